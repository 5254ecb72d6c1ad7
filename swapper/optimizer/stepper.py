"""`Stepper`: one bucket after another is brought in, stepped by the optimizer's own class, and written behind.

The class sees `param_groups` narrowed to the tensors of one bucket, with their state put in. Its own unhooked `step`
runs, and what it left behind is taken out: whatever it does to all parameters at once, it does to a few.
"""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch.optim import Optimizer

from swapper.errors import SwapError
from swapper.io.devices import DeviceCopies
from swapper.metrics import Metrics
from swapper.optimizer.plan import OptimizerPlan
from swapper.optimizer.segments import Bucket, Opened, OptimizerParameter, Scratch, Segment, grouped, is_edited
from swapper.progress import ProgressBar
from swapper.storage.buffers import BufferPool, Lease
from swapper.storage.cache import RecordCache
from swapper.storage.growing_pool import GrowingPool
from swapper.storage.malloc_trim import return_free_memory
from swapper.tensors.evicted_gradients import gradient_attached, raw_gradient
from swapper.tensors.strides import same_layout

__all__ = ["ReadAhead", "Stepper", "SwappedGradients", "SwappedParameters", "Work", "progress"]

log = logging.getLogger(__name__)

_T = TypeVar("_T")
Work = tuple[Bucket, list[Segment]]
"""A bucket, and those of its segments that have a gradient."""

_READ_AHEAD = 64
"""Buckets that are looked at for what to read next."""


class SwappedParameters(Protocol):
    """What a step asks of parameters that are on disk too."""

    def stepping(self, parameters: Iterable[torch.nn.Parameter]) -> AbstractContextManager[None]:
        """Within it `parameters` have their values and may be changed."""

    def staying(
        self, parameters: Iterable[torch.nn.Parameter], following: Iterable[torch.nn.Parameter]
    ) -> AbstractContextManager[None]:
        """Within it those of `following` that lie together with some of `parameters`, which are there, stay there."""


class SwappedGradients(Protocol):
    """What a step asks of gradients that are away too."""

    @property
    def metrics(self) -> Metrics:
        """Counts what moves."""

    @property
    def drops(self) -> int:
        """How often a part that was read ahead was given up."""

    def plan(self, parts: Iterable[tuple[int, torch.nn.Parameter, int, int]]) -> None:
        """The buckets have changed: see `OptimizerPlan.gradient_parts`."""

    def check(self) -> None:
        """Raise what is known to be wrong with any gradient: a step must not find out in the middle."""

    def has(self, parameter: torch.nn.Parameter) -> bool:
        """Whether there is a gradient, wherever it is."""

    def is_away(self, parameter: torch.nn.Parameter) -> bool:
        """Whether it is not in memory."""

    def stage(self, parameter: torch.nn.Parameter, start: int) -> bool:
        """Start reading the part of it that starts at `start`. False if there is no room."""

    def taken(self, parameter: torch.nn.Parameter, start: int) -> AbstractContextManager[torch.Tensor]:
        """Within it that part is there: 1-D, in memory order."""

    def watches(self, parameter: torch.nn.Parameter) -> bool:
        """Whether its gradients are looked at when they arrive."""

    def leave(self, parameters: Iterable[torch.Tensor]) -> None:
        """Take no more gradients of `parameters`."""

    def clear(self, parameters: Iterable[torch.nn.Parameter] | None = None) -> None:
        """Forget the gradients that are away."""

    def bring_back_all(self) -> None:
        """Have all gradients in memory."""

    def flush(self) -> None:
        """Wait until what is away is on disk."""

    def close(self) -> None:
        """Forget everything."""

    def clip_grad_norm_(
        self,
        parameters: Iterable[torch.nn.Parameter],
        max_norm: float,
        norm_type: float,
        error_if_nonfinite: bool,
        foreach: bool | None,
    ) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_`."""

    def clip_grad_value_(self, parameters: Iterable[torch.nn.Parameter], clip_value: float) -> None:
        """As `torch.nn.utils.clip_grad_value_`."""


class ReadAhead:
    """Stages what a scan over buckets needs, in order, as far as there is room.

    Goes on where there was no room the last time, so that a bucket is staged once and not at each of the 64 looks that
    come by it. When something that was staged has been given up since, it begins anew at the bucket that is next.

    Args:
        stepper: stages.
        work: what the scan steps or reads, in order.
        done: buckets that are not needed any more; grows while the scan goes on.
    """

    def __init__(self, stepper: Stepper, work: Sequence[Work], done: Container[Bucket] = ()) -> None:
        self._stepper = stepper
        self._work = work
        self._done = done
        self._start = 0
        self._next = 0
        self._drops = stepper.drops

    def look(self, start: int = 0) -> None:
        """Stage up to `_READ_AHEAD` buckets, from the first on that is not done and not before position `start`."""
        self._start = max(self._start, start)
        while self._start < len(self._work) and self._work[self._start][0] in self._done:
            self._start += 1
        drops = self._stepper.drops
        if drops != self._drops:
            self._next, self._drops = self._start, drops
        self._next = max(self._next, self._start)
        stop = min(len(self._work), self._start + _READ_AHEAD)
        while self._next < stop:
            bucket, active = self._work[self._next]
            if bucket not in self._done and not self._stepper.stage(bucket, active):
                return
            self._next += 1


class Stepper:
    """Steps the buckets of one optimizer.

    Args:
        class_step: the class's own `step`, without hooks.
        plan: the buckets.
        pool: for scratch.
        pool_bytes: how much of the pool there is; to know whether memory is short.
        cache: brings records in and out.
        metrics: counts.

    Attributes:
        parameters, gradients: what has them where they are on disk too; None where they are in memory.
        entered: the buckets that the step that is being made, or was cut off, has touched.
        done: how many of them are finished.
        stepping: a bucket is being stepped, or its step was cut off.
    """

    def __init__(
        self,
        class_step: Callable[[Optimizer], Any],
        plan: OptimizerPlan,
        pool: BufferPool | GrowingPool,
        pool_bytes: int,
        cache: RecordCache,
        metrics: Metrics,
    ) -> None:
        self.parameters: SwappedParameters | None = None
        self.gradients: SwappedGradients | None = None
        self.pool = pool
        self.entered: list[Bucket] = []
        self.done = 0
        self.stepping = False
        self._class_step = class_step
        self._plan = plan
        self._pool_bytes = pool_bytes
        self._cache = cache
        self._metrics = metrics
        self._copies = DeviceCopies(plan.device)
        self._scratches: list[Scratch] = []
        self._scratch_leases: list[Lease] = []
        self._gradient_slices: dict[Segment, torch.Tensor] = {}
        self._former: dict[str, Any] = {}  # what `_narrow` replaced on the optimizer
        self._changes: dict[int, dict[str, Any]] = {}  # values of groups that the class changed
        self._seen: set[int] = set()  # the groups that the class was shown in this step
        self._present = ExitStack()
        self._following = ExitStack()  # with an accelerator: of the bucket that is being copied
        self._unplanned: set[str] = set()
        self._edited: dict[OptimizerParameter, bool] = {}  # of this step

    # --- A whole step ----------------------------------------------------------------------------------------------

    def work_on(self, buckets: Iterable[Bucket]) -> list[Work]:
        """What a step has to do now."""
        return [(bucket, active) for bucket in buckets if (active := self._active(bucket))]

    def run(self, optimizer: Optimizer, work: Sequence[Work], show: bool) -> None:
        """Step `work`, then `finish`.

        Args:
            optimizer: the user's.
            work: from `work_on`.
            show: a progress bar.

        Raises:
            Exception: what went wrong; `entered` and `done` say where. The caller cleans up with `abandon`.
        """
        self.hold_scratch()
        present = self._bring(work, 0)
        self._present.close()
        self._present = present
        pending = self._fetch(work, 0)
        ahead = ReadAhead(self, work)
        for i, (bucket, _) in enumerate(progress(work, "writing optimizer state", show)):
            assert pending is not None
            fetched = pending
            if self._plan.remote:
                self._following = self._bring(work, i + 1)
                pending = self._fetch(work, i + 1)
            ahead.look(i)
            self._step_bucket(optimizer, bucket, *fetched)
            if self._plan.remote:
                self._present.close()
                self._present, self._following = self._following, ExitStack()
            else:
                with self._staying(work, i):
                    self._present.close()
                    self._present = self._bring(work, i + 1)
                pending = self._fetch(work, i + 1)
        self.finish(optimizer)

    def run_one(self, optimizer: Optimizer, item: Work) -> None:
        """Step one bucket, of a step that `finish` ends. Errors as for `run`.

        The parameter records that it needs stay until the next call or the end: they are then written once.
        """
        self.hold_scratch()
        present = self._bring([item], 0)
        self._present.close()
        self._present = present
        fetched = self._fetch([item], 0)
        assert fetched is not None
        self._step_bucket(optimizer, item[0], *fetched)
        self._copies.join()  # Whatever uses the parameters next, in this backward or after it, or after it failed.
        self.stepping = False

    def finish(self, optimizer: Optimizer) -> None:
        """End the step: apply what the class changed in its groups, give scratch back."""
        self._present.close()
        self._copies.join()
        self.drop_scratch()
        self._show_other_groups(optimizer)
        if self._plan.stored_bytes > self._pool_bytes:
            return_free_memory()
        for number, values in self._changes.items():
            group = optimizer.param_groups[number]
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value
        self._changes = {}
        self._seen.clear()
        self._edited.clear()
        self.entered, self.done, self.stepping = [], 0, False

    def abandon(self) -> None:
        """After an exception: give back everything that a step holds. What was entered is for the caller to note.

        Parameters are not written to any more when it returns. Each thing is done, whatever those before it raise.
        """
        with ExitStack() as steps:  # The last that is added is the first that is done.
            steps.callback(self.drop_scratch)
            steps.callback(self._cache.recover)
            steps.callback(self._changes.clear)
            steps.callback(self._seen.clear)
            steps.callback(self._edited.clear)
            steps.callback(self._following.close)
            steps.callback(self._present.close)
            steps.callback(self._copies.settle)

    def hold_scratch(self) -> None:
        """Lease the scratch buffers, if they are not held."""
        if self._scratches:
            return
        for _ in range(self._plan.scratch_count):
            if self._plan.scratch_bytes:
                lease = self.pool.acquire(self._plan.scratch_bytes)
                self._scratch_leases.append(lease)
                self._scratches.append(Scratch(lease))
            else:
                self._scratches.append(Scratch(None))

    def drop_scratch(self) -> None:
        """Give the scratch buffers back; each is the pool's when the copies from and to it are done."""
        for lease in self._scratch_leases:
            lease.release()
        self._scratches, self._scratch_leases = [], []

    def take(self, bucket: Bucket) -> Lease | None:
        """Bring the record in and wait for it; None if nothing of it moves."""
        if not bucket.length_bytes:
            return None
        lease, _ = self._cache.take(bucket.key, bucket.length_bytes)
        return lease

    def stage(self, bucket: Bucket, active: Sequence[Segment]) -> bool:
        """Start reading a bucket, and the gradients of `active`. False if there is no room for all of it."""
        # Gradients first: they are short, are asked for before the record, and would else queue behind it.
        if self.gradients is not None:
            for segment in active:
                if not self.gradients.stage(segment.parameter, segment.start):
                    return False
        return not bucket.length_bytes or self._cache.stage(bucket.key, bucket.length_bytes)

    @property
    def drops(self) -> int:
        """How often something that was read ahead was given up before it was used."""
        return self._cache.drops + (0 if self.gradients is None else self.gradients.drops)

    def widen(self, optimizer: Optimizer) -> None:
        """Show the optimizer its own groups, hooks and state again. Idempotent."""
        vars(optimizer).update(self._former)
        self._former = {}

    def count_reset(self) -> None:
        """The masters of a parameter are made anew because the user has changed it."""
        if self._metrics.masters_reset == 0:
            log.warning(
                "a parameter was changed outside of the optimizer since its last step, so its master weights are made "
                "anew from it (said once; counted in stats().masters_reset)"
            )
        self._metrics.masters_reset += 1

    def say_unplanned(self, key: str) -> None:
        """There is state that the trial did not show."""
        if key not in self._unplanned:
            self._unplanned.add(key)
            log.warning(
                "the optimizer made state %r that a trial step did not show; it stays in memory, beyond pool_bytes", key
            )

    # --- What a bucket needs ---------------------------------------------------------------------------------------

    def _active(self, bucket: Bucket) -> list[Segment]:
        return [segment for segment in bucket.segments if segment.is_stepped and self.has_gradient(segment.parameter)]

    def has_gradient(self, p: torch.nn.Parameter) -> bool:
        """Whether `p` has a gradient, in memory or away."""
        return raw_gradient(p) is not None if self.gradients is None else self.gradients.has(p)

    def _staying(self, work: Sequence[Work], i: int) -> AbstractContextManager[None]:
        """Keep the parameter records that bucket `i` and the next are both windows of: they are then written once."""
        if self.parameters is None or i + 1 >= len(work):
            return nullcontext()
        mine, following = ([segment.parameter for segment in active] for _, active in work[i : i + 2])
        return self.parameters.staying(mine, following)

    def _bring(self, work: Sequence[Work], i: int) -> ExitStack:
        """Have the parameters and gradients of bucket `i` there, if they are swapped, until the result is closed."""
        stack = ExitStack()
        self._gradient_slices = {}
        if i >= len(work):
            return stack
        active = work[i][1]
        try:
            if self.parameters is not None:
                stack.enter_context(self.parameters.stepping([segment.parameter for segment in active]))
            if self.gradients is not None:
                self._take_gradients(self.gradients, active, stack)
        except BaseException:
            stack.close()
            raise
        return stack

    def _take_gradients(self, gradients: SwappedGradients, active: Sequence[Segment], stack: ExitStack) -> None:
        for of, mine in grouped(active).items():
            p, start = of.parameter, mine[0].start
            if not gradients.is_away(p):
                continue
            part = stack.enter_context(gradients.taken(p, start))
            if mine[0].whole and not mine[0].master and not self._plan.remote:  # The class is given it itself.
                stack.enter_context(gradient_attached(p, part.as_strided(p.shape, p.stride())))
                continue
            for segment in mine:
                self._gradient_slices[segment] = part[segment.start - start : segment.stop - start]

    def _fetch(self, work: Sequence[Work], i: int) -> tuple[list[Opened], Scratch] | None:
        if i >= len(work):
            return None
        bucket, active = work[i]
        scratch = self._scratches[i % len(self._scratches)]
        scratch.reset()
        for segment in active:
            self._check_gradient(segment)
        return bucket.fetch(active, self._gradient_slices, scratch, self._copies), scratch

    def _check_gradient(self, segment: Segment) -> None:
        p, gradient = segment.parameter, raw_gradient(segment.parameter)
        if gradient is None:  # On disk, in the layout of its parameter.
            return
        if gradient.is_sparse:
            if self._plan.step_in_backward and not segment.whole and not segment.master and not self._plan.remote:
                raise SwapError(
                    "a sparse gradient came for a parameter that is cut into segments, and step_in_backward cannot cut "
                    "it anew in the middle of a backward; make it dense (nn.Embedding(sparse=False)), or use "
                    "step_in_backward: false"
                )
            if segment.master or not segment.whole or self._plan.remote:
                raise SwapError(
                    "a sparse gradient came, which can be stepped only on the CPU and without master weights; make "
                    "it dense (nn.Embedding(sparse=False))"
                )
        elif not (segment.whole or same_layout(gradient, p) or self._plan.strides_may_differ(segment)):
            raise SwapError(
                f"a gradient has strides {gradient.stride()} and its parameter {p.stride()}; stepped in segments that "
                "would give other bits. Assign gradients in the parameter's layout: torch.empty_like(p).copy_(gradient)"
            )

    # --- The step of a bucket --------------------------------------------------------------------------------------

    def _step_bucket(self, optimizer: Optimizer, bucket: Bucket, opened: list[Opened], scratch: Scratch) -> None:
        scratch.wait()
        for item in opened:
            item.edited = self._is_edited(item.segment)
        lease = self.take(bucket)
        states = bucket.open(opened, lease, scratch)
        for item in opened:
            if item.edited:
                self._note_edited(item.segment)
        self.entered.append(bucket)
        self.stepping = True
        self._call_class(optimizer, opened, states)
        self._close_bucket(bucket, opened, states, lease, scratch)
        self.done += 1

    def _is_edited(self, segment: Segment) -> bool:
        """Whether another segment, of this step or before it, shows that the user has changed the parameter.

        All are compared before the first is stepped. What is not cut is compared when it is opened.
        """
        if not segment.master:
            return False
        of = segment.of
        if len(of.segments) < 2:
            return False
        if of not in self._edited:
            self._edited[of] = False
            if is_edited(of.segments):
                self._note_edited(segment)
        return self._edited[of]

    def _note_edited(self, segment: Segment) -> None:
        if not self._edited.get(segment.of):
            self._edited[segment.of] = True
            self.count_reset()

    def _call_class(
        self,
        optimizer: Optimizer,
        opened: Sequence[Opened],
        states: list[dict[str, Any]],
    ) -> None:
        """Step the tensors of `opened` with the class's own code. `states` is updated to what it left behind."""
        groups: dict[int, dict[str, Any]] = {}
        shown: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for item, state in zip(opened, states, strict=True):
            number = item.segment.of.group
            assert number is not None
            if number not in groups:
                groups[number] = self._narrowed(optimizer.param_groups[number])
            groups[number]["params"].append(item.tensor)
            if state:
                assert item.tensor is not None
                shown[item.tensor] = state
        self._narrow(optimizer, list(groups.values()), shown)
        self._class_step(optimizer)
        for i, item in enumerate(opened):
            assert item.tensor is not None
            states[i] = dict(optimizer.state.get(item.tensor, {}))
        self.widen(optimizer)
        self._note_changes(optimizer, groups)

    def _show_other_groups(self, optimizer: Optimizer) -> None:
        """Call the class with the groups that had no gradient in this step: it may count its steps in them.

        Each has one small parameter without a gradient, because a class may pass by a group that is empty.
        """
        groups: dict[int, dict[str, Any]] = {}
        for number, group in enumerate(optimizer.param_groups):
            if number in self._seen:
                continue
            groups[number] = self._narrowed(group)
            groups[number]["params"] = [
                torch.nn.Parameter(torch.zeros([1] * p.dim(), dtype=p.dtype), requires_grad=p.requires_grad)
                for p in group["params"][:1]
            ]
        if not groups:
            return
        self._narrow(optimizer, list(groups.values()), defaultdict(dict))
        try:
            self._class_step(optimizer)
        finally:
            self.widen(optimizer)
        self._note_changes(optimizer, groups)

    def _note_changes(self, optimizer: Optimizer, groups: dict[int, dict[str, Any]]) -> None:
        """Remember what the class changed in `groups`, which it was shown, until the step ends."""
        self._seen.update(groups)
        for number, group in groups.items():
            original = optimizer.param_groups[number]
            for key, value in group.items():
                if key in ("params", "param_names") or (self._plan.remote and key == "capturable"):
                    continue
                if isinstance(value, torch.Tensor):
                    former = original.get(key)
                    changed = not isinstance(former, torch.Tensor) or not torch.equal(former.cpu(), value.cpu())
                else:
                    changed = key not in original or value is not original[key]
                if changed:
                    self._changes.setdefault(number, {})[key] = value

    def _narrow(
        self, optimizer: Optimizer, groups: list[dict[str, Any]], state: defaultdict[torch.Tensor, Any]
    ) -> None:
        """Show the class only `groups` and `state`, no hooks, and no tensor on an accelerator, until `widen`."""
        attributes: dict[str, Any] = {
            "param_groups": groups,
            "state": state,
            "_optimizer_step_pre_hooks": OrderedDict(),
            "_optimizer_step_post_hooks": OrderedDict(),
        }
        if self._plan.remote:
            for key in ("grad_scale", "found_inf"):  # From GradScaler, for fused steps.
                if isinstance(value := getattr(optimizer, key, None), torch.Tensor):
                    attributes[key] = value.cpu()
        self._former = {key: getattr(optimizer, key) for key in attributes}
        vars(optimizer).update(attributes)

    def _narrowed(self, group: dict[str, Any]) -> dict[str, Any]:
        # Tensors are cloned, so that a value that the class changes in place is changed once a step, not once a bucket.
        narrowed = {
            key: (value.cpu() if self._plan.remote else value).clone() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        if self._plan.remote and "capturable" in narrowed:
            narrowed["capturable"] = False  # The step runs on the CPU, where there is no graph to capture.
        narrowed["params"] = []
        return narrowed

    def _close_bucket(
        self,
        bucket: Bucket,
        opened: Sequence[Opened],
        states: list[dict[str, Any]],
        lease: Lease | None,
        scratch: Scratch,
    ) -> None:
        masters: dict[Segment, tuple[torch.Tensor, torch.Tensor]] = {}
        made_state = any(state and not item.segment.has_state for item, state in zip(opened, states, strict=True))
        for item, state in zip(opened, states, strict=True):
            for key in bucket.close(item.segment, state, lease):
                self.say_unplanned(key)
            if item.master is not None:
                assert item.bits is not None
                masters[item.segment] = (item.master, item.bits)
        if masters:
            bucket.encode(masters, lease)
        for item in opened:
            bucket.write_back(item, self._copies, scratch)
        if lease is not None:
            self._cache.put(bucket.key, bucket.finish(lease))
            if made_state:
                states.clear()
                return_free_memory()


def progress(items: Sequence[_T], what: str, show: bool) -> Iterable[_T]:
    """`items`, with a progress bar if it is long work and somebody looks."""
    return ProgressBar(items, desc=what, unit="bucket", leave=False) if show and sys.stderr.isatty() else items
