"""Figures as people read them: the same words and units in the terminal, on the page and on the charts."""

from __future__ import annotations

from benchmarks.multiturn.compare import Change
from benchmarks.multiturn.report import Report

NOTHING = "-"

TIER_NAMES = {"device": "device (L1)", "host": "host (L2)", "storage": "pool (L3)"}


def seconds(value: float | None) -> str:
    """
    >>> seconds(0.01234), seconds(0.5), seconds(12.345), seconds(123.4), seconds(None)
    ('12.3 ms', '500 ms', '12.3 s', '123 s', '-')
    """
    if value is None:
        return NOTHING
    if abs(value) < 0.9995:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s" if abs(value) < 1000 else f"{value:,.0f} s"


def share(value: float | None) -> str:
    return NOTHING if value is None else f"{value * 100:.1f} %"


def count(value: float | None) -> str:
    """
    >>> count(950.0), count(12_345), count(5_600_000)
    ('950', '12,345', '5.60 M')
    """
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if value < 1e6 else f"{value / 1e6:.2f} M"


def rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def size(value: float | None) -> str:
    """
    >>> size(1.5e9), size(20_000), size(0.0)
    ('1.5 GB', '20 kB', '0')
    """
    if value is None:
        return NOTHING
    for unit, of in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= of:
            return f"{value / of:.3g} {unit}"
    return f"{value:.0f} B" if value else "0"


def change(found: Change) -> str:
    """A ratio with its interval, as in ``0.62 (0.55 to 0.70)``."""
    return f"{found.ratio:.2f} ({found.low:.2f} to {found.high:.2f})"


def title(made: Report) -> str:
    return str(made.workload.get("name", "replay"))


def subtitle(made: Report) -> str:
    """How the workload was asked, in a line."""
    first = made.columns[0]
    options = first.run.metadata.get("options", {})
    loop = "open loop, TTFT from when a request was due" if options.get("loop") == "open" else "closed loop"
    return f"{first.figures.requests:,} requests, {loop}, at most {options.get('in_flight')} in flight"


Table = tuple[str, list[str], list[list[str]]]


def overall(made: Report) -> Table:
    """The runs in total, a row a run."""
    head = [
        "run",
        "requests",
        "mean TTFT",
        "p50",
        "p90",
        "p99",
        "against first",
        "input tok/s",
        "tokens hit",
        "requests hit",
    ]
    head += ["TBT", "good", "goodput /s"]
    rows = []
    for column in made.columns:
        got = column.figures
        against = column.against_first
        rows.append(
            [
                got.name,
                f"{got.requests:,}" + (f", {got.failed} failed" if got.failed else ""),
                seconds(got.ttft.mean),
                seconds(got.ttft.p50),
                seconds(got.ttft.p90),
                seconds(got.ttft.p99),
                change(against.changes[0]) if against and against.changes else NOTHING,
                rate(got.input_per_s),
                share(got.hits.token_ratio),
                share(got.hits.any_request),
                seconds(got.tbt.mean),
                share(got.good),
                rate(got.goodput),
            ]
        )
    return "All turns", head, rows


def ttft_by_turn(made: Report) -> Table:
    """Mean, median and 99th percentile of each turn, a column a run."""
    head = ["turn", "prompt tokens", *(column.name for column in made.columns)]
    rows = []
    for number in made.turns:
        cells = []
        for column in made.columns:
            turn = next((turn for turn in column.figures.turns if turn.number == number), None)
            known = turn is not None and turn.ttft.mean is not None
            times = (turn.ttft.mean, turn.ttft.p50, turn.ttft.p99) if turn else ()
            cells.append(" / ".join(seconds(time) for time in times) if known else NOTHING)
        rows.append([str(number), _prompt_tokens(made, number), *cells])
    return "TTFT by turn: mean / p50 / p99", head, rows


def hits_by_turn(made: Report) -> Table:
    """Token-weighted hit ratio of each turn by tier, and the requests that hit anything."""
    head = ["turn", *(column.name for column in made.columns)]
    rows = []
    for number in made.turns:
        cells = []
        for column in made.columns:
            turn = next((turn for turn in column.figures.turns if turn.number == number), None)
            hits = turn.hits if turn else None
            if hits is None or hits.tokens is None:
                cells.append(NOTHING)
                continue
            parts = " + ".join(f"{hits.tokens[tier] * 100:.0f}" for tier in TIER_NAMES)
            cells.append(f"{share(hits.token_ratio)} = {parts}, {share(hits.any_request)}")
        rows.append([str(number), *cells])
    return "Tokens hit by turn = device + host + pool, requests that hit", head, rows


def benefits(made: Report) -> Table:
    """Prefill time saved, what it cost, and what is left, a row a run."""
    head = ["run", *(f"saved by {name}" for name in TIER_NAMES.values()), "waited for L3", "lookup (nodes)"]
    head += ["move (nodes)", "load", "net", "net a request"]
    rows = []
    for column in made.columns:
        got = column.benefit
        if got is None:
            continue
        saved = [seconds(got.saved[tier]) for tier in TIER_NAMES]
        net = [seconds(got.net), seconds(got.net / got.requests) if got.net is not None and got.requests else NOTHING]
        rows.append(
            [column.name, *saved, seconds(got.waited), seconds(got.lookup), seconds(got.move), seconds(got.load), *net]
        )
    basis = f": {made.cost.basis}" if made.cost else ""
    error = f", {made.cost.error:.0%} off (rms)" if made.cost and made.cost.error is not None else ""
    return f"Prefill time saved and its cost, whole run{basis}{error}", head, rows


def tier_traffic(made: Report) -> Table:
    """Tokens and bytes between the tiers, a row a run."""
    ways = [way.way for way in made.columns[0].traffic]
    rows = []
    for column in made.columns:
        cells = [
            f"{count(way.tokens)} tok, {size(way.bytes)}" if way.tokens is not None else NOTHING
            for way in column.traffic
        ]
        rows.append([column.name, *cells])
    return "Between the tiers", ["run", *ways], rows


def comparisons(made: Report) -> Table:
    """Every figure of every run against the first, with its 95 % interval."""
    rows = []
    for column in made.columns:
        found = column.against_first
        for of in found.changes if found else ():
            rows.append([column.name, of.name, seconds(of.first), seconds(of.second), change(of), verdict(of)])
    first = made.columns[0].name
    return f"Against {first}: ratio and 95 % interval", ["run", "figure", first, "run", "ratio", ""], rows


def verdict(of: Change) -> str:
    if not of.sure:
        return "no sure difference"
    return "faster" if of.ratio < 1 else "slower"


def _prompt_tokens(made: Report, number: int) -> str:
    for column in made.columns:
        for turn in column.figures.turns:
            if turn.number == number and turn.prompt_tokens:
                return count(turn.prompt_tokens)
    return NOTHING
