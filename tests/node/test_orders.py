"""Orders at the owner: jobs run one of a kind, are bounded in bandwidth and end when they are told to."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from hicache_mooncake import memory
from hicache_mooncake.allocator import GRANULE
from hicache_mooncake.node.counters import Counters
from hicache_mooncake.node.orders import OrderDesk
from hicache_mooncake.node.store import DramStore
from hicache_mooncake.protocol import orders as o
from tests.node.test_eviction import held, key, names, put
from tests.pool import eventually

SIZE = 256 * GRANULE


@pytest.fixture
def store() -> DramStore:
    segment = memory.create("test-segment", 64 * SIZE)
    store = DramStore(segment, high_watermark=1.0, forget_in_directory=lambda keys: None)
    put(store, [key(name) for name in names("p", 64)], SIZE)
    return store


@pytest.fixture
def desk(store: DramStore) -> Iterator[OrderDesk]:
    desk = OrderDesk(store, Counters(), pin_ttl=60.0)
    yield desk
    desk.close()


def ask(desk: OrderDesk, order: o.Order) -> o.Answer:
    return o.decode_answer(desk.carry_out(o.encode(order)))


def job(desk: OrderDesk, order: o.Order) -> o.Job:
    answer = ask(desk, order)
    assert isinstance(answer, o.Job)
    return answer


def test_a_verification_is_one_at_a_time_bounded_and_can_be_cancelled(desk: OrderDesk) -> None:
    assert job(desk, o.Progress("verify")).state == "none"
    started = time.monotonic()
    job(desk, o.Verify(32 * SIZE))  # two seconds for all
    assert job(desk, o.Verify(1 << 40)).state == "running"  # the one under way
    eventually(lambda: job(desk, o.Progress("verify")).done >= 16 * SIZE)
    assert time.monotonic() - started > 0.2
    assert job(desk, o.Progress("verify")).total == 64 * SIZE
    job(desk, o.Cancel("verify"))
    eventually(lambda: job(desk, o.Progress("verify")).state == "cancelled")
    assert job(desk, o.Progress("verify")).done < 64 * SIZE
    job(desk, o.Verify(1 << 40))
    eventually(lambda: job(desk, o.Progress("verify")).state == "done")
    assert job(desk, o.Progress("verify")).objects == 64


def test_a_node_that_stops_does_not_wait_for_a_verification(store: DramStore) -> None:
    desk = OrderDesk(store, Counters(), pin_ttl=60.0)
    job(desk, o.Verify(SIZE))  # a minute
    started = time.monotonic()
    desk.close()
    assert time.monotonic() - started < 5.0 and store.pins == 0


def test_a_verification_makes_no_page_younger(desk: OrderDesk, store: DramStore) -> None:
    job(desk, o.Verify(1 << 40))
    eventually(lambda: job(desk, o.Progress("verify")).state == "done")
    put(store, [key(name) for name in names("n", 8)], SIZE)
    assert held(store, names("p", 64)) == names("p", 64)[8:]


def test_what_is_not_understood_is_declined(desk: OrderDesk) -> None:
    assert isinstance(o.decode_answer(desk.carry_out(b"nonsense")), o.Declined)
    del desk._carriers[o.Evict]
    assert ask(desk, o.Evict(size=1)) == o.Declined("no Evict is known here")
