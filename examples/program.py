"""A program that a signal ends in order, with one line for what the swapper refuses; and its arguments and sizes."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

import swapper

__all__ = ["add_limit_by", "gb", "peak_resident_bytes", "positive", "run"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run(name: str, main: Callable[[], int], *, inner: bool = False) -> NoReturn:
    """Call `main`, and end the process with what it returns. SIGINT and SIGTERM are raised in it as SystemExit.

    Args:
        name: of the program, for its errors.
        main: returns the exit status.
        inner: another process of the program waits for this one, and says that it was stopped.
    """
    for number in _SIGNALS:
        signal.signal(number, _stop)
    try:
        sys.exit(main())
    except swapper.SwapError as error:
        sys.exit(f"{name}: {error}")
    except SystemExit as stop:
        if not inner and stop.code in [128 + number for number in _SIGNALS]:
            print("\nStopped. Nothing is left on the drive.", file=sys.stderr)
        raise


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def positive(text: str) -> int:
    """A whole number of 1 or more, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def add_limit_by(parser: argparse.ArgumentParser) -> None:
    """Add --limit-by, which is `limit_memory`'s `by`."""
    parser.add_argument(
        "--limit-by",
        choices=["auto", "cgroup", "rlimit"],
        default="auto",
        help="what enforces the limit: a cgroup, which counts everything, or RLIMIT_DATA, which needs no permission",
    )


def gb(size_bytes: float) -> str:
    """`size_bytes` for people, in GB or MB."""
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.0f} MB"


def peak_resident_bytes() -> int:
    """The most that this process has held in memory so far: unlike getrusage's, not what it was forked from."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
