"""A model that leaves its accelerator after it was trained, as a Trainer moves it: saved on the CPU, trained again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training import assert_same, assert_same_state, make_model

import swapper
from swapper.errors import SwapError

OTHER = {"to the CPU": "cpu", "to another device": "sim:1"}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Two steps on whatever device `model` is."""
    first = next(model.parameters())
    generator = torch.Generator().manual_seed(seed)
    for _ in range(2):
        model(torch.randn(4, 40, generator=generator).to(first)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def make(device: str, path: Path, masters: bool, step_device: str, gradients: str) -> tuple[nn.Module, Any]:
    model = make_model(torch.bfloat16 if masters else torch.float32).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"device": "nvme", "step_device": step_device, "master_weights": masters}
    settings: dict[str, Any] = {"pool_bytes": "8MiB", "bucket_bytes": "64KiB"}
    config = swapper.OffloadConfig(
        nvme_path=path, offload_optimizer=state, offload_gradient={"device": gradients}, **settings
    )
    return model, swapper.wrap_optimizer(optimizer, config)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("gradients", ["nvme", "none"])
@pytest.mark.parametrize("masters", [False, True], ids=["fp32", "masters"])
@pytest.mark.parametrize("step_device", ["cpu", "device"])
@pytest.mark.parametrize("where", OTHER)
def test_a_moved_model_is_saved_and_goes_on_when_it_is_back(
    where: str, step_device: str, masters: bool, gradients: str, nvme_path: Path, tmp_path: Path, device: str
) -> None:
    other = OTHER[where]
    if device == "cuda" and other != "cpu":
        pytest.skip("of the simulated devices")
    (model, optimizer), (stays, reference) = (make(device, nvme_path, masters, step_device, gradients) for _ in "ab")
    for each in (model, optimizer), (stays, reference):
        train(*each, seed=1)
    model.to(other)
    assert_same_state(optimizer.state_dict(), reference.state_dict())
    swapper.save_checkpoint(tmp_path / "moved", model, optimizer)
    parameter = next(model.parameters())
    assert swapper.of(optimizer).state(parameter).keys() == swapper.of(reference).state(next(stays.parameters())).keys()
    x = torch.ones(4, 40).to(parameter)
    model(x).float().sum().backward()  # Gradients come where the model is, and nothing steps with them.
    expected = [torch.autograd.grad(model(x).float().sum(), p)[0].cpu() for p in model.parameters()]
    assert all(torch.equal(p.grad.cpu(), g) for p, g in zip(model.parameters(), expected, strict=True))  # type: ignore[union-attr]
    with pytest.raises(SwapError, match=f"on {device}.* and is now .* on {other}; move and convert the model first"):
        optimizer.step()
    optimizer.zero_grad()
    model.to(f"{device}:0")
    for each in (model, optimizer), (stays, reference):
        train(*each, seed=2)
    assert_same(model.cpu(), stays.cpu())
    assert_same_state(optimizer.state_dict(), reference.state_dict())
    model.to(other)
    swapper.load_checkpoint(tmp_path / "moved", model, optimizer)
    model.to(f"{device}:0")
    train(model, optimizer, seed=2)
    assert_same(model.cpu(), stays)
    assert_same_state(optimizer.state_dict(), reference.state_dict())
    for each in (optimizer, reference):
        swapper.of(each).close()


@pytest.mark.parametrize("masters", [False, True], ids=["fp32", "masters"])
def test_a_moved_model_takes_its_state_with_it(masters: bool, nvme_path: Path, device: str) -> None:
    """When the optimizer is unwrapped, and so it is trained on where it is; and a state dict is loaded there."""
    (model, optimizer), (stays, reference) = (make(device, nvme_path, masters, "cpu", "none") for _ in "ab")
    for each in (model, optimizer), (stays, reference):
        train(*each, seed=1)
    model.cpu()
    optimizer.load_state_dict(reference.state_dict())
    swapper.unwrap_optimizer(optimizer, drop_masters=masters)
    assert all(v.device.type == "cpu" for state in optimizer.state.values() for v in state.values())
    swapper.unwrap_optimizer(reference, drop_masters=masters)
    stays.cpu()
    reference.load_state_dict(reference.state_dict())  # Which takes what is in it to where the parameters are.
    for each in (model, optimizer), (stays, reference):
        train(*each, seed=2)
    assert_same(model, stays)
