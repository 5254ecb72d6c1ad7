"""`swapper bench`: no figure without a proof, and nothing left behind but what was asked for."""

from __future__ import annotations

import itertools
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import as_json, swapper
from isolation import alone
from launcher import Program, run_program
from locked_memory import needs_locked_memory
from measuring import SIZE
from repository import ROOT

from swapper.bench.measure import Figure, Timing
from swapper.bench.site import EngineSettings
from swapper.bench.witness import Proof
from swapper.cli import chart
from swapper.errors import SwapError

SMALL = ["--size", "8MiB", "--block-size", "1MiB", "--queue-depth", "4", "--loops", "2"]

pytestmark = pytest.mark.timeout(240)


# --- swapper bench -------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_bench_prints_a_table_and_leaves_nothing(leaves_nothing_on: Path, fake_fio: Callable[..., Any]) -> None:
    fake_fio()
    output = swapper("bench", "--dir", leaves_nothing_on, *SMALL).stdout
    for name in ("swapper ", "aio, 4 KiB pages", "fio libaio", "fio io_uring", "torch.load", "torch.save + fsync"):
        assert f"\n{name}" in output, output
    assert "swapper, new file, preallocated" in output
    assert "proof: " in output
    assert f"read, {leaves_nothing_on}\n" in output
    assert "not shown" not in output


@pytest.mark.long
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


@needs_locked_memory
def test_bench_measures_every_backend(leaves_nothing_on: Path) -> None:
    from swapper.io.handle import probe

    arguments = ["bench", "--dir", leaves_nothing_on, *SMALL, "--all-backends", "--no-fio", "--no-torch"]
    result = as_json(*arguments)
    names = {figure["contestant"] for figure in result["figures"]}
    for found in probe():
        assert (f"swapper {found.backend}" in names) == found.available
        assert any(note.startswith(f"{found.backend} is not available") for note in result["notes"]) != found.available


def test_a_backend_that_cannot_be_opened_is_a_note(leaves_nothing_on: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = EngineSettings.open

    def refused(settings: EngineSettings, *arguments: Any, **options: Any) -> Any:
        if settings.backend == "threads":
            raise SwapError("no memory for it")
        return opened(settings, *arguments, **options)

    monkeypatch.setattr(EngineSettings, "open", refused)
    result = as_json("bench", "--dir", leaves_nothing_on, *SMALL, "--all-backends", "--no-fio", "--no-torch")
    names = {figure["contestant"] for figure in result["figures"]}
    assert "swapper buffered" in names and "swapper threads" not in names
    assert "threads is not available: no memory for it" in result["notes"]


@pytest.mark.long
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
    assert "pip install matplotlib" in swapper(*arguments, "--plot", tmp_path / "x.png", code=1).stderr


def test_a_full_drive_is_refused_before_anything_is_written(leaves_nothing_on: Path) -> None:
    space = os.statvfs(leaves_nothing_on)
    # Of all of the drive: what is free of it, tests beside this one change meanwhile.
    size = (space.f_blocks * space.f_frsize // (4 << 20) + 1) * (4 << 20)
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
        (["--device", "tpu"], 2, "neither cpu nor an accelerator"),
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
    # In another process: this one may have the simulated device by now.
    assert "torch finds no cuda device here" in alone(refusal, *command, str(leaves_nothing_on))


def refusal(*command: str) -> str:
    return swapper(*command, code=1).stderr


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


@pytest.mark.long
@pytest.mark.sampled(2)
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
    with Program(words, env=environment, stderr=subprocess.PIPE, text=True) as run:
        try:
            deadline_s = time.monotonic() + 240
            while not list(leaves_nothing_on.glob("*/data")):
                assert run.poll() is None and time.monotonic() < deadline_s, run.communicate()
                time.sleep(0.01)
            time.sleep(0.5)
            run.send_signal(signum)
            error = run.communicate(timeout=240)[1]
        finally:
            run.kill()
    assert run.returncode in (130, 128 + signum), error
    assert "Traceback" not in error


# --- The benchmark -------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_benchmark_prints_every_row_and_leaves_nothing(
    leaves_nothing_on: Path, fake_fio: Callable[..., Any]
) -> None:
    fake_fio()
    words = [sys.executable, str(ROOT / "benchmarks" / "io_engine.py"), "--nvme-path", str(leaves_nothing_on)]
    words += ["--rounds", "2", "--size", "8MiB", "--block-size", "1MiB", "--queue-depth", "4"]
    ended = run_program(words, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
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
    ended = run_program([*words, "--size", "4MiB"], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0
    assert "nothing was measured" in ended.stdout
