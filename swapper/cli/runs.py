"""`swapper ls` and `swapper clean`: the run directories on drives."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from swapper.cli.arguments import AsJson, directories_or_default
from swapper.cli.output import fail_if, make_console, print_json, print_table, printable
from swapper.errors import SwapError, SwapIOError
from swapper.sizes import format_bytes
from swapper.storage.runs import Removal, RunDirectory, RunState, find_runs, remove_run

__all__ = ["clean", "ls"]

_STYLES = {RunState.ALIVE: "green", RunState.STALE: "yellow", RunState.NEW: "cyan", RunState.UNKNOWN: "magenta"}

Directories = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="DIR", help="Where runs keep their files. Default: $SWAPPER_NVME_PATH, else ./.swapper, else '.'."
    ),
]


def ls(directories: Directories = None, as_json: AsJson = False) -> None:
    """List run directories, and who uses them.

    A run is alive while it holds its lock. It is stale if it was killed and nobody will come back: `swapper clean`
    removes it. It is new if it may be in the making. Its state is unknown if it is another host's, or unreadable.

    \b
    Example:
        swapper ls /mnt/nvme0 /mnt/nvme1
    """
    looked_in = directories_or_default(directories, ".swapper")
    found, errors = _find(looked_in)
    size_bytes = sum(run.size_bytes or 0 for run in found)
    stale = [run for run in found if run.state is RunState.STALE]
    if as_json:
        names = [str(directory) for directory in looked_in]
        runs = [_as_json(run) for run in found]
        print_json({"directories": names, "runs": runs, "size_bytes": size_bytes, "errors": errors})
    elif found:
        _print_runs(make_console(), found)
        summary = f"{len(found)} run director{'y' if len(found) == 1 else 'ies'}, {format_bytes(size_bytes)}"
        if stale:
            freed = format_bytes(sum(run.size_bytes or 0 for run in stale))
            summary += f"; {len(stale)} stale: `swapper clean` frees {freed}"
        typer.echo(summary)
    elif len(errors) < len(looked_in):
        typer.echo("no run directories in " + ", ".join(printable(directory) for directory in looked_in))
    fail_if([f"ls: {error['error']}" for error in errors])


def clean(
    directories: Directories = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask. Needed where there is no terminal.")] = False,
    force: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="RUN_DIRECTORY",
            help="Also remove this one, whose state is unknown: you say that its run is dead. May be repeated. Without "
            "DIR nothing else is removed. What is alive here is never removed.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Remove the directories of runs that were killed.

    Says how many bytes that freed. Only what is stale is removed: see `swapper ls`. What is in use, or may be another
    host's, is left alone.

    \b
    Examples:
        swapper clean --dry-run /mnt/nvme
        swapper clean --yes /mnt/nvme0 /mnt/nvme1
        swapper clean --force /mnt/shared/swapper-3f2a9c01-0
    """
    found, errors = _find(directories_or_default(directories, ".swapper") if directories or not force else [])
    forced = [Path(os.path.abspath(path)) for path in force or []]
    planned = {run.path: run for run in found if run.state is RunState.STALE}
    left = [_left(run, run.state, run.reason) for run in found if run.path not in [*planned, *forced]]
    for path in forced:
        run, refusal = _named(path)
        if run is not None and not refusal:
            planned[path] = run
        else:
            errors.append({"path": str(path), "error": refusal})

    console = make_console(stderr=as_json)  # Where the answer is JSON, what is said to the user goes elsewhere.
    if planned and not dry_run and not yes:
        _print_runs(console, list(planned.values()))
        _ask(len(planned))
    removed: list[dict[str, object]] = []
    freed_bytes = 0
    for path, run in planned.items():
        try:
            removal = Removal(True, run.size_bytes or 0, run.state, run.reason)
            if not dry_run:
                removal = remove_run(path, force=path in forced)
        except SwapIOError as error:
            errors.append({"path": str(path), "error": str(error)})
            continue
        if not removal.removed:
            left.append(_left(run, removal.state, removal.reason))
            continue
        removed.append({"path": str(path), "freed_bytes": removal.freed_bytes, "reason": removal.reason})
        freed_bytes += removal.freed_bytes
        if not as_json:
            verb = "would remove" if dry_run else "removed"
            console.print(printable(f"{verb} {path}: {format_bytes(removal.freed_bytes)}; {removal.reason}"))
    if as_json:
        print_json({"dry_run": dry_run, "removed": removed, "freed_bytes": freed_bytes, "left": left, "errors": errors})
    else:
        for entry in left:
            line = f"left alone {entry['path']}: {entry['reason']}"
            if entry["state"] == RunState.UNKNOWN.value:
                line += f"; if that run is dead: swapper clean --force {shlex.quote(entry['path'])}"
            console.print(printable(line))
        if removed:
            console.print(f"{format_bytes(freed_bytes)} {'would be ' if dry_run else ''}freed")
        elif not errors:
            console.print("nothing to remove")
    fail_if([f"clean: {error['error']}" for error in errors])


def _find(directories: Sequence[Path]) -> tuple[list[RunDirectory], list[dict[str, str]]]:
    found: dict[str, RunDirectory] = {}  # by real path: two directories may be the same
    errors = []
    for directory in directories:
        try:
            for run in find_runs(directory):
                found.setdefault(os.path.realpath(run.path), run)
        except SwapIOError as error:
            errors.append({"path": str(directory), "error": str(error)})
    return list(found.values()), errors


def _named(path: Path) -> tuple[RunDirectory | None, str]:
    """The run directory at `path`, and the reason to leave it alone, "" without one."""
    try:
        run = next((run for run in find_runs(path) if run.path == path), None)
    except SwapIOError as error:
        return None, str(error)
    if run is None:
        return None, f"{path} is no run directory"
    if run.state in (RunState.ALIVE, RunState.NEW):
        return run, f"{path} is left alone, --force or not: {run.reason}"
    return run, ""


def _left(run: RunDirectory, state: RunState | None, reason: str) -> dict[str, str]:
    return {"path": str(run.path), "state": "gone" if state is None else state.value, "reason": reason}


def _ask(count: int) -> None:
    """Return if the user agrees.

    Raises:
        SwapError: there is nobody to ask.
    """
    if not sys.stdin.isatty():
        raise SwapError(f"nothing was removed: no terminal to ask on; give --yes to remove {count}, --dry-run to look")
    typer.echo(f"Remove {'it' if count == 1 else f'all {count}'}? [y/N] ", nl=False, err=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise SwapError("nothing was removed")


def _as_json(run: RunDirectory) -> dict[str, object]:
    return {**asdict(run), "path": str(run.path), "state": run.state.value, "age_s": _age_s(run)}


def _age_s(run: RunDirectory) -> float:
    return max(0.0, time.time() - run.started_unix_s)


def _format_age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds / length)} {unit}"
    return f"{int(seconds)} s"


def _owner(run: RunDirectory) -> str:
    owner = f"{run.user or run.uid}@{run.host or 'unknown'}"
    if run.pid is not None:
        owner += f" pid {run.pid}"
    if run.program is not None:
        owner += f" ({run.program})"
    return owner


def _print_runs(console: Console, found: Sequence[RunDirectory]) -> None:
    rows: list[list[str | Text]] = []
    for run in found:
        size = None if run.size_bytes is None else format_bytes(run.size_bytes)
        known = [size, run.files, _format_age(_age_s(run)), run.run, run.rank, _owner(run), run.path]
        cells = ["unknown" if value is None else str(value) for value in known]
        rows.append([Text(run.state.value, style=_STYLES[run.state]), *cells])
    print_table(console, ["STATE", "SIZE", "FILES", "AGE", "RUN", "RANK", "OWNER", "PATH"], rows)
