"""`examples/train_lightning.py`, interrupted and resumed, against an uninterrupted run without swapping."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launcher import run_program

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_lightning.py"
SMALL = ["--data.batch_size=1", "--data.context=16", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
COMMAND = [sys.executable, "-W", "ignore", str(SCRIPT), "fit", *SMALL, "--data.steps=40"]
CONFIG = """
pool_bytes: 8MiB
bucket_bytes: 1MiB
nvme_path: ./drive
offload_optimizer:
  device: nvme
"""
ALL = """
offload_gradient:
  device: nvme
offload_param:
  device: nvme
"""


def digest(output: str) -> str:
    found = re.search(r"parameters: (\w{64})", output)
    assert found is not None, output
    return found[1]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of a run without swapping."""
    done = run_program(COMMAND, cwd=tmp_path_factory.mktemp("plain"), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return digest(done.stdout)


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("more", ["", ALL], ids=["state", "everything"])
def test_a_run_that_was_interrupted_is_resumed_to_the_bits_of_a_plain_one(
    more: str, plain: str, tmp_path: Path
) -> None:
    ours = tmp_path
    (ours / "drive").mkdir()
    (ours / "config.yaml").write_text(CONFIG + more)
    swapped = ["--trainer.strategy=swapper.lightning.SwapStrategy", "--trainer.strategy.config=config.yaml"]
    with subprocess.Popen([*COMMAND, *swapped], cwd=ours) as run:
        try:
            deadline_s = time.monotonic() + 240
            while not (ours / ".swapper" / "lightning" / "last.ckpt").exists():
                assert run.poll() is None and time.monotonic() < deadline_s, "it has not come so far"
                time.sleep(0.01)
            run.send_signal(signal.SIGINT)
            assert run.wait(240) == 1
        finally:
            run.kill()
    assert not list((ours / "drive").iterdir())
    first = min((ours / ".swapper" / "lightning").glob("epoch=*.ckpt"), key=lambda path: path.stat().st_mtime)
    resume = [*COMMAND, *swapped, f"--ckpt_path={first}"]
    resumed = run_program(resume, cwd=ours, capture_output=True, text=True, timeout=300)
    assert resumed.returncode == 0, resumed.stderr
    assert digest(resumed.stdout) == plain
    assert not list((ours / "drive").iterdir())
