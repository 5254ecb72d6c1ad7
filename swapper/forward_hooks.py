"""What is hooked to a module, so that its parameters are there when it runs."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch._compile import _disable_dynamo

from swapper.evicted import refuse_copy
from swapper.parameter_cache import Held

__all__ = ["Forward", "ForwardHooks"]


class Owner(Protocol):
    """What brings parameters and lets them go."""

    def _enter(self, module: torch.nn.Module, parts: list[tuple[Held, tuple[int, ...]]]) -> None:
        """`module` begins its forward."""

    def _leave(self, module: torch.nn.Module) -> None:
        """It has ended it, well or not."""


class ForwardHooks:
    """What is hooked to one module. The swapper lives as long as a module that has these hooks.

    Args:
        swapper: brings parameters and lets them go.
        parts: the records that the module uses, and the places in each of the parameters that it uses.
    """

    def __init__(self, swapper: Owner, parts: list[tuple[Held, tuple[int, ...]]]) -> None:
        self._swapper = swapper
        self.parts = parts

    @_disable_dynamo
    def before(self, module: torch.nn.Module, args: Any) -> None:
        """A forward pre-hook. torch.compile leaves it as it is, and compiles what is between the hooks."""
        # In training this class leaves its parameters to the modules that own them.
        alone = module.training and isinstance(module, torch.nn.TransformerEncoderLayer)
        self._swapper._enter(module, [] if alone else self.parts)

    @_disable_dynamo
    def after(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """A forward hook, to be called always."""
        self._swapper._leave(module)

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_copy()


class Forward:
    """The `forward` of a module that, when it or one below it has hooks, takes another path with other bits."""

    def __init__(self, module: torch.nn.Module, hooks: ForwardHooks) -> None:
        self._module = weakref.ref(module)
        self._hooks = hooks
        self._former = vars(module).get("forward")
        vars(module)["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, with the hooks around it."""
        module = self._module()
        assert module is not None
        self._hooks.before(module, args)
        try:
            return self._former(*args, **kwargs) if self._former else type(module).forward(module, *args, **kwargs)
        finally:
            self._hooks.after(module, args, None)

    def remove(self) -> None:
        """Undo. Idempotent."""
        module = self._module()
        if module is None or vars(module).get("forward") is not self:
            return
        del vars(module)["forward"]
        if self._former is not None:
            vars(module)["forward"] = self._former

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_copy()
