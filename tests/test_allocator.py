"""The extent allocator against a plain model: no overlap, no leak, bounded fragmentation, mixed page sizes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hicache_mooncake.allocator import GRANULE, MAX_SPANS, ExtentAllocator, Span

CAPACITY = 256 * GRANULE


class AllocatorMachine(RuleBasedStateMachine):
    """Random allocations and frees; the model is a set of granule numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = ExtentAllocator(CAPACITY)
        self.live: list[tuple[int, tuple[Span, ...]]] = []
        self.used: set[int] = set()

    @staticmethod
    def granules(spans: tuple[Span, ...]) -> set[int]:
        out: set[int] = set()
        for offset, length in spans:
            assert offset % GRANULE == 0
            pieces = set(range(offset // GRANULE, (offset + length + GRANULE - 1) // GRANULE))
            assert not out & pieces
            out |= pieces
        return out

    @rule(size=st.one_of(st.integers(1, 3 * GRANULE), st.integers(1, 40).map(lambda n: n * GRANULE)))
    def allocate(self, size: int) -> None:
        holes = sorted((hole.length for hole in self.allocator.holes()), reverse=True)
        spans = self.allocator.allocate(size)
        if spans is None:
            assert sum(holes[:MAX_SPANS]) < ExtentAllocator.footprint(size)
            return
        assert sum(span.length for span in spans) == size
        assert len(spans) <= MAX_SPANS
        assert all(span.length % GRANULE == 0 for span in spans[:-1])
        taken = self.granules(spans)
        assert not taken & self.used
        assert max(taken) < CAPACITY // GRANULE
        self.used |= taken
        self.live.append((size, spans))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        _, spans = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.allocator.free(spans)
        self.used -= self.granules(spans)

    @invariant()
    def accounts_are_exact(self) -> None:
        assert self.allocator.used_bytes == len(self.used) * GRANULE
        assert sum(hole.length for hole in self.allocator.holes()) == self.allocator.free_bytes

    @invariant()
    def neighbours_are_merged(self) -> None:
        holes = self.allocator.holes()
        assert all(a.offset + a.length < b.offset for a, b in itertools.pairwise(holes))

    def teardown(self) -> None:
        for _, spans in self.live:
            self.allocator.free(spans)
        assert self.allocator.holes() == [Span(0, CAPACITY)]


AllocatorMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=80, deadline=None)
TestAllocatorMachine = AllocatorMachine.TestCase


def test_a_large_page_fits_between_small_survivors() -> None:
    allocator = ExtentAllocator(64 * GRANULE)
    small = [allocator.allocate(GRANULE) for _ in range(64)]
    for spans in small[::2]:
        assert spans is not None
        allocator.free(spans)
    large = allocator.allocate(10 * GRANULE)
    assert large is not None and len(large) == 10


@given(st.integers(1, 20 * GRANULE))
@settings(deadline=None)
def test_freeing_twice_is_refused(size: int) -> None:
    allocator = ExtentAllocator(CAPACITY)
    spans = allocator.allocate(size)
    assert spans is not None
    allocator.free(spans)
    with pytest.raises(ValueError, match="not allocated"):
        allocator.free(spans)


def test_nothing_fits_in_an_empty_segment_and_zero_is_refused() -> None:
    allocator = ExtentAllocator(GRANULE - 1)
    assert allocator.capacity == 0
    assert allocator.allocate(1) is None
    with pytest.raises(ValueError, match="0 bytes"):
        allocator.allocate(0)
