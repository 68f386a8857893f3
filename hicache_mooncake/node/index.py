"""What a node holds: object key -> page, in the order of last use, with pins. Pure bookkeeping, no memory is touched.

A page's life here: ``insert`` makes it visible; ``pin`` keeps its memory while somebody reads it; ``forget`` makes it
invisible at once; its memory is given back by whoever is last: the forgetter, or the last reader's ``unpin``.

Not thread-safe: the store's lock is held around every call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from hicache_mooncake.allocator import ExtentAllocator, Span
from hicache_mooncake.memory import Extent


class Page:
    """One stored object: its bytes lie in ``extents``, which cover ``spans`` of the segment."""

    __slots__ = ("checksum", "extents", "forgotten", "key", "pins", "size", "spans")

    def __init__(self, key: str, size: int, checksum: int, spans: tuple[Span, ...], extents: Sequence[Extent]) -> None:
        self.key = key
        self.size = size
        self.checksum = checksum
        self.spans = spans
        self.extents = extents
        self.pins = 0
        self.forgotten = False


class PageIndex:
    """The authority on what this node holds; ordered from the least to the most recently used page."""

    def __init__(self) -> None:
        self._pages: OrderedDict[str, Page] = OrderedDict()
        self.pinned = 0  # pins outstanding, over all pages

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, key: str) -> bool:
        return key in self._pages

    def __iter__(self) -> Iterator[Page]:
        return iter(self._pages.values())

    def get(self, key: str) -> Page | None:
        """The page, without touching its recency."""
        return self._pages.get(key)

    def touch(self, key: str) -> bool:
        """Whether the page is here; moves it to the young end. Never pins."""
        if key in self._pages:
            self._pages.move_to_end(key)
            return True
        return False

    def insert(self, page: Page) -> bool:
        """Make ``page`` visible. False when another page is stored under its key already (it is kept)."""
        if page.key in self._pages:
            return False
        self._pages[page.key] = page
        return True

    def pin(self, key: str) -> Page | None:
        """The page with one more pin, moved to the young end; None when it is not here."""
        page = self._pages.get(key)
        if page is not None:
            self._pages.move_to_end(key)
            page.pins += 1
            self.pinned += 1
        return page

    def unpin(self, page: Page) -> bool:
        """Take one pin back. True when the page was forgotten and this was its last pin: its memory is free now."""
        if page.pins <= 0:
            raise ValueError(f"page {page.key} is not pinned")
        page.pins -= 1
        self.pinned -= 1
        return page.forgotten and page.pins == 0

    def forget(self, page: Page) -> bool:
        """Make ``page`` invisible. True when nobody reads it: its memory is free now, else with the last unpin."""
        if self._pages.get(page.key) is page:
            del self._pages[page.key]
        page.forgotten = True
        return page.pins == 0

    def coldest(self, footprint: int, *, passing_over: Iterable[str] = ()) -> list[Page]:
        """Unpinned pages from the old end that take ``footprint`` bytes or more (or all there are)."""
        kept = set(passing_over)
        chosen: list[Page] = []
        for page in self._pages.values():
            if footprint <= 0:
                break
            if page.pins or page.key in kept:
                continue
            chosen.append(page)
            footprint -= ExtentAllocator.footprint(page.size)
        return chosen
