"""What else shards in torch: FSDP1, `ZeroRedundancyOptimizer`, `PostLocalSGDOptimizer`; to the bit, or refused."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from sampling import SEED
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

import swapper

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # It uses torch.jit.
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

CPU = torch.device("cpu")
OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.RMSprop, {"centered": True}),
    (torch.optim.NAdam, {}),
]


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Its shards are uneven, and empty."""
    torch.manual_seed(0)
    layers = nn.Linear(33, 301), nn.Tanh(), nn.Linear(301, 12), nn.Tanh(), nn.Linear(12, 1)
    return nn.Sequential(*layers).to(dtype)


def config_of(directory: str, **more: Any) -> dict[str, Any]:
    state = {"device": "nvme", **more.pop("state", {})}
    sizes = {"pool_bytes": "2MiB", "bucket_bytes": "32KiB"}
    return {"nvme_path": directory, **sizes, "offload_optimizer": state, **more}


def backward(model: nn.Module, step: int, dtype: torch.dtype = torch.float32) -> None:
    generator = torch.Generator().manual_seed(10 * step + torch.distributed.get_rank())
    model(torch.randn(4, 33, generator=generator).to(dtype)).square().sum().backward()


def assert_same(a: Any, b: Any) -> None:
    one, other = (tree_leaves(each) for each in (a, b))
    assert len(one) == len(other) > 0
    for x, y in zip(one, other, strict=True):
        if isinstance(x, torch.Tensor):  # Of centered RMSprop some elements are NaN: the root of less than nothing.
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
        else:
            assert x == y


@contextmanager
def swapped(optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> Iterator[None]:
    swapper.wrap_optimizer(optimizer, config)
    try:
        yield
    finally:
        swapper.of(optimizer).close()


# --- FSDP1 -----------------------------------------------------------------------------------------------------------


def flattened(chance: random.Random, dtype: torch.dtype = torch.float32) -> Callable[[], FullyShardedDataParallel]:
    options: dict[str, Any] = {
        "use_orig_params": chance.random() < 0.6,
        "sharding_strategy": chance.choice([*[ShardingStrategy.FULL_SHARD] * 2, ShardingStrategy.SHARD_GRAD_OP]),
        "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16) if chance.random() < 0.4 else None,
        "device_id": CPU,
    }

    def make() -> FullyShardedDataParallel:
        model = net(dtype)
        model[0] = FullyShardedDataParallel(model[0], **options)
        return FullyShardedDataParallel(model, **options)

    return make


def train_fsdp1(directory: str, chance: random.Random) -> None:
    make = flattened(chance)
    cls, options = chance.choice(OPTIMIZERS)
    models = make(), make()
    optimizers = [cls(model.parameters(), lr=1e-2, **options) for model in models]
    clips = chance.random() < 0.5
    with swapped(optimizers[1], config_of(directory)):
        for step in range(8):
            for model, optimizer in zip(models, optimizers, strict=True):
                backward(model, step)
                if clips:
                    model.clip_grad_norm_(0.3)
                optimizer.step()
                optimizer.zero_grad()
            assert_same(*([*model.parameters()] for model in models))
            if step == 4:
                states = [
                    FullyShardedDataParallel.optim_state_dict(*each) for each in zip(models, optimizers, strict=True)
                ]
                assert_same(*states)
                for model, optimizer, state in zip(models, optimizers, reversed(states), strict=True):
                    optimizer.load_state_dict(
                        FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state)
                    )


def train_masters_of_fsdp1(directory: str, chance: random.Random) -> None:
    make = flattened(chance, torch.bfloat16)
    plain, model = make(), make()
    masters = [p.detach().float().requires_grad_() for p in plain.parameters()]
    by_hand = torch.optim.AdamW(masters, lr=1e-3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with swapped(optimizer, config_of(directory, state={"master_weights": True})):
        for step in range(8):
            for each in (plain, model):
                backward(each, step, torch.bfloat16)
            for p, master in zip(plain.parameters(), masters, strict=True):
                master.grad = None if p.grad is None else p.grad.float()
            by_hand.step()
            optimizer.step()
            for p, master in zip(plain.parameters(), masters, strict=True):
                p.data.copy_(master.detach())
            for each in (plain, model):
                each.zero_grad()
            assert_same([*plain.parameters()], [*model.parameters()])


def refuse_fsdp1(directory: str, chance: random.Random) -> None:
    model = flattened(chance)()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for call in (swapper.check, swapper.offload):
        with pytest.raises(swapper.ConfigError, match="FSDP1"):
            call(model, optimizer, config_of(directory, offload_param={"device": "nvme"}))
    with pytest.raises(swapper.ConfigError, match="step_in_backward"):
        swapper.wrap_optimizer(optimizer, config_of(directory, state={"step_in_backward": True}))
    with swapped(optimizer, config_of(directory)):
        for call in (swapper.save_checkpoint, swapper.load_checkpoint):
            with pytest.raises(swapper.ConfigError, match="FSDP1"):
                call(f"{directory}/checkpoint", model, optimizer)


# --- Optimizers around others ----------------------------------------------------------------------------------------


def train_zero(directory: str, chance: random.Random) -> None:
    """`ZeroRedundancyOptimizer` whose inner optimizer is swapped; its state is loaded before that."""
    cls, options = chance.choice(OPTIMIZERS)
    options = {"optimizer_class": cls, "lr": 1e-2, "parameters_as_bucket_view": chance.random() < 0.5, **options}
    models = [DistributedDataParallel(net()) for _ in range(2)]
    everything = chance.random() < 0.5 and not options["parameters_as_bucket_view"]
    saved: list[Any] = [None, None]
    for part in range(2):
        optimizers = [ZeroRedundancyOptimizer(model.parameters(), **options) for model in models]
        with pytest.raises(swapper.ConfigError, match="wraps another optimizer"):
            swapper.wrap_optimizer(optimizers[1], config_of(directory))
        if part == 1:
            assert_same(*saved)
            for optimizer, state in zip(optimizers, reversed(saved), strict=True):
                optimizer.load_state_dict(state)
                optimizer.state.clear()  # A second copy, which nobody uses.
        away = {"device": "nvme"}
        if everything:
            config = config_of(directory, offload_gradient=away)
            swapper.offload(models[1].module, optimizers[1].optim, config)
        else:
            swapper.wrap_optimizer(optimizers[1].optim, config_of(directory))
        for step in range(4):
            for model, optimizer in zip(models, optimizers, strict=True):
                backward(model, 10 * part + step)
                optimizer.step()
                optimizer.zero_grad()
            assert_same(*([*model.parameters()] for model in models))
        for number, optimizer in enumerate(optimizers):
            optimizer.consolidate_state_dict(0)
            saved[number] = optimizer.state_dict() if torch.distributed.get_rank() == 0 else None
        torch.distributed.broadcast_object_list(saved, 0)
        assert len(saved[0]["state"]) == 6
        with pytest.raises(swapper.SwapError, match="on disk"):
            optimizers[1].load_state_dict(copy.deepcopy(saved[1]))  # Which changes it.
        swapper.of(optimizers[1].optim).close()


def train_post_local_sgd(directory: str, chance: random.Random) -> None:
    cls, options = chance.choice(OPTIMIZERS)
    models = [net() for _ in range(2)]
    inner = [cls(model.parameters(), lr=1e-2, **options) for model in models]
    outer = [PostLocalSGDOptimizer(each, PeriodicModelAverager(period=2, warmup_steps=1)) for each in inner]
    with pytest.raises(swapper.ConfigError, match="wraps another optimizer"):
        swapper.wrap_optimizer(outer[1], config_of(directory))
    with swapped(inner[1], config_of(directory)):
        for step in range(8):
            for model, optimizer in zip(models, outer, strict=True):
                backward(model, step)
                optimizer.step()
                optimizer.zero_grad()
            assert_same(*([*model.parameters()] for model in models))
            if step == 4:
                states = [optimizer.state_dict() for optimizer in outer]
                assert_same(*states)
                for optimizer, state in zip(outer, reversed(states), strict=True):
                    optimizer.load_state_dict(state)


WORK = (train_fsdp1, train_fsdp1, train_masters_of_fsdp1, refuse_fsdp1, train_zero, train_zero, train_post_local_sgd)


def use_all(rank: int, directory: str, rounds: int) -> None:
    torch.distributed.init_process_group("gloo")
    for number in range(rounds):
        for place, work in enumerate(WORK):
            chance = random.Random(f"{SEED} {number} {place}")
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    work(directory, chance)
            except Exception as error:
                error.add_note(f"in rank {rank}: {work.__name__}, round {number}")
                raise
            torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.long
def test_relatives_of_fsdp2_have_the_bits_of_plain_ones(nvme_path: Path, leaves_nothing: None) -> None:
    ranks.in_processes(use_all, str(nvme_path), 1)


@pytest.mark.thorough("by default: one round")
def test_relatives_of_fsdp2_in_many_ways(nvme_path: Path, leaves_nothing: None) -> None:
    ranks.in_processes(use_all, str(nvme_path), 12, ranks=3)
