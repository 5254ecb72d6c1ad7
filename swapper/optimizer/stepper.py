"""`Stepper`: one bucket after another is brought in, stepped by the optimizer's own class, and written behind.

The class sees `param_groups` narrowed to the tensors of one bucket, with their state put in. Its own unhooked `step`
runs, and what it left behind is taken out: whatever it does to all parameters at once, it does to a few.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from swapper.errors import SwapError
from swapper.io.devices import DeviceCopies
from swapper.optimizer.class_step import ClassStep
from swapper.optimizer.device_records import DeviceBucket, edited_on_device
from swapper.optimizer.device_slots import DeviceSlots, Slot
from swapper.optimizer.native_parts import share_memory
from swapper.optimizer.native_queue import NativeQueue, QueuedBucket
from swapper.optimizer.native_step import NativeOperand, NativeSteps
from swapper.optimizer.operands import Operand, Scratch, ScratchFull, Slices, fetch, make_tensors, write_back
from swapper.optimizer.plan import OptimizerPlan
from swapper.optimizer.records import BucketRecords, Masters, OpenBucket, Prefetcher, Work
from swapper.optimizer.segments import Bucket, OptimizerParameter, Segment, checksum_of, grouped, is_edited
from swapper.optimizer.step_protocols import SwappedGradients, SwappedParameters
from swapper.progress import progress
from swapper.storage.buffers import BufferPool, PoolExhausted
from swapper.storage.growing_pool import GrowingPool
from swapper.storage.malloc_trim import FreedMemory, return_free_memory
from swapper.tensors.evicted import is_evicted
from swapper.tensors.evicted_gradients import gradient_attached, raw_gradient, set_raw_gradient
from swapper.tensors.homes import gathered
from swapper.tensors.sharded import local_gradient, sharded_as
from swapper.tensors.strides import same_layout

__all__ = ["Stepper"]

log = logging.getLogger(__name__)

_Fetched = tuple[list[Operand], Scratch, DeviceBucket | None]


class Stepper:
    """Steps the buckets of one optimizer, with scratch from its pool.

    Attributes:
        plan: the buckets.
        parameters, gradients: swappers of those that are on disk too; None where they are in memory.
        entered: the segments that the step that is being made, or was cut off, has touched.
        done: the number of buckets of it that are finished.
        stepping: a bucket is being stepped, or its step was cut off.
    """

    def __init__(
        self,
        cls: type[Optimizer],
        plan: OptimizerPlan,
        pool: BufferPool | GrowingPool,
        pool_bytes: int,
        records: BucketRecords,
    ) -> None:
        self.plan = plan
        self.parameters: SwappedParameters | None = None
        self.gradients: SwappedGradients | None = None
        self.entered: list[Segment] = []
        self.done = 0
        self.stepping = False
        self._class_step = ClassStep(cls, plan.remote, plan.step_in_backward)
        self._native = NativeSteps(self._class_step, plan.native_step)
        self._queue = NativeQueue(self._enter, self._conclude)
        self._device = plan.device if plan.on_device else torch.device("cpu")
        self._pool = pool
        self._pool_bytes = pool_bytes
        self._freed = FreedMemory(64 << 20)
        self._stored_bytes: int | None = None  # of the plan, in this step
        self._records = records
        self._copies = DeviceCopies(plan.device)
        self._slots = DeviceSlots(plan.device) if plan.on_device else None
        self._direct = records.direct
        self._slot: Slot | None = None  # of the bucket that is being brought
        self._changes: list[Callable[[], object]] = []  # of its gradients, when they are in the slot
        self._looks_ahead = plan.on_accelerator  # brings a bucket while the one before is stepped
        self._scratches: list[Scratch] = []
        self._gradient_slices: dict[Segment, torch.Tensor] = {}
        self._in_memory = False  # Parameters and gradients are, and nobody changes them until the step is over.
        self._are_apart = self._may_queue = False  # So, and none shares memory with another.
        self._slices: Slices = {}  # in a step, of those that are not fetched yet
        self._on_host: Mapping[torch.nn.Parameter, torch.Tensor] = {}  # of a bucket: see `SwappedParameters.stepping`
        self._present = ExitStack()
        self._following = ExitStack()  # with an accelerator: of the bucket that is being copied
        self._late = ExitStack()  # in backward: what the last bucket has changed is written later
        self._edited: dict[OptimizerParameter, bool | torch.Tensor] = {}  # of this step
        self._noted: set[OptimizerParameter] = set()  # those of them that were counted
        # of this step: what the user gave, and the part of it that is stepped
        self._replicated: list[tuple[torch.nn.Parameter, torch.Tensor, torch.Tensor]] = []

    def announce(self, optimizer: Optimizer) -> None:
        """Say in the log which way segments will be stepped, if some may be stepped natively."""
        if self._slots is None:
            stepped = [of for of in self.plan.planned() if of.group is not None and not of.collective and of.segments]
            self._native.announce(optimizer, stepped)

    # --- A whole step ----------------------------------------------------------------------------------------------

    def work_on(self, buckets: Iterable[Bucket]) -> list[Work]:
        """The work of a step that is made now."""
        have: dict[OptimizerParameter, bool] = {}
        try:
            return [(bucket, active) for bucket in buckets if (active := self._active(bucket, have))]
        except BaseException:
            self._replicate_gradients()
            raise

    def prefetcher(self, work: Sequence[Work], done: Container[Bucket] = ()) -> Prefetcher:
        """Reads ahead of a scan over `work`: records, and gradients that are evicted. See `Prefetcher`."""
        return Prefetcher(self._records, work, done, self.gradients, for_step=True)

    def run(self, optimizer: Optimizer, work: Sequence[Work], show: bool) -> None:
        """Step `work`, then `finish`. With `show` a progress bar is shown.

        If it raises, `entered` and `done` say how far it came, and the caller cleans up with `abandon`.
        """
        pending = self._begin(work)
        prefetcher = self.prefetcher(work)
        for i, (bucket, _) in enumerate(progress(work, "writing optimizer state", show)):
            assert pending is not None
            fetched = pending
            # The next bucket is copied from or to the accelerator while this one is stepped.
            is_ahead = self._looks_ahead and self._bring_ahead(work, i + 1)
            if is_ahead:
                pending = self._fetch(work, i + 1)
            prefetcher.look(i)
            self._step_bucket(optimizer, bucket, *fetched)
            if is_ahead:
                self._present.close()
                self._present, self._following = self._following, ExitStack()
            else:
                if not self._in_memory:
                    with self._staying(work, i):
                        self._present.close()
                        self._present = self._bring(work, i + 1)
                pending = self._fetch(work, i + 1)
        self._queue.flush()
        self.finish(optimizer)

    def run_one(self, optimizer: Optimizer, item: Work) -> None:
        """Step one bucket, of a step that `finish` ends. Errors as for `run`.

        The parameter records that it has changed are written when the next call is over, or at the end, if that changes
        them too: so once. They are in nobody's way: who needs their memory has them written before.
        """
        fetched = self._begin([item])
        assert fetched is not None
        self._step_bucket(optimizer, item[0], *fetched)
        self._copies.join()  # Whatever uses the parameters next, in this backward or after it, or after it failed.
        self._replicate_gradients()
        with self._late:
            self._late = ExitStack()
            if self.parameters is not None:
                self._late.enter_context(self.parameters.written_late([each.parameter for each in item[1]]))
            self._present.close()
        self.stepping = False

    def _begin(self, work: Sequence[Work]) -> _Fetched | None:
        if not self.entered:  # Else it goes on with the step of a window. Where one ended, its end may be cut off.
            self._native.forget()
            self._class_step.abandon()
            self._forget_parameters()
        if self.plan.step_in_backward:
            self._native.begin_step(segment for bucket in self.plan.buckets for segment in bucket.segments)
        else:
            self._native.begin_step(segment for _, active in work for segment in active)
        self._slices.clear()
        moves = self.plan.on_accelerator or self.plan.step_in_backward or any(map(_evicted_inside, work))
        self._in_memory = not moves and self.parameters is None and self.gradients is None
        self._are_apart = self._in_memory and not share_memory(segment for _, active in work for segment in active)
        self._may_queue = self._are_apart and self._native.enabled
        self._queue.open_bytes_max = self.plan.open_bytes_max if self._may_queue else 0  # It walks all buckets.
        self.hold_scratch()
        if self._slots is not None:
            if self._direct is not None:
                self._direct.hold(self.plan.slot_bytes)
                self._slots.follow_caller()
            else:
                self._slots.hold(self.plan.slot_bytes)
        present = self._bring(work, 0)  # Before what is present goes: what both need stays.
        self._present.close()
        self._present = present
        return self._fetch(work, 0)

    def finish(self, optimizer: Optimizer) -> None:
        """End the step: apply what the class changed in its groups, give scratch back."""
        self._present.close()
        self._late.close()
        self._copies.join()
        self._replicate_gradients()
        self.drop_scratch()
        if self._slots is None and self._is_larger_than_pool():
            return_free_memory()
        self._stored_bytes = None
        self._class_step.finish(optimizer)
        self._queue.drop()
        self._native.forget()
        self._records.steps += 1
        if edited := [flag for flag in self._edited.values() if isinstance(flag, torch.Tensor)]:
            self._records.count_resets_later(torch.stack(edited).sum())
        self._forget_parameters()
        self.entered, self.done, self.stepping = [], 0, False

    def abandon(self) -> None:
        """After an exception: give back everything that a step holds. The caller has noted what was entered.

        Parameters are not written to any more when it returns. Each thing is done, whatever those before it raise.
        """
        self.entered, self.done = [], 0
        self._records.changes += 1  # Something may be unreadable, which a load is to mend.
        with ExitStack() as steps:  # The last that is added is the first that is done.
            steps.callback(self.drop_scratch)
            steps.callback(self.recover)
            steps.callback(self._class_step.abandon)
            steps.callback(self._native.forget)
            steps.callback(self._forget_parameters)
            steps.callback(self._replicate_gradients)
            steps.callback(self._following.close)
            steps.callback(self._late.close)
            steps.callback(self._present.close)
            steps.callback(self._copies.wait)
            if self._slots is not None:
                steps.callback(self._slots.wait)
            steps.callback(self._queue.drop)

    def recover(self) -> None:
        """Give back records that were taken and not put, and drop what was prefetched."""
        self._queue.drop()  # If an interrupt has cut off what was to do that.
        self._records.recover()

    def widen(self, optimizer: Optimizer) -> None:
        """Show the optimizer its own groups, hooks and state again. Idempotent."""
        self._class_step.widen(optimizer)

    def wish(self, buckets: Iterable[Bucket], *, scratch: bool = False) -> None:
        """Start reading `buckets` as far as there is room; with `scratch` lease that before."""
        try:
            if scratch:
                self.hold_scratch()
            self.prefetcher([(bucket, []) for bucket in buckets if bucket.length_bytes]).look()
        except SwapError as error:
            # Reading ahead is a wish. What is wrong with it (a full pool, a failed write) comes up again in the step.
            log.debug("no read-ahead: %s", str(error))

    def hold_scratch(self) -> None:
        """Lease the scratch buffers, if they are not held."""
        while len(self._scratches) < self.plan.scratch_count:
            length_bytes = self.plan.scratch_bytes  # Only now: it walks all buckets.
            self._scratches.append(Scratch(self._pool.acquire(length_bytes) if length_bytes else None))

    def drop_scratch(self) -> None:
        """Give the scratch buffers back; each is the pool's when the copies from and to it are done. The slots too."""
        for scratch in self._scratches:
            scratch.release()
        self._scratches = []
        if self._slots is not None:
            self._slots.drop()
            self._slot, self._changes, self._gradient_slices = None, [], {}

    def drop_slots(self) -> None:
        """Give back the slots to which records come without the pool, when all is written; a step takes new ones.

        Raises:
            SwapIOError: a write failed, and was not discarded.
        """
        if self._direct is not None:
            self._direct.drop()

    def has_gradient(self, p: torch.nn.Parameter) -> bool:
        """True if `p` has a gradient, in memory or evicted."""
        return raw_gradient(p) is not None if self.gradients is None else self.gradients.has(p)

    # --- What a bucket needs ---------------------------------------------------------------------------------------

    def _active(self, bucket: Bucket, have: dict[OptimizerParameter, bool]) -> list[Segment]:
        """The segments of `bucket` whose parameter has a gradient. `have` notes which do: each is checked once."""
        active = []
        for segment in bucket.segments:
            of = segment.of
            if of.group is None:
                continue
            if of not in have:
                have[of] = self.has_gradient(of.parameter)
                if have[of]:
                    self._check_gradient(segment)  # Now: a step must not find out in the middle.
            if have[of]:
                active.append(segment)
        return active

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
        bucket, active = work[i]
        if self._slots is not None:
            direct, self._changes = self._direct, []
            if direct is None:
                self._slot = self._slots.take(bucket.length_bytes)
            else:
                self._slot = direct.take(bucket, self.gradients is not None)
        try:
            if self.parameters is not None:
                stepped = [segment.parameter for segment in active]
                self._on_host = stack.enter_context(self.parameters.stepping(stepped, self._device))
            # By a swapper that was made for others. The class is given what is inside.
            if others := [p for p in _evicted_inside(work[i]) if p not in self._on_host]:
                stack.enter_context(gathered(others))
            if self.gradients is not None:
                self._take_gradients(self.gradients, active, stack)
        except BaseException:
            stack.close()
            if self._direct is not None:
                slot, self._slot = self._slot, None
                self._direct.give_back(bucket, slot)
            raise
        return stack

    def _bring_ahead(self, work: Sequence[Work], i: int) -> bool:
        """Bring bucket `i` while the one before is in use. False if parameters of both have no room at once."""
        try:
            self._following = self._bring(work, i)
        except PoolExhausted:
            return False
        return True

    def _take_gradients(self, gradients: SwappedGradients, active: Sequence[Segment], stack: ExitStack) -> None:
        for of, mine in grouped(active).items():
            p, start = of.parameter, mine[0].start
            if not gradients.is_evicted(p):
                continue
            if self._slot is not None:
                assert self._slots is not None
                part, changes = gradients.uploaded(p, start, functools.partial(self._slots.upload, self._slot))
                self._changes += [functools.partial(change, part) for change in changes]
            else:
                part = stack.enter_context(gradients.taken(p, start))
            if mine[0].whole and not mine[0].master and not self.plan.remote:  # The class is given it itself.
                local = mine[0].local
                stack.enter_context(gradient_attached(p, part.as_strided(local.shape, local.stride())))
                continue
            for segment in mine:
                self._gradient_slices[segment] = part[segment.start - start : segment.stop - start]

    def _fetch(self, work: Sequence[Work], i: int) -> _Fetched | None:
        if i >= len(work):
            return None
        bucket, active = work[i]
        scratch = self._scratches[i % len(self._scratches)] if self._scratches else Scratch(None)
        scratch.reset()
        cut, slices = self._gradient_slices, self._slices if self._in_memory else None
        operands = fetch(active, self.plan.remote, cut, self._on_host, scratch, self._copies, slices)
        if self._slots is None:
            return operands, scratch, None
        slot, note = self._slot, self._records.note_unplanned
        if slot is not None and slot.holds_record:
            lease, filled = slot.lease, slot.filled
        else:
            lease, filled = self._records.take_lease(bucket)
        opened = DeviceBucket(bucket, lease, filled, slot, self._slots, self.plan.device, note)
        opened.when_joined = self._changes
        return operands, scratch, opened

    def _check_gradient(self, segment: Segment) -> None:
        p, gradient = segment.parameter, raw_gradient(segment.parameter)
        self._class_step.check_gradient(p, gradient)
        if gradient is None or _takes_any(segment):  # On disk it is in the layout of its parameter.
            return
        if (sharded := sharded_as(gradient, p)) is not gradient:
            self._replicated.append((p, gradient, sharded))
            set_raw_gradient(p, gradient := sharded)
        gradient, local = local_gradient(p, gradient), segment.local
        if gradient.layout is torch.strided and (segment.whole or (gradient.is_contiguous() and local.is_contiguous())):
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
        elif not (segment.whole or same_layout(gradient, local) or self.plan.strides_may_differ(segment)):
            raise SwapError(
                f"a gradient has strides {gradient.stride()} and its parameter {local.stride()}; stepped in "
                "segments that would give other bits. Assign gradients in the parameter's layout: "
                "torch.empty_like(p).copy_(gradient)"
            )

    def _replicate_gradients(self) -> None:
        """Leave replicated gradients to the user as plain PyTorch does: a norm of parts has other last bits."""
        while self._replicated:
            p, given, sharded = self._replicated.pop()
            if raw_gradient(p) is sharded:
                set_raw_gradient(p, given)

    # --- The step of a bucket --------------------------------------------------------------------------------------

    def _step_bucket(
        self,
        optimizer: Optimizer,
        bucket: Bucket,
        operands: list[Operand],
        scratch: Scratch,
        on_device: DeviceBucket | None,
    ) -> None:
        scratch.wait()
        for operand in operands:
            operand.edited = self._is_edited(operand)
        if on_device is not None:
            self._join(optimizer, on_device, operands)
        opened = on_device or self._take(bucket)
        native: list[NativeOperand] = []
        if on_device is None:
            found = self._choose_half(optimizer, opened, operands, scratch) if self._may_queue else None
            if found and len(found) == len(operands) and self._may_queue:
                self._queue.add(QueuedBucket(opened, operands, found))
                return
            self._queue.flush()
            native = self._choose(optimizer, opened, operands, scratch) if found != [] else []
        all_operands = operands
        if native:
            chosen = {each.operand.segment for each in native}
            operands = [each for each in operands if each.segment not in chosen]
        opened.decode((operand.segment for operand in operands), scratch.take)
        make_tensors(operands, opened, scratch)
        for operand in operands:
            if operand.edited is True:
                self._note_edited(operand.segment)
        self._enter(all_operands)
        self._native.run(native)
        masters = self._keep_native(native, opened)
        states = self._class_step(optimizer, operands, opened) if operands else []
        made_state = False
        for operand, state in zip(operands, states, strict=True):
            made_state |= bool(state) and not operand.segment.has_state
            opened.keep(operand.segment, state)
            if operand.master is not None and operand.bits is not None:
                masters[operand.segment] = operand.master, operand.bits
        self._write_masters(opened, native, masters)
        for operand in all_operands:
            write_back(operand, self.plan.remote, self._copies, scratch)
        if self.parameters is not None and not self.plan.step_in_backward:
            for of in (each.segment.of for each in all_operands if each.segment is each.segment.of.segments[-1]):
                self.parameters.note_stepped(of.parameter, checksum_of(of))
        self._records.count_stepped(len(native), len(operands))
        # The buffer is the cache's from here on.
        if on_device is not None:
            on_device.leave()
            self._records.put_when_copied(on_device, on_device.finish)
        else:
            self._records.put(opened)
            if made_state and opened.lease is not None:
                states.clear()
                return_free_memory()
            elif self._is_larger_than_pool():
                if operands or any(each.operand.is_copied for each in native):
                    self._freed.add(bucket.length_bytes)  # About what the class made on the way to its results.
                elif self.plan.step_in_backward:  # Gradients are freed one after another.
                    self._freed.add(sum(each.segment.numel * each.segment.of.dtype.itemsize for each in all_operands))
        self.done += 1

    def _take(self, bucket: Bucket) -> OpenBucket:
        has_room = self._may_queue and self._queue.has_room(bucket)
        if has_room and (opened := self._records.take_at_hand(bucket)) is not None:
            return opened
        self._queue.flush()  # Its buffers may be needed.
        return self._records.take(bucket, for_step=True)

    def _choose(
        self, optimizer: Optimizer, opened: OpenBucket, operands: Sequence[Operand], scratch: Scratch
    ) -> list[NativeOperand]:
        # In backward the user's code runs between the buckets of a step.
        edited = {} if self.plan.step_in_backward else self._edited
        return self._native.choose(optimizer, operands, opened, scratch, edited, self._are_apart)

    def _choose_half(
        self, optimizer: Optimizer, opened: OpenBucket, operands: Sequence[Operand], scratch: Scratch
    ) -> list[NativeOperand] | None:
        """As `_choose`, with half of the scratch. None if that is not enough."""
        try:
            native = self._choose(optimizer, opened, operands, self._queue.scratch(scratch))
        except ScratchFull:
            return None
        if not all(each.program.is_one_pass for each in native):
            self._may_queue = False  # Most likely others are of its kind, and would be chosen twice.
        return native

    def _conclude(self, queued: QueuedBucket) -> None:
        """The rest of the step of a bucket that was queued, which is stepped now."""
        opened, native = queued.opened, queued.native
        self._write_masters(opened, native, self._keep_native(native, opened))
        for operand in queued.operands:
            write_back(operand, False, self._copies, Scratch(None))
        self._records.count_stepped(len(native), 0)
        self._records.put(opened)
        if self._is_larger_than_pool() and any(each.operand.is_copied for each in native):
            self._freed.add(opened.bucket.length_bytes)
        self.done += 1

    def _enter(self, operands: Sequence[Operand]) -> None:
        """From here on parameters change: a failure leaves the step half made."""
        self.entered += [each.segment for each in operands]
        self.stepping = True

    def _keep_native(self, native: Sequence[NativeOperand], opened: OpenBucket) -> Masters:
        """Keep what the native step of `native` left behind. Returns the masters of them that are not encoded yet."""
        masters: Masters = {}
        for each in native:
            self._native.keep(each)
            operand = each.operand
            if not operand.segment.master:
                increment_version(operand.segment.parameter)
            elif not operand.segment.is_split:
                assert operand.bits is not None
                masters[operand.segment] = opened.whole_master(operand.segment), operand.bits
        return masters

    def _write_masters(self, opened: OpenBucket, native: Sequence[NativeOperand], masters: Masters) -> None:
        opened.encode(masters)
        opened.place_ties(self._native.encoded(native))

    def _is_larger_than_pool(self) -> bool:
        """True if a step makes so much on the way that freed memory is to be returned."""
        if self._stored_bytes is None:
            self._stored_bytes = self.plan.stored_bytes
        return self._stored_bytes > self._pool_bytes

    def _join(self, optimizer: Optimizer, opened: DeviceBucket, operands: Sequence[Operand]) -> None:
        """Let the current stream wait for the bucket's record, and what else was uploaded."""
        opened.join()
        for operand in operands:
            number = operand.segment.of.group
            assert number is not None
            group = optimizer.param_groups[number]
            opened.place_small(operand.segment, bool(group.get("capturable") or group.get("fused")))

    def _is_edited(self, operand: Operand) -> bool | torch.Tensor:
        """True if another segment, of this step or before it, shows that the user has changed the parameter.

        All are compared before the first is stepped. A parameter that is not cut is compared when it is opened; on an
        accelerator it is compared here, too, and the result may be known only there.
        """
        segment, of = operand.segment, operand.segment.of
        if self._slots is not None:
            if segment.master and of not in self._edited:
                self._edited[of] = edited_on_device(of.segments)
            return self._edited.get(of, False)
        if not segment.master or len(of.segments) < 2:
            return False
        if of not in self._edited:
            self._edited[of] = False
            values = of.local.detach() if operand.on_host is None else operand.on_host
            if is_edited(of.segments, values):
                self._note_edited(segment)
        return self._edited[of]

    def _forget_parameters(self) -> None:
        self._edited.clear()
        self._noted.clear()
        self._slices.clear()

    def _note_edited(self, segment: Segment) -> None:
        if segment.of not in self._noted:
            self._edited[segment.of] = True
            self._noted.add(segment.of)
            self._records.count_reset()


def _evicted_inside(work: Work) -> list[torch.nn.Parameter]:
    """The DTensors, as of FSDP2, of what is to be stepped whose values on this rank are not in memory."""
    return [segment.parameter for segment in work[1] if segment.of.sharded and is_evicted(segment.local)]


def _takes_any(segment: Segment) -> bool:
    """True if the class is given the user's own DTensor, with a gradient of whatever placements."""
    return segment.of.collective and not segment.master
