"""Whole files, from start to end, through a few page-locked buffers: `OutputFile` writes one, `InputFile` reads one.

[Note: copies] Both directions copy once, between the buffers and the memory of others. That is faster than transfers
from and to ordinary memory: on pages of 4 KiB that nobody registered a drive has half its bandwidth, or less.

[Note: Ctrl-C] torch's C++ code calls `readinto`, and makes an AttributeError of every exception that it raises.
KeyboardInterrupt is raised on entry to a function, too, before any `try` or `with` in it, and to defer interrupts
around all of `torch.load` would defer them for too long. A generator is suspended within its `try`, and goes on there.
So `readinto` is the `send` of a generator, which raises nothing.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import torch

from swapper.errors import SwapError, SwapIOError, system_errors
from swapper.files.archive import LOCAL_HEADER_BYTES, Entry, header_bytes
from swapper.finalizers import finalizer
from swapper.interrupts import interrupts_deferred
from swapper.io.checksums import checksum, copy_crc32, crc32, join_checksums
from swapper.io.handle import AsyncIOHandle, File, Transfer
from swapper.io.host_memory import prefault
from swapper.sizes import PAGE_BYTES, round_up
from swapper.storage.atomic import NewFile
from swapper.storage.buffers import BufferPool, Lease

__all__ = ["POOL_BYTES", "InputFile", "OutputFile"]

POOL_BYTES = 32 << 20
"""Page-locked memory of one file, unless another size is asked for."""

_BUFFERS_MIN, _BUFFERS_MAX = 4, 16
_BUFFER_BYTES = 2 << 20
"""Length of each, if that gives a count between the two. Many short ones keep a drive busier than a few long ones."""
_POOL_BYTES_MIN = _BUFFERS_MIN * 64 * 1024
_FIRST_AHEAD_BYTES = 256 << 10
_NEXT_TO_BYTES = 64 << 10
_FRESH_BYTES_MIN = 1 << 20
_HOSTS = ("cpu",)
"""Types of devices whose memory the processor reads and writes."""


class _Buffers:
    """The engine and the page-locked buffers of one file.

    Args:
        stack: its `close` releases everything.
        pool_bytes: at least 256 KiB; all buffers together.
        length_bytes: of the file, or None if it is not known: a short file needs less.
        handle: the engine; its owner closes it. None for one of our own.
        cuda: lock the buffers for CUDA, too.
    """

    def __init__(
        self,
        stack: contextlib.ExitStack,
        pool_bytes: int,
        length_bytes: int | None,
        handle: AsyncIOHandle | None,
        cuda: bool,
    ) -> None:
        if pool_bytes < _POOL_BYTES_MIN:
            raise ValueError(f"pool_bytes: {pool_bytes} is less than {_POOL_BYTES_MIN}")
        count = min(max(_BUFFERS_MIN, pool_bytes // _BUFFER_BYTES), _BUFFERS_MAX)
        self.buffer_bytes = pool_bytes // count // PAGE_BYTES * PAGE_BYTES
        if length_bytes is not None:
            self.buffer_bytes = min(self.buffer_bytes, round_up(max(1, length_bytes), PAGE_BYTES))
            count = min(count, max(1, -(-length_bytes // self.buffer_bytes)))
        self.free: deque[Lease] = deque()
        self.handle = handle or stack.enter_context(AsyncIOHandle(block_bytes=min(4 << 20, self.buffer_bytes)))
        device = torch.device("cuda") if cuda else None
        pool = stack.enter_context(BufferPool(count * self.buffer_bytes, self.handle, device=device))
        stack.callback(self.free.clear)
        self.free.extend(pool.acquire(self.buffer_bytes) for _ in range(count))


def _memory_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """The bytes of a storage, on any device."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))


def _bytes_of(data: bytes | bytearray | memoryview | torch.UntypedStorage | torch.Tensor) -> torch.Tensor | memoryview:
    if isinstance(data, torch.UntypedStorage):
        return _memory_of(data)
    if isinstance(data, torch.Tensor):
        if data.dtype != torch.uint8 or data.dim() != 1 or not data.is_contiguous():
            raise ValueError(f"data: {data.dtype} of shape {tuple(data.shape)} is no contiguous row of bytes")
        return data
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")  # Shapes with a 0 cannot be cast.


class OutputFile:
    """A new file that is written once, from start to end, and appears under its name when `commit` returns.

    Not thread-safe. Either `commit` or `discard` ends it; as a context manager it discards what was not committed.

    Args:
        path: of the file. One that exists is replaced by `commit`, keeps its mode, and is whole until then; a symbolic
            link is followed.
        length_bytes: of the whole file if that is known: the space is reserved at once.
        pool_bytes: page-locked memory to write from.
        handle: engine to write with; None for one of its own.
        cuda: lock the buffers for CUDA, too.
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
        cuda: bool = False,
        summed: bool = False,
    ) -> None:
        self.path = os.path.realpath(os.fsdecode(path))
        self.checksum = 0
        self._summed = summed
        self._position = 0
        self._in_flight: deque[tuple[Lease, Transfer]] = deque()
        self._current: Lease | None = None
        self._used_bytes = 0
        self._pid = os.getpid()
        self._over = False
        self._stack = contextlib.ExitStack()
        self._finalizer = finalizer(self, _close_unattended, self._stack, self._pid)
        try:
            self._new = NewFile(path)
            self._stack.callback(self._new.close)
            self._buffers = _Buffers(self._stack, pool_bytes, length_bytes, handle, cuda)
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
            number = error.errno or errno.EIO
            raise SwapIOError(
                number, error.operation, self.path, error.offset_bytes, error.length_bytes, error.detail
            ) from None

    def tell(self) -> int:
        """Bytes written so far."""
        return self._position

    def append(self, data: bytes | bytearray | memoryview | torch.UntypedStorage | torch.Tensor, crc: int = 0) -> int:
        """Write bytes behind those before. Returns when they are in buffers, or with the drive.

        Args:
            data: a storage, or a tensor of bytes (uint8, one-dimensional, contiguous), may be on any device.
            crc: the CRC-32 of what came before, to go on with; not if this is `summed`.

        Returns:
            The CRC-32 of `data`, behind what `crc` is of; its CRC-32C if this is `summed`.

        Raises:
            SwapIOError: the drive has failed, maybe in a write before. All that is left then is `discard`.
            SwapError: it is over, or this is a forked child.
        """
        assert not (crc and self._summed)
        source = _bytes_of(data)

        def fill(room: torch.Tensor, done: int, crc: int) -> int:
            part = source[done : done + len(room)]
            if isinstance(part, memoryview) or part.device.type in _HOSTS:
                copied = copy_crc32(room, part, crc)
                return checksum(room, crc) if self._summed else copied
            room.copy_(part)
            return checksum(room, crc) if self._summed else crc32(room, crc)

        return self._append(len(source), fill, crc)

    def append_file(self, handle: AsyncIOHandle, file: File, offset_bytes: int, length_bytes: int) -> int:
        """Write what another file holds behind what was written before: read into the buffers, without a second copy.

        Fastest if what was written before is a multiple of 4096 bytes, as `offset_bytes` is.

        Args:
            handle: reads it.
            file: open for reading.
            offset_bytes: where to start.
            length_bytes: how much.

        Returns:
            The CRC-32C of what was read.

        Raises:
            SwapIOError: a drive has failed, or the file is shorter. All that is left then is `discard`.
            SwapError: it is over, or this is a forked child.
        """

        def fill(room: torch.Tensor, done: int, crc: int) -> int:
            lease = self._current
            assert lease is not None
            with interrupts_deferred():  # A lease that does not know its transfer would give the buffer to others.
                transfer = lease.transfer = handle.read(file, room, offset_bytes + done)
            transfer.wait()  # Meanwhile the buffers before it are written.
            lease.transfer = None
            return checksum(room, crc)

        return self._append(length_bytes, fill, 0)

    def _append(self, length_bytes: int, fill: Callable[[torch.Tensor, int, int], int], crc: int) -> int:
        """Write so many bytes.

        Args:
            length_bytes: in all.
            fill: fills a part of a buffer, given that, the bytes before it and their checksum; returns that of both.
            crc: to start with.
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
                self._send(whole, self._position - self._used_bytes)
            while self._in_flight:
                self._wait_for_one()
            self._file.truncate(self._position)
        self._new.publish()
        self._close()

    def discard(self) -> None:
        """Forget what was written: nothing is left of it. Idempotent; never raises for what failed before."""
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

    def _room(self) -> torch.Tensor:
        """The free part of the current buffer, at least one byte."""
        if self._current is not None and self._used_bytes == self._buffers.buffer_bytes:
            with self._named():
                self._send(self._used_bytes, self._position - self._used_bytes)
        if self._current is None:
            if not self._buffers.free:
                with self._named():
                    self._wait_for_one()
            self._current = self._buffers.free.popleft()
        return self._current.tensor[self._used_bytes :]

    def _send(self, length_bytes: int, offset_bytes: int) -> None:
        """Start writing the current buffer, which belongs to its transfer from then on."""
        lease = self._current
        assert lease is not None
        with interrupts_deferred():
            transfer = lease.transfer = self._buffers.handle.write(
                self._file, lease.tensor[:length_bytes], offset_bytes
            )
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


def _close_unattended(stack: contextlib.ExitStack, pid: int) -> None:
    """Finalizer of a file that nobody closed."""
    if os.getpid() == pid:
        stack.close()


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
    """A part of the file that is in a buffer, or is being read into it."""

    lease: Lease
    transfer: Transfer
    start: int
    stop: int


class InputFile(io.RawIOBase):
    """A file that is read mostly from start to end, by reads of any length; what follows is prefetched.

    A file object, for `torch.load`. That calls it from C++ code which cannot handle exceptions: a read that fails
    returns nothing, as do all after it, and the reason is kept for `take_failure`. See [Note: Ctrl-C]. Not thread-safe.

    Args:
        path: of the file.
        pool_bytes: page-locked memory to read into.
        handle: engine to read with; None for one of its own.
        cuda: lock the buffers for CUDA, too.

    Attributes:
        length_bytes: of the file, or of its part: see `restrict`.
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
        cuda: bool = False,
    ) -> None:
        super().__init__()
        self.path = os.fsdecode(path)
        self._failure: BaseException | None = None
        self._failed = False
        serving = _serving(weakref.ref(self))
        next(serving)
        self.readinto = serving.send  # type: ignore[method-assign, assignment]
        self.deferred: tuple[int, int] | None = None
        self.defer_from_bytes = 0
        self._base = 0
        self._position = 0
        self._entries: dict[int, Entry] = {}
        self._announced: Entry | None = None
        self._pieces: deque[_Piece] = deque()
        self._next = 0
        self._end_of_last = -1
        self._ahead_bytes = 0
        self._stack = contextlib.ExitStack()
        self._finalizer = finalizer(self, _close_unattended, self._stack, os.getpid())
        try:
            with system_errors("open", self.path):
                length_bytes = os.stat(self.path).st_size
            self._buffers = _Buffers(self._stack, pool_bytes, length_bytes, handle, cuda)
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
        self._base, self.length_bytes, self._position = offset_bytes, length_bytes, 0
        self.check(())

    def check(self, entries: Sequence[Entry]) -> None:
        """Compare payloads with their checksums from now on. The read after that of a local header is a payload."""
        self._entries = {entry.offset_bytes: entry for entry in entries}
        self._announced = None

    def record(self, name: str) -> bytes | None:
        """The bytes of a small record, by its name without the archive's; None if there is none.

        Raises:
            SwapIOError: the drive has failed.
        """
        for entry in self._entries.values():
            if entry.name.partition("/")[2] == name:
                header = self.read_at(entry.offset_bytes, LOCAL_HEADER_BYTES)
                return self.read_at(entry.offset_bytes + header_bytes(header), entry.length_bytes)
        return None

    def read_at(self, offset_bytes: int, length_bytes: int) -> bytes:
        """A few bytes from anywhere; less at the end of the file.

        Raises:
            SwapIOError: the drive has failed.
        """
        with system_errors("read", self.path):
            length_bytes = max(0, min(length_bytes, self.length_bytes - offset_bytes))
            return os.pread(self._file.fileno(), length_bytes, self._base + offset_bytes)

    def fill(self, storage: torch.UntypedStorage, offset_bytes: int) -> None:
        """Read the bytes of a storage, on any device, from `offset_bytes` on.

        Raises:
            SwapIOError: the drive has failed, or the bytes are not those that were written (EBADMSG).
        """
        self._read(_memory_of(storage), offset_bytes)

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Where the next read starts."""
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
        entry = self._announced
        wanted = entry is not None and "/data/" in entry.name and entry.length_bytes == length_bytes
        if wanted and 0 < self.defer_from_bytes <= length_bytes:
            self.deferred = (self._position, length_bytes)
        else:
            self._read(view[:length_bytes], self._position)
        self._position += length_bytes
        return length_bytes

    def take_failure(self) -> BaseException | None:
        """The error of the read that failed, once. Not kept: its frames hold torch's reader, which holds this."""
        failure, self._failure = self._failure, None
        return failure

    def close(self) -> None:
        """Release everything. Idempotent."""
        if not self.closed:
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
        on_host = isinstance(memory, memoryview) or memory.device.type in _HOSTS
        crc = 0
        start = self._base + offset_bytes
        stop = start + length_bytes
        # A small read at a random offset prefetches nothing; one that goes on where the last one ended more and more.
        on = 0 <= start - self._end_of_last <= _NEXT_TO_BYTES
        self._ahead_bytes = max(_FIRST_AHEAD_BYTES, 2 * self._ahead_bytes) if on else 0
        self._end_of_last = stop
        at = start
        while at < stop:
            piece = self._piece_at(at, stop)
            end = min(stop, piece.stop)
            target = memory[at - start : end - start]
            if on_host and length_bytes >= _FRESH_BYTES_MIN:
                # While the drive reads. Memory that torch has just allocated: to touch it page after page would take
                # longer than the drive does. Huge pages take longer still where a host has to bring them (measured in a
                # virtual machine: 5 times).
                prefault(target)
            piece.transfer.wait()
            source = piece.lease.tensor[at - piece.start : end - piece.start]
            if on_host:
                crc = copy_crc32(target, source, crc)
            else:
                assert isinstance(target, torch.Tensor)
                target.copy_(source)
                crc = crc32(source, crc)
            at = end
        if at == self._pieces[0].stop:
            self._free_first()
        self._prefetch(stop)
        entry = self._announced
        self._announced = self._entries.get(offset_bytes) if length_bytes == LOCAL_HEADER_BYTES else None
        if entry is not None and entry.length_bytes == length_bytes and entry.crc32 not in (None, crc):
            detail = f"the record {entry.name!r} does not match its checksum: the file was damaged"
            raise SwapIOError(errno.EBADMSG, "read", self.path, start, length_bytes, detail)

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
            piece.transfer.wait()
        piece.lease.transfer = None
        self._buffers.free.append(piece.lease)
