"""The report's charts, drawn by matplotlib: as SVG for the page, as PNG for slides."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from benchmarks.multiturn.report import Column, Report
from benchmarks.multiturn.wording import TIER_NAMES, seconds

_INK, _FAINT, _GRID = "#1f2933", "#616e7c", "#e4e7eb"
COLOURS = ("#7b8794", "#d9822b", "#2b7bba", "#0b8a5f", "#8e44ad", "#c0392b", "#b7950b", "#17a2b8")
TIER_COLOURS = {"device": "#0b5394", "host": "#4fa3d9", "storage": "#f2a541"}
_COSTS = (("waited", "waited for L3", "#c0392b"), ("load", "load", "#e8a09a"))
_MARKS = "osD^vPX*"

_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": _INK,
    "axes.labelcolor": _FAINT,
    "axes.edgecolor": _GRID,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": _GRID,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
    "legend.frameon": False,
    "svg.hashsalt": "hicache-mooncake",
}


def charts(made: Report) -> dict[str, Figure]:
    """The charts that the runs have figures for, by name, in the order in which they are shown."""
    with mpl.rc_context(_STYLE):
        found = {"ttft_by_turn": _ttft_by_turn(made), "ttft_distribution": _distribution(made)}
        if any(column.figures.hits.tokens is not None for column in made.columns):
            found["hits_by_turn"] = _hits_by_turn(made)
        if any(column.benefit is not None and column.benefit.total_saved for column in made.columns):
            found["benefit"] = _benefit(made)
    return found


def svg(figure: Figure) -> str:
    """The chart as an SVG element: text as shapes, so it looks the same everywhere."""
    written = io.StringIO()
    with mpl.rc_context(_STYLE):
        figure.savefig(written, format="svg", metadata={"Date": None})
    return re.sub(r"^.*?(?=<svg)", "", written.getvalue(), flags=re.DOTALL)


def write_pngs(found: dict[str, Figure], folder: Path) -> list[Path]:
    """Write every chart as ``NAME.png``."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with mpl.rc_context(_STYLE):
        for name, figure in found.items():
            paths.append(folder / f"{name}.png")
            figure.savefig(paths[-1], dpi=144, facecolor="white")
    return paths


def _colour(at: int) -> str:
    return COLOURS[at % len(COLOURS)]


def _axes(rows: int, columns: int, width: float, height: float, **options: Any) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, [one for row in axes for one in row]


def _time_axis(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: seconds(value) if value else "0"))
    axes.set_ylim(bottom=0)


def _turn_axis(axes: Axes) -> None:
    axes.set_xlabel("turn")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12, min_n_ticks=1))
    axes.grid(visible=False, axis="x")


def _legend(figure: Figure, axes: Axes) -> None:
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper left", ncols=min(4, max(1, len(names))), handlelength=1.6)


def _ttft_by_turn(made: Report) -> Figure:
    figure, (mean, p99) = _axes(1, 2, 10.5, 4.0)
    for axes, name in ((mean, "mean"), (p99, "p99")):
        for at, column in enumerate(made.columns):
            turns = [turn for turn in column.figures.turns if turn.ttft.mean is not None]
            values = [getattr(turn.ttft, name) for turn in turns]
            few = len(turns) <= 24
            axes.plot(
                [turn.number for turn in turns],
                values,
                color=_colour(at),
                marker=_MARKS[at % len(_MARKS)] if few else None,
                markersize=4.5,
                linewidth=1.8,
                label=column.name,
            )
        axes.set_title(f"TTFT, {name}")
        _time_axis(axes)
        _turn_axis(axes)
    _legend(figure, mean)
    return figure


def _distribution(made: Report) -> Figure:
    figure, (axes,) = _axes(1, 1, 10.5, 3.6)
    for at, column in enumerate(made.columns):
        times = np.sort([row.ttft_s for row in column.run.answered if row.ttft_s is not None])
        if len(times):
            shares = np.arange(1, len(times) + 1) / len(times)
            axes.step(times, shares, where="post", color=_colour(at), linewidth=1.8, label=column.name)
    limit = made.limits.ttft
    left, right = axes.get_xlim()
    if left < limit < right:
        axes.axvline(limit, color=_FAINT, linestyle=":", linewidth=1.2)
        axes.annotate(f" limit {seconds(limit)}", (limit, 0.02), color=_FAINT, fontsize=9)
    axes.set_title("TTFT, share of requests that had their first token by then")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: seconds(value) if value else "0"))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylim(0, 1.02)
    axes.set_xlim(left=0)
    _legend(figure, axes)
    return figure


def _hits_by_turn(made: Report) -> Figure:
    shown = [column for column in made.columns if column.figures.hits.tokens is not None]
    columns = 2 if len(shown) in (2, 4) else min(3, len(shown))
    rows = -(-len(shown) // columns)
    figure, axes = _axes(rows, columns, 10.5, 0.5 + 2.6 * rows, sharey=True, sharex=True)
    for at, one in enumerate(axes):
        if at >= len(shown):
            one.set_visible(False)
            continue
        _stack(one, shown[at])
        if at + columns >= len(shown):
            one.set_xlabel("turn")
            one.tick_params(labelbottom=True)
    _legend(figure, axes[0])
    return figure


def _stack(axes: Axes, column: Column) -> None:
    turns = [turn for turn in column.figures.turns if turn.hits.tokens is not None]
    numbers = [turn.number for turn in turns]
    bottom = np.zeros(len(turns))
    for tier, name in TIER_NAMES.items():
        shares = np.array([(turn.hits.tokens or {})[tier] for turn in turns])
        axes.bar(numbers, shares, bottom=bottom, width=0.8, color=TIER_COLOURS[tier], label=name)
        bottom += shares
    axes.set_title(column.name)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10, min_n_ticks=1))
    axes.grid(visible=False, axis="x")


def _benefit(made: Report) -> Figure:
    shown = [column for column in made.columns if column.benefit is not None]
    figure, (axes,) = _axes(1, 1, 10.5, 1.6 + 0.55 * len(shown))
    places = np.arange(len(shown))[::-1]
    left = np.zeros(len(shown))
    for tier, name in TIER_NAMES.items():
        saved = np.array([column.benefit.saved[tier] if column.benefit else 0.0 for column in shown])
        axes.barh(places, saved, left=left, height=0.6, color=TIER_COLOURS[tier], label=f"saved by {name}")
        left += saved
    left = np.zeros(len(shown))
    for cost, name, colour in _COSTS:
        spent = -np.array([getattr(column.benefit, cost) or 0.0 for column in shown])
        if spent.any():
            axes.barh(places, spent, left=left, height=0.6, color=colour, label=name)
        left += spent
    nets = [column.benefit.net if column.benefit else None for column in shown]
    known = [(place, net) for place, net in zip(places, nets, strict=True) if net is not None]
    if known:
        axes.plot([net for _, net in known], [place for place, _ in known], "D", color=_INK, markersize=5, label="net")
    axes.axvline(0, color=_FAINT, linewidth=1)
    axes.set_yticks(places, [column.name for column in shown])
    axes.tick_params(axis="y", length=0, labelcolor=_INK)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: seconds(value) if value else "0"))
    axes.grid(visible=False, axis="y")
    axes.set_title("Prefill time saved over the whole run, and its cost")
    _legend(figure, axes)
    return figure
