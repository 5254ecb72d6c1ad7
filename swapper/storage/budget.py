"""`PoolBudget`: what a run needs of its pool. Construction, `swapper.check` and their errors read this one sum.

[Note: the sum]

    pool_bytes >=   kept        of each optimizer: records that stay in the pool, scratch, gradients that stay there
                  + moving      of each optimizer: 3 of its largest record (arriving, in use, leaving), and the
                                gradients of 2 buckets (in use, arriving)
                  + parameters  2 of the largest record (in use, arriving), or all that one module and those it runs in
                                use at once; 1 more where a step is in backward; records that stay

Optimizers step one after another, so of "moving" only the largest counts, unless parameters are on the drive: those
take all that no optimizer needs, and keep it between the steps. `PoolBudget.shares` is what is beyond the sum.

[Note: scans] An optimizer uses its records in one order, once a step, round and round. For such a scan the best set to
keep is any fixed one (the record used last is needed latest, so least-recently-used would always evict the wrong one),
and the best order to read ahead in is the order of use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swapper.errors import ConfigError
from swapper.sizes import format_bytes

__all__ = [
    "BUCKETS_AT_ONCE",
    "IN_FLIGHT",
    "WHOLE",
    "GradientNeeds",
    "OptimizerNeeds",
    "ParameterNeeds",
    "PoolBudget",
    "Schedule",
    "Shares",
    "plan_schedule",
]

WHOLE = 1 << 40
"""Share of room for one record of parameters that the longest takes. So fine that rounding down hides no byte."""

BUCKETS_AT_ONCE = 2
"""Buckets whose gradients the pool must hold in a step: one in use, one arriving."""

IN_FLIGHT = 3
"""Records that the pool must hold at once: one arriving, one in use, one leaving."""

READ_AHEAD = 6
"""Records that are worth having ahead beside those: a drive that also writes gives them in bursts. Measured with
everything on disk: the step waited for every second record with none, and for few with 6."""


@dataclass(frozen=True)
class Schedule:
    """The records of one optimizer that stay in the pool, and what all of them need of it. See [Note: scans].

    Attributes:
        sizes_bytes: size of each record, in order of use; 0 for what never moves.
        resident: positions whose record stays in the pool: written through, never read again.
        pool_bytes: what the pool must hold: `held_bytes` and three of the largest.
        held_bytes: the part of it that is never free for others: the resident records and the scratch.
        largest_bytes: size of the largest record that is not resident.
    """

    sizes_bytes: tuple[int, ...]
    resident: frozenset[int]
    pool_bytes: int
    held_bytes: int
    largest_bytes: int

    @property
    def moving_bytes(self) -> int:
        """Length of all records that are read in each scan."""
        return sum(size for position, size in enumerate(self.sizes_bytes) if position not in self.resident)

    def checked(self, pool_bytes: int, others_bytes: int = 0) -> Schedule:
        """Refuse a pool that is too small.

        Args:
            pool_bytes: the part of the pool that this may count on.
            others_bytes: the part that others need besides, for the error.

        Returns:
            This.

        Raises:
            ConfigError: the pool cannot hold the sum, which the message shows.
        """
        if self.pool_bytes <= pool_bytes:
            return self
        kept_bytes = sum(self.sizes_bytes[position] for position in self.resident)
        kept = f" + {format_bytes(kept_bytes)} kept resident" if kept_bytes else ""
        raise ConfigError(
            f"pool_bytes: {format_bytes(pool_bytes)} is too small. One step needs "
            f"{IN_FLIGHT} x {format_bytes(self.largest_bytes)} (the largest segment: one arriving, one in use, one "
            f"leaving) + {format_bytes(self.held_bytes - kept_bytes)} of scratch{kept} = "
            f"{format_bytes(self.pool_bytes)}. "
            f"Set pool_bytes to at least {self.pool_bytes + others_bytes}; a smaller bucket_bytes helps too, unless "
            "the optimizer steps whole parameters"
        )


def plan_schedule(sizes_bytes: Sequence[int], resident_bytes: int, work_bytes: int) -> Schedule:
    """Choose what stays.

    Args:
        sizes_bytes: size of each record in order of use, a multiple of the pool's granularity.
        resident_bytes: at most this much is kept in the pool; 0 keeps nothing.
        work_bytes: scratch that is held for the whole step.
    """
    resident: set[int] = set()
    kept_bytes = 0
    for position, size in enumerate(sizes_bytes):
        if size and kept_bytes + size <= resident_bytes:
            resident.add(position)
            kept_bytes += size
    largest = max((size for i, size in enumerate(sizes_bytes) if i not in resident), default=0)
    needed = IN_FLIGHT * largest + work_bytes + kept_bytes
    return Schedule(tuple(sizes_bytes), frozenset(resident), needed, work_bytes + kept_bytes, largest)


@dataclass(frozen=True)
class GradientNeeds:
    """The needs of the gradients of one optimizer.

    Attributes:
        total_bytes: of all their records.
        bucket_bytes: of those of one bucket, the most.
        stored: they go to the drive; else all of them stay in the pool.
    """

    total_bytes: int
    bucket_bytes: int
    stored: bool

    @property
    def pool_bytes(self) -> int:
        """The least of the pool that will do."""
        return BUCKETS_AT_ONCE * self.bucket_bytes if self.stored else self.total_bytes

    def check(self, limit_bytes: int, others_bytes: int) -> None:
        """Refuse a pool that leaves `limit_bytes` for gradients, if that is too little; others need `others_bytes`.

        Raises:
            ConfigError: with the sum.
        """
        if self.pool_bytes <= limit_bytes:
            return
        why = "all of them, which device: cpu keeps in the pool"
        if self.stored:
            why = f"{BUCKETS_AT_ONCE} x {format_bytes(self.bucket_bytes)}: those of a bucket, and of the next"
        raise ConfigError(
            f"pool_bytes: {format_bytes(max(limit_bytes, 0))} are left for gradients, and "
            f"{format_bytes(self.pool_bytes)} are needed ({why}); set pool_bytes to at least "
            f"{self.pool_bytes + others_bytes}"
        )


@dataclass(frozen=True)
class OptimizerNeeds:
    """The needs of one optimizer, of a pool that it shares; None for what is in no such pool."""

    state: Schedule | None
    gradients: GradientNeeds | None

    @property
    def gradient_bytes(self) -> int:
        """The least of the pool that its gradients can do with."""
        return 0 if self.gradients is None else self.gradients.pool_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes that are never free for others."""
        kept_bytes = 0 if self.state is None else self.state.held_bytes
        return kept_bytes + (0 if self.gradients is None or self.gradients.stored else self.gradients.pool_bytes)

    @property
    def needed_bytes(self) -> int:
        """All of it; beyond what is kept, only in a step."""
        return (0 if self.state is None else self.state.pool_bytes) + self.gradient_bytes


@dataclass(frozen=True)
class ParameterNeeds:
    """The needs of the parameters of one model.

    Attributes:
        least_bytes, why: the least of the pool that will do, and the sum in words.
        total_bytes: of all their records.
    """

    least_bytes: int
    why: str
    total_bytes: int


@dataclass(frozen=True)
class Shares:
    """The most of the pool that each may take, beside what is kept. Bytes.

    Attributes:
        parameters: all records of parameters.
        state: records of each optimizer that are prefetched beside the one in use.
        spare: for the gradients of each optimizer, beside the least that they need.
    """

    parameters: int
    state: int
    spare: int


@dataclass(frozen=True)
class PoolBudget:
    """The sum, for optimizers and parameters that are set up together. See [Note: the sum].

    Attributes:
        pool_bytes: the pool.
        optimizers: the needs of each, in order.
        parameters: on the drive; None if they stay in memory.
        others_bytes: kept by optimizers that shared the pool before.
        lost_bytes: memory that views of the user keep from the pool for good; parameters have to do without it.
        bucket_bytes: as the config chose it for this pool; a larger pool would have larger buckets, and need more. None
            if they stay as they are.
    """

    pool_bytes: int
    optimizers: Sequence[OptimizerNeeds]
    parameters: ParameterNeeds | None = None
    others_bytes: int = 0
    lost_bytes: int = 0
    bucket_bytes: int | None = None

    @property
    def needed_bytes(self) -> int:
        """The least pool that would do for all of it."""
        kept_bytes = self.others_bytes + sum(needs.kept_bytes for needs in self.optimizers)
        moving = [needs.needed_bytes - needs.kept_bytes for needs in self.optimizers]
        if self.parameters is None:
            return kept_bytes + max(moving, default=0)
        return kept_bytes + sum(moving) + self.lost_bytes + self.parameters.least_bytes

    def check(self, *, as_a_whole: bool = False) -> None:
        """Refuse a pool that is too small.

        Args:
            as_a_whole: say of parameters that have no room what all need together, and not what is left for them.

        Raises:
            ConfigError: with the first part that has no room, and the `pool_bytes` that would do for all.
        """
        try:
            self._check(as_a_whole)
        except ConfigError as error:
            if self.bucket_bytes is None:
                raise
            raise ConfigError(
                f"{error}. Set bucket_bytes to {self.bucket_bytes} too: else it grows with the pool"
            ) from None

    def _check(self, as_a_whole: bool) -> None:
        needed_bytes = self.needed_bytes
        free_bytes = self.pool_bytes - self.others_bytes
        for needs in self.optimizers:
            state_bytes = 0 if needs.state is None else needs.state.pool_bytes
            if needs.state is not None:
                needs.state.checked(free_bytes, needed_bytes - state_bytes)
            if needs.gradients is not None:
                needs.gradients.check(free_bytes - state_bytes, needed_bytes - needs.gradient_bytes)
            free_bytes -= needs.kept_bytes
        if self.parameters is None or self.parameters.least_bytes <= self._left_bytes:
            return
        if as_a_whole:
            raise ConfigError(
                f"pool_bytes: {format_bytes(self.pool_bytes)} are too few; optimizer state, gradients and parameters "
                f"together need {format_bytes(needed_bytes)}. Set pool_bytes to at least {needed_bytes}"
            )
        raise ConfigError(
            f"pool_bytes: {format_bytes(max(self._left_bytes, 0))} are left for parameters, and {self.parameters.why} "
            f"are needed; set pool_bytes to at least {needed_bytes}"
        )

    @property
    def _left_bytes(self) -> int:
        """The bytes that optimizers leave for new parameters. Parameters of before do not count."""
        return self.pool_bytes - self.lost_bytes - sum(needs.needed_bytes for needs in self.optimizers)

    def shares(self) -> Shares:
        """Share out the room beyond the sum."""
        left_bytes = self._left_bytes
        parameter_bytes = 0
        if self.parameters is not None:
            # Parameters leave what makes a step fast, reading ahead, as far as they can do without.
            leave_bytes = min(left_bytes // 2, self._ahead_bytes)
            parameter_bytes = max(self.parameters.least_bytes, left_bytes - leave_bytes)
            left_bytes -= min(parameter_bytes, self.parameters.total_bytes)
        # State and gradients each get half of the rest. Of the records in flight one is in use, and not prefetched.
        return Shares(parameter_bytes, (IN_FLIGHT - 1) * self._record_bytes + left_bytes // 2, left_bytes // 2)

    def pool_bytes_for(self, parameter_bytes: int) -> int:
        """The least pool of which `shares` gives parameters `parameter_bytes`, if that is more than they have."""
        wanted_bytes = parameter_bytes + min(parameter_bytes, self._ahead_bytes)
        return self.pool_bytes - self._left_bytes + wanted_bytes

    @property
    def of_buckets(self) -> str:
        """The setting to change beside a larger `pool_bytes`: words for an error, after the number."""
        if self.bucket_bytes is None:
            return ""
        return f" (and bucket_bytes to {self.bucket_bytes}: else it grows with the pool)"

    @property
    def _record_bytes(self) -> int:
        return max((each.state.largest_bytes for each in self.optimizers if each.state is not None), default=0)

    @property
    def _ahead_bytes(self) -> int:
        """Of records and gradients that are worth reading ahead."""
        gradient_bytes = max((each.gradient_bytes // IN_FLIGHT for each in self.optimizers), default=0)
        return READ_AHEAD * (self._record_bytes + gradient_bytes)
