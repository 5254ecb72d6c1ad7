"""Gradients of a model on an accelerator that are cleared: nothing of them is read for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from training import make_model

import swapper
from swapper.tensors.evicted_gradients import EvictedGradient, raw_gradient


@pytest.mark.sampled(4)
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize(
    "clear", [lambda model, optimizer: optimizer.zero_grad, lambda model, optimizer: model.zero_grad],
    ids=["optimizer", "model"],
)  # fmt: skip
@pytest.mark.parametrize("parameters", ["nvme", "none"])
def test_zero_grad_reads_nothing(
    parameters: str,
    clear: Callable[[nn.Module, torch.optim.Optimizer], Callable[..., None]],
    foreach: bool,
    set_to_none: bool,
    nvme_path: Path,
    device: str,
) -> None:
    model = make_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=foreach)
    config = swapper.OffloadConfig(
        nvme_path=nvme_path,
        pool_bytes="8MiB",
        bucket_bytes="64KiB",
        offload_optimizer={"device": "nvme"},
        offload_gradient={"device": "nvme"},
        offload_param={"device": parameters},
    )
    swapper.offload(model, optimizer, config)
    model(torch.ones(4, 40, device=device)).sum().backward()
    optimizer.step()
    evicted = [p for p in model.parameters() if raw_gradient(p) is None]
    counts = swapper.of(optimizer).stats().gradients
    assert evicted and counts is not None
    before = counts.bytes_read
    clear(model, optimizer)(set_to_none=set_to_none)
    counts = swapper.of(optimizer).stats().gradients
    assert counts is not None and counts.bytes_read == before
    for p in evicted:
        assert raw_gradient(p) is None
        gradient = p.grad
        assert (gradient is None) == set_to_none
        if gradient is not None:  # For whoever wants them, of the class that torch's functions look at.
            assert type(gradient) is torch.Tensor and gradient.device.type == device
            assert not isinstance(gradient, EvictedGradient) and not gradient.any()
    swapper.of(optimizer).close()
