"""A node's DRAM: the segment, what lies where in it, and what goes when it is full.

Order of events, everywhere: bytes in place and checksummed -> index -> Redis; and to free: index -> Redis -> pins
gone -> memory. So a page that is visible is whole, and memory is reused only when nobody can be reading it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from hicache_mooncake.allocator import ExtentAllocator, Span
from hicache_mooncake.memory import Extent, Memory
from hicache_mooncake.node.index import Page, PageIndex

EVICTION_BATCH = 64
"""Fewest pages one eviction takes: a round trip to Redis is shared, and nothing like a purge happens."""


class DramStore:
    """Thread-safe. ``forget_in_directory`` is called without the lock, with the keys that were just made invisible."""

    def __init__(
        self,
        segment: Memory,
        *,
        capacity: int | None = None,
        high_watermark: float,
        forget_in_directory: Callable[[Sequence[str]], None],
    ) -> None:
        self.segment = segment
        self._allocator = ExtentAllocator(segment.size if capacity is None else capacity)
        self._index = PageIndex()
        self._lock = threading.Lock()
        self._watermark = int(self._allocator.capacity * high_watermark)
        self._forget_in_directory = forget_in_directory
        self.evicted = 0

    # -- looking

    def __len__(self) -> int:
        return len(self._index)

    @property
    def capacity(self) -> int:
        return self._allocator.capacity

    @property
    def used(self) -> int:
        """Bytes taken, pages being written and forgotten pages still read included."""
        return self._allocator.used_bytes

    @property
    def pins(self) -> int:
        return self._index.pinned

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Which keys are here; touches them, pins nothing."""
        with self._lock:
            touch = self._index.touch
            return [touch(key) for key in keys]

    def sizes_of(self, keys: Sequence[str]) -> dict[str, int]:
        """Key -> size in bytes of those that are here; touches nothing."""
        with self._lock:
            pages = [self._index.get(key) for key in keys]
        return {page.key: page.size for page in pages if page is not None}

    def keys(self) -> list[str]:
        """Every key, least recently used first: a snapshot."""
        with self._lock:
            return [page.key for page in self._index]

    # -- reading

    def pin(self, keys: Sequence[str]) -> list[Page | None]:
        """The pages, each with one more pin; every one that is not None must go through :meth:`unpin`."""
        with self._lock:
            pin = self._index.pin
            return [pin(key) for key in keys]

    def unpin(self, pages: Sequence[Page | None]) -> None:
        """Let go of what :meth:`pin` returned."""
        with self._lock:
            for page in pages:
                if page is not None and self._index.unpin(page):
                    self._allocator.free(page.spans)

    # -- writing

    def reserve(self, sizes: Sequence[int]) -> list[tuple[Span, ...] | None]:
        """Memory for new pages, evicting the least recently used ones above the watermark; None where there is none."""
        # What can never fit must not cost those their place that do.
        wanted = sum(ExtentAllocator.footprint(size) for size in sizes if size <= self.capacity)
        self._make_room(wanted)
        with self._lock:
            spans = [self._allocator.allocate(size) for size in sizes]
        if None in spans and self._evict(wanted):
            with self._lock:
                spans = [got or self._allocator.allocate(size) for got, size in zip(spans, sizes, strict=True)]
        return spans

    def reserve_free(self, sizes: Sequence[int]) -> list[tuple[Span, ...] | None]:
        """Memory for pages of other nodes: nothing is evicted for them, and the watermark holds."""
        reserved: list[tuple[Span, ...] | None] = []
        with self._lock:
            for size in sizes:
                fits = self._allocator.used_bytes + ExtentAllocator.footprint(size) <= self._watermark
                reserved.append(self._allocator.allocate(size) if fits else None)
        return reserved

    def extents(self, spans: tuple[Span, ...]) -> tuple[Extent, ...]:
        """Where reserved spans lie in memory."""
        return tuple(Extent(self.segment, offset, length) for offset, length in spans)

    def commit(self, pages: Sequence[Page]) -> list[bool]:
        """Make written pages visible. False where the key was stored meanwhile by another writer: ours is dropped."""
        with self._lock:
            fresh = [self._index.insert(page) for page in pages]
            for page, inserted in zip(pages, fresh, strict=True):
                if not inserted:
                    self._allocator.free(page.spans)
        return fresh

    def cancel(self, spans: tuple[Span, ...]) -> None:
        """Give back reserved memory that no page came of."""
        with self._lock:
            self._allocator.free(spans)

    # -- removing

    def drop(self, page: Page) -> None:
        """Remove one page that must not be served any more (it failed its check)."""
        self._remove([page])

    def remove_where(self, matches: Callable[[str], bool]) -> int:
        """Remove every page whose key matches; returns how many."""
        with self._lock:
            pages = [page for page in self._index if matches(page.key)]
        return sum(self._remove(pages[start : start + 512]) for start in range(0, len(pages), 512))

    def _make_room(self, wanted: int) -> None:
        excess = self._allocator.used_bytes + wanted - self._watermark
        if excess > 0:
            self._evict(excess)

    def _evict(self, footprint: int) -> bool:
        """Evict at least ``footprint`` bytes of cold pages if there are that many; True when any page went."""
        with self._lock:
            victims = self._index.coldest(footprint)
            if 0 < len(victims) < EVICTION_BATCH and len(self._index) > 16 * EVICTION_BATCH:
                victims += self._index.coldest(
                    (EVICTION_BATCH - len(victims)) * victims[0].size,
                    passing_over=[page.key for page in victims],
                )
        evicted = self._remove(victims)
        with self._lock:
            self.evicted += evicted
        return bool(victims)

    def _remove(self, pages: Sequence[Page]) -> int:
        """How many of ``pages`` this call removed; the others had been already."""
        # 1. Invisible here, and held by our own pin, so that an unpin meanwhile does not free it before step 2.
        # 2. Out of Redis. 3. Our pin goes; the memory goes with the last pin.
        held: list[Page] = []
        with self._lock:
            for page in pages:
                if not page.forgotten:
                    page.pins += 1
                    self._index.pinned += 1
                    self._index.forget(page)
                    held.append(page)
        if held:
            try:
                self._forget_in_directory([page.key for page in held])
            finally:
                self.unpin(held)
        return len(held)
