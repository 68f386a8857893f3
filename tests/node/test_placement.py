"""Placement: local first, then by free room, and never everything to a newcomer."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from hicache_mooncake.metadata.records import NodeRecord
from hicache_mooncake.node.placement import Room, spill_targets

GIB = 1 << 30


def node(name: str, capacity: int, used: int) -> NodeRecord:
    return NodeRecord(f"{name}~00000000", name, name, {"tcp": "h:1"}, capacity, used, "0", 0.0, 0)


def others(**rooms: tuple[int, int]) -> dict[str, NodeRecord]:
    return {f"{name}~00000000": node(name, *room) for name, room in rooms.items()}


def test_what_fits_here_stays_here() -> None:
    here = Room(GIB, GIB // 2, 0.9)
    assert spill_targets(GIB // 4, here, others(b=(GIB, 0)), {"b~00000000"}, Random(1)) == []


def test_a_newcomer_gets_at_most_half_of_what_full_nodes_write() -> None:
    chance = Random(1)
    full = Room(GIB, int(0.9 * GIB), 0.9)
    pool = others(b=(GIB, GIB), c=(GIB, GIB), new=(GIB, 0))
    share = sum(bool(spill_targets(1 << 20, full, pool, set(pool), chance)) for _ in range(1000)) / 1000
    assert 0.4 < share < 0.6


def test_a_node_without_memory_always_goes_elsewhere() -> None:
    pool = others(b=(GIB, 0))
    assert all(spill_targets(4096, Room(0, 0, 0.9), pool, set(pool), Random(seed)) for seed in range(50))


def test_free_bytes_decide_between_nodes() -> None:
    chance = Random(1)
    pool = others(small=(GIB, GIB // 2), large=(8 * GIB, 0))
    first = Counter(spill_targets(1 << 20, Room(0, 0, 0.9), pool, set(pool), chance)[0] for _ in range(1000))
    assert first["large~00000000"] > 10 * first["small~00000000"] > 0


@given(
    needed=st.integers(1, GIB),
    used=st.integers(0, GIB),
    rooms=st.dictionaries(st.sampled_from("bcdef"), st.tuples(st.integers(0, GIB), st.integers(0, GIB)), max_size=5),
    away=st.sets(st.sampled_from("bcdef")),
    seed=st.integers(0, 100),
)
def test_only_usable_nodes_with_room_are_named(
    needed: int, used: int, rooms: dict[str, tuple[int, int]], away: set[str], seed: int
) -> None:
    pool = others(**rooms)
    usable = {node_id for node_id in pool if node_id[0] not in away}
    targets = spill_targets(needed, Room(GIB, used, 0.9), pool, usable, Random(seed))
    assert len(set(targets)) == len(targets) <= 2
    for target in targets:
        assert target in usable
        assert int(pool[target].capacity * 0.9) - pool[target].used >= needed
