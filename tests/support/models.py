"""Models of all structures, and what goes into them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from twins import Run

Inputs = Callable[[torch.Generator], tuple[torch.Tensor, ...]]


WIDTH = 48


VOCABULARY = 96


def vectors(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    return (torch.randn(6, WIDTH, generator=generator),)


def sequences(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    return (torch.randn(2, 7, WIDTH, generator=generator),)


def tokens(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    return (torch.randint(VOCABULARY, (2, 9), generator=generator),)


def images(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    return (torch.randn(3, 3, 16, 16, generator=generator),)


def images_channels_last(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    return (images(generator)[0].to(memory_format=torch.channels_last),)


# --- Plain ------------------------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self, depth: int = 6, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class OddShapes(nn.Module):
    """No parameter's bytes are a multiple of 64."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [WIDTH, 37, 53, 61, 47, 59, 31]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.scale = nn.Parameter(torch.tensor(1.5))  # no dimensions
        self.one = nn.Parameter(torch.ones(1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        return x + self.one


# --- Transformers -----------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, rotary: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.rotary = rotary
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=not rotary) for _ in range(4))

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None, causal: bool = True) -> torch.Tensor:
        memory = x if memory is None else memory

        def split(t: torch.Tensor) -> torch.Tensor:
            return t.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        q, k, v = split(self.q(x)), split(self.k(memory)), split(self.v(memory))
        if self.rotary:
            q, k = rotate(q), rotate(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.o(y.transpose(1, 2).flatten(2))


def rotate(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] / 100.0 ** (torch.arange(half) / half)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1).to(x.dtype)


class GptBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(WIDTH, 4)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.ln1(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.ln2(x)))))


class Gpt2(nn.Module):
    """The head is the token embedding; the positions are a parameter of the root."""

    def __init__(self, functional: bool) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(16, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(GptBlock() for _ in range(3))
        self.ln = nn.LayerNorm(WIDTH)
        if not functional:
            self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
            self.lm_head.weight = self.wte.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.wte(x) + self.positions[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        h = self.ln(h)
        return self.lm_head(h) if hasattr(self, "lm_head") else F.linear(h, self.wte.weight)


class RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class LlamaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = RmsNorm(WIDTH), RmsNorm(WIDTH)
        self.attention = Attention(WIDTH, 4, rotary=True)
        self.gate, self.up = nn.Linear(WIDTH, 80, bias=False), nn.Linear(WIDTH, 80, bias=False)
        self.down = nn.Linear(80, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self, tied: bool, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=3)
        self.blocks = nn.ModuleList(LlamaBlock() for _ in range(3))
        self.norm = RmsNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.embedding.weight
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h)
        return self.lm_head(self.norm(h))


class T5Block(nn.Module):
    def __init__(self, decoder: bool) -> None:
        super().__init__()
        self.norm, self.norm_ff = RmsNorm(WIDTH), RmsNorm(WIDTH)
        self.attention = Attention(WIDTH, 4)
        if decoder:
            self.norm_cross, self.cross = RmsNorm(WIDTH), Attention(WIDTH, 4)
        self.wi, self.wo = nn.Linear(WIDTH, 64, bias=False), nn.Linear(64, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.attention(self.norm(x), causal=memory is not None)
        if memory is not None:
            x = x + self.cross(self.norm_cross(x), memory, causal=False)
        return x + self.wo(F.relu(self.wi(self.norm_ff(x)).to(self.wo.weight.dtype)))


class T5Stack(nn.Module):
    def __init__(self, embedding: nn.Embedding, decoder: bool) -> None:
        super().__init__()
        self.embedding = embedding
        self.blocks = nn.ModuleList(T5Block(decoder) for _ in range(1))
        self.bias = nn.Embedding(8, 1)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        h = self.embedding(x) + self.bias(torch.arange(x.shape[1]) % 8)
        for block in self.blocks:
            h = block(h, memory) if memory is not None else block(h)
        return h


class T5(nn.Module):
    """One embedding for encoder, decoder and head."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = T5Stack(self.shared, decoder=False)
        self.decoder = T5Stack(self.shared, decoder=True)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.shared.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.decoder(x.flip(1), self.encoder(x)) * WIDTH**-0.5)


class MambaBlock(nn.Module):
    """Reads weights of modules below it without calling them."""

    def __init__(self) -> None:
        super().__init__()
        inner, state, rank = 64, 4, 6
        self.norm = RmsNorm(WIDTH)
        self.in_proj = nn.Linear(WIDTH, 2 * inner, bias=False)
        self.conv = nn.Conv1d(inner, inner, 3, groups=inner, padding=2)
        self.x_proj = nn.Linear(inner, rank + 2 * state, bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        self.log_a = nn.Parameter(torch.arange(1.0, state + 1).repeat(inner, 1).log())
        self.d = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, WIDTH, bias=False)
        self.sizes = (rank, state, state)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, z = self.in_proj(self.norm(x)).chunk(2, -1)
        h = h.transpose(1, 2)
        h = F.conv1d(h, self.conv.weight, self.conv.bias, padding=2, groups=h.shape[1])[..., : x.shape[1]]
        h = F.silu(h).transpose(1, 2)
        dt, b, c = F.linear(h, self.x_proj.weight).split(self.sizes, -1)
        dt = F.softplus(dt @ self.dt_proj.weight.t() + self.dt_proj.bias)
        a = -self.log_a.float().exp()
        state = torch.zeros(x.shape[0], *a.shape)
        out = []
        for t in range(x.shape[1]):
            state = state * (dt[:, t, :, None] * a).exp() + (dt[:, t] * h[:, t])[..., None] * b[:, t, None]
            out.append((state * c[:, t, None]).sum(-1))
        y = torch.stack(out, 1) + h * self.d
        return x + self.out_proj((y * F.silu(z)).to(x.dtype))


class Mamba(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(MambaBlock() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h)
        return h @ self.embedding.weight.t()


class Experts(nn.Module):
    """Tokens choose one of six experts; those that no token chose do not run."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 6, bias=False)
        self.experts = nn.ModuleList(Mlp(1) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = x.shape
        x = x.reshape(-1, WIDTH)[:4]  # few tokens: some expert is always skipped
        weights = self.router(x).softmax(-1)
        best, chosen = weights.max(-1)
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            at = (chosen == number).nonzero()[:, 0]
            out = out.index_add(0, at, (self.experts[number](x[at]) * best[at, None]).to(out.dtype))
        return F.pad(out, (0, 0, 0, shape[0] * shape[1] - 4)).reshape(shape)


class Mixtral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Experts() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = h + block(h)
        return self.head(h)


class TorchEncoder(nn.Module):
    """Its layers have a fast path in evaluation."""

    def __init__(self, norm_first: bool = False) -> None:
        super().__init__()
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.1, batch_first=True, norm_first=norm_first),
            3,
            enable_nested_tensor=False,
        )
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x))


class TorchTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Transformer(WIDTH, 4, 1, 1, 64, batch_first=True, dropout=0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, x.flip(1))


class MultiheadAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.second = nn.MultiheadAttention(WIDTH, 4, batch_first=True, kdim=WIDTH, vdim=24, add_bias_kv=True)
        self.narrow = nn.Linear(WIDTH, 24)
        self.rest = Mlp(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.rest(x)
        x = x + self.first(x, x, x, need_weights=False)[0]
        return x + self.second(x, x, self.narrow(x))[0]


# --- Images -----------------------------------------------------------------------------------------------------------


class Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 17, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(GptBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.expand(h.shape[0], -1, -1), h], 1) + self.positions
        for block in self.blocks:
            h = block(h)
        return self.head(h[:, 0])


class ResnetBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class Resnet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(ResnetBlock(16) for _ in range(2))
        self.down = nn.Conv2d(16, 24, 3, stride=2, groups=2)
        self.norm = nn.GroupNorm(4, 24)
        self.up = nn.ConvTranspose2d(24, 8, 2)
        self.instance = nn.InstanceNorm2d(8, affine=True, track_running_stats=True)
        self.head = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        h = self.instance(self.up(self.norm(self.down(h))))
        return self.head(h.mean((2, 3)))


def resnet_channels_last() -> nn.Module:
    return Resnet().to(memory_format=torch.channels_last)


class Convolutions(nn.Module):
    """Of one and three dimensions, the latter with channels_last_3d weights."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(*(nn.Conv1d(WIDTH, WIDTH, 3, padding=1) for _ in range(5)))
        self.three = nn.Conv3d(3, 24, 3, padding=1).to(memory_format=torch.channels_last_3d)
        self.mix = nn.Bilinear(WIDTH, 24, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.one(x.transpose(1, 2)).mean(2)
        cube = h.reshape(-1, 3, 4, 2, 2)
        return self.mix(h, self.three(cube).mean((2, 3, 4)))


# --- Recurrent --------------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.inner = kind(WIDTH, 20, num_layers=2, bidirectional=True, batch_first=True, dropout=0.1)
        self.back = kind(40, WIDTH, batch_first=True)
        self.out = Mlp(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.back(self.inner(x)[0])[0])


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTMCell(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)
        self.rest = Mlp(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = torch.zeros(x.shape[0], WIDTH)
        for t in range(x.shape[1]):
            h, c = self.lstm(x[:, t], (h, c))
            h = self.gru(x[:, t], h)
        return self.rest(h)


# --- Odd structures ---------------------------------------------------------------------------------------------------


class Twice(nn.Module):
    """One module runs three times, once inside another."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Mlp(1), nn.Sequential(nn.Linear(WIDTH, WIDTH), self.again), Mlp(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.again(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.again(x)


class Changing(nn.Module):
    """Another order of its blocks in each forward, and some of them left out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp(1) for _ in range(6))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = torch.randperm(6)[:4].tolist()
        for i in chosen:
            x = self.blocks[i](x)
        return self.head(x)


class SharedModuleParameter(nn.Module):
    """One parameter under three names in modules of two classes, used in both orders of dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, WIDTH)
        self.decode = nn.Linear(WIDTH, WIDTH)
        self.decode.weight = self.encode.weight
        self.also = self.encode.weight
        self.between = Mlp(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.between(self.encode(x))) @ self.also.t()


class Containers(nn.Module):
    """Parameters in containers that have no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ParameterList(torch.randn(WIDTH, WIDTH) * 0.1 for _ in range(4))
        self.dict = nn.ParameterDict({name: torch.randn(WIDTH, WIDTH) * 0.1 for name in "abc"})
        self.inner = nn.ModuleDict({"x": Mlp(2)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for p in self.list:
            x = torch.tanh(x @ p)
        x = self.inner["x"](x)
        return x @ (self.dict["a"] + self.dict["b"]) + torch.einsum("ij,kj->ik", x, self.dict["c"])


class NormedWeights(nn.Module):
    """Weights computed from others, the old way by hooks and the new one by parametrizations."""

    def __init__(self, old: bool) -> None:
        super().__init__()
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        if old:
            with pytest.warns(FutureWarning):
                nn.utils.weight_norm(layers[0])
            nn.utils.spectral_norm(layers[1])
        else:
            parametrizations.weight_norm(layers[0])
            parametrizations.spectral_norm(layers[1])
            parametrizations.orthogonal(layers[2])
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Frozen(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.blocks[4].requires_grad_(False)


class LoraLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a = nn.Linear(WIDTH, 2, bias=False)
        self.b = nn.Linear(2, WIDTH, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Sequential(LoraLinear(), nn.GELU()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = h + block(h)
        return h


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCABULARY, WIDTH, mode="mean", padding_idx=2)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=1, max_norm=5.0)
        self.mlp = Mlp(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.bag(x) + self.embedding(x).sum(1))


class Dtypes(nn.Module):
    """Parameters of all kinds beside one another; those that are no floating-point numbers stay in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.f16 = nn.Linear(WIDTH, WIDTH, dtype=torch.float16)
        self.bf16 = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.f64 = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.mixed = nn.ParameterDict(
            {
                "f64": nn.Parameter(torch.randn(7, dtype=torch.float64)),
                "f16": nn.Parameter(torch.randn(3).half()),
                "f32": nn.Parameter(torch.randn(5)),
                "bf16": nn.Parameter(torch.randn(11).bfloat16()),
                "complex": nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64)),
                "integers": nn.Parameter(torch.arange(WIDTH), requires_grad=False),
                "bytes": nn.Parameter(torch.arange(WIDTH, dtype=torch.uint8), requires_grad=False),
                "mask": nn.Parameter(torch.arange(WIDTH) % 2 == 0, requires_grad=False),
            }
        )
        self.empty = nn.Parameter(torch.zeros(0, WIDTH))
        self.last = Mlp(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.f16(x.half()).float()
        x = self.bf16(x.bfloat16()).double()
        x = self.f64(x).float()
        p = self.mixed
        x = x * p["f64"].sum().float() + p["f16"].float().sum() + p["f32"].prod() + p["bf16"].float().mean()
        x = (x * p["complex"]).abs() + p["integers"] + p["bytes"] * p["mask"]
        return self.last(torch.cat([x / 20, self.empty]))


class SharedStorage(nn.Module):
    """Two parameters that are parts of one storage, as those that share all of it."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.randn(2, WIDTH, WIDTH) * 0.1
        self.first, self.second = nn.Parameter(both[0]), nn.Parameter(both[1])
        same = torch.randn(WIDTH, WIDTH) * 0.1
        self.third, self.fourth = nn.Parameter(same), nn.Parameter(same.view(WIDTH, WIDTH))
        self.rest = Mlp(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest(x @ self.first @ self.second + x @ self.third @ self.fourth)


class Strided(nn.Module):
    """Parameters whose elements lie in an order of their own, or with holes."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter((torch.randn(WIDTH, 40) * 0.1).t())
        self.permuted = nn.Parameter((torch.randn(3, 20, 40) * 0.1).permute(1, 2, 0))
        self.holes = nn.Parameter((torch.randn(40, 2 * WIDTH) * 0.1)[:, ::2])
        self.rest = Mlp(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest((x @ self.turned.t() @ self.permuted.sum(2).t()) @ self.permuted[..., 0] @ self.holes)


class Codebook(nn.Module):
    """VQ-VAE: codes that follow what was assigned to them, changed in place behind autograd's back in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(64, WIDTH)
        self.codes.weight.requires_grad_(False)
        self.register_buffer("sizes", torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        distances = torch.cdist(x, self.codes.weight)
        chosen = distances.argmin(1)
        if self.training:
            with torch.no_grad():
                self.sizes.mul_(0.9).index_add_(0, chosen, torch.full((x.shape[0],), 0.1))
                self.codes.weight.data.mul_(0.95).index_add_(0, chosen, x.detach(), alpha=0.05)
        quantised = self.codes(chosen)
        return x + (quantised - x).detach() + (x - quantised).square().mean()


class VqVae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.codebook, self.decoder = Mlp(2), Codebook(), Mlp(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.codebook(self.encoder(x)))


class WithoutForward(nn.Module):
    """A block whose methods are called instead of it, and a parameter that a lambda of the root uses."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Mlp(3)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)
        self.block.encode = lambda x: self.block.blocks[0][0](x) @ self.weight  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block.forward(self.block.encode(x))


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    inputs: Inputs
    spare_bytes: int = 0
    """Of pool: for modules that use several records at once."""


CASES: dict[str, Case] = {
    "mlp": Case(Mlp, vectors),
    "odd shapes": Case(OddShapes, vectors),
    "gpt2 tied": Case(lambda: Gpt2(functional=False), tokens),
    "gpt2 functionally tied": Case(lambda: Gpt2(functional=True), tokens),
    "llama": Case(lambda: Llama(tied=False), tokens),
    "llama tied": Case(lambda: Llama(tied=True), tokens),
    "llama bf16": Case(lambda: Llama(tied=False, dtype=torch.bfloat16), tokens),
    "llama fp64": Case(lambda: Llama(tied=False, dtype=torch.float64), tokens),
    "t5": Case(T5, tokens),
    "mamba": Case(Mamba, tokens),
    "mixtral": Case(Mixtral, tokens),
    "torch encoder": Case(TorchEncoder, sequences),
    "torch encoder norm_first": Case(lambda: TorchEncoder(norm_first=True), sequences),
    "torch transformer": Case(TorchTransformer, sequences),
    "multi-head attention": Case(MultiheadAttention, sequences),
    "vit": Case(Vit, images),
    "resnet": Case(Resnet, images),
    "resnet channels_last": Case(resnet_channels_last, images_channels_last),
    "convolutions": Case(Convolutions, sequences),
    "lstm": Case(lambda: Recurrent(nn.LSTM), sequences),
    "gru": Case(lambda: Recurrent(nn.GRU), sequences),
    "cells": Case(Cells, sequences),
    "used twice": Case(Twice, vectors),
    "changing order": Case(Changing, vectors),
    "shared by two modules": Case(SharedModuleParameter, vectors),
    "containers": Case(Containers, vectors),
    "normed weights, old": Case(lambda: NormedWeights(old=True), vectors),
    "normed weights, new": Case(lambda: NormedWeights(old=False), vectors),
    "frozen": Case(Frozen, vectors),
    "lora": Case(Lora, tokens),
    "bags": Case(Bags, tokens),
    "dtypes": Case(Dtypes, vectors),
    "shared storage": Case(SharedStorage, vectors),
    "strided": Case(Strided, vectors),
    "codebook": Case(VqVae, vectors),
    "methods instead of forward": Case(WithoutForward, vectors),
}


def loss_of(run: Run, inputs: Inputs, label: str = "loss") -> torch.Tensor:
    out = run.model(*inputs(run.generator))
    loss = out.float().square().mean() if out.dtype is not torch.float64 else out.square().mean()
    run.note(label, loss)
    return loss


class Checkpointed(nn.Module):
    def __init__(self, block: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.block = block
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.use_reentrant and not x.requires_grad:
            x = x.detach().requires_grad_()  # Else nothing in the block gets a gradient.
        y: torch.Tensor = checkpoint(self.block, x, use_reentrant=self.use_reentrant)
        return y


class Joined(nn.Module):
    """The gradient of `weight` is a slice of that of both, which begins five elements after an aligned address."""

    def __init__(self, numel: int = 1 << 14) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(5))
        self.weight = nn.Parameter(torch.ones(numel))

    def forward(self, x: torch.Tensor, alone: bool = False) -> torch.Tensor:
        return (self.weight * x[5:]).sum() if alone else (torch.cat([self.bias, self.weight]) * x).sum()
