"""A bar with the time that is left, on a terminal only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from swapper.cli.output import make_console

__all__ = ["progress_bar"]


@contextlib.contextmanager
def progress_bar(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on standard error of `total` steps. What it yields is called after each, with a few words about it.

    It draws only then: a thread that draws would be counted as CPU time of what is measured.
    """
    console = make_console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, auto_refresh=False, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=total)

        def advance(what: str) -> None:
            progress.update(task, advance=1, description=what, refresh=True)

        yield advance
