"""Checkpoints whose large files are in annexes, directories that not all ranks see: bits, reach, faults and sweeps."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from sharded_nets import in_processes
from test_fsdp import Case, config_of, local, same, sharded, step
from test_fsdp_checkpoint_faults import are_same, close, everything, made, trained
from test_fsdp_checkpoints import everything as wholes
from torch import nn
from torch.distributed.fsdp import fully_shard

import swapper
from swapper.checkpoint import annexes


def annex_of(directory: str, rank: int) -> str:
    return f"{directory}/drive-{rank}"


def only_reach(patch: pytest.MonkeyPatch, *places: str) -> None:
    """Let this process find only annexes in some directories, as one on another host."""
    find, within = annexes._manifest_of, tuple(f"{place}/" for place in places)
    patch.setattr(annexes, "_manifest_of", lambda path: find(path) if str(path).startswith(within) else None)


def save_and_resume(rank: int, directory: str, nvme: str, on_drive: str) -> None:
    net, optimizer = trained(nvme, on_drive)
    path, mine = f"{directory}/checkpoint", annex_of(directory, rank)
    swapper.save_checkpoint(path, net, optimizer, {"rank": rank}, annex=mine)
    saved, whole = everything(net, optimizer), wholes(net, optimizer)
    if rank == 0:
        torch.save(whole, f"{directory}/whole.pt")
        values = [f"values-r{each}.safetensors" for each in range(torch.distributed.get_world_size())]
        assert sorted(os.listdir(path)) == ["index.json", *values]
    (annex,) = os.listdir(mine)
    assert {"annex.json"} < {*os.listdir(f"{mine}/{annex}")}
    assert not [name for name in os.listdir(f"{mine}/{annex}") if name.startswith(".")]
    step(net, optimizer, 1)
    now = everything(net, optimizer)
    other, fresh = made(nvme, on_drive)
    with pytest.MonkeyPatch.context() as patch:
        only_reach(patch, mine)
        assert swapper.load_checkpoint(path, other, fresh) == {"rank": rank}
    assert are_same(everything(other, fresh), saved)
    step(other, fresh, 1)
    assert are_same(everything(other, fresh), now)
    close(net, optimizer)
    close(other, fresh)


def load(rank: int, directory: str, nvme: str, on_drive: str) -> None:
    """By another number of ranks, whose annexes are new ones."""
    net, optimizer = made(nvme, on_drive)
    swapper.load_checkpoint(f"{directory}/checkpoint", net, optimizer)
    expected, found = torch.load(f"{directory}/whole.pt"), wholes(net, optimizer)
    assert expected.keys() == found.keys() and all(same(value, found[key]) for key, value in expected.items())
    close(net, optimizer)


@pytest.mark.long
@pytest.mark.parametrize("on_drive", ["state", "all"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_rank_needs_only_its_own_annex(count: int, on_drive: str, nvme_path: Path, tmp_path: Path) -> None:
    in_processes(save_and_resume, str(tmp_path), str(nvme_path), on_drive, count=count)
    in_processes(load, str(tmp_path), str(nvme_path), on_drive, count=count % 3 + 1)


# --- Hosts that do not see each other's drives -----------------------------------------------------------------------


class Mixed(nn.Module):
    """Has parameters and buffers that are sharded, and others that all ranks have."""

    def __init__(self) -> None:
        super().__init__()
        self.sharded = nn.Linear(40, 41)
        self.norm = nn.BatchNorm1d(41)
        self.plain = nn.Linear(41, 40)
        self.register_buffer("own", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.plain(self.norm(self.sharded(x)))
        return found


def training(kind: str, nvme: str, on_drive: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model that is a replica on each rank, or has sharded parts, or shards that are replicated on each (HSDP)."""
    torch.manual_seed(0)
    net: nn.Module = Mixed()
    if kind == "hybrid":
        net = sharded(Case(torch.optim.AdamW, {}, mesh="hybrid"))
    elif kind == "mixed":
        fully_shard(net.sharded)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2, foreach=False)
    if on_drive == "all":
        swapper.offload(net, optimizer, config_of(nvme, offload_param={"device": "nvme"}))
    elif on_drive == "state":
        swapper.wrap_optimizer(optimizer, config_of(nvme))
    return net, optimizer


def learn(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """A step with gradients that are the same on all ranks."""
    for number, p in enumerate(p for p in net.parameters() if p.requires_grad):
        local(p).grad = None
        p.grad = p.detach() * (1 + number + seed)  # type: ignore[assignment]
    optimizer.step()
    optimizer.zero_grad()


def each_alone(rank: int, directory: str, nvme: str, kind: str, on_drive: str) -> None:
    """Ranks on hosts of their own load what all have alike from their own annexes."""
    net, optimizer = training(kind, nvme, on_drive)
    own = dict(net.named_buffers()).get("own")
    if own is not None:
        own.fill_(rank)
    learn(net, optimizer, 0)
    path, mine = f"{directory}/checkpoint", annex_of(directory, rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(annexes, "host", lambda: f"host-{rank}")
        patch.setattr("swapper.checkpoint.ranks.host", lambda: f"host-{rank}")
        only_reach(patch, mine)
        swapper.save_checkpoint(path, net, optimizer, {"rank": rank}, together=True, annex=mine)
    saved = everything(net, optimizer)
    other, fresh = training(kind, nvme, on_drive)
    with pytest.MonkeyPatch.context() as patch:
        only_reach(patch, mine)
        assert swapper.load_checkpoint(path, other, fresh) == {"rank": rank}
        assert are_same(everything(other, fresh), saved)
        learn(net, optimizer, 1)
        learn(other, fresh, 1)
        assert are_same(everything(other, fresh), everything(net, optimizer))
    close(net, optimizer)
    close(other, fresh)


@pytest.mark.long
@pytest.mark.sampled(2, together=2)
@pytest.mark.parametrize("kind", ["replica", "mixed", "hybrid"])
@pytest.mark.parametrize("on_drive", ["none", "state", "all"])
def test_what_all_have_is_in_an_annex_on_each_host(kind: str, on_drive: str, nvme_path: Path, tmp_path: Path) -> None:
    in_processes(each_alone, str(tmp_path), str(nvme_path), kind, on_drive)
