"""What Redis loses of a node's pages, or says wrongly of them, is put right."""

from __future__ import annotations

import pytest
import redis

from hicache_mooncake.metadata.records import ObjectRecord
from hicache_mooncake.node import audit
from hicache_mooncake.node.audit import Audit
from tests.pool import Engine, NodeProcess, eventually, hashes, running


def test_a_round_looks_at_every_page_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "BATCH", 10)
    held = [f"k{at}" for at in range(25)]
    lost = {"k3", "k12", "k24"}
    asked: list[str] = []

    def lookup(keys: list[str]) -> list[ObjectRecord | None]:
        asked.extend(keys)
        return [None if key in lost else ObjectRecord(1, ("n/dram", "o/dram")) for key in keys]

    walk = Audit(lambda: held, lookup, "n/dram")  # type: ignore[arg-type]
    found = [key for _ in range(3) for key in walk.step()]
    assert set(found) == lost and sorted(asked) == sorted(held)
    assert Audit(lambda: held, lookup, "elsewhere/dram").step() == held[-10:]  # type: ignore[arg-type]
    assert Audit(list, lookup, "n/dram").step() == []  # type: ignore[arg-type]


def test_entries_that_redis_loses_come_back(redis_url: str) -> None:
    near, far = NodeProcess(redis_url, "near"), NodeProcess(redis_url, "far")
    with running(near, far), Engine(near.socket) as writer, Engine(far.socket) as reader:
        names = hashes("lost", 30)
        writer.store(names)
        with redis.Redis.from_url(redis_url) as client:
            keys = list(client.scan_iter("hcm:default:o:*"))
            client.delete(*keys[:20])
            eventually(lambda: all(reader.exists(names)), what="the owner told Redis again")
            assert sorted(client.scan_iter("hcm:default:o:*")) == sorted(keys)
        assert all(reader.check(names))
        assert writer.stats()["directory_restored"] >= 20


def test_what_a_node_is_wrongly_said_to_hold_is_corrected_when_it_is_looked_for(redis_url: str) -> None:
    with NodeProcess(redis_url) as node, Engine(node.socket) as engine:
        names = hashes("wrong", 12)
        with redis.Redis.from_url(redis_url) as client:
            for name in names:
                key = f"hcm:default:o:{{0}}{engine.namespace.digest}:{name}:all"
                client.set(key, f"{engine.page_bytes} {node.node_id}/dram")
            assert not any(engine.exists(names))
            eventually(lambda: not list(client.scan_iter("hcm:default:o:*")), what="the node corrected them")


@pytest.mark.slow
def test_entries_of_a_node_that_nobody_knows_are_swept(redis_url: str) -> None:
    early, late = hashes("ghost", 2)
    with (
        NodeProcess(redis_url) as node,
        Engine(node.socket) as engine,
        redis.Redis.from_url(redis_url) as client,
    ):

        def plant(name: str) -> None:
            client.set(f"hcm:default:o:{{0}}{engine.namespace.digest}:{name}:all", "65536 ghost~00000000/dram")

        def gone() -> bool:
            return not list(client.scan_iter("hcm:default:o:*"))

        plant(early)
        eventually(gone, timeout=20, what="the sweep at start")
        plant(late)
        eventually(lambda: not any(engine.exists([late])) and gone(), timeout=20, what="it is swept since it was met")
