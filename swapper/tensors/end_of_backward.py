"""The end of a backward pass, after the callbacks that others have queued for it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction

__all__ = ["call_at_the_end", "is_nested"]

_ROUNDS = 3
"""A callback that is queued anew so often comes after those of `DistributedDataParallel`, which for a static graph
queues the last of its own in a callback."""


def is_nested() -> bool:
    """Return True if the backward that is going on was started, on this thread, by that of a `torch.autograd.Function`.

    So does reentrant activation checkpointing. It is over before the one around it.
    """
    frame = sys._getframe()
    while (following := frame.f_back) is not None:
        if following.f_code is BackwardCFunction.apply.__code__:
            return True
        frame = following
    return False


def call_at_the_end(function: Callable[[], None], rounds: int = _ROUNDS) -> None:
    """Call `function` when the backward that is going on is over, after what others do then.

    What it raises, `backward()` raises. After a backward that failed it is not called.
    """
    if rounds == 0:
        function()
    else:
        Variable._execution_engine.queue_callback(functools.partial(call_at_the_end, function, rounds - 1))
