"""Counters of what moved and what waited, profiler ranges, and trace events. Prints nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

__all__ = ["Metrics", "TraceEvent"]


@dataclass(frozen=True)
class TraceEvent:
    """One span on the timeline. Times are seconds of `time.perf_counter()`."""

    name: str
    start_s: float
    stop_s: float


@dataclass
class Metrics:
    """What one swapper did since it was made. Bytes are those asked of the drive, headers and padding included."""

    steps: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    reads: int = 0
    writes: int = 0
    hits: int = 0
    """Records that were in a pool buffer already when they were asked for."""
    wait_read_s: float = 0.0
    wait_write_s: float = 0.0
    step_s: float = 0.0
    """Time inside `step()`, waits included."""
    masters_reset: int = 0
    """Segments whose master weights were made anew because the user had changed the parameter."""
    late_failures: int = 0
    """Writes that failed after `step()` had returned and were only seen by a finalizer."""
    trace: list[TraceEvent] | None = field(default=None, repr=False)
    """Set to a list to collect events; None (the default) collects nothing."""

    @contextmanager
    def span(self, name: str, counter: str | None = None) -> Iterator[None]:
        """Time the block under `name`: a profiler range, a trace event, and added to the float `counter`."""
        start_s = time.perf_counter()
        try:
            with torch.profiler.record_function(name):
                yield
        finally:
            stop_s = time.perf_counter()
            if counter is not None:
                setattr(self, counter, getattr(self, counter) + stop_s - start_s)
            if self.trace is not None:
                self.trace.append(TraceEvent(name, start_s, stop_s))
