"""On which NUMA node memory lies: asked of the kernel for a few of its pages."""

from __future__ import annotations

import ctypes
import platform
from collections import Counter

from .topology import ANYWHERE

_MOVE_PAGES = {"x86_64": 279, "aarch64": 239}
_SAMPLES = 64
_CLEAR = 0.6
"""Part of the pages that must lie on one node for the memory to count as lying there."""


def node_of(address: int, size: int) -> int:
    """The node of ``size`` mapped bytes; :data:`ANYWHERE` when they are spread, or not there yet, or nobody knows."""
    call = _MOVE_PAGES.get(platform.machine())
    if call is None or size <= 0:
        return ANYWHERE
    count = min(_SAMPLES, max(1, size >> 12))
    pages = (ctypes.c_void_p * count)(*[address + at * size // count & ~4095 for at in range(count)])
    nodes = (ctypes.c_int * count)()
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    # Without target nodes move_pages(2) moves nothing, and tells where each page is or a negative errno.
    if syscall(ctypes.c_long(call), 0, ctypes.c_ulong(count), pages, None, nodes, 0) != 0:
        return ANYWHERE
    found = Counter(node for node in nodes if node >= 0)
    if not found:
        return ANYWHERE
    node, times = found.most_common(1)[0]
    return node if times >= _CLEAR * sum(found.values()) else ANYWHERE
