"""What users see of the counters: `optimizer.swapper.stats()`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from swapper.metrics import Metrics

__all__ = ["Moves", "Stats", "moves_of"]


@dataclass(frozen=True)
class Moves:
    """What moved between memory and the drive. Sizes are bytes, times seconds.

    Attributes:
        bytes_read, bytes_written: asked of the drive, padding included.
        reads, writes: transfers.
        hits: records that were in memory already when they were asked for.
        wait_read_s, wait_write_s: time that training waited for the drive.
    """

    bytes_read: int = 0
    bytes_written: int = 0
    reads: int = 0
    writes: int = 0
    hits: int = 0
    wait_read_s: float = 0.0
    wait_write_s: float = 0.0


@dataclass(frozen=True)
class Stats:
    """What an `OptimizerSwapper` did since it was made. Sizes are bytes, times seconds.

    Attributes:
        steps: calls of `step()` that were completed.
        bytes_read, bytes_written: of state, asked of the drive, headers and padding included.
        reads, writes: transfers of state.
        hits: records that were in memory already when a step came to them.
        wait_read_s, wait_write_s: time that the training thread waited for the drive, because of state.
        step_s: time inside `step()`, waits included, closures not.
        state_bytes: length of all records now.
        pool_bytes, pool_used_bytes, pool_peak_bytes: limit of the pool; what is leased now; the most ever leased.
        masters_reset: how often the master weights of a parameter were made anew because the user had changed it.
        late_failures: writes whose failure only a finalizer saw.
        first_writes: transfers of any record in the run directory, be it of state, gradients or parameters, to places
            on the drive that had never been written, which is slower than to write them again.
        gradients: what moved of gradients; zeros if they stay in memory or in the pool.
    """

    steps: int
    bytes_read: int
    bytes_written: int
    reads: int
    writes: int
    hits: int
    wait_read_s: float
    wait_write_s: float
    step_s: float
    state_bytes: int
    pool_bytes: int
    pool_used_bytes: int
    pool_peak_bytes: int
    masters_reset: int
    late_failures: int
    first_writes: int = 0
    gradients: Moves = Moves()


def moves_of(metrics: Metrics) -> Moves:
    """What `metrics` has counted of moves."""
    return Moves(**{field.name: getattr(metrics, field.name) for field in dataclasses.fields(Moves)})
