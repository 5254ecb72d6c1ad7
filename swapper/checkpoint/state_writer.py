"""The state of an optimizer put into a checkpoint: records as they lie on disk, the rest as it is in memory."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from swapper.checkpoint.index import (
    SavedBucket,
    SavedHole,
    SavedOptimizer,
    SavedParameter,
    SavedSegment,
)
from swapper.checkpoint.writer import NewCheckpoint, RecordFile, checksum_of
from swapper.errors import SwapError
from swapper.io.checksums import checksum, join_checksums
from swapper.optimizer.plan import parameters_of
from swapper.optimizer.probe import StateSpec
from swapper.optimizer.segments import MASTER, Bucket, OptimizerParameter, Segment
from swapper.optimizer.state_dicts import StateRecords
from swapper.optimizer.swapper import OptimizerSwapper
from swapper.sizes import SMALL_BYTES
from swapper.storage.store import RecordKey
from swapper.tensors.dtypes import PLAIN_DTYPES, dtype_name
from swapper.tensors.sharded import Box, Sharding, box_of, is_sharded, local_of
from swapper.tensors.strides import contiguous_stride, has_ordinary_class, is_dense

__all__ = [
    "StateDict",
    "StateWriter",
    "described_parameter",
    "digest_of_options",
    "kind_of",
    "memory_stride",
    "names_of_parameters",
    "save_state",
    "state_units",
    "sums_of_plain",
    "swapper_of",
]

_ROUNDED_NUMEL = 1 << 20


@dataclass(frozen=True)
class StateDict:
    """All of an optimizer's state dict but the state of parameters.

    Attributes:
        groups: with the options of each.
        rest: what a class, or a hook, adds; state that belongs to no parameter is "state" in it.
    """

    groups: Sequence[Mapping[str, Any]]
    rest: dict[str, Any]

    def options(self) -> list[dict[str, Any]]:
        """Return the options of each group."""
        return [{key: value for key, value in group.items() if key != "params"} for group in self.groups]


def swapper_of(optimizer: Optimizer) -> OptimizerSwapper | None:
    """The swapper of its state; None if that is in `optimizer.state`."""
    swapper = getattr(optimizer, "swapper", None)
    return swapper if swapper is not None and swapper.swaps_state else None


def kind_of(optimizer: Optimizer) -> str:
    """The name of its class, as an index has it."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def names_of_parameters(model: torch.nn.Module) -> dict[int, str]:
    """The first name of each parameter in the model, by the parameter's `id`."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def save_state(
    optimizer: Optimizer,
    number: int,
    names: Mapping[int, str],
    state_dict: StateDict,
    new: NewCheckpoint,
    writes: Callable[[str], bool] = lambda _: True,
) -> StateWriter:
    """Put the state of `optimizer` into `new`: records by a second name where they have files, else written.

    Args:
        number: of the optimizer in the checkpoint.
        names: of the model's parameters, by `id`.
        state_dict: all but the state: see `additions`.
        writes: True of those of `state_units` that are written here.
    """
    parameters = list(parameters_of(optimizer))
    described = [
        described_parameter(names.get(id(p), ""), local_of(p).shape, memory_stride(local_of(p)), p.dtype)
        for p in parameters
    ]
    writer = StateWriter(new, number, kind_of(optimizer), state_dict, described, writes)
    swapper = swapper_of(optimizer)
    if swapper is None:
        states = [_local_state(optimizer, p, names.get(id(p), "")) for p in parameters]
        writer.split = [_split_keys(optimizer.state.get(p) or {}, p) for p in parameters]
        writer.save_memory(states, boxes=[box_of(p) for p in parameters])
    else:
        writer.save_records(swapper.flushed_records(), parameters)
    return writer


def state_units(optimizer: Optimizer, number: int) -> list[tuple[str, int]]:
    """Return what `save_state` writes in one piece or not at all: a name, which is the same on each rank that has
    the same, and a length in bytes."""
    parameters = list(parameters_of(optimizer))
    swapper = swapper_of(optimizer)
    boxes = [box_of(p) for p in parameters]
    small = [(_unit_of_small(number, position, box), 0) for position, box in enumerate(boxes)]
    if swapper is None:
        units = [_unit(number, [(position, box)]) for position, box in enumerate(boxes)]
        values = [(optimizer.state.get(p) or {}).values() for p in parameters]
        lengths = [sum(local_of(v).nbytes for v in each if isinstance(v, torch.Tensor)) for each in values]
        return [*small, *zip(units, lengths, strict=True)]
    records = swapper.flushed_records()
    position_of = _positions(records, parameters)
    return [
        *small,
        *((_unit_of_bucket(number, bucket, position_of), bucket.length_bytes) for bucket in records.plan.buckets),
    ]


def digest_of_options(optimizer: Optimizer, number: int, state_dict: StateDict, new: NewCheckpoint) -> bytes:
    """Of its class, the options of its groups, how many parameters each has, and what it adds to its state dict."""
    prefix = f"optimizer-{number}.options."
    options = state_dict.options()
    counts = [len(group["params"]) for group in optimizer.param_groups]
    encoded = [
        new.encode([kind_of(optimizer), counts, options], f"optimizer {number}, options", prefix),
        new.encode(state_dict.rest, f"optimizer {number}, state_dict", f"{prefix}rest."),
    ]
    try:
        return new.summed(encoded, prefix)
    finally:
        new.drop_values(prefix)


def sums_of_plain(optimizer: Optimizer) -> dict[int, int]:
    """The CRC-32C of each parameter that is no DTensor and has state, by position."""
    swapper = swapper_of(optimizer)
    plan = None if swapper is None else swapper.flushed_records().plan
    found = {}
    for position, p in enumerate(parameters_of(optimizer)):
        of = None if plan is None else plan.of(p)
        has_state = bool(optimizer.state.get(p)) if plan is None else of is not None and of.has_state
        if has_state and not is_sharded(p):
            found[position] = checksum_of(p)
    return found


def _unit(number: int, parts: object) -> str:
    return hashlib.blake2b(repr((number, parts)).encode(), digest_size=16).hexdigest()


def _unit_of_small(number: int, position: int, box: Box) -> str:
    return _unit(number, ("small", position, box))


def _unit_of_bucket(number: int, bucket: Bucket, position_of: Mapping[OptimizerParameter, int]) -> str:
    parts: list[object] = []
    for segment in bucket.segments:
        position = position_of.get(segment.of)
        box = None if position is None else box_of(segment.parameter)
        cut = (segment.start, segment.stop, segment.whole, segment.master, segment.checksum, segment.has_state)
        dtypes = {key: spec.dtype for key, spec in segment.learnt.items()}
        parts.append((position, box, cut, sorted(segment.present), sorted(map(str, dtypes.items()))))
    return _unit(number, parts)


def _positions(records: StateRecords, parameters: Sequence[torch.nn.Parameter]) -> dict[OptimizerParameter, int]:
    return {of: position for position, p in enumerate(parameters) if (of := records.plan.of(p)) is not None}


def _local_state(optimizer: Optimizer, p: torch.nn.Parameter, name: str) -> dict[str, Any]:
    """The state of `p` in `optimizer.state`, of DTensors the local tensors."""
    state: Mapping[str, Any] = optimizer.state.get(p) or {}
    for key, value in state.items():
        if is_sharded(value) and not (is_sharded(p) and Sharding.of(value).covers(Sharding.of(p))):
            raise _other_sharding(key, name)
        if isinstance(value, torch.Tensor) and not is_sharded(value) and not has_ordinary_class(value):
            raise SwapError(
                f"state {key!r} of {name or 'a parameter'} is a {type(value).__name__}, of which more than values "
                "would have to be saved; save the optimizer's state_dict() with torch.save, and the model without it"
            )
    return {key: local_of(value) if is_sharded(value) else value for key, value in state.items()}


def _split_keys(state: Mapping[str, Any], p: torch.Tensor) -> set[str]:
    """The keys of tensors that have an element for each of the parameter's."""
    if is_sharded(p):
        return {key for key, value in state.items() if is_sharded(value)}
    return {key for key, value in state.items() if isinstance(value, torch.Tensor) and value.shape == p.shape}


def _other_sharding(key: str, name: str) -> SwapError:
    return SwapError(
        f"state {key!r} of {name or 'a parameter'} is a DTensor of another shape or other placements than its "
        "parameter, which a checkpoint cannot hold; use torch.distributed.checkpoint, also with swapper.dcp"
    )


def described_parameter(
    name: str, shape: Sequence[int] | None, stride: Sequence[int], dtype: torch.dtype | None
) -> SavedParameter:
    """A parameter without state. What of it is not known is None, or ""."""
    return SavedParameter(
        name=name,
        shape=None if shape is None else list(shape),
        stride=list(stride),
        dtype="" if dtype is None else dtype_name(dtype),
        keys=[],
        dtypes={},
        small=None,
    )


class StateWriter:
    """Writes the state of one optimizer.

    Args:
        number: of the optimizer in the checkpoint.
        kind: its class, as `kind_of` names it.
        state_dict: all but the state. Parameters are counted in the order of the groups.
        described: the parameters, in order; of DTensors, their local tensors.
        writes: see `save_state`.

    Attributes:
        saved: what the index says of it.
        step: how many steps were made, if the state counts them.
        split: of each parameter the keys of state that has an element for each of the parameter's.
    """

    def __init__(
        self,
        new: NewCheckpoint,
        number: int,
        kind: str,
        state_dict: StateDict,
        described: list[SavedParameter],
        writes: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._new = new
        self._writes = writes
        self.split: list[set[str]] = [set() for _ in described]
        self._number = number
        options, rest = state_dict.options(), state_dict.rest
        positions = iter(range(len(described)))
        self.saved = SavedOptimizer(
            kind=kind,
            encoding="exact",
            options=new.encode(options, f"optimizer {number}, options", f"optimizer-{number}.options."),
            groups=[[next(positions) for _ in group["params"]] for group in state_dict.groups],
            parameters=described,
            buckets=[],
            rest=new.encode(rest, f"optimizer {number}, state_dict", f"optimizer-{number}.rest.") if rest else None,
        )
        self.step: int | None = None

    def save_records(self, records: StateRecords, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Save the state of `parameters` that is in records."""
        files: dict[RecordKey, RecordFile] = {}
        if records.plan.encodes:
            self.saved.encoding = records.plan.encodings  # type: ignore[assignment]
        self.saved.encoded_steps = records.bucket_records.steps if records.plan.counts_steps else 0
        position_of = _positions(records, parameters)
        for bucket in records.plan.buckets:
            with_state = [segment for segment in bucket.segments if segment.of in position_of and segment.has_state]
            if not with_state:
                continue
            is_mine = self._writes(_unit_of_bucket(self._number, bucket, position_of))
            segments = [self._segment(segment, position_of.get(segment.of), is_mine) for segment in bucket.segments]
            if not is_mine:
                continue  # Another rank has the same, and writes it.
            file = None
            if any(map(_is_in_record, with_state)):
                key, store = bucket.key, records.store
                file = self._new.name_of(f"optimizer-{self._number}", f"{key.number:05d}")
                if store is None:
                    self._write_record(records, bucket, file)
                else:
                    files[key] = RecordFile(file, store.stored_bytes(key), store.checksum(key))
            self.saved.buckets.append(SavedBucket(file=file, segments=segments))
        if records.store is not None:
            self._new.add_records(records.store, files)

    def _write_record(self, records: StateRecords, bucket: Bucket, file: str) -> None:
        opened = records.bucket_records.take(bucket)
        assert opened.lease is not None
        try:
            # Copied before the lease is the cache's again.
            self._new.write_record(file, opened.lease.tensor[: bucket.used_bytes()])
        finally:
            records.bucket_records.release(opened)

    def _segment(self, segment: Segment, position: int | None, is_mine: bool) -> SavedSegment | SavedHole:
        if position is None:
            return SavedHole(hole=True, tie_bits=segment.tie_bits)
        saved = SavedSegment(parameter=position, start=segment.start, stop=segment.stop, whole=segment.whole)
        if not segment.has_state:
            return saved
        parameter = self.saved.parameters[position]
        saved.master = segment.master  # type: ignore[assignment]
        saved.present = sorted(segment.present)
        slices: dict[str, Any] = {}
        whole: dict[str, Any] = {}
        for key in segment.keys:
            if self._goes_along(segment, key, position):
                self.split[position].add(key)
            if key in segment.present:
                spec = segment.locations[key].spec
                parameter.dtypes[key] = dtype_name(spec.dtype)
                if spec.encoding != "exact":
                    parameter.encodings[key] = spec.encoding  # type: ignore[assignment]
                if segment.whole and spec.stride != contiguous_stride(spec.shape):
                    saved.strides[key] = list(spec.stride)
            else:
                value = segment.small[key]
                is_slice = not segment.whole and isinstance(value, torch.Tensor) and value.shape == (segment.numel,)
                (slices if is_slice else whole)[key] = value
        if segment.checksum is not None:
            assert isinstance(segment.checksum, int)
            saved.parameter_crc32c = segment.checksum
            saved.tie_bits = segment.tie_bits
            if not segment.master_moves:
                slices[MASTER] = segment.kept_master
        if not parameter.keys:  # This is the parameter's first segment; the others have the same.
            parameter.keys = list(segment.keys)
            if whole and self._writes(_unit_of_small(self._number, position, box_of(segment.parameter))):
                parameter.small = self._encoded(whole, position, "")
        if slices and is_mine:
            saved.small = self._encoded(slices, position, f"{segment.start}.")
        return saved

    def _goes_along(self, segment: Segment, key: str, position: int) -> bool:
        """True if the state `key` has an element for each of the parameter's."""
        value = segment.locations[key].spec if key in segment.present else segment.small[key]
        shape = tuple(value.shape) if isinstance(value, (torch.Tensor, StateSpec)) else None
        of = segment.of
        if of.collective and key in of.shardings:
            if not of.shardings[key].covers(Sharding.of(of.parameter)):
                raise _other_sharding(key, self.saved.parameters[position].name)
            return True
        return shape == (tuple(segment.local.shape) if segment.whole else (segment.numel,)) and not of.collective

    def _encoded(self, state: dict[str, Any], position: int, where: str) -> Any:
        step: Any = state.get("step")
        counts = type(step) in (int, float) or (isinstance(step, torch.Tensor) and step.numel() == 1)
        if self.step is None and counts and 0 <= float(step) < 1 << 53:
            self.step = int(step)
        what = f"optimizer {self._number}, state of parameter {self.saved.parameters[position].name or position}"
        return self._new.encode(state, what, f"optimizer-{self._number}.{position}.{where}")

    def save_memory(
        self,
        states: Sequence[Mapping[str, Any]],
        rounded_to: torch.dtype | None = None,
        boxes: Sequence[Box] | None = None,
    ) -> None:
        """Save the state of all parameters that is in memory.

        Args:
            states: of each, as in a state dict; empty if it has none.
            rounded_to: dtype of the parameters that have master weights, if there are any.
            boxes: what each is of a DTensor; None if ranks do not save together.
        """
        file = self._new.name_of(f"optimizer-{self._number}", "memory")
        segments: list[SavedSegment | SavedHole] = []
        tensors: dict[str, torch.Tensor] = {}
        for position, state in enumerate(states):
            parameter = self.saved.parameters[position]
            if parameter.shape is None:
                continue
            prefix = f"{len(segments)}."
            segment = SavedSegment(parameter=position, start=0, stop=math.prod(parameter.shape), whole=True)
            if rounded_to is not None and MASTER in state:
                master = _in_memory_order(state[MASTER])
                tensors[prefix + MASTER] = master
                segment.master, segment.parameter_crc32c = "stored", _checksum_rounded(master, rounded_to)
                state = {key: value for key, value in state.items() if key != MASTER}
            parameter.keys = list(state)
            large = {key: value for key, value in state.items() if _is_large(value)}
            for key, value in large.items():
                parameter.dtypes[key] = dtype_name(value.dtype)
                if is_dense(value) and not value.is_contiguous():
                    # In the order of memory, as records have them.
                    segment.strides[key] = list(value.stride())
                    value = _in_memory_order(value).view(value.shape)
                tensors[prefix + key] = value
            segment.present = sorted(large)
            small = {key: value for key, value in state.items() if key not in large}
            if small and (boxes is None or self._writes(_unit_of_small(self._number, position, boxes[position]))):
                parameter.small = self._encoded(small, position, "")
            if boxes is not None and not self._writes(_unit(self._number, [(position, boxes[position])])):
                for key in large:  # Another rank has the same, and writes it.
                    del tensors[prefix + key]
                continue
            segments.append(segment)
        if tensors:
            self._new.write_tensors(file, tensors)
        if tensors or any(parameter.keys for parameter in self.saved.parameters):
            self.saved.buckets.append(SavedBucket(file=file if tensors else None, segments=segments))


def _in_memory_order(value: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor as they lie, 1-D."""
    return value.detach().as_strided((value.numel(),), (1,))


def _checksum_rounded(master: torch.Tensor, dtype: torch.dtype) -> int:
    """The CRC-32C of the bits of a parameter that is `master` rounded."""
    return join_checksums(
        (checksum(part.to(dtype)), part.numel() * dtype.itemsize) for part in torch.split(master, _ROUNDED_NUMEL)
    )


def _is_large(value: object) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and value.nbytes >= SMALL_BYTES
        and value.dtype in PLAIN_DTYPES
    )


def _is_in_record(segment: Segment) -> bool:
    return bool(segment.present) or (segment.checksum is not None and segment.master_moves)


def memory_stride(p: torch.Tensor) -> list[int]:
    """The strides in whose order the elements of `p` are counted."""
    return list(p.stride() if is_dense(p) else contiguous_stride(p.shape))
