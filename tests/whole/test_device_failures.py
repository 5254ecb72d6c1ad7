"""A device that fails anywhere in a run, and says so once: an error is raised, or the bits are those of the plain run.

Errors that a device reports once are met by whoever waits next, for whatever that is. The simulated device does so.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerators import forget_failures, simulate
from sampling import places
from torch import nn
from training import same_bits

import swapper
from swapper.errors import SwapError

pytestmark = pytest.mark.timeout(300)

STEPS = 2
KINDS = list(itertools.product(["device", "cpu"], ["sim-lazy", "sim-random"], [False, True]))


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 64)).to("sim")


def backward(model: nn.Module, seed: int) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)).to("sim")
    (model(x) - x).square().mean().backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(STEPS):
        for part in range(2):
            backward(model, 2 * step + part)
        optimizer.step()
        optimizer.zero_grad()


def values_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All values of both on the host."""
    state = optimizer.state_dict()["state"]
    values = [value for _, entries in sorted(state.items()) for _, value in sorted(entries.items())]
    return [value.detach().cpu() for value in (*model.parameters(), *values)]


@functools.cache
def expected(step_device: str) -> list[torch.Tensor]:
    """Of the plain run, stepped there."""
    model = make_model()
    on_host = make_model().cpu()
    stepped = model if step_device == "device" else on_host
    optimizer = torch.optim.AdamW(stepped.parameters(), lr=1e-2)
    for step in range(STEPS):
        for part in range(2):
            backward(model, 2 * step + part)
        for p, q in zip(model.parameters(), stepped.parameters(), strict=True):
            assert p.grad is not None
            p.grad, q.grad = None, p.grad.to(q.device)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for p, q in zip(model.parameters(), stepped.parameters(), strict=True):
                p.copy_(q)
    return values_of(stepped, optimizer)


def offloaded(path: Path, step_device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Everything on the drive, and little memory, so that all of it moves."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = swapper.OffloadConfig(
        nvme_path=path,
        pool_bytes="4MiB",
        bucket_bytes="64KiB",
        gradient_accumulation_steps=2,
        offload_optimizer={"device": "nvme", "step_device": step_device},
        offload_gradient={"device": "nvme"},
        offload_param={"device": "nvme"},
    )
    swapper.offload(model, optimizer, settings)
    torch.accelerator.synchronize()
    return model, optimizer


def run(path: Path, step_device: str, n: int) -> tuple[bool, Exception | None]:
    """Train while the n-th kernel or copy fails. Returns whether there were so many, and what was raised."""
    model, optimizer = offloaded(path, step_device)
    in_memory: Any = model
    torch.ops.sim.fail_at(n)
    error: Exception | None = None
    found: list[torch.Tensor] = []
    try:
        train(model, optimizer)
        swapper.of(optimizer).flush()
        in_memory.swapper.flush()
        found = values_of(model, optimizer)
        swapper.of(optimizer).close()
        in_memory.swapper.close(keep_values=True)
        found[: len(list(model.parameters()))] = [p.detach().cpu() for p in model.parameters()]
    except (SwapError, RuntimeError) as raised:
        error = raised.with_traceback(None)
    failed = torch.ops.sim.fail_at(0) >= n
    if error is None:
        torch.accelerator.synchronize()
        assert all(map(same_bits, found, expected(step_device))), f"nobody was told that {n} failed"
    with contextlib.suppress(SwapError):
        swapper.of(optimizer).close()
    if "swapper" in vars(model):
        in_memory.swapper.close()
    return failed, error


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("step_device", "settings", "threads"), KINDS)
def test_a_failure_that_is_reported_once_is_raised_or_harmless(
    nvme_path: Path,
    leaves_nothing: None,
    monkeypatch: pytest.MonkeyPatch,
    step_device: str,
    settings: str,
    threads: bool,
) -> None:
    sim_device = simulate(settings, monkeypatch, threads=threads)
    if not hasattr(torch.ops.sim, "fail_at"):
        pytest.skip("the simulated device was built before it could fail")
    expected(step_device)
    raised = 0
    for n in places(every=12, sample=60):
        failed, error = run(nvme_path, step_device, n + 1)
        gc.collect()
        while any(thread.name == "swapper-writes" for thread in threading.enumerate()):
            time.sleep(0.0005)
        sim_device.violations()
        forget_failures()
        if not failed:
            assert error is None
            break
        raised += error is not None
    assert raised > 3


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("settings", ["sim-lazy", "sim-random"])
def test_values_that_are_brought_back_for_good_are_right_or_an_error_is_raised(
    nvme_path: Path, leaves_nothing: None, monkeypatch: pytest.MonkeyPatch, settings: str
) -> None:
    sim_device = simulate(settings, monkeypatch)
    if not hasattr(torch.ops.sim, "fail_at"):
        pytest.skip("the simulated device was built before it could fail")
    values = [p.detach().cpu() for p in make_model().parameters()]
    for n in places(every=1, sample=8):
        model, optimizer = offloaded(nvme_path, "device")
        in_memory: Any = model
        swapper.of(optimizer).close()
        torch.accelerator.synchronize()
        torch.ops.sim.fail_at(n + 1)
        with contextlib.suppress(SwapError, RuntimeError):
            in_memory.swapper.close(keep_values=True)
            found = [p.detach().cpu() for p in model.parameters()]
            assert all(map(same_bits, found, values)), f"nobody was told that {n + 1} failed"
        failed = torch.ops.sim.fail_at(0) > n
        if "swapper" in vars(model):
            in_memory.swapper.close()
        sim_device.violations()
        forget_failures()
        if not failed:
            break
    assert n > 5
