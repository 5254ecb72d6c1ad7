"""Hooks on modules, so that their parameters are attached when they run."""

from __future__ import annotations

import copy
import sys
import weakref
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch._compile import _disable_dynamo

from swapper.errors import SwapError
from swapper.parameter.cache import Held
from swapper.parameter.saved_tensors import watch_hooks_of_users
from swapper.tensors.evicted import refuse_copy, refuse_pickle

if TYPE_CHECKING:
    from swapper.parameter.owner import ParameterOwner

__all__ = ["Copies", "Forward", "ForwardHooks"]


class ForwardHooks:
    """The hooks of one module, which attach its parameters while it runs.

    Args:
        owner: of the parameters. It lives as long as a module that has these hooks. None for a copy of the module,
            whose parameters are ordinary ones: the hooks do nothing, and are removed when it is complete.
        parts: the records that the module uses, and the positions in each of the parameters that it uses.
    """

    def __init__(self, owner: ParameterOwner | None, parts: list[tuple[Held, tuple[int, ...]]]) -> None:
        watch_hooks_of_users()
        self._owner = owner
        self.parts = parts

    @_disable_dynamo
    def before(self, module: torch.nn.Module, args: Any, kwargs: Any = None) -> None:
        """A forward pre-hook. torch.compile leaves it as it is, and compiles what is between the hooks."""
        if self._owner is not None:
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
            refuse_pickle()
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
        if module is None:
            refuse_copy("the forward of a module, without the module,")
        return copy.deepcopy(self._former, memo) or MethodType(type(module).forward, module)

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_pickle()


class Copies:
    """Lets `copy.deepcopy` of a module give an ordinary one, and `torch.jit.script` of it, or of one above it, raise.

    A module's attribute is asked for a copy before its class is. `torch.jit.script` would try to compile the hooks.
    """

    def __init__(self, module: torch.nn.Module, owner: ParameterOwner) -> None:
        self._module, self._owner = weakref.ref(module), weakref.ref(owner)
        vars(module)["__deepcopy__"] = self._copy
        vars(module)["__prepare_scriptable__"] = self._refuse

    def _copy(self, memo: dict[int, Any]) -> torch.nn.Module:
        # A shallow copy of the module has this too: what is copied knows only `copy.deepcopy`.
        caller = sys._getframe(1)
        module: Any = caller.f_locals["x"] if caller.f_code is copy.deepcopy.__code__ else self._module()
        attributes, owner = vars(module), self._owner()
        own: dict[str, Any] = {}
        for name in _ATTRIBUTES:
            if getattr(attributes.get(name), "__self__", None) is self:
                own[name] = attributes[name]
        if owner is not None and attributes.get("swapper") is owner:
            own["swapper"] = owner
            memo[id(owner)] = None  # The whole model is copied: its copy has no swapper, and may be in mapped files.
        try:
            for name in own:  # Not before: Ctrl-C may strike between two of them.
                del attributes[name]
            twin = copy.deepcopy(module, memo)
        finally:
            attributes.update(own)
        return _without_hooks(twin)

    def _refuse(self) -> Any:
        """Refuse `torch.jit.script`, which calls this first."""
        raise SwapError(
            "torch.jit.script of a model whose parameters are swapped would compile what brings them; script it before "
            "swapper.offload"
        )

    def remove(self) -> None:
        """Undo. Idempotent."""
        module = self._module()
        for name in _ATTRIBUTES if module is not None else ():
            if getattr(vars(module).get(name), "__self__", None) is self:
                del vars(module)[name]


_ATTRIBUTES = ("__deepcopy__", "__prepare_scriptable__")


def _without_hooks(module: torch.nn.Module) -> torch.nn.Module:
    """Take the hooks that do nothing from a copy. Returns it."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in [*hooks.items()]:
            its = getattr(hook, "__self__", None)
            if isinstance(its, ForwardHooks) and its._owner is None:
                hooks.pop(key, None)
                module._forward_pre_hooks_with_kwargs.pop(key, None)
                module._forward_hooks_always_called.pop(key, None)
    return module


def _leaves_parameters_alone(module: torch.nn.Module) -> bool:
    """True for a module of `used_by` that looks at parameters of others, but only in evaluation."""
    if isinstance(module, torch.nn.TransformerEncoder):
        return all(layer.training for layer in module.layers[:1])
    return module.training and isinstance(module, torch.nn.TransformerEncoderLayer)
