"""What goes wrong between two nodes costs misses, within the deadline, and nothing else."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from hicache_mooncake.errors import HiCacheMooncakeError, ProtocolError, Unavailable
from hicache_mooncake.transfer import Credentials, Outcome, PinnedPage, tcp_client, wire
from hicache_mooncake.transfer.handshake import ListenerHandshake, ReaderHandshake
from hicache_mooncake.transfer.tcp import TcpTransport
from hicache_mooncake.transfer.tcp_client import ClientLimits, TcpPeer
from hicache_mooncake.transfer.tcp_server import ServerLimits, TcpListener
from hicache_mooncake.transfer.tcp_stream import Stream
from tests.stalling_proxy import StallingProxy

from .conftest import open_descriptors
from .pages import KIB, MIB, NODE, Landing, Segment, arrived, content, joined
from .serving import SECRET, Serving, serving

GRACE = 2.0
"""Seconds by which a busy test machine may be late; the product's own lateness is a few milliseconds."""


def soon(seconds: float) -> float:
    return time.monotonic() + seconds


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    until = soon(seconds)
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment(64 * MIB)
    for index in range(64):
        made.put(f"ns:{index}:all", 256 * KIB, 2)
    yield made
    assert wait_for(lambda: made.pinned == 0)
    made.close()


@pytest.fixture
def landing() -> Iterator[Landing]:
    made = Landing(64 * MIB)
    yield made
    made.close()


def listen(segment: Segment, address: str = "127.0.0.1:0", **limits: float) -> TcpListener:
    limits = {name: int(value) if name == "connections" else value for name, value in limits.items()}
    made = TcpTransport(server=ServerLimits(**limits)).listen(address, "", segment, SECRET)  # type: ignore[arg-type]
    assert isinstance(made, TcpListener)
    return made


def connect(address: str, node: str = NODE, credentials: Credentials = SECRET, **limits: float) -> TcpPeer:
    limits = {"connect_timeout": 5.0, **limits}
    made = TcpTransport(client=ClientLimits(**limits)).connect(address, node, credentials)  # type: ignore[arg-type]
    assert isinstance(made, TcpPeer)
    return made


def raw(address: str) -> socket.socket:
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def agreed(address: str) -> Stream:
    """A connection that has been let in, to misbehave on."""
    stream = Stream(raw(address))
    stream.prepare()
    stream.agree(ReaderHandshake(SECRET, NODE), soon(10))
    return stream


# --- the network ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [1, 300, 3000, 1 * MIB, 5 * MIB + 17])
def test_a_stall_anywhere_is_a_timeout_in_time(segment: Segment, landing: Landing, after: int) -> None:
    batch = [landing.want(f"ns:{index}:all", 256 * KIB) for index in range(64)]
    with (
        listen(segment) as listener,
        StallingProxy(listener.address) as proxy,
        connect(proxy.address) as peer,
    ):
        proxy.stall(after)
        started = time.monotonic()
        outcomes = peer.read(batch, started + 0.5, True)
        assert 0.5 <= time.monotonic() - started < 0.5 + GRACE
        assert set(outcomes) <= {Outcome.OK, Outcome.TIMEOUT}
        assert outcomes[-1] is Outcome.TIMEOUT
        assert all(arrived(page) for page, outcome in zip(batch, outcomes, strict=True) if outcome == Outcome.OK)
        assert peer.failure
        proxy.resume()
        assert peer.read(batch, soon(20), True) == [Outcome.OK] * 64
        assert all(map(arrived, batch))


@pytest.mark.parametrize("after", [1, 300, 1 * MIB, 5 * MIB + 17])
def test_a_cut_fails_what_has_not_arrived(segment: Segment, landing: Landing, after: int) -> None:
    batch = [landing.want(f"ns:{index}:all", 256 * KIB) for index in range(64)]
    with (
        listen(segment) as listener,
        StallingProxy(listener.address) as proxy,
        connect(proxy.address) as peer,
    ):
        proxy.cut(after)
        outcomes = peer.read(batch, soon(20), True)
        assert set(outcomes) <= {Outcome.OK, Outcome.FAILED}
        assert outcomes[-1] is Outcome.FAILED
        assert all(arrived(page) for page, outcome in zip(batch, outcomes, strict=True) if outcome == Outcome.OK)
        assert peer.read(batch, soon(20), True) == [Outcome.OK] * 64


def test_a_slow_link_gives_what_it_could_carry(segment: Segment, landing: Landing) -> None:
    batch = [landing.want(f"ns:{index}:all", 256 * KIB) for index in range(64)]
    with (
        listen(segment) as listener,
        StallingProxy(listener.address) as proxy,
        connect(proxy.address) as peer,
    ):
        peer.probe(soon(10))
        proxy.throttle(4 * MIB)
        started = time.monotonic()
        outcomes = peer.read(batch, started + 1.0, True)
        assert time.monotonic() - started < 1.0 + GRACE
        done = outcomes.count(Outcome.OK)
        assert outcomes == [Outcome.OK] * done + [Outcome.TIMEOUT] * (64 - done)
        assert 0 < done < 64
        assert all(map(arrived, batch[:done]))


def test_a_byte_damaged_on_the_way_is_corrupt(segment: Segment, landing: Landing) -> None:
    batch = [landing.want(f"ns:{index}:all", 256 * KIB) for index in range(8)]
    with (
        listen(segment) as listener,
        StallingProxy(listener.address) as proxy,
        connect(proxy.address) as peer,
    ):
        peer.probe(soon(10))
        proxy.flip(MIB)
        outcomes = peer.read(batch, soon(10), True)
        assert outcomes.count(Outcome.CORRUPT) == 1
        assert outcomes.count(Outcome.OK) == 7


ACCEPTED = 12 + 64  # bytes of the answer to an offer of 64 pages


@pytest.mark.parametrize(("after", "stored"), [(1, 0), (ACCEPTED + 1, 64)])
def test_a_write_without_an_answer_is_a_timeout_and_leaves_no_room_taken(
    landing: Landing, after: int, stored: int
) -> None:
    owner = Segment(64 * MIB)
    batch = [landing.offer(f"ns:slow{index}:all", 256 * KIB) for index in range(64)]
    with (
        listen(owner) as listener,
        StallingProxy(listener.address) as proxy,
        connect(proxy.address) as peer,
    ):
        peer.probe(soon(10))
        proxy.stall(after)
        started = time.monotonic()
        assert set(peer.write(batch, started + 0.7)) == {Outcome.TIMEOUT}
        assert time.monotonic() - started < 0.7 + GRACE
        assert wait_for(lambda: owner.rooms == 0)
        assert len(owner.pages) == stored
        proxy.resume()
        assert peer.write(batch, soon(20)) == [Outcome.OK] * 64
    owner.close()


@pytest.mark.parametrize("after", [1, ACCEPTED])
def test_a_write_that_is_cut_stores_whole_pages_or_none(landing: Landing, after: int) -> None:
    owner = Segment(64 * MIB)
    batch = [landing.offer(f"ns:cut{index}:all", 256 * KIB) for index in range(64)]
    with (
        listen(owner) as listener,
        StallingProxy(listener.address) as proxy,
        connect(proxy.address) as peer,
    ):
        peer.probe(soon(10))
        proxy.cut(after)
        outcomes = set(peer.write(batch, soon(20)))
        # A reset may overtake the first byte: then nothing was answered, and all of it was sent again, by a new way.
        assert outcomes == {Outcome.FAILED} or (after == 1 and outcomes == {Outcome.OK})
        assert wait_for(lambda: owner.rooms == 0)
        for key, page in owner.pages.items():
            assert joined(page.extents) == content(key, page.size)
        assert peer.write(batch, soon(20)) == [Outcome.OK] * 64
    owner.close()


def test_connections_that_died_while_idle_cost_nothing(segment: Segment, landing: Landing) -> None:
    batch = [landing.want("ns:0:all", 256 * KIB)]
    with (
        listen(segment) as listener,
        StallingProxy(listener.address) as proxy,
        connect(proxy.address) as peer,
    ):
        for _ in range(20):
            proxy.cut()
            assert peer.read(batch, soon(10), True) == [Outcome.OK]


def test_an_unreachable_network_is_a_failure_within_the_connect_timeout(landing: Landing) -> None:
    """A listener whose backlog is full answers no more than a host that is gone."""
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        fillers = [socket.socket() for _ in range(3)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(deaf.getsockname())
        with connect(address, connect_timeout=0.3) as peer:
            started = time.monotonic()
            assert peer.read([landing.want("ns:0:all", 4 * KIB)], started + 20, True) == [Outcome.FAILED]
            assert time.monotonic() - started < 0.3 + GRACE
            assert peer.read([landing.want("ns:0:all", 4 * KIB)], soon(0.1), True) == [Outcome.TIMEOUT]
        for filler in fillers:
            filler.close()


# --- the peer's process --------------------------------------------------------------------------------------


def test_a_stopped_peer_is_a_timeout_and_works_again_when_it_goes_on(landing: Landing) -> None:
    with serving(8, 256 * KIB) as child, connect(child.address) as peer:
        batch = [landing.want(f"ns:{index}:all", 256 * KIB) for index in range(8)]
        assert peer.read(batch, soon(10), True) == [Outcome.OK] * 8
        child.signal(signal.SIGSTOP)
        for _ in range(2):  # over the idle connection, then over one that is never answered
            started = time.monotonic()
            assert peer.read(batch, started + 0.3, True) == [Outcome.TIMEOUT] * 8
            assert 0.3 <= time.monotonic() - started < 0.3 + GRACE
        with pytest.raises(Unavailable):
            peer.probe(soon(0.2))
        child.signal(signal.SIGCONT)
        assert peer.read(batch, soon(10), True) == [Outcome.OK] * 8


def test_a_peer_killed_while_it_sends_is_a_failure_at_once(landing: Landing) -> None:
    with serving(48, 1 * MIB) as child, StallingProxy(child.address) as proxy, connect(proxy.address) as peer:
        batch = [landing.want(f"ns:{index}:all", 1 * MIB) for index in range(48)]
        peer.probe(soon(10))
        proxy.throttle(20 * MIB)
        killer = threading.Timer(0.4, child.signal, (signal.SIGKILL,))
        killer.start()
        started = time.monotonic()
        outcomes = peer.read(batch, started + 30, True)
        assert time.monotonic() - started < 20
        killer.join()
        assert set(outcomes) <= {Outcome.OK, Outcome.FAILED}
        assert outcomes[-1] is Outcome.FAILED
        assert all(arrived(page) for page, outcome in zip(batch, outcomes, strict=True) if outcome == Outcome.OK)
    with connect(child.address) as peer:
        assert peer.read(batch[:1], soon(10), True) == [Outcome.FAILED]
        assert "refused" in peer.failure.lower()


def test_a_restarted_peer_is_served_from_only_if_it_is_the_same_node(landing: Landing) -> None:
    batch = [landing.want("ns:0:all", 64 * KIB)]
    first = Serving(1, 64 * KIB)
    with connect(first.address) as peer:
        assert peer.read(batch, soon(10), True) == [Outcome.OK]
        first.close()
        with serving(1, 64 * KIB, address=first.address):
            assert peer.read(batch, soon(10), True) == [Outcome.OK], "first use fails over to a new connection"
        with serving(1, 64 * KIB, address=first.address, node="alpha~11112222"):
            assert peer.read(batch, soon(10), True) == [Outcome.FAILED]
            assert "another node" in peer.failure
            with pytest.raises(ProtocolError):
                peer.clear(["ns"], soon(10))


def test_another_secret_on_the_reused_port_reads_nothing(segment: Segment, landing: Landing) -> None:
    with listen(segment) as listener:
        for credentials in (Credentials(b"guess", "prod"), Credentials(b"", "prod"), Credentials(b"guess", "x")):
            with connect(listener.address, credentials=credentials) as peer:
                assert peer.read([landing.want("ns:0:all", 256 * KIB)], soon(10), True) == [Outcome.FAILED]
                assert "secret" in peer.failure
        assert segment.pinned_ever == 0


@pytest.mark.parametrize("greeting", [b"SSH-2.0-OpenSSH_9.2p1 Debian\r\n", b"", b"-ERR unknown command\r\n" * 100])
def test_a_port_that_something_else_took_is_a_failure(landing: Landing, greeting: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def greet() -> None:
            sock, _ = other.accept()
            with sock:
                sock.sendall(greeting)

        thread = threading.Thread(target=greet)
        thread.start()
        with connect(f"127.0.0.1:{other.getsockname()[1]}") as peer:
            assert peer.read([landing.want("ns:0:all", 4 * KIB)], soon(10), True) == [Outcome.FAILED]
        thread.join(10)


def test_a_listener_that_answers_nonsense_is_a_failure(landing: Landing) -> None:
    """It knows the secret, so it is a bug or another version; still nothing of it may count or write astray."""
    chance = random.Random(11)
    batch = [landing.want(f"ns:{index}:all", 4 * KIB) for index in range(2)]
    beyond = landing.memory.view[8 * KIB : 1 * MIB]
    rows = [wire.PageRow(Outcome.OK, 4 * KIB, 1), wire.PageRow(Outcome.ABSENT, 0, 0)]
    valid = wire.encode_pages(rows) + b"x" * 4 * KIB
    done = threading.Event()

    def answer(server: socket.socket) -> None:
        while not done.is_set():
            stream = Stream(server.accept()[0])
            try:
                stream.prepare()
                stream.agree(ListenerHandshake(SECRET, NODE), soon(5))
                stream.receive_frame((wire.Kind.READ,), wire.MAX_REQUEST_BYTES, soon(5))
                noise = bytearray(valid)
                for _ in range(chance.randrange(4)):
                    noise[chance.randrange(60)] = chance.randrange(256)
                stream.send([noise, chance.randbytes(chance.randrange(2) * 64 * KIB)], soon(5))
            except Unavailable:
                pass  # the reader has seen enough
            stream.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        for _ in range(150):
            with connect(f"127.0.0.1:{server.getsockname()[1]}") as peer:
                outcomes = peer.read(batch, soon(0.5), True)
            assert Outcome.OK not in outcomes
        done.set()
        with connect(f"127.0.0.1:{server.getsockname()[1]}") as peer:
            peer.read(batch, soon(0.5), True)
        thread.join(10)
    assert not any(beyond)
    beyond.release()


# --- readers that misbehave ----------------------------------------------------------------------------------


def test_noise_never_harms_a_listener(segment: Segment, landing: Landing) -> None:
    chance = random.Random(7)
    valid = wire.encode_read(wire.ReadRequest(["ns:0:all", "ns:1:all"], [256 * KIB] * 2, 5.0))
    with listen(segment, handshake_timeout=0.3) as listener, connect(listener.address) as peer:
        for turn in range(150):
            noise = bytearray(chance.choice([valid, chance.randbytes(chance.randrange(1, 400)), wire.MAGIC * 9]))
            for _ in range(chance.randrange(1, 4)):
                noise[chance.randrange(len(noise))] = chance.randrange(256)
            if chance.random() < 0.3:
                del noise[chance.randrange(len(noise)) :]
            stream = agreed(listener.address) if turn % 2 else Stream(raw(listener.address))
            try:
                stream.send([noise], soon(5))
                if turn % 3:
                    stream.receive(1, soon(0.02))
            except Unavailable:
                pass  # dropped, as it should be, or the frame was still valid and is being answered
            stream.close()
        batch = [landing.want(f"ns:{index}:all", 256 * KIB) for index in range(8)]
        assert peer.read(batch, soon(10), True) == [Outcome.OK] * 8
        assert wait_for(lambda: listener.connections == 1)
        assert wait_for(lambda: segment.pinned == 0)


def test_who_says_nothing_is_dropped(segment: Segment) -> None:
    with listen(segment, handshake_timeout=0.2, idle_timeout=0.4) as listener:
        silent = raw(listener.address)
        dripping = raw(listener.address)
        idle = agreed(listener.address)
        half = agreed(listener.address)
        half.send([wire.encode_clear(["ns"])[:-1]], soon(5))
        for _ in range(40):
            try:
                dripping.sendall(b"H")
            except OSError:
                break
            time.sleep(0.05)
        assert wait_for(lambda: listener.connections == 0, 5)
        for sock in (silent, dripping):
            sock.close()
        for stream in (idle, half):
            assert not stream.is_quiet()
            stream.close()
        assert segment.cleared == []


@pytest.mark.parametrize(("budget", "send_timeout"), [(30.0, 0.4), (0.4, 30.0)])
def test_a_reader_that_does_not_take_its_pages_loses_its_connection_and_pins(
    segment: Segment, budget: float, send_timeout: float
) -> None:
    keys = [f"ns:{index % 64}:all" for index in range(512)]
    with listen(segment, send_timeout=send_timeout) as listener:
        stream = agreed(listener.address)
        stream.send([wire.encode_read(wire.ReadRequest(keys, [256 * KIB] * 512, budget))], soon(5))
        assert wait_for(lambda: segment.pinned == 512)
        assert wait_for(lambda: segment.pinned == 0, 0.4 + 5)
        assert wait_for(lambda: listener.connections == 0)
        stream.close()


def test_a_full_listener_refuses_and_serves_again_when_there_is_room(segment: Segment, landing: Landing) -> None:
    batch = [landing.want("ns:0:all", 256 * KIB)]
    with listen(segment, connections=2) as listener:
        taken = [agreed(listener.address) for _ in range(2)]
        with connect(listener.address) as peer:
            for _ in range(5):
                assert peer.read(batch, soon(10), True) == [Outcome.FAILED]
            assert listener.connections == 2
            for stream in taken:
                stream.close()
            assert wait_for(lambda: listener.connections == 0)
            assert peer.read(batch, soon(10), True) == [Outcome.OK]


def test_a_peer_never_has_more_connections_than_allowed(segment: Segment, landing: Landing) -> None:
    batch = [landing.want(f"ns:{index}:all", 256 * KIB) for index in range(64)]
    most: list[int] = []
    with (
        listen(segment) as listener,
        StallingProxy(listener.address) as proxy,
        connect(proxy.address) as peer,
    ):

        def read() -> None:
            for _ in range(10):
                assert peer.read(batch[:2], soon(30), True) == [Outcome.OK] * 2
                most.append(listener.connections)

        threads = [threading.Thread(target=read) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(most) == 120
        assert max(most) <= 4
        assert proxy.accepted <= 4, "connections are used again, not made anew"


def test_batches_beyond_the_connections_wait_until_their_deadline(segment: Segment, landing: Landing) -> None:
    batch = [landing.want("ns:0:all", 256 * KIB)]
    with (
        listen(segment) as listener,
        StallingProxy(listener.address) as proxy,
        connect(proxy.address, connections=1) as peer,
    ):
        peer.probe(soon(10))
        proxy.stall()
        outcomes: list[Outcome] = []
        hog = threading.Thread(target=lambda: outcomes.extend(peer.read(batch, soon(1.5), True)))
        hog.start()
        time.sleep(0.2)
        started = time.monotonic()
        assert peer.read(batch, started + 0.3, True) == [Outcome.TIMEOUT]
        assert time.monotonic() - started < 0.3 + GRACE
        hog.join(10)
        assert outcomes == [Outcome.TIMEOUT]


# --- our own side --------------------------------------------------------------------------------------------


class Failing(Segment):
    """A source that is broken for some keys."""

    def pin(self, keys: Sequence[str]) -> list[PinnedPage | None]:
        if "ns:boom:all" in keys:
            raise RuntimeError("the index is broken")
        return super().pin(keys)


def test_a_source_that_raises_costs_one_connection(landing: Landing, caplog: pytest.LogCaptureFixture) -> None:
    segment = Failing(1 * MIB)
    segment.put("ns:0:all", 4 * KIB)
    segment.put("ns:torn:all", 8 * KIB, 2)
    torn = segment.pages["ns:torn:all"]
    segment.pages["ns:torn:all"] = torn._replace(extents=torn.extents[:1])
    with listen(segment) as listener, connect(listener.address) as peer:
        for key in ("ns:boom:all", "ns:torn:all"):
            assert peer.read([landing.want(key, 8 * KIB)], soon(10), True) == [Outcome.FAILED]
            assert peer.read([landing.want("ns:0:all", 4 * KIB)], soon(10), True) == [Outcome.OK]
    assert "the index is broken" in caplog.text
    assert segment.pinned == 0
    del torn
    segment.close()


def test_closing_the_listener_ends_a_send_and_its_pins(segment: Segment) -> None:
    keys = [f"ns:{index % 64}:all" for index in range(512)]
    listener = listen(segment)
    stream = agreed(listener.address)
    stream.send([wire.encode_read(wire.ReadRequest(keys, [256 * KIB] * 512, 30.0))], soon(5))
    assert wait_for(lambda: segment.pinned == 512)
    started = time.monotonic()
    listener.close()
    assert time.monotonic() - started < 5
    assert segment.pinned == 0
    stream.close()


def test_closing_the_peer_ends_a_read(segment: Segment, landing: Landing) -> None:
    batch = [landing.want(f"ns:{index}:all", 256 * KIB) for index in range(64)]
    with listen(segment) as listener, StallingProxy(listener.address) as proxy:
        peer = connect(proxy.address)
        peer.probe(soon(10))
        proxy.stall(1 * MIB)
        closer = threading.Timer(0.3, peer.close)
        closer.start()
        started = time.monotonic()
        outcomes = peer.read(batch, started + 30, True)
        assert time.monotonic() - started < 10
        assert outcomes[-1] is Outcome.FAILED
        closer.join()


@pytest.mark.parametrize("lanes", [1, 2])
def test_nothing_writes_after_a_deadline_has_cut_a_read(
    segment: Segment, landing: Landing, monkeypatch: pytest.MonkeyPatch, lanes: int
) -> None:
    """1,000 cuts in all, at every stage of a read; the memory belongs to someone else the moment it returns."""
    monkeypatch.setattr(tcp_client, "_SPLIT_BYTES", 1 * MIB)
    chance = random.Random(lanes)
    size = 64 * 256 * KIB
    batch = [landing.want(f"ns:{index}:all", 256 * KIB, 2) for index in range(64)]
    canary = 0xA55A
    target = np.frombuffer(landing.memory.view, np.uint16, size // 2)
    cuts = 0
    with listen(segment) as listener, connect(listener.address, lanes=lanes) as peer:
        while cuts < 500:
            outcomes = peer.read(batch, soon(chance.uniform(0.0002, 0.006)), True)
            target[:] = canary
            cuts += Outcome.TIMEOUT in outcomes
            assert set(outcomes) <= {Outcome.OK, Outcome.TIMEOUT}
            if chance.random() < 0.1:
                time.sleep(0.002)
            assert (target == canary).all()
        time.sleep(0.1)
        assert (target == canary).all()
        assert peer.read(batch, soon(20), True) == [Outcome.OK] * 64
    del target


def test_descriptors_and_threads_stay_flat(segment: Segment, landing: Landing) -> None:
    batch = [landing.want("ns:0:all", 256 * KIB)]

    def cycle() -> None:
        with listen(segment) as listener, connect(listener.address) as peer:
            assert peer.read(batch, soon(10), True) == [Outcome.OK]

    cycle()
    descriptors, threads = open_descriptors(), threading.active_count()
    for _ in range(200):
        cycle()
    assert wait_for(lambda: open_descriptors() <= descriptors)
    assert wait_for(lambda: threading.active_count() <= threads)


def test_readers_come_and_go_without_a_trace(segment: Segment, landing: Landing) -> None:
    batch = [landing.want("ns:0:all", 256 * KIB)]
    with listen(segment) as listener:
        descriptors, threads = open_descriptors(), threading.active_count()
        for turn in range(200):
            with connect(listener.address, node=NODE if turn % 4 else "alpha~22223333") as peer:
                assert peer.read(batch, soon(10), True) == [Outcome.OK if turn % 4 else Outcome.FAILED]
        assert wait_for(lambda: listener.connections == 0)
        assert wait_for(lambda: open_descriptors() <= descriptors)
        assert wait_for(lambda: threading.active_count() <= threads)


def test_a_process_out_of_descriptors_recovers(segment: Segment, landing: Landing) -> None:
    import resource

    batch = [landing.want("ns:0:all", 256 * KIB)]
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with listen(segment) as listener, connect(listener.address) as peer:
        host, _, port = listener.address.partition(":")
        early = socket.socket()
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_descriptors(), before[1]))
        hoard = []
        try:
            while True:
                hoard.append(os.dup(0))
        except OSError:
            pass
        try:
            early.connect((host, int(port)))  # the listener has no descriptor left to accept it with
            assert peer.read(batch, soon(0.3), True)[0] in (Outcome.FAILED, Outcome.TIMEOUT)
        finally:
            for descriptor in hoard:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        stream = Stream(early)
        stream.prepare()
        stream.agree(ReaderHandshake(SECRET, NODE), soon(10))
        stream.close()
        assert peer.read(batch, soon(10), True) == [Outcome.OK]


def test_a_refused_proof_is_not_an_oracle(segment: Segment) -> None:
    """Every failed proof gets the same answer, whichever pool or node was asked for."""
    answers = set()
    with listen(segment) as listener:
        for node, pool in ((NODE, "prod"), ("alpha~33334444", "prod"), (NODE, "test")):
            stream = Stream(raw(listener.address))
            stream.prepare()
            with pytest.raises(HiCacheMooncakeError) as refused:
                stream.agree(ReaderHandshake(Credentials(b"guess", pool), node), soon(10))
            answers.add(str(refused.value))
            stream.close()
    assert len(answers) == 1
