"""SGLang's storage contract, call by call, with SGLang's own host pools."""

from __future__ import annotations

import gc
import os
import threading
import time
from typing import Any

import pytest

from hicache_mooncake.errors import ConfigError
from tests.backend import rig as r
from tests.backend.rig import Rig

pytestmark = pytest.mark.sglang

POOLS = {
    "mha-page_first": lambda **k: r.mha("page_first", **k),
    "mha-page_first_direct": lambda **k: r.mha("page_first_direct", **k),
    "mha-page_head": lambda **k: r.mha("page_head", **k),
    "mha-layer_first": lambda **k: r.mha("layer_first", **k),
    "asymmetric-page_first": lambda **k: r.mha("page_first", v_dim=4, **k),
    "asymmetric-page_first_direct": lambda **k: r.mha("page_first_direct", v_dim=4, **k),
    "mla-page_first": lambda **k: r.mla("page_first", **k),
    "mla-page_first_direct": lambda **k: r.mla("page_first_direct", **k),
    "mla-layer_first": lambda **k: r.mla("layer_first", **k),
}


@pytest.fixture
def allocator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The allocator of the host pools; with ``private`` no other process can map them."""
    if request.param == "private":
        monkeypatch.setattr("hicache_mooncake.backend.lendable", lambda ranges: [])
        return "default"
    return str(request.param)


ALLOCATORS = pytest.mark.parametrize("allocator", ["mooncake", "shm", "default", "private"], indirect=True)


@ALLOCATORS
@pytest.mark.parametrize("kind", POOLS)
def test_pages_come_back(kind: str, allocator: str, rig: Rig) -> None:
    pool = POOLS[kind](allocator=allocator)
    backend = rig.backend(pool, is_mla_model=kind.startswith("mla"))
    keys = r.hashes(kind, 16)
    r.store(backend, pool, keys)
    assert backend.batch_exists(keys) == 16
    assert r.fetch(backend, pool, keys) == [True] * 16
    assert backend._mover._lent or allocator == "default"  # in place where the memory is shared, else through staging


@ALLOCATORS
def test_side_pools_come_back(allocator: str, rig: Rig) -> None:
    kv = r.mha(allocator=allocator)
    pools = {
        "mamba": r.mamba(allocator=allocator),
        "swa": r.mha("page_first_direct", layers=1, allocator=allocator),
        "draft": r.mla(layers=1, allocator=allocator),
        "auxiliary_swa": r.mha(layers=3, allocator=allocator),
    }
    backend = rig.backend(kv, pools)
    keys = r.hashes("side", 8)
    for name, pool in pools.items():
        r.store(backend, pool, keys, name)
    for name, pool in pools.items():
        assert r.fetch(backend, pool, keys, name) == [True] * 8
        assert r.fetch(backend, pool, r.hashes("others", 8), name) == [False] * 8
    assert backend.batch_exists(keys) == 0  # KV itself was not stored


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_index_keys_and_states_without_a_temporal_part(layout: str, rig: Rig) -> None:
    kv, indexer = r.dsa(layout)
    states = r.mamba(layout, temporal=(0,))
    backend = rig.backend(kv, {"indexer": indexer, "mamba": states}, is_mla_model=True)
    keys = r.hashes("dsa", 4)
    for pool, name in ((kv, "kv"), (indexer, "indexer"), (states, "mamba")):
        r.store(backend, pool, keys, name)
        assert r.fetch(backend, pool, keys, name) == [True] * 4


@pytest.mark.parametrize("count", [0, 1, 127, 128, 129, 4096])
def test_a_result_a_page(count: int, rig: Rig) -> None:
    pool = r.counting(max(1, count))
    backend = rig.backend(pool, {"swa": r.counting(max(1, count))})
    keys = r.hashes("count", count)
    swa = backend.registered_pools["swa"]
    assert backend.batch_exists(keys) == 0
    assert r.get(backend, pool, keys) == [False] * count
    assert r.get(backend, swa, keys, "swa") == [False] * count
    r.store(backend, pool, keys)
    r.store(backend, swa, keys, "swa")
    assert r.put(backend, pool, keys) == [True] * count  # present already
    assert backend.batch_exists(keys) == count
    assert r.fetch(backend, pool, keys) == [True] * count
    assert r.fetch(backend, swa, keys, "swa") == [True] * count
    both = [r.transfer("swa", keys, r.slots(swa, range(count))), r.transfer("kv", keys, r.slots(pool, range(count)))]
    assert backend.batch_get_v2(both) == {"swa": [True] * count, "kv": [True] * count}
    found = backend.batch_exists_v2(keys, [r.transfer("swa", ["__placeholder__"] * 2)])
    assert found.kv_hit_pages == count


def test_thousands_of_keys_in_one_question(rig: Rig) -> None:
    pool = r.counting(64)
    backend = rig.backend(pool)
    keys = r.hashes("many", 20_000)
    r.store(backend, pool, keys[:50])
    started = time.monotonic()
    assert backend.batch_exists(keys) == 50
    assert backend.batch_exists(keys[1:]) == 49
    assert backend.batch_exists(keys[50:]) == 0
    assert time.monotonic() - started < 3 * backend.settings.op_timeout


def test_duplicates(rig: Rig) -> None:
    pool = r.mha()
    backend = rig.backend(pool)
    one, two = r.hashes("twice", 2)
    for page, key in enumerate([one, two, one]):
        r.fill(pool, page, f"kv/{key}")
    assert r.put(backend, pool, [one, two, one]) == [True] * 3
    assert backend.batch_exists([one, two, one, one]) == 4
    assert r.fetch(backend, pool, [one, two, two, one, one]) == [True] * 5


def test_a_page_that_is_stored_stays_as_it_is(rig: Rig) -> None:
    pool = r.mha()
    backend = rig.backend(pool)
    keys = r.hashes("first", 4)
    r.store(backend, pool, keys[1:3])
    for page, key in enumerate(keys):
        r.fill(pool, page, f"kv/{key}" if page in (0, 3) else "something else")
    assert r.put(backend, pool, keys) == [True] * 4
    assert r.fetch(backend, pool, keys) == [True] * 4


def test_each_page_hits_or_misses_by_itself(rig: Rig) -> None:
    pool = r.mha()
    backend = rig.backend(pool)
    keys = r.hashes("gaps", 12)
    r.store(backend, pool, [key for at, key in enumerate(keys) if at % 3])
    assert r.fetch(backend, pool, keys) == [bool(at % 3) for at in range(12)]
    assert backend.batch_exists(keys) == 0
    assert backend.batch_exists(keys[1:]) == 2


def test_pages_may_lie_anywhere(rig: Rig) -> None:
    pool = r.mha(pages=16)
    backend = rig.backend(pool)
    keys = r.hashes("scattered", 5)
    places = [9, 2, 15, 0, 7]
    for page, key in zip(places, keys, strict=True):
        r.fill(pool, page, f"kv/{key}")
    assert r.put(backend, pool, keys, pages=places) == [True] * 5
    assert r.fetch(backend, pool, keys) == [True] * 5


def test_wrong_indices_fail_whole(rig: Rig) -> None:
    import torch

    pool = r.mha()
    backend = rig.backend(pool, {"mamba": r.mamba()})
    keys = r.hashes("wrong", 3)
    r.store(backend, pool, keys)
    blank = [r.fill(pool, page) for page in range(pool.page_num)]
    good = r.slots(pool, range(3))
    wrong: list[Any] = [
        good[:-1],
        good[: 2 * pool.page_size],
        torch.cat([good, good]),
        torch.arange(3),
        good + pool.size,
        good - 1,
        good + (1 << 40),
        torch.empty(0, dtype=torch.int64),
        None,
        [0, 1],
        "no",
        7,
        good.to(torch.float32) * float("nan"),
        good.reshape(3, -1),
    ]
    for indices in wrong:
        assert backend.batch_get_v1(keys, indices) == [False] * 3, indices
        assert backend.batch_set_v1(keys, indices) == [False] * 3, indices
        for name in ("kv", "mamba"):
            moved = backend.batch_get_v2([r.transfer(name, keys, indices)])
            if name == "kv" or not isinstance(indices, torch.Tensor) or len(indices) != 3:
                assert moved == {name: [False] * 3}, indices
    assert [r.read(pool, page) for page in range(pool.page_num)] == blank


def test_index_tensors_may_go_when_the_call_is_over(rig: Rig) -> None:
    pool = r.mha()
    backend = rig.backend(pool)
    keys = r.hashes("indices", 8)
    r.store(backend, pool, keys)
    for _ in range(3):
        for page in range(8):
            r.fill(pool, page)
        indices = r.slots(pool, range(8))
        hits = backend.batch_get_v1(keys, indices)
        indices.fill_(1 << 40)
        del indices
        gc.collect()
        assert hits == [True] * 8
        assert [r.read(pool, page) for page in range(8)] == [
            r.content(f"kv/{key}", len(r.read(pool, 0))) for key in keys
        ]
    import torch

    assert backend.batch_get_v1(keys[:1], r.slots(pool, [3]).to(torch.int32)) == [True]


def test_unknown_pools_miss_and_known_ones_beside_them_do_not(rig: Rig) -> None:
    kv, swa = r.mha(), r.mha()
    backend = rig.backend(kv, {"swa": swa})
    keys = r.hashes("unknown", 2)
    both = [r.transfer("draft", keys, r.slots(swa, range(2))), r.transfer("swa", keys, r.slots(swa, range(2)))]
    assert backend.batch_set_v2(both) == {"draft": [False, False], "swa": [True, True]}
    assert backend.batch_get_v2(both) == {"draft": [False, False], "swa": [True, True]}
    r.store(backend, kv, keys)
    assert backend.batch_exists_v2(keys, [r.transfer("draft", None)]).kv_hit_pages == 0


def test_a_pool_that_comes_late_is_served(rig: Rig) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolName

    kv, draft = r.mha(), r.mha(layers=1)
    backend = rig.backend(kv)
    keys = r.hashes("late", 3)
    r.store(backend, kv, keys)
    backend.register_mem_host_pool_v2(draft, PoolName.DRAFT)
    assert backend.batch_exists_v2(keys, [r.transfer("draft", None)]).kv_hit_pages == 0
    r.store(backend, draft, keys[:2], "draft")
    found = backend.batch_exists_v2(keys, [r.transfer("draft", None)])
    assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (2, {"kv": 3, "draft": 2})
    assert r.fetch(backend, draft, keys, "draft") == [True, True, False]


def test_a_pool_under_two_names_is_two_pools(rig: Rig) -> None:
    kv = r.mha()
    backend = rig.backend(kv, {"swa": kv})
    keys = r.hashes("alias", 2)
    r.store(backend, kv, keys)
    assert r.fetch(backend, kv, keys, "swa") == [False, False]
    r.store(backend, kv, keys, "swa")
    assert r.fetch(backend, kv, keys) == r.fetch(backend, kv, keys, "swa") == [True, True]


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first"])
def test_deepseek_v4_lives_in_its_side_pools(layout: str, rig: Rig) -> None:
    anchor, sides = r.deepseek_v4(layout)
    backend = rig.backend(anchor, sides, is_mla_model=True)
    keys = r.hashes("v4", 6)
    indices = r.slots(anchor, range(6))
    descriptors = [r.transfer("deepseek_v4_c4", None), r.transfer("deepseek_v4_c128", None)]
    assert backend.batch_exists(keys) == 0
    assert backend.batch_exists_v2(keys, descriptors).kv_hit_pages == 0
    assert backend.batch_exists_v2(keys, []).kv_hit_pages == 0
    assert backend.batch_set_v1(keys, indices) == backend.batch_get_v1(keys, indices) == [True] * 6
    for name, pool in sides.items():
        r.store(backend, pool, keys[: 4 if name == "deepseek_v4_c128" else 6], name)
        assert r.fetch(backend, pool, keys, name)[:4] == [True] * 4
    found = backend.batch_exists_v2(keys, descriptors)
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [1, 2, 3, 4])
    backend.clear()
    assert backend.batch_exists_v2(keys, descriptors).kv_hit_pages == 0


@pytest.mark.parametrize("allocator", ["mooncake", "private"], indirect=True)
def test_many_side_pages_in_one_set(allocator: str, rig: Rig) -> None:
    """SGLang cuts KV into batches of 128 pages, side pools not."""
    kv = r.mha(pages=1024, page_size=1, heads=1, allocator=allocator)
    side = r.mha(pages=1024, page_size=1, heads=1, layers=3, allocator=allocator)
    backend = rig.backend(kv, {"draft": side, "mamba": r.mamba(slots=1024, allocator=allocator)})
    keys = r.hashes("large", 1000)
    transfers = [
        r.transfer("draft", keys, r.slots(side, range(1000))),
        r.transfer("mamba", keys[-1:], r.slots(backend.registered_pools["mamba"], [77])),
    ]
    assert backend.batch_set_v2(transfers) == {"draft": [True] * 1000, "mamba": [True]}
    assert backend.batch_get_v2(transfers) == {"draft": [True] * 1000, "mamba": [True]}


def test_clear_takes_its_own_and_leaves_the_rest(rig: Rig) -> None:
    pool = r.mha()
    keys = r.hashes("clear", 4)
    mine = rig.backend(pool)
    tagged = rig.backend(pool, extra={"extra_backend_tag": "x"})
    other = rig.backend(pool, model_name=rig.model + "-2")
    for backend in (mine, tagged, other):
        r.store(backend, pool, keys)
    mine.clear()
    assert [backend.batch_exists(keys) for backend in (mine, tagged, other)] == [0, 4, 4]
    assert r.fetch(mine, pool, keys) == [False] * 4
    r.store(mine, pool, keys)
    assert r.fetch(mine, pool, keys) == [True] * 4


def test_pages_that_go_between_the_question_and_the_answer(rig: Rig) -> None:
    pool = r.mha()
    backend = rig.backend(pool)
    keys = r.hashes("between", 6)
    r.store(backend, pool, keys)
    assert backend.batch_exists(keys) == 6
    backend.clear()
    r.store(backend, pool, [keys[0], keys[4]])
    assert r.fetch(backend, pool, keys) == [True, False, False, False, True, False]


def test_metrics_are_drained_and_cheap(rig: Rig) -> None:
    pool = r.mha()
    assert rig.backend(pool).get_stats() is None
    backend = rig.backend(pool, enable_storage_metrics=True)
    keys = r.hashes("stats", 6)
    r.store(backend, pool, keys)
    r.fetch(backend, pool, [*keys[:4], "missing"])
    stats = backend.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([6], [4])
    assert len(stats.backup_bandwidth) == len(stats.prefetch_bandwidth) == 1 and stats.backup_bandwidth[0] > 0
    again = backend.get_stats()
    assert not (again.backup_pgs or again.prefetch_pgs or again.backup_bandwidth or again.prefetch_bandwidth)
    started = time.perf_counter()
    for _ in range(1000):
        backend.get_stats()
    assert time.perf_counter() - started < 0.5


def same(one: Any, other: Any) -> bool:
    import torch

    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


TENSORS = {"backend_name": "x", "module_path": "hicache_mooncake.backend", "class_name": "MooncakeHiCacheStorage"}


@pytest.mark.parametrize("layout", ["page_first", "layer_first", "page_head"])
def test_the_generic_calls(layout: str, rig: Rig) -> None:
    pool = r.mha(layout)
    backend = rig.backend(pool, {"swa": r.mha()}, extra=TENSORS)
    keys = r.hashes("generic", 4)
    for page, key in enumerate(keys):
        r.fill(pool, page, f"kv/{key}")
    pages = [pool.get_data_page(page * pool.page_size, flat=True) for page in range(4)]
    assert backend.batch_exists(keys) == 0 and not backend.exists(keys[0])
    assert backend.batch_set(keys[:3], pages[:3]) is True
    assert backend.set(keys[3], pages[3]) is True
    assert backend.batch_exists(keys) == 4 and backend.exists(keys[0])
    targets = [pool.get_dummy_flat_data_page() for _ in range(5)]
    loaded = backend.batch_get([*keys, "missing"], targets)
    assert loaded[4] is None and all(one is other for one, other in zip(loaded[:4], targets, strict=False))
    assert all(map(same, loaded[:4], pages))
    target = pool.get_dummy_flat_data_page()
    assert same(backend.get(keys[2], target), pages[2])
    assert backend.get("missing", target) is None and backend.get(keys[0]) is None
    assert backend.batch_set(keys, pages[:2]) is False and backend.batch_set(keys, None) is False
    assert backend.batch_get(keys, []) == backend.batch_get(keys) == [None] * 4
    assert backend.batch_set([], []) is True and backend.batch_get([], []) == []
    # What KV is to the generic calls it also is when side pools are asked about with it.
    r.store(backend, backend.registered_pools["swa"], keys[:2], "swa")
    assert backend.batch_exists_v2(keys, [r.transfer("swa", None)]).kv_hit_pages == 2
    # A new engine clears what the one before it stored.
    fresh = rig.backend(pool, extra=TENSORS)
    fresh.clear()
    assert backend.batch_exists(keys) == 0


def test_names_that_are_no_hashes_are_kept_apart(rig: Rig) -> None:
    pool = r.mha()
    backend = rig.backend(pool)
    names = ["a:b", "a b", "a", "x61", "", "ü\n", "a" * 64, "{a}", "*", "A" * 1000]
    r.store(backend, pool, names)
    assert r.fetch(backend, pool, names) == [True] * len(names)
    assert backend.batch_exists(names) == len(names)
    assert r.fetch(backend, pool, ["b", "a:b:kv", "a:", ":a"]) == [False] * 4


GARBAGE: list[Any] = [None, 7, "text", [None], [b"bytes"], [7], {}, object(), ["\ud800"]]


def test_nothing_escapes(rig: Rig) -> None:
    pool = r.mha()
    backend = rig.backend(pool, {"swa": r.mha()})
    indices = r.slots(pool, [0])
    for keys in GARBAGE:
        assert backend.batch_exists(keys) == 0
        for call in (backend.batch_get_v1, backend.batch_set_v1):
            for places in (indices, None, keys):
                if keys != ["\ud800"] or places is not indices:
                    assert not any(call(keys, places)), (keys, places)
        for transfers in (keys, [keys], [r.transfer("swa", None, keys)]):
            backend.batch_get_v2(transfers)
            backend.batch_set_v2(transfers)
            assert backend.batch_exists_v2(["k"], transfers).kv_hit_pages == 0
        backend.batch_exists_v2(keys, None)
        backend.batch_get(keys, keys)
        assert not backend.set(keys, keys) or keys == {}
        backend.batch_set(keys, keys)
        backend.get(keys, keys)
        assert not backend.exists(keys)
    r.store(backend, pool, r.hashes("after", 4))
    assert r.fetch(backend, pool, r.hashes("after", 4)) == [True] * 4


def test_after_close_everything_misses(rig: Rig) -> None:
    pool = r.mha()
    backend = rig.backend(pool, {"swa": r.mha()}, enable_storage_metrics=True)
    keys = r.hashes("closed", 3)
    r.store(backend, pool, keys)
    backend.close()
    backend.close()
    assert backend.batch_exists(keys) == 0
    assert r.fetch(backend, pool, keys) == [False] * 3
    assert r.put(backend, pool, keys) == [False] * 3
    assert backend.batch_exists_v2(keys, [r.transfer("swa", None)]).kv_hit_pages == 0
    assert r.get(backend, backend.registered_pools["swa"], keys, "swa") == [False] * 3
    backend.clear()
    backend.get_stats()
    assert r.fetch(rig.backend(pool), pool, keys) == [True] * 3


def test_attaching_again_and_again_leaves_nothing(rig: Rig) -> None:
    pool, staged = r.mha(), r.mha(allocator="default")
    keys = r.hashes("again", 4)

    def once() -> None:
        for of in (pool, staged):
            backend = rig.backend(of, {"mamba": r.mamba()})
            r.store(backend, of, keys)
            assert r.fetch(backend, of, keys) == [True] * 4
            backend.close()
        rig._backends.clear()

    def resources() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    once()
    before = resources()
    node_before = len(os.listdir(f"/proc/{rig.node.pid}/fd"))
    for _ in range(30):
        once()
    assert resources() == before
    deadline = time.monotonic() + 10
    # A node keeps up to sixteen connections to Redis that it happened to need at once; a leak would show sixtyfold.
    while len(os.listdir(f"/proc/{rig.node.pid}/fd")) > node_before + 16:
        assert time.monotonic() < deadline, "the node keeps descriptors of engines that are gone"
        time.sleep(0.05)


def test_several_threads_as_sglang_has(rig: Rig) -> None:
    pool = r.mha(pages=64)
    backend = rig.backend(pool)
    keys = r.hashes("threads", 256)
    problems: list[str] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            count = backend.batch_exists(keys)
            if not 0 <= count <= len(keys):
                problems.append(f"exists {count}")

    def load(pages: range) -> None:
        size = len(r.read(pool, pages[0]))
        while not stop.is_set():
            for first in range(0, len(keys), len(pages)):
                some = keys[first : first + len(pages)]
                hits = r.get(backend, pool, some, pages=pages)
                for page, key, hit in zip(pages, some, hits, strict=True):
                    if hit and r.read(pool, page) != r.content(f"kv/{key}", size):
                        problems.append(f"wrong bytes of {key}")

    threads = [
        threading.Thread(target=ask),
        *(threading.Thread(target=load, args=(range(a, a + 16),)) for a in (16, 32)),
    ]
    for thread in threads:
        thread.start()
    for _ in range(3):
        for first in range(0, len(keys), 16):
            for page, key in enumerate(keys[first : first + 16]):
                r.fill(pool, page, f"kv/{key}")
            assert r.put(backend, pool, keys[first : first + 16]) == [True] * 16
    stop.set()
    for thread in threads:
        thread.join()
    assert problems == []
    assert backend.batch_exists(keys) == 256


def test_pages_that_cannot_be_stored_are_refused_by_name(rig: Rig) -> None:
    kv, indexer = r.dsa("layer_first")
    with pytest.raises(ConfigError, match=r"--hicache-mem-layout.*indexer.*page_first"):
        rig.backend(kv, {"indexer": indexer}, is_mla_model=True)
    with pytest.raises(ConfigError, match=r"tp_lcm_size.*KV heads"):
        rig.backend(r.mha("page_head", heads=2), tp_lcm_size=4)
