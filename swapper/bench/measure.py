"""Contestants that move the same bytes in turn, measured by the clock and by the kernel's accounts.

Wall time is that of moving: opening, allocating memory and registering it come before. CPU time is user + kernel of the
whole process, I/O threads included. What the kernel does on threads of its own (write-back, interrupts) is in nobody's.
"""

from __future__ import annotations

import os
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from swapper.bench.witness import Operation, Proof, Witness
from swapper.errors import SwapError
from swapper.progress import ProgressBar

__all__ = [
    "Contestant",
    "ContestantFailed",
    "Figure",
    "Spread",
    "Timing",
    "account_bytes",
    "alternate",
    "best_fio",
    "drop_from_cache",
    "time_here",
]


class ContestantFailed(SwapError):
    """A contestant that is another program, or another library, could not run. The others go on without it."""


@dataclass(frozen=True)
class Timing:
    """One timed run, as the contestant saw it.

    Attributes:
        seconds: wall time.
        cpu_s: user + kernel, of all threads of the process.
        account_bytes: read or written, as the kernel charged it to the process (getrusage(2)).
        synced: whether a write was synced within `seconds`.
    """

    seconds: float
    cpu_s: float
    account_bytes: int
    synced: bool = False


class Contestant:
    """One way to move `length_bytes` to or from each of `files`.

    Args:
        name: for the table.
        operation: "read" or "write".
        files: one for each directory, in their order.
        length_bytes: of each file.
    """

    def __init__(self, name: str, operation: Operation, files: Sequence[Path], length_bytes: int) -> None:
        self.name = name
        self.operation: Operation = operation
        self.files = tuple(files)
        self.length_bytes = length_bytes

    @property
    def moved_bytes(self) -> int:
        """In one run."""
        return self.length_bytes * len(self.files)

    def prepare(self) -> None:
        """Before each run, not timed: nothing of the files is in the page cache then."""
        for path in self.files:
            if path.exists():
                drop_from_cache(path)

    def run(self) -> Timing:
        """Move the bytes, in this process if a subclass does not say otherwise.

        Raises:
            ContestantFailed: another program or library could not. Other errors as from the transfers.
        """
        return time_here(self.operation, self.move)

    def move(self) -> bool:
        """Move the bytes of one run; return True if what was written was synced."""
        raise NotImplementedError

    def finish(self) -> None:
        """After each run and its proof, not timed; also after one that failed."""


def drop_from_cache(path: Path) -> None:
    """Write back what is dirty of a file and ask the kernel to forget it. `Witness` sees if it did."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def time_here(operation: Operation, move: Callable[[], bool]) -> Timing:
    """Run `move` in this process.

    Args:
        operation: which of the kernel's accounts is read.
        move: returns whether it synced what it wrote.
    """
    before = resource.getrusage(resource.RUSAGE_SELF)
    start_s = time.perf_counter()
    synced = move()
    seconds = time.perf_counter() - start_s
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Timing(seconds, cpu_s, account_bytes(operation, before, after), synced)


def account_bytes(operation: Operation, before: resource.struct_rusage, after: resource.struct_rusage) -> int:
    """Bytes that the kernel charged between two looks; its unit is 512 bytes."""
    field = "ru_inblock" if operation == "read" else "ru_oublock"
    return (int(getattr(after, field)) - int(getattr(before, field))) * 512


@dataclass(frozen=True)
class Spread:
    """Median and range over the runs."""

    median: float
    min: float
    max: float


@dataclass
class Figure:
    """All runs of one contestant.

    Attributes:
        error: why it could not run; "" if it could.
    """

    name: str
    operation: Operation
    moved_bytes: int
    directories: tuple[str, ...]
    timings: list[Timing] = field(default_factory=list)
    proofs: list[Proof] = field(default_factory=list)
    error: str = ""

    @property
    def refusal(self) -> str:
        """The reason why there is no figure to show; "" if there is one. One run without proof is enough."""
        return self.error or next((proof.reason for proof in self.proofs if proof.reason), "")

    @property
    def bandwidth_bps(self) -> Spread:
        """Bytes per second. Only without `refusal`."""
        return self._spread(lambda timing: self.moved_bytes / timing.seconds)

    @property
    def cpu_s_per_gb(self) -> Spread:
        """CPU seconds per 10^9 bytes. Only without `refusal`."""
        return self._spread(lambda timing: timing.cpu_s / (self.moved_bytes / 1e9))

    def _spread(self, of: Callable[[Timing], float]) -> Spread:
        assert not self.refusal, self.refusal
        values = [of(timing) for timing in self.timings]
        return Spread(statistics.median(values), min(values), max(values))

    @property
    def flag(self) -> str:
        """A warning about the figure, in a few words; "" without one."""
        busy = [proof.other_bytes for proof in self.proofs if proof.other_bytes]
        if not busy:
            return ""
        return f"others moved up to {max(busy) / 1e9:.2f} GB on the drive in {len(busy)} of {len(self.proofs)} runs"

    def as_json(self) -> dict[str, object]:
        """For programs; without numbers where there is a refusal."""
        shown = not self.refusal
        return {
            "contestant": self.name,
            "operation": self.operation,
            "directories": list(self.directories),
            "moved_bytes": self.moved_bytes,
            "refusal": self.refusal,
            "flag": self.flag,
            "bandwidth_bps": asdict(self.bandwidth_bps) if shown else None,
            "cpu_s_per_gb": asdict(self.cpu_s_per_gb) if shown else None,
            "runs": [asdict(timing) for timing in self.timings] if shown else [],
        }


def best_fio(figures: Sequence[Figure], figure: Figure) -> Figure | None:
    """The faster of fio's engines at the operation of `figure`, in the same directories; None without one."""
    wanted = figure.operation, figure.directories
    rivals = [one for one in figures if one.name.startswith("fio ") and (one.operation, one.directories) == wanted]
    return max((one for one in rivals if not one.refusal), key=lambda one: one.bandwidth_bps.median, default=None)


def alternate(contestants: Sequence[Contestant], rounds: int) -> list[Figure]:
    """Let each contestant run once in every round, in another order each time, with a proof for each run.

    A contestant that fails by `ContestantFailed`, or has a run without proof, is not run again. On a terminal a bar
    shows the progress.

    Args:
        contestants: in the order of the result.
        rounds: at least 1.
    """
    directories = [tuple(path.parent for path in contestant.files) for contestant in contestants]
    witnesses = {parents: Witness(parents) for parents in directories}
    figures = [
        Figure(contestant.name, contestant.operation, contestant.moved_bytes, tuple(map(str, parents)))
        for contestant, parents in zip(contestants, directories, strict=True)
    ]
    order = list(range(len(contestants)))
    with ProgressBar(total=rounds * len(order), leave=False, delay=1, disable=not sys.stderr.isatty()) as bar:
        for number in range(rounds):
            random.Random(number).shuffle(order)  # So that nobody always runs after the same other.
            for i in order:
                bar.set_description(f"{figures[i].operation} {figures[i].name}", refresh=False)
                if not figures[i].refusal:
                    _run_once(contestants[i], witnesses[directories[i]], figures[i])
                bar.update()  # Not in a thread, which would be counted as CPU time of what is measured.
    return figures


def _run_once(contestant: Contestant, witness: Witness, figure: Figure) -> None:
    operation, files = contestant.operation, contestant.files
    try:
        contestant.prepare()
        witness.begin(operation, [path for path in files if path.exists()])
        timing = contestant.run()
        proof = witness.judge(operation, files, contestant.length_bytes, timing.account_bytes, timing.synced)
        figure.timings.append(timing)
        figure.proofs.append(proof)
    except ContestantFailed as error:
        figure.error = str(error)
    finally:
        contestant.finish()
