"""`FileParameters`: a model whose parameters come from files of somebody else, which are never written.

[Note: the reference] The bits are those of the model with its parameters in memory at multiples of 64 bytes, as torch
allocates them. `safetensors.torch.load_file` may give tensors at other addresses, where some kernels sum in another
order: with one row in fp32 a matrix off a multiple of 16 bytes has other bits in 72 of 2,100 cases.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from swapper.errors import SwapError
from swapper.io.checksums import checksum
from swapper.io.devices import is_accelerator
from swapper.parameter.cache import Held, finalize
from swapper.parameter.candidates import ALREADY, BUFFER_IN_NO_FILE, SMALL, Candidate, why_not
from swapper.parameter.conversions import Conversion, plan_sources, sources_bytes_of
from swapper.parameter.device_tier import DeviceTier
from swapper.parameter.embeddings import find_embeddings
from swapper.parameter.experts import (
    KIND,
    CallHook,
    ExpertCache,
    ExpertHook,
    ExpertParts,
    ExpertPlan,
    FusedParameter,
    find_called,
    find_fused,
    plan_called,
    plan_parts,
)
from swapper.parameter.home import ParameterHome
from swapper.parameter.owner import ParameterOwner, ParameterUse, Parts
from swapper.parameter.records import (
    GROUP_BYTES,
    DeviceRoom,
    ParameterLocation,
    ParameterPlan,
    ParameterRecord,
    device_bytes_of,
    needs_of,
    plan_parameters,
)
from swapper.parameter.streamed import choose_streamed
from swapper.parameter.swapper import ParameterSwapper
from swapper.process.interrupts import interrupts_deferred
from swapper.sizes import ALIGNMENT_BYTES, PAGE_BYTES, format_bytes, round_up
from swapper.storage.budget import PoolBudget
from swapper.storage.buffers import BufferPool
from swapper.storage.cache import RecordCache
from swapper.storage.growing_pool import GrowingPool
from swapper.storage.layout import Entry, RecordLayout
from swapper.storage.spans import Extent, Span, SpanStore, plan_spans
from swapper.storage.store import RecordKey
from swapper.tensors.attributes import ADDRESS, HOME, PARTS
from swapper.tensors.dtypes import NAMES
from swapper.tensors.evicted import evict, is_ordinary, restore_for_good
from swapper.tensors.homes import home_of
from swapper.tensors.packed_codes import CodeForm, form_of

__all__ = ["FileParameters", "FilePlan", "plan_from_files"]

log = logging.getLogger(__name__)

_SMALL_BYTES = 64 << 10
"""Parameters of less are read once and stay: as spans of their own they would cost up to two pages more every time."""


@dataclass
class FilePlan(ParameterPlan):
    """The parameters of a model that come from files.

    Attributes:
        experts: those that come one by one. They are in none of `records`, and `needs` has what they need.
    """

    experts: ExpertPlan = field(default_factory=ExpertPlan)

    def moved(self) -> set[torch.Tensor]:
        """All parameters that come when they are used."""
        both = {location.parameter for r in (*self.records, *self.experts.modules) for location in r.locations}
        return both.union(each.parameter for each in self.experts.fused)

    def spans(self, owner: int) -> dict[RecordKey, tuple[Span, ...]]:
        """The spans of each record of the swapper with this number."""
        found = {RecordKey(owner, "param", record.number): record.spans for record in self.records}
        experts = enumerate(self.experts.records)
        return found | {RecordKey(owner, KIND, number): record.spans for number, record in experts}

    def dense_on_device(self, limit_bytes: int) -> int:
        """The part of `limit_bytes` of an accelerator that is for all but experts. They have room for all of a module's
        if the others leave it, else for the least."""
        assert self.device_needs is not None
        if (experts := self.experts.device_needs) is None:
            return limit_bytes
        least_bytes, wanted_bytes = (
            each - experts.beside_bytes for each in (experts.least_bytes, experts.wanted_bytes)
        )
        needed_bytes = self.device_needs.least_bytes - self.device_needs.beside_bytes - least_bytes
        left_bytes = limit_bytes - (wanted_bytes if needed_bytes + wanted_bytes <= limit_bytes else least_bytes)
        return min(max(sum(map(device_bytes_of, self.records)), needed_bytes), left_bytes)


_NO_FILE = "it is in no file"
"""The reason why a parameter stays in memory, of a model whose others stay in their files."""


def plan_from_files(
    model: torch.nn.Module,
    extents: Mapping[torch.Tensor, Sequence[Extent] | Conversion],
    bucket_bytes: int,
    resident_bytes: int,
    device_resident_bytes: int,
    device: torch.device,
    *,
    by_parts: bool = True,
) -> FilePlan:
    """Plan which parameters of `model` come from files when they are used. The others are read once.

    Args:
        model: in memory, or on the meta device.
        extents: of parameters that are in files; of each one or more, in the order of its memory, or how it is made.
        bucket_bytes, resident_bytes, device_resident_bytes: as for `plan_parameters`.
        device: that the model computes on.
        by_parts: fused experts come one by one, where that is known to work, and rows of embeddings on the CPU.

    Raises:
        ConfigError: as for `plan_parameters`.
    """

    sources_bytes: list[int] = []

    def lay_out(number: int, group: Sequence[Candidate]) -> ParameterRecord:
        found = [(each.tensor, extents[each.tensor]) for each in group]
        plan = plan_spans([each for _, each in found if not isinstance(each, Conversion)])
        planned, cursor = iter(plan.offsets_bytes), plan.length_bytes
        places = [0 if isinstance(each, Conversion) else next(planned) for _, each in found]
        converted = []
        for i in sorted(range(len(found)), key=lambda i: _first_extent(found[i][1])):  # As their sources lie.
            p, each = found[i]
            if isinstance(each, Conversion):
                converted.append((p, each, cursor))
                places[i] = cursor
                cursor = round_up(cursor + p.nbytes, ALIGNMENT_BYTES)
        file_bytes = cursor = round_up(cursor, PAGE_BYTES)
        locations = []
        for candidate, at in zip(group, places, strict=True):
            p, offset = candidate.tensor, at
            if not p.is_contiguous():  # The file has the elements in another order.
                offset, cursor = cursor, round_up(cursor + p.nbytes, ALIGNMENT_BYTES)
            place = at, offset, candidate.aliases
            locations.append(ParameterLocation(p, candidate.name, p.shape, p.stride(), p.dtype, *place))
            locations[-1].form = None if isinstance(extents[p], Conversion) else form_of(p)
        entries = tuple(Entry(c.name, NAMES[c.tensor.dtype], tuple(c.tensor.shape)) for c in group)
        layout = RecordLayout(entries, tuple(places), 0, file_bytes, file_bytes)
        start = round_up(cursor, PAGE_BYTES)
        spans, length = plan_sources(converted, start, nothing_behind=start == file_bytes)
        sources_bytes.append(length - start)
        spans = _with_forms(plan.spans, locations) + spans
        return ParameterRecord(number, tuple(locations), layout, file_bytes, length, spans)

    found, unknown = find_fused(model, extents, _SMALL_BYTES, device) if by_parts else ({}, [])
    if unknown:
        log.warning(
            "experts of %s are brought whole: it is not known that it takes them one at a time", ", ".join(unknown)
        )

    rows = find_embeddings(model, extents) if by_parts and not is_accelerator(device) else {}
    found.update(rows)
    called = find_called(model, extents, _SMALL_BYTES, device) if by_parts else []
    apart: set[torch.Tensor] = {c.tensor for _, candidates in called for c in candidates}.union(found)

    def why_stays(tensor: torch.Tensor) -> str:
        if tensor not in extents:
            return _NO_FILE if isinstance(tensor, torch.nn.Parameter) else BUFFER_IN_NO_FILE
        if tensor in apart:
            return ALREADY
        return why_not(tensor, device) or (SMALL if tensor.nbytes < _SMALL_BYTES else "")

    def beside_bytes(tensors: Sequence[torch.Tensor]) -> int:
        copies_bytes = sum(round_up(t.nbytes, ALIGNMENT_BYTES) for t in tensors if not t.is_contiguous())
        made = [each for each in map(extents.__getitem__, tensors) if isinstance(each, Conversion)]
        return copies_bytes + sources_bytes_of(made)

    resident = resident_bytes, device_resident_bytes
    plan = plan_parameters(model, bucket_bytes, *resident, False, lay_out, why_stays, device, beside_bytes)
    converted_bytes = max(sources_bytes, default=0)
    names = {each.name for each in found.values()}.union(c.name for _, candidates in called for c in candidates)
    stays = {name: why for name, why in plan.stays.items() if name not in names}
    experts = ExpertPlan(plan_parts(found, extents, len(plan.records), lay_out))
    experts.called, experts.called_bytes = plan_called(
        model, called, len(plan.records) + len(experts.fused), min(GROUP_BYTES, bucket_bytes), lay_out
    )
    needs = plan.needs
    if converted_bytes:
        why = f", with {format_bytes(converted_bytes)} of the files that are cast or converted in it"
        needs = replace(needs, why=needs.why.replace("the largest record", f"the largest record{why}"))
    needs = experts.added_to(needs)
    if rows:  # With gradients of it an embedding comes whole, while nothing but its module runs.
        wholes = [each.whole for each in experts.fused if each.rows]
        others = needs_of(model, [*plan.records, *wholes], plan.resident, False, on_host=True)
        if others.least_bytes > needs.least_bytes:
            needs = replace(needs, least_bytes=others.least_bytes, why=others.why)
    kept = plan.resident, plan.device_resident
    device_needs = experts.plan_device(model, device, plan.device_needs) if is_accelerator(device) else None
    return FilePlan(plan.records, stays, *kept, needs, plan.summary, device_needs, experts)


def _first_extent(pieces: Sequence[Extent] | Conversion) -> Extent:
    return pieces.sources[0].extent if isinstance(pieces, Conversion) else pieces[0]


def _with_forms(spans: tuple[Span, ...], locations: Sequence[ParameterLocation]) -> tuple[Span, ...]:
    """`spans` of which the first brings codes that have arrived into the form that they have then."""

    def arranging(form: CodeForm, at: int, length: int) -> Callable[[torch.Tensor], None]:
        return lambda buffer: form.arrange(buffer[at : at + length])

    found = [arranging(each.form, each.offset_bytes, each.length_bytes) for each in locations if each.form is not None]
    return (spans[0]._replace(arrange=tuple(found)), *spans[1:]) if found else spans


def _turned(held: Held, position: int, p: torch.Tensor) -> CodeForm | None:
    """The form of a parameter that was given the codes that it has in the other one; None if it was not."""
    form, values = held.plan.locations[position].form, held.values[position]
    if form is None or p.data_ptr() == values.data_ptr() or checksum(values) != held.checksums[position]:
        return None
    return form if form.is_other(values, p) else None


class _Places:
    """The modules that have each tensor of a model, and under which names."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._of: dict[torch.Tensor, list[tuple[torch.nn.Module, str]]] = {}
        for module in model.modules():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    self._of.setdefault(tensor, []).append((module, name))

    def put(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Let the modules have `new` in the place of `old`, with the attributes that the user gave that."""
        for name, value in vars(old).items():
            if name not in (HOME, ADDRESS):  # As of one that is given back after a failure.
                vars(new).setdefault(name, value)
        self._of[new] = self._of.pop(old)
        for module, name in self._of[new]:
            setattr(module, name, new)  # Not in its dictionary: some, as of `nn.LSTM`, take note of it elsewhere too.

    def fill(self, tensor: torch.Tensor, values: torch.Tensor, *, are_new: bool) -> None:
        """Let a parameter or buffer have `values`: in its own memory, or as a new one if that is on another device.

        If they `are_new`, one that is replaced has them too, as a module may know it by other ways: in a list, say.
        """
        if tensor.device == values.device or (are_new and tensor.device.type != "meta"):
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                storage = tensor.untyped_storage()
                if tensor.numel() and not storage.nbytes():  # On an accelerator: see `prequantised.untouched`.
                    storage.resize_(tensor.nbytes)
                tensor.copy_(values)
        if tensor.device == values.device:
            return
        if isinstance(tensor, torch.nn.Parameter):
            own = torch.nn.Parameter if is_ordinary(tensor) else type(tensor)  # Some know what to do by its class.
            values = torch.Tensor._make_subclass(own, values, tensor.requires_grad)
        self.put(tensor, values)


class _Replaced(ParameterHome):
    """The home of a parameter that was in memory of another device: every use of it is refused.

    A module may know it by other ways than its name, in a list, say. The values that it had were never the file's.
    """

    __slots__ = ()

    def of_owner(self) -> ParameterOwner:
        """Raise SwapError."""
        raise SwapError(
            f"{self.name} was on another device when swapper.offload put a new parameter in its place; take that from "
            "the model by its name, or move the model there (model.to) before swapper.offload"
        )


class FileParameters(ParameterSwapper):
    """Brings the parameters of `model` from files when they are used. See `ParameterSwapper`.

    Parameters on the meta device, and on any other than `device`, are replaced by new ones there, with their attributes
    and `requires_grad`; the others stay the objects that they are. What they had in memory is freed, of all that move.

    Args:
        model, owner, plan, budget_bytes, pool, release: as for `ParameterSwapper`; the plan is from `plan_from_files`.
            Its attribute `swapper` is this from the moment that all is done.
        store: of the records of the plan.
        stays: parameters and buffers that stay in memory, each with its values, on `device`, of its strides; and if
            these come from files.
        device: that the model computes on.
        room: what records may have of it; None for the CPU.
        fixed: a parameter that is changed is an error. Else its record is written to the run directory.

    Attributes:
        fixed: as given.
    """

    # For what is not streamed, as in a pool with room for little more than two records.
    _depth = 1

    def __init__(
        self,
        model: torch.nn.Module,
        owner: int,
        plan: FilePlan,
        budget_bytes: int,
        pool: BufferPool | GrowingPool,
        store: SpanStore,
        release: Callable[[], None],
        stays: Iterable[tuple[torch.Tensor, torch.Tensor, bool]],
        device: torch.device,
        room: DeviceRoom | None,
        *,
        fixed: bool,
    ) -> None:
        self.fixed = fixed
        self._device = device
        self._versions: dict[torch.Tensor, int] = {}
        self._places = _Places(model)
        self._taken: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._replaced: list[tuple[Held, int, torch.Tensor]] = []
        self._one_by_one = plan.experts
        self._whole_bytes = budget_bytes
        self._whole: weakref.WeakKeyDictionary[torch.nn.Module, list[Held]] = weakref.WeakKeyDictionary()
        self._experts: ExpertCache | None = None
        self._owner = owner
        self._told = False
        self._experts_room: DeviceRoom | None = None
        if room is not None:
            on_device_bytes = plan.dense_on_device(room.limit_bytes)
            self._experts_room = room._replace(limit_bytes=room.limit_bytes - on_device_bytes)
            room = room._replace(limit_bytes=on_device_bytes)
        dense_bytes = self._dense_bytes(plan, budget_bytes)
        complete = False
        try:
            super().__init__(model, owner, plan, dense_bytes, pool, store, release, room)
            for held in self._all:
                held.fixed = fixed
            streamed = choose_streamed(model, plan, dense_bytes)
            staying_bytes = sum(r.length_bytes for r in plan.records if r.number not in streamed)
            self._policy.stream(streamed, dense_bytes - staying_bytes)
            with interrupts_deferred():  # Only memory is copied. Ctrl-C finds all done, or nothing.
                for tensor, values, are_new in stays:
                    self._places.fill(tensor, values, are_new=are_new)
                object.__setattr__(model, "swapper", self)
                complete = True
                for held, position, former in self._replaced:
                    if former.device.type != "meta":
                        evict(former, _Replaced(self._reference, held, position))
                del self._places, self._taken, self._replaced  # What the parameters had in memory goes.
        except BaseException:
            if not complete and "_finalizer" in vars(self):  # Else that was done, or there was nothing to give back.
                self._give_everything_back()
            raise

    @staticmethod
    def _dense_bytes(plan: FilePlan, budget_bytes: int) -> int:
        """The part of the pool of what does not come by parts: all that it can use. Parts have the rest."""
        least_bytes = plan.experts.least_bytes
        if not least_bytes:
            return budget_bytes
        return min(max(plan.kept_bytes, plan.needs.least_bytes - least_bytes), budget_bytes - least_bytes)

    @property
    def _caches(self) -> list[RecordCache]:
        """The caches that records are in."""
        return super()._caches if self._experts is None else [*super()._caches, self._experts.record_cache]

    @property
    def _here(self) -> list[Held]:
        """As of all owners; and parts of fused parameters."""
        return self._all if self._experts is None else [*self._all, *self._experts.records]

    def _tier_of(self, held: Held) -> DeviceTier | None:
        """As for all owners; experts have one of their own."""
        return self._experts.tier if self._experts is not None and held.key.kind == KIND else self._tier

    @property
    def locations(self) -> Iterator[ParameterLocation]:
        """As of all owners, but for fused parameters, which their parts refer to, too: those go with the model."""
        fused = {each.whole for each in self._one_by_one.fused}
        return (each for held in self._all if held.plan not in fused for each in held.plan.locations)

    @property
    def tables(self) -> list[dict[torch.Tensor, Any]]:
        """As of all owners."""
        return [*super().tables, self._versions]

    def _install(self, model: torch.nn.Module) -> None:
        """As for all owners. See [Note: experts] in `experts`."""
        fused = self._one_by_one.fused
        if self._one_by_one.least_bytes:
            assert self._store is not None
            of_pool = self._owner, self._pool, self._store, self.metrics, self._lock
            self._experts = ExpertCache(self._one_by_one, *of_pool, self._experts_room)
            self._share_out(self._whole_bytes)
            records, first = self._experts.records, len(self._one_by_one.parts)
            called, wholes = records[first : len(records) - len(fused)], records[len(records) - len(fused) :]
            self._all = [*self._all, *wholes, *called]  # By their numbers. The dense cache goes on with what it had.
            for held in called:
                self._adopt(held)
            super()._install(model)  # Modules have the parameters that were adopted attached while they run.
            for each, held in zip(fused, wholes, strict=True):
                self._adopt_whole(each, held, self._experts)
            self._hook_experts(self._experts)
        else:
            super()._install(model)

    def _adopt_whole(self, each: FusedParameter, held: Held, experts: ExpertCache) -> None:
        """Let a fused parameter come by parts; as a whole it is in `held`."""
        self._adopt(held)
        parameter = held.plan.locations[0].parameter
        assert isinstance(parameter, torch.nn.Parameter)
        each.parameter = parameter
        for record in each.records:
            record.locations[0].parameter = parameter
        vars(parameter)[PARTS] = ExpertParts(experts, each)
        if (module := each.module()) is not None:
            self._whole.setdefault(module, []).append(held)

    def _hook_experts(self, experts: ExpertCache) -> None:
        of_module: dict[torch.nn.Module, list[FusedParameter]] = {}
        for each in self._one_by_one.fused:
            if not each.rows and (module := each.module()) is not None:
                of_module.setdefault(module, []).append(each)
        for module, those in of_module.items():
            self._hooks.append(module.register_forward_pre_hook(ExpertHook(experts, those), with_kwargs=True))
        first = len(self._one_by_one.parts)
        for called in self._one_by_one.called:
            numbers = range(first, first + len(called.records))
            first += len(called.records)
            if (expert := called.module()) is not None and len(numbers) > 1:
                self._hooks.append(expert.register_forward_pre_hook(CallHook(experts, numbers)))

    def _share_out(self, budget_bytes: int) -> None:
        """Share `budget_bytes` of the pool between parts and all else."""
        assert isinstance(self.plan, FilePlan)
        dense_bytes = self._dense_bytes(self.plan, budget_bytes)
        self._whole_bytes = budget_bytes
        self._cache.limit_bytes = self._budget_bytes = dense_bytes
        if self._experts is not None:
            self._experts.limit(budget_bytes - dense_bytes, budget_bytes)

    def share_pool(self, budget: PoolBudget) -> None:
        """As for all swappers; parts of fused parameters have their share of it."""
        self._share_out(budget.shares().parameters)

    def flush(self) -> None:
        """As for all swappers. Raises SwapError if a part of a fused parameter was changed."""
        super().flush()
        if self._experts is not None:
            self._experts.check_unchanged()

    def enter(self, module: torch.nn.Module, parts: Parts) -> None:
        """As for all owners. A forward with gradients of fused parameters has them whole."""
        if (whole := self._whole.get(module)) and torch.is_grad_enabled():
            uses = [(held, held.plan.locations[0].parameter) for held in whole]
            wanted = [held for held, parameter in uses if parameter.requires_grad and PARTS in vars(parameter)]
            parts = [*parts, *((held, (0,)) for held in wanted)]
        super().enter(module, parts)

    def _bring(self, held: Held, phase: str) -> None:
        if held.key.kind != KIND:
            super()._bring(held, phase)
            return
        assert self._experts is not None
        if PARTS in vars(held.plan.locations[0].parameter) and not (self._told or torch.is_grad_enabled()):
            self._told = True
            log.warning("%s is used as a whole, and brought whole", held.plan.locations[0].name)
        self._experts.bring(held)

    def _restore_values(self, held: Held) -> None:
        """As for all owners; a fused parameter gets its parts one by one."""
        parameter = held.plan.locations[0].parameter
        parts = vars(parameter).get(PARTS)
        if parts is None or held.values or home_of(parameter) is None:
            super()._restore_values(held)
            return
        values = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        for index, rows in enumerate(torch.split(values, parts.rows or 1)):
            rows.copy_(parts.part(index))
        restore_for_good(parameter, values)

    def close(self, *, keep_values: bool = False) -> None:
        """As for all owners."""
        super().close(keep_values=keep_values)
        if self._closed:
            self._forget_parts()

    def _forget_parts(self) -> None:
        if self._experts is not None:
            self._experts.close()
        for each in self._one_by_one.fused:
            vars(each.parameter).pop(PARTS, None)

    def _adopt(self, held: Held) -> None:
        for position, location in enumerate(held.plan.locations):
            parameter = location.parameter
            if parameter.device != self._device:
                element = torch.empty((), dtype=location.dtype, device=self._device)
                new = element.expand(location.shape)
                if isinstance(parameter, torch.nn.Parameter):
                    new = torch.nn.Parameter(new, parameter.requires_grad)
                with interrupts_deferred():
                    self._places.put(parameter, new)
                    location.parameter = new
                    self._replaced.append((held, position, parameter))
                parameter = new
            else:
                self._taken += [(tensor, tensor.data) for tensor in location.tensors]
            self._home[parameter] = held
            for tensor in location.tensors:
                evict(tensor, self.home_type(self._reference, held, position))
            self._versions[parameter] = parameter._version

    def _keep_data(self, held: Held, position: int, p: torch.Tensor) -> str:
        """As for all owners. Of a `fixed` parameter its codes in the other form are no change."""
        turned = _turned(held, position, p) if held.fixed else None
        with interrupts_deferred():  # In between, what the record has would be a change.
            refused = super()._keep_data(held, position, p)
            if turned is not None and not refused and home_of(p) is not None:
                turned.packed = not turned.packed
                held.checksums[position] = checksum(held.opened[position])
        return refused

    def _release_part(self, use: ParameterUse, held: Held, positions: tuple[int, ...]) -> None:
        """As for all owners. Raises SwapError at once if a `fixed` parameter was changed by an operator of torch."""
        super()._release_part(use, held, positions)
        for parameter in (held.plan.locations[position].parameter for position in positions if held.fixed):
            if self._versions[parameter] != parameter._version:
                self._versions[parameter] = parameter._version
                if (tier := self._tier_of(held)) is not None:
                    tier.uses.check_unchanged(held)
                elif held.opened:
                    held.check_unchanged()  # What else changes it is found when the record leaves the pool.

    def _give_everything_back(self) -> None:
        """After a failed construction: nothing was read or written, and all has the values that it had. Idempotent."""
        self._forget_parts()
        while self._taken:
            restore_for_good(*self._taken[-1])
            self._taken.pop()
        while self._replaced:
            with interrupts_deferred():
                held, position, former = self._replaced.pop()
                location = held.plan.locations[position]
                self._places.put(location.parameter, former)
                location.parameter = former
        self._closed = True
        self._remove_hooks()
        finalize(self._all, self._caches, self._store, lambda: None, self._pid)
