"""Reads go before writes: somebody waits for a page that is read, nobody for one that is written."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

LONGEST_WAIT = 0.02
"""Seconds that one step of a write waits for reads at most: under endless reads writing slows down, and goes on."""


class ReadsFirst:
    """Thread-safe. Readers say that they read; writers ask before every step whether they may."""

    def __init__(self) -> None:
        self._readers = 0
        self._changed = threading.Condition()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A read is under way."""
        with self._changed:
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                if not self._readers:
                    self._changed.notify_all()

    def let_reads_pass(self, deadline: float) -> None:
        """Return when nobody reads, after :data:`LONGEST_WAIT`, or at ``deadline``, whichever is first."""
        if not self._readers:
            return
        with self._changed:
            patience = min(LONGEST_WAIT, deadline - time.monotonic())
            self._changed.wait_for(lambda: not self._readers, timeout=max(0.0, patience))
