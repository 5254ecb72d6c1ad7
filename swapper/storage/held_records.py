"""The records that hold a buffer of the pool, by key and by place, so that nothing has to look at all of them.

[Note: one owner] A record's place, the order within a place, the bytes of each place and the list of writes in flight
are one fact. Only `HeldRecords` changes it, in statements between which the interpreter raises no Ctrl-C: it does so
when a function is entered, after a call and where a loop goes back, and there is none of these from the first
assignment to the last.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field

from swapper.storage.buffers import Lease
from swapper.storage.store import RecordKey

__all__ = ["Held", "HeldRecords", "Place"]


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
    FAILED = enum.auto()
    """Its write failed. The buffer and the transfer stay until the record is discarded."""


@dataclass(eq=False, slots=True)
class _Shelf:
    """The records of one place, those that came to it first in front, and the bytes of their buffers."""

    records: dict[RecordKey, Held] = field(default_factory=dict)
    length_bytes: int = 0


@dataclass(eq=False, slots=True)
class Held:
    """A record that holds a buffer. Only `HeldRecords` changes `place` and `writing`.

    Attributes:
        key, lease: whose buffer, and the buffer. The transfer in flight is in the lease.
        place: see `Place`.
        writing: the lease's transfer is a write, or the copy before it: its failure means lost data, not a read to
            repeat.
        copied_bytes: how much is to be written when a device has copied it, which is the lease's transfer; else 0.
        empty: a new buffer of undefined content, as nothing is stored yet.
    """

    key: RecordKey
    lease: Lease
    place: Place
    writing: bool = False
    copied_bytes: int = 0
    empty: bool = False


class HeldRecords:
    """All records of one pipeline that hold a buffer. Not thread-safe. See [Note: one owner].

    Every method takes the same time however many records there are, but for `of_place`, which walks those of one place.

    Attributes:
        length_bytes: of all buffers.
    """

    def __init__(self) -> None:
        self.length_bytes = 0
        self._all: dict[RecordKey, Held] = {}
        self._shelves = {place: _Shelf() for place in Place}
        self._writing: dict[RecordKey, Held] = {}  # the write that was started first in front

    def __len__(self) -> int:
        return len(self._all)

    def get(self, key: RecordKey) -> Held | None:
        """The record, if it holds a buffer."""
        return self._all.get(key)

    def first(self, place: Place) -> Held | None:
        """The record of `place` that came to it first."""
        return next(iter(self._shelves[place].records.values()), None)

    def last(self, place: Place) -> Held | None:
        """The record of `place` that came to it last."""
        return next(reversed(self._shelves[place].records.values()), None)

    def of_place(self, place: Place) -> list[Held]:
        """Those of `place`, in the order in which they came to it."""
        return list(self._shelves[place].records.values())

    def bytes_of(self, place: Place) -> int:
        """Bytes of the buffers of `place`."""
        return self._shelves[place].length_bytes

    def writes(self) -> Iterator[Held]:
        """Those whose write is in flight, or over and not yet seen. No record may be changed while this is iterated."""
        return iter(self._writing.values())

    def add(self, held: Held) -> None:
        """`held`, which is new, holds its buffer from now on."""
        shelf, key, length_bytes = self._shelves[held.place], held.key, held.lease.length_bytes
        assert key not in self._all, key
        # From here on without a call: see [Note: one owner].
        shelf.records[key] = self._all[key] = held
        shelf.length_bytes += length_bytes
        self.length_bytes += length_bytes

    def move(self, held: Held, place: Place, *, writing: bool) -> None:
        """Change the place of `held`; and whether its lease's transfer is a write that may fail yet."""
        former, shelf, key = self._shelves[held.place], self._shelves[place], held.key
        length_bytes = held.lease.length_bytes
        # From here on without a call: see [Note: one owner].
        del former.records[key]
        former.length_bytes -= length_bytes
        shelf.records[key] = held
        shelf.length_bytes += length_bytes
        held.place = place
        if writing and not held.writing:
            self._writing[key] = held
        elif held.writing and not writing:
            del self._writing[key]
        held.writing = writing

    def end_write(self, held: Held) -> None:
        """The write of `held` is over; the record stays where it is."""
        del self._writing[held.key]
        held.writing = False

    def remove(self, held: Held) -> None:
        """`held` holds no buffer any more: its lease is the caller's to release."""
        former, key, length_bytes = self._shelves[held.place], held.key, held.lease.length_bytes
        # From here on without a call: see [Note: one owner].
        del former.records[key]
        former.length_bytes -= length_bytes
        self.length_bytes -= length_bytes
        if held.writing:
            del self._writing[key]
        del self._all[key]
        held.writing = False
