"""Parameters from files: those made of tensors that are not their bytes (cast, transposed, joined), and parts of them.

[Note: converted parameters] The tensors of the files are read to the end of the record's buffer, behind all else that
it has. When all of them have arrived the parameters are made of them at their places. So a record that is cast from
bf16 to fp32 takes half as much again of the pool, and the sum says so. What is written of the record when it is changed
ends before.

[Note: unpacked in place] Packed tensors are never longer than what they become. So where all of a record's converted
parameters are made of such, one after another, these are read to the end of the places of the parameters, and unpacked
from the first to the last:

    buffer   [parameter 0         ][parameter 1         ]
                        [packed 0     ][packed 1     ]...

No place is written before what was read there is unpacked: packed i begins no earlier than parameter i - 1 ends, and
ends no earlier than parameter i. That takes a few pages, and not the length of what is read. What has been unpacked is
there no more, so each is done once (`Span.arrange`), and all of it is looked at before anything is written.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from swapper.sizes import ALIGNMENT_BYTES, PAGE_BYTES, round_up
from swapper.storage.spans import Extent, Span, plan_spans

__all__ = ["Conversion", "InPlace", "Source", "has_parts", "plan_part", "plan_sources", "sources_bytes_of"]


class Source(NamedTuple):
    """A tensor in a file.

    Attributes:
        extent: its bytes.
        dtype, shape: of the tensor.
    """

    extent: Extent
    dtype: torch.dtype
    shape: torch.Size


class InPlace(NamedTuple):
    """A source that becomes some elements of a parameter where it lies. See [Note: unpacked in place].

    Attributes:
        source: of bytes.
        numel: elements that it becomes.
        write: makes them: takes where they are to be, 1-D, and the source, which ends no earlier, in the same memory.
            Raises before it writes anything.
    """

    source: Source
    numel: int
    write: Callable[[torch.Tensor, torch.Tensor], None]


class Conversion(NamedTuple):
    """The sources of a parameter, and the function that makes it of them.

    Attributes:
        sources: what it is made of, each once.
        write: takes a contiguous tensor of its shape and dtype, and fills it; and the values of `sources`, in order.
        rows: gives how those of its first dimension between two indices are made, of less; None if that is not known.
        in_place: what becomes its elements one after another in place; empty where it is made in another way.
    """

    sources: tuple[Source, ...]
    write: Callable[[torch.Tensor, Sequence[torch.Tensor]], None]
    rows: Callable[[int, int], Conversion] | None = None
    in_place: tuple[InPlace, ...] = ()


def sources_bytes_of(conversions: Sequence[Conversion]) -> int:
    """Bytes that the sources of some parameters take in a buffer beside these: 0 of what is unpacked in place."""
    if all(conversion.in_place for conversion in conversions):
        return 0
    extents = {source.extent for conversion in conversions for source in conversion.sources}
    return sum(extent.stop_bytes - extent.start_bytes for extent in extents)


class _Target(NamedTuple):
    conversion: Conversion
    at_bytes: int
    dtype: torch.dtype
    shape: torch.Size


def plan_sources(
    converted: Sequence[tuple[torch.Tensor, Conversion, int]], at_bytes: int, *, nothing_behind: bool = True
) -> tuple[tuple[Span, ...], int]:
    """Plan from where the parameters of a record that are converted come. See [Note: converted parameters].

    Args:
        converted: each of them, how it is made, and at which offset of the buffer it is to be, ascending.
        at_bytes: the first offset for their sources, a multiple of 4096.
        nothing_behind: the buffer has nothing else behind the first of them: see [Note: unpacked in place].

    Returns:
        The spans of their sources, the last of which has the conversions; and the length of the buffer.
    """
    if not converted:
        return (), at_bytes
    sources = list(dict.fromkeys(source for _, conversion, _ in converted for source in conversion.sources))
    if nothing_behind and all(conversion.in_place for _, conversion, _ in converted):
        pieces = [
            _Piece(piece, at + start * p.dtype.itemsize, p.dtype)
            for p, conversion, at in converted
            for piece, start in zip(conversion.in_place, _starts(conversion.in_place), strict=True)
        ]
        if len(pieces) == len(sources):  # None of them is made of the same source as another.
            return _plan_in_place(pieces, at_bytes)
    plan = plan_spans([[source.extent] for source in sources])
    found = {source: at_bytes + at for source, at in zip(sources, plan.offsets_bytes, strict=True)}
    targets = [_Target(conversion, at, p.dtype, p.shape) for p, conversion, at in converted]
    spans = [span._replace(at_bytes=at_bytes + span.at_bytes) for span in plan.spans]
    spans[-1] = spans[-1]._replace(convert=functools.partial(_convert, targets, found))
    return tuple(spans), at_bytes + plan.length_bytes


class _Piece(NamedTuple):
    """Elements of a parameter, and where in the buffer they are to be."""

    piece: InPlace
    at_bytes: int
    dtype: torch.dtype

    @property
    def stop_bytes(self) -> int:
        return self.at_bytes + self.piece.numel * self.dtype.itemsize


def _starts(pieces: Sequence[InPlace]) -> list[int]:
    return [0, *itertools.accumulate(piece.numel for piece in pieces)][: len(pieces)]


def _plan_in_place(pieces: Sequence[_Piece], end_bytes: int) -> tuple[tuple[Span, ...], int]:
    """As `plan_sources`, of what is unpacked in place, in order. The buffer has `end_bytes` at least."""
    spans: list[Span] = []
    offsets: list[int] = []
    length_bytes = 0
    for run in _ascending([each.piece.source.extent for each in pieces]):  # Spans are in the order of the files.
        plan = plan_spans([[extent] for extent in run])
        spans += (span._replace(at_bytes=length_bytes + span.at_bytes) for span in plan.spans)
        offsets += (length_bytes + offset for offset in plan.offsets_bytes)
        length_bytes += plan.length_bytes
    at_bytes = before = pieces[0].at_bytes
    for each, offset in zip(pieces, offsets, strict=True):
        source_bytes = each.piece.source.shape.numel()
        # A source may end in up to 63 zeros, so what it has ends that much earlier.
        at_bytes = max(at_bytes, before - offset, each.stop_bytes + ALIGNMENT_BYTES - offset - source_bytes)
        before = each.stop_bytes
    at_bytes = round_up(at_bytes, PAGE_BYTES)
    spans = [span._replace(at_bytes=at_bytes + span.at_bytes) for span in spans]
    steps = [
        functools.partial(_write_in_place, each, at_bytes + offset)
        for each, offset in zip(pieces, offsets, strict=True)
    ]
    spans[-1] = spans[-1]._replace(arrange=tuple(reversed(steps)))  # The last is called first.
    return tuple(spans), max(at_bytes + length_bytes, end_bytes)


def _ascending(extents: Sequence[Extent]) -> list[list[Extent]]:
    """Runs of `extents` that lie one behind the other in files."""
    runs: list[list[Extent]] = []
    for extent in extents:
        if runs and runs[-1][-1] < extent:
            runs[-1].append(extent)
        else:
            runs.append([extent])
    return runs


def _write_in_place(each: _Piece, source_at: int, buffer: torch.Tensor) -> None:
    source = each.piece.source
    into = _view(buffer, each.at_bytes, each.dtype, torch.Size((each.piece.numel,)))
    each.piece.write(into, _view(buffer, source_at, source.dtype, source.shape))


@torch.no_grad()
def _convert(targets: Sequence[_Target], found: Mapping[Source, int], buffer: torch.Tensor) -> None:
    for conversion, at, dtype, shape in targets:
        sources = [_view(buffer, found[source], source.dtype, source.shape) for source in conversion.sources]
        conversion.write(_view(buffer, at, dtype, shape), sources)


def _view(buffer: torch.Tensor, at_bytes: int, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return buffer[at_bytes : at_bytes + shape.numel() * dtype.itemsize].view(dtype).view(shape)


# --- Parts of a parameter: rows of its first dimension, which come by themselves -------------------------------------


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
