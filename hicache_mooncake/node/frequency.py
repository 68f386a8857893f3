"""How often a key was asked for lately, in a fixed amount of memory: a count-min sketch that forgets.

Cormode and Muthukrishnan, "An improved data stream summary: the count-min sketch and its applications" (2005); halved
now and then as in TinyLFU (Einziger, Friedman, Manes, 2017), so that what was hot last week does not count today.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import xxhash

ROWS = 4
WIDTH = 1 << 17
HALVE_AFTER = 1 << 14
"""Increments between two halvings. At an eighth of the width, one key in some thousand is overestimated by one."""


class Frequency:
    """Counts up to 255 a key; never too low since the last halving, rarely too high. Thread-safe."""

    def __init__(self, *, width: int = WIDTH, halve_after: int = HALVE_AFTER) -> None:
        """``width`` is a power of two of at most 65,536 times 65,536."""
        self._rows = np.zeros((ROWS, width), np.uint8)
        self._mask = np.uint64(width - 1)
        self._halve_after = halve_after
        self._added = 0
        self._lock = threading.Lock()

    def add(self, keys: Sequence[str]) -> list[int]:
        """Count each key once more; how often each was counted lately, this time included."""
        if not keys:
            return []
        places = self._places(keys)
        with self._lock:
            for row, place in zip(self._rows, places, strict=True):
                row[place] += row[place] < 255
            counts: list[int] = self._lowest(places)
            self._added += len(keys)
            if self._added >= self._halve_after:
                self._rows >>= 1
                self._added = 0
        return counts

    def _places(self, keys: Sequence[str]) -> list[np.ndarray[tuple[int], np.dtype[np.intp]]]:
        # Two hashes make as many as are needed: Kirsch and Mitzenmacher, "Less hashing, same performance" (2006).
        whole = np.array([xxhash.xxh3_128_intdigest(key.encode()) & ((1 << 64) - 1) for key in keys], np.uint64)
        first, second = whole & np.uint64(0xFFFFFFFF), (whole >> np.uint64(32)) | np.uint64(1)
        return [((first + np.uint64(row) * second) & self._mask).astype(np.intp) for row in range(ROWS)]

    def _lowest(self, places: Sequence[np.ndarray[tuple[int], np.dtype[np.intp]]]) -> list[int]:
        found = [row[place] for row, place in zip(self._rows, places, strict=True)]
        lowest: list[int] = np.minimum.reduce(found).tolist()
        return lowest
