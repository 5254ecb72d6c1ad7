"""`Stepper`: one bucket after another is brought in, stepped by the optimizer's own class, and written behind.

The class sees `param_groups` narrowed to the tensors of one bucket, with their state put in. Its own unhooked `step`
runs, and what it left behind is taken out: whatever it does to all parameters at once, it does to a few.
"""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch.optim import Optimizer

from swapper.errors import SwapError
from swapper.io.devices import DeviceCopies
from swapper.metrics import Metrics
from swapper.optimizer.operands import Operand, Scratch, fetch, make_tensors, write_back
from swapper.optimizer.plan import OptimizerPlan
from swapper.optimizer.records import BucketRecords, Masters, OpenBucket, Prefetcher, Work
from swapper.optimizer.segments import Bucket, OptimizerParameter, Segment, grouped, is_edited
from swapper.progress import ProgressBar
from swapper.storage.buffers import BufferPool
from swapper.storage.growing_pool import GrowingPool
from swapper.storage.malloc_trim import return_free_memory
from swapper.tensors.evicted_gradients import gradient_attached, raw_gradient
from swapper.tensors.strides import same_layout

__all__ = ["Stepper", "SwappedGradients", "SwappedParameters", "progress"]

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_HOST = torch.device("cpu")
_NO_OPTIONS = ("params", "param_names")
_Groups = dict[int, dict[str, Any]]


class SwappedParameters(Protocol):
    """Parameters that are on disk too, as a step uses them."""

    def stepping(
        self, parameters: Iterable[torch.nn.Parameter], device: torch.device
    ) -> AbstractContextManager[Mapping[torch.nn.Parameter, torch.Tensor]]:
        """Within it the values of `parameters` are in memory on `device`, and may be changed.

        Args:
            parameters: those that are not swapped are passed over.
            device: where they are stepped: their own, or the CPU.

        Returns:
            Of parameters that are stepped on another device than their own: their values on `device`, tensors of the
            parameter's shape and strides. All others have their values themselves. Who changes such a tensor increments
            the parameter's version.
        """

    def staying(
        self, parameters: Iterable[torch.nn.Parameter], following: Iterable[torch.nn.Parameter]
    ) -> AbstractContextManager[None]:
        """Within it records of `parameters`, which are in memory, stay there if some of `following` are in them."""


class SwappedGradients(Protocol):
    """Gradients that are evicted too, as a step uses them."""

    @property
    def metrics(self) -> Metrics:
        """Counts what moves."""

    @property
    def drops(self) -> int:
        """Count of parts that were prefetched and dropped."""

    def plan(self, parts: Iterable[tuple[int, torch.nn.Parameter, int, int]]) -> None:
        """The buckets have changed: see `OptimizerPlan.gradient_parts`."""

    def check(self) -> None:
        """Raise what is known to be wrong with any gradient: a step must not find out in the middle."""

    def has(self, parameter: torch.nn.Parameter) -> bool:
        """True if `parameter` has a gradient, in memory or not."""

    def is_evicted(self, parameter: torch.nn.Parameter) -> bool:
        """True if it is not in memory."""

    def stage(self, parameter: torch.nn.Parameter, start: int) -> bool:
        """Start reading the part of it that starts at `start`. False if there is no room."""

    def taken(self, parameter: torch.nn.Parameter, start: int) -> AbstractContextManager[torch.Tensor]:
        """Within it that part is in memory: 1-D, in memory order."""

    def watches(self, parameter: torch.nn.Parameter) -> bool:
        """True if its gradients are looked at when they arrive."""

    def leave(self, parameters: Iterable[torch.Tensor]) -> None:
        """Take no more gradients of `parameters`."""

    def bring_back_all(self) -> None:
        """Have all gradients in memory."""

    def flush(self) -> None:
        """Wait until all that is evicted is on the drive."""

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


class Stepper:
    """Steps the buckets of one optimizer, with scratch from its pool.

    Attributes:
        plan: the buckets.
        parameters, gradients: swappers of those that are on disk too; None where they are in memory.
        entered: the buckets that the step that is being made, or was cut off, has touched.
        done: the number of them that are finished.
        stepping: a bucket is being stepped, or its step was cut off.
    """

    def __init__(
        self,
        class_step: Callable[[Optimizer], Any],
        plan: OptimizerPlan,
        pool: BufferPool | GrowingPool,
        pool_bytes: int,
        records: BucketRecords,
    ) -> None:
        self.plan = plan
        self.parameters: SwappedParameters | None = None
        self.gradients: SwappedGradients | None = None
        self.entered: list[Bucket] = []
        self.done = 0
        self.stepping = False
        self._class_step = ClassStep(class_step, plan.remote)
        self._pool = pool
        self._pool_bytes = pool_bytes
        self._records = records
        self._copies = DeviceCopies(plan.device)
        self._scratches: list[Scratch] = []
        self._gradient_slices: dict[Segment, torch.Tensor] = {}
        self._on_host: Mapping[torch.nn.Parameter, torch.Tensor] = {}  # of a bucket: see `SwappedParameters.stepping`
        self._present = ExitStack()
        self._following = ExitStack()  # with an accelerator: of the bucket that is being copied
        self._edited: dict[OptimizerParameter, bool] = {}  # of this step

    # --- A whole step ----------------------------------------------------------------------------------------------

    def work_on(self, buckets: Iterable[Bucket]) -> list[Work]:
        """The work of a step that is made now."""
        return [(bucket, active) for bucket in buckets if (active := self._active(bucket))]

    def prefetcher(self, work: Sequence[Work], done: Container[Bucket] = ()) -> Prefetcher:
        """Reads ahead of a scan over `work`: records, and gradients that are evicted. See `Prefetcher`."""
        return Prefetcher(self._records, work, done, self.gradients)

    def run(self, optimizer: Optimizer, work: Sequence[Work], show: bool) -> None:
        """Step `work`, then `finish`. With `show` a progress bar is shown.

        If it raises, `entered` and `done` say how far it came, and the caller cleans up with `abandon`.
        """
        pending = self._begin(work)
        prefetcher = self.prefetcher(work)
        for i, (bucket, _) in enumerate(progress(work, "writing optimizer state", show)):
            assert pending is not None
            fetched = pending
            if self.plan.remote:  # The next bucket is copied from the accelerator while this one is stepped.
                self._following = self._bring(work, i + 1)
                pending = self._fetch(work, i + 1)
            prefetcher.look(i)
            self._step_bucket(optimizer, bucket, *fetched)
            if self.plan.remote:
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
        fetched = self._begin([item])
        assert fetched is not None
        self._step_bucket(optimizer, item[0], *fetched)
        self._copies.join()  # Whatever uses the parameters next, in this backward or after it, or after it failed.
        self.stepping = False

    def _begin(self, work: Sequence[Work]) -> tuple[list[Operand], Scratch] | None:
        self.hold_scratch()
        present = self._bring(work, 0)  # Before what is present goes: what both need stays.
        self._present.close()
        self._present = present
        return self._fetch(work, 0)

    def finish(self, optimizer: Optimizer) -> None:
        """End the step: apply what the class changed in its groups, give scratch back."""
        self._present.close()
        self._copies.join()
        self.drop_scratch()
        if self.plan.stored_bytes > self._pool_bytes:
            return_free_memory()
        self._class_step.finish(optimizer)
        self._edited.clear()
        self.entered, self.done, self.stepping = [], 0, False

    def abandon(self) -> None:
        """After an exception: give back everything that a step holds. The caller has noted what was entered.

        Parameters are not written to any more when it returns. Each thing is done, whatever those before it raise.
        """
        with ExitStack() as steps:  # The last that is added is the first that is done.
            steps.callback(self.drop_scratch)
            steps.callback(self.recover)
            steps.callback(self._class_step.abandon)
            steps.callback(self._edited.clear)
            steps.callback(self._following.close)
            steps.callback(self._present.close)
            steps.callback(self._copies.settle)

    def recover(self) -> None:
        """Give back records that were taken and not put, and drop what was prefetched."""
        self._records.cache.recover()

    def widen(self, optimizer: Optimizer) -> None:
        """Show the optimizer its own groups, hooks and state again. Idempotent."""
        self._class_step.widen(optimizer)

    def wish(self, buckets: Iterable[Bucket], *, scratch: bool = False) -> None:
        """Start reading `buckets` as far as there is room; with `scratch` lease that before."""
        try:
            if scratch:
                self.hold_scratch()
            self.prefetcher([(bucket, []) for bucket in buckets if bucket.length_bytes]).look()
        except SwapError:
            # Reading ahead is a wish. What is wrong with it (a full pool, a failed write) comes up again in the step.
            log.debug("no read-ahead", exc_info=True)

    def hold_scratch(self) -> None:
        """Lease the scratch buffers, if they are not held."""
        while len(self._scratches) < self.plan.scratch_count:
            length_bytes = self.plan.scratch_bytes  # Only now: it walks all buckets.
            self._scratches.append(Scratch(self._pool.acquire(length_bytes) if length_bytes else None))

    def drop_scratch(self) -> None:
        """Give the scratch buffers back; each is the pool's when the copies from and to it are done."""
        for scratch in self._scratches:
            scratch.release()
        self._scratches = []

    def has_gradient(self, p: torch.nn.Parameter) -> bool:
        """True if `p` has a gradient, in memory or evicted."""
        return raw_gradient(p) is not None if self.gradients is None else self.gradients.has(p)

    # --- What a bucket needs ---------------------------------------------------------------------------------------

    def _active(self, bucket: Bucket) -> list[Segment]:
        return [
            segment
            for segment in bucket.segments
            if segment.of.group is not None and self.has_gradient(segment.parameter)
        ]

    def _staying(self, work: Sequence[Work], i: int) -> AbstractContextManager[None]:
        """Keep the parameter records that bucket `i` and the next are both windows of: they are then written once."""
        if self.parameters is None or i + 1 >= len(work):
            return nullcontext()
        mine, following = ([segment.parameter for segment in active] for _, active in work[i : i + 2])
        return self.parameters.staying(mine, following)

    def _bring(self, work: Sequence[Work], i: int) -> ExitStack:
        """Have swapped parameters and gradients of bucket `i` in memory until the result is closed."""
        stack = ExitStack()
        self._gradient_slices, self._on_host = {}, {}
        if i >= len(work):
            return stack
        active = work[i][1]
        try:
            if self.parameters is not None:
                stepped = [segment.parameter for segment in active]
                self._on_host = stack.enter_context(self.parameters.stepping(stepped, _HOST))
            if self.gradients is not None:
                self._take_gradients(self.gradients, active, stack)
        except BaseException:
            stack.close()
            raise
        return stack

    def _take_gradients(self, gradients: SwappedGradients, active: Sequence[Segment], stack: ExitStack) -> None:
        for of, mine in grouped(active).items():
            p, start = of.parameter, mine[0].start
            if not gradients.is_evicted(p):
                continue
            part = stack.enter_context(gradients.taken(p, start))
            if mine[0].whole and not mine[0].master and not self.plan.remote:  # The class is given it itself.
                stack.enter_context(gradient_attached(p, part.as_strided(p.shape, p.stride())))
                continue
            for segment in mine:
                self._gradient_slices[segment] = part[segment.start - start : segment.stop - start]

    def _fetch(self, work: Sequence[Work], i: int) -> tuple[list[Operand], Scratch] | None:
        if i >= len(work):
            return None
        active = work[i][1]
        scratch = self._scratches[i % len(self._scratches)]
        scratch.reset()
        for segment in active:
            self._check_gradient(segment)
        remote, slices = self.plan.remote, self._gradient_slices
        return fetch(active, remote, slices, self._on_host, scratch, self._copies), scratch

    def _check_gradient(self, segment: Segment) -> None:
        p, gradient = segment.parameter, raw_gradient(segment.parameter)
        if gradient is None:  # On disk, in the layout of its parameter.
            return
        if gradient.is_sparse:
            if self.plan.step_in_backward and not segment.whole and not segment.master and not self.plan.remote:
                raise SwapError(
                    "a sparse gradient came for a parameter that is cut into segments, and step_in_backward cannot cut "
                    "it anew in the middle of a backward; make it dense (nn.Embedding(sparse=False)), or use "
                    "step_in_backward: false"
                )
            if segment.master or not segment.whole or self.plan.remote:
                raise SwapError(
                    "a sparse gradient came, which can be stepped only on the CPU and without master weights; make "
                    "it dense (nn.Embedding(sparse=False))"
                )
        elif not (segment.whole or same_layout(gradient, p) or self.plan.strides_may_differ(segment)):
            raise SwapError(
                f"a gradient has strides {gradient.stride()} and its parameter {p.stride()}; stepped in segments that "
                "would give other bits. Assign gradients in the parameter's layout: torch.empty_like(p).copy_(gradient)"
            )

    # --- The step of a bucket --------------------------------------------------------------------------------------

    def _step_bucket(self, optimizer: Optimizer, bucket: Bucket, operands: list[Operand], scratch: Scratch) -> None:
        scratch.wait()
        for operand in operands:
            operand.edited = self._is_edited(operand)
        opened = self._records.take(bucket)
        make_tensors(operands, opened, scratch)
        for operand in operands:
            if operand.edited:
                self._note_edited(operand.segment)
        self.entered.append(bucket)  # From here on parameters change: a failure leaves the step half made.
        self.stepping = True
        states = self._class_step(optimizer, operands, opened)
        made_state = False
        masters: Masters = {}
        for operand, state in zip(operands, states, strict=True):
            made_state |= bool(state) and not operand.segment.has_state
            opened.keep(operand.segment, state)
            if operand.master is not None and operand.bits is not None:
                masters[operand.segment] = operand.master, operand.bits
        opened.encode(masters)
        for operand in operands:
            write_back(operand, self.plan.remote, self._copies, scratch)
        self._records.put(opened)  # The buffer is the cache's from here on.
        if made_state and opened.lease is not None:
            states.clear()
            return_free_memory()
        self.done += 1

    def _is_edited(self, operand: Operand) -> bool:
        """True if another segment, of this step or before it, shows that the user has changed the parameter.

        All are compared before the first is stepped. A parameter that is not cut is compared when it is opened.
        """
        segment, of = operand.segment, operand.segment.of
        if not segment.master or len(of.segments) < 2:
            return False
        if of not in self._edited:
            self._edited[of] = False
            values = of.parameter.detach() if operand.on_host is None else operand.on_host
            if is_edited(of.segments, values):
                self._note_edited(segment)
        return self._edited[of]

    def _note_edited(self, segment: Segment) -> None:
        if not self._edited.get(segment.of):
            self._edited[segment.of] = True
            self._records.count_reset()


class ClassStep:
    """Calls the class, once for each bucket of a step, and remembers what it changes in its groups until the end.

    With `remote` parameters are on an accelerator, and all that the class is shown is on the host.
    """

    def __init__(self, step: Callable[[Optimizer], Any], remote: bool) -> None:
        self._step = step
        self._remote = remote
        self._former: dict[str, Any] = {}  # what `_narrow` replaced on the optimizer
        self._changes: _Groups = {}  # values of groups that the class changed
        self._seen: set[int] = set()  # groups that the class was shown in this step

    def __call__(self, optimizer: Optimizer, operands: Sequence[Operand], opened: OpenBucket) -> list[dict[str, Any]]:
        """Step `operands`, whose state is in `opened`. Returns the state of each that the class left behind."""
        groups: _Groups = {}
        states: dict[torch.Tensor, dict[str, Any]] = {}
        for operand in operands:
            number, tensor = operand.segment.of.group, operand.tensor
            assert number is not None and tensor is not None
            if number not in groups:
                groups[number] = self._narrowed(optimizer.param_groups[number])
            groups[number]["params"].append(tensor)
            states[tensor] = opened.state_of(operand.segment)
        self._narrow(optimizer, groups, {tensor: state for tensor, state in states.items() if state})
        self._step(optimizer)
        left = [dict(optimizer.state.get(tensor, {})) for tensor in states]
        self.widen(optimizer)
        self._note_changes(optimizer, groups)
        return left

    def finish(self, optimizer: Optimizer) -> None:
        """The step is over: apply what the class changed in its groups."""
        self._show_other_groups(optimizer)
        for number, values in self._changes.items():
            group = optimizer.param_groups[number]
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value
        self.abandon()

    def abandon(self) -> None:
        """Forget what the class changed in its groups."""
        self._changes = {}
        self._seen.clear()

    def widen(self, optimizer: Optimizer) -> None:
        """Show the optimizer its own groups, hooks and state again. Idempotent."""
        vars(optimizer).update(self._former)
        self._former = {}

    def _show_other_groups(self, optimizer: Optimizer) -> None:
        """Call the class with the groups that had no gradient in this step: it may count its steps in them.

        Each has one small parameter without a gradient, because a class may pass by a group that is empty.
        """
        groups: _Groups = {}
        for number, group in enumerate(optimizer.param_groups):
            if number not in self._seen:
                groups[number] = self._narrowed(group)
                groups[number]["params"] = [
                    torch.nn.Parameter(torch.zeros([1] * p.dim(), dtype=p.dtype), requires_grad=p.requires_grad)
                    for p in group["params"][:1]
                ]
        if not groups:
            return
        self._narrow(optimizer, groups, {})
        try:
            self._step(optimizer)
        finally:
            self.widen(optimizer)
        self._note_changes(optimizer, groups)

    def _note_changes(self, optimizer: Optimizer, groups: _Groups) -> None:
        """Remember what the class changed in `groups`, which it was shown, until the step ends."""
        self._seen.update(groups)
        for number, group in groups.items():
            original = optimizer.param_groups[number]
            for key, value in group.items():
                if key in _NO_OPTIONS or (self._remote and key == "capturable"):
                    continue
                if isinstance(value, torch.Tensor):
                    former = original.get(key)
                    changed = not isinstance(former, torch.Tensor) or not torch.equal(former.cpu(), value.cpu())
                else:
                    changed = key not in original or value is not original[key]
                if changed:
                    self._changes.setdefault(number, {})[key] = value

    def _narrow(self, optimizer: Optimizer, groups: _Groups, state: dict[torch.Tensor, dict[str, Any]]) -> None:
        """Show the class only `groups` and `state`, no hooks, and no tensor on an accelerator, until `widen`."""
        attributes: dict[str, Any] = {
            "param_groups": list(groups.values()),
            "state": defaultdict(dict, state),
            "_optimizer_step_pre_hooks": OrderedDict(),
            "_optimizer_step_post_hooks": OrderedDict(),
        }
        if self._remote:
            for key in ("grad_scale", "found_inf"):  # From GradScaler, for fused steps.
                if isinstance(value := getattr(optimizer, key, None), torch.Tensor):
                    attributes[key] = value.cpu()
        # Noted before anything is replaced: an interrupt in between is undone by `widen`.
        self._former = {key: getattr(optimizer, key) for key in attributes}
        vars(optimizer).update(attributes)

    def _narrowed(self, group: dict[str, Any]) -> dict[str, Any]:
        # Tensors are cloned, so that a value that the class changes in place is changed once a step, not once a bucket.
        narrowed = {
            key: (value.cpu() if self._remote else value).clone() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key not in _NO_OPTIONS
        }
        if self._remote and "capturable" in narrowed:
            narrowed["capturable"] = False  # The step runs on the CPU, where there is no graph to capture.
        narrowed["params"] = []
        return narrowed


def progress(items: Sequence[_T], what: str, show: bool) -> Iterable[_T]:
    """`items`, with a progress bar if it is long work and somebody looks."""
    return ProgressBar(items, desc=what, unit="bucket", leave=False) if show and sys.stderr.isatty() else items
