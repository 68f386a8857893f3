"""The replay against a real SGLang on the CPU, the two APIs' events, and the README's commands."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.multiturn import shape
from benchmarks.multiturn.api import Answer, Events, Prompt, Refused, body
from benchmarks.multiturn.generate import multiturn
from benchmarks.multiturn.loops import arrivals
from benchmarks.multiturn.provenance import counters, server_facts
from benchmarks.multiturn.replay import Endpoint, Options, replay
from benchmarks.multiturn.results import read_run
from benchmarks.multiturn.workload import Blocks, Session, Text, Turn, Workload
from hicache_mooncake.errors import ConfigError, Unavailable
from testbed.models import write_llama
from testbed.server import SGLangServer, free_port
from tests.warm_sglang import warm_sglang

__all__ = ["warm_sglang"]

ROOT = Path(__file__).resolve().parents[2]
WORDS = (3, 500)


def test_events_are_cut_anywhere_and_timed_by_token() -> None:
    stream = b""
    for count in (1, 2, 4):
        meta: dict[str, Any] = {"completion_tokens": count, "prompt_tokens": 9, "cached_tokens": 4, "queue_time": 0.5}
        meta |= {"cached_tokens_details": {"device": 1, "host": 1, "storage": 2}, "forward_entry_time": 7.0}
        meta |= {"prefill_finished_time": 7.25, "storage_prefetch_wait": 0.125}
        stream += b"data: " + json.dumps({"output_ids": list(range(count)), "meta_info": meta}).encode() + b"\n\n"
    stream += b"data: [DONE]\n\n"
    events, answer, now = Events(), Answer(), 0.0
    for at in range(0, len(stream), 7):
        for event in events.feed(stream[at : at + 7]):
            now += 1.0
            answer.take("sglang", event, now)
    assert (answer.first, answer.gaps, answer.output_tokens) == (1.0, [1.0, 0.5, 0.5], 4)
    assert (answer.cached, answer.ids, answer.prompt_tokens) == ((1, 1, 2), [0, 1, 2, 3], 9)
    assert (answer.queue, answer.prefill, answer.storage_wait) == (0.5, 0.25, 0.125)


def test_openai_events_tell_tokens_and_tiers() -> None:
    answer = Answer()
    answer.take("openai", b'{"choices": [{"text": "ab", "token_ids": [5]}]}', 1.0)
    answer.take("openai", b'{"choices": [{"text": "c"}], "usage": {"completion_tokens": 3, "prompt_tokens": 8}}', 2.0)
    answer.take("openai", b'{"choices": [], "sglext": {"cached_tokens_details": {"device": 2, "host": 3}}}', 3.0)
    assert (answer.output_tokens, answer.gaps, answer.cached, answer.text) == (3, [0.5, 0.5], (2, 3, 0), "abc")
    for bad, again in ((b'{"error": {"message": "full"}}', True), (b"[1]", False), (b"nonsense", True)):
        with pytest.raises(Refused) as refused:
            Answer().take("openai", bad, 0.0)
        assert refused.value.again == again
    assert json.loads(body("openai", "m", Prompt(None, "hi"), 3))["prompt"] == "hi"


def test_what_a_server_tells_is_kept_without_its_keys() -> None:
    told = {"version": "1", "api_key": "k1", "admin_api_key": "k2", "launch_command": "run --api-key k3 --tp 2"}
    assert "k" not in re.sub(r"--api-key|launch_command", "", json.dumps(server_facts(told)))
    page = 'hicache_mooncake_objects_total{op="get",pool="p",result="local"} 3.0\nsglang:x_bucket{le="1"} 4\n'
    assert counters(page) == {"hicache_mooncake_objects_total": 3.0, "hicache_mooncake_objects_total{get,local}": 3.0}


def test_arrivals_are_in_order_with_subagents_among_them() -> None:
    def session(name: str, *times: float, after: tuple[Session, ...] = ()) -> Session:
        turns = [Turn(at, (Text("x"),), 1, at=time) for at, time in enumerate(times, 1)]
        return Session(name, (*turns[:-1], Turn(len(times), (Text("x"),), 1, at=times[-1], after=after)))

    mixed = [session("a", 0.0, 5.0, after=(session("sub", 1.0, 4.0),)), session("b", 2.0, 3.0)]
    workload = Workload("w", lambda: iter(mixed))
    found = [(at, one.id) for at, one, _ in arrivals(workload)]
    assert found == [(0.0, "a"), (1.0, "sub"), (2.0, "b"), (3.0, "b"), (4.0, "sub"), (5.0, "a")]
    with pytest.raises(ConfigError, match="order of their times"):
        list(arrivals(Workload("w", lambda: iter(mixed[::-1]))))
    with pytest.raises(ConfigError, match="timestamps"):
        list(arrivals(multiturn(1, 1, 16)))


def test_no_server_is_said_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="no server answers"):
        replay(multiturn(1, 1, 16), Endpoint(f"http://127.0.0.1:{free_port()}"), Options(), tmp_path / "x.parquet")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def server(warm_sglang: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    folder = tmp_path_factory.mktemp("replay")
    with SGLangServer(write_llama(folder / "model"), admin_api_key=None, log_path=folder / "server.log") as started:
        yield started


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.parametrize("api", ["sglang", "openai"])
def test_a_closed_loop_hits_what_was_said_before(server: SGLangServer, tmp_path: Path, api: str) -> None:
    server.flush()
    workload = multiturn(3, 3, 128, 4, shared=0.5)
    options = Options(in_flight=2, vocabulary=WORDS)
    endpoint = Endpoint(server.url, "sglang" if api == "sglang" else "openai")
    done = replay(workload, endpoint, options, tmp_path / "run.parquet", configuration="here")
    run = read_run(done.path)
    assert (done.requests, done.failed, len(run.rows)) == (9, 0, 9)
    for row in run.rows:
        assert row.ttft_s is not None and 0 < row.ttft_s < 60 and row.output_tokens == 4 and row.cached_known
        assert row.prompt_tokens == 128 * row.turn + 4 * (row.turn - 1)
        assert row.due_s <= row.sent_s < (row.first_token_s or 0) <= row.done_s
    for turn in (2, 3):
        assert all(row.cached_device >= 128 * (turn - 1) for row in run.rows if row.turn == turn)
    assert sum(row.cached_device == 64 for row in run.rows if row.turn == 1) >= 1, "the shared half of the first turn"
    assert run.metadata["machine"]["cpus"] >= 1 and run.metadata["server"]["version"]
    assert run.metrics["sglang:prompt_tokens_total"] == sum(row.prompt_tokens for row in run.rows)


@pytest.mark.server
@pytest.mark.slow
def test_an_open_loop_counts_from_when_a_request_was_due(server: SGLangServer, tmp_path: Path) -> None:
    def sessions() -> Iterator[Session]:
        for number in range(6):
            yield Session(f"s{number}", (Turn(1, (Blocks(f"o{number}", (0,), 256, 256),), 8, at=0.01 * number),))

    options = Options(loop="open", in_flight=1, vocabulary=WORDS)
    run = read_run(replay(Workload("burst", sessions), Endpoint(server.url), options, tmp_path / "o.parquet").path)
    for number, row in enumerate(run.rows):
        assert row.due_s == pytest.approx(0.01 * number) and not row.error
        assert row.ttft_s == pytest.approx((row.first_token_s or 0) - row.due_s)
    assert run.rows[-1].sent_s >= run.rows[-2].done_s, "one at a time, and its wait is in its TTFT"


@pytest.mark.server
@pytest.mark.slow
def test_refusals_are_rows_with_their_error(server: SGLangServer, tmp_path: Path) -> None:
    workload = shape.limited(multiturn(1, 1, 20_000), requests=1)
    done = replay(workload, Endpoint(server.url), Options(vocabulary=WORDS, retries=1), tmp_path / "r.parquet")
    (row,) = read_run(done.path).rows
    assert done.failed == 1 and row.error and row.ttft_s is None


@pytest.mark.server
@pytest.mark.slow
def test_the_commands_of_the_readme_run(server: SGLangServer, tmp_path: Path) -> None:
    text = (ROOT / "benchmarks" / "multiturn" / "README.md").read_text()
    commands = re.findall(r"^\$ (.*)$", text, re.MULTILINE)
    assert len(commands) == 6
    env = {**os.environ, "URL": server.url, "URL2": server.url, "PYTHONPATH": str(ROOT)}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    script = "set -e\n" + "\n".join(commands)
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "requests in both runs, compared pairwise; 16 answers equal" in done.stdout
    assert (tmp_path / "runs" / "report" / "report.html").exists() and (tmp_path / "runs" / "compare.json").exists()
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        subprocess.run(
            [sys.executable, "-c", block], cwd=tmp_path, env=env, timeout=60, check=True, capture_output=True
        )


@pytest.mark.server
@pytest.mark.slow
def test_an_interrupted_run_keeps_what_it_has(server: SGLangServer, tmp_path: Path) -> None:
    from benchmarks.multiturn.replay import replay_async

    async def interrupted() -> None:
        seen = asyncio.Event()
        work = replay_async(
            multiturn(1, 50, 16, 4), Endpoint(server.url), Options(vocabulary=WORDS), tmp_path / "i.parquet",
            progress=lambda done, total, note: seen.set(),
        )  # fmt: skip
        task = asyncio.ensure_future(work)
        await asyncio.wait_for(seen.wait(), 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(interrupted())
    run = read_run(tmp_path / "i.parquet")
    assert run.metadata["interrupted"] and 0 < len(run.rows) < 50


@pytest.mark.server
@pytest.mark.slow
def test_a_workload_that_cannot_be_sent_leaves_no_file(server: SGLangServer, tmp_path: Path) -> None:
    workload = shape.shrunk(Workload("w", lambda: iter([Session("s", (_short_blocks(),))])), 0.1)
    with pytest.raises(ConfigError, match="block tokens"):
        replay(workload, Endpoint(server.url), Options(vocabulary=WORDS), tmp_path / "x.parquet")
    assert list(tmp_path.iterdir()) == []


def _short_blocks() -> Turn:
    return Turn(1, (Blocks("s", (1, 2, 3), 32, 96),), 1)


def test_options_that_cannot_work_are_refused_before_anything_starts() -> None:
    for wrong in ({"in_flight": 0}, {"retries": -1}, {"rate": float("nan")}, {"vocabulary": (5, 5)}):
        with pytest.raises(ConfigError):
            Options(**wrong)
