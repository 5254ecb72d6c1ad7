"""Where things lie: alignment, the segments that an elementwise optimizer steps on, records, and shares of drives.

Pure arithmetic on counts of elements and bytes; knows neither torch nor files.

[Note: cuts that keep the bits]
PyTorch computes most elements of an elementwise kernel with vector instructions and the rest, the *scalar
tail*, one by one; the two may round differently. Stepping a parameter in segments is bit-equal to stepping it
whole if, and only if, each element is in a vector in both or in a tail in both.

A kernel that runs over `n` contiguous elements takes vectors in steps of 16, 32 or 64 elements (two registers;
by dtype and instruction set) and leaves `n % step` for the tail. So a cut at a multiple of 64 elements from the
start moves no element from one side to the other.

With several threads the kernel runs over *chunks*. `at::parallel_for(0, n, grain)` with `grain` = 32768 makes
one chunk if `n <= grain`; else `k = min(threads, ceil(n / grain))` chunks of `ceil(n / k)` elements, the last one
shorter (ATen/Parallel-inl.h, ATen/ParallelOpenMP.h). A chunk's length is any number, so each chunk has a tail.
Worked: 100001 elements, 2 threads: chunks [0, 50001) and [50001, 100001). With 64-element vector steps the tails
are [49984, 50001) and [99985, 100001). A cut at 50048 would put 49984..50000 in vectors.

Which rule is needed (measured by `tests/test_exactness_of_cuts.py`):

- fp32 and fp64, not fused: the first. Their tails round as their vectors do; only NaNs may get other bits in a
  tail (in the maxima of amsgrad and Adamax), and with the second rule not even those.
- `fused=True`, any dtype: the first. These kernels split among threads at multiples of 64 bytes, whatever the grain,
  so that only the parameter's own end is a tail; it rounds differently even in fp32.
- bf16 and fp16, not fused: both. With one thread, or at most 32768 elements, there is one chunk.

For the second rule `low_precision=True` cuts so that

- each chunk of the whole parameter starts a segment, except inside a segment that PyTorch splits at the same places;
- other cuts are at multiples of 64 elements from the start of their chunk;
- a segment of more than 32768 elements, which is itself split among threads, is split at such places too.

The parameter, its gradient and its state must be contiguous, or dense with the same strides and cut in the order of
memory; then any alignment of any of them will do. A gradient of other strides takes other loops: step it whole.
The second rule holds for the thread count at the time of the step: after `torch.set_num_threads`, plan the cuts anew.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = [
    "ALIGNMENT_BYTES",
    "CUT_NUMEL",
    "PAGE_BYTES",
    "Entry",
    "RecordLayout",
    "Share",
    "format_bytes",
    "keeps_bits",
    "plan_record",
    "plan_whole_tensors",
    "round_up",
    "segment_cuts",
    "share_out",
]

ALIGNMENT_BYTES = 64
"""Every tensor in a pool buffer starts at a multiple of this, as torch's own allocator does it."""

CUT_NUMEL = 64
"""Segments are cut at multiples of this: the widest step of torch's vector loops (two registers of 32 bf16)."""

_GRAIN_NUMEL = 32768
"""`at::internal::GRAIN_SIZE`: kernels over at most this many elements are not split among threads."""


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not less than `value`.

    Args:
        value: >= 0.
        multiple: >= 1; need not be a power of two.
    """
    return -(-value // multiple) * multiple


def segment_cuts(numel: int, numel_max: int, *, low_precision: bool, threads: int) -> tuple[tuple[int, int], ...]:
    """Cut a flattened parameter into the segments on which an elementwise optimizer steps with the same bits.

    See [Note: cuts that keep the bits]. Each segment's state is to start at a multiple of `ALIGNMENT_BYTES` in a
    buffer of its own; the parameter and its gradient may lie anywhere, but contiguous.

    Args:
        numel: elements of the parameter, >= 0.
        numel_max: most elements of a segment, >= `CUT_NUMEL`. At `low_precision` use 32768 or more: with less,
            each segment is stepped by one thread.
        low_precision: the parameter is stepped in fp16 or bf16, by kernels that are not fused. False for fp32 and
            fp64, for fp32 masters (True would be exact there too, with more segments), and with `fused=True`,
            whatever the dtype: with fused kernels the cuts for True would be wrong.
        threads: `torch.get_num_threads()` in the thread that will call `step`, >= 1; of no effect unless
            `low_precision`.

    Returns:
        `(start, stop)` of each segment, in order, without holes or overlap, none empty, none longer than
        `numel_max`; `()` if `numel` is 0; one segment if `numel <= numel_max`.

        Without `low_precision` all starts are multiples of `CUT_NUMEL`, lengths differ by at most 2 * `CUT_NUMEL`,
        and there are as few as `numel_max` rounded down to a multiple of `CUT_NUMEL` allows.

        With it, `keeps_bits` holds. Where chunks are ragged and longer than 32768, each takes a segment or more of
        its own, often two, the last of any length from 1 to 32768: at worst about 2 * `threads` segments more than
        without. Where chunks are multiples of 64 (most layers, on a power of two of threads) about one more.

    Raises:
        ValueError: `numel_max` is less than `CUT_NUMEL`, `numel` is negative, or `threads` is less than 1.
    """
    if numel < 0 or threads < 1:
        raise ValueError(f"numel is {numel} and must be >= 0; threads is {threads} and must be >= 1")
    if numel_max < CUT_NUMEL:
        raise ValueError(f"numel_max is {numel_max}: a segment needs room for {CUT_NUMEL} elements")
    if numel <= numel_max:
        return ((0, numel),) if numel else ()
    if not low_precision or _pieces(numel, threads) == 1:
        return _even_cuts(0, numel, numel_max)
    return _cuts_of_chunks(numel, numel_max, threads)


def keeps_bits(numel: int, cuts: tuple[tuple[int, int], ...], *, threads: int) -> bool:
    """Whether stepping on `cuts` puts the same elements into scalar tails as stepping whole, at any vector width.

    This is the rule for `low_precision`, as a check: it knows nothing of how cuts are made. A False says that
    bits may differ on some machine, not that they do on this one.

    Args:
        numel: elements of the parameter.
        cuts: `(start, stop)` of each segment, tiling `[0, numel)`.
        threads: as in `segment_cuts`.
    """
    return all(_segment_keeps_bits(start, stop, numel, threads) for start, stop in cuts)


def _pieces(numel: int, threads: int) -> int:
    """Into how many chunks `at::parallel_for` splits `numel` >= 1 elements."""
    return min(threads, -(-numel // _GRAIN_NUMEL))


def _chunk_numel(numel: int, threads: int) -> int:
    """Elements of each chunk but the last."""
    return -(-numel // _pieces(numel, threads))


def _outer_chunk_numel(numel: int, threads: int) -> int:
    """Distance of the chunks' starts that cuts must respect: `numel` where no chunk but the last has a tail."""
    chunk = _chunk_numel(numel, threads)
    return numel if chunk % CUT_NUMEL == 0 else chunk


def _segment_keeps_bits(start: int, stop: int, numel: int, threads: int) -> bool:
    outer = _outer_chunk_numel(numel, threads)
    inner = _chunk_numel(stop - start, threads)
    for piece_start in range(start, stop, inner):
        piece_stop = min(stop, piece_start + inner)
        chunk_start = piece_start // outer * outer
        chunk_stop = min(numel, chunk_start + outer)
        starts_on_a_vector = (piece_start - chunk_start) % CUT_NUMEL == 0
        ends_on_a_vector = piece_stop < chunk_stop and (piece_stop - chunk_start) % CUT_NUMEL == 0
        if not (starts_on_a_vector and (ends_on_a_vector or piece_stop == chunk_stop)):
            return False
    return True


def _even_cuts(start: int, stop: int, numel_max: int) -> tuple[tuple[int, int], ...]:
    """Fewest segments of at most `numel_max`, cut at multiples of `CUT_NUMEL` from `start`, of about one length."""
    units = -(-(stop - start) // CUT_NUMEL)
    count = -(-units // (numel_max // CUT_NUMEL))
    edges = [start + units * i // count * CUT_NUMEL for i in range(count)] + [stop]
    return tuple(itertools.pairwise(edges))


def _cuts_of_chunks(numel: int, numel_max: int, threads: int) -> tuple[tuple[int, int], ...]:
    """`segment_cuts` where the whole parameter is stepped in more than one chunk and does not fit one segment."""
    chunk = _outer_chunk_numel(numel, threads)
    count = -(-numel // chunk)
    # A run of whole chunks, none above the grain, is split where its chunks meet, so it can be one segment.
    chunks_max = max(1, numel_max // chunk) if chunk <= _GRAIN_NUMEL else 1
    runs = -(-count // chunks_max)
    edges = [chunk * (count * i // runs) for i in range(runs)] + [numel]
    cuts: list[tuple[int, int]] = []
    for start, stop in itertools.pairwise(edges):
        last = (count - 1) * chunk
        if stop - start <= numel_max and _segment_keeps_bits(start, stop, numel, threads):
            cuts.append((start, stop))
        elif start < last < stop:
            # The last chunk is so much shorter than the others that this run would be split elsewhere.
            cuts += [(start, last), (last, stop)]
        else:
            cuts += _cuts_in_chunk(start, stop, numel_max, threads)
    return tuple(cuts)


def _cuts_in_chunk(start: int, stop: int, numel_max: int, threads: int) -> tuple[tuple[int, int], ...]:
    """Cuts of one chunk: segments that are split without a tail, then one that ends as the chunk does.

    The last is not longer than the grain, so not split, unless a longer one would be split without a tail too.
    """
    body_max = _longest_without_tail(numel_max, threads)
    edges: list[int] = []
    for tail_max in (numel_max, min(numel_max, _GRAIN_NUMEL)):
        edges = [start]
        while (left := stop - edges[-1]) > tail_max:
            bodies = -(-(left - tail_max) // body_max)
            # Even lengths, unless the last would then be longer than `tail_max`.
            aim = min(body_max, max(-(-left // (bodies + 1)), -(-(left - tail_max) // bodies)))
            length = round_up(aim, CUT_NUMEL * _pieces(aim, threads))
            if length >= left:  # more than 512 threads: the multiple is longer than a grain
                length = _longest_without_tail(left - 1, threads)
            edges.append(edges[-1] + length)
        if _pieces(left, threads) == 1 or _chunk_numel(left, threads) % CUT_NUMEL == 0:
            break
    return tuple(itertools.pairwise([*edges, stop]))


def _longest_without_tail(numel_max: int, threads: int) -> int:
    """Largest length <= `numel_max` whose chunks all are multiples of `CUT_NUMEL`."""
    pieces = _pieces(numel_max, threads)
    length = numel_max // (CUT_NUMEL * pieces) * (CUT_NUMEL * pieces)
    # Rounding down may cross into the range of one piece less; that range's upper end is a multiple of what it needs.
    return length if _pieces(length, threads) == pieces else (pieces - 1) * _GRAIN_NUMEL


# --- Records -----------------------------------------------------------------------------------------------------

PAGE_BYTES = 4096
"""Files and leases are multiples of this, so that every transfer is aligned for O_DIRECT."""

_DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One tensor of a record.

    Attributes:
        name: unique in the record.
        dtype: the safetensors name of the element type: "F32", "BF16", "U8", ...
        shape: in elements.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def length_bytes(self) -> int:
        """Bytes of payload, without padding."""
        return math.prod(self.shape) * _DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class RecordLayout:
    """Where everything lies in a record, in the pool buffer and in the file alike.

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
        fixed, pads, cursor = self._fixed_table
        table: dict[str, object] = {}
        if tail_bytes:
            cursor = self.tail_offset_bytes + tail_bytes
            self._put(table, "ties", "U8", (tail_bytes,), self.tail_offset_bytes, cursor)
        self._pad(table, pads, cursor, self.exact_bytes(tail_bytes))
        rest = _json_of(table)
        text = b"{" + fixed + (b"," if fixed and rest else b"") + rest + b"}"
        room = self.payload_bytes - 8
        assert len(text) <= room, "the header outgrew the room planned for it"
        return room.to_bytes(8, "little") + text.ljust(room)

    @functools.cached_property
    def _fixed_table(self) -> tuple[bytes, int, int]:
        """What is the same in every header, as JSON without its braces; the pads in it; and where they end."""
        table: dict[str, object] = {} if self.padded else {"__metadata__": {"format": "pt"}}
        cursor = self.payload_bytes
        pads = 0
        for entry, offset in zip(self.entries, self.offsets_bytes, strict=True):
            pads += self._pad(table, pads, cursor, offset)
            cursor = offset + entry.length_bytes
            self._put(table, entry.name, entry.dtype, entry.shape, offset, cursor)
        pads += self._pad(table, pads, cursor, self.tail_offset_bytes)
        return _json_of(table), pads, max(cursor, self.tail_offset_bytes)

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


def _json_of(table: dict[str, object]) -> bytes:
    return json.dumps(table, separators=(",", ":")).encode()[1:-1]


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
    """Where the payload starts."""
    # The header's size depends on the offsets it prints, and they on its size. So each entry is given room for the
    # longest: its two offsets and the two of the pad before it, 20 digits each, and the words come to less than 200.
    room = 512  # braces, the metadata, the last pads, the tail
    for entry in entries:
        room += len(json.dumps(entry.name)) + sum(len(str(size)) + 1 for size in entry.shape) + 200
    return round_up(room, PAGE_BYTES)


# --- Several drives ------------------------------------------------------------------------------------------------


class Share(NamedTuple):
    """The part of a record that is on one drive: bytes `start_bytes` to `stop_bytes` of the record.

    Attributes:
        drive: its place in the list of drives.
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


def format_bytes(count: int) -> str:
    """`count` bytes for people: "1.5 GiB"."""
    size = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{count} bytes" if unit == "bytes" else f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
