"""`save_checkpoint(..., together=True)` of replicas, as under DDP: each rank writes a part; and loads of it."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import ranks
import safetensors.torch
import torch
from checkpoints import Versioned
from sharded_nets import in_processes, within_group
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import swapper
from swapper.checkpoint import annexes
from swapper.checkpoint import checkpoint as checkpoints
from swapper.checkpoint.writer import NewCheckpoint
from swapper.errors import SwapError, SwapIOError
from swapper.storage.store import TensorStore

PLACES = ("nothing", "state", "all")
"""What of a training is on the drive."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(32, 96, bias=False)
        self.layers = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(96, 96), nn.BatchNorm1d(96))))
        self.head = Versioned(96, 32, bias=False)
        self.tied = nn.Linear(32, 96, bias=False)
        self.tied.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.layers(self.embedding(tokens) + self.tied(tokens)))
        return found


def made(nvme: str, place: str) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """A net and its two optimizers, of which the second has no record of its own where nothing is on the drive."""
    torch.manual_seed(0)
    net = Net()
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW([*net.embedding.parameters(), *net.layers.parameters()], lr=1e-2),
        torch.optim.SGD(net.head.parameters(), lr=1e-2, momentum=0.9),
    ]
    if place == "nothing":
        return net, optimizers
    given: dict[str, Any] = {"nvme_path": nvme, "pool_bytes": "2MiB", "bucket_bytes": "48KiB"}
    given["offload_optimizer"] = {"device": "nvme"}
    left = optimizers
    if place == "all":
        swapper.offload(net, optimizers[0], swapper.OffloadConfig(**given, offload_param={"device": "nvme"}))
        left = optimizers[1:]
    for each in left:
        swapper.wrap_optimizer(each, swapper.OffloadConfig(**given))
    return net, optimizers


def step(net: nn.Module, optimizers: list[torch.optim.Optimizer], rank: int, seed: int) -> None:
    """Ranks have data of their own, so buffers differ, and parameters do not."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    net(torch.randn(4, 32, generator=generator)).square().mean().backward()
    if not isinstance(net, DistributedDataParallel):
        for p in net.parameters():
            assert p.grad is not None
            torch.distributed.all_reduce(p.grad)
    for each in optimizers:
        each.step()
        each.zero_grad()


def everything(net: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    found = {f"model.{name}": value.detach().clone() for name, value in net.state_dict().items()}
    for number, optimizer in enumerate(optimizers):
        for position, entries in optimizer.state_dict()["state"].items():
            found |= {f"{number}.{position}.{key}": torch.as_tensor(value).clone() for key, value in entries.items()}
    return found


def are_same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return found.keys() == expected.keys() and all(
        value.dtype == expected[key].dtype and torch.equal(value, expected[key]) for key, value in found.items()
    )


def close(net: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    for each in (*optimizers, net):
        if "swapper" in vars(each):
            vars(each)["swapper"].close()


def save_and_load(rank: int, directory: str, nvme: str) -> None:
    users: list[list[float]] = []
    for place in PLACES:
        net, optimizers = made(nvme, place)
        # DistributedDataParallel keeps views of parameters, for which that pool is too small.
        used = net if place == "all" else DistributedDataParallel(net, broadcast_buffers=False)
        for seed in range(2):
            step(used, optimizers, rank, seed)
        path = f"{directory}/{place}"
        optimizers[1].register_state_dict_post_hook(
            lambda _, found: {**found, "users": torch.ones(3), "set": set([8, 0] if rank else [0, 8])}  # in that order
        )
        optimizers[1].register_load_state_dict_pre_hook(lambda _, given: users.append(given["users"].tolist()))
        swapper.save_checkpoint(path, used, optimizers, {"rank": rank}, together=True).wait()
        saved = everything(net, optimizers)
        torch.save(saved, f"{path}-{rank}.pt")
        check_spread(path, saved)
        step(used, optimizers, rank, 3)
        assert swapper.load_checkpoint(path, used, optimizers) == {"rank": rank}
        assert are_same(everything(net, optimizers), saved), place
        assert users.pop() == [1, 1, 1]
        assert not users
        step(used, optimizers, rank, 4)
        close(net, optimizers)


def check_spread(path: str, saved: dict[str, Any]) -> None:
    """Each rank has written its part of the model and of the state, and nothing is written twice."""
    count = torch.distributed.get_world_size()
    written: list[int] = []
    for rank in range(count):
        files = [*Path(path).glob(f"*-r{rank}-*.safetensors")]
        assert {file.name.split("-")[0] for file in files} == {"model", "optimizer"}, files
        written.append(sum(file.stat().st_size for file in files))
    total_bytes = sum(value.nbytes for value in saved.values())
    assert sum(written) < 1.2 * total_bytes + count * 10_000, (written, total_bytes)
    assert max(written) < 0.6 * min(1, 2 / count) * sum(written) + 40_000, written
    weights = json.loads((Path(path) / "model.safetensors.index.json").read_text())["weight_map"]
    read = {file: safetensors.torch.load_file(f"{path}/{file}") for file in {*weights.values()}}
    for name, file in weights.items():
        if "running" not in name:
            assert torch.equal(read[file][name], saved[f"model.{name}"]), name
    assert {name for name in saved if name.startswith("model.")} == {
        f"model.{name}" for name in (*weights, "tied.weight")
    }


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 3])
def test_replicas_write_one_checkpoint_that_one_process_loads(
    count: int, nvme_path: Path, tmp_path: Path, leaves_nothing: None
) -> None:
    in_processes(save_and_load, str(tmp_path), str(nvme_path), count=count)
    for place in PLACES:
        net, optimizers = made(str(nvme_path), "nothing")
        assert swapper.load_checkpoint(tmp_path / place, net, optimizers) == {"rank": 0}
        assert are_same(everything(net, optimizers), torch.load(tmp_path / f"{place}-0.pt")), place


def two_layers(is_tied: bool) -> nn.Module:
    """The largest tensor is rank 0's to write, the first weight rank 1's."""
    net = nn.ModuleDict({"a": nn.Linear(8, 8, bias=False), "b": nn.Linear(8, 8, bias=False), "c": nn.Linear(8, 99)})
    for number, p in enumerate(net.parameters()):
        nn.init.constant_(p, number)
    if is_tied:
        net["b"].weight = net["a"].weight
    return net


def save_other_ties(rank: int, directory: str) -> None:
    swapper.save_checkpoint(f"{directory}/checkpoint", two_layers(rank == 1), together=True)


def test_weights_that_are_tied_on_another_rank_are_those_of_rank_0(tmp_path: Path) -> None:
    in_processes(save_other_ties, str(tmp_path))
    assert len([*(tmp_path / "checkpoint").glob("model-r1-*")]) == 1
    net, expected = two_layers(False), two_layers(False)
    for p in net.parameters():
        nn.init.constant_(p, -1)
    swapper.load_checkpoint(tmp_path / "checkpoint", net)
    assert are_same(everything(net, []), everything(expected, []))


def save_extra_of_one(rank: int, directory: str) -> None:
    for having in range(2):
        extra = {"rank": rank} if rank == having else None
        swapper.save_checkpoint(f"{directory}/{having}", nn.Linear(2, 2), extra=extra, together=True).wait()
        torch.distributed.barrier()
        assert swapper.load_checkpoint(f"{directory}/{having}", nn.Linear(2, 2)) == extra


def test_a_rank_without_extra_is_not_given_that_of_rank_0(tmp_path: Path) -> None:
    in_processes(save_extra_of_one, str(tmp_path))


def save_packed_by(rank: int, directory: str, nvme: str) -> None:
    for packing in (0, 1):
        torch.manual_seed(0)
        net = nn.Linear(96, 200)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        state = {"device": "nvme", "encoding": "packed" if rank == packing else "unpacked"}
        given: dict[str, Any] = {"nvme_path": nvme, "pool_bytes": "2MiB", "bucket_bytes": "48KiB"}
        swapper.wrap_optimizer(optimizer, swapper.OffloadConfig(**given, offload_optimizer=state))
        net(torch.randn(4, 96)).square().mean().backward()
        optimizer.step()
        path = f"{directory}/{packing}"
        swapper.save_checkpoint(path, net, optimizer, together=True)
        saved = everything(net, [optimizer])
        assert all([*Path(path).glob(f"optimizer-0-r{each}-0*")] for each in (0, 1))
        optimizer.zero_grad()
        net(torch.randn(4, 96)).square().mean().backward()
        optimizer.step()
        swapper.load_checkpoint(path, net, optimizer)
        assert are_same(everything(net, [optimizer]), saved)
        close(net, [optimizer])


def test_replicas_of_which_one_packs_save_together(nvme_path: Path, tmp_path: Path, leaves_nothing: None) -> None:
    """As `encoding: exact` may choose on each rank: parts of one parameter are packed, and others are not."""
    in_processes(save_packed_by, str(tmp_path), str(nvme_path))


# --- When it fails ---------------------------------------------------------------------------------------------------


def full_drive(*args: object, **options: object) -> None:
    raise SwapIOError(errno.ENOSPC, "write", Path("a file"))


def refused(message: str, rank: int, directory: str, *given: Any) -> None:
    """All ranks raise it, and nothing is left."""
    with pytest.raises(SwapError, match=message):
        swapper.save_checkpoint(*given, together=True)
    torch.distributed.barrier()
    assert os.listdir(directory) == ["checkpoint"], (message, os.listdir(directory))
    torch.distributed.barrier()


def fail(rank: int, directory: str, nvme: str) -> None:
    net, optimizers = made(nvme, "state")
    step(net, optimizers, rank, 0)
    path = f"{directory}/checkpoint"
    swapper.save_checkpoint(path, net, optimizers, together=True)
    saved = everything(net, optimizers)
    step(net, optimizers, rank, 1)
    for failing in (0, 1):
        for where, name in (
            (NewCheckpoint, "write_tensors"),
            (TensorStore, "publish_all"),
            (NewCheckpoint, "complete"),
            (checkpoints, "write_for_others"),
        ):
            if failing and name == "write_for_others":  # Rank 0 does that.
                continue
            with pytest.MonkeyPatch.context() as patch:
                if rank == failing:
                    patch.setattr(where, name, full_drive)
                refused("" if rank == failing else f"on rank {failing}", rank, directory, path, net, optimizers)
    refused("different numbers of optimizers", rank, directory, path, net, optimizers[: 2 - rank])
    refused("another class", rank, directory, path, net, optimizers[:: -1 if rank else 1])
    hook = optimizers[1].register_state_dict_post_hook(lambda _, found: {**found, "rank": torch.tensor(rank)})
    refused("adds other values to its state dict", rank, directory, path, net, optimizers)
    hook.remove()
    other = f"{directory}/other" if rank else path
    refused("another directory here than .*checkpoint on rank 0", rank, directory, other, net, optimizers)
    weight = net.get_parameter("head.weight")
    with torch.no_grad():
        weight[0, 0] += rank
    refused("head.weight or its .* is not the same on ranks 0 and 1", rank, directory, path, net, optimizers)
    swapper.load_checkpoint(path, net, optimizers)
    assert are_same(everything(net, optimizers), saved)
    close(net, optimizers)


@pytest.mark.long
def test_what_fails_on_one_replica_is_raised_on_all(nvme_path: Path, tmp_path: Path, leaves_nothing: None) -> None:
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    in_processes(fail, str(directory), str(nvme_path))


def fail_to_load(rank: int, directory: str, nvme: str) -> None:
    """What one replica cannot load none has loaded, or all know of it."""
    net, optimizers = made(nvme, "state")
    step(net, optimizers, rank, 0)
    path, drive = f"{directory}/checkpoint", f"{directory}/drive-{rank}"
    swapper.save_checkpoint(path, net, optimizers, together=True, annex=drive)
    saved = everything(net, optimizers)
    step(net, optimizers, rank, 1)
    now = everything(net, optimizers)

    def is_refused(failing: int, message: str, *given: Any) -> None:
        with pytest.raises(SwapError, match=f"(?s)^(?!.*on rank).*{message}" if rank == failing else message) as caught:
            swapper.load_checkpoint(*given, together=True)
        assert (f"on rank {failing}" in str(caught.value)) == (rank != failing)
        torch.distributed.barrier()

    for failing in (0, 1):
        fails = rank == failing
        is_refused(failing, "no checkpoint|No such file", f"{path}-not" if fails else path, net, optimizers)
        is_refused(failing, "optimizer", path, net, optimizers[:1] if fails else optimizers)
        is_refused(failing, "no torch.nn.Module", path, None if fails else net, optimizers)
        assert are_same(everything(net, optimizers), now)
        with pytest.MonkeyPatch.context() as patch:
            if fails:  # As on a host whose drive does not have it.
                patch.setattr(annexes, "_manifest_of", lambda _: None)
            is_refused(failing, "mount or copy", path, net, optimizers)
        assert are_same(everything(net, optimizers), now)
        with pytest.MonkeyPatch.context() as patch:
            if fails:  # In the middle of what is loaded.
                patch.setattr("swapper.checkpoint.state_loader._StateLoader.load", full_drive)
            is_refused(failing, "No space left", path, net, optimizers)
        for optimizer in optimizers:
            with pytest.raises(SwapError, match="load"):
                optimizer.step()
        swapper.load_checkpoint(path, net, optimizers, together=True)
        assert are_same(everything(net, optimizers), saved)
        step(net, optimizers, rank, 1)
        assert are_same(everything(net, optimizers), now)
    close(net, optimizers)


@pytest.mark.long
def test_what_one_replica_cannot_load_is_raised_on_all(nvme_path: Path, tmp_path: Path, leaves_nothing: None) -> None:
    in_processes(fail_to_load, str(tmp_path), str(nvme_path))


def killed(*args: object, **options: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def live(rank: int, directory: str, nvme: str, dying: int) -> None:
    net, optimizers = made(nvme, "state")
    step(net, optimizers, rank, 0)
    path = f"{directory}/checkpoint"
    swapper.save_checkpoint(path, net, optimizers, together=True)
    torch.save(everything(net, optimizers), f"{directory}/{rank}.pt")
    step(net, optimizers, rank, 1)
    torch.distributed.barrier()
    if rank == dying:
        NewCheckpoint.complete = killed  # type: ignore[method-assign, assignment]
    try:
        swapper.save_checkpoint(path, net, optimizers, together=True)
    except Exception as error:
        Path(f"{directory}/raised-{rank}").write_text(f"{type(error).__name__}: {error}")
        os._exit(0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dying", [0, 1])
def test_a_replica_that_is_killed_leaves_the_checkpoint_before(dying: int, nvme_path: Path, tmp_path: Path) -> None:
    with ranks.started(within_group, live, (str(tmp_path), str(nvme_path), dying), ranks=3) as context:
        for process in context.processes:
            process.join(ranks.TIMEOUT_S)
    assert all((tmp_path / f"raised-{rank}").exists() for rank in range(3) if rank != dying)
    net, optimizers = made(str(nvme_path), "nothing")
    swapper.load_checkpoint(tmp_path / "checkpoint", net, optimizers)
    assert are_same(everything(net, optimizers), torch.load(tmp_path / "0.pt"))
