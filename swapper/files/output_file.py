"""`OutputFile`: a file that is written from start to end, and appears under its name when it is complete."""

from __future__ import annotations

import contextlib
import ctypes
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator

import torch

from swapper.errors import SwapError, SwapIOError, path_given, renewed
from swapper.files.file_buffers import POOL_BYTES, FileBuffers, close_unattended, memory_of, on_host
from swapper.io.checksums import checksum, copy_crc32, crc32, join_checksums
from swapper.io.handle import AsyncIOHandle, File, Transfer
from swapper.process.finalizers import finalizer
from swapper.process.interrupts import interrupts_deferred
from swapper.sizes import PAGE_BYTES, round_up
from swapper.storage.atomic import NewFile
from swapper.storage.buffers import Lease

__all__ = ["OutputFile"]

_SMALL_BYTES_MAX = 4 << 10
"""Up to so many bytes the calls cost more than the copy: there are three parts for each tensor."""


class OutputFile:
    """A new file that is written once, from start to end, and appears under its name when `commit` returns.

    Not thread-safe. Either `commit` or `discard` ends it; as a context manager it discards what was not committed.

    Args:
        path: of the file. One that exists is replaced by `commit`, keeps its mode, and is whole until then; a symbolic
            link is followed.
        length_bytes: of the whole file if that is known: the space is reserved at once.
        pool_bytes: page-locked memory to write from.
        handle: engine to write with; None for one of its own.
        summed: compute CRC-32C, as `checksums.checksum` does, instead of the CRC-32 that ZIP files have.

    Attributes:
        checksum: if `summed`, the CRC-32C of all bytes so far.

    Raises:
        ValueError: `pool_bytes` is too small.
        SwapIOError: there is no such directory, it cannot be written, or is too full; or what exists at `path` is not a
            regular file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        length_bytes: int | None = None,
        pool_bytes: int = POOL_BYTES,
        handle: AsyncIOHandle | None = None,
        summed: bool = False,
    ) -> None:
        self.path = os.path.realpath(path_given("path", path))
        self.checksum = 0
        self._summed = summed
        self._position = 0
        self._in_flight: deque[tuple[Lease, Transfer]] = deque()
        self._current: Lease | None = None
        self._used_bytes = 0
        self._pid = os.getpid()
        self._over = False
        self._stack = contextlib.ExitStack()
        self._finalizer = finalizer(self, close_unattended, self._stack, self._pid)
        try:
            self._new = NewFile(path)
            self._stack.callback(self._new.close)
            self._buffers = FileBuffers(self._stack, pool_bytes, length_bytes, handle)
            with self._named():
                self._file = self._buffers.handle.open(f"/proc/self/fd/{self._new.descriptor}", "rw", create=False)
                self._stack.callback(self._file.close)
                if length_bytes:
                    self._file.preallocate(length_bytes)
        except BaseException:
            self._close()
            raise

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Let errors name the published file: the path that the handle has opened is in /proc."""
        try:
            yield
        except SwapIOError as error:
            raise renewed(error, path=self.path) from None

    def tell(self) -> int:
        """Bytes written so far."""
        return self._position

    def append(self, data: bytes | bytearray | memoryview | torch.UntypedStorage | torch.Tensor, crc: int = 0) -> int:
        """Write bytes behind those before. Returns when they are in buffers, or with the drive.

        Args:
            data: bytes; or a storage, or a contiguous 1-D tensor of uint8, on any device.
            crc: CRC-32 of the bytes before, to continue; 0 if this is `summed`.

        Returns:
            The CRC-32 of those bytes and `data`; the CRC-32C of `data` if this is `summed`.

        Raises:
            SwapIOError: the drive has failed, maybe in a write before. All that is left then is `discard`.
            SwapError: it is over, or this is a forked child.
        """
        assert not (crc and self._summed)
        if isinstance(data, torch.UntypedStorage) and data.device.type == "cpu" and data.nbytes() <= _SMALL_BYTES_MAX:
            data = ctypes.string_at(data.data_ptr(), data.nbytes()) if data.nbytes() else b""
        if isinstance(data, bytes) and len(data) <= _SMALL_BYTES_MAX and not self._summed and self._fits(len(data)):
            self._check()
            assert self._current is not None
            ctypes.memmove(self._current.tensor.data_ptr() + self._used_bytes, data, len(data))
            self._used_bytes += len(data)
            self._position += len(data)
            return zlib.crc32(data, crc)
        source = _bytes_of(data)

        def fill(room: torch.Tensor, done: int, crc: int) -> int:
            part = source[done : done + len(room)]
            if on_host(part):
                copied = copy_crc32(room, part, crc)
                return checksum(room, crc) if self._summed else copied
            assert isinstance(part, torch.Tensor)
            self._buffers.copy(room, part)
            return checksum(room, crc) if self._summed else crc32(room, crc)

        return self._append(len(source), fill, crc)

    def append_file(self, handle: AsyncIOHandle, file: File, length_bytes: int) -> int:
        """Write another file's first bytes behind those before. They are read into the buffers, without a second copy.

        Fastest if `tell()` is a multiple of 4096.

        Args:
            handle: reads it.
            file: open for reading.
            length_bytes: how many of its bytes.

        Returns:
            Their CRC-32C.

        Raises:
            SwapIOError: a drive has failed, or the file is shorter. All that is left then is `discard`.
            SwapError: it is over, or this is a forked child.
        """

        def fill(room: torch.Tensor, done: int, crc: int) -> int:
            lease = self._current
            assert lease is not None
            with interrupts_deferred():  # A lease that does not know its transfer would give the buffer to others.
                transfer = lease.transfer = handle.read(file, room, done)
            transfer.wait()  # Meanwhile the buffers before it are written.
            lease.transfer = None
            return checksum(room, crc)

        return self._append(length_bytes, fill, 0)

    def _append(self, length_bytes: int, fill: Callable[[torch.Tensor, int, int], int], crc: int) -> int:
        """Have `fill` write `length_bytes` into the buffers, part after part.

        Args:
            length_bytes: of all parts.
            fill: takes a part of a buffer, the number of bytes before it and their checksum; returns that of all.
            crc: checksum to start with.
        """
        self._check()
        done = 0
        while done < length_bytes:
            room = self._room()[: length_bytes - done]
            crc = fill(room, done, crc)
            self._used_bytes += len(room)
            self._position += len(room)
            done += len(room)
        if self._summed:
            self.checksum = join_checksums([(self.checksum, 0), (crc, length_bytes)])
        return crc

    def commit(self) -> None:
        """Write what is left, sync, and let the file appear under its name. It is over then.

        Raises:
            SwapIOError: the drive has failed, maybe in a write before, or the directory is gone. What was there under
                the name is whole; all that is left is `discard`.
            SwapError: it is over, or this is a forked child.
        """
        self._check()
        with self._named():
            if self._current is not None and self._used_bytes:
                # Whole pages, so that they go past the page cache; `truncate` cuts off the rest.
                whole = round_up(self._used_bytes, PAGE_BYTES)
                self._current.tensor[self._used_bytes : whole] = 0
                self._send(whole)
            while self._in_flight:
                self._wait_for_one()
            self._file.truncate(self._position)
        self._new.publish()
        self._close()

    def discard(self) -> None:
        """Remove the unfinished file. Idempotent; never raises an earlier failure."""
        if os.getpid() != self._pid or self._over:
            return
        for _, transfer in self._in_flight:
            with contextlib.suppress(SwapIOError):  # Observed, so that the engine does not report it later.
                transfer.wait()
        with contextlib.suppress(SwapIOError):
            self._close()

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.discard()

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise SwapError("this file was opened before a fork: it can be written in the parent only")
        if self._over:
            raise SwapError(f"the file is closed: {self.path}")

    def _fits(self, length_bytes: int) -> bool:
        """True if so many bytes lie within the current buffer."""
        return self._current is not None and self._used_bytes + length_bytes <= self._buffers.buffer_bytes

    def _room(self) -> torch.Tensor:
        """The free part of the current buffer, at least one byte."""
        if self._current is not None and self._used_bytes == self._buffers.buffer_bytes:
            with self._named():
                self._send(self._used_bytes)
        if self._current is None:
            if not self._buffers.free:
                with self._named():
                    self._wait_for_one()
            self._current = self._buffers.free.popleft()
        return self._current.tensor[self._used_bytes :]

    def _send(self, length_bytes: int) -> None:
        """Start writing the current buffer, which belongs to its transfer from then on."""
        lease, start = self._current, self._position - self._used_bytes
        assert lease is not None
        with interrupts_deferred():
            transfer = lease.transfer = self._buffers.handle.write(self._file, lease.tensor[:length_bytes], start)
            self._in_flight.append((lease, transfer))
            self._current, self._used_bytes = None, 0

    def _wait_for_one(self) -> None:
        lease, transfer = self._in_flight[0]
        transfer.wait()
        lease.transfer = None
        self._in_flight.popleft()
        self._buffers.free.append(lease)

    def _close(self) -> None:
        with interrupts_deferred():  # Nothing is in flight any more. An `ExitStack` forgets what it was about to call.
            self._over = True
            self._in_flight.clear()
            self._current = None
            self._stack.close()
            self._finalizer.detach()


def _bytes_of(data: bytes | bytearray | memoryview | torch.UntypedStorage | torch.Tensor) -> torch.Tensor | memoryview:
    if isinstance(data, torch.UntypedStorage):
        return memory_of(data)
    if isinstance(data, torch.Tensor):
        if data.dtype != torch.uint8 or data.dim() != 1 or not data.is_contiguous():
            raise ValueError(f"data: {data.dtype} of shape {tuple(data.shape)} is no contiguous row of bytes")
        return data
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")  # Shapes with a 0 cannot be cast.
