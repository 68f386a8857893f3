"""Redis or a host goes away and comes back, under load: misses, never a wrong byte, never late, and it heals itself."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest

from tests.faults.conftest import HEAL_WITHIN, TTL, TwoHosts, nodes
from tests.faults.load import Load
from tests.pool import Engine, NodeProcess, eventually, hashes

Fault = Callable[[TwoHosts], None]


def redis_is_killed_and_comes_back_empty(hosts: TwoHosts) -> None:
    hosts.signal_redis(signal.SIGKILL)
    time.sleep(2 * TTL)
    assert hosts.server.revive()


def redis_is_emptied(hosts: TwoHosts) -> None:
    with hosts.client() as client:
        client.flushall()


def redis_is_frozen(hosts: TwoHosts) -> None:
    hosts.signal_redis(signal.SIGSTOP)
    time.sleep(2 * TTL)
    hosts.signal_redis(signal.SIGCONT)


def redis_forgets_its_scripts_and_the_nodes(hosts: TwoHosts) -> None:
    with hosts.client() as client:
        client.script_flush()
        for key in client.scan_iter("hcm:*:node:*"):
            client.delete(key)


def the_owner_is_frozen(hosts: TwoHosts) -> None:
    hosts.far.freeze()
    time.sleep(2 * TTL)
    hosts.far.thaw()
    assert hosts.far.process is not None
    if hosts.far.process.poll() is not None:  # it was writing into its engine's pages: killed, as it had to be
        hosts.far.start()


def the_owner_is_killed_and_comes_back(hosts: TwoHosts) -> None:
    hosts.far.kill()
    time.sleep(TTL)
    hosts.far.start()


def the_owner_is_restarted_in_good_order(hosts: TwoHosts) -> None:
    assert hosts.far.stop() == 0
    hosts.far.start()


FAULTS: list[Fault] = [
    redis_is_killed_and_comes_back_empty,
    redis_is_emptied,
    redis_is_frozen,
    redis_forgets_its_scripts_and_the_nodes,
    the_owner_is_frozen,
    the_owner_is_killed_and_comes_back,
    the_owner_is_restarted_in_good_order,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_under_load(two_hosts: TwoHosts, fault: Fault) -> None:
    hosts = two_hosts
    kept = hashes("kept", 40)  # on the near host, and nobody but it stores them
    hosts.engine.store(kept)
    with Load(hosts.engines, hashes("load", 300)) as load:
        eventually(lambda: load.hits_grow(0) and load.hits_grow(1), 10, "pages are read on both hosts")
        fault(hosts)
        over = time.monotonic()
        hosts.wait_until_both_see_each_other()
        fresh = iter(range(1000))

        def shared_again() -> bool:
            names = hashes(f"fresh{next(fresh)}", 4)
            slots = range(200, 204)
            for slot, name in zip(slots, names, strict=True):
                hosts.far_engine.fill(slot, hosts.far_engine.content(name))
            hosts.far_engine.put(names, slots)
            return all(hosts.engine.get(names, slots))

        eventually(shared_again, HEAL_WITHIN, "what one host stores is read on the other")
        eventually(lambda: all(hosts.far_engine.exists(kept)), HEAL_WITHIN, "what was held all along is known again")
        eventually(lambda: load.hits_grow(0) and load.hits_grow(1), HEAL_WITHIN, "pages are read on both hosts")
        took = time.monotonic() - over
        assert took < HEAL_WITHIN, f"healing took {took:.1f} s"
    for engine in hosts.engines:
        eventually(lambda engine=engine: all(engine.check(kept)), HEAL_WITHIN, "and read")
    _check_directory(hosts)
    for node in (hosts.near, hosts.far):
        log = node.log.read_text()
        assert "Traceback" not in log
        assert len(log.splitlines()) < 60, log


def _check_directory(hosts: TwoHosts) -> None:
    """Redis knows the namespace, the nodes, and as many pages as they hold."""
    with hosts.client() as client:
        digest = hosts.engine.namespace.digest
        eventually(lambda: client.hgetall(f"hcm:default:ns:{{0}}{digest}"), HEAL_WITHIN, "the namespace is described")

        def agrees() -> bool:
            words: list[bytes] = []
            for key in client.scan_iter("hcm:default:o:*", count=1000):
                words += (client.get(key) or b"").split()[1:]
            links = [(engine, engine.session._link) for engine in hosts.engines]
            held = {link.welcome.node_id: engine.stats()["pages"] for engine, link in links if link is not None}
            told = {node: sum(word.decode() == f"{node}/dram" for word in words) for node in held}
            return told == held

        eventually(agrees, HEAL_WITHIN, "Redis says what the nodes hold")


def test_while_redis_is_away_a_host_reads_what_it_holds_and_stores_on(two_hosts: TwoHosts) -> None:
    hosts = two_hosts
    early, late = hashes("early", 20), hashes("late", 20)
    hosts.engine.store(early)
    hosts.signal_redis(signal.SIGSTOP)
    hosts.engine.exists(hashes("absent", 1))  # whoever asks first waits; then it is known
    for names in (early, late):
        started = time.monotonic()
        hosts.engine.store(names)
        assert all(hosts.engine.check(names)) and all(hosts.engine.exists(names))
        assert time.monotonic() - started < 1.5
    time.sleep(TTL)
    hosts.signal_redis(signal.SIGCONT)
    eventually(lambda: all(hosts.far_engine.check([*early, *late])), HEAL_WITHIN, "Redis was told of them")


def test_an_owner_that_comes_back_on_its_port_with_other_contents(two_hosts: TwoHosts) -> None:
    hosts = two_hosts
    names = hashes("contents", 20)
    hosts.far_engine.store(names)
    assert all(hosts.engine.check(names))
    hosts.far.kill()
    hosts.far.start()  # at once: Redis still says that the dead one holds them, at the same address
    assert not any(hosts.engine.check(names)), "another process has the port now"
    other = hashes("other contents", 20)
    eventually(lambda: nodes(hosts.far_engine) == 2, HEAL_WITHIN)
    hosts.far_engine.store(other)
    eventually(lambda: all(hosts.engine.check(other)), HEAL_WITHIN)
    assert not any(hosts.engine.check(names))
    hosts.engine.store(names)  # the dead holder's word keeps nobody from storing them again
    assert all(hosts.engine.check(names)) and hosts.engine.stats()["get_local"] >= 20
    assert all(hosts.far_engine.check(names))


def test_what_a_dead_node_left_is_swept(two_hosts: TwoHosts) -> None:
    hosts = two_hosts
    hosts.far_engine.store(hashes("swept", 100))
    hosts.far.kill()
    with hosts.client() as client:
        assert sum(1 for _ in client.scan_iter("hcm:default:o:*")) == 100
        eventually(lambda: not list(client.scan_iter("hcm:default:o:*")), 15, "the survivor swept them")
        assert not [name for name in client.smembers("hcm:default:nodes:{0}") if name.startswith(b"far")]


@pytest.mark.slow
def test_a_writer_killed_at_any_moment_leaves_nothing_wrong(two_hosts: TwoHosts) -> None:
    """Many rounds: a host stores without pause and is killed after a random time; the other reads all the time."""
    import random
    import threading

    rng = random.Random(7)
    hosts = two_hosts
    names = hashes("victim", 200)
    writer: NodeProcess = hosts.far
    with Load([hosts.engine], names, kinds=("get", "exists"), threads=3) as load:
        for _ in range(14):
            with Engine(writer.socket, page_bytes=16384, op_timeout=1.0) as engine:
                engine.namespace = hosts.engine.namespace
                stop = threading.Event()

                def write(engine: Engine = engine, stop: threading.Event = stop) -> None:
                    while not stop.is_set():
                        some = rng.sample(names, 16)
                        for slot, name in enumerate(some):
                            engine.fill(slot, load._contents[name])
                        engine.put(some)

                thread = threading.Thread(target=write)
                thread.start()
                eventually(lambda engine=engine: nodes(engine) == 2, HEAL_WITHIN)
                time.sleep(rng.uniform(0, 0.15))
                writer.kill()
                stop.set()
                thread.join(10)
            writer.start()
        eventually(lambda: hosts.far_engine.session.connected, HEAL_WITHIN)
    assert load.hits[0] > 100, "the test saw what it is about"
