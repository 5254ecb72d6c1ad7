"""A timeline of swapping as a picture, as a few lines of text, and as sums."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from swapper.metrics import TimelineEvent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["PHASES", "Shares", "draw", "share_out", "sketch"]

PHASES = ("forward", "backward", "step")
"""Names of the spans that a program gives to the parts of a training step."""

_WAITS = {
    "waiting for reads": ("swapper.wait_read",),
    "waiting for writes": ("swapper.wait_write", "swapper.wait_pool", "swapper.drain"),
}
_KINDS = {"param": "parameters", "grad": "gradients", "optim": "optimizer state"}
_COLOURS = {
    "forward": "#7aa6da",
    "backward": "#2f5f98",
    "step": "#8a6fb0",
    "waiting for reads": "#d1495b",
    "waiting for writes": "#e08e45",
    "param": "#1f9e89",
    "grad": "#b5a300",
    "optim": "#6b7280",
}
_SHADES = " ░▒▓█"
_PIXELS, _DPI = 1800, 150
_MOST_ROWS = 4
"""Transfers that are in flight at once are drawn side by side, up to so many."""

Span = tuple[float, float]


@dataclass(frozen=True)
class _Lane:
    name: str
    parts: tuple[tuple[str, tuple[TimelineEvent, ...]], ...]
    """Events by colour."""

    @property
    def spans(self) -> list[Span]:
        return [(event.start_s, event.stop_s) for _, events in self.parts for event in events]


@dataclass(frozen=True)
class Shares:
    """Where the time between two moments went. All in seconds.

    Attributes:
        phases: by name, the waits in it included.
        waits: for reads and for writes; of several waits at a time one counts.
        moving: in which at least one transfer was in flight.
        took: all of it.
    """

    phases: dict[str, float]
    waits: dict[str, float]
    moving: float
    took: float


def share_out(events: Iterable[TimelineEvent], start_s: float, stop_s: float) -> Shares:
    """Sum up what happened from `start_s` to `stop_s`."""
    inside = _clipped(events, start_s, stop_s)
    return Shares(
        {name: _covered([(e.start_s, e.stop_s) for e in inside if e.name == name]) for name in PHASES},
        {name: _covered([(e.start_s, e.stop_s) for e in inside if e.name in of]) for name, of in _WAITS.items()},
        _covered([(e.start_s, e.stop_s) for e in inside if e.name in ("read", "write")]),
        stop_s - start_s,
    )


def sketch(events: Iterable[TimelineEvent], start_s: float, stop_s: float, width: int) -> list[tuple[str, str]]:
    """A line of `width` characters for each lane: the darker, the more of that time something of it was going on."""
    lines = []
    for lane in _lanes(_clipped(events, start_s, stop_s)):
        spans = _joined(lane.spans)
        slice_s = (stop_s - start_s) / width
        shades = ""
        for i in range(width):
            first_s, last_s = start_s + i * slice_s, start_s + (i + 1) * slice_s
            part = sum(max(0.0, min(stop, last_s) - max(start, first_s)) for start, stop in spans) / slice_s
            shades += _SHADES[min(len(_SHADES) - 1, -int(-part * (len(_SHADES) - 1) // 1))]
        lines.append((lane.name, shades))
    return lines


def draw(
    path: Path, events: Sequence[TimelineEvent], start_s: float, stop_s: float, parts_s: Sequence[Span], *, title: str
) -> None:
    """Draw the time from `start_s` to `stop_s`, and below it, larger, parts of it.

    Args:
        path: what it is written to; its suffix says how: .png or .svg.
        events: from a `swapper.metrics.Timeline`, with spans named as in `PHASES`.
        parts_s: from and to, of each; at least one.
        title: what ran.

    Raises:
        OSError: it cannot be written.
    """
    from matplotlib.figure import Figure

    picture = Figure(figsize=(_PIXELS / _DPI, 3.6 * (1 + len(parts_s))), dpi=_DPI, layout="constrained")
    whole, *below = picture.subplots(1 + len(parts_s), 1)
    picture.suptitle(title, fontsize=11, fontweight="bold")
    _draw_lanes(whole, events, start_s, stop_s, start_s)
    for axes, part_s in zip(below, parts_s, strict=True):
        whole.axvspan(part_s[0] - start_s, part_s[1] - start_s, color="#ffe066", zorder=0)
        _draw_lanes(axes, events, *part_s, start_s)
        axes.set_title("a yellow part, larger; numbers are those of records", fontsize=8, loc="left")
    below[-1].set_xlabel("seconds since the step began", fontsize=8)
    picture.savefig(path, dpi=_DPI)


def _draw_lanes(axes: Axes, events: Iterable[TimelineEvent], start_s: float, stop_s: float, origin_s: float) -> None:
    lanes = _lanes(_clipped(events, start_s, stop_s))
    wide_s = (stop_s - start_s) / 40
    for y, lane in enumerate(lanes):
        rows = _rows([(colour, event) for colour, each in lane.parts for event in each])
        height = 0.8 / max(1, len(rows))
        for i, row in enumerate(rows):
            bottom = y - 0.4 + i * height
            axes.broken_barh(
                [(event.start_s - origin_s, event.stop_s - event.start_s) for _, event in row],
                (bottom, 0.92 * height),
                facecolors=[_COLOURS[colour] for colour, _ in row],
                linewidth=0,
            )
            for colour, event in row:
                if event.stop_s - event.start_s < wide_s or colour in _WAITS:
                    continue
                text = colour if event.record is None else str(event.record[2])
                middle_s = (event.start_s + event.stop_s) / 2 - origin_s
                axes.text(middle_s, bottom + height / 2, text, fontsize=6, color="white", ha="center", va="center")
    axes.set_yticks(range(len(lanes)), [lane.name for lane in lanes], fontsize=8)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlim(start_s - origin_s, stop_s - origin_s)
    axes.tick_params(axis="x", labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def _lanes(events: Sequence[TimelineEvent]) -> list[_Lane]:
    def named(*names: str) -> tuple[TimelineEvent, ...]:
        return tuple(event for event in events if event.name in names)

    def of_kind(name: str, kind: str) -> tuple[TimelineEvent, ...]:
        return tuple(event for event in named(name) if event.record is not None and event.record[1] == kind)

    lanes = [
        _Lane("computing", tuple((phase, named(phase)) for phase in PHASES)),
        _Lane("parameters in use", (("param", of_kind("use", "param")),)),
        _Lane("waiting", tuple((name, named(*of)) for name, of in _WAITS.items())),
    ]
    for operation, verb in (("read", "reads of"), ("write", "writes of")):
        lanes += [_Lane(f"{verb} {name}", ((kind, of_kind(operation, kind)),)) for kind, name in _KINDS.items()]
    return lanes


def _rows(events: Iterable[tuple[str, TimelineEvent]]) -> list[list[tuple[str, TimelineEvent]]]:
    """Events that overlap in rows of their own; those that find none in the last."""
    rows: list[list[tuple[str, TimelineEvent]]] = []
    for colour, event in sorted(events, key=lambda item: item[1].start_s):
        free = (row for row in rows if row[-1][1].stop_s <= event.start_s)
        row = next(free, rows[-1] if len(rows) == _MOST_ROWS else None)
        if row is None:
            rows.append(row := [])
        row.append((colour, event))
    return rows


def _clipped(events: Iterable[TimelineEvent], start_s: float, stop_s: float) -> list[TimelineEvent]:
    return [
        TimelineEvent(e.name, max(e.start_s, start_s), min(e.stop_s, stop_s), e.record, e.length_bytes)
        for e in events
        if e.stop_s > start_s and e.start_s < stop_s
    ]


def _joined(spans: Iterable[Span]) -> list[Span]:
    joined: list[Span] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return joined


def _covered(spans: Iterable[Span]) -> float:
    return sum(stop - start for start, stop in _joined(spans))
