"""What is left when a process of multiprocessing ends."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from ranks import in_processes
from torch import nn

import swapper

kept: list[Any] = []


def end_with_an_optimizer(rank: int, nvme_path: Path) -> None:
    model = nn.Linear(96, 96)
    config = {"nvme_path": str(nvme_path), "pool_bytes": "1MiB", "bucket_bytes": "32KiB"}
    config["offload_optimizer"] = {"device": "nvme"}  # type: ignore[assignment]
    optimizer = swapper.wrap_optimizer(torch.optim.AdamW(model.parameters()), config)
    kept.append(optimizer)  # Until the very end.
    model(torch.ones(2, 96)).sum().backward()
    optimizer.step()
    child = os.fork()
    if child == 0:
        from multiprocessing.util import _exit_function  # type: ignore[attr-defined]

        _exit_function()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert os.listdir(nvme_path), "the child removed the files of its parent"


def test_a_process_of_multiprocessing_leaves_nothing(nvme_path: Path, leaves_nothing: None) -> None:
    in_processes(end_with_an_optimizer, nvme_path, ranks=1)
