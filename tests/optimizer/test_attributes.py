"""What a user has set on a parameter, an optimizer's class sees, however the parameter is stepped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import swapper


class Scaled(torch.optim.Optimizer):
    """Takes a factor of the learning rate from the parameter."""

    def __init__(self, params: Any, lr: float = 0.125) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["sum"] = torch.zeros_like(p)
                state["sum"].add_(p.grad)
                p.add_(state["sum"], alpha=-group["lr"] * getattr(p, "lr_scale", 1.0))


class ElementwiseScaled(Scaled):
    """The same, in segments."""

    step = Scaled.step


swapper.register_elementwise(ElementwiseScaled)


@pytest.mark.parametrize("native", ["on", "off"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "masters"])
@pytest.mark.parametrize("cls", [Scaled, ElementwiseScaled])
def test_a_class_sees_the_attributes_of_a_parameter(cls: type[Scaled], dtype: torch.dtype, native: str) -> None:
    parameters = [nn.Parameter(torch.ones(50_000, dtype=dtype)) for _ in range(3)]
    for p, scale in zip(parameters, (0.5, 2.0), strict=False):
        p.lr_scale = scale  # type: ignore[attr-defined]
    config = swapper.OffloadConfig(
        pool_bytes="16MiB",
        bucket_bytes="64KiB",
        offload_optimizer={
            "device": "cpu",
            "master_weights": dtype is torch.bfloat16,
            "native_step": native,
        },
    )
    optimizer = swapper.wrap_optimizer(cls(parameters), config)
    for _ in range(3):
        for p in parameters:
            p.grad = torch.ones_like(p)
        optimizer.step()
    for p, scale in zip(parameters, (0.5, 2.0, 1.0), strict=True):
        assert torch.equal(p.detach(), torch.full_like(p, 1 - 6 * 0.125 * scale))
    stats = swapper.of(optimizer).stats()
    assert (stats.segments_native > 0) == (native == "on" and cls is ElementwiseScaled)
    swapper.of(optimizer).close()


class Odd(torch.optim.Optimizer):
    """Does to each parameter what its attribute `how` says."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            how = getattr(p, "how", 1.0)
            if isinstance(how, list):
                how.append(how[-1] / 2)
                p.add_(p.grad, alpha=-how[-1])
            elif isinstance(how, Rate):
                p.add_(p.grad, alpha=-how.rate)
            elif isinstance(how, dict):
                p.add_(p.grad, alpha=-how["rates"][0])
            else:
                p.mul_(how).add_(p.grad, alpha=0.125)


swapper.register_elementwise(Odd)


class Rate:
    rate = 0.5


@pytest.mark.parametrize("native", ["on", "off"])
def test_attributes_of_any_kind_have_their_effect(native: str) -> None:
    """Zeros of both signs are two values; a list that the class appends to is the user's; an object may change."""
    hows = [0.0, -0.0, [0.5, 0.25], Rate(), {"rates": (0.25, 0.5)}, {"rates": (0.5, 0.25)}]

    def run(wrap: bool) -> list[torch.Tensor]:
        parameters = []
        for how in hows:
            p = nn.Parameter(torch.linspace(-1, 1, 1000))
            p.how = list(how) if isinstance(how, list) else how  # type: ignore[attr-defined]
            parameters.append(p)
        optimizer: torch.optim.Optimizer = Odd(parameters)
        if wrap:
            section = {"device": "cpu", "native_step": native}
            config = swapper.OffloadConfig(pool_bytes="16MiB", bucket_bytes="64KiB", offload_optimizer=section)
            optimizer = swapper.wrap_optimizer(optimizer, config)
        for _ in range(3):
            for p in parameters:
                p.grad = torch.full_like(p, -0.0)
            optimizer.step()
        if wrap:
            stats = swapper.of(optimizer).stats()
            assert stats.segments_native == (0 if native == "off" else 3 * 4)
            assert len(parameters[2].how) == 5  # type: ignore[attr-defined]
            swapper.of(optimizer).close()
        return [p.detach() for p in parameters]

    for mine, plain in zip(run(True), run(False), strict=True):
        assert torch.equal(mine.view(torch.int32), plain.view(torch.int32))
