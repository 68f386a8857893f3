"""Pages of the SSD that are read again and again come back to DRAM.

A page is admitted when it was asked for often enough lately (``frequency``) and the segment has room for it below its
watermark: a read never evicts. The bytes of an admitted page are read straight into the segment, so that promoting it
costs no second read and no copy. It becomes visible in the background, after the engine has been served. Where there
is no room, cold pages that are on SSD anyway are evicted in the background, for the next time.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from hicache_mooncake.allocator import Span
from hicache_mooncake.node.counters import Counters
from hicache_mooncake.node.frequency import Frequency
from hicache_mooncake.node.index import Page
from hicache_mooncake.node.ssd_loading import Place
from hicache_mooncake.node.store import DramStore
from hicache_mooncake.ssd.base import Entry

logger = logging.getLogger(__name__)

QUEUE_LIMIT = 1024
"""Pages that are in the segment and not visible yet; more are not promoted."""

HEADROOM_STEP = 32
"""Part of the segment, as a divisor, that is freed at a time for pages to come."""


class Promoter:
    """Thread-safe. ``published`` tells Redis of pages that have become visible in DRAM."""

    def __init__(
        self,
        dram: DramStore,
        counters: Counters,
        *,
        threshold: int,
        published: Callable[[Sequence[Page]], None],
    ) -> None:
        """``threshold``: times that a page must have been asked for lately; 0 promotes nothing."""
        self._dram = dram
        self._counters = counters
        self._threshold = threshold
        self._published = published
        self._frequency = Frequency()
        self._ready: queue.Queue[Page | None] = queue.Queue(QUEUE_LIMIT)
        self._wanted = 0  # bytes that found no room since the last look
        self._thread = threading.Thread(target=self._run, name="hcm-promote", daemon=True)
        self._thread.start()

    def admitted(self, keys: Sequence[str]) -> set[str]:
        """Count a use of each page; which of them should be in DRAM."""
        if not self._threshold or not self._dram.capacity:
            return set()
        counts = self._frequency.add(keys)
        return {key for key, count in zip(keys, counts, strict=True) if count >= self._threshold}

    def place(self, entry: Entry) -> tuple[Place, tuple[Span, ...]] | None:
        """Room in the segment for a page that is read now; ``release`` it, or give the spans to :meth:`promote`."""
        spans = self._dram.reserve_free([entry.size])[0]
        if spans is None:
            self._wanted += entry.size
            if self._ready.empty():
                self._wake()
            return None
        return Place(self._dram.extents(spans), lambda: self._dram.cancel(spans)), spans

    def promote(self, entry: Entry, spans: tuple[Span, ...]) -> None:
        """The page's bytes are in place and verified: it becomes visible soon. Takes over the spans."""
        page = Page(entry.key, entry.size, entry.checksum, spans, self._dram.extents(spans))
        try:
            self._ready.put_nowait(page)
        except queue.Full:
            self._dram.cancel(spans)

    def _wake(self) -> None:
        with suppress(queue.Full):  # it is awake then
            self._ready.put_nowait(None)

    def _run(self) -> None:
        while True:
            first = self._ready.get()
            batch = [first]
            while not self._ready.empty() and len(batch) < 128:
                batch.append(self._ready.get())
            try:
                self._commit([page for page in batch if page is not None and page is not _END])
                if self._wanted:
                    self._make_room()
            except Exception:  # the thread goes on: it gives memory back
                logger.exception("promoting pages failed")
            if _END in batch:
                return

    def _commit(self, pages: Sequence[Page]) -> None:
        if not pages:
            return
        fresh = [page for page, inserted in zip(pages, self._dram.commit(pages), strict=True) if inserted]
        if fresh:
            self._published(fresh)
            self._counters.add(ssd_promoted=len(fresh))

    def _make_room(self) -> None:
        """Free a little, of what has a copy on SSD: what was wanted, and never much at once."""
        wanted, self._wanted = self._wanted, 0
        self._dram.evict_saved(min(wanted, self._dram.capacity // HEADROOM_STEP))

    def close(self) -> None:
        """Make the last ones visible, and end."""
        self._ready.put(_END)
        self._thread.join(timeout=10)


_END = Page("", 1, 0, (), ())
