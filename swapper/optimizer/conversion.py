"""`Conversion` of the user's optimizer object in place."""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch.optim import Optimizer

from swapper.errors import SwapError
from swapper.optimizer.guarded_state import GuardedState
from swapper.optimizer.step_arguments import closure_of
from swapper.tensors.dynamo import not_compiled

if TYPE_CHECKING:
    from swapper.optimizer.swapper import OptimizerSwapper

__all__ = ["Conversion"]

_Hook = Callable[..., Any]


class Conversion:
    """Everything that is put on the user's object: `swapper`, `step`, `state`, and state-dict hooks.

    The object keeps its class. Nothing is put on it before `install`. Only a weak reference to it is kept.

    Attributes:
        own_state: the user's mapping, which is `optimizer.state` again after `uninstall`.
    """

    def __init__(self, optimizer: Optimizer, owner: OptimizerSwapper) -> None:
        self.own_state: defaultdict[torch.Tensor, Any] = optimizer.state
        self._state = GuardedState(owner)
        self._replaced: tuple[str, ...] = ()  # names of methods
        self._former: dict[str, Any] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def replaced_by(self, optimizer: Optimizer) -> list[tuple[torch.nn.Parameter, Any]] | None:
        """All the state that `optimizer.state` was replaced by, by the user or by the class's own `load_state_dict`.

        Returns:
            The entries of each parameter that has some; None if nothing was replaced.

        Raises:
            SwapError: it has something else, or entries that stand for state on disk.
        """
        if not self._replaced or optimizer.state is self._state:
            return None
        known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        state: object = optimizer.state
        wrong = "" if isinstance(state, Mapping) else f"a {type(state).__name__}"
        for key, entries in state.items() if isinstance(state, Mapping) else ():
            if not isinstance(entries, Mapping) or not (id(key) in known or key in self._state):
                wrong = f"one with a {type(entries).__name__} for a {type(key).__name__}"
        if wrong:
            raise SwapError(
                f"optimizer.state was replaced by {wrong}, but it has to have a dictionary of values for each "
                "parameter of the optimizer that has state, and nothing else; assign another one, or call "
                "optimizer.load_state_dict(...), or optimizer.swapper.reset() to start from no state"
            )
        return [(cast("torch.nn.Parameter", key), entries) for key, entries in optimizer.state.items() if entries]

    def check_given(self) -> None:
        """See `GuardedState.check_given`."""
        self._state.check_given()

    def give_state_back(self, optimizer: Optimizer) -> None:
        """`optimizer.state` is the guarded one again, after torch or the user has replaced it, or all that is in it."""
        self._state.forget_given()
        optimizer.state = self._state

    def install_counter(self, optimizer: Optimizer, swapper: object, check: _Hook, count: _Hook) -> None:
        """Have `swapper` on the object, and steps checked and counted; the object is not changed otherwise."""
        self._hooks.append(optimizer.register_step_pre_hook(check))
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
        """Have `optimizer.step(closure)` call `step`, within torch's own hooks; and state-dict hooks.

        A class's own `load_state_dict` may look at what torch's has loaded, and change it.
        """
        optimizer_ref = weakref.ref(optimizer)

        @not_compiled  # Of a loop that torch compiles the step is no part.
        @Optimizer.profile_hook_step
        def hooked(optimizer: Optimizer, *args: Any, **named: Any) -> Any:
            return step(optimizer, closure_of(optimizer, args, named))

        methods: dict[str, Any] = {"step": _as_of_a_scheduler(optimizer, hooked), "__getstate__": _refuse_copy}
        class_load, own_load = type(optimizer).load_state_dict, vars(optimizer).get("load_state_dict")
        if own_load is not None or class_load is not Optimizer.load_state_dict:
            state = self._state

            @functools.wraps(own_load or class_load)
            def loaded(*args: Any, **kwargs: Any) -> Any:
                target = optimizer_ref()
                assert target is not None
                with state.lent(target):
                    return class_load(target, *args, **kwargs) if own_load is None else own_load(*args, **kwargs)

            methods["load_state_dict"] = loaded
        self._replaced = tuple(methods)
        self._former = {name: vars(optimizer)[name] for name in methods if name in vars(optimizer)}
        vars(optimizer).update(methods, swapper=swapper, state=self._state)
        self._hooks.append(optimizer.register_state_dict_post_hook(on_state_dict, prepend=True))
        self._hooks.append(optimizer.register_load_state_dict_pre_hook(on_load))
        self._hooks.append(optimizer.register_load_state_dict_post_hook(on_loaded, prepend=True))

    def uninstall(self, optimizer: Optimizer, swapper: object, state: Mapping[torch.Tensor, Any]) -> None:
        """Undo `install`, or as much of it as was done, and put `state` back. Idempotent."""
        self.own_state.update(state)
        for hook in self._hooks:
            hook.remove()
        if optimizer.state is self._state:
            optimizer.state = self.own_state
        if vars(optimizer).get("swapper") is not swapper:
            return
        if self._replaced:
            for name in self._replaced:
                vars(optimizer).pop(name, None)
            vars(optimizer).update(self._former)
            if "step" not in self._former and any("initial_lr" in group for group in optimizer.param_groups):
                # The scheduler was given ours, and has put none there itself.
                optimizer.step = _as_of_a_scheduler(optimizer, type(optimizer).step)  # type: ignore[method-assign]
        del vars(optimizer)["swapper"]  # Last: it says that there is something to undo.


def _refuse_copy() -> NoReturn:
    raise SwapError(
        "an optimizer whose state is swapped cannot be copied or pickled: the copy would be without its state. "
        "Save optimizer.state_dict() instead, or call swapper.unwrap_optimizer(optimizer) first"
    )


def _as_of_a_scheduler(optimizer: Optimizer, step: _Hook) -> _Hook:
    """`step` as a method of `optimizer`, like the wrapper that a scheduler puts there: it looks for both names."""
    reference = weakref.ref(optimizer)

    @functools.wraps(type(optimizer).step)
    def stepped(*args: Any, **kwargs: Any) -> Any:
        target = reference()
        assert target is not None
        target._opt_called = True  # type: ignore[attr-defined]
        return step(target, *args, **kwargs)

    stepped._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return stepped
