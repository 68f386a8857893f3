"""The handshake, both ends in memory: whole, byte by byte, and with everything that can be wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_mooncake.errors import ProtocolError, Unavailable
from hicache_mooncake.transfer import handshake
from hicache_mooncake.transfer.base import Credentials
from hicache_mooncake.transfer.handshake import ListenerHandshake, ReaderHandshake, Refusal, refusal_frame
from hicache_mooncake.transfer.wire import HEADER_SIZE, Kind, encode_frame

NODE = "alpha~0000abcd"
PROVEN = Credentials(b"correct horse", "prod")


def run(reader: ReaderHandshake, listener: ListenerHandshake, step: int = 10_000) -> None:
    """Carry bytes both ways, ``step`` at a time, until neither has anything left to say."""
    to_listener, to_reader = reader.begin(), b""
    while to_listener or to_reader:
        answer = b""
        for start in range(0, len(to_listener), step):
            answer += listener.feed(to_listener[start : start + step])
        to_listener, to_reader = b"", to_reader + answer
        answer = b""
        for start in range(0, len(to_reader), step):
            answer += reader.feed(to_reader[start : start + step])
        to_reader, to_listener = b"", answer


@pytest.mark.parametrize("step", [1, 2, 7, 12, 10_000])
@pytest.mark.parametrize("credentials", [PROVEN, Credentials()])
def test_both_sides_agree_however_the_bytes_are_cut(credentials: Credentials, step: int) -> None:
    reader, listener = ReaderHandshake(credentials, NODE), ListenerHandshake(credentials, NODE)
    run(reader, listener, step)
    assert reader.done
    assert listener.done
    assert reader.wanted == listener.wanted == 0
    assert reader.version == handshake.HIGHEST_VERSION


@pytest.mark.parametrize(
    ("theirs", "node", "why"),
    [
        (Credentials(b"wrong", "prod"), NODE, "secret"),
        (Credentials(b"", "prod"), NODE, "secret"),
        (Credentials(b"correct horse", "test"), NODE, "another pool"),
        (PROVEN, "alpha~0000abce", "another node"),
    ],
)
def test_what_differs_is_told_to_both(theirs: Credentials, node: str, why: str) -> None:
    reader, listener = ReaderHandshake(PROVEN, NODE), ListenerHandshake(theirs, node)
    run(reader, listener)
    assert not reader.done
    assert not listener.done
    assert isinstance(reader.error, ProtocolError)
    assert isinstance(listener.error, ProtocolError)
    assert why in str(reader.error)


def test_an_empty_secret_is_refused_by_a_listener_that_has_one() -> None:
    reader, listener = ReaderHandshake(Credentials(b"", "prod"), NODE), ListenerHandshake(PROVEN, NODE)
    run(reader, listener)
    assert "secret" in str(reader.error)
    assert not listener.done


def test_a_listener_without_the_secret_cannot_pretend() -> None:
    """A process on a dead node's port that skips its own checks still fails the reader's."""
    reader, listener = ReaderHandshake(PROVEN, NODE), ListenerHandshake(Credentials(b"x", "prod"), NODE)
    proof = reader.feed(listener.feed(reader.begin()))
    assert proof
    forged = encode_frame(Kind.WELCOME, b"\0" * 32)
    assert reader.feed(forged) == b""
    assert not reader.done
    assert "secret" in str(reader.error)


def test_a_proof_is_not_accepted_back_or_again() -> None:
    reader, listener = ReaderHandshake(PROVEN, NODE), ListenerHandshake(PROVEN, NODE)
    hello = reader.begin()
    proof = reader.feed(listener.feed(hello))
    replayed = ListenerHandshake(PROVEN, NODE)
    replayed.feed(hello)
    replayed.feed(proof)
    assert not replayed.done, "another connection has another nonce"
    reflected = encode_frame(Kind.WELCOME, proof[HEADER_SIZE:])
    reader.feed(reflected)
    assert not reader.done, "a reader's proof is not a listener's"


def test_a_full_listener_is_unavailable_and_not_at_fault() -> None:
    reader = ReaderHandshake(PROVEN, NODE)
    reader.begin()
    assert reader.feed(refusal_frame(Refusal.BUSY)) == b""
    assert isinstance(reader.error, Unavailable)


def test_versions_without_overlap_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "LOWEST_VERSION", 7)
    monkeypatch.setattr(handshake, "HIGHEST_VERSION", 9)
    hello = ReaderHandshake(PROVEN, NODE)
    monkeypatch.undo()
    listener = ListenerHandshake(PROVEN, NODE)
    assert hello.feed(listener.feed(hello.begin())) == b""
    assert "version" in str(hello.error)
    assert "7 to 9" in str(listener.error)


def test_the_highest_common_version_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HIGHEST_VERSION", 9)
    reader = ReaderHandshake(PROVEN, NODE)
    monkeypatch.undo()
    run(reader, ListenerHandshake(PROVEN, NODE))
    assert reader.version == handshake.HIGHEST_VERSION


def test_bytes_after_the_end_undo_the_agreement() -> None:
    reader, listener = ReaderHandshake(PROVEN, NODE), ListenerHandshake(PROVEN, NODE)
    run(reader, listener)
    reader.feed(b"x")
    assert not reader.done
    assert reader.error


def test_an_endless_hello_is_cut_at_its_header() -> None:
    listener = ListenerHandshake(PROVEN, NODE)
    header = encode_frame(Kind.HELLO, b"x" * 70_000)[:HEADER_SIZE]
    assert listener.feed(header)[HEADER_SIZE:] == bytes([Refusal.MALFORMED])
    assert "limit" in str(listener.error)


@given(st.binary(max_size=2000), st.integers(1, 64))
def test_noise_never_convinces_either_side(noise: bytes, step: int) -> None:
    listener, reader = ListenerHandshake(PROVEN, NODE), ReaderHandshake(PROVEN, NODE)
    for side in (listener, reader):
        for start in range(0, len(noise), step):
            if side.error:
                break
            side.feed(noise[start : start + step])
            assert len(side._buffer) <= handshake.MAX_FRAME_BYTES + HEADER_SIZE
        assert not side.done


@given(st.data())
def test_one_damaged_byte_is_enough(data: st.DataObject) -> None:
    reader, listener = ReaderHandshake(PROVEN, NODE), ListenerHandshake(PROVEN, NODE)
    frames = [reader.begin()]
    frames.append(listener.feed(frames[0]))
    victim = data.draw(st.sampled_from([0, 1, 2, 3]))
    reader, listener = ReaderHandshake(PROVEN, NODE), ListenerHandshake(PROVEN, NODE)
    message, sides = reader.begin(), [listener, reader]
    for turn in range(4):
        if turn == victim:
            damaged = bytearray(message)
            position = data.draw(st.integers(0, len(damaged) - 1))
            # The padding in a frame header carries nothing; the transcript covers it all the same.
            damaged[position] ^= data.draw(st.integers(1, 255))
            message = bytes(damaged)
        message = sides[turn % 2].feed(message)
        if not message:
            break
    last = reader if victim == 3 else listener
    if not (victim == 3 and position in (5, 6, 7)):
        assert not last.done or not reader.done


@pytest.mark.parametrize("name", ["", "n" * 256])
def test_names_have_a_limit(name: str) -> None:
    with pytest.raises(ValueError):
        ReaderHandshake(PROVEN, name)
    with pytest.raises(ValueError):
        ListenerHandshake(Credentials(b"", name), NODE)


def test_the_secret_is_not_in_the_repr() -> None:
    assert "horse" not in repr(PROVEN)
