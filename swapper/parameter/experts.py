"""Fused experts whose parts come one by one: which parameters, their records, and what of them stays in the pool.

[Note: experts] A layer uses a few of its experts for each token, and which ones is known when its router has chosen.
So no order is learnt: the choice is read from the arguments of the experts' forward, and all that it names starts to
come at once, as far as there is room. Each expert's slice of each parameter is a record. What stays is what was used
most often, and no read is ever made for what might be chosen next: a token reads what it uses and does not find.

The forward indexes the parameter, or multiplies by groups, and that is answered by parts (`tensors.evicted_parts`).
Whatever else it does brings the parameter whole, as does a forward with gradients of it.

Experts that are modules, in a list, are in no order either: their records come when they are called.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._compile import _disable_dynamo

from swapper.metrics import Metrics
from swapper.parameter.cache import Held, ParameterCache, ParameterPolicy
from swapper.parameter.candidates import Candidate, why_not
from swapper.parameter.conversions import Conversion
from swapper.parameter.records import LayOut, ParameterLocation, ParameterRecord, needs_of
from swapper.sizes import PAGE_BYTES, format_bytes, round_up
from swapper.storage.access_order import AccessOrder
from swapper.storage.budget import ParameterNeeds
from swapper.storage.buffers import BufferPool
from swapper.storage.cache import RecordCache
from swapper.storage.cached_records import CachedRecord
from swapper.storage.growing_pool import GrowingPool
from swapper.storage.layout import Entry, RecordLayout
from swapper.storage.record_store import RecordStore
from swapper.storage.spans import Extent, plan_spans
from swapper.storage.store import RecordKey
from swapper.tensors.dtypes import NAMES
from swapper.tensors.evicted import is_ordinary, refuse_copy

__all__ = [
    "KIND",
    "CallHook",
    "ExpertCache",
    "ExpertHook",
    "ExpertParts",
    "ExpertPlan",
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


@dataclass(eq=False)
class FusedParameter:
    """A parameter whose parts come one by one.

    Attributes:
        module: that has it; weak, because that has what has this.
        records: of its parts, in order.
        whole: for uses of all of it. Only while one goes on is it in the pool, beside the parts.
    """

    module: weakref.ref[torch.nn.Module]
    name: str
    parameter: torch.nn.Parameter
    records: list[ParameterRecord]
    whole: ParameterRecord


def find_fused(
    model: torch.nn.Module, extents: Mapping[torch.Tensor, Sequence[Extent] | Conversion], least_bytes: int
) -> tuple[dict[torch.nn.Parameter, tuple[str, torch.nn.Module]], list[str]]:
    """Find the parameters of `model` whose parts can come one by one.

    Args:
        extents: of the parameters that are in files. One that is converted has no parts.
        least_bytes: a part is at least so long.

    Returns:
        Each with its name and module; and the classes of modules that have fused experts, as it seems, and use them in
        a way that is not known.
    """
    found: dict[torch.nn.Parameter, tuple[str, torch.nn.Module]] = {}
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
            pieces = extents.get(parameter)
            if pieces is None or isinstance(pieces, Conversion):
                continue
            long_enough = parameter.nbytes // parameter.shape[0] >= least_bytes
            if long_enough and parameter.is_contiguous() and is_ordinary(parameter) and not why_not(parameter):
                found[parameter] = (f"{prefix}.{name}".lstrip("."), module)
    return {parameter: of for parameter, of in found.items() if parameter not in tied}, list(unknown)


def plan_parts(
    found: Mapping[torch.nn.Parameter, tuple[str, torch.nn.Module]],
    extents: Mapping[torch.Tensor, Sequence[Extent] | Conversion],
    first_number: int,
    lay_out: LayOut,
) -> list[FusedParameter]:
    """Plan the records of the parameters that `find_fused` gave.

    Args:
        extents: of each, in the order of its memory.
        first_number: of the records of whole ones; those of parts are counted from 0.
        lay_out: makes the records of whole ones.
    """
    planned: list[FusedParameter] = []
    number = 0
    for i, (p, (name, module)) in enumerate(found.items()):
        pieces = extents[p]
        assert not isinstance(pieces, Conversion)
        length = p.nbytes // p.shape[0]
        shape = p.shape[1:]
        records = []
        for index in range(p.shape[0]):
            part = _slice(pieces, index * length, (index + 1) * length)
            # An odd length has other residues mod 64 in the middle of the parameter, and so here: kernels depend on it.
            plan = plan_spans([part], [index * length % 64])
            title = f"{name}[{index}]"
            (at,) = plan.offsets_bytes
            location = ParameterLocation(p, title, shape, p.stride()[1:], p.dtype, at, at)
            layout = RecordLayout(
                (Entry(title, NAMES[p.dtype], tuple(shape)),), (at,), 0, plan.length_bytes, plan.length_bytes
            )
            size = round_up(plan.length_bytes, PAGE_BYTES)
            records.append(ParameterRecord(number, (location,), layout, size, size, plan.spans))
            number += 1
        planned.append(
            FusedParameter(weakref.ref(module), name, p, records, lay_out(first_number + i, [Candidate(name, name, p)]))
        )
    longest: dict[int, int] = {}
    for record in (record for each in planned for record in each.records):
        part_bytes = record.locations[0].length_bytes
        longest[part_bytes] = max(longest.get(part_bytes, 0), record.length_bytes)
    for record in (record for each in planned for record in each.records):
        # Pages at the ends make a few of difference. So all of a kind fit wherever one of them was.
        record.length_bytes = longest[record.locations[0].length_bytes]
    return planned


def _slice(extents: Sequence[Extent], start: int, stop: int) -> list[Extent]:
    """The extents of the bytes from `start` to `stop` of what `extents` are one after another."""
    found, at = [], 0
    for extent in extents:
        length = extent.stop_bytes - extent.start_bytes
        first, last = max(start - at, 0), min(stop - at, length)
        if first < last:
            found.append(Extent(extent.path, extent.start_bytes + first, extent.start_bytes + last))
        at += length
    return found


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
    """

    fused: list[FusedParameter] = field(default_factory=list)
    called: list[CalledExpert] = field(default_factory=list)
    called_bytes: int = 0

    @property
    def parts(self) -> list[ParameterRecord]:
        """The records of parts."""
        return [record for each in self.fused for record in each.records]

    @property
    def modules(self) -> list[ParameterRecord]:
        """The records of experts that are called."""
        return [record for each in self.called for record in each.records]

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


def find_called(
    model: torch.nn.Module, extents: Container[torch.Tensor], least_bytes: int
) -> list[tuple[torch.nn.Module, list[Candidate]]]:
    """Find the experts of `model` that are modules in a list or dictionary, of which a layer calls a few.

    Args:
        extents: has the parameters that are in files.
        least_bytes: smaller parameters are none of them.

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
                if moves and is_ordinary(p) and not why_not(p):
                    group.append(Candidate(name, name, p))
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
    """Those stay that were used most often. See [Note: experts].

    Attributes:
        wanted: numbers of the records that the layer that runs will use, in order, each with its place in it.
        needed_bytes: length of the record that room is made for.
    """

    def __init__(self, contents: Sequence[Held]) -> None:
        super().__init__(AccessOrder(), contents)
        self.wanted: dict[int, int] = {}
        self.needed_bytes = 0
        self._uses: dict[int, tuple[int, int]] = {}  # how often each was used, and when last
        self._time = 0
        self._longest_bytes = max((each.length_bytes for each in contents), default=0)
        self._ranked: list[tuple[int, int, int]] = []  # uses and number of those that hold a buffer, the fewest first

    def note(self, number: int) -> None:
        """Record `number` is used now."""
        self._time += 1
        held = self._rank_of(number)
        is_held = self._drop(held)
        self._uses[number] = (held[0] + 1, self._time)
        if is_held:
            insort(self._ranked, self._rank_of(number))
        self.wanted.pop(number, None)

    def _rank_of(self, number: int) -> tuple[int, int, int]:
        return (*self._uses.get(number, (0, 0)), number)

    def _drop(self, rank: tuple[int, int, int]) -> bool:
        i = bisect_left(self._ranked, rank)
        if i < len(self._ranked) and self._ranked[i] == rank:
            del self._ranked[i]
            return True
        return False

    def acquired(self, key: RecordKey) -> None:
        """Note it."""
        self._drop(self._rank_of(key.number))
        insort(self._ranked, self._rank_of(key.number))

    def released(self, key: RecordKey) -> None:
        """Note it, and tell the owner."""
        self._contents[key.number].evicted()
        self._drop(self._rank_of(key.number))

    def victim(self, cache: RecordCache, *, idle_only: bool) -> CachedRecord | None:
        """The record that was used least often, and of those longest ago; of wanted ones that which is used last."""
        return self.spare(cache) or self._last_needed(cache, idle_only, among=self._wanted_last_first())

    def spare(self, cache: RecordCache) -> CachedRecord | None:
        """As `victim`, but none that is wanted."""
        return self._last_needed(cache, True, among=self._unwanted())

    def place_for(self, cache: RecordCache, key: RecordKey) -> tuple[bool, int]:
        """The longest at the low end of the pool, others at the high end: so most of what goes leaves a fitting piece.

        An expert often has matrices of two lengths, and a piece that is put together of others costs system calls.
        """
        return self._contents[key.number].length_bytes < self._longest_bytes, 0

    def _unwanted(self) -> Iterator[int]:
        """Those that may go, the least used first; before all others those that leave a piece that just fits."""
        for fits in (True, False):
            for _, _, number in self._ranked:
                length = self._contents[number].length_bytes
                if number not in self.wanted and (length == self.needed_bytes) is fits:
                    yield number

    def _wanted_last_first(self) -> list[int]:
        return sorted(self.wanted, key=self.wanted.__getitem__, reverse=True)


class ExpertCache(ParameterCache):
    """Brings parts of fused parameters into the pool. See [Note: experts].

    Args:
        plan: of the experts.
        owner: number of the model's swapper.
        budget_bytes: the most of the pool that they may hold.
        pool, store: as for `ParameterCache`.
        metrics: counts what moves.
    """

    def __init__(
        self,
        plan: ExpertPlan,
        owner: int,
        budget_bytes: int,
        pool: BufferPool | GrowingPool,
        store: RecordStore,
        metrics: Metrics,
    ) -> None:
        planned = (*plan.parts, *plan.modules)
        records = [Held(r, RecordKey(owner, KIND, number), fixed=True) for number, r in enumerate(planned)]
        self._parts = len(plan.parts)
        self._experts = _ExpertPolicy(records)
        super().__init__(records, AccessOrder(), budget_bytes, pool, store, self._experts, metrics)
        store.plan({held.key: held.plan.file_bytes for held in records})

    @property
    def record_cache(self) -> RecordCache:
        """That they are in."""
        return self._cache

    @property
    def usable(self) -> bool:
        """False once it is closed."""
        return not self._closed

    def called(self) -> list[Held]:
        """The records of experts that are called, in order."""
        return self._all[self._parts :]

    def close(self) -> None:
        """Bring nothing any more. Who made this closes `record_cache`."""
        self._closed = True

    def limit(self, budget_bytes: int) -> None:
        """Hold at most `budget_bytes` of the pool."""
        self._cache.limit_bytes = self._budget_bytes = budget_bytes

    def part(self, number: int) -> torch.Tensor:
        """The part that is record `number`, in memory as long as somebody has the tensor.

        Raises:
            SwapIOError: it could not be read.
            PoolExhausted: there is no room.
        """
        self._check_open()
        hold = object()
        held = self._all[number]
        with self._lock:
            try:
                held.holds.add(hold)
                self._bring(held, "")
                values = held.plan.locations[0].view(held.opened[0])
            finally:
                held.holds.discard(hold)
            self.read_ahead()
        return values

    def expect(self, numbers: Sequence[int]) -> None:
        """These are used next, in this order: start to read them all, as far as there is room."""
        self._check_open()
        with self._lock:
            self._experts.wanted = {number: place for place, number in enumerate(numbers)}
            self.read_ahead()

    def read_ahead(self) -> None:
        """Start to read what is wanted, as far as there is room."""
        for number in self._experts.wanted:
            held = self._all[number]
            if self._cache.records.get(held.key) is not None:
                continue
            self._experts.needed_bytes = held.length_bytes
            if not self._cache.stage(held.key, held.length_bytes):
                return

    def bring(self, held: Held) -> None:
        """Have a record, of which there is a hold, in memory and open."""
        with self._lock:
            self._bring(held, "")
            self.read_ahead()

    def _bring(self, held: Held, phase: str) -> None:
        self._experts.note(held.key.number)
        self._experts.needed_bytes = held.length_bytes
        self._cache.require(held.key, held.length_bytes)
        lease = self._cache.fetch(held.key)
        if not held.opened:
            held.open(lease, self, arrived=True)

    def check_unchanged(self) -> None:
        """Raise SwapError if somebody changed one that is in memory."""
        with self._lock:
            for held in self._all:
                held.write_newer(self._cache)


class ExpertParts:
    """The parts of one parameter. See `homes.Parts`. The parameter has this; it keeps nothing alive."""

    __slots__ = ("_cache", "_first")

    def __init__(self, cache: ExpertCache, fused: FusedParameter) -> None:
        self._cache = weakref.ref(cache)
        self._first = fused.records[0].number

    @property
    def usable(self) -> bool:
        """False once the model's swapper is closed."""
        return (cache := self._cache()) is not None and cache.usable

    def part(self, index: int) -> torch.Tensor:
        """See `ExpertCache.part`."""
        cache = self._cache()
        assert cache is not None
        return cache.part(self._first + index)

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_copy()


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

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_copy()


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

    @_disable_dynamo
    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Look for the choice among the arguments: the first tensor of integers."""
        cache = self._cache()
        if cache is None or not cache.usable:
            return
        if torch.is_grad_enabled() and any(p.requires_grad for p in self._parameters):
            return  # They come whole.
        chosen = next((each for each in (*args, *kwargs.values()) if _is_choice(each)), None)
        if chosen is None:
            return
        experts = sorted(set(chosen.reshape(-1).tolist()))
        one_by_one = getattr(getattr(module, "config", None), "_experts_implementation", None) in (None, "eager")
        pairs = list(zip(self._firsts, self._counts, strict=True))
        if one_by_one:
            cache.expect([first + e for e in experts for first, count in pairs if 0 <= e < count])
        else:
            cache.expect([first + e for first, count in pairs for e in experts if 0 <= e < count])

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_copy()


def _is_choice(item: object) -> bool:
    return type(item) is torch.Tensor and item.dtype in (torch.int64, torch.int32) and item.device.type == "cpu"
