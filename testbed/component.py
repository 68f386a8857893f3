"""SGLang's cache classes alone, without a server: does every byte come back through an L3 backend?

Uses the test kit that SGLang ships (``sglang.test.kits.unified_radix_cache``) to drive the real radix cache,
controller and host pools: insert → copy to L2 → write to L3 → a new, empty cache → prefetch from L3 → copy to
the device → compare bytes. SGLang keeps global state, so :func:`run` forks a process for every run; by hand::

    python -m testbed.component --backend file --components FULL SWA --layout page_first
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from testbed import environment

ATTENTIONS = ("mha", "mha-asymmetric", "mla", "dsa")
_RESULT = "component-result: "
_PREPARED = "TESTBED_COMPONENT_PREPARED"


@dataclass(frozen=True)
class Result:
    """What one run saw. ``identical`` is the verdict; the rest says where it went wrong when it did not.

    ``pools`` are SGLang's names of the host pools, ``tokens`` how many were stored, ``prefetched`` and
    ``on_device`` how many of them came back, ``tensors`` how many buffers were compared and ``different`` how
    many of those differ.
    """

    attention: str
    components: tuple[str, ...]
    layout: str
    backend: str
    pools: tuple[str, ...]
    tokens: int
    prefetched: int
    on_device: int
    tensors: int
    different: int
    seconds: float

    @property
    def identical(self) -> bool:
        """Every token was restored from L3, and every compared tensor has the bytes that were stored."""
        return self.on_device == self.prefetched == self.tokens and self.tensors > 0 and not self.different


def run(
    backend: str,
    *,
    attention: str = "mha",
    components: Sequence[str] = ("FULL",),
    layout: str = "page_first",
    extra: Mapping[str, Any] | None = None,
    draft: bool = False,
    buffer_only: bool = False,
    env: Mapping[str, str] | None = None,
    within: float = 120.0,
) -> Result:
    """One round trip through ``backend`` in a process of its own, with ``extra`` as the backend's settings.

    ``attention`` is ``mha``, ``mha-asymmetric`` (V narrower than K), ``mla`` or ``dsa`` (MLA with a pool of
    index keys beside it); ``components`` is FULL, with ``mha`` also FULL and SWA or MAMBA; ``draft`` adds the
    pools of a draft model; ``buffer_only`` makes L2 only a staging area. Raises ``RuntimeError`` with the end
    of its output when it fails or takes longer than ``within``.
    """
    environment.build_page_hash()
    argv = ["--backend", backend, "--attention", attention, "--layout", layout]
    argv += ["--extra", json.dumps(dict(extra or {})), "--components", *components]
    argv += ["--draft"] * draft + ["--buffer-only"] * buffer_only
    with tempfile.NamedTemporaryFile(prefix="component-", suffix=".log") as log:
        settings = environment.server_environment({_PREPARED: "1", **(env or {})})
        pid = environment.warm_process().fork("component", argv, settings, Path(log.name))
        environment.wait_for_exit(pid, within)
        output = log.read().decode(errors="replace")
    for line in output.splitlines():
        if line.startswith(_RESULT):
            found: dict[str, Any] = json.loads(line.removeprefix(_RESULT))
            found |= {"components": tuple(found["components"]), "pools": tuple(found["pools"])}
            return Result(**found)
    raise RuntimeError(f"python -m testbed.component {' '.join(argv)} failed:\n{output[-5000:]}")


def drive(options: argparse.Namespace) -> Result:
    """The round trip itself, in this process, which it leaves full of SGLang's global state."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    _without_test_utils()
    result: Result = _round_trip_class()(options).run()
    return result


def _without_test_utils() -> None:
    """The kit takes one base class from a module that imports half of PyPI: give it that class alone."""
    import types
    import unittest

    name = "sglang.test.test_utils"
    module = types.ModuleType(name)
    module.CustomTestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules.setdefault(name, module)


def _configuration(attention: str, components: Sequence[str]) -> Any:
    from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
    from sglang.test.kits.unified_radix_cache.config import CacheConfig

    four_full = {"num_layers": 4, "full_attention_layer_ids": (0, 1, 2, 3)}
    two_full = {"num_layers": 8, "full_attention_layer_ids": (3, 7)}
    large = {"page_size": 64, "kv_size": 1024, "max_context_len": 1024}
    shapes: dict[tuple[str, ...], dict[str, Any]] = {
        ("mha", "FULL", "SWA"): {"page_size": 16, "sliding_window_size": 32, "kv_size": 512, **two_full},
        ("mha", "FULL", "MAMBA"): {
            "enable_mamba_extra_buffer": True,
            "mamba_cache_size": 60,
            **large,
            **two_full,
        },
        ("dsa", "FULL"): {
            **large,
            **four_full,
        },  # index keys come in pages of 64 tokens only
    }
    shape = shapes.get((attention, *components))
    if shape is None:
        if tuple(components) != ("FULL",):
            raise ValueError(f"no round trip for {attention} with {', '.join(components)}")
        shape = {"page_size": 16, **four_full}
    return CacheConfig(components=tuple(ComponentType[name] for name in components), **shape)


def _device_pool(attention: str) -> Callable[..., Any]:
    """What builds the device pool in place of the kit's ``MHATokenToKVPool``, from the same arguments."""
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool

    latent = {"kv_lora_rank": 32, "qk_rope_head_dim": 16}

    def build(*, head_num: int, head_dim: int, **shared: Any) -> Any:
        if attention == "mla":
            return MLATokenToKVPool(**shared, **latent)
        if attention == "dsa":
            return DSATokenToKVPool(**shared, **latent, index_head_dim=128, kv_cache_dim=48)
        narrow = {"v_head_dim": head_dim // 2} if attention == "mha-asymmetric" else {}
        return MHATokenToKVPool(**shared, head_num=head_num, head_dim=head_dim, **narrow)

    return build


def _round_trip_class() -> type[Any]:
    """Build the driver class: its bases come from SGLang, which must not be imported with this module."""
    import unittest
    from unittest import mock

    import torch
    from sglang.kernels.ops.attention.fla.chunk_delta_h import CHUNK_SIZE
    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
    from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import (
        build_full_draft_pools,
        build_swa_draft_pools,
    )
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
    from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
    from sglang.test.kits.unified_radix_cache import fixtures
    from sglang.test.kits.unified_radix_cache.load_back import UnifiedRadixCacheLoadBackFixtures
    from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures

    bases = (UnifiedRadixCacheStorageFixtures, UnifiedRadixCacheLoadBackFixtures, unittest.TestCase)

    class RoundTrip(*bases):  # type: ignore[misc]
        def __init__(self, options: argparse.Namespace) -> None:
            super().__init__("run")
            self.options = options
            self.cfg = _configuration(options.attention, options.components)

        def run(self, result: Any = None) -> Any:
            started = time.monotonic()
            sequence = self._make_seq(1, 6)
            stored, pools = self._store(sequence)
            restored, prefetched, on_device = self._restore(sequence)
            return Result(
                self.options.attention,
                tuple(self.options.components),
                self.options.layout,
                self.options.backend,
                pools=pools,
                tokens=len(sequence),
                prefetched=prefetched,
                on_device=on_device,
                tensors=len(stored),
                different=sum(not same_bytes(a, b) for a, b in zip(stored, restored, strict=True)),
                seconds=round(time.monotonic() - started, 2),
            )

        def _store(self, sequence: list[int]) -> tuple[list[Any], tuple[str, ...]]:
            cache, allocator, requests = self._build()
            self._insert(cache, allocator, requests, sequence)
            match = fixtures.match_prefix(cache, sequence)
            views = list(self._views(cache, allocator, requests, match))
            generator = torch.Generator().manual_seed(7)
            for buffer, select in views:
                buffer[select] = random_like(buffer[select], generator)
            stored = [buffer[select].clone() for buffer, select in views]
            if self.options.buffer_only:
                self._buffer_backup_and_wait(cache, match.last_device_node)
            else:
                self._backup_node(cache, match.last_device_node)
                self._write_path_to_l3(cache, match.last_device_node)
                self._flush_l3_backups(cache)
            pools = tuple(str(entry.name) for entry in cache.cache_controller.mem_pool_host.entries)
            self.doCleanups()
            return stored, pools

        def _restore(self, sequence: list[int]) -> tuple[list[Any], int, int]:
            cache, allocator, requests = self._build()
            assert fixtures.match_prefix(cache, sequence).device_prefix_len == 0
            handle = CacheRequestHandle("round-trip", 0)
            cache.prefetch_from_storage(handle, cache.root_node_handle(), array("q", sequence), None, None)
            self._run_prefetch_to_completion(cache, handle)
            if self.options.buffer_only:
                prefetched = len(sequence)  # consumed on the spot: what reached the device is the answer
            else:
                prefetched = self._load_back_through_admission(cache, requests, sequence).host_hit_length
                self._finish_pending_loads(cache)
            match = fixtures.match_prefix(cache, sequence)
            views = self._views(cache, allocator, requests, match)
            restored = [buffer[select].clone() for buffer, select in views]
            on_device = match.device_prefix_len
            self.doCleanups()
            return restored, prefetched, on_device

        def _build(self) -> Any:
            """A new, empty cache with its device pools, host pools and backend, as one rank of one."""
            with mock.patch.object(fixtures, "MHATokenToKVPool", _device_pool(self.options.attention)):
                cache, allocator, requests = fixtures.build_fixture(self.cfg)
            override = get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1)
            override.__enter__()
            self.addCleanup(override.__exit__, None, None, None)
            settings = ServerArgs(
                model_path="dummy",
                page_size=self.cfg.page_size,
                hicache_io_backend="direct" if self.options.layout == "page_first_direct" else "kernel",
                hicache_mem_layout=self.options.layout,
                hicache_write_policy="write_through",
                hicache_storage_backend=self.options.backend,
                hicache_storage_backend_extra_config=json.dumps({"prefetch_threshold": 1, **self.options.extra}),
                hicache_storage_prefetch_policy="wait_complete",
                hicache_host_memory_mode="buffer_only" if self.options.buffer_only else "cache",
            )
            settings._mamba_cache_chunk_size = max(CHUNK_SIZE, self.cfg.page_size)
            set_global_server_args_for_scheduler(settings)
            cache.init_hicache(settings, cache.cache_init_params)
            controller = cache.cache_controller
            self.addCleanup(fixtures.drop_hicache_atexit_pin, cache)
            self.addCleanup(cache.release_host_resources)
            self.addCleanup(close_backend, controller)
            self.addCleanup(controller._stop_storage_threads)
            # Backups and loads happen when this class says so; prefetch may fill the kit's small pools.
            cache.write_through_threshold = 1 << 30
            cache.load_back_threshold = 0
            controller.prefetch_capacity_limit = max(controller.prefetch_capacity_limit, controller.mem_pool_host.size)
            self._draft_pools: list[Any] = []
            if self.options.draft:
                self._add_draft(cache)
            return cache, allocator, requests

        def _add_draft(self, cache: Any) -> None:
            """Pools of a draft model, one layer each: registered late, as when a draft worker starts."""
            shared = {"size": self.cfg.kv_size, "page_size": self.cfg.page_size, "dtype": self.cfg.dtype}
            shared |= {"head_num": self.cfg.head_num, "head_dim": self.cfg.head_dim, "device": "cpu"}
            if self.cfg.has_swa:
                layers = {"swa_attention_layer_ids": [0], "full_attention_layer_ids": [1]}
                pool = SWAKVPool(**shared, size_swa=self.cfg.kv_size, **layers)
                self._draft_pools = [pool.full_kv_pool, pool.swa_kv_pool]
                found = [build_full_draft_pools(draft_kv_pool=pool.full_kv_pool, tree_cache=cache)]
                found.append(build_swa_draft_pools(draft_kv_pool=pool, tree_cache=cache))
            else:
                build = _device_pool(self.options.attention)
                self._draft_pools = [build(**shared, layer_num=1, enable_memory_saver=False)]
                found = [build_full_draft_pools(draft_kv_pool=self._draft_pools[0], tree_cache=cache)]
            for specs, entries in found:
                for spec, entry in zip(specs, entries, strict=True):
                    cache.register_sidecar_pool(spec, entry)

        def _views(self, cache: Any, allocator: Any, requests: Any, match: Any) -> Iterator[tuple[Any, Any]]:
            """(buffer, what to select of it) for all device state of the matched prefix that must survive."""
            rows = cache.path_device_indices(match.last_device_node)
            for pool in (self._get_full_kv_pool(allocator), *self._draft_pools[:1]):
                latent = self.options.attention in ("mla", "dsa")
                for buffer in pool.kv_buffer if latent else (*pool.k_buffer, *pool.v_buffer):
                    yield buffer, (rows,)
                if self.options.attention == "dsa":
                    page = self.cfg.page_size
                    for buffer in pool.index_k_with_scale_buffer:
                        yield buffer, (rows[::page] // page,)
            if self.cfg.has_swa:
                window = allocator.full_to_swa_index_mapping[rows][-self.cfg.sliding_window_size :]
                assert bool((window > 0).all()), "the sliding window is not on the device"
                for pool in (allocator.get_kvcache().swa_kv_pool, *self._draft_pools[1:]):
                    for buffer in (*pool.k_buffer, *pool.v_buffer):
                        yield buffer, (window,)
            if self.cfg.has_mamba:
                state = fixtures.node_device_value(cache, match.last_device_node, ComponentType.MAMBA)
                assert state is not None, "the mamba state is not on the device"
                states = requests.mamba_pool.mamba_cache
                for buffer in (states.temporal, *states.conv):
                    yield buffer, (slice(None), state.reshape(-1).long())

    def random_like(tensor: Any, generator: Any) -> Any:
        if tensor.is_floating_point():
            return torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        return torch.randint(0, 256, tensor.shape, generator=generator, dtype=tensor.dtype)

    def same_bytes(one: Any, other: Any) -> bool:
        return bool(torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)))

    return RoundTrip


def close_backend(controller: Any) -> None:
    """What SGLang does when it detaches a backend, and the kit leaves out."""
    close: Callable[[], None] | None = getattr(controller.storage_backend, "close", None)
    if close is not None:
        close()


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of ``python -m testbed.component``: prints the result; status 1 unless identical."""
    parser = argparse.ArgumentParser(description="Round trip of SGLang's caches through an L3 backend.")
    parser.add_argument("--backend", required=True, help="as in --hicache-storage-backend")
    parser.add_argument("--attention", default="mha", choices=ATTENTIONS)
    parser.add_argument("--components", nargs="+", default=["FULL"], help="FULL, then SWA or MAMBA")
    parser.add_argument("--layout", default="page_first", help="as in --hicache-mem-layout")
    parser.add_argument("--extra", type=json.loads, default={}, help="the backend's settings, JSON")
    parser.add_argument("--draft", action="store_true", help="add the pools of a draft model")
    parser.add_argument("--buffer-only", action="store_true", help="L2 is only a staging area")
    options = parser.parse_args(argv)
    if os.environ.get(_PREPARED) != "1":
        # The stand-ins must be on PYTHONPATH before Python starts.
        os.environ.update(environment.server_environment({_PREPARED: "1"}))
        os.execv(sys.executable, [sys.executable, "-m", "testbed.component", *sys.argv[1:]])
    result = drive(options)
    print(_RESULT + json.dumps(asdict(result)))
    sys.exit(not result.identical)


if __name__ == "__main__":
    main()
