"""`swapper bench` and `swapper tune`: no figure without a proof, and nothing left behind but what was asked for."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from repository import ROOT
from typer.main import get_command
from typer.testing import CliRunner, Result

from swapper.bench import witness
from swapper.bench.contestants import NewFile, Transfers
from swapper.bench.fio import Fio, FioProgram, find_fio
from swapper.bench.measure import Contestant, ContestantFailed, Figure, Timing, alternate, drop_from_cache, time_here
from swapper.bench.site import EngineSettings, Site
from swapper.bench.sweep import default_sweep, demand, load_sweep, setting_name
from swapper.bench.witness import Operation, Proof, Witness, resident_bytes
from swapper.cli import app, chart, config_file, tune
from swapper.cli.config_file import aio_yaml, check_config_file, write_aio
from swapper.cli.deepspeed_flags import BenchCommand, TuneCommand, translated
from swapper.config import AioConfig, OffloadConfig
from swapper.errors import ConfigError, SwapError

SIZE = 8 << 20
SMALL = ["--size", "8MiB", "--block-size", "1MiB", "--queue-depth", "4", "--loops", "2"]

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def _no_default_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWAPPER_NVME_PATH", raising=False)


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


def swapper(*arguments: object, code: int = 0) -> Result:
    """Run a command in this process, and check how it ended."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    return result


def as_json(*arguments: object, code: int = 0) -> dict[str, Any]:
    data = json.loads(swapper(*arguments, "--json", code=code).stdout)
    assert isinstance(data, dict)
    return data


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


# --- The proof -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["read", "write"])
def test_direct_transfers_are_believed(site: Site, operation: Operation) -> None:
    with contextlib.ExitStack() as stack:
        lane = site.lane(stack, EngineSettings(block_bytes=1 << 20).open(stack))
        assert lane.file.direct
        figure = figure_of(Transfers("ours", operation, [lane]), rounds=3)
    assert not figure.refusal
    assert len(figure.timings) == 3
    assert all(timing.account_bytes >= SIZE for timing in figure.timings)


def test_a_read_from_the_page_cache_is_refused(data: Path) -> None:
    figure = figure_of(Scripted(data, "read", lambda: bool(data.read_bytes()) and False, warm=True))
    assert "the rest came from the page cache" in figure.refusal
    assert figure.as_json()["bandwidth_bps"] is None
    assert figure.as_json()["runs"] == []
    with pytest.raises(AssertionError, match="page cache"):
        _ = figure.bandwidth_bps


def test_a_read_of_which_half_was_cached_is_refused(data: Path) -> None:
    def read() -> bool:
        data.read_bytes()
        return False

    contestant = Scripted(data, "read", read)
    contestant.prepare()
    with open(data, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead beyond
        file.read(SIZE // 2)
    contestant.prepare = lambda: None  # type: ignore[method-assign]
    assert "came from the page cache" in figure_of(contestant).refusal


def test_a_buffered_read_of_a_dropped_file_is_believed(data: Path) -> None:
    figure = figure_of(Scripted(data, "read", lambda: bool(data.read_bytes()) and False))
    assert not figure.refusal


@pytest.mark.parametrize("synced", [True, False])
def test_a_buffered_write_is_believed_only_if_it_was_synced(data: Path, synced: bool) -> None:
    def write() -> bool:
        with open(data, "r+b") as file:
            file.write(bytes(SIZE))
            file.flush()
            if synced:
                os.fsync(file.fileno())
        return synced

    refusal = figure_of(Scripted(data, "write", write)).refusal
    assert bool(refusal) != synced
    if not synced:
        assert "not synced" in refusal


def test_a_write_that_claims_to_be_synced_is_caught_by_the_counters(data: Path) -> None:
    def write() -> bool:
        with open(data, "r+b") as file:
            file.write(bytes(SIZE))
        return True

    assert "counted" in figure_of(Scripted(data, "write", write)).refusal


def test_one_run_without_proof_spoils_the_figure_and_ends_it(data: Path) -> None:
    reads = itertools.count()

    def read() -> bool:
        if next(reads) == 1:
            data.read_bytes()  # Now it is warm; what follows is charged once only.
        else:
            data.read_bytes()
        return False

    contestant = Scripted(data, "read", read)
    prepare = contestant.prepare
    contestant.prepare = lambda: None if contestant.finished == 1 else prepare()  # type: ignore[method-assign]
    figure = figure_of(contestant, rounds=4)
    assert figure.refusal
    assert len(figure.timings) == 2
    assert [bool(proof.reason) for proof in figure.proofs] == [False, True]


def test_counters_that_stand_still_are_no_proof(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vdx").mkdir()
    (tmp_path / "vdx" / "stat").write_text("1 0 2000 0 1 0 3000 0 0 0 0\n")
    monkeypatch.setattr(witness, "_block", lambda number: tmp_path / "vdx")
    refusal = figure_of(Scripted(data, "read", lambda: bool(data.read_bytes()) and False)).refusal
    assert refusal == f"vdx counted 0.0 of {SIZE / 1e6:.1f} MB as read"


def test_counters_are_in_sectors_of_512_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = tmp_path / "vdx"
    block.mkdir()
    monkeypatch.setattr(witness, "_block", lambda number: block)
    seen = Witness([tmp_path])
    (block / "stat").write_text("1 0 1000 0 1 0 5000 0 0 0 0\n")
    seen.begin("write", [])
    for sectors, proven in ((1, False), (SIZE // 512 - 1000, False), (SIZE // 512, True)):
        (block / "stat").write_text(f"1 0 1000 0 1 0 {5000 + sectors} 0 0 0 0\n")
        proof = seen.judge("write", [tmp_path / "none"], SIZE, 0, True)
        assert proof.proven == proven


def test_what_others_move_on_the_drive_is_told(data: Path, drive: Path) -> None:
    other = drive / "other"
    other.write_bytes(os.urandom(4 * SIZE))
    drop_from_cache(other)

    def read() -> bool:
        data.read_bytes()
        other.read_bytes()
        return False

    figure = figure_of(Scripted(data, "read", read))
    assert not figure.refusal
    told = re.search(r"others moved up to ([0-9.]+) GB on the drive in 1 of 1 runs", figure.flag)
    assert told is not None, figure.flag
    assert float(told[1]) >= 0.03  # more where another program really is there


def test_without_a_device_an_account_or_a_cold_cache_is_needed(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(witness, "_blocks", lambda directory: [])
    seen = Witness([data.parent])
    assert "shows no device" in seen.describe()

    def judge(account_bytes: int) -> Proof:
        seen.begin("read", [data])
        return seen.judge("read", [data], SIZE, account_bytes, False)

    assert judge(0).proven, "nothing of it was in the page cache"
    data.read_bytes()
    assert not judge(0).proven
    assert judge(SIZE).proven, "the kernel charged it"


def test_memory_is_no_drive(memory: Path) -> None:
    assert "which is memory and no drive" in Witness([memory]).describe()
    path = memory / "data"
    path.write_bytes(bytes(SIZE))
    refusal = figure_of(Scripted(path, "read", lambda: bool(path.read_bytes()) and False)).refusal
    assert "which is memory" in refusal


def loop_device(*arguments: object) -> str:
    return subprocess.run(["losetup", *map(str, arguments)], check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.root
@pytest.mark.parametrize("direct", ["off", "on"])
def test_a_loop_device_is_believed_only_if_it_passes_by_the_page_cache(drive: Path, direct: str) -> None:
    if shutil.which("losetup") is None or shutil.which("mkfs.ext4") is None:
        pytest.skip("losetup and mkfs.ext4 are not here")
    image, mounted = drive / "image", drive / "mounted"
    mounted.mkdir()
    image.write_bytes(bytes(64 << 20))
    try:
        device = loop_device("--find", "--show", f"--direct-io={direct}", image)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no loop devices: {error.stderr.strip()}")
    try:
        subprocess.run(["mkfs.ext4", "-q", device], check=True)
        subprocess.run(["mount", device, mounted], check=True)
        try:
            (mounted / "site").mkdir()
            site = Site(mounted / "site", SIZE, "cpu")
            with contextlib.ExitStack() as stack:
                lane = site.lane(stack, EngineSettings(block_bytes=1 << 20).open(stack))
                figure = figure_of(Transfers("ours", "read", [lane]))
            del site
            if direct == "on":
                assert not figure.refusal
            else:
                assert "losetup --direct-io=on" in figure.refusal
        finally:
            subprocess.run(["umount", mounted], check=True)
    finally:
        loop_device("--detach", device)


def test_resident_bytes_are_those_in_the_page_cache(drive: Path) -> None:
    path = drive / "file"
    path.write_bytes(bytes(SIZE + 1))
    assert resident_bytes(path) == SIZE + 4096
    drop_from_cache(path)
    assert resident_bytes(path) == 0
    path.write_bytes(b"")
    assert resident_bytes(path) == 0


# --- Measuring -----------------------------------------------------------------------------------------------------


def test_contestants_alternate_in_changing_order_and_finish_each_time(data: Path) -> None:
    ran: list[str] = []

    def reader(name: str) -> Callable[[], bool]:
        def read() -> bool:
            ran.append(name)
            data.read_bytes()
            return False

        return read

    contestants = [Scripted(data, "read", reader(name), name=name) for name in "abcd"]
    figures = alternate(contestants, 5)
    rounds = ["".join(ran[i : i + 4]) for i in range(0, 20, 4)]
    assert [sorted(each) for each in rounds] == [list("abcd")] * 5
    assert len(set(rounds)) > 1
    assert [figure.name for figure in figures] == list("abcd")
    assert [contestant.finished for contestant in contestants] == [5] * 4


def test_a_contestant_that_fails_is_not_run_again_and_others_go_on(data: Path) -> None:
    def fail() -> bool:
        raise ContestantFailed("it has no engine")

    bad = Scripted(data, "read", fail)
    good = Scripted(data, "read", lambda: bool(data.read_bytes()) and False)
    figures = alternate([bad, good], 3)
    assert figures[0].refusal == "it has no engine"
    assert bad.finished == 1
    assert len(figures[1].timings) == 3


def test_an_error_of_ours_ends_everything_after_finishing(data: Path) -> None:
    def fail() -> bool:
        raise OSError("broken")

    bad = Scripted(data, "read", fail)
    with pytest.raises(OSError, match="broken"):
        alternate([bad], 3)
    assert bad.finished == 1


def test_figures_are_medians_with_their_range() -> None:
    figure = Figure("x", "read", 2 * 10**9, ("d",))
    for seconds, cpu_s in ((1.0, 0.2), (4.0, 0.6), (2.0, 0.4)):
        figure.timings.append(Timing(seconds, cpu_s, 0))
        figure.proofs.append(Proof(""))
    assert (figure.bandwidth_bps.median, figure.bandwidth_bps.min, figure.bandwidth_bps.max) == (1e9, 0.5e9, 2e9)
    assert figure.cpu_s_per_gb.median == pytest.approx(0.2)


@pytest.mark.parametrize("preallocate", [True, False])
def test_a_first_write_makes_a_new_file_each_time_and_removes_it(site: Site, preallocate: bool) -> None:
    with contextlib.ExitStack() as stack:
        handle = EngineSettings(block_bytes=1 << 20).open(stack)
        contestant = NewFile("new", site.directory, handle, site.tensor, preallocate=preallocate)
        figure = figure_of(contestant, rounds=3)
    assert not figure.refusal
    assert len(figure.timings) == 3
    assert [path.name for path in site.directory.iterdir()] == ["data"]


# --- fio -----------------------------------------------------------------------------------------------------------

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


def make_fio(path: Path, engine: str = "libaio", operation: Operation = "read", files: Sequence[Path] = ()) -> Fio:
    program = find_fio()
    assert program is not None
    return Fio(program, engine, operation, files or [path], SIZE, block_bytes=1 << 20, queue_depth=4, threads=2)


@pytest.mark.parametrize("operation", ["read", "write"])
def test_what_fio_printed_is_understood(fake_fio: Callable[..., Any], data: Path, operation: Operation) -> None:
    calls = fake_fio()
    figure = figure_of(make_fio(data, operation=operation))
    assert not figure.refusal
    assert figure.timings[0].seconds == 0.25
    assert figure.timings[0].cpu_s == pytest.approx(0.05 * 0.2)
    (words,) = calls()
    assert {"--direct=1", "--thread", "--bs=1048576", "--iodepth=8", "--ioengine=libaio"} <= set(words)
    assert "--rw=write" in words if operation == "write" else {"--rw=rw", "--rwmixread=100"} <= set(words)


def test_a_fio_that_only_claims_to_have_read_is_refused(fake_fio: Callable[..., Any], data: Path) -> None:
    fake_fio(honest=False)
    assert "page cache" in figure_of(make_fio(data)).refusal


@pytest.mark.parametrize(
    ("how", "refusal"),
    [
        ({"after": "result = {}"}, "cannot be understood"),
        ({"after": "result['jobs'][0]['error'] = 28"}, "No space left on device"),
        ({"after": "job[operation]['io_bytes'] -= 1"}, f"moved {SIZE - 1} bytes instead of {SIZE}"),
        ({"after": "job[operation]['runtime'] = 0"}, "less than a millisecond"),
        ({"before": "sys.exit('fio: engine libaio not loadable')"}, "status 1: fio: engine libaio not loadable"),
    ],
    ids=["no-jobs", "error", "short", "no-time", "exit-status"],
)
def test_a_fio_that_failed_has_no_figure(
    fake_fio: Callable[..., Any], data: Path, how: dict[str, str], refusal: str
) -> None:
    fake_fio(**how)
    assert refusal in figure_of(make_fio(data)).refusal


def test_fio_runs_without_registered_buffers_where_they_are_refused(fake_fio: Callable[..., Any], data: Path) -> None:
    calls = fake_fio(before="if 'fixedbufs' in options: sys.exit('mlock')")
    assert not figure_of(make_fio(data, engine="io_uring"), rounds=2).refusal
    assert ["--fixedbufs=1" in words for words in calls()] == [True, False, False]


def test_several_files_are_one_job_of_fio(fake_fio: Callable[..., Any], drive: Path) -> None:
    names = [drive / "a", drive / "b:c"]
    (words,) = [make_fio(drive, files=names).command() for _ in (fake_fio(),)]
    assert f"--filename={drive}/a:{drive}/b\\:c" in words
    assert f"--size={2 * SIZE}" in words
    assert "--iodepth=16" in words


def test_fio_that_cannot_be_started_has_no_figure(data: Path, tmp_path: Path) -> None:
    program = FioProgram(str(tmp_path / "gone"), "fio-0")
    fio = Fio(program, "libaio", "read", [data], SIZE, block_bytes=1 << 20, queue_depth=4, threads=1)
    assert "cannot be started" in figure_of(fio).refusal


def test_the_fio_that_is_installed_reads_and_writes(site: Site) -> None:
    if find_fio() is None:
        pytest.skip("fio is not installed")
    contestants = [make_fio(site.path, operation=operation) for operation in ("read", "write")]
    for figure in alternate(contestants, 2):
        # Too short for its clock on a fast drive is fair; anything else is not.
        assert not figure.refusal or "less than a millisecond" in figure.refusal


# --- swapper bench -------------------------------------------------------------------------------------------------


def test_bench_prints_a_table_and_leaves_nothing(leaves_nothing_on: Path, fake_fio: Callable[..., Any]) -> None:
    fake_fio()
    output = swapper("bench", "--dir", leaves_nothing_on, *SMALL).stdout
    for name in ("swapper ", "aio, 4 KiB pages", "fio libaio", "fio io_uring", "torch.load", "torch.save + fsync"):
        assert f"\n{name}" in output, output
    assert "swapper, new file, preallocated" in output
    assert "proof: " in output
    assert f"read, {leaves_nothing_on}\n" in output
    assert "not shown" not in output


def test_bench_json_has_every_figure(leaves_nothing_on: Path, fake_fio: Callable[..., Any]) -> None:
    fake_fio()
    result = as_json("bench", "--dir", leaves_nothing_on, *SMALL)
    assert set(result) == {
        "version",
        "machine",
        "directories",
        "settings",
        "backend",
        "fio",
        "proof",
        "figures",
        "notes",
    }
    assert result["fio"] == "fio-9.99"
    assert result["settings"]["size_bytes"] == SIZE
    assert result["settings"]["block_bytes"] == 1 << 20
    names = [(figure["operation"], figure["contestant"]) for figure in result["figures"]]
    assert len(set(names)) == len(names)
    for figure in result["figures"]:
        assert not figure["refusal"]
        assert figure["directories"] == [str(leaves_nothing_on)]
        assert figure["bandwidth_bps"]["min"] <= figure["bandwidth_bps"]["median"] <= figure["bandwidth_bps"]["max"]
        assert len(figure["runs"]) == 2
        assert all(run["seconds"] > 0 for run in figure["runs"])
    fio = [figure for figure in result["figures"] if figure["contestant"].startswith("fio ")]
    assert fio[0]["bandwidth_bps"]["median"] == SIZE / 0.25
    ours = next(figure for figure in result["figures"] if figure["contestant"] == f"swapper {result['backend']}")
    assert ours["of_fio"] == pytest.approx(ours["bandwidth_bps"]["median"] / (SIZE / 0.25))


def test_bench_without_fio_says_so_and_goes_on(leaves_nothing_on: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    output = swapper("bench", "--dir", leaves_nothing_on, *SMALL, "--no-torch", "--no-write").stdout
    assert "note: fio is not installed" in output
    assert "\nfio" not in output


def test_bench_with_a_fio_that_fails_shows_the_reason_and_ends_with_1(
    leaves_nothing_on: Path, fake_fio: Callable[..., Any]
) -> None:
    fake_fio(before="sys.exit('no such engine')")
    result = swapper("bench", "--dir", leaves_nothing_on, *SMALL, "--no-torch", "--no-write", code=1)
    assert "not shown: fio libaio failed with exit status 1: no such engine" in result.stdout
    assert "no figure for read, fio libaio: " in result.stderr


def test_bench_in_memory_is_refused(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = as_json("bench", "--dir", memory, *SMALL, "--no-fio", code=1)
    assert result["figures"]
    assert all(figure["refusal"] and figure["bandwidth_bps"] is None for figure in result["figures"])
    table = swapper("bench", "--dir", memory, *SMALL, "--no-fio", code=1).stdout
    assert "GB/s" in table
    assert "not shown: " in table
    assert not list(memory.iterdir())
    monkeypatch.setenv("SWAPPER_ALLOW_TMPFS", "0")
    assert "which is memory" in swapper("bench", "--dir", memory, *SMALL, code=1).stderr


def test_bench_measures_every_backend(leaves_nothing_on: Path) -> None:
    from swapper.io.handle import probe

    arguments = ["bench", "--dir", leaves_nothing_on, *SMALL, "--all-backends", "--no-fio", "--no-torch"]
    result = as_json(*arguments)
    names = {figure["contestant"] for figure in result["figures"]}
    for found in probe():
        assert (f"swapper {found.backend}" in names) == found.available
        assert any(note.startswith(f"{found.backend} is not available") for note in result["notes"]) != found.available


def test_bench_of_two_directories_shows_each_and_both(leaves_nothing_on: Path, fake_fio: Callable[..., Any]) -> None:
    fake_fio()
    with (
        tempfile.TemporaryDirectory(dir=leaves_nothing_on) as one,
        tempfile.TemporaryDirectory(dir=leaves_nothing_on) as two,
    ):
        result = as_json("bench", "--dir", one, "--dir", two, *SMALL, "--no-torch")
        output = swapper("bench", "--dir", one, "--dir", two, *SMALL, "--no-torch", "--no-read").stdout
        assert not os.listdir(one) + os.listdir(two)
    ours = [figure for figure in result["figures"] if figure["contestant"] == f"swapper {result['backend']}"]
    assert [figure["directories"] for figure in ours if figure["operation"] == "read"] == [[one], [two], [one, two]]
    both = next(figure for figure in ours if len(figure["directories"]) == 2)
    assert both["moved_bytes"] == 2 * SIZE
    assert all(run["account_bytes"] >= 2 * SIZE for run in both["runs"])
    assert f"write, {one} + {two} side by side" in output
    assert "of the sum of each alone" in output


def png_size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert content.endswith(b"IEND\xaeB`\x82")
    width, height = struct.unpack(">II", content[16:24])
    return width, height


def test_bench_draws_a_picture(leaves_nothing_on: Path, tmp_path: Path) -> None:
    target = tmp_path / "bench.png"
    swapper("bench", "--dir", leaves_nothing_on, *SMALL, "--no-fio", "--plot", target)
    width, height = png_size(target)
    assert width == chart.WIDTH_PIXELS
    assert 600 < height < 2000


def test_a_picture_shows_what_has_no_proof_without_a_bar(tmp_path: Path) -> None:
    believed, refused = (Figure(name, "read", 10**9, ("d",)) for name in ("fio libaio", "swapper uring"))
    believed.timings.append(Timing(1.0, 0.0, 0))
    believed.proofs.append(Proof(""))
    refused.error = "no proof"
    for figures in ([believed, refused], [refused]):
        chart.draw(tmp_path / "x.png", figures, title="x", below="y")
        assert png_size(tmp_path / "x.png")[0] == chart.WIDTH_PIXELS


def test_a_picture_that_cannot_be_drawn_is_refused_before_measuring(
    leaves_nothing_on: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["bench", "--dir", leaves_nothing_on, *SMALL]
    assert "ends in .png" in swapper(*arguments, "--plot", tmp_path / "x.jpg", code=1).stderr
    assert "no file can be written" in swapper(*arguments, "--plot", tmp_path / "no" / "x.png", code=1).stderr
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install tensor-swapper[plot]" in swapper(*arguments, "--plot", tmp_path / "x.png", code=1).stderr


def test_a_full_drive_is_refused_before_anything_is_written(leaves_nothing_on: Path) -> None:
    space = os.statvfs(leaves_nothing_on)
    size = (space.f_bavail * space.f_frsize // (4 << 20) + 1) * (4 << 20)
    before = leaves_nothing_on.stat().st_mtime_ns
    time.sleep(0.02)
    error = swapper("bench", "--dir", leaves_nothing_on, "--size", size, "--no-write", "--no-torch", code=1).stderr
    assert "are needed and" in error
    assert "nothing was written" in error
    # `check_nvme_path` tries a file without a name, so that the directory stays as it was.
    assert leaves_nothing_on.stat().st_mtime_ns == before


def test_directories_on_one_drive_need_the_sum(leaves_nothing_on: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs

    def small(path: Path) -> os.statvfs_result:
        values = list(real(path))
        values[4] = (60 << 20) // values[1]  # blocks that are free for this user
        return os.statvfs_result(values)

    names = []
    for name in "ab":
        (leaves_nothing_on / name).mkdir()
        names += ["--dir", leaves_nothing_on / name]
    monkeypatch.setattr(os, "statvfs", small)
    options = [*SMALL, "--no-fio", "--no-torch", "--no-write"]
    swapper("bench", *names[:2], *options, "--size", "32MiB")
    error = swapper("bench", *names, *options, "--size", "32MiB", code=1).stderr
    assert "96 MiB are needed and 60 MiB free" in error
    for name in "ab":
        (leaves_nothing_on / name).rmdir()


def test_too_little_memory_is_refused(leaves_nothing_on: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from swapper.bench import workspace
    from swapper.bench.machine import machine

    here = replace(machine(), memory_available_bytes=20 << 20)
    monkeypatch.setattr(workspace, "machine", lambda: here)
    assert "of memory are needed" in swapper("bench", "--dir", leaves_nothing_on, *SMALL, code=1).stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--size", "3MiB"], 2, "not a multiple of the block size"),
        (["--size", "many"], 2, "many"),
        (["--block-size", "5000"], 2, "multiple of 4096"),
        (["--backend", "magic"], 2, "none of auto"),
        (["--device", "tpu"], 2, "neither cpu nor cuda"),
        (["--no-read", "--no-write"], 2, "nothing to measure"),
        (["--loops", "0"], 2, "--loops"),
        (["--gds"], 2, "it needs `bench --device cuda`"),
        (["--dir", "/nowhere"], 1, "mkdir -p /nowhere"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments_of_bench_are_named(
    leaves_nothing_on: Path, arguments: list[str], code: int, message: str
) -> None:
    assert message in swapper("bench", "--dir", leaves_nothing_on, *arguments, code=code).stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("command", [["bench", "--device", "cuda", "--dir"], ["tune", "--gpu", "--nvme-dir"]])
def test_a_device_that_is_not_there_is_refused_in_a_sentence(leaves_nothing_on: Path, command: list[str]) -> None:
    assert "torch finds no CUDA device here" in swapper(*command, leaves_nothing_on, code=1).stderr


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_bench_and_tune_move_tensors_of_the_gpu(leaves_nothing_on: Path) -> None:
    result = as_json("bench", "--dir", leaves_nothing_on, *SMALL, "--device", "cuda", "--gds", "--no-fio")
    assert all(not figure["refusal"] for figure in result["figures"])
    assert {"swapper gds, cuda", "torch.load"} <= {figure["contestant"] for figure in result["figures"]}
    swapper("tune", "--nvme-dir", leaves_nothing_on, "--gpu", "--io-size", "8MiB", "--loops", 1)


def test_a_failing_write_is_an_error_and_leaves_nothing(
    leaves_nothing_on: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from swapper.errors import SwapIOError
    from swapper.io.handle import Transfer

    waited = itertools.count()
    real = Transfer.wait

    def wait(self: Transfer, timeout: float | None = None) -> int:
        moved = real(self, timeout)
        if next(waited) == 4:
            raise SwapIOError(5, "write", self.path, 0, moved)
        return moved

    monkeypatch.setattr(Transfer, "wait", wait)
    error = swapper("bench", "--dir", leaves_nothing_on, *SMALL, "--no-fio", code=1).stderr
    assert "Input/output error" in error


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize(
    "command", [["bench", "--loops", "100000", "--dir"], ["tune", "--loops", "9999", "--nvme-dir"]]
)
def test_a_signal_ends_it_and_leaves_nothing(
    leaves_nothing_on: Path, command: list[str], signum: signal.Signals
) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    size = "--size" if command[0] == "bench" else "--io-size"
    words = [sys.executable, "-m", "swapper", *command, str(leaves_nothing_on), size, "16MiB"]
    with subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True) as run:
        try:
            deadline_s = time.monotonic() + 60
            while not list(leaves_nothing_on.glob("*/data")):
                assert run.poll() is None and time.monotonic() < deadline_s, run.communicate()
                time.sleep(0.01)
            time.sleep(0.5)
            run.send_signal(signum)
            error = run.communicate(timeout=60)[1]
        finally:
            run.kill()
    assert run.returncode in (130, 128 + signum), error
    assert "Traceback" not in error


# --- swapper tune --------------------------------------------------------------------------------------------------

QUICK = ["--io-size", "8MiB", "--loops", "1"]


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    path = tmp_path / "sweep.json"
    path.write_text('{"block_size": ["512K", "1M"], "queue_depth": [2, 8], "overlap_events": [true, false]}')
    return path


def test_the_output_of_tune_is_a_config(leaves_nothing_on: Path, sweep: Path, tmp_path: Path) -> None:
    result = swapper("tune", "--nvme-dir", leaves_nothing_on, "--sweep-config", sweep, *QUICK)
    config = tmp_path / "config.yaml"
    config.write_text(result.stdout)
    assert set(yaml.safe_load(result.stdout)) == {"aio"}
    aio = OffloadConfig.load(config).aio
    assert aio in load_sweep(sweep)
    assert yaml.safe_load(result.stdout)["aio"].keys() == AioConfig.model_fields.keys()
    assert "chosen" in result.stderr


def test_tune_takes_the_flags_of_deepspeed(leaves_nothing_on: Path, tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    path.write_text('{"block_size": ["1M"], "io_parallel": [1], "sequential_requests": [true, false]}')
    logs = tmp_path / "logs"
    arguments = ["--sweep_config", path, "--io_size=8M", "--loops", 1, "--no_read", "--flush_page_cache"]
    directories = [tempfile.mkdtemp(dir=leaves_nothing_on) for _ in range(2)]
    swapper("tune", "--nvme_dir", *directories, *arguments, "--log_dir", logs, "--verbose")
    summary = json.loads((logs / "summary.json").read_text())
    assert summary["directories"] == directories
    assert summary["io_size_bytes"] == 8 << 20
    assert [setting["overlap_events"] for setting in summary["settings"]] == [False, True]
    assert not list(logs.glob("read-*"))
    for directory in directories:
        os.rmdir(directory)


DS_IO = {
    "--folder /a": ["--dir", "/a"],
    "--folder=/a": ["--dir", "/a"],
    "--folder_to_device_mapping /a:0 /b:1": ["--dir", "/a", "--dir", "/b"],
    "--io_size 1G --block_size 512K --queue_depth 8 --io_parallel 2": [
        *["--size", "1GiB", "--block-size", "512KiB", "--queue-depth", "8", "--threads", "2"]
    ],
    "--gpu --use_gds --read": ["--device", "cuda", "--gds", "--read"],
    "--dir /a /b --loops 3": ["--dir", "/a", "--dir", "/b", "--loops", "3"],
    "--loops": ["--loops"],
}


@pytest.mark.parametrize("flags", DS_IO)
def test_bench_takes_the_flags_of_ds_io(flags: str) -> None:
    assert translated(BenchCommand.flags, flags.split())[0] == DS_IO[flags]


def test_every_flag_of_deepspeed_is_taken_or_said() -> None:
    of_io = (
        "--folder=x --folder_to_device_mapping=x:1 --io_size=1M --fast_io_size=1M --read --multi_process=2 "
        "--block_size=1M --queue_depth=2 --single_submit --sequential_requests --validate --engine=aio_handle "
        "--loops=1 --io_parallel=1 --gpu --use_gds --slow_bounce_buffer --torch_legacy_save "
        "--use_accelerator_pin_memory --warmup_loops=1 --include_warmup_time --different_file_each_iteration"
    )
    of_tune = (
        "--nvme_dir=x --sweep_config=x --no_read --no_write --io_size=1M --gpu --gds --flush_page_cache --log_dir=x "
        "--loops=1 --verbose"
    )
    for command, flags in ((BenchCommand, of_io), (TuneCommand, of_tune)):
        name = "bench" if command is BenchCommand else "tune"
        known = {option for p in get_command(app).commands[name].params for option in (*p.opts, *p.secondary_opts)}
        for flag in flags.split():
            ours, said = translated(command.flags, [flag])
            assert said or ours
            assert {argument.partition("=")[0] for argument in ours if argument.startswith("--")} <= known
            if "=" in flag and not ours:  # Its value is not taken for something else when it stands alone.
                assert translated(command.flags, flag.split("=")) == (ours, said)


def test_a_flag_without_meaning_is_said(leaves_nothing_on: Path) -> None:
    result = swapper("bench", "--folder", leaves_nothing_on, "--validate", "--engine", "torch_io", "--size", 1, code=2)
    assert "bench: --validate has no effect: every figure comes with a proof" in result.stderr
    assert "bench: --engine has no effect: " in result.stderr


def test_tune_writes_a_new_config(leaves_nothing_on: Path, sweep: Path, tmp_path: Path) -> None:
    for name in ("new.yaml", "new.json"):
        config = tmp_path / name
        result = swapper(
            "tune", "--nvme-dir", leaves_nothing_on, "--sweep-config", sweep, *QUICK, "--write-config", config
        )
        loaded = OffloadConfig.load(config)
        assert loaded.nvme_path == leaves_nothing_on
        assert loaded.aio.model_dump(mode="json") == yaml.safe_load(result.stdout)["aio"]


def test_tune_logs_every_setting_and_a_summary(leaves_nothing_on: Path, sweep: Path, tmp_path: Path) -> None:
    logs = tmp_path / "a" / "logs"
    swapper(
        *["tune", "--nvme-dir", leaves_nothing_on, "--sweep-config", sweep, "--io-size", "8MiB", "--loops", 2],
        *["--log-dir", logs, "--no-write", "--verbose"],
    )
    settings = load_sweep(sweep)
    names = {f"read-{setting_name(setting)}.json" for setting in settings}
    assert {path.name for path in logs.iterdir()} == {*names, "summary.json"}
    assert len(names) == 8
    one = json.loads((logs / min(names)).read_text())
    assert len(one["runs"]) == 2
    assert one["directories"] == [str(leaves_nothing_on)]
    summary = json.loads((logs / "summary.json").read_text())
    assert AioConfig(**summary["chosen"]) in settings
    assert len(summary["settings"]) == 8
    assert all(setting["read_bps"] and "write_bps" not in setting for setting in summary["settings"])


def test_tune_of_two_directories_uses_both(leaves_nothing_on: Path, sweep: Path, tmp_path: Path) -> None:
    with (
        tempfile.TemporaryDirectory(dir=leaves_nothing_on) as one,
        tempfile.TemporaryDirectory(dir=leaves_nothing_on) as two,
    ):
        swapper(
            *["tune", "--nvme-dir", one, "--nvme-dir", two, "--sweep-config", sweep, *QUICK, "--log-dir", tmp_path],
            *["--flush-page-cache"],
        )
    logged = json.loads(next(tmp_path.glob("read-*.json")).read_text())
    assert logged["directories"] == [one, two]
    assert logged["moved_bytes"] == 2 * SIZE


def test_a_setting_that_the_machine_refuses_is_named_and_left_out(
    leaves_nothing_on: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from swapper.io import handle

    refused = tuple(
        found._replace(available=False, reason="not today") if found.backend == "aio" else found
        for found in handle.probe()
    )
    monkeypatch.setattr(handle, "probe", lambda: refused)
    path = tmp_path / "sweep.yaml"
    path.write_text("backend: [aio, threads]\n")
    result = swapper("tune", "--nvme-dir", leaves_nothing_on, "--sweep-config", path, *QUICK)
    assert "no figure for aio-1MiB-d32-t1: the I/O backend 'aio' is not available here: aio: not today" in result.stderr
    assert yaml.safe_load(result.stdout)["aio"]["backend"] == "threads"
    path.write_text("backend: aio\n")
    error = swapper("tune", "--nvme-dir", leaves_nothing_on, "--sweep-config", path, *QUICK, code=1).stderr
    assert "there is no figure for any setting" in error


def test_tune_in_memory_is_refused(memory: Path, sweep: Path) -> None:
    result = swapper("tune", "--nvme-dir", memory, "--sweep-config", sweep, *QUICK, code=1)
    assert "which is memory" in result.stderr
    assert result.stdout == ""


def scored(setting: AioConfig, read_bps: float, write_bps: float) -> tune.Score:
    figures = []
    for operation, bps in (("read", read_bps), ("write", write_bps)):
        figure = Figure(setting_name(setting), operation, 10**9, ("d",))  # type: ignore[arg-type]
        figure.timings.append(Timing(10**9 / bps, 0.0, 0))
        figure.proofs.append(Proof(""))
        figures.append(figure)
    return tune.Score(setting, figures)


def test_the_score_is_the_time_to_read_and_write_the_same() -> None:
    assert scored(AioConfig(), 1e9, 3e9).bandwidth_bps == pytest.approx(1.5e9)


def test_the_least_demanding_setting_within_the_noise_is_chosen() -> None:
    fastest = scored(AioConfig(queue_depth=128, intra_op_parallelism=4), 3.0e9, 3.0e9)
    near = scored(AioConfig(queue_depth=32), 2.95e9, 2.95e9)
    nearer_but_deeper = scored(AioConfig(queue_depth=64), 2.99e9, 2.99e9)
    slow = scored(AioConfig(queue_depth=8), 2.9e9, 2.9e9)
    scores = [fastest, near, nearer_but_deeper, slow]
    for order in itertools.permutations(scores):
        assert tune.choose(order) is near
    near.figures[0].error = "no proof"
    assert tune.choose(scores) is nearer_but_deeper


def test_no_figure_at_all_is_an_error() -> None:
    score = scored(AioConfig(), 1e9, 1e9)
    score.figures[1].error = "the page cache"
    with pytest.raises(SwapError, match="no figure for any setting: the page cache"):
        tune.choose([score])


def test_demand_counts_threads_before_bytes_before_requests() -> None:
    order = [
        AioConfig(block_size="4MiB", queue_depth=8),
        AioConfig(block_size="1MiB", queue_depth=32),
        AioConfig(block_size="1MiB", queue_depth=32, single_submit=True),
        AioConfig(block_size="1MiB", queue_depth=64),
        AioConfig(block_size="4KiB", queue_depth=1, intra_op_parallelism=2),
    ]
    assert all(sorted(some, key=demand) == order for some in itertools.permutations(order))


def test_the_default_sweep_is_short_and_distinct() -> None:
    settings = default_sweep()
    assert 4 <= len(settings) <= 48
    assert len({setting_name(setting) for setting in settings}) == len(settings)


# --- Sweep files ---------------------------------------------------------------------------------------------------


def test_a_sweep_file_for_deepspeed_is_accepted_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    path.write_text(
        '{"block_size": ["128K", "1M", "8M"], "queue_depth": [32, 128], "io_parallel": [1, 8], '
        '"overlap_events": [true, false], "single_submit": [false]}'
    )
    settings = load_sweep(path)
    assert len(settings) == 3 * 2 * 2 * 2
    assert {setting.block_size for setting in settings} == {128 << 10, 1 << 20, 8 << 20}
    assert {setting.intra_op_parallelism for setting in settings} == {1, 8}
    assert all(setting.overlap_events in (True, False) and setting.single_submit is False for setting in settings)


def test_a_sweep_file_may_be_yaml_with_single_values_and_repetitions(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text("block_size: [1MiB, 1048576, 1M]\nqueue_depth: 7\nbackend: [threads, auto]\n")
    assert load_sweep(path) == [
        AioConfig(block_size=1 << 20, queue_depth=7, backend="threads"),
        AioConfig(block_size=1 << 20, queue_depth=7, backend="auto"),
    ]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("s.json", "{}", "there is nothing to try"),
        ("s.json", "", "the file is empty"),
        ("s.json", "[1]", "is not a mapping"),
        ("s.json", '{"queue_depth": [1', "not valid JSON"),
        ("s.yaml", "a: b: c", "not valid YAML"),
        ("s.json", '{"depth": [1]}', "depth: unknown key"),
        ("s.json", '{"queue_depth": []}', "queue_depth: [] is not a list of values to try"),
        ("s.json", '{"queue_depth": {"from": 1}}', "is not a list of values to try"),
        ("s.json", '{"queue_depth": [8, 0]}', "queue_depth: 0 is not allowed; write a whole number from 1 to 4096"),
        ("s.json", '{"io_parallel": [65]}', "io_parallel: 65 is not allowed"),
        ("s.json", '{"io_parallel": [1], "intra_op_parallelism": [2]}', "another name of 'intra_op_parallelism'"),
        ("s.json", '{"block_size": ["1000"]}', "block_size: 1000 bytes"),
        ("s.json", '{"block_size": ["1.5M"]}', "can mean two sizes"),
        ("s.json", '{"block_size": [true]}', "True is not a size"),
        ("s.json", '{"overlap_events": ["yes"]}', "overlap_events: 'yes' is not a switch"),
        ("s.json", '{"backend": ["buffered"]}', "backend: 'buffered' is not one of auto, uring, aio, threads"),
    ],
)
def test_a_bad_sweep_file_is_refused_by_name(
    leaves_nothing_on: Path, tmp_path: Path, name: str, text: str, message: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_sweep(path)
    assert message in str(caught.value)
    assert all(line.startswith(str(path)) for line in str(caught.value).splitlines())
    assert str(path) in swapper("tune", "--nvme-dir", leaves_nothing_on, "--sweep-config", path, code=1).stderr


def test_every_bad_value_of_a_sweep_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    path.write_text('{"queue_depth": [0, 8, -1], "block_size": ["100"], "nonsense": 1}')
    with pytest.raises(ConfigError) as caught:
        load_sweep(path)
    assert len(str(caught.value).splitlines()) == 4


# --- The aio section of a config -----------------------------------------------------------------------------------

TUNED = AioConfig(block_size="4MiB", queue_depth=8, intra_op_parallelism=2, backend="threads")

BEFORE = """\
# My run.
nvme_path: /mnt/nvme   # the fast one

pool_bytes: 2GiB
{aio}
# What is offloaded.
offload_optimizer:
  device: nvme  # all of it
"""


@pytest.mark.parametrize(
    "aio",
    [
        "",
        "aio:",
        "aio: {}",
        "aio: {queue_depth: 3}  # short",
        "aio:\n  queue_depth: 3\n  backend: aio",
        "aio:\n  # deep\n  queue_depth: 3  # three",
        'aio: {\n  "queue_depth": 3\n}',
        '"aio":\n  block_size: >-\n    1MiB',
    ],
    ids=["absent", "empty", "flow-empty", "flow", "block", "comments", "flow-over-lines", "folded"],
)
def test_the_aio_section_is_replaced_and_the_rest_kept_to_the_character(tmp_path: Path, aio: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(BEFORE.format(aio=aio))
    path.chmod(0o640)
    check_config_file(path, [])
    assert path.read_text() == BEFORE.format(aio=aio), "a check changes nothing"
    write_aio(path, TUNED, [])
    new = aio_yaml(TUNED).rstrip("\n")
    assert path.read_text() == (BEFORE.format(aio=new) if aio else BEFORE.format(aio="") + new + "\n")
    loaded = OffloadConfig.load(path)
    assert loaded.aio == TUNED
    assert loaded.pool_bytes == 2 << 30
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.yaml"]


def test_the_last_section_without_a_line_end_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "config.yml"
    path.write_text("pool_bytes: 2GiB\naio:\n  queue_depth: 3")
    write_aio(path, TUNED, [])
    assert path.read_text() == "pool_bytes: 2GiB\n" + aio_yaml(TUNED)
    path.write_text("pool_bytes: 2GiB")
    write_aio(path, TUNED, [])
    assert path.read_text() == "pool_bytes: 2GiB\n" + aio_yaml(TUNED)


def test_a_json_config_keeps_its_other_values(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"$schema": "schema.json", "pool_bytes": "2GiB", "aio": {"queue_depth": 3}}')
    write_aio(path, TUNED, [])
    written = json.loads(path.read_text())
    assert written == {"$schema": "schema.json", "pool_bytes": "2GiB", "aio": TUNED.model_dump(mode="json")}
    assert OffloadConfig.load(path).aio == TUNED


def test_a_link_to_a_config_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real.yaml").write_text("pool_bytes: 2GiB\n")
    link = tmp_path / "link.yaml"
    link.symlink_to("real.yaml")
    write_aio(link, TUNED, [])
    assert link.is_symlink()
    assert OffloadConfig.load(tmp_path / "real.yaml").aio == TUNED


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.yaml", "{pool_bytes: 2GiB}\n", "only a file with a setting on each line"),
        ("c.yaml", "pool_bites: 2GiB\n", "unknown key; did you mean 'pool_bytes'?"),
        ("c.yaml", "aio: {queue_depth: 0}\n", "aio.queue_depth: 0 is not allowed"),
        ("c.yaml", "# nothing\n", "comments only"),
        ("c.toml", "", "ends in .yaml, .yml or .json"),
        ("no/c.yaml", None, "no file can be written there"),
    ],
    ids=["flow", "unknown-key", "bad-aio", "comments-only", "toml", "no-directory"],
)
def test_a_config_that_cannot_be_changed_is_refused_before_measuring(
    leaves_nothing_on: Path, tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    error = swapper("tune", "--nvme-dir", leaves_nothing_on, *QUICK, "--write-config", path, code=1).stderr
    assert message in error
    assert (path.read_text() if path.exists() else None) == text


def test_an_aio_section_that_others_refer_to_is_not_cut_out(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    text = "aio: &mine\n  queue_depth: 3\noffload_param:\n  resident_bytes: 0\ncheckpoint: {keep_last: null}\n"
    path.write_text(text)
    write_aio(path, TUNED, [])
    assert OffloadConfig.load(path).aio == TUNED
    text = "offload_param: &none {}\naio: *none\n"
    path.write_text(text)
    write_aio(path, TUNED, [])
    assert path.read_text() == "offload_param: &none {}\n" + aio_yaml(TUNED)
    text = "aio: &none {}\noffload_param: *none\n"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        write_aio(path, TUNED, [])
    assert path.read_text() == text


def test_a_change_of_anything_else_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("pool_bytes: 2GiB\n")
    monkeypatch.setattr(config_file, "_with_section", lambda text, section, path: "pool_bytes: 3GiB\n" + section)
    with pytest.raises(ConfigError, match="cannot be replaced alone"):
        write_aio(path, TUNED, [])
    assert path.read_text() == "pool_bytes: 2GiB\n"


# --- The benchmark -------------------------------------------------------------------------------------------------


def test_the_benchmark_prints_every_row_and_leaves_nothing(
    leaves_nothing_on: Path, fake_fio: Callable[..., Any]
) -> None:
    fake_fio()
    words = [sys.executable, str(ROOT / "benchmarks" / "io_engine.py"), "--nvme-path", str(leaves_nothing_on)]
    words += ["--rounds", "2", "--size", "8MiB", "--block-size", "1MiB", "--queue-depth", "4"]
    ended = subprocess.run(words, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    for row in (
        "bandwidth, read, of fio",
        "bandwidth, write, of fio",
        "preallocated, of not",
        "CPU, read, of DeepNVMe-style",
        "many of 256 KiB, write, of one",
        "verify, read, of without",
        "CPU of verify, write",
    ):
        assert f"\n{row}" in ended.stdout, ended.stdout
    (page_cache,) = [line for line in ended.stdout.splitlines() if line.startswith("page cache")]
    assert "PASS" in page_cache
    assert "a warm buffered read is refused" in page_cache


def test_the_benchmark_without_a_drive_ends_well(memory: Path) -> None:
    words = [sys.executable, str(ROOT / "benchmarks" / "io_engine.py"), "--nvme-path", str(memory), "--rounds", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SWAPPER_ALLOW_TMPFS": "0"}
    ended = subprocess.run([*words, "--size", "4MiB"], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0
    assert "nothing was measured" in ended.stdout
