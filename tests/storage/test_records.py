"""The file format: a record is a valid safetensors file once it is cut to its exact length."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from swapper.sizes import ALIGNMENT_BYTES, PAGE_BYTES
from swapper.storage.layout import Entry, RecordLayout, plan_record

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).filter(
    lambda name: name != "ties" and not name.startswith("__")
)


def shapes(largest: int, dims: int = 3) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(0, largest), max_size=dims).map(tuple)


def entries_of(shape: st.SearchStrategy[tuple[int, ...]], count: int = 8) -> st.SearchStrategy[list[Entry]]:
    entry = st.builds(Entry, names, st.sampled_from(sorted(DTYPES)), shape)
    return st.lists(entry, max_size=count, unique_by=lambda entry: entry.name)


def random_tensor(entry: Entry, seed: int) -> torch.Tensor:
    bits = torch.randint(0, 256, (entry.length_bytes,), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    if entry.dtype == "BOOL":
        bits %= 2
    return bits.view(DTYPES[entry.dtype]).view(entry.shape)


def bits_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def check(layout: RecordLayout, tail_bytes: int, path: Path) -> None:
    """Write a record as swapper does, publish it, and read it with the library that owns the format."""
    image = bytearray(b"\xee" * layout.length_bytes)
    header = layout.header(tail_bytes)
    assert len(header) == layout.payload_bytes
    image[: len(header)] = header
    tensors = {entry.name: random_tensor(entry, i) for i, entry in enumerate(layout.entries)}
    for entry, offset in zip(layout.entries, layout.offsets_bytes, strict=True):
        image[offset : offset + entry.length_bytes] = bits_of(tensors[entry.name])
    if tail_bytes:
        tensors["ties"] = random_tensor(Entry("ties", "U8", (tail_bytes,)), -1 % 1000)
        image[layout.tail_offset_bytes : layout.tail_offset_bytes + tail_bytes] = bits_of(tensors["ties"])
    path.write_bytes(image[: layout.exact_bytes(tail_bytes)])
    with safe_open(path, framework="pt") as file:
        keys = set(file.keys())
        assert {key for key in keys if not key.startswith("__pad__")} == set(tensors)
        for name, tensor in tensors.items():
            found = file.get_tensor(name)
            assert found.dtype == tensor.dtype
            assert found.shape == tensor.shape
            assert bits_of(found) == bits_of(tensor)
        pads = sorted(keys - set(tensors), key=lambda key: int(key.removeprefix("__pad__")))
        assert layout.padded or not pads
        assert file.metadata() == (None if layout.padded else {"format": "pt"})
        for key in pads:
            assert file.get_tensor(key).dtype == torch.uint8
            assert file.get_tensor(key).numel() < (PAGE_BYTES if key == pads[-1] else ALIGNMENT_BYTES)
    if layout.padded:
        assert path.stat().st_size % PAGE_BYTES == 0


def check_places(layout: RecordLayout, tail_bytes_max: int) -> None:
    assert layout.payload_bytes % PAGE_BYTES == 0
    assert layout.length_bytes % PAGE_BYTES == 0
    assert layout.tail_offset_bytes % ALIGNMENT_BYTES == 0
    cursor = layout.payload_bytes
    for entry, offset in zip(layout.entries, layout.offsets_bytes, strict=True):
        assert offset % ALIGNMENT_BYTES == 0
        assert cursor <= offset < cursor + ALIGNMENT_BYTES, "overlap, or more padding than alignment asks for"
        cursor = offset + entry.length_bytes
    assert cursor <= layout.tail_offset_bytes < cursor + ALIGNMENT_BYTES
    assert layout.length_bytes - PAGE_BYTES < layout.tail_offset_bytes + tail_bytes_max <= layout.length_bytes
    assert layout.used_bytes(tail_bytes_max) == layout.length_bytes
    assert layout.used_bytes(0) <= layout.length_bytes


@given(entries_of(shapes(300)), st.integers(0, 10_000))
def test_tensors_are_aligned_and_do_not_overlap(entries: list[Entry], tail_bytes_max: int) -> None:
    layout = plan_record(entries, tail_bytes_max)
    if entries or tail_bytes_max:
        check_places(layout, tail_bytes_max)
        assert layout.payload_bytes > 0
    else:
        assert layout == RecordLayout((), (), 0, 0, 0)


@settings(deadline=None, max_examples=100)
@given(entries=entries_of(shapes(20)), tail=st.integers(0, 500), data=st.data())
def test_a_published_record_opens_with_safetensors(
    tmp_path_factory: pytest.TempPathFactory, entries: list[Entry], tail: int, data: st.DataObject
) -> None:
    layout = plan_record(entries, tail)
    if layout.length_bytes:
        check(layout, data.draw(st.integers(0, tail)), tmp_path_factory.mktemp("record") / "record.safetensors")


@pytest.mark.parametrize("tail_bytes", [0, 1, 63, 64, 65])
def test_pads_and_tail(tmp_path: Path, tail_bytes: int) -> None:
    layout = plan_record(
        [
            Entry("a", "U8", (1,)),
            Entry("none", "F32", (0,)),
            Entry("also none", "BF16", (3, 0, 2)),
            Entry("scalar", "F64", ()),
            Entry("b", "BF16", (7, 3)),
            Entry("exact", "F32", (16,)),
            Entry("last", "U8", (63,)),
        ],
        65,
    )
    check(layout, tail_bytes, tmp_path / "record.safetensors")
    table = json.loads(layout.header(tail_bytes)[8:])
    assert sorted(name for name in table if name.startswith("__pad__")) == [f"__pad__{i}" for i in range(5)]


def test_only_empty_tensors(tmp_path: Path) -> None:
    layout = plan_record([Entry("a", "F32", (0,)), Entry("b", "F32", (0, 5))])
    assert layout.length_bytes == layout.payload_bytes == PAGE_BYTES
    check(layout, 0, tmp_path / "record.safetensors")


def test_only_a_tail(tmp_path: Path) -> None:
    layout = plan_record([], 5000)
    check(layout, 4999, tmp_path / "record.safetensors")
    assert layout.used_bytes(0) < layout.used_bytes(4999) == layout.length_bytes


def test_a_thousand_tensors(tmp_path: Path) -> None:
    entries = [Entry(f"{i}.exp_avg_sq", "BF16", (i % 70, 3)) for i in range(1000)]
    layout = plan_record(entries, 999)
    check_places(layout, 999)
    check(layout, 999, tmp_path / "record.safetensors")


def test_names_are_kept_whatever_they_are(tmp_path: Path) -> None:
    entries = [Entry(name, "U8", (3,)) for name in ('"', "\\", "\n", "é", "\U0001f600", "__metadata", "a" * 5000)]
    check(plan_record(entries), 0, tmp_path / "record.safetensors")


huge = st.integers(0, 2**63 - 1) | st.integers(0, 62).map(lambda bits: 1 << bits)


@settings(deadline=None)
@given(entries_of(st.lists(huge, max_size=64).map(tuple), count=30), st.integers(0, 2**62))
def test_the_header_never_outgrows_its_room(entries: list[Entry], tail_bytes_max: int) -> None:
    # Sizes that no drive holds, but none whose offsets safetensors could not write as 64 bits.
    kept: list[Entry] = []
    total = 0
    for entry in entries:
        length = math.prod(entry.shape) * 8
        if total + length < 2**62:
            kept.append(entry)
            total += length
    layout = plan_record(kept, tail_bytes_max)
    if not layout.length_bytes:
        return
    for tail_bytes in (0, tail_bytes_max):
        header = layout.header(tail_bytes)
        assert len(header) == layout.payload_bytes
        assert int.from_bytes(header[:8], "little") == layout.payload_bytes - 8
        table = json.loads(header[8:])
        assert set(table) >= {entry.name for entry in kept}


@pytest.mark.parametrize("count", [1, 10, 100])
def test_shapes_of_many_long_numbers_have_room(count: int) -> None:
    layout = plan_record([Entry(str(i), "F32", (0, *[2**62] * 60)) for i in range(count)])
    assert len(layout.header(0)) == layout.payload_bytes


@pytest.mark.parametrize("count", [1, 15, 20, 200, 2000])
def test_the_room_is_enough_at_every_length(count: int) -> None:
    # One character more at each step, so that some step fills the last page of the header to the brim.
    for length in range(1, 300):
        entries = [Entry(f"{i:05d}" + "n" * (length if i == 0 else 0), "BF16", (2**40 + 1,)) for i in range(count)]
        layout = plan_record(entries, 2**50)
        assert len(layout.header(2**50)) == layout.payload_bytes
        if count > 20 and length > 20:
            break
