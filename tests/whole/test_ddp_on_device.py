"""DistributedDataParallel on accelerators: each rank has a simulated one, and collectives that come late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from device_ranks import configure, in_device_processes
from torch import nn

import swapper
from swapper.optimizer import plan

PLACES: dict[str, dict[str, Any]] = {
    "state": {"offload_optimizer": {"device": "nvme"}},
    "gradients": {"offload_optimizer": {"device": "nvme"}, "offload_gradient": {"device": "nvme"}},
    "all": {f"offload_{part}": {"device": "nvme"} for part in ("optimizer", "gradient", "param")},
}


def train(rank: int, path: Path, places: dict[str, Any] | None, view: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 400), nn.Tanh(), nn.Linear(400, 300)).to("sim")
    parallel = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=view)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if places is not None:
        config = swapper.OffloadConfig(nvme_path=path, pool_bytes="32MiB", bucket_bytes="256KiB", **places)
        swapper.offload(model, optimizer, config)
    for step in range(3):
        x = torch.full((8, 300), step + rank + 1.0, device="sim")
        for _ in range(2):
            parallel(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [p.detach().cpu() for p in model.parameters()]
    if places is not None:
        swapper.of(optimizer).close()
        if "offload_param" in places:
            model.swapper.close()  # type: ignore[operator, union-attr]
    return found


def check_bits(rank: int, path: Path, view: bool, settings: str) -> None:
    configure("sim-eager")
    expected = train(rank, path, None, view)
    configure(settings)
    for places in (None, *PLACES.values()):
        assert all(map(torch.equal, train(rank, path, places, view), expected)), places


@pytest.mark.long
@pytest.mark.parametrize("settings", ["sim-lazy", "sim-random"])
@pytest.mark.parametrize("view", [False, True], ids=["copied", "views of buckets"])
def test_bits_are_those_of_plain_pytorch(nvme_path: Path, view: bool, settings: str) -> None:
    in_device_processes(check_bits, nvme_path, view, settings, settings=settings)


def refuse_other_devices(rank: int, path: Path) -> None:
    """With `step_device: auto` each rank looks for room on its own device."""
    model = nn.Sequential(nn.Linear(300, 400), nn.Tanh(), nn.Linear(400, 300)).to("sim")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "has_room", lambda *_: rank == 0)
        for device in ("nvme", "cpu"):
            parallel = nn.parallel.DistributedDataParallel(model)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            config = {"nvme_path": path, "pool_bytes": "32MiB", "offload_optimizer": {"device": device}}
            text = "offload_optimizer.step_device: device on rank 0, cpu on rank 1; .*set device, or cpu, on all ranks"
            with pytest.raises(swapper.ConfigError, match=text):
                swapper.wrap_optimizer(optimizer, config)
                parallel(torch.ones(8, 300, device="sim")).square().sum().backward()
                optimizer.step()
            if device == "cpu":
                swapper.of(optimizer).close()


@pytest.mark.long
def test_steps_on_other_devices_are_refused(nvme_path: Path) -> None:
    in_device_processes(refuse_other_devices, nvme_path, settings="sim-lazy")
