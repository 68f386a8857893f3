"""A replay on the terminal: progress while it runs, and the report's tables."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from types import TracebackType

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.multiturn import wording
from benchmarks.multiturn.report import Report

_WIDE = 150
"""Columns of output that goes into a file or a pipe."""

_QUIET_STEP = 10.0
"""Seconds between the lines of progress where there is no terminal."""


class ReplayProgress:
    """A bar on a terminal, a line now and then elsewhere. Call it as :func:`~.replay.replay` calls its ``progress``."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._bar: Progress | None = None
        self._said = os.times().elapsed
        if sys.stderr.isatty():
            columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn())
            self._bar = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(escape(what), total=None)

    def __enter__(self) -> ReplayProgress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def __call__(self, done: int, total: int | None, note: str) -> None:
        what = f"{self._what}, {note}" if note else self._what
        if self._bar:
            self._bar.update(self._task, completed=done, total=total, description=escape(what))
            return
        now = os.times().elapsed
        if now - self._said >= _QUIET_STEP or done == total:
            self._said = now
            print(f"{done}{f'/{total}' if total else ''}  {what}", file=sys.stderr, flush=True)


def show(made: Report, tables: Sequence[wording.Table]) -> None:
    """Print tables of a report, and what has to be known about it."""
    console = Console(width=None if sys.stdout.isatty() else _WIDE)
    console.print(f"[bold]{escape(wording.title(made))}[/bold]  {escape(wording.subtitle(made))}", highlight=False)
    for title, head, rows in tables:
        if rows:
            print_table(console, title, head, rows)
    for warning in made.warnings:
        console.print(f"[yellow]note:[/yellow] {escape(warning)}", highlight=False)


def print_table(console: Console, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """One table: words to the left, figures to the right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for at, name in enumerate(head):
        table.add_column(name, justify="left" if at == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)
