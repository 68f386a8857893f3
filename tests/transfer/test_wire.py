"""Frames: what is encoded comes back, and whatever else arrives is a ProtocolError and nothing worse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hicache_mooncake.errors import ProtocolError
from hicache_mooncake.transfer import wire
from hicache_mooncake.transfer.base import Outcome

keys = st.text(st.characters(codec="utf-8"), min_size=1, max_size=120)
sizes = st.integers(1, wire.MAX_PAGE_BYTES)
u64 = st.integers(0, 2**64 - 1)


def payload_of(frame: bytes, kind: wire.Kind, limit: int = wire.MAX_REQUEST_BYTES) -> bytes:
    found, length = wire.decode_header(frame[: wire.HEADER_SIZE], [kind], limit)
    assert found is kind
    assert length == len(frame) - wire.HEADER_SIZE
    return frame[wire.HEADER_SIZE :]


@given(st.lists(st.tuples(keys, sizes), min_size=1, max_size=40), st.floats(0, 100))
def test_read_round_trip(pages: list[tuple[str, int]], budget: float) -> None:
    request = wire.ReadRequest([key for key, _ in pages], [size for _, size in pages], budget)
    decoded = wire.decode_read(payload_of(wire.encode_read(request), wire.Kind.READ))
    assert decoded.keys == request.keys
    assert decoded.sizes == request.sizes
    assert decoded.budget == pytest.approx(budget, abs=0.001)


def test_the_largest_request_fits_its_limit() -> None:
    request = wire.ReadRequest(["k" * wire.MAX_KEY_BYTES] * wire.MAX_PAGES, [wire.MAX_PAGE_BYTES] * wire.MAX_PAGES, 1.0)
    assert wire.decode_read(payload_of(wire.encode_read(request), wire.Kind.READ))[:2] == request[:2]
    digests = ["d" * 128] * wire.MAX_DIGESTS
    assert wire.decode_clear(payload_of(wire.encode_clear(digests), wire.Kind.CLEAR)) == digests


statuses = st.sampled_from([Outcome.OK, Outcome.ABSENT, Outcome.SIZE])


@given(st.lists(st.tuples(statuses, sizes, u64), max_size=40))
def test_pages_round_trip(rows: list[tuple[Outcome, int, int]]) -> None:
    sent = [wire.PageRow(*row) for row in rows]
    asked = [row.size + (row.status is Outcome.SIZE) for row in sent]
    frame = payload_of(wire.encode_pages(sent), wire.Kind.PAGES, wire.MAX_REPLY_BYTES)
    assert wire.decode_pages(frame, asked) == sent


@given(st.lists(keys, max_size=20), u64)
def test_clear_round_trip(digests: list[str], pages: int) -> None:
    digests = [digest[:30] for digest in digests]
    assert wire.decode_clear(payload_of(wire.encode_clear(digests), wire.Kind.CLEAR)) == digests
    assert wire.decode_doubt(payload_of(wire.encode_doubt(digests), wire.Kind.DOUBT)) == digests
    assert wire.decode_cleared(payload_of(wire.encode_cleared(pages), wire.Kind.CLEARED)) == pages


@given(st.lists(st.tuples(keys, st.integers(1, wire.MAX_PAGE_BYTES), u64), min_size=1, max_size=40), st.floats(0, 100))
def test_store_round_trip(rows: list[tuple[str, int, int]], budget: float) -> None:
    sent = wire.StoreRequest([row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows], budget)
    got = wire.decode_store(payload_of(wire.encode_store(sent), wire.Kind.STORE))
    assert got[:3] == sent[:3] and abs(got.budget - budget) < 0.001


@given(st.lists(st.sampled_from(list(wire.Acceptance)), max_size=50), st.lists(st.booleans(), max_size=50))
def test_answers_to_a_store_round_trip(answers: list[wire.Acceptance], kept: list[bool]) -> None:
    accepted = payload_of(wire.encode_accepted(answers), wire.Kind.ACCEPTED)
    assert wire.decode_accepted(accepted, len(answers)) == answers
    assert wire.decode_stored(payload_of(wire.encode_stored(kept), wire.Kind.STORED), len(kept)) == kept
    with pytest.raises(ProtocolError):
        wire.decode_accepted(accepted, len(answers) + 1)
    with pytest.raises(ProtocolError):
        wire.decode_stored(b"\x02", 1)


decoders: list[Callable[[bytes], object]] = [
    wire.decode_read,
    wire.decode_clear,
    wire.decode_doubt,
    wire.decode_store,
    lambda data: wire.decode_accepted(data, 3),
    lambda data: wire.decode_stored(data, 3),
    wire.decode_cleared,
    lambda data: wire.decode_pages(data, [4096] * 3),
]


@pytest.mark.parametrize("decode", decoders)
@given(data=st.binary(max_size=300))
@example(data=b"\xff" * 300)
@example(data=b"")
def test_noise_is_refused_or_means_something(decode: Callable[[bytes], object], data: bytes) -> None:
    try:
        decode(data)
    except ProtocolError as error:
        assert str(error)


@given(st.data())
def test_a_damaged_request_is_refused_or_another_request(data: st.DataObject) -> None:
    request = wire.ReadRequest(["0123:abc:all", "0123:abd:all"], [4096, 8192], 1.0)
    payload = bytearray(wire.encode_read(request)[wire.HEADER_SIZE :])
    position = data.draw(st.integers(0, len(payload) - 1))
    payload[position] = data.draw(st.integers(0, 255))
    del payload[data.draw(st.integers(0, len(payload))) :]
    payload += data.draw(st.binary(max_size=8))
    try:
        decoded = wire.decode_read(payload)
    except ProtocolError:
        return
    assert len(decoded.keys) == len(decoded.sizes) <= wire.MAX_PAGES
    assert all(0 < size <= wire.MAX_PAGE_BYTES for size in decoded.sizes)


@given(st.binary(max_size=20))
def test_a_header_is_refused_or_within_the_limit(data: bytes) -> None:
    try:
        kind, length = wire.decode_header(data, [wire.Kind.READ], 100)
    except ProtocolError:
        return
    assert kind is wire.Kind.READ
    assert length <= 100


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (b"GET / HTTP/1", "does not speak"),
        (wire.encode_frame(wire.Kind.CLEARED, b""), "out of turn"),
        (wire.encode_frame(wire.Kind.READ, b"x" * 101)[: wire.HEADER_SIZE], "over the limit"),
        (b"HCMT", "12 bytes"),
    ],
)
def test_headers_say_what_is_wrong(header: bytes, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        wire.decode_header(header, [wire.Kind.READ], 100)


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ((Outcome.OK, 4096, 1), 8192),
        ((Outcome.SIZE, 4096, 1), 4096),
        ((Outcome.CORRUPT, 4096, 1), 4096),
        ((Outcome.TIMEOUT, 4096, 1), 4096),
    ],
)
def test_a_reply_cannot_announce_what_was_not_asked(row: tuple[Outcome, int, int], asked: int) -> None:
    payload = payload_of(wire.encode_pages([wire.PageRow(*row)]), wire.Kind.PAGES)
    with pytest.raises(ProtocolError):
        wire.decode_pages(payload, [asked])


@pytest.mark.parametrize(
    "request_",
    [
        wire.ReadRequest([], [], 1.0),
        wire.ReadRequest(["k"] * (wire.MAX_PAGES + 1), [1] * (wire.MAX_PAGES + 1), 1.0),
        wire.ReadRequest(["k"], [0], 1.0),
        wire.ReadRequest(["k"], [wire.MAX_PAGE_BYTES + 1], 1.0),
        wire.ReadRequest([""], [1], 1.0),
        wire.ReadRequest(["k" * (wire.MAX_KEY_BYTES + 1)], [1], 1.0),
        wire.ReadRequest(["\ud800"], [1], 1.0),
    ],
)
def test_the_encoder_refuses_what_the_decoder_would(request_: wire.ReadRequest) -> None:
    with pytest.raises(ValueError):
        wire.encode_read(request_)
