"""A real server through the pool's faults: its answers stay those of a server without any cache, and hits come back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hicache_mooncake.metadata.redis_server import PrivateRedis
from testbed.server import Generation, SGLangServer, prompt_ids
from tests.pool import NodeProcess, running

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.usefixtures("warm_sglang")]

PROMPTS = [prompt_ids(100 + number, 512 + 64 * number) for number in range(6)]
SHARED = 3  # the first prompts lie on the other host from the start
HEAL_WITHIN = 30.0


def ask_all(server: SGLangServer) -> list[Generation]:
    """Every prompt, three at a time."""
    with ThreadPoolExecutor(3) as threads:
        return list(threads.map(lambda prompt: server.generate(prompt, 6), PROMPTS))


@pytest.mark.timeout(300)
def test_answers_stay_right_through_every_fault(redis_server: PrivateRedis, llama: Path, tmp_path: Path) -> None:
    with SGLangServer(llama, log_path=tmp_path / "plain.log") as server:
        right = [answer.output_ids for answer in ask_all(server)]
        server.kill()
    settings: dict[str, object] = {"pool": "serverfaults"}
    here, there = NodeProcess(redis_server.url, "here", settings), NodeProcess(redis_server.url, "there", settings)
    with running(here, there):

        def on(node: NodeProcess) -> SGLangServer:
            extra = {"node": node.socket, "pool": "serverfaults", "op_timeout": 1.0}
            return SGLangServer(llama, backend="mooncake", extra_config=extra, log_path=tmp_path / f"{node.name}.log")

        with on(there) as server:
            for prompt in PROMPTS[:SHARED]:
                server.generate(prompt, 6)
            server.flush()
            server.kill()

        def kill_redis() -> None:
            os.kill(redis_server.pid, signal.SIGKILL)

        faults: list[tuple[str, Callable[[], object], Callable[[], object]]] = [
            ("Redis killed and back", kill_redis, redis_server.revive),
            ("the other host's node frozen and back", there.freeze, there.thaw),
            ("this host's node killed and back", here.kill, here.start),
            ("the other host's node killed and back", there.kill, there.start),
            ("this host's node frozen and back", here.freeze, here.thaw),
        ]
        with on(here) as server:
            for name, strike, heal in faults:
                server.flush()
                strike()
                started = time.monotonic()
                during = ask_all(server)
                assert [answer.output_ids for answer in during] == right, name
                assert time.monotonic() - started < 60, name
                heal()
                deadline = time.monotonic() + HEAL_WITHIN
                while True:
                    server.flush()
                    answers = ask_all(server)
                    assert [answer.output_ids for answer in answers] == right, name
                    if all(answer.cached.storage > 0 for answer in answers):
                        break
                    assert time.monotonic() < deadline, f"{name}: {[answer.cached for answer in answers]}"
            assert "/hicache_mooncake/" not in server.log_tail(10_000)  # no traceback of ours; SGLang has its own
            server.kill()
