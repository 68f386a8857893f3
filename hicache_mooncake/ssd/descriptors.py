"""A bounded number of open files: a store has thousands, and a process only so many descriptors."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable

MOST_OPEN = 256


class _Open:
    __slots__ = ("descriptor", "stale", "users")

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.users = 0
        self.stale = False


class Descriptors:
    """Files by number, opened on first use, the longest unused closed first; more than ``most`` only while in use.

    Thread-safe. ``open_file`` opens a file by its number and raises ``OSError``; it is called without the lock.
    """

    def __init__(self, open_file: Callable[[int], int], most: int = MOST_OPEN) -> None:
        self._open_file = open_file
        self._most = most
        self._open: OrderedDict[int, _Open] = OrderedDict()
        self._lock = threading.Lock()

    def acquire(self, number: int) -> int:
        """The file's descriptor, kept open until :meth:`release`. Raises ``OSError``."""
        with self._lock:
            found = self._open.get(number)
            if found is not None:
                self._open.move_to_end(number)
                found.users += 1
                return found.descriptor
        descriptor = self._open_file(number)
        with self._lock:
            raced = self._open.get(number)
            if raced is not None:
                os.close(descriptor)
                raced.users += 1
                return raced.descriptor
            mine = self._open[number] = _Open(descriptor)
            mine.users = 1
            self._close_unused(self._most)
        return descriptor

    def put(self, number: int, descriptor: int) -> None:
        """Take over a file that is open already, unused."""
        with self._lock:
            self._open[number] = _Open(descriptor)
            self._close_unused(self._most)

    def release(self, number: int) -> None:
        """What :meth:`acquire` was called for is done."""
        with self._lock:
            found = self._open[number]
            found.users -= 1
            if found.stale and not found.users:
                del self._open[number]
                os.close(found.descriptor)

    def forget(self, number: int) -> None:
        """Close the file, as soon as nobody uses it."""
        with self._lock:
            found = self._open.get(number)
            if found is None:
                return
            if found.users:
                found.stale = True
            else:
                del self._open[number]
                os.close(found.descriptor)

    def close(self) -> None:
        """Close everything that is not in use."""
        with self._lock:
            self._close_unused(0)

    def _close_unused(self, most: int) -> None:
        for number in list(self._open):
            if len(self._open) <= most:
                return
            if not self._open[number].users:
                os.close(self._open.pop(number).descriptor)
