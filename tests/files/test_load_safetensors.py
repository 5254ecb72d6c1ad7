"""`swapper.load_safetensors` does what `load_state_dict` of the same files does, one tensor at a time."""

from __future__ import annotations

import errno
import functools
import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import safetensors.torch
import torch
from checkpoints import CHANGES, Changing
from hypothesis import strategies
from launcher import run_program
from models import CASES, WIDTH, Llama, Mlp
from repository import BENCHMARK
from torch import nn
from twins import adamw, bits, close, config_for, offloaded, on_meta, small_records, swapper_of, values_of

import swapper
from swapper.files.tensor_files import TensorReader, read_header
from swapper.io.handle import AsyncIOHandle, FaultPlan

MakeModel = Callable[[], nn.Module]


def save(model: nn.Module, path: Path) -> Path:
    state = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in model.state_dict().items()}
    safetensors.torch.save_file(state, path)
    return path


def save_in_parts(model: nn.Module, directory: Path, parts: int, index: bool) -> Path:
    directory.mkdir()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    places = {}
    for i in range(parts):
        names = list(state)[i::parts]
        file = f"model-{i + 1:05d}-of-{parts:05d}.safetensors"
        safetensors.torch.save_file({name: state[name] for name in names}, directory / file, {"format": "pt"})
        places |= dict.fromkeys(names, file)
    if index:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return directory


def another(make: MakeModel) -> nn.Module:
    torch.manual_seed(99)
    model = make()
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.uniform_()
    return model


def swapped(nvme_path: Path, make: MakeModel, how: str) -> nn.Module:
    torch.manual_seed(0)
    if how == "plain":
        return make()
    with small_records():
        if how == "meta":
            return swapper.materialize(on_meta(make), config_for(nvme_path), lambda module: None)
        if how == "built":
            with swapper.init(config_for(nvme_path)):
                return make()
    return offloaded(nvme_path, lambda: ((m := make()), adamw(m)))[0]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("how", ["plain", "offloaded", "built", "meta"])
@pytest.mark.parametrize("name", ["mlp", "llama bf16", "resnet channels_last", "gpt2 tied", "odd shapes", "dtypes"])
def test_it_is_what_load_state_dict_gives(name: str, how: str, nvme_path: Path, tmp_path: Path) -> None:
    make = CASES[name].make
    if name == "dtypes":  # The package that writes the file for this test knows no complex numbers.
        make = functools.partial(Llama, tied=False, dtype=torch.float64)
    source = another(make)
    path = save(source, tmp_path / "weights.safetensors")
    model = swapped(nvme_path, make, how)
    result = swapper.load_safetensors(model, path)
    assert result == make().load_state_dict(safetensors.torch.load_file(path))
    assert result.missing_keys == [] and result.unexpected_keys == []
    assert values_of(model) == values_of(source)
    if how == "offloaded":
        model.swapper.close()  # type: ignore[operator, union-attr]


@pytest.mark.parametrize("how", ["plain", "offloaded", "built"])
@pytest.mark.parametrize("place", ["index", "directory with an index", "directory of files", "one file in a directory"])
def test_several_files(place: str, how: str, nvme_path: Path, tmp_path: Path) -> None:
    source = another(Mlp)
    path = save_in_parts(source, tmp_path / "model", 1 if place.startswith("one") else 3, "index" in place)
    if place == "index":
        path /= "model.safetensors.index.json"
    model = swapped(nvme_path, Mlp, how)
    swapper.load_safetensors(model, str(path))
    assert values_of(model) == values_of(source)


def test_other_dtypes_are_cast(nvme_path: Path, tmp_path: Path) -> None:
    path = save(another(Mlp).double(), tmp_path / "weights.safetensors")
    model = swapped(nvme_path, lambda: Mlp().bfloat16(), "built")
    reference = Mlp().bfloat16()
    reference.load_state_dict(safetensors.torch.load_file(path))
    swapper.load_safetensors(model, path)
    assert values_of(model) == values_of(reference)


def test_within_init(nvme_path: Path, tmp_path: Path) -> None:
    source = another(Mlp)
    path = save(source, tmp_path / "weights.safetensors")
    with small_records(), swapper.init(config_for(nvme_path)):
        model = Mlp()
        swapper.load_safetensors(model, path)
        model.blocks.double()
    source.blocks.double()  # type: ignore[operator, union-attr]
    assert values_of(model) == values_of(source)


def test_training_goes_on_from_what_was_loaded(nvme_path: Path, tmp_path: Path) -> None:
    path = save(another(Mlp), tmp_path / "weights.safetensors")
    plain = Mlp()
    plain.load_state_dict(safetensors.torch.load_file(path))
    model, optimizer = offloaded(nvme_path, lambda: ((m := Mlp()), adamw(m)))
    swapper.load_safetensors(model, path)
    for one, its in ((plain, adamw(plain)), (model, optimizer)):
        for seed in range(3):
            one(torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
            its.step()
            its.zero_grad()
    assert values_of(model) == values_of(plain)
    close(model, optimizer)


@pytest.mark.parametrize("where", ["memory", "drive"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_module_changes_in_the_state_dict_is_loaded(
    change: str, where: str, nvme_path: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    plain, ours = (nn.Sequential(Changing(change, 80), nn.Linear(80, 80)) for _ in range(2))
    state = nn.Sequential(nn.Linear(80, 80), nn.Linear(80, 80)).state_dict()
    safetensors.torch.save_file(state, tmp_path / "it.safetensors")
    plain.load_state_dict({name: value.clone() for name, value in state.items()})
    if where == "drive":
        with small_records():
            swapper.offload(ours, config=config_for(nvme_path))
    swapper.load_safetensors(ours, tmp_path / "it.safetensors")
    assert bits({name: value + 0 for name, value in ours.state_dict().items()}) == bits(
        {name: value + 0 for name, value in plain.state_dict().items()}
    )
    if where == "drive":
        swapper_of(ours).close()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_what_is_only_read_does_not_stay_in_memory(mode: Any, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Changing("in place", 8))
    kept: list[Any] = []
    model.register_load_state_dict_pre_hook(lambda module, state, *rest: kept.append(dict(state)))
    safetensors.torch.save_file(model.state_dict(), tmp_path / "it.safetensors")
    with mode():
        swapper.load_safetensors(model, tmp_path / "it.safetensors")
    assert [name for name, view in kept[0].items() if view.source.own is not None] == ["1.weight"]


@pytest.mark.parametrize("first", ["embedding.weight", "lm_head.weight"])
def test_one_name_of_a_tied_parameter_is_enough(first: str, nvme_path: Path, tmp_path: Path) -> None:
    source = another(lambda: Llama(tied=True))
    state = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    tied = {name for name, p in source.named_parameters(remove_duplicate=False) if p is source.embedding.weight}
    assert first in tied and len(tied) == 2
    for name in tied - {first}:
        del state[name]
    path = tmp_path / "weights.safetensors"
    safetensors.torch.save_file(state, path)
    model = swapped(nvme_path, lambda: Llama(tied=True), "built")
    assert swapper.load_safetensors(model, path).missing_keys == []
    assert values_of(model) == values_of(source)


def test_names_that_do_not_fit(nvme_path: Path, tmp_path: Path) -> None:
    source = another(Mlp)
    state = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    del state["blocks.1.0.bias"]
    state["blocks.9.0.bias"] = torch.zeros(3)
    path = tmp_path / "weights.safetensors"
    safetensors.torch.save_file(state, path)
    model = swapped(nvme_path, Mlp, "built")
    message = r"weights\.safetensors .* lacks blocks\.1\.0\.bias .* not have blocks\.9\.0\.bias; .* strict=False"
    with pytest.raises(swapper.SwapError, match=message):
        swapper.load_safetensors(model, path)
    result = swapper.load_safetensors(model, path, strict=False)
    assert result == Mlp().load_state_dict(state, strict=False)
    assert bits(model.get_parameter("blocks.2.0.weight")) == bits(source.get_parameter("blocks.2.0.weight"))


@pytest.mark.parametrize("how", ["plain", "offloaded"])
def test_a_shape_that_does_not_fit(how: str, nvme_path: Path, tmp_path: Path) -> None:
    state = {name: tensor.clone() for name, tensor in another(Mlp).state_dict().items()}
    state["blocks.1.0.bias"] = torch.zeros(3)
    path = tmp_path / "weights.safetensors"
    safetensors.torch.save_file(state, path)
    model = swapped(nvme_path, Mlp, how)
    message = r"weights\.safetensors could not be loaded: (.|\n)*size mismatch for blocks\.1\.0\.bias(.|\n)*; build"
    with pytest.raises(swapper.SwapError, match=message):
        swapper.load_safetensors(model, path)


def test_a_model_on_the_meta_device_is_refused_with_the_fix(tmp_path: Path) -> None:
    path = save(Mlp(), tmp_path / "weights.safetensors")
    with pytest.raises(swapper.ConfigError, match=r"blocks\.0\.0\.weight .* swapper\.materialize"):
        swapper.load_safetensors(on_meta(Mlp), path)


# --- Broken files -----------------------------------------------------------------------------------------------------


def written(path: Path, header: Any, payload: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + payload)
    return path


def entry(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


BROKEN: dict[str, tuple[Any, str]] = {
    "no JSON": (b"{", "header is no valid JSON"),
    "no text": (b"\xff\xfe\x00\x80", "header is no valid JSON"),
    "no table": ([], "header is no table"),
    "no entry": ({"a": 3}, "tensor 'a' is not dtype"),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, "tensor 'a' is not dtype"),
    "shape of text": ({"a": entry(shape=["2"])}, "tensor 'a' is not dtype"),
    "negative shape": ({"a": entry(shape=[-2])}, "tensor 'a' is not dtype"),
    "unknown dtype": ({"a": entry(dtype="F7")}, "tensor 'a' is of dtype 'F7'"),
    "too long": ({"a": entry(offsets=(0, 12))}, "tensor 'a' is at bytes 0 to 12, but needs 8"),
    "backwards": ({"a": entry(offsets=(8, 0))}, "tensor 'a' is at bytes 8 to 0, but needs 8"),
    "before the start": ({"a": entry(offsets=(-8, 0))}, "tensor 'a' is at bytes -8 to 0, but needs 8"),
    "overlapping": ({"a": entry(), "b": entry(offsets=(4, 12))}, "tensors 'a' and 'b' overlap"),
    "a name twice": (b'{"a":1,"a":2}', "a name comes twice"),
    "bytes behind the last": ({"a": entry()}, "8 bytes behind its last tensor are of none"),
    "no tensors, but bytes": ({}, "16 bytes behind its last tensor are of none"),
    "bytes before the first": ({"a": entry(offsets=(8, 16))}, "8 bytes before tensor 'a' are of none"),
    "bytes in between": (
        {"a": entry(shape=[1], offsets=(0, 4)), "b": entry(offsets=(8, 16))},
        "4 bytes before tensor 'b' are of none",
    ),
}


@pytest.mark.parametrize("why", BROKEN)
def test_a_broken_header_is_named(why: str, tmp_path: Path) -> None:
    header, message = BROKEN[why]
    path = written(tmp_path / "weights.safetensors", header, bytes(16))
    with pytest.raises(swapper.SwapError, match=r"weights\.safetensors is not a whole safetensors file: .*") as caught:
        swapper.load_safetensors(Mlp(), path)
    assert message in str(caught.value)
    with pytest.raises(safetensors.SafetensorError):
        safetensors.torch.load(path.read_bytes())


@pytest.mark.parametrize("content", [b"", b"\x02", struct.pack("<Q", 1 << 62) + b"{}", struct.pack("<Q", 3) + b"{}"])
def test_a_file_that_is_too_short_for_its_header(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(content)
    with pytest.raises(swapper.SwapError, match="and its header would have"):
        swapper.load_safetensors(Mlp(), path)


@pytest.mark.parametrize("kept", [0.999, 0.5])
def test_a_file_that_was_cut_off_is_refused_before_anything_is_loaded(kept: float, tmp_path: Path) -> None:
    path = save(another(Mlp), tmp_path / "weights.safetensors")
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    model = Mlp()
    before = values_of(model)
    with pytest.raises(swapper.SwapIOError, match=r"tensor 'blocks\.\d.* ends beyond the file's \d+ bytes") as caught:
        swapper.load_safetensors(model, path)
    assert caught.value.errno == errno.ENODATA
    assert caught.value.path == str(path)
    assert values_of(model) == before


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(strategies.integers(0, 400), strategies.integers(0, 255))
def test_a_flipped_byte_of_the_header_is_an_error_or_another_header(at: int, byte: int) -> None:
    import tempfile

    content = bytearray(safetensors.torch.save({"one": torch.zeros(3, 5), "two": torch.ones(7)}))
    if at >= len(content):
        return
    content[at] = byte
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "weights.safetensors"
        path.write_bytes(content)
        try:
            found = read_header(path)
        except swapper.SwapError:
            return
        assert all(0 <= tensor.start_bytes <= tensor.stop_bytes <= len(content) for tensor in found)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(swapper.SwapIOError, match=r"no\.safetensors"):
        swapper.load_safetensors(Mlp(), tmp_path / "no.safetensors")
    with pytest.raises(swapper.SwapIOError, match=r"there are no \.safetensors files"):
        swapper.load_safetensors(Mlp(), tmp_path)


def test_an_index_that_does_not_fit_its_files(tmp_path: Path) -> None:
    directory = save_in_parts(another(Mlp), tmp_path / "model", 3, index=True)
    index = directory / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    for content, message in (
        ("{", "is no valid JSON"),
        ("[]", "weight_map"),
        ('{"weight_map": {"a": 3}}', "weight_map"),
        (json.dumps({"weight_map": table["weight_map"] | {"extra": "model-00001-of-00003.safetensors"}}), "'extra'"),
        (json.dumps({"weight_map": table["weight_map"] | {"extra": "missing.safetensors"}}), "missing.safetensors"),
    ):
        index.write_text(content)
        with pytest.raises(swapper.SwapError) as caught:
            swapper.load_safetensors(Mlp(), directory)
        assert message in str(caught.value)
    (directory / "other.safetensors.index.json").write_text("{}")
    with pytest.raises(swapper.SwapError, match="several sets of weights"):
        swapper.load_safetensors(Mlp(), directory)


def test_of_a_whole_file_and_an_index_the_file_is_taken(tmp_path: Path) -> None:
    """As by transformers, whatever the index names."""
    directory = save_in_parts(another(Mlp), tmp_path / "model", 3, index=True)
    source = Mlp()
    save(source, directory / "model.safetensors")
    model = another(Mlp)
    swapper.load_safetensors(model, directory)
    assert bits(model.state_dict()) == bits(source.state_dict())
    (directory / "other.safetensors.index.json").write_text("{}")
    swapper.load_safetensors(model, directory)


def test_a_tensor_in_two_files_of_a_directory(tmp_path: Path) -> None:
    save(Mlp(), tmp_path / "one.safetensors")
    save(Mlp(), tmp_path / "two.safetensors")
    with pytest.raises(swapper.SwapError, match=r"is in .*one\.safetensors and in .*two\.safetensors; name one file"):
        swapper.load_safetensors(Mlp(), tmp_path)


@pytest.mark.parametrize("at", [1, 4])
def test_a_read_that_fails_is_raised_as_it_is(
    at: int, nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = another(Mlp)
    path = save(source, tmp_path / "weights.safetensors")
    plan = FaultPlan()
    plan.fail_read_at = at
    model = swapped(nvme_path, Mlp, "built")
    with monkeypatch.context() as patch:
        reader = functools.partial(TensorReader, handle=AsyncIOHandle(faults=plan))
        patch.setattr("swapper.files.weights.TensorReader", reader)
        with pytest.raises(swapper.SwapIOError) as caught:
            swapper.load_safetensors(model, path)
    assert caught.value.errno == errno.EIO
    assert caught.value.path == str(path)
    swapper.load_safetensors(model, path)
    assert values_of(model) == values_of(source)


def test_no_file_is_left_open(tmp_path: Path) -> None:
    path = save(another(Mlp), tmp_path / "weights.safetensors")
    swapper.load_safetensors(Mlp(), path)
    open_now = [entry.resolve() for entry in Path("/proc/self/fd").iterdir() if entry.exists()]
    assert path.resolve() not in open_now


@pytest.mark.long
def test_a_model_larger_than_memory_is_loaded(nvme_path: Path, tmp_path: Path) -> None:
    """The model is 240 MB, the pool 32 MB."""
    path = tmp_path / "weights.safetensors"
    safetensors.torch.save_file({f"{i}.0.weight": torch.full((1024, 1024), float(i)) for i in range(60)}, path)
    program = f"""
import sys, torch, swapper
from torch import nn
sys.path.insert(0, {str(BENCHMARK.parent)!r})
from memory import Peak
config = swapper.OffloadConfig(nvme_path={str(nvme_path)!r}, pool_bytes="32MiB", bucket_bytes="4MiB",
                               offload_param={{"device": "nvme"}}, offload_optimizer={{"device": "none"}})
with torch.device("meta"):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024, bias=False)) for _ in range(60)])
swapper.materialize(model, config)
with Peak() as before:
    import time; time.sleep(0.05)
with Peak() as peak:
    swapper.load_safetensors(model, {str(path)!r})
for i, p in enumerate(model.parameters()):
    assert p[0, 0] == p[-1, -1] == i
print(peak.bytes - before.bytes)
"""
    run = run_program([sys.executable, "-c", program], check=True, capture_output=True)
    assert int(run.stdout) < 24e6, "the longest tensor is 4 MB"
    assert run.stderr == b"", "no progress bar where nobody looks"
