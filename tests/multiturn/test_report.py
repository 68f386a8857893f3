"""Figures of runs that are known in advance, and what is made of them: tables, page, charts, JSON."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from benchmarks.multiturn.commands import main
from benchmarks.multiturn.compare import compare
from benchmarks.multiturn.figures import Limits, figures, traffic
from benchmarks.multiturn.results import Run, read_run
from benchmarks.multiturn.saved import benefit, prefill_cost
from hicache_mooncake.errors import ConfigError
from tests.multiturn.runs import prefill, write_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    folder = tmp_path_factory.mktemp("runs")
    none = write_run(folder / "none.parquet", "device <only>", lambda client, turn: 0)
    pool = write_run(folder / "pool.parquet", "pool", lambda client, turn: 1000 * (turn - 1))
    return [none, pool]


def test_figures_of_turns_and_tiers(runs: list[Run]) -> None:
    none, pool = (figures(run, Limits(ttft=0.2, tbt=0.2)) for run in runs)
    assert (none.hits.token_ratio, none.hits.any_request) == (0.0, 0.0)
    assert pool.hits.tokens == {"device": 0.0, "host": 0.0, "storage": 10 / 15}
    assert pool.hits.any_request == 0.8
    assert [turn.hits.token_ratio for turn in pool.turns] == [0.0, 1 / 2, 2 / 3, 3 / 4, 4 / 5]
    assert [turn.requests for turn in pool.turns] == [8] * 5 and pool.prompt_tokens == 8 * 15_000
    assert pool.good == 1.0 and none.good == 1 / 5, "only the first turn's 0.11 s are within the limit"
    assert figures(runs[1], Limits(ttft=9, tbt=0.01)).good == 0.0
    ways = {way.way: (way.tokens, way.bytes) for way in traffic(runs[1])}
    assert ways["host → device"] == (10.0, 1000.0)


def test_saved_time_is_what_computing_would_have_taken(runs: list[Run]) -> None:
    cost = prefill_cost(runs)
    assert cost is not None and "to themselves" in cost.basis
    found = benefit(runs[1], cost)
    saved = 8 * sum(prefill(1000 * turn, 0) - prefill(1000, 1000 * (turn - 1)) for turn in range(1, 6))
    assert found.saved["storage"] == pytest.approx(saved, rel=0.02) and found.saved["device"] == 0.0
    assert found.waited == pytest.approx(8 * 10_000 * 1e-6)
    assert found.lookup == 0.25 and found.move is None
    assert found.net == pytest.approx(found.total_saved - 0.08)


def test_a_comparison_is_sure_of_differences_only(runs: list[Run], tmp_path: Path) -> None:
    found = compare(runs[0], runs[1])
    assert (found.paired, found.pairs, found.answers_equal) == (True, 40, 40)
    mean = found.changes[0]
    assert mean.sure and 0.2 < mean.low <= mean.ratio <= mean.high < 0.7
    first_turn = next(change for change in found.changes if change.name == "mean TTFT, turn 1")
    assert not first_turn.sure, "nobody hits in the first turn"
    same = compare(runs[0], runs[0])
    assert all((change.ratio, change.low, change.high) == (1.0, 1.0, 1.0) for change in same.changes)


class Tags(HTMLParser):
    """Counts tags, and finds what a page loads from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: dict[str, int] = {}
        self.foreign: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[tag] = self.open.get(tag, 0) + 1
        if tag in ("script", "link", "img", "iframe"):
            self.foreign.append(tag)


def test_the_report_is_a_page_charts_tables_and_json(
    runs: list[Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(run.path) for run in runs]
    main(["report", *words, "--out", str(tmp_path / "out"), "--json", str(tmp_path / "report.json")])
    said = capsys.readouterr().out
    assert "TTFT by turn" in said and "device <only>" in said
    page = (tmp_path / "out" / "report.html").read_text()
    tags = Tags()
    tags.feed(page)
    assert tags.open["svg"] == 4 and tags.foreign == [] and "device &lt;only&gt;" in page and "<only>" not in page
    assert not re.search(r"(?:src|href)=['\"]https?:", page)
    for name in ("ttft_by_turn", "ttft_distribution", "hits_by_turn", "benefit"):
        assert (tmp_path / "out" / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    written = json.loads((tmp_path / "report.json").read_text())
    assert [run["name"] for run in written["runs"]] == ["device <only>", "pool"]
    assert written["runs"][1]["token_hit_ratio"] == pytest.approx(10 / 15) and written["warnings"] == []
    main(["compare", *words])
    assert "faster" in capsys.readouterr().out


def test_files_that_are_no_runs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"no")
    for path in (tmp_path / "x.parquet", tmp_path / "absent.parquet"):
        with pytest.raises(ConfigError, match="Parquet file of a replay"):
            read_run(path)
        with pytest.raises(SystemExit, match="error: setting 'run'"):
            main(["report", str(path)])
