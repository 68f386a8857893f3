"""Runs side by side: everything that the page, the terminal's tables and the JSON show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.multiturn.compare import Comparison, compare
from benchmarks.multiturn.cost_profile import Profile
from benchmarks.multiturn.figures import Figures, Limits, Traffic, figures, traffic
from benchmarks.multiturn.results import Run
from benchmarks.multiturn.saved import Benefit, PrefillCost, benefit, prefill_cost


@dataclass(frozen=True)
class Column:
    """One run. ``benefit`` is None where nothing tells what computing costs."""

    run: Run
    figures: Figures
    traffic: Sequence[Traffic]
    benefit: Benefit | None
    against_first: Comparison | None

    @property
    def name(self) -> str:
        return self.figures.name


@dataclass(frozen=True)
class Report:
    """Runs in the order in which they were given; the first is what the others are held against."""

    columns: Sequence[Column]
    limits: Limits
    cost: PrefillCost | None
    warnings: Sequence[str]

    @property
    def workload(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.columns[0].run.metadata.get("workload", {})
        return found

    @property
    def turns(self) -> list[int]:
        """All turns of all runs, in order."""
        return sorted({turn.number for column in self.columns for turn in column.figures.turns})


def report(runs: Sequence[Run], limits: Limits | None = None, profile: Profile | None = None) -> Report:
    """Put runs side by side. ``profile`` says what computing costs; without it, it is fitted to the runs."""
    limits = limits or Limits()
    cost = prefill_cost(runs, profile)
    columns = [
        Column(
            run,
            figures(run, limits),
            traffic(run),
            benefit(run, cost) if cost else None,
            compare(runs[0], run) if at else None,
        )
        for at, run in enumerate(runs)
    ]
    return Report(columns, limits, cost, _warnings(columns))


def _warnings(columns: Sequence[Column]) -> list[str]:
    """What a reader of the figures must know."""
    said = []
    workloads = {_shown(column.run.metadata.get("workload", {})) for column in columns}
    if len(workloads) > 1:
        said.append("The runs had different workloads: their figures do not compare.")
    for setting in ("clock", "options"):
        if len({_shown(column.run.metadata.get(setting, {})) for column in columns}) > 1:
            said.append(f"The runs differ in how they were asked ({setting}).")
    if len({_shown(column.run.metadata.get("machine", {}), without=("load",)) for column in columns}) > 1:
        said.append("The runs were made on different machines.")
    for column in columns:
        got = column.figures
        if column.run.metadata.get("interrupted"):
            said.append(f"{got.name}: the run was interrupted.")
        if got.failed:
            said.append(f"{got.name}: {got.failed} of {got.requests} requests failed and are in no time or hit.")
        if got.retried:
            said.append(f"{got.name}: {got.retried} requests were tried again; lost time is in their TTFT.")
        if got.hits.tokens is None and got.requests > got.failed:
            said.append(f"{got.name}: the server does not tell cached tokens (SGLang: --enable-cache-report).")
        found = column.against_first
        if found and found.pairs and found.answers_equal < found.pairs:
            said.append(
                f"{got.name}: {found.pairs - found.answers_equal} of {found.pairs} answers differ from those of "
                f"{found.first}."
            )
    return said


def _shown(setting: Any, without: Sequence[str] = ("notes",)) -> str:
    return repr(
        sorted(item for item in setting.items() if item[0] not in without) if isinstance(setting, dict) else setting
    )


def as_json(made: Report) -> dict[str, Any]:
    """The report for programs: what the tables show, by run."""
    return {
        "workload": dict(made.workload),
        "limits": asdict(made.limits),
        "prefill_cost": None if made.cost is None else {"basis": made.cost.basis, "error": made.cost.error},
        "warnings": list(made.warnings),
        "runs": [
            {
                "name": column.name,
                "file": str(column.run.path),
                **asdict(column.figures),
                "input_per_s": column.figures.input_per_s,
                "output_per_s": column.figures.output_per_s,
                "goodput": column.figures.goodput,
                "token_hit_ratio": column.figures.hits.token_ratio,
                "traffic": [asdict(way) for way in column.traffic],
                "benefit": None
                if column.benefit is None
                else {**asdict(column.benefit), "total_saved": column.benefit.total_saved, "net": column.benefit.net},
                "against_first": None if column.against_first is None else asdict(column.against_first),
            }
            for column in made.columns
        ],
    }
