"""`UnswappedOptimizer`: an optimizer whose state stays where it is."""

from __future__ import annotations

import copy
import dataclasses
import os
import weakref
from typing import Any

import torch
from torch.optim import Optimizer

from swapper.metrics import Metrics, Moves, Stats
from swapper.optimizer.stepper import SwappedGradients, SwappedParameters
from swapper.optimizer.swapper import OptimizerSwapper

__all__ = ["UnswappedOptimizer"]


class UnswappedOptimizer(OptimizerSwapper):
    """`device: none`: the optimizer is left to itself; what users call on `optimizer.swapper` works all the same."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer_ref = weakref.ref(optimizer)
        self._closed = False
        self._pid = os.getpid()
        self._failure = None
        self._backward = None
        self.parameters = self.gradients = None
        self._store = None
        self._counting = optimizer.register_step_post_hook(self._count)
        self.metrics = Metrics()
        vars(optimizer)["swapper"] = self

    def _count(self, *_: object) -> None:
        self.metrics.steps += 1

    def attach(self, *, parameters: SwappedParameters | None = None, gradients: SwappedGradients | None = None) -> None:
        """Keep what has the parameters where they are on disk."""
        assert gradients is None
        self.parameters = parameters or self.parameters

    def stats(self) -> Stats:
        """Only `steps` is counted: nothing moves."""
        values: dict[str, Any] = {field.name: 0 for field in dataclasses.fields(Stats)}
        return Stats(**{**values, "steps": self.metrics.steps, "gradients": Moves()})

    def flush(self) -> None:
        """Nothing to wait for."""
        self._check_open()

    rest = flush

    def state(self, parameter: torch.nn.Parameter) -> dict[str, Any]:
        """A copy of the state of one parameter."""
        self._check_open()
        return copy.deepcopy(self._optimizer().state.get(parameter, {}))

    def reset(self) -> None:
        """Forget all state."""
        self._check_open()
        self._optimizer().state.clear()

    def unwrap(self) -> None:
        """Take this object off the optimizer."""
        self.close()
        del vars(self._optimizer())["swapper"]

    def close(self) -> None:
        """Stop counting. The optimizer goes on working: its state was never away."""
        self._counting.remove()
        self._closed = True

    @property
    def has_masters(self) -> bool:
        """Never: see `wrap_optimizer`."""
        return False
