"""Optimizers whose state stays in memory: a test for them, and their plan for `swapper.check`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.optim import Optimizer

from swapper.config import OffloadConfig
from swapper.errors import ConfigError
from swapper.io.devices import is_accelerator
from swapper.optimizer.plan import OptimizerPlan, parameters_of
from swapper.optimizer.probe import refuse_lazy, refuse_unsupported

__all__ = ["plan_to_show", "swaps_state_of"]


def swaps_state_of(optimizer: Optimizer, config: OffloadConfig) -> bool:
    """True if `optimizer` is stepped by buckets. Else its class steps all that it has, and any class can be used."""
    gradients, state = config.offload_gradient.device, config.offload_optimizer
    if state.device != "none" or state.master_weights or state.step_in_backward or gradients == "nvme":
        return True
    return gradients == "cpu" and any(is_accelerator(p.device) for p in parameters_of(optimizer))


def plan_to_show(
    optimizer: Optimizer, config: OffloadConfig, number: int, records: Mapping[torch.Tensor, tuple[int, int]]
) -> OptimizerPlan:
    """Plan the state of `optimizer`, for its size also where it stays in memory. There it is empty if that is unknown.

    Raises:
        ConfigError: the state cannot be swapped, and is to be; or a parameter has no shape yet.
    """
    refuse_lazy(optimizer)
    swaps = swaps_state_of(optimizer, config)
    try:
        refuse_unsupported(optimizer)
        return OptimizerPlan(optimizer, config, number, records)
    except ConfigError:
        if swaps:
            raise
        return OptimizerPlan(optimizer, config, number, records, swaps_state=False)
