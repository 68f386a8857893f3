"""SGLang's ``file`` backend, but the first page of every batch comes back with one bit flipped."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile


class FlippingBackend(HiCacheFile):  # type: ignore[misc]
    """Loaded by SGLang as a ``dynamic`` backend, which passes a second argument that is not a path."""

    def __init__(self, storage_config: Any, options: Any) -> None:
        super().__init__(storage_config)

    def batch_get(self, keys: Any, target_locations: Any = None, target_sizes: Any = None) -> Any:
        pages = super().batch_get(keys, target_locations, target_sizes)
        pages[0].view(torch.uint8).view(-1)[0] ^= 1
        return pages
