"""Asynchronous reads and writes between files and CPU tensors, on the fastest system that is allowed here.

[Note: ladder] `backend="auto"` takes the first rung that this machine offers:

    uring+fixed   io_uring, with the slabs registered: no page is pinned and unpinned at each request
    uring         io_uring; containers often forbid it (seccomp), and RLIMIT_MEMLOCK can forbid registration
    aio           kernel AIO; overlaps only with O_DIRECT
    threads       pread and pwrite on a few threads, with O_DIRECT where the file system has it
    buffered      the same through the page cache

Each refusal is kept with its reason. Whether a file is direct is a matter of its file system: see `File.direct`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from swapper.errors import SwapError, SwapIOError
from swapper.finalizers import finalizer
from swapper.io import _native, bounce
from swapper.io._native import Checksums, FaultPlan, Slab

__all__ = [
    "BACKENDS",
    "AsyncIOHandle",
    "Checksums",
    "FaultPlan",
    "File",
    "Probe",
    "Refusal",
    "Slab",
    "Transfer",
    "exchange",
    "probe",
]

BACKENDS = ("uring+fixed", "uring", "aio", "threads", "buffered")
"""The rungs of the ladder, best first."""

_SYSTEMS = {"uring+fixed": "uring", "uring": "uring", "aio": "aio", "threads": "threads", "buffered": "threads"}
_MAX_BLOCK_BYTES = 1 << 30
_MAX_OFFSET_BYTES = (1 << 63) - 1

log = logging.getLogger(__name__)


class Probe(NamedTuple):
    """Whether this machine offers a backend. `reason` says why not, and is empty where it does."""

    backend: str
    available: bool
    reason: str


@dataclass(frozen=True)
class Refusal:
    """A backend that was wanted and could not be had."""

    backend: str
    reason: str


@functools.cache
def probe() -> tuple[Probe, ...]:
    """Try every backend for real, best first. Once per process; later calls return the same answer."""
    probes = []
    for backend in BACKENDS:
        reason = _native.probe_backend(_SYSTEMS[backend], fixed=backend == "uring+fixed")
        probes.append(Probe(backend, not reason, reason))
    return tuple(probes)


def exchange(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> None:
    """Let two names, of files or directories, change places in one step: no other process finds one of them missing.

    It survives a loss of power once the directories that hold the names are synced.

    Args:
        first: both exist, on one file system.

    Raises:
        SwapIOError: EINVAL or ENOSYS where the file system or the kernel cannot do it.
    """
    _native.exchange(os.fsencode(first), os.fsencode(second))


class File:
    """An open file, from `AsyncIOHandle.open`. Closed by `close`, as a context manager, or when it is collected.

    A transfer keeps what it needs of its file, so closing never disturbs one in flight. The methods block, release the
    GIL and raise `SwapIOError`; after `close` they raise `ValueError`.

    Attributes:
        path: as given.
        alignment_bytes: transfers whose offset and length are multiples of this go direct in whole; 1 where the file is
            not direct. Never less than a page. Unaligned ones are right too, only slower.
        memory_alignment_bytes: tensors whose address is a multiple of this are used in place, others are copied in
            blocks on the way.
    """

    __slots__ = (
        "__weakref__",
        "_direct",
        "_direct_reason",
        "_native",
        "_registered",
        "alignment_bytes",
        "memory_alignment_bytes",
        "path",
    )

    def __init__(self, path: str, native: _native.File) -> None:
        self.path = path
        self._direct, self._direct_reason = native.direct, native.direct_reason
        self.alignment_bytes = native.alignment_bytes
        self.memory_alignment_bytes = native.memory_alignment_bytes
        self._native: _native.File | None = native
        self._registered: _native.RegisteredFile | str | None = None  # With cuFile, or why not: see `swapper.gds`.

    def __repr__(self) -> str:
        return f"File({self.path!r}, direct={self.direct}{', closed' if self.closed else ''})"

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._native is None

    @property
    def direct(self) -> bool:
        """Whether transfers bypass the page cache (O_DIRECT). The unaligned head and tail of one do not.

        Turns False when the file system has refused a direct transfer, which then went through the page cache.
        """
        self._look()
        return self._direct

    @property
    def direct_reason(self) -> str:
        """Why `direct` is False; "" where it is True."""
        self._look()
        return self._direct_reason

    def _look(self) -> None:
        native = self._native
        if native is not None:
            self._direct, self._direct_reason = native.direct, native.direct_reason

    def _open(self) -> _native.File:
        if self._native is None:
            raise ValueError(f"the file is closed: {self.path}")
        return self._native

    def fileno(self) -> int:
        """The descriptor without O_DIRECT. Valid until `close`."""
        return self._open().fileno()

    def size_bytes(self) -> int:
        """The file's length now."""
        return self._open().size_bytes()

    def preallocate(self, length_bytes: int) -> bool:
        """Reserve space for `length_bytes`, so that later writes are fast and cannot find the drive full.

        The file becomes that long if it is shorter; what was not written reads as zeros.

        Returns:
            False where the file system cannot do it: nothing was changed.
        """
        return self._open().preallocate(length_bytes)

    def truncate(self, length_bytes: int) -> None:
        """Make the file exactly that long. No transfer beyond it may be in flight."""
        self._open().truncate(length_bytes)

    def check_written(self) -> None:
        """Raise if the kernel could not write what earlier writes left in the page cache, and has dropped it.

        Only where transfers do not bypass the page cache can that be: a write is then done before the drive has it.
        Forces nothing to be written. Each failure is raised once.
        """
        self._open().check_written()

    def sync(self) -> None:
        """Return once all completed writes survive a loss of power (fdatasync). A failure is not recoverable."""
        self._open().sync()

    def close(self) -> None:
        """Give the descriptors back, once no transfer needs them. Idempotent."""
        self._look()
        self._native = self._registered = None

    def __enter__(self) -> File:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _Ledger:
    """What is in flight on one engine, and what failed unseen.

    Apart from the handle, so that transfers need not hold it. The I/O threads never touch Python: they keep a list of
    finished transfers, which `sweep` takes at every call.
    """

    __slots__ = ("_finished", "_lock", "bounce", "engine", "failed", "in_flight", "pid")

    def __init__(self, engine: _native.Engine, mover: bounce.Bounce) -> None:
        self.engine = engine
        self.bounce = mover
        self.pid = os.getpid()
        # The storage, not the tensor: `tensor.data = ...` would otherwise free the memory under the transfer.
        self.in_flight: dict[int, torch.UntypedStorage] = {}
        self.failed: dict[int, _native.Transfer | bounce.Job] = {}
        self._finished: list[_native.Transfer] = []  # taken from the engine, not yet told to the tables
        # So that nobody sees a finished transfer in neither table. Re-entrant: the finalizer of the handle may run at
        # any allocation.
        self._lock = threading.RLock()

    def sweep(self) -> None:
        """Let go of the memory of finished transfers and note those that failed."""
        with self._lock:
            # Taken and kept in one call, in which no Ctrl-C can be raised; what comes after can be done again.
            self._finished.extend(itertools.chain.from_iterable(iter(self.engine.take_finished, [])))
            for transfer in list(self._finished):
                key, failed = transfer.key, transfer.failed()
                if key in self.in_flight:
                    if failed:
                        self.failed[key] = transfer
                    del self.in_flight[key]
            self._finished.clear()

    def over(self, job: bounce.Job) -> None:
        """The same for a transfer of device memory. Called by its helper thread."""
        with self._lock:
            if job.error is not None:
                self.failed[job.key] = job
            self.in_flight.pop(job.key, None)


class Transfer:
    """One asynchronous read or write, in flight from the moment it is made.

    May be dropped: it goes on, its memory stays, and a failure is raised by `AsyncIOHandle.close`. May be waited for
    from any thread, any number of times, also after the handle is closed.

    Attributes:
        operation: "read" or "write".
        path: of the file.
        offset_bytes: where in the file.
        length_bytes: how much.
    """

    __slots__ = ("__weakref__", "_ledger", "_native", "length_bytes", "offset_bytes", "operation", "path")

    def __init__(
        self,
        ledger: _Ledger,
        native: _native.Transfer | bounce.Job,
        operation: str,
        path: str,
        offset_bytes: int,
        length_bytes: int,
    ) -> None:
        self.operation = operation
        self.path = path
        self.offset_bytes = offset_bytes
        self.length_bytes = length_bytes
        self._ledger = ledger
        self._native = native

    def __repr__(self) -> str:
        state = "failed" if self._native.failed() else "done" if self._native.done() else "in flight"
        return f"Transfer({self.operation} {self.length_bytes} bytes at {self.offset_bytes} of {self.path!r}, {state})"

    def done(self) -> bool:
        """Whether it is over, well or not. Never blocks or raises."""
        return self._native.done()

    def times_s(self) -> tuple[float, float]:
        """When it began to move and when it was over: real times, not when somebody looked.

        Returns:
            Seconds by the clock of `time.perf_counter()`: when its first bytes were given to the system, and when its
            last were done or it had failed.

        Raises:
            SwapError: it is still in flight.
        """
        return self._native.times_s()

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it is over.

        Ctrl-C interrupts the wait, not the transfer.

        Args:
            timeout: seconds; None waits for as long as it takes.

        Returns:
            Bytes moved: always `length_bytes`. The same at every call.

        Raises:
            SwapIOError: it failed; ENODATA where the file ended before the bytes asked for. The same at every call.
                Nothing of it is in flight any more; which bytes were moved is not known.
            TimeoutError: it is still in flight.
            SwapError: in a forked child.
        """
        if os.getpid() != self._ledger.pid:
            raise SwapError("this transfer was started before a fork: it can be waited for in the parent only")
        try:
            moved = self._native.wait(timeout)
        except SwapIOError:
            self._ledger.sweep()
            self._ledger.failed.pop(self._native.key, None)
            raise
        self._ledger.sweep()
        return moved

    def settle(self, timeout: float | None = None) -> None:
        """Wait until it is over, well or not. A failure stays unobserved: `wait` or `AsyncIOHandle.close` raises it.

        Args:
            timeout: seconds; None waits for as long as it takes.

        Raises:
            TimeoutError: it is still in flight.
            SwapError: in a forked child.
        """
        if os.getpid() != self._ledger.pid:
            raise SwapError("this transfer was started before a fork: it can be waited for in the parent only")
        with contextlib.suppress(SwapIOError):
            self._native.wait(timeout)
        self._ledger.sweep()


class AsyncIOHandle:
    """Reads and writes CPU and CUDA tensors asynchronously. Thread-safe; a context manager that closes.

    Its I/O threads make every system call, so that starting a transfer takes microseconds. Transfers start in order and
    run side by side; two that overlap in one file or in memory are not ordered against each other.

    CUDA tensors go in chunks through a ring of page-locked memory, four times `block_bytes` or 4 MiB, whichever is more
    (at most 256 MiB), which is allocated at the first such transfer. What the current stream has to do at the call
    comes before the transfer; what comes after it must wait for the transfer. See `swapper.io.bounce`.

    Closed when collected or at interpreter exit, if it was not before: transfers in flight are then completed, failures
    logged. In a forked child every use raises `SwapError`, and nothing is cleaned up.

    Args:
        backend: "auto", or one of `BACKENDS`. "uring" registers slabs where that is allowed, "uring+fixed" insists.
        block_bytes: the most that one request to the kernel moves; a multiple of 4096, up to 1 GiB.
        queue_depth: requests in flight, per thread; 1 to 4096.
        threads: I/O threads, each with a queue of its own; the blocks of one transfer are spread over them.
        single_submit: one request per system call instead of a batch.
        overlap_events: False: a batch of requests is over before the next is submitted.
        faults: failures on purpose, for tests.

    Raises:
        ValueError: an argument is out of range, or names no backend.
        SwapError: the backend that was named is not to be had; the message says why.
    """

    def __init__(
        self,
        *,
        backend: str = "auto",
        block_bytes: int = 1 << 20,
        queue_depth: int = 32,
        threads: int = 1,
        single_submit: bool = False,
        overlap_events: bool = True,
        faults: FaultPlan | None = None,
    ) -> None:
        if backend != "auto" and backend not in BACKENDS:
            raise ValueError(f"backend: {backend!r} is none of auto, {', '.join(BACKENDS)}")
        if not 4096 <= block_bytes <= _MAX_BLOCK_BYTES or block_bytes % 4096:
            raise ValueError(
                f"block_bytes: {block_bytes} is not a multiple of 4096 between 4096 and {_MAX_BLOCK_BYTES}"
            )
        if not 1 <= queue_depth <= 4096:
            raise ValueError(f"queue_depth: {queue_depth} is not between 1 and 4096")
        if not 1 <= threads <= 256:
            raise ValueError(f"threads: {threads} is not between 1 and 256")
        self.block_bytes = block_bytes
        self.queue_depth = queue_depth
        self.threads = threads
        self.single_submit = single_submit
        self.overlap_events = overlap_events
        self._named = backend
        self._refusals: list[Refusal] = []

        def engine_on(rung: str) -> _native.Engine:
            return _native.Engine(
                backend=_SYSTEMS[rung],
                block_bytes=block_bytes,
                queue_depth=queue_depth,
                threads=threads,
                single_submit=single_submit,
                overlap_events=overlap_events,
                faults=faults,
            )

        self._rung, engine = self._first_available(backend, engine_on)
        allocate = functools.partial(_bounce_memory, engine, self._rung, self._refusals)
        self._ledger = _Ledger(engine, bounce.Bounce(allocate, block_bytes))
        self._keys = itertools.count(1)
        self._closed = False
        self._finalizer = finalizer(self, _close_unattended, self._ledger)

    def _first_available(self, wanted: str, engine_on: Callable[[str], _native.Engine]) -> tuple[str, _native.Engine]:
        # "uring" alone still starts at the top: it takes registration where it can.
        candidates = {"auto": BACKENDS, "uring": ("uring+fixed", "uring")}.get(wanted, (wanted,))
        probes = {found.backend: found for found in probe()}
        for rung in candidates:
            reason = probes[rung].reason
            if not reason:
                try:
                    return rung, engine_on(rung)
                except SwapIOError as error:  # As when `queue_depth` needs more than the probe did.
                    reason = str(error)
            self._refusals.append(Refusal(rung, reason))
        reasons = "; ".join(f"{refusal.backend}: {refusal.reason}" for refusal in self._refusals)
        raise SwapError(f"the I/O backend {wanted!r} is not available here: {reasons}")

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(backend={self.backend!r}, block_bytes={self.block_bytes}, "
            f"queue_depth={self.queue_depth}, threads={self.threads}{', closed' if self._closed else ''})"
        )

    @property
    def backend(self) -> str:
        """The rung in use, one of `BACKENDS`. "uring+fixed" becomes "uring" if a slab cannot be registered."""
        return self._rung

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """The rungs above `backend` that were tried, and why each was refused."""
        return tuple(self._refusals)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def broken(self) -> bool:
        """Whether the backend has failed, so that every transfer raises what has happened to it."""
        self._check_process()
        return self._ledger.engine.broken

    @property
    def in_flight(self) -> int:
        """Transfers that were started and are not over."""
        self._check_process()
        self._ledger.sweep()
        return len(self._ledger.in_flight)

    @property
    def unobserved_failures(self) -> int:
        """Transfers that failed and were not waited for since. `close` raises the first of them."""
        self._check_process()
        self._ledger.sweep()
        return len(self._ledger.failed)

    def open(
        self,
        path: str | os.PathLike[str],
        mode: str = "r",
        *,
        create: bool | None = None,
        truncate: bool = False,
        exclusive: bool = False,
        direct: bool = True,
    ) -> File:
        """Open a file for transfers. Unlike the builtin, "w" keeps what is there unless `truncate` is set.

        Args:
            path: file name. The descriptors close on exec.
            mode: "r", "w" or "rw".
            create: make it, with mode 0600, where it does not exist. None: unless `mode` is "r".
            truncate: empty it.
            exclusive: with `create`, refuse one that exists.
            direct: False: do not use O_DIRECT even where the file system has it.

        Raises:
            ValueError: no such mode, or a null character in `path`.
            SwapIOError: it cannot be opened; EISDIR for a directory.
        """
        self._check_process()
        if mode not in ("r", "w", "rw"):
            raise ValueError(f"mode: {mode!r} is none of 'r', 'w', 'rw'")
        name = os.fsdecode(path)
        if "\0" in name:
            raise ValueError(f"path: {name!r} has a null character")
        use_direct = direct and self._rung != "buffered"
        make = mode != "r" if create is None else create
        return File(name, _native.File(os.fsencode(name), mode, make, truncate, exclusive, use_direct))

    def read(
        self, file: File, tensor: torch.Tensor, offset_bytes: int = 0, *, checksums: Checksums | None = None
    ) -> Transfer:
        """Start filling `tensor` from the file. Returns at once.

        Args:
            file: from `open`, of this or another handle.
            tensor: contiguous, on the CPU or a CUDA device, any dtype. Filled without autograd noticing. Its content is
                undefined until the transfer is over; its storage is kept until then.
            offset_bytes: where in the file the first byte is.
            checksums: check what arrives against them, on the I/O threads. Each block must have been written with them,
                in one piece.

        Raises:
            ValueError: `tensor` is not contiguous, on no such device or without memory, or `offset_bytes` is out of
                range, or not the start of one of the blocks of `checksums`.
            SwapError: the handle is closed, or this is a forked child.
            SwapIOError: from `wait()`; EBADMSG, with the offset of the block, where the bytes are not those written.
        """
        return self._start("read", file, tensor, offset_bytes, checksums)

    def write(
        self, file: File, tensor: torch.Tensor, offset_bytes: int = 0, *, checksums: Checksums | None = None
    ) -> Transfer:
        """Start writing `tensor` into the file. Returns at once.

        Args and errors as for `read`. `tensor` must not change until the transfer is over. What was written survives a
        loss of power only after `File.sync`. `checksums` are set for the blocks written, on the I/O threads.
        """
        return self._start("write", file, tensor, offset_bytes, checksums)

    def _start(
        self, operation: str, file: File, tensor: torch.Tensor, offset_bytes: int, checksums: Checksums | None
    ) -> Transfer:
        self._check_process()
        on_device = tensor.device.type in bounce.DEVICES
        if (tensor.device.type != "cpu" and not on_device) or tensor.layout != torch.strided:
            raise ValueError(f"a transfer needs a dense CPU or CUDA tensor, not {tensor.layout} on {tensor.device}")
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            raise ValueError(f"a transfer needs a contiguous tensor, not one of strides {tensor.stride()}")
        length_bytes = tensor.numel() * tensor.element_size()
        if not 0 <= offset_bytes <= _MAX_OFFSET_BYTES - length_bytes:
            raise ValueError(f"offset_bytes: {offset_bytes} is out of range")
        storage = tensor.untyped_storage()
        if storage.nbytes() < tensor.storage_offset() * tensor.element_size() + length_bytes:
            raise ValueError("a transfer needs a tensor with memory; the storage of this one was made smaller than it")
        ledger = self._ledger
        ledger.sweep()
        if on_device and length_bytes:
            return self._start_on_device(operation, file, tensor, length_bytes, offset_bytes, checksums)
        start = ledger.engine.read if operation == "read" else ledger.engine.write
        key = next(self._keys)
        arguments = (file._open(), tensor.data_ptr(), length_bytes, offset_bytes, key, checksums)
        started: list[_native.Transfer] = []
        try:
            ledger.in_flight[key] = storage  # Before it starts: it may be over when `start` returns.
            started.extend(itertools.starmap(start, [arguments]))  # One call, in which no Ctrl-C can be raised.
            return Transfer(ledger, started[0], operation, file.path, offset_bytes, length_bytes)
        except BaseException:
            if not started:
                ledger.in_flight.pop(key, None)
            # Ctrl-C: nobody will know of the transfer, so it ends here, before its memory has another owner.
            end_all(started)
            raise

    def _start_on_device(
        self,
        operation: str,
        file: File,
        tensor: torch.Tensor,
        length_bytes: int,
        offset_bytes: int,
        checksums: Checksums | None,
    ) -> Transfer:
        ledger = self._ledger
        native = file._open()
        unit_bytes = file.alignment_bytes
        if checksums is not None:
            block_bytes = checksums.block_bytes
            unit_bytes = max(unit_bytes, block_bytes)
            fits = offset_bytes % block_bytes == 0 and offset_bytes + length_bytes <= checksums.length_bytes
            if not fits or self.block_bytes % block_bytes or unit_bytes > ledger.bounce.chunk_bytes:
                raise ValueError(
                    f"checksums: blocks of {block_bytes} bytes of {checksums.length_bytes} do not fit a transfer of "
                    f"{length_bytes} bytes of device memory at byte {offset_bytes}"
                )
        engine_start = ledger.engine.read if operation == "read" else ledger.engine.write
        key = next(self._keys)
        storage = tensor.untyped_storage()
        job = bounce.Job(
            key=key,
            operation=operation,
            path=file.path,
            offset_bytes=offset_bytes,
            storage=storage,
            start_bytes=int(tensor.storage_offset()) * tensor.element_size(),
            length_bytes=length_bytes,
            unit_bytes=unit_bytes,
            copies=ledger.bounce.copies(tensor.device),
            start=lambda address, length, offset: engine_start(native, address, length, offset, 0, checksums),
            direct=self._direct(operation, file, tensor, length_bytes, offset_bytes) if checksums is None else None,
            over=ledger.over,
        )
        try:
            ledger.in_flight[key] = storage
            ledger.bounce.start(job)
            return Transfer(ledger, job, operation, file.path, offset_bytes, length_bytes)
        except BaseException:
            # Ctrl-C: nobody will know of the transfer, so it ends here, before its memory has another owner.
            if ledger.bounce.withdraw(job):
                ledger.in_flight.pop(key, None)
            raise

    def _direct(
        self, operation: str, file: File, tensor: torch.Tensor, length_bytes: int, offset_bytes: int
    ) -> bounce.Direct | None:
        """What of a transfer of device memory can go without bounce memory."""
        return None

    def register(self, slab: Slab) -> bool:
        """Register memory with the kernel, so that transfers in it cost less CPU. Waits for what is in flight.

        The slab is kept alive until `unregister` or `close`.

        Returns:
            Whether it is registered. If not, transfers work all the same; the reason is added to `refusals`, and
            "uring+fixed" becomes "uring".

        Raises:
            SwapError: refused, and `backend="uring+fixed"` was asked for; or closed, or a forked child.
            SwapIOError: the backend has broken down.
        """
        self._check_process()
        if self._rung != "uring+fixed":
            return False
        reason = self._ledger.engine.register_slab(slab)
        if not reason:
            return True
        if self._named == "uring+fixed":
            raise SwapError(f"the I/O backend 'uring+fixed' is not available here: {reason}")
        self._refusals.append(Refusal("uring+fixed", reason))
        self._rung = "uring"
        return False

    def unregister(self, slab: Slab) -> None:
        """Undo `register`. Waits for what is in flight. Nothing happens if it is not registered."""
        self._check_process()
        self._ledger.engine.unregister_slab(slab)

    def close(self) -> None:
        """Complete what is in flight and end the I/O threads. Idempotent; does nothing in a forked child.

        Raises:
            SwapIOError: a transfer had failed, and nobody waited for it. Raised once, after closing.
        """
        if os.getpid() != self._ledger.pid:
            return
        self._closed = True
        if not self._ledger.bounce.close(functools.partial(_close_unattended, self._ledger)):
            return
        self._ledger.engine.close()
        self._ledger.sweep()
        failed = list(self._ledger.failed.values())
        if not failed:
            self._finalizer.detach()
            return
        try:
            failed[0].wait()
        except SwapIOError as error:
            more = f"; {len(failed) - 1} more transfers failed unseen" if len(failed) > 1 else ""
            detail = f"{error.detail}; nobody had waited for it{more}".removeprefix("; ")
            number = error.errno
            assert number is not None
            try:
                raise SwapIOError(
                    number, error.operation, error.path, error.offset_bytes, error.length_bytes, detail
                ) from None
            finally:
                # Forgotten only while it is raised: a Ctrl-C before leaves it to the next call, or to the finalizer.
                self._ledger.failed.clear()
                self._finalizer.detach()

    def __enter__(self) -> AsyncIOHandle:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *rest: object) -> None:
        try:
            self.close()
        except SwapIOError as error:
            if exc_type is None:
                raise
            log.error("%s", error)  # The error that is on its way already is the one to see.

    def _check_process(self) -> None:
        if os.getpid() != self._ledger.pid:
            raise SwapError("this I/O handle was made before a fork: it works in the parent only, make a new one")


def end_all(transfers: Iterable[Transfer | _native.Transfer]) -> None:
    """Wait until all are over, whatever strikes meanwhile; nobody else knows of them, so their failures are ignored.

    Raises:
        BaseException: what struck, such as Ctrl-C, when all are over.
    """
    struck: BaseException | None = None
    for transfer in transfers:
        over = False
        while not over:
            try:
                with contextlib.suppress(SwapIOError):
                    transfer.wait()
                over = transfer.done()
            except BaseException as error:
                struck = error
                over = transfer.done()
    if struck is not None:
        raise struck


def _close_unattended(ledger: _Ledger) -> None:
    """Finalizer of a handle that nobody closed."""
    if os.getpid() != ledger.pid or not ledger.bounce.close(functools.partial(_close_unattended, ledger)):
        return
    ledger.engine.close()
    ledger.sweep()
    for transfer in list(ledger.failed.values()):
        try:
            transfer.wait()
        except SwapIOError as error:
            log.error("a transfer failed and nobody waited for it: %s", error)


def _bounce_memory(engine: _native.Engine, rung: str, refusals: list[Refusal], length_bytes: int) -> torch.Tensor:
    """Memory that device tensors pass through, registered where slabs are."""
    slab = Slab(length_bytes)
    if rung == "uring+fixed":
        reason = engine.register_slab(slab)
        if reason:
            refusals.append(Refusal("uring+fixed", f"the memory that device tensors pass through: {reason}"))
    return torch.frombuffer(slab, dtype=torch.uint8)
