"""`Conversion` of the user's optimizer object in place, and `GuardedState`, which is its `state` between steps.

The state is in records, so the mapping has none of it. It says truly which parameters have state and under which
names, which is in memory. It gives single numbers, as the `step` that schedules and logs read, which are in memory too,
and refuses to give other values. What it is told to forget or to take it passes on: nothing that is done to it goes by
in silence.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

import torch
from torch.optim import Optimizer

from swapper.errors import SwapError
from swapper.optimizer.segments import MASTER
from swapper.tensors.dynamo import not_compiled
from swapper.tensors.grad_modes import outside_of_inference

if TYPE_CHECKING:
    from swapper.optimizer.swapper import OptimizerSwapper

__all__ = ["Conversion", "GuardedState", "StoredEntries"]

_ABSENT: Any = object()

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

    def replaced_by(self, optimizer: Optimizer) -> list[tuple[torch.nn.Parameter, Any]] | None:
        """All the state that `optimizer.state` was replaced by, by the user or by the class's own `load_state_dict`.

        Returns:
            The entries of each parameter that has some; None if nothing was replaced.

        Raises:
            SwapError: it has something else, or entries that stand for state on disk.
        """
        if not self._replaces_step or optimizer.state is self._state:
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

        @not_compiled  # Of a loop that torch compiles the step is no part.
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

    def uninstall(self, optimizer: Optimizer, swapper: object, state: Mapping[torch.Tensor, Any]) -> None:
        """Undo `install`, or as much of it as was done, and put `state` back. Idempotent."""
        self.own_state.update(state)
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


def _refuse_change() -> NoReturn:
    raise SwapError(
        "the state of a swapped optimizer is on disk, so single values of it cannot be changed in optimizer.state; "
        "assign the whole state of the parameter: entries = optimizer.swapper.state(parameter), change them, then "
        "optimizer.state[parameter] = entries"
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


_PROFILED = Optimizer._optimizer_step_code.__code__
"""In its frame the profiler reads the state of all parameters."""


class StoredEntries:
    """The value of one parameter in `optimizer.state`: the names of its state, and the values that are single numbers.

    Without state it is like an empty dictionary; with it, whatever would read other values, or change any, raises a
    `SwapError`.
    It is no `Mapping`, so that code which walks the state of mappings leaves it as it is.
    """

    __hash__ = None  # type: ignore[assignment]  # As that of a dictionary.

    def __init__(self, state: GuardedState, parameter: torch.Tensor) -> None:
        self._state = state
        self._parameter = parameter

    def belongs_to(self, state: GuardedState, parameter: object) -> bool:
        """True if this is the value that `state[parameter]` gives."""
        return self._state is state and self._parameter is parameter

    def keys(self) -> tuple[str, ...]:
        """The names; none for torch's profiler, which looks for tensors of the state that are in memory."""
        if sys._getframe(1).f_code is _PROFILED:
            return ()
        return self._state.keys_of(self._parameter)

    def __len__(self) -> int:
        return len(self.keys())

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __contains__(self, key: object) -> bool:
        return key in self.keys()

    def __repr__(self) -> str:
        return f"<swapped optimizer state: {', '.join(self.keys()) or 'none'}>"

    def __eq__(self, other: object) -> bool:
        if self is other or (isinstance(other, StoredEntries) and other.belongs_to(self._state, self._parameter)):
            return True
        return not self.items() and isinstance(other, (Mapping, StoredEntries)) and not len(other)

    def __getitem__(self, key: str) -> Any:
        if (value := self.get(key, _ABSENT)) is _ABSENT:
            raise KeyError(key)
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """A number, or a copy of a tensor of one element; `default`, if there is no such state.

        Raises:
            SwapError: the value is of more elements.
        """
        if key not in self.keys():
            return default
        value = self._state.number_of(self._parameter, key)
        if value is None:
            self._refuse()
        return value

    def items(self) -> tuple[tuple[str, Any], ...]:
        """None, as there is no state."""
        if self.keys():
            self._refuse()
        return ()

    def values(self) -> tuple[Any, ...]:
        """None, as there is no state."""
        return self.items()

    def copy(self) -> dict[str, Any]:
        """An empty one, as there is no state."""
        return dict(self.items())

    __copy__ = copy

    def __deepcopy__(self, memo: object) -> dict[str, Any]:
        return self.copy()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise SwapError(
            "the state of a swapped optimizer is on disk, so its tensors cannot be read from optimizer.state; use "
            "optimizer.swapper.state(parameter) for a copy of one parameter's, or optimizer.state_dict()"
        )

    def _refuse_change(self, *args: Any, **kwargs: Any) -> NoReturn:
        if args:  # `entries["step"] += 1` has changed the copy already, which needs not be said again.
            self._state.forget_given((id(self._parameter), args[0]))
        _refuse_change()

    __setitem__ = __delitem__ = setdefault = update = pop = popitem = clear = _refuse_change


class _Given(NamedTuple):
    """A copy of a number of the state that somebody was given, and the value that it had."""

    parameter: weakref.ref[torch.Tensor]
    copy: torch.Tensor
    value: Any


class GuardedState(defaultdict[torch.Tensor, Any]):
    """The parameters that have state, each with `StoredEntries`. The dictionary that it is stays empty.

    A parameter without state has empty entries, as in the `defaultdict` that this stands for; reading them adds none.
    Entries that are assigned replace the parameter's state, and what is deleted is forgotten.

    Args:
        owner: has the state. Only a weak reference is kept; when it is gone there is no state.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, owner: OptimizerSwapper) -> None:
        super().__init__(dict)
        self._owner_ref = weakref.ref(owner)
        self._given: dict[tuple[int, str], _Given] = {}

    def keys_of(self, parameter: Any) -> tuple[str, ...]:
        """Names of the state of a parameter."""
        owner = self._owner_ref()
        if owner is None or not isinstance(parameter, torch.Tensor):
            return ()
        segments = owner.segments_of(parameter)  # type: ignore[arg-type]
        keys = segments[0].keys if segments else ()
        return (*keys, *(MASTER,) * any(segment.checksum is not None for segment in segments))

    def number_of(self, parameter: torch.Tensor, key: str) -> Any:
        """A value of the state of a parameter that has some, if it is a single number; else None.

        A tensor is a copy, which is the same until the next step, and is then looked at: what is written to it would
        else be lost.
        """
        value = self._owner().small_state(parameter).get(key)  # type: ignore[arg-type]
        if not isinstance(value, torch.Tensor):
            return value if isinstance(value, (bool, int, float, complex)) else None
        if value.numel() != 1:
            return None
        given = self._given.get((id(parameter), key))
        if given is None or given.parameter() is not parameter:
            with outside_of_inference():
                given = _Given(weakref.ref(parameter), value.clone(), value.item())
            self._given[id(parameter), key] = given
        return given.copy

    def forget_given(self, key: tuple[int, Any] | None = None) -> None:
        """The copies that `number_of` has given, or the one of `key`, are of state that was replaced, or refused."""
        if key is None:
            self._given.clear()
        else:
            self._given.pop(key, None)

    def check_given(self) -> None:
        """Refuse what was written to a copy that `number_of` has given; then all are forgotten.

        Raises:
            SwapError: it says what to do in place of it.
        """
        given = list(self._given.values())
        self._given.clear()
        if any(repr(each.copy.item()) != repr(each.value) for each in given):  # NaN is no other value than NaN.
            _refuse_change()

    # A dictionary's own methods would look into the empty one that this is.
    keys = MutableMapping.keys  # type: ignore[assignment]
    values = MutableMapping.values  # type: ignore[assignment]
    items = MutableMapping.items  # type: ignore[assignment]
    update = MutableMapping.update

    # --- Which parameters have state --------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[torch.Tensor]:
        owner = self._owner_ref()
        return iter(()) if owner is None else iter(owner.parameters_with_state())

    def __reversed__(self) -> Iterator[torch.Tensor]:
        return reversed(list(self))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, key: object) -> bool:
        return bool(self.keys_of(key))

    def __getitem__(self, key: torch.Tensor) -> Any:
        return StoredEntries(self, key)

    def get(self, key: torch.Tensor, default: Any = None) -> Any:
        """`default`, if the parameter has no state."""
        entries = self[key]
        return entries if len(entries) else default

    def __repr__(self) -> str:
        return f"<swapped optimizer state of {len(self)} parameters>"

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Mapping) and dict(self.items()) == dict(other.items()))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def copy(self) -> dict[torch.Tensor, Any]:  # type: ignore[override]
        """A plain dictionary of the same entries."""
        return dict(self.items())

    __copy__ = copy  # type: ignore[assignment]

    def __reduce_ex__(self, *_: object) -> NoReturn:
        raise SwapError(
            "the state of a swapped optimizer is on disk, so optimizer.state cannot be copied or pickled; use "
            "optimizer.state_dict()"
        )

    __deepcopy__ = __reduce__ = __reduce_ex__

    def __or__(self, other: Any) -> Any:
        return self.copy() | dict(other)

    def __ror__(self, other: Any) -> Any:
        return dict(other) | self.copy()

    # --- Changes of the state ---------------------------------------------------------------------------------------

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, StoredEntries):
            if value.belongs_to(self, key):
                return
            raise SwapError(
                "the entry of another parameter was assigned to optimizer.state[parameter], but the state of a swapped "
                "optimizer is on disk; assign optimizer.swapper.state(other), or what state.pop(other) returns"
            )
        if not isinstance(key, torch.Tensor) or not isinstance(value, Mapping):
            raise SwapError(
                f"optimizer.state[{type(key).__name__}] = {type(value).__name__}: the state of a swapped optimizer has "
                "a dictionary for each parameter, and nothing else"
            )
        self._owner().assign_state(key, value)  # type: ignore[arg-type]

    def __delitem__(self, key: Any) -> None:
        if key not in self:
            raise KeyError(key)
        self._owner().assign_state(key, {})

    def pop(self, key: Any, default: Any = _ABSENT) -> Any:
        """Forget the state of a parameter, and return it, in memory."""
        if key in self:
            return self._owner().take_state(key)
        if default is _ABSENT:
            raise KeyError(key)
        return default

    def popitem(self) -> tuple[torch.Tensor, Any]:
        """`pop` of the last parameter."""
        parameters = list(self)
        if not parameters:
            raise KeyError("popitem(): optimizer.state is empty")
        return parameters[-1], self.pop(parameters[-1])

    def setdefault(self, key: torch.Tensor, default: Any = None) -> Any:
        """Assign `default`, if the parameter has no state."""
        if key not in self:
            self[key] = default
        return self[key]

    def __ior__(self, other: Mapping[torch.Tensor, Any] | Iterable[tuple[torch.Tensor, Any]]) -> GuardedState:  # type: ignore[override,misc]
        self.update(other)
        return self

    def clear(self) -> None:
        """Forget all state, as if no step had been made."""
        if (owner := self._owner_ref()) is not None and self:
            owner.reset()

    def _owner(self) -> OptimizerSwapper:
        owner = self._owner_ref()
        if owner is None:
            raise SwapError("the optimizer that this state belonged to is gone")
        return owner
