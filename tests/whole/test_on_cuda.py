"""What only CUDA can show: its sums depend on addresses, its graphs know of other threads, its contexts take memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import Joined
from torch import nn

import swapper
from swapper.gradient.alignment import empty_misaligned

NUMEL = (1 << 18) + 1


def config_of(path: Path, parameters: str) -> swapper.OffloadConfig:
    return swapper.OffloadConfig(
        nvme_path=path,
        pool_bytes="64MiB",
        offload_optimizer={"device": "nvme", "step_device": "device"},
        offload_gradient={"device": "nvme"},
        offload_param={"device": parameters},
    )


@pytest.mark.parametrize("clips", ["ours", "torch's"])
def test_clipped_by_the_norm_of_gradients_that_are_slices(clips: str, nvme_path: Path, device: str) -> None:
    models = [Joined(NUMEL).to(device) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    swapper.wrap_optimizer(optimizers[1], config_of(nvme_path, "none"))
    handle = swapper.of(optimizers[1])
    x = torch.randn(NUMEL + 5, device="cpu").to(device)
    for _ in range(4):
        for model in models:
            model(x).backward()
        expected = nn.utils.clip_grad_norm_(models[0].parameters(), 0.1)
        if clips == "ours":
            norm = handle.clip_grad_norm_(0.1)
        else:
            norm = nn.utils.clip_grad_norm_(models[1].parameters(), 0.1)
        assert torch.equal(norm.to(device), expected)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for mine, plain in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert torch.equal(mine, plain)
    handle.close()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("misaligned_bytes", [0, 4, 20, 32, 60])
def test_sums_depend_on_no_more_of_an_address_than_64_bytes(misaligned_bytes: int, dtype: torch.dtype) -> None:
    """See [Note: alignment] in `swapper.gradient.alignment`."""
    for numel in (1 << 12, 1 << 18, 1_000_003):
        values = torch.randn(numel, device="cuda", dtype=dtype)
        found = []
        for more in (0, 64, 192):
            room = empty_misaligned((numel,), (1,), dtype, values.device, misaligned_bytes + more).copy_(values)
            assert (room.data_ptr() - misaligned_bytes) % 64 == 0
            found.append([torch._foreach_norm([room])[0], torch.linalg.vector_norm(room), room.sum()])
        for others in found[1:]:
            assert all(map(torch.equal, others, found[0]))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("turn", range(3))
def test_a_graph_is_captured_while_a_step_is_still_written(turn: int, nvme_path: Path) -> None:
    """Threads of ours ask the device for events meanwhile."""
    torch.manual_seed(turn)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    swapper.offload(model, optimizer, config_of(nvme_path, "nvme"))
    other, x = nn.Linear(256, 256).cuda(), torch.ones(8, 256, device="cuda")
    with torch.no_grad():
        expected = other(x)
    torch.cuda.synchronize()
    for _ in range(3):
        model(torch.ones(4, 1024, device="cuda")).sum().backward()
        optimizer.step()
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            found = other(x)
        graph.replay()
        assert torch.equal(found, expected)
        optimizer.zero_grad()
    swapper.of(optimizer).flush()
    swapper.of(optimizer).close()
    model.swapper.close()  # type: ignore[operator, union-attr]


_ON_THE_SECOND = """
import sys, torch, swapper
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6))).to("cuda:1")
optimizer = torch.optim.AdamW(model.parameters())
places = {f"offload_{part}": {"device": "nvme"} for part in ("optimizer", "gradient", "param")}
places["offload_optimizer"]["step_device"] = "device"
swapper.offload(model, optimizer, swapper.OffloadConfig(nvme_path=sys.argv[1], pool_bytes="64MiB", **places))
for _ in range(3):
    model(torch.ones(8, 512, device="cuda:1")).sum().backward()
    swapper.of(optimizer).clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
swapper.of(optimizer).flush()
print("contexts:", [i for i in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(i)])
"""


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_model_on_the_second_device_takes_nothing_of_the_first(nvme_path: Path) -> None:
    command = [sys.executable, "-c", _ON_THE_SECOND, str(nvme_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "contexts: [1]" in done.stdout
