"""`GradientSwapper`: gradients that leave memory as they arrive, and come back for the step.

A gradient is cut where the optimizer's buckets are: the part of it that one bucket steps on is a record of its own.
When autograd has accumulated a gradient, its parts are added to what arrived in earlier micro-batches, written (or,
without a store, kept in the pool), and its own memory is freed. What is smaller than 16 KiB stays where it is.

[Note: gradients that stay] What was in memory when a backward came to it stays there: autograd adds to it in place, as
ever, and whoever holds it sees that. It was assigned, or it was away and its values were used. It is taken again when
it has been None since.

[Note: gradients of an accelerator] They are copied, and added up, on a stream of their own, while the backward goes on:
nothing waits but the drive, which writes a part when it was copied. What follows the backward on the current stream
comes after the copies, so that who still has the tensor of a gradient may change it.

[Note: distributed] Where `torch.distributed` is initialized, a gradient may still be local when autograd has
accumulated it: `DistributedDataParallel` reduces it later. So gradients that are away come back before the first one
arrives, and all are taken after the last callback of a backward, when they are reduced.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import ClassVar, Protocol

import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from swapper.errors import SwapError
from swapper.gradient.clipping import (
    Change,
    TakenNorm,
    clamped_to,
    in_order_of_clipping,
    norm_of,
    scaled_by,
    total_norm,
)
from swapper.gradient.copies import GradientCopies
from swapper.gradient.end_of_backward import call_at_the_end, is_distributed, is_nested
from swapper.gradient.records import (
    Gradient,
    GradientPart,
    GradientState,
    Part,
    fitting,
    record_bytes,
)
from swapper.metrics import Metrics
from swapper.storage.access_order import AccessOrder, Use
from swapper.storage.buffers import BufferPool
from swapper.storage.cache import RecordCache
from swapper.storage.malloc_trim import return_free_memory
from swapper.storage.store import RecordKey, TensorStore
from swapper.tensors.evicted_gradients import (
    bring_back_gradients,
    clear_gradient_home,
    evicted_gradient,
    fill_gradient,
    raw_gradient,
    set_gradient_home,
    set_raw_gradient,
)
from swapper.tensors.grad_modes import modes_kept, outside_of_inference, set_grad_mode

__all__ = ["GradientSwapper", "Window"]

log = logging.getLogger(__name__)

_FREED_BYTES = 32 << 20
"""Bytes of gradients that left memory, after which the heap is told to let go of them."""

_AHEAD = 32
"""Gradients looked ahead at in the order of arrival."""


class Window(Protocol):
    """What steps buckets in backward, and wants to know of gradients."""

    def count(self, p: torch.nn.Parameter, first: bool) -> bool:
        """A gradient of `p` has arrived; `first` if none is there already. Returns whether it is the window's last."""

    def complete(self, p: torch.nn.Parameter) -> None:
        """The whole gradient of `p` is final, and in memory."""


class GradientSwapper:
    """Keeps the gradients of an optimizer's parameters out of memory from their arrival to the step.

    Args:
        parts: what each bucket steps on.
        owner: number of this swapper among those of the process; part of every record's key.
        accumulation_steps: micro-batches before a step; norms are taken in the last.
        pool: where buffers come from.
        limit_bytes: the most of the pool that gradients may take, no less than `GradientNeeds.pool_bytes`.
        store: where records go; None keeps them all in the pool.
        release: called once, when this is closed.

    Raises:
        SwapIOError: the drive has too little free space.
    """

    _open: ClassVar[weakref.WeakSet[GradientSwapper]] = weakref.WeakSet()

    def __init__(
        self,
        parts: Iterable[GradientPart],
        owner: int,
        accumulation_steps: int,
        pool: BufferPool,
        limit_bytes: int,
        store: TensorStore | None,
        release: Callable[[], None],
    ) -> None:
        self.metrics = Metrics()
        self._store = store
        self._cache = RecordCache(pool, store, self.metrics)
        self.share_pool(limit_bytes)
        self._owner = owner
        self._accumulation_steps = accumulation_steps
        self._release = release
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._gradients: dict[int, Gradient] = {}  # by `id` of the parameter; `_of` compares the object
        self._by_number: dict[int, Gradient] = {}
        self._hooks: MutableMapping[torch.Tensor, list[RemovableHandle]] = WeakIdKeyDictionary()
        self._numbers = itertools.count()  # of records and of gradients
        self._order = AccessOrder()  # of arrival
        self._arrived: set[int] = set()  # numbers of the gradients that came in the backward that is going on
        self._norm_type: float | None = 2.0  # of the norms that are taken in passing
        self._freed_bytes = 0
        self._clipped = False
        self._stepping = False
        self._collecting = False  # [Note: distributed]
        self._tasks: set[int] = set()
        self._copies = GradientCopies()
        self._window_ref: weakref.ref[Window] | None = None  # Weak, as it has what has this.
        self._closed = False
        self.plan(parts)
        GradientSwapper._open.add(self)

    @property
    def drops(self) -> int:
        """How often a part that was read ahead was given up."""
        return self._cache.drops

    @property
    def _window(self) -> Window | None:
        return None if self._window_ref is None else self._window_ref()

    # --- What the optimizer calls ----------------------------------------------------------------------------------

    def plan(self, parts: Iterable[GradientPart]) -> None:
        """Follow the optimizer's buckets: cut gradients as they are cut, take those of new parameters, leave others.

        Gradients that are away are cut anew, one at a time in memory; those of parameters that are no longer there
        come back. New parameters whose gradients the pool has no room for keep them in memory, said in a log line.
        """
        self._check_process()
        with self._lock, modes_kept():
            set_grad_mode(False)
            wanted: dict[int, tuple[torch.nn.Parameter, list[tuple[int, int]]]] = {}
            given = list(parts)
            known_ids = {id(p) for gradient in self._gradients.values() if (p := gradient.parameter()) is not None}
            for _, p, start, stop in fitting(given, known_ids, self._store is not None, self._limit_bytes):
                wanted.setdefault(id(p), (p, []))[1].append((start, stop))
            for number in [number for number in self._gradients if number not in known_ids or number not in wanted]:
                self._leave(number)
            sizes: dict[RecordKey, int] = {}
            made: dict[int, list[Part]] = {}
            for number, (p, cuts) in wanted.items():
                known = self._of(p)
                if known is not None and known.cuts == cuts:
                    continue
                made[number] = [self._new_part(p, start, stop) for start, stop in cuts]
                sizes.update({part.key: part.length_bytes for part in made[number]})
            if self._store is not None:
                self._store.plan(sizes)
            for number, new in made.items():
                self._adopt(wanted[number][0], new)
            self.watch(p for _, p, _, _ in given)

    def share_pool(self, limit_bytes: int) -> None:
        """Others need the pool too: take at most `limit_bytes` of it, no less than what they need."""
        self._limit_bytes = limit_bytes
        if self._store is not None:
            self._cache.limit_bytes = limit_bytes

    def deliver_to(self, window: Window) -> None:
        """From now on the last gradient of a window stays in memory, whole, and `window` is told of it."""
        self._window_ref = weakref.ref(window)

    def watches(self, parameter: torch.nn.Parameter) -> bool:
        """Whether the gradients of `parameter` are looked at when they arrive."""
        return self._of(parameter) is not None

    def _of(self, parameter: torch.Tensor) -> Gradient | None:
        """What is known of the gradient of `parameter`, and not of a former one that had its `id`."""
        gradient = self._gradients.get(id(parameter))
        return gradient if gradient is not None and gradient.parameter() is parameter else None

    def check(self) -> None:
        """Raise what is known to be wrong with any gradient.

        Raises:
            SwapError: one was lost.
            SwapIOError: a write had failed.
        """
        for gradient in self._gradients.values():
            if gradient.state is GradientState.LOST:
                gradient.raise_lost()
            self._settle(gradient)
        self._cache.check()

    def has(self, parameter: torch.nn.Parameter) -> bool:
        """Whether there is a gradient, in memory or away."""
        return self.is_evicted(parameter) or raw_gradient(parameter) is not None

    def is_evicted(self, parameter: torch.nn.Parameter) -> bool:
        """Whether the gradient is not in memory."""
        gradient = self._of(parameter)
        return gradient is not None and gradient.state is not GradientState.IN_MEMORY

    def stage(self, parameter: torch.nn.Parameter, start: int) -> bool:
        """Start reading the part that starts at `start`, if there is room. False if there is none."""
        gradient = self._of(parameter)
        if gradient is None or gradient.state is not GradientState.EVICTED:
            return True
        part = gradient.part_at(start)
        return self._cache.stage(part.key, part.length_bytes)

    @contextmanager
    def taken(self, parameter: torch.nn.Parameter, start: int) -> Iterator[torch.Tensor]:
        """Within it the part of an away gradient that starts at `start` is there for a step: 1-D, in memory order.

        Raises:
            SwapError: the gradient was lost.
            SwapIOError: it could not be read, or a write had failed.
        """
        gradient = self._of(parameter)
        assert gradient is not None
        if not self._clipped:
            self._norm_type = None  # Nobody wants norms.
        self._stepping = True
        with self._opened(gradient, gradient.part_at(start)) as view:
            yield view

    def clip_grad_norm_(
        self,
        parameters: Iterable[torch.nn.Parameter],
        max_norm: float,
        norm_type: float,
        error_if_nonfinite: bool,
        foreach: bool | None,
    ) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_`, bit for bit, without having all gradients in memory at once.

        Norms that were not taken when the last micro-batch arrived are taken now, one gradient at a time: in a run that
        clips every step, those of the first step if `norm_type` is not 2. What is away is scaled when it is used.
        """
        self._check_process()
        self.check()
        with self._lock, modes_kept():
            set_grad_mode(False)
            norm_type = float(norm_type)
            self._norm_type, self._clipped = norm_type, True
            present = [p for p in parameters if self.has(p)]
            if not any(self.is_evicted(p) for p in present):
                return torch.nn.utils.clip_grad_norm_(present, max_norm, norm_type, error_if_nonfinite, foreach)
            self._copies.join()  # Norms were taken after them.
            norms = [self._norm_of(p, norm_type, foreach) for p in in_order_of_clipping(present)]
            total = total_norm(norms, present[0].device, norm_type, error_if_nonfinite)
            self._change(present, scaled_by(torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)))
            return total

    def clip_grad_value_(self, parameters: Iterable[torch.nn.Parameter], clip_value: float) -> None:
        """As `torch.nn.utils.clip_grad_value_`, bit for bit. What is away is clamped when it is used."""
        self._check_process()
        self.check()
        change = clamped_to(float(clip_value))
        with self._lock, modes_kept():
            set_grad_mode(False)
            present = [p for p in parameters if self.has(p)]
            for dtype in {p.dtype for p in present}:
                change(torch.empty(0, dtype=dtype))  # What has no order raises now.
            self._change(present, change)

    def bring_back_all(self) -> None:
        """Have all gradients in memory.

        Raises:
            SwapError: one was lost.
            SwapIOError: one could not be read. Those before it are in memory.
        """
        for gradient in self._gradients.values():
            if (p := gradient.parameter()) is not None:
                self.bring_back(p)

    def flush(self) -> None:
        """Wait until all gradients that are away are on disk.

        Raises:
            SwapIOError: a write failed.
        """
        self._cache.flush()

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Notice too when the gradients of `parameters`, which are not this optimizer's, arrive.

        `DistributedDataParallel` looks at all gradients of a model when the first one arrives.
        """
        for p in parameters:
            if p.requires_grad and p.is_leaf and p not in self._hooks:
                self._hooks[p] = self._hook(p, taken=False)

    def leave(self, parameters: Iterable[torch.Tensor]) -> None:
        """Take no gradients of `parameters` any more, when they arrive. What is away stays so."""
        with self._lock:
            for p in parameters:
                if (gradient := self._of(p)) is not None:
                    gradient.left = True
                    self._unhook(p)

    def _unhook(self, p: torch.Tensor) -> None:
        for hook in self._hooks.pop(p, ()):
            hook.remove()

    def close(self) -> None:
        """Delete the records. Gradients that are away are gone, and using one raises. Idempotent."""
        if self._closed:
            return
        GradientSwapper._open.discard(self)
        for hook in [hook for hooks in self._hooks.values() for hook in hooks]:
            hook.remove()
        for gradient in self._gradients.values():
            self._fill_handed(gradient)
        self._closed = True
        if os.getpid() != self._pid:
            return
        try:
            for gradient in self._gradients.values():
                if gradient.state is GradientState.IN_MEMORY and (p := gradient.parameter()) is not None:
                    clear_gradient_home(p)
                for part in gradient.parts:
                    self._cache.forget(part.key)
        finally:
            self._release()

    # --- What `p.grad` calls ---------------------------------------------------------------------------------------

    def gradient_of(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """What reading `p.grad` gives: a tensor that is brought back when its values are used."""
        with self._lock:
            gradient = self._of(parameter)
            if gradient is not None and os.getpid() == self._pid and not self._closed:
                self._settle(gradient)
            if gradient is None or gradient.state is GradientState.IN_MEMORY:
                return raw_gradient(parameter)
            if gradient.device.type != "cpu" and not self._closed:
                return self.bring_back(parameter)  # Some of torch's functions choose other kernels by the exact class.
            handed = gradient.somebody_has_it()
            if handed is None:
                handed = evicted_gradient(parameter, None if self._closed else self, gradient.stride)
                gradient.handed = weakref.ref(handed)
            return handed

    def bring_back(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """Have a gradient that is away in memory again, for good.

        Raises:
            SwapError: it was lost, or this is a forked child.
            SwapIOError: it could not be read.
        """
        if self._closed:
            return None
        self._check_process()
        with self._lock, outside_of_inference():
            set_grad_mode(False)
            gradient = self._of(parameter)
            if gradient is None or gradient.state is GradientState.IN_MEMORY:
                return raw_gradient(parameter)
            values = self._whole(gradient)
            if (handed := gradient.somebody_has_it()) is not None:
                values = fill_gradient(handed, values)
            gradient.begin_to_change()
            set_raw_gradient(parameter, values)
            self._forget(gradient)
            return values

    def clear(self, parameters: Iterable[torch.nn.Parameter] | None = None) -> None:
        """Forget gradients that are away; nothing is read, unless somebody holds the tensor that stands for one.

        Args:
            parameters: None means all.
        """
        with self._lock:
            known = self._gradients.values() if parameters is None else map(self._of, parameters)
            for gradient in known:
                if gradient is not None and gradient.state is not GradientState.IN_MEMORY:
                    self._fill_handed(gradient)
                    self._forget(gradient)

    def set_zero(self, parameter: torch.nn.Parameter) -> None:
        """Let an away gradient be zeros; nothing is read or written."""
        with self._lock:
            gradient = self._of(parameter)
            assert gradient is not None
            self._forget(gradient, to=GradientState.ZERO)

    # --- Arrival ---------------------------------------------------------------------------------------------------

    def _hook(self, p: torch.Tensor, *, taken: bool) -> list[RemovableHandle]:
        """See every gradient of `p` arrive, and have those that are `taken`."""
        self_ref, p_ref = weakref.ref(self), weakref.ref(p)

        def before(_: torch.Tensor) -> None:
            if (swapper := self_ref()) is not None and not swapper._closed:
                swapper._before_arrival(p_ref())

        def after(p: torch.Tensor) -> None:
            if (swapper := self_ref()) is not None and not swapper._closed:
                assert isinstance(p, torch.nn.Parameter)
                swapper._after_arrival(p)

        hooks = [p.register_hook(before)]  # type: ignore[no-untyped-call]
        if taken:
            hooks.append(p.register_post_accumulate_grad_hook(after))  # type: ignore[no-untyped-call]
        return hooks

    def _before_arrival(self, p: torch.Tensor | None) -> None:
        self._check_process()
        if is_distributed():
            for swapper in list(GradientSwapper._open):
                swapper._begin_collecting()
            return
        gradient = None if p is None else self._of(p)
        if gradient is not None:
            assert isinstance(p, torch.nn.Parameter)
            self._settle(gradient)
            bring_back_gradients([p], (self, self._window))
            gradient.stays = raw_gradient(p) is not None

    def _after_arrival(self, p: torch.nn.Parameter) -> None:
        if raw_gradient(p) is None or is_distributed():
            return
        gradient = self._of(p)
        first = gradient is not None and not gradient.stays and gradient.state is GradientState.IN_MEMORY
        last = self._window is not None and self._window.count(p, first)
        with self._lock:
            if gradient is not None and not gradient.stays:
                self._arrive(gradient, p, take=not last)
        if last:
            assert self._window is not None
            self._window.complete(p)

    def _settle(self, gradient: Gradient) -> None:
        """Join what an arrival that was cut off before it began has left in memory."""
        p = gradient.parameter()
        if (
            gradient.state in (GradientState.EVICTED, GradientState.ZERO)
            and p is not None
            and raw_gradient(p) is not None
        ):
            with self._lock:
                self._arrive(gradient, p, take=True)

    def _arrive(self, gradient: Gradient, p: torch.nn.Parameter, *, take: bool) -> None:
        """A gradient is in memory. Join it with what is away: there if `take`, else in memory."""
        if gradient.state is GradientState.LOST:
            gradient.raise_lost()
        self._prefetch(gradient)
        fresh = raw_gradient(p)
        assert fresh is not None
        fits = gradient.can_take(fresh) and gradient.somebody_has_it() is None
        if gradient.state is GradientState.IN_MEMORY and not (take and fits):
            return
        if not fits:
            earlier = self.bring_back(p)
            assert earlier is not None
            # What autograd does if both are in memory.
            set_raw_gradient(p, earlier + fresh if torch.is_grad_enabled() else earlier.add_(fresh))
        elif take:
            self._take(gradient, p, fresh)
        else:
            self._add_in_memory(gradient, p, fresh)

    def _take(self, gradient: Gradient, p: torch.nn.Parameter, fresh: torch.Tensor) -> None:
        """Add `fresh` to what is away, if anything is, and let go of it."""
        before = gradient.state
        gradient.arrived += 1
        if self._freed_bytes >= _FREED_BYTES:
            return_free_memory()
            self._freed_bytes = 0
        self._freed_bytes += fresh.nbytes if fresh.device.type == "cpu" else 0
        norm_type = self._norm_type
        if self._stepping:
            self._stepping = self._clipped = False
        if gradient.arrived % self._accumulation_steps:
            norm_type = None
        copies = self._copies.of(gradient.device)
        with modes_kept():
            set_grad_mode(False)
            flat = fresh.as_strided((fresh.numel(),), (1,))
            try:
                copies.begin()
                copy = None
                for part in gradient.parts:
                    piece = flat[part.start : part.stop]
                    lease, there = self._cache.take(part.key, part.length_bytes)
                    assert there or before is not GradientState.EVICTED, part.key
                    view = lease.view(0, part.numel, gradient.dtype)
                    if before is GradientState.IN_MEMORY:
                        copy = lease.transfer = copies.copy(view, piece)
                    else:
                        self._complete(gradient, view)
                        copy = lease.transfer = self._copies.add(view, piece, both=norm_type is not None)
                    self._cache.put(part.key, part.length_bytes)
                if before is GradientState.IN_MEMORY:
                    gradient.stride = fresh.stride()
                gradient.changes = []
                gradient.norm = None
                if norm_type is not None:
                    value = self._copies.norm(fresh, norm_type)
                    gradient.norm = TakenNorm(value, norm_type, torch.get_num_threads())
                if copy is not None:
                    self._copies.wait_later(copy, fresh)
                gradient.state = GradientState.EVICTED
                set_gradient_home(p, self)
                set_raw_gradient(p, None)
            except BaseException as error:
                try:
                    copies.settle()  # Then what is given back, and what stays in memory, is used by nobody else.
                finally:
                    self._cache.recover()
                    self._undo(gradient, p, before, error)
                raise

    def _add_in_memory(self, gradient: Gradient, p: torch.nn.Parameter, fresh: torch.Tensor) -> None:
        """Add what is away to `fresh`."""
        flat = fresh.as_strided((fresh.numel(),), (1,))
        try:
            for part in gradient.parts:
                with self._opened(gradient, part) as view, modes_kept():
                    set_grad_mode(False)
                    piece = flat[part.start : part.stop]
                    torch.add(view.to(piece.device), piece, out=piece)
            self._forget(gradient)
        except BaseException as error:
            self._undo(gradient, p, GradientState.EVICTED, error)
            raise

    def _undo(self, gradient: Gradient, p: torch.nn.Parameter, before: GradientState, error: BaseException) -> None:
        """After joining a gradient with what was `before` was cut off."""
        if before is GradientState.IN_MEMORY:
            if raw_gradient(p) is not None:  # It is still whole in memory.
                self._forget(gradient)
            return
        gradient.lose(error)
        set_gradient_home(p, self)
        set_raw_gradient(p, None)

    def _prefetch(self, gradient: Gradient) -> None:
        """Start reading what will arrive after `gradient`, in the order of the backward before."""
        if gradient.number in self._arrived:  # Its second time: another backward.
            self._arrived.clear()
        self._arrived.add(gradient.number)
        self._order.note(Use("backward", gradient.number))
        for number in itertools.islice(self._order.upcoming(), _AHEAD):
            if number in self._arrived:  # Of the next backward. Until then the pool is for others.
                return
            coming = self._by_number.get(number)
            for part in coming.parts if coming is not None and coming.state is GradientState.EVICTED else ():
                if not self._cache.stage(part.key, part.length_bytes):
                    return

    # --- [Note: distributed] ---------------------------------------------------------------------------------------

    def _begin_collecting(self) -> None:
        """A gradient is about to arrive: have all in memory, and take them when this backward is over."""
        task = torch._C._current_graph_task_id()
        if task in self._tasks:
            return
        with self._lock:
            self._tasks.add(task)
            if not self._collecting:
                self._collecting = True
                for gradient in self._gradients.values():
                    p = gradient.parameter()
                    if p is not None:
                        gradient.stays = raw_gradient(p) is not None or gradient.somebody_has_it() is not None
            self.bring_back_all()
        # A backward inside of another, as reentrant checkpointing makes it, is over before gradients are reduced.
        if not is_nested():
            call_at_the_end(self._collect)

    def _collect(self) -> None:
        with self._lock:
            self._collecting = False
            self._tasks.clear()
            for gradient in self._gradients.values():
                p = gradient.parameter()
                if self._closed or p is None or gradient.stays or gradient.left:
                    continue
                fresh = raw_gradient(p)
                if fresh is not None and gradient.can_take(fresh):
                    self._take(gradient, p, fresh)

    # --- Whole gradients -------------------------------------------------------------------------------------------

    @contextmanager
    def _opened(self, gradient: Gradient, part: Part) -> Iterator[torch.Tensor]:
        """Within it a part of an away gradient is there, complete; 1-D, in memory order. It is not changed."""
        if gradient.state is GradientState.LOST:
            gradient.raise_lost()
        try:
            lease, there = self._cache.take(part.key, part.length_bytes)
            assert there or gradient.state is GradientState.ZERO, part.key
            view = lease.view(0, part.numel, gradient.dtype)
            with modes_kept():
                set_grad_mode(False)
                self._complete(gradient, view)
            yield view
        finally:
            self._cache.release(part.key)

    def _complete(self, gradient: Gradient, view: torch.Tensor) -> None:
        """Do what was put off."""
        if gradient.state is GradientState.ZERO:
            view.zero_()
        for change in gradient.changes:
            change(view)

    def _change(self, parameters: Iterable[torch.nn.Parameter], change: Change) -> None:
        """Change gradients, in memory at once; what is away is changed when it is used, if it is on disk."""
        for p in parameters:
            gradient = self._of(p)
            if gradient is not None and gradient.state is not GradientState.IN_MEMORY:
                self._change_away(gradient, change)
            else:
                in_memory = raw_gradient(p)
                assert in_memory is not None
                change(in_memory)

    def _change_away(self, gradient: Gradient, change: Change) -> None:
        gradient.norm = None
        if self._store is not None or gradient.state is not GradientState.EVICTED:
            gradient.changes.append(change)
            return
        try:
            for part in gradient.parts:
                lease, _ = self._cache.take(part.key, part.length_bytes)
                change(lease.view(0, part.numel, gradient.dtype))
                self._cache.put(part.key, part.length_bytes)
        except BaseException as error:
            self._cache.recover()
            gradient.lose(error)
            raise

    def _norm_of(self, p: torch.nn.Parameter, norm_type: float, foreach: bool | None) -> torch.Tensor:
        gradient = self._of(p)
        if gradient is None or gradient.state is GradientState.IN_MEMORY:
            in_memory = raw_gradient(p)
            assert in_memory is not None
            return norm_of(in_memory, norm_type, foreach)
        if gradient.norm is not None and gradient.norm.is_as_asked(norm_type, foreach):
            return gradient.norm.value
        return norm_of(self._whole(gradient), norm_type, foreach)

    def _whole(self, gradient: Gradient) -> torch.Tensor:
        """A copy in memory of a gradient that is away."""
        whole = torch.empty_strided(gradient.shape, gradient.stride, dtype=gradient.dtype, device=gradient.device)
        flat = whole.as_strided((whole.numel(),), (1,))
        for i, part in enumerate(gradient.parts):
            if gradient.state is GradientState.EVICTED:
                for following in gradient.parts[i : i + 2]:
                    self._cache.stage(following.key, following.length_bytes)
            with self._opened(gradient, part) as view:
                flat[part.start : part.stop].copy_(view)
        return whole

    def _fill_handed(self, gradient: Gradient) -> None:
        """Who has the tensor of a gradient that is forgotten now gets its values."""
        if (handed := gradient.somebody_has_it()) is None:
            return
        try:
            self._check_process()
            if self._closed:
                raise SwapError("closed")
            with outside_of_inference():
                set_grad_mode(False)
                fill_gradient(handed, self._whole(gradient))
        except SwapError:
            handed.home = None  # Using it raises.

    def _forget(self, gradient: Gradient, *, to: GradientState = GradientState.IN_MEMORY) -> None:
        """It is in memory now, or not wanted."""
        gradient.begin_to_change()
        if os.getpid() == self._pid and not self._closed:
            for part in gradient.parts:
                self._cache.discard(part.key)
        gradient.arrived, gradient.norm, gradient.changes, gradient.cause = 0, None, [], None
        gradient.state = to
        if to is GradientState.IN_MEMORY:
            gradient.handed = None
            if (parameter := gradient.parameter()) is not None:
                clear_gradient_home(parameter)

    # --- Planning --------------------------------------------------------------------------------------------------

    def _new_part(self, p: torch.nn.Parameter, start: int, stop: int) -> Part:
        return Part(start, stop, RecordKey(self._owner, "grad", next(self._numbers)), record_bytes(p, start, stop))

    def _adopt(self, p: torch.nn.Parameter, parts: list[Part]) -> None:
        """Take the gradient of `p` from now on in `parts`."""
        known = self._of(p)
        if known is None:
            known = Gradient(next(self._numbers), weakref.ref(p), p.shape, p.stride(), p.dtype, p.device)
            self._gradients[id(p)] = self._by_number[known.number] = known
        former = known.parts
        if known.state is GradientState.EVICTED:
            whole = self._whole(known).as_strided((known.shape.numel(),), (1,))
            known.changes = []
            try:
                for part in parts:
                    lease, _ = self._cache.take(part.key, part.length_bytes)
                    lease.view(0, part.numel, known.dtype).copy_(whole[part.start : part.stop])
                    self._cache.put(part.key, part.length_bytes)
            except BaseException as error:
                self._cache.recover()
                known.lose(error)
                raise
        known.parts = parts
        for part in former:
            self._cache.forget(part.key)
        if p.requires_grad and not known.left:  # Else hooks of when it did require one stay.
            self._unhook(p)
            self._hooks[p] = self._hook(p, taken=True)

    def _leave(self, number: int) -> None:
        """Stop taking the gradient of a parameter that the optimizer has no more."""
        gradient = self._gradients[number]
        if (p := gradient.parameter()) is not None:
            self.bring_back(p)
            self._unhook(p)
            self.watch([p])
        for part in gradient.parts:
            self._cache.forget(part.key)
        del self._gradients[number]
        del self._by_number[gradient.number]
        self._arrived.discard(gradient.number)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise SwapError(
                "a gradient that is swapped was used in a forked process; its files and buffers belong to the parent"
            )
