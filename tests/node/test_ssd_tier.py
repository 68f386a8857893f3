"""Nodes with an SSD tier: what DRAM has no room for still hits, here, after a crash, and from other nodes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.pool import Engine, NodeProcess, eventually, hashes, running

pytest.importorskip("pyarrow", reason="the extra [ssd] is not installed")

PAGES = 160
SMALL: dict[str, object] = {"segment_size": "2MiB", "ssd_size": "512MiB"}
"""A segment for 28 of the 160 pages of 64 KiB."""


@pytest.fixture
def disk() -> Iterator[Path]:
    """A directory on a real file system: /tmp may be one in memory."""
    path = Path(tempfile.mkdtemp(prefix="hcm-test-ssd-", dir="/var/tmp"))
    yield path / "ssd"
    shutil.rmtree(path)


def node_on(redis_url: str, disk: Path, name: str = "n", **settings: object) -> NodeProcess:
    return NodeProcess(redis_url, name, {**SMALL, "ssd_path": str(disk), **settings})


def store_all(engine: Engine, names: list[str]) -> None:
    """In small batches, each of which is on disk before the next comes, so that nothing is lost on the way."""
    for start in range(0, len(names), 16):
        engine.store(names[start : start + 16])
        eventually(lambda: engine.stats()["ssd_offload_queue"] == 0, what="the queue is written")


def on_disk(engine: Engine, names: list[str]) -> None:
    eventually(lambda: engine.stats()["ssd_pages"] >= len(names), what="all pages are on disk")


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "store", ["bucket", *(pytest.param(name, marks=SLOW) for name in ("offset", "file_per_key", "shared"))]
)
def test_what_dram_has_no_room_for_comes_from_the_disk(redis_url: str, disk: Path, store: str) -> None:
    names = hashes("larger", PAGES)
    with node_on(redis_url, disk, ssd_store=store) as node, Engine(node.socket) as engine:
        store_all(engine, names)
        on_disk(engine, names)
        assert engine.stats()["pages"] < 40
        assert all(engine.exists(names))
        assert all(engine.check(names))
        stats = engine.stats()
        assert stats["get_ssd_local"] > 100 and stats["get_local"] + stats["get_ssd_local"] == PAGES
        assert engine.put(names[:5]) == [True] * 5  # held: nothing moves
        assert engine.stats()["put_present"] >= 5
        with redis.Redis.from_url(redis_url) as client:
            records = [client.get(key) for key in client.scan_iter("hcm:default:o:*")]
            assert all(f"{node.node_id}/ssd".encode() in (record or b"") for record in records)


@pytest.mark.slow
def test_a_victim_leaves_dram_only_when_it_is_on_disk(redis_url: str, disk: Path) -> None:
    names = hashes("evict", PAGES)
    with node_on(redis_url, disk, offload="on_evict") as node, Engine(node.socket) as engine:
        done: list[str] = []
        for name in names:  # a put that finds only unsaved pages fails, rather than that one of them is lost
            engine.fill(0, engine.content(name))
            eventually(lambda name=name: engine.put([name]) == [True], what=f"there is room for {name}")
            done.append(name)
        assert all(engine.exists(names))
        assert all(engine.check(names))
        assert engine.stats()["evicted"] > 100


def test_an_operator_sees_the_disk(redis_url: str, disk: Path) -> None:
    import json

    from tests.operate.test_commands import run

    names = hashes("seen", 60)
    where = ["--redis-url", redis_url]
    with node_on(redis_url, disk) as node, Engine(node.socket) as engine:
        store_all(engine, names)
        on_disk(engine, names)
        where += ["--node", node.socket]
        eventually(lambda: json.loads(run("nodes", "--json", *where))[0]["ssd_pages"] >= 60, what="a heartbeat")
        (seen,) = json.loads(run("nodes", "--json", *where))
        assert seen["ssd_capacity"] == 512 << 20 and seen["ssd_used"] > 60 * engine.page_bytes
        assert "ssd used" in run("nodes", *where) and "512.0 MiB" in run("status", *where)
        assert "/ssd" in run("ls", *where)


def test_after_a_crash_pages_are_found_again(redis_url: str, disk: Path) -> None:
    names = hashes("crash", PAGES)
    node = node_on(redis_url, disk)
    with running(node), Engine(node.socket) as engine:
        store_all(engine, names)
        on_disk(engine, names)
        node.kill()
        node.start()
        eventually(lambda: engine.session.connected and all(engine.exists(names)), what="all are found again")
        assert all(engine.check(names))
        assert engine.stats()["get_ssd_local"] == PAGES


@pytest.mark.slow
def test_another_node_reads_what_is_on_this_ones_disk(redis_url: str, disk: Path) -> None:
    names = hashes("remote", PAGES)
    near, far = node_on(redis_url, disk, "near"), NodeProcess(redis_url, "far", {"segment_size": 0})
    with running(near, far), Engine(near.socket) as writer, Engine(far.socket) as reader:
        store_all(writer, names)
        on_disk(writer, names)
        assert all(reader.exists(names))
        assert all(reader.check(names))
        assert reader.stats()["get_remote"] == PAGES
        assert writer.stats()["ssd_served_pages"] > 100
        eventually(lambda: writer.stats()["ssd_staging_used_bytes"] == 0, what="staging memory is given back")


@pytest.mark.slow
def test_what_is_read_again_comes_back_to_dram(redis_url: str, disk: Path) -> None:
    names = hashes("promoted", PAGES)
    with node_on(redis_url, disk) as node, Engine(node.socket) as engine:
        store_all(engine, names)
        on_disk(engine, names)
        hot = names[:4]
        eventually(
            lambda: all(engine.check(hot)) and engine.stats().get("ssd_promoted", 0) >= 4, what="they are promoted"
        )
        before = engine.stats()["get_local"]
        assert all(engine.check(hot))
        assert engine.stats()["get_local"] == before + 4


@pytest.mark.slow
def test_clear_reaches_the_disk(redis_url: str, disk: Path) -> None:
    from hicache_mooncake.protocol import messages as m

    names = hashes("clear", 60)
    with node_on(redis_url, disk) as node, Engine(node.socket) as engine:
        store_all(engine, names)
        on_disk(engine, names)
        reply = engine.session.ask(m.Clear(2000, [engine.namespace.digest]))
        assert isinstance(reply, m.Cleared) and not reply.unreached
        assert not any(engine.exists(names)) and not any(engine.check(names))
        with redis.Redis.from_url(redis_url) as client:
            eventually(lambda: not list(client.scan_iter("hcm:default:o:*")), what="Redis has forgotten them")


@pytest.mark.slow
def test_rot_is_a_miss_and_only_that(redis_url: str, disk: Path) -> None:
    names = hashes("rot", PAGES)
    node = node_on(redis_url, disk, promotion_threshold=0)
    with running(node), Engine(node.socket) as engine:
        store_all(engine, names)
        on_disk(engine, names)
        node.stop()
        data = max(disk.rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
        with open(data, "r+b") as file:
            for at in range(1 << 20, data.stat().st_size - (1 << 20), 1 << 20):
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 0x40]))
        node.start()
        eventually(lambda: engine.session.connected and sum(engine.exists(names)) > 100, what="they are found again")
        hits = engine.check(names)  # compares every byte
        assert 100 < sum(hits) < PAGES
        assert engine.check(names) == hits


@pytest.mark.slow
def test_a_disk_that_is_too_small_keeps_what_is_newest(redis_url: str, disk: Path) -> None:
    names = hashes("small", 400)
    settings = {"ssd_size": "8MiB", "ssd_store": "offset"}
    with node_on(redis_url, disk, **settings) as node, Engine(node.socket, pages=512) as engine:
        store_all(engine, names)
        hits = engine.check(names)
        assert 80 < sum(hits) < 200
        assert all(hits[-20:])
        assert engine.exists(names) == hits


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"ssd_path": "/proc/nowhere/ssd"}, "ssd_path"),
        ({"ssd_store": "tape"}, "ssd_store"),
        ({"ssd_low_watermark": "0.99", "ssd_high_watermark": "0.5"}, "ssd_low_watermark"),
    ],
)
def test_settings_that_cannot_work_stop_the_node(
    redis_url: str, disk: Path, settings: dict[str, object], named: str
) -> None:
    node = node_on(redis_url, disk, **settings)
    try:
        with pytest.raises(AssertionError, match=named):
            node.start()
    finally:
        node.close()


@pytest.mark.slow
def test_descriptors_threads_and_memory_stay_flat(redis_url: str, disk: Path) -> None:
    names = hashes("flat", PAGES)
    with node_on(redis_url, disk) as node, Engine(node.socket) as engine:
        store_all(engine, names)
        on_disk(engine, names)

        def counts() -> tuple[int, int]:
            process = Path(f"/proc/{node.pid}")
            return len(list((process / "fd").iterdir())), len(list((process / "task").iterdir()))

        for _ in range(10):
            assert all(engine.check(names))
        before = counts()
        for _ in range(60):
            assert all(engine.check(names))
        eventually(lambda: all(now <= then + 1 for now, then in zip(counts(), before, strict=True)), what="flat")
        eventually(lambda: engine.stats()["ssd_staging_used_bytes"] == 0 and engine.stats()["pins"] == 0)
