"""Compute, copies and the drive overlap, by the clock of the simulated device: the same on every machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from accelerators import simulated
from repository import ROOT


@pytest.mark.thorough("a GPT in full on the simulated device; by default: test_clock")
@pytest.mark.parametrize("way", ["drive", "compute, steps in backward"])
def test_a_step_takes_little_more_than_the_longest_of_its_parts(nvme_path: Path, way: str) -> None:
    simulated()
    command = [sys.executable, str(ROOT / "benchmarks" / "overlap.py"), "--nvme-path", str(nvme_path), "--only", way]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
    step = found["step"]
    assert step["now_s"] <= 1.10 * max(step[key] for key in ("kernels_s", "up_s", "down_s", "drive_s"))


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("drive", "compute", "up", "records"), [(1, 0.1, 0.3, 4), (0.5, 1, 0.3, 4), (0.2, 0.3, 1, 4), (1, 0.5, 0.3, 12)]
)
def test_a_token_of_weights_in_files_takes_little_more_than_the_longest_of_its_parts(
    tmp_path: Path, drive: float, compute: float, up: float, records: int
) -> None:
    simulated()
    program = str(ROOT / "tests" / "support" / "inference_clock.py")
    command = [sys.executable, program, *map(str, (tmp_path, drive, compute, up, records))]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    for token in json.loads(lines[-1]):
        assert token["now_s"] <= 1.10 * max(token[key] for key in ("kernels_s", "up_s", "drive_s"))
        assert token["records"] <= 24 - records + 2
