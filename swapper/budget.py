"""`PoolBudget`: what a run needs of its pool. Construction, `swapper.check` and their errors read this one sum.

[Note: the sum]

    pool_bytes >=   kept        of each optimizer: records that stay in the pool, scratch, gradients that stay there
                  + moving      of each optimizer: 3 of its largest record (arriving, in use, leaving), and the
                                gradients of 2 buckets (in use, arriving)
                  + parameters  2 of the largest record (in use, arriving), or all that one module and those it runs in
                                use at once; 1 more where a step is in backward; records that stay

Optimizers step one after another, so of "moving" only the largest counts, unless parameters are on the drive: those
take all that no optimizer needs, and keep it between the steps. `PoolBudget.shares` is what is beyond the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swapper.config import OffloadConfig
from swapper.errors import ConfigError
from swapper.gradient.records import GradientPart, check_room, gradient_bytes, gradient_pool_bytes
from swapper.optimizer.plan import OptimizerPlan
from swapper.parameter import records
from swapper.parameter.records import ParameterPlan
from swapper.sizes import format_bytes
from swapper.storage.schedule import IN_FLIGHT, READ_AHEAD, Schedule

__all__ = ["OptimizerNeeds", "PoolBudget", "Shares", "moves_gradients", "plan_parameters"]


@dataclass(frozen=True)
class OptimizerNeeds:
    """The needs of one optimizer. See [Note: the sum].

    Attributes:
        schedule: of its state; None if that is in no shared pool.
        parts: its gradients that move; empty if they stay where they are.
        gradients_stored: they go to the drive; else all of them stay in a pool.
        own_bytes: pools of its own, for what is in memory with `device: cpu`.
    """

    schedule: Schedule | None
    parts: Sequence[GradientPart]
    gradients_stored: bool
    own_bytes: int

    @classmethod
    def of(cls, plan: OptimizerPlan, settings: OffloadConfig) -> OptimizerNeeds:
        """The needs of an optimizer with this plan."""
        state_stored = settings.offload_optimizer.device == "nvme"
        stored = settings.offload_gradient.device == "nvme"
        parts = plan.gradient_parts() if moves_gradients(plan, settings) else []
        own_bytes = 0 if state_stored else plan.stored_bytes + plan.scratch_bytes * plan.scratch_count
        if not stored and not state_stored:  # Without a drive no pool is shared.
            own_bytes += gradient_bytes(parts)[0]
            parts = []
        return cls(plan.schedule() if state_stored else None, parts, stored, own_bytes)

    @property
    def gradient_bytes(self) -> int:
        """The least of the pool that its gradients can do with."""
        return gradient_pool_bytes(self.parts, self.gradients_stored)

    @property
    def kept_bytes(self) -> int:
        """Never free for others."""
        state_bytes = 0 if self.schedule is None else self.schedule.held_bytes
        return state_bytes + (0 if self.gradients_stored else self.gradient_bytes)

    @property
    def moving_state_bytes(self) -> int:
        """Records of state in a step."""
        return 0 if self.schedule is None else self.schedule.pool_bytes - self.schedule.held_bytes

    @property
    def moving_bytes(self) -> int:
        """Records in a step."""
        return self.moving_state_bytes + (self.gradient_bytes if self.gradients_stored else 0)


def moves_gradients(plan: OptimizerPlan, settings: OffloadConfig) -> bool:
    """True if gradients leave the place where autograd puts them. In the memory of the host they are there already."""
    device = settings.offload_gradient.device
    return device == "nvme" or (device == "cpu" and plan.remote)


def plan_parameters(model: torch.nn.Module, settings: OffloadConfig) -> ParameterPlan:
    """See `parameter.records.plan_parameters`."""
    return records.plan_parameters(
        model,
        bucket_bytes=settings.bucket_bytes,
        resident_bytes=settings.offload_param.resident_bytes,
        step_in_backward=settings.offload_optimizer.step_in_backward,
    )


@dataclass(frozen=True)
class Shares:
    """The most of the pool that each may take, beside what is kept. Bytes.

    Attributes:
        parameters: all records of parameters.
        state: records of each optimizer that are prefetched beside the one in use.
        spare: for the gradients of each optimizer, beside the least that they need.
    """

    parameters: int
    state: int
    spare: int


@dataclass(frozen=True)
class PoolBudget:
    """The sum, for optimizers and parameters that are set up together. See [Note: the sum].

    Attributes:
        pool_bytes: the pool.
        optimizers: the needs of each, in order.
        parameters: on the drive; None if they stay in memory.
        others_bytes: kept by optimizers that shared the pool before.
        lost_bytes: memory that views of the user keep from the pool for good; parameters have to do without it.
    """

    pool_bytes: int
    optimizers: Sequence[OptimizerNeeds]
    parameters: ParameterPlan | None = None
    others_bytes: int = 0
    lost_bytes: int = 0

    @property
    def needed_bytes(self) -> int:
        """The least pool that would do for all of it."""
        kept_bytes = self.others_bytes + sum(needs.kept_bytes for needs in self.optimizers)
        moving = [needs.moving_bytes for needs in self.optimizers]
        if self.parameters is None:
            return kept_bytes + max(moving, default=0)
        return kept_bytes + sum(moving) + self.lost_bytes + self.parameters.least_bytes

    def check(self) -> None:
        """Refuse a pool that is too small.

        Raises:
            ConfigError: with the first part that has no room, and the `pool_bytes` that would do for all.
        """
        needed_bytes = self.needed_bytes
        free_bytes = self.pool_bytes - self.others_bytes
        for needs in self.optimizers:
            if needs.schedule is not None:
                needs.schedule.checked(free_bytes, needed_bytes - needs.schedule.pool_bytes)
            if needs.parts:
                state_bytes = 0 if needs.schedule is None else needs.schedule.pool_bytes
                others_bytes = needed_bytes - needs.gradient_bytes
                check_room(needs.parts, needs.gradients_stored, free_bytes - state_bytes, others_bytes)
            free_bytes -= needs.kept_bytes
        if self.parameters is not None and self.parameters.least_bytes > self._left_bytes:
            raise ConfigError(
                f"pool_bytes: {format_bytes(self._left_bytes)} are left for parameters, and {self.parameters.why} are "
                f"needed; set pool_bytes to at least {needed_bytes}"
            )

    @property
    def _left_bytes(self) -> int:
        """What optimizers leave for parameters. Those of before do not count: these are for new ones."""
        needed_bytes = sum(needs.kept_bytes + needs.moving_bytes for needs in self.optimizers)
        return self.pool_bytes - self.lost_bytes - needed_bytes

    def shares(self) -> Shares:
        """Share out the room beyond the sum."""
        left_bytes = self._left_bytes
        record_bytes = max((n.schedule.largest_bytes for n in self.optimizers if n.schedule is not None), default=0)
        parameter_bytes = 0
        if self.parameters is not None:
            # Parameters leave what makes a step fast, reading ahead, as far as they can do without.
            gradient_bytes = max((n.gradient_bytes // IN_FLIGHT for n in self.optimizers), default=0)
            leave_bytes = min(left_bytes // 2, READ_AHEAD * (record_bytes + gradient_bytes))
            parameter_bytes = max(self.parameters.least_bytes, left_bytes - leave_bytes)
            left_bytes -= min(parameter_bytes, sum(record.length_bytes for record in self.parameters.records))
        # State and gradients each get half of the rest. Of the records in flight one is in use, and not prefetched.
        return Shares(parameter_bytes, (IN_FLIGHT - 1) * record_bytes + left_bytes // 2, left_bytes // 2)
