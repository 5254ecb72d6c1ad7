"""A model of transformers on an accelerator, whose weights stay in its files, gives the bits of the plain one there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from twins import bits, config_for, small_records, swapper_of

import swapper
from swapper.parameter import from_files

transformers = pytest.importorskip("transformers")

from pretrained import CACHE, GENERATES, aligned, generated, inputs_for, save_any, save_tiny  # noqa: E402

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(autouse=True)
def _all_move(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(from_files, "_SMALL_BYTES", 300)
    with small_records():
        yield


@pytest.fixture
def device(device: str) -> torch.device:
    """The first device of the type: see `accelerators`."""
    return torch.device(device, 0)


def pretrained(nvme_path: Path, path: Path, pool_bytes: str = "1MiB", **kwargs: Any) -> Any:
    config = config_for(nvme_path, pool_bytes=pool_bytes, offload_optimizer={"device": "none"})
    return swapper.from_pretrained(path, config, **kwargs)


def plain_of(model_class: Any, path: Path, device: torch.device, **kwargs: Any) -> Any:
    return aligned(model_class.from_pretrained(path, **kwargs)).to(device)


def moved(inputs: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device) for name, tensor in inputs.items()}


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", GENERATES)
def test_generate_gives_the_logits_of_the_model_on_the_device(
    name: str, dtype: torch.dtype, way: str, nvme_path: Path, tmp_path: Path, device: torch.device
) -> None:
    made = save_tiny(tmp_path / "model", name, dtype)
    model = pretrained(nvme_path, tmp_path / "model", device_map=device)
    plain = plain_of(made, tmp_path / "model", device)
    assert type(model) is made and model.device == device and not model.training
    assert {each.device for each in (*model.parameters(), *model.buffers())} == {device}
    assert [bits(b) for b in model.buffers()] == [bits(b) for b in plain.buffers()]
    assert swapper_of(model).plan.records
    inputs = moved(inputs_for(plain, 3, torch.Generator().manual_seed(3)), device)
    assert generated(model, inputs, **WAYS[way]) == generated(plain, inputs, **WAYS[way])
    assert swapper_of(model).metrics.bytes_written == 0
    swapper_of(model).close()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "WhisperForConditionalGeneration"])
def test_encoders_and_decoders(name: str, nvme_path: Path, tmp_path: Path, device: torch.device) -> None:
    made = save_any(tmp_path / "model", name, torch.float32)
    model, plain = pretrained(nvme_path, tmp_path / "model", device=device), plain_of(made, tmp_path / "model", device)
    inputs = inputs_for(plain, 2, torch.Generator().manual_seed(2))
    if "Whisper" in name:
        inputs = {"input_features": torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(2))}
    way = {**WAYS["greedy"], "decoder_start_token_id": 1}
    assert generated(model, moved(inputs, device), **way) == generated(plain, moved(inputs, device), **way)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("asked", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["llama tied", "mixtral", "gpt2"])
def test_another_dtype_is_cast_in_the_pool(
    name: str, asked: torch.dtype, nvme_path: Path, tmp_path: Path, device: torch.device
) -> None:
    saved = torch.bfloat16 if asked == torch.float32 else torch.float32
    made = save_tiny(tmp_path / "model", name, saved)
    model = pretrained(nvme_path, tmp_path / "model", dtype=asked, device=device)
    plain = plain_of(made, tmp_path / "model", device, dtype=asked)
    assert {(p.dtype, p.device) for p in model.parameters()} == {(asked, device)}
    inputs = moved(inputs_for(plain, 2, torch.Generator().manual_seed(0)), device)
    assert generated(model, inputs, do_sample=False) == generated(plain, inputs, do_sample=False)


def test_the_device_is_named_by_device_map_or_device_or_is_the_default(
    nvme_path: Path, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path / "model", "llama", torch.float32)

    def where(**kwargs: Any) -> str:
        model = pretrained(nvme_path, tmp_path / "model", **kwargs)
        swapper_of(model).close()
        return str(model.device)

    here = str(device)
    for named in (device.type, here, device, 0, {"": 0}, {"": here}, {"model": device, "lm_head": 0}):
        assert where(device_map=named) == here
    assert where(device=here) == where(device=0, device_map=here) == here
    with device:
        assert where() == here and where(device_map="cpu") == "cpu"
    torch.set_default_device(device)
    try:
        assert where() == here
    finally:
        torch.set_default_device(None)
    assert where() == where(device_map="cpu") == where(device_map={"": "cpu"}) == "cpu"
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert where(device_map="auto") == here
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    assert where(device_map="auto") == "cpu"
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    for given in ({"device_map": "auto"}, {"device_map": {"model": "cpu", "lm_head": 0}},
                  {"device_map": "cpu", "device": device}):  # fmt: skip
        with pytest.raises(swapper.ConfigError, match=r"device_map: .*name one"):
            where(**given)


def test_what_transformers_makes_lies_on_the_device(nvme_path: Path, tmp_path: Path, device: torch.device) -> None:
    save_tiny(tmp_path / "model", "llama", torch.float32)
    made = transformers.LlamaForSequenceClassification
    torch.manual_seed(4)
    model = pretrained(nvme_path, tmp_path / "model", model_class=made, strict=False, device=device)
    torch.manual_seed(4)
    plain = plain_of(made, tmp_path / "model", device)
    assert swapper_of(model).stays["score.weight"] == "it is in no file"
    assert model.score.weight.device == device
    tokens = torch.arange(9)[None].to(device)
    with torch.no_grad():
        assert bits(model(tokens).logits) == bits(plain(tokens).logits)


@pytest.mark.parametrize("way", ["greedy", "beams"])
def test_keys_and_values_on_the_drive(way: str, nvme_path: Path, tmp_path: Path, device: torch.device) -> None:
    """Beside the weights in one pool, so that both go; a prompt longer than a record."""
    made = save_tiny(tmp_path / "model", "llama", torch.float32)
    config = config_for(nvme_path, pool_bytes="768KiB", offload_optimizer={"device": "none"})
    model = swapper.from_pretrained(tmp_path / "model", config, device=device)
    plain = plain_of(made, tmp_path / "model", device)
    tokens = torch.randint(3, 96, (2, 40), generator=torch.Generator().manual_seed(1)).to(device)
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    with swapper.OffloadedCache(config_for(nvme_path, pool_bytes="96KiB")) as cache:
        found = generated(model, inputs, **{CACHE: cache}, **WAYS[way])
        assert cache.stats().bytes_written and cache.layers[0].keys.device == device
    assert found == generated(plain, inputs, **WAYS[way])
