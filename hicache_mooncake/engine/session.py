"""An engine's connections to the node of its host: opened, used by several threads at once, renewed when they break.

Nothing here raises into SGLang. A call that the node does not answer in time is a set of misses; while there is no
node, every call is, at once, and a thread of ours looks for one.
"""

from __future__ import annotations

import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from hicache_mooncake import memory
from hicache_mooncake.engine.lending import Lendable
from hicache_mooncake.engine.quiesce import NodeProcess, wait_for_silence
from hicache_mooncake.errors import HiCacheMooncakeError, ProtocolError, Unavailable
from hicache_mooncake.memory import Memory
from hicache_mooncake.protocol import messages as m
from hicache_mooncake.protocol.channel import Channel, close_all
from hicache_mooncake.protocol.fence import SLOTS, Fence

logger = logging.getLogger(__name__)

MAX_LINES = 16
"""Connections for requests at once; SGLang uses three threads, so a full set means that calls pile up."""

NODE_SHARE = 0.8
"""Part of a call's time that the node gets; the rest is for its answer to arrive, or for making sure of its silence."""

OPEN_TIMEOUT = 5.0
"""Seconds that opening a session may take."""

PROBE_TIMEOUT = 1.0
"""Seconds that a node which missed a deadline has to show that it is alive, before its session is given up."""

FIRST_RETRY, LONGEST_RETRY = 0.25, 5.0
"""Seconds between two attempts to reach a node, doubling from the first to the longest."""


class Finder(Protocol):
    """Knows where the node of this host is."""

    may_start: bool

    def dial(self, deadline: float) -> socket.socket:
        """A connected unix socket. Raises ``Unavailable``."""

    def find_or_start(self, deadline: float) -> socket.socket:
        """Like :meth:`dial`, starting a node first where that is ours to do."""


class _Line:
    """One connection for requests and its fence slot; ``staging`` is mapped by the node too."""

    def __init__(self, channel: Channel, slot: int) -> None:
        self.channel = channel
        self.slot = slot
        self.staging: Memory | None = None

    def close(self) -> None:
        self.channel.close()
        if self.staging is not None:
            self.staging.close()


class _Link:
    """One session with one node process: everything that dies together."""

    def __init__(self, finder: Finder, pool: str, label: str, deadline: float) -> None:
        self._finder = finder
        self._lock = threading.Lock()
        self._free: list[_Line] = []
        self._lines = 0
        self._slots = itertools.count()
        self.broken = threading.Event()
        self.silent = threading.Event()  # did not answer; nobody asks until a probe of ours was answered
        self.fence = Fence.create()
        self.node: NodeProcess | None = None
        self._control: Channel | None = None
        try:
            self._control = Channel(finder.find_or_start(deadline))
            self.node = NodeProcess(self._control.sock)
            self._control.send(m.Hello(m.VERSION, pool, label), deadline)
            welcome = _reply(self._control, deadline)
            if not isinstance(welcome, m.Welcome):
                raise ProtocolError(f"the node does not accept this engine: {_reason(welcome)}")
            self.welcome = welcome
            self.order(m.Attach([], with_fence=True), deadline, [self.fence.memory.fd])
        except BaseException:
            self.close()
            raise

    def order(self, message: m.Message, deadline: float, descriptors: Sequence[int] = ()) -> None:
        """Send what is only acknowledged. Raises ``Unavailable`` or ``ProtocolError``; the link is broken then."""
        control = self._control
        if control is None or self.broken.is_set():
            raise Unavailable("the session with the node is closed")
        try:
            with self._lock:
                control.send(message, deadline, descriptors)
                reply = _reply(control, deadline)
            if not isinstance(reply, m.Done):
                raise ProtocolError(f"the node refused: {_reason(reply)}")
        except HiCacheMooncakeError:
            self.broken.set()
            raise

    def line(self, deadline: float) -> _Line:
        """A connection for one request, opened if none is free. Raises ``Unavailable`` or ``ProtocolError``."""
        with self._lock:
            if self._free:
                return self._free.pop()
            if self._lines >= MAX_LINES:
                raise Unavailable(f"{MAX_LINES} requests are under way already")
            self._lines += 1
            slot = next(self._slots)
        try:
            if slot >= SLOTS:
                self.broken.set()
                raise Unavailable("the session's fence is used up; a new one is opened")
            channel = Channel(self._finder.dial(deadline))
            try:
                channel.send(m.Join(m.VERSION, self.welcome.session, slot), deadline)
                reply = _reply(channel, deadline)
                if not isinstance(reply, m.Done):
                    raise ProtocolError(f"the node refused a connection: {_reason(reply)}")
            except BaseException:
                channel.close()
                raise
        except HiCacheMooncakeError as error:
            with self._lock:
                self._lines -= 1
            if isinstance(error, ProtocolError):
                self.broken.set()  # another node process answers on the socket: ours is gone
            raise
        return _Line(channel, slot)

    def give_back(self, line: _Line) -> None:
        with self._lock:
            if not self.broken.is_set():
                self._free.append(line)
                return
        self.discard(line)

    def discard(self, line: _Line) -> None:
        """The connection is of no use any more. Its slot is never used again, its staging at most by the node."""
        line.close()
        with self._lock:
            self._lines -= 1

    @property
    def busy(self) -> int:
        with self._lock:
            return self._lines - len(self._free)

    def close(self) -> None:
        """End the session. Requests under way fail; the caller has made sure of the rest."""
        self.broken.set()
        with self._lock:
            free, self._free = self._free, []
        for line in free:
            self.discard(line)
        if self._control is not None:
            self._control.close()
        while self.busy:  # each ends by its own deadline, and needs the fence until then
            time.sleep(0.002)
        if self.node is not None:
            self.node.close()
        self.fence.close()


class NodeSession:
    """What an engine keeps for its whole life: memory it lends, namespaces it uses, and a link that is renewed.

    ``finder`` knows where the node is, and may start one.
    """

    def __init__(self, finder: Finder, *, pool: str, label: str, op_timeout: float) -> None:
        self._finder = finder
        self._pool = pool
        self._label = label
        self.op_timeout = op_timeout
        self._requests = itertools.count(1)
        self._lock = threading.Lock()
        self._link: _Link | None = None
        self._regions: list[Lendable] = []
        self._namespaces: dict[str, dict[str, str]] = {}
        self._closed = False
        self._wake = threading.Event()
        self._renewer: threading.Thread | None = None
        self._count_lock = threading.Lock()
        self.failures: dict[str, int] = {}

    # -- life

    def open(self) -> m.Welcome:
        """Connect for the first time. Raises ``Unavailable``, ``ProtocolError``, a started node's ``ConfigError``."""
        give_up = time.monotonic() + OPEN_TIMEOUT
        while True:
            try:
                link = self._open_link()
                break
            except Unavailable:
                # A node that was just leaving when we came: the next attempt finds none, and starts one.
                if time.monotonic() > give_up or not self._finder.may_start:
                    raise
                time.sleep(FIRST_RETRY)
        self._renewer = threading.Thread(target=self._renew, name="hcm-session", daemon=True)
        self._renewer.start()
        return link.welcome

    def _open_link(self) -> _Link:
        deadline = time.monotonic() + OPEN_TIMEOUT
        link = _Link(self._finder, self._pool, self._label, deadline)
        try:
            with self._lock:
                if self._closed:
                    raise Unavailable("the session is closed")
                self._tell_all(link, deadline)
                self._link = link
        except BaseException:
            link.close()
            raise
        return link

    def _tell_all(self, link: _Link, deadline: float) -> None:
        if self._regions:
            _lend(link, self._regions, deadline)
        if self._namespaces:
            link.order(m.Declare(self._namespaces), deadline)

    def _renew(self) -> None:
        """Replace a broken link, in a thread of its own: callers never wait for it."""
        pause = FIRST_RETRY
        while not self._closed:
            link = self._link
            if link is not None and not link.broken.is_set() and not _dead(link):
                if link.silent.is_set() and not self._probe(link):
                    continue
                self._wake.wait(1.0)
                self._wake.clear()
                pause = FIRST_RETRY
                continue
            if link is not None:
                logger.warning("node %s is gone: every page is a miss until it is back", link.welcome.node_id)
                self._link = None
                link.close()
            try:
                renewed = self._open_link()
                logger.warning("node %s is connected", renewed.welcome.node_id)
            except (HiCacheMooncakeError, OSError) as error:
                if not self._closed:
                    logger.log(logging.WARNING if pause >= LONGEST_RETRY else logging.INFO, "no node yet: %s", error)
                self._wake.wait(pause)
                self._wake.clear()
                pause = min(LONGEST_RETRY, 2 * pause)

    def _probe(self, link: _Link) -> bool:
        """Whether a node that did not answer does so again; if not, the link is broken."""
        try:
            link.order(m.Declare({}), time.monotonic() + PROBE_TIMEOUT)
        except HiCacheMooncakeError:
            return False
        link.silent.clear()
        logger.warning("node %s answers again", link.welcome.node_id)
        return True

    def close(self) -> None:
        """Detach from the node. Safe to call again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            link, self._link = self._link, None
        self._wake.set()
        if link is not None:
            link.close()
        if self._renewer is not None:
            self._renewer.join(timeout=2 * OPEN_TIMEOUT)
        close_all([region.fd for region in self._regions])
        self._regions = []

    @property
    def connected(self) -> bool:
        link = self._link
        return link is not None and not link.broken.is_set()

    @property
    def can_write_in_place(self) -> bool:
        """Whether the node may work on lent memory: only one that this engine could stop."""
        link = self._link
        return link is not None and link.node is not None and link.node.can_be_stopped

    # -- what the node knows of this engine

    def lend(self, regions: Sequence[Lendable]) -> None:
        """Let this node, and every later one, map these regions; takes their descriptors. Raises ``Unavailable``."""
        with self._lock:
            self._regions.extend(regions)
            link = self._link
        if link is not None:
            _lend(link, regions, time.monotonic() + OPEN_TIMEOUT)

    def declare(self, digest: str, fields: Mapping[str, str]) -> None:
        """Have a namespace described in Redis. Raises ``Unavailable``."""
        with self._lock:
            self._namespaces[digest] = dict(fields)
            link = self._link
        if link is not None:
            link.order(m.Declare({digest: dict(fields)}), time.monotonic() + OPEN_TIMEOUT)

    # -- requests

    def ask(self, message: m.Exists | m.Clear | m.Stats) -> m.Reply | None:
        """A request that touches no memory; None when the node did not answer within ``op_timeout``."""
        deadline = time.monotonic() + self.op_timeout
        link, line = self._take(deadline)
        if link is None or line is None:
            return None
        try:
            line.channel.send(message, deadline)
            reply = _reply(line.channel, deadline)
        except HiCacheMooncakeError as error:
            self._lost(link, line, error)
            return None
        return self._checked(link, line, reply)

    def budget_ms(self, deadline: float) -> int:
        """What of the time up to ``deadline`` the node may use."""
        return max(1, int((deadline - time.monotonic()) * NODE_SHARE * 1000))

    def move(self, kind: type[m.Put] | type[m.Get], groups: Sequence[m.Pages], deadline: float) -> list[bytes] | None:
        """Store or fetch pages that lie in lent memory: statuses by group, None when the node did not answer.

        When this returns, nothing writes into the pages any more.
        """
        link, line = self._take(deadline)
        if link is None or line is None:
            return None
        return self._move_on(link, line, kind, groups, deadline, in_place=True)

    def move_staged(
        self,
        kind: type[m.Put] | type[m.Get],
        build: Callable[[Memory], m.Pages],
        done: Callable[[Memory, bytes], None],
        size: int,
        deadline: float,
    ) -> bool:
        """Like :meth:`move`, through a staging area of at least ``size`` bytes that only this request uses.

        ``build`` fills it (or only lays it out) and says what lies where; ``done`` gets the statuses. False when the
        node did not answer: the area is then never used again, so a late write into it harms nobody.
        """
        link, line = self._take(deadline)
        if link is None or line is None:
            return False
        staging = line.staging
        try:
            if staging is None or staging.size < size:
                if staging is not None:
                    line.staging = None
                    staging.close()
                staging = line.staging = memory.create("hicache-mooncake-staging", size)
                region = m.Region(staging.address, staging.size, 0)
                line.channel.send(m.Stage(region), deadline, [staging.fd])
                reply = _reply(line.channel, deadline)
                if not isinstance(reply, m.Done):
                    raise ProtocolError(f"the node refused a staging area: {_reason(reply)}")
        except (HiCacheMooncakeError, OSError) as error:
            self._lost(link, line, error)
            return False
        statuses = self._move_on(
            link,
            line,
            kind,
            [build(staging)],
            deadline,
            in_place=False,
            then=lambda got: done(staging, got[0]),
        )
        return statuses is not None

    def _move_on(
        self,
        link: _Link,
        line: _Line,
        kind: type[m.Put] | type[m.Get],
        groups: Sequence[m.Pages],
        deadline: float,
        *,
        in_place: bool,
        then: Callable[[list[bytes]], None] = lambda statuses: None,
    ) -> list[bytes] | None:
        request = next(self._requests)
        fence, node = link.fence, link.node
        assert node is not None
        fence.allow(line.slot, request)
        try:
            # The node's answer is waited for until shortly before the deadline; what is left is for its silence.
            patience = deadline - (deadline - time.monotonic()) * (1 - NODE_SHARE) / 2
            line.channel.send(kind(request, self.budget_ms(deadline), list(groups)), patience)
            reply = _reply(line.channel, patience)
        except HiCacheMooncakeError as error:
            if fence.revoke(line.slot, request) and in_place:
                wait_for_silence(fence, line.slot, request, node, deadline)
            self._lost(link, line, error)
            return None
        fence.finish(line.slot)
        if isinstance(reply, m.Moved) and len(reply.statuses) == len(groups):
            then(reply.statuses)
            self._checked(link, line, reply)
            return reply.statuses
        self._lost(link, line, ProtocolError(f"not an answer to a {kind.__name__}: {_reason(reply)}"))
        return None

    def _take(self, deadline: float) -> tuple[_Link | None, _Line | None]:
        link = self._link
        if link is None or link.broken.is_set() or link.silent.is_set():
            self._count("no_node")
            return None, None
        try:
            return link, link.line(deadline)
        except HiCacheMooncakeError as error:
            self._failed(link, error)
            return None, None

    def _checked(self, link: _Link, line: _Line, reply: m.Reply) -> m.Reply | None:
        if isinstance(reply, m.Refused):
            self._lost(link, line, ProtocolError(reply.reason))
            return None
        link.give_back(line)
        return reply

    def _lost(self, link: _Link, line: _Line, error: Exception) -> None:
        link.discard(line)
        self._failed(link, error)

    def _failed(self, link: _Link, error: Exception) -> None:
        self._count("refused" if isinstance(error, ProtocolError) else "no_answer")
        logger.warning("node %s: %s", link.welcome.node_id, error)
        if _dead(link):
            link.broken.set()
        elif isinstance(error, Unavailable):
            link.silent.set()
        self._wake.set()

    def _count(self, cause: str) -> None:
        with self._count_lock:
            self.failures[cause] = self.failures.get(cause, 0) + 1


def _dead(link: _Link) -> bool:
    """Whether the node's process or its end of the first connection is gone."""
    control = link._control
    if control is None or (link.node is not None and link.node.exited()):
        return True
    return control.hung_up()


def _lend(link: _Link, regions: Sequence[Lendable], deadline: float) -> None:
    for start in range(0, len(regions), m.MAX_DESCRIPTORS):
        some = regions[start : start + m.MAX_DESCRIPTORS]
        link.order(
            m.Attach([m.Region(region.base, region.size, region.offset) for region in some]),
            deadline,
            [region.fd for region in some],
        )


def _reply(channel: Channel, deadline: float) -> m.Reply:
    body, descriptors = channel.receive(deadline)
    close_all(descriptors)
    return m.decode_reply(body)


def _reason(reply: m.Reply) -> str:
    return reply.reason if isinstance(reply, m.Refused) else f"unexpected {type(reply).__name__}"
