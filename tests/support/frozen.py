"""The garbage collector looks for garbage only in what tests make: hundreds run it, some in long loops."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

_count_of_all = gc.get_freeze_count
_count = 0


def _freeze() -> None:
    global _count
    gc.collect()
    gc.freeze()
    _count = _count_of_all()


def pytest_collection_finish() -> None:
    import torch._dynamo  # noqa: F401  # The first optimizer does it.

    _freeze()
    # What a test freezes: swapper looks for tensors in that, for which it thaws all. Of what is here it knows none.
    gc.get_freeze_count = lambda: max(0, _count_of_all() - _count)


@pytest.fixture
def thaws() -> Iterator[None]:
    """For a test that thaws all: what was frozen before is frozen again."""
    yield
    gc.unfreeze()
    _freeze()
