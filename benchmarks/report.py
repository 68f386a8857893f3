"""Figures of a benchmark for people and for programs."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.samples import GB, Series, Spread


@dataclass(frozen=True)
class Figure:
    """One line: what a batch of pages (or keys) cost. None where it does not apply."""

    name: str
    page_bytes: int | None
    calls: int
    gb_per_s: float | None
    us_per_item: float
    p50_ms: float
    p99_ms: float
    engine_cpu_s_per_gb: float | None
    other_cpu_s_per_gb: float | None
    engine_cpu_ms_per_call: float
    other_cpu_ms_per_call: float

    @classmethod
    def of(cls, series: Series, page_bytes: int | None) -> Figure:
        p50 = series.percentile(0.5)
        engine = series.cpu_per_gb(lambda sample: sample.engine_cpu)
        other = series.cpu_per_gb(lambda sample: sample.other_cpu)
        return cls(
            series.name,
            page_bytes,
            len(series.samples),
            series.size / p50 / GB if series.size else None,
            p50 / series.count * 1e6,
            p50 * 1e3,
            series.percentile(0.99) * 1e3,
            engine.median if engine else None,
            other.median if other else None,
            series.cpu_per_call(lambda sample: sample.engine_cpu) * 1e3,
            series.cpu_per_call(lambda sample: sample.other_cpu) * 1e3,
        )


@dataclass(frozen=True)
class Judgement:
    """A figure beside the limit it is held against, over the rounds of the run. ``at_most``: smaller is better."""

    name: str
    page_bytes: int | None
    value: Spread
    aim: float | None
    at_most: bool = False

    @property
    def met(self) -> bool | None:
        if self.aim is None:
            return None
        return self.value.median <= self.aim if self.at_most else self.value.median >= self.aim


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = platform.processor() or platform.machine()
    with open("/proc/cpuinfo") as file:
        model = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), model)
    return {
        "cpu": model,
        "cpus": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }


def as_json(settings: dict[str, Any], figures: Sequence[Figure], judgements: Sequence[Judgement]) -> str:
    """The whole report; figures by name and page size, ratios with their spread over the rounds."""
    return json.dumps(
        {
            "machine": machine(),
            "settings": settings,
            "figures": [asdict(figure) for figure in figures],
            "ratios": [
                {
                    "name": judgement.name,
                    "page_bytes": judgement.page_bytes,
                    **judgement.value._asdict(),
                    "aim": judgement.aim,
                    "at_most": judgement.at_most,
                    "met": judgement.met,
                }
                for judgement in judgements
            ],
        },
        indent=1,
    )


def show(figures: Sequence[Figure], judgements: Sequence[Judgement]) -> None:
    """Print tables."""
    moves = [figure for figure in figures if figure.gb_per_s is not None]
    calls = [figure for figure in figures if figure.gb_per_s is None]
    _table(
        "Pages, by batch",
        ["page", "what", "GB/s", "µs/page", "p50 ms", "p99 ms", "engine CPU s/GB", "others CPU s/GB", "calls"],
        [
            [
                size_name(figure.page_bytes),
                figure.name,
                f"{figure.gb_per_s:.2f}",
                f"{figure.us_per_item:.0f}",
                f"{figure.p50_ms:.2f}",
                f"{figure.p99_ms:.2f}",
                f"{figure.engine_cpu_s_per_gb:.4f}",
                f"{figure.other_cpu_s_per_gb:.3f}",
                str(figure.calls),
            ]
            for figure in moves
        ],
    )
    _table(
        "Calls without pages",
        ["what", "p50 ms", "p99 ms", "µs/key", "engine CPU ms", "others CPU ms", "calls"],
        [
            [
                figure.name,
                f"{figure.p50_ms:.3f}",
                f"{figure.p99_ms:.3f}",
                f"{figure.us_per_item:.2f}",
                f"{figure.engine_cpu_ms_per_call:.3f}",
                f"{figure.other_cpu_ms_per_call:.3f}",
                str(figure.calls),
            ]
            for figure in calls
        ],
    )
    _table(
        "Beside the limits, median over the rounds (lowest to highest round)",
        ["page", "what", "ratio", "spread", "aim", ""],
        [
            [
                size_name(judgement.page_bytes),
                judgement.name,
                f"{judgement.value.median:.3f}",
                f"{judgement.value.low:.3f} to {judgement.value.high:.3f}",
                "" if judgement.aim is None else f"{'≤' if judgement.at_most else '≥'} {judgement.aim:g}",
                {None: "", True: "met", False: "missed"}[judgement.met],
            ]
            for judgement in judgements
        ],
    )


def size_name(size: int | None) -> str:
    """``262144`` as ``256 KiB``."""
    if size is None:
        return ""
    return f"{size >> 20} MiB" if size >= 1 << 20 and size % (1 << 20) == 0 else f"{size >> 10} KiB"


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if not rows:
        return
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(row[at]) for row in (columns, *rows)) for at in range(len(columns))]
        print(f"\n{title}")
        for row in (columns, *rows):
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    table = Table(title=title, title_justify="left")
    for at, column in enumerate(columns):
        table.add_column(column, justify="left" if at < 2 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=None if os.isatty(1) else 120).print(table)
