"""Reading pages from a peer over TCP: a few reused connections, bytes scattered straight into their extents.

A batch is cut into requests, so that the owner never pins much for long. A large batch may use two
connections; each takes the next request from the batch when it is done with one. A page is checked as soon
as it is complete, while its bytes are still in the processor's cache.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from ..errors import HiCacheMooncakeError, Unavailable
from . import wire
from .address import Address, ip_literal
from .base import Credentials, Outcome, PageRead, PageWrite, Peer
from .handshake import ReaderHandshake
from .tcp_batch import ReadJob, deliver, offer, receive_pages, request_pages, requests, total_bytes
from .tcp_stream import DeadlinePassed, Disconnected, Stream

logger = logging.getLogger(__name__)

_REQUEST_BYTES: Final = 64 << 20
"""Of the pages of one request: half a second of a 1 Gbit/s link, and the request's own cost is lost in it."""
_SPLIT_BYTES: Final = 32 << 20
"""A smaller batch is not worth a second connection and its thread."""
_MAX_IDLE: Final = 240.0
"""Seconds after which an idle connection is not used again: less than a listener keeps it."""

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Bounds on what one peer may cost. Times in seconds."""

    connections: int = 4
    lanes: int = 2
    """Connections that one large batch may use at the same time."""
    connect_timeout: float = 1.0
    """Within a batch's deadline, so that an unreachable host leaves time to ask another one."""


class TcpPeer(Peer):
    """The connections to one node. Steps that another way of moving the bytes does differently are methods."""

    _stream_type: type[Stream] = Stream

    def __init__(self, address: Address, node_id: str, credentials: Credentials, limits: ClientLimits) -> None:
        ReaderHandshake(credentials, node_id)  # refuses names that could never be sent
        self.address = str(address)
        self.node_id = node_id
        self.failure = ""
        self._where = address
        self._credentials = credentials
        self._limits = limits
        self._slots = threading.Semaphore(limits.connections)
        self._lock = threading.Lock()
        self._idle: list[Stream] = []
        self._busy: set[Stream] = set()
        self._closed = False

    def read(self, batch: Sequence[PageRead], deadline: float, verify: bool) -> list[Outcome]:
        total = total_bytes(batch)
        if not batch:
            return []
        lanes = self._limits.lanes if total >= _SPLIT_BYTES else 1
        todo = deque(requests(batch, min(_REQUEST_BYTES, -(-total // lanes))))
        job = ReadJob(batch, deadline, verify, todo, [None] * len(batch))
        helpers: list[threading.Thread] = []
        try:
            for _ in range(min(lanes, len(todo)) - 1):
                helper = threading.Thread(
                    target=self._work, args=(job, False), name=f"read {self.address}", daemon=True
                )
                helper.start()
                helpers.append(helper)
            self._work(job, True)
        finally:
            # Each of their waits ends by the deadline; nothing may write into the extents after we return.
            for helper in helpers:
                helper.join()
        self._note(job.failure)
        return [job.unfinished if outcome is None else outcome for outcome in job.outcomes]

    def write(self, batch: Sequence[PageWrite], deadline: float) -> list[Outcome]:
        total = total_bytes([PageRead(page.key, page.size, page.source) for page in batch])
        if not batch:
            return []
        outcomes: list[Outcome | None] = [None] * len(batch)
        unfinished, failure = Outcome.TIMEOUT, f"all {self._limits.connections} connections were in use"
        if self._slots.acquire(timeout=max(deadline - time.monotonic(), 0)):
            stream: Stream | None = None
            healthy = False
            try:
                for part in requests(batch, min(_REQUEST_BYTES, total)):
                    ask = partial(self._offer, [batch[index] for index in part], deadline)
                    if stream is None:
                        stream, answers = self._begin(ask, deadline)
                    else:
                        answers = ask(stream)
                    self._deliver(stream, batch, part, answers, outcomes, deadline)
                healthy, failure = True, ""
            except HiCacheMooncakeError as error:
                unfinished = Outcome.TIMEOUT if isinstance(error, DeadlinePassed) else Outcome.FAILED
                failure = str(error)
            finally:
                if stream is not None:
                    self._release(stream, healthy)
                self._slots.release()
        self._note(failure)
        return [unfinished if outcome is None else outcome for outcome in outcomes]

    def clear(self, digests: Sequence[str], deadline: float) -> int:
        return wire.decode_cleared(self._ask(wire.encode_clear(digests), wire.Kind.CLEARED, deadline))

    def doubt(self, keys: Sequence[str], deadline: float) -> int:
        return wire.decode_cleared(self._ask(wire.encode_doubt(keys), wire.Kind.CLEARED, deadline))

    def order(self, body: bytes, deadline: float) -> bytes:
        return bytes(self._ask(wire.encode_order(body), wire.Kind.ORDERED, deadline))

    def _ask(self, frame: bytes, kind: wire.Kind, deadline: float) -> bytearray:
        """Send what is answered by one frame; its payload."""
        limit = wire.MAX_ANSWER_BYTES if kind is wire.Kind.ORDERED else wire.MAX_REPLY_BYTES

        def ask(stream: Stream) -> bytearray:
            stream.send([frame], deadline)
            _, payload = stream.receive_frame((kind,), limit, deadline)
            return payload

        if not self._slots.acquire(timeout=max(deadline - time.monotonic(), 0)):
            raise DeadlinePassed(f"all {self._limits.connections} connections were in use")
        try:
            stream, answer = self._begin(ask, deadline)
            self._release(stream, True)
        except HiCacheMooncakeError as error:
            self._note(str(error))
            raise
        finally:
            self._slots.release()
        self._note("")
        return answer

    def probe(self, deadline: float) -> None:
        self.clear((), deadline)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for stream in self._busy:
                stream.shut()
        for stream in idle:
            stream.close()

    def _work(self, job: ReadJob, wait: bool) -> None:
        """Do requests of ``job`` on one connection until there are none left, or the connection fails.

        Without ``wait`` only if a connection may be used right now: the batch goes on without this lane.
        """
        if not self._slots.acquire(timeout=max(job.deadline - time.monotonic(), 0) if wait else 0):
            if wait:
                job.fail(DeadlinePassed(f"all {self._limits.connections} connections were in use"))
            return
        stream: Stream | None = None
        healthy = False
        try:
            while (part := job.next_part()) is not None:
                ask = partial(self._request, job, part)
                if stream is None:
                    stream, rows = self._begin(ask, job.deadline)
                else:
                    rows = ask(stream)
                self._receive(stream, job, part, rows)
            healthy = True
        except HiCacheMooncakeError as error:
            job.fail(error)
        finally:
            # Before the slot is free and before read() returns: a connection with a reply under way must be gone.
            if stream is not None:
                self._release(stream, healthy)
            self._slots.release()

    def _request(self, job: ReadJob, part: range, stream: Stream) -> Any:
        return request_pages(job, part, stream)

    def _receive(self, stream: Stream, job: ReadJob, part: range, answer: Any) -> None:
        receive_pages(stream, job, part, answer)

    def _offer(self, pages: Sequence[PageWrite], deadline: float, stream: Stream) -> Any:
        return offer(pages, deadline, stream)

    def _deliver(
        self,
        stream: Stream,
        batch: Sequence[PageWrite],
        part: range,
        answer: Any,
        outcomes: list[Outcome | None],
        deadline: float,
    ) -> None:
        deliver(stream, batch, part, answer, outcomes, deadline)

    def _agreed(self, stream: Stream, deadline: float) -> None:
        """Both sides of a new connection have accepted each other."""

    def _begin(self, ask: Callable[[Stream], _Answer], deadline: float) -> tuple[Stream, _Answer]:
        """A connection and its first answer. One that was closed while idle is replaced once."""
        stream = self._reuse()
        if stream is not None:
            try:
                return stream, self._try(ask, stream)
            except Disconnected:
                # The peer went while the connection was idle, and nothing was answered: the others are as stale.
                self._drop_idle()
        stream = self._dial(deadline)
        return stream, self._try(ask, stream)

    def _try(self, ask: Callable[[Stream], _Answer], stream: Stream) -> _Answer:
        try:
            return ask(stream)
        except BaseException:
            self._release(stream, False)
            raise

    def _reuse(self) -> Stream | None:
        oldest = time.monotonic() - _MAX_IDLE
        with self._lock:
            while self._idle:
                stream = self._idle.pop()
                if stream.idle_since >= oldest and stream.is_quiet():
                    self._busy.add(stream)
                    return stream
                stream.close()
        return None

    def _dial(self, deadline: float) -> Stream:
        """A new connection on which both sides have accepted each other."""
        limit = min(deadline, time.monotonic() + self._limits.connect_timeout)
        error: HiCacheMooncakeError = Unavailable("its name has no address")
        for family, where in _resolve(self._where, limit):
            try:
                stream = self._stream_type(socket.socket(family, socket.SOCK_STREAM))
            except OSError as failed:
                raise Unavailable(f"no socket for a connection: {failed.strerror or failed}") from failed
            with self._lock:
                if self._closed:
                    stream.close()
                    raise Unavailable("the peer was closed on our side")
                self._busy.add(stream)
            try:
                stream.connect(where, limit)
                stream.agree(ReaderHandshake(self._credentials, self.node_id), limit)
                self._agreed(stream, deadline)
                return stream
            except HiCacheMooncakeError as refused:
                self._release(stream, False)
                error = refused
            except BaseException:
                self._release(stream, False)
                raise
        if isinstance(error, DeadlinePassed) and limit < deadline:
            error = Unavailable(f"no connection within {self._limits.connect_timeout} s")
        try:
            raise error
        finally:
            del error  # its traceback holds this frame, and the frames above hold the batch's memory

    def _release(self, stream: Stream, healthy: bool) -> None:
        """Keep a connection for the next batch, or close it. Under the lock: close() may be shutting it."""
        with self._lock:
            self._busy.discard(stream)
            if healthy and not self._closed:
                stream.idle_since = time.monotonic()
                self._idle.append(stream)
            else:
                stream.close()

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for stream in idle:
            stream.close()

    def _note(self, failure: str) -> None:
        """Remember how it went; people are told when that changes, not every time."""
        before, self.failure = self.failure, failure
        if failure and not before:
            logger.warning("peer %s at %s fails: %s", self.node_id, self.address, failure)
        elif before and not failure:
            logger.info("peer %s at %s works again", self.node_id, self.address)


def _resolve(where: Address, deadline: float) -> list[tuple[socket.AddressFamily, tuple[Any, ...]]]:
    """Socket addresses of a peer. The resolver knows no deadline, so a name is looked up in a thread."""
    found: list[tuple[socket.AddressFamily, tuple[Any, ...]]] = []
    failed: list[OSError] = []

    def look_up() -> None:
        try:
            for family, _, _, _, address in socket.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM):
                found.append((family, address))
        except OSError as error:
            failed.append(error)

    if ip_literal(where.host) is not None:
        look_up()
    else:
        thread = threading.Thread(target=look_up, name=f"resolve {where.host}", daemon=True)
        thread.start()
        thread.join(max(deadline - time.monotonic(), 0))
        if thread.is_alive():
            raise DeadlinePassed(f"the name {where.host} was not resolved in time")
    if failed:
        raise Unavailable(f"the name {where.host} is not known: {failed[0].strerror or failed[0]}")
    return found
