"""`GrowingPool`: page-locked memory for records that have no other copy (`device: cpu`); grows with the plan."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from swapper.sizes import PAGE_BYTES, round_up
from swapper.storage.buffers import BufferPool, Lease

__all__ = ["GrowingPool"]


class GrowingPool:
    """Pools that are used as one, and never exhausted: the system's memory is what limits them. Thread-safe.

    Records that come later bring a pool of their own. Those that were planned earlier may then lie in any of them, in
    any order, so that pieces can be left over that are too short: whatever finds no room brings a pool as well. Pools
    that are empty go when the next are made.

    Args:
        capacity_bytes: of the first pool; 0 makes none yet.
        device: see `BufferPool`.
        step_bytes: a pool that is brought later is at least as long.
    """

    def __init__(self, capacity_bytes: int, *, device: torch.device | None = None, step_bytes: int = 0) -> None:
        self._device = device
        self._step_bytes = step_bytes
        self._lock = threading.RLock()
        self._pools: list[BufferPool] = []
        if capacity_bytes:
            self._grow(capacity_bytes)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all pools."""
        return sum(pool.capacity_bytes for pool in self._pools)

    @property
    def used_bytes(self) -> int:
        """Bytes leased out."""
        return sum(pool.used_bytes for pool in list(self._pools))

    @property
    def peak_used_bytes(self) -> int:
        """The most that was leased out of each, together."""
        return sum(pool.peak_used_bytes for pool in list(self._pools))

    def reserve(self, capacity_bytes: int) -> None:
        """Have at least `capacity_bytes` in all, for what is planned now; empty pools beyond that go.

        Raises:
            SwapIOError: there is not so much memory.
        """
        with self._lock:
            for pool in [pool for pool in self._pools if pool.used_bytes == 0]:
                if self.capacity_bytes - pool.capacity_bytes >= capacity_bytes:
                    self._pools.remove(pool)
                    pool.close()
            if self.capacity_bytes < capacity_bytes:
                self._grow(capacity_bytes - self.capacity_bytes)

    def add_reclaimer(self, callback: Callable[[], bool]) -> None:
        """Nothing is ever reclaimed: nothing is short, and no other copy exists of what is here."""

    def reclaim(self) -> bool:
        """False: see `add_reclaimer`."""
        return False

    def try_acquire(self, length_bytes: int, *, high: bool = False, above: int = 0, joins: bool = True) -> Lease:
        """Lease memory, of a new pool if there is none; nothing else has a meaning here.

        Raises:
            SwapIOError: there is not so much memory.
        """
        with self._lock:
            lease = next((lease for pool in self._pools if (lease := pool.try_acquire(length_bytes))), None)
            return self._grow(length_bytes).acquire(length_bytes) if lease is None else lease

    acquire = try_acquire

    def close(self) -> None:
        """Close all pools. Idempotent."""
        for pool in self._pools:
            pool.close()

    def _grow(self, length_bytes: int) -> BufferPool:
        length_bytes = max(round_up(length_bytes, PAGE_BYTES), PAGE_BYTES, self._step_bytes)
        pool = BufferPool(length_bytes, device=self._device)
        self._pools.append(pool)
        return pool
