"""Segments and buckets: how the state of an optimizer is cut, and laid out in records.

A segment is a slice of one parameter in memory order, or a whole parameter. A bucket is the segments that are swapped
together, as one record. `open_bucket` has what is done with a bucket while its record is in memory.

[Note: parameters come and go] `param_groups` is the user's to change at any time. A parameter that is in no group any
more is not stepped, and its state stays, as plain PyTorch keeps `optimizer.state[p]`: if it is put back, training goes
on with that. Only when nobody else holds the parameter does its state go too, since nobody can ask for it. So segments
refer to parameters weakly; those in `param_groups` live because the optimizer holds them. All that is known of a
parameter is in one `OptimizerParameter`, found by `OptimizerPlan.of`, and not in dictionaries keyed by `id`: when a
parameter is gone, another may get its `id`.

[Note: edited parameters] The user may change a bf16 or fp16 parameter between steps: a clamp, an EMA swap,
`Embedding(max_norm=...)` in forward. The low halves of its masters then say nothing any more. Which elements were
changed is not known, as the old bits are gone, so one rule must do: if any element was changed, all masters of the
parameter are made anew, `float(parameter)`. That rule does not depend on how the parameter is cut, which
`bucket_bytes` decides, and a plain program can follow it in a line. It costs one more pass over the bits of
parameters that are cut, before the first of their segments is stepped; no traffic, since a parameter is always in
memory as a whole when a segment of it is stepped. Each segment keeps the checksum of the bits that its masters were
rounded to; the parameter was edited if any differs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from swapper.errors import SwapError
from swapper.io.checksums import checksums, join_checksums
from swapper.optimizer.cuts import CUT_NUMEL, segment_cuts
from swapper.optimizer.device_slots import Slot
from swapper.optimizer.int8_codec import BLOCK_NUMEL
from swapper.optimizer.master_codec import ties_bytes_max
from swapper.optimizer.packing import ENTRY_BYTES, RecordPacking, packed_blocks_of, plan_packed_record
from swapper.optimizer.probe import StateSpec
from swapper.sizes import ALIGNMENT_BYTES, SMALL_BYTES, round_up
from swapper.storage.budget import WHOLE
from swapper.storage.buffers import Lease
from swapper.storage.layout import Entry, RecordLayout
from swapper.storage.store import RecordKey
from swapper.tensors.dtypes import NAMES, PLAIN_DTYPES
from swapper.tensors.evicted_gradients import raw_gradient
from swapper.tensors.sharded import Sharding, is_sharded, local_of
from swapper.tensors.strides import has_ordinary_class, is_dense, same_layout, same_order

if TYPE_CHECKING:
    from swapper.optimizer.native_parts import Placement

__all__ = [
    "MASTER",
    "Bucket",
    "Memory",
    "OptimizerParameter",
    "Segment",
    "checksum_of",
    "grouped",
    "is_edited",
    "plan_buckets",
    "plan_segments",
    "scales_name",
]

MASTER = "master_param"
"""Key of the master weights (fp32) in a state dict."""

SEGMENT_NUMEL = 1 << 19
"""Most elements of a segment. torch's scratch for one, a few times 2 MiB in fp32, then fits the caches, and is so small
that the allocator, which adapts to what was freed, goes on giving larger tensors pages of their own."""


DEVICE_SEGMENT_NUMEL = 1 << 21
"""The same of one that is stepped on an accelerator. Of fewer elements, starting a kernel takes longer than it does."""


Memory = Lease | Slot
"""A record's: a lease, or a copy of it on an accelerator."""


@dataclass(frozen=True, slots=True)
class StateLocation:
    """Location of a tensor of the state in its bucket's record.

    Attributes:
        scales_offset_bytes: of its scales, if it has any.
    """

    offset_bytes: int
    spec: StateSpec
    scales_offset_bytes: int = 0

    def view(self, memory: Memory) -> torch.Tensor:
        """The tensor, in the record's memory."""
        spec = self.spec
        return memory.strided_view(self.offset_bytes, spec.numel, spec.stored_dtype, spec.shape, spec.stride)

    def flat_view(self, memory: Memory) -> torch.Tensor:
        """Its elements as they lie in the record's memory, 1-D."""
        return memory.view(self.offset_bytes, self.spec.numel, self.spec.stored_dtype)

    def scales(self, memory: Memory) -> torch.Tensor:
        """Its scales, float32, 1-D."""
        return memory.view(self.scales_offset_bytes, self.spec.scales_numel, torch.float32)

    def fits(self, tensor: torch.Tensor, device: torch.device) -> bool:
        """True if `tensor`, in memory of `device`, can be stored here, encoded or as it is."""
        same = tensor.dtype is self.spec.dtype and tensor.shape == self.spec.shape and has_ordinary_class(tensor)
        return same and tensor.device == device and tensor.layout is torch.strided


class OptimizerParameter:
    """A parameter that an optimizer has, or had. See [Note: parameters come and go].

    Attributes:
        numel, dtype, stride, device: as they were when its state was laid out; of a DTensor, those of the local tensor.
        sharded: it is a DTensor.
        collective: it is stepped as that, with the collectives of its class, and not by its local tensor.
        shardings: of it alone, by key: how those tensors of its state are sharded that are DTensors.
        segments: hold its state, in order.
        buckets: have its segments, in order.
        group: number of its group; None while it is in none, so that it is not stepped.
        number: among the parameters of all groups, when it was last in one.
        first_index: in all of a DTensor, of the first element that this rank has; 0 if nothing is encoded.
        fused, cut_for_fused: its group has `fused=True`; it had that when the parameter was cut.
        keeps_whole: it is not cut when it is planned the next time, because a sparse gradient came.
        strides_may_differ: those of its gradient do not change the bits of a step on its accelerator.
        has_uneven_tails: scalar tails of kernels may round otherwise than their vectors: see `cuts`.
        arrived: gradients that arrived since the last step.
        counted: the gradient that the last of them is in, if it stays in memory.
        stepped: it was stepped in backward, and its gradient is gone until it is cleared.
        left: another optimizer takes its gradients as they arrive.
        hook: tells when a gradient has arrived.
    """

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        self._reference = weakref.ref(parameter)
        local = local_of(parameter)
        self.sharded = local is not parameter
        self.collective = False
        self.shardings: dict[str, Sharding] = {}
        self.numel = local.numel()
        self.dtype = local.dtype
        self.stride = tuple(local.stride())
        self.device = local.device
        self.segments: tuple[Segment, ...] = ()
        self.buckets: tuple[Bucket, ...] = ()
        self.group: int | None = None
        self.number = self.first_index = 0
        self.fused = self.cut_for_fused = self.keeps_whole = self.strides_may_differ = self.has_uneven_tails = False
        self.arrived = 0
        self.counted: weakref.ref[torch.Tensor] | None = None
        self.stepped = self.left = False
        self.hook: torch.utils.hooks.RemovableHandle | None = None

    @property
    def parameter(self) -> torch.nn.Parameter:
        """The user's. Only while it lives."""
        parameter = self._reference()
        assert parameter is not None, "the parameter is gone"
        return parameter

    @property
    def local(self) -> torch.Tensor:
        """The values that are stepped: `parameter`, or of a DTensor its local tensor. See `local_of`."""
        parameter = self.parameter
        return parameter if type(parameter) is torch.nn.Parameter else local_of(parameter)

    @property
    def is_gone(self) -> bool:
        """True if nobody holds the parameter any more."""
        return self._reference() is None

    @property
    def has_state(self) -> bool:
        """True if it was stepped, or given state, before."""
        return any(segment.has_state for segment in self.segments)

    @property
    def has_sparse_gradient(self) -> bool:
        """True if it is in a group, and its gradient is sparse."""
        gradient = None if self.group is None else raw_gradient(self.parameter)
        return gradient is not None and gradient.is_sparse

    @property
    def cut_by_chunks(self) -> bool:
        """True if it is cut, and its bits depend on the chunks of torch's threads, unless it is `fused`."""
        return self.has_uneven_tails and not self.segments[0].whole

    def refers_to(self, parameter: torch.Tensor) -> bool:
        """True of `parameter` itself, and not of another that has the `id` which it had."""
        return self._reference() is parameter

    def check_unchanged(self, parameter: torch.Tensor) -> None:
        """Raise `SwapError` if size, dtype or order in memory of `parameter`, which this is of, have changed."""
        parameter = local_of(parameter)
        if parameter.numel() != self.numel or parameter.dtype != self.dtype:
            raise self.changed(parameter)
        in_memory_order = bool(self.segments) and (not self.segments[0].whole or bool(self.segments[0].master))
        stride = tuple(parameter.stride())
        if in_memory_order and stride != self.stride and not same_order(parameter.shape, stride, self.stride):
            raise SwapError(
                f"a parameter had strides {self.stride} when its optimizer was wrapped and now has "
                f"{stride}, and its state lies in the order of its memory; convert the model (its "
                "memory format) first, then make the optimizer and wrap it"
            )

    def changed(self, parameter: torch.Tensor) -> SwapError:
        """The error that says what `parameter`, which this is of, was and is."""
        parameter = local_of(parameter)
        return SwapError(
            f"a parameter was {self.numel} x {self.dtype} on {self.device} when its optimizer was wrapped and is now "
            f"{parameter.numel()} x {parameter.dtype} on {parameter.device}; move and convert the model first, then "
            "make the optimizer and wrap it"
        )

    def note_shardings(self, state: Mapping[str, Any]) -> None:
        """Note how `state`, which is all of it as its class or a user has it, is sharded, if its class needs that."""
        if self.collective:
            self.shardings = {key: Sharding.of(value) for key, value in state.items() if is_sharded(value)}

    def unhook(self) -> None:
        """Do not look at its gradients any more."""
        hook, self.hook = self.hook, None
        if hook is not None:
            hook.remove()


@dataclass(eq=False, slots=True)
class Segment:
    """A slice of a parameter, and everything that is kept in memory about its state.

    Attributes:
        of: its parameter.
        start, stop: in elements of the parameter in memory order.
        whole: the class is given the parameter in its own shape; else a flat slice.
        master: dtype bf16 keeps the low 16 bits of an fp32 master ("split"), fp16 all of it ("stored"); "" has none.
        specs: the tensors that move, as the probe has learnt them.
        learnt: each tensor of the state, by key, as the probe has learnt them for the whole parameter.
        locations: of `specs`, and of the master if it moves, in the record; filled by `Bucket`.
        present: keys in `locations` that hold data.
        small: state that never moves, by key.
        keys: the order of keys in the state.
        kept_master: the master of a small parameter, fp32, 1-D.
        checksum: of the parameter's bits when its master was encoded; None when it has no master yet. A tensor if they
            were summed on an accelerator: see `device_records`.
        tie_bits: ties of the encoded master.
        placement: where the state is in the record, as `native_parts` has found it; None before.
        numel: elements in the slice.
        encoded: keys of `specs` that are encoded.
        master_moves: the master is part of the record.
        is_split: the low halves of its master, and their ties, are part of the record.
    """

    of: OptimizerParameter
    start: int
    stop: int
    whole: bool
    master: str
    specs: tuple[StateSpec, ...]
    learnt: dict[str, StateSpec]
    locations: dict[str, StateLocation] = field(default_factory=dict)
    present: set[str] = field(default_factory=set)
    small: dict[str, Any] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)
    kept_master: torch.Tensor | None = None
    checksum: int | torch.Tensor | None = None
    tie_bits: int = 0
    placement: Placement | None = None
    numel: int = field(init=False)
    encoded: tuple[str, ...] = field(init=False)
    master_moves: bool = field(init=False)
    is_split: bool = field(init=False)

    def __post_init__(self) -> None:
        # Each step asks for these some ten times, and they never change.
        self.numel = self.stop - self.start
        self.encoded = tuple(spec.key for spec in self.specs if spec.is_rounded)
        self.master_moves = bool(self.master) and self.of.numel * 4 >= SMALL_BYTES
        self.is_split = self.master == "split" and self.master_moves

    @property
    def parameter(self) -> torch.nn.Parameter:
        """The user's. Only while it lives: see `is_hole`."""
        return self.of.parameter

    @property
    def local(self) -> torch.Tensor:
        """The parameter's values on this rank. See `OptimizerParameter.local`."""
        return self.of.local

    @property
    def is_hole(self) -> bool:
        """True if its parameter is gone: nobody can ask for the state."""
        return self.of.is_gone

    @property
    def has_state(self) -> bool:
        """True if it was stepped, or given state, before."""
        return bool(self.keys) or self.checksum is not None

    @property
    def is_encoded(self) -> bool:
        """True if some of its state is stored in another form than the class has it in."""
        return any(spec.encoding != "exact" for spec in self.specs)

    @property
    def tie_bytes(self) -> int:
        """Bytes of the ties in the tail of the record."""
        return (self.tie_bits + 7) // 8

    @property
    def tie_bytes_max(self) -> int:
        """The most that `tie_bytes` can become."""
        return ties_bytes_max(self.numel) if self.is_split else 0

    @property
    def stored_specs(self) -> tuple[StateSpec, ...]:
        """Its tensors in the record, the master last; without ties."""
        if not self.master_moves:
            return self.specs
        dtype = torch.int16 if self.is_split else torch.float32
        return (*self.specs, StateSpec(MASTER, dtype, (self.numel,), (1,)))

    def forget(self) -> None:
        """Back to how it was before the first step."""
        self.present.clear()
        self.small.clear()
        self.keys.clear()
        self.kept_master, self.checksum, self.tie_bits = None, None, 0

    def vacate(self) -> None:
        """Its parameter is gone. `tie_bits` stays: it says how long the hole in the record is."""
        tie_bits = self.tie_bits
        self.forget()
        self.tie_bits = tie_bits

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """`flat`, in memory order, as the class sees it: in the parameter's shape and strides if `whole`."""
        return as_shaped(flat, self.local) if self.whole else flat

    def slice_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This segment's elements of `tensor`, which has the local shape, in memory order of the parameter.

        A view, except where strides differ: then one temporary of the tensor's size is made.
        """
        p, tensor = self.local, tensor.detach()
        if tensor.is_contiguous() and p.is_contiguous():
            return tensor.as_strided((self.numel,), (1,), tensor.storage_offset() + self.start)
        if not is_dense(p):
            return tensor.contiguous().view(-1)[self.start : self.stop]
        if not same_layout(tensor, p):
            tensor = torch.empty_strided(p.shape, p.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,))[self.start : self.stop]

    def scratch_bytes_per_element(self, remote: bool) -> int:
        """Bytes of scratch for an element: decoded master, fp32 gradient and decoded state; of an accelerator's both
        copies."""
        master = (8 if self.is_split else 4) if self.master else 0
        return master + (2 * self.of.dtype.itemsize if remote else 0) + 4 * len(self.encoded)

    def scratch_bytes(self, remote: bool) -> int:
        """Bytes of scratch in a step."""
        per_element = self.scratch_bytes_per_element(remote)
        # Each of at most four pieces, and those of decoded state, starts at a multiple of 64 bytes.
        pieces = 4 + len(self.encoded)
        return round_up(per_element * self.numel, ALIGNMENT_BYTES) + pieces * ALIGNMENT_BYTES if per_element else 0

    def cost_bytes(self, remote: bool, moves_gradient: bool) -> int:
        """Bytes that it adds to its bucket's record and scratch, at most; or to its gradients, if they move, and if
        that is more.
        """
        stored = sum(
            round_up(spec.stored_bytes, ALIGNMENT_BYTES)
            + round_up(4 * spec.scales_numel, ALIGNMENT_BYTES)
            + round_up(ENTRY_BYTES * packed_blocks_of(spec.numel) * spec.is_packed, ALIGNMENT_BYTES)
            for spec in self.stored_specs
        )
        gradient = self.numel * self.of.dtype.itemsize if moves_gradient else 0
        return max(stored + self.tie_bytes_max + self.scratch_bytes(remote), gradient)


def as_shaped(flat: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """A view of `flat`, elements in the memory order of `p`, in the shape and the strides of `p`."""
    return flat.as_strided(p.shape, p.stride()) if p.is_contiguous() or is_dense(p) else flat.view(p.shape)


def checksum_of(of: OptimizerParameter) -> int | None:
    """The checksum of a parameter's values in memory order, all of which a step has just rounded; None if unknown."""
    if not of.local.is_contiguous():
        return None
    known = [(each.checksum, each.numel * of.dtype.itemsize) for each in of.segments]
    parts = [(crc, length_bytes) for crc, length_bytes in known if isinstance(crc, int)]
    return join_checksums(parts) if len(parts) == len(known) else None


def is_edited(segments: Sequence[Segment], values: torch.Tensor) -> bool:
    """True if a parameter was changed since its masters were encoded. See [Note: edited parameters].

    Args:
        segments: all of the parameter's.
        values: of the parameter, in its shape and strides, on any device.

    Returns:
        False if there are no masters yet.
    """
    known = [segment.checksum for segment in segments]
    if all(each is None for each in known):
        return False
    if None in known:
        return True
    # Where the slices are no views, all of them together would be a copy of the parameter.
    are_views = values.is_cpu and values.is_contiguous() and segments[0].local.is_contiguous()
    at_once = len(segments) if are_views else 1
    for i in range(0, len(segments), at_once):
        slices = [segment.slice_of(values) for segment in segments[i : i + at_once]]
        if not are_views:
            slices = [each.cpu().contiguous() for each in slices]
        if checksums(slices) != known[i : i + at_once]:
            return True
    return False


class Bucket:
    """Segments whose state is one record.

    Args:
        key: the record's.
        segments: in the order of the layout.
        remote: the parameters are on an accelerator, so the scratch also holds copies of them and of their gradients.
    """

    def __init__(self, key: RecordKey, segments: Sequence[Segment], remote: bool) -> None:
        self.key = key
        self.segments = tuple(segments)
        self.scratch_bytes = sum(segment.scratch_bytes(remote) for segment in segments)
        self.is_split = any(segment.is_split for segment in segments)
        self.layout, self.packing = self._lay_out()

    @property
    def length_bytes(self) -> int:
        """The longest the record can be; 0 if nothing of it moves."""
        return self.layout.length_bytes

    @property
    def tie_bytes(self) -> int:
        """Bytes of all ties, in the tail of the record as it is now."""
        return sum(segment.tie_bytes for segment in self.segments)

    def used_bytes(self) -> int:
        """Length of the record as it is now, a multiple of 4096."""
        return self.layout.used_bytes(self.tie_bytes)

    def slot_bytes(self, with_gradients: bool) -> int:
        """Bytes of a slot for it on an accelerator."""
        moving = self.segments if with_gradients else ()  # A whole gradient need not begin at a multiple of 64.
        gradients = (s.numel * s.of.dtype.itemsize + ALIGNMENT_BYTES * s.whole for s in moving)
        return round_up(self.length_bytes, ALIGNMENT_BYTES) + sum(round_up(n, ALIGNMENT_BYTES) for n in gradients)

    def _lay_out(self) -> tuple[RecordLayout, RecordPacking | None]:
        """Return the layout, and how what is packed of it is; None if nothing is."""
        entries: list[Entry] = []
        packed: list[Entry] = []
        tensors = [(i, segment, spec) for i, segment in enumerate(self.segments) for spec in segment.stored_specs]
        for number, _, spec in tensors:
            shape = (*spec.shape, 2) if spec.dtype.is_complex else spec.shape
            encoding = spec.encoding if spec.encoding != "exact" else ""
            entry = Entry(f"{number}.{spec.key}", NAMES[spec.stored_dtype], shape, encoding)
            (packed if spec.is_packed else entries).append(entry)
            if spec.scales_numel:
                entries.append(Entry(scales_name(number, spec.key), NAMES[torch.float32], (spec.scales_numel,)))
        ties_bytes = sum(segment.tie_bytes_max for segment in self.segments)
        layout, packing = plan_packed_record(entries, packed, ties_bytes)
        for segment in self.segments:
            segment.placement = None
        offsets = {entry.name: offset for entry, offset in zip(layout.entries, layout.offsets_bytes, strict=True)}
        for number, segment, spec in tensors:
            scales_offset = offsets.get(scales_name(number, spec.key), 0)
            segment.locations[spec.key] = StateLocation(offsets[f"{number}.{spec.key}"], spec, scales_offset)
        return layout, packing


def scales_name(number: int, key: str) -> str:
    """The name in a record of the scales of the tensor `key` of segment `number`. No other tensor can have it."""
    return f"scales.{number}.{key}"


def grouped(segments: Iterable[Segment]) -> dict[OptimizerParameter, list[Segment]]:
    """Segments by the parameter that they are of, in order."""
    found: dict[OptimizerParameter, list[Segment]] = {}
    for segment in segments:
        found.setdefault(segment.of, []).append(segment)
    return found


def plan_segments(
    of: OptimizerParameter,
    specs: Sequence[StateSpec],
    *,
    segmented: bool,
    low_precision: bool,
    threads: int,
    master: str,
    bucket_bytes: int,
    remote: bool,
    moves_gradient: bool,
    encode: Callable[[StateSpec], StateSpec] = lambda spec: spec,
    numel_max: int = SEGMENT_NUMEL,
) -> list[Segment]:
    """Cut one parameter.

    Args:
        specs: its state, as the probe has learnt it for the whole parameter.
        segmented: its class may be stepped on slices.
        low_precision, threads: see `segment_cuts`.
        master: see `Segment`.
        bucket_bytes: most bytes of one segment's record and scratch; exceeded only where `segmented` is False.
        moves_gradient: its gradient is evicted; of that, too, a segment has at most `bucket_bytes`.
        encode: says how a tensor of the state is stored. One that is encoded moves however small it is.
        numel_max: most elements of one segment, with the same exception.
    """
    plain = map(encode, (spec for spec in specs if spec.dtype in PLAIN_DTYPES))
    moving = tuple(spec for spec in plain if spec.is_rounded or spec.nbytes >= SMALL_BYTES)
    learnt = {spec.key: spec for spec in specs}
    whole = Segment(of, 0, of.numel, True, master, moving, learnt)
    if not segmented or (whole.cost_bytes(remote, moves_gradient) <= bucket_bytes and of.numel <= numel_max):
        return [whole]
    like = [spec for spec in moving if spec.shape == tuple(of.local.shape)]
    with_scales = sum(spec.scales_numel > 0 for spec in like)
    with_tables = sum(spec.is_packed for spec in like)
    if with_scales and low_precision and not master and of.dtype.itemsize == 2:
        return [whole]  # Cuts that depend on threads would cut blocks. In others the bits are no plain ones anyway.
    # In 64ths of a byte: the ties of a split master take one bit, a scale 4 bytes for a block, an entry of a table 2.
    parts = 64 * (sum(spec.stored_dtype.itemsize for spec in like) + whole.scratch_bytes_per_element(remote))
    parts += 64 * 4 // BLOCK_NUMEL * with_scales + with_tables
    if whole.master_moves:
        parts += 64 * 2 + 8 if whole.is_split else 64 * 4
    if moves_gradient:
        parts = max(parts, 64 * of.dtype.itemsize)
    room_bytes = bucket_bytes - ALIGNMENT_BYTES * (len(like) + with_scales + with_tables + len(whole.encoded) + 8)
    cut_numel = BLOCK_NUMEL if with_scales else CUT_NUMEL
    numel_max = max(min(64 * room_bytes // max(parts, 1), numel_max), cut_numel)
    segments = []
    for start, stop in segment_cuts(
        of.numel, numel_max, low_precision=low_precision and not with_scales, threads=threads, cut_numel=cut_numel
    ):
        slices = tuple(StateSpec(spec.key, spec.dtype, (stop - start,), (1,), spec.encoding) for spec in like)
        segments.append(Segment(of, start, stop, False, master, slices, learnt))
    return segments


def plan_buckets(
    owner: int,
    first_index: int,
    segments: Sequence[Segment],
    bucket_bytes: int,
    remote: bool,
    moves_gradients: bool,
    record_of: Callable[[torch.nn.Parameter], tuple[int, int] | None],
) -> list[Bucket]:
    """Group segments, in order, into buckets of at most `bucket_bytes` of record and scratch (or of one segment).

    Args:
        moves_gradients: they are evicted: of those, too, a bucket has at most `bucket_bytes`.
        record_of: number of the parameter record that has a parameter, and its share of room for one; None for a
            parameter that stays in memory. A step needs all records of a bucket at once, so together they take no more
            than the longest.
    """
    groups: list[list[Segment]] = []
    total_bytes = 0
    alone = False
    touched: dict[int, int] = {}  # parameter records that the bucket needs, with their shares
    for segment in segments:
        cost_bytes = segment.cost_bytes(remote, moves_gradients)
        uses = dict([record]) if (record := record_of(segment.parameter)) is not None else {}
        too_far = sum({**touched, **uses}.values()) > WHOLE
        # Ranks cut by what they have of a parameter, and their collectives must come in one order: so one at a time.
        apart = alone or segment.of.collective
        alone = segment.of.collective
        if not groups or total_bytes + cost_bytes > bucket_bytes or too_far or apart:
            groups.append([])
            total_bytes = 0
            touched.clear()
        groups[-1].append(segment)
        total_bytes += cost_bytes
        touched.update(uses)
    return [Bucket(RecordKey(owner, "optim", first_index + i), group, remote) for i, group in enumerate(groups)]
