"""SGLang's hit policies as pure functions, against their definition."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_mooncake.engine.hit_policy import PoolQuery, leading_run, restorable, trailing_lengths

PRESENT = st.lists(st.integers(0, 1), min_size=12, max_size=12).map(bytes)
POOLS = st.lists(st.tuples(st.sampled_from(["all_pages", "trailing_pages"]), st.integers(1, 15), PRESENT), max_size=3)


@given(st.lists(st.integers(0, 1), max_size=20).map(bytes))
def test_the_leading_run_ends_at_the_first_gap(present: bytes) -> None:
    run = leading_run(present)
    assert all(present[:run]) and (run == len(present) or not present[run])


@given(present=PRESENT, limit=st.integers(0, 12), window=st.integers(1, 15))
def test_a_trailing_pool_needs_the_end_of_the_prefix(present: bytes, limit: int, window: int) -> None:
    expected = [end for end in range(1, limit + 1) if all(present[max(0, end - window) : end])]
    assert trailing_lengths(present, limit, window) == expected


@given(kv_pages=st.integers(0, 12), pools=POOLS)
def test_a_length_is_restorable_when_every_pool_can_serve_it(
    kv_pages: int, pools: list[tuple[str, int, bytes]]
) -> None:
    queries = [PoolQuery(f"p{at}", policy, present, window) for at, (policy, window, present) in enumerate(pools)]
    found = restorable(kv_pages, queries)
    each = [restorable(kv_pages, [query]).lengths for query in queries]
    assert found.lengths == [end for end in range(1, kv_pages + 1) if all(end in lengths for lengths in each)]
    assert found.pages == max(found.lengths, default=0)
    for query, lengths in zip(queries, each, strict=True):
        assert found.boundaries.get(query.name, 0) == max(lengths, default=0)


@given(kv_pages=st.integers(0, 12), present=PRESENT, block=st.integers(0, 5), group=st.integers(0, 6))
def test_block_groups_never_gate(kv_pages: int, present: bytes, block: int, group: int) -> None:
    found = restorable(kv_pages, [PoolQuery("p", "block_groups", present, block_pages=block, group_pages=group)])
    assert found.pages == kv_pages and 0 <= found.boundaries.get("p", 0) <= kv_pages


def test_holes_are_reported_as_holes() -> None:
    mamba = PoolQuery("mamba", "trailing_pages", bytes([0, 1, 0, 0, 1]))
    assert restorable(5, [mamba]).lengths == [2, 5]


def test_a_policy_of_another_release_is_an_error() -> None:
    with pytest.raises(ValueError, match="some_pages"):
        restorable(3, [PoolQuery("p", "some_pages", b"\1\1\1")])
