"""Collectives of tensors whose values are in memory only for a moment.

[Note: collectives] A collective may return before it is over: a thread of the process group, or a stream, reads and
writes the tensors later. It keeps the tensor objects, and plain tensors need no more. But the memory of an evicted
parameter goes back to the pool when the function returns: the thread would find no values, or those of others. So the
collective is over before that. Two ranks that send to each other before they receive would then wait for each other
without end: what is sent is a copy instead. And nothing is received after the function has returned.

[Note: lists of lists] The dispatcher asks tensors, and lists of them, whether they have values, and not lists of lists,
which some methods of process groups are given: a tensor there without memory would be read at no address, which ends
the process. So those methods are replaced by functions that look at them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_iter, tree_map_only

from swapper.errors import SwapError

__all__ = ["is_collective", "is_distributed", "run_collective", "watch_lists"]

_PACKAGE = "torch.distributed."
_NAMESPACES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})
"""Of the operators that are collectives: the last part of the name of their module."""
_TAKE_LISTS = ("allgather", "allgather_coalesced", "gather", "reduce_scatter", "scatter")
"""The methods of `ProcessGroup` that are given lists of lists of tensors."""


def is_distributed() -> bool:
    """True if `torch.distributed` is initialized, so that there are collectives."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def is_collective(func: Callable[..., Any]) -> bool:
    """True if `func` is a function, or an operator, of torch for tensors of several ranks."""
    module = getattr(func, "__module__", None) or ""
    return module.startswith(_PACKAGE) or (module.startswith("torch.") and module.rpartition(".")[2] in _NAMESPACES)


def run_collective(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run `func`, of which `is_collective` is true. When it returns nothing uses the memory of `args` any more.

    Returns:
        What `func` returns. To wait for that again changes nothing.

    Raises:
        SwapError: it is `irecv`.
    """
    name = getattr(func, "__name__", "").partition(".")[0]
    if name in ("isend", "send"):
        args, kwargs = tree_map_only(torch.Tensor, torch.clone, (args, dict(kwargs)))
        return func(*args, **kwargs)
    if name == "irecv":
        raise SwapError(
            "irecv into an evicted parameter would write when its memory is another's; use recv, or irecv and its wait "
            "within `with swapper.gathered([parameter])`"
        )
    result = func(*args, **kwargs)
    work = getattr(sys.modules.get("torch.distributed"), "Work", ())
    kinds: Any = (torch.ScriptObject, work)  # What operators return, and what functions do.
    for item in tree_iter(result):
        if isinstance(item, kinds):
            item.wait()
        elif isinstance(item, torch.Tensor):  # Of functional collectives; for others there is nothing to wait for.
            torch.ops._c10d_functional.wait_tensor(item)
    return result


def watch_lists(is_swapped: Callable[[Any], bool], run: Callable[..., Any]) -> None:
    """From now on process groups run what is given lists of lists by `run` if a tensor in them `is_swapped`.

    Called once: see [Note: lists of lists].
    """
    if not torch.distributed.is_available():
        return
    group: Any = torch.distributed.ProcessGroup
    for name in _TAKE_LISTS:
        setattr(group, name, _looking_at_lists(getattr(group, name), is_swapped, run))


def _looking_at_lists(method: Any, is_swapped: Callable[[Any], bool], run: Callable[..., Any]) -> Callable[..., Any]:
    def run_at_once(*args: Any, **kwargs: Any) -> Any:
        return run_collective(method, args, kwargs)

    @functools.wraps(method)
    def look(*args: Any, **kwargs: Any) -> Any:
        if any(map(is_swapped, tree_iter((args, kwargs)))):
            return run(run_at_once, args, kwargs)
        return method(*args, **kwargs)

    return look
