"""`pip install tensor-swapper` alone installs no numpy, and torch does without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
sys.modules["numpy"] = None
import torch
import swapper

path = sys.argv[1]

def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.GELU(), torch.nn.Linear(300, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = swapper.OffloadConfig(
        nvme_path=path,
        pool_bytes="16MiB",
        bucket_bytes="64KiB",
        offload_optimizer={"device": "nvme", "encoding": "packed"},
        offload_gradient={"device": "nvme"},
        offload_param={"device": "nvme"},
    )
    return swapper.offload(model, optimizer, config)

def train(model, optimizer):
    for _ in range(2):
        model(torch.ones(2, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}

model, optimizer = make()
train(model, optimizer)
swapper.save_checkpoint(path + "/checkpoint", model, optimizer, extra={"seed": torch.ones(3)}).wait()
expected = train(model, optimizer)
resumed, again = make()
extra = swapper.load_checkpoint(path + "/checkpoint", resumed, again)
assert torch.equal(extra["seed"], torch.ones(3))
found = train(resumed, again)
assert all(torch.equal(value, found[name]) for name, value in expected.items())
torch.distributed.init_process_group("gloo", init_method="file://" + path + "/group", rank=0, world_size=1)
from swapper.storage.agreement import _all_gathered
assert _all_gathered({"a": 1}, None, 1) == [{"a": 1}]
torch.distributed.destroy_process_group()
"""


@pytest.mark.long
def test_a_training_is_saved_and_resumed_without_numpy(nvme_path: Path) -> None:
    done = subprocess.run(  # In no fork of a process that has torch with numpy.
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(nvme_path)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
