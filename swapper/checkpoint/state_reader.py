"""The state of one optimizer in a checkpoint, read by parameter, key and range of elements, however it was cut."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from swapper.checkpoint.index import INDEX, SavedOptimizer, SavedSegment
from swapper.checkpoint.reader import Checkpoint
from swapper.checkpoint.streams import Read, TensorStream, model_stream
from swapper.checkpoint.values import decode
from swapper.errors import SwapError
from swapper.files.tensor_files import StoredTensor
from swapper.io.checksums import checksum, join_checksums
from swapper.optimizer.int8_codec import BLOCK_NUMEL, blocks_of, decode_int8
from swapper.optimizer.master_codec import join_master
from swapper.optimizer.packing import (
    CHUNK_NUMEL,
    ENTRY_BYTES,
    blocks_name,
    packed_blocks_of,
    packed_bytes,
    unpack_values,
)
from swapper.optimizer.probe import ENCODED_DTYPES
from swapper.optimizer.segments import MASTER, scales_name
from swapper.tensors.dtypes import PLAIN_DTYPES, stored_dtype
from swapper.tensors.strides import contiguous_stride, is_dense_stride

__all__ = ["Bits", "StateReader", "check_groups"]

MASTERS_NUMEL = 1 << 20
"""Masters are decoded so many at a time."""

Bits = Callable[[int, Sequence[tuple[int, int]]], "Iterator[torch.Tensor] | None"]
"""Yields the values of the parameter at a position, from element `start` to `stop`, for each of some ranges: 1-D, on
the CPU, elements counted in the order of memory that the checkpoint says. None are those that the checkpoint has."""


@dataclass(frozen=True, eq=False)
class _SavedSlice:
    """A slice of a parameter's state in the checkpoint.

    Attributes:
        file: where its tensors are; None if all of it is in the index.
        number: of the segment in the file.
        ties_at_bytes: where its ties begin among those of the file.
        small: its state that is in the index: slices of the parameter's.
    """

    file: str | None
    number: int
    segment: SavedSegment
    ties_at_bytes: int
    small: dict[str, torch.Tensor]


def check_groups(checkpoint: Checkpoint, saved: SavedOptimizer, which: str) -> None:
    """Refuse groups that are not all parameters in order."""
    if list(itertools.chain(*saved.groups)) != list(range(len(saved.wholes()))):
        raise SwapError(f"{checkpoint.directory / INDEX} is damaged: the groups of {which} are not its parameters")


class StateReader:
    """Reads the state of one optimizer from the files of a checkpoint. Parameters are known by their positions.

    What the index and the headers of files say is compared here, once; bytes are compared before they are used.

    Args:
        checkpoint: it stays open as long as this is used.
        number: of the optimizer in the checkpoint.
        bits: the values that masters go with; None for those that the checkpoint has.

    Attributes:
        saved: what the index says.
        with_master: positions of the parameters that have master weights.
        edited: see `is_edited`; of those parameters whose masters were read.

    Raises:
        SwapError: the index and the files do not fit together.
        SwapIOError: a file cannot be read.
    """

    def __init__(self, checkpoint: Checkpoint, number: int, bits: Bits | None = None) -> None:
        self.saved = checkpoint.index.optimizers[number]
        self.with_master: set[int] = set()
        self._checkpoint = checkpoint
        self._what = f"optimizer {number}"
        self._given_bits = bits
        self._slices: dict[int, list[_SavedSlice]] = {}
        self._small: tuple[int, dict[str, Any]] | None = None
        self._master: tuple[_SavedSlice, int, torch.Tensor] | None = None
        self._ties: tuple[_SavedSlice, dict[int, int]] | None = None
        self.edited: dict[int, bool] = {}
        self._reader_of_bits: tuple[int, Read] | None = None
        check_groups(checkpoint, self.saved, self._what)
        for bucket in self.saved.buckets:
            ties_at_bytes = 0
            for i, segment in enumerate(bucket.segments):
                if isinstance(segment, SavedSegment):
                    self._add(bucket.file, i, segment, ties_at_bytes)
                ties_at_bytes += (segment.tie_bits + 7) // 8
        for position in range(len(self.saved.parameters)):
            if self.has_state(position):
                self._check(position)

    def _add(self, file: str | None, number: int, segment: SavedSegment, ties_at_bytes: int) -> None:
        position = segment.parameter
        if position >= len(self.saved.parameters):
            raise self._incomplete(position)
        small = self._decoded(segment.small, position)
        if any(not isinstance(value, torch.Tensor) or value.shape != (segment.numel,) for value in small.values()):
            raise self._incomplete(position)
        self._slices.setdefault(position, []).append(_SavedSlice(file, number, segment, ties_at_bytes, small))
        if segment.parameter_crc32c is not None:
            self.with_master.add(position)

    # --- What the index says ----------------------------------------------------------------------------------------

    def _check(self, position: int) -> None:
        """Refuse what does not fit together, as far as it can be seen without reading more than headers."""
        saved = self.saved.parameters[position]
        slices = self._slices.get(position, [])
        slices.sort(key=lambda each: each.segment.start)
        edges = [0, *(each.segment.stop for each in slices)]
        small = self.small(position)
        if (
            not slices
            or saved.shape is None
            or not is_dense_stride(saved.shape, saved.stride)
            or [each.segment.start for each in slices] != edges[:-1]
            or any(each.segment.numel < 0 for each in slices)
            or edges[-1] != math.prod(saved.shape)
            or len(set(saved.keys)) != len(saved.keys)
            or (len(slices) > 1 and any(each.segment.whole for each in slices))
            or not all(self._fits(position, each, small.keys()) for each in slices)
        ):
            raise self._incomplete(position)

    def _fits(self, position: int, each: _SavedSlice, small: Iterable[str]) -> bool:
        saved, segment = self.saved.parameters[position], each.segment
        if {*segment.present, *small, *each.small} - {MASTER} != set(saved.keys):
            return False
        if not self._reaches(each):
            return True  # Nobody reads it: see `Checkpoint.require`.
        for key in segment.present:
            shape = self._shape_in_file(each, key)
            if segment.whole and not is_dense_stride(shape, segment.strides.get(key, contiguous_stride(shape))):
                return False
            if not segment.whole and shape != (segment.numel,):
                return False
            if self.encodings_of(segment).get(key) == "int8":
                scales = self._scales(each, key)
                if scales.dtype is not torch.float32 or tuple(scales.shape) != (blocks_of(math.prod(shape)),):
                    return False
            if self.encodings_of(segment).get(key) == "packed":
                table = self._blocks(each, key)
                if table.dtype is not torch.uint8 or table.shape != (ENTRY_BYTES * packed_blocks_of(math.prod(shape)),):
                    return False
        if segment.parameter_crc32c is None:
            return not segment.tie_bits and MASTER not in each.small
        split = saved.dtype == "bfloat16"
        if segment.master != ("split" if split else "stored"):
            return False
        if MASTER in each.small:
            return not segment.tie_bits and each.small[MASTER].dtype == torch.float32
        low = torch.int16 if split else torch.float32
        return segment.tie_bits <= segment.numel and self._stored_shape(each, MASTER, low) == (segment.numel,)

    def _reaches(self, each: _SavedSlice) -> bool:
        return each.file is None or self._checkpoint.reaches(each.file)

    def files(self, position: int) -> set[str]:
        """The files that have state of the parameter."""
        return {each.file for each in self._slices.get(position, ()) if each.file is not None}

    def _shape_in_file(self, each: _SavedSlice, key: str) -> tuple[int, ...]:
        """The shape of a tensor of the state that is in a file. One that is packed has its parameter's."""
        position = each.segment.parameter
        shape = self._stored_shape(each, key, self._dtype_in_file(each, key))
        if self.encodings_of(each.segment).get(key) != "packed":
            return shape
        if len(shape) != 1:
            raise self._incomplete(position)
        return tuple(self.saved.parameters[position].shape or ()) if each.segment.whole else (each.segment.numel,)

    def _stored_shape(self, each: _SavedSlice, key: str, dtype: torch.dtype) -> tuple[int, ...]:
        """The shape of a tensor that is in a file; it is refused if it is of another dtype."""
        stored = self._tensor(each, key)
        if stored.dtype != stored_dtype(dtype) or (dtype.is_complex and stored.shape[-1:] != (2,)):
            raise self._incomplete(each.segment.parameter)
        return tuple(stored.shape[:-1] if dtype.is_complex else stored.shape)

    def _tensor(self, each: _SavedSlice, key: str) -> StoredTensor:
        if each.file is None:
            raise self._incomplete(each.segment.parameter)
        return self._checkpoint.tensor(each.file, f"{each.number}.{key}")

    def _scales(self, each: _SavedSlice, key: str) -> StoredTensor:
        return self._checkpoint.tensor(each.file or "", scales_name(each.number, key))

    def _blocks(self, each: _SavedSlice, key: str) -> StoredTensor:
        return self._checkpoint.tensor(each.file or "", blocks_name(f"{each.number}.{key}"))

    def _dtype(self, position: int, key: str) -> torch.dtype:
        if key == MASTER:
            return torch.float32
        dtype = getattr(torch, self.saved.parameters[position].dtypes.get(key, ""), None)
        if isinstance(dtype, torch.dtype) and dtype in PLAIN_DTYPES:
            return dtype
        small = self._slices[position][0].small.get(key)
        if small is None:
            raise self._incomplete(position)
        return small.dtype

    def encodings_of(self, segment: SavedSegment) -> Mapping[str, str]:
        """Return the encoding of each key of `segment` that is not stored as the class has it."""
        known = segment.encodings
        return self.saved.parameters[segment.parameter].encodings if known is None else known

    def _dtype_in_file(self, each: _SavedSlice, key: str) -> torch.dtype:
        """As `_dtype`, of what is stored: see `encodings_of`."""
        position, encoding = each.segment.parameter, self.encodings_of(each.segment).get(key)
        if encoding is None:
            return self._dtype(position, key)
        if self._dtype(position, key) is not torch.float32:
            raise self._incomplete(position)
        return ENCODED_DTYPES.get(encoding, torch.uint8)

    def groups(self, names: Sequence[Any]) -> list[dict[str, Any]]:
        """The groups as in a state dict, with `names` of the parameters, one for each position."""
        found = decode(self.saved.options, f"{self._what}, options", self._checkpoint.small_tensor)
        groups = self.saved.groups
        if not isinstance(found, list) or len(found) != len(groups) or not all(type(each) is dict for each in found):
            raise SwapError(
                f"{self._checkpoint.directory / INDEX} is damaged: the options of {self._what} are not its groups'"
            )
        return [
            {**options, "params": [names[position] for position in positions]}
            for options, positions in zip(found, groups, strict=True)
        ]

    def state_dict(self, state: Mapping[Any, Any], names: Sequence[Any]) -> dict[str, Any]:
        """A state dict of the optimizer with `state`, by `names` of parameters, and with what the class adds to it."""
        rest = decode(self.saved.rest, f"{self._what}, state_dict", self._checkpoint.small_tensor)
        if not (rest is None or (type(rest) is dict and type(rest.get("state", {})) is dict)):
            raise SwapError(
                f"{self._checkpoint.directory / INDEX} is damaged: what {self._what} adds to its state_dict is none"
            )
        rest = rest or {}
        return {**rest, "state": {**rest.get("state", {}), **state}, "param_groups": self.groups(names)}

    def has_state(self, position: int) -> bool:
        """True if the checkpoint has state of the parameter."""
        return bool(self.saved.parameters[position].keys) or position in self.with_master

    def small(self, position: int) -> dict[str, Any]:
        """The state of a parameter that never moves."""
        if self._small is None or self._small[0] != position:
            self._small = position, self._decoded(self.saved.parameters[position].small, position)
        return self._small[1]

    def small_of_segment(self, segment: SavedSegment) -> dict[str, Any]:
        """As `small`, with the slices that the index has of a segment."""
        return self.small(segment.parameter) | self._decoded(segment.small, segment.parameter)

    def _decoded(self, data: Any, position: int) -> dict[str, Any]:
        decoded = {} if data is None else decode(data, self._name(position), self._checkpoint.small_tensor)
        if not isinstance(decoded, dict):
            raise self._incomplete(position)
        return decoded

    def _name(self, position: int) -> str:
        return f"{self._what}, state of parameter {self.saved.parameters[position].name or position}"

    def _incomplete(self, position: int) -> SwapError:
        return SwapError(
            f"{self._checkpoint.directory} is no whole checkpoint: what its index says of {self._what}, parameter "
            f"{position}, does not fit together; use another checkpoint"
        )

    # --- Tensors ----------------------------------------------------------------------------------------------------

    def state(self, position: int) -> dict[str, Any]:
        """The state of a parameter in its class's own format, with a `TensorStream` for each tensor in files.

        A file is compared with its checksum before anything of it is used.
        """
        small = self.small(position)
        keys = self.saved.parameters[position].keys
        found = {key: small[key] if key in small else self._stream(position, key) for key in keys}
        if position in self.with_master:
            found[MASTER] = self._stream(position, MASTER)
        return found

    def _stream(self, position: int, key: str) -> TensorStream:
        saved, dtype, first = self.saved.parameters[position], self._dtype(position, key), self._slices[position][0]
        shape, stride = tuple(saved.shape or ()), tuple(saved.stride)
        if first.segment.whole and key != MASTER and self._reaches(first):
            shape = self._shape_in_file(first, key)
            stride = tuple(first.segment.strides.get(key, contiguous_stride(shape)))
        return TensorStream(dtype, shape, stride, partial(self.read, position, key))

    def read(self, position: int, key: str, start: int, stop: int) -> torch.Tensor:
        """Elements `start` to `stop` of a tensor of the state, 1-D, on the CPU.

        Elements are counted in the order of memory. A tensor that goes along with the parameter is put together of the
        slices in which it was saved; masters, and what is encoded, are decoded.
        """
        dtype = self._dtype(position, key)
        slices = self._slices[position]
        if slices[0].segment.whole and key != MASTER:
            return self._values(slices[0], key, start, stop)
        out = torch.empty(stop - start, dtype=dtype, device="cpu")
        first = max(0, bisect.bisect_right(slices, start, key=lambda each: each.segment.start) - 1)
        for each in itertools.takewhile(lambda each: each.segment.start < stop, slices[first:]):
            segment = each.segment
            begin, end = max(start, segment.start), min(stop, segment.stop)
            if begin < end:
                part = out[begin - start : end - start]
                self._read_slice(each, key, begin - segment.start, part)
        return out

    def _read_slice(self, each: _SavedSlice, key: str, start: int, out: torch.Tensor) -> None:
        """Fill `out` with elements of a slice, from its element `start` on."""
        stop = start + out.numel()
        if key in each.small and key != MASTER:
            out.copy_(each.small[key][start:stop])
        elif key != MASTER:
            out.copy_(self._values(each, key, start, stop))
        else:
            while start < stop:
                at = start // MASTERS_NUMEL * MASTERS_NUMEL
                masters = self._masters(each, at)[start - at : stop - at]
                out[len(out) - (stop - start) :][: len(masters)] = masters
                start += len(masters)

    def _values(self, each: _SavedSlice, key: str, start: int, stop: int) -> torch.Tensor:
        """Elements of a slice that are in its file, decoded: 1-D."""
        position = each.segment.parameter
        dtype = self._dtype_in_file(each, key)
        if self.encodings_of(each.segment).get(key) == "packed":
            return self._unpacked(each, key, start, stop)
        if self.encodings_of(each.segment).get(key) != "int8":
            return self._elements(each, key, start, stop, dtype).to(self._dtype(position, key))
        first = start // BLOCK_NUMEL
        codes = self._elements(each, key, first * BLOCK_NUMEL, stop, dtype)
        count = blocks_of(codes.numel())
        scales = self._checkpoint.elements(self._scales(each, key), first, first + count, torch.float32)
        values = torch.empty(codes.numel(), dtype=torch.float32, device="cpu")
        decode_int8(codes, scales, values)
        return values[start - first * BLOCK_NUMEL :]

    def _unpacked(self, each: _SavedSlice, key: str, start: int, stop: int) -> torch.Tensor:
        """Elements of a slice that are packed in its file: 1-D."""
        numel = math.prod(self._shape_in_file(each, key))
        first, last = start // CHUNK_NUMEL * CHUNK_NUMEL, min(-(-stop // CHUNK_NUMEL) * CHUNK_NUMEL, numel)
        self._checkpoint.verify(each.file or "")
        entries = ENTRY_BYTES * packed_blocks_of(last)
        table = self._checkpoint.elements(self._blocks(each, key), 0, entries)
        values = torch.empty(last - first, dtype=torch.float32, device="cpu")
        try:
            begin, end = (packed_bytes(table, at) for at in (first, last))
            stored = self._tensor(each, key)
            if last == numel and end != stored.length_bytes:
                raise ValueError("the table is of another tensor")
            data = self._checkpoint.elements(stored, begin, end)
            unpack_values(table[ENTRY_BYTES * packed_blocks_of(first) :], data, values)
        except ValueError as error:
            raise self._incomplete(each.segment.parameter) from error
        return values[start - first : stop - first]

    def _elements(self, each: _SavedSlice, key: str, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        self._checkpoint.verify(each.file or "")
        return self._checkpoint.elements(self._tensor(each, key), start, stop, dtype)

    # --- Masters ----------------------------------------------------------------------------------------------------

    def _masters(self, each: _SavedSlice, start: int) -> torch.Tensor:
        """The masters of a slice from element `start` on, at most `MASTERS_NUMEL`: fp32, 1-D. The last are kept."""
        if self._master is not None and self._master[0] is each and self._master[1] == start:
            return self._master[2]
        segment = each.segment
        stop = min(start + MASTERS_NUMEL, segment.numel)
        edited = self.is_edited(segment.parameter)
        (bits,) = self._bits(segment.parameter, [(segment.start + start, segment.start + stop)])
        if edited:
            masters = bits.float()
        elif MASTER in each.small:
            masters = each.small[MASTER][start:stop]
        elif segment.master == "split":
            masters = self._joined(each, bits.contiguous(), start, stop)
        else:
            masters = self._elements(each, MASTER, start, stop, torch.float32)
        self._master = each, start, masters
        return masters

    def _joined(self, each: _SavedSlice, bits: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        low = self._elements(each, MASTER, start, stop, torch.int16)
        before = self._ties_before(each, start)
        count = _count_ties(low)
        if stop == each.segment.numel and before + count != each.segment.tie_bits:
            raise self._incomplete(each.segment.parameter)
        masters = torch.empty(stop - start, dtype=torch.float32, device="cpu")
        join_master(bits, low, self._packed_ties(each, before, before + count), count, masters)
        return masters

    def is_edited(self, position: int) -> bool:
        """True if the parameter differs from its rounded masters. See [Note: edited parameters] of `segments`."""
        if position not in self.edited:
            ranges = [
                [(at, min(at + MASTERS_NUMEL, stop)) for at in range(start, stop, MASTERS_NUMEL)]
                for start, stop in ((each.segment.start, each.segment.stop) for each in self._slices[position])
            ]
            bits = self._bits(position, list(itertools.chain(*ranges)))
            sums = ((checksum(part.contiguous()), part.nbytes) for part in bits)
            self.edited[position] = any(
                join_checksums(itertools.islice(sums, len(those))) != each.segment.parameter_crc32c
                for each, those in zip(self._slices[position], ranges, strict=True)
            )
        return self.edited[position]

    def _ties_before(self, each: _SavedSlice, numel: int) -> int:
        """The number of ties in the first `numel` elements of a slice, a multiple of `MASTERS_NUMEL`."""
        if self._ties is None or self._ties[0] is not each:
            self._ties = each, {0: 0}
        known = self._ties[1]
        for at in range(max(known), numel, MASTERS_NUMEL):
            low = self._elements(each, MASTER, at, at + MASTERS_NUMEL, torch.int16)
            known[at + MASTERS_NUMEL] = known[at] + _count_ties(low)
        return known[numel]

    def _packed_ties(self, each: _SavedSlice, start: int, stop: int) -> torch.Tensor:
        """Bits `start` to `stop` of a slice's ties, packed from the first byte on."""
        if start == stop:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        ties = self._checkpoint.table(each.file or "").get("ties")
        if ties is None or stop > each.segment.tie_bits:
            raise self._incomplete(each.segment.parameter)
        first = each.ties_at_bytes + start // 8
        packed = self._checkpoint.elements(ties, first, each.ties_at_bytes + (stop + 7) // 8, torch.uint8)
        if start % 8 == 0 and stop == each.segment.tie_bits:
            return packed
        shifts = torch.arange(8, dtype=torch.uint8, device="cpu")
        bits = ((packed[:, None] >> shifts) & 1).view(-1)[start % 8 :][: stop - start]
        whole = torch.zeros(-(-bits.numel() // 8) * 8, dtype=torch.uint8, device="cpu")
        whole[: bits.numel()] = bits
        return (whole.view(-1, 8) << shifts).sum(1, dtype=torch.uint8)

    def _bits(self, position: int, ranges: Sequence[tuple[int, int]]) -> Iterator[torch.Tensor]:
        """The values of a parameter: those that were given, or those of the checkpoint. See `Bits`."""
        if self._given_bits is not None and (given := self._given_bits(position, ranges)) is not None:
            return given
        if self._reader_of_bits is None or self._reader_of_bits[0] != position:
            self._reader_of_bits = position, self._parameter_reader(position)
        read = self._reader_of_bits[1]
        return (read(start, stop) for start, stop in ranges)

    def _parameter_reader(self, position: int) -> Read:
        model, saved = self._checkpoint.index.model, self.saved.parameters[position]
        name = model.tied.get(saved.name, saved.name)
        if name not in model.tensors:
            raise SwapError(
                f"{self._name(position)}: its master weights go with a parameter that is not in the model's "
                "state dict; export without them by drop_masters (--drop-masters)"
            )
        there = model.tensors[name]
        self._checkpoint.verify(there.file)
        if (there.dtype, there.shape) != (saved.dtype, saved.shape):
            raise self._incomplete(position)
        return model_stream(self._checkpoint, name).in_order_of(saved.stride)


def _count_ties(low: torch.Tensor) -> int:
    return int((low == -0x8000).sum())
