"""Ten thousand batches leave everything as it was: descriptors, threads, memory, shared memory, Redis."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import redis

from tests.faults.conftest import HEARTBEAT, nodes
from tests.faults.load import Load
from tests.pool import Engine, NodeProcess, eventually, hashes, running

BATCHES = 10_000


def usage(pid: int) -> dict[str, int]:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "fds": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(status["Threads"]),
        "rss_kb": int(status["RssAnon"].split()[0]),
        "maps": len(Path(f"/proc/{pid}/maps").read_text().splitlines()),
    }


@pytest.mark.slow
def test_nothing_grows(redis_url: str) -> None:
    settings: dict[str, object] = {"segment_size": "4MiB", "heartbeat": HEARTBEAT, "pool": "flat"}
    with (
        running(NodeProcess(redis_url, "a", settings), NodeProcess(redis_url, "b", settings)) as (a, b),
        Engine(a.socket, pool="flat", page_bytes=4096) as lent,
        Engine(b.socket, pool="flat", page_bytes=4096, staged=True) as staged,
        redis.Redis.from_url(redis_url) as client,
    ):
        eventually(lambda: nodes(lent) == 2 == nodes(staged), 10)
        names = hashes("flat", 1500)
        processes = {"a": a.pid, "b": b.pid, "engines": os.getpid()}

        def run(batches: int) -> None:
            with Load([lent, staged], names, threads=2, batch=8, pause=0) as load:
                while load.calls < batches:
                    time.sleep(0.01)
                    assert not load.problems, load.problems[:5]

        def look() -> dict[str, dict[str, int]]:
            time.sleep(1)
            found = {name: usage(pid) for name, pid in processes.items()}
            found["host"] = {"shm": len(os.listdir("/dev/shm")), "keys": client.dbsize()}
            return found

        run(2000)  # the pools and caches fill
        before = look()
        run(BATCHES)
        after = look()
        print(before, after, sep="\n")
        for name in processes:
            assert after[name]["fds"] <= before[name]["fds"] + 8, (before, after)
            assert after[name]["threads"] <= before[name]["threads"] + 4, (before, after)
            assert after[name]["maps"] <= before[name]["maps"] + 60, (before, after)
            assert after[name]["rss_kb"] <= before[name]["rss_kb"] + 12_000, (before, after)
        held = sum(engine.stats()["pages"] for engine in (lent, staged))
        assert after["host"]["keys"] <= held + 20, "Redis holds what the nodes hold, and a few keys more"
