"""The arguments of a class's `step`, and its result: how the class uses them is found by a trial.

The swapper runs the user's closure before the first bucket, and steps the class without one, bucket by bucket. So a
class may do no more with it than call it once, before anything else, and return what it has returned.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from swapper.errors import ConfigError, SwapError, show
from swapper.io.devices import seeded_generators
from swapper.optimizer.step_function import has_step_of_torch, unhooked_step
from swapper.optimizer.twin import Twin, equal, raise_if_memory_is_short, same_bits, seeded, small_shape
from swapper.process.warnings import warn_once

__all__ = ["closure_of", "judge_closure_uses", "refuse_closure_uses", "tell_of_result"]

log = logging.getLogger(__name__)

_STEPS = 2
_LOSSES = (1e-6, 1e6)
_uses: weakref.WeakKeyDictionary[Optimizer, str] = weakref.WeakKeyDictionary()
"""The use of a closure, by optimizer, that is impossible where its state is swapped."""


def closure_of(optimizer: Optimizer, args: tuple[Any, ...], named: dict[str, Any]) -> Callable[[], Any] | None:
    """The closure among the arguments of a call of `optimizer.step`.

    Raises:
        TypeError: as from the class.
        SwapError: there are others, whose values are not the defaults.
    """
    if not named and not args:
        return None
    closure: Callable[[], Any] | None
    if len(args) + len(named) == 1 and (args or "closure" in named):
        (closure,) = args or named.values()
        return closure
    signature = inspect.signature(unhooked_step(type(optimizer)))
    bound = signature.bind_partial(optimizer, *args, **named)
    given = dict(list(bound.arguments.items())[1:])
    closure = given.pop("closure", None)
    others = [name for name, value in given.items() if value is not signature.parameters[name].default]
    if others:
        raise SwapError(
            f"{type(optimizer).__name__}.step was given {', '.join(others)}, and swapped it is called once for each "
            "bucket, with none but a closure; put what it needs into param_groups, or set offload_optimizer.device to "
            "none"
        )
    return closure


@torch.no_grad()
def judge_closure_uses(optimizer: Optimizer) -> None:
    """See what an optimizer whose state is in memory does with a closure, for when it is given one."""
    group = next((group for group in optimizer.param_groups if group["params"]), None)
    if group is None or has_step_of_torch(optimizer):
        return
    p = group["params"][0]
    for loss in _LOSSES:
        if why := _other_use(optimizer, group, seeded(small_shape(p), p.dtype, 0), loss):
            _uses[optimizer] = why
            return


def refuse_closure_uses(optimizer: Optimizer) -> None:
    """Raise `ConfigError` for an optimizer that is stepped with a closure and does more with it than can be done."""
    if (why := _uses.get(optimizer)) is not None:
        raise ConfigError(
            f"{type(optimizer).__name__}.step {why}, and swapped the closure is called once, before the first bucket; "
            "call it yourself before optimizer.step(), if that is the same, or set offload_optimizer.device to none"
        )


def _other_use(optimizer: Optimizer, group: dict[str, Any], start: torch.Tensor, loss: float) -> str:
    """Return the use that the class makes of a closure, and that is impossible swapped; "" if there is none."""
    step = unhooked_step(type(optimizer))
    by_name = "closure" in inspect.signature(step).parameters
    without, with_one = (Twin(optimizer, group, [start.clone()]) for _ in range(2))
    parameter = with_one.parameters[0]
    for number in range(_STEPS):
        gradient, other = (seeded(tuple(start.shape), start.dtype, seed) for seed in (number + 1, number + 100))
        before = parameter.detach().clone()
        calls: list[bool] = []

        def closure(
            before: torch.Tensor = before, gradient: torch.Tensor = gradient, calls: list[bool] = calls
        ) -> torch.Tensor:
            calls.append(same_bits(parameter.detach(), before))
            parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad + gradient
            return torch.tensor(loss, requires_grad=True, device=parameter.device)

        without.step([other + gradient])
        parameter.grad = other
        try:
            with seeded_generators(parameter.device):
                step(with_one.optimizer, *([] if by_name else [closure]), **({"closure": closure} if by_name else {}))
        except Exception as error:
            raise_if_memory_is_short(error, type(optimizer).__name__, with_one.parameters)
            return f"failed in a probe with a closure ({show(error)})"
        if len(calls) != 1:
            return f"called its closure {len(calls)} times in a probe"
        if not all(calls):
            return "has changed parameters before it calls its closure"
        states = (twin.optimizer.state[twin.parameters[0]] for twin in (without, with_one))
        if not same_bits(parameter.detach(), without.parameters[0].detach()) or not equal(*states):
            return "uses its closure for something else than the gradients, such as the loss"
    return ""


def tell_of_result(optimizer: Optimizer, result: object) -> None:
    """Say once that what a class's step has returned without a closure is not returned by a swapped one."""
    if result is not None:
        warn_once(
            log,
            f"{type(optimizer).__name__}.step returns a {type(result).__name__}; swapped it is called for each bucket, "
            "and step() returns what the closure returns, or None",
        )
