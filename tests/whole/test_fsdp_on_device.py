"""Swapping after `fully_shard` on an accelerator: ranks with a simulated device each, to the bit as plain FSDP2 there.

The device does work late, or only when somebody waits, and collectives are late too (`device_ranks`).
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerators import simulated
from device_ranks import in_device_processes
from mock_cufile import COMPILER, open_direct
from sampling import ALL, EVERY, SEED
from sharded_nets import (
    Case,
    Net,
    Twins,
    config_of,
    forget_iteration,
    in_processes,
    local,
    loss_of,
    most_pairs,
    same,
    sharded,
    tokens_of,
    unreadable,
    whole,
)
from sharded_uses import USES
from torch import nn
from torch.distributed.tensor import DTensor

import swapper
from swapper.errors import SwapIOError
from swapper.parameter import fsdp
from swapper.tensors import hollow
from swapper.tensors.evicted import is_evicted

DEVICE = "sim"
ORDERS = "sim-lazy", "sim-random"


def cases(count: int, rank_count: int, has_cufile: bool) -> Iterator[Case]:
    chance = random.Random(f"{SEED} {rank_count} on a device")
    # With foreach, which a device has by default and the CPU has not, some classes have other bits in bf16.
    classes: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
        (torch.optim.AdamW, {"foreach": False}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.Adam, {"foreach": True, "amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9, "foreach": False}),
        (torch.optim.RMSprop, {"momentum": 0.5, "foreach": False}),
    ]
    for _ in range(count):
        dtype = chance.choice([torch.float32, torch.bfloat16])
        in_backward = chance.random() < 0.3
        cls, options = chance.choice(classes)
        meshes = [
            "shard",
            "shard",
            "hybrid",
            "columns",
            *(["tensor"] if not options.get("foreach") and "fused" not in options else []),
        ]
        mesh = chance.choice(meshes)
        micro_batches = chance.choice([1, 2])
        parameters = chance.choice(["none", "nvme", "nvme", "cpu"])
        # More than what a rank has of one block, and less than all.
        block_bytes = 75_000 * dtype.itemsize // (1 if mesh == "hybrid" else rank_count)
        direct = has_cufile and parameters == "nvme" and chance.random() < 0.4
        yield Case(
            dtype,
            cls,
            options,
            device=DEVICE,
            blocks=3,
            steps=4,
            masters=dtype is torch.bfloat16 and chance.random() < 0.5,
            step_device=chance.choice(["cpu", "device"]),
            state=chance.choice(["nvme", "nvme", "cpu"]),
            reshard=chance.random() < 0.6,
            mixed=dtype is torch.float32 and chance.random() < 0.5,
            clips=not in_backward and mesh != "tensor" and chance.random() < 0.5,
            micro_batches=micro_batches,
            syncs_all=chance.random() < 0.5,
            mesh=mesh,
            checkpoints=chance.random() < 0.4,
            prefetches=chance.random() < 0.4,
            in_backward=in_backward,
            evaluates=chance.random() < 0.5,
            keeps_unsharded=micro_batches > 1 and chance.random() < 0.5,
            grouped=chance.random() < 0.3,
            parameters=parameters,
            gradients=chance.choice(["none", "nvme", "nvme", "cpu"]),
            scarce=not direct and chance.random() < 0.6,
            resident_bytes=block_bytes if parameters != "none" and chance.random() < 0.3 else 0,
            direct=direct,
        )


def train_cases(rank: int, directory: str, count: int, mock_path: str) -> None:
    if mock_path:
        open_direct(mock_path)
    for case in most_pairs(list(cases(40, torch.distributed.get_world_size(), bool(mock_path))), count):
        try:
            twins = Twins(directory, case)
            for step in range(case.steps):
                twins.train()
                if step in (1, case.steps - 1):
                    twins.compare()
                if step == 1:
                    twins.compare_state()
                    mine = twins.optimizers[1]
                    mine.load_state_dict(mine.state_dict())
            twins.compare_state()
            twins.close()
        except BaseException as error:
            error.add_note(f"in rank {rank}: {case}")
            raise


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("settings", ORDERS)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_same_bits_as_plain_fsdp(
    nvme_path: Path, settings: str, count: int, request: pytest.FixtureRequest, leaves_nothing: None
) -> None:
    mock_path = request.getfixturevalue("mock_path") if COMPILER is not None else ""
    times = 8 if EVERY else 5 if ALL else 3
    in_device_processes(train_cases, str(nvme_path), times, mock_path, settings=settings, count=count)


def is_refused(rank: int, directory: str, device: str) -> None:
    """Of devices whose tensors cannot tell that they are evicted."""
    net = sharded(Case(device=device))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(swapper.ConfigError, match="have other dispatch keys"):
        patch.setattr(hollow, "_COMPATIBLE", frozenset({"cpu"}))
        swapper.offload(net, config=config_of(directory, "4MiB"))
    assert "swapper" not in vars(net) and not any(is_evicted(local(p)) for p in net.parameters())


def use_all(rank: int, directory: str) -> None:
    for work in (*USES, is_refused):
        try:
            work(rank, directory, DEVICE)
        except BaseException as error:
            error.add_note(f"in rank {rank}: {work.__name__}")
            raise
        torch.distributed.barrier()


@pytest.mark.long
@pytest.mark.parametrize("settings", ORDERS)
def test_state_dicts_and_uses_of_parameters(nvme_path: Path, settings: str, leaves_nothing: None) -> None:
    in_device_processes(use_all, str(nvme_path), settings=settings)


# --- Failures --------------------------------------------------------------------------------------------------------


def fail_on_one_rank(rank: int, directory: str) -> None:
    """A step, in backward or after it, cannot read state on one rank: all raise that, and go on after a load.

    The ranks agree on the host, and over the device where the process group has nothing else.
    """
    for failing, over_device, in_backward, step_device in (
        (1, False, False, "device"),
        (0, True, False, "cpu"),
        (1, True, True, "device"),
        (0, False, True, "cpu"),
    ):
        case = Case(
            device=DEVICE,
            blocks=3,
            step_device=step_device,
            in_backward=in_backward,
            parameters="none",
            scarce=False,
            options={"foreach": False},
        )
        twins = Twins(directory, case)
        (plain, net), (of_plain, mine) = twins.models, twins.optimizers
        with pytest.MonkeyPatch.context() as patch:
            if over_device:
                patch.setattr(torch.distributed.distributed_c10d, "_get_object_coll_device", lambda group=None: DEVICE)
            twins.train()
            for model in twins.models if not case.in_backward else (plain,):
                model(tokens_of(2 + rank, DEVICE)).backward()
            fails = unreadable(2, gradients=False) if rank == failing else contextlib.nullcontext()
            with fails, pytest.raises(swapper.SwapError, match="cannot be read") as caught:
                mine.step() if not case.in_backward else net(tokens_of(2 + rank, DEVICE)).backward()
            assert (f"on rank {failing}" in str(caught.value)) == (rank != failing)
            with pytest.raises(swapper.SwapError, match="load both from a checkpoint"):
                mine.step()
            of_plain.step()
            net.load_state_dict(plain.state_dict())
            mine.load_state_dict(of_plain.state_dict())
            for model in twins.models:
                model.zero_grad()
            twins.train()
            twins.compare()
            twins.compare_state()
            twins.close()


@pytest.mark.long
@pytest.mark.parametrize("settings", ORDERS)
def test_what_fails_on_one_rank_is_raised_by_all(nvme_path: Path, settings: str, leaves_nothing: None) -> None:
    in_device_processes(fail_on_one_rank, str(nvme_path), settings=settings)


# --- Checkpoints -----------------------------------------------------------------------------------------------------

SAVED = [
    Case(device=DEVICE, parameters="none"),
    Case(torch.bfloat16, masters=True, step_device="cpu", device=DEVICE),
    Case(torch.bfloat16, torch.optim.SGD, {"momentum": 0.9}, masters=True, mesh="columns", device=DEVICE),
    Case(torch.bfloat16, step_device="device", parameters="cpu", state="cpu", device=DEVICE),
]


def made(
    case: Case, directory: str, seed: int, is_whole: bool = False, pool_bytes: str = "4MiB"
) -> tuple[Net, torch.optim.Optimizer]:
    net = (whole if is_whole else sharded)(replace(case, blocks=3), seed)
    optimizer = case.cls([p for p in net.parameters() if p.requires_grad], lr=1e-2, **case.options)
    state = {"master_weights": case.masters, "step_device": case.step_device, "device": case.state}
    config = config_of(directory, pool_bytes, state, offload_param={"device": case.parameters})
    if case.parameters == "none":
        swapper.wrap_optimizer(optimizer, config)
    else:
        swapper.offload(net, optimizer, config)
    return net, optimizer


def step(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    loss_of(net, seed).backward()
    optimizer.step()
    optimizer.zero_grad()


def close(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for each in (net, optimizer):
        if "swapper" in vars(each):
            vars(each)["swapper"].close()


def everything(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All values, whole, on the CPU."""

    def full(value: Any) -> Any:
        value = value.full_tensor() if isinstance(value, DTensor) else value
        return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value

    found = {name: full(value) for name, value in net.state_dict().items()}
    for number, entries in optimizer.state_dict()["state"].items():
        found |= {f"{number}.{key}": full(value) for key, value in entries.items()}
    return found


def save(rank: int, directory: str, nvme: str, case: Case) -> None:
    net, optimizer = made(case, nvme, 0)
    for seed in range(2):
        step(net, optimizer, seed)
    path = f"{directory}/saved"
    swapper.save_checkpoint(path, net, optimizer).wait()
    found = everything(net, optimizer)
    step(net, optimizer, 2)
    after = everything(net, optimizer)
    if rank == 0:
        torch.save((found, after), f"{path}.pt")
    # As many ranks train on as if training had not ended.
    other, fresh = made(case, nvme, 1)
    swapper.load_checkpoint(path, other, fresh)
    step(other, fresh, 2)
    assert_equal(everything(other, fresh), after)
    close(net, optimizer)
    close(other, fresh)


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    assert len(found) > 20
    for name, value in expected.items():
        same_value = same(value, found[name]) if isinstance(value, torch.Tensor) else value == found[name]
        assert same_value, name


def load(rank: int, directory: str, nvme: str, case: Case, is_whole: bool) -> None:
    net, optimizer = made(case, nvme, 1, is_whole)
    swapper.load_checkpoint(f"{directory}/saved", net, optimizer)
    assert_equal(everything(net, optimizer), torch.load(f"{directory}/saved.pt")[0])
    step(net, optimizer, 2)
    close(net, optimizer)


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("case", "before", "settings"),
    [*zip(SAVED, [2, 3, 2, 3], [*ORDERS, *reversed(ORDERS)], strict=True)],
    ids=["state", "cpu step", "columns", "in the pool"],
)
def test_checkpoints_load_on_other_ranks_and_devices(
    nvme_path: Path, tmp_path: Path, case: Case, before: int, settings: str, leaves_nothing: None
) -> None:
    """Saved on a device they load there, on the CPU, on fewer ranks, and in a model that is not sharded."""
    given = str(tmp_path), str(nvme_path)
    in_device_processes(save, *given, case, settings=settings, count=before)
    in_device_processes(load, *given, case, False, settings=settings, count=before - 1)
    in_device_processes(load, *given, case, True, settings=settings, count=1)
    in_processes(load, *given, replace(case, device="cpu", step_device="auto"), False)


# --- Faults ----------------------------------------------------------------------------------------------------------


def failing_attach(at: int) -> Any:
    attach, calls = fsdp._Reads.attach, itertools.count(1)

    def fails(self: Any) -> None:
        if self._running and self._use is None and next(calls) == at:
            raise SwapIOError(errno.EIO, "read", "it fails")
        attach(self)

    return fails


class Failing:
    """A model that is trained on after whatever goes wrong: what was saved is loaded."""

    def __init__(self, directory: str, nvme: str) -> None:
        self.case = Case(device=DEVICE, step_device="device")
        self.net, self.optimizer = made(self.case, nvme, 0, pool_bytes="1400KiB")
        self.path = f"{directory}/saved"
        step(self.net, self.optimizer, 0)
        swapper.save_checkpoint(self.path, self.net, self.optimizer).wait()
        step(self.net, self.optimizer, 1)
        self.expected = everything(self.net, self.optimizer)

    def fails(self, kind: type[Exception]) -> bool:
        """Train. Return True if an error of this kind was raised; then all is as it was saved."""
        try:
            step(self.net, self.optimizer, 2)
        except kind:
            return True
        return False

    def check(self) -> None:
        forget_iteration(self.net)
        self.optimizer.zero_grad()
        swapper.load_checkpoint(self.path, self.net, self.optimizer)
        step(self.net, self.optimizer, 1)
        assert_equal(everything(self.net, self.optimizer), self.expected)


def fail_together(rank: int, directory: str, nvme: str) -> None:
    """In the all-gathers of a forward, and of a backward."""
    training = Failing(directory, nvme)
    failed = []
    for at in (1, 2, 4, 6, 20):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fsdp._Reads, "attach", failing_attach(at))
            failed.append(training.fails(SwapIOError))
        training.check()
    assert failed == [True, True, True, True, False]
    close(training.net, training.optimizer)


def fail_alone(rank: int, directory: str, nvme: str) -> None:
    """The drive fails, and the device has no memory."""
    training = Failing(directory, nvme)
    swapped = training.net.swapper
    assert isinstance(swapped, swapper.ParameterSwapper)
    swapped.flush()
    contents = {file: file.read_bytes() for file in Path(nvme).glob("swapper-*/*-param-*")}
    for file in contents:
        os.truncate(file, 4096)
    assert contents and training.fails(SwapIOError)
    for file, content in contents.items():
        file.write_bytes(content)
    training.check()
    failed = []
    for room_bytes in (0, 100_000, 300_000):
        swapped.rest()
        torch.accelerator.synchronize()
        simulated().set_limit(torch.accelerator.memory_allocated() + room_bytes)
        failed.append(training.fails(torch.OutOfMemoryError))
        simulated().set_limit()
        training.check()
    assert all(failed)
    close(training.net, training.optimizer)


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("work", "count"), [(fail_together, 2), (fail_alone, 1)])
def test_training_goes_on_after_an_error(
    nvme_path: Path, tmp_path: Path, work: Callable[..., None], count: int, leaves_nothing: None
) -> None:
    in_device_processes(work, str(tmp_path), str(nvme_path), settings="sim-lazy", count=count)
