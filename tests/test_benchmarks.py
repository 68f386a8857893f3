"""The benchmarks run, check what they move, and write what they promise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

_PLACES = ("put", "get same host", "get over TCP", "memcpy", "memcpy + xxh3", "memcpy 2 threads", "plain TCP stream")
_CALLS = (
    "exists, all on this host",
    "exists, all on the other",
    "exists, none",
    "Redis script, all there",
    "Redis script, none",
    "Redis PING",
)


@pytest.mark.timeout(60)
def test_the_benchmark_of_pages_writes_its_figures(tmp_path: Path) -> None:
    target = tmp_path / "pages.json"
    command = [sys.executable, "-m", "benchmarks.pages", "--quick", "--json", str(target)]
    small = ["--sizes", "4KiB,64KiB", "--pages", "16", "--keys", "16", "--cold", "2MiB"]
    done = subprocess.run([*command, *small], capture_output=True, text=True, timeout=40, check=False)
    assert done.returncode == 0, done.stderr
    assert "get same host" in done.stdout and "64 KiB" in done.stdout
    written = json.loads(target.read_text())
    assert written["settings"] == {"pages": 16, "rounds": 2, "sizes": [4096, 65536], "keys": 16}
    assert written["machine"]["cpus"] >= 1
    figures = {(figure["page_bytes"], figure["name"]): figure for figure in written["figures"]}
    assert set(figures) == {(size, name) for size in (4096, 65536) for name in _PLACES} | {
        (None, name) for name in _CALLS
    }
    for (size, _), figure in figures.items():
        assert figure["calls"] >= 4 and 0 < figure["p50_ms"] <= figure["p99_ms"]
        assert (figure["gb_per_s"] is None) == (size is None) == (figure["engine_cpu_s_per_gb"] is None)
    ratios = {(ratio["page_bytes"], ratio["name"]): ratio for ratio in written["ratios"]}
    for size in (4096, 65536):
        assert ratios[size, "get same host / memcpy"]["aim"] == 0.7
        assert ratios[size, "get over TCP / plain TCP stream"]["aim"] == 0.9
        assert ratios[size, "engine CPU s/GB, put"]["at_most"]
    assert ratios[None, "exists, all on the other / Redis script, all there"]["aim"] == 2.0
    for ratio in written["ratios"]:
        assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]
        assert ratio["met"] in (None, True, False)


@pytest.mark.timeout(90)
@pytest.mark.slow
def test_the_benchmark_of_the_ssd_tier_writes_its_figures(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="the extra [ssd] is not installed")
    target = tmp_path / "ssd.json"
    command = [sys.executable, "-m", "benchmarks.ssd", "--quick", "--json", str(target)]
    small = ["--sizes", "64KiB,1MiB", "--pages", "16", "--directory", "/var/tmp"]
    done = subprocess.run([*command, *small], capture_output=True, text=True, timeout=80, check=False)
    assert done.returncode == 0, done.stderr
    written = json.loads(target.read_text())
    figures = {(figure["page_bytes"], figure["name"]): figure for figure in written["figures"]}
    for size in (64 << 10, 1 << 20):
        for name in ("get from SSD", "get from SSD of the other host", "plain O_DIRECT, 4 threads"):
            assert figures[size, name]["gb_per_s"] > 0
    assert all(0 < ratio["low"] <= ratio["median"] <= ratio["high"] for ratio in written["ratios"])
