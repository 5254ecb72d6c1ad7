"""The order in which records are used: learnt in one round, expected in the next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

__all__ = ["Order", "Use"]

_LONGEST_ROUND = 100_000
"""Uses after which a round is over even if nobody says so."""


class Use(NamedTuple):
    """One use of a record: in which phase ("forward", "backward", "step"), and its number."""

    phase: str
    number: int


class Order:
    """Follows a program that does about the same in each round.

    Args:
        guess: what to expect in the first round.
    """

    def __init__(self, guess: Iterable[Use]) -> None:
        self._current: list[Use] = []
        self._next = 0
        self._expect(guess)

    def note(self, use: Use) -> None:
        """`use` happens now. What was expected before it is not expected any more, until the round starts again."""
        if self._current and self._current[-1] == use:
            return
        self._current.append(use)
        places = self._places.get(use, ())
        at = next((at for at in places if at >= self._next), places[0] if places else None)
        if at is not None:
            self._next = at + 1
        if len(self._current) > _LONGEST_ROUND:
            self.end_round()

    def end_round(self) -> None:
        """What was noted since the last call is one round."""
        if self._current:
            self._expect(self._current)
            self._current = []

    def upcoming(self) -> Iterator[int]:
        """Numbers of the records that will be used next, in order, for one round; some come more than once."""
        count = len(self._round)
        for i in range(count):
            yield self._round[(self._next + i) % count].number

    def distance(self, number: int) -> int:
        """How many uses come before the next one of record `number`; more than a round if none is expected."""
        count = len(self._round)
        places = self._by_number.get(number)
        if not places:
            return 2 * count + 1
        return min((at - self._next) % count for at in places)

    def _expect(self, uses: Iterable[Use]) -> None:
        self._round = tuple(uses)
        self._next = 0
        self._places: dict[Use, list[int]] = {}
        self._by_number: dict[int, list[int]] = {}
        for at, use in enumerate(self._round):
            self._places.setdefault(use, []).append(at)
            self._by_number.setdefault(use.number, []).append(at)
