"""What runs of many equal cases: a sample that is the same each time by default, all of them with SWAPPER_TESTS=all.

Another SWAPPER_SEED is another sample. A test that is named by its id runs whatever is sampled.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator

import pytest

ALL = os.environ.get("SWAPPER_TESTS") == "all"
SEED = int(os.environ.get("SWAPPER_SEED", "0"))


def places(every: int, sample: int) -> Iterator[int]:
    """Places in a run to cut it off at, one after the other, for a loop that ends when the run has fewer.

    Args:
        every: so many apart with SWAPPER_TESTS=all.
        sample: so many apart on average by default, by chance.
    """
    if ALL:
        yield from itertools.count(0, every)
    chance = random.Random(f"{SEED} {every} {sample}")
    at = chance.randrange(every)
    while True:
        yield at
        at += chance.randint(1, 2 * sample - 1)


def _covering(items: list[pytest.Item], keep: int) -> Iterator[pytest.Item]:
    """`keep` of the cases of one test, which have as many values of each of its parameters as so many can have."""
    left = list(items)
    random.Random(f"{SEED} {items[0].nodeid.partition('[')[0]}").shuffle(left)
    seen: set[tuple[int, str]] = set()

    def values(item: pytest.Item) -> set[tuple[int, str]]:
        return set(enumerate(item.callspec._idlist))  # type: ignore[attr-defined]

    for _ in range(min(keep, len(left))):
        best = max(left, key=lambda item: len(values(item) - seen))
        left.remove(best)
        seen |= values(best)
        yield best


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "sampled(keep): of this test's cases so many run, all with SWAPPER_TESTS=all")
    config.addinivalue_line("markers", "thorough(reason): runs with SWAPPER_TESTS=all only; what does it otherwise")


def pytest_report_header() -> str:
    return "all tests" if ALL else f"a sample of the tests, SWAPPER_SEED={SEED}; all with SWAPPER_TESTS=all"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    named = {argument.partition("[")[0] for argument in config.args if "::" in argument}
    if ALL or named:
        return
    left_out: set[pytest.Item] = set()
    cases: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("thorough"):
            left_out.add(item)
        elif mark := item.get_closest_marker("sampled"):
            cases.setdefault((item.nodeid.partition("[")[0], mark.args[0]), []).append(item)
    for (_, keep), group in cases.items():
        left_out |= set(group) - set(_covering(group, keep))
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
