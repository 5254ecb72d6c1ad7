"""Parts of a parameter: rows of its first dimension, that come from files by themselves."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swapper.parameter.conversions import Conversion, plan_sources
from swapper.sizes import PAGE_BYTES, round_up
from swapper.storage.spans import Extent, Span, plan_spans

__all__ = ["has_parts", "plan_part"]


def has_parts(pieces: Sequence[Extent] | Conversion | None) -> bool:
    """Return True if what is in files as `pieces`, or made of files so, can come by rows of its first dimension."""
    return pieces.rows is not None if isinstance(pieces, Conversion) else pieces is not None


def plan_part(
    p: torch.Tensor, pieces: Sequence[Extent] | Conversion, first: int, last: int, residue_bytes: int
) -> tuple[int, int, int, tuple[Span, ...]]:
    """Plan where some rows of `p` come from: their offset, the bytes of a file and of a buffer for them, the spans."""
    row_bytes = p.nbytes // p.shape[0]
    if not isinstance(pieces, Conversion):
        plan = plan_spans([_slice(pieces, first * row_bytes, last * row_bytes)], [residue_bytes])
        size_bytes = round_up(plan.length_bytes, PAGE_BYTES)
        return plan.offsets_bytes[0], size_bytes, size_bytes, plan.spans
    assert pieces.rows is not None
    like = torch.empty((last - first, *p.shape[1:]), dtype=p.dtype, device="meta")
    file_bytes = round_up(residue_bytes + like.nbytes, PAGE_BYTES)
    spans, length_bytes = plan_sources([(like, pieces.rows(first, last), residue_bytes)], file_bytes)
    return residue_bytes, file_bytes, length_bytes, spans


def _slice(extents: Sequence[Extent], start: int, stop: int) -> list[Extent]:
    """The extents of the bytes from `start` to `stop` of what `extents` are one after another."""
    found, at = [], 0
    for extent in extents:
        length = extent.stop_bytes - extent.start_bytes
        first, last = max(start - at, 0), min(stop - at, length)
        if first < last:
            found.append(Extent(extent.path, extent.start_bytes + first, extent.start_bytes + last))
        at += length
    return found
