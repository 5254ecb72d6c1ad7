"""Runs a schedule over the pool and the store: read ahead, use, write behind.

[Note: who owns a buffer] Each record that is in memory has one `_Held`: its lease, and its place in the life cycle. The
transfer in flight travels in the lease. A lease that is released while its transfer is in flight is given back by the
pool only when the transfer is done, so no exception, wherever it strikes, can let two owners have one buffer. (But for
Ctrl-C in the microseconds in which a transfer was started and is not yet in the lease: it then ends unwatched.)

[Note: failed writes] A write that failed keeps its place, its buffer and its transfer, so that every later call raises
it again, until `discard` or `forget`: the record on disk is neither the old nor the new one and must not be read.
"""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from swapper.buffers import BufferPool, Lease
from swapper.errors import SwapIOError
from swapper.growing_pool import GrowingPool
from swapper.metrics import Metrics
from swapper.store import RecordKey, TensorStore
from swapper.transfers import AnyTransfer

__all__ = ["Pipeline", "Place"]


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
    empty: bool = False
    """A new buffer of undefined content, as nothing is stored yet."""


class Pipeline:
    """Moves one owner's records between the pool and the store.

    Args:
        pool: where buffers come from.
        store: where records go; None keeps every record in the pool for good (`device: cpu`).
        metrics: counts waits and hits.

    Attributes:
        limit_bytes: the most of the pool to hold at once, unless what is in use alone is more; None for no limit.
        read_ahead_bytes: the most that `stage` keeps of the pool, beside what is in use; None where nobody else needs
            the rest.

    Thread safety: `stage` may be called by an autograd thread while the owner's thread waits in backward.
    """

    def __init__(self, pool: BufferPool | GrowingPool, store: TensorStore | None, metrics: Metrics) -> None:
        self._pool = pool
        self._store = store
        self._metrics = metrics
        self.limit_bytes: int | None = None
        self.read_ahead_bytes: int | None = None
        self._held: dict[RecordKey, _Held] = {}
        self._resident: frozenset[RecordKey] = frozenset()
        self._dropped: list[AnyTransfer] = []  # reads that are not wanted any more
        self._lock = threading.RLock()
        pool.add_reclaimer(self._reclaim)

    def keep(self, keys: Iterable[RecordKey]) -> None:
        """From now on these records stay in the pool once they are there."""
        with self._lock:
            self._resident = frozenset(keys)
            for key, held in list(self._held.items()):
                if held.place is Place.KEPT and self._store is not None and key not in self._resident:
                    self._evict(key, held)

    def stage(self, key: RecordKey, length_bytes: int) -> bool:
        """Start bringing `key` in, if there is a buffer for it now.

        Args:
            key: a record of the store.
            length_bytes: length of the buffer; at least what is stored.

        Returns:
            False if there is no room: nothing was done.
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
            if self.read_ahead_bytes is not None and self._staged_bytes() + length_bytes > self.read_ahead_bytes:
                return False
            lease = self._try_acquire(length_bytes)
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
                    self._held[key] = _Held(lease, Place.LIVE, empty=True)
                    self._metrics.begin_use(key)
                    return lease, False
                held = self._read(key, lease)
            assert held.place is not Place.LIVE, f"{key} is in use already"
            transfer = held.lease.transfer
            if transfer is None or transfer.done():
                self._metrics.hits += 1
            if transfer is not None:
                try:
                    with self._metrics.span("swapper.wait_read", "wait_read_s"):
                        transfer.wait()
                    if self._store is not None and not held.writing:
                        self._store.check_written(key)  # While it was read it may have been lost.
                except SwapIOError:
                    if not held.writing:  # The next call reads it again.
                        del self._held[key]
                        held.lease.release()
                    raise
                held.lease.transfer = None
            held.place, held.writing = Place.LIVE, False
            self._metrics.begin_use(key)
            return held.lease, True

    def put(self, key: RecordKey, length_bytes: int) -> None:
        """Start writing the first `length_bytes` of the buffer taken for `key`, and let go of it. Returns at once.

        Raises:
            SwapIOError: an earlier write failed, or there is no room for a fresh file beside one that must stay.
        """
        with self._lock:
            held = self._held[key]
            assert held.place is Place.LIVE, f"{key} is not in use"
            held.empty = False
            self._metrics.end_use(key)
            if self._store is None:
                held.place = Place.KEPT
                return
            held.lease.transfer = self._store.write(key, held.lease, length_bytes)
            held.writing = True
            held.place = Place.KEPT if key in self._resident else Place.LEAVING
            self._metrics.count_write(key, length_bytes, held.lease.transfer)
            self._collect()

    def give_back(self, key: RecordKey) -> None:
        """Let go of the buffer taken for `key`; it was not changed. If nothing is stored, nothing is kept either."""
        with self._lock:
            held = self._held[key]
            assert held.place is Place.LIVE, f"{key} is not in use"
            self._metrics.end_use(key)
            if not held.empty and (self._store is None or key in self._resident):
                held.place = Place.KEPT
            else:
                del self._held[key]
                held.lease.release()

    def let_go(self, key: RecordKey) -> None:
        """As `give_back`; nothing if it is not in use, as after a `take` that was cut off."""
        with self._lock:
            held = self._held.get(key)
            if held is not None and held.place is Place.LIVE:
                self.give_back(key)

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
                    self._drop(key, held)
                    dropped = True
            return dropped
        finally:
            self._lock.release()

    def drain(self) -> None:
        """Wait until everything is written.

        Raises:
            SwapIOError: the first write that failed; the others were waited for all the same. Raised again until that
                record is discarded.
        """
        with self._lock, self._metrics.span("swapper.drain", "wait_write_s"):
            self.drop_staged()
            for held in list(self._held.values()):
                if held.lease.transfer is not None:
                    held.lease.transfer.settle()
            for transfer in self._dropped:
                transfer.settle()
            self._collect()
            if self._store is not None:
                self._store.check_written()

    def check(self) -> None:
        """Raise what is known of writes that failed; waits for none.

        Raises:
            SwapIOError: the first of them.
        """
        with self._lock:
            self._collect()

    def recover(self) -> None:
        """Give back what was read or taken and not put; writes go on. For the way out of an exception; never raises.

        Without a store there is no other copy: then what was put before stays, as it is.
        """
        with self._lock:
            self.drop_staged()
            for key, held in list(self._held.items()):
                if held.place is not Place.LIVE:
                    continue
                self._metrics.end_use(key)
                if self._store is None and not held.empty:
                    held.place = Place.KEPT
                else:
                    del self._held[key]
                    held.lease.release()

    def discard(self, key: RecordKey) -> None:
        """Give back the record's buffer, if it has one, and forget what is stored of it, failed writes included."""
        with self._lock:
            held = self._held.get(key)
            if held is not None:
                with contextlib.suppress(SwapIOError):  # The data that it failed to move are not wanted any more.
                    if held.lease.transfer is not None:
                        held.lease.transfer.wait()
                del self._held[key]
                held.lease.release()
                self._metrics.end_use(key)
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
        self._metrics.count_read(key, self._store.stored_bytes(key), lease.transfer)
        self._held[key] = held
        return held

    def _collect(self) -> None:
        """Give back the buffers whose write is done.

        Raises:
            SwapIOError: the first write that failed. See [Note: failed writes].
        """
        failure: SwapIOError | None = None
        for key, held in list(self._held.items()):
            transfer = held.lease.transfer
            if not held.writing or transfer is None or not transfer.done():
                continue
            try:
                transfer.wait()
            except SwapIOError as error:
                failure = failure or error
                continue
            held.lease.transfer, held.writing = None, False
            if held.place is Place.LEAVING:
                del self._held[key]
                held.lease.release()
        self._observe_dropped()
        if failure is not None:
            raise failure

    def _drop(self, key: RecordKey, held: _Held) -> None:
        """Give back a buffer that is being read into."""
        del self._held[key]
        if held.lease.transfer is not None:
            self._dropped.append(held.lease.transfer)
        held.lease.release()

    def _drop_last_staged(self) -> bool:
        """Give back one buffer that was only read ahead: the one staged last, which is needed last. False if none is.

        One that is still being written as well stays: it leaves when that is done.
        """
        for key, held in reversed(self._held.items()):
            if held.place is Place.ARRIVING:
                if held.writing:
                    held.place = Place.LEAVING
                else:
                    self._drop(key, held)
                return True
        return False

    def _staged_bytes(self) -> int:
        return sum(held.lease.length_bytes for held in self._held.values() if held.place is Place.ARRIVING)

    def _observe_dropped(self) -> None:
        # Waited for, so that the handle does not report the failure of a read that nobody wanted.
        for transfer in [transfer for transfer in self._dropped if transfer.done()]:
            self._dropped.remove(transfer)
            with contextlib.suppress(SwapIOError):
                transfer.wait()

    def _evict(self, key: RecordKey, held: _Held) -> None:
        """Let a record that is kept leave; what is kept beside a store is stored too."""
        if held.writing:
            held.place = Place.LEAVING
        else:
            del self._held[key]
            held.lease.release()

    def _is_beyond_limit(self, length_bytes: int) -> bool:
        if self.limit_bytes is None:
            return False
        return sum(held.lease.length_bytes for held in self._held.values()) + length_bytes > self.limit_bytes

    def _try_acquire(self, length_bytes: int) -> Lease | None:
        return None if self._is_beyond_limit(length_bytes) else self._pool.try_acquire(length_bytes)

    def _acquire(self, length_bytes: int) -> Lease:
        while (lease := self._try_acquire(length_bytes)) is None:
            # Waiting for a write costs less than reading again what was read ahead.
            if self._wait_for_write():
                self._collect()
                continue
            if self._is_beyond_limit(length_bytes) and self._drop_last_staged():
                continue
            with self._metrics.span("swapper.wait_pool"):
                return self._pool.acquire(length_bytes)
        return lease

    def _wait_for_write(self) -> bool:
        """Wait until a record has left, or failed to. False if none is leaving."""
        leaving = next((held for held in self._held.values() if held.place is Place.LEAVING), None)
        if leaving is None:
            return False
        assert leaving.lease.transfer is not None
        with self._metrics.span("swapper.wait_write", "wait_write_s"):
            leaving.lease.transfer.settle()
        return True

    def _reclaim(self) -> bool:
        """Give buffers back to a pool that is short: what was read ahead, then what is leaving, then what is kept.

        Called by whoever needs the buffer, which may be another pipeline, so a failed write is left to be raised here.

        Returns:
            Whether anything was given back; False if this pipeline is busy.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._drop_last_staged():
                return True
            # What is kept goes too if it must: buffers that stay can leave no piece of the pool that is long enough.
            for place in (Place.LEAVING, Place.KEPT):
                for key, held in list(self._held.items()):
                    if held.place is place and self._store is not None and self._is_written(held):
                        del self._held[key]
                        held.lease.release()
                        return True
            return False
        finally:
            self._lock.release()

    def _is_written(self, held: _Held) -> bool:
        """Wait for the write that is in flight, if any. False if it failed."""
        if held.lease.transfer is not None:
            try:
                held.lease.transfer.wait()
            except SwapIOError:
                return False
            held.lease.transfer, held.writing = None, False
        return True
