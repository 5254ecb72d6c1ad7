"""Models quantised by torchao and bitsandbytes, frozen on the drive, give the bits of memory, under adapters too."""

from __future__ import annotations

import importlib
import io
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised import Adapted
from safetensors.torch import save_file
from torch import nn
from twins import Run, bits, config_for, facts_of, run_twice, small_records, swapper_of

import swapper
from swapper.tensors.evicted import is_evicted

WIDTH = 128
DEPTH = 5


def module_of(name: str) -> Any:
    """A library that may not be installed, or not be fit for this machine. What it warns of is its own."""
    pytest.importorskip(name.partition(".")[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def torchao(config: str, **options: Any) -> nn.Module:
    quantization = module_of("torchao.quantization")
    base = nn.Linear(WIDTH, WIDTH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization.quantize_(base, getattr(quantization, config)(**options))
    return base


def torchao_nf4(width: int = WIDTH) -> nn.Module:
    nf4 = module_of("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")

    class Linear(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = nf4.linear_nf4(x, self.weight) + self.bias
            return y

    base = Linear(width, width)
    base.weight = nn.Parameter(nf4.to_nf4(base.weight.detach(), 64, 256), requires_grad=False)
    return base


def bitsandbytes(layer: str, **options: Any) -> nn.Module:
    base: nn.Module = getattr(module_of("bitsandbytes").nn, layer)(WIDTH, WIDTH, **options).to("cpu")
    return base


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "torchao int8": partial(torchao, "Int8WeightOnlyConfig"),
    "torchao float8": partial(torchao, "Float8WeightOnlyConfig"),
    "torchao intx": partial(torchao, "IntxWeightOnlyConfig"),
    "torchao nf4": torchao_nf4,
    "bitsandbytes nf4": partial(bitsandbytes, "Linear4bit", quant_type="nf4", compress_statistics=False),
    "bitsandbytes nf4 twice": partial(bitsandbytes, "Linear4bit", quant_type="nf4"),
    "bitsandbytes nf4 as bf16": partial(bitsandbytes, "Linear4bit", quant_type="nf4", quant_storage=torch.bfloat16),
    "bitsandbytes fp4": partial(bitsandbytes, "Linear4bit", quant_type="fp4"),
    "bitsandbytes int8": partial(bitsandbytes, "Linear8bitLt", has_fp16_weights=False, threshold=6.0),
}


@pytest.fixture(autouse=True)
def tables_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables of small models are short."""
    monkeypatch.setattr("swapper.parameter.candidates.SHORT_BYTES", 100)


def make(kind: str, depth: int = DEPTH) -> nn.Module:
    model = nn.Sequential(*(Adapted(LAYERS[kind](), WIDTH) for _ in range(depth)))
    for layer in model:
        layer.base.requires_grad_(False)  # type: ignore[operator, union-attr]
    return model


def trainable(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def program(run: Run) -> None:
    for step in range(2):
        run.model.train()
        run.model(torch.randn(3, WIDTH, generator=run.generator)).square().mean().backward()
        run.note_model(f"backward {step}")
        run.optimizer.step()
        run.note_model(f"step {step}")
        run.optimizer.zero_grad()
    run.model.eval()
    for rows in (1, 5):
        with torch.no_grad():
            run.note(f"{rows} rows", run.model(torch.randn(rows, WIDTH, generator=run.generator)))
    run.facts = facts_of(run.model)  # On some processors bitsandbytes packs weights in evaluation.


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", LAYERS)
def test_adapters_over_a_quantised_model_are_trained_to_the_bit(kind: str, nvme_path: Path) -> None:
    run_twice(nvme_path, lambda: make(kind), program, trainable, watch=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", LAYERS)
def test_state_dicts_are_those_of_memory(kind: str, nvme_path: Path) -> None:
    torch.manual_seed(0)
    want = make(kind, 3).state_dict()
    torch.manual_seed(0)
    model = make(kind, 3)
    weight: Any = model[0].base.weight  # type: ignore[union-attr]
    of_class = type(weight)
    with small_records():
        swapper.offload(model, config=config_for(nvme_path))
    assert type(weight).__name__ == of_class.__name__ and isinstance(weight, of_class)
    state = model.state_dict()
    assert not any(held.has_views() for held in swapper_of(model)._all)
    assert list(state) == list(want) and all(bits(state[name]) == bits(want[name]) for name in want)
    file = io.BytesIO()
    torch.save(dict(state), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert all(bits(loaded[name]) == bits(want[name]) for name in want)
    swapper_of(model).close(keep_values=True)
    assert type(weight) is of_class and not is_evicted(weight)
    after = model.state_dict()
    assert all(bits(after[name]) == bits(want[name]) for name in want)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", LAYERS)
def test_checkpoints(kind: str, nvme_path: Path, tmp_path: Path) -> None:
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = make(kind, 3).train()
        with small_records():
            swapper.offload(model, config=config_for(nvme_path))
        models.append(model)
    want = {name: bits(value) for name, value in models[0].state_dict().items()}
    swapper.save_checkpoint(tmp_path / "checkpoint", models[0])
    swapper.load_checkpoint(tmp_path / "checkpoint", models[1])
    loaded = models[1].state_dict()
    # What bitsandbytes packs of its own numbers is no tensor of the model.
    assert all(bits(loaded[name]) == value for name, value in want.items() if "quant_state" not in name)
    x = torch.randn(3, WIDTH, requires_grad=True)
    assert bits(models[1](x)) == bits(models[0](x))
    for model in models:
        swapper_of(model).close()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [kind for kind in LAYERS if kind.startswith("bitsandbytes")])
def test_a_bias_that_its_module_casts(kind: str, nvme_path: Path) -> None:
    """As after a norm in another dtype: the forward of the module gives the bias the dtype of its input, for good."""

    def made() -> nn.Module:
        model = make(kind).requires_grad_(False)
        for layer in model:
            layer.base.bias.data = layer.base.bias.data.bfloat16()  # type: ignore[union-attr, operator]
        return model

    def cast(run: Run) -> None:
        run.model.eval()
        with torch.no_grad():
            run.note("fp32", run.model(torch.randn(3, WIDTH, generator=run.generator)))
        run.facts = facts_of(run.model)

    run_twice(nvme_path, made, cast, lambda model: torch.optim.SGD(model.parameters()), watch=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["torchao int8", "torchao float8"])
def test_files_of_torchao(kind: str, nvme_path: Path, tmp_path: Path) -> None:
    support = module_of("torchao.prototype.safetensors.safetensors_support")
    torch.manual_seed(0)
    reference = make(kind)
    flat, metadata = support.flatten_tensor_state_dict({n: p.detach() for n, p in reference.state_dict().items()})
    save_file(flat, tmp_path / "model.safetensors", metadata)
    model = make(kind)
    config = config_for(nvme_path, bucket_bytes="64KiB", pool_bytes="192KiB")
    with small_records():
        swapper.offload(model, config=config, weights=tmp_path)
    x = torch.randn(3, WIDTH)
    with torch.no_grad():
        assert all(bits(model(x)) == bits(reference(x)) for _ in range(2))
    assert not swapper_of(model).metrics.bytes_written
    swapper_of(model).close()


@pytest.mark.filterwarnings("ignore")
def test_weights_of_4_bits_are_read_in_a_quarter_of_the_bytes_of_bf16(nvme_path: Path) -> None:
    """And their scales, which are a byte for 64 of them."""
    width, read_bytes = 512, []
    for make_layer in (partial(torchao_nf4, width), partial(nn.Linear, width, width, dtype=torch.bfloat16)):
        model = nn.Sequential(*(make_layer() for _ in range(20))).requires_grad_(False)
        x = torch.randn(2, width).to(next(model.parameters()).dtype)
        with torch.no_grad():
            want = bits(model(x))
            swapper.offload(model, config=config_for(nvme_path, bucket_bytes="512KiB", pool_bytes="1536KiB"))
            assert all(bits(model(x)) == want for _ in range(4))
        read_bytes.append(swapper_of(model).metrics.bytes_read)
        swapper_of(model).close()
    assert 0 < read_bytes[0] < 0.3 * read_bytes[1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("kind", ["torchao int8", "bitsandbytes nf4"])
def test_peft_over_a_quantised_llama_with_everything_on_the_drive(
    kind: str, checkpointing: bool, nvme_path: Path
) -> None:
    peft, transformers = module_of("peft"), module_of("transformers")

    def llama() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        shape = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_attention_heads": 4, "num_hidden_layers": 3}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=99, **shape))
        for layer in model.model.layers:
            for block, name in ((layer.self_attn, "q_proj"), (layer.self_attn, "v_proj"), (layer.mlp, "up_proj")):
                setattr(block, name, LAYERS[kind]())
        adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
        model = peft.get_peft_model(model, adapters).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
            model.enable_input_require_grads()
        return model, trainable(model)

    def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        generator, found = torch.Generator().manual_seed(3), []
        for _ in range(2):
            tokens = torch.randint(0, 99, (2, 8), generator=generator)
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            found.append(bits(loss))
            optimizer.step()
            optimizer.zero_grad()
        return [*found, *(bits(p) for p in model.parameters() if p.requires_grad)]

    want = trained(*llama())
    model, optimizer = llama()
    sections = {key: {"device": "nvme"} for key in ("offload_optimizer", "offload_gradient", "offload_param")}
    config = config_for(nvme_path, bucket_bytes="128KiB", pool_bytes="1MiB", **sections)
    with small_records():
        swapper.offload(model, optimizer, config)
    assert trained(model, optimizer) == want
    assert swapper_of(model).metrics.reads
    swapper.unwrap_optimizer(optimizer)
    swapper_of(model).close()
