"""Progress bars on a terminal: tqdm's, without its thread."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from tqdm import tqdm

__all__ = ["ProgressBar", "progress", "progress_bar"]

_T = TypeVar("_T")


class ProgressBar(tqdm):  # type: ignore[type-arg]  # Subscripts are for type checkers only.
    """A bar that is drawn when it is updated, and not by a thread that tqdm starts with the first and never ends."""

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


def progress(items: Sequence[_T], what: str, show: bool) -> Iterable[_T]:
    """`items`, with a bar of buckets if it is long work and somebody looks."""
    return ProgressBar(items, desc=what, unit="bucket", leave=False) if show and sys.stderr.isatty() else items
