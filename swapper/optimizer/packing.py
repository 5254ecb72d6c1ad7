"""Stores records with float32 state in fewer bytes, to the bit.

[Note: packed records] Whoever has taken a record finds it as if nothing were packed. `BucketRecords.put` packs it in
its buffer before it is written, and `take` unpacks it there when it has come: see [Note: packed blocks] in
`csrc/packing.h`. What is packed lies behind all else in the record but its ties, which move with it. Two numbers in the
record say whether its buffer is packed, so that one that is given back unchanged, and taken again before it is read
again, is not unpacked twice. One is a checksum of the tables: a wrong bit in those would be 256 wrong values, where a
wrong bit of a value is one, as in a record that is not packed. The store knows how long each record is, as of records
with ties. In a checkpoint the index has the length of each file, and the header of each file the places of its tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from swapper.io import _native
from swapper.io.host_memory import bytes_of
from swapper.storage.layout import Entry, RecordLayout, plan_record

__all__ = [
    "CHUNK_NUMEL",
    "ENTRY_BYTES",
    "RecordPacking",
    "blocks_name",
    "packed_blocks_of",
    "packed_bytes",
    "plan_packed_record",
    "unpack_values",
]

ENTRY_BYTES = 2
"""Of each block of 256 elements, in the table of its tensor."""

CHUNK_NUMEL = 256 * 256
"""Elements whose data begins at a place that can be found: of 256 blocks."""

_BLOCK_NUMEL = 256
_END = "packed_end"
_END_BYTES = 16
_NOT_PACKED = b"\xff" * _END_BYTES


def packed_blocks_of(numel: int) -> int:
    """The number of blocks of a tensor of so many elements."""
    return -(-numel // _BLOCK_NUMEL)


def blocks_name(name: str) -> str:
    """The name in a record of the table of the tensor `name`. No other tensor can have it."""
    return f"blocks.{name}"


def plan_packed_record(
    entries: Sequence[Entry], packed: Sequence[Entry], tail_bytes_max: int
) -> tuple[RecordLayout, RecordPacking | None]:
    """As `plan_record`, of `entries` and, behind them, of `packed`, those that are packed: float32.

    Returns:
        The layout in memory, and how it is packed; None if nothing is.
    """
    if not packed:
        return plan_record(entries, tail_bytes_max), None
    tables = [Entry(blocks_name(e.name), "U8", (ENTRY_BYTES * packed_blocks_of(e.length_bytes // 4),)) for e in packed]
    layout = plan_record([Entry(_END, "U64", (2,)), *tables, *entries, *packed], tail_bytes_max)
    return layout, RecordPacking(layout, len(packed))


class RecordPacking:
    """Packs and unpacks the records of one layout, in their buffers.

    Buffers are uint8, 1-D, on the CPU, of the length of the layout or more. Each call uses up to
    `torch.get_num_threads()` threads and releases the GIL; what is written does not depend on their number.

    Args:
        layout: in memory.
        count: how many of its last entries are packed.
    """

    def __init__(self, layout: RecordLayout, count: int) -> None:
        self._layout = layout
        self._count = count
        offsets = dict(zip((entry.name for entry in layout.entries), layout.offsets_bytes, strict=True))
        self._end = offsets[_END]
        self._pieces = [
            (offsets[entry.name], entry.length_bytes // 4, offsets[blocks_name(entry.name)])
            for entry in layout.entries[-count:]
        ]

    def begin(self, data: Tensor) -> None:
        """Note that a buffer of undefined content is not packed."""
        data[self._end : self._end + _END_BYTES].fill_(0xFF)

    def pack(self, data: Tensor, tail_bytes: int) -> int:
        """Pack a record, whose tail has `tail_bytes`, and write its header. Returns its length, a multiple of 4096."""
        offsets = _native.pack_record(*self._arguments(data, tail_bytes), torch.get_num_threads())
        return self._write_header(data, tail_bytes, offsets)

    def unpack(self, data: Tensor, tail_bytes: int) -> None:
        """Unpack a record, unless it is not packed.

        Raises:
            ValueError: it is not one that was packed, with such a tail. Nothing has changed.
        """
        if bytes_of(data[self._end : self._end + _END_BYTES]) != _NOT_PACKED:
            _native.unpack_record(*self._arguments(data, tail_bytes), torch.get_num_threads())

    def length_bytes(self, data: Tensor, tail_bytes: int) -> int:
        """Length of the packed record that a buffer begins with; 0 if it is none, or has not the header it should."""
        try:
            layout = self._packed_layout(_native.packed_offsets(*self._arguments(data, tail_bytes)))
        except ValueError:
            return 0
        header = layout.header(tail_bytes)
        return layout.used_bytes(tail_bytes) if bytes_of(data[: len(header)]) == header else 0

    def _write_header(self, data: Tensor, tail_bytes: int, offsets: Sequence[int]) -> int:
        layout = self._packed_layout(offsets)
        header = layout.header(tail_bytes)
        data[: len(header)].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        return layout.used_bytes(tail_bytes)

    def _packed_layout(self, offsets: Sequence[int]) -> RecordLayout:
        """The layout of a file whose packed tensors, tail, and its end are at `offsets`."""
        layout, count = self._layout, self._count
        packed = (
            dataclasses.replace(entry, dtype="U8", shape=(stop - start,))
            for entry, start, stop in zip(layout.entries[-count:], offsets[:count], offsets[1 : count + 1], strict=True)
        )
        return dataclasses.replace(
            layout,
            entries=(*layout.entries[:-count], *packed),
            offsets_bytes=(*layout.offsets_bytes[:-count], *offsets[:count]),
            tail_offset_bytes=offsets[count],
        )

    def _arguments(self, data: Tensor, tail_bytes: int) -> tuple[int, int, int, list[tuple[int, int, int]], int, int]:
        assert data.is_cpu and data.numel() >= self._layout.length_bytes
        length_bytes = self._layout.length_bytes
        return data.data_ptr(), length_bytes, self._end, self._pieces, self._layout.tail_offset_bytes, tail_bytes


def packed_bytes(table: Tensor, numel: int) -> int:
    """The bytes that the first `numel` elements of a tensor take when they are packed.

    Args:
        table: of the tensor, or the beginning of it: uint8, 1-D, contiguous, on the CPU.
        numel: all of the tensor's, or a multiple of `CHUNK_NUMEL`.

    Raises:
        ValueError: the table is too short, or is none.
    """
    _require_table(table, numel)
    return _native.packed_bytes(table.data_ptr(), numel)


def unpack_values(table: Tensor, data: Tensor, values: Tensor) -> None:
    """Write what is packed in `data`, from the first element of a chunk on, to `values`.

    Args:
        table: the entries of its blocks: uint8. Like the others: 1-D, contiguous, on the CPU.
        data: uint8, as many bytes as the table says.
        values: float32, the elements of whole chunks, or all to the end of the tensor; written.

    Raises:
        ValueError: the table is too short, or is none, or `data` has another length.
    """
    _require_table(table, values.numel())
    assert data.dtype is torch.uint8 and values.dtype is torch.float32 and values.is_contiguous()
    addresses = table.data_ptr(), data.data_ptr(), data.numel(), values.data_ptr()
    _native.unpack_values(*addresses, values.numel(), torch.get_num_threads())


def _require_table(table: Tensor, numel: int) -> None:
    if table.dtype is not torch.uint8 or table.numel() < ENTRY_BYTES * packed_blocks_of(numel):
        raise ValueError(f"a table of {table.dtype} with {table.numel()} elements is none of {numel} packed values")
