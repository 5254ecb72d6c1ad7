"""`PlanFollower`: keeps room in the pool, and files, for the buckets of a plan while parameters come and go."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from swapper.optimizer.plan import parameters_of
from swapper.optimizer.segments import Bucket
from swapper.storage.agreement import agreed, of_all
from swapper.storage.buffers import BufferPool
from swapper.storage.growing_pool import GrowingPool
from swapper.tensors.evicted_gradients import raw_gradient

if TYPE_CHECKING:
    from swapper.optimizer.backward_step import Arrivals
    from swapper.optimizer.failure import Guard
    from swapper.optimizer.state_dicts import StateRecords
    from swapper.optimizer.stepper import Stepper

__all__ = ["PlanFollower"]

log = logging.getLogger(__name__)


class PlanFollower:
    """Gives buckets room in the pool and files in the store. See [Note: parameters come and go]."""

    def __init__(
        self,
        state: StateRecords,
        stepper: Stepper,
        pool: BufferPool | GrowingPool,
        pool_bytes: int,
        guard: Guard,
        arrivals: Arrivals,
    ) -> None:
        self._state = state
        self._plan = state.plan
        self._records = state.bucket_records
        self._stepper = stepper
        self._pool = pool
        self._pool_bytes = pool_bytes
        self._guard = guard
        self._arrivals = arrivals
        self._gradient_buckets: list[Bucket] = []  # that the gradients' swapper knows

    def follow(self, optimizer: Optimizer) -> None:
        """Follow what happened to `param_groups` since the last call."""
        before = list(self._plan.buckets)
        unknown, regrouped = self._plan.follow(optimizer)
        if dropped := self._plan.drop_gone():
            self.forget(dropped)
            self._fit_pool()
        backward_steps, gradients = self._arrivals.backward_steps, self._stepper.gradients
        # Not with a window under way, whose stepped buckets would be stepped again: the next call cuts anew.
        # Nor while the model is elsewhere: cuts are tried where it is stepped.
        if (backward_steps is None or not backward_steps.under_way) and self._plan.moved is None:
            if reason := self._plan.reason_to_cut_anew():
                self._cut_anew(optimizer, reason)
            self._plan.threads = torch.get_num_threads()
        if new := [p for p in unknown if _is_wanted(p)]:
            self.extend(optimizer, new)
        if backward_steps is not None and (regrouped or before != self._plan.buckets):
            backward_steps.follow_plan()
        if gradients is not None and (regrouped or self._plan.buckets != self._gradient_buckets):
            gradients.plan(self._plan.gradient_parts())
            self._gradient_buckets = list(self._plan.buckets)
        if self._state.store is not None or backward_steps is not None:
            self._arrivals.watch(optimizer)

    def extend(self, optimizer: Optimizer, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Plan those of `parameters` that are not planned yet, and have room for their records."""
        parameters = [p for p in parameters if not self._plan.is_planned(p)]
        if parameters:
            self._records.drop_prefetched()
            self._arrivals.drop_window()  # The new ones may need a larger scratch.
            self.add(self._plan.extend(optimizer, parameters))

    def add(self, buckets: Sequence[Bucket]) -> None:
        """Have room in the pool and files in the store for `buckets`, which are planned. On failure they are withdrawn.

        Raises:
            ConfigError: the pool is too small.
            SwapIOError: the drive failed, or has too little free space.
        """
        try:
            self._fit_pool()
            if self._state.store is not None:
                others_bytes = self._pool.capacity_bytes - self._pool_bytes
                schedule = self._plan.schedule().checked(self._pool_bytes, others_bytes)
                self._records.keep(self._plan.buckets[i] for i in schedule.resident)
                lengths = {bucket.key: bucket.length_bytes for bucket in buckets if bucket.length_bytes}
                self._state.store.plan(lengths, summed=True)
        except BaseException:
            self._plan.withdraw(buckets)
            raise

    def forget(self, buckets: Iterable[Bucket]) -> None:
        """Delete the records of `buckets`, which are planned no more."""
        for bucket in buckets:
            self._records.forget(bucket)

    def load(
        self,
        optimizer: Optimizer,
        state: Sequence[tuple[torch.nn.Parameter, dict[str, Any]]],
        as_it_is: bool,
        together: bool = False,
    ) -> None:
        """Replace all state. What `state_dict()` has just handed out moves nothing: [Note: loads of what is there].

        Args:
            state: of each parameter that has some, in the class's own format.
            as_it_is: keep dtypes; else cast as torch's own `load_state_dict` does.
            together: all ranks do it, or none.
        """
        with agreed(together):
            self.extend(optimizer, [p for p, _ in state])
            entries_of = self._state.checked(state)  # Before anything is replaced.
        if not as_it_is:
            usable = self._guard.failure is None  # Else what is there may be of another step.
            if of_all(usable and self._state.is_there(optimizer, entries_of), together):
                return
            self._state.take_noted_steps()
        with self._guard.replacing("loading optimizer state"), agreed(together):
            self._state.replace(optimizer, entries_of, lambda segment: entries_of[segment.of], as_it_is)

    def _cut_anew(self, optimizer: Optimizer, why: str) -> None:
        """Plan all parameters anew; the state goes through a scratch file."""
        log.warning("%s: the optimizer's state is being cut anew", why)
        outside = self._plan.with_state()
        gathered = self._state.gather(outside, self._state.allocator(outside))
        state = [(p, gathered[id(p)]) for p in outside if id(p) in gathered]
        wanted = [p for p in parameters_of(optimizer) if _is_wanted(p)]
        self._records.drop_prefetched()
        self._arrivals.drop_window()  # The new cuts may need a larger scratch.
        with self._guard.replacing("cutting optimizer state anew"):
            self._plan.threads = torch.get_num_threads()
            former = list(self._plan.buckets)
            try:
                self._plan.plan_again(optimizer, [*wanted, *outside])
            finally:
                self.forget(former)
            self.add(self._plan.buckets)
            self.load(optimizer, state, as_it_is=True)

    def _fit_pool(self) -> None:
        if isinstance(self._pool, GrowingPool):
            self._pool.reserve(self._plan.wanted_bytes)


def _is_wanted(p: torch.nn.Parameter) -> bool:
    """True if a parameter in a group gets state: a step may come to it."""
    return p.requires_grad or raw_gradient(p) is not None
