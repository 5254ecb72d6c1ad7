"""What a checkpoint is on disk, and what happens to those that were there before."""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from checkpoints import Odd, Training, Words, settings_of, whole
from launcher import run_program
from repository import BENCHMARKS
from small_drives import mounted
from torch import nn
from training import OPTIMIZERS
from twins import bits

import swapper
from swapper.checkpoint.directories import remove_checkpoint, remove_leftovers
from swapper.checkpoint.writer import NewCheckpoint
from swapper.files.file_buffers import POOL_BYTES

ADAMW = OPTIMIZERS["AdamW"]


def files(directory: Path) -> dict[str, os.stat_result]:
    return {path.name: path.stat() for path in directory.iterdir()}


@pytest.mark.parametrize("way", ["everything", "nvme", "cpu", "plain"])
def test_safetensors_alone_reads_it(way: str, tmp_path: Path) -> None:
    training = Training(way, tmp_path, ADAMW).steps(2)
    training.save(tmp_path / "saved").wait()
    expected = dict(training.model.state_dict())
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    found = {}
    for path in (tmp_path / "saved").glob("*.safetensors"):
        with safetensors.safe_open(path, "pt") as file:
            if path.name.startswith("model-"):
                assert file.metadata() == {"format": "pt"}
                for name in file.keys():  # noqa: SIM118 (it has no __iter__)
                    assert index["weight_map"][name] == path.name
                    found[name] = file.get_tensor(name)
    assert found.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in found.values())
    tied = {"last.weight"}
    assert expected.keys() - found.keys() == tied
    for name, value in found.items():
        assert torch.equal(value, expected[name].detach()), name
    swapper.load_safetensors(other := Odd(), tmp_path / "saved")
    assert bits(dict(other.state_dict())) == bits({k: v.contiguous() for k, v in expected.items()}) or way


def test_stored_records_are_linked_and_never_written_again(tmp_path: Path) -> None:
    training = Training("everything", tmp_path, ADAMW).steps(1)
    training.save(tmp_path / "saved")
    before = files(tmp_path / "saved")
    content = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    linked = [name for name, status in before.items() if status.st_nlink == 2]
    assert len(linked) > 5
    training.steps(2)
    assert {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()} == content
    assert all(status.st_nlink == 1 for status in files(tmp_path / "saved").values())


def test_files_get_the_mode_of_new_files(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        Training("everything", tmp_path, ADAMW).steps(1).save(tmp_path / "saved")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "saved").stat().st_mode) == 0o750
    assert {stat.S_IMODE(status.st_mode) for status in files(tmp_path / "saved").values()} == {0o640}


def test_one_that_has_the_name_is_replaced(tmp_path: Path) -> None:
    training = Training("everything", tmp_path, ADAMW)
    for _ in range(4):
        training.steps(1).save(tmp_path / "saved")
    expected = training.everything()
    again = Training("nvme", tmp_path, ADAMW).load(tmp_path / "saved")
    again.losses = training.losses
    assert again.turn == 4
    assert again.everything() == expected
    assert [path.name for path in tmp_path.iterdir() if "saved" in path.name] == ["saved"]


@pytest.mark.parametrize("there", ["file", "link", "directory", "foreign file", "broken"])
def test_what_is_no_checkpoint_is_not_replaced(there: str, tmp_path: Path) -> None:
    training = Training("nvme", tmp_path, ADAMW).steps(1)
    target = tmp_path / "saved"
    match there:
        case "file":
            target.write_text("mine")
        case "link":
            (tmp_path / "real").mkdir()
            target.symlink_to("real")
        case "directory":
            target.mkdir()
            (target / "mine").write_text("mine")
        case _:
            training.save(target)
            (target / "mine").write_text("mine")
            if there == "broken":
                (target / "index.json").write_text("{")
    before = sorted(target.iterdir()) if target.is_dir() else target.read_text()
    with pytest.raises(swapper.SwapError, match=r"saved.*(elsewhere|another name)"):
        training.save(target)
    assert (sorted(target.iterdir()) if target.is_dir() else target.read_text()) == before
    training.save(tmp_path / "another").wait()
    assert whole(tmp_path / "another")


@pytest.mark.root
def test_all_records_together_must_have_room_for_the_next_step(nvme_path: Path, tmp_path: Path) -> None:
    """Parameters alone would have it, and state alone, too: the save is refused, not a step after it."""
    with mounted(nvme_path, "-t", "tmpfs", "-o", "size=96m", "tmpfs"):
        training = Training("everything", nvme_path, ADAMW, kind=Words).steps(1)
        records = [*nvme_path.glob("swapper-*/*-param-*"), *nvme_path.glob("swapper-*/*-optim-*")]
        used = sum(path.stat().st_blocks * 512 for path in records)
        free = os.statvfs(nvme_path).f_bavail * 4096
        (nvme_path / "ballast").write_bytes(bytes(free - used * 9 // 10))
        before = training.everything()
        with pytest.raises(swapper.SwapIOError, match="as much again"):
            training.save(nvme_path / "saved")
        assert training.everything() == before
        assert not list(nvme_path.glob(".saved*"))
        (nvme_path / "ballast").unlink()
        training.save(nvme_path / "saved").wait()
        training.steps(1)
        training.model.swapper.close(keep_values=False)
        training.optimizer.swapper.close()


@pytest.mark.parametrize("way", ["everything", "plain"])
def test_the_last_ones_are_kept(way: str, tmp_path: Path) -> None:
    training = Training(way, tmp_path, ADAMW, **({} if way == "plain" else {"checkpoint": {"keep_last": 2}}))
    parent = tmp_path / "saved"
    other = Training("plain", tmp_path, ADAMW).steps(1)
    other.save(parent / "other")
    (parent / "notes.txt").write_text("mine")
    for turn in range(5):
        training.steps(1).save(parent / f"{'zyxwv'[turn]}")  # By age, not by name.
    kept = {"v", "w"} if way != "plain" else set("zyxwv")
    assert {path.name for path in parent.iterdir()} == {"other", "notes.txt"} | kept
    assert whole(parent / "v")
    assert whole(parent / "w")


def test_pruning_goes_on_after_a_restart_and_after_going_back(tmp_path: Path) -> None:
    parent = tmp_path / "saved"
    first = Training("nvme", tmp_path, ADAMW, checkpoint={"keep_last": 3})
    for turn in range(3):
        first.steps(1).save(parent / f"a{turn}")
    first.close()
    second = Training("nvme", tmp_path, ADAMW, checkpoint={"keep_last": 3}).load(parent / "a0")
    second.steps(1).save(parent / "b0")
    assert {path.name for path in parent.iterdir()} == {"a1", "a2", "b0"}


def test_a_checkpoint_with_files_of_others_is_not_pruned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    training = Training("nvme", tmp_path, ADAMW, checkpoint={"keep_last": 1}).steps(1)
    training.save(tmp_path / "saved" / "a")
    (tmp_path / "saved" / "a" / "tokenizer.json").write_text("mine")
    training.save(tmp_path / "saved" / "b")
    assert (tmp_path / "saved" / "a" / "tokenizer.json").read_text() == "mine"
    assert whole(tmp_path / "saved" / "a")
    assert "tokenizer.json" in caplog.text


@pytest.mark.long
def test_no_write_is_a_first_write_once_old_checkpoints_come_back(tmp_path: Path) -> None:
    """Two checkpoints are kept and a third set of files is in use: then every file was there before."""
    training = Training("everything", tmp_path, ADAMW, kind=Words, checkpoint={"keep_last": 2})
    counts = []
    for turn in range(6):
        before = swapper.of(training.optimizer).stats().first_writes
        training.steps(1)
        swapper.of(training.optimizer).flush()
        training.model.swapper.flush()
        counts.append(swapper.of(training.optimizer).stats().first_writes - before)
        training.save(tmp_path / "saved" / str(turn)).wait()
    assert counts[1] > 0
    assert counts[2] > 0
    assert counts[3:] == [0, 0, 0]


def test_another_file_system_gets_copies_in_the_background(
    tmp_path: Path, elsewhere: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference = Training("plain", tmp_path, ADAMW).steps(6)
    training = Training("everything", tmp_path, ADAMW).steps(3)
    handle = training.save(elsewhere / "saved")
    training.steps(1)  # Goes on at once, in other files.
    second = training.save(elsewhere / "second")
    assert handle.done()  # One after the other.
    training.steps(2)
    handle.wait()
    second.wait()
    assert second.done()
    assert "copied in the background" in caplog.text
    assert whole(elsewhere / "saved")
    assert training.everything() == reference.everything()
    for name, steps in (("saved", 3), ("second", 2)):
        again = Training("cut otherwise", tmp_path, ADAMW).load(elsewhere / name)
        again.losses = reference.losses[: 6 - steps]
        assert again.steps(steps).everything() == reference.everything()
    assert not [path for path in elsewhere.iterdir() if path.name.startswith(".")]


def test_a_copy_in_the_background_outlives_the_training(tmp_path: Path, elsewhere: Path) -> None:
    training = Training("everything", tmp_path, ADAMW).steps(2)
    handle = training.save(elsewhere / "saved")
    training.model.swapper.close(keep_values=False)
    training.optimizer.swapper.close()
    training.close()
    handle.wait()
    assert whole(elsewhere / "saved")


def test_what_a_killed_save_left_goes_at_the_next_one(tmp_path: Path) -> None:
    parent = tmp_path / "saved"
    training = Training("nvme", tmp_path, ADAMW).steps(1)
    training.save(parent / "a")
    left = parent / ".b.tmp-0123456789ab"
    left.mkdir()
    (left / ".swapper-unfinished").touch()
    (left / "model-00000.safetensors").write_bytes(b"part")
    empty = parent / ".c.tmp-0123456789ab"
    empty.mkdir()
    mine = parent / ".d.tmp-0123456789ab"
    mine.mkdir()
    (mine / "mine").write_text("mine")
    Training("nvme", tmp_path, ADAMW).load(parent / "a")
    assert {path.name for path in parent.iterdir()} == {"a", mine.name}


def test_one_that_is_being_written_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training("plain", tmp_path, ADAMW).steps(1)
    go_on, under_way = threading.Event(), threading.Event()
    publish = NewCheckpoint.publish

    def slowly(self: Any) -> Any:
        under_way.set()
        go_on.wait()
        return publish(self)

    monkeypatch.setattr(NewCheckpoint, "publish", slowly)
    thread = threading.Thread(target=training.save, args=(tmp_path / "saved" / "a",))
    thread.start()
    under_way.wait()
    remove_leftovers(tmp_path / "saved")
    go_on.set()
    thread.join()
    assert whole(tmp_path / "saved" / "a")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wrapped_models_are_saved_under_their_own_names(tmp_path: Path) -> None:
    training = Training("plain", tmp_path, ADAMW).steps(1)
    swapper.save_checkpoint(tmp_path / "saved", torch.compile(training.model), training.optimizer)
    again = Training("plain", tmp_path, ADAMW)
    swapper.load_checkpoint(tmp_path / "saved", again.model, again.optimizer)
    again.losses = training.losses
    assert again.everything() == training.everything()


def test_several_optimizers_or_none(tmp_path: Path) -> None:
    def pair() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(70, 80), nn.Linear(80, 70))
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(model[0].parameters(), lr=1e-2),
            torch.optim.SGD(model[1].parameters(), lr=1e-2, momentum=0.9),
        ]
        config = swapper.OffloadConfig(**settings_of("nvme", tmp_path))  # type: ignore[arg-type]
        return model, [swapper.wrap_optimizer(each, config) for each in optimizers]

    def step(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        model(torch.ones(2, 70)).square().sum().backward()
        for each in optimizers:
            each.step()
            each.zero_grad()

    model, optimizers = pair()
    step(model, optimizers)
    swapper.save_checkpoint(tmp_path / "saved", model, optimizers, {"epoch": 3})
    step(model, optimizers)
    again, others = pair()
    assert swapper.load_checkpoint(tmp_path / "saved", again, others) == {"epoch": 3}
    step(again, others)
    assert bits(dict(again.state_dict())) == bits(dict(model.state_dict()))
    alone, _ = pair()
    assert swapper.load_checkpoint(tmp_path / "saved", alone) == {"epoch": 3}
    swapper.save_checkpoint(tmp_path / "alone", alone)
    with pytest.raises(swapper.ConfigError, match="2 optimizers, and 0 in the checkpoint"):
        swapper.load_checkpoint(tmp_path / "alone", again, others)


MEMORY = """
import sys, time, torch, swapper
sys.path.insert(0, {benchmarks!r})
from peak import Peak

def linear(*size):
    layer = torch.nn.utils.skip_init(torch.nn.Linear, *size, bias=False)
    layer.weight.data.fill_(0.5)
    return layer

model = torch.nn.Sequential(linear(4000, 9000), *(linear(500, 1000) for _ in range(20)))
optimizer = torch.optim.AdamW(model.parameters())
settings = {settings!r}
config = swapper.OffloadConfig(**settings) if settings else None
if config is not None and config.offload_param.device == "nvme":
    swapper.offload(model, optimizer, config)
elif config is not None:
    swapper.wrap_optimizer(optimizer, config)
if {action!r} == "save":
    for p in model.parameters():
        p.grad = torch.full((1,), 1e-3).expand(p.shape)
    optimizer.step()
    optimizer.zero_grad()
    if config is not None:
        optimizer.swapper.flush()
with Peak() as before:
    time.sleep(0.05)
with Peak() as peak:
    if {action!r} == "save":
        swapper.save_checkpoint({path!r}, model, optimizer).wait()
    else:
        swapper.load_checkpoint({path!r}, model, optimizer)
state = 0 if config is not None else sum(8 * p.numel() for p in model.parameters()) * ({action!r} == "load")
print((peak.bytes - before.bytes - state) / 1e6)
"""


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("before", "after"), [("everything", "cut otherwise"), ("cpu", "everything"), ("plain", "nvme")]
)
def test_saving_and_loading_hold_at_most_the_pool_and_100_mb(before: str, after: str, nvme_path: Path) -> None:
    """46M parameters, 36M of them in one tensor: 184 MB, and 368 MB of state."""
    path = str(nvme_path / "saved")
    for way, action in ((before, "save"), (after, "load")):
        settings = settings_of(way, nvme_path)
        if settings is not None:
            settings = {**settings, "nvme_path": str(nvme_path), "pool_bytes": "440MiB"}
            settings["bucket_bytes"] = "20MiB" if way == "cut otherwise" else "32MiB"
        program = MEMORY.format(benchmarks=str(BENCHMARKS), settings=settings, action=action, path=path)
        done = run_program([sys.executable, "-c", program], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        allowed_mb = (POOL_BYTES + 100e6) / 1e6
        assert float(done.stdout) <= allowed_mb, f"{action} with {way}"


def test_a_removal_that_is_cut_off_on_a_full_drive_leaves_what_a_sweep_recognises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tmp_path / "old"
    checkpoint.mkdir()
    for name in ("index.json", "model-00001.safetensors", "values.safetensors", "a.safetensors"):
        (checkpoint / name).write_text("{}")
    removed: list[str] = []
    unlink = Path.unlink

    def cut_off(path: Path, missing_ok: bool = False) -> None:
        if len(removed) == 3:
            raise KeyboardInterrupt
        removed.append(path.name)
        unlink(path, missing_ok)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: sorted(listdir(path), key=lambda name: name != "index.json"))
    monkeypatch.setattr(Path, "touch", full)
    monkeypatch.setattr(Path, "unlink", cut_off)
    with pytest.raises(KeyboardInterrupt):
        remove_checkpoint(checkpoint, lambda _: False)
    (left,) = (file for directory in tmp_path.iterdir() for file in directory.iterdir())
    assert left.name == "index.json"
