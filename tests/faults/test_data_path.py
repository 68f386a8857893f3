"""The path between two nodes at its worst: stalled, slow, cut by deadlines; and a segment that is always full."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from tests.faults.conftest import HEAL_WITHIN, HEARTBEAT, nodes
from tests.faults.load import LATE, Load, Watch
from tests.pool import Engine, NodeProcess, eventually, free_port, hashes, running
from tests.stalling_proxy import StallingProxy


@dataclass
class Behind:
    """The owner's data port is behind ``proxy`` for the reader's node."""

    proxy: StallingProxy
    owner: NodeProcess
    writer: Engine
    reader: Engine


@pytest.fixture
def behind(redis_url: str, request: pytest.FixtureRequest) -> Iterator[Behind]:
    """Parameter: the reader's op_timeout and the page size."""
    op_timeout, page_bytes = getattr(request, "param", (1.0, 65536))
    with ExitStack() as stack:
        port = free_port()
        proxy = stack.enter_context(StallingProxy(f"127.0.0.1:{port}"))
        settings: dict[str, object] = {"heartbeat": HEARTBEAT, "pool": f"p{port}"}
        far = {**settings, "listen": f"127.0.0.1:{port}", "advertise": proxy.address, "segment_size": "8MiB"}
        owner, near = stack.enter_context(
            running(NodeProcess(redis_url, "owner", far), NodeProcess(redis_url, "near", settings))
        )
        pool = f"p{port}"
        writer = stack.enter_context(Engine(owner.socket, pool=pool, page_bytes=page_bytes))
        reader = stack.enter_context(
            Engine(near.socket, pool=pool, page_bytes=page_bytes, op_timeout=op_timeout, pages=400)
        )
        eventually(lambda: nodes(reader) == 2 == nodes(writer), HEAL_WITHIN)
        yield Behind(proxy, owner, writer, reader)
        proxy.resume()


def test_a_stalled_path_costs_one_deadline_and_heals_by_itself(behind: Behind) -> None:
    reader, names = behind.reader, hashes("stalled", 16)
    behind.writer.store(names)
    assert all(reader.check(names))
    behind.proxy.stall()
    watch = Watch()
    started = time.monotonic()
    assert not any(reader.check(names))
    assert time.monotonic() - started < 1 + LATE + watch.worst
    until = time.monotonic() + 4
    while time.monotonic() < until:  # no call finds out for itself that the peer still does not answer
        started = time.monotonic()
        assert not any(reader.check(names)) and not any(reader.exists(names))
        assert time.monotonic() - started < 0.5 + watch.worst
        time.sleep(0.1)
    behind.proxy.resume()
    eventually(lambda: all(reader.check(names)), HEAL_WITHIN, "the path works again")
    watch.close()


@pytest.mark.slow
@pytest.mark.parametrize("behind", [(0.2, 4096)], indirect=True)
def test_a_thousand_gets_cut_by_their_deadline_write_nothing_afterwards(behind: Behind) -> None:
    """Every page is delivered slowly, so that each get is cut with bytes on the way; its buffer is then refilled."""
    reader = behind.reader
    names = hashes("cut", 96)
    behind.writer.store(names)
    eventually(lambda: all(reader.exists(names)), 5)
    contents = {name: reader.content(name) for name in names}
    behind.proxy.throttle(2_000_000)  # for each connection
    wanted, threads_count, batch = 1000, 4, len(names)
    cuts = [0] * threads_count
    problems: list[str] = []
    until = time.monotonic() + 80
    watch = Watch()

    def cut(number: int) -> None:
        rng = random.Random(number)
        slots = range(number * batch, (number + 1) * batch)
        low, high = slots.start * reader.page_bytes, slots.stop * reader.page_bytes
        while sum(cuts) < wanted and time.monotonic() < until and not problems:
            started = time.monotonic()
            hits = reader.get(names, slots)
            took = time.monotonic() - started
            pattern = bytes([rng.randrange(256)]) * (high - low)
            for slot, name, hit in zip(slots, names, hits, strict=True):
                if hit and reader.read(slot) != contents[name]:
                    problems.append(f"wrong bytes for {name}")
            reader.l2.view[low:high] = pattern
            if any(hits) and not all(hits):
                cuts[number] += 1
            if took > 0.2 + LATE + watch.worst:
                problems.append(f"a get took {took:.3f} s")
            time.sleep(0.004)
            if reader.l2.view[low:high] != pattern:
                problems.append("the pages were written to after the get had returned")

    threads = [threading.Thread(target=cut, args=(number,)) for number in range(threads_count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    watch.close()
    assert not problems, problems[:5]
    assert sum(cuts) >= wanted, f"only {sum(cuts)} gets were cut on their way"
    behind.proxy.resume()


def test_a_reader_that_stalls_holds_its_pins_for_its_deadline_and_no_longer(behind: Behind) -> None:
    writer, reader = behind.writer, behind.reader
    names = hashes("pinned", 100)  # most of the owner's 8 MiB
    writer.store(names)
    eventually(lambda: all(reader.exists(names)), 5)
    behind.proxy.stall(after=4 * writer.page_bytes)
    call = threading.Thread(target=reader.check, args=(names,))
    call.start()
    eventually(lambda: writer.stats()["pins"] > 0, 5, "pages are pinned while they are sent")
    for number in range(6):  # the owner goes on: what is pinned stays, the rest makes room
        some = hashes(f"meanwhile{number}", 8)
        writer.store(some)
        assert all(writer.check(some))
    call.join(10)
    eventually(lambda: writer.stats()["pins"] == 0, 5, "the reader's deadline is over")
    for number in range(10):
        writer.store(hashes(f"afterwards{number}", 20))
    behind.proxy.resume()
    _check_accounts(writer)


def _check_accounts(engine: Engine) -> None:
    """At rest nothing is pinned, and exactly the pages that are there take memory."""

    def settled() -> bool:
        stats = engine.stats()
        return stats["pins"] == 0 and stats["used_bytes"] == stats["pages"] * -(-engine.page_bytes // 4096) * 4096

    eventually(settled, 5, f"the accounts add up: {engine.stats()}")


@pytest.mark.slow
def test_eviction_under_local_and_remote_reads_of_a_tiny_segment(redis_url: str) -> None:
    settings: dict[str, object] = {"segment_size": "2MiB", "heartbeat": HEARTBEAT, "pool": "tiny"}
    with (
        running(NodeProcess(redis_url, "a", settings), NodeProcess(redis_url, "b", settings)) as (a, b),
        Engine(a.socket, pool="tiny", page_bytes=12_000) as here,
        Engine(b.socket, pool="tiny", page_bytes=12_000) as there,
    ):
        eventually(lambda: nodes(here) == 2 == nodes(there), HEAL_WITHIN)
        with Load([here, there], hashes("tiny", 600), threads=4, batch=12, pause=0.0005) as load:
            time.sleep(20)
        print(load.calls, "calls,", load.hits, "hits, slowest", load.slowest)
        assert all(load.hits)
        for engine in (here, there):
            _check_accounts(engine)
            stats = engine.stats()
            assert stats["evicted"] > 100 and stats["get_remote"] > 100 and stats["get_local"] > 100, stats
            assert not stats.get("get_corrupt") and not stats.get("put_failed")


def test_pages_on_their_way_to_another_node_are_stored_whole_or_not_at_all(redis_url: str) -> None:
    """A full node spills to one with room, whose port stalls and breaks at random moments; nothing is lost track of."""
    port = free_port()
    pool = f"spill{port}"
    settings: dict[str, object] = {"heartbeat": HEARTBEAT, "pool": pool}
    with StallingProxy(f"127.0.0.1:{port}") as proxy:
        roomy = {**settings, "listen": f"127.0.0.1:{port}", "advertise": proxy.address, "segment_size": "32MiB"}
        full = {**settings, "segment_size": "1MiB"}
        with (
            running(NodeProcess(redis_url, "roomy", roomy), NodeProcess(redis_url, "full", full)) as (far, near),
            Engine(far.socket, pool=pool, page_bytes=16_000) as there,
            Engine(near.socket, pool=pool, page_bytes=16_000, op_timeout=1.0) as here,
        ):
            eventually(lambda: nodes(here) == 2 == nodes(there), HEAL_WITHIN)
            rng = random.Random(3)
            with Load([here], hashes(pool, 1200), threads=3, batch=32, kinds=("put", "get")) as load:
                eventually(lambda: here.stats().get("put_spilled", 0) > 100, 10, "pages are spilled")
                for _ in range(8):
                    time.sleep(rng.uniform(0.05, 0.4))
                    if rng.random() < 0.5:
                        proxy.cut()
                    else:
                        proxy.stall()
                        time.sleep(rng.uniform(0.1, 0.6))
                        proxy.resume()
                eventually(lambda: load.hits_grow(0), HEAL_WITHIN, "pages are read again")
            for engine in (here, there):
                _check_accounts(engine)
