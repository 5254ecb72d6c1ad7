"""`Arrivals`: gradients that arrive in backward start the reading of state, or the step of a bucket."""

from __future__ import annotations

import threading
import weakref

import torch
from torch.optim import Optimizer

from swapper.optimizer.backward_step import BackwardSteps
from swapper.optimizer.failure import Guard
from swapper.optimizer.plan import OptimizerPlan, parameters_of
from swapper.optimizer.stepper import Stepper

__all__ = ["Arrivals"]


class Arrivals:
    """Watches the gradients of one optimizer.

    A window is the backward passes before a step, and the step. The first gradient of the last pass starts the reading.

    Args:
        plan: has the number of passes.
        stepper: reads ahead.
        guard: while it knows of a failure, nothing is read.
        backward_steps: gets every gradient, if buckets are stepped in backward.
    """

    def __init__(
        self, plan: OptimizerPlan, stepper: Stepper, guard: Guard, backward_steps: BackwardSteps | None
    ) -> None:
        self._plan = plan
        self._stepper = stepper
        self._guard = guard
        self._backward_steps = backward_steps
        self._lock = threading.Lock()
        self._has_begun = False  # the last pass of the window

    def watch(self, optimizer: Optimizer) -> None:
        """Have a hook on each parameter that is in a group now, and no other swapper's."""
        reference = weakref.ref(self)

        def on_gradient(p: torch.Tensor) -> None:
            arrivals = reference()
            if arrivals is not None:
                arrivals._on_gradient(p)

        for p in parameters_of(optimizer):
            known = self._plan.of(p)
            if known is not None and known.hook is None and not known.left and p.requires_grad and p.is_leaf:
                known.hook = p.register_post_accumulate_grad_hook(on_gradient)  # type: ignore[no-untyped-call]

    def drop_window(self) -> None:
        """Give scratch back; the next gradient is the first of a window."""
        self._stepper.drop_scratch()
        self._has_begun = False
        for known in self._plan.planned() if self._backward_steps is None else ():
            known.arrived = 0

    def end_window(self) -> None:
        """The step was made."""
        self.drop_window()
        if self._backward_steps is not None:
            self._backward_steps.finish()
            self._stepper.wish(self._backward_steps.expected())

    def _on_gradient(self, p: torch.Tensor) -> None:
        """Called on a thread of autograd, in the middle of backward."""
        if self._guard.closed or self._guard.failure is not None or self._guard.is_forked:
            return
        if self._backward_steps is not None:
            assert isinstance(p, torch.nn.Parameter)
            gradients = self._stepper.gradients
            if gradients is None or not gradients.watches(p):  # Else it will say when they are complete.
                self._backward_steps.arrived(p)
            return
        if self._has_begun:
            return
        with self._lock:
            known = self._plan.of(p)
            if known is None:
                return
            known.arrived += 1
            if self._has_begun or known.arrived < self._plan.gradient_accumulation_steps:
                return
            self._has_begun = True
        self._stepper.wish(self._plan.buckets, scratch=True)
