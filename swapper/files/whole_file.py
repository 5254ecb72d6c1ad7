"""Whole files, from start to end, through a few page-locked buffers: they appear when complete, and are read ahead.

[Note: copies] Both directions copy once, between the buffers and the memory of others. That is faster than transfers
from and to ordinary memory: on pages of 4 KiB that nobody registered a drive has half its bandwidth, or less.

[Note: publishing] A file that is being written has no name (O_TMPFILE), so that whatever ends the process, nothing is
left of it. When it is complete and synced it gets its name by link(2); where that name is taken, it gets another and is
renamed over it. Then the directory is synced. A file system without O_TMPFILE has it under a temporary name from the
start: there, a process that is killed leaves a file `.swapper-*.tmp` behind, until the next save in that directory. See
`temporary_files`.

[Note: Ctrl-C] It is raised on entry to a function, too, before any `try` in there, and torch's C++ code, which calls
`readinto`, makes an AttributeError of what comes out. A generator is suspended within its `try`, and goes on there. So
`readinto` is the `send` of one: nothing ever comes out.
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
import stat
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import torch

from swapper.errors import SwapError, SwapIOError, system_errors
from swapper.files.archive import LOCAL_HEADER_BYTES, Entry, header_bytes
from swapper.finalizers import finalizer
from swapper.io.checksums import checksum, copy_crc32, crc32, join_checksums
from swapper.io.handle import AsyncIOHandle, File, Transfer
from swapper.io.host_memory import prefault
from swapper.sizes import PAGE_BYTES
from swapper.storage.buffers import BufferPool, Lease
from swapper.storage.temporary_files import claim, new_name, remove_leftovers

__all__ = ["POOL_BYTES", "InputFile", "OutputFile"]

POOL_BYTES = 32 << 20
"""Page-locked memory of one file, unless another size is asked for."""

_BUFFERS_MIN, _BUFFERS_MAX = 4, 16
_BUFFER_BYTES = 2 << 20
"""Of each, if that gives a number of them between the two. Many short ones keep a drive busier than a few long ones."""
_POOL_BYTES_MIN = _BUFFERS_MIN * 64 * 1024
_FIRST_AHEAD_BYTES = 256 << 10
_NEXT_TO_BYTES = 64 << 10
_FRESH_BYTES_MIN = 1 << 20
_HOSTS = ("cpu",)
"""Types of devices whose memory the processor reads and writes."""
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)


class _Buffers:
    """The engine and the page-locked buffers of one file.

    Args:
        stack: gives all of it back.
        pool_bytes: at least 256 KiB; all buffers together.
        length_bytes: of what will be moved, if that is known: a short file needs less.
        handle: the engine; its owner closes it. None for one of our own.
        cuda: lock the buffers for CUDA, too.

    Raises:
        ValueError: `pool_bytes` is too small.
        SwapIOError: there is not so much memory.
    """

    def __init__(
        self,
        stack: contextlib.ExitStack,
        pool_bytes: int,
        length_bytes: int | None,
        handle: AsyncIOHandle | None,
        *,
        cuda: bool,
    ) -> None:
        if pool_bytes < _POOL_BYTES_MIN:
            raise ValueError(f"pool_bytes: {pool_bytes} is less than {_POOL_BYTES_MIN}")
        count = min(max(_BUFFERS_MIN, pool_bytes // _BUFFER_BYTES), _BUFFERS_MAX)
        self.buffer_bytes = pool_bytes // count // PAGE_BYTES * PAGE_BYTES
        if length_bytes is not None:
            self.buffer_bytes = min(self.buffer_bytes, max(1, -(-length_bytes // PAGE_BYTES)) * PAGE_BYTES)
        self.free: deque[Lease] = deque()
        if length_bytes is not None:
            count = min(count, max(1, -(-length_bytes // self.buffer_bytes)))
        self.handle = handle or stack.enter_context(AsyncIOHandle(block_bytes=min(4 << 20, self.buffer_bytes)))
        device = torch.device("cuda") if cuda else None
        pool = stack.enter_context(BufferPool(count * self.buffer_bytes, self.handle, device=device))
        stack.callback(self.free.clear)
        self.free.extend(pool.acquire(self.buffer_bytes) for _ in range(count))


def _memory_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """The bytes of a storage, on any device."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))


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
        self._descriptors: list[int | None] = [None]  # At the bottom, where `_stack` stops.
        self._stack = contextlib.ExitStack()
        self._finalizer = finalizer(self, _close_unattended, self._stack, self._pid)
        try:
            # By C code alone, in which no Ctrl-C can be raised: none is closed twice, and none is forgotten.
            self._stack.callback(deque, map(os.close, iter(self._descriptors.pop, None)), 0)
            self._open_directory()
            self._directory = self._last_descriptor()
            self._temporaries: list[str] = []
            self._stack.callback(_remove_all, self._temporaries, self._directory)
            remove_leftovers(self._directory)
            self._make()
            self._descriptor = self._last_descriptor()
            self._buffers = _Buffers(self._stack, pool_bytes, length_bytes, handle, cuda=cuda)
            with self._named():
                self._file = self._buffers.handle.open(f"/proc/self/fd/{self._descriptor}", "rw", create=False)
                self._stack.callback(self._file.close)
                if length_bytes:
                    self._file.preallocate(length_bytes)
        except BaseException:
            self._close()
            raise

    def _open_directory(self) -> None:
        directory, name = os.path.split(self.path)
        with system_errors("open", self.path):
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISREG(os.stat(self.path).st_mode):
                    kind = errno.EISDIR if os.path.isdir(self.path) else errno.EINVAL
                    raise SwapIOError(kind, "open", self.path, detail="only a regular file can be replaced")
            if not name:
                raise SwapIOError(errno.EISDIR, "open", self.path)
            self._open(directory, os.O_RDONLY | os.O_DIRECTORY)

    def _make(self) -> None:
        # See [Note: publishing].
        try:
            self._open(f"/proc/self/fd/{self._directory}", os.O_RDWR | os.O_TMPFILE)
            claim(self._last_descriptor(), None, self._directory)
            return
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise SwapIOError(error.errno or errno.EIO, "open", self.path) from None
        with system_errors("open", self.path):
            claimed = False
            while not claimed:
                self._temporaries[:] = [new_name()]
                place = f"/proc/self/fd/{self._directory}/{self._temporaries[0]}"
                self._open(place, os.O_RDWR | os.O_CREAT | os.O_EXCL)
                claimed = claim(self._last_descriptor(), self._temporaries[0], self._directory)

    def _open(self, path: str, flags: int) -> None:
        # Opened and kept in one call, in which no Ctrl-C can be raised.
        self._descriptors.extend(itertools.starmap(os.open, [(path, flags | os.O_CLOEXEC, 0o666)]))

    def _last_descriptor(self) -> int:
        descriptor = self._descriptors[-1]
        assert descriptor is not None
        return descriptor

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Let errors name the file that it is going to be."""
        try:
            yield
        except SwapIOError as error:
            number = error.errno or errno.EIO
            raise SwapIOError(
                number, error.operation, self.path, error.offset_bytes, error.length_bytes, error.detail
            ) from None

    @property
    def over(self) -> bool:
        """Whether it was committed or discarded."""
        return self._over

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
        self._check()
        source: torch.Tensor | memoryview
        if isinstance(data, torch.UntypedStorage):
            source, length_bytes = _memory_of(data), data.nbytes()
        elif isinstance(data, torch.Tensor):
            if data.dtype != torch.uint8 or data.dim() != 1 or not data.is_contiguous():
                raise ValueError(f"data: {data.dtype} of shape {tuple(data.shape)} is no contiguous row of bytes")
            source, length_bytes = data, data.nbytes
        else:
            source = memoryview(data)
            length_bytes = source.nbytes
            source = source.cast("B") if length_bytes else source
        assert not (crc and self._summed)
        done = 0
        while done < length_bytes:
            room = self._room()
            part = source[done : done + len(room)]
            room = room[: len(part)]
            if isinstance(part, torch.Tensor) and part.device.type not in _HOSTS:
                room.copy_(part)
                crc = checksum(room, crc) if self._summed else crc32(room, crc)
            elif self._summed:
                copy_crc32(room, part)
                crc = checksum(room, crc)
            else:
                crc = copy_crc32(room, part, crc)
            self._used_bytes += len(part)
            self._position += len(part)
            done += len(part)
        self._join(crc, length_bytes)
        return crc

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
        self._check()
        crc = 0
        done = 0
        while done < length_bytes:
            room = self._room()[: length_bytes - done]
            assert self._current is not None
            # While it is read, the buffers before it are being written.
            self._current.transfer = handle.read(file, room, offset_bytes + done)
            self._current.transfer.wait()
            self._current.transfer = None
            crc = checksum(room, crc)
            self._used_bytes += len(room)
            self._position += len(room)
            done += len(room)
        self._join(crc, length_bytes)
        return crc

    def _join(self, crc: int, length_bytes: int) -> None:
        if self._summed:
            self.checksum = join_checksums([(self.checksum, 0), (crc, length_bytes)])

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
                # Whole pages, so that they go past the page cache; what is too much is cut off.
                whole = -(-self._used_bytes // PAGE_BYTES) * PAGE_BYTES
                self._current.tensor[self._used_bytes : whole] = 0
                self._send(whole, self._position - self._used_bytes)
            while self._in_flight:
                self._wait_for_one()
            self._file.truncate(self._position)
            self._file.sync()
        with system_errors("publish", self.path):
            self._publish()
        self._close()

    def discard(self) -> None:
        """Forget what was written: nothing is left of it. Idempotent; never raises for what failed before."""
        if os.getpid() != self._pid or self._over:
            return
        for _, transfer in self._in_flight:
            transfer.settle()
            with contextlib.suppress(SwapIOError):
                transfer.wait()  # Seen, so that the engine does not speak of it later.
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
        """What is free of the current buffer: at least one byte."""
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
        """Start writing the current buffer."""
        lease = self._current
        assert lease is not None
        lease.transfer = self._buffers.handle.write(self._file, lease.tensor[:length_bytes], offset_bytes)
        self._in_flight.append((lease, lease.transfer))
        self._current, self._used_bytes = None, 0

    def _wait_for_one(self) -> None:
        lease, transfer = self._in_flight[0]
        transfer.wait()
        lease.transfer = None
        self._in_flight.popleft()
        self._buffers.free.append(lease)

    def _publish(self) -> None:
        name = os.path.basename(self.path)
        with contextlib.suppress(FileNotFoundError):
            os.fchmod(self._descriptor, stat.S_IMODE(os.stat(name, dir_fd=self._directory).st_mode))
        if not self._temporaries:
            try:
                self._link(name)
            except FileExistsError:
                # Known before it exists, so that it is removed whatever strikes.
                self._temporaries.append(new_name())
                self._link(self._temporaries[0])
        if self._temporaries:
            os.rename(self._temporaries[0], name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
            self._temporaries.clear()
        os.fsync(self._directory)

    def _link(self, name: str) -> None:
        # With a directory, or Python would take link(2), which links the symbolic link in /proc itself.
        source = f"/proc/self/fd/{self._descriptor}"
        os.link(source, name, src_dir_fd=self._directory, dst_dir_fd=self._directory, follow_symlinks=True)

    def _close(self) -> None:
        self._over = True
        self._in_flight.clear()
        self._current = None
        self._stack.close()
        self._finalizer.detach()


def _close_unattended(stack: contextlib.ExitStack, pid: int) -> None:
    """Finalizer of a file that nobody closed."""
    if os.getpid() == pid:
        stack.close()


def _remove_all(names: list[str], directory: int) -> None:
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=directory)


def _reader(of: weakref.ref[InputFile]) -> Callable[[memoryview], int]:
    """`InputFile.readinto`. See [Note: Ctrl-C]."""

    def serve() -> Generator[int, memoryview, None]:
        done = 0
        while True:
            try:
                while True:
                    buffer: memoryview | None = yield done
                    done, file = 0, of()
                    if buffer is not None and file is not None and not file.failed:
                        done = file._serve(memoryview(buffer).cast("B"))
                    buffer = file = None
            except GeneratorExit:
                return
            except BaseException as error:
                if (file := of()) is not None:
                    file._fail(error)
                buffer = file = None

    serving = serve()
    next(serving)
    return serving.send


@dataclass(slots=True)
class _Piece:
    """A part of the file that is in a buffer, or on its way there."""

    lease: Lease
    transfer: Transfer
    start: int
    stop: int


class InputFile(io.RawIOBase):
    """A file that is read mostly from start to end, by reads of any length; what follows is read ahead.

    A file object, for `torch.load`. That goes through C++ code which does not bear exceptions: a read that fails
    returns nothing, as do all after it, and the reason is kept for `take_failure`. See [Note: Ctrl-C]. Not thread-safe.

    Args:
        path: of the file.
        pool_bytes: page-locked memory to read into.
        handle: engine to read with; None for one of its own.
        cuda: lock the buffers for CUDA, too.

    Attributes:
        length_bytes: of the file, or of its part: see `restrict`.
        readinto: reads, as of any raw file.
        deferred: the last read that was left out, on demand: see `defer_from_bytes`. Offset and length.
        defer_from_bytes: reads of storages this long return with the memory untouched; 0 for none. What they asked for
            must then be fetched by `fill`. Needs `check`.

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
        self.readinto = _reader(weakref.ref(self))  # type: ignore[method-assign, assignment]
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
            self._buffers = _Buffers(self._stack, pool_bytes, length_bytes, handle, cuda=cuda)
            self._file: File = self._buffers.handle.open(self.path, "r")
            self._stack.callback(self._file.close)
            self.length_bytes = self._file_bytes = self._file.size_bytes()
        except BaseException:
            self.close()
            raise

    def restrict(self, offset_bytes: int, length_bytes: int) -> None:
        """Be that part of the file from now on: every offset is counted from its start. Nothing is checked any more.

        Raises:
            SwapIOError: the file ends before (ENODATA).
        """
        if not 0 <= offset_bytes <= offset_bytes + length_bytes <= self._file_bytes:
            raise SwapIOError(errno.ENODATA, "read", self.path, offset_bytes, length_bytes)
        self._base, self.length_bytes, self._position = offset_bytes, length_bytes, 0
        self.check(())

    def check(self, entries: Sequence[Entry]) -> None:
        """Compare payloads with their checksums from now on. One is what is read after its local header."""
        self._entries = {entry.offset_bytes: entry for entry in entries}
        self._announced = None

    def record(self, name: str) -> bytes | None:
        """What a small record holds, without the archive's name before its own; None if there is none.

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
        """Read so many bytes as a storage on any device has, from `offset_bytes` on.

        Raises:
            SwapIOError: the drive has failed, or the bytes are not those that were written (EBADMSG).
        """
        memory = _memory_of(storage)
        if memory.device.type in _HOSTS:
            self._read_into(memory, offset_bytes)
            return

        def put(done: int, piece: torch.Tensor, crc: int) -> int:
            memory[done : done + len(piece)].copy_(piece)
            return crc32(piece, crc)

        self._read(offset_bytes, storage.nbytes(), put)

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
        length_bytes = min(len(view), max(0, self.length_bytes - self._position))
        entry = self._announced
        wanted = entry is not None and "/data/" in entry.name and entry.length_bytes == length_bytes
        if wanted and 0 < self.defer_from_bytes <= length_bytes:
            self.deferred = (self._position, length_bytes)
        else:
            self._read_into(view[:length_bytes], self._position)
        self._position += length_bytes
        return length_bytes

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error

    @property
    def failed(self) -> bool:
        """Whether a read has failed: none will bring anything."""
        return self._failed or self._failure is not None

    def take_failure(self) -> BaseException | None:
        """What a read met, once. It is not kept: its frames hold torch's reader, which holds this, unseen by Python."""
        failure, self._failure = self._failure, None
        self._failed = self._failed or failure is not None
        return failure

    def close(self) -> None:
        """Give everything back. Idempotent."""
        if not self.closed:
            self._drop_pieces()
            self._stack.close()
            self._finalizer.detach()
        super().close()

    def _read_into(self, memory: memoryview | torch.Tensor, offset_bytes: int) -> None:
        def expect(start: int, stop: int) -> None:
            # Memory that torch has just allocated: to touch it page after page would take longer than the drive does.
            # Huge pages take longer still where a host has to bring them (measured in a virtual machine: 5 times).
            if len(memory) >= _FRESH_BYTES_MIN:
                prefault(memory[start:stop])

        def put(done: int, piece: torch.Tensor, crc: int) -> int:
            return copy_crc32(memory[done : done + len(piece)], piece, crc)

        self._read(offset_bytes, len(memory), put, expect)

    def _read(
        self,
        offset_bytes: int,
        length_bytes: int,
        put: Callable[[int, torch.Tensor, int], int],
        expect: Callable[[int, int], None] | None = None,
    ) -> None:
        """Hand over some bytes, piece by piece, and check them.

        Args:
            offset_bytes: where they start.
            length_bytes: how many.
            put: takes what was done before, a piece and the checksum so far; returns that with the piece.
            expect: told where the next piece starts and stops, counted from the first byte, while it may be on its way.
        """
        if not length_bytes:
            return
        crc = 0
        start = self._base + offset_bytes
        stop = start + length_bytes
        # Small reads at scattered places bring nothing else; those that go on where the last one ended, more and more.
        on = 0 <= start - self._end_of_last <= _NEXT_TO_BYTES
        self._ahead_bytes = max(_FIRST_AHEAD_BYTES, 2 * self._ahead_bytes) if on else 0
        self._end_of_last = stop
        at = start
        while at < stop:
            piece = self._piece_at(at, stop)
            end = min(stop, piece.stop)
            if expect is not None:
                expect(at - start, end - start)
            piece.transfer.wait()
            part = piece.lease.tensor[at - piece.start : end - piece.start]
            crc = put(at - start, part, crc)
            at += len(part)
        if at == self._pieces[0].stop:
            self._free_first()
        self._read_ahead(stop)
        entry = self._announced
        self._announced = self._entries.get(offset_bytes) if length_bytes == LOCAL_HEADER_BYTES else None
        if entry is not None and entry.length_bytes == length_bytes and entry.crc32 not in (None, crc):
            detail = f"the record {entry.name!r} does not match its checksum: the file was damaged"
            raise SwapIOError(errno.EBADMSG, "read", self.path, start, length_bytes, detail)

    def _piece_at(self, at: int, stop: int) -> _Piece:
        """The piece that holds the byte `at`, of those up to `stop` that are wanted now."""
        while self._pieces and not self._pieces[0].start <= at < self._pieces[0].stop:
            self._free_first()
        if not self._pieces:
            self._next = at // PAGE_BYTES * PAGE_BYTES
        self._read_ahead(stop)
        return self._pieces[0]

    def _read_ahead(self, stop: int) -> None:
        """Start reads up to `stop`, which is wanted, and beyond, as far as there are buffers."""
        while self._buffers.free:
            start = self._next
            beyond = min(stop + self._ahead_bytes, self._file_bytes)
            end = min(start + self._buffers.buffer_bytes, -(-beyond // PAGE_BYTES) * PAGE_BYTES, self._file_bytes)
            # What is not wanted yet comes in long pieces, or many short reads would make many short transfers.
            short = end - start < min(self._ahead_bytes // 4, self._buffers.buffer_bytes) and end < self._file_bytes
            if end <= start or (start >= stop and short):
                return
            lease = self._buffers.free.popleft()
            transfer = self._buffers.handle.read(self._file, lease.tensor[: end - start], start)
            lease.transfer = transfer
            self._pieces.append(_Piece(lease, transfer, start, end))
            self._next = end

    def _free_first(self) -> None:
        piece = self._pieces.popleft()
        piece.transfer.settle()
        with contextlib.suppress(SwapIOError):
            piece.transfer.wait()  # Nobody wants it any more.
        piece.lease.transfer = None
        self._buffers.free.append(piece.lease)

    def _drop_pieces(self) -> None:
        while self._pieces:
            self._free_first()
