"""`swapper tune`: the `aio` settings that are fastest on a drive."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from swapper.bench.contestants import Transfers
from swapper.bench.machine import swapper_version
from swapper.bench.measure import Contestant, ContestantFailed, Figure, alternate
from swapper.bench.site import EngineSettings, Site
from swapper.bench.sweep import default_sweep, demand, load_sweep, setting_name
from swapper.bench.witness import Operation
from swapper.bench.workspace import check_memory, workspace
from swapper.cli.arguments import Read, Write, asked_operations, check_device, directories_or_default, size_option
from swapper.cli.config_file import aio_yaml, check_config_file, write_aio
from swapper.cli.output import complain, make_console, print_table, printable
from swapper.config import AioConfig, format_size
from swapper.errors import SwapError, SwapIOError
from swapper.io.devices import current_accelerator

__all__ = ["NOISE", "Score", "choose", "tune"]

NOISE = 0.02
"""Settings that are slower than the best by no more than this part are as good."""
_SHOWN = 5


@dataclass
class Score:
    """The figures of one setting."""

    setting: AioConfig
    figures: list[Figure]

    @property
    def refusal(self) -> str:
        """The reason why it has no score; "" if it has one."""
        return next((figure.refusal for figure in self.figures if figure.refusal), "")

    @property
    def bandwidth_bps(self) -> float:
        """Bytes per second where as much is read as written, as in a step; of only one, if one was measured."""
        moved_bytes = sum(figure.moved_bytes for figure in self.figures)
        return moved_bytes / sum(figure.moved_bytes / figure.bandwidth_bps.median for figure in self.figures)


def choose(scores: Sequence[Score]) -> Score:
    """The least demanding setting within `NOISE` of the fastest.

    Raises:
        SwapError: none has a figure.
    """
    proven = [score for score in scores if not score.refusal]
    if not proven:
        raise SwapError(f"there is no figure for any setting: {scores[0].refusal}")
    best_bps = max(score.bandwidth_bps for score in proven)
    near = [score for score in proven if score.bandwidth_bps >= (1 - NOISE) * best_bps]
    return min(near, key=lambda score: demand(score.setting))


class _Tried(Contestant):
    """Transfers with one setting. Its handles live for one run: hundreds of settings would not fit side by side."""

    def __init__(
        self, setting: AioConfig, operation: Operation, sites: Sequence[Site], *, gds: bool, flush: bool
    ) -> None:
        length_bytes = sites[0].tensor.numel()
        super().__init__(setting_name(setting), operation, [site.path for site in sites], length_bytes)
        self._settings = EngineSettings.of(setting)
        self._sites = sites
        self._gds = gds
        self._flush = flush
        self._stack = contextlib.ExitStack()
        self._transfers: Transfers | None = None

    def prepare(self) -> None:
        """Make the handles and register the memory.

        Raises:
            ContestantFailed: this machine refuses the setting.
        """
        super().prepare()
        if self._flush and self.operation == "read":
            _drop_all_caches()
        try:
            handles = [self._settings.open(self._stack, gds=self._gds) for _ in self._sites]
            lanes = [site.lane(self._stack, handle) for site, handle in zip(self._sites, handles, strict=True)]
        except SwapIOError:
            raise
        except SwapError as error:
            raise ContestantFailed(str(error)) from None
        self._transfers = Transfers(self.name, self.operation, lanes)

    def move(self) -> bool:
        """Move the bytes with the handles of this run."""
        assert self._transfers is not None
        return self._transfers.move()

    def finish(self) -> None:
        """Close the handles."""
        self._transfers = None
        self._stack.close()


def tune(
    nvme_dir: Annotated[
        list[Path] | None,
        typer.Option(
            "--nvme-dir",
            metavar="DIR",
            help="On a drive; several are used side by side. Default: $SWAPPER_NVME_PATH, else '.'.",
        ),
    ] = None,
    sweep_config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Lists of values to try, JSON or YAML; DeepSpeed's sweep files are fine."),
    ] = None,
    read: Read = True,
    write: Write = True,
    io_size: Annotated[int, size_option("1GiB", "Of the tensor for each directory.")] = 1 << 30,
    gpu: Annotated[bool, typer.Option("--gpu", help="With tensors on the GPU.")] = False,
    gds: Annotated[bool, typer.Option("--gds", help="With --gpu: by GPUDirect Storage.")] = False,
    flush_page_cache: Annotated[
        bool, typer.Option("--flush-page-cache", help="Empty the whole page cache before each read; needs root.")
    ] = False,
    log_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write a JSON file for each setting, and a summary, there.")
    ] = None,
    loops: Annotated[int, typer.Option(min=1, help="Runs of each setting; what counts is the median.")] = 3,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show all settings, not only the best.")] = False,
    write_config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Put the result into the aio section of this config; made if there is none."),
    ] = None,
) -> None:
    """The aio settings that are fastest on a drive.

    Tries every combination in turn, several times over. What counts is the time to read and to write the same amount.
    Of all settings within 2 % of the best it takes the least demanding: fewest I/O threads, then fewest bytes in
    flight, then fewest requests. Standard output is an aio section that a config takes as it is.

    \b
        swapper tune --nvme-dir /mnt/nvme
        swapper tune --nvme-dir /mnt/nvme --write-config train.yaml
    """
    operations = asked_operations(read=read, write=write)
    if io_size < 4096 or io_size % 4096:
        raise typer.BadParameter("--io-size: it must be a multiple of 4096")
    device = (current_accelerator() or "cuda") if gpu else "cpu"
    check_device(device, gds=gds)
    directories = directories_or_default(nvme_dir)
    settings = default_sweep() if sweep_config is None else load_sweep(sweep_config)
    if write_config is not None:
        check_config_file(write_config, directories)
    if log_dir is not None:
        log_dir.mkdir(parents=True, exist_ok=True)
    console = make_console(stderr=True)
    flush = flush_page_cache and os.geteuid() == 0
    if flush_page_cache and not flush:
        console.print("not root: only the files that are read are dropped from the page cache")

    with workspace(directories, needed_bytes=io_size + (16 << 20)) as rooms:
        if not gpu:
            check_memory(io_size * len(rooms))
        sites = [Site(room, io_size, device) for room in rooms]
        tried = [
            _Tried(setting, operation, sites, gds=gds, flush=flush) for setting in settings for operation in operations
        ]
        figures = alternate(tried, loops)
    for figure in figures:
        figure.directories = tuple(map(str, directories))
    several = len(operations)
    scores = [Score(setting, figures[several * i : several * (i + 1)]) for i, setting in enumerate(settings)]
    if log_dir is not None:
        for figure in figures:
            _write_json(log_dir / f"{figure.operation}-{figure.name}.json", figure.as_json())
    for score in scores:
        if score.refusal:
            complain(f"tune: no figure for {setting_name(score.setting)}: {score.refusal}")
    chosen = choose(scores)

    ranked = sorted((s for s in scores if not s.refusal), key=lambda score: -score.bandwidth_bps)
    shown = ranked if verbose else ranked[:_SHOWN] + [chosen] * (chosen not in ranked[:_SHOWN])
    header = ("GB/s", *operations, "CPU s/GB", "backend", "block", "depth", "threads", "")
    print_table(console, header, [_row(score, chosen) for score in shown])
    if len(shown) < len(ranked):
        console.print(f"{len(ranked) - len(shown)} more settings: --verbose")
    if log_dir is not None:
        _write_json(log_dir / "summary.json", _summary(scores, chosen, directories, io_size, loops))
    what = " and ".join(operations)
    typer.echo(
        f"# By `swapper tune` {swapper_version()}, {what} of {format_size(io_size)} at "
        f"{chosen.bandwidth_bps / 1e9:.2f} GB/s on {printable(', '.join(map(str, directories)))}"
    )
    typer.echo(aio_yaml(chosen.setting), nl=False)
    if write_config is not None:
        write_aio(write_config, chosen.setting, directories)
        console.print(f"written to {write_config}")


def _row(score: Score, chosen: Score) -> list[str]:
    setting = score.setting
    cpu = sum(figure.cpu_s_per_gb.median for figure in score.figures) / len(score.figures)
    words = ["single_submit"] * setting.single_submit + ["no overlap_events"] * (not setting.overlap_events)
    words += ["chosen"] * (score is chosen)
    return [
        f"{score.bandwidth_bps / 1e9:.2f}",
        *(f"{figure.bandwidth_bps.median / 1e9:.2f}" for figure in score.figures),
        f"{cpu:.4f}",
        setting.backend,
        format_size(setting.block_size),
        str(setting.queue_depth),
        str(setting.intra_op_parallelism),
        ", ".join(words),
    ]


def _summary(
    scores: Sequence[Score], chosen: Score, directories: Sequence[Path], io_size: int, loops: int
) -> dict[str, object]:
    return {
        "version": swapper_version(),
        "directories": [str(directory) for directory in directories],
        "io_size_bytes": io_size,
        "loops": loops,
        "noise": NOISE,
        "chosen": chosen.setting.model_dump(mode="json"),
        "settings": [
            {
                **score.setting.model_dump(mode="json"),
                "refusal": score.refusal,
                "bandwidth_bps": None if score.refusal else score.bandwidth_bps,
                **{f"{f.operation}_bps": None if f.refusal else f.bandwidth_bps.median for f in score.figures},
            }
            for score in scores
        ],
    }


def _write_json(path: Path, data: dict[str, object]) -> None:
    path.write_text(json.dumps(data, indent=1) + "\n")


def _drop_all_caches() -> None:
    """Write back and forget what is in the page cache, proc_sys_vm(5)."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3\n")
