"""`examples/train_hf.py`: says that both runs are equal, and fails where they are not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from launcher import run_program

pytest.importorskip("transformers")

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_hf.py"


@pytest.mark.thorough("test_trainer compares the same calls")
def test_the_example_compares_both_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--nvme-path", str(tmp_path), "--compare", "--steps=2", "--context=16"]
    done = run_program(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert "equal to the bit: yes" in done.stdout
    assert not list(tmp_path.iterdir())
