"""What goes wrong below the backend costs misses, and never an exception."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hicache_mooncake.errors import ConfigError, HiCacheMooncakeError, Unavailable
from tests.backend import rig as r
from tests.backend.rig import Rig
from tests.pool import NodeProcess, eventually, running

pytestmark = pytest.mark.sglang


@pytest.fixture
def mortal(sglang: None, redis_url: str) -> Iterator[NodeProcess]:
    """A node that may be killed."""
    with running(NodeProcess(redis_url, settings={"pool": f"m{random.getrandbits(32)}"})) as (node,):
        yield node


@pytest.mark.parametrize("private", [False, True], ids=["in place", "staged"])
def test_a_node_that_dies_is_misses_until_there_is_another(
    private: bool, mortal: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    if private:
        monkeypatch.setattr("hicache_mooncake.backend.lendable", lambda ranges: [])
    pool, swa = r.mha(), r.mha(layers=1)
    with Rig(mortal) as rig:
        backend = rig.backend(pool, {"swa": swa}, extra={"pool": mortal.settings["pool"]}, enable_storage_metrics=True)
        keys = r.hashes("mortal", 4)
        r.store(backend, pool, keys)
        mortal.kill()
        for _ in range(3):
            assert r.fetch(backend, pool, keys) == [False] * 4
            assert r.put(backend, pool, keys) == [False] * 4
            assert backend.batch_exists(keys) == 0
            assert backend.batch_exists_v2(keys, [r.transfer("swa", None)]).kv_hit_pages == 0
            assert r.put(backend, swa, keys, "swa") == [False] * 4
            assert r.fetch(backend, swa, keys, "swa") == [False] * 4
        backend.clear()
        backend.get_stats()
        mortal.start()
        eventually(lambda: r.put(backend, pool, keys) == [True] * 4, 15, "the backend uses the new node")
        r.store(backend, swa, keys, "swa")
        assert r.fetch(backend, swa, keys, "swa") == [True] * 4


def test_a_frozen_node_costs_no_more_than_the_deadline(mortal: NodeProcess) -> None:
    pool = r.mha()
    with Rig(mortal) as rig:
        backend = rig.backend(pool, extra={"pool": mortal.settings["pool"], "op_timeout": 0.5})
        keys = r.hashes("frozen", 4)
        r.store(backend, pool, keys)
        mortal.freeze()
        try:
            for call in (
                lambda: backend.batch_exists(keys),
                lambda: any(r.fetch(backend, pool, keys)),
                lambda: any(r.put(backend, pool, keys)),
            ):
                started = time.monotonic()
                assert not call()
                assert time.monotonic() - started < 0.5 + 1.0
        finally:
            mortal.thaw()
        eventually(lambda: backend.batch_exists(keys) == 4, 15, "the node is used again")


def test_behind_sglang_s_fault_injector(rig: Rig) -> None:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageFailureInjector

    pool = r.mha()
    backend = rig.backend(pool, {"swa": r.mha()}, enable_storage_metrics=True)
    wrapped: Any = HiCacheStorageFailureInjector(backend, 0.001, 0.3)
    keys = r.hashes("injected", 8)
    for page, key in enumerate(keys):
        r.fill(pool, page, f"kv/{key}")
    while not all(wrapped.batch_set_v1(keys, r.slots(pool, range(8)))):
        pass
    hits = 0
    for _ in range(60):
        for page in range(8):
            r.fill(pool, page)
        for page, hit in enumerate(wrapped.batch_get_v1(keys, r.slots(pool, range(8)))):
            hits += hit
            assert not hit or r.read(pool, page) == r.content(f"kv/{keys[page]}", len(r.read(pool, page)))
        assert wrapped.batch_exists(keys) in (0, 8)
        wrapped.batch_exists_v2(keys, [r.transfer("swa", None)])
        wrapped.batch_set_v2([r.transfer("swa", keys, r.slots(pool, range(8)))])
        wrapped.get_stats()
    assert 0 < hits < 60 * 8
    wrapped.clear()
    wrapped.close()


def test_a_full_pool_takes_what_fits_and_forgets_the_oldest(sglang: None, redis_url: str) -> None:
    settings: dict[str, object] = {"pool": f"m{random.getrandbits(32)}", "segment_size": "4MiB"}
    with running(NodeProcess(redis_url, settings=settings)) as (node,), Rig(node) as rig:
        pool = r.mha(pages=64, page_size=64, heads=8, dim=32, layers=4)  # 256 KiB a page
        backend = rig.backend(pool, extra={"pool": settings["pool"]})
        keys = r.hashes("full", 64)
        for page, key in enumerate(keys):
            r.fill(pool, page, f"kv/{key}")
        stored = r.put(backend, pool, keys)
        assert len(stored) == 64 and any(stored)
        for key in keys:
            r.fill(pool, 0, f"kv/{key}")
            assert r.put(backend, pool, [key]) == [True]
        hits = r.fetch(backend, pool, keys)
        assert any(hits) and not all(hits) and hits[-1]


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"segment_sise": "1gb"}, "segment_sise", "segment_size"),
    ({"op_timeout": "soon"}, "op_timeout", "seconds"),
    ({"master_server_address": "host:50051"}, "master_server_address", "redis_url"),
    ({"metadata_server": "P2P"}, "metadata_server", "redis_url"),
    ({"protocol": "nvlink"}, "protocol", "tcp"),
    ({"tenant": "a b"}, "tenant", "A-Z"),
    ({"node": "relative.sock"}, "node", "absolute"),
    ({"enable_ssd_offload": True}, "ssd_path", "directory"),
]


@pytest.mark.parametrize(("extra", "field", "remedy"), WRONG, ids=[field for _, field, _ in WRONG])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_wrong_setting_is_named(dynamic: bool, extra: dict[str, Any], field: str, remedy: str, rig: Rig) -> None:
    from hicache_mooncake.backend import MooncakeHiCacheStorage

    second: Any = {} if dynamic else r.mha()  # SGLang hands a dynamic backend a dictionary where others get the pool
    started = time.monotonic()
    with pytest.raises(ConfigError) as refused:
        MooncakeHiCacheStorage(rig.config(extra=extra), second)
    assert time.monotonic() - started < 10
    assert field in str(refused.value) and remedy in str(refused.value) + refused.value.hint
    if field in ("op_timeout", "protocol", "tenant", "node"):  # upstream's may hold a password, and are not shown
        assert repr(extra[field]) in str(refused.value)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"node": "/nonexistent/node.sock"}, "/nonexistent/node.sock"),
        ({"node": "", "pool": "wrong-redis", "redis_url": "redis://127.0.0.1:1/0"}, "redis_url"),
        ({"node": "", "pool": "wrong-size", "segment_size": "100tb"}, "segment_size"),
    ],
)
def test_an_attach_that_cannot_work_says_so_in_time(extra: dict[str, Any], said: str, rig: Rig) -> None:
    started = time.monotonic()
    with pytest.raises(HiCacheMooncakeError, match=said):
        rig.backend(r.mha(), extra=extra)
    assert time.monotonic() - started < 10


def test_a_node_of_another_pool_is_refused(rig: Rig) -> None:
    with pytest.raises(HiCacheMooncakeError, match="pool"):
        rig.backend(r.mha(), extra={"pool": "another"})


def test_keys_of_sglang_and_of_mooncake_are_accepted(rig: Rig) -> None:
    extra = {
        "backend_name": "x",
        "module_path": "hicache_mooncake.backend",
        "class_name": "MooncakeHiCacheStorage",
        "interface_v1": 1,
        "allocator": "shm",
        "global_segment_size": "1gb",
        "tenant_id": "t",
        "device_name": "",
        "enable_ssd_offload": False,
    }
    backend = rig.backend(r.mha(), extra=extra)
    assert (backend.settings.segment_size, backend.settings.tenant) == (1 << 30, "t")


def test_a_null_configuration_is_the_default(sglang: None, monkeypatch: pytest.MonkeyPatch, node: NodeProcess) -> None:
    monkeypatch.setenv("HICACHE_MOONCAKE_NODE", node.socket)
    with Rig(node) as rig:
        config = rig.config()
        config.extra_config = None
        from hicache_mooncake.backend import MooncakeHiCacheStorage

        backend = MooncakeHiCacheStorage(config, {})
        assert backend.batch_exists(["a"]) == 0  # nothing is registered yet
        assert backend.batch_get_v1(["a"], None) == [False]
        backend.close()


def test_a_secret_is_never_shown(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Unavailable) as refused, caplog.at_level("DEBUG"):
        rig.backend(r.mha(), extra={"node": "/nonexistent", "redis_url": "redis://:hunter2@127.0.0.1:1/0"})
    assert "hunter2" not in str(refused.value) + caplog.text
