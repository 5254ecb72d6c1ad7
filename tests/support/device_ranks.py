"""Several processes that are one rank each, and have a simulated device each."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
from accelerators import SETTINGS, simulate, simulated
from sampling import SEED

from swapper.tensors import hollow

__all__ = ["configure", "in_device_processes"]


def configure(settings: str) -> None:
    """Let the device of this rank work as `settings` say, and otherwise than those of other ranks.

    FSDP2 lets one stream use memory that another may have again, for which that one waits before it has it: so memory
    is poisoned then.
    """
    seed = SEED + torch.distributed.get_rank()
    simulated().configure(
        **SETTINGS[settings] | ({"seed": seed} if "seed" in SETTINGS[settings] else {}), poison_reused=True
    )


def _worker(rank: int, settings: str, directory: str, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ["SIM_GROUP_DIR"] = directory
    with pytest.MonkeyPatch.context() as patch:
        sim_device = simulate(settings, patch)
        # As of CUDA's: the simulated device lets tensors change their dispatch keys.
        patch.setattr(hollow, "_COMPATIBLE", hollow._COMPATIBLE | {"sim"})
        import sim_group

        torch.distributed.init_process_group(sim_group.NAME)
        configure(settings)
        try:
            work(rank, *args)
            assert sim_device.violations() == []  # Runs what there is to run, on each rank.
            torch.distributed.barrier()
        finally:
            torch.distributed.destroy_process_group()


def in_device_processes(work: Callable[..., None], *args: object, settings: str, count: int = 2) -> None:
    """Run `work(rank, *args)` on so many ranks, each with a simulated device of its own. Errors as `in_processes`.

    Args:
        settings: of the device, a name in `accelerators.SETTINGS`.
    """
    simulated()  # Skips where there is none.
    with tempfile.TemporaryDirectory() as directory:
        ranks.in_processes(_worker, settings, directory, work, args, ranks=count)
