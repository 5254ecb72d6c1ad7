"""`DirectRecords`: records of parameters that come from the drive to the device without the pool, by cuFile.

[Note: staging] A record is read whole into a buffer of a `DevicePool`, the staging memory. From there each parameter is
copied to its own tensor, within the device, on the stream of copies up:

    drive  --- cuFile --->  staging: the record as the file has it  --- copy --->  one tensor for each parameter

The read begins when the buffer has nothing in flight any more, and the copy when the read is over, for which the host
waits if the record was not read ahead. The copy is then the transfer of the buffer's lease, which is given back at once
and goes to another record when the copy is over. So the staging memory holds what is arriving and what is copied.

[Note: two ways] The newest copy of a record that is not on the device is its file, or the pool's buffer if it has one:
a step on the CPU, or who reads records on the host, has it there. So a record comes from the pool if that has it. What
was read ahead here is dropped before the pool's copy is changed, and whenever the record comes to the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swapper.metrics import Metrics
from swapper.parameter.cache import Held, in_file
from swapper.storage.access_order import AccessOrder, Use
from swapper.storage.buffers import Lease
from swapper.storage.cache import RecordCache
from swapper.storage.cache_policies import CyclicPolicy
from swapper.storage.device_pool import DevicePool
from swapper.storage.store import RecordKey, TensorStore

__all__ = ["DirectRecords"]


@dataclass(eq=False, slots=True)
class _Staged:
    """A record as the staging memory sees it. The `Contents` of its policy."""

    held: Held
    pinned: bool = False
    """The buffer is needed by the call that is being made."""

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

    def write_newer(self, cache: RecordCache) -> None:
        """Do nothing: nothing is changed here."""

    def write_failed(self) -> None:
        """Do nothing: nothing is written from here."""

    def evicted(self) -> None:
        """Do nothing: nothing refers to the buffer."""


class DirectRecords:
    """Reads records into device memory, ahead where there is room. See [Note: staging].

    Args:
        pool: the staging memory; room for at least two of the largest record.
        store: has handles for `pool`.
        metrics: counts reads and waits.
        records: by number; all are stored.
        order: in which they are expected to be used on the device.

    Attributes:
        cache: of the staging memory.

    Not thread-safe: called under the lock of the pool's cache.
    """

    def __init__(
        self,
        pool: DevicePool,
        store: TensorStore,
        metrics: Metrics,
        records: Sequence[Held],
        order: AccessOrder,
    ) -> None:
        self._staged = [_Staged(held) for held in records]
        self._order = order
        self._elsewhere: set[int] = set()  # on the device or in the pool, when that was looked at last
        self._pinned: _Staged | None = None  # perhaps by a call that was cut off
        self.cache = RecordCache(pool, store, metrics, CyclicPolicy(order, self._staged))
        self.cache.limit_bytes = pool.capacity_bytes

    def note(self, use: Use) -> None:
        """A record is used on the device."""
        self._order.note(use)

    def fetch(self, held: Held, in_pool: RecordCache) -> Lease:
        """Have a record in the staging memory, until `release`. Starts to read what will be used after it.

        Raises:
            SwapIOError: the drive failed.
            PoolExhausted: the staging memory is in use, by copies up that failed.
        """
        staged = self._staged[held.number]
        if self._pinned is not None:
            self._pinned.pinned = False
        self._pinned, staged.pinned = staged, True
        self.cache.require(staged.key, staged.length_bytes)
        self.read_ahead(in_pool)
        return self.cache.fetch(staged.key)

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

    def pairs(
        self, held: Held, values: Sequence[torch.Tensor], lease: Lease
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """`values` of each parameter, and where they are in its buffer, both of the parameter's shape."""
        return [
            (location.view(each), in_file(lease, location).view(location.shape))
            for location, each in zip(held.plan.locations, values, strict=True)
        ]

    def release(self, held: Held) -> None:
        """Give the buffer of a record up, if there is one: a copy from it may go on."""
        self._staged[held.number].pinned = False
        self.cache.evict(held.key)
