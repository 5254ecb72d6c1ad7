"""Checkpoints whose large files are in annexes, directories that not all ranks see: bits, reach, faults and sweeps."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from sharded_nets import in_processes
from test_fsdp import same, step
from test_fsdp_checkpoint_faults import are_same, close, everything, made, trained
from test_fsdp_checkpoints import everything as wholes

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
