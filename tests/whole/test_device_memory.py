"""The memory of an accelerator that training takes is a sum that is known before, whatever the number of layers.

peak <= what plain forward and backward need without parameters, gradients and state + device_bytes + 3 buckets
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sampling import ALL
from torch import nn
from torch.utils.checkpoint import checkpoint
from twins import swapper_of

import swapper
from swapper.parameter import records as parameter_records
from swapper.tensors.hollow import hollow_values

WIDE = 128
LAYERS = 4, 32 if ALL else 16
BUCKET_BYTES = 128 << 10


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


def peak_of(device: torch.device, work: Callable[[], object]) -> int:
    """The most that was allocated on `device` while `work` ran."""
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats(device)
    work()
    torch.accelerator.synchronize()
    return torch.accelerator.max_memory_allocated(device)


def allocated(device: torch.device) -> int:
    """What stays: what earlier tests left would go in the middle of a measurement."""
    gc.collect()
    torch.accelerator.synchronize()
    return torch.accelerator.memory_allocated(device)


def plain_bytes(device: torch.device, depth: int) -> int:
    """Of forward and backward, without the parameters. Each gradient goes when it has arrived."""
    before = allocated(device)
    model = Checkpointed(depth).to(device)
    x = torch.ones(1, WIDE).to(device)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))  # type: ignore[no-untyped-call]
    model_bytes = sum(p.nbytes for p in model.parameters())
    return peak_of(device, lambda: model(x).sum().backward()) - model_bytes - before


@pytest.mark.long
@pytest.mark.sampled(4)
@pytest.mark.parametrize("in_backward", [False, True], ids=["after backward", "in backward"])
@pytest.mark.parametrize("step_device", ["cpu", "device"])
def test_training_takes_what_was_said_of_any_number_of_layers(
    step_device: str, in_backward: bool, nvme_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameter_records, "GROUP_BYTES", 100_000)
    on = torch.device(device, 0)
    beyond: list[int] = []
    for depth in LAYERS:
        plain = plain_bytes(on, depth)
        before = allocated(on)
        model = Checkpointed(depth).to(on)
        optimizer = torch.optim.AdamW(model.parameters())
        settings: dict[str, Any] = {
            "nvme_path": nvme_path, "pool_bytes": "4MiB", "bucket_bytes": BUCKET_BYTES,
            "offload_optimizer": {"device": "nvme", "step_device": step_device, "step_in_backward": in_backward},
            "offload_gradient": {"device": "nvme"}, "offload_param": {"device": "nvme"},
        }  # fmt: skip
        config = swapper.OffloadConfig(**settings)
        said = swapper.check(model, optimizer, config)
        assert (said.step_device_bytes > 0) == (step_device == "device") == ("device memory of a step" in str(said))
        swapper.offload(model, optimizer, config)
        needs = swapper_of(model).plan.device_needs
        assert needs is not None
        x = torch.ones(1, WIDE).to(on)

        def train(model: nn.Module = model, x: torch.Tensor = x, optimizer: Any = optimizer) -> None:
            for _ in range(2):
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        taken = peak_of(on, train) - before
        beyond.append(taken - plain)
        assert taken <= plain + needs.wanted_bytes + 3 * BUCKET_BYTES
        assert said.device_bytes == needs.wanted_bytes and taken <= plain + said.device_bytes + said.step_device_bytes
        swapper_of(model).close()
        swapper.of(optimizer).close()
    assert beyond[1] <= beyond[0] + 4096


PLACES = ("none", "nvme", "cpu")


@pytest.mark.parametrize("state", PLACES)
@pytest.mark.parametrize("parameters", PLACES)
def test_nothing_is_left_of_what_was_closed(state: str, parameters: str, nvme_path: Path, device: str) -> None:
    """But for one element of each dtype, which all evicted tensors share where they have no keys: see `hollow`."""
    hollow_values(torch.empty(0, dtype=torch.float64, device=device), (1,), "what is shared")
    before = allocated(torch.device(device, 0))
    for gradients in PLACES:
        model = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 8)).to(device, torch.float64)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        config = swapper.OffloadConfig(
            nvme_path=nvme_path,
            pool_bytes="16MiB",
            bucket_bytes=BUCKET_BYTES,
            offload_optimizer={"device": state},
            offload_gradient={"device": gradients},
            offload_param={"device": parameters},
        )
        swapper.offload(model, optimizer, config)
        for _ in range(2):
            model(torch.ones(2, WIDE, dtype=torch.float64, device=device)).square().sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        for owner in (vars(model).get("swapper"), vars(optimizer).get("swapper")):
            if owner is not None:
                owner.close()
        del model, optimizer, owner
        assert allocated(torch.device(device, 0)) == before
