"""Gradients of a model on an accelerator: nothing is read of what is cleared; what comes back lies as it lay."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from models import Joined
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


class Lamb(torch.optim.Optimizer):
    """A step as long as the parameter, whatever the gradient's norm. Notes where long gradients lie."""

    seen: ClassVar[list[int]] = []

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                state["exp_avg"].lerp_(p.grad, 0.1)
                p.sub_(state["exp_avg"] * (group["lr"] * p.norm() / p.grad.norm()))
                if p.numel() == 1 << 14:
                    self.seen.append(p.grad.data_ptr() % 64)


def test_what_a_class_steps_on_whole_is_as_far_from_an_aligned_address_as_it_was(nvme_path: Path, device: str) -> None:
    models = [Joined().to(device) for _ in range(2)]
    optimizers = [Lamb(model.parameters()) for model in models]
    config = swapper.OffloadConfig(
        nvme_path=nvme_path,
        pool_bytes="8MiB",
        bucket_bytes="64KiB",
        offload_optimizer={"device": "nvme", "step_device": "device"},
        offload_gradient={"device": "nvme"},
    )
    swapper.wrap_optimizer(optimizers[1], config)
    x = torch.randn((1 << 14) + 5, generator=torch.Generator().manual_seed(0)).to(device)
    Lamb.seen.clear()
    for _ in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert Lamb.seen == [20] * 6
    assert all(torch.equal(p, q) for p, q in zip(*(model.parameters() for model in models), strict=True))
    swapper.of(optimizers[1]).close()


@pytest.mark.parametrize("kept", ["nvme", "cpu"])
def test_what_comes_back_is_as_far_from_an_aligned_address_as_it_was(kept: str, nvme_path: Path, device: str) -> None:
    """CUDA's kernels add up the elements of a tensor in an order that depends on it: norms have other bits."""
    models = [Joined().to(device) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    config = swapper.OffloadConfig(
        nvme_path=nvme_path,
        pool_bytes="8MiB",
        bucket_bytes="64KiB",
        gradient_accumulation_steps=2,
        offload_optimizer={"device": kept},
        offload_gradient={"device": kept},
    )
    swapper.wrap_optimizer(optimizers[1], config)
    handle = swapper.of(optimizers[1])
    plain, model = models
    x = torch.randn((1 << 14) + 5, generator=torch.Generator().manual_seed(0)).to(device)
    for alone in (False, True):  # The second pass, of which the norm is taken, may bring it to another address.
        for each in models:
            each(x).backward()
            each(x, alone).backward()
        assert raw_gradient(model.weight) is None
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        assert torch.equal(norm, handle.clip_grad_norm_(1.0))
        gradient = model.weight.grad
        assert gradient is not None and plain.weight.grad is not None and not gradient._is_view()
        assert gradient.data_ptr() % 64 == plain.weight.grad.data_ptr() % 64 == 20
        for each in models:
            each(x).backward()
        assert torch.equal(gradient, plain.weight.grad) and model.weight.grad is gradient
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(plain.weight, model.weight)
    handle.close()
