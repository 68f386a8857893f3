"""Every test here is checked for descriptors and threads it left behind."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import settings

# A shared machine may be slow for a moment; the time bound of a test is pytest's.
settings.register_profile("transfer", deadline=None)
settings.load_profile("transfer")


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    descriptors, threads = open_descriptors(), set(threading.enumerate())
    yield
    gc.collect()
    # Threads that were told to end, and the other end of closed sockets, may take a moment.
    until = time.monotonic() + 5
    while time.monotonic() < until:
        if open_descriptors() <= descriptors and set(threading.enumerate()) <= threads:
            return
        time.sleep(0.02)
    assert set(threading.enumerate()) <= threads
    assert open_descriptors() <= descriptors
