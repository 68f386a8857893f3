"""The fence: after a revocation whose silence was waited for, nothing writes into the pages any more."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.connection import Connection

import pytest

from hicache_mooncake import memory
from hicache_mooncake.engine.quiesce import NodeProcess, wait_for_silence
from hicache_mooncake.memory import Memory
from hicache_mooncake.protocol.fence import SIZE, SLOTS, Fence, barrier_everywhere

PAGES = 64
PAGE = 4096


def test_a_request_is_allowed_from_allow_to_finish() -> None:
    fence = Fence.create()
    assert not fence.begin_writing(3, 7) and not fence.writing(3, 7)
    fence.allow(3, 7)
    assert fence.allowed(3, 7) and not fence.allowed(2, 7) and not fence.allowed(3, 6)
    assert not fence.begin_writing(3, 6), "a request of before"
    assert fence.begin_writing(3, 7) and fence.writing(3, 7)
    fence.end_writing(3)
    fence.finish(3)
    assert not fence.allowed(3, 7) and not fence.begin_writing(3, 7)
    fence.close()


def test_a_revoked_request_that_writes_is_waited_for_and_a_later_one_is_not_its_business() -> None:
    fence = Fence.create()
    fence.allow(SLOTS - 1, 5)
    assert not fence.revoke(SLOTS - 1, 5), "nobody writes yet"
    assert not fence.begin_writing(SLOTS - 1, 5)
    fence.allow(0, 6)
    assert fence.begin_writing(0, 6)
    assert fence.revoke(0, 6) and fence.writing(0, 6) and not fence.allowed(0, 6)
    assert not fence.writing(0, 5)
    fence.end_writing(0)
    assert not fence.writing(0, 6)
    fence.close()


def test_a_fence_needs_its_size() -> None:
    small = memory.create("small", 4096)
    with pytest.raises(ValueError, match=str(SIZE)):
        Fence(small)
    small.close()


def test_a_barrier_ends() -> None:
    started = time.monotonic()
    for _ in range(10):
        barrier_everywhere()
    assert time.monotonic() - started < 10


def _write_pages(fence_fd: int, pages_fd: int, slot: int, requests: Connection) -> None:
    """A node's thread: writes its request's number into every page, looking at the fence before each."""
    fence, pages = Fence(Memory(fence_fd, SIZE)), Memory(pages_fd, PAGES * PAGE)
    while True:
        request = requests.recv()
        if request < 0:
            return
        if fence.begin_writing(slot, request):
            for page in range(PAGES):
                if not fence.allowed(slot, request):
                    break
                if request % 7 == 0 and page == 3:
                    time.sleep(0.03)  # taken off the CPU between its look and its store
                ctypes.memset(pages.address + page * PAGE, 1 + request % 200, PAGE)
            fence.end_writing(slot)
        requests.send(request)


def test_pages_stay_as_the_engine_left_them_after_a_revocation() -> None:
    """Two processes, a slot each, hammered by revocations at random moments; the canary never changes."""
    context = multiprocessing.get_context("fork")
    fence = Fence.create()
    buffers = [memory.create("canary", PAGES * PAGE) for _ in range(2)]
    writers = []
    for slot, buffer in enumerate(buffers):
        here, there = context.Pipe()
        arguments = (os.dup(fence.memory.fd), os.dup(buffer.fd), slot, there)
        process = context.Process(target=_write_pages, args=arguments, daemon=True)
        process.start()
        os.close(arguments[0])
        os.close(arguments[1])
        there.close()
        writers.append((process, here))
    wrong: list[str] = []
    caught = [0, 0]
    until = time.monotonic() + 6

    def engine(slot: int) -> None:
        _, requests = writers[slot]
        buffer = buffers[slot]
        number = slot
        while time.monotonic() < until and not wrong:
            number += 2
            fence.allow(slot, number)
            requests.send(number)
            time.sleep((number % 11) * 0.00003)
            if fence.revoke(slot, number):
                caught[slot] += 1
                while fence.writing(slot, number):
                    time.sleep(0)
            canary = bytes([255 - number % 3]) * buffer.size
            buffer.view[:] = canary
            answered = requests.recv()
            time.sleep(0.0002)
            if answered != number or buffer.view != canary:
                wrong.append(f"slot {slot}, request {number}")

    threads = [threading.Thread(target=engine, args=(slot,)) for slot in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for process, requests in writers:
        requests.send(-1)
        process.join(10)
        requests.close()
    assert not wrong and all(caught), f"{wrong} {caught}"
    fence.close()
    for buffer in buffers:
        buffer.close()


class _Stuck:
    """A process that never ends its write, as the engine sees it."""

    def __init__(self) -> None:
        self.child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
        self.child.start()
        assert self.child.pid
        os.kill(self.child.pid, signal.SIGSTOP)
        self.node = NodeProcess.__new__(NodeProcess)
        self.node.pid = self.child.pid
        self.node._fd = os.pidfd_open(self.child.pid)


def test_a_node_that_is_stuck_while_it_writes_is_killed_shortly_after_the_deadline() -> None:
    fence, stuck = Fence.create(), _Stuck()
    fence.allow(1, 9)
    assert fence.begin_writing(1, 9) and fence.revoke(1, 9)
    deadline = time.monotonic() + 0.3
    wait_for_silence(fence, 1, 9, stuck.node, deadline)
    assert time.monotonic() >= deadline
    stuck.child.join(5)
    assert stuck.child.exitcode == -signal.SIGKILL
    wait_for_silence(fence, 1, 9, stuck.node, deadline)  # gone already: returns
    stuck.node.close()
    fence.close()


def test_a_node_that_ends_its_write_in_time_lives() -> None:
    fence, stuck = Fence.create(), _Stuck()
    fence.allow(1, 9)
    assert fence.begin_writing(1, 9) and fence.revoke(1, 9)
    timer = threading.Timer(0.2, fence.end_writing, [1])
    timer.start()
    wait_for_silence(fence, 1, 9, stuck.node, time.monotonic() + 5)
    timer.join()
    assert stuck.child.is_alive() and not fence.writing(1, 9)
    stuck.child.kill()
    stuck.child.join(5)
    stuck.node.close()
    fence.close()
