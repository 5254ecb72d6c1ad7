"""Parameters that are made of tensors of files which are not their bytes: cast, transposed, or joined of many parts.

[Note: converted parameters] The tensors of the files are read to the end of the record's buffer, behind all else that
it has. When all of them have arrived the parameters are made of them at their places. So a record that is cast from
bf16 to fp32 takes half as much again of the pool, and the sum says so. What is written of the record when it is changed
ends before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from swapper.storage.spans import Extent, Span, plan_spans

__all__ = ["Conversion", "Source", "plan_sources"]


class Source(NamedTuple):
    """A tensor in a file.

    Attributes:
        extent: its bytes.
        dtype, shape: of the tensor.
    """

    extent: Extent
    dtype: torch.dtype
    shape: torch.Size


class Conversion(NamedTuple):
    """The sources of a parameter, and the function that makes it of them.

    Attributes:
        sources: what it is made of, each once.
        write: takes a contiguous tensor of its shape and dtype, and fills it; and the values of `sources`, in order.
        rows: gives how those of its first dimension between two indices are made, of less; None if that is not known.
    """

    sources: tuple[Source, ...]
    write: Callable[[torch.Tensor, Sequence[torch.Tensor]], None]
    rows: Callable[[int, int], Conversion] | None = None


class _Target(NamedTuple):
    conversion: Conversion
    at_bytes: int
    dtype: torch.dtype
    shape: torch.Size


def plan_sources(
    converted: Sequence[tuple[torch.Tensor, Conversion, int]], at_bytes: int
) -> tuple[tuple[Span, ...], int]:
    """Plan from where the parameters of a record that are converted come. See [Note: converted parameters].

    Args:
        converted: each of them, how it is made, and at which offset of the buffer it is to be.
        at_bytes: the first offset for their sources, a multiple of 4096.

    Returns:
        The spans of their sources, the last of which has the conversions; and the length of the buffer.
    """
    if not converted:
        return (), at_bytes
    sources = list(dict.fromkeys(source for _, conversion, _ in converted for source in conversion.sources))
    plan = plan_spans([[source.extent] for source in sources])
    found = {source: at_bytes + at for source, at in zip(sources, plan.offsets_bytes, strict=True)}
    targets = [_Target(conversion, at, p.dtype, p.shape) for p, conversion, at in converted]
    spans = [span._replace(at_bytes=at_bytes + span.at_bytes) for span in plan.spans]
    spans[-1] = spans[-1]._replace(convert=functools.partial(_convert, targets, found))
    return tuple(spans), at_bytes + plan.length_bytes


@torch.no_grad()
def _convert(targets: Sequence[_Target], found: Mapping[Source, int], buffer: torch.Tensor) -> None:
    for conversion, at, dtype, shape in targets:
        sources = [_view(buffer, found[source], source.dtype, source.shape) for source in conversion.sources]
        conversion.write(_view(buffer, at, dtype, shape), sources)


def _view(buffer: torch.Tensor, at_bytes: int, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return buffer[at_bytes : at_bytes + shape.numel() * dtype.itemsize].view(dtype).view(shape)
