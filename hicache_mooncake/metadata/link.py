"""The way to one Redis: blocking connections shared by threads, and a bound on what a call waits.

redis-py provides the connection (TLS, AUTH, SELECT); the pool is ours, because a call here has one
promise to keep that a general client does not make: whatever happened to Redis, the caller has its answer or
:class:`Unavailable` within about ``timeout``, and the next call after Redis is back works.
"""

from __future__ import annotations

import ipaddress
import logging
import queue
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import hiredis
import redis.exceptions as failures

from hicache_mooncake.errors import ConfigError, Unavailable
from hicache_mooncake.metadata.permissions import ACL_RULES, REFUSED, grant
from hicache_mooncake.metadata.place import Address, Login

logger = logging.getLogger(__name__)

Command = Sequence["str | bytes | int"]

MAX_IDLE = 16
"""Connections kept open when unused: what a node's threads use at once; a burst above it is closed again."""

IDLE_SECONDS = 30.0
"""A connection unused for longer is not used again: a server's ``timeout`` or a firewall between may have ended it,
and a firewall does not say so. It is less than what any of them is usually set to."""

MAX_CONNECTING = 4
"""Threads that may hang in name resolution, which has no timeout of its own. Further callers fail at once."""

LEAST_WAIT = 0.01
"""Seconds a reply is waited for when the deadline was used up by another server: it may be here already."""

_CANNOT_SERVE = (failures.ReadOnlyError, failures.ClusterDownError, failures.BusyLoadingError)
_CANNOT_SERVE_WORDS = ("NOREPLICAS", "UNBLOCKED", "READONLY")  # what redis-py has no type for, or a script passes on


def cannot_serve(reply: object) -> bool:
    """Whether the server that replied is in the wrong role or state: the next attempt shall go elsewhere or anew."""
    return isinstance(reply, _CANNOT_SERVE) or (
        isinstance(reply, failures.ResponseError) and any(word in str(reply) for word in _CANNOT_SERVE_WORDS)
    )


class Link(ABC):
    """Send commands to the Redis of a directory, however its servers are arranged. Thread-safe."""

    rules = ACL_RULES
    """What the user must be allowed, for ACL SETUSER."""

    def __init__(self, place: str, user: str) -> None:
        """``place`` is for people, and holds no password."""
        self.place = place
        self.user = user

    @abstractmethod
    def call(self, commands: Sequence[Command], slots: Sequence[int] = ()) -> list[Any]:
        """The replies to ``commands``, in order, pipelined; an error reply is an exception in the list.

        ``slots`` says where in a Redis Cluster each command's keys are. The reply to one whose server cannot be
        reached is an :class:`Away`. Every command must be idempotent: it may be sent again, though a server
        may have run it. Raises :class:`Unavailable` when no command could be run.
        """

    @abstractmethod
    def servers(self) -> Sequence[RedisLink]:
        """The servers that hold the data now, each once. Raises :class:`Unavailable` when they are not known."""

    @abstractmethod
    def drop_idle(self) -> None:
        """Close what is idle, and what is in use as soon as it is given back."""

    @abstractmethod
    def close(self) -> None:
        """Close every connection; calls in progress finish, later ones raise :class:`Unavailable`."""

    def unavailable(self, error: BaseException) -> Unavailable:
        text = str(error) or type(error).__name__
        return Unavailable(f"Redis at {self.place}: {text}", hint=self.remedy(error))

    def remedy(self, error: BaseException | None) -> str:
        """What helps against ``error``, once the pool was in use."""
        # Inside of a script Redis 7 says "ACL failure in script", Redis 6.2 that the user "can't run this command".
        in_script = isinstance(error, failures.ResponseError) and any(
            words in str(error) for words in ("ACL failure", "can't run this command")
        )
        if in_script or isinstance(error, failures.NoPermissionError):
            return f"let an administrator of Redis run: {grant(self.user, self.rules)}"
        if isinstance(error, REFUSED):
            return "check the user and the password in redis_url, and that Redis has that user and it is on"
        if isinstance(error, failures.ResponseError) and not isinstance(error, failures.ClusterDownError):
            return "Redis answers, and refuses this: see its state (redis-cli info) and its log"
        return "the pool heals when Redis answers again"


class Away(failures.ConnectionError):  # type: ignore[misc]
    """In place of a reply: the server for this command cannot be reached, or cannot serve now; others could."""


class Pending:
    """Commands on their way to one server. ``connecting`` is where their connection will come from, if it is new."""

    __slots__ = ("commands", "connecting", "connection", "deadline", "fresh", "generation", "payload", "started")

    def __init__(self, commands: Sequence[Command], deadline: float) -> None:
        self.started = time.monotonic()
        self.commands = len(commands)
        self.payload = [b"".join([hiredis.pack_command(tuple(command)) for command in commands])]
        self.deadline = deadline
        self.connection: Any = None
        self.connecting: Connecting | None = None
        self.generation = 0
        self.fresh = False


class RedisLink(Link):
    """One server.

    ``timeout`` is in seconds and bounds connecting as well as each reply. Raises :class:`ConfigError` for
    arguments that no connection can be made with. Nothing is connected before the first :meth:`call`.
    """

    def __init__(self, login: Login, address: Address, *, place: str, timeout: float, client_name: str) -> None:
        super().__init__(place, login.user)
        self.address = address
        self._timeout = timeout
        self._connection_class = login.connection_class
        arguments = {
            **login.arguments_for(address),
            "socket_timeout": timeout,
            "socket_connect_timeout": timeout,
            "protocol": 2,
            "client_name": client_name,
            "health_check_interval": 0,
        }
        if address.host:
            arguments["socket_keepalive"] = True
            arguments["socket_keepalive_options"] = {
                socket.TCP_KEEPIDLE: 15,
                socket.TCP_KEEPINTVL: 5,
                socket.TCP_KEEPCNT: 3,
            }
        self._arguments = arguments
        try:
            self._connection_class(**arguments)
        except (ValueError, TypeError, OSError, failures.RedisError) as error:
            # The text of these errors may quote the URL, so it is not passed on.
            raise ConfigError("redis_url", place, f"it cannot be used ({type(error).__name__})") from None
        self._resolves = not _is_literal(address.host)
        self._resolving = threading.BoundedSemaphore(MAX_CONNECTING)
        self._lock = threading.Lock()
        self._idle: list[tuple[Any, float]] = []  # and since when, the longest first
        self._generation = 0
        self._closed = False
        self._resume_at = 0.0

    def call(self, commands: Sequence[Command], slots: Sequence[int] = ()) -> list[Any]:
        pending = self.begin(commands, time.monotonic() + self._timeout, wait=True)
        return self.finish(pending)

    def servers(self) -> Sequence[RedisLink]:
        return [self]

    @property
    def resting(self) -> bool:
        """Whether it did not answer lately, so that calls fail at once."""
        return bool(self._resume_at)

    def begin(self, commands: Sequence[Command], deadline: float, *, wait: bool = False) -> Pending:
        """Send ``commands`` without waiting for anything, to be followed by :meth:`finish`; with ``wait`` a new
        connection is made in this thread where that is safe. Raises :class:`Unavailable`.
        """
        pending = Pending(commands, deadline)
        self._admit(pending.started)
        try:
            self._send(pending, wait=wait)
        except (failures.RedisError, OSError) as error:
            self._discard(pending)
            self._failed(pending.started)
            raise self.unavailable(error) from error
        return pending

    def finish(self, pending: Pending) -> list[Any]:
        """The replies to what was begun. Raises :class:`Unavailable`, about at the deadline at the latest."""
        try:
            replies = self._exchange(pending)
        except (failures.RedisError, OSError) as error:
            self._failed(pending.started)
            raise self.unavailable(error) from error
        finally:
            self._discard(pending)
        if self._resume_at:
            self._resume_at = 0.0
            logger.warning("Redis at %s answers again", self.place)
        return replies

    def drop_idle(self) -> None:
        with self._lock:
            self._generation += 1
            idle, self._idle = self._idle, []
        for connection, _ in idle:
            connection.disconnect()

    def close(self) -> None:
        self._closed = True
        self.drop_idle()

    def _admit(self, now: float) -> None:
        """Fail at once while Redis is known not to answer, but for one call at a time that finds out whether
        it does.

        Without it every caller of a hung Redis would wait its whole timeout, over and over.
        """
        if self._closed:
            raise Unavailable(f"Redis at {self.place}: the directory is closed")
        if not self._resume_at:
            return
        with self._lock:
            if now < self._resume_at:
                raise Unavailable(f"Redis at {self.place} did not answer within {self._timeout:g} s")
            self._resume_at = now + self._timeout

    def _failed(self, started: float) -> None:
        now = time.monotonic()
        # A refused connection costs nothing to try again; only a wait is worth sparing the next caller.
        if now - started >= self._timeout / 2:
            if not self._resume_at:
                logger.warning("Redis at %s does not answer", self.place)
            self._resume_at = now + self._timeout / 2

    def _send(self, pending: Pending, *, wait: bool = False) -> None:
        """Give ``pending`` a connection and write to it, or have a connection made for it."""
        while True:
            pending.generation, pending.connection = self._take()
            pending.fresh = pending.connection is None
            if pending.connection is None:
                if not wait or self._resolves:
                    pending.connecting = self._connect_later()
                    return
                pending.connection = self._connection_class(**self._arguments)
                pending.connection.connect()
            try:
                pending.connection.send_packed_command(pending.payload, check_health=False)
                return
            except failures.TimeoutError:
                raise
            except (failures.ConnectionError, OSError):
                if pending.fresh or time.monotonic() >= pending.deadline:
                    raise
                self._discard(pending)
                self.drop_idle()  # the server that closed this one has most likely closed the others too

    def _exchange(self, pending: Pending) -> list[Any]:
        while True:
            if pending.connecting is not None:
                connecting, pending.connecting = pending.connecting, None
                pending.connection = connecting.result(pending.deadline)
                pending.connection.send_packed_command(pending.payload, check_health=False)
            try:
                self._bound(pending)
                replies = [self._reply(pending.connection) for _ in range(pending.commands)]
            except (failures.BusyLoadingError, failures.AuthenticationError):
                raise
            except failures.TimeoutError:
                self.drop_idle()  # behind a firewall that forgot them, the others would cost a timeout each
                raise
            except (failures.ConnectionError, OSError):
                if pending.fresh or time.monotonic() >= pending.deadline:
                    raise
                self._discard(pending)
                self.drop_idle()  # the server that closed this one has most likely closed the others too
                self._send(pending, wait=True)
                continue
            if not any(isinstance(r, Exception) and cannot_serve(r) for r in replies):
                self._give_back(pending)
            return replies

    def _bound(self, pending: Pending) -> None:
        """Have the next reply waited for until the deadline."""
        left = max(LEAST_WAIT, pending.deadline - time.monotonic())
        if left < self._timeout / 2:  # else the connection's own timeout is good enough, and costs nothing
            pending.connection._sock.settimeout(left)

    @staticmethod
    def _reply(connection: Any) -> Any:
        try:
            return connection.read_response(disable_decoding=True)
        except failures.ResponseError as error:
            return error  # one command's refusal; the connection is in step and the next reply follows

    def _take(self) -> tuple[int, Any]:
        """The connection used last, if it is young enough, and the generation it belongs to."""
        now = time.monotonic()
        old: list[tuple[Any, float]] = []
        with self._lock:
            if self._idle and now - self._idle[0][1] > IDLE_SECONDS:
                old = [idle for idle in self._idle if now - idle[1] > IDLE_SECONDS]
                self._idle = self._idle[len(old) :]
            generation = self._generation
            taken = self._idle.pop()[0] if self._idle else None
        for connection, _ in old:
            connection.disconnect()
        return generation, taken

    def _give_back(self, pending: Pending) -> None:
        connection, pending.connection = pending.connection, None
        if connection._sock is not None and connection._sock.gettimeout() != self._timeout:
            connection._sock.settimeout(self._timeout)
        with self._lock:
            if pending.generation == self._generation and len(self._idle) < MAX_IDLE and not self._closed:
                self._idle.append((connection, time.monotonic()))
                return
        connection.disconnect()

    @staticmethod
    def _discard(pending: Pending) -> None:
        connection, pending.connection = pending.connection, None
        if connection is not None:
            connection.disconnect()
        if pending.connecting is not None:
            pending.connecting.abandon()
            pending.connecting = None

    def _connect_later(self) -> Connecting:
        if not self._resolves:
            return Connecting(self._connection_class(**self._arguments))
        # Resolving a name can take the system's resolver half a minute, so it is not done in the caller's thread.
        if not self._resolving.acquire(blocking=False):
            raise failures.TimeoutError("the resolver or the network does not answer")
        return Connecting(self._connection_class(**self._arguments), self._resolving.release)


class Connecting:
    """A connection being made in a thread of its own."""

    def __init__(self, connection: Any, done: Callable[[], None] = lambda: None) -> None:
        self._connection = connection
        self._done = done
        self._outcome: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._claim = threading.Lock()  # taken by whichever of the two threads is first: the connection is its
        threading.Thread(target=self._run, name="redis-connect", daemon=True).start()

    def result(self, deadline: float) -> Any:
        """The connection. Raises what connecting raised, or ``TimeoutError`` at the deadline."""
        try:
            error = self._outcome.get(timeout=max(LEAST_WAIT, deadline - time.monotonic()))
        except queue.Empty:
            if self._claim.acquire(blocking=False):
                raise failures.TimeoutError("connecting took too long") from None
            error = self._outcome.get()
        if error is not None:
            raise error
        return self._connection

    def abandon(self) -> None:
        """Nobody wants the connection any more."""
        if not self._claim.acquire(blocking=False):
            self._outcome.get()
            self._connection.disconnect()

    def _run(self) -> None:
        try:
            self._connection.connect()
            result: BaseException | None = None
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits for it
            result = error
        finally:
            self._done()
        if self._claim.acquire(blocking=False):
            self._outcome.put(result)
        else:
            self._connection.disconnect()  # nobody waits any more


def _is_literal(host: str) -> bool:
    """Whether ``host`` needs no resolver: an address, or none (a unix socket)."""
    if not host:
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True
