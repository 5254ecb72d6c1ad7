"""The store: run directories, their locks and their clean-up; records on disk; and what is wrong with a path."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import gc
import itertools
import json
import logging
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from each_line import at_each_line
from interrupts import interrupted_at
from isolation import in_forked_child
from launcher import Program, run_program
from small_drives import HOLDER, as_nobody, keys, killed_run, mode_of, mounted, other_process, random_bytes

from swapper.errors import ConfigError, SwapError, SwapIOError
from swapper.io.handle import AsyncIOHandle, FaultPlan
from swapper.process.warnings import warn_once
from swapper.storage import mounts as mounts_module
from swapper.storage import runs as runs_module
from swapper.storage import store as store_module
from swapper.storage.buffers import BufferPool
from swapper.storage.mounts import FileSystem, NvmePathError, check_nvme_path, file_systems
from swapper.storage.runs import find_runs, make_run_directory, remove_stale_runs
from swapper.storage.store import RecordKey, TensorStore

pytestmark = pytest.mark.timeout(240)

MiB = 1 << 20
KEY = RecordKey(0, "optim", 0)


@pytest.fixture
def handle() -> Iterator[AsyncIOHandle]:
    with AsyncIOHandle(block_bytes=64 << 10) as handle:
        yield handle


@pytest.fixture
def store(nvme_path: Path, leaves_nothing: None, handle: AsyncIOHandle) -> Iterator[TensorStore]:
    made = TensorStore([nvme_path], "run", 0, [handle])
    yield made
    made.close()


@pytest.fixture
def pool(handle: AsyncIOHandle) -> Iterator[BufferPool]:
    with BufferPool(4 * MiB, handle) as pool:
        yield pool


def free_bytes(store: TensorStore) -> int:
    (file_system,) = file_systems(store.directories)
    return file_system.free_bytes


def make_leftover(nvme_path: Path, name: str = "swapper-dead-0", **owner: object) -> Path:
    """What a killed run left, made without a process."""
    directory = nvme_path / name
    directory.mkdir(mode=0o700)
    described = {"boot_id": runs_module.boot_id(), "host": socket.gethostname(), "pid": 1, "run": "dead", "rank": 0}
    (directory / "lock").write_text(json.dumps({**described, **owner}))
    (directory / KEY.file_name).write_bytes(b"x" * 10_000)
    return directory


# --- A run directory --------------------------------------------------------------------------------------------------


def test_directory_and_files_are_the_users_alone(nvme_path: Path, store: TensorStore) -> None:
    store.plan({KEY: 10_000})
    assert store.directories[0] == nvme_path / "swapper-run-0"
    assert mode_of(store.directories[0]) == 0o700
    found = {path.name: path for path in store.directories[0].iterdir()}
    assert set(found) == {"lock", "000-optim-000000.safetensors"}
    assert {mode_of(path) for path in found.values()} == {0o600}
    assert found[KEY.file_name].stat().st_size == 12288, "rounded up to a multiple of 4096"


def test_lock_is_held_and_says_whose_it_is(store: TensorStore) -> None:
    with open(store.directories[0] / "lock", "r+") as lock:
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        owner = json.load(lock)
    assert owner["pid"] == os.getpid()
    assert owner["host"] == socket.gethostname()
    assert owner["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert (owner["run"], owner["rank"]) == ("run", 0)


def test_lock_does_not_pass_to_a_program_that_is_started(nvme_path: Path, handle: AsyncIOHandle) -> None:
    store = TensorStore([nvme_path], "run", 0, [handle])
    with subprocess.Popen(["sleep", "60"], close_fds=False) as child:
        try:
            descriptors = Path(f"/proc/{child.pid}/fd")
            opened = {os.readlink(descriptor) for descriptor in descriptors.iterdir()}
            assert not any(str(nvme_path) in path for path in opened)
        finally:
            child.kill()
    store.close()


def test_close_removes_everything_and_can_be_repeated(nvme_path: Path, handle: AsyncIOHandle) -> None:
    gc.collect()  # What other tests have left would end meanwhile.
    before = len(os.listdir("/proc/self/fd"))
    store = TensorStore([nvme_path], "run", 0, [handle])
    store.plan(dict.fromkeys(keys(5), 4096))
    store.close()
    store.close()
    assert not list(nvme_path.iterdir())
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_store_that_is_collected_removes_its_directory(nvme_path: Path, handle: AsyncIOHandle) -> None:
    store = TensorStore([nvme_path], "run", 0, [handle])
    store.plan({KEY: 4096})
    del store
    gc.collect()
    assert not list(nvme_path.iterdir())


def test_a_store_that_nobody_closes_goes_when_the_program_ends(nvme_path: Path) -> None:
    with other_process(nvme_path, "run") as (process, directory):
        assert directory.is_dir()
        process.communicate("")
        assert process.returncode == 0
    assert not list(nvme_path.iterdir())


def test_ctrl_c_leaves_nothing(nvme_path: Path) -> None:
    with other_process(nvme_path, "run") as (process, directory):
        assert directory.is_dir()
        process.send_signal(signal.SIGINT)
        process.wait()
    assert not list(nvme_path.iterdir())


def test_another_thread_plans_and_forgets_records_at_any_line(
    store: TensorStore, pool: BufferPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As caches of one config in two threads do. Planning looks at records whose space is not reserved yet."""
    monkeypatch.setattr("swapper.io.file.File.preallocate", lambda *_: False)
    theirs = [RecordKey(1, "kv", number) for number in range(3)]
    ours = RecordKey(0, "kv", 0)
    turn = itertools.count()

    def plan_or_forget() -> None:
        round_number, position = divmod(next(turn), len(theirs))
        if round_number % 2:
            store.forget(theirs[position])
        else:
            store.plan({theirs[position]: 4096})

    with pool.acquire(4096) as lease, at_each_line({store_module}, plan_or_forget):
        for _ in range(10):
            store.plan({ours: 4096})
            store.write(ours, lease, 4096).wait()
            store.check_written()
            store.read(ours, lease).wait()
            store.forget(ours)
    for key in theirs:
        store.forget(key)
    assert not store._records
    assert [drive.held_bytes for drive in store._drives] == [0]


def test_a_relative_path_survives_a_change_of_directory(
    nvme_path: Path, handle: AsyncIOHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(nvme_path.parent)
    store = TensorStore([Path(nvme_path.name)], "run", 0, [handle])
    store.plan({KEY: 4096})
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    other = RecordKey(0, "optim", 1)
    store.plan({other: 4096})
    store.forget(KEY)
    assert {path.name for path in store.directories[0].iterdir()} == {"lock", other.file_name}
    store.close()
    assert not list(nvme_path.iterdir())


def test_two_stores_share_a_path(nvme_path: Path, handle: AsyncIOHandle, leaves_nothing: None) -> None:
    first = TensorStore([nvme_path], "one", 0, [handle])
    first.plan({KEY: 4096})
    second = TensorStore([nvme_path], "two", 0, [handle])
    third = TensorStore([nvme_path], "two", 1, [handle])
    assert (first.directories[0] / KEY.file_name).exists()
    second.close()
    assert (first.directories[0] / KEY.file_name).exists()
    first.close()
    third.close()


def test_a_name_that_is_taken_is_refused_and_disturbs_nobody(
    nvme_path: Path, store: TensorStore, handle: AsyncIOHandle
) -> None:
    store.plan({KEY: 4096})
    with pytest.raises(NvmePathError, match="another run has this name") as caught:
        TensorStore([nvme_path], "run", 0, [handle])
    assert caught.value.errno == errno.EEXIST
    assert (store.directories[0] / KEY.file_name).exists()
    assert [path.name for path in nvme_path.iterdir()] == ["swapper-run-0"]


def test_a_directory_that_somebody_else_removed_is_no_crash(
    nvme_path: Path, handle: AsyncIOHandle, caplog: pytest.LogCaptureFixture
) -> None:
    store = TensorStore([nvme_path], "run", 0, [handle])
    store.plan({KEY: 4096})
    shutil.rmtree(store.directories[0])
    with pytest.raises(SwapIOError) as caught:
        store.plan({RecordKey(0, "optim", 1): 4096})
    assert caught.value.errno == errno.ENOENT
    with pytest.raises(SwapIOError) as caught:
        store.scratch(4096)
    assert caught.value.errno == errno.ENOENT
    store.forget(KEY)
    store.close()
    assert not caplog.records


# --- What killed runs leave -------------------------------------------------------------------------------------------


def test_leftovers_of_a_killed_run_are_removed_and_counted(
    nvme_path: Path, handle: AsyncIOHandle, caplog: pytest.LogCaptureFixture
) -> None:
    directory = killed_run(nvme_path)
    freed = sum(path.stat().st_blocks * 512 for path in directory.iterdir())
    assert freed >= 3 * MiB
    TensorStore([nvme_path], "run", 0, [handle]).close()
    assert not list(nvme_path.iterdir())
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert str(directory) in record.message
    assert "3.004 MiB freed" in record.message or "MiB freed" in record.message


def test_a_run_of_an_earlier_boot_of_this_host_is_removed(nvme_path: Path) -> None:
    make_leftover(nvme_path, boot_id="of an earlier boot")
    remove_stale_runs(nvme_path)
    assert not list(nvme_path.iterdir())


def test_a_run_of_this_boot_in_another_container_is_removed(nvme_path: Path) -> None:
    make_leftover(nvme_path, host="a container that is gone")
    remove_stale_runs(nvme_path)
    assert not list(nvme_path.iterdir())


def test_a_live_run_is_left_alone_until_it_dies(
    nvme_path: Path, handle: AsyncIOHandle, caplog: pytest.LogCaptureFixture
) -> None:
    with other_process(nvme_path, "alive") as (process, directory):
        store = TensorStore([nvme_path], "run", 0, [handle])
        assert len(list(directory.iterdir())) == 4
        assert not caplog.records, "a live run is nothing to talk about"
        process.send_signal(signal.SIGKILL)
        process.wait()
        remove_stale_runs(nvme_path)
        assert not directory.exists()
    store.close()


def test_the_last_rank_removes_what_killed_ranks_of_its_run_left(nvme_path: Path, handle: AsyncIOHandle) -> None:
    def killed(run: str, rank: int) -> Path:
        directory, lock = make_run_directory(nvme_path, run, rank)
        os.close(lock)
        return directory

    ours, alive = TensorStore([nvme_path], "run", 0, [handle]), TensorStore([nvme_path], "run", 1, [handle])
    gone, other = killed("run", 2), killed("runs", 3)
    ours.close()
    assert sorted(nvme_path.iterdir()) == sorted([*alive.directories, other])
    assert not gone.exists()
    alive.close()
    assert list(nvme_path.iterdir()) == [other]


def test_a_run_of_another_host_is_left_alone_and_named(nvme_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = make_leftover(nvme_path, host="elsewhere", boot_id="another")
    remove_stale_runs(nvme_path)
    assert (directory / KEY.file_name).exists()
    assert "elsewhere" in caplog.text
    assert f"`swapper clean --force {directory}` frees its space" in caplog.text


@pytest.mark.parametrize("text", ["", "not json", "[1, 2]", "{}", "null", '"text"', "\x00\xff"])
def test_a_lock_that_says_nothing_is_left_alone_and_named(
    nvme_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    directory = make_leftover(nvme_path)
    (directory / "lock").write_bytes(text.encode("latin-1"))
    remove_stale_runs(nvme_path)
    assert (directory / KEY.file_name).exists()
    assert str(directory) in caplog.text


def test_a_run_killed_while_it_was_removed_is_removed_the_rest_of_the_way(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_leftover(nvme_path)
    for i in range(20):
        (directory / f"record-{i}").write_bytes(b"x")
    real = os.unlink
    left = 7

    def killed_soon(*args: object, **kwargs: object) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        real(*args, **kwargs)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", killed_soon)
        with pytest.raises(KeyboardInterrupt):
            remove_stale_runs(nvme_path)
    assert (directory / "lock").exists(), "without its lock nobody would ever remove it"
    remove_stale_runs(nvme_path)
    assert not list(nvme_path.iterdir())


def test_a_link_to_nowhere_inside_does_not_keep_a_leftover(nvme_path: Path, tmp_path: Path) -> None:
    directory = make_leftover(nvme_path)
    (directory / "nowhere").symlink_to(tmp_path / "missing")
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    (directory / "link").symlink_to(kept)
    (directory / "below").mkdir()
    (directory / "below" / "file").touch()
    remove_stale_runs(nvme_path)
    assert not list(nvme_path.iterdir())
    assert (kept / "file").exists()


def test_young_temporary_directories_may_be_in_the_making(nvme_path: Path) -> None:
    bare = nvme_path / ".swapper-new-bare"
    bare.mkdir()
    opened = nvme_path / ".swapper-new-opened"
    opened.mkdir()
    (opened / "lock").touch()
    remove_stale_runs(nvme_path)
    assert bare.is_dir()
    assert opened.is_dir()
    long_ago = time.time() - 3600
    for directory in (bare, opened):
        os.utime(directory, (long_ago, long_ago))
    remove_stale_runs(nvme_path)
    assert not list(nvme_path.iterdir())


def test_a_temporary_directory_of_a_dead_maker_is_removed_at_once(nvme_path: Path) -> None:
    make_leftover(nvme_path, ".swapper-new-0123456789abcdef")
    remove_stale_runs(nvme_path)
    assert not list(nvme_path.iterdir())


def test_what_only_looks_like_a_run_is_never_touched(nvme_path: Path, tmp_path: Path) -> None:
    users = nvme_path / "swapper-foo-bar"
    users.mkdir()
    (users / "thesis.tex").touch()
    os.utime(users, (0, 0))
    (nvme_path / "swapper-empty-dir").mkdir()
    (nvme_path / "swapper-a-file").touch()
    real = make_leftover(tmp_path)
    (nvme_path / "swapper-link-0").symlink_to(real)
    (nvme_path / "swapper-dangling-0").symlink_to(tmp_path / "missing")
    locked_by_link = nvme_path / "swapper-trap-0"
    locked_by_link.mkdir()
    (locked_by_link / "lock").symlink_to(real / "lock")
    (locked_by_link / "file").touch()
    make_leftover(nvme_path, "swapperdead-0")
    make_leftover(nvme_path, "my-swapper-dead-0")
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    remove_stale_runs(nvme_path)
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("look", [remove_stale_runs, find_runs])
def test_a_new_run_of_the_same_name_is_not_taken_for_the_old_one(
    nvme_path: Path, handle: AsyncIOHandle, monkeypatch: pytest.MonkeyPatch, look: Callable[[Path], object]
) -> None:
    # Between our opening the lock of a leftover and locking it, another process removes it, and a run of that name
    # starts: we then hold the lock of a file that is gone.
    directory = make_leftover(nvme_path, "swapper-again-0")
    real = fcntl.flock
    made: list[TensorStore] = []

    def slowly(descriptor: int, operation: int) -> None:
        if not made and operation & fcntl.LOCK_NB:
            shutil.rmtree(directory)
            monkeypatch.setattr(fcntl, "flock", real)
            made.append(TensorStore([nvme_path], "again", 0, [handle]))
            made[0].plan({KEY: 4096})
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", slowly)
    assert not look(nvme_path)
    assert made
    assert (made[0].directories[0] / KEY.file_name).exists()
    made[0].close()


def test_many_processes_clean_up_and_start_at_once(nvme_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # Forked from one that has the modules, so that they really run at once.
    script = """
import logging, os, sys
from pathlib import Path
from swapper.storage.runs import make_run_directory, remove_stale_runs
logging.basicConfig(format="%(message)s")
path = Path(sys.argv[1])
gate_out, gate_in = os.pipe()
children = []
for rank in range(8):
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.read(gate_out, 1)
            for turn in range(5):
                remove_stale_runs(path)
                directory, lock = make_run_directory(path, f"turn{turn}", rank)
                remove_stale_runs(path)
                assert sorted(os.listdir(directory)) == ["lock"]
                (directory / "record").write_bytes(b"x" * 5000)
                os.close(lock)  # as if killed
            status = 0
        finally:
            os._exit(status)
    children.append(pid)
os.write(gate_in, b"x" * 8)
sys.exit(any(os.waitpid(pid, 0)[1] for pid in children))
"""
    for i in range(50):
        make_leftover(nvme_path, f"swapper-dead{i:02}-0")
    done = run_program([sys.executable, "-c", script, str(nvme_path)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len({line.split(",")[0] for line in lines if line.startswith("removed ")}), done.stderr
    remove_stale_runs(nvme_path)
    assert not list(nvme_path.iterdir())


# --- A path that cannot work ------------------------------------------------------------------------------------------


def refused(path: Path, number: int, handle: AsyncIOHandle) -> NvmePathError:
    """The error of a store on `path`, which must be all that an error of ours is."""
    with pytest.raises(NvmePathError) as caught:
        TensorStore([path], "run", 0, [handle])
    error = caught.value
    assert isinstance(error, ConfigError)
    assert isinstance(error, SwapIOError)
    assert isinstance(error, ValueError)
    assert isinstance(error, OSError)
    assert error.errno == number
    assert error.filename == error.path == str(path)
    assert error.strerror
    assert os.strerror(number) in error.strerror
    assert str(path) in str(error)
    assert str(error).startswith(f"[Errno {number}] ")
    assert "nvme_path: " in str(error), "names the field"
    copied = pickle.loads(pickle.dumps(error))
    assert (str(copied), copied.errno, copied.path) == (str(error), number, str(path))
    return error


def test_a_missing_path_is_refused_with_the_command_that_makes_it(tmp_path: Path, handle: AsyncIOHandle) -> None:
    error = refused(tmp_path / "missing", errno.ENOENT, handle)
    assert f"mkdir -p {tmp_path / 'missing'}" in str(error)


def test_a_file_is_refused(tmp_path: Path, handle: AsyncIOHandle) -> None:
    (tmp_path / "file").touch()
    refused(tmp_path / "file", errno.ENOTDIR, handle)
    refused(tmp_path / "file" / "below", errno.ENOTDIR, handle)


def test_a_path_that_the_system_cannot_follow_is_refused(tmp_path: Path, handle: AsyncIOHandle) -> None:
    (tmp_path / "loop").symlink_to("loop")
    refused(tmp_path / "loop", errno.ELOOP, handle)
    refused(tmp_path / ("n" * 300), errno.ENAMETOOLONG, handle)
    (tmp_path / "dangling").symlink_to("missing")
    refused(tmp_path / "dangling", errno.ENOENT, handle)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_is_not_ours_to_write_is_refused(nvme_path: Path, handle: AsyncIOHandle) -> None:
    nvme_path.chmod(0o500)
    try:
        refused(nvme_path, errno.EACCES, handle)
        assert not list(nvme_path.iterdir())
        nvme_path.chmod(0)
        refused(nvme_path / "below", errno.EACCES, handle)
    finally:
        nvme_path.chmod(0o700)


@pytest.mark.root
def test_another_users_directory_is_refused(
    nvme_path: Path, handle: AsyncIOHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    if any(parent.stat().st_mode & 0o005 != 0o005 for parent in nvme_path.parents):
        # The temporary directory of the tests is root's own: step inside and look from there.
        monkeypatch.chdir(nvme_path)
    with as_nobody(), pytest.raises(NvmePathError) as caught:
        check_nvme_path(Path())
    assert caught.value.errno == errno.EACCES
    with as_nobody(), pytest.raises(NvmePathError) as caught:
        check_nvme_path(nvme_path)
    assert caught.value.errno == errno.EACCES
    assert not list(nvme_path.iterdir())


@pytest.fixture
def tmpfs(nvme_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    with mounted(nvme_path, "-t", "tmpfs", "-o", "size=4m", "tmpfs"):
        yield nvme_path


def runs_on(path: Path) -> list[str]:
    return [entry.name for entry in path.iterdir() if entry.name != "lost+found"]


@pytest.mark.root
def test_a_read_only_file_system_is_refused(tmpfs: Path, handle: AsyncIOHandle) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(tmpfs)], check=True)
    error = refused(tmpfs, errno.EROFS, handle)
    assert "read-only" in str(error)


@pytest.mark.root
def test_a_drive_that_turns_read_only_is_given_up_with_a_word(
    tmpfs: Path, handle: AsyncIOHandle, caplog: pytest.LogCaptureFixture
) -> None:
    store = TensorStore([tmpfs], "run", 0, [handle])
    store.plan(dict.fromkeys(keys(2), 4096))
    # Files that are open for writing do not let a mount be made read-only, but a second one over it can be.
    subprocess.run(["mount", "--bind", "-o", "ro", str(tmpfs), str(tmpfs)], check=True)
    try:
        caplog.clear()
        store.forget(keys(1)[0])
        assert "Read-only" in caplog.text
        with pytest.raises(SwapIOError) as caught:
            store.scratch(4096)
        assert caught.value.errno == errno.EROFS
        store.close()
        assert f"`swapper clean {tmpfs}` removes it" in caplog.text
    finally:
        subprocess.run(["umount", str(tmpfs)], check=True)


def memory_path() -> Path | None:
    path = Path("/dev/shm")
    return path if path.is_dir() and os.access(path, os.W_OK) and mounts_module._file_system(path) == "tmpfs" else None


@pytest.mark.skipif(memory_path() is None, reason="no tmpfs at /dev/shm")
def test_memory_is_refused_unless_asked_for(handle: AsyncIOHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    path = memory_path()
    assert path is not None
    check_nvme_path(path)
    before = set(path.iterdir())
    for value in (None, "0", ""):
        if value is None:
            monkeypatch.delenv("SWAPPER_ALLOW_TMPFS")
        else:
            monkeypatch.setenv("SWAPPER_ALLOW_TMPFS", value)
        with pytest.raises(ConfigError, match=r"nvme_path: /dev/shm is on tmpfs.*SWAPPER_ALLOW_TMPFS=1"):
            TensorStore([path], "run", 0, [handle])
    assert set(path.iterdir()) == before


MOUNTS = """\
22000 1 0:21 / /proc rw,nosuid - proc proc rw
30000 1 {device} / / rw,relatime shared:1 - {kind} /dev/some rw
"""


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("nfs4", "network file system"),
        ("fuse.sshfs", "network file system"),
        ("overlay", "overlay file system"),
        ("ext4", None),
        ("xfs", None),
    ],
)
def test_a_slow_kind_of_path_is_said_once(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str, words: str | None
) -> None:
    monkeypatch.setattr(mounts_module, "_file_system", lambda path: kind)
    monkeypatch.setattr(mounts_module, "_is_rotating", lambda path: False)
    warn_once.cache_clear()
    for _ in range(2):
        check_nvme_path(nvme_path)
    assert len(caplog.records) == (words is not None)
    assert words is None or words in caplog.text


def test_a_rotating_disk_is_said_once(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mounts_module, "_file_system", lambda path: "ext4")
    monkeypatch.setattr(mounts_module, "_is_rotating", lambda path: True)
    warn_once.cache_clear()
    for _ in range(2):
        check_nvme_path(nvme_path)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "rotates" in caplog.text


def test_the_file_system_is_found_in_the_table_of_mounts(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = os.stat(nvme_path).st_dev
    table = nvme_path / "mounts"
    text = MOUNTS.format(device=f"{os.major(device)}:{os.minor(device)}", kind="zonefs")
    table.write_bytes(text.encode() + b"31 1 9:9 / /mnt/\xff\xfe rw - ext4 /dev/x rw\n")
    real = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda path, *args, **kwargs: real(table if "mountinfo" in str(path) else path, **kwargs)
    )
    assert mounts_module._file_system(nvme_path) == "zonefs"
    # The number of the mount counts for more: subvolumes of btrfs have devices that no line of the table has.
    descriptor = os.open(nvme_path, os.O_PATH)
    lines = Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines()
    [number] = [line.split()[1] for line in lines if line.startswith("mnt_id:")]
    os.close(descriptor)
    with open(table, "a") as file:
        file.write(f"{number} 1 0:99 /sub /mnt/a\\040b\\134c rw - btrfs /dev/y rw,compress\nhalf a line\n")
    mount = mounts_module.mount_of(nvme_path)
    assert mount == mounts_module.Mount(number, "0:99", "/sub", "/mnt/a b\\c", "btrfs", "/dev/y", "rw,compress")


# --- Space ------------------------------------------------------------------------------------------------------------


@pytest.mark.root
def test_too_little_space_is_refused_with_the_sum(small_drive: Path, handle: AsyncIOHandle) -> None:
    store = TensorStore([small_drive], "run", 0, [handle])
    free = free_bytes(store)
    with pytest.raises(NvmePathError) as caught:
        store.plan(dict.fromkeys(keys(5), 8 * MiB))
    error = caught.value
    assert error.errno == errno.ENOSPC
    assert error.path == str(small_drive)
    assert "5 records need 40 MiB" in str(error)
    assert "are free" in str(error)
    assert isinstance(error, ConfigError)
    assert os.listdir(store.directories[0]) == ["lock"]
    assert free_bytes(store) == free
    # What fits is not refused because of what did not.
    store.plan(dict.fromkeys(keys(2), MiB))
    store.close()
    assert not runs_on(small_drive)


@pytest.mark.root
def test_a_drive_that_fills_up_while_files_are_made_keeps_none_of_them(
    small_drive: Path, handle: AsyncIOHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TensorStore([small_drive], "run", 0, [handle])
    store.plan({RecordKey(1, "optim", 0): MiB})
    free = free_bytes(store)
    # As if another process was a little faster.
    monkeypatch.setattr("swapper.storage.store.file_systems", lambda _: [FileSystem((0,), 1 << 60)])
    with pytest.raises(SwapIOError) as caught:
        store.plan(dict.fromkeys(keys(5), 8 * MiB))
    monkeypatch.undo()
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.operation == "preallocate"
    assert Path(caught.value.path).parent == store.directories[0]
    assert sorted(os.listdir(store.directories[0])) == ["001-optim-000000.safetensors", "lock"]
    assert abs(free_bytes(store) - free) < MiB
    store.plan(dict.fromkeys(keys(2), MiB))
    store.close()
    assert not runs_on(small_drive)


@pytest.mark.root
def test_scratch_that_does_not_fit_is_an_error_and_not_a_crash(small_drive: Path, handle: AsyncIOHandle) -> None:
    store = TensorStore([small_drive], "run", 0, [handle])
    with pytest.raises(NvmePathError, match="64 MiB") as caught:
        store.scratch(64 * MiB)
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(store.directories[0]) == ["lock"]
    assert len(store.scratch(MiB)) == MiB
    store.close()


def test_a_failure_in_the_middle_of_planning_leaves_what_was_there(store: TensorStore) -> None:
    store.plan({KEY: 4096})
    blocked = RecordKey(0, "optim", 2)
    (store.directories[0] / blocked.file_name).mkdir()
    with pytest.raises(SwapIOError) as caught:
        store.plan(dict.fromkeys([RecordKey(0, "optim", 1), blocked, RecordKey(0, "optim", 3)], 4096))
    assert caught.value.errno == errno.EISDIR
    assert {path.name for path in store.directories[0].glob("*.safetensors") if path.is_file()} == {KEY.file_name}
    with pytest.raises(KeyError):
        store.stored_bytes(RecordKey(0, "optim", 1))


# --- Records ----------------------------------------------------------------------------------------------------------


def test_a_record_is_read_as_it_was_written(store: TensorStore, pool: BufferPool) -> None:
    store.plan(dict.fromkeys(keys(3), MiB))
    for i, key in enumerate(keys(3)):
        assert store.stored_bytes(key) == 0
        with pool.acquire(MiB) as lease:
            lease.tensor.copy_(random_bytes(MiB, i))
            assert store.write(key, lease, MiB - 4096 * i).wait() == MiB - 4096 * i
        assert store.stored_bytes(key) == MiB - 4096 * i
    for i, key in enumerate(keys(3)):
        with pool.acquire(MiB) as lease:
            lease.tensor.zero_()
            length = store.read(key, lease).wait()
            assert torch.equal(lease.tensor[:length], random_bytes(MiB, i)[:length])
            assert not lease.tensor[length:].any()


@pytest.mark.parametrize("length_bytes", [0, -4096, 1, 4095, MiB + 4096, 2 * MiB])
def test_lengths_that_do_not_fit_are_refused(store: TensorStore, pool: BufferPool, length_bytes: int) -> None:
    store.plan({KEY: MiB})
    with pool.acquire(2 * MiB) as lease, pytest.raises(ValueError, match="bytes"):
        store.write(KEY, lease, length_bytes)
    assert store.stored_bytes(KEY) == 0


def test_a_lease_that_is_too_short_is_refused(store: TensorStore, pool: BufferPool) -> None:
    store.plan({KEY: MiB})
    with pool.acquire(MiB) as lease, pool.acquire(4096) as short:
        with pytest.raises(ValueError, match="bytes"):
            store.write(KEY, short, 8192)
        store.write(KEY, lease, MiB).wait()
        with pytest.raises(ValueError, match="does not fit a lease of 4096"):
            store.read(KEY, short)


def test_a_record_that_was_not_planned_is_an_error(store: TensorStore, pool: BufferPool) -> None:
    with pool.acquire(4096) as lease:
        with pytest.raises(KeyError):
            store.read(KEY, lease)
        with pytest.raises(KeyError):
            store.write(KEY, lease, 4096)
    store.discard(KEY)
    store.forget(KEY)


def test_discard_keeps_the_file_and_forget_does_not(store: TensorStore, pool: BufferPool) -> None:
    store.plan({KEY: 4096})
    with pool.acquire(4096) as lease:
        store.write(KEY, lease, 4096).wait()
    store.discard(KEY)
    assert store.stored_bytes(KEY) == 0
    assert (store.directories[0] / KEY.file_name).stat().st_size == 4096
    store.forget(KEY)
    assert os.listdir(store.directories[0]) == ["lock"]
    store.plan({KEY: 8192})
    assert (store.directories[0] / KEY.file_name).stat().st_size == 8192


def test_a_file_that_was_cut_short_is_not_read_as_zeros(store: TensorStore, pool: BufferPool) -> None:
    store.plan({KEY: MiB})
    with pool.acquire(MiB) as lease:
        store.write(KEY, lease, MiB).wait()
        os.truncate(store.directories[0] / KEY.file_name, MiB // 2)
        with pytest.raises(SwapIOError) as caught:
            store.read(KEY, lease).wait()
    assert caught.value.errno == errno.ENODATA
    assert caught.value.path == str(store.directories[0] / KEY.file_name)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
def test_a_failed_write_names_everything(nvme_path: Path, leaves_nothing: None, number: int) -> None:
    plan = FaultPlan(fail_write_at=2, fail_errno=number)
    with AsyncIOHandle(block_bytes=64 << 10, faults=plan) as handle, BufferPool(MiB, handle) as pool:
        store = TensorStore([nvme_path], "run", 0, [handle])
        store.plan({KEY: MiB})
        with pool.acquire(MiB) as lease, pytest.raises(SwapIOError) as caught:
            store.write(KEY, lease, MiB).wait()
        store.close()
    error = caught.value
    assert not isinstance(error, ConfigError)
    assert (error.errno, error.operation) == (number, "write")
    assert error.path == str(nvme_path / "swapper-run-0" / KEY.file_name)
    assert error.offset_bytes >= 0
    assert error.length_bytes > 0


def test_file_names_sort_as_keys_do() -> None:
    some = [RecordKey(owner, "optim", number) for owner in (0, 1, 12) for number in (0, 9, 10, 99_999)]
    assert sorted(key.file_name for key in some) == [key.file_name for key in some]
    assert len({key.file_name for key in some}) == len(some)


# --- Scratch ----------------------------------------------------------------------------------------------------------


def test_scratch_is_a_file_without_a_name_that_lives_as_long_as_its_views(nvme_path: Path, store: TensorStore) -> None:
    def mapped() -> bool:
        return str(nvme_path) in Path("/proc/self/maps").read_text()

    descriptors = len(os.listdir("/proc/self/fd"))
    mapping = store.scratch(8 * MiB)
    assert os.listdir(store.directories[0]) == ["lock"]
    tensor = torch.frombuffer(mapping, dtype=torch.float32)
    del mapping
    assert not tensor.any()
    tensor[:] = torch.arange(2 * MiB)
    view = tensor[1000:1010]
    del tensor
    gc.collect()
    assert torch.equal(view, torch.arange(1000.0, 1010))
    store.close()
    assert not list(nvme_path.iterdir())
    assert torch.equal(view, torch.arange(1000.0, 1010)), "it does not need the run directory"
    assert mapped()
    del view
    gc.collect()
    assert not mapped() and len(os.listdir("/proc/self/fd")) <= descriptors, "its space is free again"


@pytest.mark.parametrize("what", ["scratch", "left", "check"])
def test_ctrl_c_while_a_temporary_file_is_made_drops_none_that_is_open(
    what: str, nvme_path: Path, store: TensorStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tempfile.NamedTemporaryFile(dir=nvme_path).close()  # The first takes a lock, and Ctrl-C would keep it.
    dropped: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: dropped.append(raised.exc_value))
    before = sorted(nvme_path.rglob("*"))
    for place in itertools.count():
        with contextlib.ExitStack() as stack:
            if what == "check":
                interrupted = interrupted_at(place, lambda: check_nvme_path(nvme_path), "/tempfile.py")
            elif what == "left":
                stack.enter_context(store.scratch_file(4096))
                interrupted = interrupted_at(place, stack.close, "/tempfile.py")
            else:
                make = functools.partial(stack.enter_context, store.scratch_file(4096))
                interrupted = interrupted_at(place, make, "/tempfile.py")
        gc.collect()
        others = [error for error in dropped if not isinstance(error, KeyboardInterrupt)]  # In a finalizer, that is.
        assert (others, sorted(nvme_path.rglob("*"))) == ([], before), place
        if not interrupted and not dropped:
            break
        dropped.clear()
    assert place > 5


def test_two_scratch_files_are_two(store: TensorStore) -> None:
    one, two = store.scratch(4096), store.scratch(4097)
    one[:5] = b"first"
    assert two[:5] == bytes(5)
    assert (len(one), len(two)) == (4096, 4097)


# --- Forks ------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_can_do_no_harm(nvme_path: Path, store: TensorStore, pool: BufferPool) -> None:
    store.plan({KEY: MiB})
    with pool.acquire(MiB) as lease:
        lease.tensor.copy_(random_bytes(MiB))
        store.write(KEY, lease, MiB).wait()

    def child() -> None:
        with pytest.raises(SwapError):
            store.forget(KEY)
        with pytest.raises(SwapError):
            store.plan({RecordKey(0, "optim", 1): 4096})
        with pytest.raises(SwapError):
            pool.acquire(4096)
        store.close()
        remove_stale_runs(nvme_path)

    in_forked_child(child)
    assert sorted(os.listdir(store.directories[0])) == [KEY.file_name, "lock"]
    with pool.acquire(MiB) as lease:
        store.read(KEY, lease).wait()
        assert torch.equal(lease.tensor, random_bytes(MiB))
    store.plan({RecordKey(0, "optim", 1): 4096})


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_that_ends_like_any_program_removes_nothing(nvme_path: Path) -> None:
    script = HOLDER.replace(
        "sys.stdin.read()",
        """
import os
pid = os.fork()
if pid == 0:
    sys.exit(0)  # runs what is registered for the end of the program
assert os.waitpid(pid, 0)[1] == 0
assert len(os.listdir(store.directories[0])) == 4
""",
    )
    done = run_program(
        [sys.executable, "-c", script, str(nvme_path), "run"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert not list(nvme_path.iterdir())


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_that_outlives_a_killed_run_delays_its_removal(nvme_path: Path) -> None:
    # The child of a fork holds the same lock: what it may still read stays as long as it lives.
    script = HOLDER.replace("sys.stdin.read()", "import os\nos.fork()\nsys.stdin.read()")
    with Program(
        [sys.executable, "-c", script, str(nvme_path), "run"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        directory = Path(process.stdout.readline().strip())
        [child] = wait_for(lambda: Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        process.send_signal(signal.SIGKILL)
        process.wait()
        remove_stale_runs(nvme_path)
        assert directory.is_dir()
        os.kill(int(child), signal.SIGKILL)
        wait_for(lambda: remove_stale_runs(nvme_path) or not directory.exists())


def wait_for(condition: Callable[[], object]) -> list[str]:
    stop = time.monotonic() + 240
    while not (found := condition()):
        assert time.monotonic() < stop
        time.sleep(0.01)
    return found if isinstance(found, list) else []


def test_stores_in_many_threads(nvme_path: Path, handle: AsyncIOHandle, leaves_nothing: None) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(5):
                store = TensorStore([nvme_path], f"{number}x{turn}", 0, [handle])
                store.plan(dict.fromkeys(keys(3), 4096))
                assert len(os.listdir(store.directories[0])) == 4
                store.close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
