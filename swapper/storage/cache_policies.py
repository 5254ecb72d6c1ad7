"""Policies of the cache, one for each kind of records: they say what stays in the pool, and what goes first.

[Note: streams] Belady's rule reads as little as possible, but in a cycle it reads several records in a row, and then
none for a while: the drive waits while what stayed is used, and the program while the others come. So where nothing but
reads and computation takes time (inference), the owner chooses records, as evenly spread as can be, of as many bytes as
do not fit. Those are streamed: each goes as soon as it was used. All others stay. No fewer bytes would do, and while
the ones that stay are used the next of the stream arrives.
What stays lies from the beginning of the pool on, without a gap as none of it goes; streams lie in what is left above,
by turns at its two ends. So of records that are at most half of that, of any lengths, two always have room in one
piece, and in the first round no stream lies where something is to stay. A record that is read ahead waits for a piece
that is long enough, and what was used goes to make one: to join pieces costs time for each page, the huge pages, and
the registration of the memory. A stream of records of 23 MB through 256 MiB lost a quarter of its time to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import TYPE_CHECKING, Protocol

from swapper.sizes import PAGE_BYTES, round_up
from swapper.storage.access_order import Order
from swapper.storage.cached_records import CachedRecord, RecordState
from swapper.storage.store import RecordKey

if TYPE_CHECKING:
    from swapper.storage.cache import RecordCache

__all__ = ["Contents", "CyclicPolicy", "KeptPolicy", "Policy", "ScanPolicy"]


_BUSY_RECORDS = 4
"""With so many on their way a drive has enough to do."""


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

    def joins_pieces(self, cache: RecordCache, length_bytes: int) -> bool:
        """Return True if free pieces of the pool are joined for a record whenever no single one is long enough.

        Else they are only if it is needed now, and nothing that is in between can go.
        """
        return True

    def is_beyond_share(self, key: RecordKey, length_bytes: int) -> bool:
        """Return True if the record's kind holds so much that another `length_bytes` are not to be read ahead."""
        return False

    def is_another_to_go(self, cache: RecordCache, key: RecordKey, length_bytes: int) -> bool:
        """Return True if another record of its kind has to go, and can, before the record comes that is needed now."""
        return False

    def place_for(self, cache: RecordCache, key: RecordKey) -> tuple[bool, int]:
        """Tell if the record is to lie as high in the pool as it can be, and what it must not lie before, in bytes."""
        return False, 0

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

    def joins_pieces(self, cache: RecordCache, length_bytes: int) -> bool:
        """Only while few are on their way: joining takes longer than waiting for what leaves, if the drive is busy."""
        return cache.records.bytes_of(RecordState.ARRIVING) < _BUSY_RECORDS * length_bytes

    def victim(self, cache: RecordCache, *, idle_only: bool) -> CachedRecord | None:
        """The record staged last, which is needed last. Resident records come after all else has gone.

        They go too if they must, as where a pool in pieces cannot be joined.
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

    @property
    def late(self) -> int:
        """Not 0 while it is to be written only if nothing else can go."""

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

    Attributes:
        streamed: numbers of records that go as soon as they were used, before any other; those beside them stay. Empty:
            those stay that are needed soonest. See [Note: streams].
    """

    rewrites = True
    evicts_own = True
    streamed: Set[int] = frozenset()

    def __init__(self, order: Order, contents: Sequence[Contents]) -> None:
        self._order = order
        self._contents = contents
        self._streamed_here: set[int] = set()  # those of `streamed` that hold a buffer
        self._streamed_bytes = 0  # the most that they hold at once, unless one alone is more

    def keeps(self, key: RecordKey) -> bool:
        """All."""
        return True

    def victim(self, cache: RecordCache, *, idle_only: bool) -> CachedRecord | None:
        """The record that is needed last among those that may go; first of the streamed ones."""
        streamed = self._last_needed(cache, idle_only, among=self._streams()) if self.streamed else None
        return streamed or self._last_needed(cache, idle_only)

    def spare(self, cache: RecordCache) -> CachedRecord | None:
        """The record that is needed last, if it is needed after what `AccessOrder.worth` says.

        Of streamed ones that which is needed last, if it is needed after the missing one.
        """
        if not self.streamed:
            return self._last_needed(cache, True, beyond=self._order.worth())
        missing = self._order.missing()
        beyond = 0 if missing is None else self._order.distance(missing)
        return self._last_needed(cache, True, beyond=beyond, among=self._streams())

    def _streams(self) -> list[int]:
        """The streamed records that hold a buffer, those that are needed last first."""
        return sorted(self._streamed_here, key=self._order.distance, reverse=True)

    def _last_needed(
        self, cache: RecordCache, idle_only: bool, beyond: int = -1, among: Iterable[int] | None = None
    ) -> CachedRecord | None:
        for number in self._order.last_needed() if among is None else among:
            if beyond >= 0 and self._order.distance(number) <= beyond:
                return None
            contents = self._contents[number]
            record = cache.records.get(contents.key)
            if record is None or contents.pinned or record.state is RecordState.LIVE:
                continue
            if record.state is RecordState.KEPT:
                transfer = record.lease.transfer
                if idle_only and (contents.late or (transfer is not None and not transfer.done())):
                    continue
                if contents.viewed():
                    continue
            return record
        return None

    def acquired(self, key: RecordKey) -> None:
        """Note it in the order."""
        self._order.hold(key.number, fixed=self._contents[key.number].resident)
        if key.number in self.streamed:
            self._streamed_here.add(key.number)

    def before_eviction(self, cache: RecordCache, record: CachedRecord) -> None:
        """Let the owner write it."""
        self._contents[record.key.number].write_newer(cache)

    def released(self, key: RecordKey) -> None:
        """Note it in the order, and tell the owner."""
        self._contents[key.number].evicted()
        self._order.drop(key.number)
        self._streamed_here.discard(key.number)

    def write_failed(self, key: RecordKey) -> None:
        """Tell the owner."""
        self._contents[key.number].write_failed()

    def is_viewed(self, key: RecordKey) -> bool:
        """Ask the owner."""
        return self._contents[key.number].viewed()

    # --- [Note: streams] -------------------------------------------------------------------------------------------

    def stream(self, numbers: Set[int], length_bytes: int) -> None:
        """Stream these records, which hold no buffer yet, through so many bytes at the end of the pool."""
        self.streamed, self._streamed_bytes = numbers, length_bytes

    def joins_pieces(self, cache: RecordCache, length_bytes: int) -> bool:
        """Not while some are streamed."""
        return not self.streamed

    def is_beyond_share(self, key: RecordKey, length_bytes: int) -> bool:
        """Return True if streamed records would take room of those that stay."""
        if key.number not in self.streamed or not self._streamed_here:
            return False
        here_bytes = sum(self._contents[number].length_bytes for number in self._streamed_here)
        return here_bytes + length_bytes > self._streamed_bytes

    def is_another_to_go(self, cache: RecordCache, key: RecordKey, length_bytes: int) -> bool:
        """Return True as long as there is one: what is in use at once may be more than the streams' part."""
        return self.is_beyond_share(key, length_bytes) and (
            self._last_needed(cache, False, among=self._streams()) is not None
        )

    def place_for(self, cache: RecordCache, key: RecordKey) -> tuple[bool, int]:
        """For streams the end of the pool if there is room, else the beginning of their part, unless that is full."""
        if key.number not in self.streamed or self.is_beyond_share(key, self._contents[key.number].length_bytes):
            return False, 0
        capacity_bytes, top_bytes = cache.pool.capacity_bytes, 0
        for record in map(cache.records.get, (self._contents[number].key for number in self._streamed_here)):
            if record is not None:
                top_bytes = max(top_bytes, record.lease.offset_bytes + record.lease.length_bytes)
        high = capacity_bytes - top_bytes >= self._contents[key.number].length_bytes
        return high, round_up(max(0, capacity_bytes - self._streamed_bytes), PAGE_BYTES)
