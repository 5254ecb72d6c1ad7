"""`frozen`: what a class may read of a group, of small state, or of a parameter's attributes, as a dictionary's key."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Unfrozen", "frozen"]

_ATOMS = (int, str, bytes, torch.dtype, torch.device)


class Unfrozen(Exception):
    """A value has no key. Its text says which: "'name', of type X"."""


def frozen(value: Any) -> Hashable:
    """A key that two values have in common only if a class that reads them computes the same.

    Floats are compared by their bits: 0.0 is not -0.0, and a NaN equals itself.

    Args:
        value: None, a number, a string, a dtype, a device, a tensor of shape `()` on the CPU, or tuples, lists and
            dictionaries of those.

    Raises:
        Unfrozen: it is, or holds, something else.
    """
    kind = type(value)
    if isinstance(value, float):
        return kind, float.hex(value)
    if value is None or isinstance(value, _ATOMS):
        return kind, value
    if kind is Tensor and value.dim() == 0 and value.is_cpu and not value.requires_grad:
        number = value.item()
        return value.dtype, number.hex() if isinstance(number, float) else number
    if kind in (tuple, list):
        return (kind, *map(frozen, value))
    if kind is dict:
        entries = []
        for key, entry in value.items():  # Each step comes by here for each segment.
            try:
                entries.append(((str, key) if type(key) is str else frozen(key), frozen(entry)))
            except Unfrozen:
                raise Unfrozen(f"{key!r}, a {type(entry).__name__}") from None
        return (kind, *entries)
    raise Unfrozen(f"a {kind.__name__}")
