"""Tests that lock memory, beside others of the same user, whom the system may allow little of it."""

from __future__ import annotations

import os
import resource

import pytest

__all__ = ["needs_locked_memory"]

_soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)

needs_locked_memory = pytest.mark.skipif(
    os.geteuid() != 0 and 0 <= _soft < 64 << 20,  # io_uring charges the user: all test processes at once.
    reason=f"RLIMIT_MEMLOCK is {_soft} bytes: raise `ulimit -l` to 65536",
)
