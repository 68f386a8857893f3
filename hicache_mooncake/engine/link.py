"""One session with one node process: everything on the engine's side that ends together with it."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from hicache_mooncake.engine.lending import Lendable
from hicache_mooncake.engine.quiesce import NodeProcess
from hicache_mooncake.errors import HiCacheMooncakeError, ProtocolError, Unavailable
from hicache_mooncake.memory import Memory
from hicache_mooncake.protocol import messages as m
from hicache_mooncake.protocol.channel import Channel, close_all
from hicache_mooncake.protocol.fence import SLOTS, Fence

MAX_LINES = 16
"""Connections for requests at once; SGLang uses three threads, so a full set means that calls pile up."""


class Busy(Unavailable):
    """All connections carry a request. Says nothing about the node's health."""


class StartFailed(Unavailable):
    """A node cannot be started here: trying again at once would only fail again."""


class Finder(Protocol):
    """Knows where the node of this host is, and whether to start one if there is none: ``may_start``."""

    may_start: bool

    def dial(self, deadline: float) -> socket.socket:
        """A connected unix socket. Raises ``Unavailable``."""

    def find_or_start(self, deadline: float) -> socket.socket:
        """Like :meth:`dial`, starting a node first where that is ours. Raises ``StartFailed``, ``ConfigError`` too."""


class Line:
    """One connection for requests and its fence slot; ``staging`` is mapped by the node too."""

    def __init__(self, channel: Channel, slot: int) -> None:
        self.channel = channel
        self.slot = slot
        self.staging: Memory | None = None

    def close(self) -> None:
        self.channel.close()
        if self.staging is not None:
            self.staging.close()
            self.staging = None


class Link:
    """Thread-safe. Opened by constructing it; raises ``Unavailable``, ``ProtocolError`` or a started node's
    ``ConfigError``.

    ``broken`` means that it is of no use any more; ``silent`` that the node did not answer, and that nobody shall ask
    until a probe was answered.
    """

    def __init__(self, finder: Finder, pool: str, label: str, deadline: float) -> None:
        self._finder = finder
        self._changed = threading.Condition()  # over the lines
        self._free: list[Line] = []
        self._lines = 0
        self._slots = itertools.count()
        self._closed = False
        self._ordering = threading.Lock()  # one order at a time; requests never wait for it
        self.broken = threading.Event()
        self.silent = threading.Event()
        try:
            self.fence = Fence.create()
        except OSError as error:
            raise Unavailable(f"no memory for the fence: {error}") from error
        self._control: Channel | None = None
        self.node: NodeProcess | None = None
        try:
            self._control = Channel(finder.find_or_start(deadline))
            self.node = NodeProcess(self._control.sock)
            self._control.send(m.Hello(m.VERSION, pool, label), deadline)
            welcome = receive_reply(self._control, deadline)
            if not isinstance(welcome, m.Welcome):
                raise ProtocolError(f"the node does not accept this engine: {reason(welcome)}")
            self.welcome = welcome
            if not welcome.embedded:
                # An operator's node comes back when its operator says so: one of ours would take its place meanwhile.
                finder.may_start = False
            self.order(m.Attach([], with_fence=True), deadline, [self.fence.memory.fd])
        except BaseException:
            self.close()
            raise

    # -- orders: what is only acknowledged

    def order(self, message: m.Message, deadline: float, descriptors: Sequence[int] = ()) -> None:
        """Send what is only acknowledged. Raises ``Unavailable`` or ``ProtocolError``; the link is broken then."""
        if not self._ordering.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise Unavailable("an earlier order is still under way")
        try:
            control = self._control
            if control is None or self.broken.is_set():
                raise Unavailable("the session with the node is closed")
            control.send(message, deadline, descriptors)
            reply = receive_reply(control, deadline)
            if not isinstance(reply, m.Done):
                raise ProtocolError(f"the node refused: {reason(reply)}")
        except HiCacheMooncakeError:
            self.broken.set()
            raise
        finally:
            self._ordering.release()

    def lend(self, regions: Sequence[Lendable], deadline: float) -> None:
        """Let the node map regions. Raises like :meth:`order`."""
        for start in range(0, len(regions), m.MAX_DESCRIPTORS):
            some = regions[start : start + m.MAX_DESCRIPTORS]
            self.order(
                m.Attach([m.Region(region.base, region.size, region.offset) for region in some]),
                deadline,
                [region.fd for region in some],
            )

    # -- lines: one request at a time on each

    def line(self, deadline: float) -> Line:
        """A connection for one request, to be given back or discarded.

        Raises ``Busy``, ``Unavailable`` or ``ProtocolError``.
        """
        with self._changed:
            if self.broken.is_set():
                raise Unavailable("the session with the node is closed")
            if self._free:
                return self._free.pop()
            if self._lines >= MAX_LINES:
                raise Busy(f"{MAX_LINES} requests are under way already")
            self._lines += 1
            slot = next(self._slots)
        try:
            return self._join(slot, deadline)
        except BaseException as error:
            if isinstance(error, ProtocolError):
                self.broken.set()  # another node process answers on the socket: ours is gone
            self._one_line_less()
            raise

    def _join(self, slot: int, deadline: float) -> Line:
        if slot >= SLOTS:
            self.broken.set()
            raise Unavailable("the session's fence is used up; a new session is opened")
        channel = Channel(self._finder.dial(deadline))
        try:
            channel.send(m.Join(m.VERSION, self.welcome.session, slot), deadline)
            reply = receive_reply(channel, deadline)
            if not isinstance(reply, m.Done):
                raise ProtocolError(f"the node refused a connection: {reason(reply)}")
        except BaseException:
            channel.close()
            raise
        return Line(channel, slot)

    def give_back(self, line: Line) -> None:
        """The request has its reply: the next one may use the line."""
        with self._changed:
            if not self.broken.is_set():
                self._free.append(line)
                return
        self.discard(line)

    def discard(self, line: Line) -> None:
        """The connection is of no use any more. Its slot is never used again, its staging at most by the node."""
        line.close()
        self._one_line_less()

    def _one_line_less(self) -> None:
        with self._changed:
            self._lines -= 1
            self._changed.notify_all()

    # -- the end

    def dead(self) -> bool:
        """Whether the node's process or its end of the first connection is gone."""
        with self._changed:  # close() takes them away under it
            if self._closed or self._control is None or self.node is None:
                return True
            return self.node.exited() or self._control.hung_up()

    def close(self) -> None:
        """End the session; returns when the requests under way have ended, each by its own deadline."""
        self.broken.set()
        with self._changed:
            if self._closed:
                return
            self._closed = True
            free, self._free = self._free, []
        for line in free:
            self.discard(line)
        if self._control is not None:
            self._control.shutdown()  # an order that waits for its answer ends at once
            with self._ordering:
                self._control.close()
        with self._changed:
            while self._lines:  # they need the fence, and the process, to make sure of the node's silence
                self._changed.wait()
        if self.node is not None:
            self.node.close()
        self.fence.close()


def receive_reply(channel: Channel, deadline: float) -> m.Reply:
    """The node's next reply. Raises ``Unavailable`` or ``ProtocolError``."""
    body, descriptors = channel.receive(deadline)
    close_all(descriptors)
    return m.decode_reply(body)


def reason(reply: m.Reply) -> str:
    """Why a reply is not the one that was wanted, for people."""
    return reply.reason if isinstance(reply, m.Refused) else f"unexpected {type(reply).__name__}"
