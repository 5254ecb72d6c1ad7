"""Fused experts whose parts come one by one: which parameters, their records, and what of them stays in the pool.

[Note: experts] A layer uses a few of its experts for each token, and which ones is known when its router has chosen.
So no order is learnt: the choice is read from the arguments of the experts' forward, and all that it names starts to
come at once, as far as there is room. Each expert's slice of each parameter is a record. What stays is what was used
most often, and no read is ever made for what might be chosen next: a token reads what it uses and does not find.

The forward indexes the parameter, or multiplies by groups, and that is answered by parts (`tensors.evicted_parts`).
Whatever else it does brings the parameter whole, as does a forward with gradients of it.

Experts that are modules, in a list, are in no order either: their records come when they are called.

On an accelerator what was used most often stays there, too, and what is wanted is copied up as far as there is room.
The host waits for the router's choice, to read it; a kernel that takes all experts at once has them whole.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch._compile import _disable_dynamo

from swapper.metrics import Metrics
from swapper.parameter.cache import Held, ParameterCache, ParameterPolicy
from swapper.parameter.candidates import Candidate, why_not
from swapper.parameter.conversions import Conversion, has_parts, plan_part
from swapper.parameter.device_sums import DeviceSums
from swapper.parameter.device_tier import DeviceTier
from swapper.parameter.expert_order import ExpertOrder
from swapper.parameter.forward_hooks import ForwardHooks
from swapper.parameter.held_on_device import HeldOnDevice
from swapper.parameter.records import (
    DeviceNeeds,
    DeviceRoom,
    LayOut,
    ParameterLocation,
    ParameterRecord,
    device_bytes_of,
    device_needs_of,
    needs_of,
    sums_bytes_of,
)
from swapper.sizes import format_bytes
from swapper.storage.access_order import Use
from swapper.storage.budget import ParameterNeeds
from swapper.storage.buffers import BufferPool
from swapper.storage.cache import RecordCache
from swapper.storage.growing_pool import GrowingPool
from swapper.storage.layout import Entry, RecordLayout
from swapper.storage.spans import Extent, RecordStore
from swapper.storage.store import RecordKey
from swapper.tensors.dtypes import NAMES
from swapper.tensors.evicted import is_ordinary, refuse_pickle
from swapper.tensors.evicted_parts import multiplies_by_parts

__all__ = [
    "KIND",
    "CallHook",
    "ExpertCache",
    "ExpertHook",
    "ExpertParts",
    "ExpertPlan",
    "Found",
    "FusedParameter",
    "find_called",
    "find_fused",
    "plan_called",
    "plan_parts",
]

KIND = "expert"
"""Of the keys of their records."""

_AT_ONCE = 2
"""Experts that the least pool has room for: one in use, one arriving."""

_KNOWN = frozenset({"LongcatFlashExperts", "Step3p7Experts"})
"""Classes of transformers that take one expert at a time, beside those that `use_experts_implementation` marks."""

_MARKS = ("num_experts", "has_bias", "is_transposed")
"""Attributes that `use_experts_implementation` of transformers gives a module, or expects."""


class Found(NamedTuple):
    """A parameter that has parts: its name and module, and `rows`, as of a `FusedParameter`."""

    name: str
    module: torch.nn.Module
    rows: int = 0


@dataclass(eq=False)
class FusedParameter:
    """A parameter whose parts come one by one.

    Attributes:
        module: that has it; weak, because that has what has this.
        rows: indices of its first dimension that are a part together; 0: each is one by itself, as an expert.
        records: of its parts, in order.
        whole: for uses of all of it. Only while one goes on is it in the pool, beside the parts.
    """

    module: weakref.ref[torch.nn.Module]
    parameter: torch.nn.Parameter
    rows: int
    records: list[ParameterRecord]
    whole: ParameterRecord


def find_fused(
    model: torch.nn.Module,
    extents: Mapping[torch.Tensor, Sequence[Extent] | Conversion],
    least_bytes: int,
    device: torch.device,
) -> tuple[dict[torch.nn.Parameter, Found], list[str]]:
    """Find the parameters of `model` whose parts can come one by one.

    Args:
        extents: of the parameters that are in files.
        least_bytes: a part is at least so long.
        device: that the model computes on.

    Returns:
        Them; and the classes of modules that have fused experts, as it seems, and use them in
        a way that is not known.
    """
    found: dict[torch.nn.Parameter, Found] = {}
    tied: set[torch.nn.Parameter] = set()
    unknown: dict[str, None] = {}
    for prefix, module in model.named_modules():
        known = type(module).__name__ in _KNOWN or all(hasattr(module, mark) for mark in _MARKS)
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.dim() < 3 or parameter.shape[0] < 2:
                continue
            if not known:
                if "expert" in f"{prefix}.{type(module).__name__}".lower():
                    unknown[type(module).__name__] = None
                continue
            if parameter in found:
                tied.add(parameter)
            if not has_parts(extents.get(parameter)):
                continue
            long_enough = parameter.nbytes // parameter.shape[0] >= least_bytes
            if long_enough and parameter.is_contiguous() and is_ordinary(parameter) and not why_not(parameter, device):
                found[parameter] = Found(f"{prefix}.{name}".lstrip("."), module)
    return {parameter: of for parameter, of in found.items() if parameter not in tied}, list(unknown)


def plan_parts(
    found: Mapping[torch.nn.Parameter, Found],
    extents: Mapping[torch.Tensor, Sequence[Extent] | Conversion],
    first_number: int,
    lay_out: LayOut,
) -> list[FusedParameter]:
    """Plan the records of the parameters that `find_fused` and `find_embeddings` gave.

    Args:
        extents: of each, in the order of its memory.
        first_number: of the records of whole ones; those of parts are counted from 0.
        lay_out: makes the records of whole ones.
    """
    planned: list[FusedParameter] = []
    number = 0
    for i, (p, (name, module, rows)) in enumerate(found.items()):
        row_bytes = p.nbytes // p.shape[0]
        length = (rows or 1) * row_bytes
        records = []
        for index, first in enumerate(range(0, p.shape[0], rows or 1)):
            count = min(rows, p.shape[0] - first)
            shape, stride = (torch.Size((count, *p.shape[1:])), p.stride()) if rows else (p.shape[1:], p.stride()[1:])
            # An odd length has other residues mod 64 in the middle of the parameter, and so here: kernels depend on it.
            title = f"{name}[{first}:{first + count}]" if rows else f"{name}[{index}]"
            last = first + (count or 1)
            at, file_bytes, length_bytes, spans = plan_part(p, extents[p], first, last, index * length % 64)
            location = ParameterLocation(p, title, shape, stride, p.dtype, at, at)
            layout = RecordLayout((Entry(title, NAMES[p.dtype], tuple(shape)),), (at,), 0, file_bytes, file_bytes)
            records.append(ParameterRecord(number, (location,), layout, file_bytes, length_bytes, spans))
            number += 1
        whole = lay_out(first_number + i, [Candidate(name, p)])
        planned.append(FusedParameter(weakref.ref(module), p, rows, records, whole))
    longest: dict[int, int] = {}
    for record in (record for each in planned for record in each.records):
        part_bytes = record.locations[0].length_bytes
        longest[part_bytes] = max(longest.get(part_bytes, 0), record.length_bytes)
    for record in (record for each in planned for record in each.records):
        # Pages at the ends make a few of difference. So all of a kind fit wherever one of them was.
        record.length_bytes = longest[record.locations[0].length_bytes]
    return planned


@dataclass(eq=False)
class CalledExpert:
    """An expert that is a module, and comes when that is called.

    Attributes:
        module: weak, because that has what has this.
        records: of its parameters.
    """

    module: weakref.ref[torch.nn.Module]
    records: list[ParameterRecord]


@dataclass(eq=False)
class ExpertPlan:
    """The experts of a model that come one by one.

    Attributes:
        fused, called: of either kind.
        called_bytes: the least of the pool that will do for those that are called.
        device_needs: of the accelerator that the model computes on; None of one on the CPU.
    """

    fused: list[FusedParameter] = field(default_factory=list)
    called: list[CalledExpert] = field(default_factory=list)
    called_bytes: int = 0
    device_needs: DeviceNeeds | None = None

    @property
    def parts(self) -> list[ParameterRecord]:
        """The records of parts."""
        return [record for each in self.fused for record in each.records]

    @property
    def modules(self) -> list[ParameterRecord]:
        """The records of experts that are called."""
        return [record for each in self.called for record in each.records]

    @property
    def records(self) -> list[ParameterRecord]:
        """All: of parts, of experts that are called, and of whole parameters."""
        return [*self.parts, *self.modules, *(each.whole for each in self.fused)]

    @property
    def least_bytes(self) -> int:
        """The least of the pool that will do for all."""
        return _AT_ONCE * max((record.length_bytes for record in self.parts), default=0) + self.called_bytes

    def added_to(self, needs: ParameterNeeds) -> ParameterNeeds:
        """Sum up what these need of the pool besides the `needs` of all else."""
        if not self.fused and not self.called:
            return needs
        why = f"{needs.why} + {format_bytes(self.least_bytes)} (the largest part of an expert twice: in use, arriving)"
        total = sum(record.length_bytes for record in (*self.parts, *self.modules))
        return ParameterNeeds(needs.least_bytes + self.least_bytes, why, needs.total_bytes + total)

    def plan_device(
        self, model: torch.nn.Module, device: torch.device, needs: DeviceNeeds | None
    ) -> DeviceNeeds | None:
        """Sum up what these need of an accelerator, in `device_needs`, and with the `needs` of all else."""
        if not self.least_bytes:
            return needs
        least = wanted = _AT_ONCE * max(map(device_bytes_of, self.parts), default=0)
        of_module = Counter[torch.nn.Module | None]()
        for each in self.fused:
            of_module[each.module()] += device_bytes_of(each.whole)
        wanted = max([wanted, *of_module.values()])  # So that a forward with gradients has room, as it has them whole.
        if self.modules:
            called = device_needs_of(model, self.modules, set(), device)
            least, wanted = least + called.least_bytes - called.beside_bytes, wanted + called.wanted_bytes
        beside = DeviceSums.bytes_for(max(each.length_bytes for r in self.records for each in r.locations))
        beside += sum(map(sums_bytes_of, self.records))
        why = f"{format_bytes(least + beside)} (experts: the largest part twice, and sums)"
        self.device_needs = DeviceNeeds(device, least + beside, wanted + beside, beside, 0, why)
        return self.device_needs if needs is None else needs.added_to(self.device_needs)


def find_called(
    model: torch.nn.Module, extents: Container[torch.Tensor], least_bytes: int, device: torch.device
) -> list[tuple[torch.nn.Module, list[Candidate]]]:
    """Find the experts of `model` that are modules in a list or dictionary, of which a layer calls a few.

    Args:
        extents: has the parameters that are in files.
        least_bytes: smaller parameters are none of them.
        device: that the model computes on.

    Returns:
        The experts, and the parameters of each.
    """
    owners = Counter(p for module in model.modules() for p in module._parameters.values() if p is not None)
    found: list[tuple[torch.nn.Module, list[Candidate]]] = []
    seen: set[torch.nn.Parameter] = set()
    for prefix, module in model.named_modules():
        called = f"{prefix.rpartition('.')[2]} {type(module).__name__}".lower()
        is_list = isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)) and len(module) > 1
        if not is_list or "expert" not in called or "shared" in called:
            continue
        for key, expert in module.named_children():
            group = []
            for name, p in expert.named_parameters(prefix=f"{prefix}.{key}".lstrip(".")):
                moves = p in extents and owners[p] == 1 and p.nbytes >= least_bytes and p not in seen
                if moves and is_ordinary(p) and not why_not(p, device):
                    group.append(Candidate(name, p))
                    seen.add(p)
            if group:
                found.append((expert, group))
    return found


def plan_called(
    model: torch.nn.Module,
    found: Sequence[tuple[torch.nn.Module, list[Candidate]]],
    first_number: int,
    group_bytes: int,
    lay_out: LayOut,
) -> tuple[list[CalledExpert], int]:
    """Plan the records of the experts that `find_called` gave, and the least of the pool that will do for them.

    Args:
        group_bytes: parameters of one expert share a record up to this length.
    """
    planned: list[CalledExpert] = []
    number = first_number
    for expert, candidates in found:
        groups: list[list[Candidate]] = []
        for candidate in candidates:
            if not groups or sum(c.tensor.nbytes for c in (*groups[-1], candidate)) > group_bytes:
                groups.append([])
            groups[-1].append(candidate)
        records = [lay_out(number + i, group) for i, group in enumerate(groups)]
        number += len(records)
        planned.append(CalledExpert(weakref.ref(expert), records))
    records = [record for each in planned for record in each.records]
    return planned, needs_of(model, records, set(), False, on_host=True).least_bytes if records else 0


class _ExpertPolicy(ParameterPolicy):
    """Parts, and experts that are called, have a share of the pool; a fused parameter that is whole may have more.

    Args:
        order: of the uses.
        contents: of the records, those of whole parameters last.
        whole_from: number of the first of those.

    Attributes:
        share_bytes: the most that parts may hold.
    """

    def __init__(self, order: ExpertOrder, contents: Sequence[Held], whole_from: int) -> None:
        super().__init__(order, contents)
        self.share_bytes = 0
        self._whole_from = whole_from
        self._here_bytes = 0
        self._longest_bytes = max((each.length_bytes for each in contents[:whole_from]), default=0)

    def acquired(self, key: RecordKey) -> None:
        """Count it."""
        super().acquired(key)
        self._here_bytes += self._contents[key.number].length_bytes

    def released(self, key: RecordKey) -> None:
        """Count it."""
        super().released(key)
        self._here_bytes -= self._contents[key.number].length_bytes

    def is_beyond_share(self, key: RecordKey, length_bytes: int) -> bool:
        """Return True if a part would take room of the rest of the model."""
        return key.number < self._whole_from and self._here_bytes + length_bytes > self.share_bytes

    def is_another_to_go(self, cache: RecordCache, key: RecordKey, length_bytes: int) -> bool:
        """Return True as long as there is one: what is in use at once may be more than the share."""
        return self.is_beyond_share(key, length_bytes) and self._last_needed(cache, False) is not None

    def place_for(self, cache: RecordCache, key: RecordKey) -> tuple[bool, int]:
        """The longest at the low end of the pool, others at the high end: so most of what goes leaves a fitting piece.

        An expert often has matrices of two lengths, and a piece that is put together of others costs system calls.
        """
        return self._contents[key.number].length_bytes < self._longest_bytes, 0


class ExpertCache(ParameterCache):
    """Brings parts of fused parameters into the pool, and to the device. See [Note: experts].

    Args:
        plan: of the experts.
        owner: number of the model's swapper.
        pool, store: as for `ParameterCache`.
        metrics: counts what moves.
        lock: of the cache of the rest of the model.
        room: what they may have of the accelerator that the model computes on; None for the CPU.

    Attributes:
        record_cache: that they are in.
        tier: what is on the device of them; None for the CPU.
        records: of parts, of experts that are called, and of whole parameters, in this order.
    """

    def __init__(
        self,
        plan: ExpertPlan,
        owner: int,
        pool: BufferPool | GrowingPool,
        store: RecordStore,
        metrics: Metrics,
        lock: threading.RLock,
        room: DeviceRoom | None,
    ) -> None:
        make = Held if room is None else HeldOnDevice
        records = [make(r, RecordKey(owner, KIND, number), fixed=True) for number, r in enumerate(plan.records)]
        lengths_bytes = [held.length_bytes for held in records]
        self._orders = in_pool, on_device = ExpertOrder(lengths_bytes), ExpertOrder(lengths_bytes)
        self._of_experts = _ExpertPolicy(in_pool, records, len(plan.parts) + len(plan.modules))
        super().__init__(records, in_pool, 0, pool, store, self._of_experts, metrics, lock)
        if room is not None:
            self._tier = DeviceTier(self, self._cache, records, in_pool, on_device, room, store)
        self.records, self.tier, self.record_cache = records, self._tier, self._cache
        store.plan({held.key: held.plan.file_bytes for held in records})

    @property
    def usable(self) -> bool:
        """False once it is closed."""
        return not self._closed

    def close(self) -> None:
        """Bring nothing any more. Who made this closes `record_cache`."""
        self._closed = True

    def limit(self, share_bytes: int, whole_bytes: int) -> None:
        """Hold at most `share_bytes` of the pool, and while a parameter is whole up to `whole_bytes`."""
        self._of_experts.share_bytes, self._cache.limit_bytes = share_bytes, whole_bytes

    def part(self, number: int) -> torch.Tensor:
        """The part that is record `number`, in memory as long as somebody has the tensor.

        Raises:
            SwapIOError: it could not be read; or the device failed.
            PoolExhausted: there is no room.
            SwapError: another that has to make room for it was changed.
        """
        held = self._all[number]
        return held.plan.locations[0].view(self._values_of(held, 0, ""))

    def expect(self, numbers: Sequence[int]) -> None:
        """These are used next, in this order: start to read them all, as far as there is room."""
        self._check_open()
        with self._lock:
            for order in self._orders:
                order.expect(Use("", number) for number in numbers)
            self.read_ahead()

    def bring(self, held: Held) -> None:
        """Have a record, of which there is a hold, in memory and open."""
        self._bring(held, "")

    def check_unchanged(self) -> None:
        """Raise SwapError if somebody changed one that is in memory."""
        with self._lock:
            for held in self._all:
                if self._tier is not None:
                    self._tier.uses.check_unchanged(held)
                held.write_newer(self._cache)


class ExpertParts:
    """The parts of one parameter. See `homes.Parts`. The parameter has this; it keeps nothing alive."""

    __slots__ = ("_cache", "_first", "rows")

    def __init__(self, cache: ExpertCache, fused: FusedParameter) -> None:
        self._cache = weakref.ref(cache)
        self._first = fused.records[0].number
        self.rows = fused.rows

    @property
    def usable(self) -> bool:
        """False once the model's swapper is closed."""
        return (cache := self._cache()) is not None and cache.usable

    def part(self, index: int) -> torch.Tensor:
        """See `ExpertCache.part`."""
        cache = self._cache()
        assert cache is not None
        return cache.part(self._first + index)

    def expect(self, indices: Iterable[int]) -> None:
        """See `ExpertCache.expect`."""
        cache = self._cache()
        assert cache is not None
        cache.expect([self._first + index for index in indices])

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_pickle()


class CallHook:
    """A forward pre-hook of an expert that is a module: all that it has starts to come.

    Args:
        cache: has the records.
        numbers: of its records.
    """

    def __init__(self, cache: ExpertCache, numbers: Sequence[int]) -> None:
        self._cache = weakref.ref(cache)
        self._numbers = tuple(numbers)

    @_disable_dynamo
    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        """The module is called."""
        if (cache := self._cache()) is not None and cache.usable:
            cache.expect(self._numbers)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return ForwardHooks(None, []).before

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_pickle()


class ExpertHook:
    """A forward pre-hook of a module with fused experts: what its router has chosen starts to come.

    Args:
        cache: has the parts.
        fused: all parameters of the module whose parts come one by one, in order of registration.
    """

    def __init__(self, cache: ExpertCache, fused: Sequence[FusedParameter]) -> None:
        self._cache = weakref.ref(cache)
        self._firsts = [each.records[0].number for each in fused]
        self._counts = [len(each.records) for each in fused]
        self._parameters = [each.parameter for each in fused]
        self._device = fused[0].parameter.device

    @_disable_dynamo
    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Look for the choice among the arguments: the first tensor of integers."""
        cache = self._cache()
        if cache is None or not cache.usable:
            return
        if torch.is_grad_enabled() and any(p.requires_grad for p in self._parameters):
            return  # They come whole.
        way = getattr(getattr(module, "config", None), "_experts_implementation", None)
        if way == "grouped_mm" and not multiplies_by_parts(self._device):
            return  # They come whole, too.
        chosen = next((each for each in (*args, *kwargs.values()) if self._is_choice(each)), None)
        if chosen is None:
            return
        experts = sorted(set(chosen.reshape(-1).tolist()))
        one_by_one = way in (None, "eager")
        pairs = list(zip(self._firsts, self._counts, strict=True))
        if one_by_one:
            cache.expect([first + e for e in experts for first, count in pairs if 0 <= e < count])
        else:
            cache.expect([first + e for first, count in pairs for e in experts if 0 <= e < count])

    def _is_choice(self, item: object) -> bool:
        if type(item) is not torch.Tensor or item.dtype not in (torch.int64, torch.int32):
            return False
        return item.device in (torch.device("cpu"), self._device)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return ForwardHooks(None, []).before

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_pickle()
