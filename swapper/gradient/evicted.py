"""`EvictedGradients`: gradients in their records. They are read, changed, clipped and brought back from there."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from swapper.errors import SwapError
from swapper.gradient.alignment import empty_misaligned
from swapper.gradient.clipping import Change, clamped_to, in_order_of_clipping, norm_of, scaled_by, total_norm
from swapper.gradient.copies import GradientCopies
from swapper.gradient.records import Gradient, GradientState, PartRecord
from swapper.gradient.rounding import PlaceOf, decode_in_place, rounding_of
from swapper.io.devices import Copy, keep_for_current_stream
from swapper.metrics import Metrics
from swapper.storage.agreement import agreed
from swapper.storage.backward_agreement import have_all_ranks
from swapper.storage.buffers import BufferPool, Lease
from swapper.storage.cache import RecordCache
from swapper.storage.store import TensorStore
from swapper.tensors.evicted_gradients import (
    clear_gradient_home,
    evicted_gradient,
    fill_gradient,
    raw_gradient,
    return_raw_gradient,
    set_raw_gradient,
    shown,
)
from swapper.tensors.grad_modes import modes_kept, outside_of_inference, set_grad_mode
from swapper.tensors.sharded import has_norms_of_parts, is_sharded, local_of, sharded_like

__all__ = ["EvictedGradients"]


class EvictedGradients:
    """The gradients of an optimizer's parameters, as far as they are in records. The `GradientHome` of those.

    Args:
        optimizer: the end of which closes this; None if nothing does. Only a weak reference is kept.
        pool: where buffers come from.
        store: where records go; None keeps them all in the pool.
        place_of: what rounding depends on; None if nothing is rounded. See [Note: rounded gradients] in `rounding`.
    """

    def __init__(
        self, optimizer: object | None, pool: BufferPool, store: TensorStore | None, place_of: PlaceOf | None
    ) -> None:
        self.metrics = Metrics()
        self._store = store
        self._place_of = place_of
        self._cache = RecordCache(pool, store, self.metrics, owner=optimizer)
        self._copies = GradientCopies()
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._gradients: dict[int, Gradient] = {}  # by `id` of the parameter; `_of` compares the object
        self._norm_type: float | None = 2.0  # of the norms that are taken in passing
        self._clipped = False
        self._stepping = False
        self._closed = False

    def _join_left(self, gradient: Gradient) -> None:
        """Join what an arrival that was cut off before it began has left in memory."""
        raise NotImplementedError

    def gradient_to_add_to(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """See `GradientHome`."""
        raise NotImplementedError

    @property
    def drops(self) -> int:
        """Counts the parts that were prefetched and dropped before they were used."""
        return self._cache.drops

    def _of(self, parameter: torch.Tensor) -> Gradient | None:
        """Return the record of the gradient of `parameter`, and not of a former one that had its `id`."""
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
            self._join_left(gradient)
        self._cache.check()

    def has(self, parameter: torch.nn.Parameter) -> bool:
        """Return True if there is a gradient, in memory or evicted."""
        return self.is_evicted(parameter) or raw_gradient(parameter) is not None

    def is_evicted(self, parameter: torch.nn.Parameter) -> bool:
        """Return True if the gradient is not in memory."""
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
        """Within it the part of an evicted gradient that starts at `start` is there for a step: 1-D, in memory order.

        Raises:
            SwapError: the gradient was lost.
            SwapIOError: it could not be read, or a write had failed.
        """
        gradient = self._use_in_step(parameter)
        with self._opened(gradient, gradient.part_at(start)) as view:
            yield view

    def _use_in_step(self, parameter: torch.nn.Parameter) -> Gradient:
        gradient = self._of(parameter)
        assert gradient is not None
        if not self._clipped:
            self._norm_type = None  # Nobody wants norms.
        self._stepping = True
        return gradient

    def uploaded(
        self,
        parameter: torch.nn.Parameter,
        start: int,
        upload: Callable[[torch.Tensor, int], tuple[torch.Tensor, Copy | None]],
    ) -> tuple[torch.Tensor, list[Change]]:
        """As `taken`, on an accelerator: the part may still be on its way, and is incomplete.

        Args:
            upload: starts copying a tensor of the pool, 1-D, to so many bytes after a multiple of 64. Returns the
                tensor that it becomes, and the copy.

        Returns:
            That tensor, and the changes that are to be made to it, in order, when the copy is over.
        """
        gradient = self._use_in_step(parameter)
        part = gradient.part_at(start)
        if gradient.state is GradientState.ZERO:
            return torch.zeros(part.numel, dtype=gradient.dtype, device=gradient.device), list(gradient.changes)
        if gradient.state is GradientState.LOST:
            gradient.raise_lost()
        try:
            lease, there, view = self._take_part(gradient, part)
            assert there, part.key
            is_whole = len(gradient.parts) == 1  # Of others only classes step that add nothing up.
            uploaded, lease.transfer = upload(view, gradient.misaligned_bytes if is_whole else 0)
        finally:
            self._cache.release(part.key)  # The memory goes to nobody else before the copy is over.
        return uploaded, list(gradient.changes)

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
        """Wait until all evicted gradients are on disk.

        Raises:
            SwapIOError: a write failed.
        """
        self._cache.flush()

    # --- Clipping --------------------------------------------------------------------------------------------------

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
        clips every step, those of the first step if `norm_type` is not 2. Evicted gradients are scaled when used.
        """
        self._check_process()
        given = list(parameters)
        # Norms of parts have no collective. So what fails on one rank is raised by all before the first one.
        with agreed(have_all_ranks(given) and all(map(has_norms_of_parts, given))):
            self.check()
            present, norms = self._norms_of(given, float(norm_type), foreach)
        if not norms:
            return torch.nn.utils.clip_grad_norm_(present, max_norm, norm_type, error_if_nonfinite, foreach)
        with self._lock, modes_kept():
            set_grad_mode(False)
            try:
                total = total_norm(norms, present[0].device, float(norm_type), error_if_nonfinite)
            finally:
                for norm in norms:
                    keep_for_current_stream(local_of(norm))  # They were made on those of the backward.
            scale = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
            self._change(present, scaled_by(scale.full_tensor() if is_sharded(scale) else scale))  # type: ignore[attr-defined]
            return total

    def _norms_of(
        self, parameters: list[torch.nn.Parameter], norm_type: float, foreach: bool | None
    ) -> tuple[list[torch.nn.Parameter], list[torch.Tensor]]:
        """Return the `parameters` that have gradients, and the norms of these; no norms if nothing can be evicted."""
        with self._lock, modes_kept():
            set_grad_mode(False)
            self._norm_type, self._clipped = norm_type, True
            present = [p for p in parameters if self.has(p)]
            # Of DTensors other ranks may have evicted theirs: all have the same collectives.
            if not any(is_sharded(p) or self.is_evicted(p) for p in present):
                return present, []
            self._copies.join()  # Norms were taken after them.
            return present, [self._norm_of(p, norm_type, foreach) for p in in_order_of_clipping(present)]

    def clip_grad_value_(self, parameters: Iterable[torch.nn.Parameter], clip_value: float) -> None:
        """As `torch.nn.utils.clip_grad_value_`, bit for bit. Evicted gradients are clamped when they are used."""
        self._check_process()
        given = list(parameters)
        with agreed(have_all_ranks(given)):
            self.check()
        change = clamped_to(float(clip_value))
        with self._lock, modes_kept():
            set_grad_mode(False)
            present = [p for p in given if self.has(p)]
            for dtype in {p.dtype for p in present}:
                change(torch.empty(0, dtype=dtype, device="cpu"))  # What has no order raises now.
            self._change(present, change)

    def _change(self, parameters: Iterable[torch.nn.Parameter], change: Change) -> None:
        """Change gradients, in memory at once; evicted ones when they are used, if they are on disk."""
        for p in parameters:
            gradient = self._of(p)
            if gradient is None or gradient.state is GradientState.IN_MEMORY:
                in_memory = raw_gradient(p)
                assert in_memory is not None
                change(local_of(in_memory))
                continue
            gradient.norm = None
            if self._store is not None or gradient.state is not GradientState.EVICTED:
                gradient.changes.append(change)
            else:
                self._rewrite(gradient, gradient.parts, lambda _, view: change(view))

    def _rewrite(
        self, gradient: Gradient, parts: list[PartRecord], change: Callable[[PartRecord, torch.Tensor], object]
    ) -> None:
        """Call `change` with each of `parts` and its buffer, 1-D. If that is cut off, the gradient is LOST."""
        try:
            for part in parts:
                *_, view = self._take_part(gradient, part)
                change(part, view)
                self._cache.put(part.key, self._rounded(gradient, part, view))
        except BaseException as error:
            self._cache.recover()
            gradient.mark_lost(error)
            raise

    def _rounded(self, gradient: Gradient, part: PartRecord, view: torch.Tensor) -> int:
        """Round `view`, the values of `part`, if its gradient is rounded. Returns how many bytes are to be written."""
        parameter = gradient.parameter()
        if not gradient.rounds or self._place_of is None or parameter is None:
            return part.length_bytes
        return rounding_of(self._place_of, gradient, part, parameter).encode_in_place(view)

    def _norm_of(self, p: torch.nn.Parameter, norm_type: float, foreach: bool | None) -> torch.Tensor:
        gradient = self._of(p)
        if gradient is None or gradient.state is GradientState.IN_MEMORY:
            in_memory = raw_gradient(p)
            assert in_memory is not None
            return norm_of(in_memory, norm_type, foreach)
        if gradient.norm is not None and gradient.norm.is_as_asked(norm_type, foreach):
            return gradient.norm.value
        return norm_of(sharded_like(self._whole(gradient), p), norm_type, foreach)

    # --- `GradientHome` --------------------------------------------------------------------------------------------

    def gradient_of(self, parameter: torch.nn.Parameter, *, to_clear: bool = False) -> torch.Tensor | None:
        """Return what reading `p.grad` gives: a tensor that is brought back when its values are used.

        On an accelerator they come at once, unless it is read `to_clear` it.
        """
        with self._lock:
            gradient = self._of(parameter)
            is_ours = os.getpid() == self._pid and not self._closed
            # What is cleared needs no values: a write that failed must not be in the way of that.
            if gradient is not None and is_ours and (not to_clear or gradient.somebody_has_it() is not None):
                self._join_left(gradient)
            if gradient is None or gradient.state is GradientState.IN_MEMORY:
                return raw_gradient(parameter)
            # Some of torch's functions choose other kernels by the exact class; and what is handed is like `parameter`.
            comes = gradient.device.type != "cpu" or not gradient.is_like(local_of(parameter))
            if comes and not self._closed and not to_clear:
                return self.bring_back(parameter)
            handed = gradient.somebody_has_it()
            if handed is None:
                home = None if self._closed else self
                handed = evicted_gradient(parameter, home, gradient.stride, of_shard=is_sharded(parameter))
                gradient.handed = weakref.ref(handed)
            return shown(handed)

    def bring_back(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """Have an evicted gradient in memory again, for good.

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
            else:
                values = sharded_like(values, parameter)
            rounded = gradient.rounded  # It is the same one, which is rounded in memory where ranks have replicas.
            gradient.begin_to_change()
            return_raw_gradient(parameter, values)
            self._forget(gradient)
            gradient.rounded = rounded
            return values

    def clear(self, parameters: Iterable[torch.nn.Parameter] | None = None) -> None:
        """Forget evicted gradients; nothing is read, unless somebody holds the tensor that stands for one.

        Args:
            parameters: None means all.
        """
        with self._lock:
            known = self._gradients.values() if parameters is None else map(self._of, parameters)
            for gradient in known:
                if gradient is not None and gradient.state is not GradientState.IN_MEMORY:
                    self._fill_handed(gradient)
                    self._forget(gradient)

    def note_kept(self, parameter: torch.nn.Parameter, where: str) -> None:
        """See `GradientHome`."""
        if (gradient := self._of(parameter)) is not None:
            gradient.kept = where

    def set_zero(self, parameter: torch.nn.Parameter) -> None:
        """Let an evicted gradient be zeros; nothing is read or written."""
        with self._lock:
            gradient = self._of(parameter)
            assert gradient is not None
            gradient.check_not_kept()
            self._forget(gradient, to=GradientState.ZERO)
            set_raw_gradient(parameter, None)  # What an arrival that was cut off has left.

    # --- Whole gradients -------------------------------------------------------------------------------------------

    @contextmanager
    def _opened(self, gradient: Gradient, part: PartRecord) -> Iterator[torch.Tensor]:
        """Within it a part of an evicted gradient is there, complete; 1-D, in memory order. It is not changed."""
        if gradient.state is GradientState.LOST:
            gradient.raise_lost()
        try:
            _, there, view = self._take_part(gradient, part)
            assert there or gradient.state is GradientState.ZERO, part.key
            with modes_kept():
                set_grad_mode(False)
                self._complete(gradient, view)
            yield view
        finally:
            self._cache.release(part.key)

    def _take_part(
        self, gradient: Gradient, part: PartRecord, *, follows: bool = False
    ) -> tuple[Lease, bool, torch.Tensor]:
        """As `RecordCache.take`, of `part`. Returns its values too, decoded and 1-D; undefined if the buffer is new."""
        lease, there = self._cache.take(part.key, part.length_bytes, follows=follows)
        view = lease.view(0, part.numel, gradient.dtype)
        if there and gradient.rounds:
            decode_in_place(view)
        return lease, there, view

    def _complete(self, gradient: Gradient, view: torch.Tensor) -> None:
        """Do what was put off."""
        if gradient.state is GradientState.ZERO:
            view.zero_()
        for change in gradient.changes:
            change(view)

    def _whole(self, gradient: Gradient) -> torch.Tensor:
        """Copy an evicted gradient into memory."""
        where = gradient.dtype, gradient.device, gradient.misaligned_bytes
        whole = empty_misaligned(gradient.shape, gradient.stride, *where)
        flat = whole.as_strided((whole.numel(),), (1,))
        for i, part in enumerate(gradient.parts):
            if gradient.state is GradientState.EVICTED:
                for following in gradient.parts[i : i + 2]:
                    self._cache.stage(following.key, following.length_bytes)
            with self._opened(gradient, part) as view:
                flat[part.start : part.stop].copy_(view)
        return whole

    def _fill_handed(self, gradient: Gradient) -> None:
        """Give the tensor that stands for a gradient its values, if somebody has it: the gradient is forgotten next."""
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
        gradient.arrived, gradient.rounded, gradient.norm, gradient.changes, gradient.cause = 0, 0, None, [], None
        gradient.state = to
        if to is GradientState.IN_MEMORY:
            gradient.handed, gradient.kept = None, ""
            if (parameter := gradient.parameter()) is not None:
                clear_gradient_home(parameter)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise SwapError(
                "a gradient that is swapped was used in a forked process; its files and buffers belong to the parent"
            )
