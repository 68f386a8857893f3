"""Making sure that a node has stopped writing into this engine's pages, when it does not say so itself."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import struct
import time
from contextlib import suppress

from hicache_mooncake.protocol.fence import Fence

logger = logging.getLogger(__name__)

_CREDENTIALS = struct.Struct("3i")
_POLL = 0.001

FROZEN_GRACE = 0.1
"""Seconds past a call's deadline before a node that is stopped (SIGSTOP, a debugger) is killed."""

SLOW_GRACE = 1.0
"""The same for one that runs: on a busy host it is slow and not stuck, and killing it costs the host its whole cache,
where a late call costs one batch."""


class NodeProcess:
    """The process behind a unix socket, held by a pidfd: the number cannot be reused for another process meanwhile."""

    def __init__(self, sock: socket.socket) -> None:
        """A node in another pid namespace, or that may not be signalled, has no descriptor here."""
        self.pid, _, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        self._fd = -1
        if self.pid > 0:
            with suppress(OSError):
                self._fd = os.pidfd_open(self.pid)
        if self._fd >= 0:
            try:
                signal.pidfd_send_signal(self._fd, 0)
            except OSError:
                self.close()

    @property
    def can_be_stopped(self) -> bool:
        """Whether this engine could end the process. Only such a node is let into the engine's own pages."""
        return self._fd >= 0

    def exited(self, timeout: float = 0.0) -> bool:
        """Whether the process has ended, waiting up to ``timeout`` seconds for it."""
        if self._fd < 0:
            return False
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        return bool(poller.poll(timeout * 1000))

    def stopped(self) -> bool:
        """Whether the process is stopped and goes on only if somebody continues it."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                state = file.read().rpartition(b")")[2].split()[0]
        except OSError:
            return False  # gone, which its descriptor says too
        return state in (b"T", b"t")

    def kill(self) -> None:
        """End the process, whatever it does."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def wait_for_silence(fence: Fence, slot: int, request: int, node: NodeProcess, deadline: float) -> None:
    """Return when nothing can write into the pages of a revoked ``request`` any more.

    The node stops by itself within one page's copy, or one read's deadline, which is before the engine's ``deadline``
    (monotonic seconds). One that is frozen in the middle of it does not, and is killed: its pages are a cache, what the
    engine computes from its own is not. A killed process may take a moment to go; returning earlier than that would be
    the one wrong thing to do. Only for a node that can be stopped.
    """
    while fence.writing(slot, request) and not node.exited(_POLL):
        late = time.monotonic() - deadline
        if late > SLOW_GRACE or (late > FROZEN_GRACE and node.stopped()):
            logger.error(
                "node process %d is stuck while it writes into pages of this engine: killing it, it holds a cache only",
                node.pid,
            )
            node.kill()
            while not node.exited(1.0):
                logger.error("waiting for node process %d to be gone", node.pid)
            return
