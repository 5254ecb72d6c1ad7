"""The same training twice, plain and with its gradients on disk."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from training import same_bits

import swapper
from swapper.config import OffloadConfig
from swapper.gradient.swapper import GradientSwapper
from swapper.optimizer.swapper import OptimizerSwapper


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


def make_config(nvme_path: Path, steps: int = 1, **settings: Any) -> OffloadConfig:
    """Buckets so small that long parameters are cut, and a pool of few of them."""
    values: dict[str, Any] = {
        "nvme_path": nvme_path,
        "pool_bytes": "6MiB",
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


class Twin:
    """A plain and a swapped net that are given the same."""

    def __init__(self, nvme_path: Path, steps: int = 1, **settings: Any) -> None:
        self.plain, self.swapped = make_net(), make_net()
        self.reference, self.optimizer = adamw(trained(self.plain)), adamw(trained(self.swapped))
        swapper.wrap_optimizer(self.optimizer, make_config(nvme_path, steps, **settings))
        self.swapper = swapper.of(self.optimizer)
        self.data = batches(torch.float32)

    def __enter__(self) -> Twin:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.swapper.close()

    @property
    def nets(self) -> tuple[Net, Net]:
        return self.plain, self.swapped

    def backward(self, **options: Any) -> None:
        x = next(self.data)
        for net in self.nets:
            net(x).backward(**options)

    def step(self) -> None:
        self.reference.step()
        self.optimizer.step()

    def finish(self) -> None:
        """The state that both are in leads to the same, here and in two more steps."""
        assert_same_gradients(self.swapped, gradients(self.plain))
        self.step()
        assert_same(self.plain, self.swapped)
        for _ in range(2):
            self.reference.zero_grad()
            self.optimizer.zero_grad()
            self.backward()
            self.step()
        assert_same(self.plain, self.swapped)

    @property
    def moves(self) -> tuple[int, int]:
        moves = self.swapper.stats().gradients
        return moves.reads, moves.writes
