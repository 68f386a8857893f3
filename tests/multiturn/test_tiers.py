"""The comparison of the cache tiers: its columns, and a whole run on a real SGLang."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.multiturn.results import read_run
from benchmarks.multiturn.tiers import COLUMNS, CPU_TOKEN_BYTES, DEFAULT_COLUMNS, Sizes, _without_hierarchy

ROOT = Path(__file__).resolve().parents[2]


def test_dram_alone_does_not_hold_the_working_set_and_with_ssd_it_does() -> None:
    sizes = Sizes.for_cpu(longest_prompt=1000, working_set=100_000, in_flight=1)
    need = 100_000 * CPU_TOKEN_BYTES
    assert 0.6 * need < sizes.segment < 0.7 * need < need < sizes.ssd
    assert 1000 < sizes.device_tokens < 1200 and sizes.device_tokens % 64 == 0


def test_without_the_hierarchy_nothing_of_it_is_left() -> None:
    words = ["--model-path", "m", "--enable-hierarchical-cache", "--hicache-ratio", "2", "--hicache-mem-layout", "x"]
    assert _without_hierarchy([*words, "--tp", "1"]) == ["--model-path", "m", "--tp", "1"]


def test_columns_that_there_are_not_are_named() -> None:
    assert set(DEFAULT_COLUMNS) < set(COLUMNS)
    command = [sys.executable, "-m", "benchmarks.multiturn", "run", "--quick", "--columns", "l4", "--out", "/tmp/none"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    assert done.returncode == 1 and "columns" in done.stderr and "populated" in done.stderr


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_each_tier_brings_hits_and_all_give_the_same_answers(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.multiturn", "run", "--quick", "--out", str(tmp_path / "runs")]
    columns = ["--columns", "device,host,file,ssd,populated"]
    done = subprocess.run([*command, *columns], capture_output=True, text=True, timeout=360, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    runs = {name: read_run(tmp_path / "runs" / f"{name}.parquet") for name in columns[1].split(",")}
    answers = {name: {row.request_id: row.answer for row in run.answered} for name, run in runs.items()}
    assert len(answers["device"]) == 16
    for name, given in answers.items():
        assert given == answers["device"], f"{name} answers something else"
    pool = {name: sum(row.cached_storage or 0 for row in run.answered) for name, run in runs.items()}
    assert pool["device"] == pool["host"] == 0
    assert min(pool["file"], pool["ssd"], pool["populated"]) > 0
    assert pool["populated"] > pool["ssd"]
    assert (tmp_path / "runs" / "report.html").stat().st_size > 10_000
