"""Memory through which pages of the SSD pass on their way to an engine or to another node: bounded, waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from hicache_mooncake.allocator import ExtentAllocator, Span
from hicache_mooncake.memory import Extent


class Staging:
    """``area`` is cut into pages as they come and go. Thread-safe."""

    def __init__(self, area: Extent) -> None:
        self.area = area
        self._free = ExtentAllocator(area.length)
        self._changed = threading.Condition()
        self._closed = False

    @property
    def size(self) -> int:
        return self._free.capacity

    @property
    def used(self) -> int:
        return self._free.used_bytes

    def take(self, sizes: Sequence[int], deadline: float) -> list[tuple[Span, ...]] | None:
        """Room for all of ``sizes``, or None when there is not that much by ``deadline``.

        All or nothing: two who each hold a part and wait for the rest would wait for each other.
        """
        if sum(map(ExtentAllocator.footprint, sizes)) > self.size:
            return None
        with self._changed:
            while not self._closed:
                taken = self._try(sizes)
                if taken is not None:
                    return taken
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return None
        return None

    def _try(self, sizes: Sequence[int]) -> list[tuple[Span, ...]] | None:
        taken: list[tuple[Span, ...]] = []
        for size in sizes:
            spans = self._free.allocate(size)
            if spans is None:
                for given in taken:
                    self._free.free(given)
                return None
            taken.append(spans)
        return taken

    def extents(self, spans: tuple[Span, ...]) -> tuple[Extent, ...]:
        """Where they lie in memory."""
        memory, base, _ = self.area
        return tuple(Extent(memory, base + offset, length) for offset, length in spans)

    def give_back(self, taken: Sequence[tuple[Span, ...]]) -> None:
        """What :meth:`take` gave, or a part of it, is not used any more."""
        with self._changed:
            for spans in taken:
                self._free.free(spans)
            self._changed.notify_all()

    def close(self) -> None:
        """Nobody waits or is given anything any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
