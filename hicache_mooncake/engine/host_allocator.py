"""Allocates SGLang's host pools in shared memory, so that the node can work on their pages in place."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from sglang.srt.mem_cache.pool_host.common import HostTensorAllocator

from hicache_mooncake import memory

logger = logging.getLogger(__name__)


class SharedHostTensorAllocator(HostTensorAllocator):  # type: ignore[misc]
    """SGLang's allocator interface over a memfd: 2 MiB pages where the host has enough of them, all faulted in.

    The descriptor stays open as long as the tensor lives: it is what the pool is lent to the node by.
    """

    def allocate(self, dims: tuple[int, ...], dtype: Any, device: str) -> Any:
        """A zeroed host tensor. Raises ``OSError`` when the host has not that much shared memory."""
        assert device == "cpu", f"host pools live in host memory, got device={device!r}"
        self.dtype = dtype
        self.dims = dims
        count = math.prod(dims)
        if not count:
            return torch.empty(dims, dtype=dtype)
        shared = memory.create("hicache-mooncake-l2", count * dtype.itemsize, huge=True)
        shared.populate()  # cudaHostRegister pins only what is there
        # The tensor's storage holds the view, the view the mapping, and the mapping its descriptor.
        return torch.frombuffer(shared.view, dtype=dtype, count=count).reshape(dims)
