"""The command line: the frame, `swapper ls` and `swapper clean`. `swapper report` has tests of its own."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import json
import os
import pty
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command import as_json, swapper
from launcher import Program, run_program
from typer.testing import CliRunner

from swapper.bench.machine import swapper_version
from swapper.cli import app
from swapper.cli import runs as cli_runs
from swapper.errors import ConfigError, SwapError, SwapIOError
from swapper.sizes import format_bytes
from swapper.storage import runs as runs_module
from swapper.storage.runs import RunDirectory, RunState, find_runs, make_run_directory, remove_run

pytestmark = pytest.mark.timeout(240)

RECORD = "000-optim-000000.safetensors"
ELSEWHERE = {"host": "elsewhere", "boot_id": "another"}


def leftover(nvme_path: Path, name: str = "swapper-dead-0", size: int = 100_000, **owner: object) -> Path:
    """What a killed run left."""
    directory = nvme_path / name
    directory.mkdir(mode=0o700)
    described = {"boot_id": runs_module.boot_id(), "host": socket.gethostname(), "pid": 1, "run": "dead", "rank": 0}
    (directory / "lock").write_text(json.dumps({**described, **owner}))
    (directory / RECORD).write_bytes(b"x" * size)
    return directory


def blocks(directory: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in directory.iterdir())


@contextlib.contextmanager
def live_run(nvme_path: Path, run: str = "alive") -> Iterator[Path]:
    """A run directory whose lock this process holds."""
    directory, lock = make_run_directory(nvme_path, run, 3)
    try:
        (directory / RECORD).write_bytes(b"x" * 5000)
        yield directory
    finally:
        os.close(lock)


@pytest.fixture
def one_of_each(nvme_path: Path) -> Iterator[dict[str, Path]]:
    """A run directory in every state."""
    with live_run(nvme_path) as alive:
        new = nvme_path / ".swapper-new-0123"
        new.mkdir()
        old = nvme_path / ".swapper-new-4567"
        old.mkdir()
        os.utime(old, (0, 0))
        yield {
            "alive": alive,
            "stale": leftover(nvme_path),
            "booted": leftover(nvme_path, "swapper-booted-1", boot_id="of an earlier boot"),
            "unknown": leftover(nvme_path, "swapper-foreign-0", **ELSEWHERE),
            "unreadable": leftover(nvme_path, "swapper-garbled-0"),
            "new": new,
            "temporary": leftover(nvme_path, ".swapper-new-89ab"),
            "old": old,
        }


STATES = {
    "alive": "alive",
    "stale": "stale",
    "booted": "stale",
    "unknown": "unknown",
    "unreadable": "unknown",
    "new": "new",
    "temporary": "stale",
    "old": "stale",
}


@pytest.fixture
def _garble(one_of_each: dict[str, Path]) -> None:
    (one_of_each["unreadable"] / "lock").write_text("no owner")


# --- The frame --------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_version_is_the_same_in_every_way_of_calling() -> None:
    expected = f"swapper {swapper_version()}\n"
    assert swapper("--version").stdout == expected
    for command in (["-m", "swapper"], ["-c", "from swapper.cli import main; main()"]):
        done = subprocess.run([sys.executable, *command, "--version"], capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


def test_every_command_has_help_with_an_example_and_json() -> None:
    listed = swapper("--help").stdout.partition("Commands:")[2]
    names = [line.split()[0] for line in listed.splitlines() if line.startswith("  ") and line[2] != " "]
    assert {"report", "ls", "clean"} <= set(names)
    assert "..." not in listed, "the first sentence of each is short enough to be shown whole"
    for name in ("report", "ls", "clean"):
        text = swapper(name, "--help").stdout
        assert "Example" in text
        assert f"\n      swapper {name}" in text, "in a line of its own"
        assert "--json" in text


@pytest.mark.parametrize("arguments", [["nonsense"], ["ls", "--nonsense"], ["clean", "--force"], []])
def test_a_wrong_call_is_2_and_says_so_on_standard_error(arguments: list[str]) -> None:
    result = swapper(*arguments, code=2)
    assert "Usage:" in result.output or "requires an argument" in result.stderr
    assert result.stderr or not arguments


@pytest.mark.parametrize(
    "error",
    [
        SwapError("this that"),
        ConfigError("this that\nand more"),
        SwapIOError(errno.EIO, "this that", "/x"),
        PermissionError(errno.EACCES, "this that"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_one_line_for_each_mistake_and_1(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(path: Path) -> list[RunDirectory]:
        raise error

    monkeypatch.setattr(cli_runs, "find_runs", fail)
    result = swapper("ls", code=1)
    assert result.stdout == ""
    assert result.stderr.startswith("swapper ls: ")
    assert "this that" in result.stderr
    lines = result.stderr.splitlines()
    assert len(lines) == 1 + str(error).count("\n") and all(line.startswith("swapper ") for line in lines)


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> list[RunDirectory]:
        raise AssertionError("a bug")

    monkeypatch.setattr(cli_runs, "find_runs", fail)
    assert isinstance(CliRunner().invoke(app, ["ls"]).exception, AssertionError)


def test_ctrl_c_is_130_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: Path) -> list[RunDirectory]:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_runs, "find_runs", interrupted)
    assert swapper("ls", code=130).output == ""


def test_a_reader_that_has_seen_enough_is_no_error(nvme_path: Path) -> None:
    for i in range(500):
        leftover(nvme_path, f"swapper-{'long' * 40}{i}-0", size=0)
    command = [sys.executable, "-m", "swapper", "ls", str(nvme_path)]
    with Program(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("STATE")
        process.stdout.close()
        assert process.stderr.read() == ""


# --- swapper ls -------------------------------------------------------------------------------------------------------

RUN_KEYS = {
    "path",
    "temporary",
    "state",
    "reason",
    "run",
    "rank",
    "host",
    "pid",
    "program",
    "uid",
    "user",
    "started_unix_s",
    "age_s",
    "size_bytes",
    "files",
}


@pytest.mark.usefixtures("_garble")
def test_ls_shows_every_state(nvme_path: Path, one_of_each: dict[str, Path]) -> None:
    data = as_json("ls", nvme_path)
    assert set(data) == {"directories", "runs", "size_bytes", "errors"}
    assert data["directories"] == [str(nvme_path)]
    assert data["errors"] == []
    found = {run["path"]: run for run in data["runs"]}
    assert {name: found[str(path)]["state"] for name, path in one_of_each.items()} == STATES
    assert len(found) == len(STATES)
    for run in found.values():
        assert set(run) == RUN_KEYS
        assert run["reason"]
        assert run["uid"] == os.geteuid()
    assert {Path(run["path"]).name for run in found.values() if run["temporary"]} == {
        ".swapper-new-0123",
        ".swapper-new-4567",
        ".swapper-new-89ab",
    }
    assert data["size_bytes"] == sum(blocks(path) for path in one_of_each.values())

    text = swapper("ls", nvme_path).stdout.splitlines()
    assert text[0].split() == ["STATE", "SIZE", "FILES", "AGE", "RUN", "RANK", "OWNER", "PATH"]
    shown = {line.split()[-1]: line.split()[0] for line in text[1:-1]}
    assert shown == {str(path): STATES[name] for name, path in one_of_each.items()}
    freed = format_bytes(sum(blocks(path) for name, path in one_of_each.items() if STATES[name] == "stale"))
    assert text[-1].startswith("8 run directories, ")
    assert text[-1].endswith(f"4 stale: `swapper clean` frees {freed}")


@pytest.mark.long
def test_ls_says_whose_a_run_is(nvme_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from swapper.storage.runs import make_run_directory
print(make_run_directory(Path(sys.argv[1]), "named", 7)[0], flush=True)
sys.stdin.read()
"""
    program = nvme_path.parent / "train.py"
    program.write_text(script)
    with subprocess.Popen(
        [sys.executable, str(program), str(nvme_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            directory = Path(process.stdout.readline().strip())
            (directory / RECORD).write_bytes(b"x" * 50_000)
            [run] = as_json("ls", nvme_path)["runs"]
            line = swapper("ls", nvme_path).stdout.splitlines()[1]
        finally:
            process.kill()
    assert run["path"] == str(directory)
    assert (run["state"], run["run"], run["rank"]) == ("alive", "named", 7)
    assert (run["host"], run["pid"]) == (socket.gethostname(), process.pid)
    assert run["program"] == f"{Path(sys.executable).name} {program}"
    assert (run["size_bytes"], run["files"]) == (blocks(directory), 2)
    assert run["size_bytes"] >= 50_000
    assert 0 <= run["age_s"] < 100
    assert abs(run["started_unix_s"] + run["age_s"] - time.time()) < 60
    assert f"pid {process.pid} ({run['program']})" in line
    # Killed, it is stale, and another process may get its pid.
    described = json.loads((directory / "lock").read_text())
    (directory / "lock").write_text(json.dumps({**described, "pid": os.getpid()}))
    [run] = as_json("ls", nvme_path)["runs"]
    assert (run["state"], run["pid"], run["program"]) == ("stale", os.getpid(), None)


def test_ls_changes_nothing_and_holds_nothing(nvme_path: Path) -> None:
    directory = leftover(nvme_path)
    before = {path: path.lstat().st_mtime_ns for path in (nvme_path, directory, *directory.iterdir())}
    gc.collect()  # What other tests have left would end meanwhile.
    descriptors = len(os.listdir("/proc/self/fd"))
    find_runs(nvme_path)
    assert {path: path.lstat().st_mtime_ns for path in (nvme_path, directory, *directory.iterdir())} == before
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    with open(directory / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_two_who_look_at_once_do_not_take_each_other_for_the_run(nvme_path: Path) -> None:
    directory = leftover(nvme_path)
    with open(directory / "lock") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert [run.state for run in find_runs(nvme_path)] == [RunState.STALE]


def test_the_same_empty_boot_id_is_not_the_same_boot(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leftover(nvme_path, host="elsewhere", boot_id="")
    monkeypatch.setattr(runs_module, "boot_id", lambda: "")
    assert [run.state for run in find_runs(nvme_path)] == [RunState.UNKNOWN]


@pytest.mark.parametrize("text", ["", "[" * 4000, '{"pid": {}, "run": 3, "rank": "x", "host": null}', "\x00\xff"])
def test_a_lock_that_says_nonsense_is_shown_as_unknown(nvme_path: Path, text: str) -> None:
    directory = leftover(nvme_path)
    (directory / "lock").write_bytes(text.encode("latin-1"))
    [run] = as_json("ls", nvme_path)["runs"]
    assert (run["state"], run["run"], run["rank"], run["host"], run["pid"]) == ("unknown", None, None, None, None)
    assert "unknown" in swapper("ls", nvme_path).stdout


def test_what_is_no_run_directory_is_not_listed(nvme_path: Path, tmp_path: Path) -> None:
    (nvme_path / "swapper-foo-bar").mkdir()
    (nvme_path / "swapper-foo-bar" / "thesis.tex").touch()
    (nvme_path / "swapper-file-0").touch()
    (nvme_path / "swapper-link-0").symlink_to(leftover(tmp_path))
    (nvme_path / "swapper-lock-0").mkdir()
    (nvme_path / "swapper-lock-0" / "lock").symlink_to(tmp_path / "swapper-dead-0" / "lock")
    (nvme_path / "swapper-below-0" / "lock").mkdir(parents=True)
    (nvme_path / "swapper-pipe-0").mkdir()
    os.mkfifo(nvme_path / "swapper-pipe-0" / "lock")
    leftover(nvme_path, "my-swapper-dead-0")
    assert as_json("ls", nvme_path)["runs"] == []
    assert swapper("ls", nvme_path).stdout == f"no run directories in {nvme_path}\n"
    before = sorted(nvme_path.rglob("*"))
    assert as_json("clean", "--yes", nvme_path)["removed"] == []
    assert sorted(nvme_path.rglob("*")) == before


def test_a_run_directory_itself_can_be_named(nvme_path: Path) -> None:
    first, second = leftover(nvme_path), leftover(nvme_path, "swapper-other-0")
    assert [run["path"] for run in as_json("ls", f"{second}/")["runs"]] == [str(second)]
    swapper("clean", "--yes", second)
    assert first.is_dir()
    assert not second.exists()


def test_where_it_looks_if_not_told(nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.chdir(tmp_path)
    assert as_json("ls")["directories"] == [str(tmp_path)]
    (tmp_path / ".swapper").mkdir()
    assert as_json("ls")["directories"] == [str(tmp_path / ".swapper")]
    monkeypatch.setenv("SWAPPER_NVME_PATH", f"{nvme_path}:other:")
    assert as_json("ls")["directories"] == [str(nvme_path), str(other)]
    assert as_json("ls", "nvme", "./nvme/")["directories"] == [str(nvme_path)]


def test_a_directory_that_is_there_twice_is_shown_once(nvme_path: Path, tmp_path: Path) -> None:
    leftover(nvme_path)
    (tmp_path / "link").symlink_to(nvme_path)
    assert len(as_json("ls", nvme_path, tmp_path / "link")["runs"]) == 1
    assert len(as_json("clean", "--dry-run", nvme_path, tmp_path / "link")["removed"]) == 1


def test_a_missing_directory_is_named_and_the_others_are_shown(nvme_path: Path, tmp_path: Path) -> None:
    leftover(nvme_path)
    (tmp_path / "file").touch()
    data = as_json("ls", tmp_path / "missing", tmp_path / "file", nvme_path, code=1)
    assert [error["path"] for error in data["errors"]] == [str(tmp_path / "missing"), str(tmp_path / "file")]
    assert len(data["runs"]) == 1
    result = swapper("ls", tmp_path / "missing", nvme_path, code=1)
    assert "swapper-dead-0" in result.stdout
    assert str(tmp_path / "missing") in result.stderr
    assert result.stderr.count("\n") == 1
    assert swapper("ls", tmp_path / "missing", code=1).stdout == ""


def test_nothing_is_cut_where_there_is_no_terminal(nvme_path: Path) -> None:
    deep = nvme_path / ("d" * 200) / ("e" * 200)
    deep.mkdir(parents=True)
    directory = leftover(deep, f"swapper-{'r' * 100}-0", run="r" * 100)
    command = [sys.executable, "-m", "swapper", "ls", str(deep)]
    environment = {**os.environ, "COLUMNS": "20", "TERM": "xterm-256color"}
    done = run_program(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert lines[1].split()[0] == "stale"
    assert lines[1].endswith(f" {directory}")
    assert "\x1b" not in done.stdout


def test_names_that_would_command_the_terminal_are_shown_harmless(nvme_path: Path) -> None:
    name = os.fsdecode(b"swapper-\xff\x1b[31m\n[bold]-0")
    directory = leftover(nvme_path, name, run="\x1b]0;title\x07", host="a\nb")
    done = run_program([sys.executable, "-m", "swapper", "ls", str(nvme_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert len(done.stdout.splitlines()) == 3
    assert r"swapper-\udcff\x1b[31m\n[bold]-0" in done.stdout
    [run] = as_json("ls", nvme_path)["runs"]
    assert run["path"] == str(directory)
    swapper("clean", "--yes", nvme_path)
    assert not directory.exists()


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that everybody may write to. That of the other tests is below one that is root's own."""
    with tempfile.TemporaryDirectory() as name:
        if any(not parent.stat().st_mode & stat.S_IXOTH for parent in Path(name).parents):
            pytest.skip(f"{name} cannot be reached by everybody")
        os.chmod(name, 0o777)
        yield Path(name)


@pytest.mark.root
def test_another_users_run_is_unknown_and_left_alone(shared: Path) -> None:
    directory = leftover(shared)
    with as_nobody():
        [run] = as_json("ls", shared)["runs"]
        assert (run["state"], run["size_bytes"], run["files"], run["uid"]) == ("unknown", None, None, 0)
        assert "Permission denied" in run["reason"]
        assert "unknown" in swapper("ls", shared).stdout
        data = as_json("clean", "--yes", shared)
        assert [entry["path"] for entry in data["left"]] == [str(directory)]
        assert str(directory) in swapper("clean", "--yes", "--force", directory, code=1).stderr
    assert (directory / RECORD).exists()


@pytest.mark.root
def test_a_directory_that_can_be_listed_but_not_entered_is_an_error(shared: Path) -> None:
    leftover(shared)
    shared.chmod(0o744)
    with as_nobody():
        assert "Permission denied" in swapper("ls", shared, code=1).stderr


# --- swapper clean ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_garble")
def test_clean_removes_what_is_stale_and_nothing_else(nvme_path: Path, one_of_each: dict[str, Path]) -> None:
    users = nvme_path / "users.txt"
    users.touch()
    stale = {str(path): blocks(path) for name, path in one_of_each.items() if STATES[name] == "stale"}
    others = {str(path): STATES[name] for name, path in one_of_each.items() if STATES[name] != "stale"}
    data = as_json("clean", "--yes", nvme_path)
    assert set(data) == {"dry_run", "removed", "freed_bytes", "left", "errors"}
    assert data["dry_run"] is False
    assert {entry["path"]: entry["freed_bytes"] for entry in data["removed"]} == stale
    assert data["freed_bytes"] == sum(stale.values())
    assert {entry["path"]: entry["state"] for entry in data["left"]} == others
    assert all(set(entry) == {"path", "freed_bytes", "reason"} for entry in data["removed"])
    assert all(set(entry) == {"path", "state", "reason"} for entry in data["left"])
    assert {str(path) for path in nvme_path.iterdir()} == {*others, str(users)}


@pytest.mark.usefixtures("_garble")
def test_clean_says_what_it_did(nvme_path: Path, one_of_each: dict[str, Path]) -> None:
    freed = format_bytes(sum(blocks(path) for name, path in one_of_each.items() if STATES[name] == "stale"))
    wanted = swapper("clean", "--dry-run", nvme_path).stdout
    assert all(path.is_dir() for path in one_of_each.values())
    assert wanted.endswith(f"{freed} would be freed\n")
    done = swapper("clean", "--yes", nvme_path).stdout
    assert done == wanted.replace("would remove", "removed").replace("would be freed", "freed")
    for name, path in one_of_each.items():
        assert (f"removed {path}: " in done) == (STATES[name] == "stale")
        assert (f"left alone {path}: " in done) == (STATES[name] != "stale")
        assert (f"swapper clean --force {path}" in done) == (STATES[name] == "unknown")
    assert swapper("clean", "--yes", nvme_path).stdout.endswith("nothing to remove\n")


def test_clean_without_a_terminal_needs_yes(nvme_path: Path) -> None:
    directory = leftover(nvme_path)
    assert "--yes" in swapper("clean", nvme_path, code=1).stderr
    command = [sys.executable, "-m", "swapper", "clean", str(nvme_path), "--json"]
    done = run_program(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "--yes" in done.stderr
    assert "Traceback" not in done.stderr
    assert (directory / RECORD).exists()
    shutil.rmtree(directory)
    assert swapper("clean", nvme_path).stdout == "nothing to remove\n", "then there is nothing to ask"


def at_a_terminal(answer: str, *arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and what the terminal showed of a command that is answered when it asks."""
    main, side = pty.openpty()
    process = Program(
        [sys.executable, "-m", "swapper", *map(str, arguments)],
        stdin=side,
        stderr=side,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    os.close(side)
    shown = ""
    try:
        stop = time.monotonic() + 240
        while "[y/N]" not in shown:
            assert time.monotonic() < stop, shown
            if select.select([main], [], [], 1)[0]:
                shown += os.read(main, 1000).decode()
        if answer == "ctrl-c":
            process.send_signal(signal.SIGINT)
        else:
            os.write(main, answer.encode())
        stdout, _ = process.communicate(timeout=240)
        with contextlib.suppress(OSError):  # EIO: the other side is closed.
            while more := os.read(main, 1000).decode():
                shown += more
    finally:
        process.kill()
        process.wait()
        os.close(main)
    return process.returncode, stdout, shown.partition("[y/N]")[2]


@pytest.mark.parametrize(
    ("answer", "code", "removed"),
    [("Yes\n", 0, True), ("\n", 1, False), ("\x04", 1, False), ("ctrl-c", 130, False)],
    ids=["yes", "nothing", "ctrl-d", "ctrl-c"],
)
def test_clean_at_a_terminal_asks(nvme_path: Path, answer: str, code: int, removed: bool) -> None:
    directory = leftover(nvme_path)
    returned, stdout, shown = at_a_terminal(answer, "clean", nvme_path)
    assert returned == code, shown
    assert directory.exists() is not removed
    assert "PATH" in stdout, "it says what it asks about"
    assert ("removed" in stdout) == removed
    assert "Traceback" not in shown
    if answer == "ctrl-c":
        assert shown.strip() == ""


def test_the_question_does_not_get_into_json(nvme_path: Path) -> None:
    directory = leftover(nvme_path)
    returned, stdout, _ = at_a_terminal("y\n", "clean", "--json", nvme_path)
    assert returned == 0
    assert [entry["path"] for entry in json.loads(stdout)["removed"]] == [str(directory)]


def test_force_removes_another_hosts_directory_and_only_that(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWAPPER_NVME_PATH", str(nvme_path))
    foreign = leftover(nvme_path, "swapper-foreign-0", **ELSEWHERE)
    other = leftover(nvme_path, "swapper-foreign-1", **ELSEWHERE)
    stale = leftover(nvme_path)
    swapper("clean", "--force", foreign, code=1)  # Not without a word of agreement.
    swapper("clean", "--dry-run", "--force", foreign)
    assert foreign.is_dir()
    swapper("clean", "--yes", "--force", f"{foreign}/")
    assert not foreign.exists()
    assert other.is_dir()
    assert stale.is_dir(), "without DIR only what is named"
    data = as_json("clean", "--yes", "--force", other, nvme_path)
    assert {entry["path"] for entry in data["removed"]} == {str(other), str(stale)}
    assert data["left"] == []
    assert not list(nvme_path.iterdir())


@pytest.mark.usefixtures("_garble")
def test_force_takes_an_unreadable_and_a_stale_one(one_of_each: dict[str, Path]) -> None:
    for name in ("unreadable", "stale"):
        swapper("clean", "--yes", "--force", one_of_each[name])
        assert not one_of_each[name].exists()


@pytest.mark.parametrize("name", ["alive", "new"])
def test_force_never_takes_what_is_in_use_here(one_of_each: dict[str, Path], name: str) -> None:
    directory = one_of_each[name]
    data = as_json("clean", "--yes", "--force", directory, "--force", one_of_each["unknown"], code=1)
    assert [error["path"] for error in data["errors"]] == [str(directory)]
    assert [entry["path"] for entry in data["removed"]] == [str(one_of_each["unknown"])]
    assert directory.is_dir()


def test_force_takes_a_foreign_directory_only_while_its_lock_is_free(nvme_path: Path) -> None:
    # As on a network file system that carries locks from host to host.
    directory = leftover(nvme_path, **ELSEWHERE)
    with open(directory / "lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "lock is held" in swapper("clean", "--yes", "--force", directory, code=1).stderr
        assert not remove_run(directory, force=True).removed
    assert (directory / RECORD).exists()


def test_force_refuses_what_is_no_run_directory(nvme_path: Path, tmp_path: Path) -> None:
    users = nvme_path / "swapper-foo-bar"
    users.mkdir()
    (users / "thesis.tex").touch()
    link = nvme_path / "swapper-link-0"
    link.symlink_to(leftover(tmp_path, **ELSEWHERE))
    for path in (users, link, nvme_path, tmp_path / "missing"):
        assert str(path) in swapper("clean", "--yes", "--force", path, code=1).stderr
    assert (users / "thesis.tex").exists()
    assert (link / RECORD).exists()


def meanwhile(monkeypatch: pytest.MonkeyPatch, happens: Callable[[Path], object]) -> None:
    """Let something happen to each directory after it was found and before it is removed."""

    def late(directory: Path, *, force: bool = False) -> runs_module.Removal:
        happens(directory)
        return remove_run(directory, force=force)

    monkeypatch.setattr(cli_runs, "remove_run", late)


def test_what_vanishes_meanwhile_is_no_error(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = leftover(nvme_path)
    meanwhile(monkeypatch, shutil.rmtree)
    data = as_json("clean", "--yes", nvme_path)
    assert (data["removed"], data["freed_bytes"]) == ([], 0)
    assert data["left"] == [{"path": str(directory), "state": "gone", "reason": "it is gone"}]


def test_what_comes_alive_meanwhile_is_left_alone(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = leftover(nvme_path, "swapper-again-0")
    locks = []

    def start_again(path: Path) -> None:
        shutil.rmtree(path)
        locks.append(make_run_directory(nvme_path, "again", 0)[1])

    meanwhile(monkeypatch, start_again)
    data = as_json("clean", "--yes", nvme_path)
    assert data["removed"] == []
    assert [(entry["path"], entry["state"]) for entry in data["left"]] == [(str(directory), "alive")]
    assert (directory / "lock").exists()
    os.close(locks.pop())


def test_what_turns_out_to_be_another_hosts_is_left_alone(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = leftover(nvme_path)
    meanwhile(monkeypatch, lambda path: (path / "lock").write_text(json.dumps(ELSEWHERE)))
    data = as_json("clean", "--yes", nvme_path)
    assert [(entry["path"], entry["state"]) for entry in data["left"]] == [(str(directory), "unknown")]
    assert (directory / RECORD).exists()


def test_two_cleaners_count_what_they_free_once(nvme_path: Path) -> None:
    total = sum(blocks(leftover(nvme_path, f"swapper-dead{i}-0")) for i in range(40))
    command = [sys.executable, "-m", "swapper", "clean", "--yes", "--json", str(nvme_path)]
    cleaners = [Program(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    freed = [json.loads(cleaner.communicate()[0])["freed_bytes"] for cleaner in cleaners]
    assert [cleaner.returncode for cleaner in cleaners] == [0, 0]
    freed.append(as_json("clean", "--yes", nvme_path)["freed_bytes"])  # A look of one can keep the other away.
    assert sum(freed) == total
    assert not list(nvme_path.iterdir())


def test_a_half_removed_directory_is_removed_the_rest_of_the_way(nvme_path: Path) -> None:
    directory = leftover(nvme_path)
    (directory / RECORD).unlink()
    [entry] = as_json("clean", "--yes", nvme_path)["removed"]
    assert entry["path"] == str(directory)
    assert not directory.exists()


def test_a_missing_directory_does_not_keep_clean_from_the_others(nvme_path: Path, tmp_path: Path) -> None:
    directory = leftover(nvme_path)
    result = swapper("clean", "--yes", tmp_path / "missing", nvme_path, code=1)
    assert str(tmp_path / "missing") in result.stderr
    assert not directory.exists()


@pytest.mark.root
def test_a_directory_that_may_not_be_removed_is_named_and_the_others_go(shared: Path) -> None:
    locked, free = shared / "locked", shared / "free"
    locked.mkdir()
    free.mkdir()
    free.chmod(0o777)
    made = [leftover(locked), leftover(free)]
    for directory in made:
        for path in (directory, *directory.iterdir()):
            os.chown(path, 65534, 65534)
    with as_nobody():
        result = swapper("clean", "--yes", locked, free, code=1)
    assert str(made[0]) in result.stderr
    assert "Permission denied" in result.stderr
    assert result.stderr.count("\n") == 1
    assert f"removed {made[1]}" in result.stdout
    assert not made[1].exists()


@pytest.mark.root
def test_a_read_only_file_system_can_be_looked_at_and_not_cleaned(nvme_path: Path) -> None:
    directory = leftover(nvme_path)
    done = subprocess.run(
        ["mount", "--bind", "-o", "ro", str(nvme_path), str(nvme_path)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    try:
        assert [run["state"] for run in as_json("ls", nvme_path)["runs"]] == ["stale"]
        data = as_json("clean", "--yes", nvme_path, code=1)
        assert data["removed"] == []
        assert [error["path"] for error in data["errors"]] == [str(directory)]
        assert "read-only" in data["errors"][0]["error"]
    finally:
        subprocess.run(["umount", str(nvme_path)], check=True)
    assert (directory / RECORD).exists()
