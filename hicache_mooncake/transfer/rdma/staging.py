"""Where peers may write: a few areas outside the segment, one lent to one writer at a time.

A peer never gets a key with which it could write into the segment. What it wrote here is copied into the room that was
made for it and checked there, where no peer can reach it any more. Memory windows would save the copy; many devices do
not have them, and binding one for every extent of every page costs the owner more than the copy does.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

from hicache_mooncake import memory
from hicache_mooncake.errors import Unavailable
from hicache_mooncake.memory import Extent, Memory, copy_extents

from .registration import Registered, Registry

logger = logging.getLogger(__name__)

AREA_BYTES = 16 << 20
AREAS = 4
"""Writers served at once. More wait their turn, then write over TCP."""
WAIT = 0.2
"""Seconds a writer waits for an area."""


@dataclass(frozen=True)
class Area:
    """``memory`` that a writer writes into, and its keys by device."""

    memory: Memory
    registered: Registered


class Staging:
    """Areas, made and registered when they are first needed. ``registry`` gives peers the right to write."""

    def __init__(self, registry: Registry, *, areas: int = AREAS, area_bytes: int = AREA_BYTES) -> None:
        self._registry = registry
        self._size = area_bytes
        self._free = threading.Semaphore(areas)
        self._lock = threading.Lock()
        self._idle: list[Area] = []
        self._closed = False

    def take(self, deadline: float) -> Area | None:
        """An area to be given back by :meth:`give_back`; None when none is free in time, or none can be had."""
        if not self._free.acquire(timeout=max(0.0, min(WAIT, deadline - time.monotonic()))):
            return None
        with self._lock:
            if self._idle:
                return self._idle.pop()
        made: Memory | None = None
        try:
            made = memory.create("hicache-mooncake-staging", self._size)
            return Area(made, self._registry.prepare(made))
        except (OSError, Unavailable) as error:
            logger.warning("RDMA: no staging area, so pages are written to this node over TCP: %s", error)
            if made is not None:
                made.close()
            self._free.release()
            return None

    def give_back(self, area: Area) -> None:
        """No writer has a path to it any more, or it has said that it is done."""
        with self._lock:
            if not self._closed:
                self._idle.append(area)
                area = None  # type: ignore[assignment]
        if area is not None:
            area.memory.close()
        self._free.release()

    def close(self) -> None:
        """Deregister and unmap what is not lent; what is goes when it is given back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for area in idle:
            area.memory.close()


def copy_out(area: Memory, size: int, targets: list[Extent]) -> list[Extent]:
    """Copy the first ``size`` bytes of an area to ``targets``; returns what of them is still to be filled."""
    now, later = split_extents(targets, size)
    copy_extents(now, [Extent(area, 0, size)])
    return later


def split_extents(extents: list[Extent], size: int) -> tuple[list[Extent], list[Extent]]:
    """The first ``size`` bytes of some extents, and the rest."""
    for at, (area, offset, length) in enumerate(extents):
        if length >= size:
            rest = [Extent(area, offset + size, length - size)] if length > size else []
            return [*extents[:at], Extent(area, offset, size)], [*rest, *extents[at + 1 :]]
        size -= length
    return extents, []
