"""Optimizers, a small model and its training, and comparisons to the bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import swapper

Make = Callable[[list[nn.Parameter]], Optimizer]


class Assigning(Optimizer):
    """Puts new tensors in the place of parameters and state, as programs do that do not step in place."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["sum"] = 0.9 * state.get("sum", torch.zeros_like(p)) + p.grad
                p.data = p.data - group["lr"] * state["sum"]


def muon(parameters: list[nn.Parameter]) -> Optimizer:
    # One iteration of five: without instructions for them, a processor takes a minute for such products in bf16.
    return torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=1e-3, ns_steps=1)


OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "Muon": muon,
}


MORE: dict[str, Make] = {
    "AdamW-fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "AdamW-foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "Adam-amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True, weight_decay=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "SGD-plain": lambda p: torch.optim.SGD(p, lr=1e-2),
    "SGD-nesterov": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "RMSprop-centered": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9),
    "Adagrad-initial": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.1),
}


def make_config(nvme_path: Path, **settings: object) -> swapper.OffloadConfig:
    # Buckets so small that the larger parameters are cut; a pool that holds whole ones for Adafactor and Muon.
    return swapper.OffloadConfig(
        nvme_path=nvme_path,
        pool_bytes="24MiB",
        bucket_bytes="256KiB",
        offload_optimizer={"device": "nvme", **settings},
    )


class MasterWeights:
    """The reference for master weights, written out: the optimizer steps fp32 copies, the model gets them rounded."""

    def __init__(self, parameters: list[nn.Parameter], make: Make) -> None:
        self.parameters = parameters
        self.masters = [nn.Parameter(p.detach().float()) for p in parameters]
        self.optimizer = make(self.masters)

    def step(self) -> None:
        for p, master in zip(self.parameters, self.masters, strict=True):
            master.grad = None if p.grad is None else p.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for p, master in zip(self.parameters, self.masters, strict=True):
                p.copy_(master)

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.detach().reshape(-1), b.detach().reshape(-1)
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


WIDTH = 160


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, WIDTH), nn.GELU(), nn.Linear(WIDTH, 3 * WIDTH), nn.LayerNorm(3 * WIDTH)).to(
        dtype
    )


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def backward(model: nn.Module, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    loss: torch.Tensor = model(torch.randn(4, 40, generator=generator).to(dtype)).float().square().mean()
    loss.backward()
    return loss


def run(model: nn.Module, optimizer: Any, steps: range = range(4)) -> None:
    for seed in steps:
        backward(model, seed)
        optimizer.step()
        optimizer.zero_grad()


@contextlib.contextmanager
def wrapped(optimizer: Optimizer, nvme_path: Path, **settings: object) -> Iterator[swapper.OptimizerSwapper]:
    swapper.wrap_optimizer(optimizer, make_config(nvme_path, **settings))
    try:
        yield swapper.of(optimizer)
    finally:
        swapper.of(optimizer).close()


def assert_same(a: nn.Module, b: nn.Module) -> None:
    assert all(same_bits(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def assert_same_state(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a["param_groups"] == b["param_groups"]
    assert a["state"].keys() == b["state"].keys()
    for i, entries in a["state"].items():
        assert entries.keys() == b["state"][i].keys()
        for key, value in entries.items():
            other = b["state"][i][key]
            if isinstance(value, torch.Tensor):
                assert value.shape == other.shape and value.dtype == other.dtype
                assert value.numel() == 0 or same_bits(value.reshape(-1), other.reshape(-1)), (i, key)
            else:
                assert value == other
