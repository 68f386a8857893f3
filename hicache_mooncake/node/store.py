"""A node's DRAM: the segment, what lies where in it, and what goes when it is full.

Order of events, everywhere: bytes in place and checksummed -> index -> Redis; and to free: index -> Redis -> pins
gone -> memory. So a page that is visible is whole, and memory is reused only when nobody can be reading it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from hicache_mooncake.allocator import ExtentAllocator, Span
from hicache_mooncake.memory import Extent, Memory
from hicache_mooncake.node.index import Page, PageIndex, Protection

EVICTION_BATCH = 64
"""Fewest pages one eviction takes: a round trip to Redis is shared, and nothing like a purge happens."""

HARD_SHARE = 0.5
"""Most of the segment that may be hard-pinned: a cache that can evict nothing stores nothing either."""

REMOVED_AT_ONCE = 512
"""Pages removed in one step: what holds the lock, and one call to Redis, stay short."""


class PageState(NamedTuple):
    """A page as an operator sees it. ``idle`` and ``pin_left`` (of a soft pin) are seconds, ``pins`` readers."""

    key: str
    size: int
    protection: Protection
    extra: bool
    pins: int
    idle: float
    pin_left: float


class Handled(NamedTuple):
    """What became of pages: how many objects, their bytes of the segment, and how many were left as they are."""

    objects: int = 0
    bytes: int = 0
    left: int = 0


def _nobody(keys: Sequence[str]) -> Sequence[bool]:
    return [False] * len(keys)


class LowerTier(Protocol):
    """What lies below the segment; none of it waits for a disk."""

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Which objects it holds."""

    def stored(self, pages: Sequence[Page]) -> None:
        """Pages have become visible in DRAM."""

    def may_leave(self, pages: Sequence[Page]) -> list[Page]:
        """Which of these cold pages DRAM may let go of now; the others are to be written first."""


class DramStore:
    """Thread-safe. ``forget_in_directory`` and ``held_elsewhere`` are called without the lock.

    The first with keys that were just made invisible, the second to learn whether extra copies still are: whether a
    live node besides this one holds the pages.
    """

    def __init__(
        self,
        segment: Memory,
        *,
        capacity: int | None = None,
        high_watermark: float,
        forget_in_directory: Callable[[Sequence[str]], None],
        held_elsewhere: Callable[[Sequence[str]], Sequence[bool]] = _nobody,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.segment = segment
        self._allocator = ExtentAllocator(segment.size if capacity is None else capacity)
        self._index = PageIndex()
        self._lock = threading.Lock()
        self._watermark = int(self._allocator.capacity * high_watermark)
        self._promised = 0  # bytes that batches have made room for and not taken yet
        self._forget_in_directory = forget_in_directory
        self._held_elsewhere = held_elsewhere
        self._clock = clock
        self._evicted: Counter[str] = Counter()
        self.lower: LowerTier | None = None

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

    @property
    def evicted(self) -> int:
        """Pages that left because the segment was full."""
        return self._evicted.total()

    def facts(self) -> dict[str, int]:
        """Counters and gauges of protection and eviction, by name."""
        index = self._index
        return {
            "evicted": self.evicted,
            "evicted_extra": self._evicted["extra"],
            "evicted_soft": self._evicted["soft"],
            "hard_pinned_bytes": index.hard_bytes,
            "soft_pinned_bytes": index.soft_bytes,
            "extra_bytes": index.extra_bytes,
        }

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Which keys are here; touches them, pins nothing."""
        now = self._clock()
        with self._lock:
            return self._index.touch_all(keys, now)

    def sizes_of(self, keys: Sequence[str]) -> dict[str, int]:
        """Key -> size in bytes of those that are here; touches nothing."""
        with self._lock:
            pages = [self._index.get(key) for key in keys]
        return {page.key: page.size for page in pages if page is not None}

    def keys(self) -> list[str]:
        """Every key, in no order: a snapshot."""
        return [page.key for page in self.snapshot()]

    def snapshot(self) -> list[Page]:
        """Every page, in no order; nothing keeps them."""
        with self._lock:
            return self._index.snapshot()

    def find(self, page_hashes: Sequence[str], digests: Sequence[str] = ()) -> list[list[Page]]:
        """For each page hash its objects in these namespaces, or in all. Touches nothing, pins nothing."""
        with self._lock:
            return [self._index.find(page_hash, digests) for page_hash in page_hashes]

    def states(self, pages: Iterable[Page]) -> list[PageState]:
        """How pages stand now; those that are gone are left out."""
        now = self._clock()
        with self._lock:
            self._index.expire(now)
            return [
                PageState(
                    page.key,
                    page.size,
                    page.protection,
                    page.extra,
                    page.pins,
                    max(0.0, now - page.used),
                    max(0.0, page.pinned_until - now) if page.protection is Protection.SOFT else 0.0,
                )
                for page in pages
                if not page.forgotten
            ]

    # -- reading

    def pin(self, keys: Sequence[str]) -> list[Page | None]:
        """The pages, each with one more pin; every one that is not None must go through :meth:`unpin`."""
        now = self._clock()
        with self._lock:
            return self._index.pin_all(keys, now)

    def hold(self, keys: Sequence[str]) -> list[Page | None]:
        """:meth:`pin` for who only looks after pages: they become no younger."""
        with self._lock:
            pages = [self._index.get(key) for key in keys]
            self._index.hold([page for page in pages if page is not None])
        return pages

    def coldest(self, footprint: int) -> list[Page]:
        """The pages that would go next if ``footprint`` bytes were needed; nothing keeps them."""
        with self._lock:
            return self._index.coldest(footprint, self._clock())

    def unpin(self, pages: Sequence[Page | None]) -> None:
        """Let go of what :meth:`pin` or :meth:`hold` returned."""
        with self._lock:
            for page in pages:
                if page is not None and self._index.unpin(page):
                    self._allocator.free(page.spans)

    # -- protecting

    def protect(self, pages: Iterable[Page], protection: Protection, ttl: float = 0.0) -> Handled:
        """Put pages, each with all its parts, into a class; ``ttl`` (seconds without a use) is for soft pins.

        Left as it is what would take hard pins above :data:`HARD_SHARE` of the segment.
        """
        objects = size = left = 0
        now = self._clock()
        with self._lock:
            limit = int(HARD_SHARE * self.capacity)
            done: set[int] = set()
            for page in pages:
                if page.forgotten or id(page) in done:
                    continue
                members = self._index.group(page)
                done |= set(map(id, members))
                more = sum(member.footprint for member in members if member.protection is not Protection.HARD)
                if protection is Protection.HARD and self._index.hard_bytes + more > limit:
                    left += len(members)
                    continue
                self._index.protect(page, protection, ttl, now)
                objects += len(members)
                size += sum(member.footprint for member in members)
        return Handled(objects, size, left)

    # -- writing

    def reserve(self, sizes: Sequence[int]) -> list[tuple[Span, ...] | None]:
        """Memory for new pages, evicting cold ones above the watermark; None where there is none."""
        # What can never fit must not cost those their place that do.
        wanted = sum(ExtentAllocator.footprint(size) for size in sizes if size <= self.capacity)
        with self._lock:
            self._promised += wanted
        try:
            self._make_room()
            with self._lock:
                spans = [self._allocator.allocate(size) for size in sizes]
            missing = [size for size, got in zip(sizes, spans, strict=True) if got is None and size <= self.capacity]
            if missing:  # holes too small, or memory that others took or still read
                self._make_room(sum(map(ExtentAllocator.footprint, missing)))
                with self._lock:
                    spans = [got or self._allocator.allocate(size) for got, size in zip(spans, sizes, strict=True)]
        finally:
            with self._lock:
                self._promised -= wanted
        return spans

    @property
    def _excess(self) -> int:
        """Bytes above the watermark when all batches under way have what they want and what is leaving has left."""
        return self._allocator.used_bytes + self._promised - self._index.leaving_bytes - self._watermark

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
        now = self._clock()
        with self._lock:
            fresh = self._index.insert_all(pages, now)
            for page, inserted in zip(pages, fresh, strict=True):
                if not inserted:
                    self._allocator.free(page.spans)
        if self.lower is not None:
            self.lower.stored([page for page, inserted in zip(pages, fresh, strict=True) if inserted])
        return fresh

    def cancel(self, spans: tuple[Span, ...]) -> None:
        """Give back reserved memory that no page came of."""
        with self._lock:
            self._allocator.free(spans)

    # -- removing

    def drop(self, page: Page) -> None:
        """Remove one page that must not be served any more (it failed its check)."""
        self.remove([page])

    def remove(self, pages: Sequence[Page]) -> int:
        """Remove pages whatever protects them; how many this call removed, the others had been already."""
        removed = 0
        for start in range(0, len(pages), REMOVED_AT_ONCE):
            with self._lock:
                gone = self._index.forget(pages[start : start + REMOVED_AT_ONCE])
            self._bury(gone)
            removed += len(gone)
        return removed

    def remove_where(self, matches: Callable[[str], bool]) -> int:
        """Remove every page whose key matches; returns how many."""
        return self.remove([page for page in self.snapshot() if matches(page.key)])

    def evict_bytes(self, footprint: int) -> Handled:
        """Have cold pages go as if so many bytes were needed, soft-pinned ones last."""
        objects = freed = 0
        while freed < footprint:
            gone = self._make_room(min(footprint - freed, _STEP))
            if not gone:
                break
            objects += len(gone)
            freed += sum(page.footprint for page in gone)
        return Handled(objects, freed)

    def _make_room(self, footprint: int | None = None) -> list[Page]:
        """Evict what takes ``footprint`` bytes, or what is above the watermark, if there is that much; what went."""
        self._settle_extras(footprint)
        if self.lower is not None:
            return self._let_go(self.lower, footprint)
        with self._lock:
            footprint = self._excess if footprint is None else footprint
            if footprint <= 0:
                return []
            batch = EVICTION_BATCH if len(self._index) > 16 * EVICTION_BATCH else 0
            victims = self._index.evict(footprint, self._clock(), at_least=batch)
            self._count_evicted(victims)
        self._bury(victims)
        return victims

    def _count_evicted(self, victims: Sequence[Page]) -> None:
        for page in victims:
            soft = page.protection is Protection.SOFT
            self._evicted["soft" if soft else "extra" if page.extra else "cold"] += 1

    def _let_go(self, lower: LowerTier, footprint: int | None) -> list[Page]:
        """As :meth:`_make_room`, of what the tier below lets go. A page's parts go together, or none of them."""
        leaving: list[Page] = []
        seen = needed = 0
        for choice in _CHOICES:
            with self._lock:
                needed = self._excess if footprint is None else footprint
                if needed <= 0:
                    return []
                candidates = self._index.coldest(choice * needed, self._clock())
            if len(candidates) == seen:
                break
            seen = len(candidates)
            free = set(map(id, lower.may_leave(candidates)))
            staying = {_page_of(page) for page in candidates if id(page) not in free}
            leaving = [page for page in candidates if _page_of(page) not in staying]
            if sum(page.footprint for page in leaving) >= needed:
                break
        return self._remove_some(leaving, needed)

    def evict_saved(self, footprint: int) -> list[Page]:
        """Evict cold pages that the tier below has as well, of ``footprint`` bytes; what went."""
        if self.lower is None:
            return []
        candidates = self.coldest(footprint)
        held = self.lower.contains([page.key for page in candidates])
        return self._remove_some([page for page, saved in zip(candidates, held, strict=True) if saved], footprint)

    def _remove_some(self, pages: Sequence[Page], needed: int) -> list[Page]:
        """Evict the first of ``pages`` that take ``needed`` bytes; what went."""
        chosen: list[Page] = []
        for page in pages:
            if needed <= 0 and (not chosen or _page_of(page) != _page_of(chosen[-1])):
                break
            chosen.append(page)
            needed -= page.footprint
        with self._lock:
            gone = self._index.forget([page for page in chosen if not page.pins])
            self._count_evicted(gone)
        self._bury(gone)
        return gone

    def _settle_extras(self, footprint: int | None) -> None:
        """Extra copies go first only while somebody else holds the page as well: that is looked up when it matters."""
        while self._index.extra_bytes:
            with self._lock:
                needed = self._excess if footprint is None else footprint
                extras = self._index.cold_extras(needed, self._clock(), at_least=EVICTION_BATCH)
            if not extras:
                return
            elsewhere = self._held_elsewhere([page.key for page in extras])
            with self._lock:
                alone = [page for page, other in zip(extras, elsewhere, strict=True) if not other and page.extra]
                for page in alone:
                    if not page.forgotten:
                        self._index.settle(page)
            if not alone:
                return

    def _bury(self, pages: Sequence[Page]) -> None:
        """Pages that are invisible now, and held: out of Redis, and then their memory goes with the last pin."""
        if pages:
            try:
                self._forget_in_directory([page.key for page in pages])
            finally:
                self.unpin(pages)


def _page_of(page: Page) -> str:
    return page.key.rpartition(":")[0]


_CHOICES = (2, 16, 128)
"""Times what is needed that is looked at, until enough of it is on SSD already: the coldest pages mostly are."""

_STEP = 64 << 20
"""Bytes evicted in one step when an operator orders it: the lock and Redis are free in between."""
