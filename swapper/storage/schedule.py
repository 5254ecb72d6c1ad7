"""The records to stage, keep and evict, and when: decided from the order of use, the sizes and the budget alone.

An optimizer uses its records in one order, once a step, round and round. For such a scan the best set to keep is any
fixed one (the record used last is needed latest, so least-recently-used would always evict the wrong one), and the
best order to read ahead in is the order of use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swapper.errors import ConfigError
from swapper.sizes import format_bytes

__all__ = ["IN_FLIGHT", "READ_AHEAD", "Schedule", "format_bytes", "plan_schedule"]

IN_FLIGHT = 3
"""Records that the pool must hold at once: one arriving, one in use, one leaving."""

READ_AHEAD = 6
"""Records that are worth having ahead beside those: a drive that also writes gives them in bursts. Measured with
everything on disk: the step waited for every second record with none, and for few with 6."""


@dataclass(frozen=True)
class Schedule:
    """The plan for one scan.

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
