"""Replicas of DDP whose state is encoded: alike to the bit after each step, and as one process has it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from torch import nn
from torch.multiprocessing import ProcessExitedException
from torch.nn.parallel import DistributedDataParallel
from training import same_bits

import swapper
from swapper.config import OffloadConfig

STEPS, SAVED, KILLED = 10, 5, 7


def net_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 130), nn.Tanh(), nn.Linear(130, 65))


def config_of(directory: str, encoding: Any, rank: int = 0) -> OffloadConfig:
    """Of which each rank has what changes no bit otherwise."""
    return OffloadConfig(
        nvme_path=directory,
        pool_bytes=f"{4 << rank}MiB",
        bucket_bytes=f"{48 << rank}KiB",
        gradient_accumulation_steps=2,
        offload_optimizer={"device": "nvme", "encoding": encoding, "native_step": "off" if rank else "on"},
        offload_gradient={"device": "nvme", "encoding": "bf16" if encoding == "bf16" else "exact"},
    )


def step(model: nn.Module, optimizer: torch.optim.Optimizer, turn: int) -> None:
    """All ranks have the same samples, so the mean of their gradients is that of one process."""
    for micro in range(2):
        generator = torch.Generator().manual_seed(100 * turn + micro)
        model(torch.randn(4, 64, generator=generator)).square().mean().backward()
    swapper.of(optimizer).clip_grad_norm_(0.05)
    optimizer.step()
    optimizer.zero_grad()


def values_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    state = optimizer.state_dict()["state"]
    return [p.detach().clone() for p in model.parameters()] + [
        entries[key].clone() for entries in state.values() for key in ("exp_avg", "exp_avg_sq")
    ]


def train(rank: int, directory: str, encoding: Any, first: int, last: int, resumes: str) -> None:
    torch.distributed.init_process_group("gloo")
    path = Path(directory)
    expected = torch.load(path.parent / "expected.pt")
    model = DistributedDataParallel(net_of())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    swapper.wrap_optimizer(optimizer, config_of(directory, encoding, rank))
    if resumes == "checkpoint":
        swapper.load_checkpoint(path.parent / "saved", model, optimizer, together=True)
    elif resumes == "state dict":
        saved = torch.load(path.parent / "saved.pt")
        model.module.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    for turn in range(first, last):
        step(model, optimizer, turn)
        for number, (value, other) in enumerate(zip(values_of(model, optimizer), expected[turn], strict=True)):
            assert same_bits(value, other), (turn, number)
        if turn + 1 == SAVED and not resumes:
            swapper.save_checkpoint(path.parent / "saved", model, optimizer, together=True)
            if rank == 0:
                torch.save((model.module.state_dict(), optimizer.state_dict()), path.parent / "saved.pt")
    if last == KILLED:
        torch.distributed.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    swapper.of(optimizer).close()
    torch.distributed.destroy_process_group()


@pytest.mark.long
@pytest.mark.parametrize("encoding", ["bf16", "int8", {"exp_avg": "int8", "exp_avg_sq": "bf16"}], ids=str)
def test_replicas_have_the_bits_of_one_process(nvme_path: Path, encoding: Any) -> None:
    model = net_of()
    optimizer = swapper.wrap_optimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-2), config_of(str(nvme_path), encoding)
    )
    expected = []
    for turn in range(STEPS):
        step(model, optimizer, turn)
        expected.append(values_of(model, optimizer))
    swapper.of(optimizer).close()
    torch.save(expected, nvme_path.parent / "expected.pt")
    with pytest.raises(ProcessExitedException):
        ranks.in_processes(train, str(nvme_path), encoding, 0, KILLED, "")
    for resumes in ("checkpoint", "state dict"):
        ranks.in_processes(train, str(nvme_path), encoding, SAVED, STEPS, resumes)
    assert not list(nvme_path.iterdir()), "what the killed ranks had is removed"
