"""What goes wrong under a one-sided transfer: misses, within the deadline, and never a byte where it must not be."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from hicache_mooncake import memory
from hicache_mooncake.errors import ProtocolError, Unavailable
from hicache_mooncake.memory import Extent
from hicache_mooncake.transfer import Credentials, Outcome, wire
from hicache_mooncake.transfer.handshake import ReaderHandshake
from hicache_mooncake.transfer.rdma import abi, frames
from hicache_mooncake.transfer.rdma.client import RdmaPeer
from hicache_mooncake.transfer.rdma.paths import Path, RdmaStream
from hicache_mooncake.transfer.rdma.plan import Places, Plan
from hicache_mooncake.transfer.rdma.queue_pair import QueuePair
from hicache_mooncake.transfer.rdma.server import RdmaListener
from hicache_mooncake.transfer.rdma.status import meaning
from hicache_mooncake.transfer.rdma.transport import RdmaTransport
from hicache_mooncake.transfer.rdma.verbs import Device, Region
from hicache_mooncake.transfer.tcp import TcpTransport
from hicache_mooncake.transfer.tcp_server import ServerLimits
from tests.transfer.pages import KIB, MIB, NODE, Landing, Segment, arrived
from tests.transfer.serving import SECRET, serving

pytestmark = pytest.mark.rdma

CUTS = 1000


def soon(seconds: float = 20.0) -> float:
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
    made = Segment(16 * MIB)
    for index in range(12):
        made.put(f"ns:{index}:all", 256 * KIB, 2)
    yield made
    assert wait_for(lambda: made.pinned == 0)
    made.close()


@pytest.fixture
def landing() -> Iterator[Landing]:
    made = Landing(16 * MIB)
    yield made
    made.close()


@pytest.fixture
def owner() -> Iterator[RdmaTransport]:
    with contextlib.closing(RdmaTransport("rxe1")) as made:
        yield made


@pytest.fixture
def reader() -> Iterator[RdmaTransport]:
    with contextlib.closing(RdmaTransport("rxe0", strict=True)) as made:
        yield made


def connect(transport: RdmaTransport, address: str, credentials: Credentials = SECRET) -> RdmaPeer:
    peer = transport.connect(address, NODE, credentials)
    assert isinstance(peer, RdmaPeer)
    return peer


def wants(landing: Landing, count: int = 12, size: int = 256 * KIB) -> list[Any]:
    landing.reset()
    return [landing.want(f"ns:{index}:all", size) for index in range(count)]


# -- no late write


def test_a_thousand_reads_cut_by_their_deadline_leave_the_memory_alone(
    owner: RdmaTransport, reader: RdmaTransport, segment: Segment, landing: Landing
) -> None:
    """As soon as a call has returned its memory is written over; nothing of it ever changes again."""
    chance = random.Random(3)
    target = np.frombuffer(landing.memory.view, np.uint8)
    half = len(target) // 2
    cut = touched = 0
    with (
        owner.listen("127.0.0.1:0", "", segment, SECRET) as listener,
        connect(reader, listener.address) as peer,
    ):
        peer._limits = type(peer._limits)(connect_timeout=5.0)
        before: tuple[int, int, int] | None = None
        turn = 0
        while cut < CUTS:
            turn += 1
            assert turn < 10 * CUTS, "reads are not cut: they are faster than their deadlines"
            start = (turn % 2) * half
            landing._used = start
            batch = [landing.want(f"ns:{index}:all", 256 * KIB) for index in range(8)]
            area = slice(start, start + 8 * 256 * KIB)
            target[start : start + 8 * 256 * KIB : 4096] = 0xEE
            peer.probe(soon())  # a connection is there: the time is all for the read
            outcomes = peer.read(batch, time.monotonic() + chance.uniform(0.0005, 0.006), False)
            canary = 1 + turn % 200
            assert set(outcomes) <= {Outcome.OK, Outcome.TIMEOUT, Outcome.FAILED}
            cut += Outcome.TIMEOUT in outcomes
            # In the middle: it had begun to arrive.
            touched += Outcome.TIMEOUT in outcomes and bool((target[area][::4096] != 0xEE).any())
            target[area] = canary
            if before is not None:
                low, high, value = before
                assert (target[low:high] == value).all(), f"written after the call had returned (turn {turn})"
            before = (area.start, area.stop, canary)
        time.sleep(0.2)
        assert before is not None and (target[before[0] : before[1]] == before[2]).all()
        assert wait_for(lambda: segment.pinned == 0)
        batch = wants(landing, 8)
        assert peer.read(batch, soon(), True) == [Outcome.OK] * 8 and all(map(arrived, batch))
    del target
    print(f"{cut} of {turn} reads were cut, {touched} of them in the middle")
    assert touched > CUTS // 10


def test_a_killed_node_writes_nothing_more(owner: RdmaTransport) -> None:
    """What an engine falls back to when its node does not end a read: once the process is gone, so are its writes."""
    segment, landing = Segment(8 * MIB), Landing(8 * MIB)
    for index in range(8):
        segment.put(f"ns:{index}:all", MIB)
    target = np.frombuffer(landing.memory.view, np.uint8)
    in_the_middle = 0
    with owner.listen("127.0.0.1:0", "", segment, SECRET) as listener:
        for turn in range(3):
            fd = os.dup(landing.memory.fd)
            command = [sys.executable, "-m", "tests.rdma.reading", str(fd), str(landing.memory.size), listener.address]
            with subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=(fd,)) as child:
                os.close(fd)
                assert child.stdout is not None and child.stdout.readline() == b"reading\n"
                time.sleep(0.1 + 0.013 * turn)
                in_the_middle += segment.pinned > 0  # its pages are pinned for as long as it reads them
                child.kill()
                child.wait(10)
            target[:] = 0x5A
            time.sleep(0.3)
            assert (target == 0x5A).all(), f"written after the process had ended (turn {turn})"
            assert wait_for(lambda: segment.pinned == 0)
    assert in_the_middle, "it was never killed while it read"
    del target
    landing.close()
    segment.close()


def test_a_reader_that_is_slow_loses_its_path_before_the_pins_go(
    owner: RdmaTransport, reader: RdmaTransport, segment: Segment, landing: Landing
) -> None:
    """The memory of a page is the owner's again only when no reader's device can reach it any more."""
    slow = RdmaListener("127.0.0.1:0", "", segment, SECRET, ServerLimits(send_timeout=0.5), owner.fabric)
    with slow, connect(reader, slow.address) as peer:
        stream, answer = peer._begin(lambda stream: _fetch(stream, ["ns:0:all"], [256 * KIB]), soon())
        assert isinstance(stream, RdmaStream)
        _, places = answer
        path = stream.paths[0]
        extent = landing.want("ns:0:all", 256 * KIB).into[0]
        assert _read(reader, path, places, extent) == [("SUCCESS", True)], "as long as it is pinned it can be read"
        assert segment.pinned == 1
        (serving_us,) = slow._connections
        assert isinstance(serving_us, RdmaStream) and len(serving_us.paths) == 1
        with_paths: list[int] = []
        unpin = segment.unpin
        segment.unpin = lambda pages: (with_paths.append(len(serving_us.paths)), unpin(pages))[1]  # type: ignore
        assert wait_for(lambda: segment.pinned == 0, 5)
        assert with_paths == [0], "the path is gone before the pin is"
        # From here on the owner may put another page there.
        segment.memory.view[:] = bytes(len(segment.memory.view))
        extent.view[:] = b"\x77" * extent.length
        (status, _), *_ = _read(reader, path, places, extent)
        assert status in ("RETRY_EXC_ERR", "REM_ACCESS_ERR", "REM_INV_REQ_ERR", "WR_FLUSH_ERR"), status
        assert bytes(extent.view) == b"\x77" * extent.length, "not a byte of what is there now"
        peer._release(stream, False)


def _fetch(stream: Any, keys: list[str], sizes: list[int]) -> Any:
    request = wire.ReadRequest(keys, sizes, 30.0)
    stream.send([wire.encode_read(request, wire.Kind.FETCH)], soon())
    _, payload = stream.receive_frame((wire.Kind.PLACES,), frames.MAX_PLACES_BYTES, soon())
    return frames.decode_places(payload, sizes, stream.opened)


def _read(
    transport: RdmaTransport, path: Path, places: Places, extent: Extent, *, lkey: int = 0, rkey: int = 0
) -> list[tuple[str, bool]]:
    """One read on a bare queue pair: the statuses of its completions."""
    registered = transport.fabric.local.prepare(extent.memory)
    here = Places(np.array([extent.address], np.uint64), np.array([extent.length], np.uint64), np.zeros(1, np.int64))
    plan = Plan(here, places, op=abi.OP_READ, max_pieces=4)
    local = registered.local_keys[path.adapter] ^ np.uint32(lkey)
    first = plan.chain(0, [len(plan)], local, path.remote_keys ^ np.uint32(rkey))
    path.pair.post(first)
    found: list[tuple[str, bool]] = []
    until = soon(10)
    while time.monotonic() < until and not found:
        found = [(meaning(int(c["status"])).name, int(c["id"]) == len(plan) - 1) for c in path.pair.collect()]
        time.sleep(0.001)
    return found


# -- every error path


class Raw:
    """Two connected queue pairs, one on each device, and a region at both ends."""

    def __init__(self, *, access: int = abi.REMOTE_READ | abi.REMOTE_WRITE) -> None:
        self.devices = Device("rxe0"), Device("rxe1")
        gids = 1
        self.here = QueuePair(self.devices[0], 1, gids, ethernet=True, depth=64, pieces=4)
        self.there = QueuePair(self.devices[1], 1, gids, ethernet=True)
        self.here.connect(self.there.local)
        self.there.connect(self.here.local, access=access)
        self.memory = [memory.create("raw", 1 * MIB) for _ in range(2)]
        self.local: Region = self.devices[0].register(self.memory[0].address, 1 * MIB, abi.LOCAL_WRITE)
        rights = abi.LOCAL_WRITE | abi.REMOTE_READ | abi.REMOTE_WRITE
        self.remote: Region = self.devices[1].register(self.memory[1].address, 1 * MIB, rights)

    def run(
        self,
        *,
        op: int = abi.OP_READ,
        count: int = 3,
        lkey: int | None = None,
        rkey: int | None = None,
        offset: int = 0,
    ) -> list[tuple[int, str]]:
        """Post ``count`` requests in one chain, the last signalled; the ids and statuses that come back."""
        size = 4 * KIB
        ones = np.full(count, size, np.uint64)
        at = np.arange(count, dtype=np.uint64) * np.uint64(size)
        keys = np.zeros(count, np.int64)
        here = Places(at + np.uint64(self.memory[0].address), ones, keys)
        there = Places(at + np.uint64(self.memory[1].address + offset), ones, keys)
        plan = Plan(here, there, op=op, max_pieces=1)
        local = np.array([self.local.lkey if lkey is None else lkey], np.uint32)
        remote = np.array([self.remote.rkey if rkey is None else rkey], np.uint32)
        self.here.post(plan.chain(0, [count], local, remote))
        found: list[tuple[int, str]] = []
        until = soon(10)
        while time.monotonic() < until and (not found or found[-1][0] != count - 1):
            found += [(int(c["id"]), meaning(int(c["status"])).name) for c in self.here.collect()]
            time.sleep(0.001)
        return found

    def close(self) -> None:
        for part in (self.here, self.there, self.local, self.remote, *self.devices, *self.memory):
            part.close()


@pytest.fixture
def raw() -> Iterator[Raw]:
    with contextlib.closing(Raw()) as made:
        yield made


FLUSHED = [(1, "WR_FLUSH_ERR"), (2, "WR_FLUSH_ERR")]


def test_requests_that_work(raw: Raw) -> None:
    raw.memory[1].view[: 12 * KIB] = os.urandom(12 * KIB)
    assert raw.run() == [(2, "SUCCESS")]
    assert raw.memory[0].view[: 12 * KIB] == raw.memory[1].view[: 12 * KIB]
    raw.memory[0].view[: 12 * KIB] = os.urandom(12 * KIB)
    assert raw.run(op=abi.OP_WRITE) == [(2, "SUCCESS")]
    assert raw.memory[0].view[: 12 * KIB] == raw.memory[1].view[: 12 * KIB]


@pytest.mark.parametrize(
    ("wrong", "status"),
    [
        ({"rkey": 0x1234}, "REM_ACCESS_ERR"),
        ({"offset": 1 * MIB - 1}, "REM_ACCESS_ERR"),
        ({"lkey": 0x5500}, "LOC_PROT_ERR"),
    ],
)
def test_what_is_wrong_with_a_request_comes_back(raw: Raw, wrong: dict[str, int], status: str) -> None:
    for key, region in (("rkey", raw.remote.rkey), ("lkey", raw.local.lkey)):
        if key in wrong:
            wrong = {key: region ^ wrong[key]}
    raw.memory[0].view[:] = b"\x55" * MIB
    assert raw.run(**wrong) == [(0, status), *FLUSHED]
    assert raw.memory[0].view[: 12 * KIB] == b"\x55" * (12 * KIB)
    assert {status for _, status in raw.run()} == {"WR_FLUSH_ERR"}, "a broken queue pair stays broken"


def test_a_region_that_went_away_cannot_be_read(raw: Raw) -> None:
    raw.remote.close()
    assert raw.run() == [(0, "REM_ACCESS_ERR"), *FLUSHED]


def test_the_segment_cannot_be_written(
    owner: RdmaTransport, reader: RdmaTransport, segment: Segment, landing: Landing
) -> None:
    """Not even by a peer that knows its key: the region is for reading."""
    held = bytes(segment.memory.view)
    with owner.listen("127.0.0.1:0", "", segment, SECRET) as listener, connect(reader, listener.address) as peer:
        stream, (_, places) = peer._begin(lambda stream: _fetch(stream, ["ns:0:all"], [256 * KIB]), soon())
        assert isinstance(stream, RdmaStream)
        path = stream.paths[0]
        source = landing.want("ns:0:all", 256 * KIB).into[0]
        registered = reader.fabric.local.prepare(landing.memory)
        here = Places(
            np.array([source.address], np.uint64), np.array([source.length], np.uint64), np.zeros(1, np.int64)
        )
        plan = Plan(here, places, op=abi.OP_WRITE, max_pieces=4)
        path.pair.post(plan.chain(0, [len(plan)], registered.local_keys[path.adapter], path.remote_keys))
        statuses: list[int] = []
        assert wait_for(lambda: bool(statuses.extend(path.pair.collect()["status"].tolist()) or statuses))
        assert meaning(statuses[0]).name == "REM_ACCESS_ERR"
        peer._release(stream, False)
    assert bytes(segment.memory.view) == held


def test_a_stale_key_costs_the_batch_and_not_the_peer(
    owner: RdmaTransport, reader: RdmaTransport, segment: Segment, landing: Landing
) -> None:
    with owner.listen("127.0.0.1:0", "", segment, SECRET) as listener, connect(reader, listener.address) as peer:
        assert peer.read(wants(landing), soon(), True) == [Outcome.OK] * 12
        for stream in peer._idle:
            assert isinstance(stream, RdmaStream)
            for path in stream.paths:
                path.remote_keys = path.remote_keys ^ np.uint32(0x4400)
        assert peer.read(wants(landing), soon(), True) == [Outcome.FAILED] * 12
        assert "REM_ACCESS_ERR" in peer.failure
        batch = wants(landing)
        assert peer.read(batch, soon(), True) == [Outcome.OK] * 12 and all(map(arrived, batch))
    with (
        contextlib.closing(RdmaTransport("rxe0")) as lenient,
        owner.listen("127.0.0.1:0", "", segment, SECRET) as listener,
        connect(lenient, listener.address) as peer,
    ):
        peer.probe(soon())
        for stream in peer._idle:
            assert isinstance(stream, RdmaStream)
            for path in stream.paths:
                path.remote_keys = path.remote_keys ^ np.uint32(0x4400)
        batch = wants(landing)
        assert peer.read(batch, soon(), True) == [Outcome.OK] * 12, "over TCP, within the same call"
        assert all(map(arrived, batch))


def test_an_owner_killed_in_mid_read(reader: RdmaTransport, segment: Segment, owner: RdmaTransport) -> None:
    landing, other = Landing(16 * MIB), Landing(16 * MIB)
    with (
        owner.listen("127.0.0.1:0", "", segment, SECRET) as listener,
        connect(reader, listener.address) as healthy,
        serving(8, 1 * MIB, device="rxe1") as child,
        connect(reader, child.address) as peer,
    ):
        assert healthy.read(wants(other, 8), soon(), True) == [Outcome.OK] * 8
        assert peer.read(wants(landing, 8, MIB), soon(), True) == [Outcome.OK] * 8
        landing.memory.view[:] = bytes(landing.memory.size)
        killer = threading.Timer(0.01, child.signal, (signal.SIGKILL,))
        killer.start()
        outcomes: list[Outcome] = []
        while Outcome.FAILED not in outcomes:  # the first ones may be through before it dies
            began = time.monotonic()
            outcomes = peer.read(wants(landing, 8, MIB), began + 5, True)
        killer.join()
        assert time.monotonic() - began < 5.5
        assert set(outcomes) <= {Outcome.OK, Outcome.FAILED}
        target = np.frombuffer(landing.memory.view, np.uint8)
        target[:] = 0x3C
        time.sleep(0.3)
        assert (target == 0x3C).all()
        del target
        pairs = [path.pair for stream in healthy._idle if isinstance(stream, RdmaStream) for path in stream.paths]
        batch = wants(other, 8)
        assert healthy.read(batch, soon(), True) == [Outcome.OK] * 8 and all(map(arrived, batch))
        assert pairs == [
            path.pair for stream in healthy._idle if isinstance(stream, RdmaStream) for path in stream.paths
        ], "the other peer's queue pairs were not touched"
        with serving(8, 1 * MIB, node="alpha~ffff0000", address=child.address, device="rxe1"):
            assert peer.read(wants(landing, 8, MIB), soon(5), True) == [Outcome.FAILED] * 8, "another incarnation"
            assert "another node" in peer.failure
    landing.close()
    other.close()


# -- links


@contextlib.contextmanager
def link_down(netdev: str) -> Iterator[None]:
    subprocess.run(["ip", "link", "set", netdev, "down"], check=True)
    try:
        yield
    finally:
        subprocess.run(["ip", "link", "set", netdev, "up"], check=True)


def test_a_path_that_breaks_is_replaced_by_the_other_and_comes_back(
    owner: RdmaTransport, segment: Segment, landing: Landing
) -> None:
    """One of two NICs: its work goes to the other within the deadline; both are used again afterwards."""
    with (
        contextlib.closing(RdmaTransport("rxe0,rxe1", strict=True)) as both,
        both.listen("127.0.0.1:0", "", segment, SECRET) as listener,
        connect(both, listener.address) as peer,
    ):
        batch = wants(landing)
        assert peer.read(batch, soon(), True) == [Outcome.OK] * 12 and all(map(arrived, batch))
        (stream,) = peer._idle
        assert isinstance(stream, RdmaStream) and len(stream.live()) == 2
        landing.memory.view[:] = bytes(landing.memory.size)
        # Both ends of the cable would go down together, so this one's queue pair breaks instead.
        stuck = stream.paths[0]
        a = abi.QueuePairAttributes(state=abi.STATE_ERROR)
        stuck.pair._modify(a, abi.ATTR_STATE)
        batch = wants(landing)
        assert peer.read(batch, soon(10), True) == [Outcome.OK] * 12 and all(map(arrived, batch))
        assert len(stream.live()) == 1 and both.fabric.rests.resting(stuck.key, time.monotonic())
        assert wait_for(lambda: time.monotonic() > stream.look_again, 5)
        batch = wants(landing)
        assert peer.read(batch, soon(10), True) == [Outcome.OK] * 12 and all(map(arrived, batch))
        (fresh,) = peer._idle
        assert isinstance(fresh, RdmaStream) and len(fresh.live()) == 2


def test_the_cable_is_pulled_and_plugged_in_again(owner: RdmaTransport, segment: Segment, landing: Landing) -> None:
    with (
        contextlib.closing(RdmaTransport("rxe0")) as lenient,
        owner.listen("127.0.0.1:0", "", segment, SECRET) as listener,
        connect(lenient, listener.address) as peer,
    ):
        assert peer.read(wants(landing), soon(), True) == [Outcome.OK] * 12
        before = lenient.stats()["rdma_read_pages"]
        with link_down("left"):
            batch = wants(landing)
            assert peer.read(batch, soon(5), True) == [Outcome.OK] * 12, "over TCP: loopback is not the cable"
            assert all(map(arrived, batch))
            assert lenient.stats()["rdma_reads_by_tcp"] >= 12
            assert lenient.stats()["rdma_read_pages"] == before

        def again() -> bool:
            batch = wants(landing)
            assert peer.read(batch, soon(5), True) == [Outcome.OK] * 12 and all(map(arrived, batch))
            return lenient.stats()["rdma_read_pages"] > before

        assert wait_for(again, 20)


def test_an_insistent_reader_fails_by_its_deadline_without_a_link(
    owner: RdmaTransport, reader: RdmaTransport, segment: Segment, landing: Landing
) -> None:
    with owner.listen("127.0.0.1:0", "", segment, SECRET) as listener, connect(reader, listener.address) as peer:
        assert peer.read(wants(landing), soon(), True) == [Outcome.OK] * 12
        with link_down("left"):
            began = time.monotonic()
            outcomes = peer.read(wants(landing), began + 3, True)
            assert time.monotonic() - began < 3.5
            assert set(outcomes) <= {Outcome.FAILED, Outcome.TIMEOUT}
            assert peer.failure

        def again() -> bool:
            return peer.read(wants(landing), soon(5), True) == [Outcome.OK] * 12

        assert wait_for(again, 20)


# -- who may what


def test_a_stranger_gets_no_key(owner: RdmaTransport, reader: RdmaTransport, segment: Segment) -> None:
    with owner.listen("127.0.0.1:0", "", segment, SECRET) as listener:
        wrong = Credentials(b"wrong", "prod")
        with connect(reader, listener.address, wrong) as peer, pytest.raises(ProtocolError, match="secret"):
            peer.probe(soon())
        host, port = listener.address.split(":")
        with socket.create_connection((host, int(port))) as sock:
            end = QueuePair(reader.fabric.adapters[0].device, 1, 1, ethernet=True)
            sock.sendall(frames.encode_open([frames.Offer(end.local, 0)]))
            sock.settimeout(10)
            answer = sock.recv(1 << 16)
            end.close()
        assert answer[:5] == wire.encode_frame(wire.Kind.REFUSAL, b"")[:5], "a refusal and nothing else"


def test_a_tcp_peer_is_served_and_an_absent_segment_is_waited_for(
    owner: RdmaTransport, segment: Segment, landing: Landing
) -> None:
    with (
        owner.listen("127.0.0.1:0", "", segment, SECRET) as listener,
        TcpTransport().connect(listener.address, NODE, SECRET) as peer,
    ):
        batch = wants(landing)
        assert peer.read(batch, soon(), True) == [Outcome.OK] * 12 and all(map(arrived, batch))
        assert peer.write([landing.offer("ns:new:all", 64 * KIB)], soon()) == [Outcome.OK]


def test_malformed_requests_never_kill_the_owner(
    owner: RdmaTransport, reader: RdmaTransport, segment: Segment, landing: Landing
) -> None:
    chance = random.Random(1)
    with owner.listen("127.0.0.1:0", "", segment, SECRET) as listener:
        host, port = listener.address.split(":")
        for turn in range(40):
            with contextlib.closing(RdmaStream(socket.socket())) as stream:
                stream.connect((host, int(port)), soon())
                stream.agree(ReaderHandshake(SECRET, NODE), soon())
                kind = [wire.Kind.OPEN, wire.Kind.FETCH, wire.Kind.PUSH, wire.Kind.RELEASE, wire.Kind.WRITTEN][turn % 5]
                stream.send([wire.encode_frame(kind, chance.randbytes(chance.randint(0, 200)))], soon())
                with contextlib.suppress(Unavailable):
                    stream.receive(1, soon(5))
        with connect(reader, listener.address) as peer:
            assert peer.read(wants(landing), soon(), True) == [Outcome.OK] * 12
        assert wait_for(lambda: segment.pinned == 0)


# -- nothing grows


def resources() -> dict[str, int]:
    """How many objects devices hold for this process, and its descriptors."""
    found = {"descriptors": len(os.listdir("/proc/self/fd"))}
    for kind in ("qp", "cq", "mr", "pd"):
        shown = subprocess.run(["rdma", "resource", "show", kind], capture_output=True, text=True, check=True).stdout
        found[kind] = sum(f"pid {os.getpid()} " in line + " " for line in shown.splitlines())
    return found


def resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def test_two_hundred_connections_leave_nothing_behind(
    owner: RdmaTransport, reader: RdmaTransport, segment: Segment, landing: Landing
) -> None:
    with owner.listen("127.0.0.1:0", "", segment, SECRET) as listener:
        first: dict[str, int] = {}
        memory_used = 0
        for turn in range(200):
            with connect(reader, listener.address) as peer:
                assert peer.read(wants(landing, 2), soon(), True) == [Outcome.OK] * 2
            if turn == 20:
                assert isinstance(listener, RdmaListener) and wait_for(lambda: not listener.connections)
                first, memory_used = resources(), resident()
        assert isinstance(listener, RdmaListener) and wait_for(lambda: not listener.connections)
        gc.collect()
        assert resources() == first
        assert resident() - memory_used < 4 * MIB


def test_memory_that_comes_and_goes_is_registered_and_let_go(
    owner: RdmaTransport, reader: RdmaTransport, segment: Segment
) -> None:
    """As engines attach and detach: let go of before it is unmapped, and never mistaken for what lay there before."""
    with owner.listen("127.0.0.1:0", "", segment, SECRET) as listener, connect(reader, listener.address) as peer:
        peer.probe(soon())
        before = resources()["mr"]
        for turn in range(20):
            landing = Landing(2 * MIB)
            reader.prepare(landing.memory)
            batch = wants(landing, 4)
            assert peer.read(batch, soon(), True) == [Outcome.OK] * 4 and all(map(arrived, batch)), turn
            assert resources()["mr"] == before + 1
            batch.clear()
            landing.close()
            assert resources()["mr"] == before
