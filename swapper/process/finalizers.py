"""`finalizer`: `weakref.finalize` that also runs at the end of processes of multiprocessing.

Those do not call `atexit` and `weakref.finalize`; nor do the workers of `torch.multiprocessing` and of Lightning's
launchers "spawn", "fork" and "notebook".
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import weakref
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Any

__all__ = ["finalizer"]

log = logging.getLogger(__name__)

_pending: list[weakref.finalize[..., Any]] = []
_pid = 0  # of the process whose end is known to run those
_most = 8  # of those: one more, and they are looked through for those that are over


def finalizer(owner: Any, function: Callable[..., object], *args: Any) -> weakref.finalize[..., Any]:
    """Call `function` when `owner` is no more, or when the process ends; of several then the last first."""
    global _pid, _most
    made = weakref.finalize(owner, function, *args)
    if multiprocessing.parent_process() is not None:
        if _pid != os.getpid():
            _pid = os.getpid()
            _pending.clear()  # The parent's.
            Finalize(None, _end, exitpriority=0)
        _pending.append(made)
        if len(_pending) > _most:  # Not at each: there may be thousands.
            _pending[:] = [each for each in _pending if each.alive]
            _most = 2 * len(_pending) + 8
    return made


def _end() -> None:
    while _pending:
        try:
            _pending.pop()()
        except Exception:
            log.exception("at the end of a process")
