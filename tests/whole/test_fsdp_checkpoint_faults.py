"""Several ranks of which one fails in a checkpoint, or is killed: all end, and the checkpoint before is whole."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from sharded_nets import in_processes, within_group
from test_fsdp import config_of, local, same, small, step
from test_fsdp_checkpoints import everything as wholes
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

import swapper
from swapper.checkpoint import checkpoint as checkpoints
from swapper.checkpoint.state_loader import _StateLoader
from swapper.checkpoint.writer import NewCheckpoint
from swapper.errors import SwapIOError
from swapper.optimizer.stepper import Stepper
from swapper.storage.atomic import remove_tree, sweep_directories, temporary_path
from swapper.storage.store import TensorStore

PLACES: list[tuple[Any, str]] = [
    (swapper.ParameterSwapper, "flush"),
    (NewCheckpoint, "encode"),
    (NewCheckpoint, "_write_tensors"),
    (TensorStore, "publish_all"),
    (NewCheckpoint, "write_values"),
    (NewCheckpoint, "complete"),
    (NewCheckpoint, "seal"),
    (NewCheckpoint, "publish"),
    (checkpoints, "refuse_unloadable"),
]


@contextmanager
def replaced(where: Any, name: str, other: Callable[..., Any]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, name, other)
        yield


def full_drive(*args: object, **options: object) -> None:
    raise SwapIOError(errno.ENOSPC, "write", Path("a file"))


ON_DRIVE = ["state", "all"]


def made(directory: str, on_drive: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    net, optimizer = small()
    more = {"offload_param": {"device": "nvme"}} if on_drive == "all" else {}
    swapper.offload(net, optimizer, config_of(directory, **more))
    return net, optimizer


def trained(directory: str, on_drive: str = "state") -> tuple[nn.Module, torch.optim.Optimizer]:
    net, optimizer = made(directory, on_drive)
    step(net, optimizer)
    return net, optimizer


def close(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for each in (optimizer, net):
        if "swapper" in vars(each):
            vars(each)["swapper"].close()


def everything(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    state = optimizer.state_dict()["state"]
    values = [value for entries in state.values() for value in entries.values()]
    return [
        local(each).detach().clone() if isinstance(each, torch.Tensor) else each
        for each in [*net.parameters(), *values]
    ]


def are_same(found: list[Any], expected: list[Any]) -> bool:
    return len(found) == len(expected) and all(map(same, found, expected))


def fail_to_save(rank: int, directory: str, nvme: str, on_drive: str) -> None:
    """What fails on one rank is raised on all; nothing is left, and training and the old checkpoint are whole."""
    net, optimizer = trained(nvme, on_drive)
    (twin, reference) = trained(nvme, on_drive)
    path = f"{directory}/checkpoint"
    swapper.save_checkpoint(path, net, optimizer)
    saved = everything(net, optimizer)
    step(net, optimizer, 1)
    step(twin, reference, 1)
    for (where, name), failing in ((place, failing) for place in PLACES for failing in (0, 1)):
        if failing and name in ("seal", "publish", "refuse_unloadable"):  # Rank 0 does that.
            continue
        if name == "flush" and on_drive == "state":
            continue
        with pytest.MonkeyPatch.context() as patch:
            if rank == failing:
                patch.setattr(where, name, full_drive)
            with pytest.raises(SwapIOError, match="a file") as caught:
                swapper.save_checkpoint(path, net, optimizer)
        assert caught.value.errno == errno.ENOSPC
        assert (f"on rank {failing}" in str(caught.value)) == (rank != failing), (name, str(caught.value))
        torch.distributed.barrier()
        assert os.listdir(directory) == ["checkpoint"], name
    for other in ("no model", [1]):
        given = (other, optimizer) if rank == 1 else (net, optimizer)
        with pytest.raises(swapper.ConfigError, match="module"):
            swapper.save_checkpoint(path, *given)  # type: ignore[arg-type]
    step(net, optimizer, 2)
    step(twin, reference, 2)
    assert are_same(everything(net, optimizer), everything(twin, reference))
    swapper.load_checkpoint(path, net, optimizer)
    assert are_same(everything(net, optimizer), saved)
    close(net, optimizer)
    close(twin, reference)


def fail_to_load(rank: int, directory: str, nvme: str, on_drive: str) -> None:
    net, optimizer = trained(nvme, on_drive)
    good, bad = f"{directory}/good", f"{directory}/bad"
    swapper.save_checkpoint(good, net, optimizer)
    saved = everything(net, optimizer)
    step(net, optimizer, 1)
    now = everything(net, optimizer)
    # What is refused has changed nothing.
    other = torch.optim.SGD(net.parameters()) if rank == 1 else optimizer
    with pytest.raises(swapper.ConfigError, match="^on rank 1" if rank == 0 else "is not a checkpoint of"):
        swapper.load_checkpoint(good, net, other)
    for failing in (0, 1):
        with pytest.raises(SwapIOError, match="gone") as caught:
            swapper.load_checkpoint(f"{directory}/gone" if rank == failing else good, net, optimizer)
        assert (f"on rank {failing}" in str(caught.value)) == (rank != failing)
    assert are_same(everything(net, optimizer), now)
    step(net, optimizer, 2)
    model = "model-r0-memory" if on_drive == "state" else "model-r0-00000"
    for name, is_cut in (("optimizer-0-r1-00000", False), (model, False), ("optimizer-0-r0-00000", True)):
        if rank == 0:
            shutil.rmtree(bad, ignore_errors=True)
            shutil.copytree(good, bad)
            file = Path(bad) / f"{name}.safetensors"
            data = bytearray(file.read_bytes())
            data[-1000] ^= 1
            file.write_bytes(data[:-1] if is_cut else data)
        torch.distributed.barrier()
        before = everything(net, optimizer)
        with pytest.raises(swapper.SwapError, match=name):
            swapper.load_checkpoint(bad, net, optimizer)
        if is_cut:
            assert are_same(everything(net, optimizer), before)
        else:  # On both ranks, of which one had nothing to complain about.
            with pytest.raises(swapper.SwapError):
                optimizer.step()
        swapper.load_checkpoint(good, net, optimizer)
        assert are_same(everything(net, optimizer), saved)
        step(net, optimizer, 1)
        assert are_same(everything(net, optimizer), now)
    for failing in (0, 1):
        with pytest.MonkeyPatch.context() as patch:
            if rank == failing:
                patch.setattr(_StateLoader, "load", full_drive)
            with pytest.raises(SwapIOError, match="a file"):
                swapper.load_checkpoint(good, net, optimizer)
        with pytest.raises(swapper.SwapError):
            optimizer.step()
        swapper.load_checkpoint(good, net, optimizer)
        step(net, optimizer, 1)
        assert are_same(everything(net, optimizer), now)
    close(net, optimizer)


def fail_to_load_state(rank: int, directory: str, nvme: str, on_drive: str) -> None:
    """`optimizer.load_state_dict` raises on all ranks."""
    net, optimizer = trained(nvme, on_drive)
    now = everything(net, optimizer)
    state = optimizer.state_dict()
    fewer = {**state, "param_groups": [{**state["param_groups"][0], "params": [0]}]}
    other = {**state, "state": {**state["state"], 0: {"exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}}}
    for failing, wrong in ((failing, wrong) for failing in (0, 1) for wrong in (fewer, other)):
        with pytest.raises(ValueError if rank == failing else swapper.SwapError, match="no state was loaded") as caught:
            optimizer.load_state_dict(wrong if rank == failing else state)
        assert (f"on rank {failing}" in str(caught.value)) == (rank != failing)
        assert are_same(everything(net, optimizer), now)
    for failing in (0, 1):
        with pytest.MonkeyPatch.context() as patch:
            if rank == failing:
                patch.setattr("swapper.optimizer.state_dicts._write", full_drive)
            with pytest.raises(SwapIOError, match="a file"):
                optimizer.load_state_dict(state)
        with pytest.raises(swapper.SwapError):
            optimizer.state_dict()
        optimizer.load_state_dict(state)
        assert are_same(everything(net, optimizer), now)
    for failing in (0, 1):  # As where there is no room for parameters that were added since.
        with pytest.MonkeyPatch.context() as patch:
            if rank == failing:
                patch.setattr("swapper.optimizer.plan_follower.PlanFollower.follow", full_drive)
            with pytest.raises(SwapIOError, match="a file"):
                optimizer.load_state_dict(state)
        assert are_same(everything(net, optimizer), now)
    step(net, optimizer)
    close(net, optimizer)


def fail(rank: int, directory: str, nvme: str, on_drive: str) -> None:
    for work in (fail_to_save, fail_to_load, fail_to_load_state):
        path = f"{directory}/{work.__name__}"
        os.makedirs(path, exist_ok=True)
        try:
            work(rank, path, nvme, on_drive)
        except Exception as error:
            error.add_note(f"in rank {rank}: {work.__name__}")
            raise
        torch.distributed.barrier()


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("on_drive", ON_DRIVE)
def test_what_fails_on_one_rank_fails_on_all(
    on_drive: str, nvme_path: Path, tmp_path: Path, leaves_nothing: None
) -> None:
    in_processes(fail, str(tmp_path), str(nvme_path), on_drive)


def test_what_another_rank_writes_while_it_is_removed_is_removed_later(tmp_path: Path) -> None:
    path = temporary_path(tmp_path / "checkpoint")
    path.mkdir()
    (path / "first").touch()

    def adopt(file: Path) -> bool:
        (path / "second").touch()
        return False

    with pytest.raises(OSError, match="not empty"):
        remove_tree(path, adopt)
    sweep_directories(tmp_path, lambda _: False)
    assert not os.listdir(tmp_path)


# --- Killed ----------------------------------------------------------------------------------------------------------


def killed(*args: object, **options: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


DEATHS: list[tuple[str, Any, str]] = [
    ("save", TensorStore, "publish_all"),
    ("save", NewCheckpoint, "complete"),
    ("load", _StateLoader, "load"),
    ("step", FSDPParamGroup, "post_backward"),
    ("step", Stepper, "_step_bucket"),
]


def live(rank: int, directory: str, nvme: str, on_drive: str, dying: int, what: str, where: Any, name: str) -> None:
    net, optimizer = trained(nvme, on_drive)
    path = f"{directory}/checkpoint"
    swapper.save_checkpoint(path, net, optimizer)
    whole = wholes(net, optimizer)
    if rank == 0:
        torch.save(whole, f"{directory}/whole.pt")
    step(net, optimizer, 1)
    torch.distributed.barrier()
    if rank == dying:
        setattr(where, name, killed)
    try:
        if what == "save":
            swapper.save_checkpoint(path, net, optimizer)
        elif what == "load":
            swapper.load_checkpoint(path, net, optimizer)
        else:
            step(net, optimizer, 2)
    except Exception as error:
        Path(f"{directory}/raised-{rank}").write_text(f"{type(error).__name__}: {error}")
        # Nobody is helped by its end.
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and not all(
            Path(f"{directory}/raised-{each}").exists()
            for each in range(torch.distributed.get_world_size())
            if each != dying
        ):
            time.sleep(0.05)
        os._exit(0)


def load_after(rank: int, directory: str, nvme: str, on_drive: str) -> None:
    net, optimizer = made(nvme, on_drive)
    swapper.load_checkpoint(f"{directory}/checkpoint", net, optimizer)
    expected, found = torch.load(f"{directory}/whole.pt"), wholes(net, optimizer)
    assert expected.keys() == found.keys() and all(same(value, found[key]) for key, value in expected.items())
    swapper.save_checkpoint(f"{directory}/next", net, optimizer)
    close(net, optimizer)
    assert not [name for name in os.listdir(directory) if ".tmp-" in name]


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("on_drive", ON_DRIVE)
@pytest.mark.parametrize("dying", [0, 1])
@pytest.mark.parametrize("death", DEATHS, ids=lambda death: f"{death[0]}-{death[2]}")
def test_a_rank_that_is_killed_does_not_hang_the_others(
    death: tuple[str, Any, str], dying: int, on_drive: str, nvme_path: Path, tmp_path: Path
) -> None:
    with ranks.started(
        within_group, live, (str(tmp_path), str(nvme_path), on_drive, dying, *death), ranks=3
    ) as context:
        for process in context.processes:
            process.join(ranks.TIMEOUT_S)
    survivors = [rank for rank in range(3) if rank != dying]
    assert all((tmp_path / f"raised-{rank}").exists() for rank in survivors)
    in_processes(load_after, str(tmp_path), str(nvme_path), on_drive, count=2)
