"""The SSD of a node as the rest of the node sees it: a second tier below the segment.

Put together here: the disk I/O, the store, offloading, loading and promotion. Redis has a word ``<node id>/ssd`` for
every object on it, beside ``<node id>/dram``.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hicache_mooncake.allocator import Span
from hicache_mooncake.config import Settings
from hicache_mooncake.errors import ConfigError, HiCacheMooncakeError
from hicache_mooncake.memory import Extent
from hicache_mooncake.metadata.records import SSD
from hicache_mooncake.node.copying import Copier
from hicache_mooncake.node.counters import Counters
from hicache_mooncake.node.directory_sync import DirectorySync
from hicache_mooncake.node.index import Page
from hicache_mooncake.node.moves import Move, Wanted
from hicache_mooncake.node.offload import Offloader
from hicache_mooncake.node.promotion import Promoter
from hicache_mooncake.node.ssd_loading import Job, Place, SsdLoader
from hicache_mooncake.node.staging import Staging
from hicache_mooncake.node.store import DramStore
from hicache_mooncake.protocol.messages import Status
from hicache_mooncake.ssd import io_probe, registry
from hicache_mooncake.ssd.base import Entry, Hooks, Outcome, SsdStore, StoreConfig
from hicache_mooncake.ssd.io_probe import Probed
from hicache_mooncake.transfer.base import PinnedPage

logger = logging.getLogger(__name__)

SHARE_OF_FREE = 0.9
"""Part of a file system's free bytes that the tier takes when no ``ssd_size`` is given."""

SERVE_WITHIN = 2.0
"""Seconds that pages for another node may take to be read; the reader's own deadline is not known here."""

LOCAL_SHARE = 0.75
"""Part of a request's time that the own SSD gets; the rest is for another replica, if there is one."""

OPEN_WITHIN = 10.0
"""Seconds a starting node waits to hear whether its directory can be used. What is in it is found while it serves."""

DRAIN_WITHIN = 2.0
"""Seconds that a stopping node spends on writing what was not offloaded yet."""

_STATUS = {
    Outcome.OK: Status.OK,
    Outcome.ABSENT: Status.ABSENT,
    Outcome.SIZE: Status.SIZE,
    Outcome.CORRUPT: Status.CORRUPT,
    Outcome.FAILED: Status.FAILED,
    Outcome.TIMEOUT: Status.TIMEOUT,
}


@dataclass(frozen=True, slots=True)
class StagedPage:
    """A page read from SSD for another node, until it was sent."""

    place: Place


class SsdTier:
    """Thread-safe. ``staging`` is memory of the node that is served to others like its segment."""

    def __init__(
        self,
        settings: Settings,
        node_id: str,
        dram: DramStore,
        staging: Extent,
        sync: DirectorySync,
        counters: Counters,
    ) -> None:
        """Probe the disk; nothing is read or published before :meth:`open`. Raises ``ConfigError``."""
        path = settings.ssd_path
        _make_directory(path)
        self._probed: Probed = io_probe.choose(
            path, wanted=settings.ssd_io, queue_depth=settings.ssd_queue_depth, fixed=[staging]
        )
        self._sync = sync
        self._counters = counters
        self._dram = dram
        try:
            config = StoreConfig(
                path=path,
                capacity=settings.ssd_size or _free_share(path),
                pool=settings.pool,
                node=node_id,
                high_watermark=settings.ssd_high_watermark,
                low_watermark=settings.ssd_low_watermark,
                eviction=settings.ssd_eviction,
                sync=settings.ssd_fsync,
            )
            self.store: SsdStore = registry.create(
                settings.ssd_store, config, self._probed.io, Hooks(forget=self._forgotten)
            )
        except BaseException:
            self._probed.io.close()
            raise
        self.staging = Staging(staging)
        self._loader = SsdLoader(self.store, self.staging)
        self._promoter = Promoter(
            dram, counters, threshold=settings.promotion_threshold, published=self._publish_promoted
        )
        self._offloader = Offloader(
            dram,
            self.store,
            counters,
            published=self._publish,
            eager=settings.offload == "eager",
            on_evict=settings.offload == "on_evict",
            queue_limit=settings.offload_queue,
            watermark=settings.offload_watermark,
            force_evict=settings.force_evict,
        )
        self._stopping = threading.Event()
        self._opened: threading.Thread | None = None

    # -- starting and ending

    def open(self) -> None:
        """Begin to find what is on the disk, and to offload once that is done. The pool has been joined before.

        Raises ``ConfigError`` or ``Unavailable`` when the directory cannot be used.
        """
        heard = threading.Event()
        failed: list[HiCacheMooncakeError] = []

        def recovered(entries: Sequence[Entry]) -> None:
            heard.set()
            self._publish([entry.key for entry in entries], [entry.size for entry in entries])

        def progress(done: int, total: int) -> None:
            heard.set()

        def run() -> None:
            try:
                found = self.store.open(recovered, progress, self._stopping.is_set)
            except HiCacheMooncakeError as error:
                failed.append(error)
                if heard.is_set():
                    logger.error("SSD %s cannot be used: %s", self.store.config.path, error)
            except Exception:
                logger.exception("SSD %s cannot be used", self.store.config.path)
            else:
                logger.info(
                    "SSD %s: %d objects (%d MiB) found in %.1f s%s",
                    self.store.config.path,
                    found.entries,
                    found.bytes >> 20,
                    found.seconds,
                    f", dropped: {found.dropped}" if found.dropped else "",
                )
                if not self._stopping.is_set():
                    self._offloader.start()
            finally:
                heard.set()

        self._opened = threading.Thread(target=run, name="hcm-ssd-open", daemon=True)
        self._opened.start()
        heard.wait(OPEN_WITHIN)
        if failed:
            raise failed[0]

    def close(self) -> None:
        """Offload what still waits, for a moment, and close the files. Nobody asks for pages any more."""
        self._stopping.set()
        if self._opened is not None:
            self._opened.join(timeout=60)
        self._offloader.stop(DRAIN_WITHIN)
        self.staging.close()
        self._loader.close()
        self._promoter.close()
        self.store.close()
        self._probed.io.close()

    # -- Redis

    def _publish(self, keys: Sequence[str], sizes: Sequence[int]) -> None:
        self._sync.publish(keys, sizes, tier=SSD)

    def _publish_promoted(self, pages: Sequence[Page]) -> None:
        self._sync.publish([page.key for page in pages], [page.size for page in pages])

    def _forgotten(self, keys: Sequence[str]) -> None:
        self._sync.forget(keys, tier=SSD)

    # -- what the segment asks

    def stored(self, pages: Sequence[Page]) -> None:
        """Pages have become visible in DRAM."""
        self._offloader.stored(pages)

    def may_leave(self, pages: Sequence[Page]) -> list[Page]:
        """Which of these pages DRAM may let go of now."""
        return self._offloader.may_leave(pages)

    # -- what is held

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Which objects are on the SSD."""
        return self.store.contains(keys)

    def sizes_of(self, keys: Sequence[str]) -> dict[str, int]:
        """Key -> size of those that are."""
        return {entry.key: entry.size for entry in self.store.find(keys) if entry is not None}

    def keys(self) -> list[str]:
        """Every key: a snapshot."""
        return [entry.key for batch in self.store.entries() for entry in batch]

    # -- reading

    def get(
        self,
        moves: Sequence[Move],
        positions: Sequence[int],
        statuses: bytearray,
        wanted: Wanted,
        deadline: float,
        copier: Copier,
    ) -> int:
        """Fetch those of ``positions`` that are on the SSD into place, and say in ``statuses`` what became of them.

        Returns how many are there. When this has returned, nothing writes into their pages any more.
        """
        found: list[Entry] = []
        at: list[int] = []
        for position, entry in zip(positions, self.store.find([moves[p].key for p in positions]), strict=True):
            if entry is None:
                continue
            if entry.size == moves[position].size:
                found.append(entry)
                at.append(position)
            else:
                statuses[position] = Status.SIZE
        if not found:
            return 0
        for position in at:
            statuses[position] = Status.TIMEOUT
        now = time.monotonic()
        until = now + (deadline - now) * LOCAL_SHARE
        promoted, placing = self._placing([entry.key for entry in found])
        loading = self._loader.load(found, until, placing)
        got = size = 0
        try:
            for job in loading:
                copied = self._copy(job, [moves[at[index]] for index in job.indices], wanted, deadline, copier)
                for index, status in zip(job.indices, copied, strict=True):
                    statuses[at[index]] = status
                    if status == Status.OK:
                        got += 1
                        size += found[index].size
                        if index_spans := promoted.pop(found[index].key, None):
                            self._take_over(job, index, found[index], index_spans)
                job.release()
                if not wanted():
                    break
        finally:
            loading.close()
        self._counters.add(get_ssd_local_bytes=size)
        return got

    def _placing(self, keys: Sequence[str]) -> tuple[dict[str, tuple[Span, ...]], Callable[[Entry], Place | None]]:
        """Where pages go that are read: into the segment, those that are to stay there."""
        admitted = self._promoter.admitted(keys)
        promoted: dict[str, tuple[Span, ...]] = {}

        def placing(entry: Entry) -> Place | None:
            if entry.key not in admitted:
                return None
            placed = self._promoter.place(entry)
            if placed is None:
                return None
            promoted[entry.key] = placed[1]
            return placed[0]

        return promoted, placing

    def _take_over(self, job: Job, index: int, entry: Entry, spans: tuple[Span, ...]) -> None:
        place = job.places[job.indices.index(index)]
        place.release = _nothing
        self._promoter.promote(entry, spans)

    def _copy(self, job: Job, moves: Sequence[Move], wanted: Wanted, deadline: float, copier: Copier) -> list[int]:
        """Copy what a job has read to where it is wanted; the status of each page."""
        statuses = [int(_STATUS.get(result.outcome, Status.FAILED)) for result in job.results]
        ready = [number for number, status in enumerate(statuses) if status == Status.OK]
        if ready:
            copied, digests = copier.run(
                [moves[number].key for number in ready],
                [moves[number].extents for number in ready],
                [job.places[number].extents for number in ready],
                sum([moves[number].size for number in ready]),
                wanted,
                deadline,
            )
            for number, status, digest in zip(ready, copied, digests, strict=True):
                whole = digest == job.entries[number].checksum
                statuses[number] = status if status != Status.OK or whole else int(Status.CORRUPT)
        self._counters.add(corrupt_dropped=statuses.count(Status.CORRUPT))
        return statuses

    def stage(self, keys: Sequence[str]) -> list[PinnedPage | None]:
        """Read pages for another node; each that is not None must go through :meth:`unstage`."""
        pages: list[PinnedPage | None] = [None] * len(keys)
        at = [number for number, here in enumerate(self.store.contains(keys)) if here]
        found = [(number, entry) for number, entry in zip(at, self.store.find([keys[n] for n in at]), strict=True)]
        numbers = [number for number, entry in found if entry is not None]
        entries = [entry for _, entry in found if entry is not None]
        if not entries:
            return pages
        deadline = time.monotonic() + SERVE_WITHIN
        self._promoter.admitted([entry.key for entry in entries])  # counted: whoever asks, it is asked for here
        loading = self._loader.load(entries, deadline)
        try:
            for job in loading:
                for index, entry, place, result in zip(job.indices, job.entries, job.places, job.results, strict=False):
                    if result.outcome is Outcome.OK:
                        pages[numbers[index]] = PinnedPage(entry.size, entry.checksum, place.extents, StagedPage(place))
                    else:
                        place.release()
        finally:
            loading.close()
        served = [page.size for page in pages if page is not None]
        self._counters.add(ssd_served_pages=len(served), ssd_served_bytes=sum(served))
        return pages

    @staticmethod
    def unstage(page: StagedPage) -> None:
        """A page that :meth:`stage` returned was sent, or is not wanted any more."""
        page.place.release()

    # -- removing

    def doubt(self, keys: Sequence[str]) -> int:
        """Read these pages and drop those whose bytes do not match their checksum; returns how many."""
        entries = [entry for entry in self.store.find(keys) if entry is not None]
        rotten = 0
        loading = self._loader.load(entries, time.monotonic() + SERVE_WITHIN)
        try:
            for job in loading:
                rotten += sum(result.outcome is Outcome.CORRUPT for result in job.results)
                job.release()
        finally:
            loading.close()
        return rotten

    def remove_where(self, matches: Callable[[str], bool]) -> int:
        """Remove every object whose key matches; returns how many."""
        removed = 0
        for batch in self.store.entries():
            removed += self.store.remove([entry.key for entry in batch if matches(entry.key)])
        return removed

    # -- looking

    def stats(self) -> dict[str, float]:
        """Gauges and counters by name."""
        usage = self.store.usage()
        return {
            "ssd_capacity_bytes": usage.capacity,
            "ssd_used_bytes": usage.used,
            "ssd_pages": usage.entries,
            "ssd_staging_used_bytes": self.staging.used,
            "ssd_offload_queue": self._offloader.waiting,
            "ssd_read_queue": self._loader.waiting,
            "ssd_degraded": float(bool(self._offloader.trouble)),
            "ssd_io_uring": float(self._probed.kind == "io_uring"),
            "ssd_direct": float(self._probed.direct),
            **{f"ssd_store_{name}": count for name, count in self.store.counters().items()},
        }


def _nothing() -> None:
    """The memory has another owner now."""


def _make_directory(path: str) -> None:
    try:
        if not os.path.exists(path):
            os.mkdir(path, 0o700)
    except OSError as error:
        raise ConfigError(
            "ssd_path", path, f"the directory cannot be made: {error.strerror}", hint="make it, writable for this user"
        ) from error


def _free_share(path: str) -> int:
    found = os.statvfs(path)
    return int(found.f_bavail * found.f_frsize * SHARE_OF_FREE)
