"""The directory's contract, on every server it may run on and with one shard and several."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from hicache_mooncake.errors import ConfigError
from hicache_mooncake.metadata import Directory, ObjectRecord
from hicache_mooncake.metadata.redis_server import PrivateRedis

from .conftest import eventually, fresh_pool, keys, node

A, B = "a~00000001/dram", "b~00000002/dram"


@pytest.fixture
def other(directory: Directory, server: PrivateRedis) -> Iterator[Directory]:
    """A second pool on the same Redis."""
    opened = Directory(server.url, fresh_pool(), timeout=5.0)
    opened.open()
    yield opened
    opened.close()


def forget_node(directory: Directory, raw: redis.Redis, node_id: str) -> None:
    """As when its time to live has passed."""
    for shard in directory._shards:
        raw.delete(shard.node(node_id))


def test_publish_says_how_many_others_hold_a_key(directory: Directory) -> None:
    some = keys(3)
    assert directory.publish(some, [10, 20, 30], A) == [0, 0, 0]
    assert directory.publish(some, [10, 20, 30], A) == [0, 0, 0]
    assert directory.publish(some[1:], [20, 30], B) == [1, 1]
    assert directory.publish(some, [10, 20, 30], A) == [0, 1, 1]
    assert directory.lookup(some) == [
        ObjectRecord(10, (A,)),
        ObjectRecord(20, (A, B)),
        ObjectRecord(30, (A, B)),
    ]


def test_another_size_replaces_the_record(directory: Directory) -> None:
    some = keys(2)
    directory.publish(some, [10, 10], A)
    assert directory.publish(some, [10, 100], B) == [1, 0]
    assert directory.lookup(some) == [ObjectRecord(10, (A, B)), ObjectRecord(100, (B,))]
    assert directory.forget(some, A) == 1


def test_a_holder_whose_name_contains_another_is_another(directory: Directory) -> None:
    longer = "x" + A
    some = keys(1)
    directory.publish(some, [10], longer)
    assert directory.publish(some, [10], A) == [1]
    assert directory.forget(some, A) == 1
    assert directory.lookup(some) == [ObjectRecord(10, (longer,))]
    assert directory.forget(some, A) == 0


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_forget_takes_one_word_and_leaves_the_others(directory: Directory, gone: int) -> None:
    holders = [f"n{i}~0000000{i}/dram" for i in range(3)]
    some = keys(2)
    for holder in holders:
        directory.publish(some, [7, 7], holder)
    assert directory.forget(some, holders.pop(gone)) == 2
    assert directory.lookup(some) == [ObjectRecord(7, tuple(holders))] * 2


def test_the_last_forget_deletes_the_key(directory: Directory, raw: redis.Redis) -> None:
    some = keys(5)
    directory.publish(some, [1] * 5, A)
    assert directory.forget([*some, *some, *keys(1, start=99)], A) == 5
    assert directory.lookup(some) == [None] * 5
    assert not list(raw.scan_iter(f"hcm:{directory.pool}:o:*"))


def test_a_key_twice_in_a_batch(directory: Directory) -> None:
    (key,) = keys(1)
    assert directory.publish([key, key], [5, 5], A) == [0, 0]
    assert directory.lookup([key, key]) == [ObjectRecord(5, (A,))] * 2


def test_empty_batches(directory: Directory) -> None:
    assert directory.publish([], [], A) == []
    assert directory.lookup([]) == []
    assert directory.forget([], A) == 0


def test_batches_larger_than_a_call(directory: Directory) -> None:
    some = keys(10_000)
    sizes = list(range(10_000))
    assert directory.publish(some, sizes, A) == [0] * 10_000
    assert directory.publish(some[::2], sizes[::2], B) == [1] * 5_000
    found = directory.lookup([*some, *keys(3, start=20_000)])
    assert found == [ObjectRecord(i, (A, B) if i % 2 == 0 else (A,)) for i in range(10_000)] + [None] * 3
    assert directory.forget(some, A) == 10_000
    assert directory.lookup(some[:2]) == [ObjectRecord(0, (B,)), None]


def test_records_are_readable_with_redis_cli(directory: Directory, raw: redis.Redis) -> None:
    directory.publish(keys(1), [262144], A)
    (name,) = raw.scan_iter(f"hcm:{directory.pool}:o:*")
    assert raw.get(name) == b"262144 a~00000001/dram"


@pytest.mark.parametrize("holder", ["a b/dram", "a~00000001"])
def test_a_malformed_holder_is_the_callers_fault(directory: Directory, holder: str) -> None:
    with pytest.raises(ValueError, match="holder"):
        directory.publish(keys(1), [1], holder)


def test_foreign_values_are_misses_and_are_replaced(directory: Directory, raw: redis.Redis) -> None:
    some = keys(3)
    directory.publish(some, [1, 1, 1], A)
    by_key = {name.decode().partition("}")[2]: name for name in raw.scan_iter(f"hcm:{directory.pool}:o:*")}
    raw.delete(by_key[some[0]])
    raw.hset(by_key[some[0]], "what", "is this")
    raw.set(by_key[some[1]], "what is this")
    assert directory.lookup(some) == [None, None, ObjectRecord(1, (A,))]
    assert directory.sweep({"a~00000001"}) == 0
    assert directory.forget(some, A) == 1
    assert directory.publish(some, [1, 1, 1], A) == [0, 0, 0]
    assert directory.lookup(some) == [ObjectRecord(1, (A,))] * 3


def test_opening_twice_joins_the_same_pool(directory: Directory, server: PrivateRedis, raw: redis.Redis) -> None:
    before = raw.hgetall(f"hcm:{directory.pool}")
    assert set(before) == {b"schema", b"shards", b"created"}
    directory.open()
    assert raw.hgetall(f"hcm:{directory.pool}") == before


def test_another_number_of_shards_is_refused(directory: Directory, server: PrivateRedis) -> None:
    with pytest.raises(ConfigError, match="created with") as caught:
        Directory(server.url, directory.pool, shards=7).open()
    assert caught.value.field == "shards"


def test_another_schema_is_refused(directory: Directory, server: PrivateRedis, raw: redis.Redis) -> None:
    raw.hset(f"hcm:{directory.pool}", "schema", "99")
    with pytest.raises(ConfigError, match="schema 99") as caught:
        directory.open()
    assert caught.value.field == "redis_url"


def test_nodes_come_and_go(directory: Directory, raw: redis.Redis) -> None:
    first, second = node("n1~00000001"), node("n2~00000002", addresses={"tcp": "[::1]:7", "rdma": "mlx5_0:1"})
    assert directory.nodes() == {}
    directory.join(first, 30)
    directory.join(second, 30)
    assert directory.nodes() == {first.id: first, second.id: second}
    changed = node("n2~00000002", addresses={}, used=5)
    assert directory.heartbeat(changed, 30)
    assert directory.nodes()[second.id] == changed
    directory.leave(first.id)
    assert directory.nodes() == {second.id: changed}
    assert raw.smembers(directory._shards[0].nodes) == {second.id.encode()}


def test_a_node_that_says_nothing_is_dead_after_its_ttl(directory: Directory) -> None:
    record = node()
    directory.join(record, 0.2)
    deadline = time.monotonic() + 10
    while directory.nodes():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert directory.heartbeat(record, 30) is False, "others may have swept what it holds"
    assert directory.heartbeat(record, 30) is True
    assert directory.nodes() == {record.id: record}


def test_a_node_key_always_has_a_ttl(directory: Directory, raw: redis.Redis) -> None:
    record = node()
    stop = threading.Event()
    beats = 0

    def beat() -> None:
        nonlocal beats
        while not stop.is_set():
            directory.heartbeat(record, 0.005)  # mostly expired again before the next one
            beats += 1

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            assert raw.pttl(directory._shards[0].node(record.id)) != -1
    finally:
        stop.set()
        thread.join(10)
    assert beats > 20


def test_heartbeat_before_join_asks_to_publish(directory: Directory) -> None:
    assert directory.heartbeat(node(), 30) is False
    assert directory.heartbeat(node(), 30) is True


def test_a_flushed_directory_is_noticed_once_by_each_node(
    directory: Directory, server: PrivateRedis, raw: redis.Redis
) -> None:
    first, second = node("n1~00000001"), node("n2~00000002")
    peer = Directory(server.url, directory.pool, timeout=5.0, shards=len(directory._shards))
    peer.open()
    try:
        directory.join(first, 30)
        peer.join(second, 30)
        assert directory.heartbeat(first, 30) and peer.heartbeat(second, 30)
        raw.flushall()
        assert directory.heartbeat(first, 30) is False
        assert peer.heartbeat(second, 30) is False, "the pool exists again, but it is not the one it published to"
        assert directory.heartbeat(first, 30) and peer.heartbeat(second, 30)
        assert set(directory.nodes()) == {first.id, second.id}
    finally:
        peer.close()


def test_a_lost_pool_key_is_created_again(directory: Directory, raw: redis.Redis) -> None:
    directory.join(node(), 30)
    before = raw.hgetall(f"hcm:{directory.pool}")
    raw.delete(f"hcm:{directory.pool}")
    assert directory.heartbeat(node(), 30)
    assert {**before, b"created": b""} == {**raw.hgetall(f"hcm:{directory.pool}"), b"created": b""}


def test_a_lost_shard_is_noticed(directory: Directory, raw: redis.Redis) -> None:
    directory.join(node(), 30)
    raw.delete(directory._shards[-1].state)
    assert directory.heartbeat(node(), 30) is False
    assert directory.heartbeat(node(), 30) is True


def test_a_restored_shard_is_noticed(directory: Directory, raw: redis.Redis) -> None:
    directory.join(node(), 30)
    raw.hset(directory._shards[0].state, "epoch", "of an old dump")
    assert directory.heartbeat(node(), 30) is False
    assert directory.heartbeat(node(), 30) is True


def test_scripts_are_loaded_again_when_flushed(directory: Directory, raw: redis.Redis) -> None:
    some = keys(6_000)  # several calls in one write, all of them unknown to the server
    raw.script_flush()
    assert directory.publish(some, [1] * 6_000, A) == [0] * 6_000
    raw.script_flush()
    assert directory.forget(some, A) == 6_000
    raw.script_flush()
    assert directory.sweep(set()) == 0


def test_namespaces(directory: Directory, other: Directory) -> None:
    assert directory.namespaces() == {}
    directory.declare_namespace("00ff", {"model": "Llama 3 ☃", "dtype": "bf16"})
    directory.declare_namespace("00ff", {"model": "Llama 3 ☃", "dtype": "bf16"})
    directory.declare_namespace("11ff", {"model": "x"})
    assert directory.namespaces() == {"00ff": {"model": "Llama 3 ☃", "dtype": "bf16"}, "11ff": {"model": "x"}}
    assert other.namespaces() == {}
    with pytest.raises(ValueError, match="field"):
        directory.declare_namespace("22ff", {})


def test_a_namespace_that_nobody_declares_again_is_forgotten(directory: Directory, raw: redis.Redis) -> None:
    shards = directory._shards
    key, index = shards[0].namespace("00ff"), shards[0].namespaces
    month = 30 * 24 * 3600
    directory.declare_namespace("00ff", {"model": "x"})
    directory.declare_namespace("11ff", {"model": "y"})
    assert month - 60 < raw.ttl(key) <= month
    raw.expire(key, 100)
    directory.declare_namespace("00ff", {"model": "x"})
    assert month - 60 < raw.ttl(key) <= month
    for shard in shards:
        raw.pexpire(shard.namespace("00ff"), 1)
    eventually(lambda: not any(raw.exists(shard.namespace("00ff")) for shard in shards))
    assert directory.namespaces() == {"11ff": {"model": "y"}}
    assert raw.smembers(index) == {b"11ff"}
    directory.declare_namespace("00ff", {"model": "z"})
    assert directory.namespaces() == {"00ff": {"model": "z"}, "11ff": {"model": "y"}}


def test_what_redis_says_of_its_memory(directory: Directory) -> None:
    assert directory.memory_policy() == ("noeviction", 0)


def test_all_objects_and_those_of_one_namespace(directory: Directory) -> None:
    directory.publish(keys(3), [1, 2, 3], A)
    expected = {key: ObjectRecord(size, (A,)) for key, size in zip(keys(3), [1, 2, 3], strict=True)}
    assert dict(directory.objects()) == expected
    assert dict(directory.objects(digest="00112233aabbccdd")) == expected
    assert dict(directory.objects(digest="ff")) == {}


def test_two_pools_do_not_see_each_other(directory: Directory, other: Directory) -> None:
    some = keys(4)
    directory.publish(some, [1] * 4, A)
    directory.join(node(), 30)
    assert other.lookup(some) == [None] * 4
    assert other.nodes() == {}
    assert other.publish(some, [2] * 4, B) == [0] * 4
    assert other.sweep(set()) == 4
    assert other.forget(some, A) == 0
    assert directory.lookup(some) == [ObjectRecord(1, (A,))] * 4
    assert set(directory.nodes()) == {node().id}


def test_sweep_drops_what_the_dead_left(directory: Directory, raw: redis.Redis) -> None:
    live, dead = node("live~00000001"), node("dead~00000002")
    directory.join(live, 30)
    directory.join(dead, 30)
    some = keys(1_500)
    for holder in (f"{live.id}/dram", f"{dead.id}/dram", "shared/fs"):
        directory.publish(some[:1_000], [1] * 1_000, holder)
    directory.publish(some[1_000:], [1] * 500, f"{dead.id}/dram")
    directory.publish(some[1_000:], [1] * 500, f"{dead.id}/ssd")
    forget_node(directory, raw, dead.id)
    assert directory.sweep({live.id}, keys_per_call=100, pause=0.001) == 2_000
    assert directory.lookup(some) == [ObjectRecord(1, (f"{live.id}/dram", "shared/fs"))] * 1_000 + [None] * 500
    assert raw.smembers(directory._shards[0].nodes) == {live.id.encode()}
    assert directory.sweep({live.id}) == 0


def test_sweep_spares_who_joined_after_it_asked_who_lives(directory: Directory) -> None:
    late = node("late~00000009")
    live = set(directory.nodes())
    directory.join(late, 30)
    directory.publish(keys(3), [1] * 3, f"{late.id}/dram")
    assert directory.sweep(live) == 0
    assert directory.lookup(keys(3)) == [ObjectRecord(1, (f"{late.id}/dram",))] * 3
    assert set(directory.nodes()) == {late.id}


def test_crashed_nodes_leave_nothing_behind(directory: Directory, raw: redis.Redis) -> None:
    directory.join(node(), 30)  # the first node of a pool creates its shards
    directory.leave(node().id)
    baseline = raw.dbsize()
    for number in range(100):
        crashed = node(f"n~{number:08x}")
        directory.join(crashed, 30)
        directory.publish(keys(10), [1] * 10, f"{crashed.id}/dram")
        forget_node(directory, raw, crashed.id)
        if number % 10 == 9:
            directory.sweep(set(directory.nodes()))
    assert raw.dbsize() == baseline


def test_many_threads(directory: Directory) -> None:
    """Each thread works on keys that all share, in its own name; in the end exactly what it left is there."""
    some = keys(200)
    failures: list[BaseException] = []
    left: dict[str, set[str]] = {}

    def work(number: int) -> None:
        holder = f"t~{number:08x}/dram"
        mine: set[str] = set()
        try:
            for turn in range(60):
                batch = some[(turn * 7 + number) % 150 :][:50]
                if turn % 3 == 2:
                    assert directory.forget(batch, holder) == len(mine.intersection(batch))
                    mine.difference_update(batch)
                else:
                    others = directory.publish(batch, [64] * len(batch), holder)
                    assert all(0 <= count < 8 for count in others)
                    mine.update(batch)
                for key, record in zip(some, directory.lookup(some), strict=True):
                    assert (record is not None and holder in record.holders) == (key in mine)
                    assert record is None or len(set(record.holders)) == len(record.holders)
            left[holder] = mine
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    for key, record in zip(some, directory.lookup(some), strict=True):
        assert set(record.holders if record else ()) == {holder for holder, mine in left.items() if key in mine}


def test_any_sequence_of_changes_matches_a_model(server: PrivateRedis, raw: redis.Redis) -> None:
    key_choice = st.lists(st.sampled_from(keys(6)), unique=True, max_size=6)
    holder_choice = st.sampled_from([A, B, "c~00000003/ssd", "shared/fs"])

    class Model(RuleBasedStateMachine):
        @initialize(shards=st.integers(1, 3))
        def open(self, shards: int) -> None:
            raw.flushall()  # or the sweeps walk through what other tests left
            self.directory = Directory(server.url, fresh_pool(), timeout=5.0, shards=shards)
            self.directory.open()
            self.model: dict[str, tuple[int, list[str]]] = {}

        @rule(some=key_choice, size=st.sampled_from([1, 12, 123]), holder=holder_choice)
        def publish(self, some: list[str], size: int, holder: str) -> None:
            expected = []
            for key in some:
                known, holders = self.model.get(key, (size, []))
                holders = holders if known == size else []
                expected.append(len([other for other in holders if other != holder]))
                self.model[key] = (size, holders if holder in holders else [*holders, holder])
            assert self.directory.publish(some, [size] * len(some), holder) == expected

        @rule(some=key_choice, holder=holder_choice)
        def forget(self, some: list[str], holder: str) -> None:
            held = [key for key in some if holder in self.model.get(key, (0, []))[1]]
            assert self.directory.forget(some, holder) == len(held)
            self._drop(held, lambda other: other == holder)

        @rule(live=st.sets(st.sampled_from(["a~00000001", "b~00000002"])))
        def sweep(self, live: set[str]) -> None:
            def dead(holder: str) -> bool:
                return "~" in holder and holder.partition("/")[0] not in live

            words = sum(dead(holder) for _, holders in self.model.values() for holder in holders)
            assert self.directory.sweep(live, keys_per_call=4) == words
            self._drop(list(self.model), dead)

        def _drop(self, some: list[str], unwanted: object) -> None:
            for key in some:
                size, holders = self.model.pop(key)
                kept = [holder for holder in holders if not unwanted(holder)]  # type: ignore[operator]
                if kept:
                    self.model[key] = (size, kept)

        def teardown(self) -> None:
            if hasattr(self, "directory"):
                expected = [
                    ObjectRecord(self.model[key][0], tuple(self.model[key][1])) if key in self.model else None
                    for key in keys(6)
                ]
                assert self.directory.lookup(keys(6)) == expected
                self.directory.close()

    run_state_machine_as_test(
        Model,
        settings=settings(
            max_examples=40, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
