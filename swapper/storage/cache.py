"""Moves records between the drive and the pool: prefetch, use, write behind.

[Note: who owns a buffer] Each record that is in memory has one `CachedRecord`: its lease, and its state. The transfer
in flight travels in the lease. A lease that is released while its transfer is in flight is given back by the pool only
when the transfer is done, so no exception, wherever it strikes, can let two owners have one buffer.

[Note: copies from a device] A buffer that is put while a device still copies into it (the copy is the transfer of its
lease) is written when the copy is over, by a thread of `RecordWrites` or by the next call, whoever is faster. A call
that needs the record, or its buffer, before, waits for the copy. Between copy and write its length is asked for: `put`.

[Note: failed writes] A record whose write failed, or the copy before it, keeps its buffer and its transfer, as FAILED.
Every later call raises the error again, until `discard` or `forget`: the record on disk is neither the old nor the new
one. (Where the policy rewrites, the record stays KEPT instead, and the error is raised once, by who waits.)
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable

from swapper.errors import SwapIOError
from swapper.io.devices import check_devices
from swapper.metrics import Metrics
from swapper.process.interrupts import interrupts_deferred
from swapper.storage.buffers import BufferPool, Lease
from swapper.storage.cache_policies import KeptPolicy, Policy, ScanPolicy
from swapper.storage.cached_records import CachedRecord, CachedRecords, RecordState
from swapper.storage.growing_pool import GrowingPool
from swapper.storage.spans import RecordStore
from swapper.storage.store import RecordKey
from swapper.storage.transfers import DroppedReads, FailedTransfer
from swapper.storage.writes import RecordWrites

__all__ = ["RecordCache"]

log = logging.getLogger(__name__)

_LOOKS = 32
"""Writes that one call looks at, the oldest first, to see if they are over: a drive ends them in about that order."""


class RecordCache:
    """Moves one owner's records between the pool and the store.

    Args:
        pool: where buffers come from.
        store: where records go; None keeps every record in the pool for good (`device: cpu`).
        metrics: counts waits and hits.
        policy: what stays and what goes first; None: `ScanPolicy`, or `KeptPolicy` without a store.
        owner: whose finalizer ends this, if it has one. It is kept while others use the cache on their own.
        lock: of another cache of that owner, which several of its calls use together; None: one of its own.

    Attributes:
        lock: held by every call; for owners that change what their policy reads.
        records: those that hold a buffer. Only the cache changes them.
        limit_bytes: the most of the pool to hold at once, unless what is in use alone is more; None for no limit.
        read_ahead_bytes: the most that `stage` keeps of the pool, beside what is in use; None for no limit.
        drops: how often a record that was prefetched was dropped before anybody took it.

    Thread safety: `stage` may be called by an autograd thread while the owner's thread waits in backward.
    """

    def __init__(
        self,
        pool: BufferPool | GrowingPool,
        store: RecordStore | None,
        metrics: Metrics,
        policy: Policy | None = None,
        owner: object | None = None,
        lock: threading.RLock | None = None,
    ) -> None:
        self.pool = pool
        self.lock = lock or threading.RLock()
        self.limit_bytes: int | None = None
        self.read_ahead_bytes: int | None = None
        self.records, self.drops = CachedRecords(), 0
        self._store, self._metrics = store, metrics
        self._policy = policy or (KeptPolicy() if store is None else ScanPolicy())
        self._owner = None if owner is None else weakref.ref(owner)
        self._dropped = DroppedReads()
        self._writes = RecordWrites(store, metrics, self.records, self._owner, repeats=self._policy.rewrites)
        pool.add_reclaimer(self._reclaim)

    def keep(self, keys: Iterable[RecordKey]) -> None:
        """From now on these records stay in the pool once they are there. For caches with a `ScanPolicy`."""
        if self._store is None:
            return
        with self.lock:
            self._policy = ScanPolicy(keys)
            for record in self.records.of_state(RecordState.KEPT):
                if self._policy.keeps(record.key):
                    continue
                if record.writing:
                    self._move(record, RecordState.LEAVING, writing=True)
                else:
                    self._give_up(record)

    # --- Records that come -----------------------------------------------------------------------------------------

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
        with self.lock:
            self._collect()
            record = self.records.get(key)
            if record is not None:
                if record.state is RecordState.LEAVING:  # Still in memory: no need to read what is just being written.
                    self._move(record, RecordState.ARRIVING, writing=True)
                return True
            if self._store.stored_bytes(key) == 0:
                return True
            staged_bytes = self.records.bytes_of(RecordState.ARRIVING)
            if self.read_ahead_bytes is not None and staged_bytes + length_bytes > self.read_ahead_bytes:
                return False
            while self._is_beyond_limit(length_bytes) or self._policy.is_beyond_share(key, length_bytes):
                if (spare := self._policy.spare(self)) is None:
                    return False
                self._evict(spare)
            if (lease := self._try_acquire(key, length_bytes)) is None:
                return False
            self._read(key, lease)
            return True

    def require(self, key: RecordKey, length_bytes: int, *, anew: bool = False) -> None:
        """As `stage`, for a stored record that `fetch` will wait for: waits for a buffer if there is none.

        With `anew` all of it will be overwritten. Then nothing is read: a new buffer is KEPT, of undefined content.

        Raises:
            SwapIOError: a write failed that a buffer is waited for.
            PoolExhausted: others hold the whole pool.
        """
        with self.lock:
            if self.records.get(key) is None:
                lease = self._acquire(key, length_bytes)
                if not anew:
                    self._read(key, lease)
                    return
                with interrupts_deferred():
                    self._add(CachedRecord(key, lease, RecordState.KEPT))

    def fetch(self, key: RecordKey) -> Lease:
        """Wait until a record that was required has arrived. It is then KEPT. Raises SwapIOError if reading failed."""
        with self.lock:
            record = self.records.get(key)
            assert record is not None, f"{key} was not required"
            self._start_write(record)
            if record.state is RecordState.ARRIVING:
                self._wait_for_content(record)
                self._rest(record, RecordState.KEPT)
            else:
                self._metrics.hits += 1
            return record.lease

    def take(self, key: RecordKey, length_bytes: int, *, follows: bool = False) -> tuple[Lease, bool]:
        """Bring `key` in and wait for it.

        With `follows` a copy by a device, from or into the buffer, is not waited for. It is then the transfer of the
        lease, and what the caller copies comes after it. What was put with it the caller puts, or it is lost.

        Returns:
            The buffer, the caller's until `put` or `release`; and False if its content is undefined, as of new records.

        Raises:
            SwapIOError: reading failed, or a write that was in flight did.
            PoolExhausted: others hold the whole pool.
        """
        with self.lock:
            self._collect()
            record = self.records.get(key)
            if record is None:
                lease = self._acquire(key, length_bytes)
                if self._store is None or self._store.stored_bytes(key) == 0:
                    with interrupts_deferred():
                        self._add(CachedRecord(key, lease, RecordState.LIVE, empty=True))
                    self._metrics.begin_use(key)
                    return lease, False
                record = self._read(key, lease)
            assert record.state is not RecordState.LIVE, f"{key} is in use already"
            if is_followed := follows:
                with interrupts_deferred():
                    if is_followed := record.is_copied or self._writes.withdraw(record):  # Its write: until the `put`.
                        self.records.move(record, RecordState.LIVE, writing=False)
                        self._metrics.hits += 1
            if not is_followed:
                self._start_write(record)
                self._wait_for_content(record)
                self._rest(record, RecordState.LIVE)
            self._metrics.begin_use(key)
            return record.lease, True

    def _wait_for_content(self, record: CachedRecord) -> None:
        """Wait for the transfer of `record`, a read or a write, so that its buffer may be looked at and changed."""
        if (transfer := record.lease.transfer) is None or transfer.done():
            self._metrics.hits += 1
        if transfer is None:
            return
        try:
            with self._metrics.span("swapper.wait_read", "wait_read_s"):
                transfer.wait()
            if self._store is not None and not record.writing:
                self._store.finish_read(record.key, record.lease)  # While it was read it may have been lost.
        except SwapIOError:
            if record.writing:
                self._move(record, RecordState.FAILED, writing=False)
            else:  # The next call reads it again, and what was read ahead, which may have failed as well.
                self._give_up(record)
                self.drop_prefetched()
            raise

    def _rest(self, record: CachedRecord, state: RecordState) -> None:
        """The transfer of `record` is over, and seen."""
        with interrupts_deferred():
            self.records.move(record, state, writing=False)
            record.lease.transfer = None

    def _move(self, record: CachedRecord, state: RecordState, *, writing: bool) -> None:
        with interrupts_deferred():
            self.records.move(record, state, writing=writing)

    # --- Records that go -------------------------------------------------------------------------------------------

    def put(self, key: RecordKey, length: int | Callable[[], int]) -> None:
        """Start writing the buffer taken for `key`, and let go of it. Returns at once.

        If its lease has a transfer, that is waited for before it is written: see [Note: copies from a device].

        Args:
            length: how many bytes to write. A function is called once, when that transfer is over, before anybody has
                the record, and in any thread; if it raises SwapIOError, the write has failed.

        Raises:
            SwapIOError: an earlier write failed, or there is no room for a fresh file beside one that must stay.
        """
        with self.lock:
            record = self.records.get(key)
            assert record is not None and record.state is RecordState.LIVE, f"{key} is not in use"
            record.empty = False
            self._metrics.end_use(key)
            state = RecordState.KEPT if self._store is None or self._policy.keeps(key) else RecordState.LEAVING
            self._write(record, length, state)
            self._collect()

    def write(self, key: RecordKey, length: int | Callable[[], int]) -> None:
        """As `put`, of a record that is KEPT, and stays so."""
        with self.lock:
            record = self.records.get(key)
            assert record is not None and record.state is RecordState.KEPT and not record.writing, key
            self._write(record, length, RecordState.KEPT)

    def start_write(self, key: RecordKey) -> None:
        """Wait for the copy of a record by a device, if there is one, and start its write. Errors as for `take`."""
        with self.lock:
            if (record := self.records.get(key)) is not None:
                self._start_write(record)

    def wait(self, key: RecordKey) -> None:
        """Wait for the write of a record, if one is in flight. Raises SwapIOError if it failed."""
        with self.lock:
            if (record := self.records.get(key)) is not None and record.writing:
                with self._metrics.span("swapper.wait_write", "wait_write_s"):
                    self._see_written(record)

    def release(self, key: RecordKey) -> None:
        """Give back the buffer taken for `key` unchanged. Does nothing if it is not LIVE, as after a failed `take`."""
        with self.lock:
            if (record := self.records.get(key)) is not None and record.state is RecordState.LIVE:
                self._metrics.end_use(key)
                self._let_rest(record, keeps=self._policy.keeps(key))

    def evict(self, key: RecordKey) -> None:
        """Give up the buffer of a record that is ARRIVING or KEPT. Writes what is newer first, which may fail."""
        with self.lock:
            if (record := self.records.get(key)) is not None:
                self._evict(record)

    def drop_prefetched(self) -> bool:
        """Drop what was only prefetched. Returns whether that freed anything; False if the cache is busy."""
        if not self.lock.acquire(blocking=False):
            return False
        try:
            return sum(map(self._drop, self.records.of_state(RecordState.ARRIVING))) > 0
        finally:
            self.lock.release()

    def flush(self) -> None:
        """Wait until all is written. Raises SwapIOError for the first write that failed, until that is discarded."""
        with self.lock, self._metrics.span("swapper.drain", "wait_write_s"):
            self.drop_prefetched()
            writes = list(self.records.writes())
            for record in writes:
                with contextlib.suppress(SwapIOError):  # Raised again by `_collect`.
                    self._start_write(record)
            transfers = [record.lease.transfer for record in writes if record.lease.transfer is not None]
            for transfer in transfers:
                transfer.wait_quietly()
            self._dropped.wait_quietly()
            for record in writes:
                if record.writing and record.finish is None:
                    self._see_written(record)
            self._collect()
            if self._store is not None:
                self._store.check_written()

    def check(self) -> None:
        """Raise SwapIOError for the first write, or device, that is known to have failed. Waits for none."""
        with self.lock:
            self._collect()

    def recover(self) -> None:
        """Give back what was prefetched or taken and not put; writes go on. After an exception; never raises.

        Without a store there is no other copy: then what was put before stays, as it is.
        """
        with interrupts_deferred(), self.lock:  # Nothing here waits for the drive.
            self.drop_prefetched()
            self.release_live()

    def release_live(self) -> None:
        """Give back what was taken and not put, as by a call that Ctrl-C cut off in `recover`, too."""
        with self.lock:
            for record in self.records.of_state(RecordState.LIVE):
                self._metrics.end_use(record.key)
                self._let_rest(record, keeps=self._store is None)

    def discard(self, key: RecordKey) -> None:
        """Give back the record's buffer, if it has one, and forget what is stored of it, failed writes included."""
        with self.lock:
            if (record := self.records.get(key)) is not None:
                with interrupts_deferred():  # What will not be written must not be taken for written.
                    withdrawn, transfer = self._writes.withdraw(record), record.lease.transfer
                    if withdrawn:
                        self._give_up(record)
                        if self._store is not None:
                            self._store.discard(key)
                with contextlib.suppress(SwapIOError):  # The data that it failed to move are not wanted any more.
                    if transfer is not None:
                        transfer.wait()
                if not withdrawn:
                    self._give_up(record)
                self._metrics.end_use(key)
            if self._store is not None:
                self._store.discard(key)

    def forget(self, key: RecordKey) -> None:
        """`discard`, and delete the record's file."""
        with self.lock:
            self.discard(key)
            if self._store is not None:
                self._store.forget(key)

    def abandon(self, key: RecordKey) -> None:
        """Leave the buffer of a record that is at rest to the tensors that view it, and delete the record's file."""
        with self.lock:
            record = self.records.get(key)
            assert record is not None and record.lease.transfer is None, key
            self._give_up(record, abandon=True)
            self.forget(key)

    def close(self) -> None:
        """Wait for what is in flight, and give all buffers up: those that others view stay theirs. For a finalizer.

        Takes no lock and raises nothing, as the owner is gone. Files stay.
        """
        for record in list(self.records):
            self._writes.withdraw(record)
            if record.lease.transfer is not None:
                try:
                    record.lease.transfer.wait()
                except SwapIOError as error:
                    # Without a traceback: this may run in the middle of anything, where formatting one is not safe.
                    if record.writing:
                        log.warning("a write of parameters had failed, and the model is gone: %s", repr(error))
                record.lease.transfer = None
            self._give_up(record, abandon=self._policy.is_viewed(record.key))
        self._dropped.wait()

    # --- Buffers ---------------------------------------------------------------------------------------------------

    def _try_acquire(self, key: RecordKey, length_bytes: int, *, joins: bool = False) -> Lease | None:
        joins = joins or self._policy.joins_pieces(self, length_bytes)
        while not self._is_beyond_limit(length_bytes):
            high, above = self._policy.place_for(self, key)
            lease = self.pool.try_acquire(length_bytes, high=high, above=above, joins=joins)
            if lease is not None or joins or (spare := self._policy.spare(self)) is None:
                return lease
            self._evict(spare)  # Between pieces: without it the next one may be long enough.
        return None

    def _acquire(self, key: RecordKey, length_bytes: int) -> Lease:
        lease = None
        while self._policy.is_another_to_go(self, key, length_bytes) or (
            (lease := self._try_acquire(key, length_bytes) or self._try_acquire(key, length_bytes, joins=True)) is None
        ):
            # Waiting for a write costs less than reading again what was prefetched.
            if self._wait_for_write():
                self._collect()
                continue
            if self._policy.evicts_own or self._is_beyond_limit(length_bytes):
                if self._evict_one(idle_only=True) or (self._policy.evicts_own and self._evict_one(idle_only=False)):
                    continue
                if self._is_beyond_limit(length_bytes):
                    self._policy.refuse(self, length_bytes)
            with self._metrics.span("swapper.wait_pool"):
                return self.pool.acquire(length_bytes, high=self._policy.place_for(self, key)[0])
        return lease

    def _is_beyond_limit(self, length_bytes: int) -> bool:
        return self.limit_bytes is not None and self.records.length_bytes + length_bytes > self.limit_bytes

    def _reclaim(self) -> bool:
        """Give one buffer back to a pool that is short: what was prefetched, then what is leaving, then what is kept.

        Called by whoever needs the buffer, which may be another cache, so a failed write is left to be raised here.
        Returns whether anything was given back; False if this cache is busy.
        """
        owner = None if self._owner is None else self._owner()
        if (owner is None and self._owner is not None) or not self.lock.acquire(blocking=False):
            return False
        try:
            if self._evict_one(idle_only=True):
                return True
            # One whose write fails gets another state, so that the next is the first.
            while (record := self.records.first(RecordState.LEAVING)) is not None:
                if self._see_written(record):
                    return True
                if record.state is RecordState.LEAVING:  # Its write cannot be started, which its owner will be told.
                    break
            return self._evict_one(idle_only=False)
        finally:
            self.lock.release()

    def _evict_one(self, *, idle_only: bool) -> bool:
        """Evict the policy's victim. False if there is none, or if it cannot go."""
        if (victim := self._policy.victim(self, idle_only=idle_only)) is None:
            return False
        former = victim.state
        self._evict(victim)
        return victim.lease.released or victim.state is not former

    def _evict(self, record: CachedRecord) -> None:
        if record.state is RecordState.ARRIVING:
            self._drop(record)
            return
        assert record.state is RecordState.KEPT, record
        if not record.writing or self._see_written(record):
            self._policy.before_eviction(self, record)
            if not record.writing or self._see_written(record):
                self._give_up(record)

    def _let_rest(self, record: CachedRecord, *, keeps: bool) -> None:
        """Nobody uses a LIVE record any more, and it was not changed."""
        if keeps and not record.empty:
            self._move(record, RecordState.KEPT, writing=False)
        else:
            self._give_up(record)

    def _drop(self, record: CachedRecord) -> bool:
        """Drop a record that was only prefetched. False if it leaves later, as it is still being written."""
        self.drops += 1
        if record.writing:
            self._move(record, RecordState.LEAVING, writing=True)
            return False
        with interrupts_deferred():
            if record.lease.transfer is not None:
                self._dropped.append(record.lease.transfer)
            self._give_up(record)
        return True

    def _add(self, record: CachedRecord) -> None:
        """To be called with interrupts deferred."""
        self.records.add(record)
        self._policy.acquired(record.key)

    def _give_up(self, record: CachedRecord, *, abandon: bool = False) -> None:
        """Give the buffer back. The memory goes to nobody else before the transfer in it is over."""
        with interrupts_deferred():
            self._policy.released(record.key)
            self.records.remove(record)
            (record.lease.abandon if abandon else record.lease.release)()

    # --- Transfers -------------------------------------------------------------------------------------------------

    def _read(self, key: RecordKey, lease: Lease) -> CachedRecord:
        assert self._store is not None
        record = CachedRecord(key, lease, RecordState.ARRIVING)
        with interrupts_deferred():  # From the start of the transfer the buffer is the record's.
            lease.transfer = transfer = self._store.read(key, lease)
            self._add(record)
        self._metrics.count_read(key, self._store.stored_bytes(key), transfer)
        return record

    def _write(self, record: CachedRecord, length: int | Callable[[], int], state: RecordState) -> None:
        with interrupts_deferred():  # From the start of the transfer a failure is lost data.
            if record.lease.transfer is not None:
                self.records.move(record, state, writing=True)
                self._writes.start_when_copied(record, length if callable(length) else lambda: length)
                return
            length_bytes = length() if callable(length) else length
            if self._store is not None:
                self._writes.start(record, length_bytes)
            self.records.move(record, state, writing=self._store is not None)

    def _start_write(self, record: CachedRecord) -> None:
        """If a device copies the record, wait until it has, and start writing it. See [Note: copies from a device].

        Raises:
            SwapIOError: the copy failed; or the write could not be started, which the next call tries again.
        """
        if record.finish is None:
            return
        try:
            self._writes.finish(record)
        except SwapIOError:
            if isinstance(record.lease.transfer, FailedTransfer) and not self._policy.rewrites:
                with interrupts_deferred():
                    record.finish = None
                    self.records.move(record, RecordState.FAILED, writing=False)
            raise
        if self._store is None:
            self._rest(record, record.state)

    def _see_written(self, record: CachedRecord) -> bool:
        """Wait for the write of `record`, and let the record leave if it was leaving.

        Returns:
            False if the write failed, so that it is FAILED; or if it could not be started.

        Raises:
            SwapIOError: it failed, and the policy rewrites.
        """
        try:
            self._start_write(record)
            if record.lease.transfer is None:
                return True  # Without a store it was only copied.
            record.lease.transfer.wait()
        except SwapIOError:
            if self._policy.rewrites:
                if record.finish is None:
                    self._policy.write_failed(record.key)
                    self._rest(record, record.state)
                raise
            if record.writing and record.finish is None:
                self._move(record, RecordState.FAILED, writing=False)
            return False
        if record.state is RecordState.LEAVING:
            self._give_up(record)
        else:
            self._rest(record, record.state)
        return True

    def _collect(self) -> None:
        """Start the oldest writes whose copy is done; give back the buffers of the oldest that are done.

        Raises:
            SwapIOError: a write failed, or a device. See [Note: failed writes].
        """
        check_devices()
        self._dropped.collect()
        if self.records.are_written or self._policy.rewrites:  # Then each write is seen by who waits for it.
            return
        failure: SwapIOError | None = None
        for record in list(itertools.islice(self.records.writes(), _LOOKS)):
            is_copied = record.finish is not None  # First: a thread may start the write, and replace the transfer.
            assert record.lease.transfer is not None
            if not record.lease.transfer.done():
                continue
            try:
                self._start_write(record) if is_copied else self._see_written(record)
            except SwapIOError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        if (failed := self.records.first(RecordState.FAILED)) is not None:
            assert failed.lease.transfer is not None
            failed.lease.transfer.wait()

    def _wait_for_write(self) -> bool:
        """Wait until a record has left, or failed to. False if none is leaving."""
        if (leaving := self.records.first(RecordState.LEAVING)) is None:
            return False
        assert leaving.lease.transfer is not None
        with self._metrics.span("swapper.wait_write", "wait_write_s"):
            self._start_write(leaving)
            leaving.lease.transfer.wait_quietly()
        self._see_written(leaving)
        return True
