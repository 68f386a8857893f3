"""The report as one HTML file that needs nothing beside it: charts as SVG, tables, and how the runs were made."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.multiturn import wording
from benchmarks.multiturn.charts import COLOURS
from benchmarks.multiturn.report import Column, Report

_CSS = """
:root { --ink: #1f2933; --faint: #616e7c; --line: #e4e7eb; --paper: #ffffff; --ground: #f5f7fa; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", sans-serif; }
main { max-width: 1280px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 26px; margin: 0; }
h2 { font-size: 17px; margin: 0 0 12px; }
p { margin: 4px 0; } .faint { color: var(--faint); }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 8px; padding: 20px; margin-top:
20px; } .cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: 14px; margin-top:
20px; } .card { background: var(--paper); border: 1px solid var(--line); border-top: 4px solid; border-radius: 8px;
padding: 14px 16px; } .card b { display: block; font-size: 23px; line-height: 1.25; margin: 4px 0 2px; }
.card small { color: var(--faint); display: block; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 8px; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { color: var(--faint); font-weight: 600; vertical-align: bottom; white-space: normal; }
th:first-child, td:first-child { text-align: left; }
tbody tr:last-child td { border-bottom: 0; } tbody tr:hover { background: var(--ground); }
td.faster { color: #0b6b48; font-weight: 600; } td.slower { color: #b42318; font-weight: 600; }
svg { max-width: 100%; height: auto; display: block; margin: 0 auto; }
.notes { border-left: 4px solid #d9822b; } ul { margin: 0; padding-left: 20px; }
pre { background: var(--ground); padding: 12px; border-radius: 6px; overflow-x: auto; font-size: 12.5px; margin: 8px
0; } summary { cursor: pointer; font-weight: 600; }
"""

_EXPLAINED = (
    ("TTFT", "seconds to the first token: from when the request was due (open loop) or sent (closed loop)"),
    ("tokens hit", "prompt tokens that were not computed, of all prompt tokens; by the tier where they were found"),
    ("requests hit", "requests that found at least one token in a cache"),
    ("TBT", "mean of the longest tenth of the gaps between tokens, averaged over requests"),
    ("good, goodput", "requests within both limits: their share of all, and how many a second"),
    ("saved", "what computing the tokens that were found would have taken, a request at a time"),
    ("waited for L3", "what requests waited for the pool: lookup and move as users feel them"),
    ("load", "host to device; SGLang overlaps it with computing, so it is an upper bound of its cost"),
    ("net", "saved - waited for L3 - load"),
    (
        "against first",
        "ratio to the first run, with the 95 % interval of a bootstrap over sessions; sure when 1 is outside",
    ),
)


def page(made: Report, pictures: Mapping[str, str]) -> str:
    """The whole page. ``pictures`` are SVG elements by the names that :func:`~.charts.charts` gives."""
    tables = [
        wording.overall(made),
        wording.ttft_by_turn(made),
        wording.hits_by_turn(made),
        wording.benefits(made),
        wording.tier_traffic(made),
        wording.comparisons(made),
    ]
    body = [
        f"<h1>{_text(wording.title(made))}</h1><p class='faint'>{_text(wording.subtitle(made))}; limits: TTFT "
        f"{wording.seconds(made.limits.ttft)}, TBT {wording.seconds(made.limits.tbt)}</p>",
        f"<div class='cards'>{''.join(_card(column, at) for at, column in enumerate(made.columns))}</div>",
        _notes(made.warnings),
        *(f"<section>{picture}</section>" for picture in pictures.values()),
        *(_table(title, head, rows) for title, head, rows in tables if rows),
        "<section><h2>What the figures mean</h2><table><tbody>",
        *(_term(*term) for term in _EXPLAINED),
        "</tbody></table></section>",
        *(_provenance(column) for column in made.columns),
    ]
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{_text(wording.title(made))}</title><style>{_CSS}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def write_page(made: Report, pictures: Mapping[str, str], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(made, pictures), encoding="utf-8")


def _text(text: str) -> str:
    return html.escape(text)


def _card(column: Column, at: int) -> str:
    got = column.figures
    against = column.against_first
    mean = against.changes[0] if against and against.changes else None
    beside = f"{wording.change(mean)} of the first" if mean else "mean time to the first token"
    return (
        f"<div class='card' style='border-top-color:{COLOURS[at % len(COLOURS)]}'>{_text(got.name)}"
        f"<b>{wording.seconds(got.ttft.mean)}</b><small>{_text(beside)}</small>"
        f"<small>{wording.share(got.hits.token_ratio)} of tokens hit</small>"
        f"<small>{wording.rate(got.input_per_s)} input tokens/s</small></div>"
    )


def _notes(warnings: Sequence[str]) -> str:
    if not warnings:
        return ""
    return f"<section class='notes'><ul>{''.join(f'<li>{_text(warning)}</li>' for warning in warnings)}</ul></section>"


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    names = "".join(f"<th>{_text(name)}</th>" for name in head)
    lines = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return (
        f"<section><h2>{_text(title)}</h2><div class='scroll'><table><thead><tr>{names}</tr></thead>"
        f"<tbody>{lines}</tbody></table></div></section>"
    )


def _cell(text: str) -> str:
    kind = f" class='{text}'" if text in ("faster", "slower") else ""
    return f"<td{kind}>{_text(text)}</td>"


def _term(name: str, meaning: str) -> str:
    return f"<tr><td>{_text(name)}</td><td style='text-align:left;white-space:normal'>{_text(meaning)}</td></tr>"


def _provenance(column: Column) -> str:
    """How a run was made, folded."""
    metadata: dict[str, Any] = {
        key: value for key, value in column.run.metadata.items() if key not in ("metrics", "pool")
    }
    shown = json.dumps(metadata, indent=1, ensure_ascii=False, default=str)
    counted = json.dumps({**column.run.metrics, **(column.run.metadata.get("pool") or {})}, indent=1)
    return (
        f"<section><details><summary>How “{_text(column.name)}” was made</summary><pre>{_text(shown)}</pre>"
        f"<p class='faint'>Counters, by which they grew:</p><pre>{_text(counted)}</pre></details></section>"
    )
