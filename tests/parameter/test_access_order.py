"""The order of use: what is expected next, and how far off each record's next use is."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from interrupts import interrupted_at
from sampling import ALL

from swapper.storage import access_order as order
from swapper.storage.access_order import NEVER, AccessOrder, Use

FORWARD = [Use("forward", i) for i in range(4)]
BACKWARD = [Use("backward", i) for i in reversed(range(4))]
EVALUATION = [Use("evaluation", i) for i in range(4)]
STEP = [Use("step", i) for i in range(4)]


def note_all(o: AccessOrder, uses: Iterable[Use]) -> None:
    for use in uses:
        o.note(use)


def upcoming(o: AccessOrder, count: int) -> list[int]:
    return list(islice(o.upcoming(), count))


def test_the_guess_is_expected_first() -> None:
    o = AccessOrder([*FORWARD, *BACKWARD])
    assert list(o.upcoming()) == [0, 1, 2, 3, 3, 2, 1, 0]
    assert [o.distance(i) for i in range(4)] == [0, 1, 2, 3]


def test_a_use_moves_on_to_what_comes_after_it() -> None:
    o = AccessOrder([*FORWARD, *BACKWARD])
    note_all(o, FORWARD[:2])
    assert upcoming(o, 4) == [2, 3, 3, 2]
    assert [o.distance(i) for i in range(4)] == [5, 4, 0, 1]


def test_uses_that_were_passed_over_are_not_expected_before_what_comes_after_them() -> None:
    o = AccessOrder([*FORWARD, *BACKWARD])
    o.note(Use("forward", 3))
    assert upcoming(o, 5) == [3, 2, 1, 0, 3]
    assert o.distance(1) == 2


def test_phases_tell_uses_of_one_record_apart() -> None:
    o = AccessOrder([*FORWARD, *BACKWARD, *STEP])
    note_all(o, [*FORWARD, *BACKWARD[:2]])
    assert upcoming(o, 3) == [1, 0, 0]
    o.note(Use("step", 0))
    assert upcoming(o, 4) == [1, 2, 3, 0]


def test_the_last_use_of_a_round_is_followed_by_the_first() -> None:
    o = AccessOrder(FORWARD)
    note_all(o, FORWARD)
    assert list(o.upcoming()) == [0, 1, 2, 3]
    assert o.distance(3) == 3


def test_a_second_use_in_a_round_is_the_next_one_in_it() -> None:
    uses = [Use("forward", 0), Use("forward", 1), Use("forward", 0), Use("forward", 2)]
    o = AccessOrder(uses)
    o.note(uses[0])
    assert upcoming(o, 2) == [1, 0]
    note_all(o, uses[1:3])
    assert upcoming(o, 2) == [2, 0]
    note_all(o, uses[3:])
    assert upcoming(o, 4) == [0, 1, 0, 2]


def test_the_same_use_again_at_once_is_one_use() -> None:
    o = AccessOrder([Use("forward", 0), Use("forward", 1), Use("forward", 0)])
    note_all(o, [Use("forward", 0)] * 5)
    assert upcoming(o, 2) == [1, 0]


def test_after_what_was_never_done_nothing_is_expected_until_something_known_is_done() -> None:
    o = AccessOrder(FORWARD)
    note_all(o, [FORWARD[0], Use("forward", 9)])
    assert upcoming(o, 1) == []
    assert o.distance(1) == NEVER
    o.note(FORWARD[1])
    assert upcoming(o, 2) == [2, 3]


def test_an_interlude_is_expected_as_it_was_the_last_time_and_so_is_what_it_cut_off() -> None:
    o = AccessOrder([*EVALUATION, *FORWARD, *BACKWARD, *STEP], start=4)
    train = [*FORWARD, *BACKWARD, *STEP]
    note_all(o, [*train, *train, *EVALUATION, *train, *train, *train])
    for use in EVALUATION:
        o.note(use)
    assert upcoming(o, len(train)) == [use.number for use in train]
    note_all(o, FORWARD)
    assert upcoming(o, 4) == [3, 2, 1, 0]


@pytest.mark.parametrize("passes", [1, 3])
def test_passes_of_evaluation_expect_one_another(passes: int) -> None:
    o = AccessOrder([*EVALUATION, *FORWARD, *BACKWARD, *STEP], start=4)
    note_all(o, EVALUATION * passes)
    o.note(EVALUATION[0])
    assert upcoming(o, 3) == [1, 2, 3]
    if passes > 1:
        note_all(o, EVALUATION[1:])
        assert upcoming(o, 4) == [0, 1, 2, 3]


def test_the_log_is_condensed_and_nothing_that_was_ever_done_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "_LONGEST_LOG", 64)
    o = AccessOrder([])
    note_all(o, EVALUATION)
    for _ in range(1000):
        note_all(o, FORWARD)
        assert upcoming(o, 1) in ([0], [])
        assert len(o._log) <= 64
    note_all(o, EVALUATION[:1])
    assert upcoming(o, 3) == [1, 2, 3]


def test_the_log_is_as_long_as_some_rounds() -> None:
    """Of a small model far shorter than of a large one, whose rounds are foretold to their ends."""
    small = AccessOrder([])
    for _ in range(2 * order._LONGEST_LOG):
        note_all(small, FORWARD)
    assert len(small._log) <= order._LONGEST_LOG
    small.note(FORWARD[0])
    assert upcoming(small, 3) == [1, 2, 3]
    large = AccessOrder([])
    uses = [Use("forward", number) for number in range(2 * order._LONGEST_LOG)]
    for _ in range(order._PERIODS + 2):
        note_all(large, uses)
    assert len(large._log) <= order._PERIODS * len(uses) + 1
    large.note(uses[0])
    assert [*large.upcoming()][: len(uses) - 1] == [use.number for use in uses[1:]]


USES = st.lists(st.builds(Use, st.sampled_from(["forward", "backward", "step"]), st.integers(0, 5)), max_size=30)


@given(guess=USES, noted=USES)
def test_distances_are_those_of_what_is_upcoming(guess: list[Use], noted: list[Use]) -> None:
    o = AccessOrder(guess)
    note_all(o, noted)
    coming = list(o.upcoming())
    for number in range(7):
        assert o.distance(number) == (coming.index(number) if number in coming else NEVER)


@given(uses=st.lists(st.sampled_from([*FORWARD, *BACKWARD, *STEP]), unique=True, min_size=2))
def test_a_program_that_repeats_itself_is_foretold(uses: list[Use]) -> None:
    o = AccessOrder([])
    note_all(o, [*uses, uses[0]])
    for use in (*uses[1:], *uses, *uses):
        assert upcoming(o, 1) == [use.number]
        assert o.distance(use.number) == 0
        o.note(use)


# --- What is held ---


ACTIONS = st.lists(st.tuples(st.sampled_from(["note", "hold", "drop", "fixed"]), st.integers(0, 11)), max_size=60)


@given(actions=ACTIONS)
def test_what_is_known_of_held_records_is_what_a_search_finds(actions: list[tuple[str, int]]) -> None:
    o = AccessOrder([*FORWARD, *BACKWARD])
    held: dict[int, bool] = {}
    for action, value in actions:
        number = value % 4
        if action == "note":
            o.note([*FORWARD, *BACKWARD, *STEP][value])
        elif action == "drop":
            o.drop(number)
            held.pop(number, None)
        else:
            o.hold(number, fixed=action == "fixed")
            held[number] = action == "fixed"
        reached = islice(o.upcoming(), o._reach())
        assert o.missing() == next((number for number in reached if number not in held), None)
        movable = sorted((number for number in held if not held[number]), key=lambda n: (-o.distance(n), n))
        assert list(o.last_needed()) == movable
        if o.missing() is not None:
            assert o.worth() >= o.distance(o.missing())


def reads_per_round(uses: list[Use], room: int, rounds: int = 12) -> float:
    """How often a cache of `room` records reads in a round, on average of the last ones, if it follows the order."""
    return reads_of([uses] * rounds, room)


def reads_of(program: list[list[Use]], room: int) -> float:
    """As `reads_per_round`, of rounds that need not be alike."""
    rounds = len(program)
    o = AccessOrder([])
    held: set[int] = set()
    reads = [0] * rounds

    def go(number: int) -> None:
        o.drop(number)
        held.discard(number)

    for i, uses in enumerate(program):
        for use in uses:
            o.note(use)
            if use.number not in held:
                reads[i] += 1
                if len(held) == room:
                    go(next(o.last_needed()))
                held.add(use.number)
                o.hold(use.number)
            while (number := o.missing()) is not None:
                if len(held) == room:
                    victim = next(n for n in o.last_needed() if n != use.number)
                    if o.distance(victim) <= o.worth():
                        break
                    go(victim)
                reads[i] += 1
                held.add(number)
                o.hold(number)
    return sum(reads[rounds // 2 :]) / (rounds - rounds // 2)


@pytest.mark.parametrize("count", [3, 24, 100])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_round_reads_about_as_little_as_belady_with_room_for_what_is_read_ahead(count: int, share: float) -> None:
    room = max(3, int(count * share))
    evaluation = [Use("evaluation", i) for i in range(count)]
    least = max(0, count - room) * count / (count - max(2, room // 4) - 1) if count > room else 0
    assert reads_per_round(evaluation, room) <= min(count, least + 2)
    train = [
        *(Use("forward", i) for i in range(count)),
        *(Use("backward", i) for i in reversed(range(count))),
        *(Use("step", i) for i in range(count)),
    ]
    assert reads_per_round(train, room) <= min(3 * count, 3 * (count - room) * (1 + 1 / 3) + 3)


RANDOM: dict[str, Callable[[random.Random, int], Sequence[int]]] = {
    "layers dropped": lambda rng, count: [i for i in range(count) if rng.random() >= 0.2],
    "few of many": lambda rng, count: [i for i in range(count) if rng.random() >= 0.9],
    "any order": lambda rng, count: rng.sample(range(count), count),
    "two of eight experts": lambda rng, count: [8 * i + e for i in range(count // 8) for e in rng.sample(range(8), 2)],
}


@pytest.mark.parametrize("count", [48, 400])
@pytest.mark.parametrize("kind", RANDOM)
def test_a_program_that_does_not_repeat_itself_reads_little_for_nothing(kind: str, count: int) -> None:
    """One record ahead of each use, at most, beside those that are missed, however many records there are."""
    rng = random.Random(0)
    program = [[Use("evaluation", i) for i in RANDOM[kind](rng, count)] for _ in range(12)]
    assert reads_of(program, count // 2) <= 1.5 * sum(map(len, program[6:])) / 6


def test_what_repeats_itself_after_all_is_read_ahead_again() -> None:
    rng = random.Random(0)
    uses = [Use("evaluation", i) for i in range(100)]
    o = AccessOrder([])
    for _ in range(10):
        note_all(o, rng.sample(uses, 100))
    assert o._reach() < 4
    note_all(o, uses * 2)
    assert o._reach() > 100


@pytest.mark.parametrize("shuffles", [False, True], ids=["repeated", "any order"])
def test_the_work_for_a_use_does_not_grow_with_what_is_held(shuffles: bool) -> None:
    """Counted in comparisons and looks: lines of `order.py` that run. In any order where all that is used is held."""
    lines = {}
    for count in (100, 10_000):
        uses = [Use("evaluation", i) for i in range(count)]
        if shuffles:
            random.Random(0).shuffle(uses)
        o = AccessOrder([])
        for number in range(count if shuffles else count // 2):
            o.hold(number)
        for _ in range(2):
            note_all(o, uses)
            if shuffles:
                random.Random(1).shuffle(uses)
        o.missing()
        o.worth()
        seen = 0

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal seen
            if not frame.f_code.co_filename.endswith("access_order.py"):
                return None
            seen += 1
            return trace

        former = sys.gettrace()
        sys.settrace(trace)
        try:
            for use in uses[:50]:
                o.note(use)
                if (number := o.missing()) is not None:
                    o.worth()
                    victim = next(iter(o.last_needed()))
                    o.drop(victim)
                    o.hold(number)
        finally:
            sys.settrace(former)
        lines[count] = seen
    assert lines[10_000] <= 1.2 * lines[100]


def test_ctrl_c_anywhere_leaves_an_order_that_goes_on() -> None:
    """Uses that are new to it, and those that it knows."""
    for n in itertools.count():
        o = AccessOrder([], start=0)
        struck = interrupted_at(n, lambda o=o: note_all(o, [*FORWARD, *BACKWARD] * 2), "storage/access_order.py")  # type: ignore[misc]
        for _ in range(3):
            note_all(o, [*FORWARD, *BACKWARD])
        assert [*islice(o.upcoming(), 8)] == [0, 1, 2, 3, 3, 2, 1, 0], n
        assert o.distance(0) == 0, n
        if not struck:
            break
    assert n > 30


@pytest.mark.long
def test_ctrl_c_anywhere_leaves_what_is_held_as_it_is() -> None:
    """What a change of one record has half done is done anew, whatever comes next."""

    def go_on(o: AccessOrder) -> None:
        for at, use in enumerate([*FORWARD, *BACKWARD] * 2):
            o.note(use)
            o.hold((use.number + 1) % 4)
            o.missing()
            [*o.last_needed()]
            o.drop((at + 2) % 4)

    for n in itertools.count(step=1 if ALL else 5):
        o = AccessOrder([*FORWARD, *BACKWARD] * 3, start=0)
        for number in range(4):
            o.hold(number)
        [*o.last_needed()]
        struck = interrupted_at(n, lambda o=o: go_on(o), "storage/access_order.py")  # type: ignore[misc]
        for number in (0, 2):
            o.drop(number)
        held = {number for number in range(4) if number in o._due}
        assert held <= {1, 3} and sorted(o.last_needed()) == sorted(held), n
        for number in range(4):
            o.hold(number)
        assert sorted(o.last_needed()) == [0, 1, 2, 3], n
        go_on(o)
        if not struck:
            break
    assert n > 100
