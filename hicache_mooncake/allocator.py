"""Which bytes of a segment, a file or a device are free. Pure arithmetic: nothing is touched here."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import NamedTuple

GRANULE = 4096
"""Allocation unit in bytes: one system page, so that every extent suits O_DIRECT and memory registration."""

MAX_SPANS = 16
"""Most pieces one page may be cut into: half of the scatter/gather entries the smallest common NIC takes (30)."""


class Span(NamedTuple):
    """``length`` bytes of a segment from ``offset`` on."""

    offset: int
    length: int


class ExtentAllocator:
    """Best fit with immediate coalescing; a page is cut into several spans when no hole is large enough.

    Fragmentation is bounded by the cutting: an allocation of ``size`` bytes fails only when fewer than ``size`` bytes
    (rounded up to the granule) are free, or the 16 largest holes together are smaller. Sizes may be mixed freely.
    Every operation costs O(log distinct hole sizes). Not thread-safe: the owner's lock is held around it.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity // GRANULE * GRANULE
        self.free_bytes = 0
        self._length_at: dict[int, int] = {}  # hole start -> length
        self._start_before: dict[int, int] = {}  # hole end -> start
        self._holes: dict[int, dict[int, None]] = {}  # length -> starts, an ordered set
        self._lengths: list[int] = []  # distinct lengths, sorted
        self._allocated: dict[int, int] = {}  # span start -> footprint: a double free must never pass
        if self.capacity:
            self._add_hole(0, self.capacity)

    @classmethod
    def holding(cls, capacity: int, spans: Iterable[tuple[int, int]]) -> ExtentAllocator:
        """One in which these spans are taken already: sorted by offset, granular, without overlap, within capacity."""
        allocator = cls(0)
        allocator.capacity = capacity // GRANULE * GRANULE
        at = 0
        for offset, length in spans:
            taken = cls.footprint(length)
            allocator._allocated[offset] = taken
            if offset > at:
                allocator._add_hole(at, offset - at)
            at = offset + taken
        if at < allocator.capacity:
            allocator._add_hole(at, allocator.capacity - at)
        return allocator

    @property
    def used_bytes(self) -> int:
        return self.capacity - self.free_bytes

    @staticmethod
    def footprint(size: int) -> int:
        """Bytes that an object of ``size`` bytes really takes."""
        return -(-size // GRANULE) * GRANULE

    def allocate(self, size: int) -> tuple[Span, ...] | None:
        """Spans whose lengths add up to exactly ``size`` bytes, or None when that much cannot be had.

        All but the last span are whole granules; the rest of the last one's granule stays unused.
        """
        if size <= 0:
            raise ValueError(f"cannot allocate {size} bytes")
        wanted = self.footprint(size)
        if wanted > self.free_bytes:
            return None
        position = bisect_left(self._lengths, wanted)
        if position < len(self._lengths):
            return (Span(self._take(self._lengths[position], wanted), size),)
        return self._gather(size, wanted)

    def _gather(self, size: int, wanted: int) -> tuple[Span, ...] | None:
        reachable = pieces = 0
        for length in reversed(self._lengths):
            count = len(self._holes[length])
            reachable += length * min(count, MAX_SPANS - pieces)
            pieces += count
            if reachable >= wanted or pieces >= MAX_SPANS:
                break
        if reachable < wanted:
            return None
        spans: list[Span] = []
        left = wanted
        while left:
            length = self._lengths[-1]
            if length > left:  # the last piece: the best fit, not the largest hole
                length = self._lengths[bisect_left(self._lengths, left)]
            taken = min(length, left)
            spans.append(Span(self._take(length, taken), taken))
            left -= taken
        spans[-1] = Span(spans[-1].offset, spans[-1].length - (wanted - size))
        return tuple(spans)

    def free(self, spans: tuple[Span, ...]) -> None:
        """Give back what :meth:`allocate` returned. Raises ``ValueError`` if any of it is free already."""
        for offset, length in spans:
            self._release(offset, self.footprint(length))

    def _release(self, start: int, length: int) -> None:
        end = start + length
        if self._allocated.get(start) != length:
            raise ValueError(f"bytes {start}..{end} of the segment are not allocated")
        del self._allocated[start]
        before = self._start_before.get(start)
        if before is not None:
            self._remove_hole(before, start - before)
            start = before
        after = self._length_at.get(end)
        if after is not None:
            self._remove_hole(end, after)
            end += after
        self._add_hole(start, end - start)

    def _take(self, hole_length: int, wanted: int) -> int:
        start = next(reversed(self._holes[hole_length]))
        self._remove_hole(start, hole_length)
        if hole_length > wanted:
            self._add_hole(start + wanted, hole_length - wanted)
        self._allocated[start] = wanted
        return start

    def _add_hole(self, start: int, length: int) -> None:
        self._length_at[start] = length
        self._start_before[start + length] = start
        starts = self._holes.get(length)
        if starts is None:
            self._holes[length] = {start: None}
            insort(self._lengths, length)
        else:
            starts[start] = None
        self.free_bytes += length

    def _remove_hole(self, start: int, length: int) -> None:
        del self._length_at[start]
        del self._start_before[start + length]
        starts = self._holes[length]
        del starts[start]
        if not starts:
            del self._holes[length]
            del self._lengths[bisect_left(self._lengths, length)]
        self.free_bytes -= length

    def holes(self) -> list[Span]:
        """Every hole by offset: for reports and tests."""
        return [Span(start, self._length_at[start]) for start in sorted(self._length_at)]
