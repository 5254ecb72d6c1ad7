"""The examples, run as a user runs them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launcher import Program, run_program
from repository import ROOT

SMALL = ["--batch-size", "4", "--context", "32", "--threads", "1", "--device", "cpu"]
CONFIG = """
pool_bytes: 8MiB
bucket_bytes: 1MiB
offload_optimizer:
  device: nvme
  master_weights: true
"""


@pytest.fixture
def drive() -> Iterator[Path]:
    """An empty directory to swap to, beside the sources: `/tmp` may be tmpfs, which swapper refuses."""
    parent = ROOT / ".swapper"
    parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent) as directory:
        yield Path(directory)


@pytest.fixture
def command(tmp_path: Path, drive: Path) -> list[str]:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG + f"nvme_path: {drive}\n")
    return [sys.executable, str(ROOT / "examples" / "train_gpt.py"), "--config", str(config), *SMALL]


@pytest.mark.long
def test_plain_run_lowers_the_loss_and_writes_nothing_to_the_drive(
    command: list[str], tmp_path: Path, drive: Path
) -> None:
    file = tmp_path / "result.json"
    run_program([*command, "--plain", "--no-generate", "--steps", "40", "--json", str(file)], check=True)
    losses = [float.fromhex(loss) for loss in json.loads(file.read_text())["plain"]["losses"]]
    assert len(losses) == 40
    assert sum(losses[-5:]) / 5 < losses[0] - 1.5
    assert not any(drive.iterdir())


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options",
    [["--dtype", "float32"], ["--dtype", "bfloat16"], ["--dtype", "bfloat16", "--optimizer", "muon", "--tied"]],
    ids=["float32-adamw", "bfloat16-adamw", "bfloat16-muon-tied"],
)
def test_compare_finds_no_difference(command: list[str], drive: Path, options: list[str]) -> None:
    few = ["--compare", "--steps", "6", "--batch-size", "1", "--context", "16"]
    ended = run_program([*command, *options, *few], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "losses equal to the bit: yes" in ended.stdout
    assert "parameters equal to the bit: yes" in ended.stdout
    assert "optimizer state on disk" in ended.stdout
    assert not any(drive.iterdir())


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("signum", "after_s"),
    [(signal.SIGINT, 0.0), (signal.SIGINT, 1.0), (signal.SIGTERM, 1.0)],
    ids=["SIGINT-while-starting", "SIGINT-while-training", "SIGTERM-while-training"],
)
def test_signal_ends_a_run_and_leaves_no_files(
    command: list[str], drive: Path, signum: signal.Signals, after_s: float
) -> None:
    with Program([*command, "--steps", "1000000"], stderr=subprocess.PIPE, text=True) as run:
        try:
            deadline_s = time.monotonic() + 240
            while not any(drive.iterdir()):
                assert run.poll() is None and time.monotonic() < deadline_s, "the run put nothing on the drive"
                time.sleep(0.01)
            time.sleep(after_s)
            os.kill(run.pid, signum)
            _, errors = run.communicate(timeout=240)
        finally:
            run.kill()
    assert run.returncode == 128 + signum, errors
    assert "Stopped" in errors
    assert "Traceback" not in errors
    assert not any(drive.iterdir())


def test_mistake_in_the_config_is_one_sentence(command: list[str], drive: Path) -> None:
    drive.rmdir()
    ended = run_program([*command, "--steps", "1"], capture_output=True, text=True)
    drive.mkdir()
    assert ended.returncode == 1
    assert ended.stderr.startswith("train_gpt: ")
    assert str(drive) in ended.stderr
    assert "Traceback" not in ended.stderr


# --- train_xl ---------------------------------------------------------------------------------------------------------

EVERYTHING = """
pool_bytes: 192MiB
bucket_bytes: 16MiB
offload_optimizer: {device: nvme, master_weights: true}
offload_gradient: {device: nvme}
offload_param: {device: nvme}
"""


@pytest.fixture
def xl(tmp_path: Path, drive: Path) -> list[str]:
    """86M parameters, which plain PyTorch would need 1.38 GB for, in less."""
    config = tmp_path / "config.yaml"
    config.write_text(EVERYTHING + f"nvme_path: {drive}\n")
    command = [sys.executable, str(ROOT / "examples" / "train_xl.py"), "--config", str(config), "--size", "small"]
    return [*command, "--context", "16", "--threads", "1", "--picture", str(tmp_path / "timeline.png")]


def cgroup_of(output: str) -> Path | None:
    """What the example says that limits its memory; None if it is no cgroup."""
    line = next(line for line in output.splitlines() if line.startswith("Limit of memory: "))
    how = line.removeprefix("Limit of memory: ")
    return Path(how.removeprefix("cgroup ")) if how.startswith("cgroup ") else None


@pytest.mark.thorough("by default: the same run with too little memory, and what is swapped in the other examples")
@pytest.mark.parametrize("by", ["auto", "rlimit"])
def test_a_model_that_does_not_fit_is_trained(xl: list[str], tmp_path: Path, drive: Path, by: str) -> None:
    limits = ["--memory-limit", "1GB", "--limit-by", by]
    ended = subprocess.run([*xl, *limits, "--steps", "2"], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Plain PyTorch needs 1.38 GB" in ended.stdout
    assert "step 2/2  loss " in ended.stdout
    for row in ("forward", "backward", "optimizer.step()", "waiting for reads", "waiting for writes", "GB written"):
        assert row in ended.stdout
    assert "reads of parameters" in ended.stdout, "the timeline in the terminal"
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert not any(drive.iterdir())
    group = cgroup_of(ended.stdout)
    assert group is None or not group.exists()
    assert by == "auto" or group is None


@pytest.mark.long
def test_training_that_wants_more_than_it_may_is_ended_and_leaves_nothing(xl: list[str], drive: Path) -> None:
    ended = subprocess.run([*xl, "--memory-limit", "300MB", "--steps", "1"], capture_output=True, text=True)
    assert ended.returncode != 0
    group = cgroup_of(ended.stdout)
    if group is not None:
        assert "wanted more than 300 MB" in ended.stderr
        assert "Traceback" not in ended.stderr
        assert not group.exists()


@pytest.mark.thorough("by default: a signal ends a run, and a run is limited")
def test_a_signal_ends_the_limited_run_too(xl: list[str], drive: Path) -> None:
    with subprocess.Popen([*xl, "--steps", "1000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        try:
            deadline_s = time.monotonic() + 240
            while not any(drive.iterdir()):
                assert run.poll() is None and time.monotonic() < deadline_s, "the run put nothing on the drive"
                time.sleep(0.01)
            run.terminate()
            output, errors = run.communicate(timeout=240)
        finally:
            run.kill()
    assert run.returncode == 128 + signal.SIGTERM, errors
    assert "Stopped" in errors
    assert "Traceback" not in errors
    assert not any(drive.iterdir())
    group = cgroup_of(output)
    assert group is None or not group.exists()


# --- generate ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def generate(drive: Path) -> list[str]:
    """A model of 10 MB, through a pool of 8 MiB."""
    pytest.importorskip("transformers")
    command = [sys.executable, str(ROOT / "examples" / "generate.py"), "--nvme-path", str(drive), "--size", "tiny"]
    return [*command, "--pool-bytes", "8MiB", "--memory-limit", "1GB", "--threads", "1"]


@pytest.mark.thorough("by default: the same run with too little memory, and the bits of generate in the tests of hf")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("by", ["auto", "rlimit"])
def test_generation_from_files_has_the_bits_of_that_in_memory(
    generate: list[str], drive: Path, by: str, dtype: str
) -> None:
    options = ["--tokens", "3", "--limit-by", by, "--dtype", dtype]
    ended = run_program([*generate, *options], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "equal to the bit: yes" in ended.stdout
    for row in ("tokens/s", "bytes read a token", "of the drive's speed", "peak resident memory"):
        assert row in ended.stdout
    assert not any(drive.iterdir())
    group = cgroup_of(ended.stdout)
    assert group is None or not group.exists()
    assert by == "auto" or group is None


@pytest.mark.long
def test_a_generation_that_wants_more_than_it_may_is_ended_and_leaves_nothing(generate: list[str], drive: Path) -> None:
    ended = run_program([*generate, "--memory-limit", "100MB", "--no-plain"], capture_output=True, text=True)
    assert ended.returncode != 0
    assert not any(drive.iterdir())
    group = cgroup_of(ended.stdout)
    if group is not None:
        assert "wanted more than 100 MB" in ended.stderr
        assert "Traceback" not in ended.stderr
        assert not group.exists()
