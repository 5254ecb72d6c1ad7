"""Collectives of tensors whose values are in memory only for a moment.

[Note: collectives] A collective may return before it is over: a thread of the process group, or a stream, reads and
writes the tensors later. It keeps the tensor objects, and plain tensors need no more. But the memory of an evicted
parameter goes back to the pool when the function returns: the thread would find no values, or those of others. So the
collective is over before that. Two ranks that send to each other before they receive would then wait for each other
without end: what is sent is a copy instead. And nothing is received after the function has returned.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_iter, tree_map_only

from swapper.errors import SwapError

__all__ = ["is_collective", "run_collective"]

_PACKAGE = "torch.distributed."
_NAMESPACES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})
"""Of the operators that are collectives: the last part of the name of their module."""


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
