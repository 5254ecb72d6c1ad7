"""Collectives of evicted parameters: a process group reads them in a thread of its own, at any later time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from torch import nn
from torch.distributed import _functional_collectives as functional

import swapper
from swapper.config import OffloadConfig
from swapper.storage.buffers import Lease
from swapper.tensors.evicted import is_evicted

SIDE, LAYERS = 128, 6
Use = Callable[[int, nn.Module], object]


def model_of(rank: int) -> nn.Sequential:
    torch.manual_seed(rank)
    return nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS)))


def weight_of(model: nn.Module) -> Any:
    return model.get_parameter("1.weight")


def swap_with_the_other(rank: int, model: nn.Module) -> object:
    received = torch.empty(SIDE, SIDE)
    works = [torch.distributed.isend(weight_of(model), 1 - rank), torch.distributed.irecv(received, 1 - rank)]
    return received, works


def gather_into(rank: int, model: nn.Module) -> object:
    gathered = torch.empty(2 * SIDE, SIDE)
    return gathered, [torch.distributed.all_gather_into_tensor(gathered, weight_of(model), async_op=True)]


def gather_list(rank: int, model: nn.Module) -> object:
    gathered = [torch.empty(SIDE, SIDE) for _ in range(2)]
    return gathered, [torch.distributed.all_gather(gathered, model.state_dict()["1.weight"], async_op=True)]


def broadcast_at_once(rank: int, model: nn.Module) -> object:
    return None, [torch.distributed.broadcast(p, 1, async_op=True) for p in model.parameters()]


def broadcast_state(rank: int, model: nn.Module) -> None:
    for value in model.state_dict().values():
        torch.distributed.broadcast(value, 1)


def reduce_coalesced(rank: int, model: nn.Module) -> object:
    parameters = [model.get_parameter(name) for name in ("0.weight", "3.weight")]
    return functional.all_reduce_coalesced(parameters, "sum", [0, 1])


def receive_later(rank: int, model: nn.Module) -> None:
    """From an evicted parameter it may be sent at any time, to one it must be there."""
    if rank == 0:
        torch.distributed.send(weight_of(model), 1)
        return
    if is_evicted(weight_of(model)):
        with pytest.raises(swapper.SwapError, match="irecv into an evicted parameter"):
            torch.distributed.irecv(weight_of(model), 0)
    with swapper.gathered([weight_of(model)]):
        torch.distributed.irecv(weight_of(model), 0).wait()  # type: ignore[union-attr]


def send_or_receive(rank: int, model: nn.Module) -> None:
    if rank == 0:
        torch.distributed.send(weight_of(model), 1)
    else:
        torch.distributed.recv(weight_of(model), 0)


def batch(rank: int, model: nn.Module) -> object:
    received = torch.empty(SIDE, SIDE)
    both = torch.distributed.irecv, torch.distributed.isend
    tensors = received, model.get_parameter("0.weight")
    operations = [torch.distributed.P2POp(each, t, 1 - rank) for each, t in zip(both, tensors, strict=True)]
    return received, torch.distributed.batch_isend_irecv(operations)


def scatter(rank: int, model: nn.Module) -> object:
    received = torch.empty(SIDE, SIDE)
    given = [model.get_parameter(f"{i}.weight") for i in (1, 4)] if rank == 0 else None
    torch.distributed.scatter(received, given)
    given = [model.state_dict()[f"{i}.weight"] for i in (2, 3)] if rank == 1 else None
    return received, [torch.distributed.scatter(received, given, 1, async_op=True)]


def reduce_scatter(rank: int, model: nn.Module) -> object:
    received = torch.empty(SIDE, SIDE)
    given = [model.get_parameter("1.weight"), model.state_dict()["4.weight"]]
    torch.distributed.reduce_scatter(received, given)
    return received, []


def gather_into_parameters(rank: int, model: nn.Module) -> None:
    given = torch.full((SIDE, SIDE), 0.25 + rank)
    torch.distributed.all_gather([model.get_parameter("1.weight"), model.state_dict()["4.weight"]], given)
    gathered = [model.get_parameter(f"{i}.weight") for i in (2, 3)] if rank == 0 else None
    torch.distributed.gather(given, gathered)


USES: dict[str, Use] = {
    "broadcast": lambda rank, model: (None, [torch.distributed.broadcast(weight_of(model), 0, async_op=True)]),
    "broadcasts at once": broadcast_at_once,
    "broadcast of a state dict": broadcast_state,
    "all_reduce": lambda rank, model: torch.distributed.all_reduce(weight_of(model)),
    "all_reduce of a part": lambda rank, model: torch.distributed.all_reduce(model.state_dict()["1.weight"][3:9]),
    "coalesced": reduce_coalesced,
    "all_gather_into_tensor": gather_into,
    "all_gather": gather_list,
    "scatter": scatter,
    "reduce_scatter": reduce_scatter,
    "all_gather and gather into parameters": gather_into_parameters,
    "send": send_or_receive,
    "irecv": receive_later,
    "isend": swap_with_the_other,
    "batch": batch,
    "functional all_reduce": lambda rank, model: functional.all_reduce(weight_of(model), "sum", [0, 1]),
    "functional all_gather": lambda rank, model: functional.all_gather_tensor(weight_of(model), 0, [0, 1]),
}


def bits(model: nn.Module) -> list[bytes]:
    return [p.detach().numpy().tobytes() for p in model.parameters()]


def use_all(rank: int, directory: str) -> None:
    release = Lease.release

    def poison(lease: Lease) -> None:
        """What is given back is overwritten: a float is NaN then."""
        if not lease.released and (lease.transfer is None or lease.transfer.done()):
            lease.tensor.fill_(0xFF)
        release(lease)

    torch.distributed.init_process_group("gloo")
    try:
        plain, mine = model_of(rank), model_of(rank)
        config = OffloadConfig(
            nvme_path=directory,
            pool_bytes="256KiB",
            bucket_bytes="64KiB",
            offload_optimizer={"device": "none"},
            offload_param={"device": "nvme"},
        )
        swapper.offload(mine, config=config)
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(Lease, "release", poison)
            for name, use in USES.items():
                results = []
                for model in (plain, mine):
                    # Each of its threads has something to do until the other rank comes.
                    before: list[Any] = [torch.distributed.barrier(async_op=True) for _ in range(4)]
                    if rank == 1:
                        time.sleep(0.05)
                    result: Any = use(rank, model)
                    for p in model.parameters():  # Others come to where it was.
                        assert p.sum().isfinite(), name
                    if isinstance(result, tuple):
                        for work in result[1]:
                            work.wait()
                        result = result[0]
                    for work in before:
                        work.wait()
                    results.append(result)
                assert all(map(is_evicted, mine.parameters()))
                results = [each if isinstance(each, list) else [each] for each in results]
                for one, other in zip(*results, strict=True):
                    assert (one is other is None) or torch.equal(one + 0, other + 0), name
                assert bits(plain) == bits(mine), name
        mine.swapper.close()  # type: ignore[operator, union-attr]
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.long
def test_collectives_of_evicted_parameters(nvme_path: Path, leaves_nothing: None) -> None:
    ranks.in_processes(use_all, str(nvme_path))
