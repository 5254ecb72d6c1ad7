"""`swapper bench`: how fast tensors move to and from directories, beside fio and torch."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from swapper.bench.contestants import NewFile, TorchLoad, TorchSave, Transfers, ordinary_memory
from swapper.bench.drive import Directory, look_at_directory
from swapper.bench.fio import ENGINES, Fio, FioProgram, find_fio
from swapper.bench.machine import machine, swapper_version
from swapper.bench.measure import Contestant, Figure, alternate
from swapper.bench.site import EngineSettings, Site, check_device
from swapper.bench.witness import Operation, Witness
from swapper.bench.workspace import check_memory, workspace
from swapper.cli import chart
from swapper.cli.directories import directories_or_default
from swapper.cli.output import complain, make_console, print_json, print_table
from swapper.cli.progress import progress_bar
from swapper.config import format_size, parse_size
from swapper.errors import ConfigError
from swapper.io.handle import BACKENDS, probe
from swapper.sizes import format_bytes

__all__ = ["DEEPNVME_STYLE", "bench", "best_fio", "size_argument"]

DEEPNVME_STYLE = "aio, 4 KiB pages, unregistered"
"""How DeepNVMe moves a page-locked tensor, on our engine."""


def size_argument(text: str | int) -> int:
    """A size on the command line: "1GiB"."""
    try:
        return parse_size(int(text) if str(text).isdecimal() else text)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None


@dataclass(frozen=True)
class _Plan:
    """What was asked for."""

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
    """What came of it."""

    figures: list[Figure]
    directories: list[Path]
    looked_at: list[Directory]
    backend: str
    proof: str
    notes: list[str] = field(default_factory=list)


def bench(
    directory: Annotated[
        list[Path] | None,
        typer.Option(
            "--dir",
            metavar="DIR",
            help="On a drive; several are also measured side by side. Default: $SWAPPER_NVME_PATH, else '.'.",
        ),
    ] = None,
    size: Annotated[
        int, typer.Option(parser=size_argument, metavar="SIZE", show_default="1GiB", help="Of the tensor in each.")
    ] = 1 << 30,
    block_size: Annotated[
        int,
        typer.Option(
            parser=size_argument, metavar="SIZE", show_default="4MiB", help="The most that one request moves."
        ),
    ] = 4 << 20,
    queue_depth: Annotated[int, typer.Option(min=1, max=4096, help="Requests in flight, per thread.")] = 32,
    threads: Annotated[int, typer.Option(min=1, max=64, help="I/O threads for each directory.")] = 1,
    backend: Annotated[str, typer.Option(help=f"auto, {', '.join(BACKENDS)}.")] = "auto",
    all_backends: Annotated[bool, typer.Option("--all-backends", help="The other backends, too.")] = False,
    read: Annotated[bool, typer.Option(help="Measure reads.")] = True,
    write: Annotated[bool, typer.Option(help="Measure writes.")] = True,
    device: Annotated[str, typer.Option(help="Where the tensor is: cpu or cuda.")] = "cpu",
    gds: Annotated[bool, typer.Option("--gds", help="GPUDirect Storage, too.")] = False,
    loops: Annotated[int, typer.Option(min=1, help="Runs of each; the figures are medians.")] = 7,
    fio: Annotated[bool, typer.Option(help="Compare with fio, if it is installed.")] = True,
    torch: Annotated[bool, typer.Option(help="Compare with torch.save and torch.load.")] = True,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw the figures.")] = None,
) -> None:
    """How fast tensors move to and from directories.

    Every figure is the median of runs that alternate, and comes with a proof that the drive was measured and not the
    page cache: without one the reason is printed instead, and the exit status is 1. The files are removed afterwards.

    \b
        swapper bench --dir /mnt/nvme
        swapper bench --dir /mnt/nvme0 --dir /mnt/nvme1 --size 4GiB --plot drives.png
    """
    operations: list[Operation] = []
    if read:
        operations.append("read")
    if write:
        operations.append("write")
    _check_arguments(size, block_size, backend, device, operations)
    check_device(device, gds=gds)
    if plot is not None:
        chart.check_target(plot)
    plan = _Plan(
        size_bytes=size,
        engine=EngineSettings(backend, block_size, queue_depth, threads),
        operations=tuple(operations),
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
        drives = "; ".join(_drive_words(looked) for looked in result.looked_at)
        chart.draw(
            plot, result.figures, title=f"{format_size(size)} in blocks of {format_size(block_size)}", below=drives
        )
    refused = [figure for figure in result.figures if figure.refusal]
    for figure in refused:
        complain(f"bench: no figure for {figure.operation}, {figure.name}: {figure.refusal}")
    if refused:
        raise typer.Exit(1)


def _check_arguments(size: int, block_size: int, backend: str, device: str, operations: Sequence[Operation]) -> None:
    if not operations:
        raise typer.BadParameter("--no-read and --no-write leave nothing to measure")
    if backend != "auto" and backend not in BACKENDS:
        raise typer.BadParameter(f"--backend: {backend!r} is none of auto, {', '.join(BACKENDS)}")
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"--device: {device!r} is neither cpu nor cuda")
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
    with workspace(directories, needed_bytes=files * plan.size_bytes + (16 << 20)) as places:
        # The tensors, one on ordinary pages, and what torch.load makes.
        check_memory(plan.size_bytes * (len(places) + 1 + plan.torch) if plan.device == "cpu" else plan.size_bytes)
        looked_at = [look_at_directory(directory) for directory in directories]
        with contextlib.ExitStack() as stack:
            sites = [Site(place, plan.size_bytes, plan.device) for place in places]
            field = _Field(plan, sites, stack)
            with progress_bar(len(field.contestants) * plan.loops) as advance:
                figures = alternate(
                    field.contestants,
                    plan.loops,
                    lambda contestant: advance(f"{contestant.operation} {contestant.name}"),
                )
        proof = Witness(places).describe()
    names = {str(place): str(directory) for place, directory in zip(places, directories, strict=True)}
    for figure in figures:
        figure.directories = tuple(names[place] for place in figure.directories)
    return _Result(figures, directories, looked_at, field.backend, proof, field.notes)


class _Field:
    """Everybody who runs."""

    def __init__(self, plan: _Plan, sites: Sequence[Site], stack: contextlib.ExitStack) -> None:
        self.contestants: list[Contestant] = []
        self.notes: list[str] = []
        self.backend = ""
        self._plan = plan
        self._stack = stack
        together = [tuple(sites)] if len(sites) > 1 else []
        for group in [*((site,) for site in sites), *together]:
            self._add_ours(group)
            self._add_fio(group)
        for site in sites:
            if plan.device == "cpu":
                self._add_deepnvme_style(site)
            if "write" in plan.operations:
                self._add_new_files(site)
            if plan.torch:
                kinds = {"read": TorchLoad, "write": TorchSave}
                self.contestants += [kinds[operation](site.directory, site.tensor) for operation in plan.operations]

    def _add_ours(self, group: Sequence[Site]) -> None:
        self.backend = self._add_transfers(group, self._plan.engine)
        if self._plan.gds:
            self._add_gds(group)
        if not self._plan.all_backends:
            return
        for found in probe():
            if found.backend == self.backend:
                continue
            if found.available:
                self._add_transfers(group, EngineSettings(**{**asdict(self._plan.engine), "backend": found.backend}))
            elif found.reason:
                self._note(f"{found.backend} is not available: {found.reason}")

    def _add_transfers(self, group: Sequence[Site], settings: EngineSettings) -> str:
        # "uring" by name is there to show what registering saves.
        register = settings.backend != "uring"
        lanes = [site.lane(self._stack, settings.open(self._stack), register=register) for site in group]
        backend = lanes[0].handle.backend if register else "uring"
        for lane in lanes:
            if not lane.file.direct and backend != "buffered":
                self._note(f"not direct: {lane.file.direct_reason}")
        place = "" if self._plan.device == "cpu" else f", {self._plan.device}"
        self.contestants += [
            Transfers(f"swapper {backend}{place}", operation, lanes) for operation in self._plan.operations
        ]
        return backend

    def _add_gds(self, group: Sequence[Site]) -> None:
        lanes = [site.lane(self._stack, self._plan.engine.open(self._stack, gds=True)) for site in group]
        for lane in lanes:
            reason = getattr(lane.handle, "gds_reason", "")
            if reason:
                self._note(f"no GPUDirect Storage: {reason}")
        self.contestants += [Transfers("swapper gds, cuda", operation, lanes) for operation in self._plan.operations]

    def _add_deepnvme_style(self, site: Site) -> None:
        if not next(found.available for found in probe() if found.backend == "aio"):
            return
        settings = EngineSettings(**{**asdict(self._plan.engine), "backend": "aio"})
        lane = site.lane(self._stack, settings.open(self._stack), tensor=ordinary_memory(self._plan.size_bytes))
        self.contestants += [Transfers(DEEPNVME_STYLE, operation, [lane]) for operation in self._plan.operations]

    def _add_new_files(self, site: Site) -> None:
        handle = self._plan.engine.open(self._stack)
        site.lane(self._stack, handle)  # Registers the memory.
        for name, preallocate in (("new file, preallocated", True), ("new file", False)):
            self.contestants.append(
                NewFile(f"swapper, {name}", site.directory, handle, site.tensor, preallocate=preallocate)
            )

    def _add_fio(self, group: Sequence[Site]) -> None:
        if self._plan.fio is None:
            return
        engine = self._plan.engine
        self.contestants += [
            Fio(
                self._plan.fio,
                name,
                operation,
                [site.path for site in group],
                self._plan.size_bytes,
                block_bytes=engine.block_bytes,
                queue_depth=engine.queue_depth,
                threads=engine.threads,
            )
            for name in ENGINES
            for operation in self._plan.operations
        ]

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


def best_fio(figures: Sequence[Figure], figure: Figure) -> Figure | None:
    """The faster of fio's engines at what `figure` did, in the same places."""
    rivals = [
        rival
        for rival in figures
        if rival.name.startswith("fio ")
        and (rival.operation, rival.directories) == (figure.operation, figure.directories)
        and not rival.refusal
    ]
    return max(rivals, key=lambda rival: rival.bandwidth_bps.median, default=None)


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
        console.print(line, soft_wrap=True)
    groups = list(dict.fromkeys(figure.directories for figure in result.figures))
    for group in groups:
        for operation in plan.operations:
            title = " + ".join(group) + (" side by side" if len(group) > 1 else "")
            console.print(f"\n{operation}, {title}", soft_wrap=True)
            figures = [f for f in result.figures if (f.directories, f.operation) == (group, operation)]
            header = ("", "GB/s", "from - to", "of fio", "CPU s/GB", "of fio", "")
            print_table(console, header, [_row(result.figures, figure) for figure in figures])
        if len(group) > 1:
            for line in _sum_lines(plan, result, group):
                console.print(line, soft_wrap=True)
    for note in result.notes:
        console.print(f"note: {note}", soft_wrap=True)


def _row(figures: Sequence[Figure], figure: Figure) -> list[Text]:
    if figure.refusal:
        return [Text(text) for text in (figure.name, "-", "-", "-", "-", "-", f"not shown: {figure.refusal}")]
    bandwidth, cpu = figure.bandwidth_bps, figure.cpu_s_per_gb
    fio = best_fio(figures, figure)
    of_fio = f"{bandwidth.median / fio.bandwidth_bps.median:.2f}" if fio else "-"
    cpu_of_fio = f"{cpu.median / fio.cpu_s_per_gb.median:.2f}" if fio and fio.cpu_s_per_gb.median else "-"
    return [
        Text(figure.name),
        Text(f"{bandwidth.median / 1e9:.2f}"),
        Text(f"{bandwidth.min / 1e9:.2f} - {bandwidth.max / 1e9:.2f}"),
        Text(of_fio),
        Text(f"{cpu.median:.4f}"),
        Text(cpu_of_fio),
        Text(figure.flag),
    ]


def _sum_lines(plan: _Plan, result: _Result, group: tuple[str, ...]) -> list[str]:
    lines = []
    for operation in plan.operations:
        name = f"swapper {result.backend}"
        ours = [f for f in result.figures if f.operation == operation and f.name.startswith(name) and not f.refusal]
        together = [f.bandwidth_bps.median for f in ours if f.directories == group]
        alone = [f.bandwidth_bps.median for f in ours if len(f.directories) == 1]
        if together and len(alone) == len(group):
            lines.append(f"{operation}: side by side {together[0] / sum(alone):.2f} of the sum of each alone")
    return lines


def _as_json(plan: _Plan, result: _Result) -> dict[str, object]:
    figures = []
    for figure in result.figures:
        fio = best_fio(result.figures, figure)
        ratio = None
        if fio is not None and not figure.refusal:
            ratio = figure.bandwidth_bps.median / fio.bandwidth_bps.median
        figures.append({**figure.as_json(), "of_fio": ratio, "fio": fio.name if fio else None})
    return {
        "version": swapper_version(),
        "machine": asdict(machine()),
        "directories": [asdict(looked) for looked in result.looked_at],
        "settings": {
            "size_bytes": plan.size_bytes,
            **asdict(plan.engine),
            "device": plan.device,
            "gds": plan.gds,
            "loops": plan.loops,
        },
        "backend": result.backend,
        "fio": plan.fio.version if plan.fio else None,
        "proof": result.proof,
        "figures": figures,
        "notes": result.notes,
    }
