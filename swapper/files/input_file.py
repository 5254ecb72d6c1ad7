"""`InputFile`: a file that is read mostly from start to end, and prefetched.

[Note: Ctrl-C] torch's C++ code calls `readinto`, and makes an AttributeError of every exception that it raises.
KeyboardInterrupt is raised on entry to a function, too, before any `try` or `with` in it, and to defer interrupts
around all of `torch.load` would defer them for too long. A generator is suspended within its `try`, and goes on there.
So `readinto` is the `send` of a generator, which raises nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import os
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeVar

import torch

from swapper.errors import SwapIOError, path_given, system_errors
from swapper.files.archive import LOCAL_HEADER_BYTES, ArchiveEntry, BadArchive, header_bytes, read_directory
from swapper.files.file_buffers import POOL_BYTES, FileBuffers, close_unattended, memory_of, on_host
from swapper.io.checksums import copy_crc32, crc32
from swapper.io.fresh_memory import FreshMemory
from swapper.io.handle import AsyncIOHandle, File, Transfer
from swapper.process.finalizers import finalizer
from swapper.process.interrupts import interrupts_deferred
from swapper.sizes import PAGE_BYTES, round_up
from swapper.storage.buffers import Lease

__all__ = ["InputFile"]

_T = TypeVar("_T")

_FIRST_AHEAD_BYTES = 256 << 10
"""Prefetched behind the second of two reads in a row; doubled by each further one."""
_NEXT_TO_BYTES = 64 << 10
"""Gap between two reads that still counts as in a row."""
_FRESH_BYTES_MIN = 1 << 20
_SMALL_BYTES_MAX = 4 << 10
"""Up to so many bytes the calls cost more than the copy: there are two reads for each tensor."""


def _serving(of: weakref.ref[InputFile]) -> Generator[int, memoryview, None]:
    """`InputFile.readinto`: takes buffers, yields the bytes read into each. See [Note: Ctrl-C]."""
    done = 0
    while True:
        try:
            while True:
                buffer: memoryview | None = yield done
                done, file = 0, of()
                if buffer is not None and file is not None:
                    done = file._serve(memoryview(buffer).cast("B"))
                buffer = file = None  # A suspended generator would keep them.
        except GeneratorExit:
            return
        except BaseException as error:
            if (file := of()) is not None:
                file._failure = file._failure or error
                file._failed = True
            buffer = file = None


@dataclass(slots=True)
class _Piece:
    """A part of the file that is in a buffer, or is being read into it.

    Attributes:
        present: the transfer is over, without a failure.
    """

    lease: Lease
    transfer: Transfer
    start: int
    stop: int
    present: bool = False

    def wait(self) -> None:
        if not self.present:
            self.transfer.wait()
            self.present = True


class InputFile(io.RawIOBase):
    """A file that is read mostly from start to end, by reads of any length; what follows is prefetched.

    A file object, for `torch.load`. That calls it from C++ code which cannot handle exceptions: a read that fails
    returns nothing, as do all after it, and `used_by` raises the reason. See [Note: Ctrl-C]. Not thread-safe.

    Args:
        path: of the file.
        pool_bytes: page-locked memory to read into.
        handle: engine to read with; None for one of its own.

    Attributes:
        base_bytes: offset of the part of the file that this is: see `restrict`.
        length_bytes: of the file, or of its part.
        readinto: reads, as of any raw file.
        defer_from_bytes: reads of storages of at least this length return with the memory untouched, for `fill` to read
            them later; 0 for none. Needs `check`.
        deferred: offset and length of the last such read.

    Raises:
        ValueError: `pool_bytes` is too small.
        SwapIOError: there is no such file, or it cannot be read.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        pool_bytes: int = POOL_BYTES,
        handle: AsyncIOHandle | None = None,
    ) -> None:
        super().__init__()
        self._failure: BaseException | None = None
        self._failed = False
        serving = _serving(weakref.ref(self))
        next(serving)
        self.readinto = serving.send  # type: ignore[method-assign, assignment]
        self.deferred: tuple[int, int] | None = None
        self.defer_from_bytes = 0
        self.base_bytes = 0
        self._position = 0
        self._records: dict[int, ArchiveEntry] = {}
        self._announced: ArchiveEntry | None = None
        self._pieces: deque[_Piece] = deque()
        self._next = 0
        self._end_of_last = -1
        self._ahead_bytes = 0
        self._stack = contextlib.ExitStack()
        self._finalizer = finalizer(self, close_unattended, self._stack, os.getpid())
        try:
            self.path = path_given("path", path)
            with system_errors("open", self.path):
                length_bytes = os.stat(self.path).st_size
            self._buffers = FileBuffers(self._stack, pool_bytes, length_bytes, handle)
            self._file: File = self._buffers.handle.open(self.path, "r")
            self._stack.callback(self._file.close)
            self.length_bytes = self._file_bytes = self._file.size_bytes()
        except BaseException:
            self.close()
            raise

    def restrict(self, offset_bytes: int, length_bytes: int) -> None:
        """Be that part of the file from now on: offsets count from its start, and no checksums are compared.

        Raises:
            SwapIOError: the file ends before (ENODATA).
        """
        if not 0 <= offset_bytes <= offset_bytes + length_bytes <= self._file_bytes:
            raise SwapIOError(errno.ENODATA, "read", self.path, offset_bytes, length_bytes)
        self.base_bytes, self.length_bytes, self._position = offset_bytes, length_bytes, 0
        self._records, self._announced = {}, None

    def check(self, name: str = "") -> None:
        """Read the directory of the ZIP file, and compare payloads with their checksums from now on.

        The read after that of a local header is taken for one of a payload.

        Args:
            name: of the ZIP file within this file, for errors.

        Raises:
            SwapIOError: it is no whole ZIP file (EBADMSG), or the drive has failed.
        """
        try:
            records = read_directory(self.read_at, self.length_bytes)
        except BadArchive as error:
            detail = f"{name}: {error}" if name else str(error)
            raise SwapIOError(errno.EBADMSG, "read", self.path, detail=detail) from None
        self._records, self._announced = {record.offset_bytes: record for record in records}, None

    def record(self, name: str) -> bytes | None:
        """The bytes of a small record, by its name without the archive's; None if there is none.

        Raises:
            SwapIOError: the drive has failed, or its header is damaged (EBADMSG).
        """
        for record in self._records.values():
            if record.name.partition("/")[2] == name:
                try:
                    header = header_bytes(self.read_at(record.offset_bytes, LOCAL_HEADER_BYTES))
                except BadArchive as error:
                    raise SwapIOError(errno.EBADMSG, "read", self.path, detail=str(error)) from None
                return self.read_at(record.offset_bytes + header, record.length_bytes)
        return None

    def read_at(self, offset_bytes: int, length_bytes: int) -> bytes:
        """A few bytes from anywhere; less at the end of the file.

        Raises:
            SwapIOError: the drive has failed.
        """
        with system_errors("read", self.path):
            length_bytes = max(0, min(length_bytes, self.length_bytes - offset_bytes))
            return os.pread(self._file.fileno(), length_bytes, self.base_bytes + offset_bytes)

    def fill(self, storage: torch.UntypedStorage, offset_bytes: int) -> None:
        """Read the bytes of a storage, on any device, from `offset_bytes` on.

        Raises:
            SwapIOError: the drive has failed, or the bytes are not those that were written (EBADMSG).
        """
        self._read(memory_of(storage), offset_bytes)

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Offset of the next read."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Let the next read start elsewhere."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.length_bytes}[whence]
        self._position = max(0, base + offset)
        return self._position

    def _serve(self, view: memoryview) -> int:
        if self._failed:
            return 0
        length_bytes = min(len(view), max(0, self.length_bytes - self._position))
        record = self._announced
        wanted = record is not None and "/data/" in record.name and record.length_bytes == length_bytes
        if wanted and 0 < self.defer_from_bytes <= length_bytes:
            self.deferred = (self._position, length_bytes)
        else:
            self._read(view[:length_bytes], self._position)
        self._position += length_bytes
        return length_bytes

    def used_by(self, action: Callable[[], _T]) -> _T:
        """Call `action`, in which torch reads this file, and return its result.

        Raises:
            SwapIOError: a read has failed. It takes the place of whatever torch made of that.
            BaseException: from `action`.
        """
        try:
            result = action()
        except BaseException as error:
            raise (self._take_failure() or error) from None
        if (failure := self._take_failure()) is not None:
            raise failure
        return result

    def _take_failure(self) -> BaseException | None:
        # Not kept: its frames hold torch's reader, which holds this file where the garbage collector cannot see it.
        failure, self._failure = self._failure, None
        return failure

    def close(self) -> None:
        """Release everything. Idempotent."""
        if not self.closed and hasattr(self, "_finalizer"):  # Else Ctrl-C came while it was made, and nothing is open.
            while self._pieces:
                self._free_first()
            with interrupts_deferred():  # Nothing is in flight any more.
                self._stack.close()
                self._finalizer.detach()
        super().close()

    def _read(self, memory: memoryview | torch.Tensor, offset_bytes: int) -> None:
        """Fill `memory`, bytes on any device, and compare them with their checksum if they are a payload."""
        length_bytes = len(memory)
        if not length_bytes:
            return
        start = self.base_bytes + offset_bytes
        stop = start + length_bytes
        # A small read at a random offset prefetches nothing; one that goes on where the last one ended more and more.
        on = 0 <= start - self._end_of_last <= _NEXT_TO_BYTES
        self._ahead_bytes = min(max(_FIRST_AHEAD_BYTES, 2 * self._ahead_bytes), self._file_bytes) if on else 0
        self._end_of_last = stop
        first = self._pieces[0] if self._pieces else None
        if (
            first is not None
            and first.present
            and length_bytes <= _SMALL_BYTES_MAX
            and first.start <= start < stop < first.stop
            and isinstance(memory, memoryview)
        ):
            data = ctypes.string_at(first.lease.tensor.data_ptr() + start - first.start, length_bytes)
            memory[:] = data
            crc = zlib.crc32(data)
        else:
            crc = self._copy(memory, start, stop)
        if self._buffers.free:
            self._prefetch(stop)
        record = self._announced
        self._announced = self._records.get(offset_bytes) if length_bytes == LOCAL_HEADER_BYTES else None
        if record is not None and record.length_bytes == length_bytes and record.crc32 not in (None, crc):
            detail = f"the record {record.name!r} does not match its checksum: the file was damaged"
            raise SwapIOError(errno.EBADMSG, "read", self.path, start, length_bytes, detail)

    def _copy(self, memory: memoryview | torch.Tensor, start: int, stop: int) -> int:
        """Fill `memory` from the pieces that hold the bytes from `start` to `stop`; return their CRC-32."""
        crc, at = 0, start
        # Memory that torch has just allocated: to touch it page after page would take longer than the drive does.
        fresh = FreshMemory(memory) if on_host(memory) and stop - start >= _FRESH_BYTES_MIN else None
        while at < stop:
            piece = self._piece_at(at, stop)
            end = min(stop, piece.stop)
            target = memory[at - start : end - start]
            if fresh is not None:
                fresh.bring(end - start)
                while not piece.transfer.done() and fresh.bring_more():
                    pass
            piece.wait()
            source = piece.lease.tensor[at - piece.start : end - piece.start]
            if on_host(target):
                crc = copy_crc32(target, source, crc)
            else:
                assert isinstance(target, torch.Tensor)
                self._buffers.copy(target, source)
                crc = crc32(source, crc)
            at = end
        if at == self._pieces[0].stop:
            self._free_first()
        return crc

    def _piece_at(self, at: int, stop: int) -> _Piece:
        """The piece that holds the byte `at`, of a read up to `stop`."""
        while self._pieces and not self._pieces[0].start <= at < self._pieces[0].stop:
            self._free_first()
        if not self._pieces:
            self._next = at // PAGE_BYTES * PAGE_BYTES
        self._prefetch(stop)
        return self._pieces[0]

    def _prefetch(self, stop: int) -> None:
        """Start reads up to `stop`, the end of the read of now, and beyond, while there are free buffers."""
        while self._buffers.free:
            start = self._next
            beyond = min(stop + self._ahead_bytes, self._file_bytes)
            end = min(start + self._buffers.buffer_bytes, round_up(beyond, PAGE_BYTES), self._file_bytes)
            # Beyond `stop` only long pieces, or many short reads would make many short transfers.
            short = end - start < min(self._ahead_bytes // 4, self._buffers.buffer_bytes) and end < self._file_bytes
            if end <= start or (start >= stop and short):
                return
            lease = self._buffers.free.popleft()
            with interrupts_deferred():  # A lease that does not know its transfer would give the buffer to others.
                transfer = lease.transfer = self._buffers.handle.read(self._file, lease.tensor[: end - start], start)
                self._pieces.append(_Piece(lease, transfer, start, end))
            self._next = end

    def _free_first(self) -> None:
        piece = self._pieces.popleft()
        with contextlib.suppress(SwapIOError):  # Of a piece that nobody wants any more.
            piece.wait()
        piece.lease.transfer = None
        self._buffers.free.append(piece.lease)
