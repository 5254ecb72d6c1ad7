"""`GuardedState`: the `optimizer.state` of a swapped optimizer, between steps.

The state is in records, so the mapping has none of it. It says truly which parameters have state and under which
names, which is in memory, and refuses to give values, which are not. What it is told to forget or to take it passes on:
nothing that is done to it goes by in silence.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from swapper.errors import SwapError

if TYPE_CHECKING:
    from swapper.optimizer.swapper import OptimizerSwapper

__all__ = ["GuardedState", "StoredEntries"]

_ABSENT: Any = object()


class StoredEntries:
    """The value of one parameter in `optimizer.state`: the names of its state, without the values.

    Without state it is like an empty dictionary; with it, whatever would read or change values raises a `SwapError`.
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
        """The names."""
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

    def __getitem__(self, key: str) -> NoReturn:
        self.get(key)
        raise KeyError(key)

    def get(self, key: str, default: Any = None) -> Any:
        """`default`, as there is no such state."""
        if key in self.keys():
            self._refuse()
        return default

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
            "the state of a swapped optimizer is on disk, so its values cannot be read from optimizer.state; use "
            "optimizer.swapper.state(parameter) for a copy of one parameter's, or optimizer.state_dict()"
        )

    def _refuse_change(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise SwapError(
            "the state of a swapped optimizer is on disk, so single values of it cannot be changed in optimizer.state; "
            "assign the whole state of the parameter: entries = optimizer.swapper.state(parameter), change them, then "
            "optimizer.state[parameter] = entries"
        )

    __setitem__ = __delitem__ = setdefault = update = pop = popitem = clear = _refuse_change


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

    def keys_of(self, parameter: Any) -> tuple[str, ...]:
        """Names of the state of a parameter."""
        owner = self._owner_ref()
        if owner is None or not isinstance(parameter, torch.Tensor):
            return ()
        return tuple(owner.state_keys(parameter))  # type: ignore[arg-type]

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
