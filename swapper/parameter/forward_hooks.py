"""Hooks on modules, so that their parameters are attached when they run."""

from __future__ import annotations

import copy
import weakref
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch._compile import _disable_dynamo

from swapper.errors import SwapError
from swapper.parameter.cache import Held
from swapper.parameter.saved_tensors import watch_hooks_of_users
from swapper.tensors.evicted import refuse_copy

if TYPE_CHECKING:
    from swapper.parameter.owner import ParameterOwner

__all__ = ["Forward", "ForwardHooks", "ScriptRefused"]


class ForwardHooks:
    """The hooks of one module, which attach its parameters while it runs.

    Args:
        owner: of the parameters. It lives as long as a module that has these hooks. None for a copy of the module,
            whose parameters are in memory: the hooks remove themselves when it is called.
        parts: the records that the module uses, and the slots in each of the parameters that it uses.
    """

    def __init__(self, owner: ParameterOwner | None, parts: list[tuple[Held, tuple[int, ...]]]) -> None:
        watch_hooks_of_users()
        self._owner = owner
        self.parts = parts

    @_disable_dynamo
    def before(self, module: torch.nn.Module, args: Any) -> None:
        """A forward pre-hook. torch.compile leaves it as it is, and compiles what is between the hooks."""
        if self._owner is None:
            _without_hooks(module)
        else:
            self._owner.enter(module, [] if _leaves_parameters_alone(module) else self.parts)

    @_disable_dynamo
    def after(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """A forward hook, to be called always."""
        if self._owner is not None:
            self._owner.leave(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardHooks:
        return ForwardHooks(None, [])

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._owner is not None:
            refuse_copy()
        return ForwardHooks, (None, [])


class Forward:
    """Replaces the `forward` of a module that takes another path, with other bits, if it or one below it has hooks.

    Several can be put over one another, and over a `forward` of the user on the instance: a model that was built in
    `swapper.init` has its builder's until `offload` has its own. They can be removed in any order. One that cannot be
    removed, because another or the user's calls it now, goes on without its hooks.
    """

    def __init__(self, module: torch.nn.Module, hooks: ForwardHooks) -> None:
        self._module = weakref.ref(module)
        self._hooks: ForwardHooks | None = hooks
        self._former = vars(module).get("forward")
        vars(module)["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, with the hooks around it."""
        module = self._module()
        assert module is not None
        hooks = self._hooks  # They may be removed while it runs.
        if hooks is not None:
            hooks.before(module, args)
        try:
            return self._former(*args, **kwargs) if self._former else type(module).forward(module, *args, **kwargs)
        finally:
            if hooks is not None:
                hooks.after(module, args, None)

    def remove(self) -> None:
        """Undo. Idempotent."""
        self._hooks = None
        module = self._module()
        if module is None:
            return
        # Those below that were removed while this was over them go with it.
        top = vars(module).get("forward")
        while isinstance(top, Forward) and top._hooks is None:
            top = top._former
        if top is not None:
            vars(module)["forward"] = top
        else:
            vars(module).pop("forward", None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module = memo.get(id(self._module()))
        if module is None:  # It is not copied with its module.
            refuse_copy()
        return copy.deepcopy(self._former, memo) or MethodType(type(module).forward, module)

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_copy()


class ScriptRefused:
    """Lets `torch.jit.script` of a module, or of one above it, raise: it would try to compile the hooks."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)
        vars(module)["__prepare_scriptable__"] = self

    def __call__(self) -> Any:
        """What `torch.jit.script` calls first."""
        raise SwapError(
            "torch.jit.script of a model whose parameters are swapped would compile what brings them; script it before "
            "swapper.offload"
        )

    def remove(self) -> None:
        """Undo. Idempotent."""
        module = self._module()
        if module is not None and vars(module).get("__prepare_scriptable__") is self:
            del vars(module)["__prepare_scriptable__"]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module = memo.get(id(self._module()))
        if module is None:
            refuse_copy()
        return partial(_without_hooks, module)

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_copy()


def _without_hooks(module: torch.nn.Module) -> torch.nn.Module:
    """Take the hooks that do nothing from a copy, and from what is in it. Returns it."""
    for each in module.modules():
        for hooks in (each._forward_pre_hooks, each._forward_hooks):
            for key, hook in [*hooks.items()]:
                its = getattr(hook, "__self__", None)
                if isinstance(its, ForwardHooks) and its._owner is None:
                    hooks.pop(key, None)
                    each._forward_hooks_always_called.pop(key, None)
        if getattr(vars(each).get("__prepare_scriptable__"), "func", None) is _without_hooks:
            del vars(each)["__prepare_scriptable__"]
        if vars(each).get("swapper", each) is None:
            object.__delattr__(each, "swapper")
    return module


def _leaves_parameters_alone(module: torch.nn.Module) -> bool:
    """True for a module of `used_by` that looks at parameters of others, but only in evaluation."""
    if isinstance(module, torch.nn.TransformerEncoder):
        return all(layer.training for layer in module.layers[:1])
    return module.training and isinstance(module, torch.nn.TransformerEncoderLayer)
