"""Page hashes are SGLang's own, for every kind of key that it hashes."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hicache_mooncake.radix_bridge import namespace_seed, page_hashes
from testbed import environment

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("page_hash")]

TEXT = st.none() | st.text(max_size=12)
TOKENS = st.integers(0, 200_000) | st.integers(0, 2**63 - 1) | st.sampled_from([0, 2**32 - 1, 2**32])


@pytest.fixture(scope="module")
def page_hash(sglang: None) -> None:
    environment.build_page_hash()


@given(
    tokens=st.lists(TOKENS, max_size=70),
    page_size=st.integers(1, 17) | st.just(64),
    extra_key=TEXT,
    cache_salt=TEXT,
    bigram=st.booleans(),
)
@example([2**32] * 8, 4, None, None, False)
@example([2**32 - 1] * 8, 4, "", "", True)
@example([1, 2, 3, 2**40, 5, 6, 7, 8, 9], 2, "lora-1", "tenant", True)
@settings(max_examples=400, deadline=None)
def test_the_chain_is_sglangs(
    tokens: list[int], page_size: int, extra_key: str | None, cache_salt: str | None, bigram: bool
) -> None:
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    key = RadixKey(array("q", tokens), extra_key=extra_key, is_bigram=bigram, cache_salt=cache_salt)
    whole = key[: len(key) // page_size * page_size]
    theirs = get_storage_hash_str(whole, None, page_size=page_size) if len(whole) else []
    assert page_hashes(tokens, page_size, prior=namespace_seed(extra_key, cache_salt), bigram=bigram) == theirs


@given(tokens=st.lists(TOKENS, min_size=12, max_size=60), bigram=st.booleans())
@settings(max_examples=50, deadline=None)
def test_a_chain_goes_on_where_another_ended(tokens: list[int], bigram: bool) -> None:
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    whole = page_hashes(tokens, 4, bigram=bigram)
    key = RadixKey(array("q", tokens), is_bigram=bigram)[4 : 4 * len(whole)]
    if len(key):
        assert get_storage_hash_str(key, whole[0], page_size=4) == whole[1:]
