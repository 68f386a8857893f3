"""What every transport does, whatever it runs over."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache_mooncake.errors import ConfigError, ProtocolError, Unavailable
from hicache_mooncake.transfer import Credentials, Listener, Outcome, PageRead, PageWrite, Peer, Transport, transport
from hicache_mooncake.transfer.tcp import TcpTransport
from hicache_mooncake.transfer.tcp_client import ClientLimits

from .pages import KIB, MIB, NODE, Landing, Segment, arrived, content, joined

SECRET = Credentials(b"correct horse", "prod")
PATIENCE = 30.0
TRANSPORTS: dict[str, Callable[[], Transport]] = {
    "tcp": lambda: transport("tcp"),
    "tcp-two-lanes": lambda: TcpTransport(client=ClientLimits(lanes=2)),
    "rdma": lambda: rdma(strict=True, client=ClientLimits(lanes=2)),
    "rdma-one-device-in-pieces": lambda: rdma("rxe0", strict=True, largest_piece=1 * MIB),
}


def rdma(*args: Any, **kwargs: Any) -> Transport:
    from hicache_mooncake.transfer.rdma.transport import RdmaTransport

    return RdmaTransport(*args, **kwargs)


def soon(seconds: float = PATIENCE) -> float:
    return time.monotonic() + seconds


def settled(segment: Segment) -> bool:
    """Whether every pin is let go; the last ones go just after the reader has its bytes."""
    until = time.monotonic() + 5
    while segment.pinned and time.monotonic() < until:
        time.sleep(0.005)
    return segment.pinned == 0


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.rdma if "rdma" in name else ()) for name in TRANSPORTS])
def moved(request: pytest.FixtureRequest) -> Iterator[Transport]:
    with contextlib.closing(TRANSPORTS[request.param]()) as made:
        yield made


@pytest.fixture
def most(moved: Transport) -> int:
    """Bytes that a test may move: in the guest every page of memory that is touched costs 0.2 ms."""
    return 32 * MIB if moved.scheme == "rdma" else 160 * MIB


@pytest.fixture
def segment(most: int) -> Iterator[Segment]:
    made = Segment(most)
    yield made
    assert settled(made)
    made.close()


@pytest.fixture
def landing(most: int) -> Iterator[Landing]:
    made = Landing(most)
    yield made
    made.close()


@pytest.fixture
def listener(moved: Transport, segment: Segment) -> Iterator[Listener]:
    with moved.listen("127.0.0.1:0", "", segment, SECRET) as made:
        yield made


@pytest.fixture
def peer(moved: Transport, listener: Listener) -> Iterator[Peer]:
    with moved.connect(listener.address, NODE, SECRET) as made:
        yield made


@pytest.mark.parametrize(
    ("count", "size"),
    [
        (1, 4 * KIB),
        (1, 4 * MIB),
        (128, 4 * KIB),
        (512, 4 * KIB),
        (512, 64 * KIB + 1),
        (1300, 4 * KIB),
        (128, 1 * MIB),
        (33, 4 * MIB),
    ],
)
def test_batches_arrive_whole(peer: Peer, segment: Segment, landing: Landing, most: int, count: int, size: int) -> None:
    count = min(count, most // size)
    for index in range(count):
        segment.put(f"ns:{index}:all", size)
    batch = [landing.want(f"ns:{index}:all", size) for index in range(count)]
    assert peer.read(batch, soon(), True) == [Outcome.OK] * count
    assert all(map(arrived, batch))
    assert peer.failure == ""


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data(), verify=st.booleans())
def test_any_split_into_extents_on_either_side(
    peer: Peer, segment: Segment, landing: Landing, data: st.DataObject, verify: bool
) -> None:
    landing.reset()
    batch, expected = [], []
    for index in range(data.draw(st.integers(1, 12))):
        size = data.draw(st.integers(1, 200 * KIB))
        kind = data.draw(st.sampled_from(["held", "held", "held", "absent", "other size"]))
        key = f"ns:{segment.pinned_ever}-{time.monotonic_ns()}-{index}:tp0"
        if kind != "absent":
            stored = size if kind == "held" else size + 1
            if segment._used + stored > segment.memory.size:
                segment._used = 0  # earlier examples' pages are not read again
            segment.put(key, stored, min(data.draw(st.integers(1, 7)), stored))
        batch.append(landing.want(key, size, min(data.draw(st.integers(1, 7)), size)))
        expected.append({"held": Outcome.OK, "absent": Outcome.ABSENT, "other size": Outcome.SIZE}[kind])
    assert peer.read(batch, soon(), verify) == expected
    assert all(arrived(page) for page, outcome in zip(batch, expected, strict=True) if outcome is Outcome.OK)


def test_pages_of_very_many_pieces(peer: Peer, segment: Segment, landing: Landing) -> None:
    """More pieces than one system call takes, on both sides."""
    for index in range(8):
        segment.put(f"ns:{index}:all", 40_000, 1500)
    batch = [landing.want(f"ns:{index}:all", 40_000, 1700) for index in range(8)]
    assert peer.read(batch, soon(), True) == [Outcome.OK] * 8
    assert all(map(arrived, batch))


def test_an_empty_piece_is_nothing(peer: Peer, segment: Segment, landing: Landing) -> None:
    segment.put("ns:a:all", 8 * KIB)
    page = landing.want("ns:a:all", 8 * KIB, 2)
    page.into = [page.into[0]._replace(length=0), page.into[0], page.into[0]._replace(length=0), page.into[1]]
    assert peer.read([page], soon(), True) == [Outcome.OK]
    assert arrived(page)


def test_a_key_named_twice_arrives_twice(peer: Peer, segment: Segment, landing: Landing) -> None:
    segment.put("ns:a:all", 64 * KIB)
    segment.put("ns:b:all", 64 * KIB, 3)
    batch = [landing.want(f"ns:{name}:all", 64 * KIB) for name in "abaab"]
    assert peer.read(batch, soon(), True) == [Outcome.OK] * 5
    assert all(map(arrived, batch))


def test_holes_do_not_move_their_neighbours(peer: Peer, segment: Segment, landing: Landing) -> None:
    for index in range(0, 100, 3):
        segment.put(f"ns:{index}:all", 16 * KIB)
    batch = [landing.want(f"ns:{index}:all", 16 * KIB) for index in range(100)]
    outcomes = peer.read(batch, soon(), True)
    assert outcomes == [Outcome.ABSENT if index % 3 else Outcome.OK for index in range(100)]
    assert all(arrived(batch[index]) for index in range(0, 100, 3))


def test_a_page_of_another_size_is_not_sent(peer: Peer, segment: Segment, landing: Landing) -> None:
    segment.put("ns:a:all", 64 * KIB)
    segment.put("ns:b:all", 64 * KIB)
    smaller, larger = landing.want("ns:a:all", 64 * KIB - 1), landing.want("ns:a:all", 64 * KIB + 1)
    fits = landing.want("ns:b:all", 64 * KIB)
    assert peer.read([smaller, fits, larger], soon(), True) == [Outcome.SIZE, Outcome.OK, Outcome.SIZE]
    assert not any(joined(smaller.into))
    assert not any(joined(larger.into))
    assert arrived(fits)


def test_a_corrupt_page_is_found_and_costs_only_itself(peer: Peer, segment: Segment, landing: Landing) -> None:
    for index in range(5):
        segment.put(f"ns:{index}:all", 256 * KIB, 3)
    view = segment.pages["ns:2:all"].extents[1].view
    view[len(view) // 2] ^= 1
    del view
    batch = [landing.want(f"ns:{index}:all", 256 * KIB) for index in range(5)]
    ok, bad = Outcome.OK, Outcome.CORRUPT
    assert peer.read(batch, soon(), True) == [ok, ok, bad, ok, ok]
    assert peer.read(batch, soon(), False) == [ok] * 5, "nobody looks when not asked to"


def test_the_right_bytes_under_another_key_are_corrupt(peer: Peer, segment: Segment, landing: Landing) -> None:
    segment.put("ns:a:all", 64 * KIB)
    segment.pages["ns:b:all"] = segment.pages["ns:a:all"]
    assert peer.read([landing.want("ns:b:all", 64 * KIB)], soon(), True) == [Outcome.CORRUPT]


def test_an_empty_batch_is_nothing(peer: Peer) -> None:
    assert peer.read([], soon(), True) == []


def test_a_deadline_in_the_past_is_a_timeout(peer: Peer, segment: Segment, landing: Landing) -> None:
    segment.put("ns:a:all", 4 * KIB)
    batch = [landing.want("ns:a:all", 4 * KIB)]
    assert peer.read(batch, time.monotonic() - 1, True) == [Outcome.TIMEOUT]
    assert peer.read(batch, soon(), True) == [Outcome.OK]


def test_what_could_never_work_is_refused_before_anything_is_sent(
    peer: Peer, segment: Segment, landing: Landing
) -> None:
    good = landing.want("ns:a:all", 4 * KIB)
    extent = good.into[0]
    outside = extent._replace(offset=landing.memory.size - 1)
    for wrong in (
        PageRead("ns:a:all", 4 * KIB + 1, [extent]),
        PageRead("ns:a:all", 4 * KIB, [outside]),
        PageRead("ns:a:all", 4 * KIB, [extent._replace(offset=-4096)]),
        PageRead("", 4 * KIB, [extent]),
        PageRead("k" * 2000, 4 * KIB, [extent]),
        PageRead("ns:a:all", 0, []),
    ):
        with pytest.raises(ValueError):
            peer.read([good, wrong], soon(), True)
    assert segment.pinned_ever == 0


def test_many_readers_at_once(peer: Peer, segment: Segment, landing: Landing) -> None:
    """More batches than connections: each is answered, none gets another's bytes."""
    for index in range(64):
        segment.put(f"ns:{index}:all", 64 * KIB, 2)
    batches = [[landing.want(f"ns:{(t * 7 + i) % 64}:all", 64 * KIB) for i in range(32)] for t in range(10)]
    outcomes: list[list[Outcome]] = []
    deadline = soon(20)

    def read(turn: int) -> None:
        for _ in range(5):
            outcomes.append(peer.read(batches[turn], deadline, True))

    threads = [threading.Thread(target=read, args=(turn,)) for turn in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert time.monotonic() < deadline, "a reader that missed a wake-up sleeps until its deadline"
    assert outcomes == [[Outcome.OK] * 32] * 50
    assert all(arrived(page) for batch in batches for page in batch)


def test_clear_reaches_the_owner(peer: Peer, segment: Segment, landing: Landing) -> None:
    for index in range(4):
        segment.put(f"old:{index}:all", 4 * KIB)
    segment.put("new:0:all", 4 * KIB)
    assert peer.clear(["old", "older"], soon()) == 4
    assert segment.cleared == [["old", "older"]]
    batch = [landing.want("old:0:all", 4 * KIB), landing.want("new:0:all", 4 * KIB)]
    assert peer.read(batch, soon(), True) == [Outcome.ABSENT, Outcome.OK]


@pytest.mark.parametrize("length", [0, 1, 400 * KIB])
def test_an_order_and_its_answer_arrive_as_they_are(peer: Peer, segment: Segment, length: int) -> None:
    body = content("order", length)
    assert peer.order(body, soon()) == body[::-1]
    with pytest.raises(ValueError, match="at most"):
        peer.order(bytes(2 << 20), soon())
    assert peer.order(b"again", soon()) == b"niaga"


@pytest.mark.parametrize("count", [1, 7, 128, 600])
@pytest.mark.parametrize("size", [4 * KIB, 100 * KIB + 1])
def test_written_pages_are_stored_whole(
    peer: Peer, segment: Segment, landing: Landing, most: int, count: int, size: int
) -> None:
    count = min(count, most // size)
    batch = [landing.offer(f"ns:w{index}:all", size, 1 + index % 4) for index in range(count)]
    assert peer.write(batch, soon()) == [Outcome.OK] * count
    assert segment.rooms == 0
    for page in batch:
        assert joined(segment.pages[page.key].extents) == content(page.key, size)


def test_a_write_is_told_what_is_held_full_and_corrupt(peer: Peer, segment: Segment, landing: Landing) -> None:
    segment.put("ns:held:all", 4 * KIB)
    held, rotten, good = (landing.offer(f"ns:{name}:all", 4 * KIB) for name in ("held", "rotten", "good"))
    huge = landing.offer("ns:huge:all", segment.memory.size * 10 // 16)
    first = segment.memory.size - segment._used - segment.memory.size * 9 // 16
    segment._used += max(first, 0)
    rotten.checksum ^= 1
    outcomes = peer.write([held, rotten, huge, good], soon())
    assert outcomes == [Outcome.OK, Outcome.CORRUPT, Outcome.FULL, Outcome.OK]
    assert "ns:rotten:all" not in segment.pages and segment.rooms == 0
    assert peer.write([], soon()) == []
    with pytest.raises(ValueError, match="extents"):
        peer.write([PageWrite("ns:x:all", 5, 0, held.source)], soon())


def test_a_doubted_page_is_dropped_only_if_it_is_rotten(peer: Peer, segment: Segment, landing: Landing) -> None:
    for name in ("good", "bad"):
        segment.put(f"ns:{name}:all", 4 * KIB)
    extent = segment.pages["ns:bad:all"].extents[0]
    extent.view[100] ^= 1
    batch = [landing.want("ns:good:all", 4 * KIB), landing.want("ns:bad:all", 4 * KIB)]
    assert peer.read(batch, soon(), True) == [Outcome.OK, Outcome.CORRUPT]
    assert peer.doubt(["ns:good:all", "ns:bad:all", "ns:never:all"], soon()) == 1
    assert peer.read(batch, soon(), True) == [Outcome.OK, Outcome.ABSENT]


def test_probe_says_whether_the_peer_would_serve_us(moved: Transport, listener: Listener, peer: Peer) -> None:
    peer.probe(soon())
    for node, credentials, why in (
        ("alpha~ffffffff", SECRET, "another node"),
        (NODE, Credentials(b"wrong", "prod"), "secret"),
        (NODE, Credentials(b"", "prod"), "secret"),
        (NODE, Credentials(b"correct horse", "test"), "another pool"),
    ):
        with moved.connect(listener.address, node, credentials) as other:
            with pytest.raises(ProtocolError, match=why):
                other.probe(soon())
            assert why in other.failure


def test_no_secret_on_both_sides_is_allowed(moved: Transport, segment: Segment, landing: Landing) -> None:
    segment.put("ns:a:all", 4 * KIB)
    with (
        moved.listen("127.0.0.1:0", "", segment, Credentials()) as listener,
        moved.connect(listener.address, NODE, Credentials()) as peer,
    ):
        assert peer.read([landing.want("ns:a:all", 4 * KIB)], soon(), True) == [Outcome.OK]


def test_a_name_and_ipv6_work_too(moved: Transport, segment: Segment, landing: Landing) -> None:
    if not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 here")
    segment.put("ns:a:all", 4 * KIB)
    with moved.listen("[::]:0", "localhost", segment, SECRET) as listener:
        host, port = listener.address.split(":")
        assert host == "localhost"
        for address in (listener.address, f"[::1]:{port}", f"{moved.scheme}://127.0.0.1:{port}"):
            with moved.connect(address, NODE, SECRET) as peer:
                assert peer.read([landing.want("ns:a:all", 4 * KIB)], soon(), True) == [Outcome.OK]


def test_addresses_that_cannot_be_served_are_the_operators(
    moved: Transport, listener: Listener, segment: Segment
) -> None:
    for address, advertise, field in (
        (listener.address, "", "listen"),
        ("127.0.0.1", "", "listen"),
        ("203.0.113.7:0", "", "listen"),
        ("0.0.0.0:0", "", "advertise"),
        ("127.0.0.1:0", "::1", "advertise"),
    ):
        with pytest.raises(ConfigError) as refused:
            moved.listen(address, advertise, segment, SECRET)
        assert refused.value.field == field


def test_a_closed_peer_fails_at_once(moved: Transport, listener: Listener, landing: Landing) -> None:
    peer = moved.connect(listener.address, NODE, SECRET)
    peer.probe(soon())
    peer.close()
    peer.close()
    assert peer.read([landing.want("ns:a:all", 4 * KIB)], soon(), True) == [Outcome.FAILED]
    with pytest.raises(Unavailable):
        peer.probe(soon())


def test_a_closed_listener_fails_readers_and_a_new_one_serves_them_again(
    moved: Transport, segment: Segment, landing: Landing
) -> None:
    segment.put("ns:a:all", 4 * KIB)
    batch = [landing.want("ns:a:all", 4 * KIB)]
    listener = moved.listen("127.0.0.1:0", "", segment, SECRET)
    with moved.connect(listener.address, NODE, SECRET) as peer:
        assert peer.read(batch, soon(), True) == [Outcome.OK]
        listener.close()
        listener.close()
        assert peer.read(batch, soon(), True) == [Outcome.FAILED]
        assert peer.failure
        with moved.listen(listener.address, "", segment, SECRET):
            assert peer.read(batch, soon(), True) == [Outcome.OK]
            assert peer.failure == ""


def test_an_unknown_scheme_names_the_known_ones() -> None:
    with pytest.raises(ProtocolError, match="tcp"):
        transport("carrier-pigeon")
    with pytest.raises(ProtocolError, match="speaks tcp"):
        transport("tcp").connect("rdma://127.0.0.1:1", NODE, SECRET)
