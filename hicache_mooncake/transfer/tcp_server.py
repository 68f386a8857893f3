"""The data port over TCP: pages sent straight from the segment, one thread a connection.

The bytes of a request's pages go from the mapped segment into the socket by gathering system calls; nothing
is copied in Python. Pages stay pinned from before the reply's first byte until the kernel has taken the
last one, and for no longer than the reader said it would wait, nor than ``send_timeout``: a reader slower
than that loses its connection.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ConfigError, HiCacheMooncakeError, ProtocolError
from . import wire
from .address import Address, contact, parse
from .base import Credentials, Listener, Outcome, PageSource, Room
from .handshake import ListenerHandshake, Refusal, refusal_frame
from .tcp_stream import Buffer, Stream

logger = logging.getLogger(__name__)

_ACCEPT_PAUSE = 0.1
"""Seconds to wait when the process is out of descriptors: retrying at once would only spin."""
GONE = 0.2
"""Seconds after a reader's own deadline when it has surely gone. Cut any sooner, it would take it for a failure."""
_CLOSE_WAIT = 10.0
"""Seconds to wait for connection threads that have been cut off; only the page source can hold one up."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds on what readers may take of a node. Times in seconds."""

    connections: int = 512
    """Threads; 4 a peer leaves room for pools of more than a hundred nodes."""
    handshake_timeout: float = 5.0
    send_timeout: float = 10.0
    """For a whole reply. Pages are pinned while it is sent."""
    idle_timeout: float = 300.0
    """A connection without a request for so long is closed; readers reconnect."""


class TcpListener(Listener):
    """A data port that is being served."""

    _stream_type: type[Stream] = Stream
    _kinds: tuple[wire.Kind, ...] = (wire.Kind.READ, wire.Kind.STORE, wire.Kind.CLEAR, wire.Kind.DOUBT, wire.Kind.ORDER)

    def __init__(
        self, address: str, advertise: str, source: PageSource, credentials: Credentials, limits: ServerLimits
    ) -> None:
        wanted = _listen_address(address)
        self._source = source
        self._credentials = credentials
        self._limits = limits
        self._lock = threading.Lock()
        self._connections: dict[Stream, threading.Thread] = {}
        self._closing = False
        self._socket = _bind(wanted, address)
        try:
            self.address = str(contact(wanted._replace(port=self._socket.getsockname()[1]), advertise))
        except ProtocolError as error:
            self._socket.close()
            raise _not_told(address, advertise, error) from error
        self._thread = threading.Thread(target=self._accept, name=f"accept {self.address}", daemon=True)
        self._thread.start()

    @property
    def connections(self) -> int:
        """How many connections are open now, agreed or not."""
        with self._lock:
            return len(self._connections)

    def close(self) -> None:
        with self._lock:
            self._closing = True
            connections = dict(self._connections)
            for stream in connections:
                stream.shut()
        with contextlib.suppress(OSError):  # closed before
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread, which closing would not
        until = time.monotonic() + _CLOSE_WAIT
        for thread in (self._thread, *connections.values()):
            if thread is threading.current_thread():
                continue
            thread.join(max(until - time.monotonic(), 0))
            if thread.is_alive():
                logger.error("data port %s: %s does not end: the page source holds it", self.address, thread.name)
        self._socket.close()

    def _accept(self) -> None:
        while not self._closing:
            try:
                sock, peer = self._socket.accept()
            except OSError as error:
                if self._closing:
                    return
                logger.warning("data port %s cannot accept a connection: %s", self.address, error)
                time.sleep(_ACCEPT_PAUSE)
                continue
            self._admit(sock, peer[0])

    def _admit(self, sock: socket.socket, host: str) -> None:
        stream = self._stream_type(sock)
        with self._lock:
            full = len(self._connections) >= self._limits.connections
            if not (full or self._closing):
                thread = threading.Thread(target=self._serve, args=(stream, host), name=f"serve {host}", daemon=True)
                try:
                    # Under the lock, so that close() never meets a thread that it cannot join.
                    thread.start()
                except RuntimeError as error:
                    logger.warning("data port %s cannot serve %s: %s", self.address, host, error)
                else:
                    self._connections[stream] = thread
                    return
        if full:
            logger.warning("data port %s refuses %s: %d connections", self.address, host, self._limits.connections)
            with contextlib.suppress(OSError):  # it has gone, or will see the connection close
                sock.send(refusal_frame(Refusal.BUSY), socket.MSG_DONTWAIT)
        stream.close()

    def _serve(self, stream: Stream, host: str) -> None:
        agreed = False
        try:
            stream.prepare()
            handshake = ListenerHandshake(self._credentials, self._source.node_id)
            stream.agree(handshake, time.monotonic() + self._limits.handshake_timeout)
            agreed = True
            while not self._closing:
                self._answer(stream)
        except ProtocolError as error:
            logger.warning("data port %s drops %s: %s", self.address, host, error)
        except (HiCacheMooncakeError, OSError) as error:
            level = logging.DEBUG if agreed else logging.INFO
            logger.log(level, "data port %s: %s has gone: %s", self.address, host, error)
        except Exception:
            logger.exception("data port %s: serving %s failed", self.address, host)
        finally:
            self._ended(stream)
            with self._lock:
                # Both at once: close() shuts only what is in the table, never a descriptor that is used anew.
                stream.close()
                del self._connections[stream]

    def _answer(self, stream: Stream) -> None:
        kind, payload = stream.receive_frame(
            self._kinds,
            wire.MAX_REQUEST_BYTES,
            time.monotonic() + self._limits.idle_timeout,
            body_timeout=self._limits.handshake_timeout,
        )
        self._handle(stream, kind, payload)

    def _handle(self, stream: Stream, kind: wire.Kind, payload: bytearray) -> None:
        """Answer one request; its kind is one of ``_kinds``."""
        if kind is wire.Kind.READ:
            self._send_pages(stream, wire.decode_read(payload))
            return
        if kind is wire.Kind.STORE:
            self._take_pages(stream, wire.decode_store(payload))
            return
        if kind is wire.Kind.ORDER:
            answer = wire.encode_ordered(self._source.order(payload))
            stream.send([answer], time.monotonic() + self._limits.send_timeout)
            return
        if kind is wire.Kind.DOUBT:
            dropped = self._source.doubt(wire.decode_doubt(payload))
        else:
            digests = wire.decode_clear(payload)
            dropped = self._source.clear(digests) if digests else 0
        stream.send([wire.encode_cleared(dropped)], time.monotonic() + self._limits.send_timeout)

    def _ended(self, stream: Stream) -> None:
        """A connection is about to be closed: give up what belongs to it."""

    def _send_pages(self, stream: Stream, request: wire.ReadRequest) -> None:
        deadline = time.monotonic() + min(request.budget + GONE, self._limits.send_timeout)
        pages = self._source.pin(request.keys)
        buffers: list[Buffer] = [b""]
        try:
            rows = []
            announced = 0
            for page, size in zip(pages, request.sizes, strict=True):
                if page is None:
                    rows.append(wire.PageRow(Outcome.ABSENT, 0, 0))
                elif page.size != size:
                    rows.append(wire.PageRow(Outcome.SIZE, page.size, page.checksum))
                else:
                    rows.append(wire.PageRow(Outcome.OK, page.size, page.checksum))
                    buffers += [extent.view for extent in page.extents]
                    announced += size
            if sum(map(len, buffers)) != announced:
                raise ValueError("the extents of a pinned page do not have its size")
            buffers[0] = wire.encode_pages(rows)
            stream.send(buffers, deadline)
        finally:
            buffers.clear()
            self._source.unpin([page for page in pages if page is not None])

    def _take_pages(self, stream: Stream, request: wire.StoreRequest) -> None:
        deadline = time.monotonic() + min(request.budget + GONE, self._limits.send_timeout)
        made = self._source.make_room(request.keys, request.sizes)
        rooms = [room for room in made if room is not None]
        checksums = [given for given, room in zip(request.checksums, made, strict=True) if room is not None]
        try:
            held = self._source.holds(request.keys)
            answers = [
                wire.Acceptance.SEND if room is not None else wire.Acceptance.HELD if here else wire.Acceptance.FULL
                for room, here in zip(made, held, strict=True)
            ]
            stream.send([wire.encode_accepted(answers)], deadline)
            take_bytes(stream, rooms, deadline)
            coming, rooms = rooms, []
            kept = self._source.keep(coming, checksums)
        finally:
            self._source.give_up(rooms)
        stream.send([wire.encode_stored(kept)], deadline)


def take_bytes(stream: Stream, rooms: Sequence[Room], deadline: float) -> None:
    """Receive the pages that a writer sends, straight into the room that was made for them."""
    for _ in stream.receive_scattered([extent.view for room in rooms for extent in room.extents], deadline):
        continue


def _not_told(address: str, advertise: str, error: ProtocolError) -> ConfigError:
    if not advertise:
        why = f"listen is {address}, every interface of this host, so peers must be told one of its addresses"
        return ConfigError("advertise", "", why, hint="set advertise to a host, or host:port, that peers can contact")
    allowed = "a host, or host:port, that peers can contact is expected"
    return ConfigError("advertise", advertise, allowed, hint=str(error))


def _listen_address(address: str) -> Address:
    try:
        return parse(address, listening=True)
    except ProtocolError as error:
        raise ConfigError(
            "listen", address, "host:port is expected, where port 0 picks a free one", hint=str(error)
        ) from error


def _bind(wanted: Address, address: str) -> socket.socket:
    """A listening socket. The port stays bound from here on: nothing else can take it in between."""
    try:
        found = socket.getaddrinfo(
            wanted.host, wanted.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
        )
        family, _, _, _, where = found[0]
        dual = family == socket.AF_INET6 and wanted.host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(where[:2], family=family, backlog=128, dualstack_ipv6=dual)
    except OSError as error:
        raise ConfigError(
            "listen", address, f"an address of this host that is free is expected ({error.strerror or error})"
        ) from error
