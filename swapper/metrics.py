"""Counters of transfers and waits, profiler ranges, and the timeline. Prints nothing."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from swapper.errors import SwapError

__all__ = ["Metrics", "Moves", "RecordId", "Stats", "Timeline", "TimelineEvent", "moves_of"]

RecordId = tuple[int, str, int]
"""The id of a record, as its key has it: its owner, its kind ("param", "grad" or "optim"), and its number."""


class _Timed(Protocol):
    """A transfer, as the timeline needs it."""

    def done(self) -> bool: ...

    def times_s(self) -> tuple[float, float]: ...


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """One span on a timeline. Times are seconds of `time.perf_counter()`.

    Attributes:
        name: "read" and "write" are transfers of a record, "use" is the time in which code may work with its values;
            "swapper.step" is an optimizer's step; "swapper.wait_read", "swapper.wait_write", "swapper.wait_pool" (for
            room) and "swapper.drain" are waits of the thread that trains; any other is from `Timeline.span`.
        start_s, stop_s: of a transfer, from its first byte to its end.
        record: what was moved or used; None for other spans.
        length_bytes: moved; 0 for what is no transfer.
    """

    name: str
    start_s: float
    stop_s: float
    record: RecordId | None = None
    length_bytes: int = 0


class Timeline:
    """Collects waits, steps, uses of records and all their transfers while it is entered.

        with Timeline() as timeline:
            with timeline.span("forward"):
                loss = model(x)
        timeline.events()

    It is of the whole process: of all threads, models and optimizers. An event takes about 200 bytes. While no
    timeline is entered nothing is collected.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._events: list[TimelineEvent] = []
        self._in_flight: list[tuple[str, RecordId, int, _Timed]] = []
        self._used_since_s: dict[RecordId, float] = {}

    def __enter__(self) -> Timeline:
        """Start to collect.

        Raises:
            SwapError: another one does.
        """
        global _current
        with _switching:
            if _current is not None:
                raise SwapError("a timeline is being collected already; leave that one first")
            _current = self
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Collect no more. Records that are in use count as used until now."""
        global _current
        with _switching:
            _current = None
        for record in list(self._used_since_s):
            self._end_use(record)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Have the time of the block on the timeline, under a name of your own."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self._events.append(TimelineEvent(name, start_s, time.perf_counter()))

    def events(self) -> list[TimelineEvent]:
        """Give the events so far, by start: transfers that are complete, and spans that were left."""
        with self._lock:
            self._collect()
            return sorted(self._events, key=lambda event: event.start_s)

    def _add_transfer(self, operation: str, record: RecordId, length_bytes: int, transfer: _Timed) -> None:
        with self._lock:
            self._collect()  # Kept no longer than needed: a transfer holds its file open.
            self._in_flight.append((operation, record, length_bytes, transfer))

    def _collect(self) -> None:
        in_flight = []
        for item in self._in_flight:
            operation, record, length_bytes, transfer = item
            if transfer.done():
                self._events.append(TimelineEvent(operation, *transfer.times_s(), record, length_bytes))
            else:
                in_flight.append(item)
        self._in_flight = in_flight

    def _begin_use(self, record: RecordId) -> None:
        self._used_since_s.setdefault(record, time.perf_counter())

    def _end_use(self, record: RecordId) -> None:
        start_s = self._used_since_s.pop(record, None)
        if start_s is not None:
            self._events.append(TimelineEvent("use", start_s, time.perf_counter(), record))


_current: Timeline | None = None
_switching = threading.Lock()


@dataclass
class Metrics:
    """Counts the work of one swapper since it was made: see `Stats`."""

    steps: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    reads: int = 0
    writes: int = 0
    hits: int = 0
    wait_read_s: float = 0.0
    wait_write_s: float = 0.0
    step_s: float = 0.0
    masters_reset: int = 0
    segments_native: int = 0
    segments_by_class: int = 0
    late_failures: int = 0

    @contextmanager
    def span(self, name: str, counter: str | None = None) -> Iterator[None]:
        """Time the block under `name`: a profiler range, on the timeline, and added to the float `counter`."""
        start_s = time.perf_counter()
        try:
            with torch.profiler.record_function(name):
                yield
        finally:
            stop_s = time.perf_counter()
            if counter is not None:
                setattr(self, counter, getattr(self, counter) + stop_s - start_s)
            if (timeline := _current) is not None:
                timeline._events.append(TimelineEvent(name, start_s, stop_s))

    def advice_since(self, before: Metrics) -> str:
        """Say what would shorten the steps since `before`, if half of their time was waiting for the drive, else ""."""
        waited_s = self.wait_read_s + self.wait_write_s - before.wait_read_s - before.wait_write_s
        took_s = self.step_s - before.step_s
        if waited_s < 0.5 * took_s or took_s < 0.25:
            return ""
        return (
            f"step() waited for the drive for {100 * waited_s / took_s:.0f} % of its {took_s:.2f} s: a larger "
            "resident_bytes or pool_bytes, a faster drive, or gradient accumulation would shorten it"
        )

    def count_read(self, record: RecordId, length_bytes: int, transfer: _Timed) -> None:
        """`transfer`, which reads `record`, was started."""
        self.reads += 1
        self.bytes_read += length_bytes
        if (timeline := _current) is not None:
            timeline._add_transfer("read", record, length_bytes, transfer)

    def count_write(self, record: RecordId, length_bytes: int, transfer: _Timed) -> None:
        """`transfer`, which writes `record`, was started."""
        self.writes += 1
        self.bytes_written += length_bytes
        if (timeline := _current) is not None:
            timeline._add_transfer("write", record, length_bytes, transfer)

    def begin_use(self, record: RecordId) -> None:
        """From now on code may work with the values of `record`."""
        if (timeline := _current) is not None:
            timeline._begin_use(record)

    def end_use(self, record: RecordId) -> None:
        """No code works with the values of `record` any more. Nothing happens if none did."""
        if (timeline := _current) is not None:
            timeline._end_use(record)


@dataclass(frozen=True)
class Moves:
    """Transfers between memory and the drive. Sizes are bytes, times seconds.

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
    """The work of an `OptimizerSwapper` since it was made. Sizes are bytes, times seconds.

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
        segments_native, segments_by_class: parts of parameters that were stepped by the native core, and by the
            optimizer's own class: all on an accelerator, and all first steps, which make the state.
        late_failures: writes that failed after `step()` had returned, which only a finalizer saw.
        first_writes: transfers of any record in the run directory, be it of state, gradients or parameters, to places
            on the drive that had never been written, which is slower than to write them again.
        gradients: what moved of gradients; zeros if they stay in memory or in the pool.
        encoding: how the state is stored: "exact", or the names of its other encodings, with commas; "packed" also
            where `encoding: exact` has chosen that. `encoding_reason`: why, where it has chosen; else "".
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
    segments_native: int
    segments_by_class: int
    late_failures: int
    first_writes: int = 0
    gradients: Moves = Moves()
    encoding: str = "exact"
    encoding_reason: str = ""


def moves_of(metrics: Metrics) -> Moves:
    """Give the part of `metrics` that counts moves."""
    return Moves(**{field.name: getattr(metrics, field.name) for field in dataclasses.fields(Moves)})
