"""Gradients of several ranks that are stored as bf16: shards of FSDP2, and replicas of DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rounded_gradients import RoundedGradients
from sharded_nets import Case, Net, in_processes, loss_of, same, sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import swapper
from swapper.config import OffloadConfig
from swapper.tensors.evicted_gradients import raw_gradient

BF16 = {"device": "nvme", "encoding": "bf16"}


def config_of(directory: str, **more: Any) -> OffloadConfig:
    sizes = {"pool_bytes": "2MiB", "bucket_bytes": "16KiB", "gradient_accumulation_steps": 2}
    given = {"offload_optimizer": {"device": "nvme"}, "offload_gradient": BF16, **more}
    return OffloadConfig(nvme_path=directory, **{**sizes, **given})


def assert_same(plain: nn.Module, net: nn.Module) -> None:
    for (name, p), q in zip(plain.named_parameters(), net.parameters(), strict=True):
        assert same(p, q), name


def train_shards(rank: int, directory: str) -> None:
    for parameters in ("none", "nvme"):
        plain, net = (sharded(Case(blocks=2)) for _ in range(2))
        reference = RoundedGradients(torch.optim.AdamW(plain.parameters(), lr=1e-2))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        swapper.offload(net, optimizer, config_of(directory, offload_param={"device": parameters}))
        for step in range(3):
            for turn in range(2):
                reference.backward(loss_of(plain, 10 * step + turn))
                loss_of(net, 10 * step + turn).backward()
            if step == 1:
                norms = [
                    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5),
                    swapper.of(optimizer).clip_grad_norm_(0.5),
                ]
                assert same(*norms)
            assert any(raw_gradient(p) is None and p.grad is not None for p in net.parameters())
            reference.step()
            optimizer.step()
            reference.zero_grad()
            optimizer.zero_grad()
            assert_same(plain, net)
        if parameters == "nvme":
            net.swapper.close()  # type: ignore[operator, union-attr]
        swapper.of(optimizer).close()


@pytest.mark.long
def test_shards_have_the_bits_of_the_reference(nvme_path: Path, leaves_nothing: None) -> None:
    in_processes(train_shards, str(nvme_path))


def refuse(rank: int, directory: str) -> None:
    net: Net = sharded(Case(blocks=1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    gradient = {"device": "nvme", "encoding": "bf16" if rank else "exact"}
    with pytest.raises(swapper.ConfigError, match=r"offload_gradient.encoding: exact on rank 0, bf16 on rank 1"):
        swapper.offload(net, optimizer, config_of(directory, offload_gradient=gradient))
    net = sharded(Case(blocks=1, mesh="columns"))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    with pytest.raises(swapper.ConfigError, match=r"offload_gradient.encoding: .*gradients are encoded only where"):
        swapper.offload(net, optimizer, config_of(directory))


@pytest.mark.long
def test_what_cannot_be_is_refused_by_all_ranks(nvme_path: Path, leaves_nothing: None) -> None:
    in_processes(refuse, str(nvme_path))


def train_replicas(rank: int, directory: str) -> None:
    def made() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 130), nn.Tanh(), nn.Linear(130, 65))

    plain, net = made(), made()
    replicas = [DistributedDataParallel(each) for each in (plain, net)]
    reference = RoundedGradients(torch.optim.AdamW(plain.parameters(), lr=1e-2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    swapper.wrap_optimizer(optimizer, config_of(directory))
    for step in range(3):
        for turn in range(2):
            generator = torch.Generator().manual_seed(100 * step + 10 * turn + rank)
            x = torch.randn(4, 64, generator=generator)
            reference.backward(replicas[0](x).square().mean())
            replicas[1](x).square().mean().backward()
        assert any(raw_gradient(p) is None for p in net.parameters())
        reference.step()
        optimizer.step()
        reference.zero_grad()
        optimizer.zero_grad()
        assert_same(plain, net)
    for p in net.parameters():
        others = [torch.empty_like(p) for _ in range(2)]
        torch.distributed.all_gather(others, p.detach())
        assert same(others[0], others[1])
    swapper.of(optimizer).close()


@pytest.mark.long
def test_replicas_stay_alike(nvme_path: Path, leaves_nothing: None) -> None:
    in_processes(train_replicas, str(nvme_path))


def look_on_one_rank(rank: int, directory: str) -> None:
    """Rank 0 alone looks at gradients between micro-batches, or holds them: those stay in memory there."""

    def made(way: str) -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
        if way == "shards":
            mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
            for module in (net[0], net[2], net):
                fully_shard(module, mesh=mesh)
            return net, net
        return net, DistributedDataParallel(net, gradient_as_bucket_view=way == "views")

    def local(tensor: Any) -> torch.Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def trained(way: str, looks: str, to_none: bool) -> list[torch.Tensor]:
        net, parallel = made(way)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        swapper.wrap_optimizer(optimizer, config_of(directory, gradient_accumulation_steps=3))
        kept: list[Any] = []
        for step in range(3):
            for turn in range(3):
                generator = torch.Generator().manual_seed(100 * step + 10 * turn + rank)
                parallel(torch.randn(4, 64, generator=generator)).square().mean().backward()
                if rank == 0 and turn == step:
                    if looks == "values":
                        assert all(local(p.grad).norm() > 0 for p in net.parameters())
                    elif looks == "objects":
                        kept[:] = [p.grad for p in net.parameters()]
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
            for p in net.parameters():
                others = [torch.empty_like(local(p)) for _ in range(2)]
                torch.distributed.all_gather(others, local(p).detach())
                assert same(others[0], others[1]), (way, looks, to_none, step)
        swapper.of(optimizer).close()
        return [local(p).detach() for p in net.parameters()]

    for way in ("copies", "views", "shards"):
        expected = trained(way, "", True)
        for looks in ("values", "objects"):
            for to_none in (True, False):
                assert all(map(same, trained(way, looks, to_none), expected)), (way, looks, to_none)


@pytest.mark.long
def test_replicas_stay_alike_if_one_rank_looks_at_gradients(nvme_path: Path, leaves_nothing: None) -> None:
    in_processes(look_on_one_rank, str(nvme_path))


def edit_between(rank: int, directory: str) -> None:
    """Two optimizers: what was done to the gradients of one is as it was after the backward of the other."""
    for views in (False, True):
        nets = [nn.Sequential(nn.Linear(64, 130), nn.Tanh(), nn.Linear(130, 65)) for _ in range(2)]
        models = [DistributedDataParallel(net, gradient_as_bucket_view=views) for net in nets]
        optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in nets]
        for optimizer in optimizers:
            swapper.wrap_optimizer(optimizer, config_of(directory, pool_bytes="4MiB", gradient_accumulation_steps=1))
        for clips in (False, True):
            models[0](torch.randn(4, 64)).square().mean().backward()
            if clips:
                swapper.of(optimizers[0]).clip_grad_norm_(1e-3)
                if rank == 0:
                    assert all(p.grad is not None and p.grad.norm() > 0 for p in nets[0].parameters())
            else:
                for p in nets[0].parameters():
                    assert p.grad is not None
                    p.grad.mul_(0.3)
            expected = (
                [] if clips and rank else [torch.clone(p.grad) for p in nets[0].parameters() if p.grad is not None]
            )
            models[1](torch.randn(4, 64)).square().mean().backward()
            found = [p.grad for p in nets[0].parameters() if p.grad is not None]
            assert all(map(same, [torch.clone(each) for each in found[: len(expected)]], expected)), (views, clips)
            for p in nets[0].parameters():
                assert p.grad is not None
                others = [torch.empty_like(p) for _ in range(2)]
                torch.distributed.all_gather(others, torch.clone(p.grad))
                assert same(others[0], others[1]), (views, clips)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for net in nets:
                for p in net.parameters():
                    others = [torch.empty_like(p) for _ in range(2)]
                    torch.distributed.all_gather(others, p.detach())
                    assert same(others[0], others[1]), (views, clips)
        for optimizer in optimizers:
            swapper.of(optimizer).close()


@pytest.mark.long
def test_gradients_edited_before_the_backward_of_another_optimizer(nvme_path: Path, leaves_nothing: None) -> None:
    in_processes(edit_between, str(nvme_path))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(128, 128) for _ in range(3)])

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        return torch.stack([self.layers[number](x) for number in used]).square().mean()


def use_other_branches(rank: int, directory: str) -> None:
    """What one rank has not used arrives all the same, reduced: it is rounded there too, where it stays in memory."""
    for views in (False, True):
        for bucket_cap_mb in (0.01, 25):
            net = Branches()
            model = DistributedDataParallel(
                net, gradient_as_bucket_view=views, find_unused_parameters=True, bucket_cap_mb=bucket_cap_mb
            )
            optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
            swapper.wrap_optimizer(optimizer, config_of(directory, pool_bytes="4MiB", gradient_accumulation_steps=3))
            for step in range(2):
                for turn in range(3):
                    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(10 * step + turn + 100 * rank))
                    model(x, [0, 1] if (turn + rank) % 2 else [0]).backward()
                    if step or rank == 0:
                        assert all(p.grad is None or p.grad.norm() >= 0 for p in net.parameters())
                optimizer.step()
                optimizer.zero_grad(set_to_none=bool(step))
                for p in net.parameters():
                    others = [torch.empty_like(p) for _ in range(2)]
                    torch.distributed.all_gather(others, p.detach())
                    assert same(others[0], others[1]), (views, bucket_cap_mb, step)
            swapper.of(optimizer).close()


@pytest.mark.long
def test_what_other_ranks_alone_have_used_is_rounded(nvme_path: Path, leaves_nothing: None) -> None:
    in_processes(use_other_branches, str(nvme_path))
