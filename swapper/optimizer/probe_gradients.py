"""The gradients of probes that bring out what a class does only with some.

A class may look at a whole parameter, or at all of them, and act on what it finds only where a norm exceeds a limit, or
a gradient has no values, one sign, or something that is not finite, or is orthogonal to the parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

__all__ = ["CHANGES", "orthogonal_to", "sizes_of"]

CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "zeros": lambda part: part.zero_(),
    "one sign": lambda part: part.copy_(part.abs()),
    "infinity": lambda part: part[-1:].fill_(math.inf),
    "NaN": lambda part: part[-1:].fill_(math.nan),
}
"""Changes of a part of a gradient, flat and in place."""

_SIZES = (2.0**20, 2.0**-20)
_SIZES_OF_HALF = (2.0**9, 2.0**-9, 2.0**-18)


def sizes_of(dtype: torch.dtype) -> tuple[float, ...]:
    """The sizes of gradients of `dtype` that are tried besides 1."""
    return _SIZES_OF_HALF if dtype is torch.float16 else _SIZES


def orthogonal_to(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return `gradient` with each row, in the last dimension, orthogonal to that of `parameter`.

    Then whole matrices are, and all of it. AdamP and SGDP look for that, as weights before a norm layer have it.
    """
    rows, g = parameter.float(), gradient.float()
    share = (rows * g).sum(-1, keepdim=True) / (rows * rows).sum(-1, keepdim=True)
    return (g - share * rows).to(gradient.dtype)
