"""The segment: DRAM that a host gives to the pool, checked against what the host has before it is taken."""

from __future__ import annotations

import logging
import threading
from functools import partial

from hicache_mooncake import memory
from hicache_mooncake.allocator import GRANULE
from hicache_mooncake.errors import ConfigError
from hicache_mooncake.memory import Memory

logger = logging.getLogger(__name__)

HOST_RESERVE = 256 << 20
"""Bytes left to the host beside the segment: a host that swaps or kills for memory serves nobody."""


def create(size: int, *, huge_pages: str) -> Memory:
    """A segment of ``size`` bytes (or one granule for a node that gives none), its pages faulted in by a thread.

    Raises ``ConfigError`` when the host or its cgroup has less memory available, or huge pages are required and
    missing.
    """
    huge_free = memory.free_huge_bytes()
    if huge_pages == "on" and huge_free < size:
        raise ConfigError(
            "huge_pages",
            "on",
            f"{size >> 20} MiB of free 2 MiB pages are needed, the host has {huge_free >> 20} MiB",
            hint=f"sysctl vm.nr_hugepages={-(-size // memory.HUGE_PAGE)}, or huge_pages=auto",
        )
    available = available_memory()
    use_huge = huge_pages != "off" and size >= memory.HUGE_PAGE and huge_free >= size
    if not use_huge and size + HOST_RESERVE > available:
        raise ConfigError(
            "segment_size",
            f"{size >> 20} MiB",
            f"the host and its cgroup have {max(0, available - HOST_RESERVE) >> 20} MiB to give",
            hint="lower segment_size, or give the container more memory",
        )
    segment = memory.create("hicache-mooncake-segment", max(size, GRANULE), huge=use_huge)
    if huge_pages == "on" and not segment.huge:
        segment.close()
        raise ConfigError(
            "huge_pages", "on", "the host's free 2 MiB pages were taken meanwhile", hint="huge_pages=auto"
        )
    prefault = partial(segment.populate, huge=huge_pages != "off")
    threading.Thread(target=prefault, name="hcm-prefault", daemon=True).start()
    return segment


def available_memory() -> int:
    """Bytes this process may still take: the smaller of the host's available memory and its cgroup's limits."""
    return min(_host_available(), _cgroup_available())


def _host_available() -> int:
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 1 << 62


def _cgroup_available() -> int:
    """What cgroup v2, at any level up to the root of this namespace, leaves; v1 where v2 is not mounted."""
    smallest = 1 << 62
    try:
        with open("/proc/self/cgroup") as file:
            entries = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return smallest
    for _, controllers, path in entries:
        if controllers == "":
            parts = [part for part in path.split("/") if part]
            for depth in range(len(parts), -1, -1):
                folder = "/".join(["/sys/fs/cgroup", *parts[:depth]])
                smallest = min(smallest, _left(f"{folder}/memory.max", f"{folder}/memory.current"))
        elif "memory" in controllers.split(","):
            folder = "/sys/fs/cgroup/memory"
            smallest = min(smallest, _left(f"{folder}/memory.limit_in_bytes", f"{folder}/memory.usage_in_bytes"))
    return smallest


def _left(limit_file: str, usage_file: str) -> int:
    try:
        with open(limit_file) as limit, open(usage_file) as usage:
            return int(limit.read()) - int(usage.read())
    except (OSError, ValueError):
        return 1 << 62  # no such file, or "max": no limit at this level
