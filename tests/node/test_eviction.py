"""Who goes when a segment is full: classes, groups, readers and amounts, against a plain model and case by case."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from hicache_mooncake import memory
from hicache_mooncake.allocator import GRANULE, ExtentAllocator
from hicache_mooncake.memory import checksum
from hicache_mooncake.node.index import EXTRA_COLD_AFTER, Page, Protection
from hicache_mooncake.node.store import EVICTION_BATCH, HARD_SHARE, DramStore

DIGEST = "0" * 16
SEGMENT = 64 * GRANULE
WATERMARK = 0.9


def key(page: str, part: str = "all") -> str:
    return f"{DIGEST}:{page}:{part}"


def put(store: DramStore, keys: Sequence[str], size: int = GRANULE, *, extra: bool = False) -> list[bool]:
    """Store pages as a writer does; which found room."""
    spans = store.reserve([size] * len(keys))
    pages = []
    for name, reserved in zip(keys, spans, strict=True):
        if reserved is not None:
            extents = store.extents(reserved)
            for extent in extents:
                extent.view[:] = name.encode()[-1:] * extent.length
            pages.append(Page(name, size, checksum(name, extents), reserved, extents, extra=extra))
    store.commit(pages)
    return [reserved is not None for reserved in spans]


def protect(store: DramStore, pages: Sequence[str], protection: Protection, ttl: float = 60.0) -> None:
    found = [page for group in store.find(pages) for page in group]
    assert found
    store.protect(found, protection, ttl)


@dataclass
class Known:
    """What the model knows of an object. ``exact``: its place in the order of use is that of ``used``."""

    footprint: int
    used: float
    protection: Protection = Protection.NONE
    extra: bool = False
    ttl: float = 0.0
    until: float = 0.0
    exact: bool = True


class EvictionMachine(RuleBasedStateMachine):
    """Any order of puts, reads, pins, copies and time passing; every eviction is looked at when it happens."""

    pins = Bundle("pins")
    pages = st.sampled_from("abcdefghijkl")
    parts = st.sampled_from(["tp0", "tp1"])
    sizes = st.integers(2 * GRANULE, 8 * GRANULE)

    def __init__(self) -> None:
        super().__init__()
        self.segment = memory.create("test-segment", SEGMENT)
        self.now = 1000.0
        self.elsewhere = True
        self.model: dict[str, Known] = {}
        self.read: list[Page] = []
        self.gone: list[str] = []
        self.store = DramStore(
            self.segment,
            high_watermark=WATERMARK,
            forget_in_directory=self.gone_from_directory,
            held_elsewhere=self.held_elsewhere,
            clock=lambda: self.now,
        )

    def gone_from_directory(self, keys: Sequence[str]) -> None:
        self.gone += keys

    def held_elsewhere(self, keys: Sequence[str]) -> list[bool]:
        if not self.elsewhere:
            for name in keys:
                for member in self.group(name):
                    self.model[member].extra = self.model[member].exact = False
        return [self.elsewhere] * len(keys)

    def teardown(self) -> None:
        self.segment.close()

    # -- the model

    def group(self, name: str) -> list[str]:
        head = name.rpartition(":")[0]
        return [other for other in self.model if other.rpartition(":")[0] == head]

    def groups(self) -> list[list[str]]:
        return list({tuple(sorted(self.group(name))): self.group(name) for name in self.model}.values())

    def is_read(self, group: Sequence[str]) -> bool:
        return any(page.key in group and not page.forgotten for page in self.read)

    def youngest(self, group: Sequence[str]) -> float:
        return max(self.model[name].used for name in group)

    def expire(self) -> None:
        for group in self.groups():
            known = [self.model[name] for name in group]
            if known[0].protection is Protection.SOFT and max(one.until for one in known) <= self.now:
                for one in known:
                    one.protection, one.exact = Protection.NONE, False

    def use(self, name: str) -> None:
        known = self.model[name]
        known.used, known.until, known.exact = self.now, self.now + known.ttl, True

    def judge_eviction(self, needed: int, rounds: int = 1) -> None:
        """What went just now, by the rules; ``needed`` bytes were wanted, in so many rounds."""
        self.expire()
        gone, self.gone = set(self.gone), []
        if not gone:
            return
        evictable: list[list[str]] = []
        for group in self.groups():
            hard = self.model[group[0]].protection is Protection.HARD
            assert gone.isdisjoint(group) or gone.issuperset(group), "part of a group went"
            if hard or self.is_read(group):
                assert gone.isdisjoint(group), "a protected page went"
                for name in group if not hard else ():
                    self.model[name].exact = False  # passed over, which makes it younger
            else:
                evictable.append(group)
        left = [group for group in evictable if group[0] not in gone]
        went = [group for group in evictable if group[0] in gone]

        def of(groups: list[list[str]], protection: Protection, *, extra: bool | None = None) -> list[list[str]]:
            firsts = [(group, self.model[group[0]]) for group in groups]
            return [g for g, one in firsts if one.protection is protection and extra in (None, one.extra)]

        if of(went, Protection.SOFT):
            assert not of(left, Protection.NONE), "a soft-pinned page went before an unpinned one"
        if of(went, Protection.NONE, extra=False):
            copies = [g for g in of(left, Protection.NONE, extra=True) if all(self.model[n].exact for n in g)]
            cold = [g for g in copies if self.now - self.youngest(g) >= EXTRA_COLD_AFTER]
            assert not cold, "a page went before a cold copy"
        for protection in (Protection.NONE, Protection.SOFT):
            for extra in (False, True):
                ours = [of(some, protection, extra=extra) for some in (went, left)]
                used = [[self.youngest(g) for g in some if all(self.model[n].exact for n in g)] for some in ours]
                if used[0] and used[1]:
                    assert max(used[0]) <= min(used[1]), "a younger page went before an older one"
        sizes = sorted(sum(self.model[name].footprint for name in group) for group in went)
        assert sum(sizes[:-rounds]) < needed, "more went than had to"
        for name in gone:
            del self.model[name]

    # -- what happens

    @rule(names=st.lists(st.tuples(pages, parts), min_size=4, max_size=12), size=sizes, extra=st.sampled_from("nnx"))
    def put(self, names: list[tuple[str, str]], size: int, extra: str) -> None:
        for number, (page, part) in enumerate(names):
            self.put_one(key(page, part), size + number % 3 * GRANULE, extra == "x")

    def put_one(self, name: str, size: int, extra: bool) -> None:
        self.now += 1
        footprint = ExtentAllocator.footprint(size)
        leaving = sum({id(page): page.footprint for page in self.read if page.forgotten}.values())
        excess = self.store.used - leaving + footprint - int(SEGMENT * WATERMARK)
        (spans,) = self.store.reserve([size])
        # A second round is for memory that is still read, or lies in holes too small.
        self.judge_eviction(max(excess, 0) + footprint, rounds=2)
        if spans is None:
            return
        extents = self.store.extents(spans)
        (fresh,) = self.store.commit([Page(name, size, checksum(name, extents), spans, extents, extra=extra)])
        assert fresh == (name not in self.model)
        if not fresh:
            return
        others = self.group(name)
        self.model[name] = Known(footprint, self.now, extra=extra)
        if others:
            first = self.model[others[0]]
            together = extra and first.extra
            for member in [name, *others]:
                one = self.model[member]
                if one.extra != together:
                    one.extra, one.exact = together, one.exact and member == name
                if first.protection is not Protection.NONE:
                    one.protection, one.ttl, one.until = first.protection, first.ttl, self.now + first.ttl

    @rule(target=pins, names=st.lists(st.builds(key, pages, parts), min_size=1, max_size=3, unique=True))
    def pin(self, names: list[str]) -> list[Page | None]:
        self.now += 1
        self.expire()
        found = self.store.pin(names)
        for name, page in zip(names, found, strict=True):
            assert (page is not None) == (name in self.model)
            if page is not None:
                self.use(name)
                self.read.append(page)
        return found

    @rule(held=consumes(pins))
    def unpin(self, held: list[Page | None]) -> None:
        for page in held:
            if page is not None:
                assert checksum(page.key, page.extents) == page.checksum
                self.read.remove(page)
        self.store.unpin(held)

    @rule(names=st.lists(st.builds(key, pages, parts), min_size=1, max_size=4))
    def ask(self, names: list[str]) -> None:
        self.now += 1
        self.expire()
        assert self.store.contains(names) == [name in self.model for name in names]
        for name in names:
            if name in self.model:
                self.use(name)

    @rule(page=pages, protection=st.sampled_from(Protection), ttl=st.sampled_from([5.0, 100.0]))
    def protect(self, page: str, protection: Protection, ttl: float) -> None:
        (found,) = self.store.find([page])
        self.expire()
        group = self.group(key(page))
        assert {one.key for one in found} == set(group)
        hard = sum(known.footprint for known in self.model.values() if known.protection is Protection.HARD)
        new = sum(self.model[n].footprint for n in group if self.model[n].protection is not Protection.HARD)
        fits = protection is not Protection.HARD or hard + new <= HARD_SHARE * SEGMENT
        handled = self.store.protect(found, protection, ttl)
        assert (handled.objects, handled.left) == ((len(group), 0) if fits else (0, len(group)))
        if fits:
            ttl = ttl if protection is Protection.SOFT else 0.0
            for name in group:
                one = self.model[name]
                one.protection, one.ttl, one.until, one.exact = protection, ttl, self.now + ttl, False

    @rule(name=st.builds(key, pages, parts))
    def drop(self, name: str) -> None:
        self.expire()
        (page,) = self.store.pin([name])
        if page is not None:
            self.store.drop(page)
            self.store.unpin([page])
            for member in self.group(name):
                self.model[member].exact = False  # it may have been as young as the one that went
            del self.model[name]
            self.gone = []

    @rule(footprint=st.integers(1, SEGMENT))
    def evict_bytes(self, footprint: int) -> None:
        self.store.evict_bytes(footprint)
        self.judge_eviction(footprint)

    @rule(seconds=st.sampled_from([0.1, 1.0, 10.0, 40.0]), elsewhere=st.booleans())
    def pass_time(self, seconds: float, elsewhere: bool) -> None:
        self.now += seconds
        self.elsewhere = elsewhere

    @invariant()
    def accounts_are_exact(self) -> None:
        self.expire()
        states = {state.key: state for state in self.store.states(self.store.snapshot())}
        assert set(states) == set(self.model)
        for name, state in states.items():
            assert state.protection is self.model[name].protection
        still_read = {id(page): page.footprint for page in self.read if page.forgotten}
        assert self.store.used == sum(known.footprint for known in self.model.values()) + sum(still_read.values())
        assert self.store.pins == len(self.read)
        facts = self.store.facts()
        for name, protection in (("hard", Protection.HARD), ("soft", Protection.SOFT)):
            expected = sum(known.footprint for known in self.model.values() if known.protection is protection)
            assert facts[f"{name}_pinned_bytes"] == expected


# Not shrunk: a failing run of this machine is small already, and shrinking it takes minutes.
EvictionMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate)
)
TestEvictionMachine = EvictionMachine.TestCase


# -- case by case


@pytest.fixture
def clock() -> list[float]:
    return [1000.0]


def store_of(pages: int, clock: list[float], *, watermark: float = 1.0, elsewhere: bool = True) -> DramStore:
    return DramStore(
        memory.create("test-segment", pages * GRANULE),
        high_watermark=watermark,
        forget_in_directory=lambda keys: None,
        held_elsewhere=lambda keys: [elsewhere] * len(keys),
        clock=lambda: clock[0],
    )


def held(store: DramStore, names: Sequence[str]) -> list[str]:
    """Those of ``names`` that are here, without touching them."""
    return [name for name, found in zip(names, store.find(names), strict=True) if found]


def names(tag: str, count: int) -> list[str]:
    return [f"{tag}{number}" for number in range(count)]


def test_extra_copies_go_first_soft_pins_last_and_hard_pins_never(clock: list[float]) -> None:
    store = store_of(64, clock)
    hard, soft, plain, copies = names("h", 16), names("s", 16), names("p", 16), names("x", 16)
    for group in (hard, soft, plain):
        put(store, [key(name) for name in group])
    put(store, [key(name) for name in copies], extra=True)
    protect(store, hard, Protection.HARD)
    protect(store, soft, Protection.SOFT, ttl=1000.0)
    clock[0] += EXTRA_COLD_AFTER
    assert put(store, [key(name) for name in names("n", 16)]) == [True] * 16
    assert [held(store, group) for group in (hard, soft, plain, copies)] == [hard, soft, plain, []]
    assert put(store, [key(name) for name in names("m", 32)]) == [True] * 32
    assert [held(store, group) for group in (hard, soft, plain)] == [hard, soft, []]
    assert put(store, [key(name) for name in names("o", 40)]) == [True] * 40
    assert [held(store, group) for group in (hard, soft)] == [hard, soft[8:]]
    assert put(store, [key(name) for name in names("q", 64)]).count(True) == 48
    assert held(store, hard) == hard
    facts = store.facts()
    assert (facts["evicted_extra"], facts["evicted_soft"], facts["hard_pinned_bytes"]) == (16, 16, 16 * GRANULE)


def test_a_copy_that_nobody_else_holds_any_more_is_a_page_like_any_other(clock: list[float]) -> None:
    store = store_of(64, clock, elsewhere=False)
    put(store, [key(name) for name in names("p", 32)])
    put(store, [key(name) for name in names("x", 32)], extra=True)
    clock[0] += EXTRA_COLD_AFTER
    put(store, [key(name) for name in names("n", 16)])
    assert held(store, names("x", 32)) == names("x", 32)
    assert store.facts()["evicted_extra"] == 0


def test_a_copy_that_is_read_is_no_colder_than_others(clock: list[float]) -> None:
    store = store_of(64, clock)
    put(store, [key(name) for name in names("x", 32)], extra=True)
    clock[0] += EXTRA_COLD_AFTER
    put(store, [key(name) for name in names("p", 32)])
    clock[0] += 1
    assert all(store.contains([key(name) for name in names("x", 32)]))
    put(store, [key(name) for name in names("n", 32)])
    assert held(store, names("x", 32)) == names("x", 32)


def test_the_parts_of_a_page_go_together_and_one_reader_keeps_them_all(clock: list[float]) -> None:
    store = store_of(64, clock)
    parts = ["tp0", "tp1", "tp2", "tp3"]
    for name in names("p", 16):
        put(store, [key(name, part) for part in parts])
    clock[0] += 1
    assert store.contains([key("p0", "tp3")]) == [True]  # the youngest part says how young the page is
    reader = store.pin([key("p1", "tp2")])
    put(store, [key("new")])
    assert held(store, ["p0", "p1", "p2"]) == ["p0", "p1"] and store.used == 61 * GRANULE
    put(store, [key(name) for name in names("n", 55)])
    assert held(store, ["p0", "p1", "p2"]) == ["p0", "p1"]
    assert len(store.find(["p0"])[0]) == len(store.find(["p1"])[0]) == 4
    store.unpin(reader)


def test_a_pin_is_for_all_parts_also_for_one_that_comes_later(clock: list[float]) -> None:
    store = store_of(64, clock)
    put(store, [key("p", "tp0"), key("p", "tp1")])
    store.protect(store.find(["p"])[0][:1], Protection.HARD)
    put(store, [key("p", "tp2")])
    assert {state.protection for state in store.states(store.find(["p"])[0])} == {Protection.HARD}
    put(store, [key(name) for name in names("n", 200)])
    assert len(store.find(["p"])[0]) == 3
    store.protect(store.find(["p"])[0][2:], Protection.NONE)
    put(store, [key(name) for name in names("m", 64)])
    assert held(store, ["p"]) == []


def test_a_soft_pin_lasts_as_long_as_the_page_is_used(clock: list[float]) -> None:
    store = store_of(64, clock)
    put(store, [key("used"), key("idle")])
    protect(store, ["used", "idle"], Protection.SOFT, ttl=60.0)
    for _ in range(4):
        clock[0] += 30
        assert store.contains([key("used")]) == [True]
    used, idle = (store.states(store.find([name])[0])[0] for name in ("used", "idle"))
    assert (used.protection, used.pin_left) == (Protection.SOFT, 60.0)
    assert (idle.protection, idle.pin_left) == (Protection.NONE, 0.0)
    put(store, [key(name) for name in names("n", 63)])
    assert held(store, ["used", "idle"]) == ["used"]
    clock[0] += 60
    put(store, [key("last")])
    assert held(store, ["used"]) == []


def test_pinning_again_and_again_leaves_nothing_behind(clock: list[float]) -> None:
    store = store_of(64, clock)
    put(store, [key(name) for name in names("p", 8)])
    for _ in range(200):
        protect(store, names("p", 8), Protection.SOFT)
        protect(store, names("p", 8), Protection.NONE)
    protect(store, names("p", 8), Protection.SOFT)
    assert len(store._index._expiries) <= 64 + 2 * 8


def test_no_more_than_its_share_can_be_pinned_hard(clock: list[float]) -> None:
    store = store_of(64, clock)
    put(store, [key(name) for name in names("p", 64)])
    handled = store.protect([page for found in store.find(names("p", 64)) for page in found], Protection.HARD)
    assert handled == (64 * HARD_SHARE, 64 * HARD_SHARE * GRANULE, 64 * (1 - HARD_SHARE))
    assert put(store, [key(name) for name in names("n", 32)]) == [True] * 32


def test_a_large_segment_evicts_a_batch_but_no_soft_pin_for_it(clock: list[float]) -> None:
    pages = 20 * EVICTION_BATCH
    store = store_of(pages, clock)
    put(store, [key(name) for name in names("p", pages)])
    put(store, [key("new")])
    assert store.evicted == EVICTION_BATCH
    protect(store, names("p", pages)[EVICTION_BATCH:], Protection.SOFT)
    put(store, [key(name) for name in names("n", EVICTION_BATCH - 1)])
    assert store.evicted == EVICTION_BATCH
    put(store, [key("plain")])
    assert store.evicted == 2 * EVICTION_BATCH  # the plain ones that there were
    put(store, [key(name) for name in names("m", EVICTION_BATCH + 3)])
    assert store.facts()["evicted_soft"] == 3


def test_writers_at_once_evict_no_more_than_one_after_the_other_would() -> None:
    pages, writers, batches, size = 512, 8, 40, 8
    leave = threading.Event()

    def slow(keys: Sequence[str]) -> None:
        leave.wait(0.002)  # a round trip to Redis, for which the memory stays taken

    segment = memory.create("test-segment", pages * GRANULE)
    store = DramStore(segment, high_watermark=WATERMARK, forget_in_directory=slow)
    stored: list[bool] = []

    def write(writer: int) -> None:
        for batch in range(batches):
            stored.extend(put(store, [key(f"{writer}-{batch}-{number}") for number in range(size)]))

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(stored) and len(stored) == writers * batches * size
    room = int(pages * WATERMARK)
    assert room - size * writers <= len(store) <= room
    assert store.evicted == len(stored) - len(store)


def test_a_pool_that_is_polled_all_the_time_still_takes_what_is_new() -> None:
    pages = 512
    store = DramStore(
        memory.create("test-segment", pages * GRANULE), high_watermark=WATERMARK, forget_in_directory=lambda keys: None
    )
    put(store, [key(name) for name in names("p", pages)])
    everything = [key(name) for name in names("p", pages)]
    stop = threading.Event()
    polls = [0]

    def poll() -> None:
        while not stop.wait(0.001):
            store.contains(everything)
            polls[0] += 1

    poller = threading.Thread(target=poll)
    poller.start()
    try:
        until = time.monotonic() + 1.0
        batches = 0
        while time.monotonic() < until:
            assert all(put(store, [key(f"{batches}-{number}") for number in range(16)]))
            batches += 1
            time.sleep(0.002)
    finally:
        stop.set()
        poller.join()
    assert polls[0] > 100 and store.pins == 0
    assert held(store, names("p", pages))  # and what is asked for outlives what is not


def test_what_would_go_next_is_told_and_may_be_held_without_becoming_younger(clock: list[float]) -> None:
    store = store_of(64, clock)
    put(store, [key(name) for name in names("p", 64)])
    first = [page.key for page in store.coldest(8 * GRANULE)]
    assert first == [key(name) for name in names("p", 8)]
    held_pages = store.hold([*first, key("absent")])
    assert held_pages[-1] is None
    assert [page.key for page in store.coldest(GRANULE)] == [key("p8")]
    store.unpin(held_pages)
    put(store, [key(name) for name in names("n", 8)])
    assert held(store, names("p", 9)) == ["p8"]
