"""A gradient that is swapped: its records, its state, and the changes that are still to be made to it."""

from __future__ import annotations

import bisect
import copy
import enum
import logging
import weakref
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NoReturn

import torch

from swapper.errors import ConfigError, SwapError, SwapIOError
from swapper.gradient.clipping import Change, TakenNorm
from swapper.sizes import PAGE_BYTES, SMALL_BYTES, round_up
from swapper.storage.budget import GradientNeeds
from swapper.storage.store import RecordKey
from swapper.tensors.evicted import can_evict_gradient
from swapper.tensors.evicted_gradients import EvictedGradient
from swapper.tensors.sharded import local_of
from swapper.tensors.strides import is_dense, same_layout

__all__ = [
    "Gradient",
    "GradientPart",
    "GradientState",
    "PartRecord",
    "can_leave",
    "can_round",
    "file_bytes",
    "fitting",
    "needs_of",
    "record_bytes",
]

log = logging.getLogger(__name__)

GradientPart = tuple[int, torch.nn.Parameter, int, int]
"""A slice that one bucket steps on: number of the bucket, parameter, start and stop in elements in memory order."""


class GradientState(enum.Enum):
    """The state of a gradient."""

    IN_MEMORY = enum.auto()
    """It is `p.grad`, or there is none."""
    EVICTED = enum.auto()
    """In its records, each in a buffer of the pool or on the drive."""
    ZERO = enum.auto()
    """All zeros. Takes no memory and no record."""
    LOST = enum.auto()
    """Adding to it was cut off. Raises, until it is cleared."""


@dataclass(eq=False, slots=True)
class PartRecord:
    """The part of a gradient that one bucket steps on, and its record; in elements in memory order.

    Its buffer has `length_bytes`. What is stored of it has `file_bytes`: half, if it is rounded.
    """

    start: int
    stop: int
    key: RecordKey
    length_bytes: int
    file_bytes: int

    @property
    def numel(self) -> int:
        """Elements."""
        return self.stop - self.start


@dataclass(eq=False, slots=True)
class Gradient:
    """The gradient of one parameter; of a DTensor, its local tensor.

    Attributes:
        number: of this one, to know it by in the order of arrival.
        layout: strides of the parameter; a gradient that lies otherwise is not taken.
        parts: in order, without holes.
        stride: as it arrived.
        misaligned_bytes: of the address at which it arrived: see [Note: alignment] in `alignment`.
        rounds: it is rounded to bf16 on its way to the drive. See [Note: rounded gradients] in `rounding`.
        rounded: how often that was since it was begun, and in which step, by its number: another begins at 0 again.
        arrived: micro-batches in it.
        stays: it was in memory before the backward that is going on.
        begun: identity and version of what was in memory then; None if some of it arrives.
        edited: it was evicted then, and had been changed since it was rounded.
        left: another optimizer takes it when it arrives.
        norm: if it was taken.
        changes: what is yet to be done to its elements, in place, one after the other.
        handed: the tensor that stands for it, if somebody has that.
        kept: the name of the state that has a copy of it, though the optimizer's class has kept the tensor itself.
        why, cause: it is LOST.
    """

    number: int
    parameter: weakref.ref[torch.nn.Parameter]
    shape: torch.Size
    layout: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    rounds: bool = False
    rounded: int = 0
    rounded_in: int = 0
    parts: list[PartRecord] = field(default_factory=list)
    state: GradientState = GradientState.IN_MEMORY
    stride: tuple[int, ...] = ()
    misaligned_bytes: int = 0
    arrived: int = 0
    stays: bool = False
    begun: tuple[int, int] | None = None
    edited: bool = False
    left: bool = False
    norm: TakenNorm | None = None
    changes: list[Change] = field(default_factory=list)
    handed: weakref.ref[EvictedGradient] | None = None
    kept: str = ""
    why: str = ""
    cause: SwapIOError | None = None

    def note_begun(self, there: torch.Tensor | None) -> None:
        """The next micro-batch arrives, and `there` is in memory."""
        if self.state is GradientState.IN_MEMORY and there is None:
            self.rounded = 0

    def count_rounding(self, step: int) -> None:
        """It is about to be rounded in the step of this number."""
        self.rounded, self.rounded_in = (self.rounded if self.rounded_in == step else 0) + 1, step

    def begin_to_change(self) -> None:
        """It is LOST until that is over: Ctrl-C may strike before."""
        self.state, self.why = GradientState.LOST, "KeyboardInterrupt"

    def mark_lost(self, error: BaseException) -> None:
        """`error` cut off what was being done to it."""
        self.state, self.why = GradientState.LOST, f"{type(error).__name__}: {error}"
        # A copy has no traceback, whose frames would keep much alive.
        self.cause = copy.copy(error) if isinstance(error, SwapIOError) else None

    def raise_lost(self) -> NoReturn:
        """Raise that it is LOST."""
        raise SwapError(
            f"a gradient of shape {tuple(self.shape)} was lost when changing it was cut off ({self.why}); call "
            "zero_grad() and repeat the micro-batches"
        ) from self.cause

    def check_not_kept(self) -> None:
        """Raise `ConfigError` if something is about to be written to a tensor that the state would have, too."""
        if self.kept:
            raise ConfigError(
                f"the optimizer has kept a gradient itself in its state{self.kept}, and the next one is to be added up "
                "in the same tensor, while swapped state has a copy; call zero_grad() with set_to_none=True, its "
                "default, or have the class clone the gradient"
            )

    @property
    def cuts(self) -> list[tuple[int, int]]:
        """From where to where each part goes."""
        return [(part.start, part.stop) for part in self.parts]

    def part_at(self, start: int) -> PartRecord:
        """The part that element `start` is in."""
        part = self.parts[bisect.bisect_right(self.parts, start, key=attrgetter("start")) - 1]
        assert part.start <= start < part.stop, start
        return part

    def somebody_has_it(self) -> EvictedGradient | None:
        """The tensor that stands for it, if somebody has that."""
        handed = None if self.handed is None else self.handed()
        return handed if isinstance(handed, EvictedGradient) else None

    def is_like(self, parameter: torch.Tensor) -> bool:
        """True unless `parameter`, here a local tensor, was given another dtype or shape since."""
        return (parameter.dtype, parameter.shape) == (self.dtype, self.shape)

    def can_take(self, fresh: torch.Tensor) -> bool:
        """Return True if the records can hold `fresh`, so that it comes back as it was."""
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


def needs_of(parts: Iterable[GradientPart], stored: bool) -> GradientNeeds:
    """The needs of the gradients that are taken of `parts`."""
    of_bucket: dict[int, int] = {}
    for bucket, p, start, stop in parts:
        if can_leave(p):
            of_bucket[bucket] = of_bucket.get(bucket, 0) + record_bytes(p, start, stop)
    return GradientNeeds(sum(of_bucket.values()), max(of_bucket.values(), default=0), stored)


def fitting(parts: Sequence[GradientPart], known: Container[int], stored: bool, limit_bytes: int) -> list[GradientPart]:
    """Return those of `parts` whose gradients are taken. If all are too many, the last not `known` by `id` are not."""
    chosen = [part for part in parts if can_leave(part[1])]
    while chosen and needs_of(chosen, stored).pool_bytes > limit_bytes:
        dropped = next((p for _, p, _, _ in reversed(chosen) if id(p) not in known), chosen[-1][1])
        chosen = [part for part in chosen if part[1] is not dropped]
        log.warning("the pool has no room for the gradient of a parameter that came later: it stays in memory")
    return chosen


def can_leave(p: torch.nn.Parameter) -> bool:
    """Return True if the gradient of `p` is taken; else it stays in memory."""
    local = local_of(p)
    return local.numel() * p.dtype.itemsize >= SMALL_BYTES and is_dense(local) and can_evict_gradient(p)


def record_bytes(p: torch.nn.Parameter, start: int, stop: int) -> int:
    """Length of the buffer of that part of the gradient of `p`."""
    return round_up((stop - start) * p.dtype.itemsize, PAGE_BYTES)


def can_round(p: torch.nn.Parameter) -> bool:
    """Return True if the gradient of `p` is rounded where gradients are."""
    return p.dtype is torch.float32


def file_bytes(p: torch.nn.Parameter, start: int, stop: int, rounds: bool) -> int:
    """Length of the file of that part of the gradient of `p`, if those that can be are rounded, or not."""
    itemsize = torch.bfloat16.itemsize if rounds and can_round(p) else p.dtype.itemsize
    return round_up((stop - start) * itemsize, PAGE_BYTES)
