"""What a node counts. Names are stable: metrics, the CLI and tests read them.

Every object asked for by a ``get`` ends in exactly one of ``get_local``, ``get_remote`` or a ``get_<cause>`` with a
status' name, so ``get_asked`` is their sum; likewise ``put_asked`` for puts.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping

from hicache_mooncake.protocol.messages import Status


class Counters:
    """Thread-safe sums, by name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: Counter[str] = Counter()

    def add(self, **amounts: int) -> None:
        """Add to several counters at once."""
        with self._lock:
            self._values.update(amounts)

    def add_statuses(self, verb: str, statuses: Iterable[int], *, ok_as: Mapping[str, int]) -> None:
        """Count how a batch ended: failures by cause, and ``ok_as`` says how the successes divide."""
        with self._lock:
            by_status = Counter(statuses)
            self._values[f"{verb}_asked"] += sum(by_status.values())
            for status, count in by_status.items():
                if status != Status.OK:
                    self._values[f"{verb}_{Status(status).name.lower()}"] += count
            for name, count in ok_as.items():
                self._values[f"{verb}_{name}"] += count

    def snapshot(self) -> dict[str, float]:
        """A copy of all values."""
        with self._lock:
            return dict(self._values)
