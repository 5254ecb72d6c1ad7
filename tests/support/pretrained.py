"""Models of transformers, tiny, as people have them in directories; and the reference that they are compared with."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from twins import bits, swapper_of

__all__ = [
    "CACHE",
    "GENERATES",
    "VOCABULARY",
    "aligned",
    "change",
    "compare_generation",
    "generated",
    "inputs_for",
    "save_any",
    "save_tiny",
]

VOCABULARY = 96

CACHE = "cache" if "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters else "past_key_values"
"""How a model is given its cache: before transformers 5.24 by the second name."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "decoder_start_token_id": 1,
    "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96,
    "num_mel_bins": 8, "max_source_positions": 32, "max_target_positions": 64,
}  # fmt: skip

GENERATES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "qwen2 tied": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}),
}
"""By name: class of transformers, and what its config has besides `SIZES`."""


def save_tiny(path: Path, name: str, dtype: torch.dtype, shard_bytes: int = 50_000) -> type[nn.Module]:
    """Save a model of `GENERATES` with random values, in shards. Returns its class."""
    class_name, more = GENERATES[name]
    return save_any(path, class_name, dtype, shard_bytes, **more)


def save_any(path: Path, name: str, dtype: torch.dtype, shard_bytes: int = 50_000, **more: Any) -> Any:
    """Save a model of a class of transformers, with random values, in shards. Returns its class."""
    model_class = getattr(transformers, name)
    known = {key: value for key, value in SIZES.items() if _has(model_class.config_class, key)}
    torch.manual_seed(len(name))
    given = {key: value for key, value in {**known, **more}.items() if value is not ...}
    model = model_class(model_class.config_class(**given)).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) / 20)
    model.save_pretrained(path, max_shard_size=shard_bytes)
    return model_class


def _has(config_class: type, key: str) -> bool:
    if key in getattr(config_class, "attribute_map", {}):
        return True
    return key in inspect.signature(config_class.__init__).parameters or hasattr(config_class, key)


def aligned(model: nn.Module) -> nn.Module:
    """The reference: `model` as `from_pretrained` makes it, with its parameters at multiples of 64 bytes.

    Without that tensors are where the file has them, and a matrix off a multiple of 16 bytes may give other bits.
    """
    for p in model.parameters():
        p.data = p.data.clone()
        assert p.data_ptr() % 64 == 0
    return model


def inputs_for(model: nn.Module, batch: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """A prompt of several lengths, padded on the left."""
    tokens = torch.randint(3, VOCABULARY, (batch, 7), generator=generator)
    mask = torch.ones_like(tokens)
    for i in range(1, batch):
        tokens[i, :i], mask[i, :i] = 0, 0
    return {"input_ids": tokens, "attention_mask": mask}


def generated(model: Any, inputs: dict[str, torch.Tensor], **kwargs: Any) -> Any:
    """All bits of what `generate` gives: tokens, and the logits of every step."""
    torch.manual_seed(11)
    made = model.generate(
        **inputs, max_new_tokens=4, output_logits=True, return_dict_in_generate=True, pad_token_id=0, **kwargs
    )
    return bits(made.sequences), bits(list(made.logits))


def change(path: Path, name: str, value: torch.Tensor | None) -> None:
    """Let the file of a directory that has a tensor have another in its place, or none."""
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            with safe_open(file, "pt") as before:
                metadata = before.metadata()
            del tensors[name]
            save_file(tensors if value is None else {**tensors, name: value}, file, metadata)
            index = path / "model.safetensors.index.json"
            table = json.loads(index.read_text())
            if value is None:
                del table["weight_map"][name]
            index.write_text(json.dumps(table))


def compare_generation(model: Any, plain: Any, device: torch.device) -> None:
    """Assert that both, on `device`, generate with the same logits: of one prompt and several, greedy and by chance.

    `model` has its weights in files then, which are read and not written; its swapper is closed, and the values stay.
    """
    start = {"decoder_start_token_id": 1} if plain.config.is_encoder_decoder else {}
    for batch in (1, 4):
        inputs = inputs_for(plain, batch, torch.Generator().manual_seed(batch))
        inputs = {name: each.to(device) for name, each in inputs.items()}
        for way in ({"do_sample": False}, {"do_sample": True, "top_k": 20}):
            assert generated(model, inputs, **way, **start) == generated(plain, inputs, **way, **start)
    metrics = swapper_of(model).metrics
    assert metrics.bytes_read and not metrics.bytes_written
    swapper_of(model).close(keep_values=True)
    assert bits(dict(model.state_dict())) == bits(dict(plain.state_dict()))
