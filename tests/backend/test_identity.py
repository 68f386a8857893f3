"""What two engines must not share, and what they must: by bytes, through the pool."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.backend import rig as r
from tests.backend.rig import Rig

pytestmark = pytest.mark.sglang


def assert_apart(backend: Any, other: Any, pool: Any, pool_of_other: Any, name: str = "kv") -> None:
    """What is stored by one is neither found nor fetched by the other, whose pages are left alone."""
    keys = r.hashes("apart", 4)
    r.store(backend, pool, keys, name)
    if name == "kv":
        assert other.batch_exists(keys) == 0
    found = other.batch_exists_v2(keys, [] if name == "kv" else [r.transfer(name, None)])
    assert found.extra_pool_hit_pages.get(name, 0) == 0
    assert r.fetch(other, pool_of_other, keys, name) == [False] * 4
    r.store(other, pool_of_other, keys, name)
    assert r.fetch(backend, pool, keys, name) == [True] * 4


def assert_together(backend: Any, other: Any, pool: Any, pool_of_other: Any, name: str = "kv") -> None:
    keys = r.hashes("together", 4)
    r.store(backend, pool, keys, name)
    assert r.fetch(other, pool_of_other, keys, name) == [True] * 4


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "revision": ({"extra": {"revision": "a"}}, {"extra": {"revision": "b"}}),
    "no revision": ({"extra": {"revision": "a"}}, {}),
    "tag": ({"extra": {"extra_backend_tag": "a"}}, {"extra": {"extra_backend_tag": "b"}}),
    "tenant": ({"extra": {"tenant": "a"}}, {"extra": {"tenant": "b"}}),
    "tag or tenant": ({"extra": {"tenant": "a"}}, {"extra": {"extra_backend_tag": "a"}}),
    "model": ({"model_name": "org/model"}, {"model_name": "org-model"}),
    "model's separators": ({"model_name": "a:b"}, {"model_name": "a", "extra": {"extra_backend_tag": "b"}}),
    "model's case": ({"model_name": "model"}, {"model_name": "Model"}),
    "line break": ({"model_name": "a\nb"}, {"model_name": "a"}),
    "tp size": ({"tp_size": 1}, {"tp_size": 2}),
    "tp size of rank 1": ({"tp_size": 2, "tp_rank": 1}, {"tp_size": 4, "tp_rank": 1}),
    "tp rank": ({"tp_size": 2}, {"tp_size": 2, "tp_rank": 1}),
    "pp size": ({"pp_size": 1}, {"pp_size": 2}),
    "pp rank": ({"pp_size": 2}, {"pp_size": 2, "pp_rank": 1}),
    "cp size": ({"attn_cp_size": 1}, {"attn_cp_size": 2}),
    "cp rank": ({"attn_cp_size": 2}, {"attn_cp_size": 2, "attn_cp_rank": 1}),
    "rank digits": (
        {"tp_size": 16, "tp_rank": 1, "pp_size": 16, "pp_rank": 11},
        {"tp_size": 16, "tp_rank": 11, "pp_size": 16, "pp_rank": 1},
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_other_deployments_do_not_meet(what: str, rig: Rig) -> None:
    one, other = OTHERS[what]
    pool = r.mha()
    assert_apart(rig.backend(pool, **one), rig.backend(pool, **other), pool, pool)


KINDS = {
    "another dtype": lambda: r.mha(dtype="float16"),
    "one byte a value": lambda: r.mha(dtype="float8_e4m3fn"),
    "another layout": lambda: r.mha("page_first_direct"),
    "heads first": lambda: r.mha("page_head"),
    "layers first": lambda: r.mha("layer_first"),
    "a longer page": lambda: r.mha(page_size=8),
    "more heads, narrower": lambda: r.mha(heads=8, dim=4),
    "more layers, fewer heads": lambda: r.mha(heads=2, layers=4),
    "narrow values": lambda: r.mha(v_dim=4),
}


@pytest.mark.parametrize("kind", KINDS)
def test_pools_of_other_bytes_do_not_meet(kind: str, rig: Rig) -> None:
    pool, other = r.mha(), KINDS[kind]()
    assert_apart(rig.backend(pool), rig.backend(other), pool, other)


def test_states_of_other_types_do_not_meet(rig: Rig) -> None:
    one, other = r.mamba(temporal=(4, 8)), r.mamba(temporal=(8, 4))
    pair = [rig.backend(r.mha(), {"mamba": pool}, tp_size=2, tp_rank=rank) for rank, pool in ((0, one), (1, other))]
    assert_apart(*pair, one, other, name="mamba")


@contextmanager
def published(**values: Any) -> Iterator[None]:
    """SGLang's configuration of this process, as a server publishes it."""
    from sglang.srt.runtime_context import get_context

    with get_context().override_server_args(**values):
        yield


CONFIGURED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8_e5m2"}),
    ({"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "auto"}),
    ({"quantization": "fp8"}, {"quantization": None}),
    ({"revision": "main"}, {"revision": "v2"}),
    ({"weight_version": "default"}, {"weight_version": "2"}),
    ({"json_model_override_args": "{}"}, {"json_model_override_args": '{"rope_scaling": {"factor": 2}}'}),
    ({"quantization_param_path": "/scales/a.json"}, {"quantization_param_path": "/scales/b.json"}),
]


@pytest.mark.parametrize(("one", "other"), CONFIGURED, ids=lambda value: "-".join(map(str, value.values())))
def test_what_sglang_alone_knows_keeps_apart(one: dict[str, Any], other: dict[str, Any], rig: Rig) -> None:
    pool = r.mha(dtype="float8_e4m3fn")
    assert pool.dtype.itemsize == 1
    with published(**one):
        backend = rig.backend(pool)
    with published(**other):
        second = rig.backend(pool)
    assert_apart(backend, second, pool, pool)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"kv_cache_dtype": "auto"}, {"kv_cache_dtype": "bfloat16"}),
        (
            {"json_model_override_args": '{"a": 1, "b": {"c": 2, "d": 3}}'},
            {"json_model_override_args": '{"b": {"d": 3, "c": 2}, "a": 1}'},
        ),
        ({"speculative_draft_model_path": "/some/draft"}, {}),
    ],
    ids=["dtype", "overrides", "draft"],
)
def test_other_words_for_the_same_share(one: dict[str, Any], other: dict[str, Any], rig: Rig) -> None:
    pool = r.mha()
    with published(**one):
        backend = rig.backend(pool)
    with published(**other):
        second = rig.backend(pool)
    assert_together(backend, second, pool, pool)


def test_drafts_of_other_models_do_not_meet(rig: Rig) -> None:
    target, draft = r.mha(), r.mha(layers=1)
    pair = []
    for path in ("/draft/a", "/draft/b"):
        with published(speculative_draft_model_path=path):
            pair.append(rig.backend(target, {"draft": draft}))
    assert_together(*pair, target, target)
    assert_apart(*pair, draft, draft, name="draft")


def checkpoint(directory: Path, weights: bytes) -> str:
    directory.mkdir()
    (directory / "config.json").write_text('{"hidden_size": 8}')
    (directory / "model-00001-of-00002.safetensors").write_bytes(weights)
    (directory / "model-00002-of-00002.safetensors").write_bytes(b"the same")
    (directory / "tokenizer.json").write_text("anything")
    return str(directory)


def test_the_same_name_for_other_weights(tmp_path: Path, rig: Rig) -> None:
    base = bytes(1 << 20)
    tuned = bytearray(base)
    tuned[::1000] = b"\1" * len(tuned[::1000])
    paths = [checkpoint(tmp_path / name, bytes(data)) for name, data in (("a", base), ("b", tuned), ("copy", base))]
    (tmp_path / "copy" / "README.md").write_text("not a weight")
    pool = r.mha()
    backends = []
    for path in paths:
        with published(model_path=path):
            backends.append(rig.backend(pool))
    assert_apart(backends[0], backends[1], pool, pool)
    assert_together(backends[0], backends[2], pool, pool)
    # An operator who names the revision vouches for the rest.
    named = []
    for path in paths[:2]:
        with published(model_path=path):
            named.append(rig.backend(pool, extra={"revision": "mine"}))
    assert_together(*named, pool, pool)


def test_requests_of_other_adapters_and_tenants_have_other_hashes(rig: Rig) -> None:
    from hicache_mooncake.radix_bridge import namespace_seed, page_hashes

    pool = r.mha()
    backend = rig.backend(pool)
    tokens = list(range(16))
    chains = [
        page_hashes(tokens, 4, prior=namespace_seed(*names))
        for names in ((None, None), ("lora", None), (None, "lora"), ("lora", "salt"), ("lorasalt", None))
    ]
    r.store(backend, pool, chains[0])
    for chain in chains[1:]:
        assert r.fetch(backend, pool, chain) == [False] * 4
    assert r.fetch(backend, pool, page_hashes([1, *tokens[1:]], 4)) == [False] * 4


# -- what has to be shared


def test_latent_pages_of_rank_0_are_read_by_every_rank(rig: Rig) -> None:
    pools = [r.mla() for _ in range(4)]
    backends = [
        rig.backend(pool, is_mla_model=True, tp_size=4, tp_rank=rank, dp_rank=rank) for rank, pool in enumerate(pools)
    ]
    for rank in range(1, 4):
        assert_together(backends[0], backends[rank], pools[0], pools[rank])
    other_size = rig.backend(pools[0], is_mla_model=True, tp_size=8, tp_rank=7)
    assert_together(backends[0], other_size, pools[0], pools[0])


def test_states_and_drafts_beside_latent_pages_belong_to_a_rank(rig: Rig) -> None:
    def sides() -> dict[str, Any]:
        return {"mamba": r.mamba(), "draft": r.mha(layers=1), "swa": r.mla(layers=1)}

    here, there = sides(), sides()
    kv = r.mla()
    pair = [
        rig.backend(kv, side, is_mla_model=True, tp_size=2, tp_rank=rank) for rank, side in enumerate((here, there))
    ]
    assert_apart(*pair, here["mamba"], there["mamba"], name="mamba")
    assert_apart(*pair, here["draft"], there["draft"], name="draft")
    assert_together(*pair, here["swa"], there["swa"], name="swa")


def test_every_rank_of_a_dcp_group_has_its_own_part(rig: Rig) -> None:
    pool = r.mla()
    pair = [
        rig.backend(
            pool, is_mla_model=True, tp_size=4, tp_rank=rank, dcp_size=2, dcp_rank=rank % 2, logical_page_size=4
        )
        for rank in (0, 1, 2)
    ]
    assert_apart(pair[0], pair[1], pool, pool)
    assert_together(pair[0], pair[2], pool, pool)


def heads_of(pool: Any, page: int) -> list[tuple[bytes, bytes]]:
    """K and V of every head of a page, from the pool's own tensor."""
    import torch

    k, v = (half[page].contiguous().view(torch.uint8).reshape(pool.head_num, -1) for half in pool.kv_buffer)
    return [(k[head].numpy().tobytes(), v[head].numpy().tobytes()) for head in range(pool.head_num)]


@pytest.mark.parametrize(("writers", "readers"), [(2, 4), (4, 2), (1, 4), (4, 1), (1, 2)])
def test_heads_are_shared_by_other_tp_sizes(writers: int, readers: int, rig: Rig) -> None:
    heads = 8
    keys = r.hashes("heads", 3)

    def ranks(size: int) -> list[tuple[Any, Any]]:
        pools = [r.mha("page_head", heads=heads // size) for _ in range(size)]
        return [
            (pool, rig.backend(pool, tp_size=size, tp_rank=rank, tp_lcm_size=4, should_split_heads=size < 4))
            for rank, pool in enumerate(pools)
        ]

    stored: list[list[tuple[bytes, bytes]]] = [[] for _ in keys]
    written = ranks(writers)
    for rank, (pool, backend) in enumerate(written):
        for page in range(3):
            r.fill(pool, page, f"rank {rank} page {page}")
            stored[page] += heads_of(pool, page)
        assert r.put(backend, pool, keys) == [True] * 3
        whole = rank == len(written) - 1
        assert all(backend.batch_exists(keys) == 3 for _, backend in ranks(readers)) or not whole
    loaded: list[list[tuple[bytes, bytes]]] = [[] for _ in keys]
    for pool, backend in ranks(readers):
        for page in range(3):
            r.fill(pool, page)
        assert r.get(backend, pool, keys) == [True] * 3
        for page in range(3):
            loaded[page] += heads_of(pool, page)
    assert loaded == stored
    # Half the heads are no page.
    assert written[0][1].batch_exists(keys) == 3
    uncut = rig.backend(r.mha("page_head", heads=heads // writers), tp_size=writers)
    assert uncut.batch_exists(keys) == 0


def test_a_page_of_which_one_part_is_missing_is_no_hit(rig: Rig) -> None:
    keys = r.hashes("half", 2)
    half = r.mha("page_head", heads=2)
    whole = r.mha("page_head", heads=4)
    rank = rig.backend(half, tp_size=2, tp_rank=0, tp_lcm_size=2)
    reader = rig.backend(whole, tp_size=1, tp_lcm_size=2, should_split_heads=True)
    r.store(rank, half, keys)
    assert reader.batch_exists(keys) == 0
    for page in range(2):
        r.fill(whole, page)
    assert r.get(reader, whole, keys) == [False, False]


DIGESTS = """
import json, sys
from tests.backend import rig as r
from tests.pool import NodeProcess
r.load_sglang()
node = NodeProcess("")
node.directory.cleanup()
node.socket = sys.argv[1]
with r.Rig(node) as rig:
    backend = rig.backend(r.mha(allocator="default"), {"mamba": r.mamba(allocator="default")}, model_name="org/model:1")
    print("digests: " + json.dumps(backend._digests))
"""


def test_another_process_of_the_same_deployment_has_equal_namespaces(rig: Rig) -> None:
    here = rig.backend(r.mha(), {"mamba": r.mamba()}, model_name="org/model:1")._digests
    done = subprocess.run(
        [sys.executable, "-c", DIGESTS, rig.node.socket], capture_output=True, text=True, timeout=100, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("digests: ")]
    assert lines, done.stderr[-3000:]
    assert json.loads(lines[0].removeprefix("digests: ")) == here


def test_the_namespace_is_readable_in_redis(rig: Rig) -> None:
    import redis

    backend = rig.backend(r.mha(), extra={"revision": "r1", "tenant": "t1"})
    with redis.Redis.from_url(rig.node.redis_url, decode_responses=True) as client:
        fields: Any = client.hgetall(f"hcm:default:ns:{{0}}{backend._digests['kv']}")
    assert {
        "model": rig.model,
        "revision": "r1",
        "tenant": "t1",
        "layout": "page_first",
        "dtype": "bfloat16",
    }.items() <= (fields.items())


def test_replaced_weights_end_what_was_stored_under_their_name(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    from hicache_mooncake.engine import weights
    from hicache_mooncake.errors import ConfigError

    pool, swa = r.mha(), r.mha(layers=1)
    keys = r.hashes("weights", 4)
    backend = rig.backend(pool, {"swa": swa}, extra={"revision": "one"})
    r.store(backend, pool, keys)
    before = weights.updates()
    with pytest.raises(AttributeError):  # SGLang's method, called on nothing: what counts is that it was called
        SchedulerWeightUpdaterManager.update_weights_from_disk(None, None)
    assert weights.updates() == before + 1
    assert backend.batch_exists(keys) == 0
    assert r.fetch(backend, pool, keys) == [False] * 4
    assert r.put(backend, pool, keys) == [False] * 4
    assert r.put(backend, swa, keys, "swa") == [False] * 4
    assert backend.batch_exists_v2(keys, [r.transfer("swa", None)]).kv_hit_pages == 0
    with pytest.raises(ConfigError, match=r"revision.*weight_version"):
        rig.backend(pool, extra={"revision": "one"})
    again = rig.backend(pool, extra={"revision": "two"})
    assert r.fetch(again, pool, keys) == [False] * 4
    r.store(again, pool, keys)
    assert r.fetch(again, pool, keys) == [True] * 4
    with published(weight_version="v2"):
        rig.backend(pool, extra={"revision": "one"})
