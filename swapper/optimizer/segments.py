"""Buckets and segments: how an optimizer's state is cut, laid out in records, and opened for a step.

A segment is a slice of one parameter in memory order, or a whole parameter; a bucket is what is staged together. In a
step a segment is opened (views of the pool buffer, master decoded), stepped by the user's own class, and closed (master
encoded, what the class replaced copied back).

[Note: parameters come and go] `param_groups` is the user's to change at any time. A parameter that is in no group any
more is not stepped, and its state stays, as plain PyTorch keeps `optimizer.state[p]`: if it is put back, training goes
on with that. Only when nobody else holds the parameter does its state go too, since nobody can ask for it. So segments
refer to parameters weakly; those in `param_groups` live because the optimizer holds them. What is known by parameter
lies in one `OptimizerParameter`, found by `OptimizerPlan.of`, and not in dictionaries keyed by `id`: when a parameter
is gone, another may get its `id`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from swapper.io.checksums import checksum
from swapper.io.devices import Copy, DeviceCopies
from swapper.optimizer.cuts import CUT_NUMEL, segment_cuts
from swapper.optimizer.master_codec import join_master, split_master, ties_bytes_max
from swapper.optimizer.probe import StateSpec
from swapper.sizes import ALIGNMENT_BYTES, SMALL_BYTES, round_up
from swapper.storage.buffers import Lease
from swapper.storage.layout import Entry, RecordLayout, plan_record
from swapper.storage.store import RecordKey
from swapper.tensors.dtypes import NAMES, PLAIN_DTYPES
from swapper.tensors.strides import is_dense, same_layout

__all__ = [
    "MASTER",
    "Bucket",
    "Opened",
    "OptimizerParameter",
    "Scratch",
    "Segment",
    "grouped",
    "is_edited",
    "plan_buckets",
    "plan_segments",
]

MASTER = "master_param"
"""Key of the master weights (fp32) in a state dict."""

SEGMENT_NUMEL = 1 << 19
"""Most elements of a segment. torch's scratch for one, a few times 2 MiB in fp32, then fits the caches, and is so small
that the allocator, which adapts to what was freed, goes on giving larger tensors pages of their own."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where a tensor of the state lies in its bucket's record."""

    offset_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def view(self, lease: Lease) -> torch.Tensor:
        return lease.strided_view(self.offset_bytes, self.numel, self.dtype, self.shape, self.stride)


class OptimizerParameter:
    """A parameter that an optimizer has, or had. See [Note: parameters come and go].

    Attributes:
        numel, dtype, stride, device_type: when its state was laid out.
        segments: those that hold its state, in order; there is one set of them at a time.
        buckets: those that have some of `segments`, in order.
        group: number of its group; None while it is in none, so that it is not stepped.
        fused, cut_for_fused: whether its group has `fused=True`; and whether it had when the parameter was cut.
        keeps_whole: it is not cut when it is planned the next time, because a sparse gradient came.
        arrived: gradients that arrived since the last step.
        counted: the gradient that the last of them is in, if it stays in memory.
        stepped: it was stepped in backward, and its gradient is gone until it is cleared.
        left: another optimizer takes its gradients as they arrive.
        hook: tells when a gradient has arrived.
    """

    __slots__ = (
        "_reference",
        "arrived",
        "buckets",
        "counted",
        "cut_for_fused",
        "device_type",
        "dtype",
        "fused",
        "group",
        "hook",
        "keeps_whole",
        "left",
        "numel",
        "segments",
        "stepped",
        "stride",
    )

    def __init__(self, parameter: torch.nn.Parameter, group: int | None = None) -> None:
        self._reference = weakref.ref(parameter)
        self.numel = parameter.numel()
        self.dtype = parameter.dtype
        self.stride = tuple(parameter.stride())
        self.device_type = parameter.device.type
        self.segments: tuple[Segment, ...] = ()
        self.buckets: tuple[Bucket, ...] = ()
        self.group = group
        self.keeps_whole = False
        self.fused = self.cut_for_fused = False
        self.arrived = 0
        self.counted: weakref.ref[torch.Tensor] | None = None
        self.stepped = False
        self.left = False
        self.hook: torch.utils.hooks.RemovableHandle | None = None

    @property
    def parameter(self) -> torch.nn.Parameter:
        """The user's. Only while it lives."""
        parameter = self._reference()
        assert parameter is not None, "the parameter is gone"
        return parameter

    @property
    def is_gone(self) -> bool:
        """Whether nobody holds the parameter any more."""
        return self._reference() is None

    @property
    def has_state(self) -> bool:
        """Whether it was stepped, or given state, before."""
        return any(segment.has_state for segment in self.segments)

    def refers_to(self, parameter: torch.Tensor) -> bool:
        """Whether this is of `parameter` itself, and not of a former one that had its `id`."""
        return self._reference() is parameter

    def unhook(self) -> None:
        """Do not look at its gradients any more."""
        hook, self.hook = self.hook, None
        if hook is not None:
            hook.remove()


# [Note: edited parameters] The user may change a bf16 or fp16 parameter between steps: a clamp, an EMA swap,
# `Embedding(max_norm=...)` in forward. The low halves of its masters then say nothing any more. Which elements were
# changed is not known, as the old bits are gone, so one rule must do: if any element was changed, all masters of the
# parameter are made anew, `float(parameter)`. That rule does not depend on how the parameter is cut, which
# `bucket_bytes` decides, and a plain program can follow it in a line. It costs one more pass over the bits of
# parameters that are cut, before the first of their segments is stepped; no traffic, since a parameter is always in
# memory as a whole when a segment of it is stepped. Each segment keeps the checksum of the bits that its masters were
# rounded to; the parameter was edited if any differs.


@dataclass(eq=False, slots=True)
class Segment:
    """A slice of a parameter, and everything that is kept in memory about its state.

    Attributes:
        of: what is known of its parameter.
        start, stop: in elements of the parameter in memory order.
        whole: the class is given the parameter in its own shape; else a flat slice.
        master: dtype bf16 keeps the low 16 bits of an fp32 master ("split"), fp16 all of it ("stored"); "" has none.
        specs: the tensors that move, as learnt in the trial.
        dtypes: the element type of each tensor of the state, as learnt in the trial.
        slots: where they lie; filled by `Bucket`.
        present: keys in `slots` that hold data.
        small: state that never moves, by key.
        keys: the order of keys in the state.
        kept_master: the master of a small parameter, fp32, 1-D.
        checksum: of the parameter's bits when its master was encoded; None when it has no master yet.
        tie_bits: ties of the encoded master.
    """

    of: OptimizerParameter
    start: int
    stop: int
    whole: bool
    master: str
    specs: tuple[StateSpec, ...]
    dtypes: dict[str, torch.dtype]
    slots: dict[str, _Slot] = field(default_factory=dict)
    present: set[str] = field(default_factory=set)
    small: dict[str, Any] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)
    kept_master: torch.Tensor | None = None
    checksum: int | None = None
    tie_bits: int = 0

    @property
    def parameter(self) -> torch.nn.Parameter:
        """The user's. Only while it lives: see `is_live`."""
        return self.of.parameter

    @property
    def is_live(self) -> bool:
        """Whether this has the state of a parameter; else it is a hole in its record, and nobody can ask for it."""
        return not self.of.is_gone

    @property
    def is_stepped(self) -> bool:
        """Whether a step has to look at it: its parameter is in a group."""
        return self.of.group is not None

    @property
    def numel(self) -> int:
        """Elements in the slice."""
        return self.stop - self.start

    @property
    def master_moves(self) -> bool:
        """Whether the master is part of the record."""
        return bool(self.master) and self.of.numel * 4 >= SMALL_BYTES

    @property
    def has_state(self) -> bool:
        """Whether it was stepped, or given state, before."""
        return bool(self.keys) or self.checksum is not None

    def forget(self) -> None:
        """Back to how it was before the first step."""
        self.present.clear()
        self.small.clear()
        self.keys.clear()
        self.kept_master, self.checksum, self.tie_bits = None, None, 0

    def vacate(self) -> None:
        """Its parameter is gone. What stays says how long the hole in the record is."""
        tie_bits = self.tie_bits
        self.forget()
        self.tie_bits = tie_bits

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """`flat`, in memory order, as the class sees it: in the parameter's shape and strides if `whole`."""
        if not self.whole:
            return flat
        p = self.parameter
        return flat.as_strided(p.shape, p.stride()) if p.is_contiguous() or is_dense(p) else flat.view(p.shape)

    def slice_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This segment's elements of `tensor`, which has the parameter's shape, in memory order of the parameter.

        A view, except where strides differ: then one temporary of the tensor's size is made.
        """
        p, tensor = self.parameter, tensor.detach()
        if tensor.is_contiguous() and p.is_contiguous():
            return tensor.as_strided((self.stop - self.start,), (1,), tensor.storage_offset() + self.start)
        if not is_dense(p):
            return tensor.reshape(-1)[self.start : self.stop]
        if not same_layout(tensor, p):
            tensor = torch.empty_strided(p.shape, p.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,))[self.start : self.stop]


def is_edited(segments: Sequence[Segment]) -> bool:
    """Whether a parameter was changed since its masters were encoded. See [Note: edited parameters].

    Args:
        segments: all of the parameter's.

    Returns:
        False if there are no masters yet.
    """
    known = [segment.checksum for segment in segments]
    if all(checksum is None for checksum in known):
        return False
    return None in known or any(
        checksum(segment.slice_of(segment.parameter.detach()).cpu().contiguous()) != segment.checksum
        for segment in segments
    )


def flat_view(tensor: torch.Tensor) -> torch.Tensor | None:
    """The elements in memory order as a 1-D view without history; None where there is no such view."""
    tensor = tensor.detach()
    if not is_dense(tensor):
        return None
    return tensor.as_strided((tensor.numel(),), (1,))


class Scratch:
    """Hands out aligned pieces of one buffer, front to back.

    The last copy from or to it is the transfer of its lease, so that the pool gives the memory to nobody else before.
    """

    def __init__(self, lease: Lease | None) -> None:
        self._lease = lease
        self._cursor = 0

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The next `numel` elements; undefined content; 1-D; starts at a multiple of 64 bytes."""
        length = numel * dtype.itemsize
        if length == 0:
            return torch.empty(0, dtype=dtype)
        assert self._lease is not None, "scratch was not planned for"
        view = self._lease.view(self._cursor, numel, dtype)
        self._cursor += round_up(length, ALIGNMENT_BYTES)
        return view

    def note(self, copy: Copy | None) -> None:
        """`copy`, which is the last that was started, is from or to a piece."""
        if self._lease is not None and copy is not None:
            self._lease.transfer = copy

    def wait(self) -> None:
        """Wait for the copies.

        Raises:
            SwapIOError: the device failed.
        """
        if self._lease is not None and self._lease.transfer is not None:
            self._lease.transfer.wait()
            self._lease.transfer = None

    def reset(self) -> None:
        """Take everything back. Copies to it that follow come after those from it; before the host writes: `wait`."""
        self._cursor = 0


@dataclass(eq=False, slots=True)
class Opened:
    """A segment during a step.

    Attributes:
        bits: the parameter's elements, 1-D; on the host. A view of the parameter where it is on the CPU.
        gradient: the same of its gradient; None where the class is given the user's own parameter.
        master: decoded, fp32, 1-D; None without one.
        tensor: what the class steps on.
        edited: the user has changed the parameter, so the master is made anew from it. Set before it is opened where
            other segments say so, and by opening it where its own bits do.
    """

    segment: Segment
    bits: torch.Tensor | None = None
    gradient: torch.Tensor | None = None
    master: torch.Tensor | None = None
    tensor: torch.nn.Parameter | None = None
    edited: bool = False


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
        self.scratch_bytes = sum(_scratch_bytes(segment, remote) for segment in segments)
        self.layout = self._plan()
        self._remote = remote

    @property
    def length_bytes(self) -> int:
        """The longest the record can be; 0 if nothing of it moves."""
        return self.layout.length_bytes

    def used_bytes(self) -> int:
        """Length of the record as it is now, a multiple of 4096."""
        return self.layout.used_bytes(sum(_tie_bytes(segment) for segment in self.segments))

    def _plan(self) -> RecordLayout:
        entries: list[Entry] = []
        places: list[tuple[Segment, str, torch.dtype, tuple[int, ...], tuple[int, ...]]] = []
        tail_bytes_max = 0
        for number, segment in enumerate(self.segments):
            tensors = [(spec.key, spec.dtype, spec.shape, spec.stride) for spec in segment.specs]
            if segment.master_moves:
                dtype = torch.int16 if segment.master == "split" else torch.float32
                tensors.append((MASTER, dtype, (segment.numel,), (1,)))
                if segment.master == "split":
                    tail_bytes_max += ties_bytes_max(segment.numel)
            for key, dtype, shape, stride in tensors:
                stored = (*shape, 2) if dtype.is_complex else shape
                entries.append(Entry(f"{number}.{key}", NAMES[dtype], stored))
                places.append((segment, key, dtype, shape, stride))
        layout = plan_record(entries, tail_bytes_max)
        for (segment, key, dtype, shape, stride), offset in zip(places, layout.offsets_bytes, strict=True):
            segment.slots[key] = _Slot(offset, dtype, shape, stride, math.prod(shape))
        return layout

    def fetch(
        self,
        active: Sequence[Segment],
        gradients: Mapping[Segment, torch.Tensor],
        scratch: Scratch,
        copies: DeviceCopies,
    ) -> list[Opened]:
        """Get at the parameters and gradients of `active`; starts copying those that are on an accelerator.

        Args:
            active: segments with a gradient, whose parameters are there.
            gradients: slices on the host, 1-D and in memory order, of gradients that are not at their parameters.
            scratch: for copies from an accelerator.
            copies: starts them.
        """
        opened = []
        for segment in active:
            p = segment.parameter
            item = Opened(segment)
            away = gradients.get(segment)
            gradient = p.grad if away is None else None
            assert away is not None or gradient is not None
            if self._remote:
                # Both before `begin`: of what has other strides they are temporaries, made on the current stream.
                values = segment.slice_of(p.detach())
                arrived = None if gradient is None else segment.slice_of(gradient)
                copies.begin()
                item.bits = scratch.take(segment.numel, p.dtype)
                scratch.note(copies.copy(item.bits, values))
                item.gradient = away
                if arrived is not None:
                    item.gradient = scratch.take(segment.numel, arrived.dtype)
                    scratch.note(copies.copy(item.gradient, arrived))
            elif segment.master or not segment.whole:
                item.bits = segment.slice_of(p.detach())
                item.gradient = segment.slice_of(gradient) if gradient is not None else away
            opened.append(item)
        return opened

    def open(self, opened: Sequence[Opened], lease: Lease | None, scratch: Scratch) -> list[dict[str, Any]]:
        """Make the tensors that the class steps on, with their gradients.

        Args:
            opened: from `fetch`, its copies done.
            lease: the record; None if nothing of it moves.
            scratch: for decoded masters and fp32 gradients.

        Returns:
            The state of each.
        """
        states = []
        tie_offsets = self.tie_offsets() if any(item.segment.tie_bits for item in opened) else {}
        for item in opened:
            segment = item.segment
            if item.bits is None:
                item.tensor = segment.parameter
            else:
                assert item.gradient is not None
                values, gradient = item.bits, item.gradient
                if segment.master:
                    values = item.master = self._open_master(item, lease, scratch, tie_offsets.get(segment, 0))
                    gradient = scratch.take(segment.numel, torch.float32).copy_(gradient)
                item.tensor = torch.nn.Parameter(segment.shaped(values))
                item.tensor.grad = segment.shaped(gradient)
            states.append(self.state_of(segment, lease))
        return states

    def state_of(self, segment: Segment, lease: Lease | None) -> dict[str, Any]:
        """The state as the class knows it; what moves are views of `lease`."""
        state: dict[str, Any] = {}
        for key in segment.keys:
            if key in segment.present:
                assert lease is not None
                state[key] = segment.slots[key].view(lease)
            else:
                state[key] = segment.small[key]
        return state

    def decode_master(
        self, segment: Segment, bits: torch.Tensor, lease: Lease | None, out: torch.Tensor, tie_offset_bytes: int
    ) -> bool:
        """Write the master of `segment` to `out` (fp32, 1-D). `bits` are the parameter's.

        Args:
            tie_offset_bytes: of the segment, from `tie_offsets`; any number if it has no ties.

        Returns:
            False if there is none, or the parameter is not the one it was encoded with: `out` is `float(bits)` then.
        """
        if segment.checksum is None or segment.checksum != checksum(bits):
            out.copy_(bits)
            return False
        if segment.master_moves and segment.master == "split":
            assert lease is not None
            ties = lease.view(tie_offset_bytes, _tie_bytes(segment), torch.uint8)
            join_master(bits, segment.slots[MASTER].view(lease), ties, segment.tie_bits, out)
            return True
        kept = segment.kept_master
        if segment.master_moves:
            assert lease is not None
            kept = segment.slots[MASTER].view(lease)
        assert kept is not None
        if kept.data_ptr() != out.data_ptr():
            out.copy_(kept)
        return True

    def encode(self, masters: dict[Segment, tuple[torch.Tensor, torch.Tensor]], lease: Lease | None) -> None:
        """Store masters, and round them to the parameters' dtype, to nearest even.

        Args:
            masters: for each segment that changed: its master (fp32, 1-D) and where the rounded bits go (1-D).
            lease: the record, which also holds the ties of segments that did not change.
        """
        old = self._kept_ties(lease, masters)
        cursor = self.layout.tail_offset_bytes
        for segment in self.segments:
            master, bits = masters.get(segment, (None, None))
            if master is not None and bits is not None:
                if segment.master == "split" and segment.master_moves:
                    assert lease is not None
                    ties = lease.view(cursor, ties_bytes_max(segment.numel), torch.uint8)
                    segment.tie_bits = split_master(master, bits, segment.slots[MASTER].view(lease), ties)
                    torch.autograd.graph.increment_version(bits)  # As `copy_` would have done it.
                else:
                    bits.copy_(master)
                    self._keep_whole(segment, master, lease)
                segment.checksum = checksum(bits)
            elif segment.tie_bits:
                assert lease is not None
                lease.view(cursor, len(old[segment]), torch.uint8).copy_(old[segment])
            cursor += _tie_bytes(segment)

    def forget(self, segments: Sequence[Segment], lease: Lease | None) -> None:
        """Have `segments` as they were before the first step. The state of the others stays.

        Args:
            segments: some of the bucket's.
            lease: the record, which also holds the ties of the others.
        """
        old = self._kept_ties(lease, segments)
        for segment in segments:
            segment.forget()
        cursor = self.layout.tail_offset_bytes
        for segment, ties in old.items():
            if segment.tie_bits:
                assert lease is not None
                lease.view(cursor, len(ties), torch.uint8).copy_(ties)
                cursor += len(ties)

    def _kept_ties(self, lease: Lease | None, without: Container[Segment]) -> dict[Segment, torch.Tensor]:
        """Copies of the ties in the record, except those of `without`; for they may move within it."""
        if not any(segment.tie_bits and segment not in without for segment in self.segments):
            return {}
        assert lease is not None
        return {
            segment: lease.view(offset, _tie_bytes(segment), torch.uint8).clone()
            for segment, offset in self.tie_offsets().items()
            if segment not in without
        }

    def _keep_whole(self, segment: Segment, master: torch.Tensor, lease: Lease | None) -> None:
        if segment.master_moves:
            assert lease is not None
            kept = segment.slots[MASTER].view(lease)
        else:
            if segment.kept_master is None:
                segment.kept_master = torch.empty(segment.numel, dtype=torch.float32)
            kept = segment.kept_master
        if kept.data_ptr() != master.data_ptr():
            kept.copy_(master)

    def close(self, segment: Segment, state: dict[str, Any], lease: Lease | None) -> list[str]:
        """Keep `state`: what moves in `lease`, the rest in memory.

        Returns:
            Keys of state that should move but was not planned for, because the trial did not see it.
        """
        segment.keys = list(state)
        segment.present.clear()
        segment.small.clear()
        unplanned = []
        for key, value in state.items():
            slot = segment.slots.get(key)
            if isinstance(value, torch.Tensor) and slot is not None and _fits(value, slot):
                assert lease is not None
                if value.data_ptr() != lease.address + slot.offset_bytes or value.stride() != slot.stride:
                    slot.view(lease).copy_(value)
                segment.present.add(key)
                continue
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                if value.nbytes >= SMALL_BYTES:
                    unplanned.append(key)
                if lease is not None and lease.pool_has(value):
                    value = value.clone()
            segment.small[key] = value
        return unplanned

    def finish(self, lease: Lease) -> int:
        """Write the record's header. Returns the record's length, a multiple of 4096."""
        tail_bytes = sum(_tie_bytes(segment) for segment in self.segments)
        header = self.layout.header(tail_bytes)
        lease.tensor[: len(header)].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        return self.layout.used_bytes(tail_bytes)

    def _open_master(self, item: Opened, lease: Lease | None, scratch: Scratch, tie_offset_bytes: int) -> torch.Tensor:
        segment, bits = item.segment, item.bits
        assert bits is not None
        if segment.master_moves:
            if segment.master == "split":
                master = scratch.take(segment.numel, torch.float32)
            else:
                assert lease is not None
                master = segment.slots[MASTER].view(lease)
        else:
            if segment.kept_master is None:
                segment.kept_master = torch.empty(segment.numel, dtype=torch.float32)
            master = segment.kept_master
        if item.edited:
            master.copy_(bits)
        elif not self.decode_master(segment, bits, lease, master, tie_offset_bytes):
            item.edited = segment.checksum is not None
        return master

    def write_back(self, item: Opened, copies: DeviceCopies, scratch: Scratch) -> None:
        """Bring the stepped values to the parameter, where the class did not step on its own memory."""
        if item.bits is None:
            return
        segment = item.segment
        if not self._remote and segment.parameter.is_contiguous():
            return  # `bits` are a view of it.
        parameter = segment.parameter.detach()
        flat = flat_view(parameter)
        if flat is None:
            whole = parameter.reshape(-1)  # A copy, as it was cut.
            whole[segment.start : segment.stop].copy_(item.bits)
            parameter.copy_(whole.view(parameter.shape))
        elif self._remote:
            scratch.note(copies.copy(flat[segment.start : segment.stop], item.bits))

    def tie_offsets(self) -> dict[Segment, int]:
        """Where in the record the ties begin of each segment that has any, in bytes; until a master is encoded."""
        offsets: dict[Segment, int] = {}
        cursor = self.layout.tail_offset_bytes
        for segment in self.segments:
            if segment.tie_bits:
                offsets[segment] = cursor
                cursor += _tie_bytes(segment)
        return offsets


def _tie_bytes(segment: Segment) -> int:
    return (segment.tie_bits + 7) // 8


def _fits(tensor: torch.Tensor, slot: _Slot) -> bool:
    return (
        tensor.dtype is slot.dtype and tensor.shape == slot.shape and tensor.is_cpu and tensor.layout is torch.strided
    )


def grouped(segments: Iterable[Segment]) -> dict[OptimizerParameter, list[Segment]]:
    """Segments by the parameter that they are of, in order."""
    found: dict[OptimizerParameter, list[Segment]] = {}
    for segment in segments:
        found.setdefault(segment.of, []).append(segment)
    return found


# --- Planning ------------------------------------------------------------------------------------------------------


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
) -> list[Segment]:
    """Cut one parameter.

    Args:
        of: what is known of it.
        specs: its state, as learnt in the trial for the whole parameter.
        segmented: its class may be stepped on slices.
        low_precision, threads: see `layout.segment_cuts`.
        master: see `Segment`.
        bucket_bytes: most bytes of one segment's record and scratch; exceeded only where `segmented` is False.
        remote: the parameter is on an accelerator.
    """
    shape, numel = tuple(of.parameter.shape), of.numel
    moving = tuple(
        spec
        for spec in specs
        if spec.dtype in PLAIN_DTYPES and math.prod(spec.shape) * spec.dtype.itemsize >= SMALL_BYTES
    )
    dtypes = {spec.key: spec.dtype for spec in specs}
    whole = Segment(of, 0, numel, True, master, moving, dtypes)
    if not segmented or (_cost_bytes(whole, remote) <= bucket_bytes and numel <= SEGMENT_NUMEL):
        return [whole]
    like = [spec for spec in moving if spec.shape == shape]
    # In eighths of a byte, because the ties of a split master take one bit.
    eighths = 8 * sum(spec.dtype.itemsize for spec in like) + 8 * _scratch_bytes_per_element(whole, remote)
    if whole.master_moves:
        eighths += 8 * 2 + 1 if master == "split" else 8 * 4
    room_bytes = bucket_bytes - ALIGNMENT_BYTES * (len(like) + 8)
    numel_max = max(min(8 * room_bytes // max(eighths, 1), SEGMENT_NUMEL), CUT_NUMEL)
    return [
        Segment(
            of,
            start,
            stop,
            False,
            master,
            tuple(StateSpec(spec.key, spec.dtype, (stop - start,), (1,)) for spec in like),
            dtypes,
        )
        for start, stop in segment_cuts(numel, numel_max, low_precision=low_precision, threads=threads)
    ]


def plan_buckets(
    owner: int,
    first_index: int,
    segments: Sequence[Segment],
    bucket_bytes: int,
    remote: bool,
    record_of: Callable[[torch.nn.Parameter], tuple[int, int] | None],
    largest_record_bytes: int,
) -> list[Bucket]:
    """Group segments, in order, into buckets of at most `bucket_bytes` of record and scratch (or of one segment).

    Args:
        owner, first_index, remote: of the buckets.
        segments: in order.
        bucket_bytes: the most, except of one segment.
        record_of: where a parameter is on disk too, the number of the record that has it, and its bytes.
        largest_record_bytes: of all those. A step needs all records of a bucket at once, so together they are no longer
            than that.
    """
    buckets: list[Bucket] = []
    group: list[Segment] = []
    total_bytes = 0
    touched: dict[int, int] = {}

    def finish() -> None:
        nonlocal total_bytes
        if group:
            buckets.append(Bucket(RecordKey(owner, "optim", first_index + len(buckets)), group, remote))
            group.clear()
            touched.clear()
            total_bytes = 0

    for segment in segments:
        cost_bytes = _cost_bytes(segment, remote)
        uses = dict([record]) if (record := record_of(segment.parameter)) is not None else {}
        too_far = sum({**touched, **uses}.values()) > largest_record_bytes
        if total_bytes + cost_bytes > bucket_bytes or too_far:
            finish()
        touched.update(uses)
        group.append(segment)
        total_bytes += cost_bytes
    finish()
    return buckets


def _cost_bytes(segment: Segment, remote: bool) -> int:
    stored = sum(round_up(math.prod(spec.shape) * spec.dtype.itemsize, ALIGNMENT_BYTES) for spec in segment.specs)
    if segment.master_moves:
        per_element = 2 if segment.master == "split" else 4
        stored += round_up(per_element * segment.numel, ALIGNMENT_BYTES)
        stored += ties_bytes_max(segment.numel) if segment.master == "split" else 0
    return stored + _scratch_bytes(segment, remote)


def _scratch_bytes_per_element(segment: Segment, remote: bool) -> int:
    master = 0
    if segment.master:
        master = 8 if segment.master == "split" and segment.master_moves else 4
    return master + (2 * segment.of.dtype.itemsize if remote else 0)


def _scratch_bytes(segment: Segment, remote: bool) -> int:
    # Each of at most four pieces starts at a multiple of 64 bytes.
    per_element = _scratch_bytes_per_element(segment, remote)
    return round_up(per_element * segment.numel, ALIGNMENT_BYTES) + 4 * ALIGNMENT_BYTES if per_element else 0
