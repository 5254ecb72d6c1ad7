"""Processes of gloo on this host, of which each is one rank. Needs torch, and not swapper."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.spawn import start_processes

__all__ = ["run_ranks"]


def run_ranks(work: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """What `work(rank, *args)` returns on each of `ranks` ranks, with one thread each. It is picklable.

    Raises:
        ProcessRaisedException: one failed; the others are ended.
    """
    with tempfile.TemporaryDirectory() as directory:
        results = torch.multiprocessing.get_context("spawn").SimpleQueue()
        start_processes(_rank, (ranks, directory, results, work, args), nprocs=ranks)  # type: ignore[no-untyped-call]
        everything: list[Any] = results.get()
    return everything


def _rank(rank: int, ranks: int, directory: str, results: Any, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/ranks", rank=rank, world_size=ranks)
    everything: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(everything, work(rank, *args))
    if rank == 0:
        results.put(everything)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
