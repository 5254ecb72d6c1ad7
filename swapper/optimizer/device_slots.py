"""`DeviceSlots`: memory of an accelerator for a few buckets, filled and emptied while others are stepped.

[Note: three slots] While the class steps on the record in one slot, on the caller's stream, the next record comes to
another and the last leaves a third, each on a stream of its own. Nothing of it waits on the host:

    the upload to a slot       waits for the download of what was in it before, and after the first allocation for what
                               its memory was used for before
    the caller's stream        waits for the upload before the class steps
    the download from a slot   waits for the class's kernels
    the buffer in the pool     has the download as the transfer of its lease: it is neither written to the drive nor
                               given to anybody before that is over. Then `RecordWrites` writes it. A step that fails
                               before the download is started waits for all copies (`wait`)
    the slots                  are freed after a step, and their memory is kept from others until the downloads are over

Where records come without the pool a slot is a buffer of device memory, and what was in it has left before it is given
out: see [Note: direct slots] in `direct_state`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from swapper.io.devices import Copy, DeviceCopies
from swapper.sizes import ALIGNMENT_BYTES, round_up
from swapper.storage.buffers import Lease

__all__ = ["SLOTS", "DeviceSlots", "Slot"]

_T = TypeVar("_T")

SLOTS = 3
"""One that a record comes to, one that is in use, one that a record leaves."""


class Slot:
    """Device memory for one bucket: its record, the same bytes at the same offsets as in the lease, then gradients.

    Attributes:
        memory: uint8, 1-D.
        address: of its first byte.
        ready: what the class's kernels wait for: all uploads so far, or without any what was in the slot has left.
        left: what was in the slot has left; None if nothing was.
        cursor: where the next gradient comes.
        lease: the buffer that the memory is, on the device; None of memory that stays the slots' own.
        holds_record: that is the record's own, from which it is written.
        filled: and it has been read.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        record_bytes: int = 0,
        lease: Lease | None = None,
        *,
        holds_record: bool = False,
        filled: bool = False,
    ) -> None:
        self.memory = memory
        self.address = memory.data_ptr()
        self.ready: Copy | None = None
        self.left: Copy | None = None
        self.cursor = round_up(record_bytes, ALIGNMENT_BYTES)
        self.lease = lease
        self.holds_record = holds_record
        self.filled = filled

    def view(self, offset_bytes: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """As `Lease.view`."""
        return self.memory[offset_bytes : offset_bytes + numel * dtype.itemsize].view(dtype)

    def strided_view(
        self, offset_bytes: int, numel: int, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> torch.Tensor:
        """As `Lease.strided_view`."""
        return self.view(offset_bytes, numel, dtype).as_strided(shape, stride)

    def pool_has(self, tensor: torch.Tensor) -> bool:
        """True if `tensor`, which is strided, may be in this memory. An empty one may."""
        return tensor.numel() == 0 or 0 <= tensor.data_ptr() - self.address < len(self.memory)


class DeviceSlots:
    """The slots of one optimizer on its device. See [Note: three slots]."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._up = DeviceCopies(device)
        self._down = DeviceCopies(device)
        self._aside = DeviceCopies(device)
        self._slots: list[Slot] = []
        self._next = 0

    def hold(self, length_bytes: int) -> None:
        """Have slots of `length_bytes` each, if there are none. Their memory comes from torch's allocator."""
        if not self._slots and length_bytes:
            self._slots = [
                Slot(torch.empty(length_bytes, dtype=torch.uint8, device=self._device)) for _ in range(SLOTS)
            ]
            self._up.begin()  # What had the memory before may still be in use on the current stream.

    def follow_caller(self) -> None:
        """Let what comes to slots that are not these' own wait for all that the current stream has to do by now."""
        self._up.begin()

    def drop(self) -> None:
        """Give the memory back. Idempotent."""
        self._slots = []

    def wait(self) -> None:
        """Wait for all copies."""
        try:
            self._up.wait()
        finally:
            self._down.wait()

    def take(self, record_bytes: int) -> Slot | None:
        """The slot that was emptied first, for a record of so many bytes. None if there are no slots."""
        if not self._slots:
            return None
        slot = self._slots[self._next % SLOTS]
        self._next += 1
        slot.ready, slot.cursor = slot.left, round_up(record_bytes, ALIGNMENT_BYTES)
        self._up.follow(slot.left)
        return slot

    def fill(self, slot: Slot, lease: Lease, start_bytes: int, stop_bytes: int) -> None:
        """Start copying a part of `lease` to the same place in `slot`.

        The lease must not be changed or given back before `empty` or `wait`.
        """
        part = slice(start_bytes, stop_bytes)
        slot.ready = self._up.copy(slot.memory[part], lease.tensor[part])

    def upload(self, slot: Slot, source: torch.Tensor, misaligned_bytes: int = 0) -> tuple[torch.Tensor, Copy | None]:
        """Start copying a gradient, 1-D and in the pool, to `slot`. Returns the tensor it becomes, and the copy.

        Args:
            slot: has room for it.
            source: the gradient.
            misaligned_bytes: how far that tensor is to be from a multiple of 64: see [Note: alignment] of `gradient`.
        """
        room = slot.view(slot.cursor + misaligned_bytes, source.numel(), source.dtype)
        slot.cursor += round_up(misaligned_bytes + source.nbytes, ALIGNMENT_BYTES)
        slot.ready = self._up.copy(room, source)
        return room, slot.ready

    def join(self, slot: Slot) -> None:
        """Let the current stream wait until the slot can be used."""
        if slot.ready is not None:
            self._up.join(slot.ready)

    def empty(self, slot: Slot, lease: Lease, length_bytes: int) -> None:
        """Start copying the first `length_bytes` of `slot` to `lease`, when the current stream has come so far."""
        self._down.begin()
        slot.left = lease.transfer = self._down.copy(lease.tensor[:length_bytes], slot.memory[:length_bytes])

    def leave(self, slot: Slot) -> None:
        """Mark the point of the current stream after which `slot` is only written to the drive, or not used."""
        slot.left = self._down.reached()

    def give_back(self, slot: Slot) -> None:
        """Nothing but what is on its way from `slot` needs it any more."""
        if slot.lease is not None:
            slot.lease.transfer = slot.left
            if not slot.holds_record:
                slot.lease.release()

    def change(self, work: Callable[[], _T]) -> _T:
        """Run `work`, which changes a slot that no stream uses, wait for it and return its result. In any thread.

        Raises:
            SwapIOError: the device failed.
        """
        results: list[_T] = []
        done = self._aside.run(lambda: results.append(work()))
        if done is not None:
            done.wait()
        return results[0]
