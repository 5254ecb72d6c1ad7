"""`RoundPolicy`: what stays in the pool of records that are used round and round, and grow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swapper.storage.cache_policies import Policy
from swapper.storage.cached_records import CachedRecord, RecordState
from swapper.storage.store import RecordKey

if TYPE_CHECKING:
    from swapper.storage.cache import RecordCache

__all__ = ["RoundPolicy"]


class RoundPolicy(Policy):
    """For records that are used in one order, round and round, while new ones come: what was used last goes first.

    That is Belady's rule where a round uses each record once: what was used last is needed last.

    Args:
        limit_bytes: the most of the pool that records may hold. Below that others give up what they only keep.

    Attributes:
        lengths_bytes: of the buffers of all records; to be noted before a record is used.
        held_bytes, peak_bytes: of buffers that records hold now; the most ever.
        unwritten: records that are newer than what is stored, and the bytes to write of each. They are written when
            they must go.
        age_allowed: a record goes for one that is read ahead if it was used at most so many uses ago.
        failure: the error of the first write that failed.
    """

    rewrites = True

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.lengths_bytes: dict[RecordKey, int] = {}
        self.held_bytes = self.peak_bytes = 0
        self._longest_bytes = 0
        self.unwritten: dict[RecordKey, int] = {}
        self.age_allowed = 0
        self.failure: OSError | None = None
        self._uses = 0
        self._used: dict[RecordKey, int] = {}  # records that hold a buffer, and when they were used, the last one last

    def keeps(self, key: RecordKey) -> bool:
        """All, as long as there is room."""
        return True

    def use(self, key: RecordKey) -> None:
        """Note that a record that holds a buffer is used now."""
        self._uses += 1
        if self._used.pop(key, None) is not None:
            self._used[key] = self._uses

    def victim(self, cache: RecordCache, *, idle_only: bool) -> CachedRecord | None:
        """The record used last that is written; then the one whose write began first; then what was read ahead."""
        unwritten = None
        for key in reversed(self._used):
            record = cache.records.get(key)
            if record is None or record.state is not RecordState.KEPT:
                continue
            if key in self.unwritten:
                unwritten = unwritten or record
            elif record.lease.transfer is None or record.lease.transfer.done():
                return record
        if idle_only:
            return None
        writing = next((record for record in cache.records.writes() if record.state is RecordState.KEPT), None)
        return writing or unwritten or cache.records.last(RecordState.ARRIVING)

    def spare(self, cache: RecordCache) -> CachedRecord | None:
        """The record used last, if it was used so lately that it is needed after the one that is read ahead."""
        for key, used in reversed(self._used.items()):
            record = cache.records.get(key)
            if self._uses - used > self.age_allowed:
                return None
            if record is None or record.state is not RecordState.KEPT or key in self.unwritten:
                continue
            if record.lease.transfer is None or record.lease.transfer.done():
                return record
        return None

    def acquired(self, key: RecordKey) -> None:
        """Count its buffer."""
        self._used[key] = self._uses
        self._longest_bytes = max(self._longest_bytes, self.lengths_bytes[key])
        self._hold(self.lengths_bytes[key])

    def released(self, key: RecordKey) -> None:
        """Forget it."""
        if self._used.pop(key, None) is not None:
            self._hold(-self.lengths_bytes[key])

    def _hold(self, change_bytes: int) -> None:
        self.held_bytes += change_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        self.evicts_own = self.held_bytes + self._longest_bytes > self.limit_bytes

    def before_eviction(self, cache: RecordCache, record: CachedRecord) -> None:
        """Write it if it is newer than what is stored."""
        if (length_bytes := self.unwritten.get(record.key)) is not None:
            cache.write(record.key, length_bytes)
            del self.unwritten[record.key]

    def write_failed(self, key: RecordKey) -> None:
        """Note it: what is stored of the record is of no use."""
        self.failure = self.failure or OSError("a write of keys and values failed")
