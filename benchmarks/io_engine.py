"""What the I/O engine promises, measured: bandwidth beside fio, CPU time, many small transfers, checksums.

    python benchmarks/io_engine.py --nvme-path DIR

All contestants run alternately in one process, on one file; figures are medians. Each run comes with a proof that the
drive was measured and not the page cache (swapper/bench/witness.py). Ends with 0 whatever the figures are.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from swapper.bench.contestants import Lane, NewFile, Transfers, ordinary_memory
from swapper.bench.drive import look_at_directory
from swapper.bench.fio import ENGINES, Fio, find_fio
from swapper.bench.machine import machine, swapper_version
from swapper.bench.measure import Contestant, Figure, alternate
from swapper.bench.site import EngineSettings, Site
from swapper.bench.witness import Operation
from swapper.bench.workspace import check_memory, workspace
from swapper.cli.bench import best_fio
from swapper.cli.progress import progress_bar
from swapper.config import format_size, parse_size
from swapper.errors import SwapError
from swapper.io.handle import Checksums

OPERATIONS: tuple[Operation, ...] = ("read", "write")
RESULTS = Path(__file__).resolve().parent / "results"
PIECE_BYTES = 256 << 10
CHECKED_BYTES = 1 << 20
"""Of one checksum."""
NOISE = 0.02
"""A median of seven differs by so much from the next on a calm drive."""

OURS, DEEPNVME, VERIFIED = "swapper", "DeepNVMe-style", "swapper, checksums"
ONE, MANY = "one transfer", "many transfers"
PREALLOCATED, GROWING = "new file, preallocated", "new file"


@dataclass(frozen=True)
class Row:
    """One line: a ratio, what it is made of, and the bar; no bar where there is only something to show."""

    what: str
    figures: str
    ratio: float | None
    bar: str
    passed: bool | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme-path", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--size", type=parse_size, default=1 << 30, help="a multiple of --block-size")
    parser.add_argument("--block-size", type=parse_size, default=4 << 20)
    parser.add_argument("--queue-depth", type=int, default=32)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--save", action="store_true", help=f"keep the result in {RESULTS.name}/")
    arguments = parser.parse_args()
    if arguments.size < arguments.block_size or arguments.size % arguments.block_size:
        parser.error("--size must be a multiple of --block-size")
    try:
        result = measure(arguments)
    except SwapError as error:
        print(f"nothing was measured: {error}")
        return
    if arguments.save:
        path = RESULTS / f"{datetime.date.today()}-io-engine-{time.strftime('%H%M%S')}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"saved: {path}")


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    size = arguments.size
    settings = EngineSettings(arguments.backend, arguments.block_size, arguments.queue_depth)
    looked_at = look_at_directory(arguments.nvme_path)
    with workspace([arguments.nvme_path], needed_bytes=3 * size) as (place,), contextlib.ExitStack() as stack:
        check_memory(2 * size + min(size, 256 << 20))
        field = Field(place, size, settings, stack)
        with progress_bar(len(field.contestants) * arguments.rounds) as advance:
            figures = alternate(field.contestants, arguments.rounds, lambda one: advance(f"{one.operation} {one.name}"))
        (warm,) = alternate([field.warm], 1)
    rows = [*table(figures), page_cache_row(figures, warm)]
    here = machine()
    drives = ", ".join(f"{drive.name} ({drive.model or drive.kind})" for drive in looked_at.drives)
    print(f"swapper {swapper_version()}, {field.fio}, {here.kernel}, {here.cpu} x {here.cpus_usable}; {drives}")
    print(
        f"{format_size(size)}, blocks of {format_size(arguments.block_size)}, queue depth {arguments.queue_depth}, "
        f"backend {field.backend}, {arguments.rounds} rounds"
    )
    for row in rows:
        ratio = "-" if row.ratio is None else f"{row.ratio:.3f}"
        verdict = {True: "PASS", False: "short of the bar", None: ""}[row.passed]
        print(f"{row.what:<36} {ratio:>6}  {row.bar:<22} {verdict:<17} {row.figures}")
    for figure in figures:
        if figure.flag:
            print(f"{figure.operation} {figure.name}: {figure.flag}")
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "version": swapper_version(),
        "machine": asdict(here),
        "directory": asdict(looked_at),
        "arguments": {key: str(value) for key, value in vars(arguments).items()},
        "backend": field.backend,
        "fio": field.fio,
        "rows": [asdict(row) for row in rows],
        "figures": [figure.as_json() for figure in figures],
    }


class Field:
    """Everybody who runs, in one directory."""

    def __init__(self, place: Path, size: int, settings: EngineSettings, stack: contextlib.ExitStack) -> None:
        site = Site(place, size, "cpu")
        handle = settings.open(stack)
        ours = site.lane(stack, handle)
        self.backend = handle.backend
        self.contestants: list[Contestant] = []

        def add(name: str, make: Callable[[str, Operation], Contestant]) -> None:
            self.contestants.extend(make(name, operation) for operation in OPERATIONS)

        add(OURS, lambda name, operation: Transfers(name, operation, [ours]))
        # In a file of its own: what others write has other checksums.
        file = stack.enter_context(handle.open(place / "verified", "rw", exclusive=True))
        verified = Lane(handle, file, site.tensor, Checksums(size, min(settings.block_bytes, CHECKED_BYTES)))
        file.preallocate(size)
        verified.start("write", site.tensor, 0).wait()
        add(VERIFIED, lambda name, operation: Transfers(name, operation, [verified]))
        kernel_aio = EngineSettings("aio", settings.block_bytes, settings.queue_depth).open(stack)
        deepnvme = site.lane(stack, kernel_aio, tensor=ordinary_memory(size))
        add(DEEPNVME, lambda name, operation: Transfers(name, operation, [deepnvme]))
        part = site.lane(stack, handle, tensor=site.tensor[: min(size, 256 << 20)])
        add(ONE, lambda name, operation: Transfers(name, operation, [part]))
        add(MANY, lambda name, operation: Transfers(name, operation, [part], piece_bytes=PIECE_BYTES))
        for name, preallocate in ((PREALLOCATED, True), (GROWING, False)):
            self.contestants.append(NewFile(name, place, handle, site.tensor, preallocate=preallocate))
        program = find_fio()
        self.fio = program.version if program else "no fio"
        if program is not None:
            options = {"block_bytes": settings.block_bytes, "queue_depth": settings.queue_depth, "threads": 1}
            for engine in ENGINES:
                for operation in OPERATIONS:
                    self.contestants.append(Fio(program, engine, operation, [site.path], size, **options))
        cached = EngineSettings("buffered", settings.block_bytes, settings.queue_depth).open(stack)
        self.warm = WarmRead("buffered, warm", "read", [site.lane(stack, cached, register=False)])


class WarmRead(Transfers):
    """A read that finds everything in the page cache: there must be no figure for it."""

    def prepare(self) -> None:
        self.run()


def table(figures: Sequence[Figure]) -> Iterator[Row]:
    """The rows of the table, but for that of the page cache."""

    def find(name: str, operation: Operation) -> Figure:
        return next(figure for figure in figures if (figure.name, figure.operation) == (name, operation))

    def compare(what: str, one: Figure, other: Figure | None, bar: str, passes: Callable[[float], bool] | None) -> Row:
        missing = "fio is not installed" if other is None else one.refusal or other.refusal
        if other is None or missing:
            return Row(what, f"no figure: {missing}", None, bar, None if passes is None else False)
        cpu = what.startswith("CPU")
        spreads = [figure.cpu_s_per_gb if cpu else figure.bandwidth_bps for figure in (one, other)]
        ratio = spreads[0].median / spreads[1].median
        shown = [f"{s.median:.4f} ({s.min:.4f} - {s.max:.4f})" for s in spreads] if cpu else []
        shown = shown or [f"{s.median / 1e9:.2f} ({s.min / 1e9:.2f} - {s.max / 1e9:.2f})" for s in spreads]
        unit = "CPU s/GB" if cpu else "GB/s"
        text = f"{one.name} {shown[0]} {unit}, {other.name} {shown[1]}"
        return Row(what, text, ratio, bar, None if passes is None else passes(ratio))

    for operation in OPERATIONS:
        ours = find(OURS, operation)
        fio = best_fio(figures, ours)
        yield compare(f"bandwidth, {operation}, of fio", ours, fio, ">= 0.97", lambda ratio: ratio >= 0.97)
    ours, reserved, growing = (find(name, "write") for name in (OURS, PREALLOCATED, GROWING))
    yield compare("first write, of an overwrite", growing, ours, "", None)
    yield compare("first write preallocated, of same", reserved, ours, "", None)
    yield compare("preallocated, of not", reserved, growing, f">= 1 (noise {NOISE})", lambda r: r >= 1 - NOISE)
    for operation in OPERATIONS:
        ours, style = find(OURS, operation), find(DEEPNVME, operation)
        yield compare(f"CPU, {operation}, of DeepNVMe-style", ours, style, "<= 0.5", lambda ratio: ratio <= 0.5)
    for operation in OPERATIONS:
        one, many = find(ONE, operation), find(MANY, operation)
        yield compare(f"many of 256 KiB, {operation}, of one", many, one, ">= 0.9", lambda ratio: ratio >= 0.9)
    for operation in OPERATIONS:
        plain, checked = find(OURS, operation), find(VERIFIED, operation)
        yield compare(f"verify, {operation}, of without", checked, plain, "", None)
        yield compare(f"CPU of verify, {operation}", checked, plain, "", None)


def page_cache_row(figures: Sequence[Figure], warm: Figure) -> Row:
    """Whether every figure has its proof, and one that has none is refused."""
    unproven = [f"{figure.operation} {figure.name}: {figure.refusal}" for figure in figures if figure.refusal]
    refused = (
        f"a warm buffered read is refused: {warm.refusal}" if warm.refusal else "a warm buffered read was BELIEVED"
    )
    text = "; ".join([*unproven, refused])
    return Row("page cache", text, None, "every figure proven", not unproven and bool(warm.refusal))


if __name__ == "__main__":
    main()
