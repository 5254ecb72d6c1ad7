"""A call made in another thread at each line of some modules: what two threads may do at once, in a set order."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

__all__ = ["at_each_line"]


@contextmanager
def at_each_line(modules: set[ModuleType], call: Callable[[], object], *, every: int = 1) -> Iterator[None]:
    """Within it `call` is made in another thread before each line of `modules` that this thread runs, and waited for.

    Args:
        modules: those whose functions are looked at, if they are entered within this.
        call: waits for nothing that this thread may have.
        every: before each so many lines.

    Raises:
        Exception: on leaving, the first that `call` raised.
    """
    names = {module.__name__ for module in modules}
    failures: list[BaseException] = []
    turns, over = queue.SimpleQueue[bool](), queue.SimpleQueue[None]()
    lines = 0

    def other() -> None:
        while turns.get():
            try:
                call()
            except BaseException as error:
                failures.append(error)
            over.put(None)

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if frame.f_globals.get("__name__") not in names:
            return None
        if event == "line":
            lines += 1
            if lines % every == 0:
                turns.put(True)
                over.get()
        return trace

    thread = threading.Thread(target=other)
    thread.start()
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
        turns.put(False)
        thread.join()
    assert lines >= every, "no line was met"
    if failures:
        raise failures[0]
