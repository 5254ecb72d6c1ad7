"""Reads and writes of a handle, in an order that looks like DeepNVMe's.

[Note: order] DeepNVMe works off the operations of a handle one after another, and programs rely on it without a
`wait()` in between. Here they run side by side, except where that could be seen: an operation whose bytes in a file or
in memory overlap those of an earlier one, with a change on either side, starts when the earlier one is over.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import operator
import os
import stat
import threading
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

import torch

from swapper.deepnvme.byte_tensors import cast_to_byte_tensor
from swapper.errors import SwapIOError, renewed, system_errors
from swapper.io.devices import is_accelerator
from swapper.io.handle import AsyncIOHandle, File, Transfer
from swapper.process.finalizers import finalizer
from swapper.process.interrupts import interrupts_deferred

__all__ = ["Operation", "OperationQueue", "Path"]

Path: TypeAlias = "str | bytes | os.PathLike[str]"

_VALIDATE_BYTES = 4 << 20
_END = 1 << 63
"""Beyond the end of every file."""

log = logging.getLogger(__name__)


class Operation:
    """A read or write that was started, until `wait` has told of it."""

    __slots__ = ("asynchronous", "data", "failure", "path", "transfers", "validate")

    def __init__(self, buffer: torch.Tensor, path: str, validate: bool, asynchronous: bool) -> None:
        """Check `buffer`, before a file is made for it."""
        if not isinstance(buffer, torch.Tensor):
            raise TypeError(f"buffer: a tensor is needed, not {type(buffer).__name__}")
        if buffer.device.type != "cpu" and not is_accelerator(buffer.device):
            raise ValueError(f"buffer: a tensor in the memory of the CPU or of a GPU is needed, not on {buffer.device}")
        self.path = path
        self.data: torch.Tensor | None = cast_to_byte_tensor(buffer)
        self.validate = bool(validate)
        self.asynchronous = asynchronous
        """`wait` may collect it."""
        self.transfers: list[Transfer] = []
        """The one to wait for; none before and after, for as long as there is one the file stays open."""
        self.failure: SwapIOError | None = None

    def needs_nothing(self) -> bool:
        """Tell if it needs its file and its memory no more."""
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
                self.failure = renewed(error, path=self.path)
        self.transfers.clear()
        self.data = None


def _validate(path: str, data: torch.Tensor, transfer: Transfer) -> None:
    """Compare `data` with what the file holds, read by none of the code that moved it.

    Raises:
        SwapIOError: EBADMSG, with the offset of the first byte that differs; or the file cannot be read.
    """
    operation = f"validate {transfer.operation}"
    start, length = transfer.offset_bytes, transfer.length_bytes
    with system_errors(operation, path, start, length), open(path, "rb") as file:
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


class _Use(NamedTuple):
    start: int
    stop: int
    changes: bool
    operation: Operation


class _Uses:
    """The bytes, of one file or of memory, that operations use which may be in flight."""

    __slots__ = ("_items", "_prune_at", "_start", "_stop")

    def __init__(self) -> None:
        self._items: list[_Use] = []
        self._start = self._stop = 0  # what they span: most often the new one is outside, and that is all to compare
        self._prune_at = 64

    def conflicts(self, start: int, stop: int, changes: bool) -> list[Operation]:
        """Operations that must be over before these bytes may be read, or changed."""
        if not self._items or stop <= self._start or start >= self._stop:
            return []
        return [
            use.operation
            for use in self._items
            if start < use.stop and use.start < stop and (changes or use.changes) and not use.operation.needs_nothing()
        ]

    def add(self, start: int, stop: int, changes: bool, operation: Operation) -> None:
        if start >= stop:
            return
        if len(self._items) >= self._prune_at:
            self._items = [use for use in self._items if not use.operation.needs_nothing()]
            self._prune_at = 2 * len(self._items) + 64
        self._start, self._stop = (min(start, self._start), max(stop, self._stop)) if self._items else (start, stop)
        self._items.append(_Use(start, stop, changes, operation))


class OperationQueue:
    """The operations of one handle that were started and not yet collected. See [Note: order]. Thread-safe."""

    def __init__(self, handle: AsyncIOHandle) -> None:
        self._handle = handle
        self._pending: dict[Operation, int] = {}  # Each with 1, so that whoever takes one out counts it.
        # For what follows, so that of two operations one comes first. Re-entrant: a finalizer may call the handle.
        self._lock = threading.RLock()
        self._uses_of_files: dict[tuple[int, int], _Uses] = {}
        self._uses_of_memory = _Uses()
        finalizer(self, _log_failures, self._pending, os.getpid())

    def start(self, operation: Operation, mode: str, filename: Path, file_offset: int) -> None:
        """Start reading ("r") or writing ("w") at a byte of a file, once those that it must follow are over."""
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
            with interrupts_deferred():  # After it `wait` knows of the transfer.
                operation.transfers.append(begin(file, data, start))
                self._pending[operation] = 1
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

    def asynchronous(self) -> list[Operation]:
        """The pending operations that `wait` collects."""
        return [operation for operation in tuple(self._pending) if operation.asynchronous]

    def collect(self, operations: list[Operation]) -> int:
        """Wait for them, raise what failed, and count those that no other thread has counted."""
        _finish_all(operations)
        failures = [operation.failure for operation in operations if operation.failure is not None]
        error = renewed(failures[0]) if failures else None
        if len(failures) > 1:
            more = f"{len(failures) - 1} more operations failed"
            error = renewed(failures[0], detail="; ".join(filter(None, [failures[0].detail, more])))
        with interrupts_deferred():  # A failure is forgotten only when it is raised.
            count = sum(self._pending.pop(operation, 0) for operation in operations)
            if error is not None:
                raise error
        if not self._pending:
            with self._lock:
                if not self._pending:
                    self._uses_of_files.clear()
                    self._uses_of_memory = _Uses()
        return count


def _finish_all(operations: Iterable[Operation]) -> None:
    for operation in operations:
        operation.finish()


def _log_failures(pending: dict[Operation, int], pid: int) -> None:
    """Finalizer of a handle. What is still in flight, its `AsyncIOHandle` completes and logs."""
    for operation in pending:
        if operation.failure is not None and os.getpid() == pid:
            log.error("an operation failed and nobody waited for it: %s", operation.failure)
