"""Ranks measure the speeds of their drives at once, and none waits for one that cannot."""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from torch import nn

import swapper
from swapper.io.handle import AsyncIOHandle
from swapper.storage import store as store_module
from swapper.storage.runs import remove_stale_runs
from swapper.storage.speed import DriveSpeed, measure_speeds

LIMIT_S = 60
"""A rank that waits for one that does not come ends with another error then."""


def made(paths: list[Path]) -> Any:
    optimizer: Any = torch.optim.AdamW(nn.Linear(300, 40).parameters())
    config = swapper.OffloadConfig(
        nvme_path=paths, pool_bytes="4MiB", bucket_bytes="64KiB", offload_optimizer={"device": "nvme"}
    )
    return swapper.wrap_optimizer(optimizer, config)


def measure(rank: int, directory: str, counts: tuple[int, int], fails: bool) -> None:
    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=LIMIT_S))
    root = Path(directory)
    paths = [root / f"drive{i}" for i in range(counts[rank])]

    def arrive(path: Path) -> Any:
        if rank == 1 and fails and path == paths[-1]:
            raise PermissionError(13, "refused here", str(path))
        if rank == 1 and path == paths[-1]:
            time.sleep(0.5)  # The other one would be far ahead.
            (root / "arrived").touch()
        return remove_stale_runs(path)

    def noted(directories: Sequence[Path], handles: Sequence[AsyncIOHandle]) -> list[DriveSpeed]:
        assert fails or (root / "arrived").exists()
        (root / f"measured{rank}").touch()
        return measure_speeds(directories, handles)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_module, "remove_stale_runs", arrive)
        patch.setattr(store_module, "measure_speeds", noted)
        if fails:
            with pytest.raises((swapper.SwapError, PermissionError), match="refused here"):
                made(paths)
        else:
            made(paths).swapper.close()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("counts", [(2, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("fails", [False, True])
def test_ranks_meet_before_they_measure(nvme_path: Path, counts: tuple[int, int], fails: bool) -> None:
    for i in range(2):
        (nvme_path / f"drive{i}").mkdir()
    ranks.in_processes(measure, str(nvme_path), counts, fails)
    assert (nvme_path / "measured0").exists()
    assert (nvme_path / "measured1").exists() == (counts[1] > 1 and not fails)
