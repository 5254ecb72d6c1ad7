"""Probes whether parameters of a group, or of several groups, are stepped by themselves."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Container, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from swapper.config import OffloadConfig
from swapper.errors import ConfigError
from swapper.optimizer.probe import LOW_PRECISION, is_elementwise
from swapper.optimizer.step_function import has_step_of_torch
from swapper.optimizer.twin import PRIMES, Twin, equal, package_of, same_bits, seeded, small_shape

__all__ = ["refuse_group", "shows_all_groups"]

_STEPS = 3
_SCALES = (1.0, 2.0**-12, 2.0**-30)
"""Of gradients in a trial: the latter two are below what Adafactor takes for 0 in 16 bits, and in 32."""
_GROUPS_MAX = 4
_SHOWN_MAX = 32
_judged: weakref.WeakKeyDictionary[Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()
"""The number of groups that each optimizer had, and True if it is shown all of them."""


def refuse_group(optimizer: Optimizer, group: dict[str, Any], wanted: Container[int], config: OffloadConfig) -> None:
    """Refuse new parameters of a group that are stepped otherwise by themselves.

    Args:
        wanted: ids of the parameters that are new; without one in `group` nothing is tried.

    Raises:
        ConfigError: a trial with small tensors had other bits together than one after the other.
    """
    if is_elementwise(optimizer) and package_of(optimizer) == "torch":
        return
    if any(id(p) in wanted for p in group["params"]):
        _judge_groups(optimizer)
        _refuse_changed_gradients(optimizer, group, config)
        _refuse_mixed_dtypes(optimizer, group, config)


def shows_all_groups(optimizer: Optimizer) -> bool:
    """True if the class is to be shown all groups in each part of a step, those that have no part in it empty.

    So whatever it takes from another group is there. Some classes fail with a group that is empty.
    """
    return _judged.get(optimizer, (0, False))[1]


def _judge_groups(optimizer: Optimizer) -> None:
    """See how the class is to be shown its groups.

    Raises:
        ConfigError: it steps a group otherwise by itself, and with all others empty, too.
    """
    groups = [group for group in optimizer.param_groups if group["params"]]
    count = len(optimizer.param_groups)
    if count < 2 or has_step_of_torch(optimizer) or _judged.get(optimizer, (0, False))[0] == count:
        return
    for scaled in (True, False):
        together = _Groups(optimizer, groups, scaled)
        try:
            for step in range(_STEPS):
                together.step_at_once(step)
        except ConfigError:  # It may not take other options than those that it has.
            if scaled:
                continue
            raise
        break
    # All of many groups in each of many buckets take long, so then only if that is needed.
    for shows_all in (True, False) if count <= _SHOWN_MAX else (False, True):
        apart = _Groups(optimizer, groups, scaled)
        try:
            for step in range(_STEPS):
                apart.step_apart(step, shows_all=shows_all)
        except ConfigError:
            continue
        if together.equals(apart):
            _judged[optimizer] = count, shows_all
            return
    raise ConfigError(
        f"{type(optimizer).__name__} takes what belongs to one parameter group for another, and swapped it is shown "
        "parameters of one bucket at a time; have it read the options of the group that it steps, make one group, or "
        "set offload_optimizer.device to none"
    )


def _different(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first of `groups`, and some others: of those whose options are others, if there are any."""
    found: dict[str, dict[str, Any]] = {}
    for group in groups:
        found.setdefault(
            repr({key: value for key, value in group.items() if key not in ("params", "param_names")}), group
        )
    several = [*found.values()][:_GROUPS_MAX]
    return several if len(several) > 1 else [*groups[: _GROUPS_MAX - 1], *groups[_GROUPS_MAX - 1 :][-1:]]


def _scaled(value: Any, factor: float) -> Any:
    """An option that is other than that of other groups, as a schedule may make it."""
    if isinstance(value, float):
        return value * factor
    return tuple(_scaled(each, factor) for each in value) if type(value) is tuple else value


class _Groups:
    """Twins over a parameter of each of several groups, of one optimizer.

    Args:
        groups: with parameters; some of them are taken, of different options where there are.
        scaled: each has other options, as a schedule may give them.
    """

    def __init__(self, optimizer: Optimizer, groups: Sequence[dict[str, Any]], scaled: bool) -> None:
        self.twins: list[Twin] = []
        memo: dict[int, Any] = {}
        for number, group in enumerate(_different(groups)):
            p = group["params"][0]
            twin = Twin(optimizer, group, [seeded(small_shape(p), p.dtype, number)], memo=memo)
            if scaled:
                twin.group.update({key: _scaled(value, 1 - number / 16) for key, value in twin.group.items()})
            self.twins.append(twin)
        self._first = self.twins[0]
        for twin in self.twins[1:]:
            self._first.optimizer.state.update(twin.optimizer.state)
        attributes = vars(self._first.optimizer)
        for key, value in attributes.items() if scaled else ():  # It may know groups by their numbers.
            if type(value) is list and len(value) == len(optimizer.param_groups):
                attributes[key] = [
                    _scaled(each, 1 - i / 16) if i < _GROUPS_MAX else each for i, each in enumerate(value)
                ]

    def step_at_once(self, number: int) -> None:
        """Step all groups."""
        self._give_gradients(number)
        for twin in self.twins:
            twin.group["params"] = list(twin.parameters)
        self._first.call([twin.group for twin in self.twins])

    def step_apart(self, number: int, *, shows_all: bool) -> None:
        """Step one group after the other, each with the options that it had before.

        Args:
            number: of the step.
            shows_all: the class sees the others, too, without parameters.
        """
        self._give_gradients(number)
        before = [dict(twin.group) for twin in self.twins]
        after = list(before)
        for mine in range(len(self.twins)):
            for each, (twin, options) in enumerate(zip(self.twins, before, strict=True)):
                twin.give_options(options)
                twin.group["params"] = list(twin.parameters) if each == mine else []
            self._first.call([twin.group for twin in self.twins] if shows_all else [self.twins[mine].group])
            after[mine] = dict(self.twins[mine].group)
        for twin, options in zip(self.twins, after, strict=True):
            twin.group.clear()
            twin.group.update(options)

    def _give_gradients(self, number: int) -> None:
        for twin in self.twins:
            p = twin.parameters[0]
            p.grad = seeded(tuple(p.shape), p.dtype, 100 + number)

    def equals(self, other: _Groups) -> bool:
        """True if parameters, their state and options are the same."""
        pairs = [*zip(self.twins, other.twins, strict=True)]
        return all(
            same_bits(a.parameters[0].detach(), b.parameters[0].detach())
            and equal(self._first.optimizer.state[a.parameters[0]], other._first.optimizer.state[b.parameters[0]])
            and equal(a.options, b.options)
            for a, b in pairs
        )


def _refuse_changed_gradients(optimizer: Optimizer, group: dict[str, Any], config: OffloadConfig) -> None:
    """Raise `ConfigError` for a class whose step changes gradients, or takes them away, where it is given copies."""
    if has_step_of_torch(optimizer) or config.offload_gradient.device == "none":
        return
    p = next((p for p in group["params"] if p.numel() and p.dim() <= len(PRIMES)), None)
    if p is None:
        return
    gradient = seeded(small_shape(p), p.dtype, 1)
    twin = Twin(optimizer, group, [seeded(small_shape(p), p.dtype, 0)])
    twin.step([gradient])
    left, given = twin.parameters[0].grad, twin.given[0]
    is_there = left is not None and left is given
    if not is_there or (left is not None and not left.is_sparse and not same_bits(left, gradient)):
        how = "changes gradients in its step" if is_there else "takes gradients away in its step"
        raise ConfigError(
            f"{type(optimizer).__name__} {how}, and swapped it is given copies of them, so that p.grad would stay as "
            "it was; have it leave them alone and call zero_grad() yourself, or set offload_gradient.device to none"
        )


def _refuse_mixed_dtypes(optimizer: Optimizer, group: dict[str, Any], config: OffloadConfig) -> None:
    """Refuse parameters whose bits depend on those of another dtype in their group, which may be in another bucket.

    Torch's Adafactor takes its first `eps`, unless it is given, from the dtype of the first parameter that it steps.

    Raises:
        ConfigError: a trial with small tensors of two of the dtypes had other bits together than one after the other.
    """
    masters = LOW_PRECISION if config.offload_optimizer.master_weights else ()
    shapes: dict[torch.dtype, tuple[int, ...]] = {}
    for p in group["params"]:
        if (p.requires_grad or p.grad is not None) and p.numel() and p.dim() <= len(PRIMES):
            dtype = torch.float32 if p.dtype in masters else p.dtype
            shapes.setdefault(dtype, small_shape(p))
    if len(shapes) < 2:
        return
    for pair in itertools.permutations(shapes, 2):
        for scale in _SCALES:
            together, apart = (Twin(optimizer, group, [seeded(shapes[each], each, 0) for each in pair]) for _ in "ab")
            for step in range(_STEPS):
                gradients = [seeded(shapes[each], each, step + 1) * scale for each in pair]
                together.step(gradients)
                apart.step_apart(gradients)
            if not all(map(same_bits, *([p.detach() for p in twin.parameters] for twin in (together, apart)))):
                raise ConfigError(
                    f"{type(optimizer).__name__} steps parameters of {pair[1]} otherwise if parameters of {pair[0]} "
                    "are in their group, so they cannot be swapped exactly; make a group for each dtype, or give what "
                    "the class takes from a dtype itself, such as Adafactor's eps=(1e-30, 1e-3)"
                )
