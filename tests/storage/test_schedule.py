"""The schedule: what stays in the pool, and the sum that refuses what cannot work."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swapper.errors import ConfigError
from swapper.sizes import format_bytes
from swapper.storage.budget import IN_FLIGHT, plan_schedule

MiB = 1 << 20
sizes = st.lists(st.integers(0, 64).map(lambda pages: pages * 4096), max_size=40)


def test_three_of_the_largest_and_the_scratch_must_fit() -> None:
    schedule = plan_schedule([MiB, 4 * MiB, 0, 2 * MiB], 0, MiB).checked(13 * MiB)
    assert schedule.pool_bytes == 13 * MiB
    assert schedule.held_bytes == MiB
    assert schedule.resident == frozenset()
    assert schedule.sizes_bytes == (MiB, 4 * MiB, 0, 2 * MiB)


def test_one_byte_less_is_refused_with_the_sum() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_schedule([MiB, 4 * MiB], 0, MiB).checked(13 * MiB - 1)
    message = str(caught.value)
    assert message.startswith("pool_bytes: ")
    assert "3 x 4 MiB" in message
    assert "1 MiB of scratch" in message
    assert "= 13 MiB" in message
    assert f"at least {13 * MiB}" in message
    assert "bucket_bytes" in message
    assert "resident" not in message
    assert isinstance(caught.value, ValueError)


def test_what_is_resident_is_part_of_the_sum() -> None:
    with pytest.raises(ConfigError, match=r"3 x 4 MiB .* \+ 1 MiB of scratch \+ 3 MiB kept resident = 16 MiB"):
        plan_schedule([2 * MiB, 4 * MiB, MiB], 3 * MiB, MiB).checked(15 * MiB)


def test_what_the_message_asks_for_is_enough() -> None:
    with pytest.raises(ConfigError):
        plan_schedule([4 * MiB], 0, 12345).checked(1)
    assert plan_schedule([4 * MiB], 0, 12345).checked(12 * MiB + 12345).pool_bytes == 12 * MiB + 12345


def test_residents_are_chosen_in_order_of_use_where_they_fit() -> None:
    schedule = plan_schedule([MiB, 4 * MiB, 0, MiB, MiB], 2 * MiB, 0).checked(100 * MiB)
    assert schedule.resident == {0, 3}
    assert schedule.held_bytes == 2 * MiB
    assert schedule.pool_bytes == 3 * 4 * MiB + 2 * MiB


def test_when_all_is_resident_nothing_needs_to_move() -> None:
    schedule = plan_schedule([MiB, MiB], 2 * MiB, 0).checked(2 * MiB)
    assert schedule.resident == {0, 1}
    assert schedule.pool_bytes == 2 * MiB


def test_nothing_to_swap_needs_no_pool() -> None:
    assert plan_schedule([], 0, 0).checked(0).pool_bytes == 0
    assert plan_schedule([0, 0], MiB, 0).checked(0).resident == frozenset()


@given(sizes, st.integers(0, 64 * 4096), st.integers(0, MiB))
def test_the_plan_keeps_its_promises(sizes: list[int], resident_bytes: int, work_bytes: int) -> None:
    schedule = plan_schedule(sizes, resident_bytes, work_bytes)
    kept = [sizes[i] for i in schedule.resident]
    moving = [size for i, size in enumerate(sizes) if size and i not in schedule.resident]
    assert sum(kept) <= resident_bytes
    assert all(kept), "what never moves is not resident"
    assert schedule.held_bytes == work_bytes + sum(kept)
    assert schedule.pool_bytes == schedule.held_bytes + IN_FLIGHT * max(moving, default=0)
    # None was left out that would have fitted when its turn came.
    for i, size in enumerate(sizes):
        if size and i not in schedule.resident:
            assert size + sum(sizes[j] for j in schedule.resident if j < i) > resident_bytes
    # The least that is asked for is accepted, and one byte less is not.
    assert plan_schedule(sizes, resident_bytes, work_bytes).checked(schedule.pool_bytes) == schedule
    if schedule.pool_bytes:
        with pytest.raises(ConfigError, match=str(schedule.pool_bytes)):
            plan_schedule(sizes, resident_bytes, work_bytes).checked(schedule.pool_bytes - 1)


@given(sizes, sizes, st.integers(0, 64 * 4096))
def test_records_that_come_later_do_not_change_what_stays(
    sizes: list[int], more: list[int], resident_bytes: int
) -> None:
    before = plan_schedule(sizes, resident_bytes, 0)
    after = plan_schedule(sizes + more, resident_bytes, 0)
    assert {i for i in after.resident if i < len(sizes)} == before.resident


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (256 * MiB, "256 MiB"),
        (3 << 30, "3 GiB"),
        (5 << 40, "5 TiB"),
        (5 << 50, "5120 TiB"),
    ],
)
def test_sizes_for_people(count: int, text: str) -> None:
    assert format_bytes(count) == text
