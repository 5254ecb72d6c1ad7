"""Gradients of FSDP2 on an accelerator that leave its memory: ranks with a simulated device each, to the bit.

Cases by chance, with all that goes with them, are those of `test_fsdp_on_device`.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerators import simulated
from device_ranks import in_device_processes
from removed_waits import remove, sites
from sharded_nets import (
    Case,
    Net,
    Twins,
    backward,
    compare,
    config_of,
    end_step,
    large,
    local,
    loss_of,
    same,
    sharded,
    unreadable,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import swapper
from swapper.config import OffloadConfig
from swapper.io.handle import AsyncIOHandle, FaultPlan
from swapper.tensors.evicted_gradients import has_evicted_gradient, raw_gradient

DEVICE = "sim"
ORDERS = "sim-lazy", "sim-random"


def made(
    directory: str, device: str = "nvme", micro_batches: int = 1
) -> tuple[list[Net], list[torch.optim.Optimizer], Any]:
    """A plain model, and one whose state and gradients are on the drive, or in the pool."""
    models = [sharded(Case(blocks=2, device=DEVICE)) for _ in range(2)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(each.parameters(), lr=1e-2, foreach=False) for each in models
    ]
    settings: dict[str, Any] = {f"offload_{name}": {"device": device} for name in ("optimizer", "gradient")}
    config = OffloadConfig(
        nvme_path=directory,
        pool_bytes="4MiB",
        bucket_bytes="16KiB",
        gradient_accumulation_steps=micro_batches,
        **settings,
    )
    swapper.wrap_optimizer(optimizers[1], config)
    return models, optimizers, swapper.of(optimizers[1])


def evicted(net: nn.Module) -> list[str]:
    """The parameters with gradients that are not on the device; reading `p.grad` would bring them there."""
    return [name for name, p in net.named_parameters() if raw_gradient(p) is None and has_evicted_gradient(p)]


def misaligned(net: nn.Module) -> dict[str, int]:
    """How far the gradients of shards in memory are from aligned addresses, on which bits of their norms depend."""
    found = {name: raw_gradient(p) for name, p in net.named_parameters()}
    return {name: local(each).data_ptr() % 64 for name, each in found.items() if each is not None}


def trained(net: nn.Module) -> list[nn.Parameter]:
    return [p for p in net.parameters() if p.requires_grad]


def read_gradients(rank: int, directory: str, device: str) -> None:
    """What users do with `p.grad` between a backward and a step."""
    models, optimizers, handle = made(directory, device)
    plain, net = models
    backward(models)
    assert evicted(net) == large(net) != []
    for q in net.parameters():  # What stays has no part of what FSDP2 has reduced together.
        assert (mine := raw_gradient(q)) is None or local(mine).untyped_storage().nbytes() < local(mine).nbytes + 64
    here, there = misaligned(net), misaligned(plain)
    assert here == {name: there[name] for name in here} and any(here.values())
    # One that is read is on the device again, for good, and FSDP2 adds to it in place; so does it to one assigned.
    weight, twin = net.blocks[1].up.weight, plain.blocks[1].up.weight
    held = weight.grad
    assert isinstance(held, DTensor) and held is raw_gradient(weight) and same(held, twin.grad)  # type: ignore[arg-type]
    for model in models:
        model.blocks[0].up.weight.grad = model.blocks[0].up.weight.grad * 2  # type: ignore[operator]
    kept = net.blocks[0].up.weight.grad
    backward(models, 1)
    assert held is raw_gradient(weight) and kept is raw_gradient(net.blocks[0].up.weight)
    assert same(held, twin.grad)  # type: ignore[arg-type]
    assert set(large(net)) - set(evicted(net)) == {"blocks.0.up.weight", "blocks.1.up.weight"}
    end_step(models, optimizers)
    # Sums, products in place, whole tensors, and nothing.
    backward(models, 2)
    for model in models:
        model.blocks[0].up.weight.grad.mul_(0.5)  # type: ignore[union-attr]
        model.blocks[1].down.weight.grad = None
    found = [model.blocks[0].down.weight.grad.full_tensor() for model in models]  # type: ignore[union-attr]
    assert torch.equal(*found)
    backward(models, 3)
    compare(models, lambda p: p.grad)
    end_step(models, optimizers)
    # Zeros instead of nothing, to which the next pass is added.
    backward(models, 4)
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=False)
    assert evicted(net) == large(net)  # Nothing was read.
    backward(models, 5)
    assert evicted(net) == large(net)
    end_step(models, optimizers)
    # Clipping by torch itself, and by ours: norms that were not taken in backward, and such that were; and by value.
    backward(models, 6)
    assert same(*(torch.nn.utils.clip_grad_norm_(trained(model), 0.1) for model in models))
    end_step(models, optimizers)
    for seed, norm_type in ((7, 1.0), (8, 1.0), (9, 2.0)):
        backward(models, seed)
        norm = torch.nn.utils.clip_grad_norm_(trained(plain), 0.1, norm_type)
        assert same(norm, handle.clip_grad_norm_(0.1, norm_type))
        torch.nn.utils.clip_grad_value_(plain.parameters(), 1e-4)
        handle.clip_grad_value_(1e-4)
        assert evicted(net) == large(net)
        end_step(models, optimizers)
    # Unwrapping while gradients are evicted.
    backward(models, 10)
    swapper.unwrap_optimizer(optimizers[1])
    compare(models, lambda p: p.grad)
    assert misaligned(net) == misaligned(plain)


def parallel() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of tensor parallelism alone, whose gradients are autograd's."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 64)).to(DEVICE)
    mesh = init_device_mesh(DEVICE, (torch.distributed.get_world_size(),))
    parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False)


def parallel_loss(net: nn.Module, step: int) -> torch.Tensor:
    out: torch.Tensor = net(torch.full((3, 64), 0.1 * step, device=DEVICE)).square().sum()
    return out


def leave_others(rank: int, directory: str, device: str) -> None:
    """Gradients that no hook of FSDP2 tells of stay on the device, and are not stepped in backward."""
    both = [parallel() for _ in range(2)]
    on_device = {"offload_param": {"device": "none"}}
    swapper.wrap_optimizer(both[1][1], config_of(directory, "4MiB", offload_gradient={"device": device}, **on_device))
    for step in range(3):
        for net, optimizer in both:
            parallel_loss(net, step).backward()
            assert not evicted(net)
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(*(net.parameters() for net, _ in both), strict=True):
        assert same(p, q)
    swapper.of(both[1][1]).close()
    net, optimizer = parallel()
    swapper.wrap_optimizer(optimizer, config_of(directory, "4MiB", {"step_in_backward": True}, **on_device))
    with pytest.raises(swapper.ConfigError, match="DTensors that FSDP2 does not have"):
        parallel_loss(net, 1).backward()
    swapper.of(optimizer).close()


def use_all(rank: int, directory: str) -> None:
    for work in (read_gradients, leave_others):
        for device in ("nvme", "cpu"):
            try:
                work(rank, directory, device)
            except BaseException as error:
                error.add_note(f"in rank {rank}: {work.__name__}, {device}")
                raise
            torch.distributed.barrier()


@pytest.mark.long
@pytest.mark.parametrize("settings", ORDERS)
def test_gradients_that_are_read_changed_clipped_and_those_of_others(
    nvme_path: Path, settings: str, leaves_nothing: None
) -> None:
    in_device_processes(use_all, str(nvme_path), settings=settings)


# --- Failures --------------------------------------------------------------------------------------------------------


def fails(rank: int, failing: int, act: Callable[[], object], match: str) -> None:
    """All ranks raise what goes wrong on one."""
    with pytest.raises(swapper.SwapError, match=match if rank == failing else f"on rank {failing}|{match}.*on rank"):
        act()


def fail(rank: int, directory: str) -> None:
    faults = FaultPlan()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("swapper.session.AsyncIOHandle", functools.partial(AsyncIOHandle, faults=faults))
        for failing in (0, 1):
            fail_to_write(rank, failing, directory, faults)
            lose_a_sum(rank, failing, directory)


def fail_to_write(rank: int, failing: int, directory: str, faults: FaultPlan) -> None:
    """The drive of one rank is full in a backward, and cannot be read in clipping."""
    models, optimizers, handle = made(directory)
    plain, net = models
    backward(models)
    end_step(models, optimizers)
    handle.flush()
    if rank == failing:
        faults.fail_errno, faults.fail_write_at = errno.ENOSPC, 3

    def backward_and_step() -> None:
        loss_of(net).backward()
        with contextlib.suppress(swapper.SwapIOError):
            handle.flush()
        optimizers[1].step()  # Before anything is stepped.

    fails(rank, failing, backward_and_step, "No space left")
    compare(models, lambda p: p)
    optimizers[1].zero_grad()
    backward(models, 1)
    norm = torch.nn.utils.clip_grad_norm_(trained(plain), 0.1, 1.0)
    with unreadable(2, gradients=True) if rank == failing else contextlib.nullcontext():
        fails(rank, failing, lambda: handle.clip_grad_norm_(0.1, 1.0), "cannot be read")  # Its norms were not taken.
    assert same(norm, handle.clip_grad_norm_(0.1, 1.0))
    end_step(models, optimizers)
    handle.close()


def lose_a_sum(rank: int, failing: int, directory: str) -> None:
    """What a gradient is to be added to cannot be read in a backward, on one rank: it is lost there, and says so."""
    models, optimizers, handle = made(directory, micro_batches=2)
    backward(models)
    with unreadable(2, gradients=True) if rank == failing else contextlib.nullcontext():
        fails(rank, failing, functools.partial(backward, models[1:], 1), "cannot be read")
    for act in (optimizers[1].step, lambda: handle.clip_grad_norm_(1.0), lambda: handle.clip_grad_value_(1.0)):
        fails(rank, failing, act, "lost when changing it was cut off")
    compare(models, lambda p: p)
    for optimizer in optimizers:
        optimizer.zero_grad()
    for seed in range(2):
        backward(models, seed)
    end_step(models, optimizers)
    handle.close()


@pytest.mark.long
@pytest.mark.parametrize("settings", ORDERS)
def test_what_fails_on_one_rank_is_raised_by_all_and_nothing_is_lost(
    nvme_path: Path, settings: str, leaves_nothing: None
) -> None:
    in_device_processes(fail, str(nvme_path), settings=settings)


# --- Waits -----------------------------------------------------------------------------------------------------------


def train(directory: str, gradients: str) -> None:
    """Two windows of two passes, clipped; plain FSDP2 has other bits if a wait is missing."""
    case = Case(
        device=DEVICE,
        blocks=2,
        parameters="none",
        gradients=gradients,
        clips=True,
        micro_batches=2,
        syncs_all=True,
        step_device="device",
        scarce=False,
        options={"foreach": False},
    )
    twins = Twins(directory, case)
    try:
        for _ in range(2):
            twins.train()
        twins.compare()
    finally:
        twins.close()


WAITS = (
    {"gradient/swapper.py _take begin"},
    {"gradient/swapper.py _take transfer"},
    {"gradient/swapper.py _take transfer 1"},
    {"io/devices.py run keep"},
    {"gradient/evicted.py _norms_of join", "gradient/copies.py wait_later join 1"},  # Either is enough for norms.
)
"""What `removed_waits` calls the waits by which copies and norms come after FSDP2's reductions, and are come after."""


def remove_each(rank: int, directory: str) -> None:
    train(directory, "nvme")
    found = {str(site): site for site in sites()}
    for names in WAITS:
        missed = False
        with pytest.MonkeyPatch.context() as patch:
            for name in names:
                remove(found[name], patch)
            try:
                train(directory, "nvme")
            except AssertionError:
                missed = True
        gc.collect()
        torch.accelerator.synchronize()
        assert simulated().violations() or missed, names


@pytest.mark.long
@pytest.mark.parametrize("settings", ORDERS)
def test_a_wait_that_is_removed_is_missed(nvme_path: Path, settings: str) -> None:
    in_device_processes(remove_each, str(nvme_path), settings=settings, count=1)
