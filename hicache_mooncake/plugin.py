"""Makes ``--hicache-storage-backend mooncake`` this package, in every process of an SGLang server.

SGLang finds :func:`register` by the entry point group ``sglang.srt.plugins``. An exception in it would be logged and
swallowed, leaving SGLang's own backend in place: so it says clearly what was taken over.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from hicache_mooncake import __version__
from hicache_mooncake.engine import weights

logger = logging.getLogger(__name__)

NAME = "mooncake"
MODULE, CLASS = "hicache_mooncake.backend", "MooncakeHiCacheStorage"


def register() -> None:
    """Take over the backend's name and the host pools' allocator; watch for new weights."""
    # SGLang's bootstrap imports Mooncake's own engine for this backend name, unless told not to.
    os.environ.setdefault("SGLANG_HICACHE_MOONCAKE_REUSE_TE", "0")
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory  # noqa: PLC0415
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    # Its own entry goes first: SGLang would warn that it is overwritten, in every process, which reads like a fault.
    getattr(StorageBackendFactory, "_registry", {}).pop(NAME, None)
    StorageBackendFactory.register_backend(NAME, MODULE, CLASS)
    # Every host pool asks this function for its allocator; SGLang patches the modules that imported it by name, too.
    HookRegistry.register(
        "sglang.srt.mem_cache.pool_host.common.get_allocator_from_storage", _allocator, HookType.AROUND
    )
    for method in weights.UPDATES:
        HookRegistry.register(method, weights.updating, HookType.AROUND)
    logger.info("hicache-mooncake %s: storage backend %r is %s.%s", __version__, NAME, MODULE, CLASS)


def _allocator(original: Callable[[Any], Any], allocator_type: Any) -> Any:
    if allocator_type != NAME:
        return original(allocator_type)
    from hicache_mooncake.engine.host_allocator import SharedHostTensorAllocator  # noqa: PLC0415

    return SharedHostTensorAllocator()
