"""SIGKILL at random instants of a training that saves a checkpoint after every step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sampling import ALL

PROGRAM = Path(__file__).resolve().parents[1] / "support" / "crash.py"
KILLS = int(os.environ.get("SWAPPER_KILLS") or (100 if ALL else 24))


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "encoding"),
    [("names", "exact"), ("replace", "exact"), ("names", "int8"), ("replace", "bf16"), ("replace", "packed")],
)
def test_whatever_is_killed_when(mode: str, encoding: str, nvme_path: Path) -> None:
    """What is found at the next start is whole, as it was saved, and goes on to the same bits; nothing else is left."""
    kills = KILLS // 2 if encoding == "exact" else KILLS // 8
    command = [sys.executable, str(PROGRAM), str(nvme_path), str(kills), mode, encoding]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["killed"] == kills
    assert result["checked"] > kills // 5, "most lives were too short to look at what was saved"
    assert result["turns"] > (20 if ALL and encoding == "exact" else 0)
