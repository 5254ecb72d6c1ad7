"""The step of an optimizer's class, as a function without the hooks that torch puts around it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

from torch.optim import Optimizer

from swapper.errors import ConfigError

__all__ = ["class_step", "has_step_of_torch", "unhooked_step"]

_HOOKING_CODE = Optimizer.profile_hook_step(lambda optimizer: None).__code__
"""Of the function that torch puts around a class's step."""


def has_step_of_torch(optimizer: Optimizer) -> bool:
    """True if its step is that of a class of torch, which it is or derives from."""
    module: str | None = unhooked_step(type(optimizer)).__module__  # None: of `unittest.mock`.
    return module is not None and module.startswith("torch.optim.")


def unhooked_step(cls: type[Optimizer]) -> Callable[..., Any]:
    """`cls.step` without the wrapper that runs hooks, which torch puts around it when the class is first made.

    Raises:
        ConfigError: it is no function, as when `unittest.mock` has replaced it.
    """
    step: Any = cls.step
    if getattr(step, "__code__", None) is _HOOKING_CODE:
        return cast("Callable[..., Any]", step.__wrapped__)
    if not isinstance(step, FunctionType):
        raise ConfigError(
            f"{cls.__name__}.step is a {type(step).__name__} and not a function, so it cannot be called for a part of "
            "the parameters; mock the step of the wrapped optimizer (mock.patch.object(optimizer, 'step')), or use "
            "autospec=True"
        )
    return step


def class_step(cls: type[Optimizer]) -> Callable[[Optimizer], Any]:
    """`unhooked_step`, to be called with an optimizer alone: a closure that it requires is None.

    The swapper runs the user's closure itself, before the first bucket.

    Raises:
        ConfigError: it requires other arguments, or is no function.
    """
    step = unhooked_step(cls)
    _, *parameters = inspect.signature(step).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in variable]
    if not required:
        return step
    if required != ["closure"]:
        raise ConfigError(
            f"{cls.__name__}.step requires {', '.join(required)}, and swapper can pass nothing but a closure; use an "
            "optimizer whose step() works without arguments"
        )
    if parameters[0].name == "closure" and parameters[0].kind is not inspect.Parameter.KEYWORD_ONLY:
        return lambda optimizer: step(optimizer, None)
    return lambda optimizer: step(optimizer, closure=None)
