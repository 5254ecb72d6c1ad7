"""`swapper.save` and `swapper.load` beside `torch.save`, `torch.load` and the drive.

    python benchmarks/save.py --nvme-path DIR

A state dict of CPU tensors, in a new file each time, synced; loaded from a file that was dropped from the page cache.
The drive is what the engine does with one tensor of that size: the first write of a new file with its space reserved
and the sync, and a read; an overwrite is shown beside. All contestants run alternately in one process; figures are
medians, each with a proof that the drive was measured (swapper/bench/witness.py). Ends with 0 whatever the figures are.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import swapper
from swapper.bench.contestants import NewFile, Transfers
from swapper.bench.drive import look_at_directory
from swapper.bench.machine import machine, swapper_version
from swapper.bench.measure import Contestant, Figure, Timing, alternate, drop_from_cache, time_here
from swapper.bench.site import EngineSettings, Site
from swapper.bench.witness import Operation
from swapper.bench.workspace import check_memory, workspace
from swapper.cli.progress import progress_bar
from swapper.config import format_size, parse_size
from swapper.errors import SwapError
from swapper.io.host_memory import prefault

RESULTS = Path(__file__).resolve().parent / "results"
DRIVE, OVERWRITE = "drive", "drive, overwrite"

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Row:
    """One line: a ratio, what it is made of, and the bar; no bar where there is only something to show."""

    what: str
    figures: str
    ratio: float | None
    bar: str
    passed: bool | None


class DriveWrite(NewFile):
    """The first write of a new file, with its space reserved, synced."""

    def _move(self) -> bool:
        super()._move()
        assert self._file is not None
        self._file.sync()
        return True


class Save(Contestant):
    """A state dict saved into a new file."""

    def __init__(self, name: str, directory: Path, state: State) -> None:
        super().__init__(name, "write", [directory / f"{name}.pt"], total_bytes(state))
        self._state = state

    def run(self) -> Timing:
        return time_here("write", self._move)

    def _move(self) -> bool:
        if self.name == "swapper.save":
            swapper.save(self._state, self.files[0])
        else:
            with open(self.files[0], "wb") as file:
                torch.save(self._state, file)
                file.flush()
                os.fsync(file.fileno())
        return True

    def finish(self) -> None:
        """Remove the file, and have the file system note it now instead of in the next run."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.files[0])
        descriptor = os.open(self.files[0].parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class Load(Contestant):
    """A file of `torch.save` loaded, after it was dropped from the page cache."""

    def __init__(self, name: str, directory: Path, state: State) -> None:
        super().__init__(name, "read", [directory / "saved.pt"], total_bytes(state))
        self._state = state

    def prepare(self) -> None:
        """Save it if nobody has."""
        if not self.files[0].exists():
            torch.save(self._state, self.files[0])
        drop_from_cache(self.files[0])

    def run(self) -> Timing:
        return time_here("read", self._move)

    def _move(self) -> bool:
        load = swapper.load if self.name == "swapper.load" else torch.load
        loaded = load(self.files[0])
        assert loaded.keys() == self._state.keys()
        return False


def total_bytes(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme-path", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--size", type=parse_size, default=2 * 10**9)
    parser.add_argument("--tensor-size", type=parse_size, default=16 << 20, help="of each tensor but the last")
    parser.add_argument("--save", action="store_true", help=f"keep the result in {RESULTS.name}/")
    arguments = parser.parse_args()
    try:
        result = measure(arguments)
    except SwapError as error:
        print(f"nothing was measured: {error}")
        return
    if arguments.save:
        path = RESULTS / f"{datetime.date.today()}-save-{time.strftime('%H%M%S')}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"saved: {path}")


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    size = -(-arguments.size // 4096) * 4096
    looked_at = look_at_directory(arguments.nvme_path)
    with workspace([arguments.nvme_path], needed_bytes=4 * size) as (place,), contextlib.ExitStack() as stack:
        check_memory(3 * size)
        contestants = field(place, size, arguments.tensor_size, stack)
        with progress_bar(len(contestants) * arguments.rounds) as advance:
            figures = alternate(contestants, arguments.rounds, lambda one: advance(f"{one.operation} {one.name}"))
    rows = [*table(figures), fresh_memory(size, arguments.rounds)]
    here = machine()
    drives = ", ".join(f"{drive.name} ({drive.model or drive.kind})" for drive in looked_at.drives)
    versions = f"swapper {swapper_version()}, torch {torch.__version__}"
    print(f"{versions}, {here.kernel}, {here.cpu} x {here.cpus_usable}; {drives}")
    print(f"{format_size(size)} in tensors of {format_size(arguments.tensor_size)}, {arguments.rounds} rounds")
    for row in rows:
        ratio = "-" if row.ratio is None else f"{row.ratio:.3f}"
        verdict = {True: "PASS", False: "short of the bar", None: ""}[row.passed]
        print(f"{row.what:<34} {ratio:>6}  {row.bar:<8} {verdict:<17} {row.figures}")
    for figure in figures:
        if figure.flag:
            print(f"{figure.operation} {figure.name}: {figure.flag}")
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "version": swapper_version(),
        "torch": torch.__version__,
        "machine": asdict(here),
        "directory": asdict(looked_at),
        "arguments": {key: str(value) for key, value in vars(arguments).items()},
        "rows": [asdict(row) for row in rows],
        "figures": [figure.as_json() for figure in figures],
    }


def fresh_memory(size: int, rounds: int) -> Row:
    """How fast the system gives memory that nobody had, to all threads: what is loaded needs it, whoever loads."""
    rates_bps = []
    for _ in range(rounds):
        memory = torch.empty(size, dtype=torch.uint8)
        start_s = time.perf_counter()
        prefault(memory)
        rates_bps.append(size / (time.perf_counter() - start_s))
        del memory
    low, middle, high = (f(rates_bps) / 1e9 for f in (min, statistics.median, max))
    return Row("fresh memory, all threads", f"{middle:.2f} ({low:.2f} - {high:.2f}) GB/s", None, "", None)


def field(place: Path, size: int, tensor_bytes: int, stack: contextlib.ExitStack) -> list[Contestant]:
    """Everybody who runs, in one directory."""
    site = Site(place, size, "cpu")
    handle = EngineSettings().open(stack)
    lane = site.lane(stack, handle)
    starts = range(0, size, tensor_bytes)
    state = {
        f"layer.{start // tensor_bytes}": torch.randint(
            -(2**31), 2**31 - 1, (min(tensor_bytes, size - start) // 4,), dtype=torch.int32
        )
        for start in starts
    }
    return [
        DriveWrite(DRIVE, place, handle, site.tensor, preallocate=True),
        Transfers(OVERWRITE, "write", [lane]),
        Save("swapper.save", place, state),
        Save("torch.save + fsync", place, state),
        Transfers(DRIVE, "read", [lane]),
        Load("swapper.load", place, state),
        Load("torch.load", place, state),
    ]


def table(figures: Sequence[Figure]) -> Iterator[Row]:
    """The rows of the table."""

    def compare(operation: Operation, one: str, other: str, bar: float | None) -> Row:
        ours, theirs = (next(f for f in figures if (f.name, f.operation) == (name, operation)) for name in (one, other))
        what = f"{one}, of {other}"
        shown = "" if bar is None else f">= {bar}"
        refusal = ours.refusal or theirs.refusal
        if refusal:
            return Row(what, f"no figure: {refusal}", None, shown, None if bar is None else False)
        spreads = [figure.bandwidth_bps for figure in (ours, theirs)]
        ratio = spreads[0].median / spreads[1].median
        texts = [f"{s.median / 1e9:.2f} ({s.min / 1e9:.2f} - {s.max / 1e9:.2f}) GB/s" for s in spreads]
        return Row(what, ", ".join(texts), ratio, shown, None if bar is None else ratio >= bar)

    yield compare("write", "swapper.save", DRIVE, 0.85)
    yield compare("write", "swapper.save", OVERWRITE, None)
    yield compare("write", "swapper.save", "torch.save + fsync", 3)
    yield compare("read", "swapper.load", DRIVE, 0.85)
    yield compare("read", "swapper.load", "torch.load", 2)


if __name__ == "__main__":
    main()
