"""`Conversion`: the user's optimizer object, converted in place, and made plain again."""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from swapper.errors import SwapError
from swapper.optimizer.guarded_state import GuardedState

__all__ = ["Conversion"]

_Hook = Callable[..., Any]


class Conversion:
    """Everything that is put on the user's object: `swapper`, `step`, `state`, and state-dict hooks.

    The object keeps its class. Nothing is put on it before `install`. Only a weak reference to it is kept.

    Attributes:
        own_state: the user's mapping, which is `optimizer.state` again after `uninstall`.
    """

    def __init__(self, optimizer: Optimizer, state: GuardedState) -> None:
        self.own_state: defaultdict[torch.Tensor, Any] = optimizer.state
        self._optimizer_ref = weakref.ref(optimizer)
        self._state = state
        self._replaces_step = False
        self._former_step: Any = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def is_in_place(self, optimizer: Optimizer) -> bool:
        """True unless the user has replaced `optimizer.state`."""
        return not self._replaces_step or optimizer.state is self._state

    def give_state_back(self, optimizer: Optimizer) -> None:
        """`optimizer.state` is the guarded one again, after torch or the user has replaced it."""
        optimizer.state = self._state

    def install_counter(self, optimizer: Optimizer, swapper: object, count: _Hook) -> None:
        """Have `swapper` on the object, and steps counted; the object is not changed otherwise."""
        self._hooks.append(optimizer.register_step_post_hook(count))
        vars(optimizer)["swapper"] = swapper

    def install(
        self,
        optimizer: Optimizer,
        swapper: object,
        step: Callable[[Optimizer, Callable[[], Any] | None], Any],
        on_state_dict: _Hook,
        on_load: _Hook,
        on_loaded: _Hook,
    ) -> None:
        """Have `optimizer.step(closure)` call `step`, within torch's own hooks; and state-dict hooks."""
        optimizer_ref = self._optimizer_ref

        @Optimizer.profile_hook_step
        def hooked(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return step(optimizer, closure)

        @functools.wraps(type(optimizer).step)
        def stepped(*args: Any, **kwargs: Any) -> Any:
            target = optimizer_ref()
            assert target is not None
            # As the wrapper that a scheduler would put here: it looks for both names.
            target._opt_called = True  # type: ignore[attr-defined]
            return hooked(target, *args, **kwargs)

        stepped._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        self._former_step = vars(optimizer).get("step")
        self._replaces_step = True
        vars(optimizer).update(step=stepped, swapper=swapper, __getstate__=_refuse_copy, state=self._state)
        self._hooks.append(optimizer.register_state_dict_post_hook(on_state_dict, prepend=True))
        self._hooks.append(optimizer.register_load_state_dict_pre_hook(on_load))
        self._hooks.append(optimizer.register_load_state_dict_post_hook(on_loaded, prepend=True))

    def uninstall(self, optimizer: Optimizer, swapper: object) -> None:
        """Undo `install`, or as much of it as was done. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        if optimizer.state is self._state:
            optimizer.state = self.own_state
        if vars(optimizer).get("swapper") is not swapper:
            return
        if self._replaces_step:
            for name in ("step", "__getstate__"):
                vars(optimizer).pop(name, None)
            if self._former_step is not None:
                optimizer.step = self._former_step  # type: ignore[method-assign]
            elif any("initial_lr" in group for group in optimizer.param_groups):
                _install_scheduler_wrapper(optimizer)
        del vars(optimizer)["swapper"]  # Last: it says that there is something to undo.


def _refuse_copy() -> NoReturn:
    raise SwapError(
        "an optimizer whose state is swapped cannot be copied or pickled: the copy would be without its state. "
        "Save optimizer.state_dict() instead, or call swapper.unwrap_optimizer(optimizer) first"
    )


def _install_scheduler_wrapper(optimizer: Optimizer) -> None:
    """Put on the optimizer what a scheduler puts on it; the scheduler was given ours, and has left it alone."""
    reference = weakref.ref(optimizer)
    class_step = type(optimizer).step

    @functools.wraps(class_step)
    def step(*args: Any, **kwargs: Any) -> Any:
        target = reference()
        assert target is not None
        target._opt_called = True  # type: ignore[attr-defined]
        return class_step(target, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]
