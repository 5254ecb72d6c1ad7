"""Models of transformers with fused experts, and the names that checkpoints have for those, one by one."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from torch import nn
from twins import bits

transformers = pytest.importorskip("transformers")

__all__ = ["EXPERTS", "Routed", "config_of", "generate", "made", "one_by_one", "tokens"]

EXPERTS = 6


def config_of(kind: str, **more: Any) -> Any:
    """A small model of a kind, with what `more` says in its config."""
    sizes: dict[str, Any] = {
        "vocab_size": 89, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64, "num_experts_per_tok": 2,
    }  # fmt: skip
    own: dict[str, dict[str, Any]] = {
        "mixtral": {"num_local_experts": EXPERTS},
        "phimoe": {"num_local_experts": EXPERTS},
        "qwen2_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 64},
        "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 48, "head_dim": 16},
        "gpt_oss": {"num_local_experts": EXPERTS, "head_dim": 16},
        "deepseek_v3": {
            "n_routed_experts": EXPERTS, "moe_intermediate_size": 48, "n_group": 2, "topk_group": 1,
            "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
            "qk_nope_head_dim": 16,
        },
    }  # fmt: skip
    return transformers.AutoConfig.for_model(kind, **(sizes | own[kind] | more))


def made(config: Any, dtype: torch.dtype, experts: str) -> nn.Module:
    """A model that runs its experts in this way: always the same values."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation=experts)
    return model.eval()


def one_by_one(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict with the names of Mixtral's and of Qwen's checkpoints, one tensor for each expert's matrix."""
    state: dict[str, torch.Tensor] = {}
    mixtral = model.config.model_type in ("mixtral", "phimoe")
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    for name, tensor in model.state_dict().items():
        name = name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name
        name = name.replace(".router.weight", ".gate.weight") if mixtral else name
        if (
            not (match := re.fullmatch(r"(.*experts)\.(gate_up|down)_proj", name))
            or model.config.model_type == "gpt_oss"
        ):
            state[name] = tensor
            continue
        for i, each in enumerate(tensor):
            if match[2] == "down":
                state[f"{match[1]}.{i}.{down}.weight"] = each
            else:
                state[f"{match[1]}.{i}.{gate}.weight"], state[f"{match[1]}.{i}.{up}.weight"] = each.chunk(2)
    return {name: state[name].clone() for name in sorted(state)}


def tokens(seed: int, count: int = 5, batch: int = 1) -> torch.Tensor:
    """A batch of prompts."""
    return torch.randint(0, 89, (batch, count), generator=torch.Generator().manual_seed(seed))


def generate(model: Any, batch: int = 1, **how: Any) -> object:
    """The tokens, and the logits of each step, for a batch of prompts."""
    torch.manual_seed(3)
    given = tokens(1, batch=batch).to(model.device)
    made = model.generate(given, max_new_tokens=6, output_logits=True, return_dict_in_generate=True, **how)
    return bits(made.sequences), bits(list(made.logits))


class Routed:
    """Notes which experts each layer's router has chosen, each time."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[tuple[int, set[int]]] = []
        modules = [module for module in model.modules() if hasattr(module, "gate_up_proj")]
        for layer, module in enumerate(m for m in modules if m.gate_up_proj.dim() == 3):
            module.register_forward_pre_hook(functools.partial(self._note, layer), with_kwargs=True)

    def _note(self, layer: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        chosen = next(a for a in (*args, *kwargs.values()) if a.dtype == torch.int64)
        self.calls.append((layer, set(chosen.reshape(-1).tolist())))
