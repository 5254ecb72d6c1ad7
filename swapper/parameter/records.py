"""The choice of parameters that are swapped, their records, and the layout of each record.

A record holds whole tensors under their names in `model.state_dict()` and nothing else, one after another without
holes, so that its published form opens with every tool that knows safetensors. Those whose size is a multiple of 64
bytes come first, each then aligned for the kernels that use it in location. The others follow tightly packed, and are
copied to aligned locations behind them when the record is in a buffer. So are those whose elements are in another order
than that of their indices (channels_last), because the format has them in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from swapper.errors import ConfigError
from swapper.io.devices import is_accelerator
from swapper.parameter.candidates import (
    Candidate,
    candidates_of,
    memory_of,
    modules_with_tensors,
    names_by_storage,
    summary_of_what_stays,
    used_by,
    why_not,
)
from swapper.parameter.device_sums import DeviceSums
from swapper.parameter.fsdp import check_groups, shards_of
from swapper.sizes import ALIGNMENT_BYTES, PAGE_BYTES, format_bytes, round_up
from swapper.storage.budget import WHOLE, ParameterNeeds
from swapper.storage.device_pool import DevicePool
from swapper.storage.layout import Entry, RecordLayout, plan_whole_tensors
from swapper.storage.spans import Span
from swapper.tensors.dtypes import NAMES
from swapper.tensors.evicted import make_ordinary
from swapper.tensors.homes import home_of
from swapper.tensors.other_tensors import PATIENCE_S, OtherTensors, Patience
from swapper.tensors.packed_codes import CodeForm
from swapper.tensors.sharded import part_name

__all__ = [
    "GROUP_BYTES",
    "DeviceNeeds",
    "DeviceRoom",
    "LayOut",
    "ParameterLocation",
    "ParameterPlan",
    "ParameterRecord",
    "check_devices",
    "check_torch",
    "device_bytes_of",
    "device_needs_of",
    "needs_of",
    "plan_parameters",
    "plan_record_of",
    "sums_bytes_of",
]

LayOut = Callable[[int, Sequence[Candidate]], "ParameterRecord"]
"""Lays out a record: takes its number, and what is to be in it."""

_DEVICE_BLOCK_BYTES = 512
"""Allocators of accelerators round up to multiples of it."""

_STAGED_AT_ONCE = 3
"""Records that come to a device without the pool: two arrive while one is copied to its parameters' tensors."""

GROUP_BYTES = 16 << 20
"""Small modules that follow one another share a record of about this size: one long transfer instead of many short."""


@dataclass(eq=False, slots=True)
class ParameterLocation:
    """The location of a parameter in its record.

    Attributes:
        parameter: a parameter; or a buffer, or a tensor inside either, which are swapped in the same way.
        aliases: other tensors of the same shape and strides, which have the same values in the same memory.
        name: in the model's state dict.
        file_offset_bytes: in the file.
        offset_bytes: in the buffer, for the kernels; a multiple of 64, and often the same.
    """

    parameter: torch.Tensor
    name: str
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    file_offset_bytes: int
    offset_bytes: int
    aliases: tuple[torch.Tensor, ...] = ()
    laid_out: torch.Size | None = None
    """The shape that it had when its record was laid out, if it has another now."""
    given: int = 0
    """Count of assignments of other data to its tensor, as by `p.data = ...`."""
    form: CodeForm | None = None
    """Of a weight in files of somebody else whose codes may be in two orders: see [Note: packed codes]."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that see the values while they are in memory."""
        return self.parameter, *self.aliases

    @property
    def numel(self) -> int:
        """Elements."""
        return self.shape.numel()

    @property
    def length_bytes(self) -> int:
        """Bytes of the values."""
        return self.numel * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """True if memory has the elements in the order of their indices."""
        return torch.empty_strided(self.shape, self.stride, device="meta").is_contiguous()

    def view(self, values: torch.Tensor) -> torch.Tensor:
        """Give `values`, 1-D, the shape and strides of the parameter."""
        return values.as_strided(self.shape, self.stride)


@dataclass(eq=False, slots=True)
class ParameterRecord:
    """Parameters that are swapped together.

    Attributes:
        number: position in the order of registration.
        file_bytes: length of the file, a multiple of 4096.
        length_bytes: length of a buffer for it; more than the file where parameters have aligned copies.
        spans: of files of somebody else that have it until it is changed. `file_bytes` is then for when it is.
        sharded: it has the shards of a group of FSDP2, which alone uses them: see [Note: FSDP2].
    """

    number: int
    locations: tuple[ParameterLocation, ...]
    layout: RecordLayout
    file_bytes: int
    length_bytes: int
    spans: tuple[Span, ...] = ()
    sharded: bool = False


@dataclass(eq=False, slots=True)
class ParameterPlan:
    """The parameters of one model that are swapped, and what their records need of the pool.

    Attributes:
        records: in order of registration.
        stays: why each of the others stays in memory, by name.
        resident: records that stay in the pool.
        device_resident: records that stay on the accelerator.
        needs: of the pool.
        summary: which parameters stay in memory, why, and what to do; "" if there is nothing to say.
        device_needs: of the accelerator that the parameters are on; None of those on the CPU.
    """

    records: list[ParameterRecord]
    stays: dict[str, str]
    resident: set[ParameterRecord]
    device_resident: set[ParameterRecord]
    needs: ParameterNeeds
    summary: str
    device_needs: DeviceNeeds | None

    @property
    def kept_bytes(self) -> int:
        """Length of a pool that has all records."""
        return sum(round_up(record.length_bytes, PAGE_BYTES) for record in self.records)

    def room(self, device_bytes: int | None, staging_bytes: int) -> DeviceRoom | None:
        """Give what records may have of an accelerator's memory, still without staging. None for the CPU."""
        needs = self.device_needs
        return None if needs is None else DeviceRoom(needs.device, needs.record_bytes(device_bytes, staging_bytes))

    def where(self) -> Mapping[torch.Tensor, tuple[int, int]]:
        """The number of the record of each parameter, and its share of room for one; of those that still exist.

        Records whose shares are no more than `WHOLE` together are no longer than the longest, in the pool and on an
        accelerator.
        """
        found: MutableMapping[torch.Tensor, tuple[int, int]] = WeakIdKeyDictionary()
        longest_bytes = max((record.length_bytes for record in self.records), default=0)
        on_device_bytes = max(map(device_bytes_of, self.records), default=0)
        for record in self.records:
            share = WHOLE * record.length_bytes // longest_bytes
            if self.device_needs is not None:
                share = max(share, WHOLE * device_bytes_of(record) // on_device_bytes)
            found.update((location.parameter, (record.number, share)) for location in record.locations)
        return found


class DeviceRoom(NamedTuple):
    """The memory of an accelerator that records may have.

    Attributes:
        device: the accelerator.
        limit_bytes: the most that records may take at once, beside what is needed to sum them, and `staging`.
        staging: memory there that records come to without the pool; None if none do.
    """

    device: torch.device
    limit_bytes: int
    staging: DevicePool | None = None


@dataclass(frozen=True)
class DeviceNeeds:
    """The needs of the parameters of one model of an accelerator's memory.

    Attributes:
        device: the accelerator.
        least_bytes: what will do.
        wanted_bytes: what lets the next two records come while one module runs.
        beside_bytes: the part of either that sums take, and not records.
        staging_bytes: what is needed besides for records to come without the pool.
        why: `least_bytes` in words.
    """

    device: torch.device
    least_bytes: int
    wanted_bytes: int
    beside_bytes: int
    staging_bytes: int
    why: str

    def why_not_direct(self, device_bytes: int | None) -> str:
        """Say why `device_bytes`, which the user gives, or does not, have no room for staging; "" if they have."""
        needed_bytes = self.least_bytes + self.staging_bytes
        if device_bytes is None or device_bytes >= needed_bytes:
            return ""
        return (
            f"offload_param.device_bytes: {format_bytes(device_bytes)} have no room for {_STAGED_AT_ONCE} records that "
            f"arrive; set it to at least {needed_bytes}"
        )

    def added_to(self, others: DeviceNeeds) -> DeviceNeeds:
        """The needs of these and of `others`, which do not come without the pool."""
        least, wanted = self.least_bytes + others.least_bytes, self.wanted_bytes + others.wanted_bytes
        beside, why = self.beside_bytes + others.beside_bytes, f"{self.why} + {others.why}"
        return DeviceNeeds(self.device, least, wanted, beside, self.staging_bytes, why)

    def record_bytes(self, device_bytes: int | None, staging_bytes: int = 0) -> int:
        """Bytes for records, of the `device_bytes` that the user gives, or does not; of those given, less staging.

        Raises:
            ConfigError: they are too few.
        """
        if device_bytes is not None and device_bytes < self.least_bytes:
            raise ConfigError(
                f"offload_param.device_bytes: {format_bytes(device_bytes)} are too few for the parameters on "
                f"{self.device}: {self.why} are needed; set it to at least {self.least_bytes}"
            )
        return (self.wanted_bytes if device_bytes is None else device_bytes - staging_bytes) - self.beside_bytes


def plan_parameters(
    model: torch.nn.Module,
    bucket_bytes: int,
    resident_bytes: int,
    device_resident_bytes: int,
    step_in_backward: bool,
    lay_out: LayOut | None = None,
    why_stays: Callable[[torch.Tensor], str] | None = None,
    device: torch.device | None = None,
    beside_bytes: Callable[[Sequence[torch.Tensor]], int] | None = None,
) -> ParameterPlan:
    """Plan which parameters of `model` are swapped.

    Args:
        model: its parameters are in memory, or on the meta device.
        bucket_bytes: a buffer is longer, but for a few pages, only if one module's parameters are.
        resident_bytes: the first records stay in the pool, as far as they are this long together.
        device_resident_bytes: of a model on an accelerator the first records stay there, as far as they are this long
            together; `resident_bytes` is then for those after them.
        step_in_backward: records of the last bucket that was stepped stay beside those that backward uses.
        lay_out: makes each record; None: `plan_record_of`.
        why_stays: gives the reason why a parameter stays in memory, or ""; None: `why_not`.
        device: that the parameters are used on; None: their own.
        beside_bytes: gives what a buffer has beside the values of some tensors; None: as `plan_record_of` lays out.

    Raises:
        ConfigError: as `check_groups`; or the model has parameters, and not one byte of them can be moved.
    """
    check_groups(model)
    for p in model.parameters():
        make_ordinary(p)  # Made of one that was swapped before, as by `weight_norm`.
    groups = _Groups(bucket_bytes, beside_bytes or _copies_bytes)
    records, stays, tensors = _group(model, groups, lay_out or plan_record_of, why_stays or why_not)
    moved_bytes = sum(location.length_bytes for record in records for location in record.locations)
    summary = summary_of_what_stays(model, moved_bytes, stays, tensors, GROUP_BYTES)
    on = device or next((p.parameter.device for record in records for p in record.locations), torch.device("cpu"))
    on_device = bool(records) and is_accelerator(on)
    device_resident = _first_of(records, device_resident_bytes, device_bytes_of) if on_device else set()
    others = (record for record in records if record not in device_resident)
    resident = _first_of(others, resident_bytes, lambda record: record.length_bytes)
    device_needs = device_needs_of(model, records, device_resident, on) if on_device else None
    needs = needs_of(model, records, resident, step_in_backward, on_host=not on_device)
    return ParameterPlan(records, stays, resident, device_resident, needs, summary, device_needs)


def check_torch() -> None:
    """Refuse a torch that does not say which hooks for saved tensors are in force: those before 2.8.

    Raises:
        ConfigError: it is one.
    """
    if not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):
        raise ConfigError(
            f"offload_param needs PyTorch 2.8 or newer, and this is {torch.__version__}; install that, or use "
            "offload_param.device: none (the optimizer's state and gradients can be offloaded)"
        )


def check_devices(model: torch.nn.Module) -> None:
    """Refuse a model whose parameters are on no device that they can be swapped from, or on several.

    Raises:
        ConfigError: they are; or as `check_torch`.
    """
    check_torch()
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta":
            raise ConfigError(f"parameter {name} is on the meta device and has no values; give the model memory first")
        if parameter.device.type != "cpu" and not is_accelerator(parameter.device):
            raise ConfigError(
                f"offload_param: swapping cannot work for parameter {name} on {parameter.device}; move the model to "
                "the CPU or to an accelerator, or use offload_param.device: none"
            )
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1:
        raise ConfigError(
            f"offload_param: swapping cannot work for a model on several devices ({', '.join(devices)}) in this "
            "version of swapper; move it to one of them, or use offload_param.device: none"
        )


def _group(
    model: torch.nn.Module, groups: _Groups, lay_out: LayOut, why_stays: Callable[[torch.Tensor], str]
) -> tuple[list[ParameterRecord], dict[str, str], dict[str, torch.Tensor]]:
    """Group the tensors of `model` into records.

    Returns:
        The records; the reason why each of the others stays, by name; and all tensors that were looked at, by name.
    """
    stays: dict[str, str] = {}
    seen: dict[torch.Tensor, str] = {}
    sharing = names_by_storage(model)
    others_of_it = OtherTensors(Patience(PATIENCE_S))
    shards, shards_of_group = shards_of(model), dict[int, list[Candidate]]()
    for prefix, module in modules_with_tensors(model):
        units: dict[bool, list[Candidate]] = {True: [], False: []}
        for candidate in candidates_of(prefix, module):
            tensor, name = candidate.tensor, candidate.name
            if tensor in seen:
                continue
            seen[tensor] = name
            reason = "it belongs to a ScriptModule" if isinstance(module, torch.jit.ScriptModule) else ""
            reason = reason or candidate.why_not or why_stays(tensor)
            shard = shards.get(id(tensor))
            aliases = (*candidate.aliases, *(shard.views if shard is not None else ()))
            if not reason and tensor.device.type != "meta" and home_of(tensor) is None:
                names = sharing.get(memory_of(tensor), ())
                if others := [other for other in names if other != name]:
                    reason = f"it shares memory with {', '.join(others)}"
                elif others_of_it.view(tensor, aliases):
                    reason = "a tensor that is neither a parameter nor a buffer of the model shares its memory"
            if reason:
                stays[name] = reason
            elif shard is not None:
                part = candidate._replace(file_name=part_name(name, shard.box))
                shards_of_group.setdefault(shard.group, []).append(part)
            else:
                units[candidate.kept].append(candidate)
        for kept, unit in units.items():
            groups.add(unit, kept)
    records = [lay_out(number, group) for number, group in enumerate(groups.all)]
    for number, group in enumerate(shards_of_group.values(), start=len(records)):
        records.append(lay_out(number, group))
        records[-1].sharded = True
    return records, stays, {name: tensor for tensor, name in seen.items()}


class _Groups:
    """The tensors of each record. Those that are in no state dict have records of their own, as checkpoints have them
    not."""

    def __init__(self, bucket_bytes: int, beside_bytes: Callable[[Sequence[torch.Tensor]], int]) -> None:
        self.all: list[list[Candidate]] = []
        self._bucket_bytes = bucket_bytes
        self._beside_bytes = beside_bytes
        self._last: dict[bool, list[Candidate]] = {}
        self._bytes: dict[bool, tuple[int, int]] = {}  # of the last ones: of their tensors, and of a buffer

    def add(self, unit: list[Candidate], kept: bool) -> None:
        """Add the tensors of one module, which stay together."""
        if not unit:
            return
        tensors = [candidate.tensor for candidate in unit]
        own_bytes = sum(tensor.nbytes for tensor in tensors)
        unit_bytes = own_bytes + self._beside_bytes(tensors)
        group = self._last.get(kept)
        group_bytes, buffer_bytes = self._bytes.get(kept, (0, 0))
        has_room = group_bytes + own_bytes <= GROUP_BYTES and buffer_bytes + unit_bytes <= self._bucket_bytes
        if group is None or not has_room:
            group = self._last[kept] = []
            self.all.append(group)
            group_bytes = buffer_bytes = 0
        self._bytes[kept] = group_bytes + own_bytes, buffer_bytes + unit_bytes
        group += unit


def _copies_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of the values that a buffer has at two places: see the module's docstring."""
    copied = (t for t in tensors if t.nbytes % ALIGNMENT_BYTES != 0 or not t.is_contiguous())
    return sum(round_up(t.nbytes, ALIGNMENT_BYTES) for t in copied)


def plan_record_of(number: int, group: Sequence[Candidate]) -> ParameterRecord:
    """Lay out a record of `group`."""

    def rank(candidate: Candidate) -> int:
        # Of those that are tightly packed, wide elements come first: each tensor is then at a multiple of them.
        p = candidate.tensor
        return 0 if p.nbytes % ALIGNMENT_BYTES == 0 else 17 - p.dtype.itemsize

    ordered = sorted(group, key=rank)  # stable
    layout = plan_whole_tensors(
        [Entry(c.file_name or c.name, NAMES[c.tensor.dtype], _stored_shape(c.tensor)) for c in ordered]
    )
    locations = []
    cursor = round_up(layout.tail_offset_bytes, ALIGNMENT_BYTES)
    for candidate, file_offset in zip(ordered, layout.offsets_bytes, strict=True):
        p, offset = candidate.tensor, file_offset
        if file_offset % ALIGNMENT_BYTES or not p.is_contiguous():
            offset, cursor = cursor, round_up(cursor + p.nbytes, ALIGNMENT_BYTES)
        place = file_offset, offset, candidate.aliases
        locations.append(ParameterLocation(p, candidate.name, p.shape, p.stride(), p.dtype, *place))
    length = max(layout.length_bytes, round_up(cursor, PAGE_BYTES))
    return ParameterRecord(number, tuple(locations), layout, layout.length_bytes, length)


def _stored_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return (*tensor.shape, 2) if tensor.dtype.is_complex else tuple(tensor.shape)


def device_bytes_of(record: ParameterRecord) -> int:
    """Bytes of the parameters of `record` on an accelerator, each in an allocation of its own."""
    return sum(round_up(location.length_bytes, _DEVICE_BLOCK_BYTES) for location in record.locations)


def sums_bytes_of(record: ParameterRecord) -> int:
    """Bytes of what `DeviceSums` and `Check` keep of `record` on an accelerator: three numbers for each parameter."""
    return 3 * round_up(8 * len(record.locations), _DEVICE_BLOCK_BYTES)


def _first_of(
    records: Iterable[ParameterRecord], resident_bytes: int, length_of: Callable[[ParameterRecord], int]
) -> set[ParameterRecord]:
    chosen: set[ParameterRecord] = set()
    for record in records:
        if resident_bytes < length_of(record):
            break
        resident_bytes -= length_of(record)
        chosen.add(record)
    return chosen


def needs_of(
    model: torch.nn.Module,
    records: Sequence[ParameterRecord],
    resident: set[ParameterRecord],
    step_in_backward: bool,
    *,
    on_host: bool,
) -> ParameterNeeds:
    """Sum up what `records` need of the pool, of which `resident` stay; `on_host` if modules use them there."""
    moving = [record for record in records if record not in resident]
    largest = max((record.length_bytes for record in moving), default=0)
    needed = 2 * largest
    why = f"2 x {format_bytes(largest)} (the largest record: one in use, one arriving)"
    together, name = _longest_together(model, moving, lambda record: record.length_bytes)
    if not on_host:  # Modules use them on the device. A step, which files of others have not, uses two here.
        stepped = not any(record.spans for record in moving)
        needed = (2 + stepped) * largest
        using = "two" if stepped else "one"
        why = f"{2 + stepped} x {format_bytes(largest)} (the largest record: {using} in use, one arriving)"
    elif together > needed:
        needed = together
        why = f"{format_bytes(together)} (what {name or 'the model'} uses itself, and the modules it runs in,)"
    if step_in_backward:
        needed += largest
        why += f" + {format_bytes(largest)} (stepped in backward)"
    if resident:
        kept_bytes = sum(record.length_bytes for record in resident)
        needed += kept_bytes
        why += f" + {format_bytes(kept_bytes)} kept resident"
    return ParameterNeeds(needed, why, sum(record.length_bytes for record in records))


def device_needs_of(
    model: torch.nn.Module,
    records: Sequence[ParameterRecord],
    resident: set[ParameterRecord],
    device: torch.device,
) -> DeviceNeeds:
    """Sum up what `records`, of which there are some and of which `resident` stay, need of an accelerator."""
    beside = DeviceSums.bytes_for(max(each.length_bytes for record in records for each in record.locations))
    beside += sum(sums_bytes_of(record) for record in records)
    kept = sum(map(device_bytes_of, resident))
    moving = [record for record in records if record not in resident]
    total = sum(map(device_bytes_of, moving))
    largest = max(map(device_bytes_of, moving), default=0)
    together, name = _longest_together(model, moving, device_bytes_of)
    least = min(max(2 * largest, together), total)
    if together > 2 * largest:
        why = f"{format_bytes(together)} (what {name or 'the model'} uses itself, and the modules it runs in,)"
    else:
        why = f"{format_bytes(least)} (the largest record twice: one in use, one arriving)"
    why += f" + {format_bytes(beside)} (sums of the values)"
    if kept:
        why += f" + {format_bytes(kept)} kept resident"
    wanted = max(least, min(max(together, largest) + 2 * largest, total))
    staging = min(
        _STAGED_AT_ONCE * max(record.file_bytes for record in records), sum(record.file_bytes for record in records)
    )
    return DeviceNeeds(device, least + kept + beside, wanted + kept + beside, beside, staging, why)


def _longest_together(
    model: torch.nn.Module, records: Iterable[ParameterRecord], length_of: Callable[[ParameterRecord], int]
) -> tuple[int, str]:
    """The most bytes of records that are held while a module runs inside others, and the name of that module."""
    used = (record for record in records if not record.sharded)
    record_of = {location.parameter: record for record in used for location in record.locations}
    return _walk("", model, frozenset(), record_of, length_of)


def _walk(  # Not a function within the one above: that would be a cycle, which keeps the parameters.
    name: str,
    module: torch.nn.Module,
    outer: frozenset[ParameterRecord],
    record_of: Mapping[torch.Tensor, ParameterRecord],
    length_of: Callable[[ParameterRecord], int],
) -> tuple[int, str]:
    used = outer | {record_of[p] for p in used_by(module) if p in record_of}
    children = [(f"{name}.{key}".lstrip("."), child) for key, child in module.named_children()]
    below = [_walk(child_name, child, used, record_of, length_of) for child_name, child in children]
    return max([(sum(map(length_of, used)), name), *below], key=lambda item: item[0])
