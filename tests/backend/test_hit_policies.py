"""How long a prefix can be restored: against a model of its own, and against SGLang's ``file`` backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.backend import rig as r
from tests.backend.rig import Rig

pytestmark = pytest.mark.sglang

PAGES = 7
SIDES = ("indexer", "swa", "mamba")

Presence = tuple[bool, ...]
presence = st.lists(st.booleans() | st.just(True), min_size=PAGES, max_size=PAGES).map(tuple)
policies = st.tuples(st.just("all_pages"), st.just(0)) | st.tuples(st.just("trailing_pages"), st.integers(0, PAGES + 1))


def legal(length: int, kv: Presence, sides: list[tuple[str, int, Presence]]) -> bool:
    """Whether a prefix of this length can be restored: the definition, page by page."""
    if not all(kv[:length]):
        return False
    for policy, window, present in sides:
        first = 0 if policy == "all_pages" else max(0, length - max(1, window))
        if not all(present[first:length]):
            return False
    return True


class Both:
    """The pool and SGLang's files, brought into the same state."""

    def __init__(self, rig: Rig, directory: Path) -> None:
        from sglang.srt.mem_cache.hicache_storage import HiCacheFile

        self.pools = {"kv": r.mha(pages=PAGES + 1), **{name: r.mha(pages=PAGES + 1, layers=1) for name in SIDES}}
        sides = {name: self.pools[name] for name in SIDES}
        self.ours = rig.backend(self.pools["kv"], sides)
        self.theirs = HiCacheFile(rig.config(extra={}), str(directory))
        self.directory = directory
        self.theirs.register_mem_pool_host(self.pools["kv"])
        for name, pool in sides.items():
            self.theirs.register_mem_host_pool_v2(pool, name)
        self.round = 0

    def store(self, present: dict[str, Presence]) -> list[str]:
        self.round += 1
        keys = r.hashes(f"round {self.round}", PAGES)
        for name, pages in present.items():
            some = [key for key, here in zip(keys, pages, strict=True) if here]
            if some:
                assert r.put(self.ours, self.pools[name], some, name) == [True] * len(some)
            for key in some:
                component = None if name == "kv" else name
                (self.directory / f"{self.theirs._get_component_key(key, component)}.bin").touch()
        return keys


@pytest.fixture(scope="module")
def both(sglang: None, node: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with Rig(node) as rig:
        yield Both(rig, tmp_path_factory.mktemp("files"))


@given(kv=presence, sides=st.lists(st.tuples(policies, presence), max_size=3))
@example((True,) * PAGES, [(("trailing_pages", 1), (False, True, False, True, False, False, False))])
@example((True,) * PAGES, [(("trailing_pages", 3), (True, False, True, True, True, False, True))])
@example((False,) * PAGES, [(("all_pages", 0), (True,) * PAGES)])
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_legal_length_and_no_other(
    both: Both, kv: Presence, sides: list[tuple[tuple[str, int], Presence]]
) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy

    named = list(zip(SIDES, sides, strict=False))
    keys = both.store({"kv": kv, **{name: present for name, (_, present) in named}})
    transfers = [
        r.transfer(name, ["__placeholder__"] * window or None, hit_policy=PoolHitPolicy(policy))
        for name, ((policy, window), _) in named
    ]
    ours = both.ours.batch_exists_v2(keys, transfers)
    theirs = both.theirs.batch_exists_v2(keys, transfers)
    model = [
        length
        for length in range(1, PAGES + 1)
        if legal(length, kv, [(policy, window, present) for (policy, window), present in sides])
    ]
    assert ours.restorable_prefix_pages == model == theirs.restorable_prefix_pages
    assert ours.kv_hit_pages == theirs.kv_hit_pages == max(model, default=0)
    # SGLang's stops asking once nothing can be restored; what it reports, ours reports too.
    reported = {str(name): count for name, count in ours.extra_pool_hit_pages.items()}
    assert {str(name): count for name, count in theirs.extra_pool_hit_pages.items()}.items() <= reported.items()
    if model:
        assert len(reported) == len(theirs.extra_pool_hit_pages)
    run = next((at for at, here in enumerate(kv) if not here), PAGES)
    assert both.ours.batch_exists(keys) == run == reported.get("kv", 0)


@given(kv=presence, present=presence, block=st.integers(1, 4), group=st.integers(1, 2))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_block_groups_report_and_never_gate(
    both: Both, kv: Presence, present: Presence, block: int, group: int
) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy

    keys = both.store({"kv": kv, "indexer": present})
    blocks = r.transfer("indexer", None, hit_policy=PoolHitPolicy.BLOCK_GROUPS, block_pages=block, group_pages=group)
    found = both.ours.batch_exists_v2(keys, [blocks])
    run = next((at for at, here in enumerate(kv) if not here), PAGES)
    assert found.kv_hit_pages == run and found.restorable_prefix_pages == list(range(1, run + 1))
    covered = found.extra_pool_hit_pages.get("indexer", 0)
    assert covered % block == 0 and covered <= run
    size = min(block, group)
    complete = [all(present[end - size : end]) for end in range(block, run + 1, block)]
    assert covered == block * next((at for at, here in enumerate(complete) if not here), len(complete))


def test_an_unknown_policy_is_a_miss(both: Both) -> None:
    keys = both.store({"kv": (True,) * PAGES, "swa": (True,) * PAGES})
    assert both.ours.batch_exists_v2(keys, [r.transfer("swa", None, hit_policy="some_pages")]).kv_hit_pages == 0


def test_no_pages_no_pools(both: Both) -> None:
    keys = both.store({"kv": (True, True, *[False] * (PAGES - 2))})
    assert both.ours.batch_exists_v2(keys).kv_hit_pages == both.ours.batch_exists_v2(keys, []).kv_hit_pages == 2
    empty = both.ours.batch_exists_v2([], [r.transfer("swa", None)])
    assert (empty.kv_hit_pages, empty.extra_pool_hit_pages, empty.restorable_prefix_pages) == (0, {}, [])
