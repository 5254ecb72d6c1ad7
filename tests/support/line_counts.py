"""Counts the lines of swapper's code that run: what a call does is compared without a measured time.

A function of its own counts for each code object, and nothing else is done for a line: millions of them run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import swapper

PACKAGE = f"{Path(swapper.__file__).parent}/"


def line_counts(work: Callable[[], object], leave_out: tuple[str, ...] = ()) -> dict[tuple[str, str], int]:
    """Call `work` and return how many lines of each function ran on this thread, a loop's lines once for each turn.

    Args:
        leave_out: folders and modules of swapper that are not counted, as paths in the package.

    Returns:
        By the module's path in the package and the function's name.
    """
    counts: dict[tuple[str, str], int] = {}
    tracers: dict[CodeType, Callable[..., Any] | None] = {}
    of_code: list[tuple[CodeType, Callable[[], int]]] = []

    def tracer(code: CodeType) -> Callable[..., Any] | None:
        if not code.co_filename.startswith(PACKAGE) or code.co_filename[len(PACKAGE) :].startswith(leave_out):
            return None
        lines = 0

        def count(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal lines
            lines += 1
            return count

        of_code.append((code, lambda: lines))
        return count

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if code not in tracers:
            tracers[code] = tracer(code)
        found = tracers[code]
        return None if found is None else found(frame, event, argument)

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(former)
    for code, lines in of_code:
        name = code.co_filename[len(PACKAGE) :], code.co_name
        counts[name] = counts.get(name, 0) + lines()
    return counts
