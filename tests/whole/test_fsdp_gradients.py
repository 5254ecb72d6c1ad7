"""Gradients of FSDP2 on each rank's drive: to the bit of plain FSDP2, with memory that is poisoned when given back.

Cases by chance, with all that goes with them, are those of `test_fsdp` and `test_fsdp_parameters`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from interrupts import interrupted_at, places_of
from sampling import ALL, EVERY
from sharded_nets import (
    LAYER_BYTES,
    SIDE,
    Case,
    Layer,
    Net,
    backward,
    compare,
    config_of,
    end_step,
    forget_iteration,
    in_processes,
    large,
    local,
    loss_of,
    memory_bytes,
    poisoned,
    same,
    sharded,
    unreadable,
)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import swapper
from swapper.config import OffloadConfig
from swapper.io.handle import AsyncIOHandle, FaultPlan
from swapper.parameter import fsdp
from swapper.tensors import reduced
from swapper.tensors.evicted_gradients import raw_gradient

ON_DRIVE = {"offload_gradient": {"device": "nvme"}}


def made(
    directory: str, pool: str = "2MiB", count: int = 2, **more: Any
) -> tuple[list[Net], list[torch.optim.Optimizer]]:
    """A plain model of `count` blocks, and one with everything on the drive."""
    models = [sharded(Case(blocks=count)) for _ in range(2)]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in models]
    swapper.offload(models[1], optimizers[1], config_of(directory, pool, **ON_DRIVE, **more))
    return models, optimizers


def close(net: Net, optimizer: torch.optim.Optimizer) -> None:
    net.swapper.close()  # type: ignore[operator, union-attr]
    swapper.of(optimizer).close()


def evicted(net: nn.Module) -> list[str]:
    return [name for name, p in net.named_parameters() if raw_gradient(p) is None and p.grad is not None]


def go_on(models: list[Net]) -> None:
    """After a backward that was cut off: what FSDP2 had gathered and not reduced is forgotten."""
    for model in models:
        for p in model.parameters():
            if not isinstance(p, DTensor):
                p.grad = None
        forget_iteration(model)
        for each in (*model.blocks, model):
            each.reshard()  # type: ignore[operator]


def of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters that have gradients."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def read_gradients(rank: int, directory: str) -> None:
    """What users do with `p.grad` between a backward and a step."""
    models, optimizers = made(directory)
    plain, net = models
    backward(models)
    assert evicted(net) == large(net)
    for q in net.parameters():  # What stays has no part of what FSDP2 has reduced together.
        assert (mine := raw_gradient(q)) is None or local(mine).untyped_storage().nbytes() <= local(mine).nbytes
    # Metadata is answered without the values, and who holds the tensor sees them when they come.
    weight, twin = net.blocks[1].up.weight, plain.blocks[1].up.weight
    held = weight.grad
    assert held is weight.grad and isinstance(held, DTensor)
    assert held.placements == twin.grad.placements and held.shape == twin.grad.shape  # type: ignore[union-attr]
    assert held.stride() == twin.grad.stride()  # type: ignore[union-attr]
    assert "blocks.1.up.weight" in evicted(net)
    assert same(held, twin.grad) and held is weight.grad and held is raw_gradient(weight)  # type: ignore[arg-type]
    # It stays in memory, and FSDP2 adds to it in place; so does it to one that was assigned.
    for model in models:
        model.blocks[0].up.weight.grad = model.blocks[0].up.weight.grad * 2  # type: ignore[operator]
    kept = net.blocks[0].up.weight.grad
    backward(models, 1)
    assert held is raw_gradient(weight) and kept is raw_gradient(net.blocks[0].up.weight)
    assert same(held, twin.grad)  # type: ignore[arg-type]
    assert set(large(net)) - set(evicted(net)) == {"blocks.0.up.weight", "blocks.1.up.weight"}
    end_step(models, optimizers)
    # Sums, products in place, whole tensors, one assigned to another, zeros, and nothing.
    backward(models, 2)
    for model in models:
        blocks = model.blocks
        blocks[0].up.weight.grad.mul_(0.5)  # type: ignore[union-attr]
        blocks[1].up.weight.grad = blocks[0].up.weight.grad.clone()
        blocks[1].down.weight.grad = None
    found = [model.blocks[0].down.weight.grad.full_tensor() for model in models]  # type: ignore[union-attr]
    assert torch.equal(*found)
    backward(models, 3)
    compare(models, lambda p: p.grad)
    end_step(models, optimizers)
    for zero in (torch.optim.Optimizer.zero_grad, lambda optimizer, **_: [p.grad.zero_() for p in of(optimizer)]):
        backward(models, 4)
        for optimizer in optimizers:
            zero(optimizer, set_to_none=False)
        assert evicted(net) == large(net)  # Nothing was read.
    backward(models, 5)
    assert evicted(net) == large(net)
    end_step(models, optimizers)
    # Clipping by torch itself, and by ours: the norm, which the second time was taken in backward, and by value.
    backward(models, 6)
    norms = [torch.nn.utils.clip_grad_norm_([p for p in m.parameters() if p.requires_grad], 0.1) for m in models]
    assert same(*norms)
    end_step(models, optimizers)
    for seed in (7, 8):
        backward(models, seed)
        clips = torch.nn.utils.clip_grad_norm_, swapper.of(optimizers[1]).clip_grad_norm_
        norms = [clips[0]([p for p in plain.parameters() if p.requires_grad], 0.1), clips[1](0.1)]
        assert same(*norms)
        torch.nn.utils.clip_grad_value_(plain.parameters(), 1e-4)
        swapper.of(optimizers[1]).clip_grad_value_(1e-4)
        assert evicted(net) == large(net)
        end_step(models, optimizers)
    # One that is a part of a buffer of the user's stays there, and is added up there.
    buffers = []
    for model in models:
        up = model.blocks[0].up.weight
        mine = local(up)  # type: ignore[arg-type]
        buffers.append(torch.zeros(2 * mine.numel(), dtype=mine.dtype))
        part = buffers[-1][: mine.numel()].view_as(mine)
        up.grad = DTensor.from_local(part, up.device_mesh, up.placements, shape=up.shape, stride=up.stride())
    for seed in (10, 11):
        backward(models, seed)
        assert same(*buffers) and buffers[0].any()
    end_step(models, optimizers)
    # Unwrapping while gradients are evicted.
    backward(models, 9)
    swapper.unwrap_optimizer(optimizers[1])
    compare(models, lambda p: p.grad)
    net.swapper.close()  # type: ignore[operator, union-attr]


def pass_over_some(rank: int, directory: str) -> None:
    """Blocks that have no part in some passes, one that is frozen later, and a backward that is cut off."""
    models, optimizers = made(directory, count=3, gradient_accumulation_steps=3)
    for count in range(2):
        for number, left_out in enumerate([(1,), (), (0, 2)]):
            for model in models:
                for i, block in enumerate(model.blocks):
                    block.forward = (lambda x: x) if i in left_out else functools.partial(type(block).forward, block)  # type: ignore[method-assign]
            backward(models, 10 * count + number)
        end_step(models, optimizers)
        for model in models:
            model.blocks[2].up.weight.requires_grad_(False)

    class Stop(Exception):
        pass

    def stop(*_: object) -> None:
        raise Stop

    for model in models:
        model.blocks[0].forward = functools.partial(type(model.blocks[0]).forward, model.blocks[0])  # type: ignore[method-assign]
        handle = model.blocks[1].norm.register_full_backward_hook(stop)  # type: ignore[arg-type]
        with pytest.raises(Stop):
            loss_of(model).backward()
        handle.remove()
    go_on(models)
    compare(models, lambda p: p.grad)
    for optimizer in optimizers:
        optimizer.zero_grad()
    for number in range(3):
        backward(models, number)
    end_step(models, optimizers)
    close(models[1], optimizers[1])


def scale(rank: int, directory: str) -> None:
    """A scaled loss: `unscale_` of gradients on the drive, or not, and one that is infinite on one rank only."""
    models, optimizers = made(directory)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in models]
    both = list(zip(scalers, optimizers, strict=True))
    for seed in range(4):
        for model, scaler in zip(models, scalers, strict=True):
            loss = loss_of(model, seed + 1000 * rank)
            scaler.scale(loss * torch.inf if (seed, rank) == (2, 0) else loss).backward()
        assert evicted(models[1]) == large(models[1])
        if seed % 2:
            for scaler, optimizer in both:
                scaler.unscale_(optimizer)
            compare(models, lambda p: p.grad)
        for scaler, optimizer in both:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        compare(models, lambda p: p)
        assert {scaler.get_scale() for scaler in scalers} == {1024.0 if seed < 2 else 512.0}
    close(models[1], optimizers[1])


def are_refused(rank: int, directory: str) -> None:
    net = sharded(Case(blocks=1))
    optimizer = torch.optim.AdamW(net.parameters())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed.fsdp._fully_shard._fsdp_collectives, "foreach_reduce", lambda: None)
        reduced.check_reduction.cache_clear()
        with pytest.raises(swapper.ConfigError, match="reduces the gradients of FSDP2 otherwise"):
            swapper.offload(net, optimizer, config_of(directory, **ON_DRIVE))
    reduced.check_reduction.cache_clear()
    with contextlib.redirect_stdout(None):
        report = swapper.check(net, optimizer, config_of(directory, "2MiB", **ON_DRIVE))
    taken = [p for name, p in net.named_parameters() if name in large(net)]
    length = sum(local(p).nbytes for p in taken)
    assert length <= report.gradient_bytes < length + 4096 * 8 * len(taken)
    assert report.model_bytes < sum(local(p).nbytes for p in net.parameters())


def use_all(rank: int, directory: str) -> None:
    for work in (read_gradients, scale, are_refused, *((pass_over_some,) if ALL else ())):
        try:
            with poisoned():
                work(rank, directory)
        except Exception as error:
            error.add_note(f"in rank {rank}: {work.__name__}")
            raise
        torch.distributed.barrier()


@pytest.mark.long
def test_reads_absent_gradients_and_refusals(nvme_path: Path, leaves_nothing: None) -> None:
    in_processes(use_all, str(nvme_path))


# --- Failures --------------------------------------------------------------------------------------------------------


def fails(rank: int, failing: int, act: Callable[[], object], match: str = "") -> None:
    """All ranks raise what goes wrong on one."""
    with pytest.raises(swapper.SwapError, match=match if rank == failing else f"on rank {failing}|{match}.*on rank"):
        act()


def fail(rank: int, directory: str) -> None:
    faults = FaultPlan()
    with pytest.MonkeyPatch.context() as patch, poisoned():
        patch.setattr("swapper.session.AsyncIOHandle", functools.partial(AsyncIOHandle, faults=faults))
        for failing in (0, 1) if ALL else (1,):
            fail_in_a_step(rank, failing, directory, faults)
            if ALL:
                lose_a_sum(rank, failing, directory)


def fail_in_a_step(rank: int, failing: int, directory: str, faults: FaultPlan) -> None:
    """The drive of one rank is full in a backward, and cannot be read in clipping and in a step."""
    models, optimizers = made(directory)
    plain, net = models
    handle = swapper.of(optimizers[1])

    def unreadable_there(at: int, *, gradients: bool) -> contextlib.AbstractContextManager[None]:
        return unreadable(at, gradients=gradients) if rank == failing else contextlib.nullcontext()

    backward(models)
    end_step(models, optimizers)
    handle.flush()
    net.swapper.flush()  # type: ignore[operator, union-attr]
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
    norm = torch.nn.utils.clip_grad_norm_([p for p in plain.parameters() if p.requires_grad], 0.1)
    with unreadable_there(2, gradients=True):
        fails(rank, failing, lambda: handle.clip_grad_norm_(0.1), "cannot be read")
    assert same(norm, handle.clip_grad_norm_(0.1))
    end_step(models, optimizers)
    backward(models, 2)
    with unreadable_there(3, gradients=False):
        fails(rank, failing, optimizers[1].step, "cannot be read")
    fails(rank, failing, optimizers[1].step, "load both from a checkpoint")
    optimizers[0].step()
    net.load_state_dict(plain.state_dict())
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    for model in models:
        model.zero_grad()
    backward(models, 3)
    end_step(models, optimizers)
    close(net, optimizers[1])


def lose_a_sum(rank: int, failing: int, directory: str) -> None:
    """What a gradient is to be added to cannot be read, on one rank."""
    models = [sharded(Case(blocks=2)) for _ in range(2)]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in models]
    devices: dict[str, Any] = {f"offload_{name}": {"device": "nvme"} for name in ("optimizer", "gradient")}
    config = OffloadConfig(
        nvme_path=directory, pool_bytes="2MiB", bucket_bytes="16KiB", gradient_accumulation_steps=2, **devices
    )
    swapper.wrap_optimizer(optimizers[1], config)
    handle = swapper.of(optimizers[1])
    backward(models)
    with unreadable(2, gradients=True) if rank == failing else contextlib.nullcontext():
        fails(rank, failing, lambda: loss_of(models[1], 1).backward(), "cannot be read")
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
def test_what_fails_on_one_rank_is_raised_by_all_and_nothing_is_lost(nvme_path: Path, leaves_nothing: None) -> None:
    in_processes(fail, str(nvme_path))


def fail_in_backward(rank: int, directory: str) -> None:
    """The step of a bucket in a backward fails on one rank; the program catches that, and goes on."""
    for failing, gradients, clears in ((1, {}, True), (0, ON_DRIVE, False), (0, {}, False), (1, ON_DRIVE, True)):
        models = [sharded(Case(blocks=2)) for _ in range(2)]
        plain, net = models
        optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in models]
        state = {"step_in_backward": True}
        swapper.offload(net, optimizers[1], config_of(directory, "2MiB", state=state, **gradients))
        backward(models)
        end_step(models, optimizers)
        backward(models[:1], 1)
        optimizers[0].step()
        with unreadable(3, gradients=False) if rank == failing else contextlib.nullcontext():
            fails(rank, failing, functools.partial(backward, [net], 1), "cannot be read")
        if clears:
            optimizers[1].zero_grad()
        # Whatever a rank says of its state, it says when the backward is over, as the others do.
        with contextlib.suppress(swapper.SwapError) if gradients else contextlib.nullcontext():
            if clears or gradients:
                backward([net], 2)
            else:
                with pytest.raises(swapper.SwapError, match="the gradient of this parameter is gone"):
                    backward([net], 2)
        with pytest.raises(swapper.SwapError, match="load both from a checkpoint"):
            optimizers[1].step()
        net.load_state_dict(plain.state_dict())
        optimizers[1].load_state_dict(optimizers[0].state_dict())
        for model in models:
            model.zero_grad()
        backward(models, 3)
        end_step(models, optimizers)
        close(net, optimizers[1])
        torch.distributed.barrier()


def lose_a_sum_in_backward(rank: int, directory: str) -> None:
    """As `fail_in_backward`, where no step fails: after some buckets are stepped a sum cannot be read."""
    models = [sharded(Case(blocks=4)) for _ in range(2)]
    plain, net = models
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in models]
    config = config_of(directory, "2MiB", state={"step_in_backward": True}, gradient_accumulation_steps=2, **ON_DRIVE)
    swapper.offload(net, optimizers[1], config)
    for failing in (0, 1):
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(models)
        backward(models[:1], 1)
        optimizers[0].step()
        with unreadable(9, gradients=True) if rank == failing else contextlib.nullcontext():
            fails(rank, failing, functools.partial(backward, [net], 1), "cannot be read")
        optimizers[1].zero_grad()  # Of buckets that are stepped it would be refused: on none, or on all.
        with pytest.raises(swapper.SwapError, match="load both from a checkpoint"):
            optimizers[1].step()
        net.load_state_dict(plain.state_dict())
        optimizers[1].load_state_dict(optimizers[0].state_dict())
        optimizers[1].zero_grad()
        optimizers[0].zero_grad()
        for seed in (2, 3):
            backward(models, seed)
        end_step(models, optimizers)
    close(net, optimizers[1])


def go_on_after_failures(rank: int, directory: str) -> None:
    fail_in_backward(rank, directory)
    lose_a_sum_in_backward(rank, directory)


@pytest.mark.long
def test_a_program_goes_on_after_a_backward_that_steps_has_failed_on_one_rank(
    nvme_path: Path, leaves_nothing: None
) -> None:
    in_processes(go_on_after_failures, str(nvme_path))


def cannot_read(rank: int, directory: str) -> None:
    """The second of two ranks cannot read parameters in a backward."""
    torch.distributed.init_process_group("gloo")
    models, _ = made(directory)
    backward(models[1:])
    loss = loss_of(models[1])
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(fsdp._Reads, "attach", cannot)
        try:
            loss.backward()
        except Exception as error:
            (Path(directory).parent / str(rank)).write_text(f"{type(error).__name__}: {error}")
            raise


def cannot(_: object) -> None:
    raise swapper.SwapError("cannot be read")


@pytest.mark.thorough("by default: gradients that cannot be written or read")
def test_a_rank_that_ends_in_a_backward_ends_the_others(nvme_path: Path, leaves_nothing: None) -> None:
    with ranks.started(cannot_read, str(nvme_path)) as context:
        for process in context.processes:
            process.join(ranks.TIMEOUT_S)
            assert process.exitcode != 0  # gloo may abort.
    errors = [(nvme_path.parent / str(rank)).read_text() for rank in range(2)]
    assert errors[1] == "SwapError: cannot be read" and "cannot be read" not in errors[0]


def interrupt(rank: int, directory: str, test: str) -> None:
    """Ctrl-C in the second backward of a step: a gradient is that of the first, the sum, or lost, and then says so."""
    os.environ["PYTEST_CURRENT_TEST"] = test
    models, optimizers = made(directory, count=1, gradient_accumulation_steps=2)
    plain, net = models
    shards = [list(model.parameters()) for model in models]
    files = ("gradient/swapper.py", "gradient/evicted.py", "tensors/evicted_gradients.py", "tensors/reduced.py")
    sums: list[list[torch.Tensor | None]] = []
    for seed in range(2):
        backward([plain], seed)
        sums.append([None if p.grad is None else p.grad.clone() for p in shards[0]])

    def first() -> None:
        optimizers[1].zero_grad()
        backward([net])

    def second() -> None:
        backward([net], 1)

    first()
    struck = 0
    for place in places_of(second, *files, sample=None if EVERY else 40 if ALL else 3):
        first()
        # Not where only another pass comes by, as what reads ahead for a step.
        struck += (interrupted := interrupted_at(place, second, *files))
        for each, q, *values in zip(shards[0], shards[1], *sums, strict=True):
            try:
                mine = None if q.grad is None else q.grad.clone()
            except swapper.SwapError as error:
                assert interrupted and "KeyboardInterrupt" in str(error), place
                continue
            assert (mine is None) == (values[0] is None), place
            allowed = values if interrupted else values[1:]
            assert mine is None or any(same(mine, value) for value in allowed), (place, each.shape)
        go_on([net])
    assert struck
    optimizers[0].zero_grad()
    optimizers[1].zero_grad()
    backward(models, 2)
    end_step(models, optimizers)
    close(net, optimizers[1])


@pytest.mark.long
def test_ctrl_c_in_a_backward_leaves_no_wrong_gradient(nvme_path: Path, leaves_nothing: None) -> None:
    in_processes(interrupt, str(nvme_path), os.environ["PYTEST_CURRENT_TEST"], count=1)


# --- Memory ----------------------------------------------------------------------------------------------------------


POOL_BYTES = 6 << 20


class TrainedLayer(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.register_hook(self.note)
        return super().forward(x)

    @staticmethod
    def note(_: torch.Tensor) -> None:
        Layer.peak_bytes = max(Layer.peak_bytes, memory_bytes())


def count_memory(rank: int, directory: str) -> None:
    m_mmap_threshold = -3
    ctypes.CDLL(None).mallopt(m_mmap_threshold, 1 << 16)  # What is freed goes back at once.
    grown = []
    devices: dict[str, Any] = {f"offload_{name}": {"device": "nvme"} for name in ("optimizer", "gradient", "param")}
    config = OffloadConfig(nvme_path=directory, pool_bytes=POOL_BYTES, bucket_bytes="256KiB", **devices)
    for count in (2, 4, 32):  # The first makes threads, and what torch makes once.
        before = memory_bytes()
        net = nn.Sequential(*(TrainedLayer() for _ in range(count)))
        for layer in net:
            fully_shard(layer)
        fully_shard(net)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        swapper.offload(net, optimizer, config)
        Layer.peak_bytes = 0
        for step in range(3):
            if step == 1:  # In the first step state is made.
                Layer.peak_bytes = 0
            net(torch.ones(2, SIDE, requires_grad=True)).sum().backward()
            TrainedLayer.note(torch.empty(0))
            optimizer.step()
            TrainedLayer.note(torch.empty(0))
            optimizer.zero_grad()
        grown.append(Layer.peak_bytes - before)
        net.swapper.close()  # type: ignore[operator, union-attr]
        swapper.of(optimizer).close()
        del net, layer, optimizer
        gc.collect()
    # Two that FSDP2 gathers, each with the buffer of a collective, a gradient, and the buffers of two reductions.
    assert max(grown[1:]) < POOL_BYTES + 8 * LAYER_BYTES + (2 << 20), grown
    # One kind of shards of those 28 would be 14 times as much as one layer is.
    assert grown[2] < grown[1] + 4 * LAYER_BYTES, grown


@pytest.mark.thorough("by default: the bits with the least pool")
def test_memory_of_training_does_not_grow_with_layers(nvme_path: Path, leaves_nothing: None) -> None:
    in_processes(count_memory, str(nvme_path))
