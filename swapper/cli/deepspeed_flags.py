"""The flags of DeepSpeed's `ds_nvme_tune` and `ds_io`, as spelled there, for `swapper tune` and `swapper bench`.

They stand beside our own, which have dashes, and are not in the help. A flag without a meaning here is said on standard
error. Source: `ds_nvme_tune --help` and `ds_io --help` of DeepSpeed 0.19.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from typer.core import TyperCommand

from swapper.bench.sweep import binary_size
from swapper.cli.output import complain

__all__ = ["BenchCommand", "TuneCommand", "translated"]


@dataclass(frozen=True)
class _Flags:
    """How one of DeepSpeed's programs spells its flags.

    Attributes:
        names: our arguments for each flag; a value follows the last of them if the flag takes one.
        with_values: flags, of both spellings, that take one value or several.
        sizes: those whose value is a size; "1M" is 2**20 bytes there.
        without_meaning: why a flag has no effect here.
    """

    names: Mapping[str, Sequence[str]]
    with_values: frozenset[str]
    sizes: frozenset[str] = frozenset()
    without_meaning: Mapping[str, str] = field(default_factory=dict)


_TUNE = _Flags(
    {
        "--nvme_dir": ["--nvme-dir"],
        "--nvme-dir": ["--nvme-dir"],
        "--sweep_config": ["--sweep-config"],
        "--no_read": ["--no-read"],
        "--no_write": ["--no-write"],
        "--io_size": ["--io-size"],
        "--flush_page_cache": ["--flush-page-cache"],
        "--log_dir": ["--log-dir"],
    },
    with_values=frozenset({"--nvme_dir", "--nvme-dir", "--sweep_config", "--io_size", "--log_dir"}),
    sizes=frozenset({"--io_size"}),
)

_ALWAYS_LIKE_THAT = "there is one way to do it here"
_BENCH = _Flags(
    {
        "--folder": ["--dir"],
        "--folder_to_device_mapping": ["--dir"],
        "--dir": ["--dir"],
        "--io_size": ["--size"],
        "--block_size": ["--block-size"],
        "--queue_depth": ["--queue-depth"],
        "--io_parallel": ["--threads"],
        "--gpu": ["--device", "cuda"],
        "--use_gds": ["--gds"],
    },
    with_values=frozenset(
        {
            "--folder", "--folder_to_device_mapping", "--dir", "--io_size", "--block_size", "--queue_depth",
            "--io_parallel", "--fast_io_size", "--multi_process", "--engine", "--warmup_loops",
        }
    ),
    sizes=frozenset({"--io_size", "--block_size"}),
    without_meaning={
        "--fast_io_size": "the pinned buffer is the tensor",
        "--multi_process": "one process drives all directories; --threads adds I/O threads",
        "--single_submit": "swapper tune tries it, from a sweep file",
        "--sequential_requests": "swapper tune tries it, from a sweep file, as overlap_events",
        "--validate": "every figure comes with a proof, and transfers that fail raise",
        "--engine": "all engines are measured side by side; --backend and --all-backends choose ours",
        "--slow_bounce_buffer": _ALWAYS_LIKE_THAT,
        "--torch_legacy_save": "torch.save writes its present format",
        "--use_accelerator_pin_memory": _ALWAYS_LIKE_THAT,
        "--warmup_loops": "the figures are medians of all runs; --loops says of how many",
        "--include_warmup_time": "the figures are medians of all runs; --loops says of how many",
        "--different_file_each_iteration": "new files are measured beside a file that is written again",
    },
)  # fmt: skip


def translated(flags: _Flags, args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our arguments for `args`, and a line for each flag that has no meaning here."""
    ours: list[str] = []
    said: list[str] = []
    left = list(args)
    while left:
        name, equals, value = left.pop(0).partition("=")
        if name not in flags.names and name not in flags.without_meaning:
            ours.append(name + equals + value)
            continue
        values = [value] if equals else []
        if not equals and name in flags.with_values:
            while left and (not values or name in _SEVERAL) and not left[0].startswith("--"):
                values.append(left.pop(0))
        if name in flags.without_meaning:
            said.append(f"{name} has no effect: {flags.without_meaning[name]}")
            continue
        if name in flags.sizes:
            values = [str(binary_size(each)) for each in values]
        if name == "--folder_to_device_mapping":
            values = [each.rpartition(":")[0] or each for each in values]
            said.append("--folder_to_device_mapping: only the folders are used; the GPU is the current one")
        if not values:
            ours += flags.names[name]
        for each in values:
            ours += [*flags.names[name], each]
    return ours, said


_SEVERAL = frozenset({"--nvme_dir", "--nvme-dir", "--folder_to_device_mapping", "--dir"})


class _Command(TyperCommand):
    flags: _Flags

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
