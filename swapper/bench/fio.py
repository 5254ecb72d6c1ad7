"""`fio`, the yardstick, set up so that it does nothing that we do not do.

What its defaults would cost it, and what is done about it:

    memory      buffers of 4 KiB pages, of which a request of 4 MiB has a thousand: huge pages, as ours are, by a
                setting of the C library (glibc 2.35), and buffers that start on one
    first use   the buffers of a read are touched first by the read itself, so that the kernel makes and clears them
                while the clock runs: a mix of 100 % reads and 0 % writes fills them before
    stamps      it changes every buffer before each write (scramble_buffers) and takes the time of each request: off
    registered  io_uring with registered buffers and files, as ours; without, where the kernel refuses

Direct, in the same file, which was written in full before. Several files, and several I/O threads of ours, are one job
with as many requests in flight as all of them together: two jobs would not run side by side, because each fills its
buffers at a time of its own, but each would be timed alone.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swapper.bench.measure import Contestant, ContestantFailed, Timing, account_bytes
from swapper.bench.site import EngineSettings
from swapper.bench.witness import Operation

__all__ = ["ENGINES", "Fio", "FioProgram", "find_fio", "fio_contestants"]

ENGINES = ("libaio", "io_uring")
"""fio's engines that keep many requests in flight from one thread."""

_COMMON = (
    *("--thread", "--direct=1", "--output-format=json", "--overwrite=1", "--fallocate=none", "--invalidate=0"),
    *("--scramble_buffers=0", "--gtod_reduce=1", "--disk_util=0", "--iomem_align=2m"),
)
_REGISTERED = ("--fixedbufs=1", "--registerfiles=1", "--nonvectored=1")
_HUGE_PAGES = "glibc.malloc.hugetlb=1"


@dataclass(frozen=True)
class FioProgram:
    """Its path, and the version that it prints: "fio-3.33"."""

    path: str
    version: str


def find_fio() -> FioProgram | None:
    """The fio on PATH; None if there is none that runs."""
    path = shutil.which("fio")
    if path is None:
        return None
    try:
        ended = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return FioProgram(path, ended.stdout.strip()) if ended.returncode == 0 else None


def fio_contestants(
    program: FioProgram,
    operations: Sequence[Operation],
    files: Sequence[Path],
    length_bytes: int,
    settings: EngineSettings,
) -> list[Contestant]:
    """fio with each of `ENGINES`, for each operation; the arguments are those of `Fio`."""
    return [
        Fio(program, engine, operation, files, length_bytes, settings) for engine in ENGINES for operation in operations
    ]


class Fio(Contestant):
    """One run of fio over existing files, in turn block by block.

    Args:
        program: from `find_fio`.
        engine: one of `ENGINES`.
        operation, files, length_bytes: as for `Contestant`; the length is a multiple of the block.
        settings: of ours; its threads are for each file.
    """

    def __init__(
        self,
        program: FioProgram,
        engine: str,
        operation: Operation,
        files: Sequence[Path],
        length_bytes: int,
        settings: EngineSettings,
    ) -> None:
        super().__init__(f"fio {engine}", operation, files, length_bytes)
        self._program = program
        self._engine = engine
        self._settings = settings
        self._registered = engine == "io_uring"

    def command(self) -> list[str]:
        """The command line of the next run."""
        mode = ("--rw=write",) if self.operation == "write" else ("--rw=rw", "--rwmixread=100")
        depth = self._settings.queue_depth * self._settings.threads * len(self.files)
        # A backslash and a colon have a meaning in a list of names.
        names = [str(path).replace("\\", "\\\\").replace(":", "\\:") for path in self.files]
        return [
            *(self._program.path, *_COMMON, *mode, *(_REGISTERED if self._registered else ())),
            *(f"--ioengine={self._engine}", f"--bs={self._settings.block_bytes}", f"--iodepth={depth}"),
            *(f"--filename={':'.join(names)}", f"--size={self.moved_bytes}", "--name=bench"),
        ]

    def run(self) -> Timing:
        """Raises ContestantFailed with what fio said."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        ended = self._start()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if ended.returncode != 0 and self._registered:
            self._registered = False  # As where RLIMIT_MEMLOCK is less than what is in flight.
            return self.run()
        if ended.returncode != 0:
            lines = (ended.stderr.strip() or ended.stdout.strip() or "it said nothing").splitlines()
            raise ContestantFailed(f"{self.name} failed with exit status {ended.returncode}: {lines[-1]}")
        seconds, cpu_s = self._parse(ended.stdout)
        return Timing(seconds, cpu_s, account_bytes(self.operation, before, after))

    def _start(self) -> subprocess.CompletedProcess[str]:
        tunables = [os.environ.get("GLIBC_TUNABLES", ""), _HUGE_PAGES]
        environment = {**os.environ, "GLIBC_TUNABLES": ":".join(filter(None, tunables))}
        try:
            return subprocess.run(self.command(), env=environment, capture_output=True, text=True)
        except OSError as error:
            raise ContestantFailed(f"{self.name} cannot be started: {error}") from None

    def _parse(self, output: str) -> tuple[float, float]:
        """Wall time and CPU time from what fio printed."""
        try:
            # Warnings may come first.
            jobs: list[dict[str, Any]] = json.loads(output[output.index("{") :])["jobs"]
            moved = sum(int(job[self.operation]["io_bytes"]) for job in jobs)
            milliseconds = max(int(job[self.operation]["runtime"]) for job in jobs)
            errors = [int(job["error"]) for job in jobs if job["error"]]
            cpu_s = sum((job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3 for job in jobs)
        except (ValueError, KeyError, TypeError) as error:
            raise ContestantFailed(f"{self.name} printed what cannot be understood: {error!r}") from None
        if errors:
            raise ContestantFailed(f"{self.name} failed: {os.strerror(errors[0])}")
        if moved != self.moved_bytes:
            raise ContestantFailed(f"{self.name} moved {moved} bytes instead of {self.moved_bytes}")
        if milliseconds == 0:
            raise ContestantFailed(f"{self.name} was done in less than a millisecond, the unit of its clock")
        return milliseconds / 1e3, cpu_s
