"""`aio_handle` and `gds_handle`."""

from __future__ import annotations

import errno
import fcntl
import operator
import os
from typing import ClassVar

import torch

from swapper.deepnvme.locked_memory import address_of, free, is_pinned, lock_memory
from swapper.deepnvme.operations import Operation, OperationQueue, Path
from swapper.errors import SwapError, SwapIOError
from swapper.io.gds import GDSHandle
from swapper.io.handle import AsyncIOHandle
from swapper.sizes import PAGE_BYTES, round_up

__all__ = ["aio_handle", "gds_handle"]

_SECTOR_BYTES = 512
_MAX_BLOCK_BYTES = 1 << 30
_MAX_QUEUE_DEPTH = 4096
_MAX_THREADS = 256


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
        # Cuts of an operation do not show in its bytes, so of all that DeepNVMe takes the nearest that can be is taken.
        block_bytes = round_up(self._block_size, PAGE_BYTES)
        self._handle = self._handle_type(
            block_bytes=min(block_bytes, _MAX_BLOCK_BYTES),
            queue_depth=min(self._queue_depth, _MAX_QUEUE_DEPTH),
            threads=min(self._intra_op_parallelism, _MAX_THREADS),
            single_submit=self._single_submit,
            overlap_events=self._overlap_events,
        )
        self._operations = OperationQueue(self._handle)

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
        """Programs pad lengths to this: as in DeepNVMe, so that files have the same size. No transfer here needs it."""
        return self._intra_op_parallelism * _SECTOR_BYTES

    def read(self, buffer: torch.Tensor, filename: Path, validate: bool, file_offset: int = 0) -> int:
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
        return self._run("r", buffer, filename, file_offset, validate=validate, alone=True)

    def write(self, buffer: torch.Tensor, filename: Path, validate: bool, file_offset: int = 0) -> int:
        """Write `buffer` into the file. Unlike `sync_pwrite`, it leaves pending operations pending.

        Args as for `read`. The file is made, with mode 0600, where it does not exist. One that does is not truncated:
        bytes beside those written stay. With `validate`, what is on the drive is read back and compared.

        Returns:
            0.

        Raises:
            As `read`; ENOSPC where the drive is full.
        """
        return self._run("w", buffer, filename, file_offset, validate=validate, alone=True)

    def pread(
        self,
        buffer: torch.Tensor,
        filename: Path,
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
        return self._run(
            "r", buffer, filename, file_offset, validate=validate, asynchronous=_is_async(async_, keywords)
        )

    def pwrite(
        self,
        buffer: torch.Tensor,
        filename: Path,
        validate: bool,
        async_: bool | None = None,
        file_offset: int = 0,
        **keywords: bool,
    ) -> int:
        """Write `buffer` into the file: see `write`. The rest is as for `pread`.

        If asynchronous, `buffer` must not change before `wait()` has returned.
        """
        return self._run(
            "w", buffer, filename, file_offset, validate=validate, asynchronous=_is_async(async_, keywords)
        )

    def sync_pread(self, buffer: torch.Tensor, filename: Path, file_offset: int = 0) -> int:
        """`pread` that waits and does not validate."""
        return self._run("r", buffer, filename, file_offset)

    def sync_pwrite(self, buffer: torch.Tensor, filename: Path, file_offset: int = 0) -> int:
        """`pwrite` that waits and does not validate."""
        return self._run("w", buffer, filename, file_offset)

    def async_pread(self, buffer: torch.Tensor, filename: Path, file_offset: int = 0) -> int:
        """`pread` that returns 0 at once and does not validate."""
        return self._run("r", buffer, filename, file_offset, asynchronous=True)

    def async_pwrite(
        self, buffer: torch.Tensor, filename: Path | int | None = None, file_offset: int = 0, *, fd: int | None = None
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
            return self._run("w", buffer, filename, file_offset, asynchronous=True)
        # Opened anew: with its own mode, and whatever the caller then does with the descriptor.
        name, path = _path_of_descriptor(descriptor), f"/proc/self/fd/{descriptor}"
        return self._run("w", buffer, path, file_offset, asynchronous=True, name=name)

    def wait(self) -> int:
        """Wait until all pending operations are over.

        Returns:
            How many there were: the asynchronous ones since the last call that waited.

        Raises:
            SwapError: none is pending.
            SwapIOError: one of them failed: the first of those that did; its message counts the others. Raised once,
                when all are over. Which bytes of those that failed were moved is not known.
        """
        operations = self._operations.asynchronous()
        if not operations:
            raise SwapError(
                "wait() without a pending operation: start one with async_pread or async_pwrite; a sync_pread or "
                "sync_pwrite waits for those that were pending too"
            )
        return self._operations.collect(operations)

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
        return lock_memory(self._handle, num_elem, example_tenosr)

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Unlock the memory of a tensor from `new_cpu_locked_tensor`, of this or another handle.

        Waits for operations in flight on the handle that made it. The memory itself goes with the last tensor that
        views it.

        Args:
            tensor: the one that was returned, or a view that starts where it does.

        Returns:
            False if it is not such a tensor, or was freed before; then nothing happens.
        """
        return free(address_of(tensor))

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Tell if `buffer` lies in memory from `new_cpu_locked_tensor` of any handle, or was pinned by torch."""
        return is_pinned(buffer)

    def _run(
        self,
        mode: str,
        buffer: torch.Tensor,
        filename: Path,
        file_offset: int,
        *,
        validate: bool = False,
        asynchronous: bool = False,
        alone: bool = False,
        name: str = "",
    ) -> int:
        """Start an operation, and collect it unless it is asynchronous: with all that are pending unless `alone`.

        Returns:
            The operations that were collected; 0 of one that is `alone`.
        """
        operations = self._operations
        operation = Operation(buffer, name or os.fsdecode(filename), validate, asynchronous)
        try:
            operations.start(operation, mode, filename, file_offset)
            if asynchronous:
                return 0
            count = operations.collect([*([] if alone else operations.asynchronous()), operation])
            return 0 if alone else count
        except BaseException:
            operation.asynchronous = True  # If Ctrl-C has cut it off, the next `wait` collects it.
            raise


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


def _path_of_descriptor(descriptor: int) -> str:
    """The path of its file, for messages.

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
