"""The output of the commands: lines and tables for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

__all__ = ["complain", "fail_if", "make_console", "print_json", "print_table", "printable", "say"]


def make_console(*, stderr: bool = False) -> Console:
    """Colours on a terminal, plain text elsewhere. Nothing is ever cut."""
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False, soft_wrap=True)


def printable(text: object) -> str:
    """`text` without what a terminal would obey or cannot show: names on a shared drive are anybody's to choose."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape", "surrogatepass").decode()
        for character in str(text)
    )


def print_table(console: Console, header: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> None:
    """Columns as wide as their widest cell; the last one is not padded. Strings are made `printable`."""
    lines = [[Text(title, style="bold") for title in header]]
    lines += [[Text(printable(cell)) if isinstance(cell, str) else cell for cell in row] for row in rows]
    widths = [max(cell_len(line[i].plain) for line in lines) for i in range(len(header))]
    for line in lines:
        joined = Text()
        for cell, width in zip(line[:-1], widths[:-1], strict=True):
            joined.append_text(cell).append(" " * (width - cell_len(cell.plain) + 2))
        console.print(joined.append_text(line[-1]))


def print_json(data: Mapping[str, object]) -> None:
    """One object on standard output."""
    typer.echo(json.dumps(data, indent=2))


def say(line: str) -> None:
    """A line on standard output."""
    typer.echo(printable(line))


def complain(message: str) -> None:
    """A line on standard error for each of the message's."""
    for line in message.splitlines():
        typer.echo(f"swapper {printable(' '.join(line.split()))}", err=True)


def fail_if(complaints: Sequence[str]) -> None:
    """Complain, and end the command with 1; return if there is nothing to complain about."""
    for complaint in complaints:
        complain(complaint)
    if complaints:
        raise typer.Exit(1)
