"""The order in which records are used: what happened before is expected again."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

__all__ = ["NEVER", "AccessOrder", "Order", "Use"]

_LONGEST_LOG = 20_000
"""Uses after which the first half of the log is condensed, unless that would be less than `_PERIODS`."""

_PERIODS = 4
"""Times as many uses as there are different ones that the log has before it is condensed: rounds of a program that does
the same in each."""

_USUAL = 64.0
"""Uses in a row that are taken to come as foretold before a program has done anything else."""

NEVER = 1 << 62
"""The distance of a record that no use is expected of."""


class Use(NamedTuple):
    """One use of a record: in which phase ("forward", "evaluation", "backward", "step"), and its number."""

    phase: str
    number: int


class Order(Protocol):
    """Says which records to bring next into one memory, and which of those that are in it are worth least."""

    def note(self, use: Use) -> None:
        """`use` happens now."""

    def expect(self, uses: Iterable[Use]) -> None:
        """Expect `uses` next, and nothing that was expected before."""

    def distance(self, number: int) -> int:
        """Return the distance to the next use of record `number`; `NEVER` if none is expected."""

    def hold(self, number: int, *, fixed: bool = False) -> None:
        """Record `number` is in memory, or on its way there; `fixed` if it stays, so that `last_needed` passes it."""

    def drop(self, number: int) -> None:
        """Record `number` is not in memory any more. Idempotent."""

    def missing(self) -> int | None:
        """The number of the first record that is expected, soon enough to be brought now, and not held."""

    def worth(self) -> int:
        """The distance beyond which a record must be needed to go for the one that is `missing`."""

    def last_needed(self) -> Iterator[int]:
        """The numbers of the records that are held and not fixed, those that are worth least first.

        What is held may change only after the last one that is taken from it.
        """


class AccessOrder:
    """An `Order` that predicts uses from a log of all uses.

    The program is at a place in the log, after the last occurrence of what it does now. What followed there is expected
    to follow again, up to the end of the log: one period. While the program does what is expected, the place moves on
    with it, and the period stays as it is. After what was never done before nothing is expected.

    So nobody has to say where a round begins or ends: a training step, a pass of evaluation and a token are periods,
    and what was done before an interlude is found again after it.

    All methods take constant time, but for bisection, while the program repeats itself. A use that was not foretold
    makes `worth` and `last_needed` look at all that is held when they are asked next.

    [Note: surprises] A program need not repeat itself, as one that drops layers at random, or whose router chooses
    experts. What is foretold far ahead is then brought for nothing, and something that is used is given up for it: in a
    random order of 800 records, half of them held, 45 were read for each use. So no more is looked ahead than one use,
    and twice as many as usually come as foretold before one that does not, or as have come so since: what begins to
    repeat itself is soon looked ahead as far as there is room.

    Args:
        guess: a log to begin with.
        start: the place in it where the program is.
        depth: how many uses before a missing record it must be asked for to come in time: see `worth`. None: a quarter
            of what is held, and at least 2.
    """

    def __init__(self, guess: Iterable[Use] = (), start: int = 0, depth: int | None = None) -> None:
        self._given_depth = depth
        self._last: Use | None = None
        self._next = 0
        self._ahead = 0  # All records that are expected from `_next` to here are held.
        self._due: dict[int, int] = {}  # of each record that is held: the place of its next use
        self._movable: list[tuple[int, int]] = []  # those of them that may go: due and -number, sorted
        self._stale = False  # `_due` and `_movable` are to be computed anew; also where Ctrl-C left a change half made
        self._run = 0  # uses that came as foretold since one that did not; see [Note: surprises]
        self._usual = _USUAL  # how many that usually are
        self._depth = 0
        self._between: deque[tuple[int, int]] = deque()  # see `worth`
        self._between_stop = 0
        self._fixed: set[int] = set()
        self._expect(list(guess), start)

    def note(self, use: Use) -> None:
        """`use` happens now."""
        if self._last == use:
            return
        self._last = use
        if places := self._places.get(use):
            use = self._log[places[-1]]  # One object for all that are equal: the log may be long.
            i = bisect_left(places, self._next)
            at = places[i] if i < len(places) else places[-1]
            self._count(at == self._next)
            if at < self._next:
                self._start_anew()  # Places before `_next` are expected again.
            self._next = at + 1
        else:
            self._count(False)
            self._next = len(self._log) + 1  # What comes after it is not known.
        self._log.append(use)  # First: a place that Ctrl-C leaves without its use could not be looked up.
        at = len(self._log) - 1  # One object for both.
        self._places.setdefault(use, []).append(at)
        self._by_number.setdefault(use.number, []).append(at)
        if use.number in self._due:
            self._update(use.number)
        if len(self._log) > max(_LONGEST_LOG, _PERIODS * len(self._places)):
            self._condense()

    def expect(self, uses: Iterable[Use]) -> None:
        """Forget what was learnt, and expect `uses`."""
        self._expect(list(uses), 0)

    def upcoming(self) -> Iterator[int]:
        """Numbers of the records that will be used next, in order, for one period; some come more than once."""
        for at in range(self._next, len(self._log)):
            yield self._log[at].number

    def distance(self, number: int) -> int:
        """Return the number of uses that come before the next one of record `number`, or `NEVER`."""
        due = self._due_of(number)
        return NEVER if due == NEVER else due - self._next

    # --- What is held ----------------------------------------------------------------------------------------------

    def hold(self, number: int, *, fixed: bool = False) -> None:
        """Record `number` is in memory, or on its way there; see `Order.hold`."""
        self.drop(number)
        stale, self._stale = self._stale, True
        if fixed:
            self._fixed.add(number)
        due = self._due[number] = self._due_of(number)
        if not fixed:
            insort(self._movable, (due, -number))
        self._stale = stale

    def drop(self, number: int) -> None:
        """Record `number` is not in memory any more. Idempotent."""
        due = self._due.get(number)
        if due is None:
            return
        stale, self._stale = self._stale, True
        if number in self._fixed:
            self._fixed.discard(number)
        else:
            self._remove(due, number)
        del self._due[number]
        self._stale = stale
        self._ahead = min(self._ahead, self._due_of(number))

    def missing(self) -> int | None:
        """The number of the first record that is expected and not held. See [Note: surprises]."""
        self._ahead = max(self._ahead, self._next)
        log, held = self._log, self._due
        stop = min(len(log), self._next + 4 * len(self._by_number))  # A period may be many steps long.
        stop = min(stop, self._next + self._reach())
        while self._ahead < stop:
            number = log[self._ahead].number
            if number not in held:
                return number
            self._ahead += 1
        return None

    def worth(self) -> int:
        """The distance beyond which a record must be needed to go for the one that is `missing`.

        That one is needed sooner, of course. Besides, a record that is used now, or before the missing one, and is then
        needed later than what could go now, is what should go: so it is waited for. (That is what Belady's rule drops
        when it reads nothing ahead, and so as little as possible is read.) But what is used just before the missing one
        comes too late, or it could not be read meanwhile: of that, as many uses as the depth, nothing is expected.
        """
        self._refresh()
        self._depth = self._given_depth or max(self._depth, 2, len(self._movable) // 4)
        now = self._next if self._last is None else max(self._next - 1, 0)
        stop = max(self._ahead - self._depth, now)
        between = self._between
        if stop < self._between_stop:
            between.clear()
            self._between_stop = now
        for at in range(max(self._between_stop, now), stop):
            if self._log[at].number in self._fixed:  # It never goes.
                continue
            due = self._due_after(at)
            while between and between[-1][1] <= due:
                between.pop()
            between.append((at, due))
        self._between_stop = stop
        while between and between[0][0] < now:
            between.popleft()
        return max(self._ahead, between[0][1] if between else 0) - self._next

    def last_needed(self) -> Iterator[int]:
        """The numbers of the records that are held and not fixed, those that are needed last, or never, first."""
        self._refresh()
        for at in range(len(self._movable) - 1, -1, -1):
            yield -self._movable[at][1]

    # --- Inside ----------------------------------------------------------------------------------------------------

    def _expect(self, log: list[Use], start: int) -> None:
        self._log = log
        self._next = start
        self._places: dict[Use, list[int]] = {}
        self._by_number: dict[int, list[int]] = {}
        for at, use in enumerate(log):
            self._places.setdefault(use, []).append(at)
            self._by_number.setdefault(use.number, []).append(at)
        self._start_anew()

    def _start_anew(self) -> None:
        """Forget what is known of what is ahead. Ctrl-C after any line of it does no harm."""
        self._stale = True
        self._ahead = self._depth = self._between_stop = 0
        self._between.clear()

    def _count(self, foretold: bool) -> None:
        """A use came as it was foretold, or not. See [Note: surprises]."""
        if foretold:
            self._run += 1
        else:
            self._usual, self._run = (self._usual + self._run) / 2, 0

    def _reach(self) -> int:
        """Return the most uses that are looked ahead."""
        return 1 + int(2 * max(self._usual, self._run))

    def _due_of(self, number: int) -> int:
        places = self._by_number.get(number, ())
        i = bisect_left(places, self._next)
        return places[i] if i < len(places) else NEVER

    def _due_after(self, at: int) -> int:
        """The place of the next use of the record that is used at `at`, which is expected; perhaps in a period more."""
        places = self._by_number[self._log[at].number]
        i = bisect_right(places, at)
        if i < len(places):
            return places[i]
        i = bisect_left(places, self._next)
        return places[i] + len(self._log) - self._next if i < len(places) else NEVER

    def _update(self, number: int) -> None:
        before, due = self._due[number], self._due_of(number)
        if before == due:
            return
        stale, self._stale = self._stale, True
        if number not in self._fixed:
            self._remove(before, number)
            insort(self._movable, (due, -number))
        self._due[number] = due
        self._stale = stale

    def _remove(self, due: int, number: int) -> None:
        i = bisect_left(self._movable, (due, -number))
        if i < len(self._movable) and self._movable[i] == (due, -number):
            del self._movable[i]

    def _refresh(self) -> None:
        """Bring what is known of held records up to date with `_next`."""
        if self._stale:
            self._due = {number: self._due_of(number) for number in self._due}
            self._movable = sorted((due, -number) for number, due in self._due.items() if number not in self._fixed)
            self._stale = False
        self._ahead = max(self._ahead, self._next)
        while self._movable and self._movable[0][0] < self._next:  # Passed over.
            self._update(-self._movable[0][1])

    def _condense(self) -> None:
        """Keep the second half of the log; of what is only in the first the last occurrence of each use."""
        middle = len(self._log) // 2
        tail = self._log[middle:]
        kept = sorted(places[-1] for places in self._places.values() if places[-1] < middle)
        start = self._next - middle + len(kept) if self._next >= middle else bisect_left(kept, self._next)
        self._expect([*(self._log[at] for at in kept), *tail], start)
