"""The choice of parameters that are swapped, their records, and the layout of each record.

A record holds whole tensors under their names in `model.state_dict()` and nothing else, one after another without
holes, so that its published form opens with every tool that knows safetensors. Those whose size is a multiple of 64
bytes come first, each then aligned for the kernels that use it in location. The others follow tightly packed, and are
copied to aligned locations behind them when the record is in a buffer. So are those whose elements are in another order
than that of their indices (channels_last), because the format has them in that order.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from swapper.errors import ConfigError
from swapper.io.devices import is_accelerator
from swapper.parameter.device_sums import DeviceSums
from swapper.sizes import ALIGNMENT_BYTES, PAGE_BYTES, format_bytes, round_up
from swapper.storage.budget import WHOLE, ParameterNeeds
from swapper.storage.device_pool import DevicePool
from swapper.storage.layout import Entry, RecordLayout, plan_whole_tensors
from swapper.tensors.dtypes import NAMES
from swapper.tensors.evicted import is_ordinary
from swapper.tensors.homes import home_of
from swapper.tensors.other_tensors import PATIENCE_S, OtherTensors, Patience
from swapper.tensors.strides import is_dense, is_plain

__all__ = [
    "GROUP_BYTES",
    "DeviceNeeds",
    "DeviceRoom",
    "ParameterLocation",
    "ParameterPlan",
    "ParameterRecord",
    "check_devices",
    "check_torch",
    "device_bytes_of",
    "modules_with_parameters",
    "plan_parameters",
    "plan_record_of",
    "sums_bytes_of",
    "used_by",
    "why_not",
]

_ALREADY = "it is swapped already"
_EMPTY = "it is empty"
_ADVICE = {
    "it is lazy": "run the model once before swapper.offload",
    "its class is": "tensor subclasses, as of quantised tensors, cannot be moved: offload the model before it is "
    "quantised, or use one whose weights are ordinary parameters",
    "its dtype is": "convert the model to a floating dtype, as with model.to(torch.bfloat16)",
    "it shares memory with": "give each memory of its own (clone), or register one parameter under both names",
    "a tensor that is neither": "delete that tensor, or make it a copy (clone), before swapper.offload",
    "it belongs to a ScriptModule": "offload the module that was scripted instead",
    "its elements do not lie densely": "make it contiguous: p.data = p.data.contiguous()",
    "it is computed from others": "register a leaf as the parameter",
    "it is not contiguous": "make it contiguous: p.data = p.data.contiguous()",
}
"""Advice about a parameter that stays, by the beginning of the reason."""

_DEVICE_BLOCK_BYTES = 512
"""What allocators of accelerators round up to."""

_STAGED_AT_ONCE = 3
"""Records that come to a device without the pool: two arrive while one is copied to its parameters' tensors."""

GROUP_BYTES = 16 << 20
"""Small modules that follow one another share a record of about this size: one long transfer instead of many short."""


@dataclass(eq=False, slots=True)
class ParameterLocation:
    """The location of a parameter in its record.

    Attributes:
        name: in the model's state dict.
        file_offset_bytes: in the file.
        offset_bytes: in the buffer, for the kernels; a multiple of 64, and often the same.
    """

    parameter: torch.nn.Parameter
    name: str
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    file_offset_bytes: int
    offset_bytes: int

    @property
    def numel(self) -> int:
        """Elements."""
        return self.shape.numel()

    @property
    def length_bytes(self) -> int:
        """Bytes of the values."""
        return self.numel * self.dtype.itemsize

    def view(self, values: torch.Tensor) -> torch.Tensor:
        """Give `values`, 1-D, the shape and strides of the parameter."""
        return values.as_strided(self.shape, self.stride)


@dataclass(eq=False, slots=True)
class ParameterRecord:
    """Parameters that are swapped together.

    Attributes:
        number: slot in the order of registration.
        file_bytes: length of the file, a multiple of 4096.
        length_bytes: length of a buffer for it; more than the file where parameters have aligned copies.
    """

    number: int
    locations: tuple[ParameterLocation, ...]
    layout: RecordLayout
    file_bytes: int
    length_bytes: int


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
) -> ParameterPlan:
    """Plan which parameters of `model` are swapped.

    Args:
        model: its parameters are in memory, or on the meta device.
        bucket_bytes: a buffer is longer, but for a few pages, only if one module's parameters are.
        resident_bytes: the first records stay in the pool, as far as they are this long together.
        device_resident_bytes: of a model on an accelerator the first records stay there, as far as they are this long
            together; `resident_bytes` is then for those after them.
        step_in_backward: records of the last bucket that was stepped stay beside those that backward uses.

    Raises:
        ConfigError: the model has DTensors; or it has parameters, and not one byte of them can be moved.
    """
    records, stays = _group(model, bucket_bytes)
    summary = _summary_of_what_stays(model, records, stays)
    device_resident: set[ParameterRecord] = set()
    if records and is_accelerator(records[0].locations[0].parameter.device):
        device_resident = _first_of(records, device_resident_bytes, device_bytes_of)
    others = (record for record in records if record not in device_resident)
    resident = _first_of(others, resident_bytes, lambda record: record.length_bytes)
    device_needs = _device_needs(model, records, device_resident)
    needs = _needs(model, records, resident, step_in_backward, on_host=device_needs is None)
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
        ConfigError: they are.
    """
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


def why_not(parameter: torch.nn.Parameter) -> str:
    """Give the reason why `parameter` stays in memory; "" if it can be swapped."""
    if (home := home_of(parameter)) is not None:
        return _ALREADY if home.temporary is None else ""
    if torch.nn.parameter.is_lazy(parameter):
        return "it is lazy and has no values yet"
    if not is_ordinary(parameter) or not is_plain(parameter):
        return f"its class is {type(parameter).__name__}"
    if parameter.layout is not torch.strided or not is_dense(parameter):
        return "its elements do not lie densely in memory"
    if not parameter.dtype.is_floating_point or parameter.dtype not in NAMES:
        return f"its dtype is {parameter.dtype}"
    if parameter.numel() == 0:
        return _EMPTY
    if not parameter.is_leaf:
        return "it is computed from others"
    if not parameter.is_contiguous() and torch.distributed.is_available() and torch.distributed.is_initialized():
        return (
            "it is not contiguous, and DistributedDataParallel would take its gradient for contiguous while it is away"
        )
    return ""


def modules_with_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules that own parameters, with the prefix of their names, in order of registration, each once."""
    for name, module in model.named_modules():
        if any(parameter is not None for parameter in module._parameters.values()):
            yield f"{name}." if name else "", module


def _names_by_storage(model: torch.nn.Module) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if home_of(tensor) is not None or torch.nn.parameter.is_lazy(tensor):  # It shares memory with nothing.
            continue
        if tensor.layout is torch.strided and is_plain(tensor):
            names.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    return names


def _group(model: torch.nn.Module, bucket_bytes: int) -> tuple[list[ParameterRecord], dict[str, str]]:
    """Group the parameters of `model` into records. Gives those that stay, too, by name, with the reason."""
    stays: dict[str, str] = {}
    seen: set[torch.nn.Parameter] = set()
    sharing = _names_by_storage(model)
    others_of_it = OtherTensors(Patience(PATIENCE_S))
    groups: list[list[tuple[str, torch.nn.Parameter]]] = []
    total_bytes = in_buffer_bytes = 0
    for prefix, module in modules_with_parameters(model):
        unit = []
        for name, parameter in module._parameters.items():
            if parameter is None or parameter in seen:
                continue
            seen.add(parameter)
            reason = "it belongs to a ScriptModule" if isinstance(module, torch.jit.ScriptModule) else ""
            reason = reason or why_not(parameter)
            if not reason and parameter.device.type != "meta" and home_of(parameter) is None:
                names = sharing[parameter.untyped_storage().data_ptr()]
                if others := [other for other in names if other != prefix + name]:
                    reason = f"it shares memory with {', '.join(others)}"
                elif others_of_it.view(parameter):
                    reason = "a tensor that is neither a parameter nor a buffer of the model shares its memory"
            if reason:
                stays[prefix + name] = reason
            else:
                unit.append((prefix + name, parameter))
        unit_bytes = sum(parameter.nbytes for _, parameter in unit)
        buffer_bytes = unit_bytes + sum(round_up(p.nbytes, ALIGNMENT_BYTES) for _, p in unit if _has_copy(p))
        if not unit:
            continue
        if not groups or total_bytes + unit_bytes > GROUP_BYTES or in_buffer_bytes + buffer_bytes > bucket_bytes:
            groups.append([])
            total_bytes = in_buffer_bytes = 0
        groups[-1] += unit
        total_bytes += unit_bytes
        in_buffer_bytes += buffer_bytes
    return [plan_record_of(number, group) for number, group in enumerate(groups)], stays


def _summary_of_what_stays(model: torch.nn.Module, records: Iterable[ParameterRecord], stays: Mapping[str, str]) -> str:
    parameters = dict(model.named_parameters())
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in stays.items():
        if _is_sharded(parameters[name]):
            raise ConfigError(
                f"offload_param.device: nvme cannot work for parameter {name}, a DTensor, in this version of swapper: "
                "offload the model before it is sharded, or use offload_param.device: none"
            )
        if reason not in (_ALREADY, _EMPTY):
            # What it shares its memory with is in `stays`; here parameters of one kind of reason are one line.
            kind = reason if not reason.startswith("it shares memory with") else "it shares memory with another tensor"
            names_by_reason.setdefault(kind, []).append(name)
    moved_bytes = sum(location.length_bytes for record in records for location in record.locations)
    moved_bytes += sum(_length_bytes(parameters[name]) for name, reason in stays.items() if reason == _ALREADY)
    buffers = dict(model.named_buffers())
    buffer_bytes = sum(map(_length_bytes, buffers.values()))
    bytes_of = {
        reason: sum(_length_bytes(parameters[name]) for name in names) for reason, names in names_by_reason.items()
    }
    kept_bytes = sum(bytes_of.values())
    most = kept_bytes + buffer_bytes > moved_bytes and (names_by_reason or buffer_bytes >= GROUP_BYTES)
    if not names_by_reason and not most:
        return ""
    lines = [
        f"{format_bytes(length)} in {len(names_by_reason[reason])} of {len(parameters)} parameters "
        f"({_some(names_by_reason[reason])}): {reason}; "
        + next(advice for beginning, advice in _ADVICE.items() if reason.startswith(beginning))
        for reason, length in sorted(bytes_of.items(), key=lambda item: -item[1])
    ]
    if most and buffers:
        lines.append(
            f"{format_bytes(buffer_bytes)} in {len(buffers)} buffers ({_some(list(buffers))}): buffers are not "
            "swapped; use a model whose weights are parameters"
        )
    total_bytes = moved_bytes + kept_bytes + (buffer_bytes if most else 0)
    text = f"{format_bytes(total_bytes - moved_bytes)} of the {format_bytes(total_bytes)} of this model stay in memory:"
    text = "\n  ".join([text, *lines])
    if names_by_reason and not moved_bytes:
        raise ConfigError(
            "offload_param.device: nvme cannot move a byte of this model's parameters; use offload_param.device: none, "
            f"or change this. {text}"
        )
    return text


def _is_sharded(parameter: torch.nn.Parameter) -> bool:
    # Imports nothing: if the module was not imported there are no DTensors.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(parameter, module.DTensor)


def _length_bytes(tensor: torch.Tensor) -> int:
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(_length_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    with contextlib.suppress(NotImplementedError, RuntimeError):  # As of sparse and lazy ones.
        return tensor.nbytes
    return 0


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _has_copy(parameter: torch.nn.Parameter) -> bool:
    """True if a buffer has the values at two places: see the module's docstring."""
    return parameter.nbytes % ALIGNMENT_BYTES != 0 or not parameter.is_contiguous()


def plan_record_of(number: int, group: Sequence[tuple[str, torch.nn.Parameter]]) -> ParameterRecord:
    """Lay out a record of `group`, parameters with their names."""

    def rank(item: tuple[str, torch.nn.Parameter]) -> int:
        # Of those that are tightly packed, wide elements come first: each tensor is then at a multiple of them.
        p = item[1]
        return 0 if p.nbytes % ALIGNMENT_BYTES == 0 else 17 - p.dtype.itemsize

    ordered = sorted(group, key=rank)  # stable
    layout = plan_whole_tensors(
        [Entry(name, NAMES[p.dtype], (*p.shape, 2) if p.dtype.is_complex else tuple(p.shape)) for name, p in ordered]
    )
    locations = []
    cursor = round_up(layout.tail_offset_bytes, ALIGNMENT_BYTES)
    for (name, p), file_offset in zip(ordered, layout.offsets_bytes, strict=True):
        offset = file_offset
        if file_offset % ALIGNMENT_BYTES or not p.is_contiguous():
            offset, cursor = cursor, round_up(cursor + p.nbytes, ALIGNMENT_BYTES)
        locations.append(ParameterLocation(p, name, p.shape, p.stride(), p.dtype, file_offset, offset))
    length = max(layout.length_bytes, round_up(cursor, PAGE_BYTES))
    return ParameterRecord(number, tuple(locations), layout, layout.length_bytes, length)


def device_bytes_of(record: ParameterRecord) -> int:
    """Bytes of the parameters of `record` on an accelerator, each in an allocation of its own."""
    return sum(round_up(location.length_bytes, _DEVICE_BLOCK_BYTES) for location in record.locations)


def sums_bytes_of(record: ParameterRecord) -> int:
    """Bytes of what `DeviceSums` and `Check` keep of `record` on an accelerator: three numbers for each parameter."""
    return 3 * round_up(8 * len(record.locations), _DEVICE_BLOCK_BYTES)


def used_by(module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters that the forward of `module` itself uses, as far as can be known before it runs."""
    whole = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)
    # These choose another kernel in evaluation if a parameter of a module below them is not an ordinary one.
    yield from module.parameters(recurse=isinstance(module, whole))
    if isinstance(module, torch.nn.TransformerEncoder) and len(module.layers):
        yield from module.layers[0].parameters()  # As does this, by those of its first layer alone.


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


def _needs(
    model: torch.nn.Module,
    records: Sequence[ParameterRecord],
    resident: set[ParameterRecord],
    step_in_backward: bool,
    *,
    on_host: bool,
) -> ParameterNeeds:
    moving = [record for record in records if record not in resident]
    largest = max((record.length_bytes for record in moving), default=0)
    needed = 2 * largest
    why = f"2 x {format_bytes(largest)} (the largest record: one in use, one arriving)"
    together, name = _longest_together(model, moving, lambda record: record.length_bytes)
    if not on_host:  # Modules use them on the device. A step uses those of two buckets here.
        needed = 3 * largest
        why = f"3 x {format_bytes(largest)} (the largest record: two in use, one arriving)"
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


def _device_needs(
    model: torch.nn.Module, records: Sequence[ParameterRecord], resident: set[ParameterRecord]
) -> DeviceNeeds | None:
    locations = [location for record in records for location in record.locations]
    device = next((each.parameter.device for each in locations), torch.device("cpu"))
    if not is_accelerator(device):
        return None
    beside = DeviceSums.bytes_for(max(each.length_bytes for each in locations))
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
    record_of = {location.parameter: record for record in records for location in record.locations}
    return _walk("", model, frozenset(), record_of, length_of)


def _walk(  # Not a function within the one above: that would be a cycle, which keeps the parameters.
    name: str,
    module: torch.nn.Module,
    outer: frozenset[ParameterRecord],
    record_of: Mapping[torch.nn.Parameter, ParameterRecord],
    length_of: Callable[[ParameterRecord], int],
) -> tuple[int, str]:
    used = outer | {record_of[p] for p in used_by(module) if p in record_of}
    children = [(f"{name}.{key}".lstrip("."), child) for key, child in module.named_children()]
    below = [_walk(child_name, child, used, record_of, length_of) for child_name, child in children]
    return max([(sum(map(length_of, used)), name), *below], key=lambda item: item[0])
