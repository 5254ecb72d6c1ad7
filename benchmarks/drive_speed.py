"""Measures a drive as the engine reaches it: benchmarks hold their own figures against it, in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from swapper.io.handle import AsyncIOHandle, File, Transfer
from swapper.storage.buffers import BufferPool

__all__ = ["Drive"]


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
