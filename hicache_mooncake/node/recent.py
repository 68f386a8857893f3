"""Who held which page a moment ago: SGLang asks whether pages exist and fetches them right after."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

REMEMBER = 4.0
"""Seconds an answer is used at least; twice as long at most. Between SGLang's query and its fetch are milliseconds, or
seconds when fetches queue. An answer that is out of date costs one question to a node that says no."""

LIMIT = 32_768
"""Keys of one generation: two million tokens at page size 64, and some 8 MiB of memory."""


class RecentHolders:
    """Object key -> the nodes that held it. Thread-safe. Bounded in time and number by two generations."""

    def __init__(self, remember: float = REMEMBER, limit: int = LIMIT) -> None:
        self._remember = remember
        self._limit = limit
        self._lock = threading.Lock()
        self._young: dict[str, Sequence[str]] = {}
        self._old: dict[str, Sequence[str]] = {}
        self._turn_at = time.monotonic() + remember

    def note(self, keys: Sequence[str], holders: Sequence[Sequence[str]]) -> None:
        """Remember those that somebody holds."""
        with self._lock:
            self._turn()
            if len(keys) <= self._limit - len(self._young) and all(holders):
                self._young.update(zip(keys, holders, strict=True))
                return
            for key, nodes in zip(keys, holders, strict=True):
                if nodes and len(self._young) < self._limit:  # of a longer query its front: that is fetched first
                    self._young[key] = nodes

    def of(self, keys: Sequence[str]) -> list[Sequence[str]]:
        """Of each key the nodes that held it, or nobody where nothing is remembered. Each answer is given once."""
        with self._lock:
            self._turn()
            return [self._young.pop(key, ()) or self._old.pop(key, ()) for key in keys]

    def _turn(self) -> None:
        now = time.monotonic()
        if now >= self._turn_at or len(self._young) >= self._limit:
            # After a pause longer than two turns what is young is as stale as what is old.
            self._old = {} if now >= self._turn_at + self._remember else self._young
            self._young = {}
            self._turn_at = now + self._remember
