"""One TCP connection whose every wait ends by a deadline.

The socket is blocking and the kernel's own receive and send timeouts are set before each call: one system
call then moves as much as it can, where a Python timeout would poll first and wake up for every segment.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias

from ..errors import Unavailable
from .handshake import ListenerHandshake, ReaderHandshake
from .wire import HEADER_SIZE, Kind, decode_header

Buffer: TypeAlias = "bytes | bytearray | memoryview"

_IOV_MAX: Final = 1024
"""Pieces that one sendmsg or recvmsg takes (UIO_MAXIOV)."""
_SEND_STEP: Final = 1 << 20
"""Bytes of one sendmsg. While one runs, the peer's acknowledgements wait; a longer one stalls the window."""
_RECEIVE_WINDOW: Final = 4 << 20
"""Bytes offered to one recvmsg: what came in is checked while it is still in the processor's cache."""
_LOW_WATER: Final = 1 << 20
"""A sleeping receiver is woken when this much has come, not for every segment: half of the CPU time."""
_LOOK_ANYWAY: Final = 20.0
"""Milliseconds a receiver sleeps at most before it takes what is there, low water or not."""
_TIMEVAL = struct.Struct("@ll")
_KEEPALIVE: Final = (
    (socket.TCP_KEEPIDLE, 30),
    (socket.TCP_KEEPINTVL, 10),
    (socket.TCP_KEEPCNT, 3),
)
"""A peer whose host has vanished is noticed after a minute, also on a connection that is idle."""


class DeadlinePassed(Unavailable):
    """The peer did not answer, or did not take what it was sent, in time."""


class Disconnected(Unavailable):
    """The connection ended or broke."""


class Stream:
    """A connected socket. One thread uses it at a time; :meth:`shut` may be called from any other."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._low_water = 1
        self._poll = select.poll()
        self.idle_since = 0.0

    def prepare(self) -> None:
        """Set the options of a connection. The kernel tunes the buffer sizes itself."""
        self._socket.settimeout(None)
        self._poll.register(self._socket, select.POLLIN)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            self._socket.setsockopt(socket.IPPROTO_TCP, option, value)

    def connect(self, where: tuple[Any, ...], deadline: float) -> None:
        """Connect the socket to ``where`` and prepare it."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise DeadlinePassed("the deadline passed")
        self._socket.settimeout(left)
        try:
            self._socket.connect(where)
            self.prepare()
        except TimeoutError:
            raise DeadlinePassed("it did not accept a connection in time") from None
        except OSError as error:
            raise Disconnected(f"it does not accept connections: {error.strerror or error}") from error

    def send(self, buffers: Sequence[Buffer], deadline: float) -> None:
        """Send all of ``buffers``, gathered from where they lie."""
        pending = [buffer for buffer in buffers if len(buffer)]
        first = 0
        while first < len(pending):
            last, step = first, 0
            while last < len(pending) and last - first < _IOV_MAX and step < _SEND_STEP:
                step += len(pending[last])
                last += 1
            self._limit(socket.SO_SNDTIMEO, deadline)
            try:
                sent = self._socket.sendmsg(pending[first:last])
            except BlockingIOError:
                raise DeadlinePassed("the peer does not take what it asked for in time") from None
            except OSError as error:
                raise Disconnected(f"the connection broke: {error.strerror or error}") from error
            first = _advance(pending, first, sent)

    def receive(self, size: int, deadline: float) -> bytearray:
        """Exactly ``size`` bytes, for frames."""
        data = bytearray(size)
        view = memoryview(data)
        done = 0
        while done < size:
            done += self._receive_some([view[done:]], deadline)
        return data

    def receive_frame(
        self, allowed: Sequence[Kind], limit: int, deadline: float, *, body_timeout: float | None = None
    ) -> tuple[Kind, bytearray]:
        """A frame's kind and payload. After its header the rest has ``body_timeout`` seconds, if given."""
        kind, size = decode_header(self.receive(HEADER_SIZE, deadline), allowed, limit)
        if body_timeout is not None:
            deadline = time.monotonic() + body_timeout
        return kind, self.receive(size, deadline)

    def receive_scattered(self, buffers: Sequence[memoryview], deadline: float) -> Iterator[int]:
        """Fill ``buffers`` in order; yields how many of them are full, each time there are more.

        None of them may be empty. When the generator ends or raises, nothing writes into them any more.
        """
        pending = list(buffers)
        sizes = list(map(len, pending))
        left = sum(sizes)
        first = last = window = 0
        try:
            while left:
                while last < len(pending) and last - first < _IOV_MAX and window < _RECEIVE_WINDOW:
                    window += sizes[last]
                    last += 1
                self._wake_at(min(_LOW_WATER, window, left))
                got = self._receive_ready(pending[first:last], deadline)
                left -= got
                window -= got
                reached = _advance(pending, first, got)
                if reached > first:
                    first = reached
                    yield first
        finally:
            pending.clear()
        self._wake_at(1)

    def agree(self, handshake: ReaderHandshake | ListenerHandshake, deadline: float) -> None:
        """Carry out a handshake. Raises what it ends with."""
        if isinstance(handshake, ReaderHandshake):
            self.send([handshake.begin()], deadline)
        while not handshake.done:
            answer = handshake.feed(bytes(self.receive(handshake.wanted, deadline)))
            self.send([answer], deadline)
            if handshake.error is not None:
                raise handshake.error

    def is_quiet(self) -> bool:
        """Whether an idle connection is open with nothing to read, as it must be between two requests."""
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def fileno(self) -> int:
        """For poll: readable between two answers means that the other side has gone, or we were shut."""
        return self._socket.fileno()

    def shut(self) -> None:
        """Make the thread that uses the connection fail at once; it stays that thread's to close."""
        with contextlib.suppress(OSError):  # not connected: just what is wanted
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _receive_some(self, buffers: Sequence[memoryview], deadline: float) -> int:
        self._limit(socket.SO_RCVTIMEO, deadline)
        try:
            got = self._socket.recvmsg_into(buffers)[0]
        except BlockingIOError:
            raise DeadlinePassed("the peer did not answer in time") from None
        except OSError as error:
            raise Disconnected(f"the connection broke: {error.strerror or error}") from error
        if not got:
            raise Disconnected("the peer closed the connection")
        return got

    def _receive_ready(self, buffers: Sequence[memoryview], deadline: float) -> int:
        """Sleep until the low water mark is reached, then take what is there; may be 0.

        Sleeping in recvmsg itself would not do. It may (1) take what is there, less than the mark, (2)
        sleep on for the rest of it, and (3) not be woken when that comes, because the kernel counts only
        what is not taken yet.
        """
        left = deadline - time.monotonic()
        if left <= 0:
            raise DeadlinePassed("the peer did not send all in time")
        self._poll.poll(min(left * 1000, _LOOK_ANYWAY))
        try:
            got = self._socket.recvmsg_into(buffers, 0, socket.MSG_DONTWAIT)[0]
        except BlockingIOError:
            return 0
        except OSError as error:
            raise Disconnected(f"the connection broke: {error.strerror or error}") from error
        if not got:
            raise Disconnected("the peer closed the connection")
        return got

    def _limit(self, option: int, deadline: float) -> None:
        """Let the next call wait until ``deadline``. Set anew each time: it is a limit of each call."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise DeadlinePassed("the deadline passed")
        seconds = int(left)
        # Zero would mean no limit at all.
        microseconds = max(int((left - seconds) * 1e6), 1)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(seconds, microseconds))
        except OSError as error:
            raise Disconnected(f"the connection broke: {error.strerror or error}") from error

    def _wake_at(self, size: int) -> None:
        """Set how many bytes wake a receiver: never more than are to come, or it would sleep on."""
        if size != self._low_water:
            with contextlib.suppress(OSError):  # it saves wake-ups; receiving works without, or says what is wrong
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
                self._low_water = size


def _advance(pending: list[Buffer] | list[memoryview], first: int, moved: int) -> int:
    """Step over ``moved`` bytes from buffer ``first`` on; the buffer they end in is cut."""
    while first < len(pending) and moved >= len(pending[first]):
        moved -= len(pending[first])
        first += 1
    if moved:
        pending[first] = memoryview(pending[first])[moved:]
    return first
