"""What a training run shows: progress, and the table at the end."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

__all__ = ["Bar", "Result", "Traffic", "table"]

_LINES_WITHOUT_TERMINAL = 10


@dataclass(frozen=True)
class Traffic:
    """What swapping has done so far. All sizes in bytes."""

    read: int
    written: int
    wait_s: float
    state: int
    pool: int
    pool_used: int
    pool_peak: int


@dataclass(frozen=True)
class Result:
    """What a run ended with. Times are medians over its steps; `losses` are `float.hex()`, to compare bits."""

    losses: list[str]
    parameters_sha256: str
    step_s: float
    optimizer_step_s: float
    peak_resident_bytes: int
    peak_cuda_bytes: int
    traffic: Traffic | None


class Bar:
    """Progress of `steps` steps: a live bar on a terminal, elsewhere ten plain lines."""

    def __init__(self, console: Console, name: str, steps: int) -> None:
        self._console = console
        self._name = name
        self._steps = steps
        self._every = 1 if console.is_terminal else max(1, steps // _LINES_WITHOUT_TERMINAL)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(name, total=steps, status="")
        self._shown_s = 0.0
        self._read = self._written = 0

    def __enter__(self) -> Bar:
        self._progress.start()
        self._shown_s = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, done: int, loss: float, step_s: float, traffic: Traffic | None) -> None:
        """Show that `done` steps are done, the last of them in `step_s`. Rates are since what was shown before."""
        if done % self._every and done != self._steps:
            return
        now_s = time.perf_counter()
        elapsed_s, self._shown_s = now_s - self._shown_s, now_s
        status = f"loss {loss:.3f}  {step_s * 1e3:.0f} ms"
        if traffic is not None:
            read, written = ((traffic.read - self._read) / elapsed_s, (traffic.written - self._written) / elapsed_s)
            self._read, self._written = traffic.read, traffic.written
            status += f"  {read / 1e9:.2f}/{written / 1e9:.2f} GB/s r/w"
            status += f"  pool {traffic.pool_used / 2**20:.0f}/{traffic.pool / 2**20:.0f} MiB"
        self._progress.update(self._task, completed=done, status=status)
        if not self._console.is_terminal:
            self._console.print(f"{self._name} {done}/{self._steps}  {status}", soft_wrap=True, highlight=False)


def table(results: dict[str, Result]) -> Table:
    """A column for each run of `results`."""
    grid = Table()
    grid.add_column("")
    for name in results:
        grid.add_column(name, justify="right")
    runs = list(results.values())
    grid.add_row("last losses", *(" ".join(f"{float.fromhex(loss):.4f}" for loss in r.losses[-3:]) for r in runs))
    grid.add_row("step, median", *(f"{r.step_s * 1e3:.1f} ms" for r in runs))
    grid.add_row("  of it optimizer.step()", *(f"{r.optimizer_step_s * 1e3:.1f} ms" for r in runs))
    grid.add_row("peak resident memory", *(_mib(r.peak_resident_bytes) for r in runs))
    if any(r.peak_cuda_bytes for r in runs):
        grid.add_row("peak GPU memory", *(_mib(r.peak_cuda_bytes) for r in runs))
    if any(r.traffic for r in runs):
        traffic = [r.traffic for r in runs]
        steps = len(runs[0].losses)
        grid.add_section()
        grid.add_row("optimizer state on disk", *("-" if t is None else _mib(t.state) for t in traffic))
        grid.add_row("read a step", *("-" if t is None else _mib(t.read / steps) for t in traffic))
        grid.add_row("written a step", *("-" if t is None else _mib(t.written / steps) for t in traffic))
        grid.add_row("waited for the drive", *("-" if t is None else f"{t.wait_s:.2f} s" for t in traffic))
        grid.add_row(
            "pool, peak use of size", *("-" if t is None else f"{_mib(t.pool_peak)} of {_mib(t.pool)}" for t in traffic)
        )
    return grid


def _mib(size_bytes: float) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"
