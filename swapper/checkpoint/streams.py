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

import torch

from swapper.checkpoint.reader import Checkpoint
from swapper.errors import SwapError
from swapper.io.checksums import checksum, join_checksums
from swapper.storage.malloc_trim import return_free_memory
from swapper.tensors.dtypes import WORDS
from swapper.tensors.strides import contiguous_stride

__all__ = ["Read", "TensorStream", "model_stream"]

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
        self._fill(slab.view(self._words).view(shape).permute(back), 0, [ranges[d] for d in back])
        self._slab = slab
        return_free_memory()  # What was decoded on the way came from the heap.
        self._slab_start = (lead * size + row) * self._row_numel

    def _fill(self, target: torch.Tensor, base: int, ranges: Sequence[tuple[int, int]]) -> None:
        """Copy a box of elements, whose dimensions are the last ones, from those behind `base`."""
        sizes = self._sizes[len(self._sizes) - len(ranges) :]
        row_numel = math.prod(sizes[1:])
        (start, stop), rest = ranges[0], ranges[1:]
        rows = PIECE_BYTES // self._dtype.itemsize // max(1, row_numel)
        if not rows:
            for row in range(start, stop):
                self._fill(target[row - start], base + row * row_numel, rest)
            return
        for row in range(start, stop, rows):
            end = min(row + rows, stop)
            data = self._read(base + row * row_numel, base + end * row_numel).view(target.dtype)
            data = data.view(end - row, *sizes[1:])
            for d, (low, high) in enumerate(rest, 1):
                data = data.narrow(d, low, high - low)
            target[row - start : end - start].copy_(data)


def model_stream(checkpoint: Checkpoint, name: str) -> TensorStream:
    """A tensor of the model, in the order of its indices.

    Args:
        name: in the state dict; not one that is tied to another.

    Raises:
        SwapError: its file and the index do not fit together.
    """
    stored = checkpoint.model_tensor(name)
    shape = tuple(stored.shape)
    crc32c = checkpoint.index.model.tensors[name].crc32c
    read = partial(checkpoint.elements, stored)
    what = f"tensor {name!r} of {stored.path}"
    return TensorStream(stored.dtype, shape, contiguous_stride(shape), read, crc32c, what)
