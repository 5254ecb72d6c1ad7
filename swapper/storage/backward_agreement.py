"""`raised_by_all`: what fails on one rank in a hook of a backward pass is raised by that `backward()` on all ranks.

A rank that raises in the middle of a backward leaves the others in the next collective of FSDP2, until it times out. So
it goes on: its gradients stay in memory, or are lost and say so. When the backward is over the ranks tell each other.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from swapper.errors import ConfigError, SwapError
from swapper.storage.agreement import agreed, rank_count
from swapper.tensors.end_of_backward import call_at_the_end, is_nested
from swapper.tensors.sharded import is_sharded, local_of

__all__ = ["have_all_ranks", "raised_by_all"]


class _Passes(threading.local):
    """The backward passes of a thread, in which hooks of tensors on the CPU run."""

    def __init__(self) -> None:
        self.failures: dict[int, SwapError | None] = {}
        """By autograd's number of a pass in which gradients were reduced: what went wrong first."""


_passes = _Passes()


def have_all_ranks(parameters: Iterable[Any]) -> bool:
    """True if every process of the program has a part of one of `parameters`, on the CPU.

    On an accelerator to agree would be to wait for it.
    """
    count = rank_count()
    return count > 1 and any(
        is_sharded(p) and p.device_mesh.size() == count and local_of(p).device.type == "cpu" for p in parameters
    )


@contextmanager
def raised_by_all(parameter: torch.Tensor) -> Iterator[None]:
    """What is raised within, in a hook of FSDP2 for `parameter`, `backward()` raises at its end, on all ranks.

    Mistakes of the user are raised at once: all ranks make them. So is all of a model that not all processes share.

    Raises:
        ConfigError: raised within.
        SwapError: raised within, or an error of another rank: from `backward()`.
    """
    task = torch._C._current_graph_task_id()
    if task < 0 or not have_all_ranks([parameter]):
        yield
        return
    failures = _passes.failures
    if task not in failures:
        if not is_nested():
            failures.clear()  # Of passes that were cut off.
        failures[task] = None
        call_at_the_end(functools.partial(_agree, task))
    try:
        yield
    except ConfigError:
        raise
    except SwapError as error:
        failures[task] = failures[task] or error


def _agree(task: int) -> None:
    failure = _passes.failures.pop(task, None)
    with agreed():
        if failure is not None:
            raise failure
