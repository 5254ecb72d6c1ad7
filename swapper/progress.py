"""`ProgressBar`: tqdm's, without the thread that it starts with the first bar, shown or not, and never ends."""

from __future__ import annotations

from tqdm import tqdm

__all__ = ["ProgressBar"]


class ProgressBar(tqdm):  # type: ignore[type-arg]  # Subscripts are for type checkers only.
    """A bar that is drawn again when it is updated, and not by a thread of its own."""

    monitor_interval = 0
