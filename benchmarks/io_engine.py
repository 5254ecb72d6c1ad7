"""Measures what the I/O engine promises: bandwidth beside fio, CPU time, many small transfers, checksums.

    python benchmarks/io_engine.py --nvme-path DIR

All contestants run alternately in one process, on one file; figures are medians. Each run comes with a proof that the
drive was measured and not the page cache (swapper/bench/witness.py). Ends with 0 whatever the figures are.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmark import keep_result, make_parser
from ratios import Row, as_result, compare, find, print_rows, system_line

from swapper.bench.contestants import NewFile, Transfers, ordinary_memory
from swapper.bench.drive import look_at_directory
from swapper.bench.fio import find_fio, fio_contestants
from swapper.bench.measure import Contestant, Figure, alternate, best_fio
from swapper.bench.site import EngineSettings, Lane, Site
from swapper.bench.witness import Operation
from swapper.bench.workspace import check_memory, workspace
from swapper.config import format_size, parse_size
from swapper.errors import SwapError
from swapper.io.handle import Checksums

OPERATIONS: tuple[Operation, ...] = ("read", "write")
PIECE_BYTES = 256 << 10
CHECKED_BYTES = 1 << 20
"""Of one checksum."""
NOISE = 0.02
"""A median of seven differs by so much from the next on a calm drive."""

OURS, DEEPNVME, VERIFIED = "swapper", "DeepNVMe-style", "swapper, checksums"
ONE, MANY = "one transfer", "many transfers"
PREALLOCATED, GROWING = "new file, preallocated", "new file"


def main() -> None:
    parser = make_parser(__doc__, rounds=7)
    parser.add_argument("--size", type=parse_size, default=1 << 30, help="a multiple of --block-size")
    parser.add_argument("--block-size", type=parse_size, default=4 << 20)
    parser.add_argument("--queue-depth", type=int, default=32)
    parser.add_argument("--backend", default="auto")
    arguments = parser.parse_args()
    if arguments.size < arguments.block_size or arguments.size % arguments.block_size:
        parser.error("--size must be a multiple of --block-size")
    try:
        keep_result(arguments, "io-engine", measure(arguments))
    except SwapError as error:
        print(f"nothing was measured: {error}")


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    size = arguments.size
    settings = EngineSettings(arguments.backend, arguments.block_size, arguments.queue_depth)
    looked_at = look_at_directory(arguments.nvme_path)
    with workspace([arguments.nvme_path], needed_bytes=3 * size) as (room,), contextlib.ExitStack() as stack:
        check_memory(2 * size + min(size, 256 << 20))
        field = Field(room, size, settings, stack)
        figures = alternate(field.contestants, arguments.rounds)
        (warm,) = alternate([field.warm], 1)
    rows = [*table(figures), page_cache_row(figures, warm)]
    print(system_line(looked_at, field.fio))
    print(
        f"{format_size(size)}, blocks of {format_size(arguments.block_size)}, queue depth {arguments.queue_depth}, "
        f"backend {field.backend}, {arguments.rounds} rounds"
    )
    print_rows(rows, figures)
    return {**as_result(arguments, looked_at, rows, figures), "backend": field.backend, "fio": field.fio}


class Field:
    """Everybody who runs, in one directory."""

    def __init__(self, room: Path, size: int, settings: EngineSettings, stack: contextlib.ExitStack) -> None:
        site = Site(room, size, "cpu")
        handle = settings.open(stack)
        ours = site.lane(stack, handle)
        self.backend = handle.backend
        self.contestants: list[Contestant] = []

        def add(name: str, make: Callable[[str, Operation], Contestant]) -> None:
            self.contestants.extend(make(name, operation) for operation in OPERATIONS)

        add(OURS, lambda name, operation: Transfers(name, operation, [ours]))
        # In a file of its own: what others write has other checksums.
        file = stack.enter_context(handle.open(room / "verified", "rw", exclusive=True))
        verified = Lane(handle, file, site.tensor, Checksums(size, min(settings.block_bytes, CHECKED_BYTES)))
        file.preallocate(size)
        verified.start("write", site.tensor, 0).wait()
        add(VERIFIED, lambda name, operation: Transfers(name, operation, [verified]))
        deepnvme = site.lane(stack, replace(settings, backend="aio").open(stack), tensor=ordinary_memory(size))
        add(DEEPNVME, lambda name, operation: Transfers(name, operation, [deepnvme]))
        part = site.lane(stack, handle, tensor=site.tensor[: min(size, 256 << 20)])
        add(ONE, lambda name, operation: Transfers(name, operation, [part]))
        add(MANY, lambda name, operation: Transfers(name, operation, [part], piece_bytes=PIECE_BYTES))
        for name, preallocate in ((PREALLOCATED, True), (GROWING, False)):
            self.contestants.append(NewFile(name, room, handle, site.tensor, preallocate=preallocate))
        program = find_fio()
        self.fio = program.version if program else "no fio"
        if program is not None:
            self.contestants += fio_contestants(program, OPERATIONS, [site.path], size, settings)
        cached = replace(settings, backend="buffered").open(stack)
        self.warm = WarmRead("buffered, warm", "read", [site.lane(stack, cached, register=False)])


class WarmRead(Transfers):
    """A read that finds everything in the page cache: there must be no figure for it."""

    def prepare(self) -> None:
        self.move()


def table(figures: Sequence[Figure]) -> Iterator[Row]:
    """The rows of the table, but for that of the page cache."""
    for operation in OPERATIONS:
        ours = find(figures, OURS, operation)
        yield compare(f"bandwidth, {operation}, of fio", ours, best_fio(figures, ours), least=0.97)
    ours, reserved, growing = (find(figures, name, "write") for name in (OURS, PREALLOCATED, GROWING))
    yield compare("first write, of an overwrite", growing, ours)
    yield compare("first write preallocated, of same", reserved, ours)
    yield compare("preallocated, of not", reserved, growing, least=1 - NOISE, bar=f">= 1 (noise {NOISE})")
    for operation in OPERATIONS:
        ours, style = find(figures, OURS, operation), find(figures, DEEPNVME, operation)
        yield compare(f"CPU, {operation}, of DeepNVMe-style", ours, style, most=0.5, cpu=True)
    for operation in OPERATIONS:
        one, many = find(figures, ONE, operation), find(figures, MANY, operation)
        yield compare(f"many of 256 KiB, {operation}, of one", many, one, least=0.9)
    for operation in OPERATIONS:
        plain, checked = find(figures, OURS, operation), find(figures, VERIFIED, operation)
        yield compare(f"verify, {operation}, of without", checked, plain)
        yield compare(f"CPU of verify, {operation}", checked, plain, cpu=True)


def page_cache_row(figures: Sequence[Figure], warm: Figure) -> Row:
    """Passes if every figure has its proof, and a read without one is refused."""
    unproven = [f"{figure.operation} {figure.name}: {figure.refusal}" for figure in figures if figure.refusal]
    verdict = f"is refused: {warm.refusal}" if warm.refusal else "was BELIEVED"
    text = "; ".join([*unproven, f"a warm buffered read {verdict}"])
    return Row("page cache", text, None, "every figure proven", not unproven and bool(warm.refusal))


if __name__ == "__main__":
    main()
