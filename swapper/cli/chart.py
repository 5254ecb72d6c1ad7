"""Figures as a picture."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from swapper.bench.measure import Figure, Spread
from swapper.errors import SwapError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["WIDTH_PIXELS", "check_target", "draw"]

WIDTH_PIXELS = 1500
_DPI = 150
_LEAST_CPU = 1e-4
"""Start of the logarithmic scale, in CPU seconds per GB: a run that is too short for a clock has none at all."""
_OURS, _OTHERS, _BASELINE, _SMALL_PRINT = "#1f6feb", "#b8c0cc", "#d1495b", "#555555"


def check_target(path: Path) -> None:
    """Refuse a picture that could not be drawn or written, before time is spent on figures.

    Raises:
        SwapError: in words that say what to change.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise SwapError("a plot needs matplotlib: pip install matplotlib") from None
    if path.suffix.lower() != ".png":
        raise SwapError(f"{path}: the name of a plot ends in .png")
    if not os.access(path.parent, os.W_OK) or path.is_dir():
        raise SwapError(f"{path}: no file can be written there")


def draw(path: Path, figures: Sequence[Figure], *, title: str, below: str) -> None:
    """Draw bandwidth and CPU time as bars, those of swapper in colour, and write a PNG `WIDTH_PIXELS` wide.

    What has no proof is named, without a bar.

    Args:
        path: as checked by `check_target`.
        figures: in the order of the rows.
        title: what was measured.
        below: one line in small print.

    Raises:
        OSError: it cannot be written.
    """
    from matplotlib.figure import Figure as Picture

    groups = list(dict.fromkeys((figure.operation, figure.directories) for figure in figures))
    several = len({directories for _, directories in groups}) > 1
    members = [[f for f in figures if (f.operation, f.directories) == group] for group in groups]
    sizes = [len(each) for each in members]
    height = 1.5 + sum(0.28 * size + 0.7 for size in sizes)
    picture = Picture(figsize=(WIDTH_PIXELS / _DPI, height), dpi=_DPI, layout="constrained")
    axes = picture.subplots(len(groups), 2, squeeze=False, gridspec_kw={"height_ratios": sizes, "width_ratios": [3, 2]})
    picture.suptitle(title, fontsize=11, fontweight="bold")
    picture.supxlabel(below, fontsize=7, color=_SMALL_PRINT)
    for (operation, directories), each, (left, right) in zip(groups, members, axes, strict=True):
        _draw_bars(left, each, [None if f.refusal else f.bandwidth_bps for f in each], scale=1e9, digits=2)
        fio = [f.bandwidth_bps.median / 1e9 for f in each if f.name.startswith("fio ") and not f.refusal]
        if fio:
            left.axvline(max(fio), color=_BASELINE, lw=0.9, ls="--", label="best of fio")
            left.legend(loc="lower right", fontsize=6, frameon=False)
        left.set_title(f"{operation}, {' + '.join(directories)}" if several else operation, fontsize=9, loc="left")
        left.set_yticks(range(len(each)), [figure.name for figure in each])
        left.set_xlim(left=0)
        # From a registered read to a copy through the page cache is a factor of hundreds.
        right.set_xscale("log")
        # Before the bars: to look for limits of its own matplotlib needs more than one value, and else warns.
        right.set_xlim(_LEAST_CPU, 4 * max([_LEAST_CPU, *(f.cpu_s_per_gb.max for f in each if not f.refusal)]))
        _draw_bars(right, each, [None if f.refusal else f.cpu_s_per_gb for f in each], scale=1.0, digits=4)
        right.set_yticks([])
    axes[-1][0].set_xlabel("GB/s: more is better", fontsize=8)
    axes[-1][1].set_xlabel("CPU s/GB, logarithmic: less is better", fontsize=8)
    picture.savefig(path, format="png", dpi=_DPI)


def _draw_bars(
    axis: Axes, figures: Sequence[Figure], spreads: Sequence[Spread | None], *, scale: float, digits: int
) -> None:
    shown = [(i, spread) for i, spread in enumerate(spreads) if spread is not None]
    least = _LEAST_CPU if axis.get_xscale() == "log" else 0.0
    axis.barh(
        [i for i, _ in shown],
        [max(spread.median / scale, least) for _, spread in shown],
        xerr=[
            [(spread.median - spread.min) / scale for _, spread in shown],
            [(spread.max - spread.median) / scale for _, spread in shown],
        ],
        color=[_OURS if figures[i].name.startswith("swapper") else _OTHERS for i, _ in shown],
        height=0.7,
        error_kw={"lw": 0.8, "capsize": 2, "ecolor": _SMALL_PRINT},
    )
    for i, spread in enumerate(spreads):
        text = "no proof" if spread is None else f"{spread.median / scale:.{digits}f}"
        end = least if spread is None else max(spread.max / scale, least)
        ground = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
        axis.annotate(text, (end, i), (5, 0), textcoords="offset points", va="center", fontsize=7, bbox=ground)
    axis.margins(x=0.14)
    axis.set_ylim(len(figures) - 0.5, -0.5)
    axis.tick_params(labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)
