"""A step moves the bytes that it must, and the counters say what the kernel says."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from torch import nn

import swapper

STEPS = 3


def kernel_bytes() -> tuple[int, int]:
    """What this process read from and wrote to block devices so far (proc_pid_io(5)), in bytes."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def major_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "masters", "bytes_per_parameter"),
    [(torch.bfloat16, True, 10), (torch.float16, True, 12), (torch.float32, False, 8), (torch.bfloat16, False, 4)],
    ids=["bf16-masters", "fp16-masters", "fp32", "bf16"],
)
def test_bytes_of_an_adamw_step(nvme_path: Path, dtype: torch.dtype, masters: bool, bytes_per_parameter: int) -> None:
    model = nn.Sequential(nn.Linear(3000, 1500), nn.Linear(1500, 2100), nn.LayerNorm(2100)).to(dtype)
    config = swapper.OffloadConfig(
        nvme_path=nvme_path,
        pool_bytes="32MiB",
        bucket_bytes="8MiB",
        offload_optimizer={"device": "nvme", "master_weights": masters},
    )
    optimizer = swapper.wrap_optimizer(torch.optim.AdamW(model.parameters()), config)
    swapped = swapper.of(optimizer)

    def step() -> None:
        for p in model.parameters():
            p.grad = torch.randn(p.shape).to(dtype)
        optimizer.step()
        swapped.flush()

    step()
    numel = sum(p.numel() for p in model.parameters())
    faults = -1
    while faults != major_faults():  # The kernel counts what it reads of a program that was pushed out of memory, too.
        faults = major_faults()
        before, before_kernel = swapped.stats(), kernel_bytes()
        for _ in range(STEPS):
            step()
        after, after_kernel = swapped.stats(), kernel_bytes()
    moved = after.bytes_read - before.bytes_read, after.bytes_written - before.bytes_written
    for count in moved:
        # Biases and norms never move: a little less. Headers, alignment and ties: a little more, at most 1 %.
        assert 0.99 * bytes_per_parameter <= count / STEPS / numel <= 1.01 * bytes_per_parameter
    store = swapped.store
    assert store is not None
    direct = all(part.file.direct for record in store._records.values() for part in record.parts)
    swapped.close()
    if not direct:
        pytest.skip("the kernel counts what goes to a device, and this file system has no O_DIRECT")
    for count, counted in zip(moved, (a - b for a, b in zip(after_kernel, before_kernel, strict=True)), strict=True):
        assert abs(counted - count) <= 0.01 * count
