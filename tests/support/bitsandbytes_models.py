"""Models of transformers that bitsandbytes has quantised, tiny, as people have them in directories."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import transformers
from pretrained import save_any
from torch import nn

from swapper.tensors.inner import inner_tensors

__all__ = ["KINDS", "STRUCTURES", "load_plain", "save_quantised"]

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # It says in each forward of 8 bits that it casts to fp16.

KINDS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4 twice": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "fp4 twice": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}
"""Arguments of `BitsAndBytesConfig`."""

STRUCTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"intermediate_size": 128}),
    "qwen2 tied": ("Qwen2ForCausalLM", {"intermediate_size": 192, "tie_word_embeddings": True}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "t5": ("T5ForConditionalGeneration", {"d_ff": 128}),
}
"""By name: class of transformers, and what its config has besides. bitsandbytes packs matrices of whole blocks only."""


def save_quantised(
    path: Path,
    structure: str,
    kind: str,
    dtype: torch.dtype,
    shard_bytes: int = 40_000,
    storage: torch.dtype = torch.uint8,
    **sizes: Any,
) -> Path:
    """Save a model with random values, quantised, in shards, and as it was. Returns the directory of the first.

    Args:
        path: of a directory for both.
        structure, kind: of `STRUCTURES` and `KINDS`.
        dtype, shard_bytes: as for `save_any`.
        storage: dtype of 4-bit codes.
        sizes: of the model's config, besides those of the structure.
    """
    name, more = STRUCTURES[structure]
    save_any(path / "plain", name, dtype, shard_bytes, **{**more, **sizes})
    asked = transformers.BitsAndBytesConfig(**KINDS[kind], bnb_4bit_quant_storage=storage)
    # In its dtype, else fp16 is quantised.
    model = getattr(transformers, name).from_pretrained(path / "plain", quantization_config=asked, dtype=dtype)
    model.save_pretrained(path / "model", max_shard_size=shard_bytes)
    return path / "model"


def load_plain(path: Path, **kwargs: Any) -> Any:
    """The reference: what transformers makes of it in memory, with all tensors at multiples of 64 bytes."""
    name = transformers.AutoConfig.from_pretrained(path).architectures[0]
    model = getattr(transformers, name).from_pretrained(path, **kwargs)
    for prefix, module in model.named_modules():
        _align(prefix, module)
    return model


def _align(prefix: str, module: nn.Module) -> None:
    for name, p in module._parameters.items():
        for inner in () if p is None else inner_tensors(f"{prefix}.{name}", p, module):
            inner.tensor.data = inner.tensor.detach().clone()
            for alias in inner.aliases:
                alias.data = inner.tensor.data
            assert inner.tensor.data_ptr() % 64 == 0
