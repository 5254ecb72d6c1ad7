"""The state of an optimizer put into a checkpoint: records as they lie on disk, the rest as it is in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from swapper.checkpoint.index import (
    SavedBucket,
    SavedHole,
    SavedOptimizer,
    SavedParameter,
    SavedSegment,
    dtype_name,
)
from swapper.checkpoint.writer import NewCheckpoint, RecordFile
from swapper.io.checksums import checksum, join_checksums
from swapper.optimizer.plan import parameters_of
from swapper.optimizer.segments import MASTER, Bucket, Segment
from swapper.optimizer.state_dicts import StateRecords
from swapper.optimizer.swapper import OptimizerSwapper
from swapper.sizes import SMALL_BYTES
from swapper.storage.store import RecordKey
from swapper.tensors.dtypes import PLAIN_DTYPES
from swapper.tensors.strides import contiguous_stride, is_dense

__all__ = [
    "StateWriter",
    "described_parameter",
    "kind_of",
    "memory_stride",
    "names_of_parameters",
    "save_state",
    "swapper_of",
]

_ROUNDED_NUMEL = 1 << 20


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
    optimizer: Optimizer, number: int, names: Mapping[int, str], new: NewCheckpoint
) -> tuple[SavedOptimizer, int | None]:
    """Put the state of `optimizer` into `new`: records by a second name where they have files, else written.

    Args:
        number: of the optimizer in the checkpoint.
        names: of the model's parameters, by `id`.

    Returns:
        What the index says of it; and how many steps were made, if the state counts them.
    """
    parameters = list(parameters_of(optimizer))
    described = [described_parameter(names.get(id(p), ""), p.shape, memory_stride(p), p.dtype) for p in parameters]
    writer = StateWriter(new, number, kind_of(optimizer), optimizer.param_groups, described)
    swapper = swapper_of(optimizer)
    if swapper is None:
        writer.save_memory([optimizer.state.get(p) or {} for p in parameters])
    else:
        writer.save_records(swapper.flushed_records("save_checkpoint"), parameters)
    return writer.saved, writer.step


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
        groups: as in a state dict, but for their parameters, which are counted in the order of the groups.
        described: the parameters, in order.

    Attributes:
        saved: what the index says of it.
        step: how many steps were made, if the state counts them.
    """

    def __init__(
        self,
        new: NewCheckpoint,
        number: int,
        kind: str,
        groups: Sequence[Mapping[str, Any]],
        described: list[SavedParameter],
    ) -> None:
        self._new = new
        self._number = number
        options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        slots = iter(range(len(described)))
        self.saved = SavedOptimizer(
            kind=kind,
            encoding="exact",
            options=new.encode(options, f"optimizer {number}, options", f"optimizer-{number}.options."),
            groups=[[next(slots) for _ in group["params"]] for group in groups],
            parameters=described,
            buckets=[],
        )
        self.step: int | None = None

    def save_records(self, records: StateRecords, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Save the state of `parameters` that is in records."""
        files: dict[RecordKey, RecordFile] = {}
        slot_of = {of: slot for slot, p in enumerate(parameters) if (of := records.plan.of(p)) is not None}
        for bucket in records.plan.buckets:
            with_state = [segment for segment in bucket.segments if segment.of in slot_of and segment.has_state]
            if not with_state:
                continue
            file = None
            if any(map(_is_in_record, with_state)):
                key, store = bucket.key, records.store
                file = f"optimizer-{self._number}-{key.number:05d}.safetensors"
                if store is None:
                    self._write_record(records, bucket, file)
                else:
                    files[key] = RecordFile(file, store.stored_bytes(key), store.checksum(key))
            segments = [self._segment(segment, slot_of.get(segment.of)) for segment in bucket.segments]
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

    def _segment(self, segment: Segment, slot: int | None) -> SavedSegment | SavedHole:
        if slot is None:
            return SavedHole(hole=True, tie_bits=segment.tie_bits)
        saved = SavedSegment(parameter=slot, start=segment.start, stop=segment.stop, whole=segment.whole)
        if not segment.has_state:
            return saved
        parameter = self.saved.parameters[slot]
        saved.master = segment.master  # type: ignore[assignment]
        saved.present = sorted(segment.present)
        slices: dict[str, Any] = {}
        whole: dict[str, Any] = {}
        for key in segment.keys:
            if key in segment.present:
                spec = segment.locations[key].spec
                parameter.dtypes[key] = dtype_name(spec.dtype)
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
            if whole:
                parameter.small = self._encoded(whole, slot, "")
        if slices:
            saved.small = self._encoded(slices, slot, f"{segment.start}.")
        return saved

    def _encoded(self, state: dict[str, Any], slot: int, where: str) -> Any:
        step: Any = state.get("step")
        counts = type(step) in (int, float) or (isinstance(step, torch.Tensor) and step.numel() == 1)
        if self.step is None and counts and 0 <= float(step) < 1 << 53:
            self.step = int(step)
        what = f"optimizer {self._number}, state of parameter {self.saved.parameters[slot].name or slot}"
        return self._new.encode(state, what, f"optimizer-{self._number}.{slot}.{where}")

    def save_memory(self, states: Sequence[Mapping[str, Any]], rounded_to: torch.dtype | None = None) -> None:
        """Save the state of all parameters that is in memory.

        Args:
            states: of each, as in a state dict; empty if it has none.
            rounded_to: dtype of the parameters that have master weights, if there are any.
        """
        file = f"optimizer-{self._number}-memory.safetensors"
        segments: list[SavedSegment | SavedHole] = []
        tensors: dict[str, torch.Tensor] = {}
        for slot, state in enumerate(states):
            parameter = self.saved.parameters[slot]
            if parameter.shape is None:
                continue
            prefix = f"{len(segments)}."
            segment = SavedSegment(parameter=slot, start=0, stop=math.prod(parameter.shape), whole=True)
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
            if small := {key: value for key, value in state.items() if key not in large}:
                parameter.small = self._encoded(small, slot, "")
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
