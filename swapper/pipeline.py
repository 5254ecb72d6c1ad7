"""Runs a schedule over the pool and the store: read ahead, use, write behind.

[Note: who owns a buffer] Each record that is in memory has one `_Held`: its lease, and its place in the life cycle. The
transfer in flight travels in the lease. A lease that is released while its transfer is in flight is given back by the
pool only when the transfer is done, so no exception, wherever it strikes, can let two owners have one buffer.
"""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from swapper.buffers import BufferPool, Lease
from swapper.errors import SwapIOError
from swapper.metrics import Metrics
from swapper.store import RecordKey, TensorStore

__all__ = ["DeviceCopies", "Pipeline", "Place"]


class Place(enum.Enum):
    """Where a record is that is not only on disk. Each holds one pool buffer."""

    ARRIVING = enum.auto()
    """Being read (or still being written by the step before, and wanted again). Clean."""
    LIVE = enum.auto()
    """In use between `take` and `put`; the only place where the buffer may be changed."""
    LEAVING = enum.auto()
    """Being written. The buffer goes back to the pool when that is done."""
    KEPT = enum.auto()
    """Resident: written through, or never stored at all. The buffer stays."""


@dataclass(slots=True)
class _Held:
    lease: Lease
    place: Place
    writing: bool = False
    """The lease's transfer is a write: its failure means lost data, not only a read to repeat."""


class Pipeline:
    """Moves one owner's records between the pool and the store.

    Args:
        pool: where buffers come from.
        store: where records go; None keeps every record in the pool for good (`device: cpu`).
        metrics: counts waits and hits.

    Thread safety: `stage` may be called by an autograd thread while the owner's thread waits in backward.
    """

    def __init__(self, pool: BufferPool, store: TensorStore | None, metrics: Metrics) -> None:
        self._pool = pool
        self._store = store
        self._metrics = metrics
        self._held: dict[RecordKey, _Held] = {}
        self._resident: frozenset[RecordKey] = frozenset()
        self._lock = threading.RLock()
        pool.add_reclaimer(self.drop_staged)

    def keep(self, keys: Iterable[RecordKey]) -> None:
        """From now on these records stay in the pool once they are there."""
        self._resident = frozenset(keys)

    def stage(self, key: RecordKey, length_bytes: int) -> bool:
        """Start bringing `key` in, if there is a buffer for it now.

        Args:
            key: a record of the store.
            length_bytes: length of the buffer; at least what is stored.

        Returns:
            False if the pool has no room: nothing was done.
        """
        with self._lock:
            self._collect()
            held = self._held.get(key)
            if held is not None:
                if held.place is Place.LEAVING:
                    held.place = Place.ARRIVING  # Still in memory: no need to read what is just being written.
                return True
            if self._store is None or self._store.stored_bytes(key) == 0:
                return True
            lease = self._pool.try_acquire(length_bytes)
            if lease is None:
                return False
            self._read(key, lease)
            return True

    def take(self, key: RecordKey, length_bytes: int) -> tuple[Lease, bool]:
        """Bring `key` in and wait for it.

        Returns:
            The buffer, the caller's until `put` or `give_back`; and whether it holds a record (False: it is a new
            buffer of undefined content, because nothing is stored yet).

        Raises:
            SwapIOError: reading failed, or a write that was in flight did.
            PoolExhausted: others hold the whole pool.
        """
        with self._lock:
            self._collect()
            held = self._held.get(key)
            if held is None:
                lease = self._acquire(length_bytes)
                if self._store is None or self._store.stored_bytes(key) == 0:
                    self._held[key] = _Held(lease, Place.LIVE)
                    return lease, False
                held = self._read(key, lease)
            assert held.place is not Place.LIVE, f"{key} is in use already"
            transfer = held.lease.transfer
            if transfer is None or transfer.done():
                self._metrics.hits += 1
            if transfer is not None:
                with self._metrics.span("swapper.wait_read", "wait_read_s"):
                    transfer.wait()
                held.lease.transfer = None
            held.place, held.writing = Place.LIVE, False
            return held.lease, True

    def put(self, key: RecordKey, length_bytes: int) -> None:
        """Start writing the first `length_bytes` of the buffer taken for `key`, and let go of it. Returns at once.

        Raises:
            SwapIOError: an earlier write failed.
        """
        with self._lock:
            held = self._held[key]
            assert held.place is Place.LIVE, f"{key} is not in use"
            if self._store is not None:
                held.lease.transfer = self._store.write(key, held.lease, length_bytes)
                held.writing = True
                self._metrics.writes += 1
                self._metrics.bytes_written += length_bytes
            kept = self._store is None or key in self._resident
            held.place = Place.KEPT if kept else Place.LEAVING
            self._collect()

    def give_back(self, key: RecordKey) -> None:
        """Let go of the buffer taken for `key`; it was not changed. If nothing is stored, nothing is kept either."""
        with self._lock:
            held = self._held[key]
            assert held.place is Place.LIVE, f"{key} is not in use"
            if self._store is None or key in self._resident:
                held.place = Place.KEPT
            else:
                del self._held[key]
                held.lease.release()

    def drop_staged(self) -> bool:
        """Give back what was only read ahead. Returns whether that freed anything; False if the pipeline is busy."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            dropped = False
            for key, held in list(self._held.items()):
                if held.place is Place.ARRIVING and held.writing:
                    held.place = Place.LEAVING
                elif held.place is Place.ARRIVING:
                    del self._held[key]
                    held.lease.release()
                    dropped = True
            return dropped
        finally:
            self._lock.release()

    def drain(self) -> None:
        """Wait until everything is written.

        Raises:
            SwapIOError: the first write that failed; the others were waited for all the same.
        """
        with self._lock, self._metrics.span("swapper.drain", "wait_write_s"):
            self.drop_staged()
            failure: Exception | None = None
            for key, held in list(self._held.items()):
                if held.lease.transfer is not None:
                    try:
                        held.lease.transfer.wait()
                    except OSError as error:
                        failure = failure or error
                    held.lease.transfer, held.writing = None, False
                if held.place is Place.LEAVING:
                    del self._held[key]
                    held.lease.release()
            if failure is not None:
                raise failure

    def recover(self) -> None:
        """Give back what was read or taken and not put; writes go on. For the way out of an exception; never raises."""
        with self._lock:
            self.drop_staged()
            for key, held in list(self._held.items()):
                if held.place is Place.LIVE:
                    del self._held[key]
                    held.lease.release()

    def discard(self, key: RecordKey) -> None:
        """Give back the record's buffer, if it has one, and forget what is stored of it, failed writes included."""
        with self._lock:
            held = self._held.pop(key, None)
            if held is not None:
                with contextlib.suppress(SwapIOError):  # The data that it failed to move are not wanted any more.
                    if held.lease.transfer is not None:
                        held.lease.transfer.wait()
                held.lease.release()
            if self._store is not None:
                self._store.discard(key)

    def forget(self, key: RecordKey) -> None:
        """`discard`, and delete the record's file."""
        with self._lock:
            self.discard(key)
            if self._store is not None:
                self._store.forget(key)

    def _read(self, key: RecordKey, lease: Lease) -> _Held:
        assert self._store is not None
        held = _Held(lease, Place.ARRIVING)
        lease.transfer = self._store.read(key, lease)
        self._metrics.reads += 1
        self._metrics.bytes_read += self._store.stored_bytes(key)
        self._held[key] = held
        return held

    def _collect(self) -> None:
        """Give back the buffers whose write is done."""
        for key, held in list(self._held.items()):
            transfer = held.lease.transfer
            if not held.writing or transfer is None or not transfer.done() or held.place is Place.LIVE:
                continue
            transfer.wait()
            held.lease.transfer, held.writing = None, False
            if held.place is Place.LEAVING:
                del self._held[key]
                held.lease.release()

    def _acquire(self, length_bytes: int) -> Lease:
        while (lease := self._pool.try_acquire(length_bytes)) is None:
            leaving = next((held for held in self._held.values() if held.place is Place.LEAVING), None)
            if leaving is None:
                self.drop_staged()
                return self._pool.acquire(length_bytes)
            assert leaving.lease.transfer is not None
            with self._metrics.span("swapper.wait_write", "wait_write_s"):
                leaving.lease.transfer.wait()
            self._collect()
        return lease


class DeviceCopies:
    """Copies between an accelerator and the pool on a stream of their own, so that they overlap its other work.

    On a CPU device every call does its work at once, which the tests use.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._device = device

    def begin(self) -> None:
        """Let the copies that follow see what the current stream has computed so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Start copying. Neither tensor may be freed or changed before `mark().synchronize()` or `join()`."""
        if self._stream is None:
            destination.copy_(source)
            return
        with torch.cuda.stream(self._stream):
            destination.copy_(source, non_blocking=True)

    def mark(self) -> torch.cuda.Event | None:
        """An event that is reached when the copies so far are done; None if they are done already."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def join(self) -> None:
        """Let the current stream wait for the copies so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
