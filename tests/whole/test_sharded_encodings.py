"""`encoding: bf16` of DTensors: an element is rounded alike on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from training import same_bits

import swapper

SHAPES = [(301, 33), (70, 71), (12, 12), (5000,), (1, 4096)]
"""Uneven on two ranks and on three; of the second a rank has less than 16 KiB; of the last, rank 1 has nothing."""


def values_of(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def config_of(path: Path, **settings: Any) -> swapper.OffloadConfig:
    state = {"device": "nvme", "encoding": "bf16", **settings}
    return swapper.OffloadConfig(nvme_path=path, pool_bytes="8MiB", bucket_bytes="48KiB", offload_optimizer=state)


def train(module: nn.ParameterList, optimizer: torch.optim.Optimizer, steps: range, mesh: Any = None) -> None:
    for seed in steps:
        for p, gradient in zip(module, values_of(1 + seed), strict=True):
            p.grad = gradient if mesh is None else distribute_tensor(gradient, mesh, [Shard(0)])
        optimizer.step()
        optimizer.zero_grad()


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def make(mesh: Any = None) -> tuple[nn.ParameterList, torch.optim.Optimizer]:
    values = values_of(0)
    module = nn.ParameterList(v if mesh is None else distribute_tensor(v, mesh, [Shard(0)]) for v in values)
    return module, torch.optim.AdamW(module.parameters(), lr=1e-2)


def train_sharded(rank: int, directory: str, count: int) -> None:
    torch.distributed.init_process_group("gloo")
    try:
        mesh = init_device_mesh("cpu", (count,))
        path = Path(directory)
        expected = torch.load(path / "expected.pt")
        module, optimizer = make(mesh)
        swapper.wrap_optimizer(optimizer, config_of(path, native_step="auto"))
        train(module, optimizer, range(2), mesh)
        swapper.save_checkpoint(path / f"saved-{count}", module, optimizer)
        train(module, optimizer, range(2, 4), mesh)
        compare(module, optimizer, expected)
        # From one process, and back from another cut.
        swapper.load_checkpoint(path / "saved", module, optimizer)
        train(module, optimizer, range(2, 4), mesh)
        compare(module, optimizer, expected)
        swapper.of(optimizer).close()
        refuse_columns(mesh, path)
    finally:
        torch.distributed.destroy_process_group()


def compare(module: nn.ParameterList, optimizer: torch.optim.Optimizer, expected: dict[str, Any]) -> None:
    for p, value in zip(module, expected["values"], strict=True):
        assert same_bits(whole(p.detach()), value)
    state = optimizer.state_dict()["state"]
    for number, entries in expected["state"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert same_bits(whole(state[number][key]), entries[key]), (number, key)


def refuse_columns(mesh: Any, path: Path) -> None:
    square, column = (
        torch.randn(*shape, generator=torch.Generator().manual_seed(0)) for shape in ((96, 96), (9216, 1))
    )
    # Of one column the first rank has all; it refuses as the others do.
    cases: list[tuple[torch.Tensor, Any, bool]] = [(square, Shard(1), False), (column, Shard(1), False)]
    for value, placement, works in [*cases, (square, Replicate(), True)]:
        p = nn.Parameter(distribute_tensor(value, mesh, [placement]))
        optimizer = torch.optim.AdamW([p])
        if not works:
            with pytest.raises(swapper.ConfigError, match=r"encoding: a parameter is a DTensor of shape"):
                swapper.wrap_optimizer(optimizer, config_of(path))
        else:
            swapper.wrap_optimizer(optimizer, config_of(path))
            swapper.of(optimizer).close()
    p = nn.Parameter(distribute_tensor(square, mesh, [Shard(0)]))
    with pytest.raises(swapper.ConfigError, match=r"encoding: Muon, which is not known"):
        swapper.wrap_optimizer(torch.optim.Muon([p]), config_of(path))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("count", [2, 3])
def test_ranks_have_the_bits_of_one_process(nvme_path: Path, count: int) -> None:
    module, optimizer = make()
    swapper.wrap_optimizer(optimizer, config_of(nvme_path))
    train(module, optimizer, range(2))
    swapper.save_checkpoint(nvme_path / "saved", module, optimizer)
    train(module, optimizer, range(2, 4))
    state = optimizer.state_dict()
    torch.save({"values": [p.detach() for p in module], "state": state["state"]}, nvme_path / "expected.pt")
    ranks.in_processes(train_sharded, str(nvme_path), count, ranks=count)
    # Saved by ranks, and loaded by one process.
    swapper.load_checkpoint(nvme_path / f"saved-{count}", module, optimizer)
    train(module, optimizer, range(2, 4))
    compare(module, optimizer, torch.load(nvme_path / "expected.pt"))
    swapper.of(optimizer).close()
