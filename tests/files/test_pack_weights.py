"""`swapper.pack_weights` and `unpack_weights`: a directory of fewer bytes, and back to the bit; damage raises."""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner
from weight_files import write_shards, write_weights

import swapper
from swapper.cli import app
from swapper.files import packing
from swapper.files.packed_tensors import METADATA_KEY, PackedTensor
from swapper.files.weights import PACKED_INDEX, find_weights


def normal(*shape: int) -> torch.Tensor:
    return torch.empty(shape).normal_(0, 0.02, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def any_bits(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(-(1 << 15), 1 << 15, shape, generator=generator).to(torch.int16).view(torch.bfloat16)


def weights() -> dict[str, torch.Tensor]:
    special = normal(200, 301)
    special.view(-1)[::150] = any_bits(402)
    return {
        "embed_tokens.weight": normal(700, 128),
        "lm_head.weight": normal(700, 128),
        "layers.0.weight": normal(512, 256),
        "layers.0.bias": normal(512),
        "layers.1.weight": special,
        "experts.gate_up_proj": normal(3, 256, 200),
        "conv.weight": normal(64, 64, 3, 3),
        "long": normal(70_001),
        "bits": any_bits(300, 300),
        "fp32": normal(100, 300).float(),
        "codes": torch.arange(9).to(torch.uint8),
    }


def same_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        (a.dtype, a.shape) == (b.dtype, b.shape)
        and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        for a, b in zip(one.values(), (other[name] for name in one), strict=True)
    )


def model_directory(tmp_path: Path, state: dict[str, torch.Tensor] | None = None) -> Path:
    """With two shards whose tensors lie at odd offsets, and what else models have."""
    directory = tmp_path / "model"
    write_shards(directory, state or weights(), random.Random(3), [8, 61])
    (directory / "config.json").write_text('{"model_type": "none"}')
    (directory / "tokenizer.json").write_text("{}")
    (directory / "templates").mkdir()
    (directory / "templates" / "chat.jinja").write_text("{{ a }}")
    (directory / "pytorch_model.bin").write_bytes(b"x" * 100)
    (directory / ".hidden").write_text("x")
    return directory


def loaded(directory: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in directory.glob("*.safetensors") for name, t in load_file(file).items()}


def packed_names(directory: Path) -> set[str]:
    return {tensor.name for tensor in find_weights(directory) if isinstance(tensor, PackedTensor)}


@pytest.mark.parametrize("part_bytes", [8 << 20, 10_000], ids=["whole", "parts"])
def test_what_is_packed_comes_back_to_the_bit(part_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_PART_BYTES", part_bytes)
    src = model_directory(tmp_path)
    sizes = swapper.pack_weights(src, tmp_path / "packed")
    names = {"lm_head.weight", "layers.0.weight", "layers.1.weight", "experts.gate_up_proj", "conv.weight", "long"}
    assert packed_names(sizes.path) == names
    assert (sizes.changed, sizes.left) == (6, 5)
    assert sizes.from_bytes == sum(t.nbytes for t in weights().values())
    files = [*sizes.path.glob("*.safetensors")]
    assert sizes.to_bytes == sum(t.nbytes for file in files for t in load_file(file).values()) < sizes.from_bytes * 0.85
    others = ["config.json", "templates/chat.jinja", "tokenizer.json"]
    found = [str(each.relative_to(sizes.path)) for each in sizes.path.rglob("*") if each.is_file()]
    assert sorted(found) == sorted([*others, PACKED_INDEX, *(file.name for file in files)])
    back = swapper.unpack_weights(sizes.path, tmp_path / "back")
    assert (back.changed, back.from_bytes, back.to_bytes) == (6, sizes.to_bytes, sizes.from_bytes)
    assert same_tensors(loaded(back.path), weights())
    assert {path.name for path in back.path.glob("*.safetensors")} == {path.name for path in src.glob("*.safetensors")}
    for file in back.path.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}


def test_parts_lie_at_multiples_of_64_and_experts_are_parts(tmp_path: Path) -> None:
    swapper.pack_weights(model_directory(tmp_path), tmp_path / "packed")
    tensors = {t.name: t for t in find_weights(tmp_path / "packed") if isinstance(t, PackedTensor)}
    assert all(part.start_bytes % 64 == 0 for name, t in tensors.items() if name != "long" for part in t.parts)
    assert len(tensors["experts.gate_up_proj"].parts) == 3


def test_an_embedding_that_is_the_head_too_is_packed(tmp_path: Path) -> None:
    state = {name: t for name, t in weights().items() if name != "lm_head.weight"}
    swapper.pack_weights(model_directory(tmp_path, state), tmp_path / "packed")
    assert "embed_tokens.weight" in packed_names(tmp_path / "packed")


def test_a_quantised_model_is_copied_as_it_is(tmp_path: Path) -> None:
    src = model_directory(tmp_path)
    (src / "config.json").write_text('{"text_config": {"quantization_config": {"quant_method": "fp8"}}}')
    assert swapper.pack_weights(src, tmp_path / "packed").changed == 0
    assert same_tensors(loaded(tmp_path / "packed"), weights())


def test_one_file_becomes_one_and_has_its_name_back(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    write_weights(tmp_path / "model" / "model.safetensors", weights())
    swapper.pack_weights(tmp_path / "model" / "model.safetensors", tmp_path / "packed")
    assert sorted(os.listdir(tmp_path / "packed")) == ["model.packed.safetensors", PACKED_INDEX]
    swapper.unpack_weights(tmp_path / "packed", tmp_path / "back")
    assert os.listdir(tmp_path / "back") == ["model.safetensors"]
    assert same_tensors(loaded(tmp_path / "back"), weights())


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(700, 128)
        self.layers = nn.ModuleList([nn.Linear(128, 512), nn.Linear(512, 700)])
        self.bfloat16()


def test_load_safetensors_takes_a_packed_directory(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, other = Small(), Small()
    (tmp_path / "model").mkdir()
    write_weights(tmp_path / "model" / "model.safetensors", model.state_dict())
    assert swapper.pack_weights(tmp_path / "model", tmp_path / "packed").changed == 3
    swapper.load_safetensors(other, tmp_path / "packed")
    assert same_tensors(dict(other.state_dict()), dict(model.state_dict()))


def test_links_are_followed_and_lead_no_way_back(tmp_path: Path) -> None:
    src = model_directory(tmp_path)
    others = tmp_path / "tokenizer"
    others.mkdir()
    (others / "vocab.json").write_text("[]")
    links = {"tokenizer": others, "itself": src, "above": tmp_path, "vocab.json": others / "vocab.json"}
    for name, to in links.items():
        (src / name).symlink_to(to)
    (others / "again").symlink_to(others)
    packed = swapper.pack_weights(src, tmp_path / "packed").path
    assert (packed / "tokenizer" / "vocab.json").read_text() == (packed / "vocab.json").read_text() == "[]"
    assert not any((packed / name).exists() for name in ("itself", "above", "tokenizer/again"))
    assert not any(each.is_symlink() for each in packed.rglob("*"))
    (src / "nowhere.json").symlink_to(tmp_path / "missing.json")
    with pytest.raises(swapper.SwapIOError, match=r"nowhere\.json"):
        swapper.pack_weights(src, tmp_path / "twice")
    assert not (tmp_path / "twice").exists()


def test_a_tensor_whose_parts_would_have_names_of_others_stays_as_it_is(tmp_path: Path) -> None:
    state = {"x": normal(300, 300), "x.packed.0": normal(4), "y": normal(300, 300)}
    swapper.pack_weights(model_directory(tmp_path, state), tmp_path / "packed")
    assert packed_names(tmp_path / "packed") == {"y"}
    assert same_tensors(loaded(swapper.unpack_weights(tmp_path / "packed", tmp_path / "back").path), state)


def test_nothing_is_replaced_and_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    src = model_directory(tmp_path)
    (tmp_path / "there").mkdir()
    with pytest.raises(swapper.SwapError, match="there exists"):
        swapper.pack_weights(src, tmp_path / "there")
    before = sorted(os.listdir(tmp_path))

    def fail(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packing, "pack_bf16", fail)
    with pytest.raises(swapper.SwapIOError, match="No space left"):
        swapper.pack_weights(src, tmp_path / "packed")
    assert sorted(os.listdir(tmp_path)) == before


def test_what_is_packed_is_not_packed_again_nor_plain_unpacked(tmp_path: Path) -> None:
    src = model_directory(tmp_path)
    with pytest.raises(swapper.SwapError, match="has no packed weights"):
        swapper.unpack_weights(src, tmp_path / "back")
    swapper.pack_weights(src, tmp_path / "packed")
    with pytest.raises(swapper.SwapError, match="packed weights already"):
        swapper.pack_weights(tmp_path / "packed", tmp_path / "twice")


def test_the_command_packs_and_unpacks(tmp_path: Path) -> None:
    src, packed, back = model_directory(tmp_path), tmp_path / "packed", tmp_path / "back"
    result = CliRunner().invoke(app, ["pack", str(src), str(packed), "--json"])
    assert result.exit_code == 0
    said = json.loads(result.stdout)
    assert said["path"] == str(packed) and said["to_bytes"] < said["from_bytes"] and said["changed"] == 6
    result = CliRunner().invoke(app, ["pack", "--unpack", str(packed), str(back)])
    assert result.exit_code == 0 and "6 tensors unpacked" in result.stdout
    assert same_tensors(loaded(back), weights())
    result = CliRunner().invoke(app, ["pack", str(src), str(packed)])
    assert result.exit_code == 1 and "exists" in result.stderr


# --- Damage ----------------------------------------------------------------------------------------------------------


def edit_header(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + length])
    said = json.loads(table["__metadata__"][METADATA_KEY])
    edit(said)
    table["__metadata__"][METADATA_KEY] = json.dumps(said)
    header = json.dumps(table).encode().ljust(length)
    assert len(header) == length
    path.write_bytes(struct.pack("<Q", length) + header + data[8 + length :])


def packed_file(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    write_weights(tmp_path / "model" / "model.safetensors", {"layer.weight": normal(512, 256), "b": normal(4)})
    swapper.pack_weights(tmp_path / "model", tmp_path / "packed")
    return tmp_path / "packed" / "model.packed.safetensors"


def of_weight(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda said: said["tensors"]["layer.weight"].update(changes)


HEADERS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "another encoding": (lambda said: said.update(encoding="bf16-x"), "packed as 'bf16-x'"),
    "no tensors": (lambda said: said.update(tensors=[]), "no encoding and tensors"),
    "another dtype": (of_weight(dtype="F16"), "is not dtype, shape and rows"),
    "no rows": (of_weight(rows=0), "is not dtype, shape and rows"),
    "true rows": (of_weight(rows=True), "is not dtype, shape and rows"),
    "a shape of words": (of_weight(shape=["a"]), "is not dtype, shape and rows"),
    "a smaller shape": (of_weight(shape=[512, 8]), "is no part of a tensor"),
    "a larger shape": (of_weight(shape=[512, 2560]), "is no part of a tensor"),
    "an impossible shape": (of_weight(shape=[512, 1 << 39, 1 << 39]), "is no part of a tensor"),
    "more parts": (of_weight(rows=500), "has no part 1"),
    "another tensor": (lambda said: said["tensors"].update(c={"dtype": "BF16", "shape": [1], "rows": 1}), "no part 0"),
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_wrong_header_names_the_file(what: str, tmp_path: Path) -> None:
    edit, message = HEADERS[what]
    path = packed_file(tmp_path)
    edit_header(path, edit)
    with pytest.raises(swapper.SwapError, match=message) as raised:
        find_weights(path.parent)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("at", [0, 8, 16, 42, 44, 46], ids=str)
def test_a_damaged_part_names_file_and_tensor(at: int, tmp_path: Path) -> None:
    path = packed_file(tmp_path)
    part = next(t for t in find_weights(path) if isinstance(t, PackedTensor)).parts[0]
    data = bytearray(path.read_bytes())
    data[part.start_bytes + at] ^= 4
    path.write_bytes(data)
    with pytest.raises(swapper.SwapIOError, match=r"layer\.weight\.packed\.0 cannot be unpacked") as raised:
        swapper.unpack_weights(path.parent, tmp_path / "back")
    assert str(path) in str(raised.value) and not (tmp_path / "back").exists()


def test_a_file_that_is_cut_off_names_the_tensor(tmp_path: Path) -> None:
    path = packed_file(tmp_path)
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(swapper.SwapIOError, match="ends beyond the file"):
        find_weights(path.parent)
