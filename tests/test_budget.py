"""The sum that a refusal shows is enough, for everything that shares the pool, and `swapper.check` agrees with it."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sampling import ALL, EVERY, SEED
from torch import nn

import swapper
from swapper.errors import ConfigError
from swapper.storage.buffers import PoolExhausted

KINDS: dict[str, dict[str, Any]] = {
    "state that stays in part": {"offload_optimizer": {"device": "nvme", "resident_bytes": "3MiB"}},
    "gradients": {"offload_optimizer": {"device": "nvme"}, "offload_gradient": {"device": "nvme"}},
    "parameters": {
        "offload_optimizer": {"device": "none"},
        "offload_param": {"device": "nvme", "resident_bytes": "1MiB"},
    },
    "everything": {
        "offload_optimizer": {"device": "nvme", "resident_bytes": "3MiB"},
        "offload_gradient": {"device": "nvme"},
        "offload_param": {"device": "nvme"},
    },
    "both stay in part": {
        "offload_optimizer": {"device": "nvme", "resident_bytes": "3MiB"},
        "offload_param": {"device": "nvme", "resident_bytes": "1MiB"},
    },
}


def make(optimizers: int) -> tuple[nn.Sequential, list[torch.optim.Optimizer]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
    return model, [torch.optim.AdamW(model[i::optimizers].parameters(), lr=0.1) for i in range(optimizers)]


def config_for(nvme_path: Path, pool_bytes: int, kind: str) -> swapper.OffloadConfig:
    settings = {"nvme_path": nvme_path, "pool_bytes": pool_bytes, "bucket_bytes": 1 << 18, **KINDS[kind]}
    return swapper.OffloadConfig.model_validate(settings)


@pytest.mark.parametrize(
    ("kind", "optimizers"),
    [
        *(("state that stays in part", count) for count in (2, 3)),
        *(("gradients", count) for count in (1, 2)),
        ("parameters", 0),
        *(("everything", count) for count in (1, 2, 3)),
    ],
)
def test_what_a_refusal_asks_for_is_enough(kind: str, optimizers: int, nvme_path: Path) -> None:
    model, each = make(optimizers)
    needed_bytes = swapper.check(model, each, config_for(nvme_path, 1 << 30, kind)).pool_needed_bytes
    too_small = config_for(nvme_path, needed_bytes - 1, kind)
    refused = []
    for action in (swapper.check, swapper.offload):
        with pytest.raises(ConfigError, match=r"pool_bytes: .*et pool_bytes to at least \d+") as caught:
            action(model, each, too_small)
        found = re.search(r"at least (\d+)", str(caught.value))
        assert found
        refused.append(int(found[1]))
    assert refused == [needed_bytes, needed_bytes]
    assert not any(hasattr(optimizer, "swapper") for optimizer in each)
    assert not list(nvme_path.iterdir()), "nothing is made before the sum is right"
    enough = config_for(nvme_path, refused[0], kind)
    assert swapper.check(model, each, enough).pool_needed_bytes == refused[0]
    swapper.offload(model, each, enough)
    for _ in range(2):
        model(torch.ones(4, 512)).sum().backward()
        for optimizer in each:
            optimizer.step()
        for optimizer in each:
            optimizer.zero_grad()
    for optimizer in each:
        swapper.of(optimizer).close()
    if "swapper" in vars(model):
        model.swapper.close()  # type: ignore[operator, union-attr]


def gather(model: nn.Module) -> None:
    with swapper.gathered(model):
        pass


def keep_graph(model: nn.Module) -> None:
    torch.autograd.grad(model(torch.ones(4, 512)).sum(), list(model.parameters()), create_graph=True)


def keep_views(model: nn.Module) -> None:
    views = [p.detach() for p in model.parameters()]
    assert all(view.isfinite().all() for view in views)


@pytest.mark.parametrize("use", [gather, keep_graph, keep_views])
@pytest.mark.parametrize("kind", ["parameters", "everything", "both stay in part"])
@pytest.mark.parametrize("follows", [False, True])
def test_what_a_full_pool_asks_for_is_enough(
    kind: str, use: Callable[[nn.Module], None], follows: bool, nvme_path: Path
) -> None:
    """Of a larger pool parameters get a part only, if state and gradients share it; and it may have larger records."""

    def used(sizes: dict[str, int]) -> None:
        model, each = make(0 if kind == "parameters" else 1)
        settings = {"nvme_path": nvme_path, **sizes, **KINDS[kind]}
        swapper.offload(model, each, swapper.OffloadConfig.model_validate(settings))
        try:
            use(model)
        finally:
            model.swapper.close()  # type: ignore[operator, union-attr]
            for optimizer in each:
                swapper.of(optimizer).close()

    if follows:  # The default of `bucket_bytes` does.
        sizes = {"pool_bytes": (4 if kind == "parameters" else 8) << 20}
    else:
        model, each = make(0 if kind == "parameters" else 1)
        needed_bytes = swapper.check(model, each, config_for(nvme_path, 1 << 30, kind)).pool_needed_bytes
        sizes = {"pool_bytes": needed_bytes, "bucket_bytes": 1 << 18}
    with pytest.raises(PoolExhausted) as caught:
        used(sizes)
    text = str(caught.value)
    del caught
    sizes["pool_bytes"] = int(re.findall(r"pool_bytes (?:to at least|of up to) (\d+)", text)[-1])
    if follows:
        sizes["bucket_bytes"] = int(re.findall(r"and bucket_bytes to (\d+)", text)[-1])
    used(sizes)


@pytest.mark.parametrize("kind", ["state that stays in part", "everything", "both stay in part"])
def test_the_least_pool_has_room_for_all_that_may_stay(kind: str, nvme_path: Path) -> None:
    """Where a model has less than `resident_bytes`, too: the config asks for them before it knows the model."""
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    needed_bytes = swapper.check(model, optimizer, config_for(nvme_path, 1 << 30, kind)).pool_needed_bytes
    with pytest.raises(ConfigError, match="too small for 3 x bucket_bytes"):
        config_for(nvme_path, needed_bytes - 1, kind)
    swapper.offload(model, optimizer, config_for(nvme_path, needed_bytes, kind))
    for each in (optimizer, model):
        if hasattr(each, "swapper"):
            each.swapper.close()


@pytest.mark.parametrize("number", range(60) if EVERY else range(20) if ALL else (2, 5, 11))
def test_the_default_of_bucket_bytes_fits_the_pool(number: int, nvme_path: Path) -> None:
    """Whatever goes to the drive, a pool in which each module fits some ten times is not refused."""
    chance = random.Random(str(number + 1000 * SEED))
    width = chance.choice([64, 100, 256])
    pool_bytes = chance.randint(13, 60) * 4 * width * (width + 1)
    dtype = chance.choice([torch.float32, torch.bfloat16])
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(chance.choice([3, 200])))).to(dtype)
    make = chance.choice([torch.optim.AdamW, torch.optim.SGD, lambda p: torch.optim.SGD(p, momentum=0.9)])
    optimizer = make(model.parameters())
    config = swapper.OffloadConfig(
        nvme_path=nvme_path,
        pool_bytes=max(pool_bytes, 1 << 18),
        offload_optimizer={
            "device": "nvme",
            "master_weights": chance.choice([False, True]),
            "step_in_backward": chance.choice([False, True]),
        },
        offload_gradient={"device": chance.choice(["none", "nvme"])},
        offload_param={"device": chance.choice(["none", "nvme"])},
    )
    swapper.offload(model, optimizer, config)
    for _ in range(2):
        model(torch.ones(4, width, dtype=dtype)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    swapper.of(optimizer).close()


@pytest.mark.long
@pytest.mark.parametrize("pool_mib", [5, 9, 17])
def test_a_refusal_is_enough_where_buckets_follow_the_pool(pool_mib: int, nvme_path: Path) -> None:
    """A larger pool has larger buckets, which need a larger pool: the refusal names both sizes."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(60)))
    made = [torch.optim.AdamW(model[i::2].parameters(), lr=0.1) for i in range(2)]
    settings: dict[str, Any] = {"nvme_path": nvme_path, "pool_bytes": pool_mib << 20, **KINDS["everything"]}
    with pytest.raises(ConfigError) as caught:
        swapper.offload(model, made, settings)
    found = re.search(r"pool_bytes to at least (\d+).* Set bucket_bytes to (\d+) too", str(caught.value))
    assert found, caught.value
    settings["pool_bytes"], settings["bucket_bytes"] = int(found[1]), int(found[2])
    swapper.offload(model, made, settings)
    model(torch.ones(4, 256)).sum().backward()
    for optimizer in made:
        optimizer.step()
        swapper.of(optimizer).close()
