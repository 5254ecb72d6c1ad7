"""State of large parameters that is other than that of small ones: in blocks, in 8 bits, in a class of its own."""

from __future__ import annotations

import importlib
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sampling import SEED
from torch import nn
from torch.optim import Optimizer
from twins import bits

import swapper
from swapper.optimizer.state_shapes import shape_of_state, two_like

pytestmark = pytest.mark.packs_too

SHAPES = [
    (1024, 512),
    (512, 513),
    (50257, 8),
    (300_000,),
    (262_144 + 256,),
    (64, 3, 40, 40),
    (520, 520, 3),
    (2, 131_073),
]

STATES: dict[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = {
    "its own": lambda shape: shape,
    "flat": lambda shape: (math.prod(shape),),
    "blocks": lambda shape: (-(-math.prod(shape) // 256),),
    "blocks rounded down": lambda shape: (math.prod(shape) // 2048,),
    "blocks of two": lambda shape: (2, -(-math.prod(shape) // 256)),
    "a table": lambda shape: (256,),
    "rows": lambda shape: (shape[0], 1),
    "columns": lambda shape: (1, shape[-1]),
    "half": lambda shape: (math.prod(shape) // 2,),
    "reversed": lambda shape: shape[::-1],
    "square": lambda shape: (shape[0], shape[0]),
    "a number": lambda shape: (),
}


@pytest.mark.parametrize("what", STATES)
def test_the_shape_of_state_is_that_of_a_large_parameter(what: str) -> None:
    chance = random.Random(f"{SEED} shapes")
    drawn = [
        tuple(chance.choice([1, 3, 8, 64, 96, 100, 4096, 5003]) for _ in range(chance.randint(1, 4))) for _ in range(40)
    ]
    for shape in [*SHAPES, *(shape for shape in drawn if max(shape) > 8)]:
        like = two_like(shape)
        found = shape_of_state(shape, like, (STATES[what](like[0]), STATES[what](like[1])))
        assert found == STATES[what](shape), (shape, like)


def test_small_ones_are_like_the_large_one() -> None:
    for shape in SHAPES:
        for like in two_like(shape):
            numel, whole = math.prod(like), math.prod(shape)
            assert 4096 <= numel <= 1 << 22 and len(like) == len(shape)
            assert numel % 256 == 0 or whole % 256 != 0
            for i, size in enumerate(shape):
                for k, other in enumerate(shape):
                    assert (like[i] == like[k]) == (size == other) and (like[i] < like[k]) == (size < other)


def test_what_cannot_be_told_is_not() -> None:
    like = two_like((1024, 512))
    assert shape_of_state((1024, 512), like, ((3, 5), (7, 11))) is None
    assert shape_of_state((1024, 512), like, ((3,), (3, 1))) is None


class InBlocks(Optimizer):
    """Momentum in 8 bits, with a scale for each block, of parameters of 4,096 elements or more."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                blocks = -(-p.numel() // 256)
                if not state:
                    state["table"] = torch.arange(-128, 128) / 128
                    if p.numel() < 4096:
                        state["mean"] = torch.zeros_like(p)
                    else:
                        state["mean"] = torch.zeros_like(p, dtype=torch.uint8)
                        state["scales"] = torch.zeros(2, blocks)
                mean = state["mean"]
                if mean.dtype == torch.uint8:
                    scales = state["scales"][0].repeat_interleave(256)[: p.numel()].view_as(p)
                    mean = state["table"][mean.long()] * scales
                mean = mean * 0.9 + p.grad
                p.sub_(mean, alpha=group["lr"])
                if "scales" in state:
                    flat = torch.nn.functional.pad(mean.flatten(), (0, blocks * 256 - p.numel())).view(blocks, 256)
                    state["scales"][0] = flat.abs().amax(1)
                    codes = (flat / state["scales"][0].clamp(min=1e-30)[:, None] * 127).round() + 128
                    state["mean"].copy_(codes.flatten()[: p.numel()].view_as(p))
                else:
                    state["mean"].copy_(mean)


def train(make: Any, config: swapper.OffloadConfig | None, shapes: list[tuple[int, ...]], steps: int = 4) -> Any:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = make(parameters)
    if config is not None:
        optimizer = swapper.wrap_optimizer(optimizer, config)
    for step in range(steps):
        for i, p in enumerate(parameters):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i))
        optimizer.step()
    return optimizer


def config_of(nvme_path: Path) -> swapper.OffloadConfig:
    return swapper.OffloadConfig(
        nvme_path=nvme_path, pool_bytes="32MiB", bucket_bytes="64KiB", offload_optimizer={"device": "nvme"}
    )


def values(optimizer: Any) -> Any:
    return bits([[p.detach() for p in optimizer.param_groups[0]["params"]], optimizer.state_dict()["state"]])


def bitsandbytes(name: str) -> Callable[[Any], Optimizer]:
    pytest.importorskip("bitsandbytes")
    made = getattr(importlib.import_module("bitsandbytes.optim"), name)
    return lambda parameters: made(parameters, lr=1e-3)


LIBRARIES = ["AdamW8bit", "Lion8bit", "RMSprop8bit", "AdEMAMix8bit"]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["InBlocks", *LIBRARIES])
def test_state_in_blocks_of_large_parameters_is_swapped(
    name: str, nvme_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make = InBlocks if name == "InBlocks" else bitsandbytes(name)
    shapes = [(1024, 512), (50257, 8), (300_001,), (40, 40), (1024, 512), (512, 64, 3, 3)]
    ours = train(make, config_of(nvme_path), shapes)
    assert values(ours) == values(train(make, None, shapes))
    assert "stays in memory" not in caplog.text
    swapper.of(ours).close()


class Marked(torch.Tensor):
    """A tensor that somebody's class is more than."""


class Marking(Optimizer):
    """Has its state in such a tensor, from some size or some step on."""

    def __init__(self, params: Any, numel: int = 0, step: int = 0) -> None:
        super().__init__(params, {"numel": numel, "from_step": step})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(count=0, sum=torch.zeros_like(p))
                state["count"] += 1
                if p.numel() >= group["numel"] and state["count"] > group["from_step"]:
                    state["sum"] = torch.Tensor(state["sum"]).as_subclass(Marked)
                weight = 2 if type(state["sum"]) is Marked else 1
                state["sum"].add_(p.grad)
                p.sub_(torch.Tensor(state["sum"]), alpha=0.01 * weight)


@pytest.mark.parametrize("shape", [(8, 8), (64, 64), (1024, 512), (262_144 + 256,)])
@pytest.mark.parametrize("numel", [0, 4096])
def test_state_of_a_class_of_somebodys_is_refused(shape: tuple[int, ...], numel: int, nvme_path: Path) -> None:
    if math.prod(shape) < numel:
        return
    optimizer = Marking([nn.Parameter(torch.zeros(shape))], numel)
    with pytest.raises(swapper.ConfigError, match=r"keeps its state 'sum' in a Marked.*offload_optimizer.encoding"):
        swapper.wrap_optimizer(optimizer, config_of(nvme_path))


def test_state_that_comes_to_be_of_such_a_class_stays_what_it_is(
    nvme_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shapes = [(96, 96), (1024, 512)]

    def make(parameters: Any) -> Optimizer:
        return Marking(parameters, step=10)

    ours = train(make, config_of(nvme_path), shapes, 14)
    assert values(ours) == values(train(make, None, shapes, 14))
    assert "'sum' that a trial step did not show; it stays in memory" in caplog.text
    swapper.of(ours).close()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit"])
def test_the_optimizers_of_torchao_are_refused(name: str, nvme_path: Path) -> None:
    pytest.importorskip("torchao")
    make = getattr(importlib.import_module("torchao.optim"), name)
    for shape in [(64, 64), (1024, 512)]:
        with pytest.raises(swapper.ConfigError, match="OptimState"):
            swapper.wrap_optimizer(make([nn.Parameter(torch.randn(shape))]), config_of(nvme_path))


class Holder:
    """A tensor that is kept where nobody looks."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.inner = {"tensor": tensor}


class Holding(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            held = self.state[p].setdefault("held", Holder(torch.zeros_like(p)))
            held.inner["tensor"].add_(p.grad)
            p.sub_(held.inner["tensor"], alpha=0.01)


@pytest.mark.parametrize("size", [8, 200])
def test_state_that_is_in_objects_is_said_to_stay_in_memory(
    size: int, nvme_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours = train(Holding, config_of(nvme_path), [(size, size)])
    expected = train(Holding, None, [(size, size)])
    assert torch.equal(ours.param_groups[0]["params"][0], expected.param_groups[0]["params"][0])
    assert ("stays in memory, beyond pool_bytes" in caplog.text) == (size == 200)
    swapper.of(ours).close()


class Sliced(Optimizer):
    """Keeps every so many-th element of a parameter as it began, as classes do that measure how far they came."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "every": 11})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["began"] = p.detach().clone().flatten()[:: group["every"]]
                    p.add_(p.grad * state["began"][0].sign(), alpha=-group["lr"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_of_one_element_may_have_any_stride(dtype: torch.dtype, tmp_path: Path, nvme_path: Path) -> None:
    """It is contiguous then, and yet torch has no view of its bytes."""
    torch.manual_seed(0)
    model, plain = nn.Linear(5, 2, dtype=dtype), nn.Linear(5, 2, dtype=dtype)
    plain.load_state_dict(model.state_dict())
    optimizer, reference = Sliced(model.parameters()), Sliced(plain.parameters())
    swapper.wrap_optimizer(optimizer, {"nvme_path": str(nvme_path), "offload_optimizer": {"device": "nvme"}})
    for each, of in ((model, optimizer), (plain, reference)):
        for p in each.parameters():
            p.grad = torch.ones_like(p)
        of.step()
    swapper.save_checkpoint(tmp_path / "saved", model, optimizer).wait()
    swapper.load_checkpoint(tmp_path / "saved", model, optimizer)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert bits(p) == bits(q)
        assert bits(optimizer.state_dict()["state"][0]["began"]) == bits(reference.state_dict()["state"][0]["began"])
    swapper.of(optimizer).close()
