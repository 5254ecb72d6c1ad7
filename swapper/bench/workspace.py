"""Directories for files that are removed again, whatever happens; refusals where space or memory is short."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from swapper.bench.machine import machine
from swapper.errors import SwapError
from swapper.sizes import format_bytes
from swapper.storage.mounts import check_nvme_path

__all__ = ["check_memory", "workspace"]

_PREFIX = ".swapper-bench-"


@contextlib.contextmanager
def workspace(directories: Sequence[Path], needed_bytes: int) -> Iterator[list[Path]]:
    """An empty directory in each of `directories`; removed with what is in them, on errors, Ctrl-C and SIGTERM too.

    Args:
        directories: on drives.
        needed_bytes: free space that each needs; those on one file system need the sum.

    Raises:
        ConfigError: a directory is missing, cannot be written, or is memory.
        SwapError: there is not so much space. Nothing was written.
    """
    for directory in directories:
        check_nvme_path(directory)
    _check_space(directories, needed_bytes)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_signals_end_it())
        yield [
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=_PREFIX, dir=directory)))
            for directory in directories
        ]


def _check_space(directories: Sequence[Path], needed_bytes: int) -> None:
    sums: dict[int, list[Path]] = {}
    for directory in directories:
        sums.setdefault(os.stat(directory).st_dev, []).append(directory)
    for together in sums.values():
        space = os.statvfs(together[0])
        free_bytes = space.f_bavail * space.f_frsize
        wanted_bytes = needed_bytes * len(together)
        if free_bytes < wanted_bytes:
            names = " and ".join(map(str, together))
            raise SwapError(
                f"{names}: {format_bytes(wanted_bytes)} are needed and {format_bytes(free_bytes)} free; nothing was "
                "written. Free some space, or measure with a smaller size"
            )


def check_memory(needed_bytes: int) -> None:
    """Refuse what would not fit the machine's memory.

    Raises:
        SwapError: with both figures.
    """
    available_bytes = machine().memory_available_bytes
    if available_bytes is not None and needed_bytes > 0.9 * available_bytes:
        raise SwapError(
            f"{format_bytes(needed_bytes)} of memory are needed and {format_bytes(available_bytes)} available; measure "
            "with a smaller size"
        )


@contextlib.contextmanager
def _signals_end_it() -> Iterator[None]:
    received: list[int] = []

    # As an exception does, so that clean-up happens.
    def leave(number: int, frame: FrameType | None) -> None:
        received.append(number)
        sys.exit(128 + number)

    former = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    except Exception:
        if received:  # torch.save raises an error of its own where one passes through it.
            sys.exit(128 + received[0])
        raise
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
