"""`swapper.save` and `swapper.load` beside `torch.save`, `torch.load` and the drive.

    python benchmarks/save.py --nvme-path DIR

State dicts of CPU tensors, one for each `--tensor-size`, in a new file each time, synced; loaded from a file that was
dropped from the page cache. The drive is what the engine does with one tensor of that size: the first write of a new
file with its space reserved and the sync, and a read; an overwrite is shown beside, and a read into memory that is
allocated for it, as the tensors of a load are. All contestants run alternately in one process; figures are medians,
each with a proof that the drive was measured (swapper/bench/witness.py). The last rows are of 10,000 tensors of 64
bytes, where only calls count. Ends with 0 whatever the figures are.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from benchmark import keep_result, make_parser, medians, timed
from ratios import Row, as_result, compare, find, print_rows, system_line

import swapper
from swapper.bench.contestants import Load, NewFile, Save, Transfers, torch_load, torch_save
from swapper.bench.drive import look_at_directory
from swapper.bench.measure import Contestant, Figure, alternate
from swapper.bench.site import EngineSettings, Lane, Site
from swapper.bench.witness import Operation
from swapper.bench.workspace import check_memory, workspace
from swapper.config import format_size, parse_size
from swapper.errors import SwapError
from swapper.io.fresh_memory import FreshMemory
from swapper.sizes import PAGE_BYTES

DRIVE, OVERWRITE, NEW_MEMORY = "drive", "drive, overwrite", "drive, new memory"


def main() -> None:
    parser = make_parser(__doc__, rounds=7)
    parser.add_argument("--size", type=parse_size, default=2 * 10**9)
    parser.add_argument(
        "--tensor-size",
        type=parse_size,
        nargs="+",
        default=[256 << 20, 16 << 20, 100_000],
        help="of each tensor but the last; a table for each",
    )
    arguments = parser.parse_args()
    try:
        keep_result(arguments, "save", measure(arguments))
    except SwapError as error:
        print(f"nothing was measured: {error}")


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    size = -(-arguments.size // 4096) * 4096
    looked_at = look_at_directory(arguments.nvme_path)
    print(system_line(looked_at, f"torch {torch.__version__}"))
    every_row: list[Row] = []
    every_figure: list[Figure] = []
    check_memory(4 * size)
    for tensor_bytes in arguments.tensor_size:
        with workspace([arguments.nvme_path], needed_bytes=4 * size) as (room,), contextlib.ExitStack() as stack:
            figures = alternate(field(room, size, tensor_bytes, stack), arguments.rounds)
        name = f"{format_size(size)} in tensors of {format_size(tensor_bytes)}"
        rows = list(table(figures))
        print(f"{name}, {arguments.rounds} rounds")
        print_rows(rows, figures)
        every_row += [dataclasses.replace(row, what=f"{name}: {row.what}") for row in rows]
        every_figure += figures
    with workspace([arguments.nvme_path], needed_bytes=64 << 20) as (room,):
        rows = [*small_tensors(room, arguments.rounds), fresh_memory(size, arguments.rounds)]
    print_rows(rows, [])
    every_row += rows
    return {**as_result(arguments, looked_at, every_row, every_figure), "torch": torch.__version__}


def small_tensors(room: Path, rounds: int) -> Iterator[Row]:
    """What each tensor costs, beside torch's own: seconds for 10,000 of 64 bytes, the file in the page cache."""
    state = {f"layer.{i}.weight": torch.randn(16) for i in range(10_000)}
    path = room / "small.pt"
    actions: dict[str, Callable[[], object]] = {
        "torch.save + fsync": lambda: torch_save(state, path),
        "swapper.save": lambda: swapper.save(state, path),
        "torch.load": lambda: torch_load(path),
        "swapper.load": lambda: swapper.load(path),
    }
    seconds = medians([{name: timed(action) for name, action in actions.items()} for _ in range(rounds)])
    for one, other in (("swapper.save", "torch.save + fsync"), ("swapper.load", "torch.load")):
        ratio = seconds[one] / seconds[other]
        figures = f"{one} {seconds[one]:.3f} s, {other} {seconds[other]:.3f} s"
        yield Row(f"10,000 tensors of 64 bytes, time of {one}, of {other}", figures, ratio, "<= 1.5", ratio <= 1.5)


def fresh_memory(size: int, rounds: int) -> Row:
    """The speed at which the system gives fresh memory: loaded tensors need it, whatever loads them."""
    rates_bps = []
    for _ in range(rounds):
        memory = torch.empty(size, dtype=torch.uint8)
        rates_bps.append(size / timed(functools.partial(FreshMemory(memory).bring, size)))
        del memory
    low, middle, high = (f(rates_bps) / 1e9 for f in (min, statistics.median, max))
    return Row("fresh memory", f"{middle:.2f} ({low:.2f} - {high:.2f}) GB/s")


class NewMemory(Contestant):
    """A read into memory that was allocated just now, whose pages the kernel has to bring; that is in the time.

    Args:
        name: as for `Contestant`.
        lane: of the directory. Its file and length are taken, its tensor is not.
    """

    def __init__(self, name: str, lane: Lane) -> None:
        super().__init__(name, "read", [Path(lane.file.path)], lane.tensor.numel())
        self._lane = lane
        self._tensor: torch.Tensor | None = None

    def move(self) -> bool:
        """Allocate and read."""
        whole = torch.empty(self.length_bytes + PAGE_BYTES, dtype=torch.uint8, device="cpu")
        start = -whole.data_ptr() % PAGE_BYTES
        self._tensor = whole[start : start + self.length_bytes]
        self._lane.start("read", self._tensor, 0).wait()
        return False

    def finish(self) -> None:
        """Free it."""
        self._tensor = None


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
        NewMemory(NEW_MEMORY, lane),
        Load("swapper.load", room, state, swapper.load),
        Load("torch.load", room, state, torch_load),
    ]


def table(figures: Sequence[Figure]) -> Iterator[Row]:
    """The rows of the table: a contestant, another, and the bar for their ratio."""
    bars: list[tuple[Operation, str, str, float | None]] = [
        ("write", "swapper.save", DRIVE, 0.9),
        ("write", "swapper.save", OVERWRITE, None),
        ("write", "swapper.save", "torch.save + fsync", 3),
        ("read", "swapper.load", DRIVE, 0.85),
        ("read", "swapper.load", NEW_MEMORY, None),
        ("read", "swapper.load", "torch.load", 2),
    ]
    for operation, one, other, least in bars:
        yield compare(f"{one}, of {other}", find(figures, one, operation), find(figures, other, operation), least=least)


if __name__ == "__main__":
    main()
