"""A model whose packed weights stay in their files gives the bits of the plain one, and reads a third less."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from twins import bits, config_for, small_records, swapper_of
from weight_files import state_to_save, write_weights

import swapper
from swapper.files import packing
from swapper.files.packed_tensors import PackedTensor
from swapper.files.weights import find_weights
from swapper.parameter import from_files

transformers = pytest.importorskip("transformers")

from pretrained import aligned, generated, inputs_for, save_any  # noqa: E402

pytestmark = pytest.mark.timeout(240)

LARGER = {
    "hidden_size": 256, "intermediate_size": 384, "head_dim": 64,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", LARGER),
    "qwen2 tied": ("Qwen2ForCausalLM", {**LARGER, "tie_word_embeddings": True}),
    "mixtral": ("MixtralForCausalLM", {**LARGER, "num_local_experts": 4}),
}


@pytest.fixture(autouse=True)
def _short_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(packing, "LEAST_BYTES", 8 << 10)
    monkeypatch.setattr(packing, "_PART_BYTES", 100_000)  # Matrices have several.
    monkeypatch.setattr(from_files, "_SMALL_BYTES", 8 << 10)
    with small_records():
        yield


def config(nvme_path: Path, pool_bytes: int | str, **offload_param: Any) -> swapper.OffloadConfig:
    settings = {"device": "nvme", **offload_param}
    return config_for(nvme_path, pool_bytes=pool_bytes, offload_optimizer={"device": "none"}, offload_param=settings)


def run(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[Any, int]:
    """What a model generates, and the bytes that it read."""
    made = generated(model, inputs, do_sample=False)
    metrics = swapper_of(model).metrics
    assert metrics.bytes_written == 0
    read = metrics.bytes_read
    swapper_of(model).close()
    return made, read


@pytest.mark.parametrize("name", MODELS)
def test_a_packed_model_generates_the_same_and_reads_less(name: str, nvme_path: Path, tmp_path: Path) -> None:
    class_name, more = MODELS[name]
    made = save_any(tmp_path / "model", class_name, torch.bfloat16, 600_000, **more)
    sizes = swapper.pack_weights(tmp_path / "model", tmp_path / "packed")
    assert sizes.to_bytes < sizes.from_bytes * (
        0.75 if "tied" in name else 0.78
    )  # Heads of their own leave embeddings.
    plain = aligned(made.from_pretrained(tmp_path / "model", dtype=torch.bfloat16))
    inputs = inputs_for(plain, 2, torch.Generator().manual_seed(2))
    expected = generated(plain, inputs, do_sample=False)
    read = []
    for directory in ("model", "packed"):
        model = swapper.from_pretrained(tmp_path / directory, config(nvme_path, "2MiB"), dtype="auto")
        assert type(model) is made and {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert bits(dict(model.named_buffers())) == bits(dict(plain.named_buffers()))
        tokens, count = run(model, inputs)
        assert tokens == expected
        read.append(count)
    assert 0 < read[1] <= read[0] * 0.75


def test_what_is_in_the_pool_takes_no_more_than_the_weights(nvme_path: Path, tmp_path: Path) -> None:
    save_any(tmp_path / "model", "LlamaForCausalLM", torch.bfloat16, 600_000, **LARGER)
    swapper.pack_weights(tmp_path / "model", tmp_path / "packed")
    lengths = []
    for directory in ("model", "packed"):
        model = swapper.from_pretrained(tmp_path / directory, config(nvme_path, "2MiB"), dtype="auto")
        lengths.append([record.length_bytes for record in swapper_of(model).plan.records])
        swapper_of(model).close()
    assert all(packed <= plain + (16 << 10) for plain, packed in zip(*lengths, strict=True))


@pytest.mark.parametrize(
    "given", [{"resident_bytes": "500KiB"}, {"copy_on_write": True}, {"experts": "whole"}], ids=str
)
def test_settings_of_parameters_work(given: dict[str, Any], nvme_path: Path, tmp_path: Path) -> None:
    made = save_any(tmp_path / "model", "MixtralForCausalLM", torch.bfloat16, 600_000, **MODELS["mixtral"][1])
    swapper.pack_weights(tmp_path / "model", tmp_path / "packed")
    plain = aligned(made.from_pretrained(tmp_path / "model", dtype=torch.bfloat16))
    inputs = inputs_for(plain, 2, torch.Generator().manual_seed(2))
    model = swapper.from_pretrained(tmp_path / "packed", config(nvme_path, "8MiB", **given), dtype="auto")
    if given.get("copy_on_write"):  # What is changed is in a file of the run from then on.
        for each in (model, plain):
            with torch.no_grad():
                each.model.layers[0].self_attn.q_proj.weight.mul_(2)
        assert generated(model, inputs, do_sample=False) == generated(plain, inputs, do_sample=False)
        swapper_of(model).close(keep_values=True)
        assert bits(dict(model.state_dict())) == bits(dict(plain.state_dict()))
        return
    assert run(model, inputs)[0] == generated(plain, inputs, do_sample=False)


@pytest.mark.parametrize("name", MODELS)
def test_a_packed_model_that_is_cast_has_the_bits_of_one_in_memory(name: str, nvme_path: Path, tmp_path: Path) -> None:
    class_name, more = MODELS[name]
    made = save_any(tmp_path / "model", class_name, torch.bfloat16, 600_000, **more)
    swapper.pack_weights(tmp_path / "model", tmp_path / "packed")
    plain = aligned(made.from_pretrained(tmp_path / "model", dtype=torch.float32))
    inputs = inputs_for(plain, 2, torch.Generator().manual_seed(2))
    model = swapper.from_pretrained(tmp_path / "packed", config(nvme_path, "16MiB"), dtype=torch.float32)
    assert run(model, inputs)[0] == generated(plain, inputs, do_sample=False)


def test_fp32_is_left_as_it_is(nvme_path: Path, tmp_path: Path) -> None:
    more = {"n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 64}
    made = save_any(tmp_path / "model", "GPT2LMHeadModel", torch.float32, 600_000, **more)
    sizes = swapper.pack_weights(tmp_path / "model", tmp_path / "packed")
    assert sizes.changed == 0 and sizes.to_bytes == sizes.from_bytes
    plain = aligned(made.from_pretrained(tmp_path / "model"))
    inputs = inputs_for(plain, 2, torch.Generator().manual_seed(2))
    model = swapper.from_pretrained(tmp_path / "packed", config(nvme_path, "4MiB"))
    assert run(model, inputs)[0] == generated(plain, inputs, do_sample=False)


def test_transposed_matrices_come_packed(nvme_path: Path, tmp_path: Path) -> None:
    more = {"n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 64}
    made = save_any(tmp_path / "model", "GPT2LMHeadModel", torch.bfloat16, 600_000, **more)
    assert swapper.pack_weights(tmp_path / "model", tmp_path / "packed").changed > 0
    plain = aligned(made.from_pretrained(tmp_path / "model", dtype=torch.bfloat16))
    inputs = inputs_for(plain, 2, torch.Generator().manual_seed(2))
    model = swapper.from_pretrained(tmp_path / "packed", config(nvme_path, "4MiB"), dtype="auto")
    assert run(model, inputs)[0] == generated(plain, inputs, do_sample=False)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "one by one"])
def test_offload_with_packed_weights_reads_the_experts_that_are_used(
    fused: bool, nvme_path: Path, tmp_path: Path
) -> None:
    made = save_any(tmp_path / "model", "MixtralForCausalLM", torch.bfloat16, 600_000, **MODELS["mixtral"][1])
    plain = aligned(made.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)).eval()
    if fused:
        (tmp_path / "fused").mkdir()
        write_weights(tmp_path / "fused" / "model.safetensors", state_to_save(plain))
    src = tmp_path / ("fused" if fused else "model")
    swapper.pack_weights(src, tmp_path / "packed")
    names = {tensor.name for tensor in find_weights(tmp_path / "packed") if isinstance(tensor, PackedTensor)}
    assert any(("gate_up_proj" if fused else ".experts.0.") in name for name in names)
    inputs = inputs_for(plain, 1, torch.Generator().manual_seed(2))
    expected = generated(plain, inputs, do_sample=False)
    read = []
    for directory in (src, tmp_path / "packed"):
        model = aligned(made.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)).eval()
        swapper.offload(model, config=config(nvme_path, "3MiB"), weights=directory)
        assert swapper_of(model).plan.experts.fused
        tokens, count = run(model, inputs)
        assert tokens == expected
        read.append(count)
    assert 0 < read[1] <= read[0] * 0.8


def test_an_embedding_is_read_by_rows(nvme_path: Path, tmp_path: Path) -> None:
    more = {**LARGER, "vocab_size": 9000}  # 4.6 MB: long enough for that.
    made = save_any(tmp_path / "model", "LlamaForCausalLM", torch.bfloat16, 6_000_000, **more)
    swapper.pack_weights(tmp_path / "model", tmp_path / "packed")
    plain = aligned(made.from_pretrained(tmp_path / "model", dtype=torch.bfloat16))
    inputs = inputs_for(plain, 1, torch.Generator().manual_seed(2))
    model = swapper.from_pretrained(tmp_path / "packed", config(nvme_path, "16MiB"), dtype="auto")
    [by_rows] = swapper_of(model).plan.experts.fused
    assert by_rows.parameter is model.get_parameter("model.embed_tokens.weight")
    assert run(model, inputs)[0] == generated(plain, inputs, do_sample=False)


def test_transformers_does_not_take_it_for_a_model_of_its_own(tmp_path: Path) -> None:
    made = save_any(tmp_path / "model", "LlamaForCausalLM", torch.bfloat16, 600_000, **LARGER)
    swapper.pack_weights(tmp_path / "model", tmp_path / "packed")
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        made.from_pretrained(tmp_path / "packed")
    swapper.unpack_weights(tmp_path / "packed", tmp_path / "back")
    assert bits(dict(made.from_pretrained(tmp_path / "back").state_dict())) == bits(
        dict(made.from_pretrained(tmp_path / "model").state_dict())
    )


def test_damage_is_an_error_that_names_the_tensor_each_time(nvme_path: Path, tmp_path: Path) -> None:
    save_any(tmp_path / "model", "LlamaForCausalLM", torch.bfloat16, 600_000, **LARGER)
    swapper.pack_weights(tmp_path / "model", tmp_path / "packed")
    tensors = {tensor.name: tensor for tensor in find_weights(tmp_path / "packed")}
    damaged = tensors["model.layers.1.mlp.up_proj.weight"]
    assert isinstance(damaged, PackedTensor)
    part = damaged.parts[-1]
    data = bytearray(part.path.read_bytes())
    data[part.start_bytes + 42] ^= 1  # The number of escapes of its first chunk.
    part.path.write_bytes(data)
    model = swapper.from_pretrained(tmp_path / "packed", config(nvme_path, "3MiB"), dtype="auto")
    for _ in range(2):
        with pytest.raises(swapper.SwapIOError, match=r"up_proj\.weight\.packed\.\d cannot be unpacked") as raised:
            model(torch.tensor([[1, 2, 3]]))
        assert raised.value.errno == errno.EBADMSG and str(part.path) in str(raised.value)
    swapper_of(model).close()


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_on_an_accelerator(name: str, nvme_path: Path, tmp_path: Path, device: str) -> None:
    on = torch.device(device, 0)
    class_name, more = MODELS[name]
    made = save_any(tmp_path / "model", class_name, torch.bfloat16, 600_000, **more)
    swapper.pack_weights(tmp_path / "model", tmp_path / "packed")
    plain = aligned(made.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)).to(on)
    inputs = {key: each.to(on) for key, each in inputs_for(plain, 2, torch.Generator().manual_seed(2)).items()}
    model = swapper.from_pretrained(tmp_path / "packed", config(nvme_path, "8MiB"), dtype="auto", device_map=on)
    assert run(model, inputs)[0] == generated(plain, inputs, do_sample=False)
