"""`OptimizerSwapper`: an optimizer whose state is on disk between steps.

The user's own object is kept and its class is not changed: `step` is replaced on the instance, the state goes through
torch's own state-dict hooks, and each bucket is stepped by the class's own code on narrowed `param_groups`.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch.optim import Optimizer

from swapper.errors import ConfigError, SwapError, SwapIOError
from swapper.metrics import Metrics, Moves, Stats, moves_of
from swapper.optimizer.alike import Alike
from swapper.optimizer.backward_step import CANNOT_GO_WITH, Arrivals, BackwardSteps
from swapper.optimizer.conversion import Conversion
from swapper.optimizer.device_records import checksums_to_host
from swapper.optimizer.direct_state import DirectState
from swapper.optimizer.failure import Guard
from swapper.optimizer.plan import OptimizerPlan, parameters_of
from swapper.optimizer.plan_follower import PlanFollower
from swapper.optimizer.probe import is_stepped_by_all
from swapper.optimizer.records import BucketRecords
from swapper.optimizer.segments import Bucket
from swapper.optimizer.state_dicts import (
    SHOW_PROGRESS_BYTES,
    StateRecords,
    allocate_in_memory,
    as_plain_state,
    as_plain_states,
    is_shared,
    state_by_position,
)
from swapper.optimizer.step_arguments import refuse_closure_uses
from swapper.optimizer.step_protocols import SwappedGradients, SwappedParameters
from swapper.optimizer.stepper import Stepper
from swapper.process.finalizers import finalizer
from swapper.process.interrupts import interrupts_deferred
from swapper.storage.agreement import agreed
from swapper.storage.buffers import BufferPool
from swapper.storage.cache import RecordCache
from swapper.storage.device_pool import DevicePool
from swapper.storage.growing_pool import GrowingPool
from swapper.storage.store import TensorStore
from swapper.tensors.evicted_gradients import bring_back_gradients
from swapper.tensors.grad_modes import modes_kept, outside_of_inference, set_grad_mode

__all__ = ["OptimizerSwapper"]

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_ADVICE_AFTER_STEPS = 3


class OptimizerSwapper:
    """Swaps the state of one optimizer. Made by `swapper.wrap_optimizer`; found at `optimizer.swapper`.

    Args:
        optimizer: the user's; converted in place. Only a weak reference is kept.
        plan: its buckets. Of a plan that swaps no state (`device: none`) only steps are counted, and everything that
            users call works on `optimizer.state`.
        pool: buffers for records and scratch.
        pool_bytes: the part of the pool that this optimizer may count on.
        store: has the records; None keeps them in the pool.
        release: called once, when this is closed.
        make_slots: makes memory on the device for records that come without the pool; None if all come through it.

    Attributes:
        keep_last: number of checkpoints to keep; None keeps all.
        store: has the records; None if they are in memory.
        parameters, gradients: swappers of those that are on disk too; None where they are in memory.
        backward_steps: steps buckets in backward, if that is asked for.

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
        make_slots: Callable[[int], DevicePool] | None = None,
    ) -> None:
        self.store = store
        self.metrics = Metrics()
        self.parameters: SwappedParameters | None = None
        self.gradients: SwappedGradients | None = None
        self.backward_steps: BackwardSteps | None = None
        self._optimizer_ref = weakref.ref(optimizer)
        self._plan = plan
        self.segments_of = plan.segments_of  # None of a parameter that is not planned.
        self._pool = pool
        self._release, self._released = release, False
        self._cache = RecordCache(pool, store, self.metrics, owner=optimizer)
        direct = make_slots and DirectState(make_slots, store, self.metrics, self._cache, optimizer)
        records = BucketRecords(self._cache, self.metrics, direct)
        self._stepper = Stepper(type(optimizer), plan, pool, pool_bytes, records)
        self._records = StateRecords(plan, records, store)
        self.rounding_of = self._records.rounding_of  # Of a gradient.
        self._alike = Alike(plan, records, self.metrics)
        self._guard = Guard(self._stepper, records, self.metrics)
        self.check_open = self._guard.check_open  # Raises SwapError if the state is gone, or the parent's.
        self._conversion = Conversion(optimizer, self)
        self._loading: tuple[dict[int, dict[str, Any]], object] | None = None  # and the groups before
        self._advised = False
        self._finalizer: weakref.finalize[..., Any] | None = None
        if plan.step_in_backward:
            self.backward_steps = BackwardSteps(optimizer, plan, self._stepper, self._prepare, self._fail)
        self._arrivals = Arrivals(plan, self._stepper, self._guard, self.backward_steps)
        self._follower = PlanFollower(self._records, self._stepper, pool, pool_bytes, self._guard, self._arrivals)
        if not plan.swaps_state:
            self._conversion.install_counter(optimizer, self, self._alike.check, self._count_step)
            self._alike.tell(optimizer)
            return
        kept, own_state = dict[Any, Any](), self._conversion.own_state
        try:
            self._follower.add(plan.buckets)
            self._follower.follow(optimizer)
            self._stepper.announce(optimizer)
            if existing := [(cast(torch.nn.Parameter, p), entries) for p, entries in own_state.items() if entries]:
                self._follower.load(optimizer, existing, as_it_is=True)
                records.flush()  # The copy in memory must stay until the one on the drive is good.
            with interrupts_deferred():
                kept.update(own_state)
                own_state.clear()
                hooks = self._on_state_dict, self._on_load_state_dict, self._on_loaded
                self._conversion.install(optimizer, self, self._step, *hooks)
                self._finalizer = finalizer(optimizer, _finalize, self)
                self._take_over(optimizer)
        except BaseException:
            try:
                with interrupts_deferred():
                    self._conversion.uninstall(optimizer, self, kept)
            finally:  # Ctrl-C may come once more, before it is deferred; where that ends it is raised.
                self._conversion.uninstall(optimizer, self, kept)
                with suppress(SwapIOError):  # The error that is on its way already is the one to see.
                    self.close()
            raise
        self._alike.tell(optimizer)

    # --- What users call -------------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Counters since this was made."""
        self._records.bucket_records.wait_for_resets()
        return Stats(
            **vars(self.metrics),
            state_bytes=0 if self._guard.closed else self._records.stored_bytes(),
            pool_bytes=self._pool.capacity_bytes,
            pool_used_bytes=self._pool.used_bytes,
            pool_peak_bytes=self._pool.peak_used_bytes,
            first_writes=0 if self.store is None else self.store.first_writes,
            gradients=Moves() if self.gradients is None else moves_of(self.gradients.metrics),
            encoding=self._plan.encodings or "exact",
            encoding_reason=self._plan.encoding_reason,
        )

    def flush(self) -> None:
        """Wait until everything that was stepped, and every gradient that is evicted, is on disk.

        Raises:
            SwapIOError: a write failed.
        """
        self._guard.check_open()
        self._records.bucket_records.flush()
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
            if not self._guard.closed and not self._stepper.stepping:
                self._arrivals.drop_window()
                self._stepper.drop_slots()

    @property
    def closed(self) -> bool:
        """True once it is closed: the state is gone."""
        return self._guard.closed

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
        except KeyboardInterrupt:  # It waits for the drive, so that interrupts cannot be deferred.
            self._close()  # Nothing may be left behind; what was done already is not done again.
            raise

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        """`torch.nn.utils.clip_grad_norm_` over all parameters of the optimizer, with the same bits.

        Gradients that are evicted stay so: norms were taken as they passed, and they are scaled when they are used.

        Returns:
            The total norm before clipping, a scalar.
        """
        purpose = "clipping by a global norm, which is known only when all gradients have arrived"
        parameters = self._gradients_to_clip(purpose)
        clip = torch.nn.utils.clip_grad_norm_ if self.gradients is None else self.gradients.clip_grad_norm_
        return clip(parameters, max_norm, norm_type, error_if_nonfinite, foreach)

    def clip_grad_value_(self, clip_value: float) -> None:
        """`torch.nn.utils.clip_grad_value_` over all parameters of the optimizer, with the same bits.

        Gradients that are evicted stay so, and are clamped when they are used.
        """
        parameters = self._gradients_to_clip("clipping, for which gradients have to be there after backward")
        clip = torch.nn.utils.clip_grad_value_ if self.gradients is None else self.gradients.clip_grad_value_
        clip(parameters, clip_value)

    def _gradients_to_clip(self, purpose: str) -> list[torch.nn.Parameter]:
        self._guard.check_open()
        if self.backward_steps is not None:
            raise ConfigError(f"{CANNOT_GO_WITH} {purpose}")
        parameters = list(parameters_of(self._optimizer()))
        bring_back_gradients(parameters, (self.gradients,))
        return parameters

    def state(self, parameter: torch.nn.Parameter) -> dict[str, Any]:
        """A copy, in memory, of the state of one parameter; {} if it has none. With master weights, `master_param` too.

        Raises:
            KeyError: the optimizer does not have `parameter`.
        """
        self._check_usable("state")
        if not self.swaps_state:
            return copy.deepcopy(self._optimizer().state.get(parameter, {}))
        if not self._plan.is_planned(parameter) and all(p is not parameter for p in parameters_of(self._optimizer())):
            raise KeyError("the optimizer does not have this parameter")
        self._plan.check_unchanged(parameter)
        return self._gathered([parameter]).get(id(parameter), {})

    def reset(self) -> None:
        """Forget all state, as if no step had been made: the next one makes it anew, as the class does it."""
        self._guard.check_open()
        if not self.swaps_state:
            self._optimizer().state.clear()
            return
        self._guard.note_cut_off(optimizer := self._optimizer())
        with self._guard.replacing("forgetting optimizer state"):
            self._records.reset()
        self._conversion.give_state_back(optimizer)
        self._made_anew()

    def unwrap(self) -> None:
        """Bring all state back to `optimizer.state` and undo what wrapping did. See `swapper.unwrap_optimizer`."""
        optimizer = self._check_usable("unwrap")
        self._conversion.check_given()
        parameters = self._plan.with_state()
        gathered = self._gathered(parameters)
        state = as_plain_states(optimizer, {p: gathered[id(p)] for p in parameters}, self.has_masters)
        if self.gradients is not None:
            self.gradients.bring_back_all()
        with ExitStack() as end, interrupts_deferred():  # Half of it would be an optimizer without its state.
            self._conversion.uninstall(optimizer, self, state)
            end.callback(self.close)  # Not if an interrupt was first: then the records are all there is.
        if self._finalizer is not None:
            self._finalizer.detach()

    def flushed_records(self) -> StateRecords:
        """The records of all state, in step with `param_groups`, for a checkpoint; what has files is in them.

        Raises:
            SwapError: a step failed, or is under way in backward.
            SwapIOError: a write failed.
        """
        self._prepare("save_checkpoint")
        self.flush()
        self._records.bucket_records.wait_for_resets()
        checksums_to_host(self._plan.planned())
        return self._records

    def restore(
        self, parameters: Sequence[torch.nn.Parameter], fill: Callable[[StateRecords, Optimizer], None]
    ) -> None:
        """Replace all state by what `fill` puts into the records. `parameters` are those that get state."""
        self._guard.check_open()
        self._take_replaced(optimizer := self._optimizer())  # A class's own load_state_dict may have.
        self._follower.follow(optimizer)
        self._follower.extend(optimizer, parameters)
        with self._guard.replacing("loading a checkpoint"), modes_kept():
            set_grad_mode(False)
            fill(self._records, optimizer)
        self._made_anew()

    @contextmanager
    def loading(self, parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
        """While `parameters` and state are loaded, and from then on if that fails, no step can be made."""
        self._guard.check_open()
        self._guard.note_cut_off(self._optimizer())
        try:
            with self._guard.replacing("loading a checkpoint"):
                yield
        except BaseException:
            if self._guard.failure is not None:
                self._guard.failure.wait_for(parameters)
            raise
        self._made_anew()

    @property
    def swaps_state(self) -> bool:
        """True if the state is in records. With `device: none` it is in `optimizer.state`."""
        return self._plan.swaps_state

    @property
    def has_masters(self) -> bool:
        """True if any parameter has an fp32 master copy."""
        return any(segment.master for bucket in self._plan.buckets for segment in bucket.segments)

    def attach(self, *, parameters: SwappedParameters | None = None, gradients: SwappedGradients | None = None) -> None:
        """Step parameters, or with gradients, that are on disk too. What is None stays as it was."""
        self.parameters = self._stepper.parameters = parameters or self.parameters
        self.gradients = self._stepper.gradients = gradients or self.gradients

    def share_pool(self, read_ahead_bytes: int) -> None:
        """Others need the pool too: read at most `read_ahead_bytes` ahead."""
        self._cache.read_ahead_bytes = read_ahead_bytes

    def _optimizer(self) -> Optimizer:
        if (optimizer := self._optimizer_ref()) is None:
            raise SwapError("the optimizer that this swapper belonged to is gone")
        return optimizer

    def _check_usable(self, operation: str, *, take_replaced: bool = True) -> Optimizer:
        self._guard.check_open()
        self._guard.note_cut_off(optimizer := self._optimizer())
        if self.backward_steps is not None and self.backward_steps.under_way and operation != "step":
            raise SwapError(f"{operation} is refused: parameters were stepped in backward; call step() first")
        if take_replaced:
            self._take_replaced(optimizer)
        self._guard.check_usable(optimizer, operation)  # Only now: what was taken may be what this waits for.
        return optimizer

    def _take_replaced(self, optimizer: Optimizer) -> None:
        """Take what `optimizer.state` was replaced by as all the state, with the dtypes that it has."""
        if (state := self._conversion.replaced_by(optimizer)) is not None:
            # What torch has put there is empty, for `_on_loaded`, which did not end.
            if self._loading is not None and self._loading[1] is not optimizer.param_groups:
                raise SwapError("load_state_dict was cut off; call it again, or optimizer.swapper.reset() for no state")
            self._arrivals.refuse_new_state()
            self._follower.load(optimizer, state, as_it_is=True)
            self._conversion.give_state_back(optimizer)
            self._made_anew()
        self._loading = None  # Still there if torch has refused what was to be loaded, and then left all as it was.

    def _prepare(self, operation: str, *, follow: bool = True) -> Optimizer:
        """Check that `operation` may be done now, and follow `param_groups`. Returns the optimizer."""
        optimizer = self._check_usable(operation)
        self._conversion.check_given()
        if follow:
            self._follower.follow(optimizer)
        if operation == "step":
            self._plan.check_not_moved()
        return optimizer

    def _take_over(self, optimizer: Optimizer) -> None:
        """Have other optimizers leave the gradients of these parameters alone when they arrive.

        They go on stepping them with the gradients that are there when `step()` is called.
        """
        parameters = list(parameters_of(optimizer))
        for other in list(OptimizerSwapper._living):
            if other.gradients is not None:
                other.gradients.leave(parameters)
            if other.backward_steps is not None:
                for known in filter(None, map(other._plan.of, parameters)):
                    known.left = True
                    known.unhook()
        OptimizerSwapper._living.add(self)

    # --- The step --------------------------------------------------------------------------------------------------

    def _step(self, optimizer: Optimizer, closure: Callable[[], _T] | None) -> _T | None:
        together = is_stepped_by_all(optimizer)
        loss = None
        if closure is not None:
            with agreed(together):
                self._check_usable("step")
                refuse_closure_uses(optimizer)
            with modes_kept():
                set_grad_mode(True)
                loss = closure()
        with agreed(together):
            self._check_usable("step")
            self._arrivals.check_step(optimizer)
            self._alike.check(optimizer)
            self._conversion.check_given()
            if self.gradients is not None:
                self.gradients.check()
            bring_back_gradients(parameters_of(optimizer), (self.gradients, self.backward_steps))
            self._follower.follow(optimizer)
            self._plan.check_not_moved()
            work = self._stepper.work_on(self._arrivals.left())
        show = self.metrics.steps == 0 and self._plan.stored_bytes >= SHOW_PROGRESS_BYTES
        before = copy.copy(self.metrics)
        with modes_kept(), self.metrics.span("swapper.step", "step_s"):
            set_grad_mode(False)
            try:
                with agreed(together):
                    self._stepper.run(optimizer, work, show)
                    self._arrivals.end_window()
            except BaseException as error:
                self._fail(error, [bucket for bucket, _ in work] if together else None)
                raise
        self.metrics.steps += 1
        self._advise(before)
        return loss

    def _count_step(self, *_: object) -> None:
        if not self._guard.closed:
            self.metrics.steps += 1

    def _advise(self, before: Metrics) -> None:
        is_late = self.metrics.steps > _ADVICE_AFTER_STEPS
        if not self._advised and is_late and (text := self.metrics.advice_since(before)):
            self._advised = True
            log.warning("%s", text)

    def _fail(self, error: BaseException, shared: list[Bucket] | None = None) -> None:
        """Note what a step that raised has left behind. For `shared` see `Guard.note_cut_off`."""
        done = self._stepper.done
        self._guard.note_cut_off(self._optimizer(), error, shared)
        self._stepper.abandon()
        self._arrivals.drop_window()
        if isinstance(error, SwapIOError):
            error.step, error.buckets_stepped = self.metrics.steps, done

    def _made_anew(self) -> None:
        """All state was replaced."""
        self._loading = None
        if self._guard.failure is not None:
            self._guard.failure.state_loaded = True
        if self.backward_steps is not None:
            self.backward_steps.forget()
        self._alike.tell(self._optimizer())
        if self._stepper.entered:  # Of a window that was under way. Last: writes that were put off may fail here.
            self._stepper.abandon()

    # --- What `optimizer.state` asks -------------------------------------------------------------------------------

    def parameters_with_state(self) -> list[torch.nn.Parameter]:
        """The parameters in groups that have state, in the order in which they were planned.

        What is asked of a parameter outside of them is answered too, but it is not among these: torch's `state_dict`
        goes through all, and fails at one that is in no group.
        """
        if (optimizer := self._optimizer_ref()) is None:
            return []
        members = {id(p) for p in parameters_of(optimizer)}
        return [p for p in self._plan.with_state() if id(p) in members]

    def small_state(self, parameter: torch.nn.Parameter) -> Mapping[str, Any]:
        """The state, of a parameter that has some, that never moves; of its first segment, if it is cut."""
        self._check_usable("reading optimizer.state")
        return self._plan.segments_of(parameter)[0].small

    def plain_state(self, parameter: torch.nn.Parameter) -> dict[str, Any]:
        """Return the state from the records, as the class would have it on the parameter's device; {} if none."""
        self._check_usable("reading optimizer.state", take_replaced=False)
        self._plan.check_unchanged(parameter)
        entries = self._gathered([parameter]).get(id(parameter), {})
        return {key: as_plain_state(key, value, parameter, False) for key, value in entries.items()}

    def assign_state(self, parameter: torch.nn.Parameter, entries: Mapping[str, Any]) -> None:
        """Replace the state of a parameter by a copy of `entries`, with the dtypes they have; without any, forget it.

        Raises:
            SwapError: the optimizer does not have `parameter`; or a step was cut off, or is under way in backward.
            ConfigError, ValueError: the entries cannot be those of the parameter. Nothing was changed.
            SwapIOError: the drive failed.
        """
        # To follow groups is work for all parameters, and programs assign the state of all, one after another.
        optimizer = self._prepare("assigning to optimizer.state", follow=not self._plan.is_planned(parameter))
        self._plan.check_unchanged(parameter)
        if not self._plan.is_planned(parameter):
            if not any(p is parameter for p in parameters_of(optimizer)):
                raise SwapError(
                    "state was assigned for a parameter that the optimizer does not have; add the parameter to "
                    "optimizer.param_groups first"
                )
            if not entries:
                return
            self._follower.extend(optimizer, [parameter])
        _, entries = self._records.checked([(parameter, entries)]).popitem()
        with self._guard.replacing("assigning to optimizer.state"), outside_of_inference():
            set_grad_mode(False)
            self._records.replace_one(optimizer, parameter, entries)

    # --- State in and out ------------------------------------------------------------------------------------------

    def _gathered(self, parameters: Sequence[torch.nn.Parameter]) -> dict[int, dict[str, Any]]:
        return self._records.gather(parameters, allocate_in_memory)

    def _on_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        self._prepare("state_dict")
        self._records.put_into(state_dict, list(parameters_of(optimizer)))

    def _on_load_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        with agreed(is_shared(optimizer)):
            self._guard.check_open()
            self._guard.note_cut_off(optimizer)
            self._loading = state_by_position(optimizer, state_dict), optimizer.param_groups
            self._records.note_steps(state_dict)
        return {**state_dict, "state": {}}

    def _on_loaded(self, optimizer: Optimizer) -> None:
        assert self._loading is not None
        state, _ = self._loading
        try:
            with agreed(is_shared(optimizer)):
                self._follower.follow(optimizer)
            given = [(p, state[i]) for i, p in enumerate(parameters_of(optimizer)) if i in state]
            self._follower.load(optimizer, given, as_it_is=False, together=is_shared(optimizer))
        except Exception:
            self._conversion.give_state_back(optimizer)
            self._loading = None
            raise
        self._conversion.give_state_back(optimizer)
        self._made_anew()

    # --- The end ---------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        self._guard.closed = True
        self._loading = None
        self._alike.forget()
        for known in self._plan.planned():
            known.unhook()
        if self.backward_steps is not None:
            self.backward_steps.forget()
        if self._guard.is_forked:
            self._released = True
            return
        with ExitStack() as steps:  # Each is done, whatever those before it raise. The last that is added comes first.
            steps.callback(self._release_part)
            if self.gradients is not None:
                steps.callback(self.gradients.close)
            steps.callback(self._stepper.drop_slots)
            steps.callback(self._forget_records)
            steps.callback(self._records.bucket_records.flush)
            steps.callback(self._stepper.abandon)

    def _forget_records(self) -> None:
        self._arrivals.drop_window()
        self._records.forget()
        self._follower.forget(self._plan.buckets)

    def _release_part(self) -> None:
        try:
            self._release()
        except Exception:
            self._released = True
            raise
        self._released = True


def _finalize(swapper: OptimizerSwapper) -> None:
    try:
        swapper.close()
    except Exception as error:
        swapper.metrics.late_failures += 1
        # Its text, without a traceback: this may run in the middle of anything, where formatting one is not safe.
        log.error("a write of optimizer state had failed, and nobody was there to be told: %s", repr(error))
