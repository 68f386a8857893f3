"""A request to stop that may come from a signal handler."""

from __future__ import annotations

import os
import select
from contextlib import suppress


class StopRequest:
    """Like ``threading.Event``, but :meth:`set` is safe in a signal handler.

    An Event is not: 1. the main thread waits on it and holds the lock of its condition for a moment 2. a signal is
    handled, in the main thread, and ``set`` waits for that lock for ever. A pipe has no such lock.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)

    def set(self) -> None:
        """Ask to stop. Safe to call again, from any thread or signal handler."""
        with suppress(BlockingIOError):  # asked for so often that the pipe is full
            os.write(self._write, b"x")

    def wait(self, timeout: float) -> bool:
        """Whether it was asked for, waiting up to ``timeout`` seconds for it."""
        return bool(select.select([self._read], [], [], timeout)[0])

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)
