"""Long orders: each runs in a thread of the owner, one of a kind at a time, and is asked how far it is."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from hicache_mooncake.protocol.orders import Job

logger = logging.getLogger(__name__)

STOP_WITHIN = 5.0
"""Seconds a job has to notice that the node stops."""


class Running:
    """What a job writes its progress into, and looks at to see whether it is to end."""

    def __init__(self, kind: str) -> None:
        self.report = Job(kind, "running")
        self.cancelled = threading.Event()


class Jobs:
    """Thread-safe. The last job of a kind is remembered until the next one begins."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[str, Running] = {}
        self._threads: dict[str, threading.Thread] = {}

    def begin(self, kind: str, work: Callable[[Running], None]) -> Job:
        """Start ``work``, or say how far the one under way is."""
        with self._lock:
            thread = self._threads.get(kind)
            if thread is not None and thread.is_alive():
                return self._jobs[kind].report
            job = self._jobs[kind] = Running(kind)
            thread = threading.Thread(target=self._run, args=(job, work), name=f"hcm-{kind}", daemon=True)
            self._threads[kind] = thread
            thread.start()
        return job.report

    def _run(self, job: Running, work: Callable[[Running], None]) -> None:
        state, error = "failed", ""
        try:
            work(job)
            state = "cancelled" if job.cancelled.is_set() else "done"
        except Exception as failure:
            logger.exception("job %s failed", job.report.kind)
            error = str(failure)
        job.report.error = error
        job.report.state = state  # last: who sees it sees the rest

    def progress(self, kind: str) -> Job:
        """How far the job is, or how it ended."""
        with self._lock:
            job = self._jobs.get(kind)
        return job.report if job is not None else Job(kind)

    def cancel(self, kind: str) -> Job:
        """Have the job end at its next step."""
        with self._lock:
            job = self._jobs.get(kind)
        if job is not None:
            job.cancelled.set()
        return self.progress(kind)

    def close(self) -> None:
        """Cancel everything and wait for it."""
        with self._lock:
            jobs, threads = list(self._jobs.values()), list(self._threads.values())
        for job in jobs:
            job.cancelled.set()
        for thread in threads:
            thread.join(timeout=STOP_WITHIN)
