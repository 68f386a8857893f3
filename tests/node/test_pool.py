"""Engines and nodes together: pages go in, come back, are evicted, are cleared; on one host and across two."""

from __future__ import annotations

import time

import pytest

from tests.pool import Engine, NodeProcess, eventually, hashes, running


@pytest.fixture(scope="module", params=["lent", "staged"])
def staged(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "staged")


def test_a_page_comes_back_as_it_was_stored(redis_url: str, staged: bool) -> None:
    with NodeProcess(redis_url) as node, Engine(node.socket, staged=staged) as engine:
        names = hashes("round", 130)
        assert engine.exists(names) == [False] * 130
        engine.store(names)
        assert engine.exists(names) == [True] * 130
        assert all(engine.check(names))


def test_batches_with_holes_duplicates_and_nothing(redis_url: str, staged: bool) -> None:
    with NodeProcess(redis_url) as node, Engine(node.socket, staged=staged) as engine:
        names = hashes("holes", 64)
        stored = [name for at, name in enumerate(names) if at not in (0, 31, 63)]
        engine.store(stored)
        hits = engine.check(names)
        assert [at for at, hit in enumerate(hits) if not hit] == [0, 31, 63]
        assert all(engine.check([stored[0]] * 3))  # all three buffers are filled
        engine.fill(0, engine.content("twice"))
        engine.fill(1, engine.content("twice"))
        assert engine.put(["twice", "twice"], [0, 1]) == [True, True]
        assert engine.check(["twice"]) == [True]
        assert engine.put([]) == [] == engine.get([])


def test_a_second_put_moves_no_bytes_and_keeps_the_first(redis_url: str) -> None:
    with NodeProcess(redis_url) as node, Engine(node.socket) as engine:
        names = hashes("again", 8)
        engine.store(names)
        before = engine.stats()["put_bytes"]
        for slot in range(8):
            engine.fill(slot, b"\0" * engine.page_bytes)
        assert all(engine.put(names))
        assert engine.stats()["put_bytes"] == before
        assert all(engine.check(names))


def test_another_namespace_misses(redis_url: str) -> None:
    with NodeProcess(redis_url) as node, Engine(node.socket) as engine, Engine(node.socket, dtype="fp8") as other:
        names = hashes("ns", 4)
        engine.store(names)
        assert not any(other.exists(names)) and not any(other.check(names))


def test_a_page_of_another_size_under_the_same_key_is_a_miss(redis_url: str) -> None:
    with NodeProcess(redis_url) as node, Engine(node.socket) as engine, Engine(node.socket, page_bytes=32768) as other:
        other.namespace = engine.namespace
        names = hashes("size", 4)
        engine.store(names)
        blank = b"\x55" * other.page_bytes
        other.fill(0, blank)
        assert other.get(names[:1]) == [False] and other.read(0) == blank


def test_what_is_stored_on_one_host_is_read_on_another(redis_url: str, staged: bool) -> None:
    with (
        running(NodeProcess(redis_url, "a"), NodeProcess(redis_url, "b")) as (a, b),
        Engine(a.socket) as writer,
        Engine(b.socket, staged=staged) as reader,
    ):
        names = hashes("far", 130)
        eventually(lambda: reader.stats()["nodes"] == 2)
        writer.store(names)
        assert reader.exists(names) == [True] * 130
        assert all(reader.check(names))
        stats = reader.stats()
        assert stats["get_remote"] == 130 and stats["pages"] == 0
        reader.store(names)  # held by the other host: nothing is stored twice
        assert reader.stats()["pages"] == 0


def test_a_full_segment_evicts_the_coldest_and_keeps_taking(redis_url: str) -> None:
    settings: dict[str, object] = {"segment_size": "4MiB"}
    with NodeProcess(redis_url, settings=settings) as node, Engine(node.socket) as engine:
        early, late = hashes("early", 40), hashes("late", 40)
        engine.store(early)
        assert all(engine.check(early[:4]))  # used again: these are the young ones now
        engine.store(late)
        assert all(engine.check(late))
        assert all(engine.check(early[:4]))
        kept = engine.check(early)
        assert not all(kept) and engine.stats()["used_bytes"] <= 4 << 20
        eventually(lambda: engine.exists(early) == engine.check(early))


def test_polling_exists_over_a_full_segment_never_makes_puts_fail(redis_url: str) -> None:
    settings: dict[str, object] = {"segment_size": "4MiB"}
    with NodeProcess(redis_url, settings=settings) as node, Engine(node.socket) as engine:
        seen: list[str] = []
        until = time.monotonic() + 2
        number = 0
        while time.monotonic() < until:
            names = hashes(f"poll{number}", 16)
            engine.store(names)
            seen = [*seen, *names][-400:]
            engine.exists(seen)
            number += 1
        assert engine.stats()["evicted"] > 0


def test_clear_reaches_every_node_and_only_the_own_namespace(redis_url: str) -> None:
    with (
        running(NodeProcess(redis_url, "a"), NodeProcess(redis_url, "b")) as (a, b),
        Engine(a.socket) as here,
        Engine(b.socket) as there,
        Engine(b.socket, tenant="other") as other,
    ):
        from hicache_mooncake.protocol import messages as m

        eventually(lambda: here.stats()["nodes"] == 2)
        mine, far, others = hashes("mine", 8), hashes("far8", 8), hashes("others", 8)
        here.store(mine)
        there.store(far)
        other.store(others)
        reply = here.session.ask(m.Clear(2000, [here.namespace.digest]))
        assert isinstance(reply, m.Cleared) and reply.objects == 16 and not reply.unreached
        assert not any(here.exists([*mine, *far])) and not any(there.exists([*mine, *far]))
        assert all(other.check(others))


def test_a_page_with_a_flipped_bit_is_a_miss_and_goes(redis_url: str) -> None:
    import mmap
    import os

    with NodeProcess(redis_url) as node, Engine(node.socket) as engine:
        names = hashes("flip", 8)
        engine.store(names)
        target = engine.content(names[3])[:64]
        for entry in os.listdir(f"/proc/{node.pid}/fd"):
            link = os.readlink(f"/proc/{node.pid}/fd/{entry}")
            if "hicache-mooncake-segment" in link:
                fd = os.open(f"/proc/{node.pid}/fd/{entry}", os.O_RDWR)
                break
        else:
            pytest.fail("the node's segment was not found")
        with mmap.mmap(fd, 0) as segment:
            at = segment.find(target)
            assert at >= 0
            segment[at + 7] ^= 0x10
        os.close(fd)
        assert [at for at, hit in enumerate(engine.check(names)) if not hit] == [3]
        assert not engine.exists([names[3]])[0]
        assert engine.stats()["get_corrupt"] == 1 == engine.stats()["corrupt_dropped"]
        engine.store(names)
        assert all(engine.check(names))


def test_a_stopped_node_leaves_no_key_behind(redis_url: str) -> None:
    import redis

    with redis.Redis.from_url(redis_url) as client:
        with NodeProcess(redis_url, settings={"pool": "leave"}) as node, Engine(node.socket, pool="leave") as engine:
            engine.store(hashes("leave", 32))
            assert len(list(client.scan_iter("hcm:leave:o:*"))) == 32
            started = time.monotonic()
            assert node.stop() == 0
            assert time.monotonic() - started < 10
        assert not list(client.scan_iter("hcm:leave:o:*")) and not list(client.scan_iter("hcm:leave:node:*"))


def test_a_full_node_spills_to_one_with_room(redis_url: str) -> None:
    small: dict[str, object] = {"segment_size": "4MiB", "pool": "spill"}
    large: dict[str, object] = {"segment_size": "64MiB", "pool": "spill"}
    with (
        running(NodeProcess(redis_url, "small", small), NodeProcess(redis_url, "large", large)) as (a, b),
        Engine(a.socket, pool="spill", pages=512) as full,
        Engine(b.socket, pool="spill", pages=512) as roomy,
    ):
        eventually(lambda: full.stats()["nodes"] == 2)
        written: list[str] = []
        for batch in range(30):  # 30 x 16 pages of 64 KiB: 30 MiB through 4 MiB
            names = hashes(f"spill{batch}", 16)
            full.store(names)
            written += names
        stats = full.stats()
        assert stats["put_spilled"] >= 16 * 5 and stats["evicted"] > 0
        assert roomy.stats()["taken_pages"] == stats["put_spilled"] == roomy.stats()["pages"]
        kept = full.check(written)  # read back from both nodes, byte for byte
        assert sum(kept) >= stats["put_spilled"] and full.stats()["get_remote"] >= stats["put_spilled"]
        assert sum(roomy.check(written)) == sum(kept)


def test_a_node_without_memory_stores_on_others(redis_url: str, staged: bool) -> None:
    client: dict[str, object] = {"segment_size": 0, "pool": "client"}
    store: dict[str, object] = {"pool": "client"}
    with (
        running(NodeProcess(redis_url, "client", client), NodeProcess(redis_url, "store", store)) as (a, b),
        Engine(a.socket, pool="client", staged=staged) as engine,
    ):
        names = hashes("client", 40)
        eventually(lambda: engine.stats()["nodes"] == 2)
        engine.store(names)
        assert all(engine.check(names))
        assert engine.stats()["pages"] == 0
        b.kill()
        eventually(lambda: engine.stats()["nodes"] == 1)
        assert not any(engine.exists(names)) and not any(engine.put(hashes("nowhere", 4)))


def test_namespaces_in_use_are_described_again_before_they_expire(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import redis

    from hicache_mooncake.config import Settings
    from hicache_mooncake.node import directory_sync
    from hicache_mooncake.node.service import Node

    monkeypatch.setattr(directory_sync, "DESCRIBE_EVERY", 0.3)
    given = {
        "redis_url": redis_url,
        "pool": "describe",
        "node": "@hcm-describe",
        "segment_size": "1MiB",
        "heartbeat": 0.1,
    }
    node = Node(Settings.of(given))
    try:
        with Engine("@hcm-describe", pool="describe") as engine, redis.Redis.from_url(redis_url) as client:
            key = f"hcm:describe:ns:{{0}}{engine.namespace.digest}"
            assert client.delete(key) == 1
            eventually(lambda: client.hget(key, "model") == b"test", what="the description is back")
    finally:
        node.close()
