"""Makes ``--hicache-storage-backend mooncake`` this package, in every process of an SGLang server.

SGLang finds :func:`register` by the entry point group ``sglang.srt.plugins``. An exception in it, or in importing this
module, would be logged and swallowed, leaving SGLang's own backend in place, whose advice then misleads. So nothing of
the package is imported here before the backend's name is taken over, and what fails later is said and survived.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

NAME = "mooncake"
MODULE, CLASS = "hicache_mooncake.backend", "MooncakeHiCacheStorage"


def register() -> None:
    """Take over the backend's name, then the host pools' allocator; watch for new weights."""
    # SGLang's bootstrap imports Mooncake's own engine for this backend name, unless told not to.
    os.environ.setdefault("SGLANG_HICACHE_MOONCAKE_REUSE_TE", "0")
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory  # noqa: PLC0415

    # Its own entry goes first: SGLang would warn that it is overwritten, in every process, which reads like a fault.
    getattr(StorageBackendFactory, "_registry", {}).pop(NAME, None)
    StorageBackendFactory.register_backend(NAME, MODULE, CLASS)
    _survive(_share_host_pools, "host pools are not shared with the node, so pages are copied once more")
    _survive(
        _watch_weights, "an update of the weights goes unnoticed: detach before it, attach again with a 'revision'"
    )
    logger.info("hicache-mooncake: storage backend %r is %s.%s", NAME, MODULE, CLASS)


def _survive(step: Callable[[], None], otherwise: str) -> None:
    """Run a step without which the backend still works, and say what is lost when it fails."""
    try:
        step()
    except Exception as error:
        logger.exception(
            "hicache-mooncake is registered, but a hook into SGLang failed (%s: %s): %s",
            type(error).__name__,
            error,
            otherwise,
        )


def _share_host_pools() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    # Every host pool asks this function for its allocator; SGLang patches the modules that imported it by name, too.
    HookRegistry.register(
        "sglang.srt.mem_cache.pool_host.common.get_allocator_from_storage", _allocator, HookType.AROUND
    )


def _watch_weights() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    from hicache_mooncake.engine import weights  # noqa: PLC0415

    for method in weights.UPDATES:
        HookRegistry.register(method, weights.updating, HookType.AROUND)


def _allocator(original: Callable[[Any], Any], allocator_type: Any) -> Any:
    if allocator_type != NAME:
        return original(allocator_type)
    from hicache_mooncake.engine.host_allocator import SharedHostTensorAllocator  # noqa: PLC0415

    return SharedHostTensorAllocator()
