"""A GPT as a plain `nn.Module`, in nanoGPT's size classes. It knows nothing of swapper."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["GPT", "SIZES", "Shape"]


@dataclass(frozen=True)
class Shape:
    """What a size class fixes. `context` is the longest sequence, in tokens."""

    layers: int
    heads: int
    width: int
    context: int


SIZES = {
    "tiny": Shape(layers=4, heads=4, width=128, context=128),
    "small": Shape(layers=12, heads=12, width=768, context=1024),
    "medium": Shape(layers=24, heads=16, width=1024, context=1024),
    "1.3b": Shape(layers=26, heads=16, width=2048, context=1024),
    "xl": Shape(layers=48, heads=25, width=1600, context=1024),
}


class Attention(nn.Module):
    """Causal self-attention; query, key and value in one matrix."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.proj = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.proj(y.transpose(1, 2).reshape(batch, length, width))
        return out


class Block(nn.Module):
    """Attention, then an MLP, each normalised before and added to the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        x = x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))
        return x


class GPT(nn.Module):
    """Pre-norm GPT-2 with learned positions and GPT-2's initialisation.

    Args:
        shape: one of `SIZES`, or your own.
        vocab_size: number of token ids; 256 is every byte.
        tied: whether the output layer shares the token embedding's weight.
        recompute: keep only the input of each block for backward, and compute the block again there (activation
            checkpointing): memory for one block's activations instead of all.
    """

    def __init__(self, shape: Shape, vocab_size: int = 256, tied: bool = False, recompute: bool = False) -> None:
        super().__init__()
        self.context = shape.context
        self.recompute = recompute
        self.tokens = nn.Embedding(vocab_size, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, vocab_size, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self._initialise(shape.layers)

    def _initialise(self, layers: int) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2:
                # Two matrices of every block add to the residual stream: its variance must not grow with depth.
                residual = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, (batch, length, vocab_size), of `tokens`, (batch, length) int64 with length <= context."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute and self.training else block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats a token, in fp32 whatever the parameters' dtype."""
        return F.cross_entropy(self(tokens).flatten(0, 1).float(), targets.flatten())

    @torch.no_grad()
    def generate(self, prompt: Tensor, count: int, temperature: float = 0.7, seed: int = 0) -> Tensor:
        """Sample `count` tokens after `prompt`, (length,) int64 on the CPU; returns both, (length + count,)."""
        generator = torch.Generator().manual_seed(seed)
        device = self.tokens.weight.device
        tokens = prompt
        for _ in range(count):
            logits = self(tokens[-self.context :].to(device)[None])[0, -1].float().cpu()
            probabilities = torch.softmax(logits / temperature, dim=0)
            tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=generator)])
        return tokens
