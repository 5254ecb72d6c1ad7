"""Annexes of the checkpoints of one process: what is in them, where they are found, sweeps, damage and kills.

Those of ranks are in `tests/whole/test_annexes.py`.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import command
import pytest
from checkpoints import SmallTraining, annexes_in, whole
from launcher import run_program
from sampling import ALL, EVERY, places

import swapper
from swapper.checkpoint import annexes
from swapper.checkpoint.export import export_checkpoint
from swapper.checkpoint.index import glance
from swapper.errors import SwapError, SwapIOError

PROGRAM = Path(__file__).resolve().parents[1] / "support" / "annex_kills.py"


def run_at(directory: Path, drive: Path, n: int) -> tuple[int, str]:
    """Run it. Returns how it has ended, and what it has logged."""
    args = [sys.executable, str(PROGRAM), str(directory), str(drive), str(n)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = run_program(args, capture_output=True, text=True, timeout=240, env=environment)
    return done.returncode, done.stderr


def annex_of(checkpoint: Path) -> Path:
    found = glance(checkpoint)
    assert found is not None
    (annex,) = found.annexes
    return Path(annex.path)


@pytest.fixture
def training(tmp_path: Path) -> SmallTraining:
    return SmallTraining(tmp_path).steps(2)


def saved(training: SmallTraining, tmp_path: Path, name: str = "saved") -> Path:
    training.save(tmp_path / "all" / name, tmp_path / "drive").wait()
    return tmp_path / "all" / name


def refused(path: Path, training: SmallTraining, what: str, annex: object = ()) -> SwapError:
    """Loading it is refused, and has changed nothing."""
    before = training.everything()
    with pytest.raises(SwapError, match=what) as caught:
        training.load(path, annex)
    assert training.everything() == before
    return caught.value


# --- What is where -------------------------------------------------------------------------------------------------


def test_only_what_is_small_is_beside_the_index(training: SmallTraining, tmp_path: Path, elsewhere: Path) -> None:
    """On another file system, where nothing could be linked; and the records in the annex are links."""
    training.save(elsewhere / "saved", tmp_path / "drive").wait()
    assert sorted(os.listdir(elsewhere / "saved")) == ["index.json", "values.safetensors"]
    annex = annex_of(elsewhere / "saved")
    names = {*os.listdir(annex)}
    assert names >= {
        "annex.json",
        "model-memory.safetensors",
        "optimizer-0-00000.safetensors",
        "model-00000.safetensors",
    }
    assert not [name for name in names if name.startswith(".")]
    records = [path for path in annex.iterdir() if path.stem[-5:].isdigit()]
    assert len(records) > 3 and all(path.stat().st_nlink == 2 for path in records)
    expected = training.everything()
    training.steps(1)
    assert SmallTraining(None).load(elsewhere / "saved").everything() == expected
    assert training.load(elsewhere / "saved").everything() == expected


def test_the_annex_of_a_checkpoint_that_is_replaced_or_pruned_goes_with_it(tmp_path: Path) -> None:
    training = SmallTraining(tmp_path, checkpoint={"keep_last": 2})
    for name in ("a", "b", "b", "c", "d"):
        saved(training.steps(), tmp_path, name)
        kept = [path for path in (tmp_path / "all").iterdir() if whole(path)]
        assert {*os.listdir(tmp_path / "drive")} == {annex_of(path).name for path in kept}
    assert sorted(os.listdir(tmp_path / "all")) == ["c", "d"]
    training.save(tmp_path / "all" / "d")  # Without an annex.
    assert {*os.listdir(tmp_path / "drive")} == annexes_in(tmp_path / "all" / "c")


def test_files_of_annexes_that_go_are_written_again(tmp_path: Path) -> None:
    training = SmallTraining(tmp_path, checkpoint={"keep_last": 1})
    firsts = []
    for _ in range(5):
        before = swapper.of(training.optimizer).stats().first_writes
        training.steps()
        swapper.of(training.optimizer).flush()
        firsts.append(swapper.of(training.optimizer).stats().first_writes - before)
        saved(training, tmp_path)
    assert firsts[0] > 0 and firsts[3:] == [0, 0]


def test_an_annex_that_has_files_of_others_stays(
    training: SmallTraining, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    annex = annex_of(saved(training, tmp_path))
    (annex / "notes.txt").write_text("mine")
    path = saved(training, tmp_path)
    assert (annex / "notes.txt").read_text() == "mine" and f"{annex} is left" in caplog.text
    assert whole(path)


def test_what_is_beside_the_index_and_has_the_name_of_a_file_in_the_annex_is_not_lost(
    training: SmallTraining, tmp_path: Path
) -> None:
    path = saved(training, tmp_path)
    (path / "model-memory.safetensors").write_text("mine")
    with pytest.raises(SwapError, match=r"not the checkpoint's: model-memory"):
        saved(training, tmp_path)
    assert (path / "model-memory.safetensors").read_text() == "mine"


@pytest.mark.parametrize("place", ["saved", "saved/below", "other", "other/below", "link", "run"])
def test_a_directory_that_goes_with_something_else_is_refused(
    place: str, training: SmallTraining, tmp_path: Path
) -> None:
    path = saved(training, tmp_path)
    saved(training, tmp_path, "other")
    (tmp_path / "all" / "link").symlink_to("saved")
    (run,) = [each for each in tmp_path.iterdir() if each.name.startswith("swapper-")]
    where = run if place == "run" else tmp_path / "all" / place
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SwapError, match=r"annex: .* is in (the checkpoint|.*swapper-)"):
        training.save(path, where)
    assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(SwapError, match=r"annex: .* is in the checkpoint"):  # That is not there yet.
        training.save(tmp_path / "new", tmp_path / "new" / "annexes")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("kind", ["file", "below a file", "full name"])
def test_a_place_where_no_annex_can_be_is_named(kind: str, training: SmallTraining, tmp_path: Path) -> None:
    path = saved(training, tmp_path)
    (tmp_path / "file").write_text("mine")
    where = {
        "file": tmp_path / "file",
        "below a file": tmp_path / "file" / "below",
        "full name": tmp_path / ("x" * 300),
    }
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SwapIOError) as caught:
        training.save(path, where[kind])
    assert str(where[kind]) in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before and whole(path)


def test_a_path_is_wanted(training: SmallTraining, tmp_path: Path) -> None:
    with pytest.raises(swapper.ConfigError, match="annex: a int is not a path"):
        training.save(tmp_path / "saved", 3)  # type: ignore[arg-type]
    with pytest.raises(swapper.ConfigError, match="annex: a int is not a path"):
        training.load(saved(training, tmp_path), [3])


def test_none_is_no_annex_in_both(training: SmallTraining, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    training.save(path, None)
    training.load(path, None)
    assert not annexes_in(path)


# --- Where they are found --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["its directory", "itself", "several", "by a link"])
def test_an_annex_that_was_moved_is_found_where_the_user_says(
    given: str, training: SmallTraining, tmp_path: Path
) -> None:
    path = saved(training, tmp_path)
    expected, name = training.everything(), annex_of(path).name
    (tmp_path / "drive").rename(tmp_path / "moved")
    training.steps(1)
    error = refused(path, training, "annexes")
    assert isinstance(error, SwapIOError) and error.errno == errno.ENOENT
    for part in (str(annex_of(path)), f"of host {os.uname().nodename}", "mount or copy", "annex=DIR", "nothing has"):
        assert part in str(error)
    assert "moved-too" in str(refused(path, training, "either", tmp_path / "moved-too"))
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "link").symlink_to(tmp_path / "moved" / name)
    where = {
        "its directory": tmp_path / "moved",
        "itself": tmp_path / "moved" / name,
        "several": [tmp_path / "nowhere", str(tmp_path / "moved")],
        "by a link": tmp_path / "links",
    }
    assert training.load(path, where[given]).everything() == expected


def test_a_checkpoint_that_was_moved_has_its_annex(training: SmallTraining, tmp_path: Path) -> None:
    path = saved(training, tmp_path)
    expected = training.everything()
    moved = path.rename(tmp_path / "moved")
    saved(training.steps(1), tmp_path)
    assert training.load(moved).everything() == expected


@pytest.mark.parametrize("kind", ["of another checkpoint", "without a token", "unfinished", "no directory"])
def test_another_directory_at_the_path_of_an_annex_is_told(kind: str, training: SmallTraining, tmp_path: Path) -> None:
    path, other = saved(training, tmp_path), saved(training, tmp_path, "other")
    annex, expected = annex_of(path), training.everything()
    kept = annex.rename(tmp_path / "kept")
    if kind == "no directory":
        annex.write_text("mine")
    else:
        shutil.copytree(kept if kind == "unfinished" else annex_of(other), annex)
    if kind == "without a token":
        (annex / "annex.json").write_text("{}")
    elif kind == "unfinished":
        (annex / ".swapper-unfinished").touch()
    training.steps(1)
    text = str(refused(path, training, "annexes"))
    assert ("unfinished" if kind == "unfinished" else "another one is there") in text and str(annex) in text
    assert training.load(path, kept).everything() == expected


@pytest.mark.parametrize("damage", ["cut", "flipped", "missing", "a link", "of another"])
@pytest.mark.parametrize("name", ["optimizer-0-00000", "model-00000", "model-memory"])
def test_a_damaged_file_of_an_annex_is_named(damage: str, name: str, training: SmallTraining, tmp_path: Path) -> None:
    path, other = saved(training, tmp_path), saved(training.steps(1), tmp_path, "other")
    file = annex_of(path) / f"{name}.safetensors"
    data = bytearray(file.read_bytes())
    file.unlink()
    if damage == "cut":
        file.write_bytes(data[:-1])
    elif damage == "flipped":
        data[-1] ^= 1
        file.write_bytes(data)
    elif damage == "a link":
        (tmp_path / "elsewhere").write_bytes(data)
        file.symlink_to(tmp_path / "elsewhere")
    elif damage == "of another":
        shutil.copy(annex_of(other) / file.name, file)
    with pytest.raises(SwapError, match=name):
        training.load(path)
    assert str(file) in command.swapper("checkpoint", "verify", path, code=1).output
    whole(other)
    if damage != "flipped" or name != "model-00000":  # That is found by a checksum of a tensor, on the way.
        with pytest.raises(SwapError, match=name):
            export_checkpoint(path, "torch", tmp_path / "exported.pt")
    assert training.load(other)


def test_an_index_that_refers_to_an_annex_that_it_lacks_is_refused(training: SmallTraining, tmp_path: Path) -> None:
    from swapper.checkpoint.index import with_checksum

    path = saved(training, tmp_path)
    index = json.loads((path / "index.json").read_bytes())
    del index["crc32c"], index["annexes"]
    (path / "index.json").write_bytes(with_checksum(json.dumps(index).encode()))
    refused(path, training, "refers to annex 0")


# --- The command line ------------------------------------------------------------------------------------------------


def test_the_command_line_reads_annexes_or_names_them(training: SmallTraining, tmp_path: Path) -> None:
    path = saved(training, tmp_path)
    annex = annex_of(path)

    def run(*arguments: object, code: int = 0) -> str:
        return " ".join(command.swapper("checkpoint", *arguments, code=code).output.split())

    shown = command.as_json("checkpoint", "show", path)
    host = os.uname().nodename
    assert shown["annexes"] == [{"host": host, "path": str(annex), "found": str(annex)}]
    assert f"annex {annex} of host {host} model" in run("show", path)
    run("verify", path)
    run("export", path, "--to", "torch", tmp_path / "whole.pt")
    (tmp_path / "drive").rename(tmp_path / "moved")
    assert f"annex {annex} of host {host}, not reached here" in run("show", path)
    assert command.as_json("checkpoint", "show", path)["model"] == shown["model"]
    text = run("verify", path, code=1)
    assert str(annex) in text and text.count("does not reach") == 1
    with pytest.raises(SwapIOError, match="annexes"):
        export_checkpoint(path, "torch", tmp_path / "lost.pt")
    assert not (tmp_path / "lost.pt").exists()
    given = ("--annex", tmp_path / "moved")
    assert f"here {tmp_path / 'moved' / annex.name}" in run("show", path, *given)
    run("verify", path, *given)
    run("export", path, "--to", "torch", tmp_path / "found.pt", *given)
    assert (tmp_path / "found.pt").read_bytes() == (tmp_path / "whole.pt").read_bytes()


# --- Sweeps ----------------------------------------------------------------------------------------------------------


def left(drive: Path, mark: str, checkpoint: Path, name: str = "saved.annex-0123456789abcdef", **more: str) -> Path:
    """What a dead writer has left."""
    (drive / name).mkdir(parents=True)
    manifest = {"format": "swapper annex", "token": "0", "host": annexes.host(), "boot": "another"}
    (drive / name / "annex.json").write_text(json.dumps({**manifest, "checkpoint": str(checkpoint), **more}))
    (drive / name / "model-00000.safetensors").write_bytes(b"part")
    if mark:
        (drive / name / mark).touch()
    return drive / name


def test_what_was_never_complete_is_removed_by_the_next_save(training: SmallTraining, tmp_path: Path) -> None:
    drive = tmp_path / "drive"
    gone = [
        left(drive, annexes.MARK, tmp_path / "all" / "saved"),
        left(drive, annexes.MARK, tmp_path / "another" / "one", "one.annex-0123456789abcdef"),
        left(drive, annexes.MARK, tmp_path, "a.annex-0123456789abcdef", host="another", boot=annexes.boot_id()),
        drive / "empty.annex-0123456789abcdef",
        drive / "begun.annex-0123456789abcdef",
    ]
    gone[3].mkdir()
    gone[4].mkdir()
    (gone[4] / annexes.MARK).touch()
    (gone[4] / "annex.json").write_text('{"for')
    path = saved(training, tmp_path)
    assert {*os.listdir(drive)} == {annex_of(path).name}


def test_what_is_of_others_or_in_doubt_is_left(
    training: SmallTraining, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    drive = tmp_path / "drive"
    moved = annex_of(saved(training, tmp_path, "moved"))
    (tmp_path / "all" / "moved").rename(tmp_path / "all" / "best")
    gone = tmp_path / "all" / "gone"
    doubtful = [
        left(drive, annexes.UNPUBLISHED, gone, "gone.annex-0123456789abcdef"),
        left(drive, annexes.MARK, gone, "a.annex-0123456789abcdef", host="another"),
        left(drive, annexes.MARK, gone, "b.annex-0123456789abcdef", format="mine"),
    ]
    quiet = [
        drive / "c.annex-0123456789abcdef",
        drive / "swapper-x-0",
        drive / "file",
        drive / "d.annex-0123456789abcdef",
    ]
    quiet[0].mkdir()
    (quiet[0] / "mine").write_text("mine")
    quiet[1].mkdir()
    (quiet[1] / annexes.MARK).touch()
    quiet[2].write_text("mine")
    target = left(tmp_path / "target", annexes.MARK, gone)
    quiet[3].symlink_to(target)
    caplog.clear()
    path = saved(training, tmp_path)
    assert {*os.listdir(drive)} == {each.name for each in (moved, annex_of(path), *doubtful, *quiet)}
    assert (target / "model-00000.safetensors").exists()
    for each in doubtful:
        assert f"{each} is left" in caplog.text
    assert moved.name in caplog.text and "not where they were saved" in caplog.text
    assert not any(each.name in caplog.text for each in quiet)
    assert whole(tmp_path / "all" / "best") and (moved / "model-00000.safetensors").exists()


def test_an_annex_whose_checkpoint_names_it_is_marked_and_kept(training: SmallTraining, tmp_path: Path) -> None:
    """As after a kill between the last two steps; and one that is marked unfinished by mistake."""
    path, other = saved(training, tmp_path), saved(training, tmp_path, "other")
    (annex_of(path) / annexes.UNPUBLISHED).touch()
    (annex_of(other) / annexes.MARK).touch()
    saved(training, tmp_path, "next")
    assert not (annex_of(path) / annexes.UNPUBLISHED).exists()
    assert whole(path)
    (annex_of(other) / annexes.MARK).unlink()
    assert whole(other)


def test_the_annexes_of_a_leftover_go_with_it(training: SmallTraining, tmp_path: Path) -> None:
    """It is known that it never got a name, or lost it; but a load leaves both, for a save of all ranks."""
    path, other = saved(training, tmp_path), saved(training, tmp_path, "other")
    left_over = path.with_name(".other.tmp-0123456789ab")
    other.rename(left_over)
    (annex_of(left_over) / annexes.UNPUBLISHED).touch()
    gone = annex_of(left_over)
    training.load(path)
    assert left_over.exists() and gone.exists()
    saved(training, tmp_path)
    assert not left_over.exists() and not gone.exists()


def test_an_annex_that_is_being_written_is_left_alone(
    training: SmallTraining, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = SmallTraining(tmp_path).steps(1)
    complete = annexes.NewAnnex.complete
    found: list[Path] = []

    def save_another(self: annexes.NewAnnex, *rest: object) -> None:
        if not found:
            found.append(self.path)
            code, said = run_at(tmp_path / "all", tmp_path / "drive", -1)
            assert code == 0, said
            assert self.path.exists()
        complete(self)

    monkeypatch.setattr(annexes.NewAnnex, "complete", save_another)
    other.save(tmp_path / "other" / "one", tmp_path / "drive" / "annexes").wait()
    assert whole(tmp_path / "other" / "one") and whole(tmp_path / "all" / "saved")


def test_a_failure_to_publish_removes_the_annex(
    training: SmallTraining, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Unless it is not known whether the checkpoint has its name."""
    path = saved(training, tmp_path)
    before = {*os.listdir(tmp_path / "drive")}

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "injected")

    with monkeypatch.context() as patch:
        patch.setattr("swapper.storage.atomic.put_in_place", fail)
        with pytest.raises(SwapIOError):
            saved(training.steps(1), tmp_path)
    assert {*os.listdir(tmp_path / "drive")} == before and whole(path)

    def put(new: Path, target: Path) -> None:
        os.rename(target, tmp_path / "old")
        os.rename(new, target)
        raise OSError(errno.EIO, "injected")

    with monkeypatch.context() as patch:
        patch.setattr("swapper.storage.atomic.put_in_place", put)
        with pytest.raises(SwapIOError):
            saved(training, tmp_path)
    assert "is left" in caplog.text and whole(path) and whole(tmp_path / "old")


# --- Killed ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.timeout(900)
def test_whatever_is_killed_when(nvme_path: Path) -> None:
    """What is found is whole, as it was or as it was to be; and the next save leaves no annex that it does not name."""
    directory, drive = nvme_path / "all", nvme_path
    expected: dict[int, object] = {}

    def look() -> int:
        training = SmallTraining(None).load(directory / "saved")
        if training.turn not in expected:
            expected[training.turn] = SmallTraining(None).steps(training.turn).everything()
        assert training.everything() == expected[training.turn]
        assert whole(directory / "saved")
        return training.turn

    assert run_at(directory, drive, -1)[0] == 0
    turn, killed, doubtful = look(), 0, 0
    for n in places(2 if EVERY else 4, sample=14):
        code, _ = run_at(directory, drive, n)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        killed += 1
        assert look() in (turn, turn + 1), n
        code, said = run_at(directory, drive, -1)
        assert code == 0, said
        turn = look()
        assert os.listdir(directory) == ["saved"], n
        for name in {*os.listdir(drive / "annexes")} - annexes_in(directory / "saved"):
            assert f"{name} is left" in said or name in said, (n, said)
            shutil.rmtree(drive / "annexes" / name)
            doubtful += 1
    assert killed > (60 if EVERY else 30 if ALL else 6)
    assert doubtful <= 2
