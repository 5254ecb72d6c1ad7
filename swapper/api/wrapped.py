"""Optimizers that were wrapped: their swapper, and how they become plain again."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch.optim import Optimizer

from swapper.errors import SwapError
from swapper.optimizer.swapper import OptimizerSwapper
from swapper.tensors.grad_modes import outside_of_inference

__all__ = ["of", "unwrap_optimizer"]

_OptimizerT = TypeVar("_OptimizerT", bound=Optimizer)


def unwrap_optimizer(optimizer: _OptimizerT, *, drop_masters: bool = False) -> _OptimizerT:
    """Bring all state back into memory and make `optimizer` the plain optimizer it was.

    Args:
        optimizer: from `wrap_optimizer`.
        drop_masters: needed where there are master weights, which a plain optimizer has no place for: their precision
            beyond that of the parameters is lost, and the state is cast to the parameters' dtype.

    Raises:
        SwapError: it is not wrapped; or there are masters and `drop_masters` is False.
    """
    swapper = of(optimizer)
    if swapper.has_masters and not drop_masters:
        raise SwapError(
            "unwrapping would lose the fp32 master weights; save optimizer.state_dict(), or pass drop_masters=True"
        )
    with outside_of_inference():  # What comes back is trained outside of that mode.
        swapper.unwrap()
    return optimizer


def of(optimizer: Optimizer) -> OptimizerSwapper:
    """The `OptimizerSwapper` of a wrapped optimizer: `optimizer.swapper`, typed.

    Raises:
        SwapError: it is not wrapped, or no optimizer.
    """
    swapper = getattr(optimizer, "swapper", None)
    if isinstance(optimizer, torch.nn.Module):
        raise SwapError("a model is not wrapped; pass its optimizer, or use model.swapper, which moves the parameters")
    if not isinstance(swapper, OptimizerSwapper):
        raise SwapError("this optimizer is not wrapped; call swapper.wrap_optimizer(optimizer, config)")
    return swapper
