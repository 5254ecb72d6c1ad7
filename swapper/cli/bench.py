"""`swapper bench`: how fast tensors move to and from directories, beside fio and torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from swapper.bench.contestants import Load, NewFile, Save, Transfers, ordinary_memory, torch_load, torch_save
from swapper.bench.drive import Directory, look_at_directory
from swapper.bench.fio import FioProgram, find_fio, fio_contestants
from swapper.bench.machine import machine, swapper_version
from swapper.bench.measure import Contestant, Figure, alternate, best_fio
from swapper.bench.site import EngineSettings, Lane, Site
from swapper.bench.witness import Operation, Witness
from swapper.bench.workspace import check_memory, workspace
from swapper.cli import chart
from swapper.cli.arguments import Read, Write, asked_operations, check_device, directories_or_default, size_option
from swapper.cli.output import fail_if, make_console, print_json, print_table
from swapper.config import format_size
from swapper.errors import SwapError
from swapper.io.handle import BACKENDS, probe
from swapper.sizes import format_bytes

__all__ = ["DEEPNVME_STYLE", "bench"]

DEEPNVME_STYLE = "aio, 4 KiB pages, unregistered"
"""Our engine, moving a page-locked tensor as DeepNVMe does."""


@dataclass(frozen=True)
class _Plan:
    """The run that was asked for."""

    size_bytes: int
    engine: EngineSettings
    operations: tuple[Operation, ...]
    device: str
    gds: bool
    loops: int
    torch: bool
    all_backends: bool
    fio: FioProgram | None


@dataclass
class _Result:
    """Its outcome."""

    figures: list[Figure]
    looked_at: list[Directory]
    backend: str
    proof: str
    notes: list[str]


def bench(
    directory: Annotated[
        list[Path] | None,
        typer.Option(
            "--dir",
            metavar="DIR",
            help="On a drive; several are also measured side by side. Default: $SWAPPER_NVME_PATH, else '.'.",
        ),
    ] = None,
    size: Annotated[int, size_option("1GiB", "Of the tensor in each.")] = 1 << 30,
    block_size: Annotated[int, size_option("4MiB", "The most that one request moves.")] = 4 << 20,
    queue_depth: Annotated[int, typer.Option(min=1, max=4096, help="Requests in flight, per thread.")] = 32,
    threads: Annotated[int, typer.Option(min=1, max=64, help="I/O threads for each directory.")] = 1,
    backend: Annotated[str, typer.Option(help=f"auto, {', '.join(BACKENDS)}.")] = "auto",
    all_backends: Annotated[bool, typer.Option("--all-backends", help="The other backends, too.")] = False,
    read: Read = True,
    write: Write = True,
    device: Annotated[str, typer.Option(help="Where the tensor is: cpu, or an accelerator, as in cuda.")] = "cpu",
    gds: Annotated[bool, typer.Option("--gds", help="GPUDirect Storage, too.")] = False,
    loops: Annotated[int, typer.Option(min=1, help="Runs of each; the figures are medians.")] = 7,
    fio: Annotated[bool, typer.Option(help="Compare with fio, if it is installed.")] = True,
    torch: Annotated[bool, typer.Option(help="Compare with torch.save and torch.load.")] = True,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw the figures.")] = None,
) -> None:
    """Measure how fast tensors move to and from directories.

    Every figure is the median of runs that alternate, and comes with a proof that the drive was measured and not the
    page cache: without one the reason is printed instead, and the exit status is 1. The files are removed afterwards.

    \b
        swapper bench --dir /mnt/nvme
        swapper bench --dir /mnt/nvme0 --dir /mnt/nvme1 --size 4GiB --plot drives.png
    """
    operations = asked_operations(read=read, write=write)
    _check_arguments(size, block_size, backend)
    check_device(device, gds=gds)
    if plot is not None:
        chart.check_target(plot)
    plan = _Plan(
        size_bytes=size,
        engine=EngineSettings(backend, block_size, queue_depth, threads),
        operations=operations,
        device=device,
        gds=gds,
        loops=loops,
        torch=torch,
        all_backends=all_backends,
        fio=find_fio() if fio else None,
    )
    result = _measure(plan, directories_or_default(directory))
    if fio and plan.fio is None:
        result.notes.append("fio is not installed, so there is nothing to compare with (Debian: apt install fio)")
    if json:
        print_json(_as_json(plan, result))
    else:
        _print(make_console(), plan, result)
    if plot is not None:
        title = f"{format_size(size)} in blocks of {format_size(block_size)}"
        chart.draw(plot, result.figures, title=title, below="; ".join(map(_drive_words, result.looked_at)))
    refused = [figure for figure in result.figures if figure.refusal]
    fail_if([f"bench: no figure for {figure.operation}, {figure.name}: {figure.refusal}" for figure in refused])


def _check_arguments(size: int, block_size: int, backend: str) -> None:
    if backend != "auto" and backend not in BACKENDS:
        raise typer.BadParameter(f"--backend: {backend!r} is none of auto, {', '.join(BACKENDS)}")
    if block_size < 4096 or block_size % 4096 or block_size > 1 << 30:
        raise typer.BadParameter("--block-size: it must be a multiple of 4096, up to 1GiB")
    if size < block_size or size % block_size:
        raise typer.BadParameter(
            f"--size: {format_size(size)} is not a multiple of the block size, {format_size(block_size)}"
        )


# --- Measuring -----------------------------------------------------------------------------------------------------


def _measure(plan: _Plan, directories: list[Path]) -> _Result:
    writes = "write" in plan.operations
    files = 1 + writes + plan.torch  # ours and fio's; a new one; torch's
    with workspace(directories, needed_bytes=files * plan.size_bytes + (16 << 20)) as rooms:
        # The tensors, one on ordinary pages, and what torch.load makes.
        check_memory(plan.size_bytes * (len(rooms) + 1 + plan.torch) if plan.device == "cpu" else plan.size_bytes)
        looked_at = [look_at_directory(directory) for directory in directories]
        with contextlib.ExitStack() as stack:
            field = _Field(plan, [Site(room, plan.size_bytes, plan.device) for room in rooms], stack)
            figures = alternate(field.contestants, plan.loops)
        proof = Witness(rooms).describe()
    names = {str(room): str(directory) for room, directory in zip(rooms, directories, strict=True)}
    for figure in figures:
        figure.directories = tuple(names[room] for room in figure.directories)
    return _Result(figures, looked_at, field.backend, proof, field.notes)


class _Field:
    """All contestants: each directory alone, and with several all of them side by side."""

    def __init__(self, plan: _Plan, sites: Sequence[Site], stack: contextlib.ExitStack) -> None:
        self.contestants: list[Contestant] = []
        self.notes: list[str] = []
        self._plan = plan
        self._stack = stack
        groups = [[site] for site in sites] + ([list(sites)] if len(sites) > 1 else [])
        for group in groups:
            self.backend = self._add_ours(group)
            if plan.fio is not None:
                paths = [site.path for site in group]
                self.contestants += fio_contestants(plan.fio, plan.operations, paths, plan.size_bytes, plan.engine)
        for site in sites:
            if plan.device == "cpu":
                self._add_deepnvme_style(site)
            if "write" in plan.operations:
                self._add_new_files(site)
            if plan.torch:
                torchs = {
                    "read": Load("torch.load", site.directory, site.tensor, torch_load),
                    "write": Save("torch.save + fsync", site.directory, site.tensor, torch_save),
                }
                self.contestants += [torchs[operation] for operation in plan.operations]

    def _add_ours(self, group: Sequence[Site]) -> str:
        """Add our backends; return the one that is asked for."""
        backend = self._add_transfers(group, self._plan.engine)
        if self._plan.gds:
            lanes = [site.lane(self._stack, self._plan.engine.open(self._stack, gds=True)) for site in group]
            for reason in filter(None, (getattr(lane.handle, "gds_reason", "") for lane in lanes)):
                self._note(f"no GPUDirect Storage: {reason}")
            self._add("swapper gds, cuda", lanes)
        for found in probe() if self._plan.all_backends else ():
            if found.available and found.backend != backend:
                try:
                    self._add_transfers(group, replace(self._plan.engine, backend=found.backend))
                except SwapError as error:  # Memory of this length cannot be registered.
                    self._note(f"{found.backend} is not available: {error}")
            elif found.reason:
                self._note(f"{found.backend} is not available: {found.reason}")
        return backend

    def _add_transfers(self, group: Sequence[Site], settings: EngineSettings) -> str:
        # "uring" by name is there to show what registering saves.
        register = settings.backend != "uring"
        lanes = [site.lane(self._stack, settings.open(self._stack), register=register) for site in group]
        backend = lanes[0].handle.backend if register else "uring"
        for lane in lanes:
            if not lane.file.direct and backend != "buffered":
                self._note(f"not direct: {lane.file.direct_reason}")
        self._add(f"swapper {backend}{'' if self._plan.device == 'cpu' else f', {self._plan.device}'}", lanes)
        return backend

    def _add_deepnvme_style(self, site: Site) -> None:
        if next(found.available for found in probe() if found.backend == "aio"):
            handle = replace(self._plan.engine, backend="aio").open(self._stack)
            self._add(DEEPNVME_STYLE, [site.lane(self._stack, handle, tensor=ordinary_memory(self._plan.size_bytes))])

    def _add_new_files(self, site: Site) -> None:
        handle = self._plan.engine.open(self._stack)
        site.lane(self._stack, handle)  # Registers the memory.
        for name, preallocate in (("new file, preallocated", True), ("new file", False)):
            self.contestants.append(
                NewFile(f"swapper, {name}", site.directory, handle, site.tensor, preallocate=preallocate)
            )

    def _add(self, name: str, lanes: Sequence[Lane]) -> None:
        self.contestants += [Transfers(name, operation, lanes) for operation in self._plan.operations]

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


# --- Showing -------------------------------------------------------------------------------------------------------


def _drive_words(directory: Directory) -> str:
    drives = ", ".join(f"{drive.name} ({drive.model or drive.kind})" for drive in directory.drives)
    return f"{directory.path}: {directory.file_system or 'unknown file system'} on {drives or 'no drive that is seen'}"


def _system_lines(plan: _Plan, result: _Result) -> list[str]:
    here = machine()
    fio = plan.fio.version if plan.fio else "no fio"
    written = sum(figure.moved_bytes * plan.loops for figure in result.figures if figure.operation == "write")
    return [
        f"swapper {swapper_version()}, torch {here.torch}, {fio}, {here.kernel}, {here.cpu or here.architecture} x "
        f"{here.cpus_usable}",
        *(_drive_words(looked) for looked in result.looked_at),
        f"{format_size(plan.size_bytes)} per directory, on the {plan.device}, blocks of "
        f"{format_size(plan.engine.block_bytes)}, queue depth {plan.engine.queue_depth}, {plan.engine.threads} I/O "
        f"thread{'s' if plan.engine.threads > 1 else ''}, backend {result.backend}; medians of {plan.loops}",
        f"proof: {result.proof}",
        f"written to the drives, beside the files themselves: {format_bytes(written)}",
    ]


def _print(console: Console, plan: _Plan, result: _Result) -> None:
    for line in _system_lines(plan, result):
        console.print(line)
    for group in dict.fromkeys(figure.directories for figure in result.figures):
        for operation in plan.operations:
            console.print(f"\n{operation}, {' + '.join(group)}{' side by side' if len(group) > 1 else ''}")
            figures = [f for f in result.figures if (f.directories, f.operation) == (group, operation)]
            header = ("", "GB/s", "from - to", "of fio", "CPU s/GB", "of fio", "")
            print_table(console, header, [_row(result.figures, figure) for figure in figures])
        for line in _sum_lines(plan, result, group) if len(group) > 1 else ():
            console.print(line)
    for note in result.notes:
        console.print(f"note: {note}")


def _row(figures: Sequence[Figure], figure: Figure) -> list[str]:
    if figure.refusal:
        return [figure.name, *"-----", f"not shown: {figure.refusal}"]
    bandwidth, cpu = figure.bandwidth_bps, figure.cpu_s_per_gb
    fio = best_fio(figures, figure)
    return [
        figure.name,
        f"{bandwidth.median / 1e9:.2f}",
        f"{bandwidth.min / 1e9:.2f} - {bandwidth.max / 1e9:.2f}",
        f"{bandwidth.median / fio.bandwidth_bps.median:.2f}" if fio else "-",
        f"{cpu.median:.4f}",
        f"{cpu.median / fio.cpu_s_per_gb.median:.2f}" if fio and fio.cpu_s_per_gb.median else "-",
        figure.flag,
    ]


def _sum_lines(plan: _Plan, result: _Result, group: tuple[str, ...]) -> Iterator[str]:
    ours = [f for f in result.figures if f.name.startswith(f"swapper {result.backend}") and not f.refusal]
    for operation in plan.operations:
        together = [f.bandwidth_bps.median for f in ours if (f.operation, f.directories) == (operation, group)]
        alone = [f.bandwidth_bps.median for f in ours if f.operation == operation and len(f.directories) == 1]
        if together and len(alone) == len(group):
            yield f"{operation}: side by side {together[0] / sum(alone):.2f} of the sum of each alone"


def _as_json(plan: _Plan, result: _Result) -> dict[str, object]:
    figures = []
    for figure in result.figures:
        fio = best_fio(result.figures, figure)
        ratio = figure.bandwidth_bps.median / fio.bandwidth_bps.median if fio and not figure.refusal else None
        figures.append({**figure.as_json(), "of_fio": ratio, "fio": fio.name if fio else None})
    settings = {"device": plan.device, "gds": plan.gds, "loops": plan.loops}
    return {
        "version": swapper_version(),
        "machine": asdict(machine()),
        "directories": [asdict(looked) for looked in result.looked_at],
        "settings": {"size_bytes": plan.size_bytes, **asdict(plan.engine), **settings},
        "backend": result.backend,
        "fio": plan.fio.version if plan.fio else None,
        "proof": result.proof,
        "figures": figures,
        "notes": result.notes,
    }
