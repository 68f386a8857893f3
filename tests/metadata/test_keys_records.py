from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from hicache_mooncake.errors import ConfigError
from hicache_mooncake.metadata.keys import Keys, shard_of, tags
from hicache_mooncake.metadata.records import (
    NodeRecord,
    ObjectRecord,
    format_node,
    format_object,
    node_of,
    pairs,
    parse_node,
    parse_object,
)

words = st.text(st.characters(codec="utf-8", exclude_characters=" "), min_size=1)
parts = st.text(st.characters(codec="ascii", categories=("L", "N"), include_characters="._-"), min_size=1)


@given(st.integers(0, 10**18 - 1), st.lists(words, min_size=1))
def test_object_record_round_trip(size: int, holders: list[str]) -> None:
    record = ObjectRecord(size, tuple(holders))
    assert parse_object(format_object(record)) == record


@given(st.binary())
def test_any_bytes_are_a_record_or_none(raw: bytes) -> None:
    record = parse_object(raw)
    if record is not None:
        assert record.size >= 0 and record.holders
        assert parse_object(format_object(record)) == record


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"12",
        b"12 ",
        b" a/dram",
        b"-1 a/dram",
        b"1e3 a/dram",
        b"1  a/dram",
        b"9" * 19 + b" a/dram",
        b"1 \xff/dram",
    ],
)
def test_malformed_object_records(raw: bytes) -> None:
    assert parse_object(raw) is None


@given(
    st.builds(
        NodeRecord,
        id=st.just("n~00000001"),
        name=words,
        host=words,
        addresses=st.dictionaries(parts, words),
        capacity=st.integers(0, 1 << 60),
        used=st.integers(0, 1 << 60),
        version=words,
        started=st.floats(0, 1e12),
        pages=st.integers(0, 1 << 40),
    )
)
def test_node_record_round_trip(record: NodeRecord) -> None:
    fields = pairs(word.encode() for word in format_node(record))
    assert parse_node(record.id, fields) == record


@pytest.mark.parametrize("missing", ["name", "host", "capacity", "used", "version", "started", "pages"])
def test_incomplete_node_is_none(missing: str) -> None:
    flat = format_node(NodeRecord("n~1", "n", "h", {"tcp": "h:1"}, 1, 0, "0", 1.0, 0))
    fields = pairs(word.encode() for word in flat)
    assert parse_node("n~1", {**fields, "capacity": "much"}) is None
    del fields[missing]
    assert parse_node("n~1", fields) is None


def test_holder_words() -> None:
    assert node_of("a-b.c~0011aabb/dram") == "a-b.c~0011aabb"
    assert node_of("shared/threefs") is None


@given(parts, st.lists(parts, min_size=2, max_size=4), st.integers(1, 64))
def test_parts_of_a_page_share_a_shard(page: str, shard_parts: list[str], shards: int) -> None:
    found = {shard_of(f"{'0' * 16}:{page}:{part}", shards) for part in shard_parts}
    assert len(found) == 1 and 0 <= found.pop() < shards


@given(parts, st.integers(1, 64))
def test_object_key_is_readable_and_in_its_pool(page: str, shards: int) -> None:
    object_key = f"00112233aabbccdd:{page}:tp0"
    names = Keys("p", shards)
    name = names.object(object_key)
    assert name == f"hcm:p:o:{{{tags(shards)[shard_of(object_key, shards)]}}}{object_key}"
    assert names.shard_of(object_key).objects([object_key]) == [name]
    assert Keys.object_key(name.encode()) == object_key
    assert key_slot(name.encode()) == names.shard_of(object_key).slot


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 64])
def test_all_keys_of_a_shard_are_in_its_slot(count: int) -> None:
    for shard in Keys("p", count).shards:
        keys = [shard.state, shard.nodes, shard.namespaces, shard.probe, shard.node("n~1"), shard.namespace("ff")]
        assert {key_slot(key.encode()) for key in keys} == {shard.slot}


@pytest.mark.parametrize("count", [2, 3, 4, 6, 12, 64])
def test_shards_are_spread_over_the_masters_of_a_cluster(count: int) -> None:
    slots = [shard.slot for shard in Keys("p", count).shards]
    assert [slot * count // 16384 for slot in slots] == list(range(count))


def test_tags_never_change() -> None:
    # Part of the schema: a node that came to others would not find what was stored.
    assert tags(1) == ("0",)
    assert tags(3) == ("0b", "1bi", "2dr")
    assert tags(6) == ("0bd", "1bs", "2bc", "3di", "4as", "5ad")


def test_pages_spread_over_shards() -> None:
    counts = [0] * 4
    for number in range(4000):
        counts[shard_of(f"{'0' * 16}:{number:064x}:all", 4)] += 1
    assert min(counts) > 800


@pytest.mark.parametrize("pool", ["", "a:b", "a b", "*", "a{b}", "x" * 65])
def test_pool_names_that_could_reach_other_pools_are_refused(pool: str) -> None:
    with pytest.raises(ConfigError, match="pool"):
        Keys(pool)


@pytest.mark.parametrize("shards", [0, -1, 65])
def test_number_of_shards_is_bounded(shards: int) -> None:
    with pytest.raises(ConfigError, match="shards"):
        Keys("p", shards)
