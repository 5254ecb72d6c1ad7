"""Functions of lists of parameters, and averages of a model: a pool for a few parameters is enough."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerators import simulate
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, get_swa_multi_avg_fn
from twins import bits, swapper_of

import swapper

WIDE, LAYERS = 256, 8
POOL = "2MiB"
"""All layers, of 256 KiB, are as long, and part of it is for the rest of a step."""


def make_model(device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(LAYERS)))
    model.register_buffer("mean", torch.zeros(WIDE))
    return model.to(device)


def config_for(path: Path, trained: str = "nvme") -> swapper.OffloadConfig:
    return swapper.OffloadConfig(
        nvme_path=path,
        pool_bytes=POOL,
        bucket_bytes="512KiB",
        offload_optimizer={"device": trained},
        offload_gradient={"device": trained},
        offload_param={"device": "nvme"},
    )


AVERAGES: dict[str, dict[str, Callable[..., Any]]] = {
    "default": {},
    "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "swa": {"multi_avg_fn": get_swa_multi_avg_fn()},
    "one at a time": {"avg_fn": get_ema_avg_fn(0.9)},
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("when", ["before", "after", "swapped too"])
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_an_average_that_follows_a_training(
    device: str, when: str, use_buffers: bool, average: str, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`when` it was made; the average of a swapped model is in memory, unless it is swapped too."""
    if device == "sim":
        simulate("sim-lazy", monkeypatch)
    results = []
    for swapped in (False, True):
        model = make_model(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        averaged = None if when == "after" else AveragedModel(model, use_buffers=use_buffers, **AVERAGES[average])
        if swapped:
            swapper.offload(model, optimizer, config_for(nvme_path))
        if averaged is None:
            averaged = AveragedModel(model, use_buffers=use_buffers, **AVERAGES[average])
        elif when == "swapped too" and swapped:
            swapper.offload(averaged, config=config_for(nvme_path, "none"))
        for step in range(4):
            x = torch.randn(4, WIDE, generator=torch.Generator().manual_seed(step)).to(device)
            model.get_buffer("mean").lerp_(x.mean(0), 0.1)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            averaged.update_parameters(model)
        results.append(bits([p.detach().cpu().clone() for p in (*averaged.parameters(), *averaged.buffers())]))
        if swapped:
            swapper_of(model).close()
    assert results[0] == results[1]


LISTS: dict[str, Callable[..., Any]] = {
    "lerp_": lambda a, b: torch._foreach_lerp_(a, b, 0.25),
    "lerp_ by lists": lambda a, b: torch._foreach_lerp_(a, b, [0.5 / (1 + i) for i in range(len(a))]),
    "mul_ by a number": lambda a, b: torch._foreach_mul_(a, 0.5),
    "mul_ by numbers": lambda a, b: torch._foreach_mul_(a, [1.0 + i for i in range(len(a))]),
    "mul_ by a tensor": lambda a, b: torch._foreach_mul_(a, torch.tensor(0.5)),
    "add_": lambda a, b: torch._foreach_add_(a, b, alpha=0.3),
    "addcdiv_ by a tensor": lambda a, b: torch._foreach_addcdiv_(a, b, b, torch.arange(1.0, 1 + len(a))),
    "addcmul_": lambda a, b: torch._foreach_addcmul_(a, b, b, value=0.1),
    "copy_": lambda a, b: torch._foreach_copy_(a, b),
    "zero_": lambda a, b: torch._foreach_zero_(a),
    "sub": lambda a, b: torch._foreach_sub(a, b),
    "norm": lambda a, b: torch._foreach_norm(a),
    "exp": lambda a, b: torch._foreach_exp(a),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("others", ["memory", "the drive", "state dict"])
@pytest.mark.parametrize("first", ["parameters", "state dict"])
def test_functions_of_lists(name: str, first: str, others: str, nvme_path: Path) -> None:
    """Each on more parameters than have room at once."""
    results = []
    for swapped in (False, True):
        models = make_model(), make_model()
        for model in models if others != "memory" else models[:1]:
            if swapped:
                swapper.offload(model, config=config_for(nvme_path, "none"))
        a: Any = list(models[0].parameters())
        if first == "state dict":
            a = [value for key, value in models[0].state_dict().items() if key != "mean"]
        b: Any = list(models[1].parameters())
        if others == "state dict":
            b = [value for key, value in models[1].state_dict().items() if key != "mean"]
        with torch.no_grad():
            result = LISTS[name](a, b)
        if name.partition(" ")[0].endswith("_"):
            assert result is None or all(mine is given for mine, given in zip(result, a, strict=True))
            result = None
        values = [t.detach().clone() for t in (*models[0].parameters(), *models[1].parameters())]
        results.append((bits(values), None if result is None else bits(list(result))))
        if swapped:
            swapper_of(models[0]).close()
            if others != "memory":
                swapper_of(models[1]).close()
    assert results[0] == results[1]
