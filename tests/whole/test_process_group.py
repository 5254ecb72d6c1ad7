"""Calls that only some of the processes of `torch.distributed` make, within `swapper.process_group`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_nets import in_processes
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import swapper
from swapper.storage import agreement
from swapper.storage.agreement import agreed, exchanged, rank_count, rank_of_process

MEMBERS = [1, 2]
"""Of three processes."""


def made(nvme: str | None, sharded: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(130, 257), nn.Tanh(), nn.Linear(257, 33))
    if sharded:
        fully_shard(net, mesh=DeviceMesh("cpu", MEMBERS))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    if nvme is not None:
        where = {"device": "nvme"}
        places = {"offload_optimizer": where, "offload_param": where, "offload_gradient": where}
        config = swapper.OffloadConfig(nvme_path=nvme, pool_bytes="8MiB", bucket_bytes="64KiB", **places)
        swapper.offload(net, optimizer, config)
    return net, optimizer


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for turn in steps:
        x = torch.randn(4, 130, generator=torch.Generator().manual_seed(turn * 10 + dist.get_rank()))
        net(x).square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def values(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    found = [*net.state_dict().values()]
    for state in optimizer.state_dict()["state"].values():
        found += state.values()
    return [(each.to_local() if hasattr(each, "to_local") else each).detach().clone() for each in found]


def check_training(nvme: str, sharded: bool, checkpoint: Path) -> None:
    expected = made(None, sharded)
    train(*expected, range(6))
    net, optimizer = made(nvme, sharded)
    train(net, optimizer, range(2))
    swapper.save_checkpoint(checkpoint, net, optimizer, {"turn": 2})
    saved = optimizer.state_dict()
    train(net, optimizer, range(2, 3))
    assert swapper.load_checkpoint(checkpoint, net, optimizer) == {"turn": 2}
    optimizer.load_state_dict(saved)
    train(net, optimizer, range(2, 6))
    torch.testing.assert_close(values(net, optimizer), values(*expected), rtol=0, atol=0)
    swapper.unwrap_optimizer(optimizer)
    net.swapper.close()


def fail_on(rank: int) -> None:
    with agreed():
        if dist.get_rank() == rank:
            raise ValueError("of this rank")


def alone(rank: int) -> dist.ProcessGroup:
    group = dist.new_group([rank], use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def train_some(rank: int, directory: str) -> None:
    assert swapper.process_group is agreement.process_group
    group = dist.new_group(MEMBERS)
    nvme, checkpoint = f"{directory}/nvme", Path(directory) / "checkpoint"
    Path(nvme).mkdir(exist_ok=True)
    if rank in MEMBERS:
        with swapper.process_group(group):
            assert (rank_count(), rank_of_process()) == (2, rank - 1)
            assert exchanged(rank) == MEMBERS
            check_training(nvme, True, checkpoint)
            with pytest.raises(ValueError if rank == 2 else swapper.SwapError, match="this rank") as caught:
                fail_on(2)
            assert rank == 2 or str(caught.value) == "on rank 2: ValueError: of this rank"
            with pytest.raises(swapper.SwapError, match=r"ranks \[2\] are within another call"):
                fail_on(0) if rank == 2 else exchanged(None)
            with swapper.process_group(alone(rank)):
                assert (rank_count(), rank_of_process(), exchanged(rank)) == (1, 0, [rank])
            assert exchanged(rank) == MEMBERS
            with swapper.process_group(None):
                assert (rank_count(), rank_of_process()) == (3, rank)
    else:
        with pytest.raises(swapper.ConfigError, match="this process is not in the group"), swapper.process_group(group):
            pass
        with swapper.process_group(alone(rank)):  # What is not sharded, beside them.
            check_training(nvme, False, Path(directory) / "alone")
    assert exchanged(rank) == [0, 1, 2]
    assert not list(Path(nvme).glob("swapper-*"))


@pytest.mark.long
def test_some_of_the_processes_train_and_save(tmp_path: Path, leaves_nothing: None) -> None:
    in_processes(train_some, str(tmp_path), count=3)


def be_late(rank: int) -> None:
    said: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            dist.distributed_c10d._get_default_store().set("said", "1")

    assert exchanged(rank) == [0, 1]  # The first time ranks connect, by way of the store that the handler needs.
    agreement.log.addHandler(Kept())
    agreement.WARN_AFTER_S = 0.1
    agreement._watcher = None  # That one sleeps as long as was asked before.
    if rank:
        # Until rank 0 has said that it waits.
        dist.distributed_c10d._get_default_store().wait(["said"], timedelta(minutes=1))
        agreement.WARN_AFTER_S = 3600.0
    assert exchanged(rank) == [0, 1]
    told: Any = exchanged(said)[0]
    assert any("rank 0 has waited 0 s for the other ranks of [0, 1] to make the same call" in each for each in told)


def test_who_waits_long_says_for_whom() -> None:
    in_processes(be_late)


@pytest.fixture
def one_of_three() -> Iterator[None]:
    """This process is rank 1, and whatever it asks the others they say what it says."""
    dist.init_process_group("fake", rank=1, world_size=3, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_without_torch_distributed() -> None:
    with swapper.process_group(None):
        assert (rank_count(), rank_of_process(), exchanged(3)) == (1, 0, [3])


def test_other_threads_are_in_the_group_too(one_of_three: None) -> None:
    """Autograd's on a device agree."""
    found: list[int] = []
    with swapper.process_group(dist.new_group([1, 2])):
        thread = threading.Thread(target=lambda: found.append(rank_count()))
        thread.start()
        thread.join()
    assert [*found, rank_count()] == [2, 3]


@pytest.mark.parametrize("wrong", ["destroyed", "gloo", [0, 1]], ids=str)
def test_what_is_no_group_is_refused_by_name(wrong: Any, one_of_three: None) -> None:
    if wrong == "destroyed":
        wrong = dist.new_group([0, 1])
        dist.destroy_process_group(wrong)
    with pytest.raises(swapper.ConfigError, match="is no process group of this program, or was destroyed"):
        swapper.process_group(wrong).__enter__()


def test_ranks_agree_where_the_system_has_no_more_threads(one_of_three: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(agreement, "_watcher", None)
    monkeypatch.setattr(threading.Thread, "start", fails)
    assert exchanged(3) == [3, 3, 3]
