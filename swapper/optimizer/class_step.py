"""`ClassStep`: the optimizer's class is called with a few of its parameters, as if there were no others.

It sees `param_groups` narrowed to the tensors of one bucket, with their state put in, and no hooks. What it leaves
behind is taken out, and what it changes in its groups is applied when the step ends.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from swapper.errors import ConfigError
from swapper.optimizer.aliases import refuse_new_aliases
from swapper.optimizer.group_probe import shows_all_groups
from swapper.optimizer.operands import Operand
from swapper.optimizer.own_numbers import own_copy
from swapper.optimizer.records import OpenBucket
from swapper.optimizer.segments import Segment
from swapper.optimizer.single_settings import Settings, lent_manager, take_settings
from swapper.optimizer.step_function import class_step
from swapper.optimizer.twin import equal, package_of
from swapper.tensors.evicted_gradients import note_kept_gradient, raw_gradient
from swapper.tensors.homes import home_of
from swapper.tensors.sharded import local_of

__all__ = ["ClassStep"]

_NO_OPTIONS = ("params", "param_names")
_Groups = dict[int, dict[str, Any]]


class ClassStep:
    """Calls the class, once for each bucket of a step, and remembers what it changes in its groups until the end.

    With `remote` parameters are on an accelerator, and all that the class is shown is on the host. With `any_order`
    buckets come in another order than parameters, so that random numbers would be others.

    Raises:
        ConfigError: as `class_step`.
    """

    def __init__(self, cls: type[Optimizer], remote: bool, any_order: bool = False) -> None:
        self._step = class_step(cls)
        self._remote = remote
        self._may_not_draw = any_order and not cls.__module__.startswith("torch.")
        self._former: dict[str, Any] = {}  # what `_narrow` replaced on the optimizer
        self._changes: _Groups = {}  # values of groups that the class changed
        self._clones: dict[tuple[int, str], torch.Tensor] = {}  # of tensors in groups that are on an accelerator
        self._seen: set[int] = set()  # groups that the class was shown in this step
        self._settings: dict[int, Settings] | None = None  # of single parameters, by `id`; None: not asked in this step
        # Of parameters whose state has a copy of their gradient, which the class has put there itself.
        self._kept_gradients: MutableMapping[torch.Tensor, tuple[str, weakref.ref[torch.Tensor]]]
        self._kept_gradients = WeakIdKeyDictionary()

    def __call__(self, optimizer: Optimizer, operands: Sequence[Operand], opened: OpenBucket) -> list[dict[str, Any]]:
        """Step `operands`, whose state is in `opened`. Returns the state of each that the class left behind."""
        if self._settings is None:
            self._settings = take_settings(optimizer)
        groups: _Groups = {}
        states: dict[torch.Tensor, dict[str, Any]] = {}
        settings: dict[torch.Tensor, Settings] = {}
        for operand in operands:
            number, tensor = operand.segment.of.group, operand.tensor
            assert number is not None and tensor is not None
            if number not in groups:
                groups[number] = self._narrowed(number, optimizer.param_groups[number])
            groups[number]["params"].append(tensor)
            states[tensor] = _as_sharded(operand.segment, opened.state_of(operand.segment))
            if own := self._settings.get(id(operand.segment.parameter)):
                _refuse_part(optimizer, operand.segment)
                settings[tensor] = own
        before = [dict(state) for state in states.values()]
        shown = self._among_others(optimizer, groups)
        self._narrow(optimizer, shown, {tensor: state for tensor, state in states.items() if state}, settings)
        given = [
            (made, local_of(made).detach())
            for operand, made in zip(operands, states, strict=True)
            if made is not operand.segment.parameter
        ]
        drawn = torch.get_rng_state() if self._may_not_draw else None
        self._step(optimizer)
        if drawn is not None and not torch.equal(drawn, torch.get_rng_state()):
            raise ConfigError(
                f"{type(optimizer).__name__} draws random numbers in its step, and with step_in_backward parameters "
                "are stepped in another order, with others; set offload_optimizer.step_in_backward to false"
            )
        for operand, made in zip(operands, states, strict=True):
            if made.grad is None and not operand.segment.whole and not operand.segment.master:
                raise ConfigError(
                    f"{type(optimizer).__name__} takes gradients away in its step, and is given parts of them, so that "
                    "p.grad would stay as it was; have it leave them alone, or do not register it as elementwise"
                )
        for made, values in given:  # What it has assigned to `data` of a tensor of ours belongs in its memory.
            if local_of(made).data_ptr() != values.data_ptr():
                values.copy_(local_of(made).detach())
        states_left = [optimizer.state.get(tensor, {}) for tensor in states]
        left = [_as_kept(operand.segment, state) for operand, state in zip(operands, states_left, strict=True)]
        self.widen(optimizer)
        for operand, former, state in zip(operands, before, states_left, strict=True):
            self._check_left(type(optimizer), operand, former, state)
        self._note_changes(optimizer, groups)
        return left

    def check_gradient(self, parameter: torch.nn.Parameter, gradient: torch.Tensor | None) -> None:
        """Raise `ConfigError` for a gradient that the state has kept since the last step: it would have what comes."""
        at, reference = self._kept_gradients.get(parameter, ("", None))
        if reference is not None and gradient is not None and reference() is gradient:
            raise ConfigError(
                f"the optimizer has kept a gradient itself in its state{at}, and the next one was added up in the same "
                "tensor, while swapped state has a copy; call zero_grad() with set_to_none=True, its default, or have "
                "the class clone the gradient"
            )

    def _check_left(
        self, cls: type[Optimizer], operand: Operand, before: Mapping[str, Any], state: Mapping[str, Any]
    ) -> None:
        segment, tensor = operand.segment, operand.tensor
        assert tensor is not None
        is_users = tensor is segment.parameter and home_of(segment.local) is None
        gradient = None if tensor.grad is None else local_of(tensor.grad)
        at = refuse_new_aliases(cls, before, state, None if is_users else tensor, gradient)
        if not at:
            return
        note_kept_gradient(segment.parameter, at)
        users = raw_gradient(segment.parameter)
        if users is None:
            return
        if not is_users or any(at == f"[{key!r}]" for key in segment.locations):  # Else it stays the tensor it is.
            self._kept_gradients[segment.parameter] = at, weakref.ref(users)

    def record(
        self,
        optimizer: Optimizer,
        number: int,
        tensor: torch.nn.Parameter,
        state: dict[str, Any],
        recorder: AbstractContextManager[Any],
    ) -> dict[str, Any] | None:
        """Step `tensor` with `state`, as a member of group `number`, within `recorder`. With interrupts deferred.

        Returns:
            The state that the class left behind. None if it failed, drew random numbers, or changed an attribute of
            the optimizer or what is in an option of the group, which is undone.
        """
        group = self._narrowed(number, optimizer.param_groups[number])
        group["params"] = [tensor]
        lent = {k: v for k, v in group.items() if k not in _NO_OPTIONS and isinstance(v, (dict, list, set, tuple))}
        group.update(copy.deepcopy(lent))
        self._narrow(optimizer, self._among_others(optimizer, {number: group}), {tensor: state} if state else {})
        before, given = dict(vars(optimizer)), dict(state)
        shown: dict[str, Any] = {}  # copies of what the class may change in place
        try:
            package, memo = package_of(optimizer), dict[int, Any]()
            own = {key: value for key, value in before.items() if key not in self._former and _is_mutable(value)}
            shown = {key: own_copy(value, package, memo) for key, value in own.items()}
            vars(optimizer).update(shown)
            # Not forked: other threads may draw from it now. `recorder` has none drawn.
            drawn = torch.get_rng_state()
            with recorder:
                self._step(optimizer)
            if not torch.equal(drawn, torch.get_rng_state()):
                return None
            left = dict(optimizer.state.get(tensor, {}))
            if refuse_new_aliases(type(optimizer), given, left, tensor, tensor.grad):
                return None
        except Exception:  # The class is called again, as ever, and raises it there.
            return None
        finally:
            attributes = vars(optimizer)
            is_changed = attributes.keys() != before.keys() or any(
                attributes[key] is not shown.get(key, value) or (key in shown and not equal(value, shown[key]))
                for key, value in before.items()
            )
            if is_changed:
                attributes.clear()
            attributes.update(before)
            self.widen(optimizer)
        if is_changed or any(group.get(key) != value for key, value in lent.items()):
            return None
        group.update(lent)
        self._note_changes(optimizer, {number: group})
        return left

    def finish(self, optimizer: Optimizer) -> None:
        """The step is over: apply what the class changed in its groups."""
        self._show_other_groups(optimizer)
        for number, values in self._changes.items():
            group = optimizer.param_groups[number]
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value
        self.abandon()

    def abandon(self) -> None:
        """Forget what the class changed in its groups."""
        self._changes, self._clones = {}, {}
        self._seen.clear()
        self._settings = None

    def widen(self, optimizer: Optimizer) -> None:
        """Show the optimizer its own groups, hooks and state again. Idempotent."""
        vars(optimizer).update(self._former)
        self._former = {}

    def _show_other_groups(self, optimizer: Optimizer) -> None:
        """Call the class with the groups that had no gradient in this step: it may count its steps in them.

        Each has one small parameter without a gradient, because a class may pass by a group that is empty.
        """
        groups: _Groups = {}
        for number, group in enumerate(optimizer.param_groups):
            if number not in self._seen:
                groups[number] = self._narrowed(number, group)
                groups[number]["params"] = [
                    torch.nn.Parameter(
                        torch.zeros([1] * p.dim(), dtype=p.dtype, device="cpu" if self._remote else p.device),
                        requires_grad=p.requires_grad,
                    )
                    for p in group["params"][:1]
                ]
        if not groups:
            return
        self._narrow(optimizer, self._among_others(optimizer, groups), {})
        try:
            self._step(optimizer)
        finally:
            self.widen(optimizer)
        self._note_changes(optimizer, groups)

    def _note_changes(self, optimizer: Optimizer, groups: _Groups) -> None:
        """Remember what the class changed in `groups`, which it was shown, until the step ends."""
        self._seen.update(groups)
        for number, group in groups.items():
            original = optimizer.param_groups[number]
            for key, value in group.items():
                if key in _NO_OPTIONS or (self._remote and key == "capturable"):
                    continue
                if isinstance(value, torch.Tensor):
                    changed = self._is_changed(original.get(key), value, self._clones.get((number, key)))
                else:
                    changed = key not in original or value is not original[key]
                if changed:
                    self._changes.setdefault(number, {})[key] = value

    def _is_changed(self, former: Any, value: torch.Tensor, clone: torch.Tensor | None) -> bool:
        if clone is value and not value.is_inference():  # Comparing values would wait for the accelerator.
            return value._version != 0
        return not isinstance(former, torch.Tensor) or not torch.equal(former.cpu(), value.cpu())

    def _narrow(
        self,
        optimizer: Optimizer,
        groups: _Groups,
        state: dict[torch.Tensor, dict[str, Any]],
        settings: Mapping[torch.Tensor, Settings] | None = None,
    ) -> None:
        """Show the class only `groups` and `state`, no hooks, and no tensor on an accelerator, until `widen`."""
        attributes: dict[str, Any] = {
            "param_groups": list(groups.values()),
            "state": defaultdict(dict, state),
            "_optimizer_step_pre_hooks": OrderedDict(),
            "_optimizer_step_post_hooks": OrderedDict(),
            **lent_manager(optimizer, list(groups.values()), settings or {}),
        }
        if self._remote:
            for key in ("grad_scale", "found_inf"):  # From GradScaler, for fused steps.
                if isinstance(value := getattr(optimizer, key, None), torch.Tensor):
                    attributes[key] = value.cpu()
        # Noted before anything is replaced: an interrupt in between is undone by `widen`.
        self._former = {key: getattr(optimizer, key) for key in attributes}
        vars(optimizer).update(attributes)

    def _among_others(self, optimizer: Optimizer, groups: _Groups) -> _Groups:
        """`groups`, in their order, with the others, without parameters, if the class is to be shown them."""
        if not shows_all_groups(optimizer):
            return groups
        everyone = enumerate(optimizer.param_groups)
        return {number: groups.get(number) or self._narrowed(number, group) for number, group in everyone}

    def _narrowed(self, number: int, group: dict[str, Any]) -> dict[str, Any]:
        # Tensors are cloned, so that a value that the class changes in place is changed once a step, not once a bucket.
        narrowed = {
            key: (value.cpu() if self._remote else value).clone() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key not in _NO_OPTIONS
        }
        for key, value in narrowed.items():
            if isinstance(value, torch.Tensor) and not value.is_cpu:
                self._clones[number, key] = value
        if self._remote and "capturable" in narrowed:
            narrowed["capturable"] = False  # The step runs on the CPU, where there is no graph to capture.
        narrowed["params"] = []
        return narrowed


def _refuse_part(optimizer: Optimizer, segment: Segment) -> None:
    """Refuse a part of a parameter that has settings of its own, which came when it had been planned."""
    if not segment.whole:
        raise ConfigError(
            f"{type(optimizer).__name__}: GlobalOptimManager of bitsandbytes has settings for a parameter that is "
            "stepped in parts, which they may not go with; make them before swapper.wrap_optimizer, which then steps "
            "it whole"
        )


def _is_mutable(value: Any) -> bool:
    """True of what may count steps in place."""
    return isinstance(value, (dict, list, set)) or (
        isinstance(value, torch.Tensor) and not value.dim() and value.is_cpu
    )


def _as_sharded(segment: Segment, state: dict[str, Any]) -> dict[str, Any]:
    """State of `segment`, as it is kept, as a class that steps DTensors knows it."""
    shardings = segment.of.shardings
    return {key: shardings[key].around(value) if key in shardings else value for key, value in state.items()}


def _as_kept(segment: Segment, state: Mapping[str, Any]) -> dict[str, Any]:
    """The way back: of DTensors the local tensors. Notes how they are sharded."""
    segment.of.note_shardings(state)
    return {key: local_of(value) if isinstance(value, torch.Tensor) else value for key, value in state.items()}
