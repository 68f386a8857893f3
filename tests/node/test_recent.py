"""What an existence query learned is used by the fetch that follows, and no longer than it is worth."""

from __future__ import annotations

import time

from hicache_mooncake.node.recent import RecentHolders
from tests.pool import Engine, NodeProcess, hashes, running


def test_an_answer_is_given_once() -> None:
    recent = RecentHolders()
    recent.note(["a", "b", "c"], [["n1"], [], ["n2", "n3"]])
    assert recent.of(["c", "b", "a", "x"]) == [["n2", "n3"], (), ["n1"], ()]
    assert recent.of(["a", "c"]) == [(), ()]


def test_answers_expire() -> None:
    recent = RecentHolders(remember=0.05)
    recent.note(["a"], [["n1"]])
    time.sleep(0.11)
    assert recent.of(["a"]) == [()]


def test_it_does_not_grow_and_keeps_a_query_front() -> None:
    recent = RecentHolders(limit=100)
    for query in range(50):
        keys = [f"{query}/{at}" for at in range(1000)]
        recent.note(keys, [["n"]] * 1000)
        assert len(recent._young) + len(recent._old) <= 200
    assert recent.of([f"49/{at}" for at in range(3)]) == [["n"]] * 3


def test_pages_that_moved_between_query_and_fetch_are_found_where_they_are(redis_url: str) -> None:
    near, far, third = (NodeProcess(redis_url, name) for name in ("near", "far", "third"))
    with running(near, far, third), Engine(near.socket) as writer, Engine(far.socket) as reader:
        names = hashes("moved", 40)
        writer.store(names)
        assert all(reader.exists(names))
        near.stop()  # so that others do not take it for a holder any more
        with Engine(third.socket) as other:
            other.store(names)
            assert all(reader.check(names))


def test_a_fetch_after_a_query_asks_redis_nothing(redis_url: str) -> None:
    import redis

    seldom = {"heartbeat": 60}  # at each a node audits what Redis says of it
    near, far = NodeProcess(redis_url, "near", {**seldom}), NodeProcess(redis_url, "far", {**seldom})
    with running(near, far), Engine(near.socket) as writer, Engine(far.socket) as reader:
        names = hashes("asked", 40)
        writer.store(names)
        with redis.Redis.from_url(redis_url) as client:

            def lookups() -> int:
                return int(client.info("commandstats").get("cmdstat_mget", {}).get("calls", 0))

            assert all(reader.exists(names))
            before = lookups()
            assert all(reader.check(names))
            assert lookups() == before
            assert all(reader.check(names))  # given once: now Redis is asked
            assert lookups() > before
