"""The command line, `swapper`: what this machine offers, what runs left on its drives, and how fast they are."""

from __future__ import annotations

import typer

__all__ = ["app", "main"]

app = typer.Typer(
    name="swapper", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__
)


@app.callback()
def _root() -> None:
    pass


def main() -> None:
    """The console script."""
    app()
