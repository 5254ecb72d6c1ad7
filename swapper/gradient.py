"""`GradientSwapper`: gradients that go to disk as they arrive, and come back for the step.

A gradient is cut where the optimizer's buckets are: the part of it that one bucket steps on is a record of its own.
When autograd has accumulated a gradient, its parts are added to what arrived in earlier micro-batches, written, and
the memory is freed. What is smaller than 16 KiB stays where it is.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from swapper.buffers import BufferPool
from swapper.evicted import clear_gradient_home, raw_gradient, set_gradient_home, set_raw_gradient
from swapper.metrics import Metrics
from swapper.pipeline import Pipeline
from swapper.store import RecordKey, TensorStore
from swapper.trial import is_dense, same_layout

__all__ = ["SMALL_BYTES", "GradientPart", "GradientSwapper"]

SMALL_BYTES = 16 * 1024
"""Gradients smaller than this never move: the transfer would cost more than the memory."""


class Window(Protocol):
    """What steps buckets in backward, and wants to know of gradients."""

    def count(self, p: torch.nn.Parameter) -> bool:
        """A gradient of `p` has arrived. Returns whether it is the last of the window."""

    def complete(self, p: torch.nn.Parameter) -> None:
        """The whole gradient of `p` is final, and in memory."""


@dataclass(frozen=True, slots=True)
class GradientPart:
    """The part of a gradient that one bucket steps on, in elements in memory order."""

    start: int
    stop: int


@dataclass(eq=False, slots=True)
class _Gradient:
    """What is known of the gradient of one parameter.

    Attributes:
        parts: with the record of each.
        away: it is in the records; else it is in memory, or there is none.
        arrived: micro-batches in it.
        norm: of the whole gradient, as `torch.linalg.vector_norm` has it; None where it was not taken.
    """

    parameter: weakref.ref[torch.nn.Parameter]
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    parts: list[tuple[GradientPart, RecordKey]] = field(default_factory=list)
    away: bool = False
    arrived: int = 0
    norm: torch.Tensor | None = None

    def length_bytes(self, part: GradientPart) -> int:
        return -(-(part.stop - part.start) * self.dtype.itemsize // 4096) * 4096


class GradientSwapper:
    """Keeps the gradients of an optimizer's parameters on disk.

    Args:
        parts: for each parameter, the parts that its gradient is cut into, in order and without holes.
        owner: number of this swapper among those of the process; part of every record's key.
        accumulation_steps: micro-batches before a step; norms are taken in the last.
        pool, store: where buffers come from and records go.
    """

    def __init__(
        self,
        parts: Iterable[tuple[torch.nn.Parameter, Sequence[GradientPart]]],
        owner: int,
        accumulation_steps: int,
        pool: BufferPool,
        store: TensorStore,
    ) -> None:
        self.metrics = Metrics()
        self._store = store
        self._pipeline = Pipeline(pool, store, self.metrics)
        self._accumulation_steps = accumulation_steps
        self._lock = threading.RLock()
        self._gradients: dict[int, _Gradient] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._scale: torch.Tensor | None = None
        self._window: Window | None = None
        self._closed = False
        number = 0
        sizes: dict[RecordKey, int] = {}
        for parameter, cuts in parts:
            if parameter.numel() * parameter.dtype.itemsize < SMALL_BYTES or not is_dense(parameter):
                continue
            gradient = _Gradient(weakref.ref(parameter), parameter.shape, parameter.stride(), parameter.dtype)
            for part in cuts:
                key = RecordKey(owner, "grad", number)
                number += 1
                gradient.parts.append((part, key))
                sizes[key] = gradient.length_bytes(part)
            self._gradients[id(parameter)] = gradient
            self._watch(parameter)
        self.largest_bytes = max(sizes.values(), default=0)
        store.plan(sizes)

    def share_pool(self, read_ahead_bytes: int) -> None:
        """Others need the pool too: read at most `read_ahead_bytes` ahead."""
        self._pipeline.read_ahead_bytes = read_ahead_bytes

    def deliver_to(self, window: Window) -> None:
        """From now on the last gradient of a window stays in memory, whole, and `window` is told of it."""
        self._window = window

    def watches(self, parameter: torch.nn.Parameter) -> bool:
        """Whether the gradients of `parameter` are looked at when they arrive."""
        return id(parameter) in self._gradients

    def has(self, parameter: torch.nn.Parameter) -> bool:
        """Whether there is a gradient, in memory or away."""
        gradient = self._gradients.get(id(parameter))
        return (gradient is not None and gradient.away) or raw_gradient(parameter) is not None

    def is_away(self, parameter: torch.nn.Parameter) -> bool:
        """Whether the gradient is on disk."""
        gradient = self._gradients.get(id(parameter))
        return gradient is not None and gradient.away

    def stage(self, parameter: torch.nn.Parameter, start: int) -> bool:
        """Start reading the part that starts at `start`, if there is room. False if there is none."""
        gradient = self._gradients.get(id(parameter))
        if gradient is None or not gradient.away:
            return True
        part, key = self._part(gradient, start)
        return self._pipeline.stage(key, gradient.length_bytes(part))

    @contextmanager
    def taken(self, parameter: torch.nn.Parameter, start: int) -> Iterator[torch.Tensor]:
        """Within it the part of an away gradient that starts at `start` is there: 1-D, in memory order, scaled."""
        gradient = self._gradients[id(parameter)]
        part, key = self._part(gradient, start)
        lease, there = self._pipeline.take(key, gradient.length_bytes(part))
        assert there, key
        try:
            view = lease.view(0, part.stop - part.start, gradient.dtype)
            if self._scale is not None:
                view.mul_(self._scale)
            yield view
        finally:
            self._pipeline.give_back(key)

    def clear(self, parameters: Iterable[torch.nn.Parameter] | None = None) -> None:
        """Forget gradients that are away, without reading them; what `zero_grad` does to those in memory.

        Args:
            parameters: None means all.
        """
        with self._lock:
            wanted = None if parameters is None else {id(p) for p in parameters}
            for number, gradient in self._gradients.items():
                if gradient.away and (wanted is None or number in wanted):
                    self._forget(gradient)
            if not any(gradient.away for gradient in self._gradients.values()):
                self._scale = None

    def clip_grad_norm_(
        self, parameters: Iterable[torch.nn.Parameter], max_norm: float, norm_type: float, error_if_nonfinite: bool
    ) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_`, bit for bit, without having all gradients in memory at once.

        Norms that were not taken when the last micro-batch arrived are taken now, one gradient at a time. The scaling
        is done when a gradient is used.
        """
        present = [p for p in parameters if self.has(p)]
        norms = [self._norm(p, norm_type) for p in present]
        if not norms:
            return torch.tensor(0.0)
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        if error_if_nonfinite and torch.logical_or(total.isnan(), total.isinf()):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
                "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
                "`error_if_nonfinite=False`"
            )
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for p in present:
            if not self.is_away(p):
                in_memory = raw_gradient(p)
                assert in_memory is not None
                in_memory.mul_(scale)
        if any(self.is_away(p) for p in present):
            with self._lock:
                for p in present:
                    if self.is_away(p):
                        self._gradients[id(p)].norm = None
                if self._scale is None:
                    self._scale = scale
                else:  # Clipped twice: the first has to be done before the second's factor counts.
                    self._apply_scale()
                    self._scale = scale
        return total

    def bring_back(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """Have a gradient that is away in memory again: what reading `p.grad` does."""
        with self._lock:
            gradient = self._gradients.get(id(parameter))
            if gradient is None or not gradient.away:
                return raw_gradient(parameter)
            whole = torch.empty_strided(gradient.shape, gradient.stride, dtype=gradient.dtype)
            self._copy_out(parameter, gradient, whole)
            self._forget(gradient)
            set_raw_gradient(parameter, whole)
            return whole

    def drain(self) -> None:
        """Wait until all gradients that are away are on disk."""
        self._pipeline.drain()

    def close(self) -> None:
        """Forget everything; gradients that are away are gone."""
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        for gradient in self._gradients.values():
            parameter = gradient.parameter()
            if parameter is not None:
                clear_gradient_home(parameter)
            for _, key in gradient.parts:
                self._pipeline.forget(key)

    # --- Arrival ---------------------------------------------------------------------------------------------------

    def _watch(self, parameter: torch.nn.Parameter) -> None:
        self_ref = weakref.ref(self)

        def arrived(p: torch.Tensor) -> None:
            swapper = self_ref()
            if swapper is not None and not swapper._closed:
                assert isinstance(p, torch.nn.Parameter)
                swapper._on_arrival(p)

        self._hooks.append(parameter.register_post_accumulate_grad_hook(arrived))  # type: ignore[no-untyped-call]

    def _on_arrival(self, p: torch.nn.Parameter) -> None:
        if raw_gradient(p) is None:
            return
        if self._window is None or not self._window.count(p):
            self._send_away(p)
        else:
            self._complete(p)
            self._window.complete(p)

    def _complete(self, p: torch.nn.Parameter) -> None:
        """Add what came before, which is away, to the gradient that is in memory."""
        with self._lock, torch.no_grad():
            gradient, fresh = self._gradients[id(p)], raw_gradient(p)
            assert fresh is not None
            if not gradient.away:
                return
            if fresh.layout is not torch.strided or fresh.dtype != gradient.dtype or not _has(fresh, gradient.stride):
                earlier = torch.empty_strided(gradient.shape, gradient.stride, dtype=gradient.dtype)
                self._copy_out(p, gradient, earlier)
                self._forget(gradient)
                set_raw_gradient(p, earlier + fresh)
                return
            flat = fresh.as_strided((fresh.numel(),), (1,))
            for part, _ in gradient.parts:
                with self.taken(p, part.start) as view:
                    flat[part.start : part.stop].add_(view)
            self._forget(gradient)

    def _send_away(self, p: torch.nn.Parameter) -> None:
        with self._lock, torch.no_grad():
            gradient, fresh = self._gradients[id(p)], raw_gradient(p)
            assert fresh is not None
            if fresh.layout is not torch.strided or fresh.dtype != gradient.dtype or not _has(fresh, gradient.stride):
                self._complete(p)  # What came before has to be added to what cannot be moved.
                return
            if gradient.away and self._scale is not None:
                self._apply_scale()
            flat = fresh.as_strided((fresh.numel(),), (1,))
            gradient.arrived += 1
            last = gradient.arrived % self._accumulation_steps == 0
            for part, key in gradient.parts:
                length = gradient.length_bytes(part)
                lease, there = self._pipeline.take(key, length)
                view = lease.view(0, part.stop - part.start, gradient.dtype)
                piece = flat[part.start : part.stop]
                if there and gradient.away:
                    view.add_(piece)
                    if last:
                        piece.copy_(view)
                else:
                    view.copy_(piece)
                self._pipeline.put(key, length)
            gradient.norm = _norm(fresh, 2.0) if last else None
            gradient.away = True
            set_raw_gradient(p, None)
            set_gradient_home(p, self)

    # --- Whole gradients -------------------------------------------------------------------------------------------

    def _norm(self, p: torch.nn.Parameter, norm_type: float) -> torch.Tensor:
        gradient = self._gradients.get(id(p))
        if gradient is None or not gradient.away:
            in_memory = raw_gradient(p)
            assert in_memory is not None
            return _norm(in_memory, norm_type)
        if gradient.norm is not None and norm_type == 2.0 and self._scale is None:
            return gradient.norm
        whole = torch.empty_strided(gradient.shape, gradient.stride, dtype=gradient.dtype)
        self._copy_out(p, gradient, whole)
        return _norm(whole, norm_type)

    def _copy_out(self, p: torch.nn.Parameter, gradient: _Gradient, whole: torch.Tensor) -> None:
        flat = whole.as_strided((whole.numel(),), (1,))
        for part, _ in gradient.parts:
            with self.taken(p, part.start) as view:
                flat[part.start : part.stop].copy_(view)

    def _apply_scale(self) -> None:
        """Do now what was put off until use, to all gradients that are away."""
        assert self._scale is not None
        for gradient in self._gradients.values():
            parameter = gradient.parameter()
            if not gradient.away or parameter is None:
                continue
            for part, key in gradient.parts:
                length = gradient.length_bytes(part)
                lease, _ = self._pipeline.take(key, length)
                lease.view(0, part.stop - part.start, gradient.dtype).mul_(self._scale)
                self._pipeline.put(key, length)
        self._scale = None

    def _forget(self, gradient: _Gradient) -> None:
        for _, key in gradient.parts:
            self._pipeline.discard(key)
        gradient.away, gradient.arrived, gradient.norm = False, 0, None
        parameter = gradient.parameter()
        if parameter is not None:
            clear_gradient_home(parameter)

    def _part(self, gradient: _Gradient, start: int) -> tuple[GradientPart, RecordKey]:
        return next((part, key) for part, key in gradient.parts if part.start <= start < part.stop)


def _norm(gradient: torch.Tensor, norm_type: float) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, norm_type)
    return norm


def _has(gradient: torch.Tensor, stride: tuple[int, ...]) -> bool:
    """Whether a gradient lies in memory as its parameter does."""
    return is_dense(gradient) and same_layout(gradient, torch.empty_strided(gradient.shape, stride, device="meta"))
