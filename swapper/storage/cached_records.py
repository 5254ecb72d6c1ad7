"""The records that hold a buffer of the pool, by key and by state, so that nothing has to look at all of them.

[Note: one owner] A record's state, the order within a state, the bytes of each state and the list of writes in flight
are one fact. Only `CachedRecords` changes it. Its caller defers interrupts, since a buffer changes hands with the fact.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from swapper.io.devices import Copy
from swapper.storage.buffers import Lease
from swapper.storage.store import RecordKey

__all__ = ["CachedRecord", "CachedRecords", "RecordState"]


class RecordState(enum.Enum):
    """The state of a record that is not only on disk. In each state it holds one pool buffer."""

    ARRIVING = enum.auto()
    """Being read (or still being written by the step before, and wanted again). Clean."""
    LIVE = enum.auto()
    """In use between `take` and `put`, by an owner who may change the buffer."""
    LEAVING = enum.auto()
    """Being written. The buffer goes back to the pool when that is done."""
    KEPT = enum.auto()
    """Its bytes are there for whoever asks next, and may be being written. The policy says when the buffer may go."""
    FAILED = enum.auto()
    """Its write failed. The buffer and the transfer stay until the record is discarded."""

    __hash__ = object.__hash__  # Members are few and each is one object. That of `Enum` is a call of Python code.


@dataclass(eq=False, slots=True)
class CachedRecord:
    """A record that holds a buffer. Only `CachedRecords` changes `state` and `writing`.

    Attributes:
        key, lease: whose buffer, and the buffer. The transfer in flight is in the lease.
        state: see `RecordState`.
        writing: the lease's transfer is a write, or the copy before it: its failure means lost data, not a read to
            repeat.
        finish: what is to be called when a device has copied the record, which is the lease's transfer: it gives the
            bytes to write. None if no device does.
        empty: a new buffer of undefined content, as nothing is stored yet.
    """

    key: RecordKey
    lease: Lease
    state: RecordState
    writing: bool = False
    finish: Callable[[], int] | None = None
    empty: bool = False

    @property
    def is_copied(self) -> bool:
        """True if a device copies from or into the buffer, or has, and nothing is to be written after it."""
        return not self.writing and isinstance(self.lease.transfer, Copy)

    @property
    def is_at_hand(self) -> bool:
        """True if it can be taken without a wait."""
        if self.state is RecordState.LIVE or self.finish is not None:
            return False
        return self.lease.transfer is None or self.lease.transfer.done()


@dataclass(eq=False, slots=True)
class _Shelf:
    """The records of one state, those that came to it first in front, and the bytes of their buffers."""

    records: dict[RecordKey, CachedRecord] = field(default_factory=dict)
    length_bytes: int = 0

    def put(self, record: CachedRecord) -> None:
        self.records[record.key] = record
        self.length_bytes += record.lease.length_bytes

    def take(self, record: CachedRecord) -> None:
        del self.records[record.key]
        self.length_bytes -= record.lease.length_bytes


class CachedRecords:
    """All records of one cache that hold a buffer. Not thread-safe. See [Note: one owner].

    Every method takes the same time however many records there are, but for `of_state`, which walks those of one state.

    Attributes:
        length_bytes: bytes of all buffers.
    """

    def __init__(self) -> None:
        self.length_bytes = 0
        self._all: dict[RecordKey, CachedRecord] = {}
        self._shelves = {state: _Shelf() for state in RecordState}
        self._writing: dict[RecordKey, CachedRecord] = {}  # the write that was started first in front

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[CachedRecord]:
        return iter(self._all.values())

    def get(self, key: RecordKey) -> CachedRecord | None:
        """The record, if it holds a buffer."""
        return self._all.get(key)

    def first(self, state: RecordState) -> CachedRecord | None:
        """The record of `state` that came to it first."""
        return next(iter(self._shelves[state].records.values()), None)

    def last(self, state: RecordState) -> CachedRecord | None:
        """The record of `state` that came to it last."""
        return next(reversed(self._shelves[state].records.values()), None)

    def of_state(self, state: RecordState) -> list[CachedRecord]:
        """Return the records of `state`, in the order in which they came to it."""
        return list(self._shelves[state].records.values())

    def bytes_of(self, state: RecordState) -> int:
        """Bytes of the buffers of `state`."""
        return self._shelves[state].length_bytes

    @property
    def are_written(self) -> bool:
        """True if no write is in flight, or over and not yet seen, and none has failed."""
        return not self._writing and not self._shelves[RecordState.FAILED].records

    def writes(self) -> Iterator[CachedRecord]:
        """Iterate over those with a write in flight, or over and not yet seen. No record may be changed meanwhile."""
        return iter(self._writing.values())

    def add(self, record: CachedRecord) -> None:
        """`record`, which is new, holds its buffer from now on. To be called with interrupts deferred."""
        assert record.key not in self._all, record.key
        self._all[record.key] = record
        self.length_bytes += record.lease.length_bytes
        self._shelves[record.state].put(record)

    def move(self, record: CachedRecord, state: RecordState, *, writing: bool) -> None:
        """Change the state of `record`; and whether its lease's transfer is a write that may fail yet. As for `add`."""
        self._shelves[record.state].take(record)
        record.state, record.writing = state, writing
        self._shelves[state].put(record)
        if writing:
            self._writing.setdefault(record.key, record)
        else:
            self._writing.pop(record.key, None)

    def remove(self, record: CachedRecord) -> None:
        """`record` holds no buffer any more: its lease is the caller's to release. As for `add`."""
        del self._all[record.key]
        self.length_bytes -= record.lease.length_bytes
        self._shelves[record.state].take(record)
        self._writing.pop(record.key, None)
        record.writing = False
