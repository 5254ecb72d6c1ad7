"""`raised_by_all`: what fails on one rank in a hook of a backward pass is raised by that `backward()` on all ranks.

A rank that raises in the middle of a backward leaves the others in the next collective of FSDP2, until it times out. So
it goes on: its gradients stay in memory, or are lost and say so. When the backward is over the ranks tell each other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from swapper.errors import ConfigError
from swapper.storage.agreement import agreed, rank_count
from swapper.tensors.end_of_backward import call_at_the_end, is_nested
from swapper.tensors.sharded import is_sharded

__all__ = ["have_all_ranks", "raised_by_all"]


@dataclass
class _Pass:
    """A backward pass in which gradients were reduced."""

    failure: Exception | None = None  # what went wrong first
    told: list[Callable[[BaseException], object]] = field(default_factory=list)  # of what others raise


_passes: dict[int, _Pass] = {}
"""The backward passes of the process, by autograd's number of them.

Of one pass hooks run in several threads: on an accelerator in autograd's own, and those of FSDP2's last reductions in
the one that called `backward()`, as does `_agree`.
"""


def have_all_ranks(parameters: Iterable[Any]) -> bool:
    """True if every process of the program has a part of one of `parameters`."""
    count = rank_count()
    return count > 1 and any(is_sharded(p) and p.device_mesh.size() == count for p in parameters)


@contextmanager
def raised_by_all(parameter: torch.Tensor, told: Callable[[BaseException], object] | None = None) -> Iterator[None]:
    """Let `backward()` raise at its end, on all ranks, what is raised within, in a hook of FSDP2 for `parameter`.

    Mistakes of the user are raised at once: all ranks make them. So is all of a model that not all processes share.

    Args:
        told: called with what is raised, before it is, on all ranks: on one where nothing went wrong, too.

    Raises:
        ConfigError: raised within.
        Exception: raised within, or an error of another rank: from `backward()`.
    """
    task = torch._C._current_graph_task_id()
    if task < 0 or not have_all_ranks([parameter]):
        yield
        return
    this = _passes.get(task)
    if this is None:
        if not is_nested():
            _passes.clear()  # Of passes that were cut off: ranks agree on one after another.
        this = _passes[task] = _Pass()
        call_at_the_end(functools.partial(_agree, task, this))
    if told is not None and told not in this.told:
        this.told.append(told)
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        this.failure = this.failure or error


def _agree(task: int, this: _Pass) -> None:
    _passes.pop(task, None)
    failure, this.failure = this.failure, None
    try:
        with agreed():
            if failure is not None:
                raise failure
    except Exception as error:
        with ExitStack() as all_of_them:
            for tell in this.told:
                all_of_them.callback(tell, error)
        raise
    finally:
        failure = None  # Its traceback has this frame, and frames with views of parameters: together they would stay.
