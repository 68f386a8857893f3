"""Reading pages from the SSD into memory of the node: a bounded number of threads, each with its own ring.

Pages never go from the disk straight into an engine's memory, however well aligned. An engine may end a request at any
moment by its fence, at worst by killing this process; a device that holds on to a request would still write into the
page after both. So the bytes land in memory that only the node uses, and are copied from there in the very pass that
verifies them. What is late is left alone: its thread gives the memory back when the device has let go of it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from hicache_mooncake.allocator import Span
from hicache_mooncake.memory import Extent
from hicache_mooncake.node.staging import Staging
from hicache_mooncake.ssd.base import Entry, Outcome, Result, SsdStore, StoreRead

logger = logging.getLogger(__name__)

READERS = 4
"""Threads that read: enough to overlap reading, verifying and copying; each keeps a whole queue busy."""

JOB_BYTES = 16 << 20
"""Bytes that one thread reads at a time: large enough for a full queue, small enough that copying begins early."""


WAITING_LIMIT = 256
"""Jobs that wait or are being read, at most: some GiB, seconds of any disk that does not hang."""


@dataclass(slots=True)
class Place:
    """Where the bytes of one page go. ``release`` gives the memory back, unless somebody has taken it over."""

    extents: Sequence[Extent]
    release: Callable[[], None]


@dataclass(slots=True)
class Job:
    """Some pages of a batch, read together. ``indices`` are those of the batch; ``places`` has no hole once read."""

    indices: Sequence[int]
    entries: Sequence[Entry]
    places: list[Place] = field(default_factory=list)
    results: Sequence[Result] = ()

    def release(self) -> None:
        """Give back what nobody has taken over."""
        for place in self.places:
            place.release()
        self.places = []


Placing = Callable[[Entry], Place | None]
"""A better place than staging memory for a page, if there is one."""


def _staged(entry: Entry) -> Place | None:
    return None


class Loading:
    """One batch on its way. Iterate over its jobs as they end, and close it, whatever happens."""

    def __init__(self, jobs: int, deadline: float) -> None:
        self._deadline = deadline
        self._left = jobs
        self._ended: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self.abandoned = False

    def __iter__(self) -> Iterator[Job]:
        """The jobs that end in time, in the order in which they do."""
        while self._left:
            try:
                job = self._ended.get(timeout=max(0.0, self._deadline - time.monotonic()))
            except queue.Empty:
                return
            self._left -= 1
            yield job

    def end(self, job: Job) -> None:
        """A reader is done with a job."""
        with self._lock:
            if not self.abandoned:
                self._ended.put(job)
                return
        job.release()

    def close(self) -> None:
        """What has not ended by now is left to its reader, which gives its memory back."""
        with self._lock:
            self.abandoned = True
        while True:
            try:
                self._ended.get_nowait().release()
            except queue.Empty:
                return


class SsdLoader:
    """Thread-safe. ``store`` and ``staging`` outlive it."""

    def __init__(self, store: SsdStore, staging: Staging) -> None:
        self._store = store
        self._staging = staging
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="hcm-ssd-read")
        self._job_bytes = max(1, min(JOB_BYTES, staging.size // (2 * READERS)))
        self._waiting = 0
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """Jobs that are being read or wait for their turn."""
        return self._waiting

    def load(self, entries: Sequence[Entry], deadline: float, placing: Placing = _staged) -> Loading:
        """Begin to read a batch. Nothing of it comes when too much waits already: a disk that hangs costs no memory."""
        jobs = list(self._jobs(entries))
        if self._waiting + len(jobs) > WAITING_LIMIT:
            return Loading(0, deadline)
        loading = Loading(len(jobs), deadline)
        for job in jobs:
            with self._lock:
                self._waiting += 1
            self._pool.submit(self._do, job, loading, deadline, placing)
        return loading

    def _jobs(self, entries: Sequence[Entry]) -> Iterator[Job]:
        start = size = 0
        for index, entry in enumerate(entries):
            if index > start and size + entry.size > self._job_bytes:
                yield Job(range(start, index), entries[start:index])
                start, size = index, 0
            size += entry.size
        if start < len(entries):
            yield Job(range(start, len(entries)), entries[start:])

    def _do(self, job: Job, loading: Loading, deadline: float, placing: Placing) -> None:
        try:
            if not loading.abandoned and time.monotonic() < deadline and self._place(job, deadline, placing):
                reads = [
                    StoreRead(entry.key, entry.size, place.extents)
                    for entry, place in zip(job.entries, job.places, strict=True)
                ]
                job.results = self._store.read(reads, deadline)
            else:
                job.results = [Result(Outcome.TIMEOUT)] * len(job.entries)
        except Exception:
            logger.exception("reading %d pages from SSD failed", len(job.entries))
            job.results = [Result(Outcome.FAILED)] * len(job.entries)
        finally:
            with self._lock:
                self._waiting -= 1
            loading.end(job)

    def _place(self, job: Job, deadline: float, placing: Placing) -> bool:
        places = [placing(entry) for entry in job.entries]
        staged = [at for at, place in enumerate(places) if place is None]
        taken = self._staging.take([job.entries[at].size for at in staged], deadline)
        if taken is not None:
            for at, spans in zip(staged, taken, strict=True):
                places[at] = self._staged_place(spans)
        job.places = [place for place in places if place is not None]
        return taken is not None

    def _staged_place(self, spans: tuple[Span, ...]) -> Place:
        return Place(self._staging.extents(spans), lambda: self._staging.give_back([spans]))

    def close(self) -> None:
        """Wait for the reads under way."""
        self._pool.shutdown(cancel_futures=False)
