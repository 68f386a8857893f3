"""Page hashes, namespaces and object keys never alias. That the hashes are SGLang's is tested in tests/backend."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_mooncake.radix_bridge import (
    Namespace,
    namespace_seed,
    object_keys,
    page_hashes,
    printable_hash,
    shards_of_rank,
    split_object_key,
)

TEXT = st.text(max_size=12)


def test_a_known_chain() -> None:
    # sha256 of u32 1..4 little-endian, then of that digest and 5..8
    first, second = page_hashes([1, 2, 3, 4, 5, 6, 7, 8, 9], 4)
    assert first == "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72"
    assert page_hashes([5, 6, 7, 8], 4, prior=first) == [second]
    assert page_hashes([1, 2, 3], 4) == []


def test_the_same_tokens_after_another_prefix_hash_differently() -> None:
    tail = list(range(100, 116))
    assert page_hashes([1] * 16 + tail, 16)[1] != page_hashes([2] * 16 + tail, 16)[1]
    assert page_hashes(tail, 16, prior=namespace_seed("lora-a")) != page_hashes(tail, 16)
    assert namespace_seed("a", None) != namespace_seed(None, "a")
    assert namespace_seed("", None) != namespace_seed(None, None)


@given(st.dictionaries(TEXT, TEXT, max_size=4), st.dictionaries(TEXT, TEXT, max_size=4))
def test_namespaces_are_equal_only_with_equal_fields(left: dict[str, str], right: dict[str, str]) -> None:
    assert (Namespace(left).digest == Namespace(right).digest) == (left == right)


@pytest.mark.parametrize(
    ("left", "right"),
    [({"a": "b/c"}, {"a/b": "c"}), ({"a": ""}, {}), ({"a": "1", "b": "2"}, {"a": "1b2"}), ({"a": "x\ny"}, {"a": "x"})],
)
def test_fields_are_framed(left: dict[str, str], right: dict[str, str]) -> None:
    assert Namespace(left).digest != Namespace(right).digest


@given(st.sets(st.text(max_size=70), max_size=50))
def test_printable_hashes_keep_names_apart_and_split_back(names: set[str]) -> None:
    printed = {printable_hash(name) for name in names}
    assert len(printed) == len(names)
    digest = Namespace.describe(model="m").digest
    for key, page_hash in zip(object_keys(digest, printed, ["tp0"]), printed, strict=True):
        assert split_object_key(key) == (digest, page_hash, "tp0")
        assert not any(symbol.isspace() for symbol in key)


def test_sglang_hashes_stand_as_they_are() -> None:
    page_hash = page_hashes(range(16), 16)[0]
    assert printable_hash(page_hash) == page_hash


def rank(**fields: int | bool) -> SimpleNamespace:
    values = {"replicated": False, "tp_rank": 0, "tp_size": 1, **fields}
    shards = shards_of_rank(**values)  # type: ignore[arg-type]
    return SimpleNamespace(parts=shards.parts, fields=dict(shards.fields))


def test_split_heads_let_tp4_read_what_tp2_wrote() -> None:
    tp2 = [rank(tp_rank=r, tp_size=2, head_shards=4) for r in range(2)]
    tp4 = [rank(tp_rank=r, tp_size=4, head_shards=4) for r in range(4)]
    parts = [[part for r in ranks for part in r.parts] for ranks in (tp2, tp4)]
    assert parts == [["h0", "h1", "h2", "h3"]] * 2
    assert tp2[0].fields == tp4[0].fields != rank(tp_rank=0, tp_size=2).fields


def test_ranks_and_sizes_never_meet_unless_the_bytes_are_the_same() -> None:
    assert rank(replicated=True, tp_rank=3, tp_size=4).parts == rank(replicated=True, tp_rank=0, tp_size=2).parts
    assert rank(tp_rank=0, tp_size=2).fields != rank(tp_rank=0, tp_size=4).fields
    assert rank(tp_rank=1, tp_size=2, pp_rank=1, pp_size=2).parts == ("tp1.pp1",)
    assert rank(replicated=True, tp_rank=1, tp_size=4, dcp_rank=1, dcp_size=2).parts == ("all.dcp1",)
    with pytest.raises(ValueError, match="multiple"):
        rank(tp_rank=0, tp_size=3, head_shards=4)
