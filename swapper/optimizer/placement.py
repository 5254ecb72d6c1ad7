"""`Placement`: which state of a segment is float32 and in its record, found once, so that a step makes no views."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from swapper.optimizer.segments import Segment
from swapper.tensors.strides import is_dense

__all__ = ["IMMUTABLE", "Placement", "placement_of"]

IMMUTABLE = (int, float, bool, str, type(None))
"""Types of state that a copy of a reference is a copy of."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The state of a segment of which all that is large is in its record; true while `fits` says so.

    Attributes:
        keys, present, stride: of the segment and its parameter, when this was found.
        large: keys of what is in the record, in order: float32, as long as the segment, and dense in the same order.
        rest: the other keys.
    """

    keys: tuple[str, ...]
    present: frozenset[str]
    stride: tuple[int, ...]
    large: tuple[str, ...]
    rest: tuple[str, ...]

    def fits(self, segment: Segment, stride: tuple[int, ...]) -> bool:
        """True if `segment` has the state that this was found for, and its parameter these strides."""
        return self.present == segment.present and self.keys == tuple(segment.keys) and self.stride == stride

    def addresses(self, segment: Segment, record: int) -> list[int]:
        """The address of each of `large`, in a record at the address `record`."""
        locations = segment.locations
        return [record + locations[key].offset_bytes for key in self.large]

    def small_of(self, segment: Segment) -> Mapping[str, Any] | None:
        """The state of `segment` that is not `large`; None if it is not only numbers, strings and their like."""
        small = {key: segment.small[key] for key in self.rest}
        for value in small.values():
            if isinstance(value, torch.Tensor):
                if value.dim() or not value.is_cpu:
                    return None
            elif not isinstance(value, IMMUTABLE):
                return None
        return small


def placement_of(segment: Segment) -> Placement | None:
    """The placement of `segment` as it is now; None if its record has state of another kind. Keeps it in `segment`."""
    p = segment.local
    stride = p.stride() if segment.whole else ()
    found = segment.placement
    if found is not None and found.fits(segment, stride):
        return found
    large = tuple(key for key in segment.keys if key in segment.present)
    specs = [segment.locations[key].spec for key in large]
    for spec in specs:
        if spec.dtype is not torch.float32 or spec.numel != segment.numel:
            return None
        if segment.whole and not (spec.stride == stride and is_dense(p)) and not _are_contiguous(p, spec.stride):
            return None
    segment.placement = Placement(
        tuple(segment.keys),
        frozenset(segment.present),
        stride,
        large,
        tuple(key for key in segment.keys if key not in segment.present),
    )
    return segment.placement


def _are_contiguous(p: torch.Tensor, stride: tuple[int, ...]) -> bool:
    """True if `p` is contiguous, and a tensor of its shape with `stride` as well."""
    return p.is_contiguous() and torch.empty_strided(p.shape, stride, device="meta").is_contiguous()
