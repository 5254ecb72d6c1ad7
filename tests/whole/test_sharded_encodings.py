"""`encoding` of DTensors: an element is rounded alike on any number of ranks."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from training import same_bits

import swapper
from swapper.optimizer import encodings

SHAPES = {
    "bf16": [(301, 33), (70, 71), (12, 12), (5000,), (1, 4096)],
    "int8": [(301, 256), (20, 256), (12, 12), (7, 3, 512), (1, 4096)],
    "packed": [(301, 33), (70, 71), (12, 12), (5000,), (1, 4096)],
}
"""Uneven on two ranks and on three; of the second a rank has less than 16 KiB; of the last, rank 1 has nothing."""


def values_of(seed: int, encoding: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES[encoding]]


def config_of(path: Path, encoding: Any, **settings: Any) -> swapper.OffloadConfig:
    state = {"device": "nvme", "encoding": encoding, **settings}
    return swapper.OffloadConfig(nvme_path=path, pool_bytes="8MiB", bucket_bytes="48KiB", offload_optimizer=state)


def train(
    module: nn.ParameterList, optimizer: torch.optim.Optimizer, steps: range, encoding: str, mesh: Any = None
) -> None:
    for seed in steps:
        for p, gradient in zip(module, values_of(1 + seed, encoding), strict=True):
            p.grad = gradient if mesh is None else distribute_tensor(gradient, mesh, [Shard(0)])
        optimizer.step()
        optimizer.zero_grad()


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def make(encoding: str, mesh: Any = None) -> tuple[nn.ParameterList, torch.optim.Optimizer]:
    values = values_of(0, encoding)
    module = nn.ParameterList(v if mesh is None else distribute_tensor(v, mesh, [Shard(0)]) for v in values)
    return module, torch.optim.AdamW(module.parameters(), lr=1e-2)


def train_sharded(rank: int, directory: str, count: int, encoding: str) -> None:
    torch.distributed.init_process_group("gloo")
    try:
        mesh = init_device_mesh("cpu", (count,))
        path = Path(directory)
        expected = torch.load(path / "expected.pt")
        module, optimizer = make(encoding, mesh)
        swapper.wrap_optimizer(optimizer, config_of(path, encoding, native_step="on"))
        train(module, optimizer, range(2), encoding, mesh)
        swapper.save_checkpoint(path / f"saved-{count}", module, optimizer)
        train(module, optimizer, range(2, 4), encoding, mesh)
        compare(module, optimizer, expected)
        # From one process, and back from another cut.
        swapper.load_checkpoint(path / "saved", module, optimizer)
        train(module, optimizer, range(2, 4), encoding, mesh)
        compare(module, optimizer, expected)
        swapper.of(optimizer).close()
        if encoding != "packed":
            refuse_columns(mesh, path, encoding)
        if encoding == "int8":
            refuse_parts_of_blocks(mesh, path, count)
    finally:
        torch.distributed.destroy_process_group()


def compare(module: nn.ParameterList, optimizer: torch.optim.Optimizer, expected: dict[str, Any]) -> None:
    for p, value in zip(module, expected["values"], strict=True):
        assert same_bits(whole(p.detach()), value)
    state = optimizer.state_dict()["state"]
    for number, entries in expected["state"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert same_bits(whole(state[number][key]), entries[key]), (number, key)


def refuse_parts_of_blocks(mesh: Any, path: Path, count: int) -> None:
    """Also where this rank's part begins with one, as that of rank 0 does, or has nothing."""
    for shape, works in [((301, 33), False), ((4 * count * 256, 3), True), ((8, 33), True), ((count - 1, 5000), False)]:
        p = nn.Parameter(distribute_tensor(torch.zeros(shape), mesh, [Shard(0)]))
        for state in ("int8", {"exp_avg_sq": "int8"}):
            optimizer = torch.optim.AdamW([p])
            if works or (count == 2 and shape[0] == 1):
                swapper.wrap_optimizer(optimizer, config_of(path, state))
                swapper.of(optimizer).close()
            else:
                with pytest.raises(swapper.ConfigError, match=r"encoding: int8 has blocks of 256 elements, and ranks"):
                    swapper.wrap_optimizer(optimizer, config_of(path, state))
        optimizer = torch.optim.AdamW([p])
        swapper.wrap_optimizer(optimizer, config_of(path, {"exp_avg_sq": "bf16"}))
        swapper.of(optimizer).close()


def refuse_columns(mesh: Any, path: Path, encoding: str) -> None:
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
                swapper.wrap_optimizer(optimizer, config_of(path, encoding))
        else:
            swapper.wrap_optimizer(optimizer, config_of(path, encoding))
            swapper.of(optimizer).close()
    p = nn.Parameter(distribute_tensor(square, mesh, [Shard(0)]))
    with pytest.raises(swapper.ConfigError, match=r"encoding: Muon, which is not known"):
        swapper.wrap_optimizer(torch.optim.Muon([p]), config_of(path, encoding))


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize("encoding", SHAPES)
@pytest.mark.parametrize("count", [2, 3])
def test_ranks_have_the_bits_of_one_process(nvme_path: Path, count: int, encoding: str) -> None:
    module, optimizer = make(encoding)
    swapper.wrap_optimizer(optimizer, config_of(nvme_path, encoding))
    train(module, optimizer, range(2), encoding)
    swapper.save_checkpoint(nvme_path / "saved", module, optimizer)
    train(module, optimizer, range(2, 4), encoding)
    state = optimizer.state_dict()
    torch.save({"values": [p.detach() for p in module], "state": state["state"]}, nvme_path / "expected.pt")
    ranks.in_processes(train_sharded, str(nvme_path), count, encoding, ranks=count)
    # Saved by ranks, and loaded by one process.
    swapper.load_checkpoint(nvme_path / f"saved-{count}", module, optimizer)
    train(module, optimizer, range(2, 4), encoding)
    compare(module, optimizer, torch.load(nvme_path / "expected.pt"))
    swapper.of(optimizer).close()


def test_parts_of_blocks_are_refused_on_any_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch cuts: where several dimensions of a mesh cut rows, parts of parts too."""
    monkeypatch.setattr(encodings, "is_sharded", lambda parameter: True)
    chance = random.Random(0)
    refused = 0
    for _ in range(1000):
        mesh = tuple(chance.randint(1, 4) for _ in range(chance.randint(1, 3)))
        placements = [chance.choice([Shard(0), Shard(0), Replicate()]) for _ in mesh]
        shape = (chance.randint(1, 40), chance.choice([32, 64, 128, 256, 3]), chance.choice([1, 2, 4]))
        row_numel = shape[1] * shape[2]
        starts = {
            offsets[0] * row_numel
            for at in itertools.product(*map(range, mesh))
            for local, offsets in [_compute_local_shape_and_global_offset(shape, mesh, list(at), placements)]
            if local[0]
        }
        parameter: Any = SimpleNamespace(shape=shape, placements=placements, device_mesh=SimpleNamespace(shape=mesh))
        is_refused = False
        try:
            encodings._check_blocks(parameter)
        except swapper.ConfigError:
            is_refused = True
        assert is_refused == any(start % 256 for start in starts), (shape, mesh, placements)
        refused += is_refused
    assert 200 < refused < 800
