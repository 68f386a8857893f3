"""Backends with SGLang's own host pools and configuration objects, as SGLang's controller makes them."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import runpy
import sys
from collections.abc import Sequence
from typing import Any

from testbed import SITE, environment
from tests.pool import NodeProcess

_numbers = itertools.count()

BLANK = b"\xee"


def load_sglang() -> None:
    """Make SGLang's classes importable and usable in this process, without a GPU."""
    os.environ.update({**environment.server_environment(), "PYTHONWARNINGS": os.environ.get("PYTHONWARNINGS", "")})
    sys.path.insert(0, str(SITE))
    runpy.run_path(str(SITE / "sitecustomize.py"))
    from sglang.srt.plugins import load_plugins

    load_plugins()


class Rig:
    """Makes backends of one engine each on ``node``; every rig has models of its own, so tests do not meet."""

    def __init__(self, node: NodeProcess) -> None:
        self.node = node
        self.model = f"model-{next(_numbers)}"
        self._backends: list[Any] = []

    def config(self, **fields: Any) -> Any:
        """SGLang's configuration of one rank; ``extra`` are the backend's settings."""
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

        settings = {"node": self.node.socket, **fields.pop("extra", {})}
        standard = {
            "tp_rank": 0,
            "tp_size": 1,
            "pp_rank": 0,
            "pp_size": 1,
            "attn_cp_rank": 0,
            "attn_cp_size": 1,
            "is_mla_model": False,
            "enable_storage_metrics": False,
            "is_page_first_layout": True,
            "model_name": self.model,
            "extra_config": settings,
        }
        return HiCacheStorageConfig(**{**standard, **fields})

    def backend(self, kv: Any = None, pools: dict[str, Any] | None = None, **fields: Any) -> Any:
        """A backend with these pools, registered in the order that SGLang registers them."""
        from sglang.srt.mem_cache.hicache_storage import PoolName

        from hicache_mooncake.backend import MooncakeHiCacheStorage

        backend = MooncakeHiCacheStorage(self.config(**fields), kv)
        self._backends.append(backend)
        if kv is not None:
            backend.register_mem_pool_host(kv)
            backend.register_mem_host_pool_v2(kv, PoolName.KV)
        for name, pool in (pools or {}).items():
            backend.register_mem_host_pool_v2(pool, PoolName(name))
        backend.on_host_pools_registered()
        return backend

    def close(self) -> None:
        for backend in self._backends:
            backend.close()

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# -- SGLang's host pools, small ones


def mha(
    layout: str = "page_first",
    *,
    pages: int = 16,
    page_size: int = 4,
    heads: int = 4,
    dim: int = 8,
    v_dim: int | None = None,
    layers: int = 2,
    dtype: str = "bfloat16",
    allocator: str = "mooncake",
) -> Any:
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    narrow = {} if v_dim is None else {"v_head_dim": v_dim}
    device = MHATokenToKVPool(
        size=page_size,
        page_size=page_size,
        dtype=getattr(torch, dtype),
        head_num=heads,
        head_dim=dim,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
        **narrow,
    )
    return host(device, layout, pages, page_size, allocator)


def mla(
    layout: str = "page_first",
    *,
    pages: int = 16,
    page_size: int = 4,
    layers: int = 2,
    dtype: str = "bfloat16",
    allocator: str = "mooncake",
) -> Any:
    import torch
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    device = MLATokenToKVPool(
        size=page_size,
        page_size=page_size,
        dtype=getattr(torch, dtype),
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )
    return host(device, layout, pages, page_size, allocator)


def dsa(layout: str = "page_first", *, pages: int = 4, allocator: str = "mooncake") -> tuple[Any, Any]:
    """The latent pool and the index keys beside it, in pages of 64 tokens."""
    import torch
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
    from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost, make_dsa_indexer_pool_decl
    from sglang.srt.runtime_context import get_parallel

    with get_parallel().override(attn_dcp_size=1, attn_dcp_rank=0):
        device = DSATokenToKVPool(
            size=64,
            page_size=64,
            dtype=torch.bfloat16,
            kv_lora_rank=32,
            qk_rope_head_dim=16,
            kv_cache_dim=48,
            index_head_dim=128,
            layer_num=2,
            device="cpu",
            enable_memory_saver=False,
        )
    anchor = host(device, layout, pages, 64, allocator)
    declared = make_dsa_indexer_pool_decl(device)
    return anchor, DSAIndexerPoolHost(declared, anchor, allocator_type=allocator)


def host(device: Any, layout: str, pages: int, page_size: int, allocator: str) -> Any:
    from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import _build_mha_mla_host_pool

    return _build_mha_mla_host_pool(
        pool=device,
        host_to_device_ratio=1.0,
        page_size=page_size,
        layout=layout,
        allocator_type=allocator,
        pool_label="kv",
        host_token_capacity=pages * page_size,
    )


def mamba(
    layout: str = "page_first", *, slots: int = 15, temporal: tuple[int, ...] = (4, 8), allocator: str = "mooncake"
) -> Any:
    """States of three layers: a float32 state (of no bytes with ``temporal`` (0,)) and two convolutions."""
    import torch
    from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

    state = MambaStateBufferInfo(
        temporal=torch.zeros((3, 2, *temporal), dtype=torch.float32),
        conv=(torch.zeros((3, 2, 6, 3), dtype=torch.bfloat16), torch.zeros((3, 2, 5), dtype=torch.bfloat16)),
    )
    return MambaPoolHost(state, slots / 2, 0, device_capacity=2, layout=layout, allocator_type=allocator)


def deepseek_v4(
    layout: str = "page_first", *, pages: int = 8, allocator: str = "mooncake"
) -> tuple[Any, dict[str, Any]]:
    """The anchor without bytes of DeepSeek V4, and pools beside it."""
    import torch
    from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool, LogicalHostPool

    def side(name: str, item_bytes: int) -> Any:
        buffers = [torch.zeros((2, item_bytes), dtype=torch.uint8) for _ in range(2)]
        return DeepSeekV4PagedHostPool(
            name, buffers, item_bytes, pages, 4, layout, allocator_type=allocator, page_aligned_only=True
        )

    sides = {name: side(name, size) for name, size in (("deepseek_v4_c4", 64), ("deepseek_v4_c128", 32), ("swa", 96))}
    return LogicalHostPool(pages * 4, 4, layout), sides


# -- pages


def hashes(tag: str, count: int) -> list[str]:
    return [hashlib.sha256(f"{tag}/{number}".encode()).hexdigest() for number in range(count)]


def slots(pool: Any, pages: Sequence[int]) -> Any:
    """Host indices of whole pages."""
    import torch

    size = pool.page_size
    return torch.tensor([page * size + offset for page in pages for offset in range(size)], dtype=torch.int64)


def where(pool: Any, page: int) -> list[tuple[int, int]]:
    """(address, bytes) of a page's buffers."""
    return list(zip(*pool.get_page_buffer_meta(slots(pool, [page])), strict=True))


def read(pool: Any, page: int) -> bytes:
    return b"".join(ctypes.string_at(address, size) for address, size in where(pool, page))


def content(tag: str, size: int) -> bytes:
    return hashlib.shake_128(tag.encode()).digest(size)


def fill(pool: Any, page: int, tag: str | None = None) -> bytes:
    """Write the page of this tag, or a blank one; what was written."""
    places = where(pool, page)
    size = sum(length for _, length in places)
    data = BLANK * size if tag is None else content(tag, size)
    at = 0
    for address, length in places:
        ctypes.memmove(address, data[at : at + length], length)
        at += length
    return data


def store(backend: Any, pool: Any, keys: Sequence[str], name: str = "kv") -> None:
    """Store a page of its own content under every key, using the pool's pages over and over."""
    room = pool.page_num if hasattr(pool, "page_num") else pool.num_host_pages
    for first in range(0, len(keys), room):
        some = list(keys[first : first + room])
        for page, key in enumerate(some):
            fill(pool, page, f"{name}/{key}")
        assert put(backend, pool, some, name) == [True] * len(some)


def put(backend: Any, pool: Any, keys: Sequence[str], name: str = "kv", pages: Sequence[int] | None = None) -> Any:
    indices = slots(pool, range(len(keys)) if pages is None else pages)
    if name == "kv":
        return backend.batch_set_v1(list(keys), indices)
    return backend.batch_set_v2([transfer(name, keys, indices)])[name]


def get(backend: Any, pool: Any, keys: Sequence[str], name: str = "kv", pages: Sequence[int] | None = None) -> Any:
    indices = slots(pool, range(len(keys)) if pages is None else pages)
    if name == "kv":
        return backend.batch_get_v1(list(keys), indices)
    return backend.batch_get_v2([transfer(name, keys, indices)])[name]


def fetch(backend: Any, pool: Any, keys: Sequence[str], name: str = "kv") -> list[bool]:
    """Get pages into blank ones; which were hits. A hit must have its content, a miss must leave the page alone."""
    blanks = [fill(pool, page) for page in range(len(keys))]
    hits = get(backend, pool, keys, name)
    assert type(hits) is list and len(hits) == len(keys)
    for page, (key, hit) in enumerate(zip(keys, hits, strict=True)):
        expected = content(f"{name}/{key}", len(blanks[page])) if hit else blanks[page]
        assert read(pool, page) == expected, f"page {page}, {'hit' if hit else 'miss'}"
    return list(hits)


def transfer(name: str, keys: Sequence[str] | None, indices: Any = None, **fields: Any) -> Any:
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

    return PoolTransfer(PoolName(name), host_indices=indices, keys=None if keys is None else list(keys), **fields)


def counting(pages: int) -> Any:
    """A small pool with room for so many pages."""
    return mha(pages=pages, page_size=1, heads=1, dim=8, layers=1)
