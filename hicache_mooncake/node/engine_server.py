"""Serves engines of this host over a unix socket: one thread a connection, one request at a time on each."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from hicache_mooncake.errors import HiCacheMooncakeError, ProtocolError, Unavailable
from hicache_mooncake.memory import Memory
from hicache_mooncake.node import tokens
from hicache_mooncake.node.counters import Counters
from hicache_mooncake.node.engine_socket import close_listener
from hicache_mooncake.node.moves import Move, Wanted
from hicache_mooncake.node.pages import CHECK_MARGIN, PageService
from hicache_mooncake.node.session import Lent, Session, moves_of
from hicache_mooncake.protocol import messages as m
from hicache_mooncake.protocol.channel import Channel, close_all
from hicache_mooncake.protocol.fence import SIZE as FENCE_SIZE
from hicache_mooncake.protocol.fence import Fence
from hicache_mooncake.radix_bridge import object_keys, printable_hashes

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 512
"""Eight ranks with sixteen connections each, four times over; one thread each."""

OPENING_TIMEOUT = 5.0
"""Seconds a new connection may take to say who it is."""

CLOSE_WAIT = 5.0
"""Seconds a stopping node gives to the requests under way; each ends with its current page, once it is cut off."""

_SAY_AGAIN = 10.0
"""Seconds after which the log repeats that connections are refused."""

_ACCEPT_PAUSE = 0.1
"""Seconds to wait when the process is out of descriptors or threads: retrying at once would only spin."""

_CREDENTIALS = struct.Struct("3i")


class EngineServer:
    """Serves from construction. ``welcome`` greets a session, by its token; ``declare`` is told engines' namespaces."""

    def __init__(
        self,
        listener: socket.socket,
        address: str,
        pages: PageService,
        counters: Counters,
        *,
        pool: str,
        welcome: Callable[[bytes], m.Welcome],
        declare: Callable[[dict[str, dict[str, str]]], None],
        stats: Callable[[], dict[str, float]],
        observe: Callable[[str, float], None],
        prepare: Callable[[Memory], None],
        relay: Callable[[bytes, list[str], float], tuple[dict[str, bytes], dict[str, str]]],
    ) -> None:
        """Take over ``listener``, which :func:`listen` made for ``address``."""
        self.address = address
        self._pages = pages
        self._counters = counters
        self._pool = pool
        self._welcome = welcome
        self._declare = declare
        self._stats = stats
        self._observe = observe
        self._prepare = prepare
        self._relay = relay
        self._lock = threading.Lock()
        self._sessions: dict[bytes, Session] = {}
        self._channels: dict[Channel, threading.Thread] = {}
        self._closing = False
        self._refused_at = -_SAY_AGAIN
        self.idle_since = time.monotonic()
        self.served = False  # whether any engine has been here
        self._listener = listener
        self._acceptor = threading.Thread(target=self._accept, name="hcm-accept", daemon=True)
        self._acceptor.start()

    @property
    def sessions(self) -> int:
        """Engines attached now."""
        with self._lock:
            return sum(session.engine for session in self._sessions.values())

    def close(self) -> None:
        """Stop serving: requests under way end, their engines see the connection close."""
        with self._lock:
            self._closing = True
            channels = dict(self._channels)
            for channel in channels:
                channel.shutdown()
        close_listener(self._listener, self.address)
        deadline = time.monotonic() + CLOSE_WAIT
        for thread in (self._acceptor, *channels.values()):
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                logger.error("a request of an engine does not end: the node stops without waiting for it")

    def _accept(self) -> None:
        while not self._closing:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if self._closing:
                    return
                self._refused(str(error))
                continue
            self._admit(Channel(sock))

    def _admit(self, channel: Channel) -> None:
        refusal = ""
        with self._lock:
            if len(self._channels) >= MAX_CONNECTIONS:
                refusal = f"{MAX_CONNECTIONS} are open"
            elif not self._closing:
                thread = threading.Thread(target=self._serve, args=(channel,), name="hcm-engine", daemon=True)
                try:
                    thread.start()  # under the lock, so that close() never meets a thread that it cannot join
                    self._channels[channel] = thread
                    return
                except RuntimeError as error:
                    refusal = str(error)
        channel.close()
        if refusal:
            self._refused(refusal)

    def _refused(self, why: str) -> None:
        now = time.monotonic()
        if now - self._refused_at > _SAY_AGAIN:
            self._refused_at = now
            logger.warning("an engine's connection is refused: %s", why)
        time.sleep(_ACCEPT_PAUSE)

    def _serve(self, channel: Channel) -> None:
        try:
            if not _same_user(channel.sock):
                channel.send(m.Refused("another user's process"), time.monotonic() + 1)
                return
            body, descriptors = channel.receive(time.monotonic() + OPENING_TIMEOUT)
            close_all(descriptors)
            opening = m.decode_opening(body)
            if opening.version != m.VERSION:
                reason = f"protocol {m.VERSION} is spoken here, {opening.version} there: install one version per host"
                channel.send(m.Refused(reason), time.monotonic() + 1)
            elif isinstance(opening, m.Hello):
                self._serve_session(channel, opening)
            else:
                self._serve_joined(channel, opening)
        except Unavailable:
            return  # the engine went away: the usual end
        except HiCacheMooncakeError as error:
            logger.warning("an engine's connection is closed: %s", error)
            with suppress(HiCacheMooncakeError):
                channel.send(m.Refused(str(error)), time.monotonic() + 1)
        except Exception:
            logger.exception("an engine's connection is closed after an unexpected error")
        finally:
            with self._lock:
                # Both at once: close() shuts only what is in the table, never a descriptor that is used anew.
                self._channels.pop(channel, None)
                channel.close()

    # -- the first connection of an engine: what it lends and declares

    def _serve_session(self, channel: Channel, hello: m.Hello) -> None:
        if hello.pool != self._pool:
            channel.send(m.Refused(f"this node is of pool {self._pool!r}, not {hello.pool!r}"), time.monotonic() + 1)
            return
        session = Session(secrets.token_bytes(16), engine=hello.engine)
        level = logging.INFO if hello.engine else logging.DEBUG
        with self._lock:
            self._sessions[session.token] = session
            self.served = self.served or hello.engine
        logger.log(level, "engine %s attached", hello.label)
        try:
            channel.send(self._welcome(session.token))
            while True:
                body, descriptors = channel.receive()
                try:
                    reply = self._control(session, m.decode_request(body), descriptors)
                finally:
                    close_all(descriptors)  # those that nobody took over
                channel.send(reply)
        finally:
            with self._lock:
                self._sessions.pop(session.token, None)
                if hello.engine:
                    self.idle_since = time.monotonic()
            session.end()
            logger.log(level, "engine %s detached", hello.label)

    def _control(self, session: Session, request: m.Request, descriptors: list[int]) -> m.Reply:
        if isinstance(request, m.Attach):
            return _attach(session, request, descriptors, self._prepare)
        if isinstance(request, m.Declare):
            self._declare(request.namespaces)
            session.count_tokens(request.page_tokens)
            return m.Done()
        return self._plain(request)

    def _plain(self, request: m.Request) -> m.Reply:
        """Requests that touch none of the engine's memory."""
        if isinstance(request, m.Exists):
            with self._timed("exists"):
                return self._exists(request)
        if isinstance(request, m.Clear):
            objects, unreached = self._pages.clear(request.digests, _deadline(request.budget_ms))
            return m.Cleared(objects, unreached)
        if isinstance(request, m.Relay):
            return m.Relayed(*self._relay(request.body, request.nodes, _deadline(request.budget_ms)))
        if isinstance(request, m.Stats):
            return m.Counters(self._stats())
        raise ProtocolError(f"a {type(request).__name__} has no place here")

    # -- its further connections: one request after the other

    def _serve_joined(self, channel: Channel, opening: m.Join) -> None:
        with self._lock:
            session = self._sessions.get(opening.session)
        if session is None:
            channel.send(m.Refused("no such session: it has ended"), time.monotonic() + 1)
            return
        session.claim_slot(opening.slot)
        channel.send(m.Done())
        staging: list[Lent] = []
        try:
            while True:
                body, descriptors = channel.receive()
                try:
                    request = m.decode_request(body)
                    if isinstance(request, m.Stage):
                        reply = _stage(request, descriptors, staging)
                    elif isinstance(request, m.Put | m.Get):
                        with self._timed("put" if isinstance(request, m.Put) else "get"):
                            reply = self._move(session, opening.slot, request, staging)
                    else:
                        reply = self._plain(request)
                finally:
                    close_all(descriptors)  # those that nobody took over
                channel.send(reply)
        finally:
            for lent in staging:
                lent.memory.close()

    @contextmanager
    def _timed(self, op: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._observe(op, time.perf_counter() - started)

    def _exists(self, request: m.Exists) -> m.Found:
        deadline = _deadline(request.budget_ms)
        found: list[bytes] = []
        run: int | None = None
        for group in request.groups:
            asked = group.hashes if run is None or not request.limit_to_first else group.hashes[:run]
            keys = object_keys(group.digest, printable_hashes(asked), group.parts)
            first = run is None
            here = self._pages.exists(keys, deadline, stop_at_miss=request.prefix_only and first)
            width = len(group.parts)
            pages = (
                bytes(here) if width == 1 else bytes(all(here[at : at + width]) for at in range(0, len(here), width))
            )
            if first:
                missing = pages.find(0)
                run = len(pages) if missing < 0 else missing
            found.append(pages.ljust(len(group.hashes), b"\0"))
        return m.Found(found)

    def _move(self, session: Session, slot: int, request: m.Put | m.Get, staging: Sequence[Lent]) -> m.Moved:
        deadline = _deadline(request.budget_ms)
        session.enter()
        try:
            fence = session.fence
            assert fence is not None  # claim_slot made sure
            regions = [*staging, *session.regions]
            moves: list[Move] = []
            counts = []
            for group in request.groups:
                of_group = moves_of(group, regions)
                moves += of_group
                counts.append(len(of_group))

            wanted = Wanted(fence, slot, request.request)
            if isinstance(request, m.Put):
                statuses = self._pages.put(moves, wanted, deadline)
            elif fence.begin_writing(slot, request.request):
                try:
                    statuses = self._pages.get(moves, wanted, deadline)
                finally:
                    fence.end_writing(slot)
            else:
                statuses = bytearray([m.Status.REVOKED]) * len(moves)
        finally:
            session.leave()
        out: list[bytes] = []
        start = 0
        for count in counts:
            out.append(bytes(statuses[start : start + count]))
            start += count
        if session.page_tokens:
            moved = [(group.keys, of_group) for group, of_group in zip(request.groups, out, strict=True)]
            tokens.count(self._counters, "put" if isinstance(request, m.Put) else "get", moved, session.page_tokens)
        return m.Moved(out)


def _deadline(budget_ms: int) -> float:
    return time.monotonic() + budget_ms / 1000 - CHECK_MARGIN


def _attach(session: Session, request: m.Attach, descriptors: list[int], prepare: Callable[[Memory], None]) -> m.Reply:
    if len(descriptors) != len(request.regions) + request.with_fence:
        raise ProtocolError(f"{len(request.regions)} regions with {len(descriptors)} descriptors")
    if request.with_fence:
        session.set_fence(Fence(_map(descriptors, FENCE_SIZE, 0)))
    for region in request.regions:
        mapping = _map(descriptors, region.size, region.offset)
        session.lend(region, mapping)
        threading.Thread(target=_populate, args=(session, mapping, prepare), name="hcm-populate", daemon=True).start()
    return m.Done()


def _stage(request: m.Stage, descriptors: list[int], staging: list[Lent]) -> m.Reply:
    if len(descriptors) != 1:
        raise ProtocolError(f"a staging region with {len(descriptors)} descriptors")
    mapping = _map(descriptors, request.region.size, request.region.offset)
    for old in staging:
        old.memory.close()
    staging[:] = [Lent(request.region, mapping)]
    return m.Done()


def _map(descriptors: list[int], size: int, offset: int) -> Memory:
    """Take the next descriptor over and map it."""
    try:
        return Memory(descriptors.pop(0), size, offset=offset)
    except (OSError, OverflowError) as error:
        raise ProtocolError(f"the engine's memory cannot be mapped: {error}") from error


def _populate(session: Session, mapping: Memory, prepare: Callable[[Memory], None]) -> None:
    """Map the engine's pages into this process, and have devices know them, before the first request needs them."""
    with suppress(ProtocolError):
        session.enter()
        try:
            mapping.populate()
            prepare(mapping)
        finally:
            session.leave()


def _same_user(sock: socket.socket) -> bool:
    """Whether the other process runs as our user or as root: an abstract socket has no file mode to say so."""
    _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return uid in (0, os.getuid())
