"""A node's store against a plain model: pinned memory is never reused, nothing leaks, the coldest page goes first."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from hicache_mooncake import memory
from hicache_mooncake.allocator import GRANULE, ExtentAllocator
from hicache_mooncake.memory import checksum
from hicache_mooncake.node.index import Page
from hicache_mooncake.node.store import DramStore

SEGMENT = 64 * GRANULE


class StoreMachine(RuleBasedStateMachine):
    """Puts, reads and removals in any order; the model is key -> bytes, and the bytes of whoever reads."""

    pins = Bundle("pins")

    def __init__(self) -> None:
        super().__init__()
        self.segment = memory.create("test-segment", SEGMENT)
        self.forgotten: list[str] = []
        self.store = DramStore(self.segment, high_watermark=0.9, forget_in_directory=self.forgotten.extend)
        self.content: dict[str, bytes] = {}
        self.generation = 0
        self.pinned: list[Page] = []

    def put(self, key: str, size: int) -> None:
        (spans,) = self.store.reserve([size])
        if spans is None:
            return
        self.generation += 1
        content = self.generation.to_bytes(4, "little") * (size // 4 + 1)
        extents = self.store.extents(spans)
        position = 0
        for extent in extents:
            extent.view[:] = content[position : position + extent.length]
            position += extent.length
        (fresh,) = self.store.commit([Page(key, size, checksum(key, extents), spans, extents)])
        assert fresh != (key in self.content and key not in self.forgotten)
        if fresh:
            self.content[key] = content[:size]
            self.forgotten = [other for other in self.forgotten if other != key]
            self.store._forget_in_directory = self.forgotten.extend

    @rule(key=st.sampled_from("abcdefghijkl"), size=st.integers(1, 12 * GRANULE))
    def put_one(self, key: str, size: int) -> None:
        self.put(key, size)

    @rule(target=pins, keys=st.lists(st.sampled_from("abcdefghijkl"), min_size=1, max_size=3))
    def pin(self, keys: list[str]) -> tuple[list[Page | None], list[bytes]]:
        pages = self.store.pin(keys)
        for key, page in zip(keys, pages, strict=True):
            assert (page is not None) == (key in self.content and key not in self.forgotten)
        self.pinned += [page for page in pages if page is not None]
        return pages, [self.content.get(key, b"") for key in keys]

    @rule(held=consumes(pins))
    def read_and_unpin(self, held: tuple[list[Page | None], list[bytes]]) -> None:
        pages, contents = held
        self.check(pages, contents)
        self.store.unpin(pages)
        for page in pages:
            if page is not None:
                self.pinned.remove(page)

    @staticmethod
    def check(pages: Sequence[Page | None], contents: Sequence[bytes]) -> None:
        for page, content in zip(pages, contents, strict=True):
            if page is not None:
                assert b"".join(bytes(extent.view) for extent in page.extents) == content
                assert checksum(page.key, page.extents) == page.checksum

    @rule(key=st.sampled_from("abcdefghijkl"))
    def drop(self, key: str) -> None:
        (page,) = self.store.pin([key])
        if page is not None:
            self.store.drop(page)
            self.store.unpin([page])
            assert not self.store.contains([key])[0]

    @invariant()
    def accounts_are_exact(self) -> None:
        live = {key for key in self.content if key not in self.forgotten}
        assert set(self.store.keys()) == live
        held = {id(page): page.size for page in self.pinned if page.forgotten}
        expected = sum(ExtentAllocator.footprint(len(self.content[key])) for key in live)
        expected += sum(ExtentAllocator.footprint(size) for size in held.values())
        assert self.store.used == expected
        assert self.store.pins == len(self.pinned)

    def teardown(self) -> None:
        self.segment.close()


StoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestStoreMachine = StoreMachine.TestCase


@pytest.fixture
def store() -> DramStore:
    return DramStore(memory.create("test-segment", SEGMENT), high_watermark=1.0, forget_in_directory=lambda keys: None)


def fill(store: DramStore, keys: Sequence[str]) -> None:
    for key, spans in zip(keys, store.reserve([GRANULE] * len(keys)), strict=True):
        assert spans is not None
        extents = store.extents(spans)
        store.commit([Page(key, GRANULE, checksum(key, extents), spans, extents)])


def test_the_least_recently_used_page_goes_first(store: DramStore) -> None:
    names = [f"k{number}" for number in range(64)]
    fill(store, names)
    assert all(store.contains(names[:8]))  # a hit query keeps them young
    store.unpin(store.pin(names[8:12]))  # and so does a read
    fill(store, [f"n{number}" for number in range(20)])
    assert all(store.contains(names[:12]))
    assert not any(store.contains(names[12:32]))


def test_pages_being_read_are_never_evicted(store: DramStore) -> None:
    names = [f"k{number}" for number in range(64)]
    fill(store, names)
    pinned = store.pin(names[:60])
    assert store.reserve([8 * GRANULE]) == [None]
    assert all(store.contains(names[:60])) and not any(store.contains(names[60:]))
    store.unpin(pinned)
    assert store.reserve([8 * GRANULE]) != [None]


def test_a_forgotten_page_keeps_its_memory_until_its_last_reader(store: DramStore) -> None:
    fill(store, ["a"])
    first, second = store.pin(["a"]), store.pin(["a"])
    page = first[0]
    assert page is not None
    store.drop(page)
    assert store.contains(["a"]) == [False] and store.used == GRANULE
    store.unpin(first)
    assert store.used == GRANULE
    store.unpin(second)
    assert store.used == 0
