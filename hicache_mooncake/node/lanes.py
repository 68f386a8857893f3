"""Threads that share the copying of a batch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

PARALLEL_FROM = 4 << 20
"""Bytes of a batch from which it is copied by several threads: below, handing over costs more than it brings."""

PARALLEL_PAGE = 128 << 10
"""Bytes of a page from which threads help each other: copies of smaller ones are so short that the threads mostly wait
for each other's interpreter lock, and two are slower than one."""


WORTH_A_THREAD = 2 << 20
"""Bytes that compiled code copies while a thread is woken, several times over."""


class CopyLanes:
    """``threads`` in all, the caller's own among them. Thread-safe."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._others = ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix="hcm-copy")

    def run(self, work: Callable[[int], None], count: int, size: int) -> None:
        """``work(0)`` .. ``work(count - 1)``, over threads when ``size`` bytes are worth it; ends when all have."""
        lanes = max(1, min(self._threads, count, size // PARALLEL_FROM)) if size >= count * PARALLEL_PAGE else 1

        def lane(first: int) -> None:
            for at in range(first, count, lanes):
                work(at)

        others = [self._others.submit(lane, first) for first in range(1, lanes)]
        try:
            lane(0)
        finally:
            wait(others)
        for future in others:
            future.result()

    def together(self, work: Callable[[], None], size: int) -> None:
        """``work()`` in as many threads as ``size`` bytes are worth; they divide it among themselves."""
        others = [self._others.submit(work) for _ in range(min(self._threads, size // WORTH_A_THREAD) - 1)]
        try:
            work()
        finally:
            wait(others)
        for future in others:
            future.result()

    def close(self) -> None:
        self._others.shutdown()
