"""The command line, `swapper`: what this machine offers, what runs left on its drives, and how fast they are.

Every command ends with 0 (fine), 1 (failed or refused, with one line on standard error for each failure), 2 (called
wrongly) or 130 (Ctrl-C). With `--json` it prints one JSON object on standard output and nothing else there.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from swapper.bench import machine
from swapper.cli import bench, checkpoint, pack, report, runs, tune
from swapper.cli.deepspeed_flags import BenchCommand, TuneCommand
from swapper.cli.output import complain
from swapper.errors import SwapError

__all__ = ["app", "main"]


class _Commands(TyperGroup):
    """The one place where errors become a line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except BrokenPipeError:
            raise  # Typer ends quietly: who read our output has seen enough.
        except (SwapError, OSError) as error:
            complain(f"{ctx.invoked_subcommand}: {error}")
            raise typer.Exit(1) from error


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"swapper {machine.swapper_version()}")
        raise typer.Exit


app = typer.Typer(
    name="swapper",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # Examples in the help keep their lines, and errors are one line.
)


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Report what this machine offers, what runs left on its drives, and how fast they are.

    \b
    Start with:
        swapper report --nvme-path /mnt/nvme
    """


# Every command, in the order of `swapper --help`. Each is a function in a module of its own.
app.command("report")(report.report)
app.command("ls")(runs.ls)
app.command("clean")(runs.clean)
app.command("bench", cls=BenchCommand)(bench.bench)
app.command("tune", cls=TuneCommand)(tune.tune)
app.command("pack")(pack.pack)
app.add_typer(checkpoint.app, name="checkpoint")


def main() -> None:
    """The console script."""
    app()
