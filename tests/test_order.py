"""The order of use: what is expected next, and how far off each record's next use is."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swapper import order
from swapper.order import Order, Use

FORWARD = [Use("forward", i) for i in range(4)]
BACKWARD = [Use("backward", i) for i in reversed(range(4))]
STEP = [Use("step", i) for i in range(4)]


def note_all(o: Order, uses: Iterable[Use]) -> None:
    for use in uses:
        o.note(use)


def upcoming(o: Order, count: int) -> list[int]:
    return list(islice(o.upcoming(), count))


def test_the_guess_is_expected_first() -> None:
    o = Order([*FORWARD, *BACKWARD])
    assert list(o.upcoming()) == [0, 1, 2, 3, 3, 2, 1, 0]
    assert [o.distance(i) for i in range(4)] == [0, 1, 2, 3]


def test_a_use_moves_on_to_what_comes_after_it() -> None:
    o = Order([*FORWARD, *BACKWARD])
    note_all(o, FORWARD[:2])
    assert upcoming(o, 4) == [2, 3, 3, 2]
    assert [o.distance(i) for i in range(4)] == [5, 4, 0, 1]


def test_uses_that_were_passed_over_are_not_expected_until_the_round_starts_again() -> None:
    o = Order([*FORWARD, *BACKWARD])
    o.note(Use("forward", 3))
    assert upcoming(o, 5) == [3, 2, 1, 0, 0]
    assert o.distance(1) == 2


def test_phases_tell_uses_of_one_record_apart() -> None:
    o = Order([*FORWARD, *BACKWARD, *STEP])
    note_all(o, [*FORWARD, *BACKWARD[:2]])
    assert upcoming(o, 3) == [1, 0, 0]
    o.note(Use("step", 0))
    assert upcoming(o, 4) == [1, 2, 3, 0]


def test_the_last_use_of_a_round_is_followed_by_the_first() -> None:
    o = Order(FORWARD)
    note_all(o, FORWARD)
    assert list(o.upcoming()) == [0, 1, 2, 3]
    assert o.distance(3) == 3


def test_a_second_use_in_a_round_is_the_next_one_in_it() -> None:
    uses = [Use("forward", 0), Use("forward", 1), Use("forward", 0), Use("forward", 2)]
    o = Order(uses)
    o.note(uses[0])
    assert upcoming(o, 2) == [1, 0]
    note_all(o, uses[1:3])
    assert upcoming(o, 2) == [2, 0]
    note_all(o, [Use("forward", 1), Use("forward", 0)])  # Once more than expected: as if the round had begun again.
    assert upcoming(o, 2) == [2, 0]
    note_all(o, [Use("forward", 2), Use("forward", 0)])
    assert upcoming(o, 2) == [1, 0]


def test_the_same_use_again_at_once_is_one_use() -> None:
    o = Order([Use("forward", 0), Use("forward", 1), Use("forward", 0)])
    note_all(o, [Use("forward", 0)] * 5)
    assert upcoming(o, 2) == [1, 0]
    o.end_round()
    assert list(o.upcoming()) == [0]


def test_what_was_not_expected_is_learnt_for_the_next_round() -> None:
    o = Order(FORWARD)
    note_all(o, [Use("forward", 9), Use("forward", 1)])
    assert upcoming(o, 2) == [2, 3]
    assert o.distance(9) == 2 * len(FORWARD) + 1
    o.end_round()
    assert list(o.upcoming()) == [9, 1]
    assert o.distance(9) == 0
    assert o.distance(0) == 5


def test_an_unexpected_use_leaves_what_is_expected_as_it_was() -> None:
    o = Order(FORWARD)
    o.note(FORWARD[0])
    before = list(o.upcoming())
    o.note(Use("forward", 17))
    assert list(o.upcoming()) == before


def test_a_round_without_uses_changes_nothing() -> None:
    o = Order(FORWARD)
    o.end_round()
    assert list(o.upcoming()) == [0, 1, 2, 3]
    note_all(o, reversed(FORWARD))
    o.end_round()
    o.end_round()
    assert list(o.upcoming()) == [3, 2, 1, 0]


def test_nothing_is_expected_of_an_empty_guess() -> None:
    o = Order([])
    assert list(o.upcoming()) == []
    assert o.distance(0) == 1
    o.note(Use("forward", 5))
    assert list(o.upcoming()) == []
    o.end_round()
    assert list(o.upcoming()) == [5]


def test_a_program_that_never_ends_a_round_is_cut_into_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "_LONGEST_ROUND", 8)
    o = Order([])
    for _ in range(1000):
        note_all(o, FORWARD)
    assert len(list(o.upcoming())) == 9
    assert len(o._current) <= 9
    assert set(o.upcoming()) == {0, 1, 2, 3}


USES = st.lists(st.builds(Use, st.sampled_from(["forward", "backward", "step"]), st.integers(0, 5)), max_size=30)


@given(guess=USES, noted=USES)
def test_distances_are_those_of_what_is_upcoming(guess: list[Use], noted: list[Use]) -> None:
    o = Order(guess)
    note_all(o, noted)
    coming = list(o.upcoming())
    assert sorted(coming) == sorted(use.number for use in guess)
    for number in range(7):
        if number in coming:
            assert o.distance(number) == coming.index(number)
        else:
            assert o.distance(number) > len(coming)


@given(uses=st.lists(st.sampled_from([*FORWARD, *BACKWARD, *STEP]), unique=True, min_size=1))
def test_a_program_that_repeats_itself_is_foretold(uses: list[Use]) -> None:
    o = Order([])
    note_all(o, uses)
    o.end_round()
    for use in (*uses, *uses):
        assert upcoming(o, 1) == [use.number]
        assert o.distance(use.number) == 0
        o.note(use)
