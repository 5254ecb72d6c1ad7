"""The state of an optimizer put into a checkpoint: records as they lie on disk, the rest as it is in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from swapper.checkpoint.values import encode
from swapper.checkpoint.writer import NewCheckpoint
from swapper.io.checksums import checksum, join_checksums
from swapper.optimizer.plan import parameters_of
from swapper.optimizer.segments import MASTER, Bucket, Segment
from swapper.optimizer.state_dicts import StateRecords
from swapper.optimizer.swapper import OptimizerSwapper
from swapper.sizes import SMALL_BYTES
from swapper.storage.store import RecordKey
from swapper.tensors.dtypes import PLAIN_DTYPES
from swapper.tensors.strides import is_dense

__all__ = [
    "contiguous_stride",
    "described_parameter",
    "dtype_name",
    "kind_of",
    "memory_stride",
    "save_plain_state",
    "save_state",
    "swapper_of",
]

_ROUNDED_NUMEL = 1 << 20


def swapper_of(optimizer: Optimizer) -> OptimizerSwapper | None:
    """What swaps its state; None if that is in `optimizer.state`."""
    swapper = getattr(optimizer, "swapper", None)
    return swapper if swapper is not None and swapper.swaps_state else None


def kind_of(optimizer: Optimizer) -> str:
    """The name of its class, as an index has it."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def save_state(
    optimizer: Optimizer,
    number: int,
    names: Mapping[int, str],
    new: NewCheckpoint,
    values: dict[str, torch.Tensor],
) -> tuple[dict[str, Any], int | None]:
    """Put the state of `optimizer` into `new`: records by a second name where they have files, else written.

    Args:
        number: of the optimizer in the checkpoint.
        names: of the model's parameters, by `id`.
        values: takes the small tensors.

    Returns:
        The fields of `SavedOptimizer`; and how many steps were made, if the state counts them.
    """
    parameters = list(parameters_of(optimizer))
    what = f"optimizer {number}"
    described = [described_parameter(names.get(id(p), ""), p.shape, memory_stride(p), p.dtype) for p in parameters]
    sink = _Sink(new, values, number, described)
    swapper = swapper_of(optimizer)
    if swapper is None:
        buckets = sink.save_memory([optimizer.state.get(p) or {} for p in parameters])
    else:
        buckets = sink.save_records(swapper.settled_records("save_checkpoint"), parameters)
    fields = {
        "kind": kind_of(optimizer),
        "encoding": "exact",
        **_groups(optimizer.param_groups, what, number, values),
        "parameters": described,
        "buckets": buckets,
    }
    return fields, sink.step


def _groups(
    groups: Sequence[Mapping[str, Any]], what: str, number: int, values: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """What an index says of groups. Parameters are counted in their order."""
    options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    places = []
    count = 0
    for group in groups:
        places.append(list(range(count, count + len(group["params"]))))
        count += len(group["params"])
    return {"options": encode(options, f"{what}, options", values, f"optimizer-{number}.options."), "groups": places}


def described_parameter(
    name: str, shape: Sequence[int] | None, stride: Sequence[int], dtype: torch.dtype | None
) -> dict[str, Any]:
    """The fields of `SavedParameter`, without state. What of a parameter is not known is None, or ""."""
    return {
        "name": name,
        "shape": None if shape is None else list(shape),
        "stride": list(stride),
        "dtype": "" if dtype is None else dtype_name(dtype),
        "keys": [],
        "dtypes": {},
        "small": None,
    }


def save_plain_state(
    kind: str,
    groups: Sequence[Mapping[str, Any]],
    described: list[dict[str, Any]],
    states: Sequence[Mapping[str, Any]],
    number: int,
    new: NewCheckpoint,
    values: dict[str, torch.Tensor],
    rounded_to: torch.dtype | None,
) -> tuple[dict[str, Any], int | None]:
    """Put a state that is in memory, as a state dict has it, into `new`.

    Args:
        kind: the class, as `kind_of` names it.
        groups: as in a state dict; the parameters are counted in their order.
        described: from `described_parameter`, for each.
        states: of each; empty if it has none.
        number: of the optimizer in the checkpoint.
        values: takes the small tensors.
        rounded_to: dtype of the parameters that have master weights.

    Returns:
        The fields of `SavedOptimizer`; and how many steps were made, if the state counts them.
    """
    sink = _Sink(new, values, number, described)
    fields = {
        "kind": kind,
        "encoding": "exact",
        **_groups(groups, f"optimizer {number}", number, values),
        "parameters": described,
        "buckets": sink.save_memory(states, rounded_to),
    }
    return fields, sink.step


class _Sink:
    """Writes the state of one optimizer."""

    def __init__(
        self, new: NewCheckpoint, values: dict[str, torch.Tensor], number: int, described: list[dict[str, Any]]
    ) -> None:
        self._new = new
        self._values = values
        self._number = number
        self._described = described
        self.step: int | None = None

    def save_records(self, records: StateRecords, parameters: Sequence[torch.nn.Parameter]) -> list[dict[str, Any]]:
        """State of `parameters` that is in records."""
        buckets = []
        files: dict[RecordKey, tuple[str, int, int]] = {}
        known = ((records.plan.of(p), place) for place, p in enumerate(parameters))
        place_of = {of: place for of, place in known if of is not None}
        for bucket in records.plan.buckets:
            saved = [segment for segment in bucket.segments if segment.of in place_of and segment.has_state]
            if not saved:
                continue
            file = None
            if any(map(_is_in_record, saved)):
                file = f"optimizer-{self._number}-{bucket.key.number:05d}.safetensors"
                if records.store is None:
                    self._write_record(records, bucket, file)
                else:
                    length_bytes, crc32c = records.store.stored_bytes(bucket.key), records.store.checksum(bucket.key)
                    files[bucket.key] = file, length_bytes, crc32c
            segments = [self._segment(segment, place_of.get(segment.of)) for segment in bucket.segments]
            buckets.append({"file": file, "segments": segments})
        if records.store is not None:
            self._new.add_records(records.store, files)
        return buckets

    def _write_record(self, records: StateRecords, bucket: Bucket, file: str) -> None:
        lease = records.stepper.take(bucket)
        assert lease is not None
        try:
            self._new.write_record(file, lease.tensor[: bucket.used_bytes()])
        finally:
            records.cache.release(bucket.key)

    def _segment(self, segment: Segment, place: int | None) -> dict[str, Any]:
        if place is None:
            return {"hole": True, "tie_bits": segment.tie_bits}
        saved: dict[str, Any] = {
            "parameter": place,
            "start": segment.start,
            "stop": segment.stop,
            "whole": segment.whole,
        }
        if not segment.has_state:
            return saved
        parameter = self._described[place]
        if segment.master:
            saved["master"] = segment.master
        slices: dict[str, Any] = {}
        whole: dict[str, Any] = {}
        for key in segment.keys:
            if key in segment.present:
                slot = segment.slots[key]
                parameter["dtypes"][key] = dtype_name(slot.dtype)
                if segment.whole and slot.stride != contiguous_stride(slot.shape):
                    saved.setdefault("strides", {})[key] = list(slot.stride)
            else:
                value = segment.small[key]
                is_slice = not segment.whole and isinstance(value, torch.Tensor) and value.shape == (segment.numel,)
                (slices if is_slice else whole)[key] = value
        if segment.present:
            saved["present"] = sorted(segment.present)
        if segment.checksum is not None:
            saved["parameter_crc32c"] = segment.checksum
            saved["tie_bits"] = segment.tie_bits
            if not segment.master_moves:
                slices[MASTER] = segment.kept_master
        if not parameter["keys"]:
            parameter["keys"] = list(segment.keys)
            if whole:
                parameter["small"] = self._encoded(whole, place, "")
        if slices:
            saved["small"] = self._encoded(slices, place, f"{segment.start}.")
        return saved

    def _encoded(self, state: dict[str, Any], place: int, where: str) -> Any:
        step: Any = state.get("step")
        counts = type(step) in (int, float) or (isinstance(step, torch.Tensor) and step.numel() == 1)
        if self.step is None and counts and 0 <= float(step) < 1 << 53:
            self.step = int(step)
        prefix = f"optimizer-{self._number}.{place}.{where}"
        what = f"optimizer {self._number}, state of parameter {self._described[place]['name'] or place}"
        return encode(state, what, self._values, prefix)

    def save_memory(
        self, states: Sequence[Mapping[str, Any]], rounded_to: torch.dtype | None = None
    ) -> list[dict[str, Any]]:
        """State of all parameters that is in memory. With `rounded_to` there may be masters of parameters so."""
        file = f"optimizer-{self._number}-memory.safetensors"
        segments: list[dict[str, Any]] = []
        tensors: dict[str, torch.Tensor] = {}
        for place, state in enumerate(states):
            described = self._described[place]
            if described["shape"] is None:
                continue
            numel = math.prod(described["shape"])
            segment: dict[str, Any] = {"parameter": place, "start": 0, "stop": numel, "whole": True}
            if rounded_to is not None and MASTER in state:
                master = _in_memory_order(state[MASTER])
                tensors[f"{len(segments)}.{MASTER}"] = master
                segment |= {"master": "stored", "parameter_crc32c": _checksum_rounded(master, rounded_to)}
                state = {key: value for key, value in state.items() if key != MASTER}
            described["keys"] = list(state)
            large = {key: value for key, value in state.items() if _is_large(value)}
            for key, value in large.items():
                described["dtypes"][key] = dtype_name(value.dtype)
                if is_dense(value) and not value.is_contiguous():
                    # In the order of memory, as records have them.
                    segment.setdefault("strides", {})[key] = list(value.stride())
                    value = _in_memory_order(value).view(value.shape)
                tensors[f"{len(segments)}.{key}"] = value
            if large:
                segment["present"] = sorted(large)
            if small := {key: value for key, value in state.items() if key not in large}:
                described["small"] = self._encoded(small, place, "")
            segments.append(segment)
        if not tensors and not any(described["keys"] for described in self._described):
            return []
        if tensors:
            self._new.write_tensors(file, tensors)
        return [{"file": file if tensors else None, "segments": segments}]


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


def dtype_name(dtype: torch.dtype) -> str:
    """As an index has it: "float32"."""
    return str(dtype).removeprefix("torch.")


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return torch.empty(tuple(shape), device="meta").stride()


def memory_stride(p: torch.Tensor) -> list[int]:
    """The strides in whose order the elements of `p` are counted."""
    return list(p.stride() if is_dense(p) else contiguous_stride(p.shape))
