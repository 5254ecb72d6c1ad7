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
import functools
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from benchmark import keep_result, make_parser, timed
from ratios import Row, as_result, compare, find, print_rows, system_line

import swapper
from swapper.bench.contestants import Load, NewFile, Save, Transfers, torch_load, torch_save
from swapper.bench.drive import look_at_directory
from swapper.bench.measure import Contestant, Figure, alternate
from swapper.bench.site import EngineSettings, Site
from swapper.bench.witness import Operation
from swapper.bench.workspace import check_memory, workspace
from swapper.config import format_size, parse_size
from swapper.errors import SwapError
from swapper.io.fresh_memory import FreshMemory

DRIVE, OVERWRITE = "drive", "drive, overwrite"


def main() -> None:
    parser = make_parser(__doc__, rounds=7)
    parser.add_argument("--size", type=parse_size, default=2 * 10**9)
    parser.add_argument("--tensor-size", type=parse_size, default=16 << 20, help="of each tensor but the last")
    arguments = parser.parse_args()
    try:
        keep_result(arguments, "save", measure(arguments))
    except SwapError as error:
        print(f"nothing was measured: {error}")


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    size = -(-arguments.size // 4096) * 4096
    looked_at = look_at_directory(arguments.nvme_path)
    with workspace([arguments.nvme_path], needed_bytes=4 * size) as (room,), contextlib.ExitStack() as stack:
        check_memory(3 * size)
        figures = alternate(field(room, size, arguments.tensor_size, stack), arguments.rounds)
    rows = [*table(figures), fresh_memory(size, arguments.rounds)]
    print(system_line(looked_at, f"torch {torch.__version__}"))
    print(f"{format_size(size)} in tensors of {format_size(arguments.tensor_size)}, {arguments.rounds} rounds")
    print_rows(rows, figures)
    return {**as_result(arguments, looked_at, rows, figures), "torch": torch.__version__}


def fresh_memory(size: int, rounds: int) -> Row:
    """The speed at which the system gives fresh memory: loaded tensors need it, whatever loads them."""
    rates_bps = []
    for _ in range(rounds):
        memory = torch.empty(size, dtype=torch.uint8)
        rates_bps.append(size / timed(functools.partial(FreshMemory(memory).bring, size)))
        del memory
    low, middle, high = (f(rates_bps) / 1e9 for f in (min, statistics.median, max))
    return Row("fresh memory", f"{middle:.2f} ({low:.2f} - {high:.2f}) GB/s")


def field(room: Path, size: int, tensor_bytes: int, stack: contextlib.ExitStack) -> list[Contestant]:
    """Everybody who runs, in one directory."""
    site = Site(room, size, "cpu")
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
        NewFile(DRIVE, room, handle, site.tensor, preallocate=True, synced=True),
        Transfers(OVERWRITE, "write", [lane]),
        Save("swapper.save", room, state, swapper.save, new=True),
        Save("torch.save + fsync", room, state, torch_save, new=True),
        Transfers(DRIVE, "read", [lane]),
        Load("swapper.load", room, state, swapper.load),
        Load("torch.load", room, state, torch_load),
    ]


def table(figures: Sequence[Figure]) -> Iterator[Row]:
    """The rows of the table: a contestant, another, and the bar for their ratio."""
    bars: list[tuple[Operation, str, str, float | None]] = [
        ("write", "swapper.save", DRIVE, 0.85),
        ("write", "swapper.save", OVERWRITE, None),
        ("write", "swapper.save", "torch.save + fsync", 3),
        ("read", "swapper.load", DRIVE, 0.85),
        ("read", "swapper.load", "torch.load", 2),
    ]
    for operation, one, other, least in bars:
        yield compare(f"{one}, of {other}", find(figures, one, operation), find(figures, other, operation), least=least)


if __name__ == "__main__":
    main()
