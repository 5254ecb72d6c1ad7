"""A transformer that is compiled: the graph breaks at the hooks change its bits, and swapping does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from twins import Run, run_twice

WIDTH, HEADS, WORDS = 32, 2, 50


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()


class Block(nn.Module):
    """RMSNorm, rotary embedding, SDPA, SwiGLU, as in Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = Norm(), Norm()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        count, length, _ = x.shape
        h = self.before_attention(x)
        q, k, v = (
            projection(h).view(count, length, HEADS, -1).transpose(1, 2) for projection in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(rotate(q, angles), rotate(k, angles), v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(count, length, WIDTH))
        h = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = Norm()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.angles: Tensor
        self.register_buffer("angles", torch.outer(torch.arange(6.0), torch.arange(1.0, 1.0 + WIDTH // HEADS)))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.angles)
        logits: Tensor = self.head(self.norm(x))
        return logits


@torch.compiler.disable
def does_nothing(*_: object) -> None:
    pass


def break_graphs(model: nn.Module) -> None:
    """Hook what `swapper.offload` hooks."""
    for module in model.modules():
        if module is model or module._parameters:
            module.register_forward_pre_hook(does_nothing)
            module.register_forward_hook(does_nothing, always_call=True)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at inputs that are no leaves.
@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_bits_are_those_of_a_plain_model_compiled_with_the_same_graph_breaks(backend: str, nvme_path: Path) -> None:
    def program(run: Run) -> None:
        torch.compiler.reset()
        if not run.swapped:
            break_graphs(run.model)
        compiled = torch.compile(run.model, backend=backend)
        for _ in range(2):
            tokens = torch.randint(WORDS, (2, 6), generator=run.generator)
            loss = F.cross_entropy(compiled(tokens).flatten(0, 1), tokens.flatten())
            run.note("loss", loss)
            loss.backward()
            run.finish_step()

    run_twice(nvme_path, Transformer, program, watch=False)
