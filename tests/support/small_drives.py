"""Drives that are small, full or of another kind, and what runs leave on them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from launcher import Program
from repository import ROOT

from swapper.bench.witness import Witness
from swapper.storage.store import RecordKey


def keys(count: int) -> list[RecordKey]:
    return [RecordKey(0, "optim", i) for i in range(count)]


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def random_bytes(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


HOLDER = """
import sys, time
from pathlib import Path
from swapper.io.handle import AsyncIOHandle
from swapper.storage.store import RecordKey, TensorStore
store = TensorStore([Path(sys.argv[1])], sys.argv[2], 0, [AsyncIOHandle(backend="threads")])
store.plan({RecordKey(0, "optim", i): 1 << 20 for i in range(3)})
print(store.directories[0], flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def other_process(nvme_path: Path, run: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that has a store on `nvme_path` until its standard input ends; and its run directory."""
    process = Program(
        [sys.executable, "-c", HOLDER, str(nvme_path), run], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            assert process.stdout is not None
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def killed_run(nvme_path: Path, run: str = "dead") -> Path:
    with other_process(nvme_path, run) as (process, directory):
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert directory.is_dir()
    return directory


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """What root does here is what an ordinary user would do."""
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@contextlib.contextmanager
def mounted(path: Path, *options: str) -> Iterator[Path]:
    done = subprocess.run(["mount", *options, str(path)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture(params=["tmpfs", "ext4"])
def small_drive(request: pytest.FixtureRequest, nvme_path: Path, tmp_path: Path) -> Iterator[Path]:
    """A file system of some MiB."""
    if request.param == "tmpfs":
        options = ["-t", "tmpfs", "-o", "size=16m", "tmpfs"]
    else:
        if shutil.which("mkfs.ext4") is None:
            pytest.skip("mkfs.ext4 is not there")
        image = tmp_path / "image"
        with open(image, "wb") as file:
            file.truncate(32 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], check=True)
        options = ["-t", "ext4", "-o", "loop", str(image)]
    with mounted(nvme_path, *options):
        yield nvme_path


@pytest.fixture
def thin_drive(tmp_path: Path) -> Iterator[Path]:
    """An ext4 of 64 MiB whose backing has room for half of that: it learns of it when it writes its pages back."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount")
    backing, mount = tmp_path / "backing", tmp_path / "mount"
    backing.mkdir()
    mount.mkdir()
    commands = [
        ["mount", "-t", "tmpfs", "-o", "size=32m", "swapper", str(backing)],
        ["truncate", "-s", "64M", str(backing / "image")],
        ["mkfs.ext4", "-q", "-m", "0", "-E", "lazy_itable_init=1", "-O", "^has_journal", str(backing / "image")],
        ["mount", "-o", "loop,errors=continue", str(backing / "image"), str(mount)],
    ]
    with contextlib.ExitStack() as stack:
        for command in commands:
            if command[0] == "mount":
                stack.callback(subprocess.run, ["umount", "-l", command[-1]], capture_output=True)
            try:
                subprocess.run(command, check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError) as error:
                pytest.skip(f"cannot make such a drive: {error}")
        yield mount


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A directory on another file system."""
    try:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
            if os.stat(name).st_dev == os.stat(tmp_path).st_dev:
                pytest.skip("/dev/shm is on the same file system")
            yield Path(name)
    except OSError:
        pytest.skip("there is no /dev/shm here")


@pytest.fixture
def drive() -> Iterator[Path]:
    """An empty directory beside the sources: `/tmp` may be memory, which is refused."""
    parent = ROOT / ".swapper"
    parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent) as directory:
        if Witness([Path(directory)]).describe().startswith("none"):
            pytest.skip(f"the sources are on no drive: {Witness([Path(directory)]).describe()}")
        yield Path(directory)


@pytest.fixture
def leaves_nothing_on(drive: Path) -> Iterator[Path]:
    """`drive`, which must be empty at the end."""
    yield drive
    assert not list(drive.iterdir()), "files were left behind"


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory that is no drive."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("there is no /dev/shm to write to")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)
