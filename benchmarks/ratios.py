"""Tables of ratios of what contestants measured, each with what it is made of and the bar it is held against."""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmark import settings_of

from swapper.bench.drive import Directory
from swapper.bench.machine import machine, swapper_version
from swapper.bench.measure import Figure
from swapper.bench.witness import Operation


@dataclass(frozen=True)
class Row:
    """One line: a ratio, what it is made of, and the bar; no bar where there is only something to show."""

    what: str
    figures: str
    ratio: float | None = None
    bar: str = ""
    passed: bool | None = None


def find(figures: Sequence[Figure], name: str, operation: Operation) -> Figure:
    return next(figure for figure in figures if (figure.name, figure.operation) == (name, operation))


def compare(
    what: str,
    one: Figure,
    other: Figure | None,
    *,
    least: float | None = None,
    most: float | None = None,
    bar: str | None = None,
    cpu: bool = False,
) -> Row:
    """The ratio of `one` to `other`, in bandwidth or CPU time, held against `least` or `most`.

    Args:
        other: None if fio is not installed.
        bar: how the bar is called, if not by its number.
    """
    judged = least is not None or most is not None
    if bar is None:
        bar = f">= {least}" if least is not None else f"<= {most}" if most is not None else ""
    missing = "fio is not installed" if other is None else one.refusal or other.refusal
    if other is None or missing:
        return Row(what, f"no figure: {missing}", None, bar, False if judged else None)
    spreads = [figure.cpu_s_per_gb if cpu else figure.bandwidth_bps for figure in (one, other)]
    scale, digits, unit = (1, 4, "CPU s/GB") if cpu else (1e9, 2, "GB/s")
    ratio = spreads[0].median / spreads[1].median
    shown = [
        f"{figure.name} {s.median / scale:.{digits}f} ({s.min / scale:.{digits}f} - {s.max / scale:.{digits}f})"
        for figure, s in zip((one, other), spreads, strict=True)
    ]
    passed = (least is None or ratio >= least) and (most is None or ratio <= most)
    return Row(what, f"{shown[0]} {unit}, {shown[1]}", ratio, bar, passed if judged else None)


def print_rows(rows: Sequence[Row], figures: Sequence[Figure]) -> None:
    """The table, and what else should be known of the figures."""
    name_width, bar_width = max(len(row.what) for row in rows), max(len(row.bar) for row in rows)
    for row in rows:
        ratio = "-" if row.ratio is None else f"{row.ratio:.3f}"
        verdict = {True: "PASS", False: "short of the bar", None: ""}[row.passed]
        print(f"{row.what:<{name_width}} {ratio:>6}  {row.bar:<{bar_width}} {verdict:<17} {row.figures}")
    for figure in figures:
        if figure.flag:
            print(f"{figure.operation} {figure.name}: {figure.flag}")


def system_line(looked_at: Directory, *more: str) -> str:
    """Versions, machine and drives."""
    here = machine()
    drives = ", ".join(f"{drive.name} ({drive.model or drive.kind})" for drive in looked_at.drives)
    parts = [f"swapper {swapper_version()}", *more, here.kernel, f"{here.cpu} x {here.cpus_usable}; {drives}"]
    return ", ".join(parts)


def as_result(
    arguments: argparse.Namespace, looked_at: Directory, rows: Sequence[Row], figures: Sequence[Figure]
) -> dict[str, Any]:
    """For `keep_result`."""
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "version": swapper_version(),
        "machine": asdict(machine()),
        "directory": asdict(looked_at),
        "arguments": settings_of(arguments),
        "rows": [asdict(row) for row in rows],
        "figures": [figure.as_json() for figure in figures],
    }
