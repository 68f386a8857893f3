"""The HiCache storage backend that SGLang calls: ``--hicache-storage-backend mooncake``.

Every call names pages, asks the node of this host, and answers in SGLang's terms (contract of
``mem_cache/hicache_storage.py``, SGLang 0.5.23). A call ends by ``op_timeout`` and never raises; whatever is doubtful
is a miss. Only constructing and registering raise, with one error that names the setting: then the attach fails.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolTransfer,
    PoolTransferResult,
)

from hicache_mooncake import __version__
from hicache_mooncake.config import Settings
from hicache_mooncake.engine import advice, flat_pages, identity, weights
from hicache_mooncake.engine.hit_policy import PoolQuery, leading_run, restorable
from hicache_mooncake.engine.host_pools import HostPool, is_logical, is_rank_sharded
from hicache_mooncake.engine.launch import NodeFinder
from hicache_mooncake.engine.lending import lendable
from hicache_mooncake.engine.session import NodeSession
from hicache_mooncake.engine.stats import EngineStats
from hicache_mooncake.engine.transfers import Batch, PageMover
from hicache_mooncake.errors import ConfigError, Unavailable
from hicache_mooncake.protocol import messages as m

logger = logging.getLogger(__name__)

_KV = "kv"
_T = TypeVar("_T")


class MooncakeHiCacheStorage(HiCacheStorage):  # type: ignore[misc]
    """L3 of one SGLang rank. Called by several of SGLang's threads at once; keeps nothing thread-local."""

    def __init__(self, storage_config: HiCacheStorageConfig, mem_pool_host: Any = None, *_: Any, **__: Any) -> None:
        """Read the settings, find or start the node. ``mem_pool_host`` is registered later, by SGLang.

        Raises ``ConfigError`` or ``Unavailable`` within ten seconds.
        """
        self._config = storage_config
        self.settings = Settings.load(storage_config.extra_config)
        self._deployment = identity.deployment(storage_config, self.settings)
        self._weights = weights.claim(*(self._deployment[name] for name in ("revision", "model", "weight_version")))
        self._finder = NodeFinder(self.settings)
        label = identity.label(storage_config)
        self._session = NodeSession(
            self._finder, pool=self.settings.pool, label=label, op_timeout=self.settings.op_timeout
        )
        self._stats = EngineStats(enabled=bool(getattr(storage_config, "enable_storage_metrics", False)))
        # SGLang stores whole pages as tensors through a dynamic backend that does not claim the v1 interface.
        extra = storage_config.extra_config or {}
        self._stores_tensors = "module_path" in extra and not extra.get("interface_v1")
        self._pools: dict[str, HostPool] = {}
        self._digests: dict[str, str] = {}
        self._flat_digest = ""
        self._lock = threading.Lock()
        self._warned: dict[str, float] = {}
        welcome = self._session.open()
        self._mover = PageMover(self._session, staging_size=self.settings.staging_size)
        logger.info(
            "hicache-mooncake %s is the L3 of %s: pool %s, node %s at %s (%s), redis %s, %s",
            __version__,
            label,
            self.settings.pool,
            welcome.node_id,
            self._finder.address,
            "started for this engine" if self._finder.started else "found running",
            welcome.redis,
            "pages in place" if self._session.can_write_in_place else "pages through staging",
        )
        advice.advise(self.settings, storage_config.extra_config, None if self._finder.started else welcome)

    # -- registration

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The anchor pool. Raises ``ConfigError`` when its pages cannot be stored."""
        super().register_mem_pool_host(mem_pool_host)
        if is_logical(mem_pool_host):
            return  # its bytes lie in side pools, which are registered by name
        self._register(_KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """A pool by name; KV comes here a second time. Raises ``ConfigError`` when its pages cannot be stored."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if name != _KV:
            self._register(name, host_pool)

    def _register(self, name: str, pool: Any) -> None:
        config = self._config
        head_shards = 0
        if getattr(pool, "layout", "") == "page_head" and name == _KV:
            head_shards = int(getattr(config, "tp_lcm_size", None) or 0)
        replicated = not is_rank_sharded(name, pool, replicated=bool(config.is_mla_model))
        shards = identity.shards(config, replicated=replicated, head_shards=0 if replicated else head_shards)
        page_tokens = getattr(config, "logical_page_size", None) if name == _KV else None
        host_pool = HostPool(name, pool, shards, page_tokens=page_tokens)
        draft = identity.draft(self.settings) if host_pool.holds_draft else {}
        namespace = host_pool.namespace({**self._deployment, **draft})
        regions = lendable(host_pool.buffers()) if self._session.can_write_in_place else []
        self._session.lend(regions)
        for region in regions:
            self._mover.add_lent(region.base, region.size)
        counted = host_pool.page_tokens if name == _KV and identity.is_first_rank(config) else 0
        self._session.declare(namespace.digest, namespace.fields, counted)
        with self._lock:
            self._pools[name] = host_pool
            self._digests[name] = namespace.digest
        if name == _KV:
            self._stats.page_bytes = host_pool.page_bytes
            if self._stores_tensors:
                # A flat page is the pool's own serialisation, which need not be the order of its buffers.
                flat = host_pool.namespace({**self._deployment, **draft, "form": "flat"})
                self._session.declare(flat.digest, flat.fields, counted)
                self._flat_digest = flat.digest
        lent = {region.base for region in regions}
        logger.info(
            "pool %s: %s %s, %d bytes a page as %s, namespace %s, %s",
            name,
            type(pool).__name__,
            host_pool.layout,
            host_pool.page_bytes,
            "+".join(shards.parts),
            namespace.digest,
            "lent to the node" if lent else "through staging",
        )

    # -- v1: the KV pool alone

    def batch_exists(self, keys: Sequence[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many of ``keys`` are stored, counted from the first one until one is not."""
        return self._guarded("exists", 0, lambda: self._count_leading(list(keys)))

    def _count_leading(self, keys: list[str]) -> int:
        if _KV not in self._pools:
            return 0  # an anchor without bytes: what its side pools hold was not asked
        (pages,) = self._ask([self._kv_keys(keys)], prefix_only=True)
        return leading_run(pages)

    def batch_get_v1(
        self, keys: Sequence[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Fetch pages into the KV pool; a truth value a page."""
        return self._guarded("get", _misses(keys), lambda: self._move_kv(m.Get, list(keys), host_indices))

    def batch_set_v1(
        self, keys: Sequence[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store pages of the KV pool; a truth value a page, true where it was stored already."""
        return self._guarded("set", _misses(keys), lambda: self._move_kv(m.Put, list(keys), host_indices))

    def _move_kv(self, kind: type[m.Put] | type[m.Get], keys: list[str], host_indices: Any) -> list[bool]:
        if not keys:
            return []
        if _KV not in self._pools:
            return [self._is_anchored()] * len(keys)  # a logical anchor has no bytes: its side pools decide
        started = time.perf_counter()
        (result,) = self._mover.move(kind, [self._batch(_KV, keys, host_indices)], self._deadline())
        self._stats.moved(kind is m.Put, len(keys), sum(result), time.perf_counter() - started)
        return result

    # -- v2: side pools

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """How long a prefix all pools can restore, and every other length that they can."""
        nothing = PoolTransferResult(0, {}, [])
        return self._guarded("exists", nothing, lambda: self._restorable(list(keys), list(pool_transfers or [])))

    def _restorable(self, keys: list[str], transfers: list[PoolTransfer]) -> PoolTransferResult:
        anchored = _KV not in self._pools
        if anchored and not (transfers and self._is_anchored()):
            return PoolTransferResult(0, {}, [])
        names = [str(transfer.name) for transfer in transfers]
        asked = ([] if anchored else [self._kv_keys(keys)]) + [self._keys(name, keys) for name in names]
        found = self._ask(asked, limit_to_first=not anchored) if asked and keys else [b""] * len(asked)
        kv_pages = len(keys) if anchored else leading_run(found[0])
        queries = [
            PoolQuery(
                name,
                str(getattr(transfer.hit_policy, "value", transfer.hit_policy)),
                present,
                window=len(transfer.keys or ()) or 1,
                block_pages=getattr(transfer, "block_pages", 0),
                group_pages=getattr(transfer, "group_pages", 0),
            )
            for name, transfer, present in zip(names, transfers, found[0 if anchored else 1 :], strict=True)
        ]
        result = restorable(kv_pages, queries)
        return PoolTransferResult(result.pages, dict(result.boundaries), result.lengths)

    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[Any, list[bool]]:
        """Fetch pages into several pools at once; pool -> a truth value a page."""
        return self._move_pools(m.Get, transfers)

    def batch_set_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[Any, list[bool]]:
        """Store pages of several pools at once; pool -> a truth value a page."""
        return self._move_pools(m.Put, transfers)

    def _move_pools(self, kind: type[m.Put] | type[m.Get], transfers: Sequence[PoolTransfer]) -> dict[Any, list[bool]]:
        results: dict[Any, list[bool]] = {}

        def move() -> dict[Any, list[bool]]:
            results.update({transfer.name: _misses(transfer.keys) for transfer in transfers})
            usable: list[tuple[PoolTransfer, Batch]] = []
            for transfer in transfers:
                if not transfer.keys or transfer.host_indices is None:
                    continue
                try:
                    batch = self._batch(str(transfer.name), list(transfer.keys), transfer.host_indices)
                except (KeyError, ValueError) as error:
                    self._warn("pool", f"pool {transfer.name} is left out: {error}")
                    continue
                usable.append((transfer, batch))
            started = time.perf_counter()
            moved = self._mover.move(kind, [batch for _, batch in usable], self._deadline())
            for (transfer, _), result in zip(usable, moved, strict=True):
                results[transfer.name] = result
            pages = sum(len(result) for result in moved)
            self._stats.moved_side(kind is m.Put, pages, sum(map(sum, moved)), time.perf_counter() - started)
            return results

        return self._guarded("set" if kind is m.Put else "get", results, move)

    # -- the generic calls, for ``dynamic`` without ``interface_v1``: whole pages as tensors

    def exists(self, key: str) -> bool:
        """Whether one page is stored."""
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """One page into ``target_location``, which is returned; None on a miss."""
        return self.batch_get([key], [target_location], None)[0]

    def batch_get(self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """Pages into the tensors of ``target_locations``; each tensor itself where it was filled, None elsewhere."""

        def fetch() -> list[Any]:
            targets = list(target_locations if target_locations is not None else [None] * len(keys))
            moved = self._move_flat(m.Get, list(keys), targets)
            return [target if ok else None for target, ok in zip(targets, moved, strict=True)]

        return self._guarded("get", [None for _ in _misses(keys)], fetch)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store one page given as a tensor."""
        return self.batch_set([key], [value if value is not None else target_location])

    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store pages given as tensors; true when all are stored."""

        def put() -> bool:
            sources = values if values is not None else target_locations
            return all(self._move_flat(m.Put, list(keys), list(sources if sources is not None else [])))

        return self._guarded("set", False, put)

    def _move_flat(self, kind: type[m.Put] | type[m.Get], keys: list[str], tensors: list[Any]) -> list[bool]:
        if len(keys) != len(tensors):
            raise ValueError(f"{len(keys)} keys with {len(tensors)} tensors")
        results = [False] * len(keys)
        deadline = self._deadline()
        for positions, located in flat_pages.by_size(tensors):
            batch = Batch(self._flat_keys([keys[at] for at in positions]), located)
            (moved,) = self._mover.move(kind, [batch], deadline)
            for at, ok in zip(positions, moved, strict=True):
                results[at] = ok
        return results

    def _flat_keys(self, keys: list[str]) -> m.Keys:
        pool = self._pools.get(_KV)
        if pool is None or not self._flat_digest:
            raise ValueError("tensors are stored for SGLang's generic interface only: dynamic, without interface_v1")
        self._check_weights()
        return m.Keys(self._flat_digest, ["+".join(pool.shards.parts)], keys)

    # -- the rest of the contract

    def clear(self) -> None:
        """Drop every page of this engine's own namespaces, on every node of the pool; nobody else's."""

        def clear() -> None:
            digests = [*self._digests.values(), *filter(None, [self._flat_digest])]
            reply = self._session.ask(m.Clear(self._session.budget_ms(self._deadline()), digests))
            if isinstance(reply, m.Cleared):
                logger.info("cleared %d objects%s", reply.objects, _unreached(reply.unreached))
            else:
                logger.warning("clear: the node did not answer; nothing may have been cleared")

        self._guarded("clear", None, clear)

    def get_stats(self) -> Any:
        """SGLang's ``StorageMetrics`` since the last call; None with metrics off."""
        return self._guarded("stats", None, self._stats.drain)

    def counters(self) -> dict[str, float]:
        """What this engine's calls came to, and the node's own counters if it answers: for tests and tools."""
        reply = self._session.ask(m.Stats())
        node = reply.values if isinstance(reply, m.Counters) else {}
        failures = {f"engine_{cause}": count for cause, count in self._session.failures.items()}
        return {**node, **failures, **self._stats.totals()}

    def close(self) -> None:
        """Detach: give back connections and shared memory. Called once by SGLang; safe to call again."""
        self._guarded("close", None, self._session.close)

    # -- pieces

    def _is_anchored(self) -> bool:
        """Whether KV pages exist by their side pools alone."""
        return hasattr(self, "mem_pool_host") and is_logical(self.mem_pool_host) and bool(self._pools)

    def _keys(self, name: str, hashes: list[str]) -> m.Keys:
        self._check_weights()
        parts = list(self._pools[name].shards.parts)
        return m.Keys(self._digests[name], parts, hashes)

    def _kv_keys(self, hashes: list[str]) -> m.Keys:
        return self._flat_keys(hashes) if self._stores_tensors else self._keys(_KV, hashes)

    def _check_weights(self) -> None:
        if weights.updates() != self._weights:
            raise Unavailable(
                "the weights were replaced since this backend was attached",
                hint="detach it and attach it again with another 'revision'",
            )

    def _batch(self, name: str, keys: list[str], host_indices: Any) -> Batch:
        pool = self._pools.get(name)
        if pool is None:
            raise KeyError(f"pool {name!r} is not registered")
        return Batch(self._keys(name, keys), pool.locate(host_indices, len(keys)))

    def _deadline(self) -> float:
        return time.monotonic() + self.settings.op_timeout

    def _ask(self, groups: list[m.Keys], *, prefix_only: bool = False, limit_to_first: bool = False) -> list[bytes]:
        if not groups or not any(group.hashes for group in groups):
            return [b""] * len(groups)
        budget = self._session.budget_ms(self._deadline())
        reply = self._session.ask(m.Exists(budget, groups, prefix_only, limit_to_first))
        lengths = [len(group.hashes) for group in groups]
        if isinstance(reply, m.Found) and [len(pages) for pages in reply.pages] == lengths:
            self._stats.asked(lengths[0], leading_run(reply.pages[0]))
            return reply.pages
        return [bytes(length) for length in lengths]

    def _guarded(self, verb: str, nothing: _T, call: Callable[[], _T]) -> _T:
        """The result of ``call``, or ``nothing`` when it raised: an error of ours must never be one of SGLang's."""
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - this is the one place where everything has to stop
            self._stats.count(f"{verb}_errors")
            self._warn(verb, f"{verb}: {type(error).__name__}: {error}; taken as a miss", trace=True)
            return nothing

    def _warn(self, about: str, text: str, *, trace: bool = False) -> None:
        """Log a warning, about each matter at most once in ten seconds."""
        now = time.monotonic()
        if now - self._warned.get(about, -60.0) > 10:
            self._warned[about] = now
            logger.warning("%s", text[:500], exc_info=trace and logger.isEnabledFor(logging.DEBUG))


def _misses(keys: Any) -> list[bool]:
    """A miss for every key, whatever was given as keys."""
    return [False] * len(keys) if hasattr(keys, "__len__") else []


def _unreached(nodes: Sequence[str]) -> str:
    return f"; not reached: {', '.join(nodes)}" if nodes else ""


__all__ = ["ConfigError", "MooncakeHiCacheStorage"]
