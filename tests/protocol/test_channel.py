"""The unix socket between engine and node: frames, descriptors, deadlines, and ends of every kind."""

from __future__ import annotations

import array
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from hicache_mooncake.errors import ProtocolError, Unavailable
from hicache_mooncake.protocol import messages as m
from hicache_mooncake.protocol.channel import Channel, close_all

GRACE = 1.0
"""Seconds that a busy test machine may be late."""


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    here, there = map(Channel, socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
    before = len(os.listdir("/proc/self/fd"))
    yield here, there
    after = len(os.listdir("/proc/self/fd"))
    here.close()
    there.close()
    assert after <= before, "descriptors were left open"


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def files(count: int) -> list[int]:
    found = []
    for number in range(count):
        fd = os.memfd_create(f"test{number}")
        os.write(fd, str(number).encode())
        found.append(fd)
    return found


@pytest.mark.parametrize("count", [0, 1, 2, m.MAX_DESCRIPTORS])
def test_descriptors_arrive_in_order_and_close_on_exec(pair: tuple[Channel, Channel], count: int) -> None:
    here, there = pair
    sent = files(count)
    here.send(m.Attach([m.Region(0, 1, 0)] * count), soon(), sent)
    close_all(sent)
    body, got = there.receive(soon())
    assert isinstance(m.decode_request(body), m.Attach)
    assert [os.pread(fd, 8, 0).decode() for fd in got] == [str(number) for number in range(count)]
    assert not any(os.get_inheritable(fd) for fd in got)
    close_all(got)


def test_more_descriptors_than_allowed_are_refused_and_closed(pair: tuple[Channel, Channel]) -> None:
    here, there = pair
    sent = files(m.MAX_DESCRIPTORS + 1)
    frame = m.encode(m.Done())
    socket.send_fds(here.sock, [frame], sent)
    close_all(sent)
    with pytest.raises(ProtocolError, match="descriptors"):
        there.receive(soon())


def test_descriptors_on_every_byte_are_refused_and_closed(pair: tuple[Channel, Channel]) -> None:
    here, there = pair
    sent = files(40)
    for byte in m.FRAME.pack(3):
        socket.send_fds(here.sock, [bytes([byte])], sent)
    close_all(sent)
    with pytest.raises(ProtocolError, match="descriptors"):
        there.receive(soon())


def test_descriptors_that_no_longer_fit_into_the_process_are_an_error(pair: tuple[Channel, Channel]) -> None:
    here, there = pair
    sent = files(8)
    here.send(m.Attach([]), soon(), sent)
    close_all(sent)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = set(map(int, os.listdir("/proc/self/fd")))
    free = [number for number in range(200) if number not in taken]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[4], hard))
    try:
        with pytest.raises(ProtocolError, match="lost"):
            there.receive(soon())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_other_ancillary_data_is_ignored(pair: tuple[Channel, Channel]) -> None:
    here, there = pair
    there.sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    fds = files(1)
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
    here.sock.sendmsg([m.encode(m.Done())], [rights])
    close_all(fds)
    try:
        body, got = there.receive(soon())
    except ProtocolError:
        return  # no room for both: said, and nothing leaks
    assert isinstance(m.decode_reply(body), m.Done)
    close_all(got)


def test_a_big_frame_passes_while_both_sides_work(pair: tuple[Channel, Channel]) -> None:
    here, there = pair
    big = m.Found([os.urandom(1 << 20) for _ in range(40)])
    sender = threading.Thread(target=here.send, args=(big, soon(30)))
    sender.start()
    body, _ = there.receive(soon(30))
    sender.join(30)
    assert m.decode_reply(body) == big


def test_a_frame_that_comes_byte_by_byte(pair: tuple[Channel, Channel]) -> None:
    here, there = pair

    def drip() -> None:
        for byte in m.encode(m.Refused("slowly")):
            here.sock.sendall(bytes([byte]))
            time.sleep(0.002)

    sender = threading.Thread(target=drip)
    sender.start()
    body, _ = there.receive(soon())
    sender.join(5)
    assert m.decode_reply(body) == m.Refused("slowly")


@pytest.mark.parametrize("prefix", [b"", b"\x07", m.FRAME.pack(100), m.FRAME.pack(100) + b"half"])
def test_nothing_more_comes_by_the_deadline(pair: tuple[Channel, Channel], prefix: bytes) -> None:
    here, there = pair
    here.sock.sendall(prefix)
    started = time.monotonic()
    with pytest.raises(Unavailable):
        there.receive(soon(0.2))
    assert 0.15 < time.monotonic() - started < 0.2 + GRACE


def test_a_drip_does_not_extend_the_deadline(pair: tuple[Channel, Channel]) -> None:
    here, there = pair
    stop = threading.Event()

    def drip() -> None:
        here.sock.sendall(m.FRAME.pack(10_000))
        while not stop.wait(0.02):
            here.sock.sendall(b"x")

    sender = threading.Thread(target=drip)
    sender.start()
    started = time.monotonic()
    with pytest.raises(Unavailable):
        there.receive(soon(0.3))
    assert time.monotonic() - started < 0.3 + GRACE
    stop.set()
    sender.join(5)


def test_a_reader_that_does_not_read_costs_the_sender_its_deadline_only(pair: tuple[Channel, Channel]) -> None:
    here, _ = pair
    started = time.monotonic()
    with pytest.raises(Unavailable):
        here.send(m.Found([bytes(32 << 20)]), soon(0.3))
    assert time.monotonic() - started < 0.3 + GRACE


def test_a_passed_deadline_fails_at_once(pair: tuple[Channel, Channel]) -> None:
    here, there = pair
    here.send(m.Done(), soon())
    for attempt in (lambda: there.receive(soon(-1)), lambda: here.send(m.Done(), soon(-1))):
        with pytest.raises(Unavailable):
            attempt()


@pytest.mark.parametrize("sent", [b"", m.FRAME.pack(100)[:2], m.FRAME.pack(100), m.FRAME.pack(100) + b"half"])
def test_an_end_in_the_middle_of_a_frame(pair: tuple[Channel, Channel], sent: bytes) -> None:
    here, there = pair
    here.sock.sendall(sent)
    here.sock.shutdown(socket.SHUT_WR)  # half-closed: it still reads
    assert there.hung_up()
    with pytest.raises(Unavailable, match="closed"):
        there.receive(soon())
    there.send(m.Done(), soon())
    assert m.decode_reply(here.receive(soon())[0]) == m.Done()


def test_what_is_no_frame_is_refused(pair: tuple[Channel, Channel]) -> None:
    here, there = pair
    here.sock.sendall(b"GET / HTTP/1.1\r\n")
    with pytest.raises(ProtocolError):
        there.receive(soon())


def test_shutdown_wakes_the_thread_that_waits(pair: tuple[Channel, Channel]) -> None:
    here, there = pair
    threading.Timer(0.1, there.shutdown).start()
    with pytest.raises(Unavailable):
        there.receive(soon(30))
    there.shutdown()  # again: harmless
    with pytest.raises(Unavailable):
        for _ in range(2):
            here.send(m.Done(), soon())


def test_hung_up_is_said_of_a_closed_end_too(pair: tuple[Channel, Channel]) -> None:
    here, there = pair
    assert not here.hung_up()
    there.close()
    assert here.hung_up() and there.hung_up()
