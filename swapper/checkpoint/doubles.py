"""The choice among copies: of what ranks have written more than once a reader takes one.

Ranks that have cut what several have in different ways write some slices of state twice. And with annexes each host has
of what several hosts have a copy of its own, which it loads without the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from swapper.checkpoint.index import SavedHole, SavedModel, SavedOptimizer, SavedSegment

__all__ = ["choose_copies", "drop_doubles"]


class _Slice(NamedTuple):
    """A slice of a part of a parameter, and where it is: in which bucket, as which of its segments."""

    start: int
    stop: int
    bucket: int
    number: int


def drop_doubles(optimizer: SavedOptimizer, reaches: Callable[[str], bool] = lambda _: True) -> None:
    """Leave one of the slices of state that are there twice; the others become holes.

    Args:
        reaches: True of a file that can be read. Where those make up all of a parameter, no other is left.
    """
    found: dict[int, list[_Slice]] = {}
    for b, bucket in enumerate(optimizer.buckets):
        for i, segment in enumerate(bucket.segments):
            if isinstance(segment, SavedSegment):
                found.setdefault(segment.parameter, []).append(_Slice(segment.start, segment.stop, b, i))
    for parameter, slices in found.items():
        near = [each for each in slices if (file := optimizer.buckets[each.bucket].file) is None or reaches(file)]
        shape = optimizer.parameters[parameter].shape if parameter < len(optimizer.parameters) else None
        is_whole = bool(near) and shape is not None and _chain(near)[1] == math.prod(shape)
        kept = {*(_chain(near if is_whole else slices)[0])}
        for each in slices:
            if each not in kept:
                segments = optimizer.buckets[each.bucket].segments
                segments[each.number] = SavedHole(hole=True, tie_bits=segments[each.number].tie_bits)


def _chain(slices: Sequence[_Slice]) -> tuple[list[_Slice], int]:
    """Slices of which each begins where the one before has ended, and where the last ends."""
    kept: list[_Slice] = []
    at = 0
    for each in sorted(slices, key=lambda each: (each.start, -each.stop)):
        if each.start == at and (not kept or each.stop > at):
            kept.append(each)
            at = each.stop
    return kept, at


def choose_copies(model: SavedModel, reaches: Callable[[str], bool]) -> None:
    """Let tensors whose file cannot be read be in another that can, where there is one."""
    for name, copies in model.copies.items():
        for copy in copies:
            if name in model.tensors and not reaches(model.tensors[name].file) and reaches(copy.file):
                model.tensors[name] = copy
