"""Frames of the engine's protocol: what goes in comes out, and nothing else gets through."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_mooncake.errors import ProtocolError
from hicache_mooncake.protocol import messages as m

settings.register_profile("protocol", deadline=None)
settings.load_profile("protocol")

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
NUMBER = st.integers(0, 2**63 - 1)
KEYS = st.builds(m.Keys, TEXT, st.lists(TEXT, min_size=1, max_size=3), st.lists(TEXT, max_size=5))
REGION = st.builds(m.Region, NUMBER, st.integers(1, 2**63 - 1), NUMBER)


@st.composite
def pages(draw: st.DrawFn) -> m.Pages:
    keys = draw(KEYS)
    lengths = draw(st.lists(st.integers(1, 2**30), min_size=1, max_size=4))
    size = 8 * len(keys.parts) * len(keys.hashes) * len(lengths)
    return m.Pages(keys, lengths, draw(st.binary(min_size=size, max_size=size)))


OPENINGS = st.one_of(
    st.builds(m.Hello, NUMBER, TEXT, TEXT),
    st.builds(m.Join, NUMBER, st.binary(max_size=32), NUMBER),
)
REQUESTS = st.one_of(
    st.builds(m.Attach, st.lists(REGION, max_size=4), st.booleans()),
    st.builds(m.Stage, REGION),
    st.builds(
        m.Declare,
        st.dictionaries(TEXT, st.dictionaries(TEXT, TEXT, max_size=3), max_size=3),
        st.dictionaries(TEXT, st.integers(0, 1 << 20), max_size=3),
    ),
    st.builds(m.Exists, NUMBER, st.lists(KEYS, max_size=3), st.booleans(), st.booleans()),
    st.builds(m.Put, NUMBER, NUMBER, st.lists(pages(), max_size=2)),
    st.builds(m.Get, NUMBER, NUMBER, st.lists(pages(), max_size=2)),
    st.builds(m.Clear, NUMBER, st.lists(TEXT, max_size=3)),
    st.builds(m.Stats),
)
REPLIES = st.one_of(
    st.builds(m.Welcome, TEXT, st.binary(max_size=32), TEXT, TEXT),
    st.builds(m.Refused, TEXT),
    st.builds(m.Done),
    st.builds(m.Found, st.lists(st.binary(max_size=20), max_size=3)),
    st.builds(m.Moved, st.lists(st.binary(max_size=20), max_size=3)),
    st.builds(m.Cleared, NUMBER, st.lists(TEXT, max_size=3)),
    st.builds(m.Counters, st.dictionaries(TEXT, st.floats(allow_nan=False), max_size=5)),
)
DECODERS = [m.decode_opening, m.decode_request, m.decode_reply]


def body_of(message: m.Message) -> bytes:
    frame = m.encode(message)
    assert m.frame_length(frame[: m.FRAME.size]) == len(frame) - m.FRAME.size
    return frame[m.FRAME.size :]


@given(OPENINGS)
def test_openings_round_trip(message: m.Opening) -> None:
    assert m.decode_opening(body_of(message)) == message


@given(REQUESTS)
def test_requests_round_trip(message: m.Request) -> None:
    assert m.decode_request(body_of(message)) == message


@given(REPLIES)
def test_replies_round_trip(message: m.Reply) -> None:
    assert m.decode_reply(body_of(message)) == message


@given(st.one_of(OPENINGS, REQUESTS, REPLIES), st.data())
def test_a_truncated_body_is_refused(message: m.Message, data: st.DataObject) -> None:
    body = body_of(message)
    cut = body[: data.draw(st.integers(0, len(body) - 1))]
    for decode in DECODERS:
        with pytest.raises(ProtocolError):
            decode(cut)


@given(
    st.one_of(st.binary(max_size=200), st.recursive(st.none() | NUMBER | TEXT, st.lists).map(msgspec.msgpack.encode))
)
def test_garbage_is_refused(body: bytes) -> None:
    for decode in DECODERS:
        with pytest.raises(ProtocolError):
            decode(body)


@given(st.one_of(REQUESTS, REPLIES), st.data())
def test_a_damaged_body_is_refused_or_another_message(message: m.Message, data: st.DataObject) -> None:
    body = bytearray(body_of(message))
    at = data.draw(st.integers(0, len(body) - 1))
    body[at] ^= data.draw(st.integers(1, 255))
    for decode in DECODERS:
        try:
            decode(bytes(body))
        except ProtocolError:
            continue


@given(OPENINGS, REQUESTS, REPLIES)
def test_a_message_in_the_wrong_place_is_refused(opening: m.Opening, request: m.Request, reply: m.Reply) -> None:
    for decode, others in ((m.decode_opening, [request, reply]), (m.decode_request, [opening, reply])):
        for other in others:
            with pytest.raises(ProtocolError):
                decode(body_of(other))
    with pytest.raises(ProtocolError):
        m.decode_reply(body_of(request))


@pytest.mark.parametrize("kind", [m.Put, m.Get])
@pytest.mark.parametrize(
    "group",
    [
        m.Pages(m.Keys("ns", ["all"], ["a", "b"]), [10], bytes(8)),  # one address for two pages
        m.Pages(m.Keys("ns", ["all"], ["a"]), [10, 10], bytes(8)),  # one for two extents
        m.Pages(m.Keys("ns", ["k", "v"], ["a"]), [10], bytes(8)),  # one for two parts
        m.Pages(m.Keys("ns", ["all"], ["a"]), [10], bytes(9)),
        m.Pages(m.Keys("ns", ["all"], ["a"]), [10], b""),
        m.Pages(m.Keys("ns", ["all"], []), [10], bytes(8)),
        m.Pages(m.Keys("ns", [], ["a"]), [10], b""),
        m.Pages(m.Keys("ns", ["all"], ["a"]), [], b""),
        m.Pages(m.Keys("ns", ["all"], ["a"]), [0], bytes(8)),
        m.Pages(m.Keys("ns", ["all"], ["a"]), [-1], bytes(8)),
        m.Pages(m.Keys("ns", ["all"], ["a"]), [2**62, 2**62], bytes(16)),
    ],
)
def test_pages_whose_parts_do_not_agree_are_refused(kind: type[m.Put] | type[m.Get], group: m.Pages) -> None:
    with pytest.raises(ProtocolError):
        m.decode_request(body_of(kind(1, 1000, [group])))


@pytest.mark.parametrize(
    "region",
    [m.Region(0, 0, 0), m.Region(0, -4096, 0), m.Region(-1, 4096, 0), m.Region(0, 4096, -1), m.Region(2**63, 1, 0)],
)
def test_regions_that_no_memory_can_have_are_refused(region: m.Region) -> None:
    for request in (m.Stage(region), m.Attach([region])):
        with pytest.raises(ProtocolError):
            m.decode_request(body_of(request))


def test_an_existence_query_needs_parts() -> None:
    with pytest.raises(ProtocolError):
        m.decode_request(body_of(m.Exists(100, [m.Keys("ns", [], ["a"])])))


@pytest.mark.parametrize("length", [0, m.MAX_FRAME + 1, 2**32 - 1])
def test_lengths_that_no_frame_has_are_refused(length: int) -> None:
    with pytest.raises(ProtocolError):
        m.frame_length(m.FRAME.pack(length))


def test_a_message_longer_than_a_frame_is_refused_by_its_sender() -> None:
    with pytest.raises(ProtocolError, match="Found"):
        m.encode(m.Found([bytes(m.MAX_FRAME)]))
