"""Policies of the cache, one for each kind of records: they say what stays in the pool, and what goes first.

[Note: pools in pieces] A record that is in use cannot be moved, and one in the middle of a short pool may leave no
piece that is long enough for the next, though their sum is what the pool must hold. So in pools of a few records
`CyclicPolicy` chooses a buffer from the end of the pool where less is in use, and what lies in between goes first. A
record that is in memory and lies badly is evicted, and read again to a better location, before it is used. Where that
was not enough for several that are used at once, those that have come go again, and come side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from swapper.storage.access_order import AccessOrder
from swapper.storage.buffers import Lease
from swapper.storage.cached_records import CachedRecord, RecordState
from swapper.storage.store import RecordKey

if TYPE_CHECKING:
    from swapper.storage.cache import RecordCache

__all__ = ["Contents", "CyclicPolicy", "KeptPolicy", "Policy", "ScanPolicy"]

_ROOMY = 5
"""A pool of so many of the longest record has a piece for another, wherever two that are in use lie."""


class Policy:
    """Decides for the records of one cache. The cache calls it under its lock.

    Attributes:
        rewrites: a record whose write failed stays as it is, and is written again; else it is FAILED.
        evicts_own: for a new record the cache's own go first, before the pool asks others.
    """

    rewrites = False
    evicts_own = False

    def keeps(self, key: RecordKey) -> bool:
        """Return True if the record stays in the pool when nobody uses it any more."""
        raise NotImplementedError

    def victim(self, cache: RecordCache, *, idle_only: bool) -> CachedRecord | None:
        """The record that is to be evicted first, ARRIVING or KEPT; with `idle_only` one that nothing is waited for."""
        raise NotImplementedError

    def spare(self, cache: RecordCache) -> CachedRecord | None:
        """The record that is worth less than the one that is prefetched now; None if there is no such record."""
        return None

    def prefers_high(self, cache: RecordCache, key: RecordKey) -> bool:
        """Return True if the record is to lie at the high end of the pool."""
        return False

    def splits_pool(self, cache: RecordCache, key: RecordKey, lease: Lease) -> bool:
        """Return True if a record that is used in `lease` leaves no piece for the next. See [Note: pools in pieces]."""
        return False

    def refuse(self, cache: RecordCache, length_bytes: int) -> None:
        """There is no victim, and another `length_bytes` are beyond the cache's limit: raise, or let it be."""

    def acquired(self, key: RecordKey) -> None:
        """The record holds a buffer now."""

    def before_eviction(self, cache: RecordCache, record: CachedRecord) -> None:
        """Start writing a KEPT record if it is newer than what is stored."""

    def released(self, key: RecordKey) -> None:
        """The record is about to give its buffer up."""

    def write_failed(self, key: RecordKey) -> None:
        """With `rewrites`: what is stored of the record is not what is in memory."""

    def is_viewed(self, key: RecordKey) -> bool:
        """Return True if tensors that are not the owner's share the memory of a KEPT record."""
        return False


class ScanPolicy(Policy):
    """For records that are used in one order, round and round: a fixed set stays, the others leave after use.

    Args:
        resident: the records that stay.
    """

    def __init__(self, resident: Iterable[RecordKey] = ()) -> None:
        self._resident = frozenset(resident)

    def keeps(self, key: RecordKey) -> bool:
        """The resident ones."""
        return key in self._resident

    def victim(self, cache: RecordCache, *, idle_only: bool) -> CachedRecord | None:
        """The record staged last, which is needed last. Resident records come after all else has gone.

        They go too if they must: buffers that stay can leave no piece of the pool that is long enough.
        """
        staged = cache.records.last(RecordState.ARRIVING)
        return staged if staged is not None or idle_only else cache.records.first(RecordState.KEPT)


class KeptPolicy(Policy):
    """For records that have no other copy: all stay."""

    def keeps(self, key: RecordKey) -> bool:
        """All."""
        return True

    def victim(self, cache: RecordCache, *, idle_only: bool) -> CachedRecord | None:
        """None."""
        return None


class Contents(Protocol):
    """The owner's side of a record, for `CyclicPolicy`."""

    @property
    def key(self) -> RecordKey:
        """Of the record."""

    @property
    def length_bytes(self) -> int:
        """Of a buffer for it."""

    @property
    def resident(self) -> bool:
        """True if it is never evicted."""

    @property
    def pinned(self) -> bool:
        """True while a use of it is not over, so that it stays where it is."""

    def viewed(self) -> bool:
        """Return True if tensors that are not the owner's share the memory of its buffer."""

    def write_newer(self, cache: RecordCache) -> None:
        """Start writing the record, which is KEPT, if it is newer than what is stored."""

    def write_failed(self) -> None:
        """Note that the stored copy is older than the one in memory."""

    def evicted(self) -> None:
        """The buffer is given up."""


class CyclicPolicy(Policy):
    """For records that a program uses in an order that it repeats: those stay that are needed soonest (Belady).

    Args:
        order: of their uses, which the owner notes in it.
        contents: of the records, by number; may grow.
    """

    rewrites = True
    evicts_own = True

    def __init__(self, order: AccessOrder, contents: Sequence[Contents]) -> None:
        self._order = order
        self._contents = contents
        self._longest_bytes = 0
        self._measured = 0  # contents of which the length is in that

    def keeps(self, key: RecordKey) -> bool:
        """All."""
        return True

    def victim(self, cache: RecordCache, *, idle_only: bool) -> CachedRecord | None:
        """The record that is needed last among those that may go."""
        return self._last_needed(cache, idle_only)

    def spare(self, cache: RecordCache) -> CachedRecord | None:
        """The record that is needed last, if it is needed after what `AccessOrder.worth` says."""
        return self._last_needed(cache, True, beyond=self._order.worth())

    def _last_needed(self, cache: RecordCache, idle_only: bool, beyond: int = -1) -> CachedRecord | None:
        for number in self._order.last_needed():
            if beyond >= 0 and self._order.distance(number) <= beyond:
                return None
            contents = self._contents[number]
            record = cache.records.get(contents.key)
            if record is None or contents.pinned or record.state is RecordState.LIVE:
                continue
            if record.state is RecordState.KEPT:
                transfer = record.lease.transfer
                if idle_only and transfer is not None and not transfer.done():
                    continue
                if contents.viewed():
                    continue
            return record
        return None

    def acquired(self, key: RecordKey) -> None:
        """Note it in the order."""
        self._order.hold(key.number, fixed=self._contents[key.number].resident)

    def before_eviction(self, cache: RecordCache, record: CachedRecord) -> None:
        """Let the owner write it."""
        self._contents[record.key.number].write_newer(cache)

    def released(self, key: RecordKey) -> None:
        """Note it in the order, and tell the owner."""
        self._contents[key.number].evicted()
        self._order.drop(key.number)

    def write_failed(self, key: RecordKey) -> None:
        """Tell the owner."""
        self._contents[key.number].write_failed()

    def is_viewed(self, key: RecordKey) -> bool:
        """Ask the owner."""
        return self._contents[key.number].viewed()

    # --- [Note: pools in pieces] -----------------------------------------------------------------------------------

    def prefers_high(self, cache: RecordCache, key: RecordKey) -> bool:
        """Return True if most of what is in use is in the lower half of the pool."""
        if self._is_roomy(cache):
            return False
        middle = cache.pool.capacity_bytes // 2
        used = self._in_use(cache, key)
        return sum(stop - start if stop <= middle else start - stop for start, stop in used) > 0

    def splits_pool(self, cache: RecordCache, key: RecordKey, lease: Lease) -> bool:
        """Return True if the largest record that is not pinned has no piece left, now or when all others have gone."""
        if self._is_roomy(cache):
            return False
        capacity_bytes = cache.pool.capacity_bytes
        start, stop = lease.offset_bytes, lease.offset_bytes + lease.length_bytes
        others = (other for other in self._contents if other.key != key and not other.pinned)
        needed = max((other.length_bytes for other in others), default=0)
        if max(start, capacity_bytes - stop) < needed:  # Even when no other is in use any more.
            return True
        used = sorted([*self._in_use(cache, key), (start, stop)])
        if cache.limit_bytes is not None and sum(stop - start for start, stop in used) + needed > cache.limit_bytes:
            return False  # There is no room for it now, wherever they lie.
        edges = [0, *(edge for span in used for edge in span), capacity_bytes]
        return max(stop - start for start, stop in zip(edges[::2], edges[1::2], strict=True)) < needed

    def _is_roomy(self, cache: RecordCache) -> bool:
        if self._measured < len(self._contents):
            new = self._contents[self._measured :]
            self._longest_bytes = max(self._longest_bytes, *(each.length_bytes for each in new))
            self._measured = len(self._contents)
        return cache.pool.capacity_bytes >= _ROOMY * self._longest_bytes

    def _in_use(self, cache: RecordCache, key: RecordKey) -> list[tuple[int, int]]:
        """The spans of the pool that records in use take, beside `key`."""
        spans = []
        for record in cache.records:
            contents = self._contents[record.key.number]
            if record.key != key and (record.state is RecordState.LIVE or contents.pinned or contents.viewed()):
                spans.append((record.lease.offset_bytes, record.lease.offset_bytes + record.lease.length_bytes))
        return spans
