"""The garbage collector looks for garbage only in what tests make: hundreds run it, some in long loops.

What stays for good, the modules above all, is frozen: what is imported before the first test, and later, after a test
that has imported more and after the last of a file. Otherwise one look at a heap with transformers and the compiler of
torch in it takes ten times as long as one at what a test has made.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest

_NEW_MODULES = 20
_freeze_all = gc.freeze
_modules = 0
_frozen_by_a_test = False


def _freeze() -> None:
    global _frozen_by_a_test, _modules
    gc.collect()
    _freeze_all()
    _frozen_by_a_test = False
    _modules = len(sys.modules)


def _freeze_for_a_test() -> None:
    global _frozen_by_a_test
    _frozen_by_a_test = True
    _freeze_all()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Without a look for garbage: test files and what they import stay, and it would take a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    import torch._dynamo  # noqa: F401  # The first optimizer does it.

    # What a test freezes: swapper looks for tensors in that, for which it thaws all. Of what is frozen here it knows
    # none. To count takes as long as to look at all that is frozen.
    count = gc.get_freeze_count
    gc.get_freeze_count = lambda: count() if _frozen_by_a_test else 0
    gc.freeze = _freeze_for_a_test
    _freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    yield
    if nextitem is None or nextitem.path != item.path or len(sys.modules) > _modules + _NEW_MODULES:
        _freeze()


@pytest.fixture
def thaws() -> Iterator[None]:
    """For a test that thaws all: what was frozen before is frozen again."""
    yield
    gc.unfreeze()
    _freeze()
