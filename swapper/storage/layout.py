"""The format of a record, and the shares of it that several drives get. Pure arithmetic on bytes."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from swapper.sizes import ALIGNMENT_BYTES, PAGE_BYTES, round_up
from swapper.tensors.dtypes import DTYPES

__all__ = ["Entry", "RecordLayout", "Share", "plan_record", "plan_whole_tensors", "share_out"]


@dataclass(frozen=True)
class Entry:
    """One tensor of a record.

    Attributes:
        name: unique in the record.
        dtype: the safetensors name of the element type: "F32", "BF16", "U8", ...
        shape: in elements.
        encoding: what the header says of it under its name in `__metadata__`; "" is nothing.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    encoding: str = ""

    @property
    def length_bytes(self) -> int:
        """Bytes of payload, without padding."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class RecordLayout:
    """The layout of a record, in the pool buffer and in the file alike.

    Attributes:
        entries: the tensors of fixed size, in order.
        offsets_bytes: where each starts, from the start of the record; multiples of 64.
        tail_offset_bytes: where the tail of variable length (one U8 tensor named "ties") starts.
        length_bytes: the longest the record can be, a multiple of 4096; 0 for a record of nothing.
        payload_bytes: where the payload starts; a multiple of 4096.
        padded: `__pad__` tensors fill what lies between the others and behind them. False: there is none, as in
            `plan_whole_tensors`.
    """

    entries: tuple[Entry, ...]
    offsets_bytes: tuple[int, ...]
    payload_bytes: int
    tail_offset_bytes: int
    length_bytes: int
    padded: bool = True

    def used_bytes(self, tail_bytes: int) -> int:
        """Length of the record, a multiple of 4096, when its tail holds `tail_bytes`."""
        return round_up(self.tail_offset_bytes + tail_bytes, PAGE_BYTES)

    def exact_bytes(self, tail_bytes: int = 0) -> int:
        """Length of the record's published file: `used_bytes`, less what follows the last tensor if not `padded`."""
        return self.used_bytes(tail_bytes) if self.padded else self.tail_offset_bytes

    def header(self, tail_bytes: int) -> bytes:
        """The first `payload_bytes` bytes of the file, for a tail of `tail_bytes`.

        With it, the first `exact_bytes(tail_bytes)` bytes of the record are a valid safetensors file. One that is not
        `padded` says that it is PyTorch's, without which Hugging Face's loaders refuse it.
        """
        start = self.payload_bytes
        return _header_of(
            *self._fixed_table, start, self.tail_offset_bytes - start, tail_bytes, self.exact_bytes(tail_bytes) - start
        )

    @functools.cached_property
    def _fixed_table(self) -> tuple[bytes, int, int]:
        """The part that all headers share, as JSON without braces; the number of its pads; its end in the payload."""
        metadata = {} if self.padded else {"format": "pt"}
        metadata |= {entry.name: entry.encoding for entry in self.entries if entry.encoding}
        table: dict[str, object] = {"__metadata__": metadata} if metadata else {}
        cursor = self.payload_bytes
        pads = 0
        for entry, offset in zip(self.entries, self.offsets_bytes, strict=True):
            pads += self._pad(table, pads, cursor, offset)
            cursor = offset + entry.length_bytes
            self._put(table, entry.name, entry.dtype, entry.shape, offset, cursor)
        pads += self._pad(table, pads, cursor, self.tail_offset_bytes)
        text = json.dumps(table, separators=(",", ":")).encode()[1:-1]
        return text, pads, max(cursor, self.tail_offset_bytes) - self.payload_bytes

    def _put(
        self, table: dict[str, object], name: str, dtype: str, shape: tuple[int, ...], start: int, stop: int
    ) -> None:
        offsets = [start - self.payload_bytes, stop - self.payload_bytes]
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}

    def _pad(self, table: dict[str, object], number: int, start: int, stop: int) -> bool:
        """Fill from `start` to `stop` if that is anything. Returns whether it is."""
        if stop > start:
            self._put(table, f"__pad__{number}", "U8", (stop - start,), start, stop)
        return stop > start


@functools.lru_cache(maxsize=64)  # Most records of a step are as long as their neighbours.
def _header_of(
    fixed: bytes, pads: int, cursor: int, payload_bytes: int, tail_offset: int, tail_bytes: int, stop: int
) -> bytes:
    """See `RecordLayout.header`. Offsets are from the start of the payload."""
    parts = [fixed] if fixed else []
    if tail_bytes:
        cursor = tail_offset + tail_bytes
        parts.append(_bytes_entry("ties", tail_offset, cursor))
    if stop > cursor:
        parts.append(_bytes_entry(f"__pad__{pads}", cursor, stop))
    text = b"{" + b",".join(parts) + b"}"
    room = payload_bytes - 8
    assert len(text) <= room, "the header outgrew the room planned for it"
    return room.to_bytes(8, "little") + text.ljust(room)


def _bytes_entry(name: str, start: int, stop: int) -> bytes:
    """As `RecordLayout._put` with "U8", as JSON. Each put of a record writes two, for which `json` is slow."""
    return f'"{name}":{{"dtype":"U8","shape":[{stop - start}],"data_offsets":[{start},{stop}]}}'.encode()


def plan_record(entries: Sequence[Entry], tail_bytes_max: int = 0) -> RecordLayout:
    """Lay out a record of `entries` followed by a tail of at most `tail_bytes_max` bytes.

    The file is a safetensors file (https://github.com/huggingface/safetensors, "Format"): 8 bytes with the header's
    length, little-endian; the header, JSON padded with spaces so that the payload starts at a multiple of 4096;
    the tensors one after another without holes, which the format forbids: `__pad__N` tensors fill them, and what
    is left of the last 4096 bytes.
    """
    if not entries and not tail_bytes_max:
        return RecordLayout((), (), 0, 0, 0)
    offsets: list[int] = []
    cursor = 0
    for entry in entries:
        cursor = round_up(cursor, ALIGNMENT_BYTES)
        offsets.append(cursor)
        cursor += entry.length_bytes
    tail = round_up(cursor, ALIGNMENT_BYTES)
    payload = _payload_bytes(entries)
    return RecordLayout(
        entries=tuple(entries),
        offsets_bytes=tuple(payload + offset for offset in offsets),
        payload_bytes=payload,
        tail_offset_bytes=payload + tail,
        length_bytes=round_up(payload + tail + tail_bytes_max, PAGE_BYTES),
    )


def plan_whole_tensors(entries: Sequence[Entry]) -> RecordLayout:
    """Lay out a record of `entries` one after another, without padding between them and without a tail.

    Those that are to lie at multiples of 64 bytes come first, and their sizes are multiples of it.
    """
    payload = _payload_bytes(entries)
    offsets: list[int] = []
    cursor = payload
    for entry in entries:
        offsets.append(cursor)
        cursor += entry.length_bytes
    return RecordLayout(tuple(entries), tuple(offsets), payload, cursor, round_up(cursor, PAGE_BYTES), padded=False)


def _payload_bytes(entries: Sequence[Entry]) -> int:
    # The header's size depends on the offsets it prints, and they on its size. So each entry is given room for the
    # longest: its two offsets and the two of the pad before it, 20 digits each, and the words come to less than 200.
    room = 512  # braces, the metadata, the last pads, the tail
    for entry in entries:
        room += len(json.dumps(entry.name)) + sum(len(str(size)) + 1 for size in entry.shape) + 200
        room += len(json.dumps(entry.name)) + len(json.dumps(entry.encoding)) + 2 if entry.encoding else 0
    return round_up(room, PAGE_BYTES)


# --- Several drives ------------------------------------------------------------------------------------------------


class Share(NamedTuple):
    """The part of a record that is on one drive: bytes `start_bytes` to `stop_bytes` of the record.

    Attributes:
        drive: its index in the list of drives.
    """

    drive: int
    start_bytes: int
    stop_bytes: int

    @property
    def length_bytes(self) -> int:
        """Bytes of the record that are there."""
        return self.stop_bytes - self.start_bytes


def share_out(
    length_bytes: int, held_bytes: Sequence[int], speeds: Sequence[int], unit_bytes: int
) -> tuple[Share, ...]:
    """Split a record among drives so that each comes to hold bytes in proportion to its speed.

    The record is handed out in units. Each goes to the drive that lacks most of what it should hold when all of the
    record is there, which is its part of all bytes; of several the first. So a record of one unit goes whole to the
    drive that lacks most, a long one to all drives, and what one record rounds away the next makes up for: each drive
    holds its part of the total, give or take a unit for each other drive. Worked: speeds 3 and 1, records of 5 units.
    Of the first the drives should hold 3.75 and 1.25, and get 4 and 1; of the second the same, of the third 3 and 2.

    Args:
        length_bytes: of the record; 0 is a share of nothing, on the drive that lacks most.
        held_bytes: what each drive holds already.
        speeds: of each drive, positive, in any unit.
        unit_bytes: shares start at multiples of it.

    Returns:
        Shares that follow one another and make up the record, at most one for each drive. Only the last may be no
        multiple of the unit long.
    """
    total_bytes, total_speed = sum(held_bytes) + length_bytes, sum(speeds)
    # Times the sum of the speeds, which keeps it whole.
    lacking = [total_bytes * speed - held * total_speed for held, speed in zip(held_bytes, speeds, strict=True)]

    def neediest(take_bytes: int) -> int:
        drive = max(range(len(lacking)), key=lacking.__getitem__)
        lacking[drive] -= take_bytes * total_speed
        return drive

    units = max(1, -(-length_bytes // unit_bytes))
    last_bytes = length_bytes - (units - 1) * unit_bytes
    last_drive = neediest(last_bytes)
    sizes = [0] * len(speeds)
    for _ in range(units - 1):
        sizes[neediest(unit_bytes)] += unit_bytes
    sizes[last_drive] += last_bytes
    shares: list[Share] = []
    start = 0
    for drive in [*(drive for drive in range(len(speeds)) if drive != last_drive), last_drive]:
        if sizes[drive] or drive == last_drive:
            shares.append(Share(drive, start, start + sizes[drive]))
            start += sizes[drive]
    return tuple(shares)
