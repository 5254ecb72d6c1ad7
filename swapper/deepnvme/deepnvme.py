"""DeepNVMe's names over `AsyncIOHandle`, so that a program written for them runs after changing its import.

    from swapper.deepnvme import AsyncIOBuilder  # was: from deepspeed.ops.op_builder import AsyncIOBuilder

What moves bytes is `swapper.handle`, which is the interface to write new programs for. Names, order of arguments and
what is returned are those of DeepSpeed 0.16 to 0.19. Where DeepNVMe returns -1, aborts the process or reports success
for what failed, a call here raises: `SwapIOError` for what the system refused, `ValueError` for what cannot be asked
for, `SwapError` for what cannot be done now. Lengths and offsets need no alignment.

[Note: order] DeepNVMe works off the operations of a handle one after another, and programs rely on it without a
`wait()` in between. Here they run side by side, except where that could be seen: an operation whose bytes in a file or
in memory overlap those of an earlier one, with a change on either side, starts when the earlier one is over.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import operator
import os
import stat
import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, TypeAlias, overload

import torch

from swapper.errors import SwapError, SwapIOError
from swapper.finalizers import finalizer
from swapper.io.gds import GDSHandle, probe_cufile
from swapper.io.handle import AsyncIOHandle, File, Slab, Transfer
from swapper.sizes import PAGE_BYTES, round_up

__all__ = [
    "AsyncIOBuilder",
    "GDSBuilder",
    "PinMemoryBuilder",
    "UtilsBuilder",
    "aio_handle",
    "aio_read",
    "aio_write",
    "cast_from_byte_tensor",
    "cast_to_byte_tensor",
    "deepspeed_memcpy",
    "gds_handle",
    "pin_handle",
]

_Path: TypeAlias = "str | bytes | os.PathLike[str]"

_SECTOR_BYTES = 512
_MAX_BLOCK_BYTES = 1 << 30
_MAX_QUEUE_DEPTH = 4096
_MAX_THREADS = 256
_VALIDATE_BYTES = 4 << 20
_END = 1 << 63
"""Beyond the end of every file."""
_MAX_REGISTERED = 64
"""Locked tensors of one handle that are registered with the kernel, which takes the list of all of them anew for each.
Transfers in the others cost more CPU."""

log = logging.getLogger(__name__)


# --- Bytes of a tensor ----------------------------------------------------------------------------------------------


@overload
def cast_to_byte_tensor(src_tensor: torch.Tensor) -> torch.Tensor: ...
@overload
def cast_to_byte_tensor(src_tensor: Sequence[torch.Tensor]) -> list[torch.Tensor]: ...
def cast_to_byte_tensor(src_tensor: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
    """The memory of a tensor as uint8 of shape `(nbytes,)`, without a copy. It keeps the memory alive.

    Args:
        src_tensor: contiguous, any dtype and device; or several, each cast.

    Raises:
        TypeError: no tensor.
        ValueError: not contiguous, not dense, or conjugated or negated only on paper (`resolve_conj`, `resolve_neg`).
    """
    if not isinstance(src_tensor, torch.Tensor):
        if not isinstance(src_tensor, Sequence) or not all(isinstance(each, torch.Tensor) for each in src_tensor):
            raise TypeError(f"a tensor or a list of tensors is needed, not {type(src_tensor).__name__}")
        return [cast_to_byte_tensor(each) for each in src_tensor]
    if src_tensor.layout != torch.strided:
        raise ValueError(f"a dense tensor is needed, not {src_tensor.layout}")
    if not src_tensor.is_contiguous() or src_tensor.is_conj() or src_tensor.is_neg():
        raise ValueError(
            f"a contiguous tensor is needed, not one of shape {tuple(src_tensor.shape)} and strides "
            f"{src_tensor.stride()}: call `contiguous()`"
        )
    return src_tensor.reshape(-1).view(torch.uint8)


def cast_from_byte_tensor(byte_tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `cast_to_byte_tensor`: the same memory as a tensor of `dtype`, flat, without a copy.

    Args:
        byte_tensor: uint8, contiguous, of shape `(n * dtype.itemsize,)`, starting at a multiple of `dtype.itemsize` in
            its storage.
        dtype: of the result, which has shape `(n,)`.

    Raises:
        TypeError: not a uint8 tensor.
        ValueError: another shape, not contiguous, or misaligned.
    """
    if not isinstance(byte_tensor, torch.Tensor) or byte_tensor.dtype != torch.uint8:
        what = byte_tensor.dtype if isinstance(byte_tensor, torch.Tensor) else type(byte_tensor).__name__
        raise TypeError(f"a tensor of torch.uint8 is needed, not {what}")
    if byte_tensor.dim() != 1 or not byte_tensor.is_contiguous():
        raise ValueError(f"a flat, contiguous tensor is needed, not one of shape {tuple(byte_tensor.shape)}")
    if byte_tensor.numel() % dtype.itemsize or byte_tensor.storage_offset() % dtype.itemsize:
        raise ValueError(
            f"{byte_tensor.numel()} bytes at byte {byte_tensor.storage_offset()} of their storage are not elements of "
            f"{dtype}, which take {dtype.itemsize} bytes each"
        )
    return byte_tensor.view(dtype)


# --- Operations -----------------------------------------------------------------------------------------------------


class _Operation:
    """A read or write that was started, until `wait` has told of it."""

    __slots__ = ("asynchronous", "data", "failure", "path", "transfers", "validate")

    def __init__(self, path: str, data: torch.Tensor, validate: bool, asynchronous: bool) -> None:
        self.path = path
        self.data: torch.Tensor | None = data
        self.validate = validate
        self.asynchronous = asynchronous
        """Whether `wait` may collect it."""
        self.transfers: list[Transfer] = []
        """The one to wait for; none before and after, for as long as there is one the file stays open."""
        self.failure: SwapIOError | None = None

    def settled(self) -> bool:
        """Whether it needs its file and its memory no more."""
        return not self.transfers or (not self.validate and self.transfers[0].done())

    def finish(self) -> None:
        """Wait until it is over, and validate it; `failure` says how it went. What Ctrl-C cuts off can be repeated."""
        data = self.data
        for transfer in tuple(self.transfers):
            try:
                transfer.wait()
                if self.validate and data is not None:
                    _validate(self.path, data, transfer)
            except SwapIOError as error:
                self.failure = _copy_of(error, self.path)
        self.transfers.clear()
        self.data = None


def _copy_of(error: SwapIOError, path: str, more: str = "") -> SwapIOError:
    """The same failure, as of `path`. Anew for each time it is raised: an exception collects where it has been."""
    detail = f"{error.detail}; {more}".strip("; ") if more else error.detail
    number = error.errno
    assert number is not None
    return SwapIOError(number, error.operation, path, error.offset_bytes, error.length_bytes, detail)


def _validate(path: str, data: torch.Tensor, transfer: Transfer) -> None:
    """Compare `data` with what the file holds, read by none of the code that moved it.

    Raises:
        SwapIOError: EBADMSG, with the offset of the first byte that differs; or the file cannot be read.
    """
    operation = f"validate {transfer.operation}"
    start, length = transfer.offset_bytes, transfer.length_bytes
    try:
        with open(path, "rb") as file:
            if transfer.operation == "write":
                os.fdatasync(file.fileno())
            # From the drive, not from what is cached of it. Advice, so a refusal does not matter.
            with contextlib.suppress(OSError):
                os.posix_fadvise(file.fileno(), start, length, os.POSIX_FADV_DONTNEED)
            file.seek(start)
            for at in range(0, length, _VALIDATE_BYTES):
                wanted = data[at : at + _VALIDATE_BYTES].cpu()
                found = bytearray(file.read(wanted.numel()))
                if len(found) < wanted.numel():
                    raise SwapIOError(errno.ENODATA, operation, path, start, length)
                differs = wanted != torch.frombuffer(found, dtype=torch.uint8)
                if differs.any():
                    first = start + at + int(differs.to(torch.uint8).argmax())
                    detail = f"it has other bytes than the tensor, {int(differs.sum())} of {len(found)} from there on"
                    raise SwapIOError(errno.EBADMSG, operation, path, first, length, detail)
    except SwapIOError:
        raise
    except OSError as error:
        raise SwapIOError(error.errno or errno.EIO, operation, path, start, length) from error


class _Use(NamedTuple):
    start: int
    stop: int
    changes: bool
    operation: _Operation


class _Uses:
    """Which bytes, of one file or of memory, operations use that may be in flight."""

    __slots__ = ("_items", "_prune_at", "_start", "_stop")

    def __init__(self) -> None:
        self._items: list[_Use] = []
        self._start = self._stop = 0  # what they span: most often the new one is outside, and that is all to compare
        self._prune_at = 64

    def conflicts(self, start: int, stop: int, changes: bool) -> list[_Operation]:
        """Those that must be over before these bytes may be read, or changed."""
        if not self._items or stop <= self._start or start >= self._stop:
            return []
        return [
            use.operation
            for use in self._items
            if start < use.stop and use.start < stop and (changes or use.changes) and not use.operation.settled()
        ]

    def add(self, start: int, stop: int, changes: bool, operation: _Operation) -> None:
        if start >= stop:
            return
        if len(self._items) >= self._prune_at:
            self._items = [use for use in self._items if not use.operation.settled()]
            self._prune_at = 2 * len(self._items) + 64
        self._start, self._stop = (min(start, self._start), max(stop, self._stop)) if self._items else (start, stop)
        self._items.append(_Use(start, stop, changes, operation))


class aio_handle:
    """DeepNVMe's handle for asynchronous file I/O. Closed when it is collected or at interpreter exit.

    What is in flight then is completed, and failures that no `wait()` told of are logged. All methods may be called
    from any thread; the pending operations are those of the handle, not of the thread. A blocking call that Ctrl-C cuts
    off goes on as if it were asynchronous: the next `wait()` tells of it. In a forked child every transfer raises
    `SwapError`.

    Args:
        block_size: the most bytes one request moves. Rounded up to 4096, at most 1 GiB.
        queue_depth: requests in flight per thread; more than 4096 is as 4096.
        single_submit: one request per system call instead of a batch.
        overlap_events: False: a batch of requests is over before the next is submitted.
        intra_op_parallelism: I/O threads that share each operation; more than 256 is as 256.

    Raises:
        ValueError: one of the numbers is not positive.
    """

    _handle_type: ClassVar[type[AsyncIOHandle]] = AsyncIOHandle

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        self._block_size = _positive("block_size", block_size)
        self._queue_depth = _positive("queue_depth", queue_depth)
        self._single_submit = bool(single_submit)
        self._overlap_events = bool(overlap_events)
        self._intra_op_parallelism = _positive("intra_op_parallelism", intra_op_parallelism)
        # How an operation is cut does not show in its bytes, so what DeepNVMe takes is taken: the nearest that can be.
        block_bytes = round_up(self._block_size, PAGE_BYTES)
        self._handle = self._handle_type(
            block_bytes=min(block_bytes, _MAX_BLOCK_BYTES),
            queue_depth=min(self._queue_depth, _MAX_QUEUE_DEPTH),
            threads=min(self._intra_op_parallelism, _MAX_THREADS),
            single_submit=self._single_submit,
            overlap_events=self._overlap_events,
        )
        self._pending: dict[_Operation, int] = {}  # each with 1, so that taking some out is one call that counts them
        # For what follows, so that of two operations one comes first. Re-entrant: a finalizer may call the handle.
        self._lock = threading.RLock()
        self._uses_of_files: dict[tuple[int, int], _Uses] = {}
        self._uses_of_memory = _Uses()
        finalizer(self, _log_failures, self._pending, os.getpid())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._handle!r})"

    def get_block_size(self) -> int:
        """As given."""
        return self._block_size

    def get_queue_depth(self) -> int:
        """As given."""
        return self._queue_depth

    def get_single_submit(self) -> bool:
        """As given."""
        return self._single_submit

    def get_overlap_events(self) -> bool:
        """As given."""
        return self._overlap_events

    def get_intra_op_parallelism(self) -> int:
        """As given."""
        return self._intra_op_parallelism

    def get_alignment(self) -> int:
        """What programs pad lengths to: as in DeepNVMe, so that files have the same size. No transfer here needs it."""
        return self._intra_op_parallelism * _SECTOR_BYTES

    def read(self, buffer: torch.Tensor, filename: _Path, validate: bool, file_offset: int = 0) -> int:
        """Fill `buffer` from the file. Unlike `sync_pread`, it leaves pending operations pending.

        Args:
            buffer: contiguous, any dtype. It decides how much is read; the file may be longer.
            filename: opened for this operation.
            validate: compare with an independent read.
            file_offset: byte of the file to begin at.

        Returns:
            0.

        Raises:
            TypeError: an argument is of another type.
            ValueError: `buffer` is not contiguous or has no memory that can be read into, or `file_offset` is negative.
            SwapIOError: the file cannot be opened, is too short (ENODATA), or the drive failed. With `validate`,
                EBADMSG with the offset of the first byte that differs.
            SwapError: in a forked child.
        """
        return self._alone("r", buffer, filename, validate, file_offset)

    def write(self, buffer: torch.Tensor, filename: _Path, validate: bool, file_offset: int = 0) -> int:
        """Write `buffer` into the file. Unlike `sync_pwrite`, it leaves pending operations pending.

        Args as for `read`. The file is made, with mode 0600, where it does not exist. One that does is not truncated:
        bytes beside those written stay. With `validate`, what is on the drive is read back and compared.

        Returns:
            0.

        Raises:
            As `read`; ENOSPC where the drive is full.
        """
        return self._alone("w", buffer, filename, validate, file_offset)

    def pread(
        self,
        buffer: torch.Tensor,
        filename: _Path,
        validate: bool,
        async_: bool | None = None,
        file_offset: int = 0,
        **keywords: bool,
    ) -> int:
        """Fill `buffer` from the file.

        Args as for `read`, and:

        Args:
            async_: whether to return at once. The fourth argument, or given as `**{"async": True}`.

        Returns:
            If asynchronous 0, else the operations that are over: this one and all that were pending.

        Raises:
            As `read`. If asynchronous, `wait()` raises what the drive refuses; what is wrong with the call, or with the
            file now, is raised here.
        """
        return self._parallel("r", buffer, filename, validate, _is_async(async_, keywords), file_offset)

    def pwrite(
        self,
        buffer: torch.Tensor,
        filename: _Path,
        validate: bool,
        async_: bool | None = None,
        file_offset: int = 0,
        **keywords: bool,
    ) -> int:
        """Write `buffer` into the file: see `write`. The rest is as for `pread`.

        If asynchronous, `buffer` must not change before `wait()` has returned.
        """
        return self._parallel("w", buffer, filename, validate, _is_async(async_, keywords), file_offset)

    def sync_pread(self, buffer: torch.Tensor, filename: _Path, file_offset: int = 0) -> int:
        """`pread` that waits and does not validate."""
        return self._parallel("r", buffer, filename, False, False, file_offset)

    def sync_pwrite(self, buffer: torch.Tensor, filename: _Path, file_offset: int = 0) -> int:
        """`pwrite` that waits and does not validate."""
        return self._parallel("w", buffer, filename, False, False, file_offset)

    def async_pread(self, buffer: torch.Tensor, filename: _Path, file_offset: int = 0) -> int:
        """`pread` that returns 0 at once and does not validate."""
        return self._parallel("r", buffer, filename, False, True, file_offset)

    def async_pwrite(
        self, buffer: torch.Tensor, filename: _Path | int | None = None, file_offset: int = 0, *, fd: int | None = None
    ) -> int:
        """`pwrite` that returns 0 at once and does not validate.

        Args:
            filename: or the descriptor of a file that is open for writing. It stays the caller's and may be closed at
                once. `file_offset` counts even if it was opened with O_APPEND.
            fd: the same by name.
        """
        if (filename is None) == (fd is None):
            raise TypeError("async_pwrite() takes either `filename` or `fd`")
        descriptor = filename if isinstance(filename, int) else fd
        if descriptor is None:
            assert filename is not None and not isinstance(filename, int)
            return self._parallel("w", buffer, filename, False, True, file_offset)
        # Opened anew: with its own mode, and whatever the caller then does with the descriptor.
        name, path = _path_of_descriptor(descriptor), f"/proc/self/fd/{descriptor}"
        return self._parallel("w", buffer, path, False, True, file_offset, name)

    def wait(self) -> int:
        """Wait until all pending operations are over.

        Returns:
            How many there were: the asynchronous ones since the last call that waited.

        Raises:
            SwapError: none is pending.
            SwapIOError: one of them failed: the first of those that did; its message counts the others. Raised once,
                when all are over. Which bytes of those that failed were moved is not known.
        """
        operations = self._to_collect()
        if not operations:
            raise SwapError(
                "wait() without a pending operation: start one with async_pread or async_pwrite; a sync_pread or "
                "sync_pwrite waits for those that were pending too"
            )
        return self._collect(operations)

    def new_cpu_locked_tensor(self, num_elem: int, example_tenosr: torch.Tensor) -> torch.Tensor:
        """Allocate page-locked memory.

        It lives as long as a tensor that views it, also after `free_cpu_locked_tensor` and without the handle. A forked
        child must not touch it.

        Args:
            num_elem: how many elements.
            example_tenosr: its dtype is the result's; spelled as in DeepNVMe.

        Returns:
            CPU tensor of shape `(num_elem,)`, zeros, aligned to a page.

        Raises:
            ValueError: `num_elem` is negative.
            SwapIOError: there is not so much memory, or it cannot be locked (RLIMIT_MEMLOCK).
        """
        return _lock_memory(self._handle, num_elem, example_tenosr)

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Unlock the memory of a tensor from `new_cpu_locked_tensor`, of this or another handle.

        Waits for operations in flight on the handle that made it. The memory itself goes with the last tensor that
        views it.

        Args:
            tensor: the one that was returned, or a view that starts where it does.

        Returns:
            False if it is not such a tensor, or was freed before; then nothing happens.
        """
        return _free(_address(tensor))

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Whether `buffer` lies in memory from `new_cpu_locked_tensor` of any handle, or was pinned by torch."""
        return _is_pinned(buffer)

    # Below: what the methods share.

    def _alone(self, mode: str, buffer: torch.Tensor, filename: _Path, validate: bool, file_offset: int) -> int:
        operation = _operation(buffer, os.fsdecode(filename), validate, False)
        try:
            self._start(operation, mode, filename, file_offset)
            self._collect([operation])
        except BaseException:
            operation.asynchronous = True
            raise
        return 0

    def _parallel(
        self,
        mode: str,
        buffer: torch.Tensor,
        filename: _Path,
        validate: bool,
        asynchronous: bool,
        file_offset: int,
        name: str = "",
    ) -> int:
        operation = _operation(buffer, name or os.fsdecode(filename), validate, asynchronous)
        try:
            self._start(operation, mode, filename, file_offset)
            return 0 if asynchronous else self._collect([*self._to_collect(), operation])
        except BaseException:
            operation.asynchronous = True
            raise

    def _start(self, operation: _Operation, mode: str, filename: _Path, file_offset: int) -> None:
        start, writes, data = operator.index(file_offset), mode == "w", operation.data
        assert data is not None
        if start < 0:
            raise ValueError(f"file_offset: {start} is negative")
        stop, memory = start + data.numel(), data.data_ptr()
        memory_stop = memory + data.numel()
        with self._open(os.fsdecode(filename), mode) as file, self._lock:
            status = os.fstat(file.fileno())
            uses = self._uses_of_files.setdefault((status.st_dev, status.st_ino), _Uses())
            earlier = uses.conflicts(start, stop, writes)
            earlier += self._uses_of_memory.conflicts(memory, memory_stop, not writes)
            short = not writes and stop > status.st_size and stat.S_ISREG(status.st_mode)
            if short:
                earlier += uses.conflicts(0, _END, False)  # any write may make it longer
            _finish_all(earlier)  # See [Note: order].
            if short and stop > file.size_bytes():
                detail = f"it has {file.size_bytes()} bytes"
                raise SwapIOError(errno.ENODATA, "read", operation.path, start, data.numel(), detail)
            uses.add(start, stop, writes, operation)
            self._uses_of_memory.add(memory, memory_stop, not writes, operation)
            begin = self._handle.write if writes else self._handle.read
            try:
                self._pending[operation] = 1
                # One call, in which no Ctrl-C can be raised; after it `wait` knows of it.
                operation.transfers.extend(itertools.starmap(begin, [(file, data, start)]))
            except BaseException:
                if not operation.transfers:
                    self._pending.pop(operation, None)
                raise
            if not operation.validate:
                operation.data = None  # The transfer keeps what it needs, and only for as long.

    def _open(self, path: str, mode: str) -> File:
        """For one operation. Where too many files are open, those of operations that are over are closed first."""
        try:
            return self._handle.open(path, mode)
        except SwapIOError as error:
            if error.errno != errno.EMFILE or not self._pending:
                raise
        _finish_all(tuple(self._pending))
        return self._handle.open(path, mode)

    def _to_collect(self) -> list[_Operation]:
        return [operation for operation in tuple(self._pending) if operation.asynchronous]

    def _collect(self, operations: list[_Operation]) -> int:
        """Wait for them, raise what failed, and count those that no other thread has counted."""
        _finish_all(operations)
        failures = [operation.failure for operation in operations if operation.failure is not None]
        more = f"{len(failures) - 1} more operations failed" if len(failures) > 1 else ""
        error = _copy_of(failures[0], failures[0].path, more) if failures else None
        try:  # Nothing in it can be interrupted: a failure is forgotten only while it is raised.
            if error is not None:
                raise error
        finally:
            count = sum(map(self._pending.pop, operations, itertools.repeat(0)))
        if not self._pending:
            with self._lock:
                if not self._pending:
                    self._uses_of_files.clear()
                    self._uses_of_memory = _Uses()
        return count


class gds_handle(aio_handle):
    """DeepNVMe's handle for GPUDirect Storage: device tensors go by cuFile.

    Where that cannot be had they go through page-locked memory of the CPU, which is said once. CPU tensors go as in
    `aio_handle`. Arguments and errors as there.
    """

    _handle_type = GDSHandle
    _handle: GDSHandle

    def get_alignment(self) -> int:
        """As in DeepNVMe, where it does not depend on the parallelism of this handle."""
        return _SECTOR_BYTES

    def new_pinned_device_tensor(self, num_elem: int, example_tenosr: torch.Tensor) -> torch.Tensor:
        """Allocate a device tensor and pin it: see `pin_device_tensor`.

        Args:
            num_elem: how many elements.
            example_tenosr: its dtype is the result's, and its device unless that is the CPU; then the current GPU.

        Returns:
            Tensor of shape `(num_elem,)`. Its content is undefined.

        Raises:
            ValueError: `num_elem` is negative.
        """
        numel = operator.index(num_elem)
        if numel < 0:
            raise ValueError(f"num_elem: {numel} is negative")
        device = torch.device("cuda") if example_tenosr.device.type == "cpu" else example_tenosr.device
        tensor = torch.empty(numel, dtype=example_tenosr.dtype, device=device)
        self.pin_device_tensor(tensor)
        return tensor

    def free_pinned_device_tensor(self, tensor: torch.Tensor) -> bool:
        """`unpin_device_tensor`. The memory goes with the last tensor that views it."""
        return self.unpin_device_tensor(tensor)

    def pin_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Register the memory of a device tensor with cuFile, until `unpin_device_tensor`.

        Returns:
            False where cuFile is not to be had. Transfers work all the same.

        Raises:
            ValueError: it is not on a GPU, or not contiguous.
        """
        return self._handle.pin(tensor)

    def unpin_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Undo `pin_device_tensor`. Returns False if it was not pinned. Errors as there."""
        return self._handle.unpin(tensor)


def _positive(name: str, value: int) -> int:
    number = operator.index(value)
    if number < 1:
        raise ValueError(f"{name}: {number} is not positive")
    return number


def _is_async(value: bool | None, keywords: dict[str, bool]) -> bool:
    """`async` is a keyword of Python: it comes by its place, as `async_`, or in a dict."""
    given = [*([] if value is None else [value]), *keywords.values()]
    if keywords.keys() - {"async"}:
        raise TypeError(f"unexpected arguments: {', '.join(sorted(keywords.keys() - {'async'}))}")
    if len(given) != 1:
        raise TypeError(f"`async` is {'missing' if not given else 'given twice'}")
    return bool(given[0])


def _operation(buffer: torch.Tensor, path: str, validate: bool, asynchronous: bool) -> _Operation:
    """What is wrong with `buffer` is raised here, before a file is made for it."""
    if not isinstance(buffer, torch.Tensor):
        raise TypeError(f"buffer: a tensor is needed, not {type(buffer).__name__}")
    if buffer.device.type not in ("cpu", "cuda"):
        raise ValueError(f"buffer: a tensor in the memory of the CPU or of a GPU is needed, not on {buffer.device}")
    return _Operation(path, cast_to_byte_tensor(buffer), bool(validate), asynchronous)


def _path_of_descriptor(descriptor: int) -> str:
    """What its file is called, for messages.

    Raises:
        SwapIOError: EBADF, it is not open for writing.
    """
    try:
        access = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        path = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError as error:
        raise SwapIOError(error.errno or errno.EBADF, "open", f"descriptor {descriptor}") from None
    if access == os.O_RDONLY:
        raise SwapIOError(errno.EBADF, "write", path, detail=f"descriptor {descriptor} was opened for reading only")
    return path


def _finish_all(operations: Iterable[_Operation]) -> None:
    for operation in operations:
        operation.finish()


def _log_failures(pending: dict[_Operation, int], pid: int) -> None:
    """Finalizer of a handle. What is still in flight, its `AsyncIOHandle` completes and logs."""
    for operation in pending:
        if operation.failure is not None and os.getpid() == pid:
            log.error("an operation failed and nobody waited for it: %s", operation.failure)


# --- Page-locked memory ---------------------------------------------------------------------------------------------


class _Locked:
    """Memory of one `new_cpu_locked_tensor`, while it is locked."""

    __slots__ = ("_finalizer", "_handle", "_pid", "_slab")

    def __init__(self, slab: Slab, handle: AsyncIOHandle | None, exporter: memoryview) -> None:
        self._slab = slab
        self._handle = None if handle is None else weakref.ref(handle)
        self._pid = os.getpid()
        # The storage of all tensors that view the memory holds the exporter, and nothing else does.
        self._finalizer = weakref.finalize(exporter, self._unlock)
        self._finalizer.atexit = False

    def holds(self, address: int) -> bool:
        start = self._slab.address
        return start <= address < start + self._slab.length_bytes and self.in_this_process()

    def belongs_to(self, handle: AsyncIOHandle) -> bool:
        return self._handle is not None and self._handle() is handle

    def in_this_process(self) -> bool:
        return os.getpid() == self._pid

    def release(self) -> bool:
        """Returns False if another thread was faster."""
        if not self._finalizer.alive:
            return False
        self._finalizer()
        return True

    def _unlock(self) -> None:
        if _locked.get(self._slab.address) is self:  # In a forked child others may have the address.
            del _locked[self._slab.address]
        handle = None if self._handle is None else self._handle()
        if self.in_this_process():
            if handle is not None and not handle.closed:
                handle.unregister(self._slab)
            self._slab.unlock()


_locked: dict[int, _Locked] = {}
"""By address, of all handles: a tensor of one is pinned for another, and may be freed by it."""


def _lock_memory(handle: AsyncIOHandle | None, num_elem: int, example: torch.Tensor) -> torch.Tensor:
    """Page-locked memory, registered with the kernel for the transfers of `handle`."""
    numel, dtype = operator.index(num_elem), example.dtype
    if numel < 0:
        raise ValueError(f"num_elem: {numel} is negative")
    slab = Slab(max(numel * dtype.itemsize, 1))
    if not slab.locked:
        raise SwapIOError(errno.ENOMEM, "lock memory", length_bytes=slab.length_bytes, detail=slab.lock_reason)
    if handle is not None and sum(locked.belongs_to(handle) for locked in tuple(_locked.values())) < _MAX_REGISTERED:
        handle.register(slab)
    memory: Any = slab  # supports the buffer protocol, which has no type before Python 3.12
    exporter = memoryview(memory)
    storage = torch.frombuffer(exporter, dtype=torch.uint8).untyped_storage()
    _locked[slab.address] = _Locked(slab, handle, exporter)
    return torch.empty(0, dtype=dtype).set_(storage, 0, (numel,), (1,))


def _free(address: int) -> bool:
    locked = _locked.get(address)
    return locked is not None and locked.in_this_process() and locked.release()


def _is_pinned(buffer: torch.Tensor) -> bool:
    address = _address(buffer)
    return any(locked.holds(address) for locked in tuple(_locked.values())) or buffer.is_pinned()


class pin_handle:
    """DeepNVMe's handle for page-locked memory alone. It has no engine, and nothing to close.

    What it allocates is pinned for every `aio_handle`, and each may free it; and the other way round. It is registered
    with the kernel for no handle, so transfers in it cost a little more CPU.
    """

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """As of `aio_handle`, with the last name spelled so."""
        return _lock_memory(None, num_elem, example_tensor)

    def free_cpu_locked_tensor(self, locked_tensor: torch.Tensor) -> bool:
        """As of `aio_handle`."""
        return _free(_address(locked_tensor))

    def free_cpu_locked_tensor_by_ptr(self, address: int) -> bool:
        """As `free_cpu_locked_tensor`, by the address of the first byte: also when the tensor has other memory now."""
        return _free(operator.index(address))

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """As of `aio_handle`."""
        return _is_pinned(buffer)


def _address(tensor: torch.Tensor) -> int:
    """Of its first element, also if it has none, unlike `data_ptr()`; 0 if it is not in memory of the CPU."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return 0
    return int(tensor.untyped_storage().data_ptr()) + int(tensor.storage_offset()) * tensor.element_size()


# --- What DeepSpeed's modules have beside the handles ---------------------------------------------------------------


def aio_read(
    buffer: torch.Tensor,
    filename: _Path,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
    /,
) -> int:
    """`aio_handle.read` by a handle of its own. Returns 0."""
    return aio_handle(block_size, queue_depth, single_submit, overlap_events).read(buffer, filename, validate)


def aio_write(
    buffer: torch.Tensor,
    filename: _Path,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
    /,
) -> int:
    """`aio_handle.write` by a handle of its own. Returns 0."""
    return aio_handle(block_size, queue_depth, single_submit, overlap_events).write(buffer, filename, validate)


def deepspeed_memcpy(dest: torch.Tensor, src: torch.Tensor, /) -> int:
    """Copy `src` to `dest`, without autograd noticing. Returns 0.

    Raises:
        ValueError: they differ in dtype or number of elements, or are not on the CPU.
    """
    if dest.dtype != src.dtype or dest.numel() != src.numel() or {dest.device.type, src.device.type} != {"cpu"}:
        raise ValueError(
            f"two CPU tensors of one dtype and size are needed, not {dest.numel()} of {dest.dtype} on {dest.device} "
            f"and {src.numel()} of {src.dtype} on {src.device}"
        )
    dest.detach().copy_(src.detach().reshape(dest.shape))
    return 0


class AsyncIOBuilder:
    """Stands in for DeepSpeed's class of this name. Nothing is built: the core comes with the package."""

    NAME: ClassVar[str] = "async_io"

    def is_compatible(self, verbose: bool = False) -> bool:
        """True: an `aio_handle` finds a backend everywhere."""
        return True

    def load(self, verbose: bool = True) -> ModuleType:
        """This module, which has what DeepSpeed's has."""
        return sys.modules[__name__]


class GDSBuilder(AsyncIOBuilder):
    """Stands in for DeepSpeed's class of this name. `load` works everywhere: see `gds_handle`."""

    NAME = "gds"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether a `gds_handle` goes by cuFile here. With `verbose`, a warning in the log says why not."""
        found = probe_cufile()
        if verbose and not found.available:
            log.warning("GPUDirect Storage is not available: %s", found.reason)
        return found.available


class PinMemoryBuilder(AsyncIOBuilder):
    """Stands in for DeepSpeed's class of this name, for the sake of `pin_handle`."""

    NAME = "pin_memory"


class UtilsBuilder(AsyncIOBuilder):
    """Stands in for DeepSpeed's class of this name, for the sake of `cast_to_byte_tensor`."""

    NAME = "utils"
