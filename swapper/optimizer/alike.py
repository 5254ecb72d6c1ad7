"""Finds ranks that have replicas, or shards, of one model and store or round otherwise than each other.

[Note: ranks alike] Such ranks would go on, and their replicas differ in bits from the first step on. So what decides
bits is compared twice, each time where no rank can be left waiting for another:

- When optimizers are wrapped, if all ranks make that call together anyway: of sharded parameters, and at the first use
  of a config with "nvme" in it. Collective (`compare`).
- In the first step, also after a load. Nothing says that all ranks come to that, so nobody waits: each has left a note
  in the store of `torch.distributed`, and reads those of the others then (`Alike.check`). Between the two gradients
  were reduced, and a rank took part in that only after it had left its note: of replicas when the first gradient of a
  backward arrives, and of shards, whose gradients autograd does not see, at once. If shards have gradients already
  then, it is the backward before the second step. On an accelerator the step comes before they are reduced: where
  notes are missing it waits for the device, once.

Ranks belong together if `DistributedDataParallel` has a parameter, or a mesh, whoever else is in the process group:
ranks that train models of their own may have what settings they like. A note is of such ranks, parameters of some
shapes, the n-th optimizer of such that had gradients on its rank, and the number of steps made. Optimizers that no rank
shares count for nothing, nor do those of replicas that were wrapped and had no gradients: one rank may have tried
something before. Where ranks count otherwise all the same, a note is missing, as a rule, and nothing is refused.

Modules are found by the garbage collector. Those that the user has frozen (`gc.freeze`) are found if they were there
when something was wrapped before; else nothing is compared, as it is not for us to unfreeze the heap.
"""

from __future__ import annotations

import collections
import gc
import hashlib
import json
import logging
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from swapper.errors import ConfigError
from swapper.io.devices import is_accelerator, synchronize
from swapper.metrics import Metrics
from swapper.optimizer.loss_scaling import with_subclasses
from swapper.optimizer.plan import OptimizerPlan, parameters_of
from swapper.optimizer.records import BucketRecords
from swapper.storage.agreement import agreed, exchanged, leave_note, notes_of, rank_count
from swapper.tensors.dynamo import not_compiled
from swapper.tensors.evicted_gradients import raw_gradient
from swapper.tensors.sharded import is_sharded

__all__ = ["Alike", "compare", "difference"]

log = logging.getLogger(__name__)

_LOSSLESS = {"exact", "packed", "unpacked"}
_LOOKS = 3
"""Steps in which notes are looked for, where some are missing: a rank may have no swapped optimizer."""

_ORDER = "order of parameters in the optimizer"
_PLACES = "places in the model of the parameters in the optimizer"
_STEPS = "number of steps that state is rounded by"
_IN_ORDER = "random bits follow from the position of a parameter: make param_groups in the same order on all ranks"
_ADVICE = {
    _ORDER: _IN_ORDER,
    _PLACES: _IN_ORDER,
    _STEPS: "load the same checkpoint or state dict on all ranks",
    "offload_optimizer.step_device": "with auto each rank steps where it has room; set device, or cpu, on all ranks",
}

_counts: collections.Counter[str] = collections.Counter()
"""Optimizers that have left a note, by the ranks that share their model, and the shapes of their parameters."""

_seen: weakref.WeakSet[Any] = weakref.WeakSet()
"""Modules that `_data_parallel` has found."""


class _Bits(NamedTuple):
    """The settings that decide the bits of one optimizer on one rank, for other ranks to compare.

    Attributes:
        shapes: a digest of the shapes and dtypes of all parameters, in any order: the same on all ranks of a model.
        settings: name of a setting, and its value.
    """

    shapes: str
    settings: dict[str, str]


def _bits_of(optimizer: Optimizer, plan: OptimizerPlan, steps: int, modules: Iterable[Any]) -> _Bits:
    parameters = list(parameters_of(optimizer))
    kinds = [f"{tuple(p.shape)} {p.dtype}" for p in parameters]
    config = plan.config
    state = config.offload_optimizer
    on_device = plan.on_device if plan.swaps_state else any(is_accelerator(p.device) for p in parameters)
    is_low = any(p.dtype in (torch.bfloat16, torch.float16) for p in parameters)
    settings = {
        "offload_optimizer.encoding": _lossy(state.encoding),
        "offload_optimizer.master_weights": str(state.master_weights and is_low).lower(),
        "offload_optimizer.step_device": "device" if on_device else "cpu",
        "offload_gradient.encoding": config.offload_gradient.encoding,
    }
    if state.step_in_backward:
        settings["gradient_accumulation_steps"] = str(config.gradient_accumulation_steps)
    if plan.counts_steps:
        settings[_STEPS] = str(steps)
        settings[_ORDER] = _digest(kinds)
        for each in modules:  # Any will do that has all: the order is the same. None where it comes later.
            places = {id(p): place for place, p in enumerate(each.parameters())}
            if all(id(p) in places for p in parameters):
                numbers = sorted(range(len(parameters)), key=lambda number: places[id(parameters[number])])
                settings[_PLACES] = _digest(map(str, numbers))
                break
    return _Bits(_digest(sorted(kinds)), settings)


def _lossy(encoding: str | Mapping[str, str]) -> str:
    """Say what of an encoding changes bits."""
    if isinstance(encoding, str):
        return "exact" if encoding in _LOSSLESS else encoding
    named = ", ".join(f"{key}: {encoding[key]}" for key in sorted(encoding) if encoding[key] not in _LOSSLESS)
    return f"{{{named}}}" if named else "exact"


def _digest(lines: Iterable[str]) -> str:
    return hashlib.blake2s("\n".join(lines).encode(), digest_size=6).hexdigest()


def _data_parallel() -> list[Any]:
    """The modules of `DistributedDataParallel` in this process, and of `FullyShardedDataParallel` (FSDP1)."""
    classes = {torch.nn.parallel.DistributedDataParallel}
    if (fsdp := sys.modules.get("torch.distributed.fsdp")) is not None:
        classes.add(fsdp.FullyShardedDataParallel)
    classes.update([below for each in list(classes) for below in with_subclasses(each)])
    # One whose constructor has not come that far has no group.
    found = [each for each in gc.get_referrers(*classes) if type(each) in classes and hasattr(each, "process_group")]
    _seen.update(found)
    return found


def _modules_of(parameters: Sequence[torch.Tensor], *, anew: bool = False) -> list[Any]:
    """The modules of `_data_parallel` that have any of `parameters`. It is called if none is known, or `anew`."""
    ours = {id(p) for p in parameters if p.requires_grad and not is_sharded(p)}
    if not ours:
        return []

    def those_of(modules: Iterable[Any]) -> list[Any]:
        return [each for each in modules if any(id(p) in ours for p in each.parameters()) and _ranks_of(each)]

    known = [] if anew else those_of(list(_seen))
    if not known:
        _data_parallel()
        known = those_of(list(_seen))  # And those that were frozen meanwhile.
    return known


def _ranks_of(module: Any) -> set[int]:
    ranks: set[int] = set()
    for group in module.process_group, getattr(module, "_inter_node_pg", None):  # Replicas of FSDP1 are in another.
        with suppress(KeyError, ValueError):  # It was destroyed, and its ranks train together no more.
            ranks.update(() if group is None else torch.distributed.get_process_group_ranks(group))
    return ranks


def _ranks_with(parameters: Sequence[torch.Tensor], modules: Iterable[Any]) -> tuple[int, ...]:
    """The ranks, sorted, that have shards or replicas of `parameters`; () if this one trains by itself."""
    ranks: set[int] = set()
    for mesh in {p.device_mesh for p in parameters if is_sharded(p)}:  # type: ignore[attr-defined]
        ranks.update(mesh.mesh.flatten().tolist())
    for each in modules:
        ranks |= _ranks_of(each)
    return tuple(sorted(ranks)) if len(ranks) > 1 else ()


def difference(name: str, values: Mapping[int, str]) -> str:
    """Say which ranks have which value of the setting `name`; "" if all have the same."""
    ranks_of: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks_of.setdefault(value, []).append(rank)
    if len(ranks_of) < 2:
        return ""
    return f"{name}: " + ", ".join(f"{value} on {_named(ranks)}" for value, ranks in ranks_of.items())


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks))}" if len(ranks) <= 8 else f"{len(ranks)} ranks, as {ranks[0]}"


def _differing(found: Mapping[int, Mapping[str, str]]) -> str:
    """Say how ranks have other settings than each other; "" if they do not."""
    for name in dict.fromkeys(name for settings in found.values() for name in settings):
        text = difference(name, {rank: settings[name] for rank, settings in found.items() if name in settings})
        if text:
            return (
                f"{text}; these ranks have replicas or shards of one model, whose bits would come to differ: "
                f"{_ADVICE.get(name, 'set it to the same on all ranks')}"
            )
    return ""


def compare(optimizers: Sequence[Optimizer], plans: Sequence[OptimizerPlan]) -> None:
    """Refuse, on all ranks, settings by which replicas or shards would differ. Collective, over the ranks of the group.

    Args:
        optimizers: that are about to be wrapped, with their `plans`.

    Raises:
        ConfigError: ranks that have parameters of one model have different settings.
    """
    if not _compared(optimizers, plans):
        return
    # All ranks have found the same. The module that made replicas of theirs may be garbage that is left.
    gc.collect()
    if text := _compared(optimizers, plans):
        raise ConfigError(text)


def _compared(optimizers: Sequence[Optimizer], plans: Sequence[OptimizerPlan]) -> str:
    """Say, on all ranks in the same words, what is different; "" if nothing is."""
    with agreed():
        _data_parallel()
        here = []
        for each, plan in zip(optimizers, plans, strict=True):
            modules = _modules_of(parameters := list(parameters_of(each)))
            here.append((_ranks_with(parameters, modules), _bits_of(each, plan, 0, modules)))
    told = dict(exchanged((torch.distributed.get_rank(), here)))
    for _, given in sorted(told.items()):
        for number, (ranks, bits) in enumerate(given):
            among = {each: told[each][number][1] for each in ranks if number < len(told.get(each, ()))}
            text = _differing({each: of.settings for each, of in among.items() if of.shapes == bits.shapes})
            if text:
                return text
    return ""


class Alike:
    """Compares what decides the bits of a wrapped optimizer with the other ranks that train its model.

    Args:
        plan, records, metrics: of its swapper.
    """

    def __init__(self, plan: OptimizerPlan, records: BucketRecords, metrics: Metrics) -> None:
        self._plan, self._records, self._metrics = plan, records, metrics
        self._name: str | None = None  # of the optimizer, in keys of notes
        self._told: str | None = None  # the key of the last note, until it was compared
        self._ranks: tuple[int, ...] = ()
        self._looks, self._due = 0, 0  # and the number of steps after which it is compared
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def tell(self, optimizer: Optimizer) -> None:
        """Have a note left for other ranks of what decides bits from the next step on. Waits for nobody."""
        self.forget()
        if rank_count() == 1:
            return
        parameters = list(parameters_of(optimizer))
        modules = _modules_of(parameters)
        ddp = torch.nn.parallel.DistributedDataParallel
        if any(map(is_sharded, parameters)) or any(not isinstance(each, ddp) for each in modules):
            self._leave_note(optimizer, self._metrics.steps + any(raw_gradient(p) is not None for p in parameters))
            return
        self_ref, optimizer_ref = weakref.ref(self), weakref.ref(optimizer)

        def arrived(_: torch.Tensor) -> None:
            alike, optimizer = self_ref(), optimizer_ref()
            if alike is not None and optimizer is not None and alike._hooks:
                alike._unhook()
                alike._leave_note(optimizer, alike._metrics.steps)

        hook = not_compiled(arrived)
        self._hooks = [p.register_hook(hook) for p in parameters if p.requires_grad]  # type: ignore[no-untyped-call]

    def _leave_note(self, optimizer: Optimizer, due: int) -> None:
        modules = _modules_of(parameters := list(parameters_of(optimizer)))
        self._ranks = _ranks_with(parameters, modules)
        if not self._ranks:
            log.debug("an optimizer is not compared with other ranks: no DistributedDataParallel or mesh joins them")
            return
        bits = _bits_of(optimizer, self._plan, self._records.steps, modules)
        if self._name is None:
            name = f"{_digest(map(str, self._ranks))}/{bits.shapes}"
            self._name = f"{name}/{_counts[name]}"
            _counts[name] += 1
        key = f"bits/{self._name}/{self._metrics.steps}"
        self._looks, self._due = 0, due
        if leave_note(f"{key}/{torch.distributed.get_rank()}", json.dumps(bits.settings)):
            self._told = key

    def forget(self) -> None:
        """Compare nothing, until something is told again."""
        self._told = None
        self._unhook()

    def _unhook(self) -> None:
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()

    def check(self, optimizer: Optimizer, *_: object) -> None:
        """Compare with the notes of the other ranks, once after each `tell`. Waits for a device at most.

        Raises:
            ConfigError: a rank with a replica, or shards, of the model has other settings. So does each later call.
        """
        if self._told is None or self._metrics.steps < self._due:
            return
        self._looks += 1
        is_compared, text = self._compared(self._told)
        if not is_compared and self._looks == 1:
            for device in {p.device for p in parameters_of(optimizer)}:
                synchronize(device)  # [Note: ranks alike]
            is_compared, text = self._compared(self._told)
        if text:  # As in `compare`.
            gc.collect()
            parameters = list(parameters_of(optimizer))
            self._ranks = _ranks_with(parameters, _modules_of(parameters, anew=True))
            is_compared, text = self._compared(self._told)
            if text:
                raise ConfigError(text)
        if is_compared or self._looks >= _LOOKS:
            if not is_compared:
                log.debug("an optimizer was not compared with all of its ranks %s: notes are missing", self._ranks)
            self._told = None

    def _compared(self, key: str) -> tuple[bool, str]:
        """False if notes are missing; and what is different."""
        notes = notes_of([f"{key}/{rank}" for rank in self._ranks])
        found = {rank: json.loads(note) for rank, note in zip(self._ranks, notes, strict=True) if note is not None}
        return None not in notes, _differing(found)
