"""`offload_optimizer.encoding: packed`: fewer bytes, and each value comes back to the bit."""

from __future__ import annotations

import copy
import errno
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import Optimizer
from training import assert_same, assert_same_state, make_model, run, same_bits

import swapper
from swapper.checkpoint.export import export_checkpoint
from swapper.checkpoint.index import with_checksum
from swapper.io.checksums import checksum
from swapper.optimizer.packing import CHUNK_NUMEL, packed_bytes, plan_packed_record, unpack_values
from swapper.storage.layout import Entry


@pytest.fixture(autouse=True)
def _threads_stay() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def config_of(nvme_path: Path, encoding: Any, **settings: Any) -> swapper.OffloadConfig:
    state = {"device": "nvme", "encoding": encoding} | settings.pop("state", {})
    defaults = {"pool_bytes": "24MiB", "bucket_bytes": "256KiB"}
    return swapper.OffloadConfig(nvme_path=nvme_path, offload_optimizer=state, **(defaults | settings))


def wrap(nvme_path: Path, encoding: Any = "packed", **settings: Any) -> tuple[nn.Module, Optimizer]:
    model = make_model()
    optimizer = adamw(model)
    swapper.wrap_optimizer(optimizer, config_of(nvme_path, encoding, **settings))
    return model, optimizer


def close(optimizer: Optimizer) -> None:
    swapper.of(optimizer).close()


def special_values(numel: int) -> torch.Tensor:
    """Bits of all kinds, a kind for each 300 elements, so that blocks have one or two."""
    generator = torch.Generator().manual_seed(numel)
    any_bits = torch.randint(-(1 << 31), 1 << 31, (numel,), generator=generator, dtype=torch.int64).to(torch.int32)
    normal = torch.randn(numel, generator=generator)
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 2.0**-149, -(2.0**-149), 3.4e38])
    kinds = [
        any_bits.view(torch.float32),
        normal,
        normal.square(),
        torch.zeros(numel),
        special[any_bits.remainder(len(special)).long()],
        normal * 2.0**-140,
    ]
    kind = torch.arange(numel) // 300 % len(kinds)
    return torch.stack([each.view(torch.int32) for each in kinds]).gather(0, kind[None])[0].view(torch.float32)


# --- Records ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("numels", [[20_000], [65_536 + 77, 300], [200_000, 4097, 131_072]], ids=str)
def test_a_packed_record_is_a_safetensors_file_and_comes_back(numels: list[int], threads: int, tmp_path: Path) -> None:
    torch.set_num_threads(threads)
    others = [Entry("0.low", "I16", (1001,))]
    names = [f"{i}.state" for i in range(len(numels))]
    packed = [Entry(name, "F32", (n,), "packed") for name, n in zip(names, numels, strict=True)]
    layout, packing = plan_packed_record(others, packed, 500)
    assert packing is not None
    data = torch.zeros(layout.length_bytes, dtype=torch.uint8)
    values = {name: special_values(n) for name, n in zip(names, numels, strict=True)}
    values["0.low"] = torch.arange(1001, dtype=torch.int16)
    offsets = dict(zip((entry.name for entry in layout.entries), layout.offsets_bytes, strict=True))
    for name, value in values.items():
        data[offsets[name] :][: value.nbytes] = value.view(torch.uint8)
    ties = torch.arange(333, dtype=torch.int64).to(torch.uint8)
    data[layout.tail_offset_bytes :][:333] = ties
    before = data.clone()

    length_bytes = packing.pack(data, 333)
    assert length_bytes < layout.used_bytes(333) and length_bytes % 4096 == 0
    assert packing.length_bytes(data, 333) == length_bytes
    assert packing.length_bytes(data, 332) == 0, "another tail is another record"
    (tmp_path / "record").write_bytes(bytes(data[:length_bytes].numpy()))
    found = load_file(tmp_path / "record")
    assert same_bits(found["0.low"], values["0.low"]) and same_bits(found["ties"], ties)
    for name, n in zip(names, numels, strict=True):
        table, there = found[f"blocks.{name}"], found[name]
        assert there.dtype is torch.uint8 and packed_bytes(table, n) == there.numel() <= 4 * n + 32
        unpacked = torch.empty(n)
        unpack_values(table, there, unpacked)
        assert same_bits(unpacked, values[name])
        if n > CHUNK_NUMEL:  # A part, from the first of a chunk on.
            start = packed_bytes(table, CHUNK_NUMEL)
            unpack_values(table[CHUNK_NUMEL // 128 :], there[start:], rest := torch.empty(n - CHUNK_NUMEL))
            assert same_bits(rest, values[name][CHUNK_NUMEL:])

    other = data.clone()
    packing.unpack(other, 400)  # As after a step that has failed, when it has other ties in memory than on the drive.
    packing.unpack(data, 333)
    for start in layout.offsets_bytes:
        assert same_bits(other[start : layout.tail_offset_bytes], data[start : layout.tail_offset_bytes])
    again = data.clone()
    packing.unpack(data, 333)
    assert same_bits(data, again), "what is not packed is left alone"
    for entry, start in zip(layout.entries, layout.offsets_bytes, strict=True):
        if entry.name in values:
            assert same_bits(again[start:][: entry.length_bytes], before[start:][: entry.length_bytes])
    assert same_bits(again[layout.tail_offset_bytes :][:333], ties)


def test_what_is_no_table_is_refused() -> None:
    table = torch.tensor([0, 1, 7, 3], dtype=torch.uint8)
    assert packed_bytes(table, 512) == 768 + 832
    for damaged in (table[:2], table.view(torch.int8), torch.tensor([0, 10, 7, 3], dtype=torch.uint8)):
        with pytest.raises(ValueError, match="is none"):
            packed_bytes(damaged, 512)
    with pytest.raises(ValueError, match="by their table"):
        unpack_values(table, torch.zeros(1000, dtype=torch.uint8), torch.empty(512))


# --- Runs ------------------------------------------------------------------------------------------------------------


def test_fewer_bytes_are_written_and_read(nvme_path: Path) -> None:
    moved: dict[str, tuple[int, int, int]] = {}
    for encoding in ("exact", "packed"):
        model, optimizer = wrap(nvme_path, encoding)
        for seed in range(4):
            run(model, optimizer, range(seed, seed + 1))
            swapper.of(optimizer).flush()  # What is still being written would not be read.
        stats = swapper.of(optimizer).stats()
        moved[encoding] = stats.bytes_written, stats.bytes_read, stats.state_bytes
        report = swapper.check(model, optimizer, config_of(nvme_path, encoding))
        packed_numel = 2 * sum(p.numel() for p in model.parameters() if p.numel() >= 4096)
        assert report.packed_numel == (packed_numel if encoding == "packed" else 0) and not report.encoded_numel
        assert (f" {packed_numel:,} values" in str(report)) == (encoding == "packed")
        assert moved[encoding][2] <= report.state_bytes
        close(optimizer)
    for exact, packed in zip(moved["exact"], moved["packed"], strict=True):
        assert packed < 0.92 * exact


@pytest.mark.parametrize("resident_bytes", [0, "64MiB"], ids=["read", "resident"])
def test_records_that_are_looked_at_and_given_back(nvme_path: Path, resident_bytes: Any) -> None:
    """Between two steps, several times: what stays in the pool as it is, and what is read anew."""
    plain = make_model()
    other = adamw(plain)
    settings = {"pool_bytes": "96MiB"} if resident_bytes else {}
    model, optimizer = wrap(nvme_path, state={"resident_bytes": resident_bytes}, **settings)
    for seed in range(3):
        run(plain, other, range(seed, seed + 1))
        run(model, optimizer, range(seed, seed + 1))
        for _ in range(2):
            assert_same_state(optimizer.state_dict(), other.state_dict())
    assert_same(plain, model)
    close(optimizer)


def test_values_of_all_kinds_are_kept(nvme_path: Path, tmp_path: Path) -> None:
    """Also such as no state has, and that do not shrink: loaded, read, saved and loaded again."""
    model, optimizer = wrap(nvme_path)
    run(model, optimizer, range(1))
    state = copy.deepcopy(optimizer.state_dict())
    for entries in state["state"].values():
        for key in ("exp_avg", "exp_avg_sq"):
            entries[key] = special_values(entries[key].numel()).view(entries[key].shape)
    optimizer.load_state_dict(state)
    assert_same_state(optimizer.state_dict(), state)
    swapper.save_checkpoint(tmp_path / "saved", model, optimizer)
    close(optimizer)
    for encoding, bucket_bytes in (("packed", "256KiB"), ("packed", "64KiB"), ("exact", "256KiB")):
        other, loaded = wrap(nvme_path, encoding, bucket_bytes=bucket_bytes)
        swapper.load_checkpoint(tmp_path / "saved", other, loaded)
        assert_same_state(loaded.state_dict(), state)
        close(loaded)


def test_random_bits_take_no_more_than_the_file(nvme_path: Path) -> None:
    model, optimizer = wrap(nvme_path)
    run(model, optimizer, range(1))
    state = copy.deepcopy(optimizer.state_dict())
    generator = torch.Generator().manual_seed(0)
    for entries in state["state"].values():
        for key in ("exp_avg", "exp_avg_sq"):
            bits = torch.randint(-(1 << 31), 1 << 31, entries[key].shape, generator=generator)
            entries[key] = bits.to(torch.int32).view(torch.float32)
    optimizer.load_state_dict(state)
    assert_same_state(optimizer.state_dict(), state)
    # Headers apart, the values as they are.
    state_bytes = 8 * sum(p.numel() for p in model.parameters() if p.numel() >= 4096)
    stored_bytes = swapper.of(optimizer).stats().state_bytes
    assert state_bytes < stored_bytes < 1.01 * state_bytes + 4 * 8192
    close(optimizer)


def test_a_record_that_is_not_what_was_packed_is_refused(nvme_path: Path) -> None:
    """And one that is right again can be used again."""
    model, optimizer = wrap(nvme_path)
    run(model, optimizer, range(2))
    swapper.of(optimizer).flush()
    was = copy.deepcopy(optimizer.state_dict())
    path = next(path for path in nvme_path.rglob("*-optim-*.safetensors"))
    good = path.read_bytes()
    header_bytes = 8 + struct.unpack("<Q", good[:8])[0]
    header = json.loads(good[8:header_bytes])
    header.pop("__metadata__")
    places = {name: [header_bytes + at for at in entry["data_offsets"]] for name, entry in header.items()}
    assert places["packed_end"][0] == header_bytes
    tables = [places[name] for name in places if name.startswith("blocks.")]
    # A bit of a table is 256 values. What a drive has lost are zeros.
    flipped = [at for start, stop in (places["packed_end"], *tables) for at in (*range(start, start + 16), stop - 1)]
    damages = [good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :] for at in flipped]
    damages.append(good[:header_bytes] + bytes(4096) + good[header_bytes + 4096 :])
    for damaged in damages:
        path.write_bytes(damaged)
        with pytest.raises(swapper.SwapIOError, match="not what was packed") as caught:
            optimizer.state_dict()
        assert caught.value.errno == errno.EBADMSG
    path.write_bytes(good)
    assert_same_state(optimizer.state_dict(), was)
    run(model, optimizer, range(2, 4))
    plain = make_model()
    run(plain, adamw(plain))
    assert_same(plain, model)
    close(optimizer)


# --- Checkpoints -----------------------------------------------------------------------------------------------------


def saved_checkpoint(nvme_path: Path, directory: Path) -> tuple[nn.Module, Optimizer, dict[str, Any]]:
    model, optimizer = wrap(nvme_path, bucket_bytes="8MiB")
    run(model, optimizer)
    swapper.save_checkpoint(directory, model, optimizer)
    return model, optimizer, copy.deepcopy(optimizer.state_dict())


def test_a_checkpoint_says_what_is_packed(nvme_path: Path, tmp_path: Path) -> None:
    model, optimizer, _ = saved_checkpoint(nvme_path, tmp_path / "saved")
    index = json.loads((tmp_path / "saved" / "index.json").read_text())
    saved = index["optimizers"][0]
    assert saved["encoding"] == "packed" and not saved.get("encoded_steps")
    large = [p.numel() >= 4096 for p in model.parameters()]
    both = {"exp_avg": "packed", "exp_avg_sq": "packed"}
    assert [each.get("encodings", {}) for each in saved["parameters"]] == [both if each else {} for each in large]
    (path,) = (tmp_path / "saved").glob("optimizer-*.safetensors")
    assert index["files"][path.name]["length_bytes"] == path.stat().st_size == swapper.of(optimizer).stats().state_bytes
    assert sum(name.startswith("blocks.") for name in load_file(path)) == 2 * sum(large)
    close(optimizer)


@pytest.mark.parametrize("bucket_bytes", ["8MiB", "64KiB"], ids=["whole-records", "cut-anew"])
@pytest.mark.parametrize("damage", ["form", "shorter", "longer", "table", "name"])
def test_a_damaged_file_of_a_checkpoint_is_refused(
    nvme_path: Path, tmp_path: Path, damage: str, bucket_bytes: str
) -> None:
    """Its checksum and the index were made anew, so that nothing but its content tells."""
    model, optimizer, _ = saved_checkpoint(nvme_path, tmp_path / "saved")
    close(optimizer)
    (path,) = (tmp_path / "saved").glob("optimizer-*.safetensors")
    data = bytearray(path.read_bytes())
    header_bytes = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:header_bytes])
    name = next(name for name in header if name.startswith("blocks."))
    if damage == "form":
        data[header_bytes + header[name]["data_offsets"][0] + 1] = 0x4F
    elif damage in ("shorter", "longer"):
        data[header_bytes + header[name]["data_offsets"][0] + 1] += 1 if damage == "longer" else -1
    elif damage == "table":
        header[name]["shape"][0] -= 2
        header[name]["data_offsets"][1] -= 2
    else:
        header["blocked" + name] = header.pop(name)
    text = json.dumps(header, separators=(",", ":")).encode()
    assert len(text) <= header_bytes - 8
    data[8:header_bytes] = text.ljust(header_bytes - 8)
    path.unlink()
    path.write_bytes(data)
    fields = json.loads((tmp_path / "saved" / "index.json").read_text())
    fields["files"][path.name]["crc32c"] = checksum(torch.frombuffer(data, dtype=torch.uint8))
    fields.pop("crc32c")
    (tmp_path / "saved" / "index.json").write_bytes(with_checksum(json.dumps(fields, separators=(",", ":")).encode()))
    model, optimizer = wrap(nvme_path, bucket_bytes=bucket_bytes)
    with pytest.raises(swapper.SwapError, match=r"does not fit together|which the index names|not a whole safetensors"):
        swapper.load_checkpoint(tmp_path / "saved", model, optimizer)
    close(optimizer)


def test_an_exported_checkpoint_is_as_of_exact_state(nvme_path: Path, tmp_path: Path) -> None:
    _, optimizer, state = saved_checkpoint(nvme_path, tmp_path / "saved")
    assert state.keys() == {"state", "param_groups"}
    export_checkpoint(tmp_path / "saved", "torch", tmp_path / "exported.pt")
    exported = torch.load(tmp_path / "exported.pt")["optimizer"]
    assert exported.keys() == state.keys()
    assert_same_state(exported, state)
    close(optimizer)


def test_in_memory_nothing_is_packed(nvme_path: Path) -> None:
    plain, (model, optimizer) = make_model(), wrap(nvme_path, state={"device": "cpu"})
    run(plain, adamw(plain))
    run(model, optimizer)
    assert_same(plain, model)
    state_bytes = 8 * sum(p.numel() for p in model.parameters() if p.numel() >= 4096)
    assert swapper.of(optimizer).stats().state_bytes > state_bytes
    close(optimizer)


@pytest.mark.packs_too
@pytest.mark.sampled(2)
def test_state_is_packed_where_a_test_runs_with_packed_state(nvme_path: Path, state_on_drive: str) -> None:
    for encoding, expected in (("exact", state_on_drive), ("unpacked", "unpacked")):
        model, optimizer = wrap(nvme_path, encoding)
        run(model, optimizer)
        handle = swapper.of(optimizer)
        handle.flush()
        assert handle.stats().encoding == ("packed" if expected == "packed" else "exact")
        found = [b'"blocks.' in path.read_bytes() for path in nvme_path.rglob("*-optim-*.safetensors")]
        assert found and any(found) == (expected == "packed")
        close(optimizer)
