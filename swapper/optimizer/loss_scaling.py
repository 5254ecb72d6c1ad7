"""`may_be_scaled`: a guess whether a GradScaler has scaled the loss of the backward pass that is running.

A gradient does not say whether it is scaled, and when it arrives, autograd has freed the factor that the loss was
multiplied by. What is left is the graph. `GradScaler.scale` multiplies by a tensor without a gradient, so every path
from a scaled loss to a parameter passes a multiplication by a constant. A path without one proves that the loss is not
scaled, whatever scalers there are for other models. There is one to the last layer of a model, unless the program
itself multiplies the loss by a number. Only then it matters whether there is a scaler in the process at all.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
import torch.autograd.graph
from torch.autograd.function import BackwardCFunction

__all__ = ["may_be_scaled", "with_subclasses"]

_MULTIPLICATIONS = ("MulBackward", "CompiledFunction", "DifferentiableGraph")
"""Parts of names of nodes that may multiply by a scale: `outputs * scale`, and code that was compiled as a whole, in
which such a node does not show."""

_RUNS_BACKWARD = getattr(getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", None)
_RUNS_FUNCTION = BackwardCFunction.apply.__code__


def may_be_scaled(is_ours: Callable[[Any], bool], hidden: bool = False) -> bool:
    """True if the loss of this backward pass may be scaled by a `torch.amp.GradScaler`.

    To be called by a hook of a parameter. False is certain, but for multiplications hidden in a
    `torch.autograd.Function`. True means that there is an enabled scaler in the process, and no proof that it is of
    another loss.

    Args:
        is_ours: tells if a leaf of the graph is a parameter that is stepped in this pass.
        hidden: parameters are in no graph, as those of FSDP2, which gives its modules others. Then any leaf of a pass
            with one root will do: all that comes of that root is scaled, or nothing is.
    """
    return not _is_proven_unscaled(is_ours, hidden) and _is_a_scaler_in_use()


def _is_proven_unscaled(is_ours: Callable[[Any], bool], hidden: bool) -> bool:
    """True if each of the nested passes has a path without multiplication to what runs in it."""
    passes = _passes(sys._getframe())
    if passes is None:
        return False

    def proves(roots: Sequence[Any], inner: Any) -> Callable[[Any], bool]:
        if inner is not None:
            return lambda leaf: False
        return (lambda leaf: len(roots) == 1) if hidden else is_ours

    return all(_has_plain_path(roots, proves(roots, inner), inner) for roots, inner in passes)


def _passes(frame: FrameType | None) -> list[tuple[Sequence[Any], Any]] | None:
    """The roots of each backward pass that is running on this thread, the innermost first, with the node that runs.

    That node is the `torch.autograd.Function` which has started the pass before it in the list, as reentrant activation
    checkpointing does; None for the innermost. For devices autograd has threads of its own: then the rest is on the one
    other thread that waits for a backward pass. None if it cannot be known.
    """
    found: list[tuple[Sequence[Any], Any]] = []
    inner = _walk(frame, None, found)
    if found and inner is None:
        return found
    mine = threading.get_ident()
    others = [_walk_all(other, inner) for ident, other in sys._current_frames().items() if ident != mine]
    waiting = [(passes, rest) for passes, rest in others if passes]
    if len(waiting) != 1 or waiting[0][1] is not None:
        return None
    return [*found, *waiting[0][0]]


def _walk_all(frame: FrameType, inner: Any) -> tuple[list[tuple[Sequence[Any], Any]], Any]:
    found: list[tuple[Sequence[Any], Any]] = []
    return found, _walk(frame, inner, found)


def _walk(frame: FrameType | None, inner: Any, found: list[tuple[Sequence[Any], Any]]) -> Any:
    """Append the passes of one stack to `found`. Returns the node that runs in a pass which is not on this stack."""
    while frame is not None:
        if frame.f_code is _RUNS_FUNCTION:
            inner = frame.f_locals["self"]
        elif frame.f_code is _RUNS_BACKWARD:
            found.append((frame.f_locals["t_outputs"], inner))
            inner = None
        frame = frame.f_back
    return inner


def _has_plain_path(roots: Sequence[Any], is_ours: Callable[[Any], bool], wanted: Any) -> bool:
    """True if a leaf that `is_ours`, or the node `wanted`, can be reached from `roots` without a multiplication."""
    nodes = [root.node if isinstance(root, torch.autograd.graph.GradientEdge) else root.grad_fn for root in roots]
    if any(node is None and is_ours(root) for node, root in zip(nodes, roots, strict=True)):
        return True
    queue = deque(node for node in nodes if node is not None)
    seen = set(queue)
    while queue:
        node = queue.popleft()
        if node is wanted:
            return True
        name = node.name()
        if name.endswith("AccumulateGrad"):
            if is_ours(node.variable):  # type: ignore[union-attr]  # Only nodes of this name have it.
                return True
            continue
        following = [inner for inner, _ in node.next_functions]
        if any(part in name for part in _MULTIPLICATIONS) and (None in following or "MulBackward" not in name):
            continue
        for each in following:
            if each is not None and each not in seen:
                seen.add(each)
                queue.append(each)
    return False


def _is_a_scaler_in_use() -> bool:
    """True if any enabled scaler has scaled something. Looks at every object that refers to a class of scalers."""
    classes = set(with_subclasses(torch.amp.GradScaler))
    scalers = [item for item in gc.get_referrers(*classes) if type(item) in classes]
    return any(scaler.is_enabled() and scaler._scale is not None for scaler in scalers)


def with_subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    """The class, and all that are derived of it."""
    yield cls
    for below in cls.__subclasses__():
        yield from with_subclasses(below)
