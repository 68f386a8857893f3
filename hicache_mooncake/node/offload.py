"""Writing pages of the segment to SSD, in the background: never while somebody waits for a put.

``eager``: every new page. ``on_evict``: the coldest pages, ahead of their eviction, as soon as the segment is filled
above a watermark; one that has no copy on SSD yet stays in DRAM.

What waits is names, not memory: a page that has left DRAM before its turn is skipped. A queue that is full takes no
more. A disk that fails or is full is left alone for a while; meanwhile eviction goes on without it.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

from hicache_mooncake.node.counters import Counters
from hicache_mooncake.node.index import Page
from hicache_mooncake.node.store import DramStore
from hicache_mooncake.ssd.base import Outcome, Result, SsdStore, StoreWrite

logger = logging.getLogger(__name__)

BATCH_BYTES = 32 << 20
"""Bytes written at a time: pinned in DRAM for so long, and enough for large sequential writes."""

WRITE_WITHIN = 30.0
"""Seconds that a disk has for a batch. It writes behind everybody's back, so slow is no fault."""

TEND_EVERY = 2.0
"""Seconds between two calls of the store's own upkeep."""

FIRST_PAUSE = 0.5
LONGEST_PAUSE = 15.0
"""Seconds that a disk which failed or is full is left alone, doubling from the first to the longest."""

LOOK_EVERY = 0.05
"""Seconds between two looks at how full the segment is."""


class Offloader:
    """Thread-safe. ``published`` tells Redis of pages that are on SSD now."""

    def __init__(
        self,
        dram: DramStore,
        store: SsdStore,
        counters: Counters,
        *,
        published: Callable[[Sequence[str], Sequence[int]], None],
        eager: bool,
        on_evict: bool,
        queue_limit: int,
        watermark: float,
        force_evict: bool,
    ) -> None:
        """``watermark``: the used part of the segment above which, ``on_evict``, the coldest pages are written."""
        self._dram = dram
        self._store = store
        self._counters = counters
        self._published = published
        self._eager = eager
        self._on_evict = on_evict
        self._limit = queue_limit
        self._watermark = int(dram.capacity * watermark)
        self._force_evict = force_evict
        self._batch_bytes = max(1, min(BATCH_BYTES, dram.capacity // 8))
        self._changed = threading.Condition()
        self._queue: dict[str, int] = {}  # key -> size, oldest first
        self._unpublished: set[str] = set()  # being written, or written and not told to Redis yet
        self._pause = 0.0
        self._resume_at = 0.0
        self._trouble = ""
        self._stop = False
        self._started = False
        self._thread = threading.Thread(target=self._run, name="hcm-offload", daemon=True)

    def start(self) -> None:
        """Begin: the store is open for writing now."""
        self._thread.start()
        self._started = True

    # -- what is asked by others

    @property
    def waiting(self) -> int:
        """Pages that wait for their turn."""
        return len(self._queue)

    @property
    def trouble(self) -> str:
        """Why the disk is left alone now; empty when it is not."""
        return self._trouble

    def stored(self, pages: Sequence[Page]) -> None:
        """Pages have become visible in DRAM. Waits for nothing."""
        if self._eager:
            self._enqueue(pages)

    def may_leave(self, pages: Sequence[Page]) -> list[Page]:
        """Which of these pages, about to be evicted, DRAM may let go now. Waits for nothing."""
        if not self._on_evict or self._trouble or not self._started:
            # While the disk is being looked through, or cannot be used, DRAM is a cache as it is without one.
            return list(pages)
        held = self._store.contains([page.key for page in pages])
        with self._changed:
            saved = [here and page.key not in self._unpublished for page, here in zip(pages, held, strict=True)]
        unsaved = [page for page, safe in zip(pages, saved, strict=True) if not safe]
        if not unsaved:
            return list(pages)
        queued = self._enqueue(unsaved)
        if self._force_evict and queued < len(unsaved):
            self._counters.add(ssd_evicted_unsaved=len(unsaved) - queued)
            kept = set(self._queue)
            return [page for page, safe in zip(pages, saved, strict=True) if safe or page.key not in kept]
        return [page for page, safe in zip(pages, saved, strict=True) if safe]

    def _enqueue(self, pages: Sequence[Page]) -> int:
        """How many of these wait in the queue now; the others are dropped, which is counted for ``eager``."""
        queued = dropped = 0
        with self._changed:
            for page in pages:
                if page.key in self._queue or page.key in self._unpublished:
                    queued += 1
                elif len(self._queue) < self._limit:
                    self._queue[page.key] = page.size
                    queued += 1
                else:
                    dropped += 1
            self._changed.notify_all()
        if dropped:
            self._counters.add(ssd_offload_dropped=dropped)
        return queued

    # -- the thread

    def _run(self) -> None:
        tend_at = time.monotonic() + TEND_EVERY
        while not self._stop:
            try:
                if time.monotonic() >= self._resume_at:
                    keys = self._next()
                    if keys:
                        self._offload(keys)
                else:
                    time.sleep(LOOK_EVERY)
                if time.monotonic() >= tend_at:
                    tend_at = time.monotonic() + TEND_EVERY
                    self._store.flush()
            except Exception:  # this thread is the tier: one bad round must not end it
                logger.exception("offloading to SSD failed; going on")
                time.sleep(FIRST_PAUSE)

    def _next(self) -> list[str]:
        """The next pages to write, at most a batch; none after a moment without any."""
        with self._changed:
            if not self._queue and not self._stop:
                self._changed.wait(LOOK_EVERY)
        if not self._queue and self._on_evict:
            self._look_ahead()
        with self._changed:
            chosen: list[str] = []
            size = 0
            for key, length in self._queue.items():
                if chosen and size + length > self._batch_bytes:
                    break
                chosen.append(key)
                size += length
            for key in chosen:
                del self._queue[key]
            self._unpublished.update(chosen)
        return chosen

    def _look_ahead(self) -> None:
        """Have the coldest pages written before they have to go."""
        excess = self._dram.used - self._watermark
        if excess > 0:
            coldest = self._dram.coldest(excess)
            held = self._store.contains([page.key for page in coldest])
            self._enqueue([page for page, here in zip(coldest, held, strict=True) if not here])

    def _offload(self, keys: Sequence[str]) -> None:
        pages = self._dram.hold(keys)
        try:
            self._write([page for page in pages if page is not None])
            gone = pages.count(None)
            if gone:
                self._counters.add(ssd_offload_late=gone)
        finally:
            self._dram.unpin(pages)
            with self._changed:
                self._unpublished.difference_update(keys)

    def _write(self, pages: Sequence[Page]) -> None:
        if not pages:
            return
        writes = [StoreWrite(page.key, page.size, page.checksum, page.extents) for page in pages]
        results = self._store.write(writes, time.monotonic() + WRITE_WITHIN)
        done = [
            (page, result)
            for page, result in zip(pages, results, strict=True)
            if result.outcome in (Outcome.OK, Outcome.HELD)
        ]
        if done:
            self._published([page.key for page, _ in done], [page.size for page, _ in done])
        fresh = [page for page, result in done if result.outcome is Outcome.OK]
        self._counters.add(
            ssd_offloaded=len(fresh),
            ssd_offloaded_bytes=sum(page.size for page in fresh),
            ssd_offload_failed=len(pages) - len(done),
        )
        self._judge(results)

    def _judge(self, results: Sequence[Result]) -> None:
        """Leave a disk alone that takes nothing, and say so; once it takes something again, say that too."""
        bad = [result for result in results if result.outcome in (Outcome.FULL, Outcome.FAILED, Outcome.TIMEOUT)]
        if not bad:
            if self._trouble:
                logger.warning("SSD %s: pages are written again", self._store.config.path)
            self._trouble, self._pause = "", 0.0
            return
        first = bad[0]
        reason = f"{first.outcome.name.lower()}"
        if first.errno:
            reason += f", {errno.errorcode.get(first.errno, first.errno)} ({os.strerror(first.errno)})"
        self._pause = min(LONGEST_PAUSE, 2 * self._pause or FIRST_PAUSE)
        self._resume_at = time.monotonic() + self._pause
        if not self._trouble:
            logger.error(
                "SSD %s: pages cannot be written (%s): what is there is served, new pages stay in DRAM only; "
                "it is tried again",
                self._store.config.path,
                reason,
            )
        self._trouble = reason

    def stop(self, drain_within: float) -> None:
        """Write what still waits, for up to ``drain_within`` seconds, and end."""
        deadline = time.monotonic() + drain_within
        if self._thread.is_alive():
            while (self._queue or self._unpublished) and not self._trouble and time.monotonic() < deadline:
                time.sleep(0.01)
        self._stop = True
        with self._changed:
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout=WRITE_WITHIN + 5)
