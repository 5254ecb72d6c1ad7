"""What is left when a process of multiprocessing ends."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from isolation import alone
from ranks import in_processes
from torch import nn

import swapper
from swapper.process import finalizers

kept: list[Any] = []


def lines_of_finalizers(count: int) -> int:
    """Lines of `finalizers.py` that run in a process of multiprocessing when so many are made, and all live."""
    owners = [nn.Module() for _ in range(count)]
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != finalizers.__file__:
            return None
        lines += 1
        return trace

    sys.settrace(trace)
    for owner in owners:
        finalizers.finalizer(owner, len, ())
    sys.settrace(None)
    assert len(finalizers._pending) >= count
    owners.clear()
    for _ in range(5 * count):  # Those that are over do not stay.
        finalizers.finalizer(nn.Module(), len, ())
    assert len(finalizers._pending) < 3 * count
    return lines


def test_a_finalizer_takes_the_same_work_among_many() -> None:
    assert alone(lines_of_finalizers, 2000) < 1.5 * 20 * alone(lines_of_finalizers, 100)


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
