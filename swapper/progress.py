"""Progress bars on a terminal: tqdm's, without the thread that it starts with its first bar and never ends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

__all__ = ["ProgressBar", "progress_bar"]


class ProgressBar(tqdm):  # type: ignore[type-arg]  # Subscripts are for type checkers only.
    """A bar that is drawn again when it is updated, and not by a thread of its own."""

    monitor_interval = 0


@contextmanager
def progress_bar(what: str, length_bytes: int) -> Iterator[Callable[[int], object]]:
    """Show a bar of bytes, if stderr is a terminal and they take longer than a second.

    Yields a function that counts bytes which are done.
    """
    with ProgressBar(
        total=length_bytes, desc=what, unit="B", unit_scale=True, leave=False, delay=1,
        disable=not sys.stderr.isatty(),
    ) as bar:  # fmt: skip
        yield bar.update
