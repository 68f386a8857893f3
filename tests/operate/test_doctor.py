"""The doctor names what is planted, and nothing else."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from hicache_mooncake.config import Settings
from hicache_mooncake.metadata.directory import Directory
from hicache_mooncake.metadata.records import NodeRecord
from hicache_mooncake.operate.doctor import examine, parse_sglang_flags
from hicache_mooncake.operate.facts import Facts, facts
from hicache_mooncake.operate.rdma_facts import RdmaFacts, rdma_facts

URL = {"redis_url": "redis://r/0"}


def node(
    name: str, host: str, address: str = "10.0.0.1:7766", version: str = "0.1.0", started: float = 0.0
) -> NodeRecord:
    return NodeRecord(f"{name}~00000001", name, host, {"tcp": address}, 1 << 30, 0, version, started, 0)


def healthy(**changes: Any) -> Facts:
    good = Facts(
        Settings.of({**URL, "segment_size": "1gb"}),
        redis_ms=0.1,
        redis_binary="/usr/bin/redis-server",
        node_here=False,
        available_memory=8 << 30,
        huge_pages_free=2 << 30,
        open_files=65536,
        now=100.0,
    )
    return replace(good, **changes)


def test_a_healthy_host_has_no_findings() -> None:
    assert [finding for finding in examine(healthy()) if finding.level != "ok"] == []


SGLANG = "--enable-hierarchical-cache --hicache-storage-backend mooncake "

PLANTED: list[tuple[str, Callable[[], Facts]]] = [
    ("cannot connect", lambda: healthy(redis_error="Redis at r: cannot connect")),
    ("no server to start", lambda: healthy(settings=Settings.of({"segment_size": "1gb"}), redis_binary="")),
    ("round trip takes 9.0 ms", lambda: healthy(redis_ms=9.0)),
    ("allkeys-lru", lambda: healthy(redis_policy=("allkeys-lru", 1 << 30))),
    ("1024 of 1024 KiB", lambda: healthy(redis_policy=("noeviction", 1 << 20), redis_used=1 << 20)),
    ("not the node of pool", lambda: healthy(node_here=True, node_error="this node is of pool 'x'")),
    (
        "is not in this Redis",
        lambda: healthy(node_here=True, node_id="c~00000001", node_redis="redis://other/0", nodes=[node("a", "h")]),
    ),
    ("cannot be read: none", lambda: healthy(secret_error="secret_file cannot be read: none")),
    (
        "not JSON",
        lambda: healthy(
            sglang=parse_sglang_flags([*SGLANG.split(), "--hicache-storage-backend-extra-config", "{'pool': 1}"])
        ),
    ),
    (
        "there is no such setting",
        lambda: healthy(
            sglang=parse_sglang_flags([*SGLANG.split(), '--hicache-storage-backend-extra-config={"poool": "x"}'])
        ),
    ),
    (
        "which SGLang prints",
        lambda: healthy(
            sglang=parse_sglang_flags([*SGLANG.split(), '--hicache-storage-backend-extra-config={"secret": "x"}'])
        ),
    ),
    ("no node answers", lambda: healthy(settings=Settings.of({**URL, "node": "/run/n.sock", "segment_size": "1gb"}))),
    ("cannot be read from", lambda: healthy(nodes=[node("a", "h")], reachable={"a~00000001": "refused"})),
    (
        "tells other hosts 127.0.0.1",
        lambda: healthy(nodes=[node("a", "h1"), node("b", "h2", "127.0.0.1:5")], reachable={}),
    ),
    (
        "without a secret",
        lambda: healthy(settings=Settings.of({**URL, "listen": "0.0.0.0:7766", "segment_size": "1gb"})),
    ),
    ("segment_size is", lambda: healthy(available_memory=1 << 28, huge_pages_free=0)),
    ("2 MiB pages are free", lambda: healthy(huge_pages_free=0)),
    ("at most 1024 descriptors", lambda: healthy(open_files=1024)),
    ("no RDMA device", lambda: healthy(rdma=RdmaFacts(True))),
    (
        "RDMA cannot be used: no link is up",
        lambda: healthy(rdma=RdmaFacts(False, 1, problem="no link is up: x is DOWN")),
    ),
    (
        "2048 MiB are to be locked for 2 devices, memlock allows 8 MiB",
        lambda: healthy(rdma=RdmaFacts(True, 2, ("a", "b"), lockable=8 << 20, to_lock=2 << 30)),
    ),
    (
        "the link of mlx5_1 is down",
        lambda: healthy(
            settings=Settings.of({**URL, "segment_size": "1gb", "device_name": "mlx5_0,mlx5_1"}),
            rdma=RdmaFacts(False, 2, ("mlx5_0",), ("mlx5_1", "mlx5_2")),
        ),
    ),
    ("in our future", lambda: healthy(nodes=[node("a", "h", started=500.0)])),
    ("nodes run 0.1.0, 0.2.0", lambda: healthy(nodes=[node("a", "h"), node("b", "h", version="0.2.0")])),
    ("HiCache is off", lambda: healthy(sglang=parse_sglang_flags(["--hicache-storage-backend", "mooncake"]))),
    ("another one", lambda: healthy(sglang=parse_sglang_flags(["--enable-hierarchical-cache"]))),
    ("--hicache-ratio 1", lambda: healthy(sglang=parse_sglang_flags((SGLANG + "--hicache-ratio=1").split()))),
    (
        "best_effort",
        lambda: healthy(sglang=parse_sglang_flags((SGLANG + "--hicache-storage-prefetch-policy best_effort").split())),
    ),
    ("never looked up", lambda: healthy(sglang=parse_sglang_flags((SGLANG + "--prompt-tokens 100").split()))),
    ("write_back", lambda: healthy(sglang=parse_sglang_flags((SGLANG + "--hicache-write-policy write_back").split()))),
]


@pytest.mark.parametrize(("said", "plant"), PLANTED, ids=[said for said, _ in PLANTED])
def test_each_planted_fault_is_named_with_its_remedy(said: str, plant: Callable[[], Facts]) -> None:
    wrong = [finding for finding in examine(plant()) if finding.level != "ok"]
    assert [said in finding.found for finding in wrong] == [True]
    assert wrong[0].remedy


def test_the_real_facts_of_this_host_are_collected(redis_url: str) -> None:
    found = facts(Settings.of({"redis_url": redis_url, "node": "@nobody-listens-here"}), {})
    assert not found.redis_error and found.redis_ms > 0 and found.available_memory > 0 and not found.node_here
    broken = facts(Settings.of({"redis_url": "redis://127.0.0.1:1/0"}), {})
    assert broken.redis_error


def test_a_node_that_takes_connections_and_never_answers_is_found(redis_url: str) -> None:
    with closing(Directory(redis_url, "frozen")) as directory, socket.create_server(("127.0.0.1", 0)) as port:
        directory.open()
        directory.join(node("f", "h", f"127.0.0.1:{port.getsockname()[1]}"), 60)
        found = facts(Settings.of({"redis_url": redis_url, "pool": "frozen"}), {})
    assert found.reachable["f~00000001"] and found.redis_used > 0


def test_a_host_with_and_without_rdma_is_told_what_pages_do() -> None:
    assert rdma_facts(Settings.of({"protocol": "tcp"})) is None
    (finding,) = [found for found in examine(healthy(rdma=RdmaFacts(False))) if found.check == "rdma"]
    assert finding.level == "ok" and "move over TCP" in finding.found
    uses = RdmaFacts(True, 2, ("mlx5_0", "mlx5_1"), lockable=-1, to_lock=1 << 40)
    (finding,) = [found for found in examine(healthy(rdma=uses)) if found.check == "rdma"]
    assert finding.level == "ok" and "mlx5_0, mlx5_1" in finding.found
