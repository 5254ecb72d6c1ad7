"""A `GradScaler` and float16 on an accelerator, with parameters, gradients and state away: infinite gradients skip."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from training import assert_same, make_model

import swapper

OPTIMIZERS: dict[str, dict[str, Any]] = {"foreach": {}, "single": {"foreach": False}, "fused": {"fused": True}}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, passes: int, clip: bool) -> list[float]:
    """Five windows, two of which have an infinite gradient. Returns losses, norms and scales."""
    device = next(model.parameters()).device
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, growth_interval=2)
    generator, noted = torch.Generator().manual_seed(3), []
    for window in range(5):
        for number in range(passes):
            with torch.autocast(device.type, torch.float16):
                loss = model(torch.randn(4, 40, generator=generator).to(device)).square().mean()
            scaler.scale(loss * (float("inf") if window in (1, 3) and number == 0 else 1.0)).backward()
            noted.append(loss.item())
        if clip:
            scaler.unscale_(optimizer)
            noted.append(clip_grad_norm_(model.parameters(), 0.05).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        noted.append(scaler.get_scale())
    return noted


@pytest.mark.sampled(4)
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("how", OPTIMIZERS)
@pytest.mark.parametrize("gradients", ["nvme", "cpu", "none"])
@pytest.mark.parametrize("parameters", ["nvme", "cpu"])
def test_windows_with_infinite_gradients_are_skipped(
    parameters: str, gradients: str, how: str, passes: int, clip: bool, nvme_path: Path, device: str
) -> None:
    plain, mine = (make_model().to(device) for _ in "ab")
    config = swapper.OffloadConfig(
        nvme_path=nvme_path,
        pool_bytes="8MiB",
        bucket_bytes="64KiB",
        gradient_accumulation_steps=passes,
        offload_optimizer={"device": "nvme", "step_device": "device"},
        offload_gradient={"device": gradients},
        offload_param={"device": parameters},
    )
    optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-2, **OPTIMIZERS[how])
    swapper.offload(mine, optimizer, config)
    noted = train(mine, optimizer, passes, clip)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, **OPTIMIZERS[how])
    assert str(noted) == str(train(plain, reference, passes, clip))  # Norms are NaN where gradients are infinite.
    assert noted[-1] < 1024
    assert_same(mine, plain)
    swapper.of(optimizer).close()
    mine.swapper.close()  # type: ignore[union-attr, operator]
