"""A quantised model of transformers whose weights stay in its files gives the bits of `from_pretrained`."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from twins import bits, config_for, small_records, swapper_of

import swapper
from swapper.parameter import from_files
from swapper.tensors.evicted import is_evicted

transformers = pytest.importorskip("transformers")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    quantization = pytest.importorskip("torchao.quantization")

from pretrained import change, compare_generation, save_tiny  # noqa: E402

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]

KINDS = {
    "int8": "Int8WeightOnlyConfig",
    "int8 activations too": "Int8DynamicActivationInt8WeightConfig",
    "float8": "Float8WeightOnlyConfig",
    "intx": "IntxWeightOnlyConfig",
}


@pytest.fixture(autouse=True)
def _all_move(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(from_files, "_SMALL_BYTES", 300)
    with small_records():
        yield


def save_quantised(path: Path, kind: str) -> Path:
    """A tiny Llama that torchao has quantised, as transformers saves it, in shards."""
    save_tiny(path / "plain", "llama", torch.bfloat16)
    asked = transformers.TorchAoConfig(getattr(quantization, KINDS[kind])())
    model = transformers.AutoModelForCausalLM.from_pretrained(path / "plain", quantization_config=asked)
    model.save_pretrained(path / "model", max_shard_size="40KB")
    assert len(list((path / "model").glob("*.safetensors"))) > 2
    return path / "model"


def opened(nvme_path: Path, path: Path, **kwargs: Any) -> Any:
    return swapper.from_pretrained(path, config_for(nvme_path, pool_bytes="160KiB"), **kwargs)


@pytest.mark.parametrize("kind", KINDS)
def test_generate_gives_the_logits_of_from_pretrained(kind: str, nvme_path: Path, tmp_path: Path) -> None:
    path = save_quantised(tmp_path, kind)
    plain = transformers.AutoModelForCausalLM.from_pretrained(path)
    model = opened(nvme_path, path)
    weight, expected = (each.model.layers[1].mlp.up_proj.weight for each in (model, plain))
    assert type(weight) is type(expected) is not torch.nn.Parameter and is_evicted(weight.qdata)
    compare_generation(model, plain, torch.device("cpu"))


@pytest.fixture
def on(device: str) -> torch.device:
    """The first device of the type: see `accelerators`."""
    return torch.device(device, 0)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_on_an_accelerator_it_gives_the_logits_of_the_model_there(
    kind: str, on: torch.device, nvme_path: Path, tmp_path: Path
) -> None:
    path = save_quantised(tmp_path, kind)
    plain = transformers.AutoModelForCausalLM.from_pretrained(path).to(on)
    model = opened(nvme_path, path, device=on)
    weight, expected = (each.model.layers[1].mlp.up_proj.weight for each in (model, plain))
    assert type(weight) is type(expected) is not torch.nn.Parameter and is_evicted(weight.qdata)
    assert {each.device for each in (*model.parameters(), *model.buffers(), weight.qdata)} == {on}
    compare_generation(model, plain, on)


def test_only_what_is_small_is_read_before_it_is_used(nvme_path: Path, tmp_path: Path) -> None:
    model = opened(nvme_path, save_quantised(tmp_path, "int8"))
    assert swapper_of(model).metrics.bytes_read == 0
    inside = [layer.mlp.up_proj.weight.qdata for layer in model.model.layers]
    assert all(map(is_evicted, inside)) and not {"qdata"}.intersection(swapper_of(model).stays)
    swapper_of(model).close()


SCALE = "model.layers.1.mlp.up_proj._weight_scale"


@pytest.mark.parametrize("rows", [0, 1, 48, 97])
@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_scales_of_another_matrix_are_an_error_with_their_name(
    kind: str, rows: int, nvme_path: Path, tmp_path: Path
) -> None:
    """torchao would take some of them for those of larger blocks, and compute with them."""
    path = save_quantised(tmp_path, kind)
    change(path, SCALE, torch.ones(rows, 1, dtype=torch.bfloat16 if kind == "int8" else torch.float32))
    says = rf"{SCALE} is \({rows}, 1\), and .*weight has 96 blocks of \(1, 64\) \(in .*model-00001"
    with pytest.raises(swapper.SwapError, match=says):
        opened(nvme_path, path)
    assert list(nvme_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize("how", ["uint8", "int32", "float32", "float8_e5m2", "flat", "transposed"])
@pytest.mark.parametrize("kind", ["int8", "int8 activations too", "float8"])
def test_parts_of_another_dtype_or_shape_work_as_in_memory_or_are_an_error(
    kind: str, how: str, nvme_path: Path, tmp_path: Path
) -> None:
    """torchao does not look at them, and some raised at the first token, in words that named nothing."""
    path, tokens = save_quantised(tmp_path, kind), torch.tensor([[1, 2, 3]])
    tensors = {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    refused = 0
    for name in [name for name in tensors if "layers.1.mlp.up_proj." in name]:
        shaped = {"flat": torch.Tensor.flatten, "transposed": lambda tensor: tensor.t().contiguous()}
        change(path, name, shaped[how](tensors[name]) if how in shaped else tensors[name].to(getattr(torch, how)))
        try:
            expected = transformers.AutoModelForCausalLM.from_pretrained(path)(tokens).logits
        except Exception:
            refused += 1
            with pytest.raises(swapper.SwapError, match=r"layers\.1\.mlp\.up_proj\.weight.* \(in .*model-00001"):
                opened(nvme_path, path)
        else:
            model = opened(nvme_path, path)
            assert bits(model(tokens).logits) == bits(expected)
            model.swapper.close()
        change(path, name, tensors[name])
    assert refused == {
        "int8 activations too": {"uint8": 1, "int32": 1, "float32": 1, "float8_e5m2": 2, "flat": 1, "transposed": 1},
        "float8": {"float8_e5m2": 1, "flat": 2, "transposed": 2},
        "int8": {"flat": 1, "transposed": 1},
    }[kind].get(how, 0)
    assert list(nvme_path.iterdir()) == []


@pytest.mark.parametrize("how", ["truncated", "lacks", "shape", "foreign"])
def test_what_cannot_work_is_an_error_with_its_name(how: str, nvme_path: Path, tmp_path: Path) -> None:
    path = save_quantised(tmp_path, "int8")
    if how == "truncated":
        file = max(path.glob("*.safetensors"))
        os.truncate(file, file.stat().st_size - 8)
        says = f"{file.name}"
    elif how == "lacks":
        change(path, SCALE, None)
        says = (
            r"model-0000\d.* says that model\.layers\.1\.mlp\.up_proj\.weight is made of .*up_proj\._weight_scale too"
        )
    elif how == "shape":
        text = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**text, "intermediate_size": 100}))
        says = r"layers\.0\.mlp\.gate_proj\.weight is \(96, 64\) and in the model \(100, 64\) \(in .*model-00001-of"
    else:
        text = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**text, "quantization_config": {"quant_method": "gptq"}}))
        says = r"is a quantised model \(gptq\)"
    with pytest.raises(swapper.SwapError, match=says):
        opened(nvme_path, path)
    assert list(nvme_path.iterdir()) == []
