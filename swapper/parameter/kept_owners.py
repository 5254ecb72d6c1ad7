"""Owners whose models are gone live on while somebody has one of their parameters, whose values must not go.

The modules of a model have the owner, and the owner has the parameters. So reference counting frees all of it with the
last module. Parameters that somebody has kept would then lose their values, which those of plain PyTorch do not: so an
owner that is about to die is kept here if its parameters are referred to by anybody else. It is looked at again
whenever the garbage collector has gone through all objects, and when a model is offloaded, and goes when nobody has any
of them. After a backward that has failed torch has some, and what autograd has saved, which needs the owner: it is made
to let go of them when a model dies, and when one is offloaded. A forked child keeps it, too, and may neither use it nor
delete its files.

Parameters do not refer to the owner themselves: what lives in the pool, and what is to be deleted at the end of the
process, refers to records, and so to parameters, and nothing of it would ever be freed.

A model that is part of a cycle is found by the garbage collector together with its owner, whose files are deleted
before its `__del__` is called. A parameter that was kept raises then when it is used.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from swapper.tensors.dispatch_modes import outside_of_dispatch_modes
from swapper.tensors.grad_modes import outside_of_inference, set_grad_mode

if TYPE_CHECKING:
    from swapper.parameter.owner import ParameterOwner

__all__ = ["drop_unused_owners", "forget_failed_backward", "keep_while_used"]

_kept: list[ParameterOwner] = []


def keep_while_used(owner: ParameterOwner) -> None:
    """Called by the `__del__` of `owner`: keep it if others have one of its parameters."""
    if not _is_used(owner):
        return
    _kept.append(owner)
    if _look_again not in gc.callbacks:
        gc.callbacks.append(_look_again)


def drop_unused_owners() -> None:
    """Let those go whose parameters nobody has any more."""
    for owner in list(_kept):
        if not _is_used(owner):
            with contextlib.suppress(ValueError):  # Another thread was faster.
                _kept.remove(owner)


def forget_failed_backward(*_: object, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
    """Have torch let go of the graph of a backward that has failed in this thread, and with it of the owner.

    What was about to run stays in the queue of the thread, with what autograd has saved, until its next backward. Does
    nothing where a backward goes on, or a transform of `torch.func`; nor while the interpreter ends: torch, and all
    that this module has a name for, may be gone before a model is that another module has.
    """
    if is_ending():
        return
    if torch._C._current_graph_task_id() != -1 or torch._C._functorch.peek_interpreter_stack() is not None:
        return
    # Called when a model dies, so at any time: no mode of others is to see it.
    with outside_of_dispatch_modes(), torch._C.DisableTorchFunction(), outside_of_inference():
        set_grad_mode(True)
        with contextlib.suppress(RuntimeError):  # A forked child of a process whose autograd has threads may have none.
            torch.zeros((), device="cpu", requires_grad=True).backward()  # type: ignore[no-untyped-call]


def _look_again(phase: str, info: dict[str, Any]) -> None:
    if phase == "stop" and _kept and info["generation"] == 2:  # The others run too often to look at all parameters.
        drop_unused_owners()


def _is_used(owner: ParameterOwner) -> bool:
    locations = list(owner.locations)  # A parameter that was converted has several, of which the last counts.
    times = Counter(id(tensor) for location in locations for tensor in location.tensors)
    home, *others = owner.tables
    for location in locations:
        if location.parameter not in home:  # It stays in memory, or another owner has its values.
            continue
        # The references are those of the locations, of the tables, and the argument.
        ours = times[id(location.parameter)] + 1 + sum(location.parameter in table for table in others) + 1
        if sys.getrefcount(location.parameter) > ours:
            return True
        if any(sys.getrefcount(alias) > times[id(alias)] + 2 for alias in location.aliases):  # That of the loop, too.
            return True
    return False
