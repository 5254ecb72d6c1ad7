"""Contestants that move the same bytes in turn, and what the clock and the kernel say of each.

Wall time is that of moving: opening, allocating memory and registering it come before. CPU time is user + kernel of the
whole process, I/O threads included. What the kernel does on threads of its own (write-back, interrupts) is in nobody's.
"""

from __future__ import annotations

import os
import random
import resource
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from swapper.bench.witness import Operation, Proof, Witness
from swapper.errors import SwapError

__all__ = [
    "Contestant",
    "ContestantFailed",
    "Figure",
    "Spread",
    "Timing",
    "account_bytes",
    "alternate",
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


class Contestant(ABC):
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

    @abstractmethod
    def run(self) -> Timing:
        """Move the bytes.

        Raises:
            ContestantFailed: it could not.
        """

    def finish(self) -> None:  # noqa: B027
        """After each run and its proof, not timed; also after one that failed."""


def drop_from_cache(path: Path) -> None:
    """Write back what is dirty of a file and ask the kernel to forget it. Whether it did is for `Witness` to see."""
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
    return Timing(
        seconds=seconds,
        cpu_s=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        account_bytes=account_bytes(operation, before, after),
        synced=synced,
    )


def account_bytes(operation: Operation, before: resource.struct_rusage, after: resource.struct_rusage) -> int:
    """What the kernel charged between two looks; its unit is 512 bytes."""
    if operation == "read":
        return (after.ru_inblock - before.ru_inblock) * 512
    return (after.ru_oublock - before.ru_oublock) * 512


@dataclass(frozen=True)
class Spread:
    """Median and range over the runs."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


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
        """Why there is no figure to show; "" if there is one. One run without proof is enough."""
        return self.error or next((proof.reason for proof in self.proofs if proof.reason), "")

    @property
    def bandwidth_bps(self) -> Spread:
        """Bytes per second. Only without `refusal`."""
        assert not self.refusal, self.refusal
        return Spread.of([self.moved_bytes / timing.seconds for timing in self.timings])

    @property
    def cpu_s_per_gb(self) -> Spread:
        """CPU seconds per 10^9 bytes. Only without `refusal`."""
        assert not self.refusal, self.refusal
        return Spread.of([timing.cpu_s / (self.moved_bytes / 1e9) for timing in self.timings])

    @property
    def flag(self) -> str:
        """What else should be known of the figure, in a few words."""
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


def alternate(
    contestants: Sequence[Contestant], rounds: int, after_run: Callable[[Contestant], None] | None = None
) -> list[Figure]:
    """Let each contestant run once in every round, in another order each time, with a proof for each run.

    A contestant that fails by `ContestantFailed`, or has a run without proof, is not run again.

    Args:
        contestants: in the order of the result.
        rounds: at least 1.
        after_run: called after each run, or instead of it, with what ran.
    """
    directories = [tuple(path.parent for path in contestant.files) for contestant in contestants]
    witnesses = {places: Witness(places) for places in directories}
    figures = [
        Figure(contestant.name, contestant.operation, contestant.moved_bytes, tuple(map(str, places)))
        for contestant, places in zip(contestants, directories, strict=True)
    ]
    order = list(range(len(contestants)))
    for number in range(rounds):
        random.Random(number).shuffle(order)  # So that nobody always runs after the same other.
        for i in order:
            if not figures[i].refusal:
                _run_once(contestants[i], witnesses[directories[i]], figures[i])
            if after_run is not None:
                after_run(contestants[i])
    return figures


def _run_once(contestant: Contestant, witness: Witness, figure: Figure) -> None:
    try:
        contestant.prepare()
        existing = [path for path in contestant.files if path.exists()]
        witness.begin(contestant.operation, existing)
        timing = contestant.run()
        proof = witness.judge(
            contestant.operation, contestant.files, contestant.length_bytes, timing.account_bytes, timing.synced
        )
        figure.timings.append(timing)
        figure.proofs.append(proof)
    except ContestantFailed as error:
        figure.error = str(error)
    finally:
        contestant.finish()
