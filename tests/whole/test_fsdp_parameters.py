"""`swapper.offload` after `fully_shard`: shards on disk, with memory that is poisoned when it is given back."""

from __future__ import annotations

import ctypes
import gc
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupts import interrupted_at, places_of
from sampling import ALL, EVERY, SEED
from sharded_nets import (
    LAYER_BYTES,
    SIDE,
    Case,
    Layer,
    Net,
    Twins,
    config_of,
    forget_iteration,
    in_processes,
    local,
    loss_of,
    memory_bytes,
    mesh_of,
    most_pairs,
    poisoned,
    same,
    sharded,
    whole,
)
from sharded_uses import USES, train_alike
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import swapper
from swapper.parameter import fsdp
from swapper.tensors.evicted import is_evicted

CLASSES: list[type[torch.optim.Optimizer]] = [
    *(torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adadelta, torch.optim.Adamax),
    *(torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop),
]
"""Rprop fails on DTensors in plain PyTorch, too."""


def cases(count: int, rank_count: int) -> Iterator[Case]:
    chance = random.Random(f"{SEED} {rank_count} parameters")
    yield Case()
    for _ in range(count - 1):
        dtype = chance.choice([torch.float32, torch.bfloat16])
        in_backward = chance.random() < 0.25
        mesh = chance.choice(["shard", "shard", "hybrid", "columns", "tensor"])
        micro_batches = chance.choice([1, 2])
        yield Case(
            dtype,
            chance.choice(CLASSES),
            masters=dtype is torch.bfloat16 and chance.random() < 0.5,
            reshard=chance.random() < 0.5,
            mixed=dtype is torch.float32 and chance.random() < 0.5,
            clips=not in_backward and mesh != "tensor" and chance.random() < 0.5,
            micro_batches=micro_batches,
            syncs_all=chance.random() < 0.5,
            mesh=mesh,
            checkpoints=chance.random() < 0.4,
            prefetches=chance.random() < 0.4,
            in_backward=in_backward,
            evaluates=chance.random() < 0.5,
            keeps_unsharded=micro_batches > 1 and chance.random() < 0.5,
            grouped=chance.random() < 0.3,
            gradients=chance.choice(["none", "nvme"]),
            packed=chance.random() < 0.5,
            steps=10 if EVERY else 6 if ALL else 4,
        )


def train_cases(rank: int, directory: str, count: int) -> None:
    for case in most_pairs(list(cases(max(count, 30 if ALL else 0), torch.distributed.get_world_size())), count):
        try:
            with poisoned():
                twins = Twins(directory, case)
                for step in range(case.steps):
                    twins.train()
                    if step in (0, case.steps - 1):
                        twins.compare()
                plan = twins.swapper.plan
                assert twins.swapper.stats().bytes_read or plan.kept_bytes < plan.needs.least_bytes + (64 << 10)
                twins.close()
        except Exception as error:
            error.add_note(f"in rank {rank}: {case}")
            raise


@pytest.mark.long
def test_same_bits_as_plain_fsdp(nvme_path: Path, leaves_nothing: None) -> None:
    in_processes(train_cases, str(nvme_path), 30 if EVERY else 16 if ALL else 2)


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("count", [1, 3])
def test_same_bits_on_other_numbers_of_ranks(nvme_path: Path, count: int, leaves_nothing: None) -> None:
    in_processes(train_cases, str(nvme_path), 12 if EVERY else 8 if ALL else 4, count=count)


def train_on_two_dimensions(rank: int, directory: str, mesh: str, more: dict[str, Any]) -> None:
    case = Case(mesh=mesh, steps=4, micro_batches=2, syncs_all=not more, **more)
    with poisoned():
        twins = Twins(directory, case)
        sizes = {p.device_mesh.size() for p in twins.parameters[1] if isinstance(p, DTensor)}
        assert max(sizes) == 4, sizes
        for _ in range(case.steps):
            twins.train()
        twins.compare()
        twins.compare_state()
        twins.close()


TWO_DIMENSIONS: dict[str, dict[str, Any]] = {
    "state": {"parameters": "none", "scarce": False},
    "everything": {"gradients": "nvme"},
    "parameters, in backward": {"in_backward": True, "checkpoints": True},
}


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["hybrid", "tensor"])
@pytest.mark.parametrize("what", TWO_DIMENSIONS)
def test_same_bits_on_a_mesh_of_two_by_two(nvme_path: Path, mesh: str, what: str, leaves_nothing: None) -> None:
    in_processes(train_on_two_dimensions, str(nvme_path), mesh, TWO_DIMENSIONS[what], count=4)


# --- What users call -------------------------------------------------------------------------------------------------


def are_refused(rank: int, directory: str) -> None:
    def refuses(net: nn.Module, message: str, **more: Any) -> None:
        parameters = dict(net.named_parameters())
        with pytest.raises(swapper.ConfigError, match=message):
            swapper.offload(net, config=config_of(directory, **more))
        assert "swapper" not in vars(net)
        assert all(parameters[name] is p and not is_evicted(local(p)) for name, p in net.named_parameters())

    plain = sharded(Case())
    net = Net()
    fully_shard(net, offload_policy=CPUOffloadPolicy(pin_memory=False))
    refuses(net, "CPUOffloadPolicy")
    alone = nn.Linear(4, 4)
    alone.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)]))
    refuses(alone, "weight, a DTensor that FSDP2 does not have")
    net = sharded(Case())
    refuses(net, "pool_bytes", pool_bytes="64KiB")
    with pytest.raises(swapper.ConfigError, match="DTensor"):
        swapper.offload(net, config=config_of(directory), weights=directory)
    assert swapper.check(net, config=config_of(directory)).parameter_bytes
    # Another torch.
    internals = torch.distributed.fsdp._fully_shard
    version = f"torch {torch.__version__}".replace("+", r"\+")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(internals._fsdp_param.FSDPParam, "reset_sharded_param", lambda self, other: None)
        fsdp.check_names.cache_clear()
        refuses(net, version)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(internals._fsdp_param_group.FSDPParamGroup, "unshard")
        refuses(net, version)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(internals._fsdp_param_group.FSDPParamGroup, "unshard", lambda self, async_op=False: None)
        refuses(net, "FSDPParamGroup._all_gather_result is gone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(fsdp._USERS, "_sharded_param_data", {"FSDPParam.all_gather_inputs"})
        refuses(net, "_sharded_param_data, used by FSDPParam")
    with pytest.MonkeyPatch.context() as patch:  # A user of another version is none of this one.
        patch.setitem(fsdp._USERS, "foreach_all_gather", {*fsdp._USERS["foreach_all_gather"], "FSDPParamGroup.other"})
        fsdp.check_names.cache_clear()
        fsdp.check_names()
    fsdp.check_names.cache_clear()
    # One rank alone.
    for failing in (0, 1):
        more = {"pool_bytes": "64KiB"} if rank == failing else {}
        refuses(net, "^pool_bytes" if rank == failing else f"on rank {failing}: pool_", **more)
        given: Any = "no.yaml" if rank == failing else config_of(directory)
        with pytest.raises(swapper.ConfigError, match=f"{'' if rank == failing else f'on rank {failing}: .*'}no.yaml"):
            swapper.offload(net, config=given)
    more = {"offload_gradient": {"device": "nvme"}} if rank else {}
    refuses(net, "^offload_gradient.device: none on rank 0, nvme on rank 1; where", **more)
    more = {"offload_optimizer": {"device": "none" if rank else "cpu"}}
    refuses(net, "^offload_optimizer.device: cpu on rank 0, none on rank 1; where", **more)
    more = {"offload_optimizer": {"device": "nvme", "step_in_backward": not rank}}
    refuses(net, "^offload_optimizer.step_in_backward: true on rank 0, false on rank 1; where", **more)
    more = {"offload_param": {"device": "none" if rank else "nvme"}}
    refuses(net, "^offload_param.device: nvme on rank 0, none on rank 1; where", **more)
    assert same(loss_of(net), loss_of(plain))
    swapper.offload(net, config=config_of(directory))
    net.swapper.close()  # type: ignore[operator, union-attr]


def train_beside_ignored(rank: int, directory: str) -> None:
    """FSDP2 ignores the embedding, so the whole forward is within our hooks; they see what tensor parallelism saves."""
    case = Case(mesh="tensor")
    nets = [whole(case) for _ in range(2)]
    mesh = mesh_of(case)
    for net in nets:
        for block in net.blocks:
            parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(block, mesh=mesh["data"])
        fully_shard(net, mesh=mesh["data"], ignored_params=set(net.embed.parameters()))
    swapper.offload(nets[1], config=config_of(directory))
    train_alike(*nets)
    nets[1].swapper.close()  # type: ignore[operator, union-attr]


def train_on_several_meshes(rank: int, directory: str) -> None:
    """Parameters of one call of `fully_shard` have several meshes, as experts have: it makes a group of each."""
    common = torch.distributed.fsdp._fully_shard._fsdp_common
    if not hasattr(common, "ShardPlacementResult"):  # Of an older torch.
        return
    one = init_device_mesh("cpu", (2,))
    two = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    experts = common.HSDPMeshInfo(two, shard_mesh_dim=1, replicate_mesh_dim=0)
    runs = []
    for swapped in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        expert = net[1].weight

        def place(p: nn.Parameter, expert: nn.Parameter = expert) -> Any:
            return common.ShardPlacementResult(Shard(0), experts) if p is expert else None

        fully_shard(net, mesh=one, shard_placement_fn=place)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        if swapped:
            swapper.offload(net, optimizer, config_of(directory, offload_gradient={"device": "nvme"}))
        for _ in range(3):
            net(torch.ones(2, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append([local(p).detach().clone() for p in net.parameters()])
        if swapped:
            net.swapper.close()  # type: ignore[operator, union-attr]
            swapper.of(optimizer).close()
    assert all(map(same, *runs))


def use_all(rank: int, directory: str) -> None:
    for work in (*USES, train_beside_ignored, are_refused):
        try:
            with poisoned():
                work(rank, directory)
        except Exception as error:
            error.add_note(f"in rank {rank}: {work.__name__}")
            raise
        torch.distributed.barrier()


@pytest.mark.long
def test_state_dicts_uses_and_refusals(nvme_path: Path, leaves_nothing: None) -> None:
    in_processes(use_all, str(nvme_path))


@pytest.mark.long
def test_parameters_of_one_module_on_several_meshes(nvme_path: Path, leaves_nothing: None) -> None:
    in_processes(train_on_several_meshes, str(nvme_path))


def reshard_to_fewer(rank: int, directory: str) -> None:
    plain, net = (sharded(Case(reshard=2)) for _ in range(2))
    with torch.no_grad():
        loss_of(net)  # Blocks have what two ranks have of them.
    swapper.offload(net, config=config_of(directory))
    train_alike(plain, net)
    net.swapper.close()  # type: ignore[operator, union-attr]


@pytest.mark.thorough("by default: two ranks")
def test_offload_of_what_was_resharded_to_fewer_ranks(nvme_path: Path, leaves_nothing: None) -> None:
    in_processes(reshard_to_fewer, str(nvme_path), count=4)


def interrupt(rank: int, directory: str, test: str) -> None:
    os.environ["PYTEST_CURRENT_TEST"] = test
    plain, net = (sharded(Case()) for _ in range(2))
    swapper.offload(net, config=config_of(directory, "2MiB"))
    assert isinstance(net.swapper, swapper.ParameterSwapper)

    def use() -> None:
        with torch.no_grad():
            loss_of(net)
        for each in (*net.blocks, net):
            each.reshard()  # type: ignore[operator]

    use()
    for place in places_of(use, "parameter/fsdp.py", sample=None if ALL else 15):
        assert interrupted_at(place, use, "parameter/fsdp.py"), place
        forget_iteration(net)
        use()
        assert not any(held.holds or held.attached for held in net.swapper._all), place
    train_alike(plain, net)
    net.swapper.close()


def test_interrupts_leave_nothing_in_memory(nvme_path: Path, leaves_nothing: None) -> None:
    in_processes(interrupt, str(nvme_path), os.environ["PYTEST_CURRENT_TEST"], count=1)


# --- Memory ----------------------------------------------------------------------------------------------------------

POOL_BYTES = 3 << 20


def count_memory(rank: int, directory: str) -> None:
    m_mmap_threshold = -3
    ctypes.CDLL(None).mallopt(m_mmap_threshold, 1 << 16)  # What is freed goes back at once.
    grown = []
    for count in (2, 4, 32):  # The first makes threads, and what torch makes once.
        before = memory_bytes()
        net = nn.Sequential(*(Layer() for _ in range(count)))
        for layer in net:
            fully_shard(layer)
        fully_shard(net)
        swapper.offload(net, config=config_of(directory, POOL_BYTES))
        Layer.peak_bytes = 0
        with torch.no_grad():
            for _ in range(2):
                net(torch.ones(2, SIDE))
        grown.append(Layer.peak_bytes - before)
        net.swapper.close()  # type: ignore[operator, union-attr]
        del net, layer
        gc.collect()
    # Two that FSDP2 gathers, and the buffer of a collective for each.
    assert max(grown[1:]) < POOL_BYTES + 4 * LAYER_BYTES + (2 << 20), grown
    # 28 layers more have 28 times that. Their modules and hooks take 0.8 MB, and threads may have one or two at once.
    assert grown[2] < grown[1] + 3 * LAYER_BYTES, grown


@pytest.mark.thorough("by default: the bits with the least pool")
def test_memory_does_not_grow_with_layers(nvme_path: Path, leaves_nothing: None) -> None:
    in_processes(count_memory, str(nvme_path))
