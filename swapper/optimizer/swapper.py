"""`OptimizerSwapper`: an optimizer whose state is on disk between steps.

The user's own object is kept and its class is not changed: `step` is replaced on the instance, the state goes through
torch's own state-dict hooks, and each bucket is stepped by the class's own code on narrowed `param_groups`.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, NoReturn, TypeVar, cast

import torch
from torch.optim import Optimizer

from swapper.errors import ConfigError, SwapError, SwapIOError
from swapper.finalizers import finalizer
from swapper.metrics import Metrics, Moves, Stats, moves_of
from swapper.optimizer.backward_step import CANNOT_GO_WITH, BackwardSteps
from swapper.optimizer.failure import Failure, versions
from swapper.optimizer.guarded_state import GuardedState
from swapper.optimizer.plan import OptimizerPlan, parameters_of
from swapper.optimizer.probe import class_step
from swapper.optimizer.segments import MASTER, Bucket, OptimizerParameter
from swapper.optimizer.state_dicts import (
    SHOW_PROGRESS_BYTES,
    StateRecords,
    allocate_in_memory,
    as_plain_state,
    check_loadable,
)
from swapper.optimizer.stepper import ReadAhead, Stepper, SwappedGradients, SwappedParameters
from swapper.storage.buffers import BufferPool
from swapper.storage.cache import RecordCache
from swapper.storage.growing_pool import GrowingPool
from swapper.storage.store import TensorStore
from swapper.tensors.evicted_gradients import bring_back_gradients, raw_gradient
from swapper.tensors.grad_modes import modes_kept, set_grad_mode

__all__ = ["OptimizerSwapper"]

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_ADVICE_AFTER_STEPS = 3


class OptimizerSwapper:
    """Swaps the state of one optimizer. Made by `swapper.wrap_optimizer`; found at `optimizer.swapper`.

    Args:
        optimizer: the user's; converted in place. Only a weak reference is kept.
        plan: its buckets.
        pool: buffers for records and scratch.
        pool_bytes: how much of the pool this optimizer may count on.
        store: where records go; None keeps them in the pool.
        release: called once, when this is closed.

    Attributes:
        keep_last: how many checkpoints to keep; None keeps all.

    Raises:
        ConfigError: the pool is too small.
        SwapIOError: the state that the optimizer had already could not be written; the optimizer is unchanged.
    """

    keep_last: int | None = None

    _living: ClassVar[weakref.WeakSet[OptimizerSwapper]] = weakref.WeakSet()

    def __init__(
        self,
        optimizer: Optimizer,
        plan: OptimizerPlan,
        pool: BufferPool | GrowingPool,
        pool_bytes: int,
        store: TensorStore | None,
        release: Callable[[], None],
    ) -> None:
        self.parameters: SwappedParameters | None = None
        self.gradients: SwappedGradients | None = None
        self._gradient_buckets: list[Bucket] = []  # that `gradients` follows
        self._optimizer_ref = weakref.ref(optimizer)
        self._plan = plan
        self._pool = pool
        self._pool_bytes = pool_bytes
        self._store = store
        self._release = release
        self._pid = os.getpid()
        self._closed = False
        self._released = False
        self.metrics = Metrics()
        self._cache = RecordCache(pool, store, self.metrics)
        self._stepper = Stepper(class_step(type(optimizer)), plan, pool, pool_bytes, self._cache, self.metrics)
        self._records = StateRecords(plan, self._stepper, self._cache, store)
        self._window_lock = threading.Lock()
        self._read_ahead = False
        self._failure: Failure | None = None
        self._former_step: Any = None
        self._finalizer: weakref.finalize[..., Any] | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._loading: dict[int, dict[str, Any]] | None = None
        self._advised = False
        self._backward: BackwardSteps | None = None
        self._state = GuardedState(self)
        self._own_state = optimizer.state  # Empty while the state is in records; `unwrap` fills it again.
        kept: dict[Any, Any] = {}
        try:
            if plan.step_in_backward:
                prepare, fail = _called_weakly(self._prepare_step), _called_weakly(self._fail)
                self._backward = BackwardSteps(optimizer, plan, self._stepper, prepare, fail)
            if not plan.swaps_state:
                self._hooks.append(optimizer.register_step_post_hook(self._count_step))
                vars(optimizer)["swapper"] = self
                return
            self._add_buckets(plan.buckets)
            self._reconcile(optimizer)
            existing = [(cast(torch.nn.Parameter, p), entries) for p, entries in optimizer.state.items() if entries]
            if existing:
                self._import(optimizer, existing, as_it_is=True)
                self._cache.flush()  # The copy in memory must stay until the one on the drive is good.
            kept.update(self._own_state)
            self._own_state.clear()
            self._install(optimizer)
            self._finalizer = finalizer(optimizer, _finalize, self)
            self._take_over(optimizer)
        except BaseException:
            self._uninstall(optimizer)
            self._own_state.update(kept)
            with suppress(SwapIOError):  # The error that is on its way already is the one to see.
                self.close()
            raise

    # --- What users call -------------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Counters since this was made."""
        m = self.metrics
        state_bytes = 0
        if not self._closed:
            state_bytes = sum(b.used_bytes() for b in self._plan.buckets if any(s.has_state for s in b.segments))
        return Stats(
            steps=m.steps,
            bytes_read=m.bytes_read,
            bytes_written=m.bytes_written,
            reads=m.reads,
            writes=m.writes,
            hits=m.hits,
            wait_read_s=m.wait_read_s,
            wait_write_s=m.wait_write_s,
            step_s=m.step_s,
            state_bytes=state_bytes,
            pool_bytes=self._pool.capacity_bytes,
            pool_used_bytes=self._pool.used_bytes,
            pool_peak_bytes=self._pool.peak_used_bytes,
            masters_reset=m.masters_reset,
            late_failures=m.late_failures,
            first_writes=0 if self._store is None else self._store.first_writes,
            gradients=Moves() if self.gradients is None else moves_of(self.gradients.metrics),
        )

    def flush(self) -> None:
        """Wait until everything that was stepped, and every gradient that is away, is on disk.

        Raises:
            SwapIOError: a write failed.
        """
        self._check_open()
        self._cache.flush()
        if self.gradients is not None:
            self.gradients.flush()

    def rest(self) -> None:
        """As `flush`, when no step is to be expected soon: gives the buffers back that were leased for the next one.

        Raises:
            SwapIOError: a write failed.
        """
        try:
            self.flush()
        finally:
            if not self._closed and not self._stepper.stepping:
                self._drop_window()

    @property
    def closed(self) -> bool:
        """Whether it has been closed: the state is gone."""
        return self._closed

    def close(self) -> None:
        """Wait for writes, delete the files, give the memory back. The state is gone; `step()` raises from now on.

        Idempotent. `swapper.unwrap_optimizer` keeps the state instead.

        Raises:
            SwapIOError: a write had failed. Everything was given back all the same.
        """
        if self._released:
            return
        try:
            self._close()
        except KeyboardInterrupt:
            self._close()  # Nothing may be left behind; what was done already is not done again.
            raise

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """`torch.nn.utils.clip_grad_norm_` over all parameters of the optimizer, with the same bits.

        Gradients that are away stay away: norms were taken as they passed, and they are scaled when they are used.

        Returns:
            The total norm before clipping, a scalar.
        """
        self._check_open()
        self._check_whole("clipping by a global norm, which is known only when all gradients have arrived")
        parameters = list(parameters_of(self._optimizer()))
        bring_back_gradients(parameters, (self.gradients,))
        if self.gradients is not None:
            return self.gradients.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)

    def clip_grad_value_(self, clip_value: float) -> None:
        """`torch.nn.utils.clip_grad_value_` over all parameters of the optimizer, with the same bits.

        Gradients that are away stay away, and are clamped when they are used.
        """
        self._check_open()
        self._check_whole("clipping, for which gradients have to be there after backward")
        parameters = list(parameters_of(self._optimizer()))
        bring_back_gradients(parameters, (self.gradients,))
        if self.gradients is not None:
            self.gradients.clip_grad_value_(parameters, clip_value)
        else:
            torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def _check_whole(self, what: str) -> None:
        if self._backward is not None:
            raise ConfigError(f"{CANNOT_GO_WITH} {what}")

    def state(self, parameter: torch.nn.Parameter) -> dict[str, Any]:
        """A copy, in memory, of the state of one parameter; {} if it has none. With master weights, `master_param` too.

        Raises:
            KeyError: the optimizer does not have `parameter`.
        """
        self._check_usable("state")
        if not self.swaps_state:
            return copy.deepcopy(self._optimizer().state.get(parameter, {}))
        if not self._plan.is_planned(parameter) and not any(p is parameter for p in parameters_of(self._optimizer())):
            raise KeyError("the optimizer does not have this parameter")
        self._plan.check_unchanged(parameter)
        return self._records.gather([parameter], allocate_in_memory).get(id(parameter), {})

    def reset(self) -> None:
        """Forget all state, as if no step had been made; also the way out after `optimizer.state` was replaced.

        The next step makes the state anew, as the class does it.
        """
        self._check_open()
        optimizer = self._optimizer()
        if not self.swaps_state:
            optimizer.state.clear()
            return
        self._note_cut_off(optimizer)
        with self._replacing("forgetting optimizer state"):
            self._records.forget()
        optimizer.state = self._state
        self._made_anew()

    def unwrap(self) -> None:
        """Bring all state back to `optimizer.state` and undo what wrapping did. See `swapper.unwrap_optimizer`."""
        self._check_usable("unwrap")
        optimizer = self._optimizer()
        parameters = self._parameters_with_state()
        self._check_state(optimizer)
        gathered = self._records.gather(parameters, allocate_in_memory)
        state: dict[Any, dict[str, Any]] = {}
        for p in parameters:
            if id(p) in gathered:
                entries = gathered[id(p)]
                entries.pop(MASTER, None)
                state[p] = {
                    key: as_plain_state(key, value, p, self.has_masters) if isinstance(value, torch.Tensor) else value
                    for key, value in entries.items()
                }
        if self.gradients is not None:
            self.gradients.bring_back_all()
        try:
            self._own_state.update(state)
            self._uninstall(optimizer)
        except KeyboardInterrupt:  # Half of it would be an optimizer without its state.
            self._own_state.update(state)
            self._uninstall(optimizer)
            raise
        finally:
            self.close()
        if self._finalizer is not None:
            self._finalizer.detach()

    def settled_records(self, operation: str) -> StateRecords:
        """The records of all state, in step with `param_groups`; what has files is in them.

        Raises:
            SwapError: a step failed, or is under way in backward: `operation` cannot go with that.
            SwapIOError: a write failed.
        """
        self._check_usable(operation)
        optimizer = self._optimizer()
        self._check_state(optimizer)
        self._reconcile(optimizer)
        self.flush()
        return self._records

    def restore(
        self, parameters: Sequence[torch.nn.Parameter], fill: Callable[[StateRecords, Optimizer], None]
    ) -> None:
        """Replace all state by what `fill` puts into the records. `parameters` are those that get state."""
        self._check_open()
        optimizer = self._optimizer()
        self._reconcile(optimizer)
        self._extend(optimizer, parameters)
        with self._replacing("loading a checkpoint"), modes_kept():
            set_grad_mode(False)
            fill(self._records, optimizer)
        self._made_anew()

    @contextmanager
    def loading(self, parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
        """While `parameters` and state are loaded, and from then on if that fails, no step can be made."""
        self._check_open()
        self._note_cut_off(self._optimizer())
        try:
            with self._replacing("loading a checkpoint"):
                yield
        except BaseException:
            if self._failure is not None:
                self._failure.parameters = versions(parameters)
            raise
        self._made_anew()

    @property
    def swaps_state(self) -> bool:
        """Whether the state is in records. With `device: none` it is in `optimizer.state`."""
        return self._plan.swaps_state

    @property
    def store(self) -> TensorStore | None:
        """Where the records are; None if they are in memory."""
        return self._store

    @property
    def has_masters(self) -> bool:
        """Whether any parameter has an fp32 master copy."""
        return any(segment.master for bucket in self._plan.buckets for segment in bucket.segments)

    def attach(self, *, parameters: SwappedParameters | None = None, gradients: SwappedGradients | None = None) -> None:
        """Step parameters, or with gradients, that are on disk too. What is None stays as it was."""
        self.parameters = self._stepper.parameters = parameters or self.parameters
        self.gradients = self._stepper.gradients = gradients or self.gradients

    def share_pool(self, read_ahead_bytes: int) -> None:
        """Others need the pool too: read at most `read_ahead_bytes` ahead."""
        self._cache.read_ahead_bytes = read_ahead_bytes

    @property
    def backward_steps(self) -> BackwardSteps | None:
        """What steps buckets in backward, if that is asked for."""
        return self._backward

    # --- Conversion of the user's object ---------------------------------------------------------------------------

    def _install(self, optimizer: Optimizer) -> None:
        optimizer_ref = self._optimizer_ref

        @Optimizer.profile_hook_step
        def hooked(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return self._step(optimizer, closure)

        @functools.wraps(type(optimizer).step)
        def step(*args: Any, **kwargs: Any) -> Any:
            target = optimizer_ref()
            assert target is not None
            # As the wrapper that a scheduler would put here: it looks for both names.
            target._opt_called = True  # type: ignore[attr-defined]
            return hooked(target, *args, **kwargs)

        def refuse_copy() -> NoReturn:
            raise SwapError(
                "an optimizer whose state is swapped cannot be copied or pickled: the copy would be without its state. "
                "Save optimizer.state_dict() instead, or call swapper.unwrap_optimizer(optimizer) first"
            )

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        self._former_step = vars(optimizer).get("step")
        vars(optimizer).update(step=step, swapper=self, __getstate__=refuse_copy, state=self._state)
        self._hooks.append(optimizer.register_state_dict_post_hook(self._on_state_dict, prepend=True))
        self._hooks.append(optimizer.register_load_state_dict_pre_hook(self._on_load_state_dict))
        self._hooks.append(optimizer.register_load_state_dict_post_hook(self._on_loaded, prepend=True))

    def _take_over(self, optimizer: Optimizer) -> None:
        """Have other optimizers leave the gradients of these parameters alone when they arrive.

        They go on stepping them with the gradients that are there when `step()` is called.
        """
        parameters = list(parameters_of(optimizer))
        for other in list(OptimizerSwapper._living):
            if other.gradients is not None:
                other.gradients.leave(parameters)
            if other._backward is not None:
                for known in filter(None, map(other._plan.of, parameters)):
                    known.left = True
                    known.unhook()
        OptimizerSwapper._living.add(self)

    def _uninstall(self, optimizer: Optimizer) -> None:
        """Undo `_install`, or as much of it as was done. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        if optimizer.state is self._state:
            optimizer.state = self._own_state
        if vars(optimizer).get("swapper") is not self:
            return
        if self.swaps_state:
            for name in ("step", "__getstate__"):
                vars(optimizer).pop(name, None)
            if self._former_step is not None:
                optimizer.step = self._former_step  # type: ignore[method-assign]
            elif any("initial_lr" in group for group in optimizer.param_groups):
                _install_scheduler_wrapper(optimizer)
        del vars(optimizer)["swapper"]

    def _optimizer(self) -> Optimizer:
        optimizer = self._optimizer_ref()
        if optimizer is None:
            raise SwapError("the optimizer that this swapper belonged to is gone")
        return optimizer

    def _check_open(self) -> None:
        if self._closed:
            raise SwapError("the swapper of this optimizer was closed and its state is gone; make a new optimizer")
        if os.getpid() != self._pid:
            raise SwapError(
                "a swapped optimizer was used in a forked process; its files and buffers belong to the parent. "
                "Make the optimizer in the process that steps it"
            )

    def _check_usable(self, operation: str) -> None:
        self._check_open()
        self._note_cut_off(self._optimizer())
        if self._backward is not None and self._backward.under_way and operation != "step":
            raise SwapError(f"{operation} is refused: parameters were stepped in backward; call step() first")
        if self._failure is not None:
            self._failure.check(operation)
            self._failure = None

    # --- The step --------------------------------------------------------------------------------------------------

    def _step(self, optimizer: Optimizer, closure: Callable[[], _T] | None) -> _T | None:
        self._check_usable("step")
        self._loading = None  # Still there if torch has refused what was to be loaded.
        loss = None
        if closure is not None:
            with modes_kept():
                set_grad_mode(True)
                loss = closure()
        if self._backward is not None:
            self._backward.check_window(optimizer)
        self._check_state(optimizer)
        if self.gradients is not None:
            self.gradients.check()
        bring_back_gradients(parameters_of(optimizer), (self.gradients, self._backward))
        self._reconcile(optimizer)
        work = self._stepper.work_on(self._plan.buckets if self._backward is None else self._backward.left())
        show = self.metrics.steps == 0 and self._plan.stored_bytes >= SHOW_PROGRESS_BYTES
        waited_s = self.metrics.wait_read_s + self.metrics.wait_write_s
        before_s = self.metrics.step_s
        with modes_kept(), self.metrics.span("swapper.step", "step_s"):
            set_grad_mode(False)
            try:
                self._stepper.run(optimizer, work, show)
            except BaseException as error:
                self._fail(error)
                raise
            self._end_window()
        self.metrics.steps += 1
        waited_s = self.metrics.wait_read_s + self.metrics.wait_write_s - waited_s
        self._advise(waited_s, self.metrics.step_s - before_s)
        return loss

    def _check_state(self, optimizer: Optimizer) -> None:
        if self.swaps_state and optimizer.state is not self._state:
            raise SwapError(
                "optimizer.state was replaced since the last step, but the state of a swapped optimizer is on disk. "
                "Assign what single parameters are to have (optimizer.state[parameter] = {...}) or load all of it with "
                "optimizer.load_state_dict(...), or call optimizer.swapper.reset() to start from no state"
            )

    def _reconcile(self, optimizer: Optimizer) -> None:
        """Follow what happened to `param_groups` since the last call. See [Note: parameters come and go]."""
        before = list(self._plan.buckets)
        unknown, came, left = self._plan.follow(optimizer)
        for known in left:
            known.unhook()
            known.arrived = 0
        if dropped := self._plan.drop_gone():
            self._forget_buckets(dropped)
            self._fit_pool()
        under_way = self._backward is not None and self._backward.under_way
        if under_way:  # What is stepped would be stepped again: the next call cuts anew.
            pass
        elif self._plan.threads != torch.get_num_threads() and self._plan.depends_on_threads:
            self._plan_again(
                optimizer, "torch.set_num_threads was called, and the bits of a low-precision step depend on it"
            )
        elif self._note_sparse(optimizer):
            self._plan_again(optimizer, "a sparse gradient came, which cannot be cut")
        elif self._plan.is_misfit:
            self._plan_again(optimizer, "fused was switched off, and the bits of a low-precision step depend on it")
        elif self._plan.is_wasteful:
            self._plan_again(optimizer, "more than half of its records is of parameters that are gone")
        if not under_way:
            self._plan.threads = torch.get_num_threads()
        if new := [p for p in unknown if p.requires_grad or raw_gradient(p) is not None]:
            self._extend(optimizer, new)
        if self._backward is not None and (came or left or before != self._plan.buckets):
            self._backward.follow_plan()
        if self.gradients is not None and (came or left or self._plan.buckets != self._gradient_buckets):
            self.gradients.plan(self._plan.gradient_parts())
            self._gradient_buckets = list(self._plan.buckets)
        self._watch_gradients(optimizer)

    def _note_sparse(self, optimizer: Optimizer) -> bool:
        """Whether a sparse gradient came for a parameter that is cut."""
        found = False
        for p in parameters_of(optimizer):
            gradient = raw_gradient(p)
            if gradient is not None and gradient.is_sparse:
                known = self._plan.of(p)
                if known is not None and not known.segments[0].whole:
                    known.keeps_whole = found = True
        return found

    def _extend(self, optimizer: Optimizer, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Give `parameters` a place in the records that do not have one."""
        parameters = [p for p in parameters if not self._plan.is_planned(p)]
        if not parameters:
            return
        self._cache.drop_prefetched()
        self._drop_window()  # The new ones may need a larger one.
        buckets = self._plan.extend(optimizer, parameters)
        try:
            self._add_buckets(buckets)
        except BaseException:
            self._plan.withdraw(buckets)
            raise

    def _fit_pool(self) -> None:
        if isinstance(self._pool, GrowingPool):
            self._pool.reserve(self._plan.stored_bytes + self._plan.scratch_bytes * self._plan.scratch_count)

    def _add_buckets(self, buckets: Sequence[Bucket]) -> None:
        self._fit_pool()
        if self._store is None:
            return
        schedule = self._plan.schedule(self._pool_bytes)
        self._cache.keep(self._plan.buckets[i].key for i in schedule.resident)
        self._store.plan({bucket.key: bucket.length_bytes for bucket in buckets if bucket.length_bytes}, summed=True)

    def _forget_buckets(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            if bucket.length_bytes:
                self._cache.forget(bucket.key)

    def _parameters_with_state(self) -> list[torch.nn.Parameter]:
        """Those that have state, in a group or not."""
        return [known.parameter for known in self._plan.planned() if known.has_state]

    def _plan_again(self, optimizer: Optimizer, why: str) -> None:
        """Cut anew; the state goes through a scratch file."""
        log.warning("%s: the optimizer's state is being cut anew", why)
        outside = self._parameters_with_state()
        gathered = self._records.gather(outside, self._records.allocator(outside))
        state = [(p, gathered[id(p)]) for p in outside if id(p) in gathered]
        wanted = [p for p in parameters_of(optimizer) if p.requires_grad or raw_gradient(p) is not None]
        self._cache.drop_prefetched()
        self._drop_window()  # The new cuts may need a larger one.
        with self._replacing("cutting optimizer state anew"):
            self._plan.threads = torch.get_num_threads()
            former = list(self._plan.buckets)
            try:
                self._plan.plan_again(optimizer, [*wanted, *outside])
            finally:
                self._forget_buckets(former)
            try:
                self._add_buckets(self._plan.buckets)
            except BaseException:
                self._plan.withdraw(self._plan.buckets)
                raise
            self._import(optimizer, state, as_it_is=True)

    def _advise(self, waited_s: float, took_s: float) -> None:
        if self._advised or self.metrics.steps <= _ADVICE_AFTER_STEPS or waited_s < 0.5 * took_s or took_s < 0.25:
            return
        self._advised = True
        log.warning(
            "step() waited for the drive for %.0f %% of its %.2f s: a larger resident_bytes or pool_bytes, a faster "
            "drive, or gradient accumulation would shorten it",
            100 * waited_s / took_s,
            took_s,
        )

    def _count_step(self, *_: object) -> None:
        if not self._closed:
            self.metrics.steps += 1

    def _prepare_step(self) -> None:
        """Before the first bucket that is stepped in backward: what `_step` does before it."""
        optimizer = self._optimizer()
        self._check_usable("step")
        self._check_state(optimizer)
        self._reconcile(optimizer)

    def _fail(self, error: BaseException) -> None:
        """Note what a step that raised has left behind."""
        done = self._stepper.done
        self._note_cut_off(self._optimizer(), error)
        self._stepper.abandon()
        self._drop_window()
        if isinstance(error, SwapIOError):
            error.step, error.buckets_stepped = self.metrics.steps, done

    def _note_cut_off(self, optimizer: Optimizer, error: BaseException | None = None) -> None:
        """Remember a step that ended in the middle. Without `error`: one that even `_fail` was cut off in."""
        stepper = self._stepper
        if not stepper.stepping and not (error and stepper.entered):
            return
        stepper.widen(optimizer)
        what = f"step {self.metrics.steps} failed after {stepper.done} of {len(self._plan.buckets)} buckets"
        parameters = [segment.parameter for bucket in stepper.entered for segment in bucket.segments]
        self._failure = Failure(what, error or KeyboardInterrupt(), versions(parameters))
        stepper.entered, stepper.done, stepper.stepping = [], 0, False
        if error is None:
            stepper.abandon()

    @contextmanager
    def _replacing(self, what: str) -> Iterator[None]:
        """While all state is replaced, and from then on if that fails, nothing may use it."""
        before = self._failure
        parameters = () if before is None else before.parameters
        self._failure = failure = Failure(f"{what} was not finished", None, parameters)
        try:
            yield
        except BaseException as error:
            failure.explain(error)
            self._cache.recover()
            raise
        self._failure = before

    def _drop_window(self) -> None:
        """Give scratch back; the next gradient is the first of a window."""
        self._stepper.drop_scratch()
        self._read_ahead = False
        for known in self._plan.planned() if self._backward is None else ():
            known.arrived = 0

    def _end_window(self) -> None:
        self._drop_window()
        if self._backward is not None:
            self._backward.finish()
            self._wish([bucket for bucket in self._backward.expected() if bucket.length_bytes])

    # --- Read-ahead ------------------------------------------------------------------------------------------------

    def _watch_gradients(self, optimizer: Optimizer) -> None:
        """Start reading when the first gradient arrives; with accumulation, the first of the last micro-batch."""
        if self._store is None and self._backward is None:
            return
        self_ref = weakref.ref(self)

        def on_gradient(p: torch.Tensor) -> None:
            swapper = self_ref()
            if swapper is not None:
                swapper._on_gradient(p)

        for p in parameters_of(optimizer):
            known = self._plan.of(p)
            if known is not None and known.hook is None and not known.left and p.requires_grad and p.is_leaf:
                known.hook = p.register_post_accumulate_grad_hook(on_gradient)  # type: ignore[no-untyped-call]

    def _on_gradient(self, p: torch.Tensor) -> None:
        if self._closed or self._failure is not None or os.getpid() != self._pid:
            return
        if self._backward is not None:
            assert isinstance(p, torch.nn.Parameter)
            if self.gradients is None or not self.gradients.watches(p):  # Else it will say when they are complete.
                self._backward.arrived(p)
            return
        if self._read_ahead:
            return
        with self._window_lock:
            known = self._plan.of(p)
            if known is None:
                return
            known.arrived += 1
            if self._read_ahead or known.arrived < self._plan.gradient_accumulation_steps:
                return
            self._read_ahead = True
        self._wish([bucket for bucket in self._plan.buckets if bucket.length_bytes], scratch=True)

    def _wish(self, buckets: Sequence[Bucket], *, scratch: bool = False) -> None:
        """Start reading `buckets` as far as there is room."""
        try:
            if scratch:
                self._stepper.hold_scratch()
            ReadAhead(self._stepper, [(bucket, []) for bucket in buckets]).look(0)
        except SwapError:
            # Read-ahead is a wish. What is wrong with it (a full pool, a failed write) comes up again in `step`.
            log.debug("no read-ahead", exc_info=True)

    # --- `StateOwner`, of what `optimizer.state` shows ---------------------------------------------------------------

    def parameters_with_state(self) -> list[torch.nn.Parameter]:
        """The parameters in groups that have state, in the order in which they were planned.

        What is asked of a parameter outside of them is answered too, but it is not among these: torch's `state_dict`
        goes through all, and fails at one that is in no group.
        """
        if (optimizer := self._optimizer_ref()) is None:
            return []
        members = {id(p) for p in parameters_of(optimizer)}
        found = (known.parameter for known in self._plan.planned() if known.has_state)
        return [p for p in found if id(p) in members]

    def state_keys(self, parameter: torch.nn.Parameter) -> list[str]:
        """Names of the state of a parameter, as `state` has them; none if it has no state."""
        segments = self._plan.segments_of(parameter)
        keys = list(segments[0].keys) if segments else []
        return keys + [MASTER] * any(segment.checksum is not None for segment in segments)

    def take_state(self, parameter: torch.nn.Parameter) -> dict[str, Any]:
        """Forget the state of a parameter, and return it, as the class would have it on the parameter's device.

        Errors as for `assign_state`.
        """
        self._check_usable("popping optimizer.state")
        entries = self._records.gather([parameter], allocate_in_memory).get(id(parameter), {})
        self.assign_state(parameter, {})
        return {
            key: as_plain_state(key, value, parameter, False) if isinstance(value, torch.Tensor) else value
            for key, value in entries.items()
        }

    def assign_state(self, parameter: torch.nn.Parameter, entries: Mapping[str, Any]) -> None:
        """Replace the state of a parameter by a copy of `entries`, with the dtypes they have; without any, forget it.

        Raises:
            SwapError: the optimizer does not have `parameter`; or a step was cut off, or is under way in backward.
            ConfigError, ValueError: the entries cannot be those of the parameter. Nothing was changed.
            SwapIOError: the drive failed.
        """
        self._check_usable("assigning to optimizer.state")
        optimizer = self._optimizer()
        self._check_state(optimizer)
        self._reconcile(optimizer)
        if not self._plan.is_planned(parameter):
            if not any(p is parameter for p in parameters_of(optimizer)):
                raise SwapError(
                    "state was assigned for a parameter that the optimizer does not have; add the parameter to "
                    "optimizer.param_groups first"
                )
            if not entries:
                return
            self._extend(optimizer, [parameter])
        entries = dict(entries)
        check_loadable(parameter, self._plan.segments_of(parameter), entries)
        with self._replacing("assigning to optimizer.state"), modes_kept():
            set_grad_mode(False)
            self._records.replace_one(optimizer, parameter, entries)

    # --- State in and out ------------------------------------------------------------------------------------------

    def _on_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        self._check_usable("state_dict")
        self._check_state(optimizer)
        self._reconcile(optimizer)
        parameters = list(parameters_of(optimizer))
        gathered = self._records.gather(parameters, self._records.allocator(parameters))
        state_dict["state"] = {i: gathered[id(p)] for i, p in enumerate(parameters) if id(p) in gathered}

    def _on_load_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        self._check_open()
        self._note_cut_off(optimizer)
        # By position, as torch maps them: the numbers (or names) in a state dict need not be those of `state_dict()`.
        names = (name for group in state_dict["param_groups"] for name in group["params"])
        state = state_dict["state"]
        self._loading = {i: state[name] for i, name in enumerate(names) if name in state}
        return {**state_dict, "state": {}}

    def _on_loaded(self, optimizer: Optimizer) -> None:
        state, self._loading = self._loading, None
        assert state is not None
        try:
            self._reconcile(optimizer)
            given = [(p, state[i]) for i, p in enumerate(parameters_of(optimizer)) if i in state]
            self._import(optimizer, given, as_it_is=False)
        except Exception:
            optimizer.state = self._state
            raise
        # Only now: until then `optimizer.state`, which torch has replaced, says that the state does not belong to it.
        optimizer.state = self._state
        self._made_anew()

    def _made_anew(self) -> None:
        if self._backward is not None:
            self._backward.forget()
        if self._failure is not None:
            self._failure.state_loaded = True

    def _import(
        self, optimizer: Optimizer, state: Sequence[tuple[torch.nn.Parameter, dict[str, Any]]], as_it_is: bool
    ) -> None:
        """Replace all state.

        Args:
            state: of each parameter that has some, in the class's own format.
            as_it_is: keep dtypes; else cast as torch's own `load_state_dict` does.
        """
        self._extend(optimizer, [p for p, _ in state])
        entries_of: dict[OptimizerParameter, dict[str, Any]] = {}
        for p, entries in state:
            known = self._plan.of(p)
            assert known is not None
            check_loadable(p, known.segments, entries)
            entries_of[known] = entries
        with self._replacing("loading optimizer state"), modes_kept():
            set_grad_mode(False)
            self._records.replace(optimizer, entries_of, lambda segment: entries_of[segment.of], as_it_is)

    # --- The end ---------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        self._closed = True
        self._loading = None
        for known in self._plan.planned():
            known.unhook()
        if self._backward is not None:
            self._backward.forget()
        if os.getpid() != self._pid:
            self._released = True
            return
        self._stepper.abandon()
        try:
            self._cache.flush()
        finally:
            self._drop_window()
            for bucket in self._plan.buckets:
                if bucket.length_bytes:
                    self._cache.forget(bucket.key)
                for segment in bucket.segments:
                    segment.forget()
            if self.gradients is not None:
                self.gradients.close()
            try:
                self._release()
            except Exception:
                self._released = True
                raise
            self._released = True


def _called_weakly(method: Callable[..., None]) -> Callable[..., None]:
    """`method`, for parts of its object that must not keep that alive: it goes when its optimizer goes, at once."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        bound = reference()
        assert bound is not None
        bound(*args)

    return call


def _install_scheduler_wrapper(optimizer: Optimizer) -> None:
    """What a scheduler puts on the optimizer it is given, for one that was given ours and left it alone."""
    reference = weakref.ref(optimizer)
    class_step = type(optimizer).step

    @functools.wraps(class_step)
    def step(*args: Any, **kwargs: Any) -> Any:
        target = reference()
        assert target is not None
        target._opt_called = True  # type: ignore[attr-defined]
        return class_step(target, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]


def _finalize(swapper: OptimizerSwapper) -> None:
    try:
        swapper.close()
    except Exception as error:
        swapper.metrics.late_failures += 1
        # Without a traceback: this may run in the middle of anything, and formatting one is not safe everywhere.
        log.error("a write of optimizer state had failed, and nobody was there to be told: %r", error)
