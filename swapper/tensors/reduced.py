"""FSDP2's `foreach_reduce`, which makes and adds up the gradients of shards, as far as it can be seen from outside.

When the gradients of a group are reduced, that function looks for each parameter whether `sharded_param.grad` is None.
If it is, it sets it to a new DTensor, whose memory all gradients of the group have together; else it adds to it in
place. Then it calls the hooks of `register_post_accumulate_grad_hook` itself: autograd knows nothing of that gradient.
"""

from __future__ import annotations

import functools
import inspect
import sys
from types import CodeType, FrameType
from typing import Any

from swapper.errors import ConfigError

__all__ = [
    "adds_in_place",
    "check_reduction",
    "is_of_fsdp",
    "is_reduction",
    "reduces_what_is_unused",
]

_MODULE = "torch.distributed.fsdp._fully_shard._fsdp_collectives"
_FILE = "_fsdp_collectives.py"
_NAME = "foreach_reduce"
_ADDS = "to_accumulate_grad"
"""The variable of it that says whether the gradient was there."""

_USED = {"sharded_param", "grad", "_local_tensor", "_post_accumulate_grad_hooks"}


def is_of_fsdp(caller: FrameType | None) -> bool:
    """True if FSDP2 calls a hook, as it does when a gradient is final; autograd itself is no Python code."""
    return caller is not None and caller.f_globals.get("__name__", "").startswith("torch.distributed.fsdp.")


def reduces_what_is_unused(frame: FrameType | None) -> bool:
    """True if `frame` is within a reduction of a group whose unused parameters FSDP2 reduces, as zeros, too.

    It does so whenever the backward of one use of their module is over, also if that of another is still to come.
    """
    while frame is not None:
        if frame.f_code.co_name == "post_backward" and is_of_fsdp(frame):
            return bool(getattr(frame.f_locals.get("self"), "reduce_scatter_unused_params", False))
        frame = frame.f_back
    return False


def is_reduction(code: CodeType) -> bool:
    """True if `code` is that of `foreach_reduce`."""
    return code.co_name == _NAME and code.co_filename.endswith(_FILE)


def adds_in_place(caller: FrameType) -> bool:
    """True if the gradient that `foreach_reduce`, which calls a hook, has just made was added to one in memory."""
    return bool(caller.f_locals.get(_ADDS))


@functools.cache
def check_reduction() -> None:
    """Compare `foreach_reduce` with what is said above.

    Raises:
        ConfigError: this version of torch has another.
    """
    import torch.distributed.fsdp

    function: Any = getattr(sys.modules.get(_MODULE), _NAME, None)
    code: CodeType | None = getattr(function and inspect.unwrap(function), "__code__", None)
    if code is not None and _ADDS in code.co_varnames and {*code.co_names, *code.co_consts} >= _USED:
        return
    raise ConfigError(
        f"offload_gradient: torch {torch.__version__} reduces the gradients of FSDP2 otherwise than swapper knows; use "
        "another version of torch, or offload_gradient.device: none"
    )
