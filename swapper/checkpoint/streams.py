"""Tensors of a checkpoint that come in pieces: a piece is in memory at a time, however long they are.

[Note: order of elements] A file of the model has the elements of a tensor in the order of its indices; the state of an
optimizer is in the order of the parameter's memory, which differs for channels_last and transposed tensors. What reads
along with the other order gets it from `_Reordered`, a slab at a time. If no leading dimension is common to both orders
each slab takes a pass over the whole file.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from swapper.checkpoint.index import SavedSegment
from swapper.checkpoint.reader import Checkpoint
from swapper.checkpoint.saved_state import SavedPiece, SavedState, hollow
from swapper.errors import SwapError
from swapper.io.checksums import checksum, join_checksums
from swapper.optimizer.master_codec import join_master
from swapper.optimizer.segments import MASTER
from swapper.storage.malloc_trim import return_free_memory
from swapper.tensors.dtypes import WORDS
from swapper.tensors.strides import is_dense

__all__ = ["StreamedState", "TensorStream", "contiguous_stride", "model_stream"]

PIECE_BYTES = 4 << 20
SLAB_BYTES = 16 << 20
_MASTERS_NUMEL = 1 << 20


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
        if order == list(range(len(order))):
            return replace(self, stride=plain)
        sizes = [self.shape[dimension] for dimension in order]
        back = [order.index(dimension) for dimension in range(len(order))]
        reordered = _Reordered(self.read, self.dtype, sizes, back)
        return replace(self, stride=plain, read=reordered.read, crc32c=None)


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a tensor whose elements lie in the order of indices."""
    return tuple(torch.empty(tuple(shape), device="meta").stride())


def _order_of_memory(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """The dimensions of a dense tensor from the outermost in memory to the innermost."""
    order = [d for d in range(len(shape)) if shape[d] != 1]
    ordered = iter(sorted(order, key=lambda d: -stride[d]))
    return [d if shape[d] == 1 else next(ordered) for d in range(len(shape))]


def _memory(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A 1-D tensor that is not from the heap, where holes would be left of it."""
    if not numel:
        return torch.empty(0, dtype=dtype)
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
        self._slab = torch.empty(0, dtype=dtype)
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
        back = [self._order.index(d) for d in range(len(self._order))]
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
    described = checkpoint.index.model.tensors[name]
    stored = checkpoint.tensor(described.file, name)
    dtype = getattr(torch, described.dtype, None)
    shape = tuple(described.shape)
    length_bytes = stored.stop_bytes - stored.start_bytes
    if not isinstance(dtype, torch.dtype) or math.prod(shape) * dtype.itemsize != length_bytes:
        raise SwapError(f"{stored.path}: tensor {name!r} is not what the index says; the checkpoint is damaged")

    def read(start: int, stop: int) -> torch.Tensor:
        begin = stored.start_bytes + start * dtype.itemsize
        data = checkpoint.reader.read_bytes(stored.path, begin, begin + (stop - start) * dtype.itemsize)
        return (data if data.data_ptr() % dtype.itemsize == 0 else data.clone()).view(dtype)

    stride = contiguous_stride(shape)
    return TensorStream(dtype, shape, stride, read, described.crc32c, f"tensor {name!r} of {stored.path}")


class StreamedState(SavedState):
    """The state of one optimizer in a checkpoint, a piece at a time; the parameters are those of the checkpoint.

    Args:
        checkpoint: it stays open as long as this is used.
        number: of the optimizer in the checkpoint.
    """

    def __init__(self, checkpoint: Checkpoint, number: int) -> None:
        saved = checkpoint.index.optimizers[number]
        parameters = [hollow(parameter, checkpoint) for parameter in saved.parameters]
        super().__init__(checkpoint, saved, parameters, number)
        self._bits: tuple[torch.nn.Parameter, Read] | None = None
        self._ties: tuple[SavedPiece, dict[int, int]] | None = None
        self._decoded_masters: tuple[SavedPiece, int, torch.Tensor] | None = None

    def tensors(self, place: int) -> dict[str, Any]:
        """The state of a parameter in its class's own format, with a `TensorStream` for what is in files.

        A file is compared with its checksum before anything of it is used.
        """
        saved = self._saved.parameters[place]
        small = self._small_of(place)
        found = {key: small[key] if key in small else self._stream(place, key) for key in saved.keys}
        if place in self._with_master:
            found[MASTER] = self._stream(place, MASTER)
        return found

    def _stream(self, place: int, key: str) -> TensorStream:
        saved = self._saved.parameters[place]
        if place not in self._pieces or saved.shape is None:
            raise self._incomplete(place)
        first = self._pieces[place][0]
        dtype = torch.float32 if key == MASTER else self._dtype(place, key)
        shape, stride = tuple(saved.shape), tuple(saved.stride)
        read: Read = partial(self._read_slices, place, key, dtype)
        if key != MASTER and first.segment.whole:
            stored = self._stored(first, key)
            shape = tuple(stored.shape[:-1] if dtype.is_complex else stored.shape)
            stride = tuple(first.segment.strides.get(key, contiguous_stride(shape)))
            read = partial(self._read, stored, dtype)
        if len(shape) != len(stride) or not is_dense(torch.empty_strided(shape, stride, device="meta")):
            raise self._incomplete(place)
        return TensorStream(dtype, shape, stride, read)

    def _bits_of(self, p: torch.nn.Parameter, start: int, stop: int) -> torch.Tensor:
        if self._bits is None or self._bits[0] is not p:
            self._bits = p, self._reader_of_parameter(self._place_of[id(p)])
        return self._bits[1](start, stop)

    def _reader_of_parameter(self, place: int) -> Read:
        """Reads a parameter in the order of its memory."""
        index = self._checkpoint.index
        saved = self._saved.parameters[place]
        name = index.model.tied.get(saved.name, saved.name)
        if name not in index.model.tensors:
            raise SwapError(
                f"{self._name(place)}: its master weights go with a parameter that is not in the model's state dict; "
                "export without them by drop_masters (--drop-masters)"
            )
        self._checkpoint.verify(index.model.tensors[name].file)
        stream = model_stream(self._checkpoint, name)
        if (str(stream.dtype).removeprefix("torch."), list(stream.shape)) != (saved.dtype, saved.shape):
            raise self._incomplete(place)
        order = _order_of_memory(stream.shape, saved.stride)
        if order == list(range(len(order))):
            return stream.read
        return _Reordered(stream.read, stream.dtype, stream.shape, order).read

    def _master_slice(self, piece: SavedPiece, p: torch.nn.Parameter, begin: int, end: int) -> torch.Tensor:
        segment = piece.segment
        numel = segment.stop - segment.start
        if numel <= _MASTERS_NUMEL:
            return super()._master_slice(piece, p, begin, end)
        parts = []
        position, last = begin - segment.start, end - segment.start
        while position < last:
            start = position // _MASTERS_NUMEL * _MASTERS_NUMEL
            masters = self._masters(piece, p, start, min(start + _MASTERS_NUMEL, numel))
            parts.append(masters[position - start : last - start])
            position += parts[-1].numel()
        return torch.cat(parts)

    def _masters(self, piece: SavedPiece, p: torch.nn.Parameter, start: int, stop: int) -> torch.Tensor:
        """The master of elements `start` to `stop` of a piece that is too long to be decoded whole."""
        segment = piece.segment
        if (kept := self._decoded_masters) is not None and kept[0] is piece and kept[1] == start:
            return kept[2]
        bits = self._bits_of(p, segment.start + start, segment.start + stop)
        if self._is_edited(segment.parameter):
            masters = bits.float()
        elif segment.master == "split":
            low = self._read(self._stored(piece, MASTER), torch.int16, start, stop)
            before = self._ties_before(piece, start)
            count = int((low == -0x8000).sum())
            masters = torch.empty(stop - start)
            join_master(bits.contiguous(), low, self._tie_bits(piece, before, before + count), count, masters)
        else:
            masters = self._read(self._stored(piece, MASTER), torch.float32, start, stop)
        self._decoded_masters = piece, start, masters
        return masters

    def _is_edited(self, place: int) -> bool:
        if place not in self._edited:
            self._edited[place] = not all(self._is_unchanged(piece.segment) for piece in self._pieces[place])
        return self._edited[place]

    def _is_unchanged(self, segment: SavedSegment) -> bool:
        p = self._parameters[segment.parameter]
        parts = []
        for start in range(segment.start, segment.stop, _MASTERS_NUMEL):
            bits = self._bits_of(p, start, min(start + _MASTERS_NUMEL, segment.stop))
            parts.append((checksum(bits.contiguous()), bits.nbytes))
        return bool(join_checksums(parts) == segment.parameter_crc32c)

    def _ties_before(self, piece: SavedPiece, position: int) -> int:
        """How many ties there are in the first elements of a piece; `position` is a multiple of `_MASTERS_NUMEL`."""
        if self._ties is None or self._ties[0] is not piece:
            self._ties = piece, {0: 0}
        known = self._ties[1]
        last = max(known)
        while last < position:
            low = self._read(self._stored(piece, MASTER), torch.int16, last, last + _MASTERS_NUMEL)
            known[last + _MASTERS_NUMEL] = known[last] + int((low == -0x8000).sum())
            last += _MASTERS_NUMEL
        return known[position]

    def _tie_bits(self, piece: SavedPiece, start: int, stop: int) -> torch.Tensor:
        """Bits `start` to `stop` of a piece's ties, packed from the first byte on."""
        ties = self._checkpoint.table(piece.file or "").get("ties")
        if start == stop:
            return torch.empty(0, dtype=torch.uint8)
        if ties is None or stop > piece.segment.tie_bits:
            raise self._incomplete(piece.segment.parameter)
        first = start // 8
        packed = self._read(ties, torch.uint8, piece.ties_at_bytes + first, piece.ties_at_bytes + (stop + 7) // 8)
        shifts = torch.arange(8, dtype=torch.uint8)
        bits = ((packed[:, None] >> shifts) & 1).view(-1)[start - 8 * first : stop - 8 * first]
        whole = torch.zeros(-(-bits.numel() // 8) * 8, dtype=torch.uint8)
        whole[: bits.numel()] = bits
        return (whole.view(-1, 8) << shifts).sum(1, dtype=torch.uint8)
