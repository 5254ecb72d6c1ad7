"""The records that hold a buffer of the pool, by key and by state, so that nothing has to look at all of them.

[Note: one owner] A record's state, the order within a state, the bytes of each state and the list of writes in flight
are one fact. Only `CachedRecords` changes it, in statements between which the interpreter raises no Ctrl-C: it does so
when a function is entered, after a call and where a loop goes back, and there is none of these from the first
assignment to the last.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field

from swapper.storage.buffers import Lease
from swapper.storage.store import RecordKey

__all__ = ["CachedRecord", "CachedRecords", "RecordState"]


class RecordState(enum.Enum):
    """Where a record is that is not only on disk. Each holds one pool buffer."""

    ARRIVING = enum.auto()
    """Being read (or still being written by the step before, and wanted again). Clean."""
    LIVE = enum.auto()
    """In use between `take` and `put`; the only state where the buffer may be changed."""
    LEAVING = enum.auto()
    """Being written. The buffer goes back to the pool when that is done."""
    KEPT = enum.auto()
    """Resident: written through, or never stored at all. The buffer stays."""
    FAILED = enum.auto()
    """Its write failed. The buffer and the transfer stay until the record is discarded."""


@dataclass(eq=False, slots=True)
class _Shelf:
    """The records of one state, those that came to it first in front, and the bytes of their buffers."""

    records: dict[RecordKey, CachedRecord] = field(default_factory=dict)
    length_bytes: int = 0


@dataclass(eq=False, slots=True)
class CachedRecord:
    """A record that holds a buffer. Only `CachedRecords` changes `state` and `writing`.

    Attributes:
        key, lease: whose buffer, and the buffer. The transfer in flight is in the lease.
        state: see `RecordState`.
        writing: the lease's transfer is a write, or the copy before it: its failure means lost data, not a read to
            repeat.
        copied_bytes: how much is to be written when a device has copied it, which is the lease's transfer; else 0.
        empty: a new buffer of undefined content, as nothing is stored yet.
    """

    key: RecordKey
    lease: Lease
    state: RecordState
    writing: bool = False
    copied_bytes: int = 0
    empty: bool = False


class CachedRecords:
    """All records of one cache that hold a buffer. Not thread-safe. See [Note: one owner].

    Every method takes the same time however many records there are, but for `of_state`, which walks those of one state.

    Attributes:
        length_bytes: of all buffers.
    """

    def __init__(self) -> None:
        self.length_bytes = 0
        self._all: dict[RecordKey, CachedRecord] = {}
        self._shelves = {state: _Shelf() for state in RecordState}
        self._writing: dict[RecordKey, CachedRecord] = {}  # the write that was started first in front

    def __len__(self) -> int:
        return len(self._all)

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
        """Those of `state`, in the order in which they came to it."""
        return list(self._shelves[state].records.values())

    def bytes_of(self, state: RecordState) -> int:
        """Bytes of the buffers of `state`."""
        return self._shelves[state].length_bytes

    def writes(self) -> Iterator[CachedRecord]:
        """Those whose write is in flight, or over and not yet seen. No record may be changed while this is iterated."""
        return iter(self._writing.values())

    def add(self, held: CachedRecord) -> None:
        """`held`, which is new, holds its buffer from now on."""
        shelf, key, length_bytes = self._shelves[held.state], held.key, held.lease.length_bytes
        assert key not in self._all, key
        # From here on without a call: see [Note: one owner].
        shelf.records[key] = self._all[key] = held
        shelf.length_bytes += length_bytes
        self.length_bytes += length_bytes

    def move(self, held: CachedRecord, state: RecordState, *, writing: bool) -> None:
        """Change the state of `held`; and whether its lease's transfer is a write that may fail yet."""
        former, shelf, key = self._shelves[held.state], self._shelves[state], held.key
        length_bytes = held.lease.length_bytes
        # From here on without a call: see [Note: one owner].
        del former.records[key]
        former.length_bytes -= length_bytes
        shelf.records[key] = held
        shelf.length_bytes += length_bytes
        held.state = state
        if writing and not held.writing:
            self._writing[key] = held
        elif held.writing and not writing:
            del self._writing[key]
        held.writing = writing

    def end_write(self, held: CachedRecord) -> None:
        """The write of `held` is over; the record stays as it is."""
        del self._writing[held.key]
        held.writing = False

    def remove(self, held: CachedRecord) -> None:
        """`held` holds no buffer any more: its lease is the caller's to release."""
        former, key, length_bytes = self._shelves[held.state], held.key, held.lease.length_bytes
        # From here on without a call: see [Note: one owner].
        del former.records[key]
        former.length_bytes -= length_bytes
        self.length_bytes -= length_bytes
        if held.writing:
            del self._writing[key]
        del self._all[key]
        held.writing = False
