"""Measures a drive as the engine reaches it: benchmarks hold their own figures against it, in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from swapper.io.handle import AsyncIOHandle, File, Transfer
from swapper.sizes import PAGE_BYTES
from swapper.storage.buffers import BufferPool

__all__ = ["Drive", "Records"]


class Drive:
    """The drive's speed, as the engine reaches it: 1 GiB in transfers of 16 MiB, four in flight, overwriting."""

    TOTAL_BYTES, TRANSFER_BYTES, IN_FLIGHT = 1 << 30, 16 << 20, 4
    POOL_BYTES = TRANSFER_BYTES * IN_FLIGHT

    def __init__(self, handle: AsyncIOHandle, directory: Path) -> None:
        self._handle = handle
        self._path = directory / "drive-speed.tmp"
        self._pool = BufferPool(self.POOL_BYTES, handle)
        self._file = handle.open(self._path, "rw", create=True)
        self._file.preallocate(self.TOTAL_BYTES)
        self._run(handle.write)  # The first write of new blocks is slower and not what a step does.

    def measure(self) -> tuple[float, float]:
        """Bytes per second, writing and reading."""
        written_s = self._run(self._handle.write)
        read_s = self._run(self._handle.read)
        return self.TOTAL_BYTES / written_s, self.TOTAL_BYTES / read_s

    def _run(self, operation: Callable[[File, torch.Tensor, int], Transfer]) -> float:
        """Move everything; returns the seconds that it took."""
        start_s = time.perf_counter()
        leases = [self._pool.acquire(self.TRANSFER_BYTES) for _ in range(self.IN_FLIGHT)]
        for i, offset in enumerate(range(0, self.TOTAL_BYTES, self.TRANSFER_BYTES)):
            lease = leases[i % self.IN_FLIGHT]
            if lease.transfer is not None:
                lease.transfer.wait()
            lease.transfer = operation(self._file, lease.tensor, offset)
        for lease in leases:
            assert lease.transfer is not None
            lease.transfer.wait()
            lease.release()
        return time.perf_counter() - start_s

    def close(self) -> None:
        self._file.close()
        self._path.unlink()
        self._pool.close()


class Records:
    """The files of a run, read and written back as they are: what the same bytes take without any arithmetic.

    In pieces of 16 MiB, four being read and four being written, each written as soon as it has been read. Nothing else
    may use the files meanwhile. Files are moved as a whole: of packed state that is more than a step moves.
    """

    PIECE_BYTES, IN_FLIGHT = 16 << 20, 4

    def __init__(self, handle: AsyncIOHandle, directory: Path) -> None:
        self._handle = handle
        self._pool = BufferPool(2 * self.IN_FLIGHT * self.PIECE_BYTES, handle)
        files = {path: path.stat().st_size for path in directory.rglob("*") if path.is_file()}
        self._files = [(handle.open(path, "rw"), size) for path, size in files.items() if size >= 1 << 20]
        """Large ones only: what is small is not read a second time by a step."""

    def move(self) -> float:
        """Bytes per second, of those that were read and written."""
        pieces = [
            (file, offset, min(self.PIECE_BYTES, size - offset) // PAGE_BYTES * PAGE_BYTES)
            for file, size in self._files
            for offset in range(0, size - PAGE_BYTES + 1, self.PIECE_BYTES)
        ]
        leases = [self._pool.acquire(self.PIECE_BYTES) for _ in range(2 * self.IN_FLIGHT)]
        start_s = time.perf_counter()
        for i in range(len(pieces) + self.IN_FLIGHT):
            if i < len(pieces):
                lease, (file, offset, length) = leases[i % len(leases)], pieces[i]
                if lease.transfer is not None:
                    lease.transfer.wait()
                lease.transfer = self._handle.read(file, lease.tensor[:length], offset)
            if i >= self.IN_FLIGHT:
                lease, (file, offset, length) = leases[(i - self.IN_FLIGHT) % len(leases)], pieces[i - self.IN_FLIGHT]
                assert lease.transfer is not None
                lease.transfer.wait()
                lease.transfer = self._handle.write(file, lease.tensor[:length], offset)
        for lease in leases:
            if lease.transfer is not None:
                lease.transfer.wait()
            lease.release()
        return 2 * sum(length for _, _, length in pieces) / (time.perf_counter() - start_s)

    def close(self) -> None:
        for file, _ in self._files:
            file.close()
        self._pool.close()
