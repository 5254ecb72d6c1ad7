"""`sim_group`: collectives of simulated devices."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from device_ranks import configure, in_device_processes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def collectives(rank: int) -> None:
    size = dist.get_world_size()
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        mine = (torch.arange(6) + 10 * rank).to("sim", dtype)
        whole = torch.empty(6 * size, dtype=dtype, device="sim")
        dist.all_gather_into_tensor(whole, mine)
        expected = torch.cat([torch.arange(6) + 10 * other for other in range(size)]).to(dtype)
        assert torch.equal(whole.cpu(), expected)
        part = torch.empty(6, dtype=dtype, device="sim")
        dist.reduce_scatter_tensor(part, whole)
        assert torch.equal(part.cpu(), size * expected[6 * rank : 6 * rank + 6])
        dist.all_reduce(part, op=dist.ReduceOp.MAX)
        assert torch.equal(part.cpu(), size * expected[-6:])
        dist.broadcast(mine, size - 1)
        assert torch.equal(mine.cpu(), expected[-6:])
        listed = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(listed, mine + rank)
        assert [int(each[0]) for each in listed] == [int(expected[-6]) + other for other in range(size)]
        listed = [torch.empty_like(mine) for _ in range(size)] if rank == 1 else []
        dist.gather(mine + rank, listed or None, 1)
        assert [int(each[0]) for each in listed] == [int(expected[-6]) + other for other in range(size) if listed]
    found: list[Any] = [None] * size
    dist.all_gather_object(found, f"rank {rank}")
    assert found == [f"rank {other}" for other in range(size)]
    mesh = init_device_mesh("sim", (size,))
    full = torch.arange(35.0).view(7, 5)
    tensor = distribute_tensor(full.to("sim"), mesh, [Shard(0)])
    assert torch.equal(tensor.full_tensor().cpu(), full)
    assert torch.equal(tensor.redistribute(mesh, [Shard(1)]).full_tensor().cpu(), full)
    assert torch.equal((tensor.sum() + 0).full_tensor().cpu(), full.sum())
    assert isinstance(tensor.redistribute(mesh, [Replicate()]), DTensor)


def is_late(rank: int) -> None:
    """The input is read, and the output written, when somebody waits; other streams are not waited for."""
    import sim_device

    mine, whole = torch.ones(4, device="sim"), torch.zeros(8, device="sim")
    torch.accelerator.synchronize()
    _, _, distance = sim_device.dma_window()
    seen = (ctypes.c_float * 8).from_address(whole.data_ptr() + distance)
    other = torch.Stream("sim")
    with other:
        sim_device.sleep(1000)
        mine.fill_(3)
    work = dist.all_gather_into_tensor(whole, mine, async_op=True)  # Does not wait for the other stream.
    assert list(seen) == [0] * 8
    assert work is not None
    work.wait()
    assert list(seen) == [0] * 8
    dist.all_reduce(torch.zeros(1))  # Of the host. A rank that waits for its device brings those of others as far.
    assert torch.equal(whole.cpu(), torch.ones(8))
    torch.accelerator.synchronize()  # `mine` may go.


def test_collectives_give_what_they_should() -> None:
    in_device_processes(collectives, settings="sim-random", count=3)


def test_collectives_are_late_and_in_the_order_of_their_stream() -> None:
    in_device_processes(is_late, settings="sim-lazy", count=2)


class Net(nn.Module):
    """301 rows are uneven on two ranks and on three; of one row the others have none."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(33, 301)
        self.down = nn.Linear(301, 33, bias=False)
        self.gate = nn.Linear(33, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(x))) * torch.sigmoid(self.gate(x))
        return out


def trained(device: str, mesh: Any, reshard: bool, policy: MixedPrecisionPolicy) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(Net(), Net(), Net()).to(device)
    for each in (*net, net):
        fully_shard(each, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    values = []
    for step in range(3):
        for micro in range(2):
            generator = torch.Generator().manual_seed(10 * step + micro + 100 * dist.get_rank())
            assert isinstance(net, FSDPModule)
            net.set_requires_gradient_sync(micro == 1 or step == 1)
            loss = net(torch.randn(4, 33, generator=generator).to(device)).float().square().sum()
            loss.backward()
            values.append(loss.detach().cpu())
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        assert isinstance(norm, DTensor)
        values.append(norm.full_tensor().cpu())
        optimizer.step()
        optimizer.zero_grad()
    return values + [p.full_tensor().detach().cpu() for p in net.parameters()]


def train(rank: int, settings: str) -> None:
    size = dist.get_world_size()
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for reshard, policy in itertools.product((True, False), (MixedPrecisionPolicy(), mixed)):
        found = trained("sim", init_device_mesh("sim", (size,)), reshard, policy)
        configure("sim-eager")
        assert all(map(torch.equal, found, trained("sim", init_device_mesh("sim", (size,)), reshard, policy)))
        if size == 2:  # Gloo adds those of three in another order.
            expected = trained("cpu", init_device_mesh("cpu", (size,)), reshard, policy)
            assert all(map(torch.equal, found, expected))
        configure(settings)
    hybrid = init_device_mesh("sim", (size, 1), mesh_dim_names=("replicate", "shard"))
    found = trained("sim", hybrid, True, mixed)
    configure("sim-eager")
    assert all(map(torch.equal, found, trained("sim", hybrid, True, mixed)))


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("settings", "count"), [("sim-lazy", 2), ("sim-random", 2), ("sim-lazy", 3), ("sim-random", 3)]
)
def test_fsdp_trains_alike_in_whatever_order_work_is_done(settings: str, count: int) -> None:
    in_device_processes(train, settings, settings=settings, count=count)
