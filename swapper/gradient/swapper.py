"""`GradientSwapper`: gradients that leave memory as they arrive, and come back for the step.

A gradient is cut where the optimizer's buckets are: the part of it that one bucket steps on is a record of its own.
When autograd has accumulated a gradient, its parts are added to what arrived in earlier micro-batches, written (or,
without a store, kept in the pool), and its own memory is freed. What is smaller than 16 KiB stays where it is.

[Note: gradients that stay] What was in memory when a backward came to it stays there: autograd adds to it in place, as
ever, and whoever holds it sees that. It was assigned, or it was evicted and its values were used. It is taken again
when it has been None since. [Note: rounded gradients] in `rounding` says when it is rounded in its place.

[Note: gradients of an accelerator] They are copied, and added up, on a stream of their own, while the backward goes on:
nothing waits but the drive, which writes a part when it was copied. What follows the backward on the current stream
comes after the copies, so that who still has the tensor of a gradient may change it.

[Note: distributed] Where `torch.distributed` is initialized, a gradient may still be local when autograd has
accumulated it: `DistributedDataParallel` reduces it later. So evicted gradients come back before the first one
arrives, and all are taken after the last callback of a backward, when they are reduced.

[Note: gradients of shards] FSDP2 reduces the gradients of a group together, in memory that they share, and hooks are
called when that is done. So each is taken then; what stays is given memory of its own ([Note: alignment]). FSDP2 is
told that there is no gradient while one is evicted, and does not add to it: the record is added to when the hook is
called. What FSDP2 has added to in place stays. An error waits for the end of the backward: see `raised_by_all`. A
DTensor of which autograd itself has the gradient is none of FSDP2's: others may reduce that later, and it stays.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterable, MutableMapping
from types import FrameType
from typing import ClassVar, Protocol

import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from swapper.errors import SwapError
from swapper.gradient.alignment import keep_alone, misaligned_bytes_of
from swapper.gradient.clipping import TakenNorm
from swapper.gradient.evicted import EvictedGradients
from swapper.gradient.records import (
    Gradient,
    GradientPart,
    GradientState,
    PartRecord,
    can_round,
    file_bytes,
    fitting,
    record_bytes,
)
from swapper.gradient.rounding import PlaceOf, decode_in_place, rounding_of
from swapper.io.devices import refuse_in_graph
from swapper.storage.access_order import AccessOrder, Use
from swapper.storage.backward_agreement import raised_by_all
from swapper.storage.buffers import BufferPool
from swapper.storage.malloc_trim import FreedMemory
from swapper.storage.store import RecordKey, TensorStore
from swapper.tensors.collectives import is_distributed
from swapper.tensors.dynamo import not_compiled
from swapper.tensors.end_of_backward import call_at_the_end, is_nested
from swapper.tensors.evicted_gradients import (
    bring_back_gradients,
    clear_gradient_home,
    raw_gradient,
    set_gradient_home,
    set_raw_gradient,
)
from swapper.tensors.grad_modes import modes_kept, set_grad_mode
from swapper.tensors.reduced import adds_in_place, is_of_fsdp
from swapper.tensors.sharded import has_norms_of_parts, is_sharded, local_of, sharded_like

__all__ = ["GradientSwapper", "Window"]

log = logging.getLogger(__name__)

_AHEAD = 32
"""Gradients looked ahead at in the order of arrival."""


class Window(Protocol):
    """Steps buckets in backward, and is told of gradients."""

    def count(self, p: torch.nn.Parameter, first: bool) -> bool:
        """A gradient of `p` has arrived; `first` if none is there already. Returns whether it is the window's last."""

    def complete(self, p: torch.nn.Parameter) -> None:
        """The whole gradient of `p` is final, and in memory."""

    def fail_with_others(self, error: BaseException) -> None:
        """A rank has raised `error` in this backward."""


class GradientSwapper(EvictedGradients):
    """Keeps the gradients of an optimizer's parameters out of memory from their arrival to the step.

    Args:
        optimizer: the end of which closes this; None if nothing does. Only a weak reference is kept.
        parts: what each bucket steps on.
        owner: number of this swapper among those of the process; part of every record's key.
        accumulation_steps: micro-batches before a step; norms are taken in the last.
        pool: where buffers come from.
        limit_bytes: the most of the pool that gradients may take, no less than `GradientNeeds.pool_bytes`.
        store: where records go; None keeps them all in the pool.
        release: called once, when this is closed.
        place_of: what rounding depends on; None rounds nothing. See [Note: rounded gradients] in `rounding`.

    Raises:
        SwapIOError: the drive has too little free space.
    """

    _open: ClassVar[weakref.WeakSet[GradientSwapper]] = weakref.WeakSet()

    def __init__(
        self,
        optimizer: object | None,
        parts: Iterable[GradientPart],
        owner: int,
        accumulation_steps: int,
        pool: BufferPool,
        limit_bytes: int,
        store: TensorStore | None,
        release: Callable[[], None],
        place_of: PlaceOf | None = None,
    ) -> None:
        super().__init__(optimizer, pool, store, place_of)
        self.share_pool(limit_bytes)
        self._owner = owner
        self._accumulation_steps = accumulation_steps
        self._release = release
        self._by_number: dict[int, Gradient] = {}
        self._hooks: MutableMapping[torch.Tensor, list[RemovableHandle]] = WeakIdKeyDictionary()
        self._numbers = itertools.count()  # of records and of gradients
        self._left_numbers: list[int] = []  # of gradients that have left: others get them, so `_order` knows no more
        self._order = AccessOrder()  # of arrival
        self._arrived: set[int] = set()  # numbers of the gradients that came in the backward that is going on
        self._freed = FreedMemory()
        self._collecting = False  # [Note: distributed]
        self._said = False  # that gradients of DTensors stay
        self._tasks: set[int] = set()
        self._window_ref: weakref.ref[Window] | None = None  # Weak, as it has what has this.
        self.plan(parts)
        GradientSwapper._open.add(self)

    @property
    def _window(self) -> Window | None:
        return None if self._window_ref is None else self._window_ref()

    # --- What the optimizer calls ----------------------------------------------------------------------------------

    def plan(self, parts: Iterable[GradientPart]) -> None:
        """Follow the optimizer's buckets: cut gradients as they are cut, take those of new parameters, leave others.

        Evicted gradients are cut anew, one at a time in memory; those of parameters that are no longer there
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
            made: dict[int, list[PartRecord]] = {}
            for number, (p, cuts) in wanted.items():
                known = self._of(p)
                if known is not None and known.cuts == cuts:
                    continue
                made[number] = [self._new_part(p, start, stop) for start, stop in cuts]
                sizes.update({part.key: part.file_bytes for part in made[number]})
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
        """Return True if the gradients of `parameter` are looked at when they arrive."""
        return self._of(parameter) is not None

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Notice too when the gradients of `parameters` arrive that are not taken.

        `DistributedDataParallel` looks at all gradients of a model when the first one arrives. Those of FSDP2 would
        keep the memory of their group, and all ranks notice the same.
        """
        for p in parameters:
            if p.requires_grad and p.is_leaf and p not in self._hooks:
                self._hooks[p] = self._hook(p, taken=False)

    def leave(self, parameters: Iterable[torch.Tensor]) -> None:
        """Take no gradients of `parameters` any more, when they arrive. Evicted ones stay so."""
        with self._lock:
            for p in parameters:
                if (gradient := self._of(p)) is not None:
                    gradient.left = True
                    self._unhook(p)

    def _unhook(self, p: torch.Tensor) -> None:
        for hook in self._hooks.pop(p, ()):
            hook.remove()

    def close(self) -> None:
        """Delete the records. Evicted gradients are gone, and using one raises. Idempotent."""
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
                if is_sharded(p):
                    swapper._after_reduction(p, sys._getframe().f_back)  # None in autograd's own thread.
                elif not is_distributed():
                    swapper._count_and_arrive(swapper._of(p), p)

        hooks = [p.register_hook(not_compiled(before))]  # type: ignore[no-untyped-call]
        if taken or is_sharded(p):
            hook = after if is_sharded(p) else not_compiled(after)  # Of a shard it looks at the frame that calls it.
            hooks.append(p.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        return hooks

    def _before_arrival(self, p: torch.Tensor | None) -> None:
        self._check_process()
        if p is not None and is_sharded(p):
            if not self._said:
                self._said = True
                log.warning("a gradient of a DTensor that FSDP2 has not reduced stays in memory")
            bring_back_gradients([p])  # type: ignore[list-item]
            return
        if is_distributed():
            for swapper in list(GradientSwapper._open):
                swapper._begin_collecting()
            if p is not None and (gradient := self._of(p)) is not None:
                gradient.begun = None
            return
        gradient = None if p is None else self._of(p)
        if gradient is not None:
            assert isinstance(p, torch.nn.Parameter)
            self._join_left(gradient)
            bring_back_gradients([p], (self, self._window))
            gradient.note_begun(there := raw_gradient(p))
            gradient.stays = there is not None

    def _count_and_arrive(self, gradient: Gradient | None, p: torch.nn.Parameter) -> None:
        if raw_gradient(p) is None:
            return
        first = gradient is not None and not gradient.stays and gradient.state is GradientState.IN_MEMORY
        last = self._window is not None and self._window.count(p, first)
        with self._lock:
            if gradient is not None and not gradient.stays:
                self._arrive(gradient, p, take=not last)
            elif gradient is not None and is_sharded(p) and not last:
                self._round_in_memory(gradient, p)
        if last:
            assert self._window is not None
            self._window.complete(p)

    def _after_reduction(self, p: torch.nn.Parameter, caller: FrameType | None) -> None:
        """`caller`, FSDP2, has reduced a gradient of `p`. See [Note: gradients of shards]."""
        self._check_process()
        if caller is None or not is_of_fsdp(caller):
            return
        window = self._window
        with raised_by_all(p, None if window is None else window.fail_with_others):
            gradient = self._of(p)
            try:
                if gradient is not None:
                    gradient.stays = adds_in_place(caller)
                    gradient.note_begun(raw_gradient(p) if gradient.stays else None)
                    self._count_and_arrive(gradient, p)
            finally:
                if not adds_in_place(caller):  # Else it has the memory that it had before, perhaps one of the user's.
                    keep_alone(raw_gradient(p))

    def gradient_to_add_to(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """See `GradientHome`."""
        gradient = self._of(parameter)
        if gradient is None or gradient.left or self._closed or gradient.somebody_has_it() is not None:
            if self._closed:
                raise SwapError("a gradient was on disk, and its optimizer was closed; call zero_grad() before")
            with raised_by_all(parameter):
                return self.bring_back(parameter)
            return None  # It could not be read: that is raised at the end.
        if gradient.state is GradientState.IN_MEMORY:
            return raw_gradient(parameter)
        with raised_by_all(parameter):
            self._join_left(gradient)
        return None

    def _join_left(self, gradient: Gradient) -> None:
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
        """A gradient is in memory. Join it with what is evicted: there if `take`, else in memory."""
        if gradient.state is GradientState.LOST:
            gradient.raise_lost()
        gradient.check_not_kept()
        self._prefetch(gradient)
        arrived = raw_gradient(p)
        assert arrived is not None
        fresh = local_of(arrived)
        fits = gradient.can_take(fresh) and gradient.somebody_has_it() is None
        if gradient.state is GradientState.IN_MEMORY and not (take and fits):
            return
        if not fits:
            earlier = self.bring_back(p)
            assert earlier is not None
            # What autograd does if both are in memory.
            set_raw_gradient(p, earlier + arrived if torch.is_grad_enabled() else earlier.add_(arrived))
        elif take:
            self._take(gradient, p, fresh)
        else:
            self._add_in_memory(gradient, p, fresh)

    def _take(self, gradient: Gradient, p: torch.nn.Parameter, fresh: torch.Tensor) -> None:
        """Add `fresh` to what is evicted, if anything is, and evict it."""
        refuse_in_graph(gradient.device)
        before = gradient.state
        gradient.arrived += 1
        if on_host := fresh.device.type == "cpu":
            self._freed.add(fresh.nbytes)
        norm_type = self._norm_type
        if self._stepping:
            self._stepping = self._clipped = False
        if gradient.arrived % self._accumulation_steps or not has_norms_of_parts(p):
            norm_type = None
        if gradient.rounds and not on_host:  # Rounded values are on the host, when the copies are over.
            norm_type = None
        if before is not GradientState.IN_MEMORY and gradient.misaligned_bytes != misaligned_bytes_of(fresh):
            norm_type = None  # The sum, which is taken in the memory of `fresh`, would be elsewhere.
        copies = self._copies.of(gradient.device)
        with modes_kept():
            set_grad_mode(False)
            flat = fresh.as_strided((fresh.numel(),), (1,))
            try:
                value = torch.empty((), dtype=fresh.dtype.to_real(), device=fresh.device)  # For its norm.
                to_norm = fresh
                if gradient.rounds and norm_type is not None:  # `fresh` may be the user's, too.
                    to_norm = torch.empty_strided(fresh.shape, fresh.stride(), dtype=fresh.dtype, device=fresh.device)
                flat_to_norm = to_norm.as_strided((fresh.numel(),), (1,))
                if gradient.rounds and self._place_of is not None:
                    gradient.count_rounding(self._place_of(p)[0])
                copies.begin()
                copy = None
                for part in gradient.parts:
                    piece = flat[part.start : part.stop]
                    lease, there, view = self._take_part(gradient, part, follows=not gradient.rounds)
                    assert there or before is not GradientState.EVICTED, part.key
                    if before is GradientState.IN_MEMORY:
                        copy = lease.transfer = copies.copy(view, piece)
                    else:
                        if gradient.changes and lease.transfer is not None:  # A copy of the pass before.
                            lease.transfer.wait()
                        self._complete(gradient, view)
                        both = norm_type is not None and not gradient.rounds
                        copy = lease.transfer = self._copies.add(view, piece, both=both)
                    if not gradient.rounds or self._place_of is None:
                        self._cache.put(part.key, part.length_bytes)
                        continue
                    rounding = rounding_of(self._place_of, gradient, part, p)
                    if not on_host:
                        self._cache.put(part.key, functools.partial(rounding.encode_in_place, view))
                        continue
                    length_bytes = rounding.encode_in_place(view)
                    if norm_type is not None:
                        rounding.decode_to(view, flat_to_norm[part.start : part.stop])
                    self._cache.put(part.key, length_bytes)
                if before is GradientState.IN_MEMORY:
                    gradient.stride, gradient.misaligned_bytes = fresh.stride(), misaligned_bytes_of(fresh)
                gradient.changes = []
                gradient.norm = None
                if norm_type is not None:
                    value = self._copies.norm(sharded_like(to_norm, p), norm_type, value)
                    gradient.norm = TakenNorm(value, norm_type, torch.get_num_threads())
                if copy is not None:
                    self._copies.wait_later(copy, fresh)
                gradient.state = GradientState.EVICTED
                set_gradient_home(p, self)
                set_raw_gradient(p, None)
            except BaseException as error:
                try:
                    copies.wait()  # Then what is given back, and what stays in memory, is used by nobody else.
                finally:
                    self._cache.recover()
                    self._undo(gradient, p, before, error)
                raise

    def _add_in_memory(self, gradient: Gradient, p: torch.nn.Parameter, fresh: torch.Tensor) -> None:
        """Add what is evicted to `fresh`."""
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

    def _round_in_memory(self, gradient: Gradient, p: torch.nn.Parameter, arrived: bool = True) -> None:
        """Round a gradient that stays in memory as it would be on its way to the drive: other ranks may take theirs.

        If nothing of it has `arrived` it is as it was, perhaps edited by the user, and counted as on other ranks.
        """
        there = raw_gradient(p)
        if not gradient.rounds or self._place_of is None or there is None:
            return
        fresh = local_of(there)
        if not gradient.can_take(fresh):
            return
        gradient.count_rounding(self._place_of(p)[0])
        if not arrived:
            return
        with modes_kept():
            set_grad_mode(False)
            flat = fresh.as_strided((fresh.numel(),), (1,))
            for part in gradient.parts:
                piece = flat[part.start : part.stop]
                values = piece.to("cpu", copy=True)
                rounding_of(self._place_of, gradient, part, p).encode_in_place(values)
                decode_in_place(values)
                piece.copy_(values)

    def _undo(self, gradient: Gradient, p: torch.nn.Parameter, before: GradientState, error: BaseException) -> None:
        """After joining a gradient with what was `before` was cut off."""
        if before is GradientState.IN_MEMORY:
            if raw_gradient(p) is not None:  # It is still whole in memory.
                self._forget(gradient)
            return
        gradient.mark_lost(error)
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
            if begins := not self._collecting:
                self._collecting = True
                for gradient in self._gradients.values():
                    p = gradient.parameter()
                    if p is not None and not is_sharded(p):
                        gradient.note_begun(there := raw_gradient(p))
                        gradient.stays = there is not None or gradient.somebody_has_it() is not None
            for gradient in list(self._gradients.values()):
                p = gradient.parameter()
                if p is None or is_sharded(p):
                    continue
                if begins:
                    gradient.edited = gradient.rounds and bool(gradient.changes)
                if gradient.state is not GradientState.IN_MEMORY:
                    self.bring_back(p)
                if begins:
                    gradient.begun = _version_of(raw_gradient(p))
        # A backward inside of another, as reentrant checkpointing makes it, is over before gradients are reduced.
        if not is_nested():
            call_at_the_end(self._collect)

    def _collect(self) -> None:
        with self._lock:
            self._collecting = False
            self._tasks.clear()
            for gradient in self._gradients.values():
                p = gradient.parameter()
                if self._closed or p is None or is_sharded(p) or gradient.left:
                    continue
                fresh = raw_gradient(p)
                # Another rank may have used a parameter that this one has not: then its gradient is written to.
                arrived = gradient.begun is None or gradient.begun != _version_of(fresh)
                if gradient.stays or (gradient.edited and not arrived):
                    self._round_in_memory(gradient, p, arrived)
                elif fresh is not None and gradient.can_take(fresh):
                    self._take(gradient, p, fresh)

    # --- Planning --------------------------------------------------------------------------------------------------

    def _new_part(self, p: torch.nn.Parameter, start: int, stop: int) -> PartRecord:
        key = RecordKey(self._owner, "grad", next(self._numbers))
        stored_bytes = file_bytes(p, start, stop, self._place_of is not None)
        return PartRecord(start, stop, key, record_bytes(p, start, stop), stored_bytes)

    def _adopt(self, p: torch.nn.Parameter, parts: list[PartRecord]) -> None:
        """Take the gradient of `p` from now on in `parts`."""
        known = self._of(p)
        if known is None:
            local = local_of(p)
            number = self._left_numbers.pop() if self._left_numbers else next(self._numbers)
            known = Gradient(number, weakref.ref(p), local.shape, local.stride(), p.dtype, local.device)
            known.rounds = self._place_of is not None and can_round(p)
            self._gradients[id(p)] = self._by_number[known.number] = known
        former = known.parts
        if known.state is GradientState.EVICTED:
            # What is to be done when it is used is done then: else how it is cut would say how often it is rounded.
            changes, known.changes = known.changes, []
            try:
                whole = self._whole(known).as_strided((known.shape.numel(),), (1,))
            finally:
                known.changes = changes
            self._rewrite(known, parts, lambda part, view: view.copy_(whole[part.start : part.stop]))
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
        self._left_numbers.append(gradient.number)


def _version_of(gradient: torch.Tensor | None) -> tuple[int, int] | None:
    """Another one after autograd, or who reduces gradients, has written to it."""
    return None if gradient is None or gradient.is_inference() else (id(gradient), gradient._version)
