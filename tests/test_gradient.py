"""Gradients that are away: the bits, strides and meaning of `p.grad` are those of plain PyTorch."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_optimizer_exact import MasterWeights, same_bits
from torch import nn
from torch.optim import Optimizer

import swapper
from swapper.config import OffloadConfig
from swapper.errors import SwapError
from swapper.evicted import AwayGradient, raw_gradient
from swapper.gradient import GradientSwapper
from swapper.optimizer import OptimizerSwapper

pytestmark = pytest.mark.usefixtures("leaves_nothing")


class Net(nn.Module):
    """Parameters of every kind: long, odd, tiny, empty, channels_last, frozen, unused, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.long = nn.Linear(96, 1500)
        self.odd = nn.Linear(1500, 61)
        self.conv = nn.Conv2d(16, 40, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.one = nn.Conv2d(16, 300, (1, 1)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.twice = nn.Linear(96, 96)
        self.turned = nn.Parameter(torch.randn(61, 96).t() * 0.1)
        self.sometimes = nn.Parameter(torch.randn(96, 70) * 0.1)
        self.frozen = nn.Parameter(torch.randn(96, 96) * 0.1, requires_grad=False)
        self.unused = nn.Parameter(torch.randn(100, 100))
        self.empty = nn.Parameter(torch.empty(0, 7))
        self.tiny = nn.Parameter(torch.randn(()))
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        x = torch.tanh(self.twice(x) @ self.frozen)
        x = torch.tanh(self.twice(x))
        out = self.odd(torch.tanh(self.long(x))).sum() + (x @ self.turned).square().sum() + self.empty.sum()
        if self.count % 3 == 1:
            out = out + (x @ self.sometimes).square().sum()
        image = x[:, :64].reshape(-1, 16, 2, 2)
        image = nn.functional.pad(image, (1, 1, 1, 1)).contiguous(memory_format=torch.channels_last)
        return (out + self.conv(image).square().sum() + self.one(image).sum()) * self.tiny.tanh() * 0.01


MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


def adamw(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "AdamW": adamw,
    "SGD": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "foreach": lambda ps: torch.optim.Adam(ps, lr=1e-3, foreach=True),
    "Adafactor": lambda ps: torch.optim.Adafactor([p for p in ps if p.numel()], lr=1e-2),  # It divides by numel.
}


def make_config(nvme_path: Path, steps: int = 1, **settings: Any) -> OffloadConfig:
    """Buckets so small that long parameters are cut, and a pool of few of them."""
    values: dict[str, Any] = {
        "nvme_path": nvme_path,
        "pool_bytes": "4MiB",
        "bucket_bytes": "256KiB",
        "gradient_accumulation_steps": steps,
        "offload_optimizer": {"device": "nvme"},
        "offload_gradient": {"device": "nvme"},
    }
    return OffloadConfig(**{**values, **settings})


def make_net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def batches(dtype: torch.dtype, seed: int = 1) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(4, 96, generator=generator).to(dtype)


def gradients(model: nn.Module) -> list[Any]:
    """Bits and strides of every gradient, without disturbing where it is."""
    found = []
    for p in model.parameters():
        gradient = p.grad
        if gradient is None:
            found.append(None)
        else:
            found.append((tuple(gradient.shape), gradient.stride(), copy.deepcopy(gradient)))
    return found


def assert_same_gradients(model: nn.Module, expected: list[Any]) -> None:
    for (name, _), mine, theirs in zip(model.named_parameters(), gradients(model), expected, strict=True):
        if theirs is None:
            assert mine is None, name
            continue
        assert mine is not None, name
        assert mine[:2] == theirs[:2], name
        assert same_bits(mine[2].contiguous(), theirs[2].contiguous()), name


def assert_same(plain: nn.Module, swapped: nn.Module) -> None:
    for (name, p), q in zip(plain.named_parameters(), swapped.parameters(), strict=True):
        assert same_bits(p.detach().contiguous(), q.detach().contiguous()), name


@contextmanager
def wrapped(optimizer: Optimizer, config: OffloadConfig) -> Iterator[OptimizerSwapper]:
    swapper.wrap_optimizer(optimizer, config)
    try:
        yield swapper.of(optimizer)
    finally:
        swapper.of(optimizer).close()


def gradients_of(optimizer: Optimizer) -> GradientSwapper:
    found = swapper.of(optimizer).gradients
    assert isinstance(found, GradientSwapper)
    return found


# --- Exactness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [None, 0.5], ids=["", "clipped"])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-masters"])
def test_same_bits_as_plain(nvme_path: Path, precision: str, name: str, micro_batches: int, clip: float | None) -> None:
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    masters = precision == "bf16-masters"
    plain, swapped = make_net(dtype), make_net(dtype)
    make = OPTIMIZERS[name]
    reference: Any = MasterWeights(trained(plain), make) if masters else make(trained(plain))
    optimizer = make(trained(swapped))
    config = make_config(nvme_path, micro_batches, offload_optimizer={"device": "nvme", "master_weights": masters})
    with wrapped(optimizer, config) as handle:
        plain_data, swapped_data = batches(dtype), batches(dtype)
        for step in range(5):
            for _ in range(micro_batches):
                loss = plain(next(plain_data))
                loss.backward()
                mine = swapped(next(swapped_data))
                mine.backward()
                assert same_bits(mine.detach(), loss.detach())
            assert raw_gradient(swapped.long.weight) is None and swapped.long.weight.grad is not None
            if clip is not None:
                expected = torch.nn.utils.clip_grad_norm_(trained(plain), clip)
                assert same_bits(handle.clip_grad_norm_(clip), expected)
            if step == 3:
                assert_same_gradients(swapped, gradients(plain))
            reference.step()
            optimizer.step()
            if masters:
                plain.zero_grad()
            else:
                reference.zero_grad()
            optimizer.zero_grad()
            assert_same(plain, swapped)
        assert handle.stats().gradients.bytes_written > 0
