"""`DirectRecords`: records of parameters that go between the drive and the device without the pool, by cuFile.

[Note: staging] A record is read whole into a buffer of a `DevicePool`, the staging memory. From there each parameter is
copied to its own tensor, within the device, on the stream of copies up; what was changed goes back the same way:

    drive  <--- cuFile --->  staging: the record as the file has it  <--- copy --->  one tensor for each parameter

The read begins when the buffer has nothing in flight any more, and the copy when the read is over, for which the host
waits if the record was not read ahead. The copy is then the transfer of the buffer's lease, which is given back at once
and goes to another record when the copy is over. The other way the copy down is the transfer, and the write begins when
that is over, by a thread: see `RecordWrites`. The header is copied just before it, on a stream for that alone. So the
staging memory holds what is arriving, what is copied, and what is being written; and, until the room is needed, what
has been written.

[Note: two ways] The newest copy of a record that is not on the device is its buffer here, or the pool's, or its file.
It is never in both: a step on the CPU, or who reads records on the host, has it in the pool, and before it comes there
it leaves here, written. What the pool has comes from there, and goes down to there. While values are on the device, a
buffer that stays here, as it is being written, may be older; nobody looks at it before they have come down or gone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swapper.io.devices import DeviceCopies
from swapper.metrics import Metrics
from swapper.parameter.cache import Held
from swapper.storage.access_order import Order
from swapper.storage.buffers import Lease
from swapper.storage.cache import RecordCache
from swapper.storage.cache_policies import CyclicPolicy
from swapper.storage.device_pool import DevicePool
from swapper.storage.spans import RecordStore
from swapper.storage.store import RecordKey

__all__ = ["DirectRecords"]


@dataclass(eq=False, slots=True)
class _Staged:
    """A record as the staging memory sees it. The `Contents` of its policy."""

    held: Held
    aside: DeviceCopies
    """For its header."""
    pinned: bool = False
    """The buffer is needed by the call that is being made."""
    newer: bool = False
    """The buffer is newer than the file, and is not being written: that has failed."""

    resident = False
    late = 0

    @property
    def key(self) -> RecordKey:
        """Of the record."""
        return self.held.key

    @property
    def length_bytes(self) -> int:
        """Of a buffer for it: as the file."""
        return self.held.plan.file_bytes

    def viewed(self) -> bool:
        """False: nobody is given views of the buffer."""
        return False

    def write(self, cache: RecordCache, lease: Lease) -> None:
        """Write `lease`, which has the newest values but for the header, or will when its transfer is over."""
        cache.write(self.key, functools.partial(self._complete, lease))
        self.newer = False

    def _complete(self, lease: Lease) -> int:
        """As `RecordCache.write` wants it: have `lease` as the file is to be. Returns its bytes. In any thread."""
        header = torch.frombuffer(bytearray(self.held.plan.layout.header(0)), dtype=torch.uint8)
        copied = self.aside.run(lambda: lease.tensor[: len(header)].copy_(header))
        if copied is not None:
            copied.wait()
        return self.length_bytes

    def write_newer(self, cache: RecordCache) -> None:
        """Start writing the record again, which is KEPT, if that has failed."""
        if self.newer and (record := cache.records.get(self.key)) is not None and not record.writing:
            self.write(cache, record.lease)

    def write_failed(self) -> None:
        """The values are still here, and will be written again."""
        self.newer = True

    def evicted(self) -> None:
        """Do nothing: nothing refers to the buffer."""


class DirectRecords:
    """Reads records into device memory, ahead where there is room, and writes them. See [Note: staging].

    Args:
        device: that the parameters are on.
        pool: the staging memory; room for at least two of the largest record.
        store: has handles for `pool`.
        metrics: counts reads and waits.
        records: by number; all are stored.
        order: in which they are expected to be used on the device.
        owner: as of the pool's cache: what has a finalizer that ends this.

    Attributes:
        cache: of the staging memory.

    Not thread-safe: called under the lock of the pool's cache.
    """

    def __init__(
        self,
        device: torch.device,
        pool: DevicePool,
        store: RecordStore,
        metrics: Metrics,
        records: Sequence[Held],
        order: Order,
        owner: object,
    ) -> None:
        aside = DeviceCopies(device)
        self._staged = [_Staged(held, aside) for held in records]
        self._order = order
        self._elsewhere: set[int] = set()  # on the device or in the pool, when that was looked at last
        self._pinned: _Staged | None = None  # perhaps by a call that was cut off
        self.cache = RecordCache(pool, store, metrics, CyclicPolicy(order, self._staged), owner)
        self.cache.limit_bytes = pool.capacity_bytes

    def fetch(self, held: Held, in_pool: RecordCache) -> Lease:
        """Have a record in the staging memory, until `release`. Starts to read what will be used after it.

        Raises:
            SwapIOError: the drive failed.
            PoolExhausted: the staging memory is in use, by copies up that failed.
        """
        staged = self._pin(held)
        self.cache.require(staged.key, staged.length_bytes)
        self.read_ahead(in_pool)
        return self.cache.fetch(staged.key)

    def room_for(self, held: Held) -> Lease:
        """A buffer for all of a record that nothing is in flight in, until `release`; its content is undefined.

        Raises:
            SwapIOError: an earlier write of the record failed, or one that the room was waited for.
            PoolExhausted: as for `fetch`.
        """
        staged = self._pin(held)
        self.cache.require(staged.key, staged.length_bytes, anew=True)
        lease = self.cache.fetch(staged.key)
        self.cache.wait(staged.key)
        return lease

    def write(self, held: Held, lease: Lease) -> None:
        """Start writing what `room_for` gave, when its transfer is over. The values' checksums are not known then."""
        held.checksums = []
        self._staged[held.number].write(self.cache, lease)

    def write_newer(self, held: Held) -> None:
        """Start writing a record again whose write has failed. Raises SwapIOError if that could not be started."""
        self._staged[held.number].write_newer(self.cache)

    def _pin(self, held: Held) -> _Staged:
        if self._pinned is not None:
            self._pinned.pinned = False
        self._pinned = staged = self._staged[held.number]
        staged.pinned = True
        return staged

    def read_ahead(self, in_pool: RecordCache) -> None:
        """Start reading what will be used next, as far as there is room.

        Args:
            in_pool: the records that the pool has.
        """
        for number in list(self._elsewhere):
            if not self._is_elsewhere(number, in_pool):
                self._elsewhere.discard(number)
                if self.cache.records.get(self._staged[number].key) is None:
                    self._order.drop(number)
        while (missing := self._order.missing()) is not None:
            staged = self._staged[missing]
            if self._is_elsewhere(missing, in_pool):
                self._elsewhere.add(missing)
                self._order.hold(missing, fixed=True)
            elif not self.cache.stage(staged.key, staged.length_bytes):
                return

    def _is_elsewhere(self, number: int, in_pool: RecordCache) -> bool:
        held = self._staged[number].held
        return held.gone or bool(held.values) or in_pool.records.get(held.key) is not None

    def release(self, held: Held) -> None:
        """Give the buffer of a record up, if there is one: a copy from it may go on. Not before it is written."""
        staged, record = self._staged[held.number], self.cache.records.get(held.key)
        staged.pinned = False
        if record is not None and not record.writing and not staged.newer:
            self.cache.evict(held.key)

    def leave(self, held: Held) -> None:
        """Have a record here no more: what is newer than its file is written.

        Raises:
            SwapIOError: that failed; the record stays, and the next call writes it again.
        """
        self._staged[held.number].pinned = False
        self.cache.evict(held.key)
