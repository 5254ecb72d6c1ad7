"""The server that processes of tests are forked from. It has imported what they would, and has no threads.

It is the one of `multiprocessing`, of which a process has one, whoever starts it.
"""

from __future__ import annotations

import multiprocessing.forkserver
import os
import sys

import pytest

__all__ = ["ensure_server"]


def ensure_server() -> None:
    """Start it, unless it runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        patch.setenv("PYTHONWARNINGS", "ignore")
        multiprocessing.forkserver.set_forkserver_preload(["preloaded"])
        multiprocessing.forkserver.ensure_running()
