"""What the demo shows: progress on stderr while it runs, one table and a few sentences on stdout when it is done."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.demo_conversation import Phase
from benchmarks.demo_machines import POOL, Contents

_WIDTH = 110
_LONGEST_LINE = 90


class Screen:
    """Progress of ``steps`` steps: a bar on a terminal, a line a step elsewhere."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._done = 0
        self._started = time.monotonic()
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            self._bar = Progress(
                SpinnerColumn(),
                BarColumn(20),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.description}"),
                console=self._console,
                transient=True,
            )
            self._task = self._bar.add_task("", total=steps)

    def __enter__(self) -> Screen:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take the bar off the screen. Safe to call again."""
        if self._bar:
            self._bar.stop()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def doing(self, what: str) -> None:
        """Say what is being done now."""
        if self._bar:
            self._bar.update(self._task, description=escape(what[:_LONGEST_LINE]))
        else:
            self._line(f"{self._done:2}/{self._steps}  {what}")

    def step(self) -> None:
        """One more step is done."""
        self._done += 1
        if self._bar:
            self._bar.update(self._task, completed=self._done)

    def note(self, what: str) -> None:
        """A line that stays on the screen."""
        if self._bar:
            self._bar.console.print(f"[dim]{self.seconds:4.0f} s[/]  {escape(what)}", highlight=False)
        else:
            self._line(what)

    def fail(self, message: str, hint: str) -> None:
        """The one line that says why there is no result, and the one that says what to do."""
        self.close()
        self._console.print(f"[bold red]demo failed:[/] {escape(message)}", highlight=False, soft_wrap=True)
        if hint:
            self._console.print(f"[bold]hint:[/] {escape(hint)}", highlight=False, soft_wrap=True)

    def _line(self, text: str) -> None:
        print(f"[{self.seconds:4.0f} s] {text}", file=sys.stderr, flush=True)


def show_table(title: str, reference: Phase, phases: Sequence[Phase]) -> None:
    """Every turn of every phase, the reference first."""
    table = Table(
        title=title,
        caption="TTFT: time to the first token. Before each turn, except in 'cold', the server's own device and\n"
        "host tiers are emptied, as if other conversations had filled them. Every server is warm: it has\n"
        "answered a short prompt of another conversation before.",
        box=box.SIMPLE_HEAD,
        title_style="bold",
        caption_justify="left",
    )
    for name in ("phase", "turn", "prompt\ntokens", "from\ndevice", "from\nhost", "from\npool", "computed", "TTFT\nms"):
        table.add_column(name, justify="left" if name == "phase" else "right", no_wrap=True)
    table.add_column("x faster than\nwithout pool", justify="right", no_wrap=True)
    for phase in (reference, *phases):
        for number, (turn, base) in enumerate(zip(phase.turns, reference.turns, strict=True), 1):
            last = number == len(phase.turns)
            table.add_row(
                f"[bold]{escape(phase.name)}[/]" if number == 1 else "",
                str(number),
                _count(turn.prompt),
                _count(turn.device),
                _count(turn.host),
                f"[green]{_count(turn.pool)}[/]" if turn.pool else _count(0),
                _count(turn.computed),
                f"{1000 * turn.ttft:,.0f}",
                "" if phase is reference else _times(base.ttft, turn.ttft),
                end_section=last,
            )
    _out().print(table)


def show_summary(reference: Phase, phases: Sequence[Phase], pages_over_tcp: int, complaints: Sequence[str]) -> None:
    """The means, and whether every answer was right."""
    out = _out()
    gains = ", ".join(
        f"[bold]{1000 * phase.mean_ttft:,.0f} ms[/] {phase.name} ({_times(reference.mean_ttft, phase.mean_ttft)})"
        for phase in phases
        if phase.from_pool
    )
    without = f"[bold]{1000 * reference.mean_ttft:,.0f} ms[/] without the pool"
    out.print(f"Mean TTFT: {without}; with it {gains}.", soft_wrap=True)
    out.print(f"The second node read {pages_over_tcp:,} pages from the first over TCP.")
    if complaints:
        out.print(f"[bold white on red] WRONG [/] {len(complaints)} checks failed:")
        for complaint in complaints:
            out.print(f"  [red]{escape(complaint)}[/]")
    else:
        out.print("[green]All answers are those computed without any cache, token for token.[/]")


def show_pool(url: str, pool: Contents, *, kept: bool) -> None:
    """What Redis says the pool holds, and how to look for oneself."""
    out = _out()
    out.print(f"\nThe pool, as Redis describes it: {pool.pages:,} pages, {_mib(pool.bytes)}")
    for node in pool.nodes:
        out.print(
            f"  node {node.name} ({node.id}, pages at {node.address}): "
            f"{node.pages:,} pages, {_mib(node.bytes)} of {_mib(node.capacity)}"
        )
    out.print("Look for yourself:" if kept else "To look for yourself, make demo ARGS=--keep, then for example:")
    cli = ["redis-cli", "-s", url.removeprefix("unix://")]
    first = pool.nodes[0].id if pool.nodes else "ID"
    for words, what in (
        ([*cli, "SMEMBERS", f"hcm:{POOL}:nodes:{{0}}"], "who is in the pool"),
        ([*cli, "HGETALL", f"hcm:{POOL}:node:{{0}}{first}"], "what a node says of itself"),
        ([*cli, "GET", pool.example], "how large a page is and who holds it"),
        (
            [str(Path(sys.executable).with_name("hicache-mooncake")), "status", "--redis-url", url, "--pool", POOL],
            "all of it, by this package's own command",
        ),
    ):
        out.print(f"  [dim]# {what}[/]")
        out.print(f"  {escape(shlex.join(words))}", soft_wrap=True)


def _out() -> Console:
    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(highlight=False, width=_WIDTH)


def _count(tokens: int) -> str:
    return f"{tokens:,}" if tokens else "-"


def _times(base: float, value: float) -> str:
    ratio = base / value
    return f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.1f}x"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
