"""What SGLang's metrics ask of a backend, collected cheaply: it is drained in every scheduler loop."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

GIB = 1 << 30

MAX_SAMPLES = 1000
"""Samples kept between two drains: a scheduler that does not ask must not make lists grow."""


class EngineStats:
    """Thread-safe. ``page_bytes`` is set when the KV pool is known."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._lock = threading.Lock()
        self._prefetch: list[tuple[int, float]] = []
        self._backup: list[tuple[int, float]] = []
        self._totals: Counter[str] = Counter()
        self.page_bytes = 0

    def asked(self, pages: int, hits: int) -> None:
        """An existence query for ``pages`` pages of which the first ``hits`` are stored."""
        with self._lock:
            self._totals.update(pages_asked=pages, pages_hit=hits)

    def moved(self, is_put: bool, pages: int, ok: int, seconds: float) -> None:
        """A batch of KV pages ended; ``ok`` of them as wanted."""
        self._count_pages("put" if is_put else "got", pages, ok)
        if self._enabled and ok:
            bandwidth = ok * self.page_bytes / GIB / max(seconds, 1e-9)
            with self._lock:
                samples = self._backup if is_put else self._prefetch
                if len(samples) < MAX_SAMPLES:
                    samples.append((ok, bandwidth))

    def moved_side(self, is_put: bool, pages: int, ok: int, seconds: float) -> None:
        """A batch of side-pool pages ended."""
        self._count_pages("side_put" if is_put else "side_got", pages, ok)

    def _count_pages(self, name: str, pages: int, ok: int) -> None:
        with self._lock:
            self._totals.update({f"pages_{name}": ok, f"pages_{name}_failed": pages - ok})

    def count(self, name: str) -> None:
        with self._lock:
            self._totals[name] += 1

    def totals(self) -> dict[str, float]:
        """Sums since the start, by name."""
        with self._lock:
            return {f"engine_{name}": value for name, value in self._totals.items()}

    def drain(self) -> Any:
        """SGLang's ``StorageMetrics`` of what happened since the last call; None when metrics are off."""
        if not self._enabled:
            return None
        with self._lock:
            prefetch, self._prefetch = self._prefetch, []
            backup, self._backup = self._backup, []
        metrics = _metrics_class()()
        metrics.prefetch_pgs.extend(pages for pages, _ in prefetch)
        metrics.prefetch_bandwidth.extend(bandwidth for _, bandwidth in prefetch)
        metrics.backup_pgs.extend(pages for pages, _ in backup)
        metrics.backup_bandwidth.extend(bandwidth for _, bandwidth in backup)
        return metrics


def _metrics_class() -> Any:
    try:
        from sglang.srt.observability.metrics_collector import StorageMetrics  # noqa: PLC0415
    except ImportError:  # where it was before SGLang 0.5.15
        from sglang.srt.metrics.collector import StorageMetrics  # noqa: PLC0415
    return StorageMetrics
