"""Several processes that know each other, of which each is one rank.

They are forked from a server (`fork_server`), so that only the first of them waits for imports.
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import torch.multiprocessing
from fork_server import ensure_server

__all__ = ["TIMEOUT_S", "free_port", "in_processes", "started"]

TIMEOUT_S = 900


def _rank(rank: int, work: Callable[..., None], environment: dict[str, str], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    # As a launcher of processes sets it: Lightning then starts none.
    os.environ.update(environment, LOCAL_RANK=str(rank), RANK=str(rank))
    work(rank, *args)


PORTS = range(20_000, 30_000)
"""Linux gives none of them to a process that asks for any port, or that connects to one (ip_local_port_range)."""


@contextmanager
def free_port() -> Iterator[int]:
    """A port of this machine that nobody has, nor another test of this kind meanwhile."""
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        # A name that only one socket has, of all processes, and that is gone with it.
        with closing(socket.socket(socket.AF_UNIX)) as name, closing(socket.socket()) as tried:
            try:
                name.bind(f"\0swapper-tests-port-{port}")
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
            tried.close()
            yield port
            return
    raise AssertionError(f"no port of {PORTS} is free")


@contextmanager
def started(work: Callable[..., None], *args: object, ranks: int = 2) -> Iterator[Any]:
    """Start `work(rank, *args)` in processes whose environment is that of `torchrun`. Kills those that are left."""
    ensure_server()
    with free_port() as port:
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "NODE_RANK": "0"}
        context = torch.multiprocessing.start_processes(
            _rank, (work, environment, args), nprocs=ranks, join=False, start_method="forkserver"
        )
        try:
            yield context
        finally:
            for process in context.processes:
                process.kill()


def in_processes(work: Callable[..., None], *args: object, ranks: int = 2) -> None:
    """Run `work(rank, *args)` in processes whose environment is that of `torchrun`.

    Raises:
        ProcessRaisedException, ProcessExitedException: one failed; the others are then ended.
    """
    with started(work, *args, ranks=ranks) as context:
        deadline = time.monotonic() + TIMEOUT_S
        while not context.join(TIMEOUT_S):  # Returns whenever one of them has ended.
            assert time.monotonic() < deadline, "the processes are still running"
