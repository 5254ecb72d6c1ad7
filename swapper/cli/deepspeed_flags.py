"""The flags of DeepSpeed's `ds_nvme_tune` and `ds_io`, as spelled there, for `swapper tune` and `swapper bench`.

They stand beside our own, which have dashes, and are not in the help. A flag without a meaning here is said on standard
error. Source: `ds_nvme_tune --help` and `ds_io --help` of DeepSpeed 0.19.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from typer.core import TyperCommand

from swapper.bench.sweep import binary_size
from swapper.cli.output import complain

__all__ = ["BenchCommand", "TuneCommand", "translated"]


@dataclass(frozen=True)
class _Flag:
    """One of DeepSpeed's flags.

    Attributes:
        ours: our arguments for it; a value follows the last of them.
        takes: the values that follow it. "1M" is a size of 2**20 bytes there; "folders" are folder:GPU.
        no_effect: why it has none here.
    """

    ours: tuple[str, ...] = ()
    takes: Literal["nothing", "one", "size", "several", "folders"] = "nothing"
    no_effect: str = ""


_ALWAYS_LIKE_THAT = "there is one way to do it here"
_MEDIANS = "the figures are medians of all runs; --loops says of how many"
_FROM_A_SWEEP = "swapper tune tries it, from a sweep file"

_TUNE = {
    "--nvme_dir": _Flag(("--nvme-dir",), "several"),
    "--nvme-dir": _Flag(("--nvme-dir",), "several"),
    "--sweep_config": _Flag(("--sweep-config",), "one"),
    "--no_read": _Flag(("--no-read",)),
    "--no_write": _Flag(("--no-write",)),
    "--io_size": _Flag(("--io-size",), "size"),
    "--flush_page_cache": _Flag(("--flush-page-cache",)),
    "--log_dir": _Flag(("--log-dir",), "one"),
}

_BENCH = {
    "--folder": _Flag(("--dir",), "one"),
    "--folder_to_device_mapping": _Flag(("--dir",), "folders"),
    "--dir": _Flag(("--dir",), "several"),
    "--io_size": _Flag(("--size",), "size"),
    "--block_size": _Flag(("--block-size",), "size"),
    "--queue_depth": _Flag(("--queue-depth",), "one"),
    "--io_parallel": _Flag(("--threads",), "one"),
    "--gpu": _Flag(("--device", "cuda")),
    "--use_gds": _Flag(("--gds",)),
    "--fast_io_size": _Flag((), "one", "the pinned buffer is the tensor"),
    "--multi_process": _Flag((), "one", "one process drives all directories; --threads adds I/O threads"),
    "--single_submit": _Flag(no_effect=_FROM_A_SWEEP),
    "--sequential_requests": _Flag(no_effect=f"{_FROM_A_SWEEP}, as overlap_events"),
    "--validate": _Flag(no_effect="every figure comes with a proof, and transfers that fail raise"),
    "--engine": _Flag((), "one", "all engines are measured side by side; --backend and --all-backends choose ours"),
    "--slow_bounce_buffer": _Flag(no_effect=_ALWAYS_LIKE_THAT),
    "--torch_legacy_save": _Flag(no_effect="torch.save writes its present format"),
    "--use_accelerator_pin_memory": _Flag(no_effect=_ALWAYS_LIKE_THAT),
    "--warmup_loops": _Flag((), "one", _MEDIANS),
    "--include_warmup_time": _Flag(no_effect=_MEDIANS),
    "--different_file_each_iteration": _Flag(no_effect="new files are measured beside a file that is written again"),
}


def translated(flags: Mapping[str, _Flag], args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our arguments for `args`, and a line for each flag that has no meaning here."""
    ours: list[str] = []
    said: list[str] = []
    left = list(args)
    while left:
        argument = left.pop(0)
        name, equals, value = argument.partition("=")
        flag = flags.get(name)
        if flag is None:
            ours.append(argument)
            continue
        values = [value] if equals else []
        most = 0 if equals or flag.takes == "nothing" else len(left) if flag.takes in ("several", "folders") else 1
        while left and len(values) < most and not left[0].startswith("--"):
            values.append(left.pop(0))
        if flag.no_effect:
            said.append(f"{name} has no effect: {flag.no_effect}")
            continue
        if flag.takes == "size":
            values = [str(binary_size(each)) for each in values]
        if flag.takes == "folders":
            values = [each.rpartition(":")[0] or each for each in values]
            said.append(f"{name}: only the folders are used; the GPU is the current one")
        ours += [argument for each in values for argument in (*flag.ours, each)] or flag.ours
    return ours, said


class _Command(TyperCommand):
    flags: Mapping[str, _Flag]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line."""
        ours, said = translated(self.flags, args)
        for line in said:
            complain(f"{ctx.info_name}: {line}")
        return super().parse_args(ctx, ours)


class TuneCommand(_Command):
    """`swapper tune`, with the flags of `ds_nvme_tune` too."""

    flags = _TUNE


class BenchCommand(_Command):
    """`swapper bench`, with the flags of `ds_io` too."""

    flags = _BENCH
