"""The memory of an accelerator that a rank of FSDP2 takes with its shards on the drive: a sum that is known before.

peak <= what plain FSDP2 needs without its shards, gradients and state + device_bytes + step_device_bytes
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from device_ranks import in_device_processes
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import swapper

WIDE = 128
LAYERS = 4, 16
DEVICE = "sim"


class Checkpointed(nn.Module):
    """Keeps one activation of half a KiB for each layer."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDE, 2 * WIDE), nn.GELU(), nn.Linear(2 * WIDE, WIDE)) for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)  # type: ignore[no-untyped-call]
        return x


def sharded(depth: int) -> Checkpointed:
    model = Checkpointed(depth).to(DEVICE)
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def allocated() -> int:
    gc.collect()
    torch.accelerator.synchronize()
    return torch.accelerator.memory_allocated(DEVICE)


def peak_of(work: Callable[[], object]) -> int:
    """The most that was allocated while `work` ran."""
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats(DEVICE)
    work()
    torch.accelerator.synchronize()
    return torch.accelerator.max_memory_allocated(DEVICE)


def train(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    x = torch.ones(1, WIDE).to(DEVICE)
    for _ in range(2):
        model(x).sum().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()


def plain_bytes(depth: int) -> int:
    """Of forward and backward, without the shards. Each gradient goes when it has arrived."""
    before = allocated()
    model = sharded(depth)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))  # type: ignore[no-untyped-call]
    shard_bytes = sum(p.to_local().nbytes for p in model.parameters())  # type: ignore[attr-defined]
    return peak_of(lambda: train(model, None)) - shard_bytes - before


def measure(rank: int, directory: str, step_device: str, gradients: str) -> None:
    taken, said, plain = [], [], []
    for depth in LAYERS:
        plain.append(plain_bytes(depth))
        before = allocated()
        model = sharded(depth)
        optimizer = torch.optim.AdamW(model.parameters())
        settings: dict[str, Any] = {
            "nvme_path": directory, "pool_bytes": "4MiB", "bucket_bytes": "128KiB",
            "offload_optimizer": {
                "device": "nvme", "step_device": step_device, "step_in_backward": gradients == "none"
            },
            "offload_param": {"device": "nvme"}, "offload_gradient": {"device": gradients},
        }  # fmt: skip
        config = swapper.OffloadConfig(**settings)
        report = swapper.check(model, optimizer, config)
        swapper.offload(model, optimizer, config)
        said.append(report.device_bytes + report.step_device_bytes)
        taken.append(peak_of(lambda model=model, optimizer=optimizer: train(model, optimizer)) - before)
        model.swapper.close()
        swapper.of(optimizer).close()
        del model, optimizer
        assert taken[-1] <= plain[-1] + said[-1], (taken, plain, said)
    # Of each layer a rank has 130 KiB. Activations, sums of its values and small state are 3 of them.
    assert taken[1] - taken[0] < (LAYERS[1] - LAYERS[0]) * 4096, (taken, plain, said)


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("gradients", ["none", "nvme"])
@pytest.mark.parametrize("step_device", ["cpu", "device"])
def test_training_takes_what_was_said_of_any_number_of_layers(
    step_device: str, gradients: str, nvme_path: Path, leaves_nothing: None
) -> None:
    """Gradients go as they are reduced: they are stepped in backward, or leave for the drive."""
    in_device_processes(measure, str(nvme_path), step_device, gradients, settings="sim-lazy")
