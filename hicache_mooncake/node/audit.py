"""Goes through what this node holds, round after round, and finds what Redis does not say of it.

Redis loses entries without losing itself: a ``maxmemory-policy`` that evicts, an operator's DEL, a write that a failing
master had acknowledged. Such a page would lie here for nothing until it is evicted: others store it again, and a put
here finds it in the index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hicache_mooncake.metadata.records import ObjectRecord

BATCH = 512
"""Pages looked up in one step, which is one heartbeat: a short MGET. 100,000 pages take some three minutes."""


class Audit:
    """One round after the other over ``held``, which gives the keys of all pages. Used by one thread."""

    def __init__(
        self,
        held: Callable[[], Sequence[str]],
        lookup: Callable[[Sequence[str]], Sequence[ObjectRecord | None]],
        holder: str,
    ) -> None:
        self._held = held
        self._lookup = lookup
        self._holder = holder
        self._left: list[str] = []

    def step(self) -> list[str]:
        """Of the next pages those that Redis does not name ``holder`` for. Raises ``Unavailable``."""
        if not self._left:
            self._left = list(self._held())
        batch = self._left[-BATCH:]
        del self._left[-BATCH:]
        if not batch:
            return []
        return [
            key
            for key, record in zip(batch, self._lookup(batch), strict=True)
            if record is None or self._holder not in record.holders
        ]
