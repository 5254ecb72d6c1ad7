"""`step_in_backward`: a bucket is stepped as soon as the last gradient of the window has arrived, and its gradients go.

A window is `gradient_accumulation_steps` backward passes and the `step()` that ends them. In the last pass each
parameter's gradient is final when autograd has accumulated it; when that is so for all parameters of a bucket, the
bucket is stepped at once, on the thread of the backward pass. `step()` does what is left: buckets with
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
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.utils.checkpoint import CheckpointFunction

from swapper.errors import ConfigError, SwapError
from swapper.io.devices import among_streams, current_streams, refuse_in_graph
from swapper.optimizer.failure import Guard
from swapper.optimizer.loss_scaling import may_be_scaled
from swapper.optimizer.plan import OptimizerPlan, parameters_of
from swapper.optimizer.records import Prefetcher
from swapper.optimizer.segments import Bucket, OptimizerParameter, grouped
from swapper.optimizer.stepper import Stepper
from swapper.storage.agreement import rank_count
from swapper.storage.backward_agreement import raised_by_all
from swapper.tensors.dynamo import not_compiled
from swapper.tensors.evicted_gradients import (
    bring_back_gradients,
    clear_gradient_home,
    evicted_gradient,
    raw_gradient,
    set_gradient_home,
    set_raw_gradient,
)
from swapper.tensors.grad_modes import modes_kept, set_grad_mode
from swapper.tensors.memory_overlap import CANNOT_GO_WITH, check_memory, names_of, refuse_foreach_on_one_memory
from swapper.tensors.reduced import is_of_fsdp, reduces_what_is_unused
from swapper.tensors.sharded import is_sharded
from swapper.tensors.thread_counts import is_of_autograd, program_thread_count

__all__ = ["CANNOT_GO_WITH", "Arrivals", "BackwardSteps"]

_Options = dict[str, Any]

_REDUCED_BEFORE = (
    "FSDP2 has reduced gradients of this parameter more than once in a backward, and with step_in_backward it was "
    "stepped, or counted, with the first: after set_reduce_scatter_unused_params(True) it reduces zeros for a module "
    "that is used several times in a forward, before its gradient is there. Call "
    "set_reduce_scatter_unused_params(False, recurse=False) on that module, or use step_in_backward: false"
)
_PASSED_THROUGH = (
    "Before a backward that is not to step these parameters, as a generator's through its discriminator, call "
    "requires_grad_(False) on them"
)


@dataclass(eq=False, slots=True)
class _Window:
    """The backward passes before a step. The last four are set when the first bucket is stepped."""

    stepped: dict[Bucket, None] = field(default_factory=dict)  # in order
    missing: dict[Bucket, int] = field(default_factory=dict)  # parameters that lack gradients, where some have arrived
    groups_of: dict[OptimizerParameter, int | None] = field(default_factory=dict)  # of what was stepped
    backward_pass: int = -1  # autograd's number of it
    options: list[_Options] = field(default_factory=list)  # of each group
    prefetcher: Prefetcher | None = None
    threads: int = 0  # that the program computes with; 0: not asked, as in its own thread
    streams: set[Any] = field(default_factory=set)  # of an accelerator, on which gradients have arrived


class BackwardSteps:
    """Steps the buckets of one optimizer in backward.

    Args:
        optimizer: the user's. Only a weak reference is kept.
        plan: the buckets; `gradient_accumulation_steps` is the window.
        stepper: steps them.
        prepare: called with "step" before the first bucket of a window is stepped; raises if a step could not be made
            now. A method, of which a weak reference is kept, as of the next: their object goes when its optimizer goes.
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
        prepare: Callable[[str], object],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._optimizer_ref = weakref.ref(optimizer)
        self._plan = plan
        self._stepper = stepper
        self._prepare = weakref.WeakMethod(prepare)
        self._failed = weakref.WeakMethod(failed)
        self._lock = threading.RLock()
        self._window = _Window()
        self._order: list[Bucket] = []  # of the last window: expected in the next
        self._checked: list[Bucket] = []  # buckets whose parameters are known to share no memory
        self._refuse(optimizer)
        check_memory(names_of(optimizer), parameters_of(optimizer))

    @property
    def under_way(self) -> bool:
        """True if buckets were stepped and `step()` was not called yet."""
        return bool(self._window.stepped)

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
            if first and not self._window.stepped and not known.stepped:
                self._count_anew(known)
            count = known.arrived + 1
            too_many = known.stepped or count > self._plan.gradient_accumulation_steps
            if too_many or self._is_another_pass():
                set_raw_gradient(p, None)
                raise SwapError(self._too_many() if too_many else self._another_pass())
            known.arrived = count
            if self._plan.on_accelerator:
                self._window.streams.update(current_streams([self._plan.device]))
            return count == self._plan.gradient_accumulation_steps

    def complete(self, p: torch.nn.Parameter) -> None:
        """The gradient of `p` is final, and in memory. Steps the buckets of which that is true of all parameters.

        Raises:
            SwapError, ConfigError: the result would be wrong. No parameter was touched.
            SwapIOError: the drive failed in the step of a bucket.
        """
        with self._lock:
            optimizer = self._optimizer_ref()
            assert optimizer is not None
            self._follow_thread_count()
            if not self._window.stepped:
                if self._without_gradient():
                    set_raw_gradient(p, None)
                    raise SwapError(self._too_many())
                self._refuse(optimizer)
                self._refuse_scaler()
                prepare = self._prepare()
                assert prepare is not None
                prepare("step")
                if self._checked != self._plan.buckets:
                    check_memory(names_of(optimizer), parameters_of(optimizer))
                    self._checked = list(self._plan.buckets)
            known = self._plan.of(p)
            for bucket in () if known is None else known.buckets:
                if self._is_complete(bucket):
                    self._step(optimizer, bucket)

    def _follow_thread_count(self) -> None:
        """Have a thread of autograd's own compute with as many threads as the program, which `step()` would be in."""
        if not is_of_autograd():
            return
        window = self._window
        window.threads = window.threads or program_thread_count()
        if torch.get_num_threads() != window.threads:
            torch.set_num_threads(window.threads)

    def left(self) -> list[Bucket]:
        """The buckets that `step()` has to see to."""
        return [bucket for bucket in self._plan.buckets if bucket not in self._window.stepped]

    def follow_plan(self) -> None:
        """The buckets, or which parameters are stepped, have changed."""
        with self._lock:
            self._window.missing.clear()
            self._window.prefetcher = None

    def check_window(self, optimizer: Optimizer) -> None:
        """Raise `SwapError` if `step()` would step otherwise what was stepped in backward."""
        if self._window.stepped:
            self._check_options(optimizer, range(len(self._window.options)))
        group_of = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        if any(known.is_gone or group_of.get(id(known.parameter)) != n for known, n in self._window.groups_of.items()):
            raise SwapError(
                "a parameter was taken out of its group between backward() and step(), but with step_in_backward it "
                "was stepped in backward; take it out after step() or before backward()"
            )

    def _check_options(self, optimizer: Optimizer, numbers: Iterable[int]) -> None:
        groups, options = optimizer.param_groups, self._window.options
        if any(number >= len(groups) or _options(groups[number]) != options[number] for number in numbers):
            raise SwapError(
                "an option of the optimizer (its learning rate, ...) was changed between backward() and step(), but "
                "with step_in_backward the parameters were stepped in backward; change it after step() or before "
                "backward()"
            )

    def finish(self) -> None:
        """The window is over; what was stepped in it is expected in the next one."""
        with self._lock:
            if self._window.stepped:
                self._order = list(self._window.stepped)
            self._window = _Window()
            for known in self._plan.planned():
                known.arrived = 0

    def fail_with_others(self, error: BaseException) -> None:
        """This backward, in which buckets were stepped, has failed on a rank: see `raised_by_all`.

        What is stepped on one rank may not be on another, so that all refuse the same from here on.
        """
        with self._lock:
            if self._window.stepped:
                self._end_window_of_failure(error)

    def _end_window_of_failure(self, error: BaseException) -> None:
        if (failed := self._failed()) is not None:
            failed(error)
        self.finish()

    def forget(self) -> None:
        """State and parameters are made anew: there is no window, and nothing is missing."""
        with self._lock:
            self.finish()
            for p in self._without_gradient():
                self._clear(p)

    def expected(self) -> list[Bucket]:
        """The buckets that are not stepped yet, in the order in which they probably will be."""
        # The last layers come first in a backward: so new buckets are expected at the end, in reverse order.
        present = dict.fromkeys(self._plan.buckets)
        known = dict.fromkeys([*(bucket for bucket in self._order if bucket in present), *reversed(present)])
        return [bucket for bucket in known if bucket not in self._window.stepped]

    # --- `GradientHome`, of gradients that are gone ------------------------------------------------------------------

    def gradient_of(self, parameter: torch.nn.Parameter, *, to_clear: bool = False) -> torch.Tensor:
        """The value of `p.grad`: a tensor that raises when its values are used."""
        return evicted_gradient(parameter, self, tuple(parameter.stride()))

    def bring_back(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """Raises `SwapError`, for the values of the gradient are gone."""
        raise SwapError(
            "the gradient of this parameter is gone: with step_in_backward it was used, and freed, in backward(). "
            f"{CANNOT_GO_WITH} GradScaler, clipping by a global norm, or anything else that needs gradients after "
            "it; use step_in_backward: false"
        )

    def gradient_to_add_to(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """Raises `SwapError`, as FSDP2 would add to values that are gone: see `bring_back`."""
        with raised_by_all(parameter, self.fail_with_others):
            if reduces_what_is_unused(sys._getframe()):
                raise SwapError(_REDUCED_BEFORE)
            return self.bring_back(parameter)
        return None

    def note_kept(self, parameter: torch.nn.Parameter, where: str) -> None:
        """Nothing: no other gradient is added to one that is gone."""

    def set_zero(self, parameter: torch.nn.Parameter) -> None:
        """Raises `SwapError`: see `bring_back`. Called by `zero_grad(set_to_none=False)`."""
        raise SwapError("zero_grad(set_to_none=False): with step_in_backward the gradients are gone; leave it out")

    def clear(self, parameters: Iterable[torch.nn.Parameter] | None = None) -> None:
        """`zero_grad`: the parameters may have gradients again. Raises `SwapError` if `step()` was not called."""
        with self._lock:
            if self._window.stepped:
                raise SwapError(
                    "the gradients were set to None before step() was called, but with step_in_backward the parameters "
                    "were stepped in backward already: a step cannot be skipped. Load a checkpoint to undo it. "
                    f"{_PASSED_THROUGH}, or use step_in_backward: false"
                )
            for p in self._without_gradient() if parameters is None else parameters:
                self._clear(p)

    def _clear(self, p: torch.nn.Parameter) -> None:
        if (known := self._plan.of(p)) is not None:
            known.stepped = False
            self._count_anew(known)
        clear_gradient_home(p)

    def _count_anew(self, known: OptimizerParameter) -> None:
        known.arrived = 0
        for bucket in known.buckets:
            self._window.missing.pop(bucket, None)

    def _without_gradient(self) -> list[torch.nn.Parameter]:
        """The parameters that were stepped, and whose gradients were not cleared since."""
        return [known.parameter for known in self._plan.planned() if known.stepped]

    # --- The step of a bucket ----------------------------------------------------------------------------------------

    def _is_complete(self, bucket: Bucket) -> bool:
        """A parameter of `bucket` has its last gradient. Returns whether all have, so that it can be stepped."""
        if bucket in self._window.stepped:
            return False
        if bucket not in self._window.missing:
            self._window.missing[bucket] = self._count_missing(bucket)
        else:
            self._window.missing[bucket] -= 1
        if self._window.missing[bucket]:
            return False
        given_up = [known for known in _members(bucket) if not self._stepper.has_gradient(known.parameter)]
        for known in given_up:  # `zero_grad()` without `step()`, and this bucket was not complete then.
            self._count_anew(known)
        if given_up:
            self._window.missing[bucket] = self._count_missing(bucket)
        return not given_up

    def _count_missing(self, bucket: Bucket) -> int:
        wanted = self._plan.gradient_accumulation_steps
        return sum(known.arrived != wanted for known in _members(bucket))

    def _step(self, optimizer: Optimizer, bucket: Bucket) -> None:
        members, window = _members(bucket), self._window
        if not window.stepped:
            window.options = [_options(group) for group in optimizer.param_groups]
            window.backward_pass = torch._C._current_graph_task_id()
        else:  # All groups are compared at the end; a model of many would take long to do so for each bucket.
            self._check_options(optimizer, {known.group for known in members if known.group is not None})
        bring_back_gradients((known.parameter for known in members), (self, self._stepper.gradients))
        work = self._stepper.work_on([bucket])
        if not work:
            return
        try:
            with among_streams(self._plan.device, window.streams) if window.streams else nullcontext(), modes_kept():
                set_grad_mode(False)
                self._stepper.run_one(optimizer, work[0])
        except BaseException as error:
            self._end_window_of_failure(error)
            raise
        window.stepped[bucket] = None
        for known in members:
            window.groups_of[known] = known.group
            if all(other in window.stepped for other in known.buckets):
                set_raw_gradient(known.parameter, None)
                known.stepped = True
                set_gradient_home(known.parameter, self)
        if window.prefetcher is None:  # Buckets stay as they are from here to the end of the window.
            window.prefetcher = self._stepper.prefetcher([(other, []) for other in self.expected()], window.stepped)
        window.prefetcher.look()

    def _is_another_pass(self) -> bool:
        """True in a later backward pass than the one in which buckets of the window were stepped.

        Autograd numbers passes as they start. Reentrant activation checkpointing makes passes within a pass: those
        have later numbers than what is around them.
        """
        if not self._window.stepped or torch._C._current_graph_task_id() <= self._window.backward_pass:
            return False
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code is CheckpointFunction.backward.__code__:
                return False
            frame = frame.f_back
        return True

    def _refuse(self, optimizer: Optimizer) -> None:
        refuse_in_graph(self._plan.device)
        processes = rank_count()
        # FSDP2 says when a gradient is reduced: see `Arrivals`.
        trained = [p for p in parameters_of(optimizer) if p.requires_grad] if processes > 1 else []
        others = [p for p in trained if not is_sharded(p)]
        if others and len(others) < len(trained):
            raise ConfigError(
                f"{CANNOT_GO_WITH} parameters that FSDP2 does not have beside others that it has: {len(others)} of "
                f"{len(trained)}, the first of shape {tuple(others[0].shape)}, are no DTensors, as of ignored_params. "
                "Each process has a gradient of its own for them, and it is averaged, if at all, after it has arrived. "
                "Call fully_shard on the model that has them, give them an optimizer of their own without it, or use "
                "step_in_backward: false"
            )
        if others:
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
        hidden = any(known.sharded for known in self._plan.planned())
        if may_be_scaled(self._plan.is_planned, hidden):
            raise ConfigError(
                f"{CANNOT_GO_WITH} GradScaler: the gradients are scaled when they arrive; use step_in_backward: "
                "false, or bfloat16, which needs no scaling. (A scaler of another model is no hindrance, unless the "
                "loss of this one is multiplied by a number, which looks the same: divide it instead.)"
            )

    def _another_pass(self) -> str:
        passes = self._plan.gradient_accumulation_steps
        return (
            "a backward pass came after the one in which parameters were stepped; with step_in_backward all have their "
            f"last gradients in one pass, the last of gradient_accumulation_steps: {passes}. Set that to the number of "
            "backward passes before a step, or use step_in_backward: false, as for pipeline schedules with several "
            "stages on a rank"
        )

    def _too_many(self) -> str:
        if reduces_what_is_unused(sys._getframe()):
            return _REDUCED_BEFORE
        passes = self._plan.gradient_accumulation_steps
        if not self._window.stepped:
            return (
                "gradients of a new window arrive, and those of the last one were not set to None; call "
                f"optimizer.zero_grad() after step(). {_PASSED_THROUGH}"
            )
        return (
            f"more than gradient_accumulation_steps: {passes} gradients arrived for a parameter since the last step(), "
            "and with step_in_backward it was stepped already; set gradient_accumulation_steps to the number of "
            "backward passes before a step. (Reentrant activation checkpointing of modules that share parameters "
            "counts as several: use use_reentrant=False.)"
        )


class Arrivals:
    """Watches the gradients of one optimizer.

    A window is the backward passes before a step, and the step. The first gradient of the last pass starts the reading.
    If buckets are stepped in backward, `backward_steps` gets every gradient instead.
    """

    def __init__(
        self, plan: OptimizerPlan, stepper: Stepper, guard: Guard, backward_steps: BackwardSteps | None
    ) -> None:
        self._plan = plan
        self._stepper = stepper
        self._guard = guard
        self.backward_steps = backward_steps
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
                # The frame that calls the hook of a shard is looked at, so it must be the caller's own.
                hook = on_gradient if is_sharded(p) else not_compiled(on_gradient)
                known.hook = p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def drop_window(self) -> None:
        """Give scratch back; the next gradient is the first of a window."""
        self._stepper.drop_scratch()
        self._has_begun = False
        for known in self._plan.planned() if self.backward_steps is None else ():
            known.arrived = 0

    def check_step(self, optimizer: Optimizer) -> None:
        """Refuse a `step()` that would have other bits than the class's own.

        Raises:
            ConfigError: parameters overlap, which are stepped at once since a group or a parameter has changed.
            SwapError: it would step otherwise what was stepped in backward; or a CUDA graph is being captured.
        """
        refuse_in_graph(self._plan.device)
        refuse_foreach_on_one_memory(optimizer, self._stepper.has_gradient)
        if self.backward_steps is not None:
            self.backward_steps.check_window(optimizer)

    def refuse_new_state(self) -> None:
        """Raise `SwapError` if buckets were stepped in backward: with another state they had other bits."""
        if self.backward_steps is not None and self.backward_steps.under_way:
            raise SwapError(
                "optimizer.state was replaced between backward() and step(), but with step_in_backward the parameters "
                "were stepped in backward; replace it after step() or before backward(), or start from no state by "
                "optimizer.swapper.reset()"
            )

    def left(self) -> list[Bucket]:
        """The buckets that `step()` has to see to."""
        return self._plan.buckets if self.backward_steps is None else self.backward_steps.left()

    def end_window(self) -> None:
        """The step was made."""
        self.drop_window()
        if self.backward_steps is not None:
            self.backward_steps.finish()
            self._stepper.wish(self.backward_steps.expected())

    def _on_gradient(self, p: torch.Tensor) -> None:
        """Called on a thread of autograd, in the middle of backward."""
        if self._guard.closed or self._guard.is_forked:
            return
        if self.backward_steps is not None:
            assert isinstance(p, torch.nn.Parameter)
            if is_sharded(p) and not is_of_fsdp(sys._getframe(1).f_back):  # None in autograd's own thread.
                raise ConfigError(
                    f"{CANNOT_GO_WITH} DTensors that FSDP2 does not have: others may be changed after they have "
                    "arrived; use step_in_backward: false"
                )
            gradients = self._stepper.gradients
            if gradients is None or not gradients.watches(p):  # Else it will say when they are complete.
                with raised_by_all(p, self.backward_steps.fail_with_others):
                    if self._guard.failure is None:
                        self.backward_steps.arrived(p)
            return
        if self._guard.failure is not None or self._has_begun:
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


def _members(bucket: Bucket) -> list[OptimizerParameter]:
    """The parameters of `bucket` that are stepped."""
    return [known for known in grouped(bucket.segments) if known.group is not None]


def _options(group: _Options) -> _Options:
    """The options of a group, with the values of tensors, and copies of what may be changed in place."""
    return {key: _value(option) for key, option in group.items() if key not in ("params", "param_names")}


def _value(option: Any) -> Any:
    if isinstance(option, torch.Tensor):
        return repr(option.tolist())  # Of a NaN, too, which is equal to none.
    if isinstance(option, dict):
        return {key: _entry(entry) for key, entry in option.items()}
    if isinstance(option, (list, tuple)):
        return isinstance(option, tuple), [_entry(entry) for entry in option]
    return option.copy() if isinstance(option, set) else option


def _entry(entry: Any) -> Any:
    """As `_value`. A long tensor in a list is known by being the same object, as it would take long to compare."""
    return entry if isinstance(entry, torch.Tensor) and entry.dim() else _value(entry)
