"""`DeviceBucket`: a bucket that is stepped on an accelerator; its record is in a slot there.

[Note: what only the device knows] How many ties a split makes, and whether the user has changed a parameter since its
masters were encoded, is known on the device, and nothing waits for it to tell. So

- each segment's ties are written at the place that they would have if those before it took the most they can. Their
  counts are written where the record's header will be. When the record has been copied to the pool, and before it is
  written to the drive, `finish` moves the ties together, and writes the header.
- the checksum of a parameter's bits is a sum on the device. If it is not the one that the bits had, the masters are
  made of the parameter by a selection there. `checksums_to_host` makes checksums of the host of such sums, for all that
  is done with state outside of steps.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from swapper.errors import SwapIOError
from swapper.io.checksums import checksum
from swapper.optimizer.device_codec import join_on_device, split_on_device, sum_of_bits
from swapper.optimizer.device_slots import DeviceSlots, Slot
from swapper.optimizer.master_codec import damaged_master, ties_bytes_max
from swapper.optimizer.records import Masters, OpenBucket
from swapper.optimizer.segments import MASTER, Bucket, Memory, OptimizerParameter, Segment
from swapper.storage.buffers import Lease
from swapper.tensors.grad_modes import modes_kept, set_grad_mode

__all__ = ["DeviceBucket", "checksums_to_host", "edited_on_device"]

_DAMAGED = -1
"""Count of ties of a segment whose stored master was found damaged."""


class DeviceBucket(OpenBucket):
    """A bucket whose record is being copied to a slot, or is in one. Made when the record is in the pool, or there.

    Args:
        lease: the record's buffer, in the pool or the slot itself; None if nothing of the bucket moves.
        filled: the buffer has a record, and is not new.
        slot: where the record comes to, or is; None if neither it nor a gradient comes.

    Attributes:
        when_joined: is called by `join`, when the current stream waits.
    """

    def __init__(
        self,
        bucket: Bucket,
        lease: Lease | None,
        filled: bool,
        slot: Slot | None,
        slots: DeviceSlots,
        device: torch.device,
        note_unplanned: Callable[[str], None],
    ) -> None:
        super().__init__(bucket, lease, note_unplanned)
        self.device = device
        self.when_joined: list[Callable[[], object]] = []
        self._slots = slots
        self._slot = slot
        self._fits: dict[Segment, torch.Tensor] = {}  # whether its stored ties are as many as they should be
        self._counted: list[int] = []  # positions of the segments whose ties were counted on the device
        if lease is not None:
            assert slot is not None
            self.memory = slot
            if filled and not slot.holds_record:
                slots.fill(slot, lease, bucket.layout.payload_bytes, bucket.used_bytes())

    def join(self) -> None:
        """Let the current stream wait for the record, and for gradients that come to the same slot."""
        if self._slot is not None:
            self._slots.join(self._slot)
        for change in self.when_joined:
            change()

    def place_small(self, segment: Segment, on_device: bool) -> None:
        """Have the state of `segment` that does not move where its class expects it.

        Args:
            on_device: all scalars are on the device, as of fused and capturable steps; else those that the class makes
                there, and those that torch's `load_state_dict` has cast, for it brings them there too.
        """
        for key, value in segment.small.items():
            if not isinstance(value, torch.Tensor) or value.device == self.device:
                continue
            learnt = segment.learnt.get(key)
            is_cast = learnt is not None and key != "step" and value.dtype != learnt.dtype
            if on_device or value.dim() or is_cast or (learnt is not None and learnt.on_accelerator):
                segment.small[key] = value.to(self.device)

    # --- Masters ---------------------------------------------------------------------------------------------------

    def whole_master(self, segment: Segment) -> torch.Tensor:  # noqa: D102
        kept = segment.kept_master
        if kept is not None and kept.device != self.device:
            segment.kept_master = kept.to(self.device)
        return super().whole_master(segment)

    def make_master(self, segment: Segment, bits: torch.Tensor, edited: torch.Tensor | bool) -> torch.Tensor:
        """The master of `segment`, fp32 and 1-D: the stored one, or that of `bits` if they were `edited`."""
        master = (
            self.whole_master(segment)
            if not segment.is_split
            else torch.empty(segment.numel, dtype=torch.float32, device=self.device)
        )
        if segment.checksum is None or edited is True:
            return master.copy_(bits)
        if segment.is_split:
            ties = self._tail(self._ties_at.get(segment, 0), segment.tie_bytes)
            low = self.stored(segment, MASTER)
            self._fits[segment] = join_on_device(bits, low, ties, segment.tie_bits, master)
        if edited is not False:
            torch.where(edited, bits, master, out=master)
        return master

    def encode(self, masters: Masters) -> None:
        """Start storing masters and rounding them to the parameters' dtype, to nearest even."""
        self._encode(masters, self._copy_ties(masters))

    def _encode(self, masters: Masters, ties: Mapping[Segment, torch.Tensor]) -> None:
        cursor = self.bucket.layout.tail_offset_bytes
        counts = self._counts(self.memory)
        for position, segment in enumerate(self.bucket.segments):
            if segment in masters:
                master, bits = masters[segment]
                if segment.is_split:
                    room = self._tail(cursor, ties_bytes_max(segment.numel))
                    count = split_on_device(master, bits, self.stored(segment, MASTER), room)
                    if segment in self._fits:
                        count = torch.where(self._fits[segment], count, _DAMAGED)
                    counts[position].copy_(count)
                    self._counted.append(position)
                else:
                    bits.copy_(master)
                    kept = self.whole_master(segment)
                    if kept.data_ptr() != master.data_ptr():
                        kept.copy_(master)
                segment.checksum = sum_of_bits(bits)
            elif segment in ties:
                self._tail(cursor, segment.tie_bytes).copy_(ties[segment])
            cursor += segment.tie_bytes_max

    def _counts(self, memory: Memory | None) -> torch.Tensor:
        """The counts of ties, int64, one for each segment. Each needs more room in the header than this takes."""
        if memory is None:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        return memory.view(0, len(self.bucket.segments), torch.int64)

    # --- The way back ----------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Start copying the record back to the pool, when the current stream has come so far; give the slot back.

        One that is in the slot is its lease's until it is written.
        """
        slot, self._slot, self.memory, self.when_joined = self._slot, None, None, []
        if slot is None:
            return
        if self.lease is None or slot.holds_record:
            self._slots.leave(slot)
        else:
            tail_bytes = sum(segment.tie_bytes_max for segment in self.bucket.segments)
            self._slots.empty(slot, self.lease, self.bucket.layout.tail_offset_bytes + tail_bytes)
        self._slots.give_back(slot)

    def finish(self) -> int:
        """Put the record, whose step is over, in the form in which it is stored. Returns its length in bytes.

        It is in the pool again, or in its slot, where nothing else uses it. Called by whoever waits for that, in any
        thread.

        Raises:
            SwapIOError: a stored master was damaged.
        """
        assert self.lease is not None
        return self._finish() if self.lease.tensor.is_cpu else self._slots.change(self._finish)

    def _finish(self) -> int:
        bucket, lease = self.bucket, self.lease
        assert lease is not None
        counts = self._counts(lease).tolist() if self._counted else []
        for position in self._counted:
            count = counts[position]
            if count == _DAMAGED:
                detail = str(damaged_master("its ties are not as many as said"))
                raise SwapIOError(errno.EBADMSG, "read", detail=detail)
            bucket.segments[position].tie_bits = count
        place = cursor = bucket.layout.tail_offset_bytes
        for segment in bucket.segments:
            if segment.tie_bytes and place != cursor:
                ties = lease.view(cursor, segment.tie_bytes, torch.uint8).clone()
                lease.view(place, segment.tie_bytes, torch.uint8).copy_(ties)
            place += segment.tie_bytes
            cursor += segment.tie_bytes_max
        self.write_header()
        return bucket.used_bytes()


def edited_on_device(segments: Sequence[Segment]) -> torch.Tensor | bool:
    """As `is_edited`, for parameters on a device: bool, of shape `()`, on it, if only the device knows."""
    known = [segment.checksum for segment in segments]
    if all(each is None for each in known):
        return False
    found: list[torch.Tensor] = []
    for segment in segments:
        if segment.checksum is None:
            return True
        bits = segment.slice_of(segment.local.detach())
        if isinstance(segment.checksum, torch.Tensor):
            found.append(sum_of_bits(bits) != segment.checksum)
        elif checksum(bits.cpu()) != segment.checksum:  # It was loaded, or asked for.
            return True
    return torch.stack(found).any() if found else False


def checksums_to_host(parameters: Iterable[OptimizerParameter]) -> None:
    """Have checksums of the host for the masters of `parameters`. Waits for the device they are on."""
    with modes_kept():
        set_grad_mode(False)
        for segment in (segment for of in parameters for segment in of.segments):
            if isinstance(segment.checksum, torch.Tensor) and not segment.is_hole:
                bits = segment.slice_of(segment.local.detach())
                same = sum_of_bits(bits).item() == segment.checksum.item()  # They may be on two devices: see `moved`.
                crc = checksum(bits.cpu().contiguous())
                segment.checksum = crc if same else crc ^ 0xFFFFFFFF  # Of no parameter that anybody knows.
