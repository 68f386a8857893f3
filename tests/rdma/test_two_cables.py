"""Two NICs on each side, each pair with a cable of its own: one of them is pulled while pages move."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache_mooncake.transfer import Outcome
from hicache_mooncake.transfer.rdma import server
from hicache_mooncake.transfer.rdma.paths import RdmaStream
from hicache_mooncake.transfer.rdma.transport import RdmaTransport
from hicache_mooncake.transfer.rdma.verbs import Device, Region
from tests.transfer.pages import KIB, MIB, NODE, Landing, Segment, arrived
from tests.transfer.serving import SECRET

pytestmark = pytest.mark.rdma

PAGES = 16


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@pytest.fixture
def second_cable() -> Iterator[None]:
    """``rxe2`` and ``rxe3`` at its ends."""
    ip("link", "add", "left2", "mtu", "9000", "type", "veth", "peer", "name", "right2", "mtu", "9000")
    for number, end in enumerate(("left2", "right2")):
        ip("address", "add", f"10.9.0.{1 + number}/24", "dev", end)
        ip("link", "set", end, "up")
        for name, value in (("accept_local", "1"), ("rp_filter", "0")):
            Path(f"/proc/sys/net/ipv4/conf/{end}/{name}").write_text(value)
        subprocess.run(["rdma", "link", "add", f"rxe{2 + number}", "type", "rxe", "netdev", end], check=True)
    yield
    ip("link", "delete", "left2")  # its devices go with it
    until = time.monotonic() + 10
    while any(Path("/sys/class/infiniband", name).exists() for name in ("rxe2", "rxe3")):
        assert time.monotonic() < until
        time.sleep(0.05)


def wants(landing: Landing) -> list[object]:
    landing.reset()
    return [landing.want(f"ns:{index}:all", 512 * KIB, 2) for index in range(PAGES)]


@pytest.mark.timeout(120)
def test_a_cable_pulled_in_mid_read_costs_nothing_but_time(second_cable: None) -> None:
    segment, landing = Segment(PAGES * 512 * KIB), Landing(PAGES * 512 * KIB)
    for index in range(PAGES):
        segment.put(f"ns:{index}:all", 512 * KIB)
    with (
        contextlib.closing(RdmaTransport("rxe1,rxe3")) as owner,
        contextlib.closing(RdmaTransport("rxe0,rxe2", strict=True)) as reader,
        owner.listen("127.0.0.1:0", "", segment, SECRET) as listener,
        reader.connect(listener.address, NODE, SECRET) as peer,
    ):

        def live() -> list[int]:
            (stream,) = peer._idle  # type: ignore[attr-defined]
            assert isinstance(stream, RdmaStream)
            return [path.adapter for path in stream.live()]

        def read() -> None:
            landing.memory.view[:] = bytes(landing.memory.size)
            batch = wants(landing)
            outcomes = peer.read(batch, time.monotonic() + 5, True)  # type: ignore[arg-type]
            assert outcomes == [Outcome.OK] * PAGES, peer.failure
            assert all(arrived(page) for page in batch)  # type: ignore[arg-type]

        read()
        assert live() == [0, 1]
        moved = {nic: _bytes(nic) for nic in ("left", "left2")}
        read()
        both = {nic: _bytes(nic) - before for nic, before in moved.items()}
        assert min(both.values()) > segment.memory.size // 8, f"large batches are striped: {both}"

        puller = threading.Timer(0.02, ip, ("link", "set", "left", "down"))
        puller.start()
        try:
            until = time.monotonic() + 20
            while live() != [1]:
                read()
                assert time.monotonic() < until, "the loss of a cable was not noticed"
            for _ in range(3):
                read()
        finally:
            puller.join()
            ip("link", "set", "left", "up")
        until = time.monotonic() + 30
        while live() != [0, 1]:
            time.sleep(0.2)
            read()
            assert time.monotonic() < until, "the cable that is back was not used again"
        assert reader.stats().get("rdma_reads_by_tcp", 0) == 0
    landing.close()
    segment.close()


def _bytes(netdev: str) -> int:
    return int(Path(f"/sys/class/net/{netdev}/statistics/rx_bytes").read_text())


@pytest.mark.parametrize("strict", [False, True])
def test_pages_come_over_tcp_until_the_segment_is_registered(monkeypatch: pytest.MonkeyPatch, strict: bool) -> None:
    """As with a segment of hundreds of GiB: here the device is made slow."""
    register = Device.register
    go = threading.Event()

    def slowly(self: Device, address: int, length: int, access: int) -> Region:
        if length == 8 * MIB:
            assert go.wait(20)
        return register(self, address, length, access)

    monkeypatch.setattr(Device, "register", slowly)
    monkeypatch.setattr(server, "ON_DEMAND", 0)
    segment, landing = Segment(8 * MIB), Landing(4 * MIB)
    for index in range(4):
        segment.put(f"ns:{index}:all", 512 * KIB)
    batch = [landing.want(f"ns:{index}:all", 512 * KIB) for index in range(4)]
    with (
        contextlib.closing(RdmaTransport("rxe1")) as owner,
        contextlib.closing(RdmaTransport("rxe0", strict=strict)) as reader,
        owner.listen("127.0.0.1:0", "", segment, SECRET) as listener,
        reader.connect(listener.address, NODE, SECRET) as peer,
    ):
        assert peer.read(batch, time.monotonic() + 5, True) == [Outcome.OK] * 4 and all(map(arrived, batch))
        assert reader.stats() == {"rdma_reads_by_tcp": 4}
        go.set()
        until = time.monotonic() + 20
        while "rdma_read_pages" not in reader.stats():
            assert peer.read(batch, time.monotonic() + 5, True) == [Outcome.OK] * 4 and all(map(arrived, batch))
            assert time.monotonic() < until
            time.sleep(0.1)
    batch.clear()
    landing.close()
    segment.close()
