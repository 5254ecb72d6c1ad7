"""`DirectState`: records of buckets that go between the drive and slots on an accelerator without the pool, by cuFile.

[Note: direct slots] A record is read whole into a buffer of a `DevicePool`, which is the slot in which its bucket is
stepped, and it is written from there:

    read     begins when nothing is in flight in the slot. Who takes the record waits for it, if it was not read ahead
    step     on the caller's stream
    write    the lease's transfer is an event: the stream is done with the slot. Then the record is completed, on a
             stream for that alone, and written, as one that was copied to the pool is: see `RecordWrites`
    slot     goes to another record when the write is over

A `RecordCache` moves the buffers. It does not know that they are on a device.

[Note: one of two caches] A record is in the pool's cache, or in this one, or in its file alone: never in both. A step
takes it from where it is. From the file it comes here, unless it is one that stays in the pool. Who wants it on the
host has it leave here first, and waits for its write. So nothing of a record begins while it is being written. A read
that is dropped may go on, as in the pool: nobody gets its bytes, and its slot goes to nobody before it is over.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container

from swapper.metrics import Metrics
from swapper.optimizer.device_slots import SLOTS, Slot
from swapper.optimizer.segments import Bucket
from swapper.sizes import PAGE_BYTES, round_up
from swapper.storage.cache import RecordCache
from swapper.storage.device_pool import DevicePool
from swapper.storage.store import RecordKey, TensorStore
from swapper.tensors.grad_modes import outside_of_inference

__all__ = ["DirectState"]


class DirectState:
    """The slots of one optimizer, and the records in them. See [Note: direct slots].

    Args:
        make_pool: makes device memory of so many bytes, which the store moves by cuFile.
        store: has the records.
        metrics: counts reads, writes and waits.
        in_pool: the cache of the same records in the pool.
        owner: as of that.

    Attributes:
        cache: of the records in slots; None while there are no slots.
        slot_bytes: of each slot; 0 while there are none.
        resident: records that stay in the pool.

    Not thread-safe, but that `stage` may be called by autograd's thread while the owner's waits in backward.
    """

    def __init__(
        self,
        make_pool: Callable[[int], DevicePool],
        store: TensorStore | None,
        metrics: Metrics,
        in_pool: RecordCache,
        owner: object,
    ) -> None:
        self.cache: RecordCache | None = None
        self.slot_bytes = 0
        self.resident: Container[RecordKey] = ()
        self._make_pool = make_pool
        self._store = store
        self._metrics = metrics
        self._in_pool = in_pool
        self._owner = weakref.ref(owner)

    def hold(self, slot_bytes: int) -> None:
        """Have slots of at least `slot_bytes` each. They stay until `drop`, or until longer ones are asked for.

        Raises:
            SwapIOError: a write from shorter ones failed.
            torch.OutOfMemoryError: the device has not so much memory.
        """
        if slot_bytes > self.slot_bytes:
            self.drop()
            length_bytes = round_up(slot_bytes, PAGE_BYTES)
            with outside_of_inference():  # The memory outlives that mode.
                pool = self._make_pool(SLOTS * length_bytes)
            self.cache = RecordCache(pool, self._store, self._metrics, owner=self._owner())
            self.slot_bytes = length_bytes

    def drop(self) -> None:
        """Wait for writes, and give the memory back. Nothing may be in use. Idempotent.

        Raises:
            SwapIOError: a write failed. The record is kept until it is discarded, and so is the memory.
        """
        if self.cache is not None:
            if len(self.cache.records):
                self.cache.flush()
            pool, self.cache, self.slot_bytes = self.cache.pool, None, 0
            pool.close()

    def has(self, bucket: Bucket) -> bool:
        """True if the record of `bucket` is in a slot, or arriving or leaving there."""
        return self.cache is not None and self.cache.records.get(bucket.key) is not None

    def takes(self, bucket: Bucket) -> bool:
        """True if a step is to have the record of `bucket` here: see [Note: one of two caches].

        Raises:
            SwapIOError: a write from the pool failed.
        """
        if self.cache is None or not bucket.length_bytes:
            return False
        if self.has(bucket):
            return True
        if bucket.key in self.resident:
            return False
        self._in_pool.check()  # What is written leaves the pool.
        return self._in_pool.records.get(bucket.key) is None

    def stage(self, bucket: Bucket) -> bool:
        """Start reading a record that `takes` wants. False if there is no slot for it now."""
        assert self.cache is not None
        return self.cache.stage(bucket.key, self.slot_bytes)

    def take(self, bucket: Bucket, with_gradients: bool) -> Slot | None:
        """A slot for `bucket`, with its record if `takes` wants that, for which it waits; else an empty one.

        Args:
            bucket: of a step.
            with_gradients: some may come to the slot. Without them a bucket of which nothing moves gets None.

        Raises:
            SwapIOError: the drive failed.
        """
        if self.cache is None or not (bucket.length_bytes or with_gradients):
            return None
        if not self.takes(bucket):
            lease = self.cache.pool.acquire(self.slot_bytes)
            return Slot(lease.tensor, bucket.length_bytes, lease)
        lease, filled = self.cache.take(bucket.key, self.slot_bytes)
        return Slot(lease.tensor, bucket.length_bytes, lease, holds_record=True, filled=filled)

    def give_back(self, bucket: Bucket, slot: Slot | None) -> None:
        """The step of `bucket` is not made now: give up what `take` gave. Gradients may still be on their way to it."""
        if slot is not None and slot.lease is not None and self.cache is not None:
            slot.lease.transfer = slot.ready
            if slot.holds_record:
                self.cache.release(bucket.key)
            else:
                slot.lease.release()

    def leave(self, bucket: Bucket) -> None:
        """Have the record of `bucket` in its file only. A read that nobody waits for may go on.

        Raises:
            SwapIOError: a write failed.
        """
        if self.cache is None or not self.has(bucket):
            return
        self.cache.wait(bucket.key)
        self.cache.check()  # It may have failed.
        self.cache.evict(bucket.key)
