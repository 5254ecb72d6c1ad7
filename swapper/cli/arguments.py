"""Arguments that several commands share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from swapper.bench.witness import Operation
from swapper.config import parse_size
from swapper.config.fields import paths_of_environment
from swapper.errors import ConfigError, SwapError
from swapper.io.devices import current_accelerator, has_accelerator

__all__ = ["AsJson", "Read", "Write", "asked_operations", "check_device", "directories_or_default", "size_option"]

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object; docs/cli.md has its keys.")]
Read = Annotated[bool, typer.Option("--read/--no-read", help="Measure reads.")]
Write = Annotated[bool, typer.Option("--write/--no-write", help="Measure writes.")]


def directories_or_default(named: Sequence[Path] | None, *usual: str) -> list[Path]:
    """`named`, else those of the environment variable SWAPPER_NVME_PATH, else one of `usual`, else ".".

    Of `usual` it is the first that exists.

    Returns:
        Absolute paths, each once.
    """
    chosen = list(named or paths_of_environment())
    if not chosen:
        chosen = [next((Path(name) for name in usual if os.path.isdir(name)), Path())]
    return list(dict.fromkeys(Path(os.path.abspath(path)) for path in chosen))


def size_option(default: str, words: str) -> Any:
    """An option that takes a size, such as "1GiB"."""
    return typer.Option(parser=_parse_size, metavar="SIZE", show_default=default, help=words)


def _parse_size(text: str | int) -> int:
    try:
        return parse_size(int(text) if str(text).isdecimal() else text)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None


def asked_operations(*, read: bool, write: bool) -> tuple[Operation, ...]:
    """The operations to measure.

    Raises:
        BadParameter: there is none.
    """
    asked: dict[Operation, bool] = {"read": read, "write": write}
    if not any(asked.values()):
        raise typer.BadParameter("--no-read and --no-write leave nothing to measure")
    return tuple(operation for operation, wanted in asked.items() if wanted)


def check_device(device: str, *, gds: bool) -> None:
    """Refuse a device that is not there.

    Raises:
        BadParameter: torch knows no such type of device, or GPUDirect Storage was asked for without a GPU.
        SwapError: in words that say what to change.
    """
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise typer.BadParameter(f"--device: {device!r} is neither cpu nor an accelerator that torch knows") from None
    if gds and kind != "cuda":
        raise typer.BadParameter("--gds moves tensors on a GPU: it needs `bench --device cuda` or `tune --gpu`")
    if kind != "cpu" and not (kind == current_accelerator() and has_accelerator()):
        raise SwapError(f"torch finds no {kind} device here: measure with tensors on the CPU")
