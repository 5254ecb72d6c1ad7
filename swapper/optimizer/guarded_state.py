"""`GuardedState`: the `state` of a swapped optimizer between steps.

The state is in records, so the mapping has none of it. It says truly which parameters have state and under which
names, which is in memory. It gives single numbers, as the `step` that schedules and logs read, which are in memory too,
and refuses to give other values, but to a class's own `load_state_dict`. What it is told to forget or to take it passes
on: nothing that is done to it goes by in silence.
"""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch.optim import Optimizer

from swapper.errors import SwapError
from swapper.optimizer.segments import MASTER
from swapper.tensors.grad_modes import outside_of_inference

if TYPE_CHECKING:
    from swapper.optimizer.swapper import OptimizerSwapper

__all__ = ["GuardedState", "StoredEntries"]

_ABSENT: Any = object()


def _refuse_change() -> NoReturn:
    raise SwapError(
        "the state of a swapped optimizer is on disk, so single values of it cannot be changed in optimizer.state; "
        "assign the whole state of the parameter: entries = optimizer.swapper.state(parameter), change them, then "
        "optimizer.state[parameter] = entries"
    )


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


_FEWEST_LOANS = 2
"""A loop has the entries of a parameter when it asks for the next one's."""

_IMMUTABLE = (int, float, complex, str, type(None))


class _Lent(dict[str, Any]):
    """Entries that can be referred to weakly."""

    __slots__ = ("__weakref__",)


class _Loan:
    """The state of one parameter in memory, which is looked at for changes.

    Attributes:
        entries: they, while somebody may change them.
    """

    def __init__(self, parameter: torch.Tensor, entries: Mapping[str, Any]) -> None:
        self.parameter = parameter
        self.entries: _Lent | None = _Lent(entries)
        self._entries_ref = weakref.ref(self.entries)
        self._held: list[torch.Tensor] = []  # Of entries that are gone.
        self.note()

    def note(self) -> None:
        """The state is as the entries are now."""
        entries = {} if self.entries is None else self.entries
        tensors = {k: v for k, v in entries.items() if isinstance(v, torch.Tensor) and not v.is_inference()}
        self._tensors = {key: (weakref.ref(tensor), tensor._version) for key, tensor in tensors.items()}
        self._others = {key: value for key, value in entries.items() if key not in tensors}

    def end(self) -> bool:
        """Let go of the entries. False if somebody else has them, or tensors of them: those are held too then."""
        self.entries = None
        self.entries = self._entries_ref()
        if self.entries is None:
            self._held = [t for tensor, _ in self._tensors.values() if (t := tensor()) is not None]
        return self.entries is None and not self._held

    @property
    def changed(self) -> bool:
        """True if a tensor has been written to, or an entry was replaced."""
        if any((t := tensor()) is not None and t._version != version for tensor, version in self._tensors.values()):
            return True
        had = {key: tensor() for key, (tensor, _) in self._tensors.items()} | self._others
        entries = had if self.entries is None else self.entries
        return entries.keys() != had.keys() or any(entries[key] is not value for key, value in had.items())

    @property
    def may_have_changed(self) -> bool:
        """True also if there are values that do not tell."""
        return self.changed or not all(isinstance(value, _IMMUTABLE) for value in self._others.values())


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
        self._lends = False
        self._loans: dict[int, _Loan] = {}
        self._most_loans = _FEWEST_LOANS
        self._stale: list[_Loan] = []  # They have ended, and somebody has them, or tensors of them.
        self._passing_on = False

    @contextmanager
    def lent(self, optimizer: Optimizer) -> Iterator[None]:
        """Within it the entries of a parameter are a dictionary with its state, and what is changed in them is taken.

        They are in memory until those of a few others are asked for, or as long as somebody has them.

        Args:
            optimizer: whose state this is; what is changed counts only if it still is at the end.

        Raises:
            SwapError: entries were changed that were those of the parameter no longer.
        """
        self._lends = True
        try:
            yield
            if optimizer.state is self:
                self._end_loans()
                self._check_stale()
        finally:
            self._lends = False
            self._loans.clear()
            self._stale.clear()

    def _lend(self, parameter: torch.Tensor) -> _Lent:
        loan = self._loans.get(id(parameter))
        if loan is None or loan.entries is None:
            if len(self._loans) >= self._most_loans:
                for each in self._loans.values():
                    self._take_changes(each)
                self._loans = {key: each for key, each in self._loans.items() if not each.end()}
                self._most_loans = max(_FEWEST_LOANS, 2 * len(self._loans))  # Those that are held are not asked often.
            with outside_of_inference():
                loan = _Loan(parameter, self._owner().plain_state(parameter))  # type: ignore[arg-type]
            if (ended := self._loans.get(id(parameter))) is not None:
                self._stale.append(ended)
            self._loans[id(parameter)] = loan
        assert loan.entries is not None
        return loan.entries

    def _take_changes(self, loan: _Loan) -> None:
        if loan.entries is not None and loan.may_have_changed:
            self._assign(loan.parameter, loan.entries)
            loan.note()

    def _end_loans(self) -> None:
        """The state may be another from here on: entries that were lent are not those of the parameters any more."""
        loans, self._loans = self._loans, {}
        for loan in loans.values():
            self._take_changes(loan)
        self._stale += [loan for loan in loans.values() if not loan.end()]

    def _check_stale(self) -> None:
        if any(loan.changed for loan in self._stale):
            raise SwapError(
                "load_state_dict of the optimizer's class changed entries of a parameter's state, or a tensor of them, "
                "that it had from before it let go of state[parameter], or from before a step. State that is swapped "
                "is in memory for few parameters at a time: have the class ask for state[parameter] again, or load the "
                "state before the optimizer is wrapped"
            )

    def _replace(self, key: Any, entries: Mapping[str, Any]) -> None:
        self._loans.pop(id(key), None)
        self._assign(key, entries)

    def _assign(self, key: Any, entries: Mapping[str, Any]) -> None:
        self._passing_on, before = True, self._passing_on
        try:
            self._owner().assign_state(key, entries)
        finally:
            self._passing_on = before

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
        """Refuse what was written to a copy that `number_of` has given; then all are forgotten. Ends what is lent.

        Raises:
            SwapError: it says what to do in place of it.
        """
        if not self._passing_on:
            self._end_loans()
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
        return self._lend(key) if self._lends and key in self else StoredEntries(self, key)

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
        self._replace(key, value)

    def __delitem__(self, key: Any) -> None:
        if key not in self:
            raise KeyError(key)
        self._replace(key, {})

    def pop(self, key: Any, default: Any = _ABSENT) -> Any:
        """Forget the state of a parameter, and return it, in memory."""
        if key in self:
            entries = dict(self._lend(key)) if self._lends else self._owner().plain_state(key)
            self._replace(key, {})
            return entries
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
            self._loans.clear()
            owner.reset()

    def _owner(self) -> OptimizerSwapper:
        owner = self._owner_ref()
        if owner is None:
            raise SwapError("the optimizer that this state belonged to is gone")
        return owner
