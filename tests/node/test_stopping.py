"""A stop that a signal asks for, at any moment."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import pytest

from hicache_mooncake.node.stopping import StopRequest


@pytest.mark.timeout(60)
def test_a_signal_may_come_at_any_moment_of_waiting() -> None:
    chance = random.Random(1)
    before = signal.getsignal(signal.SIGUSR1)
    try:
        for _ in range(300):
            stop = StopRequest()
            signal.signal(signal.SIGUSR1, lambda *_, stop=stop: stop.set())
            killer = threading.Timer(chance.random() * 0.004, os.kill, (os.getpid(), signal.SIGUSR1))
            killer.start()
            while not stop.wait(0.0001):  # mostly in and out of waiting, where an Event's lock is held
                pass
            killer.join()
            stop.close()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_it_waits_no_longer_than_told_and_remembers() -> None:
    stop = StopRequest()
    started = time.monotonic()
    assert not stop.wait(0.05) and time.monotonic() - started >= 0.05
    for _ in range(100_000):  # more than a pipe holds
        stop.set()
    assert stop.wait(10) and stop.wait(10)
    stop.close()
