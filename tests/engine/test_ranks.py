"""Which rank counts tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hicache_mooncake.engine.identity import is_first_rank


@pytest.mark.parametrize("name", ["tp_rank", "pp_rank", "attn_cp_rank", "dcp_rank"])
def test_only_the_first_rank_counts_tokens(name: str) -> None:
    first = {"tp_rank": 0, "pp_rank": 0, "attn_cp_rank": 0}
    assert is_first_rank(SimpleNamespace(**first))
    assert not is_first_rank(SimpleNamespace(**{**first, name: 1}))
