"""Gradients that are stored as bf16, as it is described, in plain torch."""

from __future__ import annotations

import math
from typing import Any

import torch
from encoded_state import rounded
from torch.distributed.tensor import DTensor

from swapper.io.bf16_codec import RoundingKey
from swapper.tensors.sharded import box_of

__all__ = ["RoundedGradients"]


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def leaves(p: torch.Tensor) -> bool:
    return p.dtype is torch.float32 and local(p).nbytes >= 16 << 10


class RoundedGradients:
    """Plain gradients, each sum of which is rounded when a pass is over.

    Args:
        optimizer: has the parameters, whose numbers count.
        keeps: the last of so many passes is not rounded, as it is stepped where it arrives; 0: all are.
    """

    def __init__(self, optimizer: Any, keeps: int = 0) -> None:
        self.optimizer, self.keeps = optimizer, keeps
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.steps = 0
        self.begin()

    def begin(self) -> None:
        self.passes = [0] * len(self.parameters)

    def backward(self, loss: torch.Tensor) -> None:
        before = [p.grad for p in self.parameters]
        for p in self.parameters:
            if leaves(p):
                p.grad = None
        loss.backward()
        for number, p in enumerate(self.parameters):
            if not leaves(p):
                continue
            earlier, fresh = before[number], p.grad
            if fresh is None:
                p.grad = earlier
                continue
            if earlier is not None:
                local(earlier).add_(local(fresh))
            total = fresh if earlier is None else earlier
            self.passes[number] += 1
            if self.passes[number] != self.keeps:
                self.round(number, p, local(total))
            p.grad = total

    def round(self, number: int, p: torch.Tensor, total: torch.Tensor) -> None:
        row_numel = math.prod(p.shape[1:])
        first = box_of(p).offsets[0] * row_numel if isinstance(p, DTensor) else 0
        flat = total.as_strided((total.numel(),), (1,))
        key = RoundingKey(f"gradient.{self.passes[number]}", self.steps, number)
        flat.copy_(rounded(flat, first, key))

    def step(self) -> None:
        self.optimizer.step()
        self.steps += 1

    def zero_grad(self) -> None:
        self.begin()
        for p in self.parameters:
            p.grad = None
