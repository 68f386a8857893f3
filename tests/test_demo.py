"""The demo as a user runs it: the pool gives its pages back in every phase, and nothing stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pool import eventually
from tests.warm_sglang import warm_sglang

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.usefixtures("warm_sglang")]

__all__ = ["warm_sglang"]

ROOT = Path(__file__).resolve().parent.parent
POOL_PHASES = ["flush", "restart", "second_node"]


@pytest.fixture
def place() -> Iterator[Path]:
    """Where the demo makes its files: its own, so that what it leaves is seen. Short, for the paths of sockets."""
    with tempfile.TemporaryDirectory(prefix="demo-") as directory:
        yield Path(directory)


def started(place: Path, *words: str, **options: Any) -> subprocess.Popen[str]:
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell starts what runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # or the demo would inherit it, and heed no Ctrl-C
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.demo", *words],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(place)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def processes_of(place: Path) -> list[str]:
    """Processes that run in the demo's environment: everything it starts inherits it."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and f"TMPDIR={place}" in (process / "environ").read_text(errors="replace"):
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue  # it has ended, or is not ours
    return found


def assert_nothing_left(place: Path) -> None:
    eventually(lambda: not processes_of(place), 10, "every process of the demo has ended")
    assert list(place.glob("hcm-*")) == []


@pytest.mark.timeout(400)
def test_the_demo_gets_its_pages_from_the_pool_and_leaves_nothing(place: Path) -> None:
    report = place / "report.json"
    with started(place, "--quick", "--json", str(report)) as demo:
        said, errors = demo.communicate(timeout=380)
    assert demo.returncode == 0, said + errors
    found = json.loads(report.read_text())
    assert found["outputs_equal"] and not found["complaints"]
    phases = {phase["phase"]: phase["turns"] for phase in found["phases"]}
    assert list(phases) == ["without_pool", "cold", *POOL_PHASES]
    for name in POOL_PHASES:
        assert [turn["pool"] // 64 for turn in phases[name]] == [
            (turn["prompt_tokens"] - 1) // 64 for turn in phases[name]
        ]
        assert all(turn["computed"] <= 64 for turn in phases[name])
    assert all(turn["computed"] == turn["prompt_tokens"] for turn in phases["without_pool"])
    assert found["pages_over_tcp"] == sum(turn["pool"] // 64 for turn in phases["second_node"])
    assert found["pool"]["pages"] == sum(node["pages"] for node in found["pool"]["nodes"]) > 0
    assert "token for token" in said and "redis-cli -s" in said
    assert "after a restart: turn 1 of 3" in errors  # progress, line by line where there is no terminal
    assert_nothing_left(place)


@pytest.mark.timeout(200)
def test_an_interrupted_demo_leaves_nothing(place: Path) -> None:
    # In a group of its own, which gets the signal as a whole, like that of a terminal's foreground.
    with started(place, "--quick", start_new_session=True) as demo:
        assert demo.stderr is not None
        for line in demo.stderr:
            if "cold: turn 2" in line:
                break
        os.killpg(demo.pid, signal.SIGINT)
        _, errors = demo.communicate(timeout=60)
    assert demo.returncode == 130, errors
    assert "interrupted" in errors and "Traceback" not in errors
    assert_nothing_left(place)


@pytest.mark.timeout(60)
def test_what_cannot_work_is_said_in_one_line_with_a_hint(place: Path) -> None:
    with started(place, "--quick", "--segment-size", "100tb") as demo:
        _, errors = demo.communicate(timeout=50)
    failed, hint = errors.strip().splitlines()[-2:]
    assert demo.returncode == 1
    assert failed.startswith("demo failed: ") and "segment_size" in failed
    assert hint.startswith("hint: ") and "Traceback" not in errors
    assert processes_of(place) == []
