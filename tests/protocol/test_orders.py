"""Orders and answers as bytes: what is encoded is decoded, and anything else is refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_mooncake.errors import ProtocolError
from hicache_mooncake.protocol import orders as o

ORDERS: list[o.Order] = [
    o.Pin(["a"], ["b"], hard=True),
    o.Pin(["a"], ttl=5.0),
    o.Unpin(["a"]),
    o.Evict(size=7),
    o.Describe(["a"]),
    o.Verify(1 << 40),
    o.Progress("verify"),
    o.Cancel("verify"),
]
ANSWERS: list[o.Answer] = [
    o.Handled(1, 2, 3, b"\0\1"),
    o.Described([o.Replica("k", 4096, "soft", True, 2, 1.5, 10.0)]),
    o.Job("verify", "done", 1, 2, 3, ["k"]),
    o.Declined("no"),
]


@pytest.mark.parametrize("order", ORDERS)
def test_orders_come_back(order: o.Order) -> None:
    assert o.decode_order(o.encode(order)) == order


@pytest.mark.parametrize("answer", ANSWERS)
def test_answers_come_back(answer: o.Answer) -> None:
    assert o.decode_answer(o.encode(answer)) == answer


@given(st.binary(max_size=200))
def test_anything_else_is_refused(body: bytes) -> None:
    for decode in (o.decode_order, o.decode_answer):
        try:
            decode(body)
        except ProtocolError:
            continue
        assert msgspec.msgpack.decode(body)  # hypothesis has found an order


def test_the_number_of_pages_is_bounded() -> None:
    assert o.decode_order(o.encode(o.Unpin(["h"] * o.PAGES_AT_ONCE)))
    with pytest.raises(ProtocolError, match="at most"):
        o.decode_order(o.encode(o.Unpin(["h"] * (o.PAGES_AT_ONCE + 1))))


def test_the_longest_order_and_answer_fit_into_their_frames() -> None:
    order = o.Unpin([f"{number:064x}" for number in range(o.PAGES_AT_ONCE)], ["0" * 16] * o.PAGES_AT_ONCE)
    assert len(o.encode(order)) < o.MAX_ORDER
    key = f"{'0' * 16}:{'0' * 64}:tp00.pp00"
    replicas = [o.Replica(key, 1 << 30, "none", False, 0, 123456.123, 0.0)] * (16 * o.PAGES_AT_ONCE)
    assert len(o.encode(o.Described(replicas))) < o.MAX_ANSWER
