"""What a rank of FSDP2 takes with its state on the drive: what plain FSDP2 takes without state, and the pool.

peak <= plain FSDP2's peak without optimizer state + pool + 2 buckets + what torch and the kernel have beside it
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_nets import LAYER_BYTES, SIDE, in_processes
from torch import nn
from torch.distributed.fsdp import fully_shard

import swapper
from swapper.config import OffloadConfig

POOL_BYTES = 8 << 20
BUCKET_BYTES = 1 << 20
BESIDE_BYTES = 16 << 20
LAYERS = 64


def status_bytes(name: str) -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[name].split()[0]) * 1024


def peak_bytes(work: Callable[[], object]) -> int:
    """The most memory that this process has while `work` runs, beyond what it has now."""
    gc.collect()
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    work()
    return status_bytes("VmHWM") - before


def made() -> nn.Sequential:
    net = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS)))
    for layer in net:
        fully_shard(layer)
    fully_shard(net)
    return net


def train(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        net(torch.ones(2, SIDE)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def count_memory(rank: int, directory: str) -> None:
    m_mmap_threshold = -3
    ctypes.CDLL(None).mallopt(m_mmap_threshold, 1 << 16)  # What is freed goes back at once.
    where: dict[str, Any] = {"offload_optimizer": {"device": "nvme"}}
    config = OffloadConfig(nvme_path=directory, pool_bytes=POOL_BYTES, bucket_bytes=BUCKET_BYTES, **where)
    # What is made once, as threads and code, is made before anything is counted.
    small = nn.Linear(SIDE, SIDE)
    fully_shard(small)
    for warm in (torch.optim.SGD(small.parameters()), torch.optim.AdamW(small.parameters())):
        train(small, warm)
    peaks = {}
    for name in ("without state", "swapped", "plain"):

        def run(name: str = name) -> None:
            net = made()
            sgd = name == "without state"
            optimizer: Any = torch.optim.SGD(net.parameters()) if sgd else torch.optim.AdamW(net.parameters())
            if name == "swapped":
                swapper.wrap_optimizer(optimizer, config)
            train(net, optimizer)
            if name == "swapped":
                optimizer.swapper.close()

        peaks[name] = peak_bytes(run)
    bound_bytes = peaks["without state"] + POOL_BYTES + 2 * BUCKET_BYTES + BESIDE_BYTES
    assert peaks["swapped"] <= bound_bytes, peaks
    state_bytes = 2 * LAYERS * LAYER_BYTES // torch.distributed.get_world_size()
    assert bound_bytes < peaks["without state"] + state_bytes < peaks["plain"] + BESIDE_BYTES, (
        peaks
    )  # It would be seen.


@pytest.mark.long
def test_a_rank_takes_what_plain_fsdp_takes_without_state_and_the_pool(nvme_path: Path, leaves_nothing: None) -> None:
    in_processes(count_memory, str(nvme_path))
