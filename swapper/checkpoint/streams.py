"""Tensors of a checkpoint that are read in pieces: one piece is in memory at a time, however long they are.

[Note: order of elements] A file of the model has the elements of a tensor in the order of its indices; the state of an
optimizer is in the order of the parameter's memory, which differs for channels_last and transposed tensors.
`_Reordered` gives one in the order of the other, a slab at a time. If no leading dimension is common to both orders
each slab takes a pass over the whole file.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from swapper.checkpoint.index import INDEX
from swapper.checkpoint.reader import Checkpoint
from swapper.errors import SwapError
from swapper.io.checksums import checksum, join_checksums
from swapper.storage.malloc_trim import return_free_memory
from swapper.tensors.dtypes import WORDS
from swapper.tensors.sharded import Box
from swapper.tensors.strides import contiguous_stride

__all__ = [
    *("Read", "StreamPart", "TensorStream", "are_a_whole", "model_box", "model_stream", "read_box", "stream_of"),
    "whole_box",
]

PIECE_BYTES = 4 << 20
SLAB_BYTES = 16 << 20


Read = Callable[[int, int], torch.Tensor]
"""Gives elements `start` to `stop`, 1-D."""


@dataclass(frozen=True)
class TensorStream:
    """A dense tensor whose elements are read piece by piece.

    Attributes:
        dtype, shape, stride: of the tensor.
        read: gives elements `start` to `stop` in the order of its memory.
        crc32c: of all its bytes in that order, if that is known and `read` does not compare it.
        name: what an error calls it.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    read: Read
    crc32c: int | None = None
    name: str = ""

    @property
    def numel(self) -> int:
        """Its number of elements."""
        return math.prod(self.shape)

    @property
    def length_bytes(self) -> int:
        """Its size."""
        return self.numel * self.dtype.itemsize

    def pieces(self) -> Iterator[torch.Tensor]:
        """All of it in the order of its memory: contiguous, 1-D, on the CPU, uint8.

        Raises:
            SwapError: it is damaged. That may be found at its end.
            SwapIOError: it cannot be read.
        """
        step = PIECE_BYTES // self.dtype.itemsize
        parts = []
        for start in range(0, self.numel, step):
            piece = self.read(start, min(start + step, self.numel)).view(torch.uint8)
            if self.crc32c is not None:
                parts.append((checksum(piece), piece.numel()))
            yield piece
        if self.crc32c is not None and join_checksums(parts) != self.crc32c:
            raise SwapError(f"{self.name} is damaged: it is not as it was saved; use another checkpoint")

    def contiguous(self) -> TensorStream:
        """The same tensor with its elements in the order of its indices."""
        plain = contiguous_stride(self.shape)
        order = _order_of_memory(self.shape, self.stride)
        if order == sorted(order):
            return replace(self, stride=plain)
        sizes = [self.shape[dimension] for dimension in order]
        reordered = _Reordered(self.read, self.dtype, sizes, _inverse(order))
        return replace(self, stride=plain, read=reordered.read, crc32c=None)

    def in_order_of(self, stride: Sequence[int]) -> Read:
        """Reads elements of this tensor, which is contiguous, in the order of memory of one with other strides."""
        order = _order_of_memory(self.shape, stride)
        return self.read if order == sorted(order) else _Reordered(self.read, self.dtype, self.shape, order).read


def stream_of(tensor: torch.Tensor) -> TensorStream:
    """A tensor in memory, in the order of its indices."""
    flat, shape = tensor.detach().cpu().contiguous().view(-1), tuple(tensor.shape)
    return TensorStream(tensor.dtype, shape, contiguous_stride(shape), lambda start, stop: flat[start:stop])


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(dimension) for dimension in range(len(order))]


def _order_of_memory(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """The dimensions of a dense tensor from the outermost in memory to the innermost."""
    order = [d for d in range(len(shape)) if shape[d] != 1]
    ordered = iter(sorted(order, key=lambda d: -stride[d]))
    return [d if shape[d] == 1 else next(ordered) for d in range(len(shape))]


def _memory(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A 1-D tensor that is not from the heap, where holes would be left of it."""
    if not numel:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(mmap.mmap(-1, numel * dtype.itemsize), dtype=torch.uint8).view(dtype)


class _Reordered:
    """The elements of a tensor in another order of its dimensions. See [Note: order of elements].

    Args:
        read: gives them as they are, in the order of indices.
        dtype: of them.
        sizes: of the dimensions as they are.
        order: which of them come first, second, ... in the order that is wanted.
    """

    def __init__(self, read: Read, dtype: torch.dtype, sizes: Sequence[int], order: Sequence[int]) -> None:
        self._read = read
        self._dtype = dtype
        self._words = WORDS.get(dtype.itemsize, dtype)  # A copy of integers keeps all bits.
        self._sizes = list(sizes)
        self._order = list(order)
        self._wanted = [sizes[d] for d in order]
        room = SLAB_BYTES // dtype.itemsize
        # A slab is some indices of dimension `_cut` of those that are wanted, and all of those behind it.
        self._cut = next(d for d in range(len(order)) if math.prod(self._wanted[d + 1 :]) <= room)
        self._row_numel = math.prod(self._wanted[self._cut + 1 :])
        self._rows = max(1, room // max(1, self._row_numel))
        self._numel = math.prod(sizes)
        self._room: torch.Tensor | None = None
        self._slab = torch.empty(0, dtype=dtype, device="cpu")
        self._slab_start = 0

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Elements `start` to `stop` in the order that is wanted. Fast where they follow those of the call before."""
        out = _memory(stop - start, self._dtype).view(self._words)
        done = 0
        while done < len(out):
            if not self._slab_start <= start + done < self._slab_start + self._slab.numel():
                self._fetch(start + done)
            part = self._slab.view(self._words)[start + done - self._slab_start :][: len(out) - done]
            out[done : done + len(part)] = part
            done += len(part)
        if stop == self._numel:  # The last of it: others may need the memory.
            self._room, self._slab = None, self._slab[:0].clone()
        return out.view(self._dtype)

    def _fetch(self, position: int) -> None:
        size = self._wanted[self._cut]
        lead, row = divmod(position // self._row_numel, size)
        row = row // self._rows * self._rows
        ranges = [(0, n) for n in self._wanted]
        ranges[self._cut] = (row, min(row + self._rows, size))
        rest = lead
        for d in range(self._cut - 1, -1, -1):
            rest, index = divmod(rest, self._wanted[d])
            ranges[d] = (index, index + 1)
        shape = [stop - start for start, stop in ranges]
        if self._room is None:
            self._room = _memory(min(self._numel, self._rows * self._row_numel), self._dtype)
        slab = self._room[: math.prod(shape)]
        back = _inverse(self._order)
        target = slab.view(self._words).view(shape).permute(back)
        _fill_box(self._read, self._dtype, self._sizes, target, [ranges[d] for d in back])
        self._slab = slab
        return_free_memory()  # What was decoded on the way came from the heap.
        self._slab_start = (lead * size + row) * self._row_numel


def _fill_box(
    read: Read,
    dtype: torch.dtype,
    sizes: Sequence[int],
    target: torch.Tensor,
    ranges: Sequence[tuple[int, int]],
    base: int = 0,
) -> None:
    """Copy a box of elements out of a tensor that is read in the order of its indices, some rows at a time.

    Args:
        dtype, sizes: of the tensor.
        target: of the shape of the box; of `dtype`, or integers of its length.
        ranges: of the box, in each dimension of the tensor.
        base: elements that come before those of the tensor.
    """
    if not ranges:
        target.copy_(read(base, base + 1).view(target.dtype).view(()))
        return
    row_numel = math.prod(sizes[1:])
    (start, stop), rest = ranges[0], ranges[1:]
    rows = PIECE_BYTES // dtype.itemsize // max(1, row_numel)
    if not rows:
        for row in range(start, stop):
            _fill_box(read, dtype, sizes[1:], target[row - start], rest, base + row * row_numel)
        return
    for row in range(start, stop, rows):
        end = min(row + rows, stop)
        data = read(base + row * row_numel, base + end * row_numel).view(target.dtype)
        data = data.view(end - row, *sizes[1:])
        for d, (low, high) in enumerate(rest, 1):
            data = data.narrow(d, low, high - low)
        target[row - start : end - start].copy_(data)


# --- Tensors in parts ------------------------------------------------------------------------------------------------


class StreamPart(NamedTuple):
    """A part of a tensor: its box, and its elements in the order of its indices."""

    box: Box
    read: Read


def whole_box(shape: Sequence[int]) -> Box:
    """All elements of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def read_box(parts: Sequence[StreamPart], dtype: torch.dtype, box: Box) -> Read:
    """Reads the elements of `box` in the order of its indices, out of parts that hold all of them."""
    words = WORDS.get(dtype.itemsize, dtype)  # A copy of integers keeps all bits.

    def read(start: int, stop: int) -> torch.Tensor:
        out = _memory(stop - start, dtype).view(words)
        done = 0
        for at, sizes in _boxes_in(box.sizes, start, stop):
            numel = math.prod(sizes)
            target = out[done : done + numel].view(sizes)
            done += numel
            lows = [offset + here for offset, here in zip(box.offsets, at, strict=True)]
            for part in parts:
                _copy_common(part, dtype, Box(tuple(lows), sizes), target)
        return out.view(dtype)

    return read


def _copy_common(part: StreamPart, dtype: torch.dtype, box: Box, target: torch.Tensor) -> None:
    """Copy to `target`, which is of `box`, what `part` has of it."""
    ranges = []
    for theirs, size, mine, wanted in zip(*part.box, *box, strict=True):
        low, high = max(theirs, mine), min(theirs + size, mine + wanted)
        if low >= high:
            return
        ranges.append((low, high))
    for d, ((low, high), mine) in enumerate(zip(ranges, box.offsets, strict=True)):
        target = target.narrow(d, low - mine, high - low)
    there = [(low - theirs, high - theirs) for (low, high), theirs in zip(ranges, part.box.offsets, strict=True)]
    _fill_box(part.read, dtype, part.box.sizes, target, there)


def _boxes_in(sizes: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of boxes that are elements `start` to `stop` of a tensor, in the order of its indices."""
    if start >= stop:
        return
    if not sizes:
        yield (), ()
        return
    row_numel, rest = math.prod(sizes[1:]), tuple(sizes[1:])
    row, inside = divmod(start, row_numel)
    if inside:
        end = min(stop, (row + 1) * row_numel)
        for at, part in _boxes_in(rest, inside, end - row * row_numel):
            yield (row, *at), (1, *part)
        start, row = end, row + 1
    if rows := (stop - start) // row_numel if stop > start else 0:
        yield (row, *(0 for _ in rest)), (rows, *rest)
        start, row = start + rows * row_numel, row + rows
    if start < stop:
        for at, part in _boxes_in(rest, 0, stop - start):
            yield (row, *at), (1, *part)


def are_a_whole(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """True if each element of a tensor of `shape` is in one of `boxes`, which are as sharding makes them: a grid."""
    if any(len(box.sizes) != len(shape) or len(box.offsets) != len(shape) for box in boxes):
        return False
    cuts = [sorted({box.offsets[d] for box in boxes}) for d in range(len(shape))]
    if any(not each or each[0] != 0 for each in cuts):
        return False
    ends = [dict(zip(each, [*each[1:], size], strict=True)) for each, size in zip(cuts, shape, strict=True)]
    known = {box.offsets for box in boxes}
    return len(known) == len(boxes) == math.prod(map(len, cuts)) and all(
        ends[d][offset] - offset == box.sizes[d] for box in boxes for d, offset in enumerate(box.offsets)
    )


def model_stream(checkpoint: Checkpoint, name: str) -> TensorStream:
    """A tensor of the model, in the order of its indices.

    Args:
        name: in the state dict, not one that is tied to another; or of a part.

    Raises:
        SwapError: its file and the index do not fit together.
    """
    if name in checkpoint.index.model.sharded:
        parts, dtype = _parts_of_model(checkpoint, name)
        shape = tuple(checkpoint.index.model.sharded[name].shape)
        return TensorStream(dtype, shape, contiguous_stride(shape), read_box(parts, dtype, whole_box(shape)))
    stored = checkpoint.model_tensor(name)
    shape = tuple(stored.shape)
    crc32c = checkpoint.index.model.tensors[name].crc32c
    read = partial(checkpoint.elements, stored)
    what = f"tensor {name!r} of {stored.path}"
    return TensorStream(stored.dtype, shape, contiguous_stride(shape), read, crc32c, what)


def _parts_of_model(checkpoint: Checkpoint, name: str) -> tuple[list[StreamPart], torch.dtype]:
    """The parts of a tensor of the model, and its dtype. A file is compared with its checksum before it is used."""
    saved = checkpoint.index.model
    if name not in saved.sharded:
        stored = checkpoint.model_tensor(name)
        return [StreamPart(whole_box(stored.shape), partial(_verified, checkpoint, name))], stored.dtype
    shards = saved.sharded[name]
    found, dtypes = [], set()
    for part, offsets in shards.parts.items():
        if part not in saved.tensors:
            raise _not_whole(checkpoint, name)
        if checkpoint.reaches(saved.tensors[part].file):
            checkpoint.model_tensor(part)
        dtype, shape = checkpoint.model_spec(part)
        dtypes.add(dtype)
        found.append(StreamPart(Box(tuple(offsets), tuple(shape)), partial(_verified, checkpoint, part)))
    if not are_a_whole([part.box for part in found], shards.shape) or len(dtypes) > 1:
        raise _not_whole(checkpoint, name)
    return found, dtypes.pop()


def _not_whole(checkpoint: Checkpoint, name: str) -> SwapError:
    return SwapError(f"{checkpoint.directory / INDEX} is damaged: its parts of {name!r} are not the whole tensor")


def _verified(checkpoint: Checkpoint, name: str, start: int, stop: int) -> torch.Tensor:
    checkpoint.verify(checkpoint.index.model.tensors[name].file)
    return checkpoint.elements(checkpoint.model_tensor(name), start, stop)


def model_box(checkpoint: Checkpoint, name: str, box: Box) -> Read:
    """Reads the elements of `box` of a tensor of the model in the order of their indices."""
    return read_box(*_parts_of_model(checkpoint, name), box)
