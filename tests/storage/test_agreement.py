"""Ranks that are not at the same call."""

from __future__ import annotations

import pytest
from sharded_nets import in_processes

from swapper.errors import SwapError
from swapper.storage.agreement import agreed, exchanged


def be_apart(rank: int) -> None:
    def fail() -> None:
        with agreed():
            raise ValueError("of this rank")

    def succeed() -> None:
        with agreed():
            pass

    for first in (fail, succeed):
        for at_verdict in range(2):
            with pytest.raises(SwapError, match=rf"ranks \[{at_verdict}\] are within another call") as caught:
                first() if rank == at_verdict else exchanged(None)
            assert isinstance(caught.value.__cause__, ValueError) == (first is fail and rank == at_verdict)
    succeed()
    assert exchanged(rank) == [0, 1]


def test_ranks_that_make_different_calls_are_told() -> None:
    in_processes(be_apart)
