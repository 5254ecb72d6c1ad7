"""A model whose files have codes that transformers dequantises as it loads gives the bits of `from_pretrained`."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from twins import bits, config_for, small_records, swapper_of

import swapper
from swapper.files import unread
from swapper.files.dequantised import DEQUANTISES, dequantised
from swapper.files.tensor_files import read_header
from swapper.files.unread import Unread
from swapper.parameter import from_files

transformers = pytest.importorskip("transformers")

from pretrained import SIZES, aligned, compare_generation, save_any  # noqa: E402

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]

BLOCK = 32

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen3 tied": ("Qwen3ForCausalLM", {"tie_word_embeddings": True}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}),
    "gpt_oss": ("GptOssForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


@pytest.fixture(autouse=True)
def _all_move(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(from_files, "_SMALL_BYTES", 300)
    with small_records():
        yield


def save_quantised(path: Path, name: str, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A tiny model as people have it: matrices in float8 with a scale for each block, or experts in mxfp4."""
    class_name, more = MODELS[name]
    save_any(path, class_name, dtype, 10_000_000, **more)
    quantise(path, name)
    return path


def quantise(path: Path, name: str, part: Callable[[Any], dict[str, Any]] = lambda config: config) -> None:
    """Let the file of a model, and `part` of its config, have it quantised."""
    file = next(path.glob("*.safetensors"))
    generator = torch.Generator().manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}
    for key, value in load_file(file).items():
        if name == "gpt_oss" and value.dim() == 3:
            experts, columns, rows = value.shape
            shape = experts, rows, columns // 32
            tensors[f"{key}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
            tensors[f"{key}_scales"] = torch.randint(118, 124, shape, dtype=torch.uint8, generator=generator)
        elif (
            name != "gpt_oss"
            and value.dim() == 2
            and not any(part in key for part in ("embed", "head", "gate.w", "vision"))
        ):
            rows, columns = value.shape
            blocks = value.float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
            scales = blocks.abs().amax((1, 3)) / 448
            codes = blocks / scales[:, None, :, None]
            tensors[key] = codes.view(rows, columns).to(torch.float8_e4m3fn)
            tensors[f"{key}_scale_inv"] = scales
        else:
            tensors[key] = value
    save_file(tensors, file, metadata={"format": "pt"})
    said: dict[str, Any] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "model.embed_tokens"]}
    if name != "gpt_oss":
        said = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    config = json.loads((path / "config.json").read_text())
    part(config)["quantization_config"] = said
    (path / "config.json").write_text(json.dumps(config))


def load_plain(path: Path, class_name: str = "AutoModelForCausalLM") -> Any:
    return aligned(getattr(transformers, class_name).from_pretrained(path))


def opened(nvme_path: Path, path: Path, pool_bytes: str = "640KiB", **kwargs: Any) -> Any:
    return swapper.from_pretrained(path, config_for(nvme_path, pool_bytes=pool_bytes), **kwargs)


@pytest.mark.parametrize("at_once", [1, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_generate_gives_the_logits_of_from_pretrained(
    name: str, dtype: torch.dtype, at_once: int, nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few rows are dequantised at once."""
    monkeypatch.setattr(unread, "_AT_ONCE_BYTES", at_once)
    path = save_quantised(tmp_path / "model", name, dtype)
    model, plain = opened(nvme_path, path), load_plain(path)
    assert {p.dtype for p in model.parameters()} == {p.dtype for p in plain.parameters()} == {dtype}
    compare_generation(model, plain, torch.device("cpu"))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MODELS)
def test_on_an_accelerator_it_gives_the_logits_of_the_model_there(
    name: str, device: str, nvme_path: Path, tmp_path: Path
) -> None:
    on = torch.device(device, 0)
    path = save_quantised(tmp_path / "model", name)
    given = {"quantization_config": transformers.FineGrainedFP8Config(dequantize=True)} if name != "gpt_oss" else {}
    model = opened(nvme_path, path, "1MiB", device=on, **given)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    compare_generation(model, load_plain(path).to(on), on)


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt_oss"])
def test_a_token_reads_the_codes_of_what_it_uses(name: str, nvme_path: Path, tmp_path: Path) -> None:
    path = save_quantised(tmp_path / "model", name)
    model = opened(nvme_path, path, "256KiB" if name == "llama" else "384KiB")
    metrics, token = swapper_of(model).metrics, torch.zeros(1, 1, dtype=torch.int64)
    with torch.no_grad():
        model(token)
        before = metrics.bytes_read
        model(token)
    whole_bytes = sum(p.nbytes for p in model.parameters())
    # Spans of tiny tensors begin and end within pages.
    assert 0 < metrics.bytes_read - before < (0.9 if name == "llama" else 0.6) * whole_bytes
    swapper_of(model).close()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the length in bytes of all codes that are dequantised in one call, which are to be few."""
    monkeypatch.setattr(unread, "_AT_ONCE_BYTES", 1024)
    found: list[int] = []
    write = unread.RowWise.write

    def watched(self: unread.RowWise, into: torch.Tensor, args: Any) -> None:
        def function(*parts: torch.Tensor) -> torch.Tensor:
            found.append(parts[0].nbytes)
            return self.function(*parts)

        write(unread.RowWise(function, self.units), into, args)

    monkeypatch.setattr(unread.RowWise, "write", watched)
    return found


def test_memory_beside_the_pool_is_that_of_some_rows(at_once: list[int], nvme_path: Path, tmp_path: Path) -> None:
    """And not ten times the codes of a matrix, as where all of it is dequantised at once."""
    model = opened(nvme_path, save_quantised(tmp_path / "model", "llama"))
    with torch.no_grad():
        model(torch.arange(3)[None])
    assert at_once and max(at_once) == BLOCK * SIZES["intermediate_size"]
    swapper_of(model).close()


SCALES: dict[str, tuple[Callable[[int, int], tuple[int, ...]], torch.dtype]] = {
    "one": (lambda rows, columns: (), torch.bfloat16),
    "one in a list": (lambda rows, columns: (1,), torch.float32),
    "one in a table": (lambda rows, columns: (1, 1), torch.float16),
    "rows": (lambda rows, columns: (rows, 1), torch.float32),
    "columns": (lambda rows, columns: (1, columns // 4), torch.bfloat16),
    "powers of 2": (lambda rows, columns: (rows // 8, columns // 16), torch.float8_e8m0fnu),
    "exponents": (lambda rows, columns: (rows, columns // 32), torch.uint8),
}
"""Shapes of the scales of a matrix that transformers knows, and their dtypes."""


def scale_anew(path: Path, scales: str, name: str) -> None:
    shape_of, dtype = SCALES[scales]
    generator = torch.Generator().manual_seed(2)
    file = path / "model.safetensors"
    tensors = load_file(file)
    for key in [each for each in tensors if each.endswith("weight_scale_inv")]:
        del tensors[key]
        shape = shape_of(*tensors[key.removesuffix("_scale_inv")].shape)
        exponents = torch.randint(118, 122, shape, dtype=torch.uint8, generator=generator)
        values = torch.rand(shape, generator=generator) / 100
        made = values.to(dtype) if dtype.itemsize > 1 else exponents.view(dtype)
        tensors[key.removesuffix("weight_scale_inv") + name] = made
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.parametrize("scales", SCALES)
def test_scales_of_any_shape_and_dtype(
    scales: str, name: str, at_once: list[int], nvme_path: Path, tmp_path: Path
) -> None:
    """And few rows are dequantised at once, whatever has one scale."""
    path = save_quantised(tmp_path / "model", name)
    scale_anew(path, scales, "qscale_weight" if scales == "one" else "weight_scale_inv")
    if scales == "exponents":
        config = json.loads((path / "config.json").read_text())
        config["quantization_config"]["quant_method"] = "mxfp8"
        (path / "config.json").write_text(json.dumps(config))
    compare_generation(opened(nvme_path, path), load_plain(path), torch.device("cpu"))
    assert at_once and max(at_once) <= 8 * SIZES["intermediate_size"]


@pytest.mark.parametrize("shape", [(4, 3), (2, 1), (1, 4, 3), (4, 1, 3), (4,)], ids=str)
def test_experts_with_scales_in_common(shape: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few of them are made at once."""
    monkeypatch.setattr(unread, "_AT_ONCE_BYTES", 1)
    codes, scales = torch.randn(4, 8, 6).to(torch.float8_e4m3fn), torch.rand(shape)
    save_file({"codes": codes, "scales": scales}, tmp_path / "file.safetensors")
    stored = {each.name: Unread.of_file(each) for each in read_header(tmp_path / "file.safetensors")}
    converter = importlib.import_module("transformers.integrations.finegrained_fp8").Fp8Dequantize(None)
    with dequantised("fp8", lambda: True):
        made = converter._dequantize_one(stored["codes"], stored["scales"])
    values = torch.empty(made.shape, dtype=made.dtype)
    unread.write_values(made.recipe, values, lambda each: codes if each.name == "codes" else scales)
    assert bits(values) == bits(converter._dequantize_one(codes, scales))


def test_a_method_that_only_the_text_has(nvme_path: Path, tmp_path: Path) -> None:
    """The config of a model of text and images may say it there."""
    text = {key: value for key, value in SIZES.items() if not key.endswith("token_id")}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14})
    path = tmp_path / "model"
    transformers.Gemma3ForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(path)
    quantise(path, "gemma3", lambda said: said["text_config"])
    model, plain = opened(nvme_path, path, "1MiB"), load_plain(path, "Gemma3ForConditionalGeneration")
    compare_generation(model, plain, torch.device("cpu"))
    said = json.loads((path / "config.json").read_text())
    said["text_config"]["quantization_config"]["quant_method"] = "gptq"
    (path / "config.json").write_text(json.dumps(said))
    with pytest.raises(swapper.ConfigError, match=r"quantised model \(gptq\)"):
        opened(nvme_path, path)


UP = "model.layers.1.mlp.up_proj.weight"
EXPERTS = "model.layers.1.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("name", "key", "value", "says"),
    [
        ("llama", f"{UP}_scale_inv", None, rf"model.safetensors does not fit.*{UP} has quantised codes.*their scales"),
        ("llama", UP, None, f"lacks {UP}"),
        ("llama", f"{UP}_scale_inv", torch.ones(3, 5), r"up_proj.*divisible"),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.2.w3.weight_scale_inv", None, r"experts\.gate_up_proj"),
        ("gpt_oss", f"{EXPERTS}_scales", None, EXPERTS),
        ("gpt_oss", f"{EXPERTS}_scales", torch.zeros(4, 64, 2, dtype=torch.uint8), EXPERTS),
    ],
)
def test_what_does_not_fit_is_an_error_with_its_name(
    name: str, key: str, value: torch.Tensor | None, says: str, nvme_path: Path, tmp_path: Path
) -> None:
    path = save_quantised(tmp_path / "model", name)
    file = path / "model.safetensors"
    tensors = load_file(file)
    del tensors[key]
    save_file({**tensors, **({} if value is None else {key: value})}, file, metadata={"format": "pt"})
    with pytest.raises(swapper.SwapError, match=says):
        opened(nvme_path, path)
    assert list(nvme_path.iterdir()) == []


def test_memory_that_is_lacking_is_no_fault_of_the_files(
    nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> None:
        raise MemoryError("drawn")

    path = save_quantised(tmp_path / "model", "llama")
    monkeypatch.setattr("swapper.files.dequantised.Step", fails)
    with pytest.raises(MemoryError, match="drawn"):
        opened(nvme_path, path)


def test_a_config_that_would_quantise_is_refused(nvme_path: Path, tmp_path: Path) -> None:
    path = save_quantised(tmp_path / "model", "llama")
    for config in (transformers.FineGrainedFP8Config(), transformers.BitsAndBytesConfig(load_in_4bit=True)):
        with pytest.raises(swapper.ConfigError, match=r"quantization_config: .*dequantize=True"):
            opened(nvme_path, path, quantization_config=config)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_others_load_as_they_did(name: str, nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_quantised(tmp_path / "model", name)
    module_name, class_name, function = DEQUANTISES["mxfp4" if name == "gpt_oss" else "fp8"]
    owner = importlib.import_module(module_name)
    convert = getattr(owner, class_name).convert
    owner = getattr(owner, class_name) if "." in function else owner
    function = function.rpartition(".")[2]
    before = vars(owner)[function]
    swapper_of(opened(nvme_path, path)).close()
    assert vars(owner)[function] is before
    assert getattr(importlib.import_module(module_name), class_name).convert is convert
    monkeypatch.delattr(owner, function)
    with pytest.raises(swapper.ConfigError, match="this version of transformers dequantises"):
        opened(nvme_path, path)
