"""Which parameters of a model are swapped, grouped into records, and how each record is laid out.

A record holds whole tensors under their names in `model.state_dict()` and nothing else, one after another without
holes, so that its published form opens with every tool that knows safetensors. Those whose size is a multiple of 64
bytes come first, each then aligned for the kernels that use it in place. The others follow tightly packed, and are
copied to aligned places behind them when the record is in a buffer. So are those whose elements lie in another order
than that of their indices (channels_last), because the format has them in that order.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.utils.weak import WeakIdKeyDictionary

from swapper.codec import SAFETENSORS_NAMES
from swapper.evicted import GradientAwayParameter, home_of
from swapper.layout import ALIGNMENT_BYTES, PAGE_BYTES, Entry, RecordLayout, format_bytes, plan_whole_tensors, round_up
from swapper.trial import is_dense

__all__ = [
    "GROUP_BYTES",
    "OtherTensors",
    "ParameterPlace",
    "ParameterRecord",
    "first_of",
    "least_bytes",
    "modules_with_parameters",
    "plan_parameter_records",
    "plan_record_of",
    "used_by",
    "where",
    "why_not",
]

GROUP_BYTES = 16 << 20
"""Small modules that follow one another share a record of about this size: one long transfer instead of many short."""


@dataclass(eq=False, slots=True)
class ParameterPlace:
    """A parameter in its record.

    Attributes:
        name: in the model's state dict.
        shape, stride, dtype: of the parameter.
        file_offset_bytes: where the file has it.
        offset_bytes: where the buffer has it for the kernels, a multiple of 64; often the same place.
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


@dataclass(eq=False, slots=True)
class ParameterRecord:
    """Parameters that are swapped together.

    Attributes:
        number: place in the order of registration.
        places: the parameters.
        layout: of the file.
        file_bytes: length of the file, a multiple of 4096.
        length_bytes: length of a buffer for it; more than the file where parameters have aligned copies.
    """

    number: int
    places: tuple[ParameterPlace, ...]
    layout: RecordLayout
    file_bytes: int
    length_bytes: int
    moved: tuple[ParameterPlace, ...] = field(init=False)
    """Those whose place in the buffer is not that in the file."""

    def __post_init__(self) -> None:
        self.moved = tuple(place for place in self.places if place.offset_bytes != place.file_offset_bytes)


def why_not(parameter: torch.nn.Parameter) -> str:
    """Why `parameter` stays in memory; "" if it can be swapped."""
    if (home := home_of(parameter)) is not None:
        return "" if home.temporary else "it is swapped already"
    plain = type(parameter) in (torch.nn.Parameter, GradientAwayParameter)
    if not plain or type(parameter.data) is not torch.Tensor:
        return f"its class is {type(parameter).__name__}"
    if parameter.layout is not torch.strided or not is_dense(parameter):
        return "its elements do not lie densely in memory"
    if not parameter.dtype.is_floating_point or parameter.dtype not in SAFETENSORS_NAMES:
        return f"its dtype is {parameter.dtype}"
    if parameter.numel() == 0:
        return "it is empty"
    if not parameter.is_leaf:
        return "it is computed from others"
    if not parameter.is_contiguous() and torch.distributed.is_available() and torch.distributed.is_initialized():
        return (
            "it is not contiguous, and DistributedDataParallel would take its gradient for contiguous while it is away"
        )
    return ""


class OtherTensors:
    """Which parameters share their memory with a tensor that Python code has and that is no parameter of the model.

    What autograd saved of one shares it too, but in C++, and does not count: it has the values of its time, as it
    should, and the version counter says when it must not be used any more. Memory that torch does not own may have
    users besides, such as the NumPy array that a parameter was made of: those cannot be known.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] | None = None

    def view(self, parameter: torch.nn.Parameter) -> bool:
        """Whether such a tensor shares the memory of `parameter`, whose values are there."""
        storage = parameter.untyped_storage()
        if torch._C._storage_Use_Count(storage._cdata) <= 2:  # the parameter's, and that of this Python object
            return False
        if self._counts is None:
            self._counts = _tensors_by_storage()
        return self._counts.get(storage._cdata, 0) > 1


def _tensors_by_storage() -> dict[int, int]:
    """How many tensors that Python code has there are for each storage."""
    counts: dict[int, int] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for item in gc.get_objects():
            kind = type(item)
            # Those that dispatch to Python have no storage of their own.
            if not issubclass(kind, torch.Tensor) or kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
                continue
            with contextlib.suppress(NotImplementedError, RuntimeError):  # As have some others.
                number = item.untyped_storage()._cdata
                counts[number] = counts.get(number, 0) + 1
    return counts


def modules_with_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules that own parameters, with the prefix of their names, in order of registration, each once."""
    for name, module in model.named_modules():
        if any(parameter is not None for parameter in module._parameters.values()):
            yield f"{name}." if name else "", module


def _names_by_storage(model: torch.nn.Module) -> dict[int, list[str]]:
    """The parameters and buffers, each once, in each storage: what changes one of them may change the others."""
    names: dict[int, list[str]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if home_of(tensor) is not None:  # It shares memory with nothing.
            continue
        if tensor.layout is torch.strided and type(tensor.data) is torch.Tensor:
            names.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    return names


def plan_parameter_records(model: torch.nn.Module, bucket_bytes: int) -> tuple[list[ParameterRecord], dict[str, str]]:
    """Group the parameters of `model`.

    Args:
        model: its parameters are in memory, or on the meta device.
        bucket_bytes: a record is longer only if one module's parameters are.

    Returns:
        The records; and for each parameter that stays in memory, by name, the reason.
    """
    stays: dict[str, str] = {}
    seen: set[torch.nn.Parameter] = set()
    sharing = _names_by_storage(model)
    others_of_it = OtherTensors()
    groups: list[list[tuple[str, torch.nn.Parameter]]] = []
    total_bytes = 0
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
        if not unit:
            continue
        if not groups or total_bytes + unit_bytes > min(GROUP_BYTES, bucket_bytes):
            groups.append([])
            total_bytes = 0
        groups[-1] += unit
        total_bytes += unit_bytes
    return [plan_record_of(number, group) for number, group in enumerate(groups)], stays


def plan_record_of(number: int, group: Sequence[tuple[str, torch.nn.Parameter]]) -> ParameterRecord:
    """Lay out a record of `group`, parameters with their names.

    Args:
        number: of the record.
    """

    def rank(item: tuple[str, torch.nn.Parameter]) -> int:
        # Of those that lie tightly packed, the ones with wide elements come first: each is then at a multiple of them.
        p = item[1]
        return 0 if p.nbytes % ALIGNMENT_BYTES == 0 else 17 - p.dtype.itemsize

    ordered = sorted(group, key=rank)  # stable
    layout = plan_whole_tensors(
        [
            Entry(name, SAFETENSORS_NAMES[p.dtype], (*p.shape, 2) if p.dtype.is_complex else tuple(p.shape))
            for name, p in ordered
        ]
    )
    places = []
    cursor = round_up(layout.tail_offset_bytes, ALIGNMENT_BYTES)
    for (name, p), file_offset in zip(ordered, layout.offsets_bytes, strict=True):
        offset = file_offset
        if file_offset % ALIGNMENT_BYTES or not p.is_contiguous():
            offset, cursor = cursor, round_up(cursor + p.nbytes, ALIGNMENT_BYTES)
        places.append(ParameterPlace(p, name, p.shape, p.stride(), p.dtype, file_offset, offset))
    length = max(layout.length_bytes, round_up(cursor, PAGE_BYTES))
    return ParameterRecord(number, tuple(places), layout, layout.length_bytes, length)


def used_by(module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """The parameters that the forward of `module` itself uses, as far as can be known before it runs."""
    whole = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)
    # These choose another kernel in evaluation if a parameter of a module below them is not an ordinary one.
    yield from module.parameters(recurse=isinstance(module, whole))


def where(records: Iterable[ParameterRecord]) -> Mapping[torch.Tensor, tuple[int, int]]:
    """The number of the record of each parameter, and its length in bytes; of those that are still there."""
    found: Mapping[torch.Tensor, tuple[int, int]] = WeakIdKeyDictionary(
        {place.parameter: (record.number, record.length_bytes) for record in records for place in record.places}
    )
    return found


def first_of(records: Iterable[ParameterRecord], resident_bytes: int) -> set[ParameterRecord]:
    """The first records that together take at most `resident_bytes`."""
    chosen: set[ParameterRecord] = set()
    for record in records:
        if resident_bytes < record.length_bytes:
            break
        resident_bytes -= record.length_bytes
        chosen.add(record)
    return chosen


def least_bytes(
    model: torch.nn.Module, records: Sequence[ParameterRecord], resident: set[ParameterRecord], step_in_backward: bool
) -> tuple[int, str]:
    """What the pool must have for parameters, and the sum in words."""
    moving = [record for record in records if record not in resident]
    largest = max((record.length_bytes for record in moving), default=0)
    needed = 2 * largest
    why = f"2 x {format_bytes(largest)} (the largest record: one in use, one arriving)"
    together, name = _longest_together(model, moving)
    if together > needed:
        needed = together
        why = f"{format_bytes(together)} (what {name or 'the model'} uses itself, and the modules it runs in,)"
    if step_in_backward:
        needed += largest
        why += f" + {format_bytes(largest)} (stepped in backward)"
    if resident:
        kept_bytes = sum(record.length_bytes for record in resident)
        needed += kept_bytes
        why += f" + {format_bytes(kept_bytes)} kept resident"
    return needed, why


def _longest_together(model: torch.nn.Module, records: Iterable[ParameterRecord]) -> tuple[int, str]:
    """The most bytes of records that are there while a module runs inside others, and the name of that module."""
    record_of = {place.parameter: record for record in records for place in record.places}

    def walk(name: str, module: torch.nn.Module, outer: frozenset[ParameterRecord]) -> tuple[int, str]:
        used = outer | {record_of[p] for p in used_by(module) if p in record_of}
        below = [walk(f"{name}.{key}".lstrip("."), child, used) for key, child in module.named_children()]
        return max([(sum(record.length_bytes for record in used), name), *below], key=lambda item: item[0])

    return walk("", model, frozenset())
