"""`step_in_backward`: a bucket is stepped as soon as the last gradient of the window has arrived, and its gradients go.

A window is `gradient_accumulation_steps` backward passes and the `step()` that ends them. In the last pass each
parameter's gradient is final when autograd has accumulated it; when that is so for all parameters of a bucket, the
bucket is stepped there and then, on the thread of the backward pass. `step()` does what is left: buckets with
parameters that had fewer gradients than the window has passes.

[Note: what plain PyTorch would still have] After `backward()` a plain program may look at gradients, change them, or
not step at all. Here they are gone and the step is made. So whatever asks for a gradient that is gone, or leaves the
order of backward, step, zero_grad, is told so, before it can do anything else than what it would have done.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.utils.checkpoint import CheckpointFunction

from swapper.errors import ConfigError, SwapError
from swapper.optimizer.loss_scaling import may_be_scaled
from swapper.optimizer.plan import OptimizerPlan, parameters_of
from swapper.optimizer.segments import Bucket, OptimizerParameter, grouped
from swapper.optimizer.stepper import ReadAhead, Stepper
from swapper.tensors.evicted_gradients import (
    bring_back_gradients,
    clear_gradient_home,
    evicted_gradient,
    raw_gradient,
    set_gradient_home,
    set_raw_gradient,
)
from swapper.tensors.grad_modes import modes_kept, set_grad_mode
from swapper.tensors.memory_overlap import CANNOT_GO_WITH, check_memory, names_of

__all__ = ["CANNOT_GO_WITH", "BackwardSteps"]


class BackwardSteps:
    """Steps the buckets of one optimizer in backward.

    Args:
        optimizer: the user's. Only a weak reference is kept.
        plan: the buckets; `gradient_accumulation_steps` is the window.
        stepper: steps them.
        prepare: called before the first bucket of a window is stepped; raises if a step could not be made now.
        failed: called with what went wrong in the step of a bucket.

    Raises:
        ConfigError: several processes train together, the optimizer has step pre-hooks, or two of its parameters are in
            the same memory.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        plan: OptimizerPlan,
        stepper: Stepper,
        prepare: Callable[[], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._optimizer_ref = weakref.ref(optimizer)
        self._plan = plan
        self._stepper = stepper
        self._prepare = prepare
        self._failed = failed
        self._lock = threading.RLock()
        self._stepped: dict[Bucket, None] = {}  # of the window, in order
        self._missing: dict[Bucket, int] = {}  # of buckets for which gradients have arrived: parameters that lack some
        self._order: list[Bucket] = []  # of the last window: what to expect in the next
        self._ahead: ReadAhead | None = None  # of the window, from its first step on
        self._groups_of: dict[OptimizerParameter, int | None] = {}  # of what was stepped, and in which group
        self._pass = -1  # autograd's number of the backward pass in which the first of them was stepped
        self._groups: list[dict[str, Any]] = []  # the options that the window is stepped with
        self._checked: list[Bucket] = []  # those whose parameters are known to lie each in memory of its own
        self._refuse(optimizer)
        check_memory(names_of(optimizer), parameters_of(optimizer))

    @property
    def under_way(self) -> bool:
        """Whether buckets were stepped and `step()` was not called yet."""
        return bool(self._stepped)

    def arrived(self, p: torch.nn.Parameter) -> None:
        """Autograd has accumulated the gradient of `p`, which is in memory: `count` it, and `complete` if it is final.

        Errors as for those two.
        """
        known, gradient = self._plan.of(p), raw_gradient(p)
        counted = None if known is None else known.counted
        last = self.count(p, counted is not None and counted() is not gradient)
        if known is not None:
            known.counted = None if gradient is None else weakref.ref(gradient)
        if last:
            self.complete(p)

    def count(self, p: torch.nn.Parameter, first: bool) -> bool:
        """Autograd has accumulated a gradient of `p`. Returns whether it is the last of the window.

        Args:
            first: no earlier one is in it: those that were counted, if any were, were given up.

        Raises:
            SwapError: there is one pass too many; the gradient is dropped, and no parameter was touched.
        """
        with self._lock:
            known = self._plan.of(p)
            if known is None or known.group is None:
                return False  # It is in no group any more, which `step()` will find out too.
            if first and not self._stepped and not known.stepped:
                self._count_anew(known)
            count = known.arrived + 1
            if known.stepped or count > self._plan.gradient_accumulation_steps or self._is_another_pass():
                set_raw_gradient(p, None)
                raise SwapError(self._too_many())
            known.arrived = count
            return count == self._plan.gradient_accumulation_steps

    def complete(self, p: torch.nn.Parameter) -> None:
        """The gradient of `p` is final, and in memory. Steps the buckets of which that is true of all parameters.

        Raises:
            SwapError: the gradients of the last window were not set to None. No parameter was touched.
            ConfigError: something is in use that would make the result wrong. No parameter was touched.
            SwapIOError: the drive failed in the step of a bucket.
        """
        with self._lock:
            optimizer = self._optimizer_ref()
            assert optimizer is not None
            if not self._stepped:
                if self._known(None):
                    set_raw_gradient(p, None)
                    raise SwapError(self._too_many())
                self._refuse(optimizer)
                self._refuse_scaler()
                self._prepare()
                if self._checked != self._plan.buckets:
                    check_memory(names_of(optimizer), parameters_of(optimizer))
                    self._checked = list(self._plan.buckets)
            known = self._plan.of(p)
            for bucket in () if known is None else known.buckets:
                if self._is_complete(bucket):
                    self._step(optimizer, bucket)

    def left(self) -> list[Bucket]:
        """The buckets that `step()` has to see to."""
        return [bucket for bucket in self._plan.buckets if bucket not in self._stepped]

    def follow_plan(self) -> None:
        """The buckets, or which parameters are stepped, have changed."""
        with self._lock:
            self._missing.clear()
            self._ahead = None

    def check_window(self, optimizer: Optimizer) -> None:
        """Raise if `step()` would step what was stepped in backward otherwise.

        Raises:
            SwapError: an option was changed, or a parameter taken out of its group, since the first bucket was stepped.
        """
        self._check_options(optimizer)
        group_of = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        if any(known.is_gone or group_of.get(id(known.parameter)) != n for known, n in self._groups_of.items()):
            raise SwapError(
                "a parameter was taken out of its group between backward() and step(), but with step_in_backward it "
                "was stepped in backward; take it out after step() or before backward()"
            )

    def _check_options(self, optimizer: Optimizer) -> None:
        if self._stepped and _options(optimizer)[: len(self._groups)] != self._groups:
            raise SwapError(
                "an option of the optimizer (its learning rate, ...) was changed between backward() and step(), but "
                "with step_in_backward the parameters were stepped in backward; change it after step() or before "
                "backward()"
            )

    def finish(self) -> None:
        """The window is over; what was stepped in it is expected in the next one."""
        with self._lock:
            if self._stepped:
                self._order = list(self._stepped)
            self._stepped, self._ahead = {}, None
            self._missing.clear()
            self._groups_of.clear()
            for known in self._plan.planned():
                known.arrived = 0

    def forget(self) -> None:
        """State and parameters are made anew: there is no window, and nothing is missing."""
        with self._lock:
            self.finish()
            for p in self._known(None):
                self._clear(p)

    def expected(self) -> list[Bucket]:
        """The buckets that are not stepped yet, in the order in which they probably will be."""
        # What was stepped last comes first in a backward, so what is new is expected at the end, in reverse order.
        present = dict.fromkeys(self._plan.buckets)
        known = dict.fromkeys([*(bucket for bucket in self._order if bucket in present), *reversed(present)])
        return [bucket for bucket in known if bucket not in self._stepped]

    # --- `GradientHome`, of gradients that are gone ------------------------------------------------------------------

    def gradient_of(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """What reading `p.grad` gives: a tensor that raises when its values are used."""
        return evicted_gradient(parameter, self, tuple(parameter.stride()))

    def bring_back(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """The values of the gradient of `parameter` are asked for.

        Raises:
            SwapError: always.
        """
        raise SwapError(
            "the gradient of this parameter is gone: with step_in_backward it was used, and freed, in backward(). "
            f"{CANNOT_GO_WITH} GradScaler, clipping by a global norm, or anything else that needs gradients after "
            "it; use step_in_backward: false"
        )

    def set_zero(self, parameter: torch.nn.Parameter) -> None:
        """`zero_grad(set_to_none=False)`.

        Raises:
            SwapError: always.
        """
        raise SwapError("zero_grad(set_to_none=False): with step_in_backward the gradients are gone; leave it out")

    def clear(self, parameters: Iterable[torch.nn.Parameter] | None = None) -> None:
        """`zero_grad`: the parameters may have gradients again.

        Raises:
            SwapError: `step()` was not called.
        """
        with self._lock:
            if self._stepped:
                raise SwapError(
                    "the gradients were set to None before step() was called, but with step_in_backward the parameters "
                    "were stepped in backward already: a step cannot be skipped. Load a checkpoint to undo it, or use "
                    "step_in_backward: false"
                )
            for p in self._known(parameters):
                self._clear(p)

    def _clear(self, p: torch.nn.Parameter) -> None:
        if (known := self._plan.of(p)) is not None:
            known.stepped = False
            self._count_anew(known)
        clear_gradient_home(p)

    def _count_anew(self, known: OptimizerParameter) -> None:
        known.arrived = 0
        for bucket in known.buckets:
            self._missing.pop(bucket, None)

    def _known(self, parameters: Iterable[torch.nn.Parameter] | None) -> list[torch.nn.Parameter]:
        """`parameters`; for None those that were stepped, and whose gradients were not cleared since."""
        if parameters is not None:
            return list(parameters)
        return [known.parameter for known in self._plan.planned() if known.stepped]

    # --- The step of a bucket ----------------------------------------------------------------------------------------

    def _is_complete(self, bucket: Bucket) -> bool:
        """A parameter of `bucket` has its last gradient. Returns whether all have, so that it can be stepped."""
        if bucket in self._stepped:
            return False
        if bucket not in self._missing:
            self._missing[bucket] = self._count_missing(bucket)
        else:
            self._missing[bucket] -= 1
        if self._missing[bucket]:
            return False
        given_up = [known for known in _members(bucket) if not self._stepper.has_gradient(known.parameter)]
        for known in given_up:  # `zero_grad()` without `step()`, and this bucket was not complete then.
            self._count_anew(known)
        if given_up:
            self._missing[bucket] = self._count_missing(bucket)
        return not given_up

    def _count_missing(self, bucket: Bucket) -> int:
        wanted = self._plan.gradient_accumulation_steps
        return sum(known.arrived != wanted for known in _members(bucket))

    def _step(self, optimizer: Optimizer, bucket: Bucket) -> None:
        if not self._stepped:
            self._groups = _options(optimizer)
            self._pass = torch._C._current_graph_task_id()
        self._check_options(optimizer)
        members = _members(bucket)
        bring_back_gradients((known.parameter for known in members), (self, self._stepper.gradients))
        work = self._stepper.work_on([bucket])
        if not work:
            return
        try:
            with modes_kept():
                set_grad_mode(False)
                self._stepper.run_one(optimizer, work[0])
        except BaseException as error:
            self._failed(error)
            self.finish()
            raise
        self._stepped[bucket] = None
        for known in members:
            self._groups_of[known] = known.group
            if all(other in self._stepped for other in known.buckets):
                set_raw_gradient(known.parameter, None)
                known.stepped = True
                set_gradient_home(known.parameter, self)
        if self._ahead is None:  # Buckets stay as they are from here to the end of the window.
            self._ahead = ReadAhead(self._stepper, [(other, []) for other in self.expected()], self._stepped)
        self._ahead.look()

    def _is_another_pass(self) -> bool:
        """Whether this is a later backward pass than the one in which buckets of the window were stepped.

        Autograd numbers passes as they start. Reentrant activation checkpointing makes passes within a pass: those
        have later numbers than what is around them.
        """
        if not self._stepped or torch._C._current_graph_task_id() <= self._pass:
            return False
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code is CheckpointFunction.backward.__code__:
                return False
            frame = frame.f_back
        return True

    def _refuse(self, optimizer: Optimizer) -> None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            processes = torch.distributed.get_world_size()
            if processes > 1:
                raise ConfigError(
                    f"{CANNOT_GO_WITH} DistributedDataParallel: {processes} processes train together, and a gradient "
                    "is averaged only after it has arrived; use step_in_backward: false"
                )
        if optimizer._optimizer_step_pre_hooks or torch_optimizer._global_optimizer_pre_hooks:
            raise ConfigError(
                f"{CANNOT_GO_WITH} step pre-hooks, which would run after the step; use step_in_backward: false, or a "
                "post-hook"
            )

    def _refuse_scaler(self) -> None:
        if may_be_scaled(self._plan.is_planned):
            raise ConfigError(
                f"{CANNOT_GO_WITH} GradScaler: the gradients are scaled when they arrive; use step_in_backward: "
                "false, or bfloat16, which needs no scaling. (A scaler of another model is no hindrance, unless the "
                "loss of this one is multiplied by a number, which looks the same: divide it instead.)"
            )

    def _too_many(self) -> str:
        passes = self._plan.gradient_accumulation_steps
        if not self._stepped:
            return (
                "gradients of a new window arrive, and those of the last one were not set to None; call "
                "optimizer.zero_grad() after step()"
            )
        return (
            f"more than gradient_accumulation_steps: {passes} gradients arrived for a parameter since the last step(), "
            "and with step_in_backward it was stepped already; set gradient_accumulation_steps to the number of "
            "backward passes before a step. (Reentrant activation checkpointing of modules that share parameters "
            "counts as several: use use_reentrant=False.)"
        )


def _members(bucket: Bucket) -> list[OptimizerParameter]:
    """The parameters of `bucket` that are stepped."""
    return [known for known in grouped(bucket.segments) if known.group is not None]


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of each group, with the values of tensors."""
    return [
        {
            key: value.tolist() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        for group in optimizer.param_groups
    ]
