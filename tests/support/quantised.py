"""Quantised weights: a class of tensors that are made of others, as the libraries of quantisation have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from models import WIDTH
from torch import nn
from torch.utils._python_dispatch import return_and_correct_aliasing

__all__ = ["KINDS", "Adapted", "CodedTensor", "QuantisedLinear", "make_quantised"]


class CodedTensor(torch.Tensor):
    """A matrix of int8 codes, with a scale for each row; `scale` may itself be made of others."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> CodedTensor:
        made: CodedTensor = torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=torch.float32, device=codes.device, requires_grad=False
        )
        made.codes, made.scale = codes, scale
        return made

    @classmethod
    def of(cls, values: torch.Tensor, scale: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> CodedTensor:
        rows = values.detach().abs().amax(1, keepdim=True) / 127
        return cls((values.detach() / rows).round().to(torch.int8), scale(rows))

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: None, size: Any, stride: Any) -> CodedTensor:
        return CodedTensor(inner["codes"], inner["scale"])

    def decoded(self) -> torch.Tensor:
        scale = self.scale.decoded() if isinstance(self.scale, CodedTensor) else self.scale
        return self.codes.to(torch.float32) * scale

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"CodedTensor({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first = args[0]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten.alias.default):
            made = cls(func(first.codes), func(first.scale))
            return return_and_correct_aliasing(func, args, kwargs or {}, made)
        if func is torch.ops.aten._to_copy.default:
            return cls(first.codes.to(kwargs["device"]), first.scale.to(kwargs["device"]))
        if func is torch.ops.aten.copy_.default:
            first.codes.copy_(args[1].codes)
            first.scale.copy_(args[1].scale)
            return first
        plain = [each.decoded() if isinstance(each, CodedTensor) else each for each in args]
        return func(*plain, **(kwargs or {}))


class _CodedMatmul(torch.autograd.Function):
    """Saves the coded weight, and not what it decodes to."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(weight)
        return x @ _decoded(weight).t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        return gradient @ _decoded(weight), None


def _decoded(weight: torch.Tensor) -> torch.Tensor:
    return weight.decoded() if isinstance(weight, CodedTensor) else weight.to(torch.float32) / 20


class QuantisedLinear(nn.Module):
    """A frozen linear layer whose weight is what `make` gives it, as a parameter or a buffer."""

    weight: torch.Tensor

    def __init__(self, make: Callable[[nn.Module, torch.Tensor], None], width: int = WIDTH) -> None:
        super().__init__()
        make(self, torch.randn(width, width))
        self.bias = nn.Parameter(torch.zeros(width), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _CodedMatmul.apply(x, self.weight) + self.bias  # type: ignore[no-untyped-call]
        return y


def _coded(layer: nn.Module, w: torch.Tensor) -> None:
    layer.weight = nn.Parameter(CodedTensor.of(w), requires_grad=False)


def _nested(layer: nn.Module, w: torch.Tensor) -> None:
    layer.weight = nn.Parameter(CodedTensor.of(w, CodedTensor.of), requires_grad=False)


def _parameter(dtype: torch.dtype) -> Callable[[nn.Module, torch.Tensor], None]:
    def make(layer: nn.Module, w: torch.Tensor) -> None:
        layer.weight = nn.Parameter((w * 20).to(dtype), requires_grad=False)

    return make


def _buffer(persistent: bool) -> Callable[[nn.Module, torch.Tensor], None]:
    def make(layer: nn.Module, w: torch.Tensor) -> None:
        layer.register_buffer("weight", (w * 20).to(torch.int8), persistent=persistent)

    return make


KINDS: dict[str, Callable[[nn.Module, torch.Tensor], None]] = {
    "coded": _coded,
    "nested": _nested,
    "int8": _parameter(torch.int8),
    "uint8": _parameter(torch.uint8),
    "int32": _parameter(torch.int32),
    "float8_e4m3fn": _parameter(torch.float8_e4m3fn),
    "float8_e5m2": _parameter(torch.float8_e5m2),
    "buffer": _buffer(True),
    "transient": _buffer(False),
}
"""Ways to have a quantised weight; buffers must be long enough to be swapped."""


class Adapted(nn.Module):
    """A frozen layer with a trainable one of low rank beside it."""

    def __init__(self, base: nn.Module, width: int = WIDTH, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.tanh(self.base(x) + self.up(F.gelu(self.down(x))))
        return y


def make_quantised(kind: str, depth: int = 5, width: int = WIDTH) -> nn.Module:
    """A model of adapted layers whose frozen weights are of this kind."""
    return nn.Sequential(*(Adapted(QuantisedLinear(KINDS[kind], width), width) for _ in range(depth)))
