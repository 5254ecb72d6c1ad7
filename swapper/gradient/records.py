"""What is known of each gradient that is swapped: its records, where it is, and what is still to be done to it."""

from __future__ import annotations

import bisect
import copy
import enum
import logging
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NoReturn

import torch
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from swapper.errors import ConfigError, SwapError, SwapIOError
from swapper.sizes import PAGE_BYTES, SMALL_BYTES, format_bytes, round_up
from swapper.storage.store import RecordKey
from swapper.tensors.evicted import can_evict_gradient
from swapper.tensors.evicted_gradients import EvictedGradient, raw_gradient
from swapper.tensors.strides import is_dense, same_layout

__all__ = [
    "BUCKETS_AT_ONCE",
    "Change",
    "Gradient",
    "GradientPart",
    "Part",
    "Place",
    "TakenNorm",
    "can_leave",
    "check_room",
    "clamped_to",
    "fitting",
    "gradient_bytes",
    "gradient_pool_bytes",
    "in_order_of_clipping",
    "norm_of",
    "record_bytes",
    "scaled_by",
]

log = logging.getLogger(__name__)

BUCKETS_AT_ONCE = 2
"""Buckets whose gradients the pool must hold in a step: one in use, one arriving."""

GradientPart = tuple[int, torch.nn.Parameter, int, int]
"""What one bucket steps on: the bucket's number, a parameter, and from where to where, in elements in memory order."""


class Place(enum.Enum):
    """Where a gradient is."""

    HERE = enum.auto()
    """In memory, or there is none: `p.grad` says which."""
    AWAY = enum.auto()
    """In its records."""
    ZERO = enum.auto()
    """All zeros. Takes no memory and no record."""
    LOST = enum.auto()
    """Adding to it was cut off. Raises, until it is cleared."""


Change = Callable[[torch.Tensor], object]
"""Changes each element of a tensor in place, whatever its neighbours are."""


def scaled_by(scale: torch.Tensor) -> Change:
    """Multiplies with a scalar, as `torch.nn.utils.clip_grad_norm_` does."""
    return lambda gradient: gradient.mul_(scale.to(gradient.device))


def clamped_to(clip_value: float) -> Change:
    """Clamps, as `torch.nn.utils.clip_grad_value_` does on the CPU."""

    def change(gradient: torch.Tensor) -> None:
        torch._foreach_clamp_min_([gradient], -clip_value)
        torch._foreach_clamp_max_([gradient], clip_value)

    return change


@dataclass(eq=False, slots=True)
class Part:
    """The part of a gradient that one bucket steps on, and its record; in elements in memory order."""

    start: int
    stop: int
    key: RecordKey
    length_bytes: int

    @property
    def numel(self) -> int:
        """Elements."""
        return self.stop - self.start


@dataclass(eq=False, slots=True)
class TakenNorm:
    """The norm of a whole gradient, taken as `foreach=None` takes it, and what its bits depend on besides."""

    value: torch.Tensor
    norm_type: float
    threads: int


@dataclass(eq=False, slots=True)
class Gradient:
    """What is known of the gradient of one parameter.

    Attributes:
        layout: strides of the parameter; a gradient that lies otherwise is not taken.
        parts: in order, without holes.
        stride: as it arrived.
        arrived: micro-batches in it.
        stays: it was in memory before the backward that is going on.
        left: another optimizer takes it when it arrives.
        norm: if it was taken.
        changes: what is yet to be done to its elements, in place, one after the other.
        handed: the tensor that stands for it, if somebody has that.
        why, cause: it is LOST.
    """

    parameter: weakref.ref[torch.nn.Parameter]
    shape: torch.Size
    layout: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    parts: list[Part] = field(default_factory=list)
    place: Place = Place.HERE
    stride: tuple[int, ...] = ()
    arrived: int = 0
    stays: bool = False
    left: bool = False
    norm: TakenNorm | None = None
    changes: list[Change] = field(default_factory=list)
    handed: weakref.ref[EvictedGradient] | None = None
    why: str = ""
    cause: SwapIOError | None = None

    def begin_to_change(self) -> None:
        """It is LOST until that is over: Ctrl-C may strike before."""
        self.place, self.why = Place.LOST, "KeyboardInterrupt"

    def lose(self, error: BaseException) -> None:
        """`error` cut off what was being done to it."""
        self.place, self.why = Place.LOST, f"{type(error).__name__}: {error}"
        # A copy has no traceback, whose frames would keep much alive.
        self.cause = copy.copy(error) if isinstance(error, SwapIOError) else None

    def raise_lost(self) -> NoReturn:
        """Raise that it is LOST."""
        raise SwapError(
            f"a gradient of shape {tuple(self.shape)} was lost when changing it was cut off ({self.why}); call "
            "zero_grad() and repeat the micro-batches"
        ) from self.cause

    @property
    def cuts(self) -> list[tuple[int, int]]:
        """From where to where each part goes."""
        return [(part.start, part.stop) for part in self.parts]

    def part_at(self, start: int) -> Part:
        """The part that element `start` is in."""
        part = self.parts[bisect.bisect_right(self.parts, start, key=attrgetter("start")) - 1]
        assert part.start <= start < part.stop, start
        return part

    def somebody_has_it(self) -> EvictedGradient | None:
        """The tensor that stands for it, if somebody has that."""
        handed = None if self.handed is None else self.handed()
        return handed if isinstance(handed, EvictedGradient) else None

    def can_take(self, fresh: torch.Tensor) -> bool:
        """Whether the records can hold `fresh`, so that it comes back as it was."""
        return (
            type(fresh) is torch.Tensor
            and fresh.layout is torch.strided
            and not fresh.requires_grad
            and fresh.dtype == self.dtype
            and fresh.device == self.device
            and not (fresh.is_conj() or fresh.is_neg())
            and is_dense(fresh)
            and same_layout(fresh, torch.empty_strided(fresh.shape, self.layout, device="meta"))
        )


def gradient_bytes(parts: Iterable[GradientPart]) -> tuple[int, int]:
    """Bytes of all records of the gradients that are taken; and of those of one bucket, the most."""
    of_bucket: dict[int, int] = {}
    for bucket, p, start, stop in parts:
        if can_leave(p):
            of_bucket[bucket] = of_bucket.get(bucket, 0) + record_bytes(p, start, stop)
    return sum(of_bucket.values()), max(of_bucket.values(), default=0)


def gradient_pool_bytes(parts: Iterable[GradientPart], stored: bool) -> int:
    """What the pool must hold of gradients; all of them, unless they are stored."""
    total, of_bucket = gradient_bytes(parts)
    return BUCKETS_AT_ONCE * of_bucket if stored else total


def check_room(parts: Sequence[GradientPart], stored: bool, limit_bytes: int, pool_bytes: int) -> None:
    """Refuse a pool of `pool_bytes` that leaves `limit_bytes` for gradients, if that is too little.

    Raises:
        ConfigError: with the sum.
    """
    needed = gradient_pool_bytes(parts, stored)
    if needed <= limit_bytes:
        return
    why = "all of them, which device: cpu keeps in the pool"
    if stored:
        why = f"{BUCKETS_AT_ONCE} x {format_bytes(gradient_bytes(parts)[1])}: those of a bucket, and of the next"
    raise ConfigError(
        f"pool_bytes: {format_bytes(max(limit_bytes, 0))} are left for gradients, and {format_bytes(needed)} are "
        f"needed ({why}); set pool_bytes to at least {pool_bytes + needed - limit_bytes}"
    )


def fitting(parts: Sequence[GradientPart], known: Container[int], stored: bool, limit_bytes: int) -> list[GradientPart]:
    """Those of `parts` whose gradients are taken. If all are too many, the last not `known` by `id` are not."""
    chosen = [part for part in parts if can_leave(part[1])]
    while chosen and gradient_pool_bytes(chosen, stored) > limit_bytes:
        dropped = next((p for _, p, _, _ in reversed(chosen) if id(p) not in known), chosen[-1][1])
        chosen = [part for part in chosen if part[1] is not dropped]
        log.warning("the pool has no room for the gradient of a parameter that came later: it stays in memory")
    return chosen


def can_leave(p: torch.nn.Parameter) -> bool:
    """Whether the gradient of `p` is taken; else it stays in memory."""
    return p.numel() * p.dtype.itemsize >= SMALL_BYTES and is_dense(p) and can_evict_gradient(p)


def record_bytes(p: torch.nn.Parameter, start: int, stop: int) -> int:
    """Length of the record of that part of the gradient of `p`."""
    return round_up((stop - start) * p.dtype.itemsize, PAGE_BYTES)


def in_order_of_clipping(parameters: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """In the order in which `torch.nn.utils.clip_grad_norm_` takes the norms of their gradients."""
    gradients = [p if (gradient := raw_gradient(p)) is None else gradient for p in parameters]
    like = [torch.empty(0, dtype=gradient.dtype, device=gradient.device) for gradient in gradients]
    groups = _group_tensors_by_device_and_dtype([like], with_indices=True)  # type: ignore[list-item]
    return [parameters[i] for _, indices in groups.values() for i in indices]


def norm_of(gradient: torch.Tensor, norm_type: float, foreach: bool | None) -> torch.Tensor:
    """The norm of one gradient, as `torch.nn.utils.clip_grad_norm_` takes it."""
    if gradient.device.type != "cpu" and foreach is not False:
        foreach_norm: torch.Tensor = torch._foreach_norm([gradient], norm_type)[0]
        return foreach_norm
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, norm_type)
    return norm
