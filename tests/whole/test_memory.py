"""Memory is counted, not hoped: the peak of a process stays within the sum that is promised."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from repository import BENCHMARK
from torch import nn
from training import make_config

import swapper


@pytest.mark.thorough("by default: the peak with everything on disk")
def test_the_peak_stays_within_the_formula(nvme_path: Path) -> None:
    """60M parameters: masters and moments are 10 bytes each, 600 MB, of which the pool holds 32."""
    arguments = ["--layers", "6", "--vocab-size", "12000", "--steps", "2", "--context", "8"]
    arguments += ["--pool-bytes", "32MiB", "--bucket-bytes", "8MiB", "--modes", "no optimizer", "swapped", "--json"]
    command = [sys.executable, str(BENCHMARK), "--nvme-path", str(nvme_path), *arguments]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    result = json.loads(output)["swapped"]
    assert result["numel"] * 10 > 4 * 100e6, "the state must be far larger than the allowance of 100 MB"
    assert result["peak_bytes"] <= result["bound_bytes"]


def test_nothing_is_leased_between_steps_and_never_more_than_the_pool(nvme_path: Path) -> None:
    model = nn.Linear(700, 900)
    optimizer = swapper.wrap_optimizer(torch.optim.AdamW(model.parameters()), make_config(nvme_path))
    for _ in range(3):
        model(torch.randn(2, 700)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    swapped = swapper.of(optimizer)
    swapped.flush()
    stats = swapped.stats()
    assert stats.pool_used_bytes == 0
    assert 0 < stats.pool_peak_bytes <= stats.pool_bytes == 24 << 20
    swapped.close()


@pytest.mark.long
def test_a_state_dict_costs_disk_and_not_memory(nvme_path: Path) -> None:
    program = f"""
import sys, torch, swapper
sys.path.insert(0, {str(BENCHMARK.parent)!r})
from peak import Peak
p = torch.nn.Parameter(torch.zeros(30_000_000))
config = swapper.OffloadConfig(nvme_path={str(nvme_path)!r}, pool_bytes="16MiB", offload_optimizer={{"device": "nvme"}})
optimizer = swapper.wrap_optimizer(torch.optim.AdamW([p]), config)
p.grad = torch.ones_like(p)
optimizer.step()
with Peak() as before:
    optimizer.swapper.flush()
    torch.zeros(1).add_(1)
    import time; time.sleep(0.05)
with Peak() as peak:
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    optimizer.step()
assert saved["state"][0]["exp_avg"].shape == p.shape
print(peak.bytes - before.bytes)
"""
    output = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True).stdout
    assert int(output) < 60e6, "the state is 240 MB"


@pytest.mark.thorough("by default: a model under a limit of memory in test_examples, and two models in test_offload")
def test_the_peak_with_everything_on_disk_stays_within_the_formula(nvme_path: Path) -> None:
    """86M parameters: 14 bytes each on disk, 1.2 GB, and nothing of them in memory but what the pool holds."""
    arguments = ["--vocab-size", "256", "--context", "8", "--rounds", "1"]
    arguments += ["--pool-bytes", "96MiB", "--bucket-bytes", "8MiB", "--json", str(nvme_path / "figures.json")]
    command = [sys.executable, str(BENCHMARK.with_name("everything_nvme.py")), "--nvme-path", str(nvme_path)]
    subprocess.run([*command, *arguments], check=True, stdout=subprocess.PIPE)
    result = json.loads((nvme_path / "figures.json").read_text())
    assert result["numel"] * 2 > 160e6, "the parameters alone must be more than the allowance of 50 MB"
    assert result["peak_bytes"] <= result["bound_bytes"]
    assert result["median"]["read_param_bytes"] > 0
