"""The way to one Redis: blocking connections shared by threads, and a bound on what a call waits.

redis-py provides the connection (URL, TLS, AUTH, SELECT); the pool is ours, because a call here has one
promise to keep that a general client does not make: whatever happened to Redis, the caller has its answer or
:class:`Unavailable` within about ``timeout``, and the next call after Redis is back works.
"""

from __future__ import annotations

import ipaddress
import logging
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

import hiredis
import redis.connection
import redis.exceptions as failures

from hicache_mooncake.config_values import masked_url
from hicache_mooncake.errors import ConfigError, Unavailable
from hicache_mooncake.metadata.permissions import REFUSED, grant

logger = logging.getLogger(__name__)

Command = Sequence["str | bytes | int"]

MAX_IDLE = 16
"""Connections kept open when unused: what a node's threads use at once; a burst above it is closed again."""

MAX_CONNECTING = 4
"""Threads that may hang in name resolution, which has no timeout of its own. Further callers fail at once."""

_SERVER_CANNOT = ("READONLY", "LOADING", "MASTERDOWN", "CLUSTERDOWN", "NOREPLICAS", "UNBLOCKED")
"""Errors of a server in the wrong role or state: the next attempt shall resolve and connect anew."""


class RedisLink:
    """Send commands, get their replies. Thread-safe.

    ``timeout`` is in seconds and bounds connecting as well as each reply. Raises :class:`ConfigError` for a
    URL that no connection can be made from. Nothing is connected before the first :meth:`call`.
    """

    def __init__(self, url: str, *, timeout: float, client_name: str) -> None:
        self.place = masked_url(url)
        self._timeout = timeout
        try:
            arguments = redis.connection.parse_url(url)
            self._connection_class = arguments.pop("connection_class", redis.connection.Connection)
            arguments.update(
                socket_timeout=timeout,
                socket_connect_timeout=timeout,
                protocol=2,
                client_name=client_name,
                health_check_interval=0,
            )
            if self._connection_class is not redis.connection.UnixDomainSocketConnection:
                arguments["socket_keepalive"] = True
            self._arguments = arguments
            self.user = str(arguments.get("username") or "default")
            self._connection_class(**arguments)
        except (ValueError, TypeError, failures.RedisError) as error:
            # The text of these errors may quote the URL, so it is not passed on.
            raise ConfigError("redis_url", self.place, f"it cannot be used ({type(error).__name__})") from None
        self._resolves = not _is_literal(arguments.get("host"))
        self._connecting = threading.BoundedSemaphore(MAX_CONNECTING)
        self._lock = threading.Lock()
        self._idle: list[Any] = []
        self._generation = 0
        self._closed = False
        self._resume_at = 0.0

    def call(self, commands: Sequence[Command]) -> list[Any]:
        """The replies to ``commands``, in order, sent in one write; an error reply is an exception in the
        list.

        Every command must be idempotent: when a reused connection turns out to be closed they are sent again
        on a fresh one, though the server may have run them. Raises :class:`Unavailable`.
        """
        started = time.monotonic()
        self._admit(started)
        payload = [b"".join([hiredis.pack_command(tuple(command)) for command in commands])]
        try:
            replies = self._exchange(payload, len(commands), started + self._timeout)
        except (failures.RedisError, OSError) as error:
            self._failed(started)
            raise self.unavailable(error) from error
        if self._resume_at:
            self._resume_at = 0.0
            logger.warning("Redis at %s answers again", self.place)
        return replies

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
            return f"let an administrator of Redis run: {grant(self.user)}"
        if isinstance(error, REFUSED):
            return "check the user and the password in redis_url, and that Redis has that user and it is on"
        if isinstance(error, failures.ResponseError):
            return "Redis answers, and refuses this: see its state (redis-cli info) and its log"
        return "the pool heals when Redis answers again"

    def drop_idle(self) -> None:
        """Close what is idle, and what is in use as soon as it is given back."""
        with self._lock:
            self._generation += 1
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.disconnect()

    def close(self) -> None:
        """Close every connection; calls in progress finish, later ones raise :class:`Unavailable`."""
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

    def _exchange(self, payload: list[bytes], count: int, deadline: float) -> list[Any]:
        while True:
            with self._lock:
                generation = self._generation
                connection = self._idle.pop() if self._idle else None
            fresh = connection is None
            if connection is None:
                connection = self._connect(deadline)
            healthy = False
            try:
                connection.send_packed_command(payload, check_health=False)
                replies = [self._reply(connection) for _ in range(count)]
                healthy = not any(isinstance(r, Exception) and str(r).startswith(_SERVER_CANNOT) for r in replies)
                return replies
            except (failures.BusyLoadingError, failures.AuthenticationError):
                raise
            except failures.TimeoutError:
                self.drop_idle()  # behind a firewall that forgot them, the others would cost a timeout each
                raise
            except (failures.ConnectionError, OSError):
                if fresh or time.monotonic() >= deadline:
                    raise
                self.drop_idle()  # the server that closed this one has most likely closed the others too
            finally:
                self._give_back(connection, generation, healthy=healthy)

    @staticmethod
    def _reply(connection: Any) -> Any:
        try:
            return connection.read_response(disable_decoding=True)
        except failures.ResponseError as error:
            return error  # one command's refusal; the connection is in step and the next reply follows

    def _give_back(self, connection: Any, generation: int, *, healthy: bool) -> None:
        if healthy:
            with self._lock:
                if generation == self._generation and len(self._idle) < MAX_IDLE and not self._closed:
                    self._idle.append(connection)
                    return
        connection.disconnect()

    def _connect(self, deadline: float) -> Any:
        connection = self._connection_class(**self._arguments)
        if not self._resolves:
            connection.connect()
            return connection
        # Resolving a name can take the system's resolver half a minute, so it is waited for from here:
        if not self._connecting.acquire(blocking=False):
            raise failures.TimeoutError("the resolver or the network does not answer")
        outcome: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        claim = threading.Lock()  # taken by whichever of the two threads is first: the connection is its
        thread = threading.Thread(
            target=self._connect_in_thread,
            args=(connection, outcome, claim),
            name="redis-connect",
            daemon=True,
        )
        thread.start()
        try:
            error = outcome.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            if claim.acquire(blocking=False):
                raise failures.TimeoutError("connecting took too long") from None
            error = outcome.get()
        if error is not None:
            raise error
        return connection

    def _connect_in_thread(
        self, connection: Any, outcome: queue.SimpleQueue[BaseException | None], claim: threading.Lock
    ) -> None:
        try:
            connection.connect()
            result: BaseException | None = None
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits for it
            result = error
        finally:
            self._connecting.release()
        if claim.acquire(blocking=False):
            outcome.put(result)
        else:
            connection.disconnect()  # nobody waits any more


def _is_literal(host: object) -> bool:
    """Whether ``host`` needs no resolver: an address, or none (a unix socket)."""
    if host is None:
        return True
    try:
        ipaddress.ip_address(str(host))
    except ValueError:
        return host == "localhost"
    return True
