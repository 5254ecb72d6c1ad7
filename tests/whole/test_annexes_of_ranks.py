"""Checkpoints whose large files are in annexes, directories that not all ranks see: bits, reach, faults and sweeps."""

from __future__ import annotations

import errno
import io
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from sharded_nets import in_processes, within_group
from small_drives import mounted
from test_fsdp import Case, config_of, local, same, sharded, step
from test_fsdp_checkpoint_faults import are_same, close, everything, full_drive, killed, made, trained
from test_fsdp_checkpoints import everything as wholes
from torch import nn
from torch.distributed.fsdp import fully_shard

import swapper
from swapper.checkpoint import annexes
from swapper.checkpoint import checkpoint as checkpoints
from swapper.checkpoint import ranks as ranks_module
from swapper.checkpoint.export import export_checkpoint
from swapper.checkpoint.index import glance
from swapper.checkpoint.writer import NewCheckpoint
from swapper.errors import SwapError, SwapIOError
from swapper.storage import atomic
from swapper.storage.store import TensorStore


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


# --- Other numbers of ranks ------------------------------------------------------------------------------------------


def square(nvme: str, *, is_whole: bool, swaps: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose rows are spread evenly over 1, 2 and 4 ranks."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(256, 128), nn.Linear(128, 256, bias=False))
    if not is_whole:
        fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False)
    if swaps:
        swapper.offload(net, optimizer, config_of(nvme, offload_param={"device": "nvme"}))
    return net, optimizer


def save_square(rank: int, directory: str, nvme: str, is_whole: bool) -> None:
    net, optimizer = square(nvme, is_whole=is_whole)
    for seed in range(2):
        learn(net, optimizer, seed)
    swapper.save_checkpoint(f"{directory}/checkpoint", net, optimizer, annex=annex_of(directory, rank))
    whole = wholes(net, optimizer)
    if rank == 0:
        torch.save(whole, f"{directory}/whole.pt")
    close(net, optimizer)


def load_square(rank: int, directory: str, nvme: str, saved_by: int) -> None:
    """Each of two ranks needs, and reaches, half of the annexes; and one process whose model is whole all of them."""
    half = saved_by // 2
    mine = [annex_of(directory, each) for each in range(rank * half, (rank + 1) * half)]
    path, expected = f"{directory}/checkpoint", torch.load(f"{directory}/whole.pt")
    for swaps in (True, False):
        net, optimizer = square(nvme, is_whole=False, swaps=swaps)
        with pytest.MonkeyPatch.context() as patch:
            only_reach(patch, *mine)
            swapper.load_checkpoint(path, net, optimizer)
            found = wholes(net, optimizer)
        assert expected.keys() == found.keys() and all(same(value, found[key]) for key, value in expected.items())
        close(net, optimizer)
    net, optimizer = square(nvme, is_whole=True)
    learn(net, optimizer, 5)
    before = everything(net, optimizer)
    exported = f"{directory}/exported-{rank}.pt"
    for load in (
        lambda: swapper.load_checkpoint(path, net, optimizer),
        lambda: swapper.load_checkpoint(path, net),
        lambda: checkpoints.OpenCheckpoint(path).load_optimizers(net, optimizer),
        lambda: export_checkpoint(path, "torch", exported),
    ):
        with pytest.MonkeyPatch.context() as patch:
            only_reach(patch, *mine)
            with pytest.raises(SwapIOError, match="mount or copy") as caught:
                load()
        for number, annex in enumerate(named(path)):
            assert (str(annex) in str(caught.value)) == (annex_of(directory, number) not in mine)
        assert are_same(everything(net, optimizer), before)
    export_checkpoint(path, "torch", exported)
    swapper.load_checkpoint(path, net, optimizer)
    found = wholes(net, optimizer)
    assert all(same(value, found[key]) for key, value in expected.items())
    close(net, optimizer)


def load_from_whole(rank: int, directory: str, nvme: str) -> None:
    net, optimizer = square(nvme, is_whole=False)
    swapper.load_checkpoint(f"{directory}/checkpoint", net, optimizer)
    expected, found = torch.load(f"{directory}/whole.pt"), wholes(net, optimizer)
    assert all(same(value, found[key]) for key, value in expected.items())
    close(net, optimizer)


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 4])
def test_a_rank_needs_the_annexes_that_have_a_part_of_its_shards(count: int, nvme_path: Path, tmp_path: Path) -> None:
    in_processes(save_square, str(tmp_path), str(nvme_path), False, count=count)
    in_processes(load_square, str(tmp_path), str(nvme_path), count)


@pytest.mark.long
def test_the_annex_of_one_process_is_loaded_by_several(nvme_path: Path, tmp_path: Path) -> None:
    in_processes(save_square, str(tmp_path), str(nvme_path), True, count=1)
    in_processes(load_from_whole, str(tmp_path), str(nvme_path))


# --- Hosts that do not see each other's drives -----------------------------------------------------------------------


class Mixed(nn.Module):
    """Has parameters and buffers that are sharded, and others that all ranks have."""

    def __init__(self) -> None:
        super().__init__()
        self.sharded = nn.Linear(150, 151)
        self.norm = nn.BatchNorm1d(151)
        self.plain = nn.Linear(151, 150)
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
        patch.setattr(ranks_module, "host", lambda: f"host-{rank}")
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
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["replica", "mixed", "hybrid"])
@pytest.mark.parametrize("on_drive", ["none", "state", "all"])
def test_what_all_have_is_in_an_annex_on_each_host(kind: str, on_drive: str, nvme_path: Path, tmp_path: Path) -> None:
    in_processes(each_alone, str(tmp_path), str(nvme_path), kind, on_drive)


def spoil(rank: int, directory: str, nvme: str, hosts: int) -> None:
    """A file of rank 1 that could not be loaded is found before the checkpoint has its name, by who sees it."""
    net, optimizer = trained(nvme, "state")
    path, mine = f"{directory}/all/checkpoint", annex_of(directory, rank)
    complete = NewCheckpoint.complete

    def cut(new: NewCheckpoint) -> None:
        complete(new)
        file = next(new.bulk_path.glob("optimizer-*-00000.safetensors"))
        os.truncate(file, file.stat().st_size - 1)

    with pytest.MonkeyPatch.context() as patch:
        if hosts > 1:
            patch.setattr(ranks_module, "host", lambda: f"host-{rank}")
            only_reach(patch, mine)
        if rank == 1:
            patch.setattr(NewCheckpoint, "complete", cut)
        with pytest.raises(SwapError, match="not saved, because it could not be loaded again"):
            swapper.save_checkpoint(path, net, optimizer, annex=mine)
    torch.distributed.barrier()
    assert not os.listdir(mine) and not os.listdir(f"{directory}/all")
    close(net, optimizer)


@pytest.mark.long
@pytest.mark.parametrize("hosts", [1, 2])
def test_what_could_not_be_loaded_is_not_saved(hosts: int, nvme_path: Path, tmp_path: Path) -> None:
    in_processes(spoil, str(tmp_path), str(nvme_path), hosts)


# --- One rank fails --------------------------------------------------------------------------------------------------

FAILING: list[tuple[Any, str, int | None]] = [
    (annexes, "_check_outside", None),
    (annexes, "_sweep", None),
    (NewCheckpoint, "_write_tensors", None),
    (TensorStore, "publish_all", None),
    (NewCheckpoint, "complete", None),
    (NewCheckpoint, "seal", 0),
    (annexes, "all_at_once", None),
    (annexes.NewAnnex, "complete", None),
    (atomic, "put_in_place", 0),
]
"""Where a rank fails; None: any."""


def named(path: str) -> list[Path]:
    """The annexes of a checkpoint, in the order of ranks."""
    found = glance(Path(path))
    assert found is not None
    return [Path(annex.path) for annex in found.annexes]


def fail_to_save(rank: int, directory: str, nvme: str, on_drive: str) -> None:
    """What fails on one rank is raised on all; nothing is left, and training and the old checkpoint are whole."""
    net, optimizer = trained(nvme, on_drive)
    twin, reference = trained(nvme, on_drive)
    path, mine = f"{directory}/all/checkpoint", annex_of(directory, rank)
    swapper.save_checkpoint(path, net, optimizer, annex=mine)
    saved, kept = everything(net, optimizer), os.listdir(mine)
    for each, its in ((net, optimizer), (twin, reference)):
        step(each, its, 1)

    def check(what: object) -> None:
        torch.distributed.barrier()
        assert os.listdir(f"{directory}/all") == ["checkpoint"], what
        assert os.listdir(mine) == kept, what
        torch.distributed.barrier()

    for (where, name, only), failing in ((place, failing) for place in FAILING for failing in (0, 1)):
        if only not in (None, failing):
            continue
        with pytest.MonkeyPatch.context() as patch:
            if rank == failing:
                patch.setattr(where, name, full_drive)
            with pytest.raises(SwapIOError, match="a file") as caught:
                swapper.save_checkpoint(path, net, optimizer, annex=mine)
        assert caught.value.errno == errno.ENOSPC
        assert (f"on rank {failing}" in str(caught.value)) == (rank != failing), (name, str(caught.value))
        check(name)
    if rank == 0:
        Path(f"{directory}/file").touch()
    torch.distributed.barrier()
    wrong: list[tuple[object, str]] = [
        (f"{directory}/file", "file"),
        (f"{directory}/file/below", "file/below"),
        ("/proc/annex", "/proc/annex"),
        (f"{path}/annex", "annex: .* is in the checkpoint"),
        (None, r"annex: ranks \[[01]\] give none"),
        (3, "annex: a int is not a path"),
    ]
    for given, what in wrong:
        for failing in (0, 1):
            with pytest.raises(SwapError, match=what):
                swapper.save_checkpoint(path, net, optimizer, annex=given if rank == failing else mine)  # type: ignore[arg-type]
            check(what)
    for each, its in ((net, optimizer), (twin, reference)):
        step(each, its, 2)
    assert are_same(everything(net, optimizer), everything(twin, reference))
    swapper.load_checkpoint(path, net, optimizer)
    assert are_same(everything(net, optimizer), saved)
    swapper.save_checkpoint(path, net, optimizer, annex=mine)
    assert os.listdir(mine) == [named(path)[rank].name] != kept
    close(net, optimizer)
    close(twin, reference)


def fail_to_load(rank: int, directory: str, nvme: str, on_drive: str) -> None:
    """An annex that one rank needs and cannot reach, or whose files are damaged, is named on all, and all go on."""
    net, optimizer = trained(nvme, on_drive)
    path, mine = f"{directory}/checkpoint", annex_of(directory, rank)
    swapper.save_checkpoint(path, net, optimizer, annex=mine)
    saved = everything(net, optimizer)
    step(net, optimizer, 1)
    now = everything(net, optimizer)
    moved = f"{directory}/moved"
    for failing in (0, 1):
        torch.distributed.barrier()
        if rank == failing:
            os.rename(mine, moved)
        torch.distributed.barrier()
        annex = named(path)[failing]
        with pytest.raises(SwapIOError, match="mount or copy") as caught:
            swapper.load_checkpoint(path, net, optimizer)
        assert str(annex) in str(caught.value) and f"of host {os.uname().nodename}" in str(caught.value)
        assert (f"on rank {failing}" in str(caught.value)) == (rank != failing)
        assert are_same(everything(net, optimizer), now)
        swapper.load_checkpoint(path, net, optimizer, annex=moved if rank == failing else ())
        assert are_same(everything(net, optimizer), saved)
        step(net, optimizer, 1)
        assert are_same(everything(net, optimizer), now)
        torch.distributed.barrier()
        if rank == failing:
            os.rename(moved, mine)
            file = next(annex.glob("*-00000.safetensors"))
            os.truncate(file, file.stat().st_size - 1)
        torch.distributed.barrier()
        with pytest.raises(SwapError, match="cut off, or is from another one"):
            swapper.load_checkpoint(path, net, optimizer)
        assert are_same(everything(net, optimizer), now)
        swapper.save_checkpoint(path, net, optimizer, annex=mine)
        saved = everything(net, optimizer)
        step(net, optimizer, 1)
        now = everything(net, optimizer)
    close(net, optimizer)


def share_a_drive(rank: int, directory: str, nvme: str, on_drive: str) -> None:
    """Ranks of one host may have one drive; old annexes go, and a plain model reads all that it reaches."""
    net, optimizer = trained(nvme, on_drive)
    for number in range(3):
        path = f"{directory}/step-{number % 2}"
        swapper.save_checkpoint(path, net, optimizer, annex=f"{directory}/drive")
        step(net, optimizer, number)
    assert {*os.listdir(f"{directory}/drive")} == {each.name for n in (0, 1) for each in named(f"{directory}/step-{n}")}
    swapper.save_checkpoint(f"{directory}/step-0", net, optimizer)
    assert {*os.listdir(f"{directory}/drive")} == {each.name for each in named(f"{directory}/step-1")}
    close(net, optimizer)


def fail(rank: int, directory: str, nvme: str, on_drive: str) -> None:
    for work in (fail_to_save, fail_to_load, share_a_drive):
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
@pytest.mark.parametrize("on_drive", ["state", "all"])
def test_what_fails_on_one_rank_fails_on_all(
    on_drive: str, nvme_path: Path, tmp_path: Path, leaves_nothing: None
) -> None:
    in_processes(fail, str(tmp_path), str(nvme_path), on_drive)


def fill_drive(rank: int, directory: str, nvme: str) -> None:
    net, optimizer = trained(nvme, "state")
    path = f"{directory}/all/checkpoint"
    swapper.save_checkpoint(path, net, optimizer)
    with pytest.raises(SwapIOError) as caught:
        swapper.save_checkpoint(path, net, optimizer, annex=annex_of(directory, rank))
    assert caught.value.errno == errno.ENOSPC
    torch.distributed.barrier()
    assert os.listdir(f"{directory}/all") == ["checkpoint"] and not os.listdir(annex_of(directory, rank))
    swapper.load_checkpoint(path, net, optimizer)
    close(net, optimizer)


@pytest.mark.long
@pytest.mark.root
def test_a_full_drive_of_one_rank_is_an_error_on_all(nvme_path: Path, tmp_path: Path) -> None:
    drive = Path(annex_of(str(tmp_path), 1))
    drive.mkdir()
    with mounted(drive, "-t", "tmpfs", "-o", "size=16k", "tmpfs"):
        in_processes(fill_drive, str(tmp_path), str(nvme_path))


# --- Killed ----------------------------------------------------------------------------------------------------------

DEATHS: list[tuple[Any, str, str, int | None]] = [
    (annexes.NewAnnex, "__init__", "after", None),
    (NewCheckpoint, "publish_records", "after", None),
    (NewCheckpoint, "seal", "after", 0),
    (annexes.NewAnnex, "complete", "before", None),
    (annexes.NewAnnex, "complete", "after", None),
    (NewCheckpoint, "publish", "before", 0),
    (NewCheckpoint, "_publish", "after", 0),
    (annexes.NewAnnex, "conclude", "before", None),
    (annexes.NewAnnex, "conclude", "after", None),
    (ranks_module, "remove_annexes", "before", None),
    (ranks_module, "remove_annexes", "after", None),
    (ranks_module, "remove_replaced", "before", 0),
]
"""Where a rank is killed, and which; None: any."""


def dies(where: Any, name: str, when: str) -> None:
    """Kill this process when it calls something."""
    real = getattr(where, name)

    def call(*args: Any, **options: Any) -> None:
        if when == "after":
            real(*args, **options)
        killed()

    setattr(where, name, call)


def live(rank: int, directory: str, nvme: str, dying: int, death: int) -> None:
    net, optimizer = trained(nvme, "all")
    path, mine = f"{directory}/all/checkpoint", annex_of(directory, rank)
    only_reach(pytest.MonkeyPatch(), mine)
    swapper.save_checkpoint(path, net, optimizer, annex=mine)
    before = wholes(net, optimizer)
    step(net, optimizer, 1)
    after = wholes(net, optimizer)
    if rank == 0:
        torch.save((before, after), f"{directory}/whole.pt")
    torch.distributed.barrier()
    if rank == dying:
        dies(*DEATHS[death][:3])
    try:
        swapper.save_checkpoint(path, net, optimizer, annex=mine)
        torch.distributed.barrier()  # Where nothing of it is left that the others would miss.
    except Exception as error:
        Path(f"{directory}/raised-{rank}").write_text(f"{type(error).__name__}: {error}")
        # Nobody is helped by its end.
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and not Path(f"{directory}/raised-{1 - dying}").exists():
            time.sleep(0.05)
        os._exit(0)


def go_on(rank: int, directory: str, nvme: str) -> None:
    """Another training finds one of the two, whole; the next save removes what no checkpoint names, or names it."""
    net, optimizer = made(nvme, "all")
    path, mine = f"{directory}/all/checkpoint", annex_of(directory, rank)
    only_reach(pytest.MonkeyPatch(), mine)
    swapper.load_checkpoint(path, net, optimizer)
    found = wholes(net, optimizer)
    known = torch.load(f"{directory}/whole.pt")
    assert any(each.keys() == found.keys() and all(same(each[key], found[key]) for key in each) for each in known)
    said = io.StringIO()
    logging.getLogger("swapper").addHandler(logging.StreamHandler(said))
    swapper.save_checkpoint(path, net, optimizer, annex=mine)
    swapper.load_checkpoint(path, net, optimizer)
    assert os.listdir(f"{directory}/all") == ["checkpoint"]
    for name in {*os.listdir(mine)} - {named(path)[rank].name}:
        assert name in said.getvalue(), (name, said.getvalue())
        Path(f"{directory}/left-{rank}").touch()
    close(net, optimizer)


@pytest.mark.long
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("death", "dying"),
    [
        pytest.param(number, rank, id=f"{when}-{name}-{rank}")
        for number, (_, name, when, only) in enumerate(DEATHS)
        for rank in (0, 1)
        if only in (None, rank)
    ],
)
def test_a_rank_that_is_killed_leaves_a_checkpoint_whole(
    death: int, dying: int, nvme_path: Path, tmp_path: Path
) -> None:
    with ranks.started(within_group, live, (str(tmp_path), str(nvme_path), dying, death), ranks=2) as context:
        for process in context.processes:
            process.join(ranks.TIMEOUT_S)
        assert context.processes[dying].exitcode == -signal.SIGKILL
    assert (tmp_path / f"raised-{1 - dying}").exists()
    in_processes(go_on, str(tmp_path), str(nvme_path))
    certain = {"__init__", "publish_records", "seal", "_publish"}
    assert DEATHS[death][1] not in certain or not [*tmp_path.glob("left-*")]
