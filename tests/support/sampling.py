"""What runs of many equal cases: a sample that is the same each time, a larger one with SWAPPER_TESTS=all.

Another SWAPPER_SEED is another sample. A test that is named by its id runs whatever is sampled. By default a test that
is the product of several options runs so that each value of each option occurs, and of the cases of tests that take
long one in ten runs, all of them if their file is named. Of a case that runs with unpacked and with packed state
(`packed_state`) one of the two runs.

With SWAPPER_TESTS=all all cases run, but for these. Of a test that is the product of many options twice as many
run as by default. Where each of many cases runs in two orders of a simulated device's work, it runs in one of them.
Where a test takes long, half of its cases run, or, if it has several options, so many that each value of each occurs.
All cases run with SWAPPER_TESTS=every.
"""

from __future__ import annotations

import collections
import itertools
import os
import random
from collections.abc import Iterator

import hypothesis
import pytest

EVERY = os.environ.get("SWAPPER_TESTS") == "every"
ALL = EVERY or os.environ.get("SWAPPER_TESTS") == "all"
SEED = int(os.environ.get("SWAPPER_SEED", "0"))

# On a busy machine an example may take any time, and so may its making. The examples are the same in each run, too.
hypothesis.settings.register_profile(
    "swapper",
    deadline=None,
    derandomize=SEED == 0 and not EVERY,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("swapper")


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


def _covering(items: list[pytest.Item], keep: int | None) -> Iterator[pytest.Item]:
    """`keep` of the cases of one test, which have as many values of each of its parameters as so many can have.

    None: so many that each value occurs. A case that needs CUDA, and is skipped elsewhere, stands for no value that
    another case has.
    """
    left = list(items)
    random.Random(f"{SEED} {items[0].nodeid.partition('[')[0]}").shuffle(left)
    own = {item: set(enumerate(item.callspec._idlist)) for item in left}  # type: ignore[attr-defined]
    anywhere = set().union(*(own[item] for item in left if not item.get_closest_marker("cuda")))
    for item in left:
        if item.get_closest_marker("cuda"):
            own[item] -= anywhere
    seen: set[tuple[int, str]] = set()
    for _ in range(min(len(left), len(left) if keep is None else keep)):
        best = max(left, key=lambda item: len(own[item] - seen))
        if keep is None and own[best] <= seen:
            return
        left.remove(best)
        seen |= own[best]
        yield best


def _one_of_each_pair(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Those of cases that differ in the order of the simulated device's work: one of each, drawn."""
    orders = ("sim-lazy", "sim-random")
    pairs: dict[str, list[pytest.Item]] = {}
    for item in items:
        for order in orders:
            if order in item.nodeid:
                pairs.setdefault(item.nodeid.replace(order, ""), []).append(item)
    for name, pair in pairs.items():
        yield random.Random(f"{SEED} {name}").choice(pair)


def _unpacked_or_packed(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Those of cases that differ in how state is on the drive, see `packed_state`: one of each, drawn."""
    pairs: dict[str, list[pytest.Item]] = {}
    for item in items:
        value: str = item.callspec.params["state_on_drive"]  # type: ignore[attr-defined]
        pairs.setdefault(item.nodeid.replace(value, "", 1), []).append(item)
    for name, pair in pairs.items():
        yield random.Random(f"{SEED} {name}").choice(pair)


def _in_another_order(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Of tests on the simulated device with many cases, each case in the order of its work in which it need not run.

    Half of them run in each order.

    A wait that is missing is then found by other cases that come by it; that each wait is missed, and in which order,
    is tested by `test_device_waits`. Tests of few cases run in both.
    """
    tests: dict[str, dict[str, list[pytest.Item]]] = {}
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if params.get("device") in ("sim-lazy", "sim-random"):
            case = item.nodeid.replace(params["device"], "")
            tests.setdefault(item.nodeid.partition("[")[0], {}).setdefault(case, []).append(item)
    for name, cases in tests.items():
        pairs = [pair for pair in cases.values() if len(pair) == 2]
        if len(cases) < _MANY_CASES:
            pairs = []
        random.Random(f"{SEED} {name}").shuffle(pairs)
        yield from (pair[number % 2] for number, pair in enumerate(pairs))


_MANY_CASES = 8


def _each_value(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Cases of tests in which each value of each parameter occurs. Tests of one parameter keep all of their cases."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if len(getattr(getattr(item, "callspec", None), "_idlist", ())) > 1:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
        else:
            yield item
    for cases in tests.values():
        yield from _covering(cases, None)


def _drawn_of_long(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Of cases that take long: one in ten of each directory's, of as many tests as there can be."""
    directories: dict[str, list[pytest.Item]] = {}
    for item in items:
        directories.setdefault(os.path.dirname(item.nodeid), []).append(item)
    for name, cases in directories.items():
        random.Random(f"{SEED} {name}").shuffle(cases)
        of_its_test: dict[pytest.Item, int] = {}
        seen: collections.Counter[str] = collections.Counter()
        for item in cases:
            test = item.nodeid.partition("[")[0]
            of_its_test[item] = seen[test]
            seen[test] += 1
        yield from sorted(cases, key=of_its_test.__getitem__)[: -(-len(cases) // _LONG_ONES)]


_LONG_ONES = 10
"""One of so many runs."""

_MORE = 2
"""So many times as many cases of a test that is sampled run with SWAPPER_TESTS=all."""


def _part_of_long(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Of cases that take long: half of each test's of one parameter, and each value of each parameter of others."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        parameters = len(getattr(getattr(cases[0], "callspec", None), "_idlist", ()))
        if parameters == 0:
            yield from cases
        else:
            yield from _covering(cases, -(-len(cases) // 2) if parameters == 1 else None)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"sampled(keep): of this test's cases so many run, and {_MORE} times as many with SWAPPER_TESTS=all",
    )
    config.addinivalue_line(
        "markers",
        "long: takes a second or more; one in ten runs, half with SWAPPER_TESTS=all, and all in a file that is named",
    )
    config.addinivalue_line("markers", "thorough(reason): runs with SWAPPER_TESTS=all only; what does it otherwise")


def pytest_report_header() -> str:
    if EVERY:
        return "all tests"
    return f"a {'large ' if ALL else ''}sample of the tests, SWAPPER_SEED={SEED}; all with SWAPPER_TESTS=every"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    named = {argument.partition("[")[0] for argument in config.args if "::" in argument}
    if EVERY or named:
        return
    left_out: set[pytest.Item] = set()
    cases: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("thorough") and not ALL:
            left_out.add(item)
        elif mark := item.get_closest_marker("sampled"):
            cases.setdefault((item.nodeid.partition("[")[0], mark.args[0]), []).append(item)
    if ALL:
        product = {item for group in cases.values() for item in group}
        left_out |= set(_in_another_order([item for item in items if item not in product]))
    else:
        unmarked = [item for item in items if not item.get_closest_marker("sampled")]
        simulated = {item for item in unmarked if "sim-lazy" in item.nodeid or "sim-random" in item.nodeid}
        left_out |= simulated - set(_one_of_each_pair(unmarked))
        packed = [item for item in unmarked if item.get_closest_marker("packs_too")]
        left_out |= set(packed) - set(_unpacked_or_packed([item for item in packed if item not in left_out]))
        unmarked = [item for item in unmarked if item not in left_out]
        left_out |= set(unmarked) - set(_each_value(unmarked))
    for (_, keep), group in cases.items():
        left_out |= set(group) - set(_covering(group, _MORE * keep if ALL else keep))
    files = {str(config.invocation_params.dir / argument) for argument in config.args if argument.endswith(".py")}
    long = [item for item in items if item.get_closest_marker("long") and str(item.path) not in files]
    long = [item for item in long if item not in left_out]
    left_out |= set(long) - set(_part_of_long(long) if ALL else _drawn_of_long(long))
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
