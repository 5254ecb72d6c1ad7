"""Progress bars: tqdm's, without the thread that it starts with the first bar, shown or not, and never ends."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from tqdm import tqdm

__all__ = ["ProgressBar", "progress_bar"]


class ProgressBar(tqdm):  # type: ignore[type-arg]  # Subscripts are for type checkers only.
    """A bar that is drawn again when it is updated, and not by a thread of its own."""

    monitor_interval = 0


@contextlib.contextmanager
def progress_bar(what: str, length_bytes: int) -> Iterator[Callable[[int], object]]:
    """A bar on a terminal, for what takes longer than a second. Yields a function that takes the bytes of each step."""
    with ProgressBar(
        total=length_bytes, desc=what, unit="B", unit_scale=True, leave=False, delay=1,
        disable=not sys.stderr.isatty(),
    ) as bar:  # fmt: skip
        yield bar.update
