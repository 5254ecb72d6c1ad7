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
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch.optim import Optimizer

from swapper.errors import SwapError
from swapper.optimizer.segments import MASTER
from swapper.optimizer.snapshots import CONTAINERS, IMMUTABLE, content_of
from swapper.tensors.grad_modes import outside_of_inference
from swapper.tensors.inner import is_wrapper
from swapper.tensors.other_tensors import is_shared
from swapper.tensors.sharded import local_of

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


def _inside(value: Any) -> list[Any]:
    """Return all that can be changed of `value`: itself, and what is in it."""
    if not isinstance(value, CONTAINERS):
        return [] if isinstance(value, IMMUTABLE) else [value]
    items = value.values() if isinstance(value, Mapping) else value
    return [value] * (not isinstance(value, tuple)) + [each for item in items for each in _inside(item)]


def _refcounts(things: Sequence[Any]) -> list[int]:
    return [sys.getrefcount(thing) for thing in things]


_ALONE = _refcounts(_inside({"": []}))[1]
"""References to what is in a dictionary that nobody else has."""


def _had_elsewhere(things: Sequence[Any]) -> list[Any]:
    """Return the `things`, each in one place here, to which, or to whose memory, somebody else has a reference."""
    return [
        thing
        for thing, count in zip(things, _refcounts(things), strict=True)
        if count > _ALONE or (isinstance(thing, torch.Tensor) and _shares_memory(local_of(thing)))
    ]


def _shares_memory(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_meta or is_wrapper(tensor):
        return False
    return is_shared(tensor, ours=1 + (tensor._base is not None))


class _Loan:
    """The state of one parameter in memory, which is looked at for changes.

    Args:
        entries: the dictionary that somebody may change.
        is_stored: it has what the records have.
    """

    def __init__(self, parameter: torch.Tensor, entries: Mapping[str, Any], is_stored: bool) -> None:
        self.parameter = parameter
        self.entries = entries
        self._stored = content_of(entries) if is_stored else None

    def take(self) -> bool:
        """Return True if the records have something else, or if that cannot be told. They are given it then."""
        before, self._stored = self._stored, content_of(self.entries)
        return bool(self._stored != before)

    @property
    def is_had(self) -> bool:
        """True if somebody else has the entries, or something of them that does not tell if it was changed."""
        had = _had_elsewhere(_inside(self.entries))
        return any(each is self.entries or not isinstance(each, (torch.Tensor, *CONTAINERS)) for each in had)


class _Kept:
    """Something of a loan of `parameter` that is over, which somebody else still has."""

    def __init__(self, parameter: torch.Tensor, thing: Any) -> None:
        self.parameter = parameter
        self.thing = thing
        self._content = content_of(thing)

    @property
    def has_changed(self) -> bool:
        """True if it is not what the records were given, or if that cannot be told."""
        return bool(content_of(self.thing) != self._content)


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
        self._borrower: Optimizer | None = None
        self._loans: dict[int, _Loan] = {}
        self._most_loans = _FEWEST_LOANS
        self._kept: list[_Kept] = []
        self._most_kept = 0
        self._passing_on = False

    @contextmanager
    def lent(self, optimizer: Optimizer) -> Iterator[None]:
        """Within it the entries of a parameter are a dictionary with its state, or the one that was assigned.

        What is changed in them is taken. They are in memory until those of a few others are asked for, or as long as
        somebody has them.

        Args:
            optimizer: whose state this is. While its state is another, what is changed in this one does not count.

        Raises:
            SwapError: something was changed that was the parameter's state no longer.
        """
        if self._borrower is not None:  # A `load_state_dict` that calls itself.
            yield
            return
        self._borrower, self._most_loans, self._most_kept = optimizer, _FEWEST_LOANS, 0
        try:
            try:
                yield
            except Exception:  # Not Ctrl-C. What was changed before is changed, as in plain PyTorch.
                self._finish_loans()
                raise
            self._finish_loans()
        finally:
            self._borrower = None
            self._loans.clear()
            self._kept.clear()

    @property
    def _is_installed(self) -> bool:
        return self._borrower is None or self._borrower.state is self

    def _lend(self, parameter: torch.Tensor) -> Mapping[str, Any]:
        if (loan := self._loans.get(id(parameter))) is None:
            self._check(each for each in self._kept if each.parameter is parameter)
            if self._is_installed and len(self._loans) >= self._most_loans:
                self._end_some()
            with outside_of_inference():
                entries = self._owner().plain_state(parameter)  # type: ignore[arg-type]
                loan = self._loans[id(parameter)] = _Loan(parameter, entries, True)
        return loan.entries

    def _end_some(self) -> None:
        """End the loans of which nobody has the entries."""
        self._take_changes()
        still = {key: loan for key, loan in self._loans.items() if loan.is_had}
        self._keep_of(loan for key, loan in self._loans.items() if key not in still)
        self._loans = still
        self._most_loans = max(_FEWEST_LOANS, 2 * len(still))  # Those that are had are not asked often.
        if len(self._kept) >= self._most_kept:
            self._check(self._kept)
            had = set(map(id, _had_elsewhere([each.thing for each in self._kept])))
            self._kept = [each for each in self._kept if id(each.thing) in had]
            self._most_kept = 2 * len(self._kept)

    def _finish_loans(self) -> None:
        self._take_changes()
        if self._is_installed:
            self._check(self._kept)

    def _end_loans(self) -> None:
        """The state may be another from here on: entries that were lent are not those of the parameters any more."""
        self._keep_of(self._loans.values())
        self._loans = {}

    def _take_changes(self) -> None:
        for loan in self._loans.values() if self._is_installed else ():
            if not loan.take():
                continue
            entries, of = loan.entries, loan.parameter
            if entries and MASTER not in entries and MASTER in self._stored_keys_of(of):
                # The class does not know of it, so what it has put together anew is without it.
                entries = {**entries, MASTER: self._owner().plain_state(of)[MASTER]}  # type: ignore[arg-type]
            self._assign(of, entries)

    def _keep_of(self, loans: Iterable[_Loan]) -> None:
        self._kept += [
            _Kept(loan.parameter, thing) for loan in loans for thing in _had_elsewhere(_inside(loan.entries))
        ]

    def _check(self, kept: Iterable[_Kept]) -> None:
        if any(each.has_changed for each in kept):
            raise SwapError(
                "load_state_dict of the optimizer's class changed entries of a parameter's state, or a tensor of them, "
                "that it had from before it let go of state[parameter], or from before a step. State that is swapped "
                "is in memory for few parameters at a time: have the class ask for state[parameter] again, or load the "
                "state before the optimizer is wrapped"
            )

    def _replace(self, key: Any, entries: Mapping[str, Any]) -> None:
        if self._borrower is None:
            self._assign(key, entries)
        else:
            self._loans[id(key)] = _Loan(key, entries, False)

    def _assign(self, key: Any, entries: Mapping[str, Any]) -> None:
        self._passing_on, before = True, self._passing_on
        try:
            self._owner().assign_state(key, entries)
        finally:
            self._passing_on = before

    def keys_of(self, parameter: Any) -> tuple[str, ...]:
        """Names of the state of a parameter."""
        loan = self._loans.get(id(parameter))
        return self._stored_keys_of(parameter) if loan is None else tuple(loan.entries)

    def _stored_keys_of(self, parameter: Any) -> tuple[str, ...]:
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
            self._kept = [_Kept(each.parameter, each.thing) for each in self._kept]
            self._end_loans()
        else:
            self._given.pop(key, None)

    def check_given(self) -> None:
        """Raise `SwapError` if a copy that `number_of` has given was written to. Forgets all, and ends what is lent."""
        if not self._passing_on:
            self._take_changes()
            self._end_loans()
            self._check(self._kept)
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
        stored = [] if owner is None else owner.parameters_with_state()
        known, loans = set(map(id, stored)), self._loans
        new = (loan.parameter for key, loan in loans.items() if loan.entries and key not in known)
        return iter([*(p for p in stored if id(p) not in loans or loans[id(p)].entries), *new])

    def __reversed__(self) -> Iterator[torch.Tensor]:
        return reversed(list(self))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, key: object) -> bool:
        return bool(self.keys_of(key))

    def __getitem__(self, key: torch.Tensor) -> Any:
        lends = self._borrower is not None and isinstance(key, torch.Tensor)
        return self._lend(key) if lends else StoredEntries(self, key)

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
            entries = self._owner().plain_state(key) if self._borrower is None else self._lend(key)
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
        if (owner := self._owner_ref()) is None or not self:
            return
        if self._borrower is None:
            owner.reset()
        else:
            for parameter in list(self):
                self._replace(parameter, {})

    def _owner(self) -> OptimizerSwapper:
        owner = self._owner_ref()
        if owner is None:
            raise SwapError("the optimizer that this state belonged to is gone")
        return owner
