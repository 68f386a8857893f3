"""A session over the life of nodes: killed, started again, frozen, refused. Calls miss, in time; then all heals."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from hicache_mooncake import memory
from hicache_mooncake.engine import link as link_module
from hicache_mooncake.engine.lending import Lendable
from hicache_mooncake.errors import ProtocolError
from hicache_mooncake.protocol import messages as m
from tests.pool import Engine, NodeProcess, eventually, free_port, hashes, running
from tests.stalling_proxy import StallingProxy

LATE = 0.2
"""Seconds past ``op_timeout`` by which a call must have returned, whatever happened to the node."""


@pytest.fixture(params=["lent", "staged"])
def staged(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "staged")


@contextlib.contextmanager
def in_time(engine: Engine, late: float = LATE) -> Iterator[None]:
    """The calls inside, one each, end in time."""
    started = time.monotonic()
    yield
    took = time.monotonic() - started
    assert took < engine.session.op_timeout + late, f"a call took {took:.3f} s"


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < 0.1


def healed(engine: Engine, names: list[str]) -> Callable[[], bool]:
    """Whether pages can be stored and read again."""

    def attempt() -> bool:
        for slot, name in enumerate(names):
            engine.fill(slot, engine.content(name))
        return all(engine.put(names)) and all(engine.check(names))

    return attempt


def test_a_node_that_is_killed_and_started_again(redis_url: str, staged: bool) -> None:
    with NodeProcess(redis_url) as node, Engine(node.socket, staged=staged, op_timeout=1) as engine:
        names = hashes("again", 20)
        engine.store(names)
        for _ in range(2):
            node.kill()
            for call in (engine.check, engine.exists, engine.put):
                with in_time(engine):
                    assert not any(call(names))
            eventually(lambda: not engine.session.connected, what="the engine noticed")
            with at_once():
                assert not any(engine.get(names)) and not any(engine.exists(names))
            node.start()
            eventually(healed(engine, names), 10, "the engine found the new node")
            assert engine.stats()["engines"] == 1
        namespaces = engine.session._namespaces
        assert engine.namespace.digest in namespaces


def test_calls_under_way_when_the_node_dies_are_misses(redis_url: str, staged: bool) -> None:
    with NodeProcess(redis_url) as node, Engine(node.socket, staged=staged, op_timeout=2, pages=512) as engine:
        names = hashes("under way", 400)
        engine.store(names)
        stop = threading.Event()
        escaped: list[BaseException] = []
        slowest = [0.0]

        def load() -> None:
            while not stop.is_set():
                started = time.monotonic()
                try:
                    engine.get(names)
                except BaseException as error:
                    escaped.append(error)
                slowest[0] = max(slowest[0], time.monotonic() - started)
                time.sleep(0.001)

        threads = [threading.Thread(target=load) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(3):
            time.sleep(0.4)
            node.kill()
            node.start()
            eventually(lambda: engine.session.connected, 15)
        stop.set()
        for thread in threads:
            thread.join(10)
        assert not escaped and slowest[0] < 2 + LATE, f"{escaped} {slowest}"
        eventually(healed(engine, names[:8]), 10)


def test_a_node_that_is_frozen_while_idle(redis_url: str, staged: bool) -> None:
    with NodeProcess(redis_url) as node, Engine(node.socket, staged=staged, op_timeout=0.6) as engine:
        names = hashes("idle", 8)
        engine.store(names)
        node.freeze()
        with in_time(engine):
            assert not any(engine.check(names))
        for _ in range(3):
            with at_once():
                assert not any(engine.exists(names)) and not any(engine.get(names))
            time.sleep(0.5)
        assert node.process is not None and node.process.poll() is None, "it was not writing, so it lives"
        node.thaw()
        eventually(lambda: all(engine.check(names)), 15, "the same node, with its pages")
        assert engine.session._link is not None and engine.session._link.welcome.node_id == node.node_id


def test_a_node_that_is_frozen_for_a_moment_keeps_its_session(redis_url: str) -> None:
    with NodeProcess(redis_url) as node, Engine(node.socket, op_timeout=0.3) as engine:
        names = hashes("moment", 8)
        engine.store(names)
        before = engine.session._link
        node.freeze()
        with in_time(engine):
            assert not any(engine.check(names))
        node.thaw()
        eventually(lambda: all(engine.check(names)), 5)
        assert engine.session._link is before


def test_other_calls_do_not_wait_for_an_order_that_the_node_does_not_answer(redis_url: str) -> None:
    with NodeProcess(redis_url) as node, Engine(node.socket, op_timeout=0.5) as engine:
        engine.store(hashes("order", 4))
        node.freeze()
        order = threading.Thread(target=engine.session.declare, args=("0" * 16, {"a": "b"}))
        order.start()
        time.sleep(0.05)
        with in_time(engine):
            assert not any(engine.exists(hashes("order", 4)))
        node.thaw()
        order.join(10)
        eventually(lambda: all(engine.check(hashes("order", 4))), 10)


@contextlib.contextmanager
def far_page_stalls(redis_url: str, name: str, op_timeout: float) -> Iterator[tuple[NodeProcess, Engine, list[str]]]:
    """A node and its engine; what it reads of ``names`` comes from another node, half of it, and then nothing."""
    port = free_port()
    with StallingProxy(f"127.0.0.1:{port}") as proxy:
        settings: dict[str, object] = {"listen": f"127.0.0.1:{port}", "advertise": proxy.address}
        with (
            running(NodeProcess(redis_url, "owner", settings), NodeProcess(redis_url, "near")) as (owner, near),
            Engine(owner.socket) as writer,
            Engine(near.socket, op_timeout=op_timeout) as reader,
        ):
            names = hashes(name, 64)
            writer.store(names)
            eventually(lambda: all(reader.exists(names)), 10)
            assert all(reader.check(names[:1]))
            proxy.stall(after=20 * writer.page_bytes + 1000)
            yield near, reader, names
            proxy.resume()


def test_a_node_that_is_frozen_in_the_middle_of_a_get_is_killed_and_writes_nothing_more(redis_url: str) -> None:
    with far_page_stalls(redis_url, "middle", op_timeout=1.0) as (node, engine, names):
        threading.Timer(0.4, node.freeze).start()
        with in_time(engine):
            hits = engine.get(names)
        assert not any(hits)
        assert node.process is not None and node.process.wait(timeout=5) == -signal.SIGKILL
        canary = bytes([7]) * engine.l2.size
        engine.l2.view[:] = canary
        time.sleep(1)
        assert engine.l2.view == canary
        node.start()
        eventually(healed(engine, hashes("after", 4)), 15)


def test_a_read_that_stalls_ends_by_itself_and_costs_no_node_its_life(redis_url: str) -> None:
    with far_page_stalls(redis_url, "stall", op_timeout=1.0) as (node, engine, names):
        with in_time(engine):
            hits = engine.get(names)
        assert 0 < sum(hits) < len(names), "what had come in time is a hit"
        for slot, (name, hit) in enumerate(zip(names, hits, strict=True)):
            assert not hit or engine.read(slot) == engine.content(name)
        canary = bytes([7]) * engine.l2.size
        engine.l2.view[:] = canary
        time.sleep(0.5)
        assert engine.l2.view == canary
        assert node.process is not None and node.process.poll() is None


def test_a_node_that_is_frozen_while_it_stores_lives_and_stores_nothing_torn(redis_url: str) -> None:
    with NodeProcess(redis_url) as node, Engine(node.socket, op_timeout=0.4, pages=512) as engine:
        for round_number in range(6):
            names = hashes(f"torn{round_number}", 400)
            for slot, name in enumerate(names):
                engine.fill(slot, engine.content(name))
            timer = threading.Timer(0.004 * (1 + round_number), node.freeze)
            timer.start()
            with in_time(engine):
                engine.put(names)
            timer.join()
            engine.l2.view[:] = bytes(engine.l2.size)  # the engine reuses them at once
            node.thaw()
            eventually(lambda: any(engine.put(["x"], [0])), 10, "the node answers again")
            engine.check(names)  # whatever is there is right
        assert node.process is not None and node.process.poll() is None


def test_a_session_whose_fence_is_used_up_is_opened_anew(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "SLOTS", 3)
    with NodeProcess(redis_url) as node, Engine(node.socket) as engine:
        names = hashes("slots", 4)
        engine.store(names)
        first = engine.session._link
        for _ in range(3):
            link = engine.session._link
            assert link is not None
            link.discard(link.line(time.monotonic() + 5))  # as every failed call does
        eventually(lambda: all(engine.check(names)), 10, "a new session")
        assert engine.session._link is not first


def test_more_calls_at_once_than_there_are_lines(redis_url: str) -> None:
    with NodeProcess(redis_url) as node, Engine(node.socket, pages=64) as engine:
        names = hashes("crowd", 2)
        engine.store(names)
        link = engine.session._link
        assert link is not None
        lines = [link.line(time.monotonic() + 5) for _ in range(link_module.MAX_LINES)]
        with at_once():
            assert not any(engine.exists(names))
        assert engine.session.failures["busy"] and not link.silent.is_set(), "it says nothing about the node"
        for line in lines:
            link.give_back(line)
        assert all(engine.check(names))


def test_a_call_that_fails_on_this_side_leaves_nothing_behind(redis_url: str) -> None:
    with NodeProcess(redis_url) as node, Engine(node.socket) as engine:
        names = hashes("own", 2)
        engine.store(names)

        def fail(*_: object) -> m.Pages:
            raise ZeroDivisionError

        deadline = time.monotonic() + 5
        for _ in range(20):  # more than there are lines
            with pytest.raises(ZeroDivisionError):
                engine.session.move_staged(m.Get, fail, lambda *_: None, 4096, deadline)
            with pytest.raises(UnicodeEncodeError):
                engine.exists(["\ud800"])
            with pytest.raises(UnicodeEncodeError):
                engine.get(["\ud800"])
        assert all(engine.check(names))


def test_memory_that_the_node_cannot_map_is_refused_and_harms_nothing(redis_url: str) -> None:
    with NodeProcess(redis_url) as node, Engine(node.socket) as engine:
        names = hashes("unmappable", 4)
        engine.store(names)
        made = memory.create("short", 4096)
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(ProtocolError, match="mapped"):
            engine.session.lend([Lendable(made.address, 1 << 30, os.dup(made.fd), 0)])
        made.close()
        eventually(lambda: all(engine.check(names)), 10, "the session was opened anew")
        assert len(os.listdir("/proc/self/fd")) <= before
        assert engine.stats()["engines"] == 1


def test_requests_for_memory_that_was_not_lent_are_refused(redis_url: str) -> None:
    with NodeProcess(redis_url) as node, Engine(node.socket) as engine:
        names = hashes("outside", 2)
        engine.store(names)
        outside = (engine.l2.address + engine.l2.size).to_bytes(8, "little")
        group = m.Pages(engine.keys(names[:1]), [engine.page_bytes], outside)
        assert engine.session.move(m.Get, [group], time.monotonic() + 2) is None
        assert engine.session.failures["refused"] == 1
        assert all(engine.check(names)), "the others go on"


def test_twenty_thousand_keys_in_one_query(redis_url: str) -> None:
    with NodeProcess(redis_url) as node, Engine(node.socket, page_bytes=4096, pages=512) as engine:
        names = hashes("many", 20_000)
        stored = [name for at, name in enumerate(names) if at % 50 == 0]
        engine.store(stored)
        with in_time(engine):
            found = engine.exists(names)
        assert [at for at, held in enumerate(found) if held] == list(range(0, 20_000, 50))


def test_batches_far_larger_than_staging_and_the_128_pages_of_sglang(redis_url: str, staged: bool) -> None:
    with NodeProcess(redis_url) as node, Engine(node.socket, staged=staged, pages=700) as engine:
        names = hashes("large", 700)
        engine.store(names)
        assert all(engine.check(names))
        assert sum(engine.check([*names[:350], *hashes("absent", 350)])) == 350


def test_a_page_larger_than_the_staging_area(redis_url: str) -> None:
    with NodeProcess(redis_url) as node, Engine(node.socket, staged=True, page_bytes=3 << 20, pages=4) as engine:
        engine.store(hashes("page", 4))
        assert all(engine.check(hashes("page", 4)))


@pytest.mark.parametrize("stalled", [False, True])
def test_a_node_ends_within_seconds_of_sigterm_though_engines_are_attached(redis_url: str, stalled: bool) -> None:
    with far_page_stalls(redis_url, f"term{stalled}", op_timeout=30.0) as (node, engine, names):
        hits: list[bool] = []
        call = threading.Thread(target=lambda: hits.extend(engine.get(names)))
        if stalled:
            call.start()
            time.sleep(0.5)
        started = time.monotonic()
        assert node.stop() == 0
        assert time.monotonic() - started < 6
        if stalled:
            call.join(5)
            assert not call.is_alive() and len(hits) == len(names)
        assert not any(engine.get(names))
        assert "Traceback" not in node.log.read_text()


def test_two_nodes_that_come_at_once_to_the_socket_of_a_dead_one(redis_url: str) -> None:
    with NodeProcess(redis_url) as first:
        first.kill()
        assert os.path.exists(first.socket)
        outcomes: list[str] = []

        def try_start(node: NodeProcess) -> None:
            node.socket = first.socket
            try:
                node.start()
                outcomes.append("serves")
            except AssertionError as error:
                outcomes.append("refused" if "'field': 'node'" in str(error) else str(error))

        rivals = [NodeProcess(redis_url, name) for name in ("x", "y", "z")]
        threads = [threading.Thread(target=try_start, args=(node,)) for node in rivals]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(outcomes) == ["refused", "refused", "serves"]
        with Engine(first.socket) as engine:
            engine.store(hashes("rivals", 2))
        for node in rivals:
            node.close()
