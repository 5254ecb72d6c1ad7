"""Parameters of FSDP2 that one rank cannot read or write: all ranks raise it, and training goes on to the bit."""

from __future__ import annotations

import contextlib
import datetime
import errno
import functools
import gc
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from sharded_nets import Case, Net, compare, config_of, forget_iteration, local, loss_of, sharded
from torch.distributed.tensor import DTensor

import swapper
from swapper.io.handle import AsyncIOHandle, FaultPlan

LIMIT_S = 60
"""Within so long the others end with an error: gloo's collectives raise another one when it is over."""

FAILING = 1


class Training:
    """A plain model and one on the drive, trained alike, on a drive that fails when it is told to."""

    def __init__(self, directory: str, faults: FaultPlan, pool: str = "1MiB", mesh: str = "shard", **more: Any) -> None:
        self.faults = faults
        self.models = [sharded(Case(in_backward=bool(more), mesh=mesh)) for _ in range(2)]
        self.optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in self.models]
        swapper.offload(self.models[1], self.optimizers[1], config_of(directory, pool, more))
        self.seed = 0

    def pass_through(self, model: Net) -> torch.Tensor:
        return loss_of(model, self.seed)

    def step(self) -> None:
        self.seed += 1
        for net, optimizer in zip(self.models, self.optimizers, strict=True):
            self.pass_through(net).backward()
            optimizer.step()
            optimizer.zero_grad()
        compare(self.models, lambda p: p)

    def flush(self) -> None:
        for each in (self.models[1], self.optimizers[1]):
            each.swapper.flush()  # type: ignore[operator, union-attr]

    def repair(self) -> None:
        """What a program does after an error: load model and optimizer."""
        plain, net = self.models
        forget_iteration(net)
        self.optimizers[1].zero_grad()
        net.load_state_dict(plain.state_dict())
        self.optimizers[1].load_state_dict(self.optimizers[0].state_dict())
        self.step()

    def close(self) -> None:
        swapper.of(self.optimizers[1]).close()
        self.models[1].swapper.close()  # type: ignore[operator, union-attr]


def is_raised(error: BaseException, rank: int, text: str) -> None:
    """`error` is what went wrong on the rank that fails; on others it names that rank."""
    assert isinstance(error, swapper.SwapIOError) and text in str(error), repr(error)
    assert rank == FAILING or f"on rank {FAILING}" in str(error), repr(error)


@contextlib.contextmanager
def group(rank: int) -> Any:
    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=LIMIT_S))
    with pytest.MonkeyPatch.context() as patch:
        faults = FaultPlan()
        patch.setattr("swapper.session.AsyncIOHandle", functools.partial(AsyncIOHandle, faults=faults))
        gc.collect()
        gc.disable()  # What is left in a cycle with an error, as views of parameters, keeps its room in the pool.
        yield faults
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def raised_in(training: Training, rank: int, text: str) -> str:
    """A step of the swapped model, and in which part of it all ranks raise."""
    net, optimizer = training.models[1], training.optimizers[1]
    part = "forward"
    try:
        loss = training.pass_through(net)
        assert torch.isfinite(loss)
        part = "backward"
        loss.backward()
        part = "step"
        optimizer.step()
        part = "nothing"
    except swapper.SwapIOError as error:
        is_raised(error, rank, text)
    parts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, part)
    assert len(set(parts)) == 1, parts
    return part


def fail_to_write(rank: int, directory: str) -> None:
    """Writes of a step that go on after it has returned."""
    with group(rank) as faults:
        training, seen = Training(directory, faults), set[str]()
        training.step()
        training.flush()
        before = faults.writes
        training.step()
        training.flush()
        of_a_step = faults.writes - before
        for at in range(of_a_step, of_a_step - 8, -1):  # The last ones go on when the step has returned.
            training.flush()
            training.pass_through(training.models[0]).backward()
            training.pass_through(training.models[1]).backward()
            if rank == FAILING:
                faults.fail_errno, faults.fail_write_at = errno.ENOSPC, at
            ended = "step"
            try:
                training.optimizers[1].step()
                ended = ""
            except swapper.SwapIOError as error:
                is_raised(error, rank, "No space left")
            training.optimizers[0].step()
            for each in training.optimizers:
                each.zero_grad()
            ended = ended or raised_in(training, rank, "No space left")
            faults.fail_write_at = 0
            seen.add(ended)
            training.repair()
        assert "forward" in seen, seen
        training.close()


def fail_to_read(rank: int, directory: str, in_backward: bool, mesh: str = "shard") -> None:
    with group(rank) as faults:
        more = {"step_in_backward": True} if in_backward else {}
        pool = {"shard": "1MiB", "hybrid": "560KiB", "tensor": "320KiB"}[mesh]  # Not all parameters stay in it.
        training, seen = Training(directory, faults, pool, mesh, **more), set[str]()
        training.step()
        # What is read ahead differs from run to run: more places, where it takes more to meet one in each part.
        for at in (*range(1, 24, 3), *range(2, 24, 3), *range(3, 24, 3)):
            if at % 3 != 1 and {"forward", "backward"} <= seen:
                break
            training.flush()
            if rank == FAILING:
                faults.fail_errno, faults.fail_read_at = errno.EIO, at
            ended = raised_in(training, rank, "Input/output error")
            faults.fail_read_at = 0
            seen.add(ended)
            if ended == "backward" and in_backward:
                with pytest.raises(swapper.SwapError, match="load both from a checkpoint"):
                    training.optimizers[1].step()
            training.repair()
        assert {"forward", "backward"} <= seen, seen
        training.close()


def fail_in_evaluation(rank: int, directory: str) -> None:
    """Nothing that NaN is in is returned, and a forward after it is good."""
    with group(rank) as faults, torch.no_grad():
        training = Training(directory, faults, "560KiB")
        plain, net = training.models
        expected = training.pass_through(plain)
        for at in (1, 2):
            training.flush()
            if rank == FAILING:
                faults.fail_errno, faults.fail_read_at = errno.EIO, at
            with pytest.raises(swapper.SwapIOError) as raised:
                training.pass_through(net)
            is_raised(raised.value, rank, "Input/output error")
            faults.fail_read_at = 0
            assert torch.equal(training.pass_through(net), expected)
        # Outside of a forward no rank waits for one that raises.
        if rank == FAILING:
            faults.fail_errno, faults.fail_read_at = errno.EIO, 1
            with pytest.raises(swapper.SwapIOError):
                for p in net.parameters():
                    local(p).sum() if isinstance(p, DTensor) else None
            faults.fail_read_at = 0
        training.close()


def raise_of_nan(module: torch.nn.Module, arguments: object, result: torch.Tensor) -> None:
    if not torch.isfinite(result).all():
        raise FloatingPointError


def fail_where_the_model_raises_of_nan(rank: int, directory: str) -> None:
    """That has the failure as its cause, and what was gathered is not used again without a word."""
    with group(rank) as faults, torch.no_grad():
        training = Training(directory, faults, "560KiB")
        plain, net = training.models
        expected = training.pass_through(plain)
        hooks = [module.register_forward_hook(raise_of_nan) for module in net.modules() if not [*module.children()]]
        training.flush()
        if rank == FAILING:
            faults.fail_errno, faults.fail_read_at = errno.EIO, 2
        for _ in range(2):
            with pytest.raises(FloatingPointError) as caught:
                training.pass_through(net)
            faults.fail_read_at = 0
            if rank == FAILING:
                assert isinstance(caught.value.__cause__, swapper.SwapIOError)
        for hook in hooks:
            hook.remove()
        with pytest.raises(swapper.SwapIOError) as raised:
            training.pass_through(net)
        is_raised(raised.value, rank, "Input/output error")
        del caught, raised
        assert torch.equal(training.pass_through(net), expected)
        training.close()


def test_a_model_that_raises_of_what_could_not_be_read(nvme_path: Path, leaves_nothing: None) -> None:
    ranks.in_processes(fail_where_the_model_raises_of_nan, str(nvme_path))


@pytest.mark.long
def test_a_late_write_that_fails_on_one_rank_is_raised_by_all(nvme_path: Path, leaves_nothing: None) -> None:
    ranks.in_processes(fail_to_write, str(nvme_path))


@pytest.mark.long
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_read_that_fails_on_one_rank_is_raised_by_all(
    nvme_path: Path, in_backward: bool, leaves_nothing: None
) -> None:
    ranks.in_processes(fail_to_read, str(nvme_path), in_backward)


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["hybrid", "tensor"])
def test_a_read_that_fails_on_a_mesh_of_two_by_two_is_raised_by_all(
    nvme_path: Path, mesh: str, leaves_nothing: None
) -> None:
    """With tensor parallelism some parameters are on half of the ranks alone."""
    ranks.in_processes(fail_to_read, str(nvme_path), False, mesh, ranks=4)


def test_an_evaluation_that_fails_on_one_rank_fails_on_all(nvme_path: Path, leaves_nothing: None) -> None:
    ranks.in_processes(fail_in_evaluation, str(nvme_path))
