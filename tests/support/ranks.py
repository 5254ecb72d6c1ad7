"""Several processes that know each other, of which each is one rank.

They are forked from a server that has imported what they need, so that only the first of them waits for that.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch.multiprocessing

__all__ = ["TIMEOUT_S", "in_processes"]

TIMEOUT_S = 300
PRELOADED = ["torch.distributed", "torch.distributed.fsdp", "lightning", "swapper.lightning"]


def _rank(rank: int, work: Callable[..., None], environment: dict[str, str], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    # As a launcher of processes sets it: Lightning then starts none.
    os.environ.update(environment, LOCAL_RANK=str(rank), RANK=str(rank))
    work(rank, *args)


def in_processes(work: Callable[..., None], *args: object, ranks: int = 2) -> None:
    """Run `work(rank, *args)` in processes whose environment is that of `torchrun`.

    Raises:
        ProcessRaisedException, ProcessExitedException: one failed; the others are then ended.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "NODE_RANK": "0"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # For the server.
        patch.setenv("PYTHONWARNINGS", "ignore")
        multiprocessing.set_forkserver_preload(PRELOADED)
        context = torch.multiprocessing.start_processes(
            _rank, (work, environment, args), nprocs=ranks, join=False, start_method="forkserver"
        )
    try:
        assert context.join(TIMEOUT_S) or context.join(TIMEOUT_S), "the processes are still running"
    finally:
        for process in context.processes:
            process.kill()
