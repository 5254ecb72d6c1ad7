"""Tests that must have the machine to themselves, beside others in another worker of pytest-xdist.

A test marked `alone` measures time or takes what all share. It holds a lock that all others share while they run.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator

import pytest
from repository import ROOT, SUPPORT


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "alone: no other test of this tree may run meanwhile")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Outside of everything else, so that the time of no test runs while it waits."""
    gate, lock = os.open(ROOT / "tests", os.O_RDONLY), os.open(SUPPORT, os.O_RDONLY)
    try:
        # Whoever waits for the others to end holds the gate, so that no more of them begin.
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(lock, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        return (yield)
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # A forked child may still have it open.
        os.close(gate)
        os.close(lock)
