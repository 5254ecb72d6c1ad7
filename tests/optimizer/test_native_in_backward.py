"""Native steps in the middle of a backward: a window is one step, in whose middle the user's code runs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import swapper
from swapper.errors import SwapError, SwapIOError
from swapper.io.handle import AsyncIOHandle, FaultPlan
from swapper.optimizer.native_step import NativeSteps

pytestmark = pytest.mark.packs_too

WIDE, LAYERS, STEPS = 768, 8, 4
"""2.4 million elements in each group of four layers: more than `auto` asks for."""


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(LAYERS)))


def wrap(model: nn.Module, path: Path, native: str, masters: bool) -> torch.optim.Optimizer:
    groups = [{"params": list(layers.parameters())} for layers in (model[:4], model[4:])]  # type: ignore[index]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, foreach=False)
    config = swapper.OffloadConfig(
        nvme_path=path,
        pool_bytes="32MiB",
        bucket_bytes="4MiB",
        offload_optimizer={
            "device": "nvme",
            "master_weights": masters,
            "step_in_backward": True,
            "native_step": native,
        },
    )
    return swapper.wrap_optimizer(optimizer, config)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> None:
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        x = torch.randn(3, WIDE, generator=torch.Generator().manual_seed(step)).to(dtype)
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The group of each recording."""
    groups: list[int] = []
    record: Callable[..., Any] = NativeSteps._record

    def counted(self: NativeSteps, case: Any, first: Any) -> Any:
        groups.append(case.number)
        return record(self, case, first)

    monkeypatch.setattr(NativeSteps, "_record", counted)
    return groups


@pytest.mark.parametrize("masters", [True, False], ids=["masters", "fp32"])
def test_auto_is_native_and_records_once_a_window(nvme_path: Path, recorded: list[int], masters: bool) -> None:
    values = []
    for native in ("off", "auto"):
        model = make_model().to(torch.bfloat16 if masters else torch.float32)
        optimizer = wrap(model, nvme_path, native, masters)
        train(model, optimizer)
        stats = swapper.of(optimizer).stats()
        # Each step but the first, which makes state; weights are cut, so biases are the only whole parameters.
        assert (stats.segments_native > 0) == (native == "auto")
        assert native == "off" or stats.segments_by_class < stats.segments_native
        values.append([p.detach().clone() for p in model.parameters()])
        swapper.of(optimizer).close()
    assert all(torch.equal(p, q) for p, q in zip(*values, strict=True))
    # One for each group and step but the first; biases are stepped whole where they have no masters, so once more.
    assert len(recorded) <= (STEPS - 1) * 2 * (1 if masters else 2)


def test_a_window_after_one_that_failed(nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that was recorded in the window that failed is used after a load, whose steps are other ones."""
    plan = FaultPlan()
    monkeypatch.setattr("swapper.session.AsyncIOHandle", functools.partial(AsyncIOHandle, faults=plan))
    model = make_model()
    optimizer = wrap(model, nvme_path, "auto", False)
    train(model, optimizer, 2)
    swapper.save_checkpoint(tmp_path / "saved", model, optimizer)
    train(model, optimizer)
    expected = [p.detach().clone() for p in model.parameters()]

    swapper.of(optimizer).flush()
    plan.fail_read_at = 3
    with pytest.raises(SwapIOError):
        train(model, optimizer)
    swapper.load_checkpoint(tmp_path / "saved", model, optimizer)
    optimizer.zero_grad()
    before = swapper.of(optimizer).stats().segments_native
    train(model, optimizer)
    assert swapper.of(optimizer).stats().segments_native > before
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), expected, strict=True))
    swapper.of(optimizer).close()


BETAS: dict[str, Callable[[], Any]] = {
    "a list": lambda: [0.9, 0.999],  # Its constructor makes a tuple of it.
    "tensors in a tuple": lambda: (torch.tensor(0.9), torch.tensor(0.999)),
}


@pytest.mark.parametrize("native", ["off", "on"])
@pytest.mark.parametrize("kind", BETAS)
def test_an_option_that_is_changed_in_place_in_the_middle(nvme_path: Path, kind: str, native: str) -> None:
    """Is refused as any other: plain torch would have stepped all with the new one."""
    model = make_model()
    optimizer = wrap(model, nvme_path, native, False)
    for group in optimizer.param_groups:
        group["betas"] = BETAS[kind]()
    train(model, optimizer, 2)

    def change(_: torch.Tensor) -> None:
        for group in optimizer.param_groups:
            if kind == "a list":
                group["betas"][0] = 0.5
            else:
                group["betas"][0].fill_(0.5)

    model[2].weight.register_hook(change)
    with pytest.raises(SwapError, match="was changed between backward"):
        train(model, optimizer, 1)
    swapper.of(optimizer).close()


@pytest.mark.parametrize("native", ["off", "on"])
def test_an_option_that_is_a_tensor_of_nan_has_not_changed(nvme_path: Path, native: str) -> None:
    model = make_model()
    optimizer = wrap(model, nvme_path, native, False)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(torch.nan)
    train(model, optimizer, 2)
    assert all(p.isnan().all() for p in model.parameters())
    swapper.of(optimizer).close()


@pytest.mark.long
@pytest.mark.parametrize("native", ["off", "on"])
@pytest.mark.parametrize("way", ["state dicts", "checkpoint"])
def test_a_load_in_the_middle_of_a_window(nvme_path: Path, tmp_path: Path, way: str, native: str) -> None:
    """The next window is another step, with other options: nothing that was recorded for this one is used in it."""
    values = []
    for is_given_up in (False, True):
        model = make_model()
        optimizer = wrap(model, nvme_path, native, False)
        train(model, optimizer, 2)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        path = tmp_path / f"saved {is_given_up}"
        swapper.save_checkpoint(path, model, optimizer)
        if is_given_up:
            model(torch.randn(3, WIDE)).square().mean().backward()
            assert optimizer.swapper.backward_steps.under_way  # type: ignore[attr-defined]
        if way == "checkpoint":
            swapper.load_checkpoint(path, model, optimizer)
        else:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        stepper = swapper.of(optimizer)._stepper
        assert not stepper.entered
        assert stepper._native._room is None
        for group in optimizer.param_groups:
            group["lr"] = 0.25
        train(model, optimizer, 2)
        values.append([p.detach().clone() for p in model.parameters()])
        assert (swapper.of(optimizer).stats().segments_native > 0) == (native == "on")
        swapper.of(optimizer).close()
    assert all(torch.equal(p, q) for p, q in zip(*values, strict=True))
