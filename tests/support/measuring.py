"""Files on a drive, and what is measured on them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from swapper.bench.measure import Contestant, Figure, Timing, alternate, drop_from_cache, time_here
from swapper.bench.site import Site
from swapper.bench.witness import Operation

SIZE = 8 << 20


class Scripted(Contestant):
    """Whatever a test wants to be timed."""

    def __init__(
        self,
        path: Path,
        operation: Operation,
        move: Callable[[], bool],
        warm: bool = False,
        name: str = "scripted",
        length_bytes: int = SIZE,
    ) -> None:
        super().__init__(name, operation, [path], length_bytes)
        self.move = move
        self.warm = warm
        self.finished = 0

    def prepare(self) -> None:
        if self.warm:
            self.files[0].read_bytes()
        else:
            super().prepare()

    def run(self) -> Timing:
        return time_here(self.operation, self.move)

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def data(drive: Path) -> Path:
    """A file of `SIZE` random bytes."""
    path = drive / "data"
    path.write_bytes(os.urandom(SIZE))
    drop_from_cache(path)
    return path


@pytest.fixture
def site(drive: Path) -> Site:
    directory = drive / "site"
    directory.mkdir()
    return Site(directory, SIZE, "cpu")


def figure_of(contestant: Contestant, rounds: int = 1) -> Figure:
    (figure,) = alternate([contestant], rounds)
    return figure


FAKE = r"""#!{python}
import json, os, subprocess, sys
if sys.argv[1:] == ["--version"]:
    print("fio-9.99")
    raise SystemExit
options = dict(word[2:].partition("=")[::2] for word in sys.argv[1:])
with open({log!r}, "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\n")
operation = "write" if options["rw"] == "write" else "read"
moved = int(options["size"])
{before}
if {honest}:
    for name in options["filename"].split(":"):
        target = ["if=/dev/zero", "of=" + name, "oflag=direct", "conv=notrunc"]
        source = ["if=" + name, "of=/dev/null", "iflag=direct"]
        words = target if operation == "write" else source
        count = "count=%d" % (moved // (1 << 20) // len(options["filename"].split(":")))
        subprocess.run(["dd", "bs=1M", count, *words], check=True, stderr=subprocess.DEVNULL)
job = {{"error": 0, "usr_cpu": 2.0, "sys_cpu": 3.0, "job_runtime": 200}}
job["read"] = job["write"] = {{"io_bytes": 0, "runtime": 0}}
job[operation] = {{"io_bytes": moved, "runtime": 250}}
result = {{"jobs": [job]}}
{after}
print("note: something about iodepth")
print(json.dumps(result))
"""


@pytest.fixture
def fake_fio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Callable[[], list[list[str]]]]:
    """Put a fio on PATH that does what is said. What it returns gives the command lines it was called with."""

    def install(*, before: str = "", after: str = "", honest: bool = True) -> Callable[[], list[list[str]]]:
        log = tmp_path / "fio.log"
        directory = tmp_path / "bin"
        directory.mkdir()
        program = directory / "fio"
        program.write_text(FAKE.format(python=sys.executable, log=str(log), before=before, after=after, honest=honest))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
        return lambda: [json.loads(line) for line in log.read_text().splitlines()]

    return install
