"""Moves records between the drive and the pool: prefetch, use, write behind.

[Note: who owns a buffer] Each record that is in memory has one `CachedRecord`: its lease, and its state. The transfer
in flight travels in the lease. A lease that is released while its transfer is in flight is given back by the pool only
when the transfer is done, so no exception, wherever it strikes, can let two owners have one buffer. (But for Ctrl-C in
the microseconds in which a transfer was started and is not yet in the lease: it then ends unwatched.)

[Note: copies from a device] A buffer that is put while a device still copies into it (the copy is the transfer of its
lease) is written when the copy is over: whoever calls next then starts the write, or waits for the copy if it needs the
record, or its buffer, before.

[Note: failed writes] A record whose write failed, or the copy before it, keeps its buffer and its transfer, as FAILED.
Every later call raises the error again, until `discard` or `forget`: the record on disk is neither the old nor the new
one.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Iterable

from swapper.errors import SwapIOError
from swapper.metrics import Metrics
from swapper.storage.buffers import BufferPool, Lease
from swapper.storage.cached_records import CachedRecord, CachedRecords, RecordState
from swapper.storage.growing_pool import GrowingPool
from swapper.storage.store import RecordKey, TensorStore
from swapper.storage.transfers import AnyTransfer

__all__ = ["RecordCache", "RecordState"]

_LOOKS = 32
"""Writes that one call looks at, the oldest first, to see whether they are over. Each call starts at most one, so the
list does not grow; and a drive finishes them in about the order in which they were started."""


class RecordCache:
    """Moves one owner's records between the pool and the store.

    Args:
        pool: where buffers come from.
        store: where records go; None keeps every record in the pool for good (`device: cpu`).
        metrics: counts waits and hits.

    Attributes:
        limit_bytes: the most of the pool to hold at once, unless what is in use alone is more; None for no limit.
        read_ahead_bytes: the most that `stage` keeps of the pool, beside what is in use; None where nobody else needs
            the rest.
        drops: how often a record that was read ahead was given up before anybody took it.

    Thread safety: `stage` may be called by an autograd thread while the owner's thread waits in backward.
    """

    def __init__(self, pool: BufferPool | GrowingPool, store: TensorStore | None, metrics: Metrics) -> None:
        self._pool = pool
        self._store = store
        self._metrics = metrics
        self.limit_bytes: int | None = None
        self.read_ahead_bytes: int | None = None
        self.drops = 0
        self._held = CachedRecords()
        self._resident: frozenset[RecordKey] = frozenset()
        self._dropped: deque[AnyTransfer] = deque()  # reads that are not wanted any more
        self._lock = threading.RLock()
        pool.add_reclaimer(self._reclaim)

    def keep(self, keys: Iterable[RecordKey]) -> None:
        """From now on these records stay in the pool once they are there."""
        with self._lock:
            self._resident = frozenset(keys)
            for held in self._held.of_state(RecordState.KEPT):
                if self._store is not None and held.key not in self._resident:
                    self._evict(held)

    def stage(self, key: RecordKey, length_bytes: int) -> bool:
        """Start bringing `key` in, if there is a buffer for it now.

        Args:
            key: a record of the store.
            length_bytes: length of the buffer; at least what is stored.

        Returns:
            False if there is no room: nothing was done.
        """
        if self._store is None:  # What there is is in the pool.
            return True
        with self._lock:
            self._collect()
            held = self._held.get(key)
            if held is not None:
                if held.state is RecordState.LEAVING:  # Still in memory: no need to read what is just being written.
                    self._held.move(held, RecordState.ARRIVING, writing=True)
                return True
            if self._store.stored_bytes(key) == 0:
                return True
            staged_bytes = self._held.bytes_of(RecordState.ARRIVING)
            if self.read_ahead_bytes is not None and staged_bytes + length_bytes > self.read_ahead_bytes:
                return False
            lease = self._try_acquire(length_bytes)
            if lease is None:
                return False
            self._read(key, lease)
            return True

    def take(self, key: RecordKey, length_bytes: int) -> tuple[Lease, bool]:
        """Bring `key` in and wait for it.

        Returns:
            The buffer, the caller's until `put` or `release`; and whether it holds a record (False: it is a new
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
                    self._held.add(CachedRecord(key, lease, RecordState.LIVE, empty=True))
                    self._metrics.begin_use(key)
                    return lease, False
                held = self._read(key, lease)
            assert held.state is not RecordState.LIVE, f"{key} is in use already"
            self._start_write(held)
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
                    if held.writing:
                        self._held.move(held, RecordState.FAILED, writing=False)
                    else:  # The next call reads it again.
                        self._give_up(held)
                    raise
            self._held.move(held, RecordState.LIVE, writing=False)
            held.lease.transfer = None
            self._metrics.begin_use(key)
            return held.lease, True

    def put(self, key: RecordKey, length_bytes: int) -> None:
        """Start writing the first `length_bytes` of the buffer taken for `key`, and let go of it. Returns at once.

        If its lease has a transfer, that is waited for before it is written: see [Note: copies from a device].

        Raises:
            SwapIOError: an earlier write failed, or there is no room for a fresh file beside one that must stay.
        """
        with self._lock:
            held = self._live(key)
            held.empty = False
            self._metrics.end_use(key)
            if self._store is None:
                self._held.move(held, RecordState.KEPT, writing=held.lease.transfer is not None)
                return
            if held.lease.transfer is not None:  # See [Note: copies from a device].
                held.copied_bytes = length_bytes
            else:
                self._write(held, length_bytes)
            self._held.move(held, RecordState.KEPT if key in self._resident else RecordState.LEAVING, writing=True)
            self._collect()

    def release(self, key: RecordKey) -> None:
        """Give back the buffer taken for `key`, which was not changed. If nothing is stored, nothing is kept either.

        Does nothing if it is not in use, as after a `take` that was cut off.
        """
        with self._lock:
            held = self._held.get(key)
            if held is None or held.state is not RecordState.LIVE:
                return
            self._metrics.end_use(key)
            if not held.empty and (self._store is None or key in self._resident):
                self._held.move(held, RecordState.KEPT, writing=False)
            else:
                self._give_up(held)

    def drop_prefetched(self) -> bool:
        """Give back what was only read ahead. Returns whether that freed anything; False if the cache is busy."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            dropped = [self._drop(held) for held in self._held.of_state(RecordState.ARRIVING)]
            return any(dropped)
        finally:
            self._lock.release()

    def flush(self) -> None:
        """Wait until everything is written.

        Raises:
            SwapIOError: the first write that failed; the others were waited for all the same. Raised again until that
                record is discarded.
        """
        with self._lock, self._metrics.span("swapper.drain", "wait_write_s"):
            self.drop_prefetched()
            writes = list(self._held.writes())
            for held in writes:
                with contextlib.suppress(SwapIOError):  # Raised again by `_collect`.
                    self._start_write(held)
            for held in writes:
                assert held.lease.transfer is not None
                held.lease.transfer.settle()
            for transfer in self._dropped:
                transfer.settle()
            for held in writes:
                if held.writing and not held.copied_bytes:
                    self._see_written(held)
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
            self.drop_prefetched()
            for held in self._held.of_state(RecordState.LIVE):
                self._metrics.end_use(held.key)
                if self._store is None and not held.empty:
                    self._held.move(held, RecordState.KEPT, writing=False)
                else:
                    self._give_up(held)

    def discard(self, key: RecordKey) -> None:
        """Give back the record's buffer, if it has one, and forget what is stored of it, failed writes included."""
        with self._lock:
            held = self._held.get(key)
            if held is not None:
                with contextlib.suppress(SwapIOError):  # The data that it failed to move are not wanted any more.
                    if held.lease.transfer is not None:
                        held.lease.transfer.wait()
                self._give_up(held)
                self._metrics.end_use(key)
            if self._store is not None:
                self._store.discard(key)

    def forget(self, key: RecordKey) -> None:
        """`discard`, and delete the record's file."""
        with self._lock:
            self.discard(key)
            if self._store is not None:
                self._store.forget(key)

    def _live(self, key: RecordKey) -> CachedRecord:
        held = self._held.get(key)
        assert held is not None, f"{key} is not in use"
        assert held.state is RecordState.LIVE, f"{key} is not in use"
        return held

    def _read(self, key: RecordKey, lease: Lease) -> CachedRecord:
        assert self._store is not None
        held = CachedRecord(key, lease, RecordState.ARRIVING)
        lease.transfer = self._store.read(key, lease)
        self._metrics.count_read(key, self._store.stored_bytes(key), lease.transfer)
        self._held.add(held)
        return held

    def _write(self, held: CachedRecord, length_bytes: int) -> None:
        assert self._store is not None
        held.lease.transfer = self._store.write(held.key, held.lease, length_bytes)
        self._metrics.count_write(held.key, length_bytes, held.lease.transfer)

    def _start_write(self, held: CachedRecord) -> None:
        """If a device copies the record, wait until it has, and start writing it. See [Note: copies from a device].

        Raises:
            SwapIOError: the copy failed; or the write could not be started, which the next call tries again.
        """
        if not held.copied_bytes:
            return
        assert held.lease.transfer is not None
        try:
            held.lease.transfer.wait()
        except SwapIOError:
            held.copied_bytes = 0
            self._held.move(held, RecordState.FAILED, writing=False)
            raise
        self._write(held, held.copied_bytes)
        held.copied_bytes = 0

    def _give_up(self, held: CachedRecord) -> None:
        """Give the buffer back. The memory goes to nobody else before the transfer in it is over."""
        self._held.remove(held)
        held.lease.release()

    def _collect(self) -> None:
        """Start the oldest writes whose copy is done; give back the buffers of the oldest that are done.

        Raises:
            SwapIOError: a write failed. See [Note: failed writes].
        """
        failure: SwapIOError | None = None
        for held in list(itertools.islice(self._held.writes(), _LOOKS)):
            assert held.lease.transfer is not None
            if not held.lease.transfer.done():
                continue
            if not held.copied_bytes:
                self._see_written(held)
                continue
            try:
                self._start_write(held)
            except SwapIOError as error:
                failure = failure or error
        self._observe_dropped()
        if failure is not None:
            raise failure
        failed = self._held.first(RecordState.FAILED)
        if failed is not None:
            assert failed.lease.transfer is not None
            failed.lease.transfer.wait()

    def _see_written(self, held: CachedRecord) -> bool:
        """Wait for the write of `held`, and let the record leave if it was leaving.

        Returns:
            False if the write failed, so that it is FAILED; or if it could not be started.
        """
        try:
            self._start_write(held)
            assert held.lease.transfer is not None
            held.lease.transfer.wait()
        except SwapIOError:
            if held.writing and not held.copied_bytes:
                self._held.move(held, RecordState.FAILED, writing=False)
            return False
        if held.state is RecordState.LEAVING:
            self._give_up(held)
        else:
            self._held.end_write(held)
            held.lease.transfer = None
        return True

    def _drop(self, held: CachedRecord) -> bool:
        """Give up a record that was only read ahead. False if it leaves later, as it is still being written."""
        self.drops += 1
        if held.writing:
            self._held.move(held, RecordState.LEAVING, writing=True)
            return False
        if held.lease.transfer is not None:
            self._dropped.append(held.lease.transfer)
        self._give_up(held)
        return True

    def _drop_last_staged(self) -> bool:
        """Give up one record that was only read ahead: the one staged last, which is needed last. False if none is."""
        held = self._held.last(RecordState.ARRIVING)
        if held is None:
            return False
        self._drop(held)
        return True

    def _observe_dropped(self) -> None:
        # Waited for, so that the handle does not report the failure of a read that nobody wanted.
        while self._dropped and self._dropped[0].done():
            with contextlib.suppress(SwapIOError):
                self._dropped[0].wait()
            self._dropped.popleft()

    def _evict(self, held: CachedRecord) -> None:
        """Let a record that is kept leave; what is kept beside a store is stored too."""
        if held.writing:
            self._held.move(held, RecordState.LEAVING, writing=True)
        else:
            self._give_up(held)

    def _is_beyond_limit(self, length_bytes: int) -> bool:
        if self.limit_bytes is None:
            return False
        return self._held.length_bytes + length_bytes > self.limit_bytes

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
        leaving = self._held.first(RecordState.LEAVING)
        if leaving is None:
            return False
        assert leaving.lease.transfer is not None
        with self._metrics.span("swapper.wait_write", "wait_write_s"):
            self._start_write(leaving)
            leaving.lease.transfer.settle()
        self._see_written(leaving)
        return True

    def _reclaim(self) -> bool:
        """Give buffers back to a pool that is short: what was read ahead, then what is leaving, then what is kept.

        Called by whoever needs the buffer, which may be another cache, so a failed write is left to be raised here.

        Returns:
            Whether anything was given back; False if this cache is busy.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._drop_last_staged():
                return True
            if self._store is None:
                return False
            # One whose write fails gets another state, so that the next is the first.
            while (held := self._held.first(RecordState.LEAVING)) is not None:
                if self._see_written(held):
                    return True
                if held.state is RecordState.LEAVING:  # Its write cannot be started, which its own cache will raise.
                    break
            # What is kept goes too if it must: buffers that stay can leave no piece of the pool that is long enough.
            while (held := self._held.first(RecordState.KEPT)) is not None:
                if not held.writing or self._see_written(held):
                    self._give_up(held)
                    return True
                if held.state is RecordState.KEPT:
                    break
            return False
        finally:
            self._lock.release()
