"""A unix socket that carries frames and descriptors, with a deadline on every wait."""

from __future__ import annotations

import array
import os
import select
import socket
import time
from collections.abc import Sequence

from hicache_mooncake.errors import ProtocolError, Unavailable
from hicache_mooncake.protocol.messages import FRAME, MAX_DESCRIPTORS, Message, encode, frame_length

_HEADER = FRAME.size
_ANCILLARY = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)


class Channel:
    """One end of a connection. Used by one thread at a time; :meth:`shutdown` may come from any."""

    def __init__(self, sock: socket.socket) -> None:
        """Take ownership of a connected unix socket."""
        self.sock = sock

    def send(self, message: Message, deadline: float | None = None, descriptors: Sequence[int] = ()) -> None:
        """Send a frame, descriptors beside its first byte. Raises ``Unavailable``, or ``ProtocolError`` if too long."""
        frame = memoryview(encode(message))
        try:
            self._wait_until(deadline)
            if descriptors:
                sent = socket.send_fds(self.sock, [frame], list(descriptors))
                frame = frame[sent:]
            while frame:
                self._wait_until(deadline)
                frame = frame[self.sock.send(frame) :]
        except TimeoutError as error:
            raise Unavailable("the other side of the unix socket takes nothing: the deadline passed") from error
        except OSError as error:
            raise Unavailable(f"the other side of the unix socket is gone: {error}") from error

    def receive(self, deadline: float | None = None) -> tuple[bytearray, list[int]]:
        """The next frame's body and the descriptors beside it, which are the caller's to close.

        Raises ``Unavailable`` when the connection ended or the deadline passed, ``ProtocolError`` for nonsense.
        """
        descriptors: list[int] = []
        try:
            header = bytearray(_HEADER)
            self._fill(memoryview(header), deadline, descriptors)
            body = bytearray(frame_length(header))
            self._fill(memoryview(body), deadline, descriptors)
        except TimeoutError as error:
            close_all(descriptors)
            raise Unavailable("no answer on the unix socket before the deadline") from error
        except OSError as error:
            close_all(descriptors)
            raise Unavailable(f"the other side of the unix socket is gone: {error}") from error
        except (Unavailable, ProtocolError):
            close_all(descriptors)
            raise
        return body, descriptors

    def _fill(self, buffer: memoryview, deadline: float | None, descriptors: list[int]) -> None:
        while buffer:
            self._wait_until(deadline)
            received, ancillary, flags, _ = self.sock.recvmsg_into([buffer], _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
            for level, kind, data in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    got = array.array("i")
                    got.frombytes(data[: len(data) - len(data) % got.itemsize])
                    descriptors.extend(got)
            if flags & socket.MSG_CTRUNC or len(descriptors) > MAX_DESCRIPTORS:
                raise ProtocolError("descriptors were lost: too many, or this process has too many open")
            if not received:
                raise Unavailable("the other side of the unix socket closed it")
            buffer = buffer[received:]

    def _wait_until(self, deadline: float | None) -> None:
        if deadline is None:
            if self.sock.gettimeout() is not None:
                self.sock.settimeout(None)
            return
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer before the deadline")
        self.sock.settimeout(left)

    def hung_up(self) -> bool:
        """Whether the other side has closed its end, or this one is closed; does not wait."""
        if self.sock.fileno() < 0:
            return True
        poller = select.poll()
        poller.register(self.sock, select.POLLRDHUP)
        return bool(poller.poll(0))

    def shutdown(self) -> None:
        """Make the other side, and a thread of ours that waits here, see the end of the connection."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # not connected any more: nobody is left to be told

    def close(self) -> None:
        self.sock.close()


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors that arrived and nobody took over."""
    for descriptor in descriptors:
        os.close(descriptor)


def socket_address(name: str) -> str | bytes:
    """The kernel's address of a unix socket's name: ``@name`` is an abstract one, anything else a path."""
    return b"\0" + name[1:].encode() if name.startswith("@") else name


def default_socket(pool: str) -> str:
    """The abstract unix socket on which this user's node of ``pool`` is found. No file is left behind by it."""
    return f"@hicache-mooncake/{os.getuid()}/{pool}"
