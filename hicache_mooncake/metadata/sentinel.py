"""The way to a Redis that sentinels watch: they are asked who the master is, at first and whenever it fails."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import redis.exceptions as failures

from hicache_mooncake.errors import Unavailable
from hicache_mooncake.metadata.link import Command, Link, RedisLink, cannot_serve
from hicache_mooncake.metadata.place import Address, Place

logger = logging.getLogger(__name__)

ASK_PAUSE = 0.1
"""Seconds between two questions to the sentinels while the master does not work."""

ASK_EVERY = 5.0
"""Seconds after which sentinels are asked though the master works: one that was cut off from them may still be reached
from here, while everybody else has another one. The heartbeat does it, and no lookup waits for it."""


class SentinelLink(Link):
    """The master of the place's service. ``timeout`` is in seconds, for a whole call."""

    def __init__(self, place: Place, *, timeout: float, client_name: str) -> None:
        super().__init__(place.shown, place.login.user)
        self._service = place.service
        self._login = place.login
        self._timeout = timeout
        self._client_name = client_name
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._asked_at = -ASK_PAUSE
        self._turn = itertools.count()
        self._doubted = True
        self._closed = False
        self._master: RedisLink | None = None
        self._sentinels = [
            RedisLink(
                place.sentinel_login,
                address,
                place=f"sentinel {address} of {place.shown}",
                timeout=timeout,
                client_name=client_name,
            )
            for address in place.addresses
        ]
        self._link(Address("localhost", 1)).close()  # raises ConfigError for a login that cannot be used

    def call(self, commands: Sequence[Command], slots: Sequence[int] = ()) -> list[Any]:
        deadline = time.monotonic() + self._timeout
        master = self._current(deadline)
        replies: list[Any] | None = None
        problem: Unavailable | None = None
        try:
            replies = master.call(commands)
            if not any(isinstance(reply, Exception) and cannot_serve(reply) for reply in replies):
                return replies
        except Unavailable as error:
            if isinstance(error.__cause__, failures.AuthenticationError):
                raise
            problem = error
        self._doubted = True
        if time.monotonic() < deadline:
            other = self._current(deadline)
            if other.address != master.address:
                return other.finish(other.begin(commands, deadline))
        if problem is not None:
            raise problem
        assert replies is not None
        return replies

    def servers(self) -> Sequence[RedisLink]:
        self._doubted = self._doubted or time.monotonic() - self._asked_at > ASK_EVERY
        return [self._current(time.monotonic() + self._timeout)]

    def _current(self, deadline: float) -> RedisLink:
        """The master, asked for when that is in doubt; the one known is good enough when no sentinel answers."""
        if self._closed:
            raise Unavailable(f"Redis at {self.place}: the directory is closed")
        if self._master is not None and not self._doubted:
            return self._master
        wait = 0.0 if self._master is not None else max(0.0, deadline - time.monotonic())
        if self._asking.acquire(timeout=wait):
            try:
                if self._master is None or (self._doubted and time.monotonic() - self._asked_at >= ASK_PAUSE):
                    self._ask(deadline)
            finally:
                self._asking.release()
        if self._master is None:
            raise Unavailable(f"Redis at {self.place}: no sentinel answers in time")
        return self._master

    def _ask(self, deadline: float) -> None:
        problem: Unavailable | None = None
        turn = next(self._turn) % len(self._sentinels)
        for sentinel in sorted(self._sentinels[turn:] + self._sentinels[:turn], key=lambda link: link.resting):
            now = time.monotonic()
            if now >= deadline:
                break
            try:
                # Half of what is left for each: one sentinel that hangs leaves time for another.
                question = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)
                (reply,) = sentinel.finish(sentinel.begin([question], now + (deadline - now) / 2))
            except Unavailable as error:
                problem = error
                continue
            if isinstance(reply, list) and len(reply) == 2:
                self._adopt(Address(reply[0].decode(), int(reply[1])))
                return
            if isinstance(reply, failures.ResponseError):
                problem = sentinel.unavailable(reply)
                problem.__cause__ = reply
            else:
                problem = Unavailable(f"{sentinel.place} watches no {self._service!r}")
        self._asked_at = time.monotonic()
        if self._master is None:
            raise problem or Unavailable(f"Redis at {self.place}: no sentinel answers in time")

    def _adopt(self, address: Address) -> None:
        with self._lock:
            self._doubted = False
            self._asked_at = time.monotonic()
            old = self._master
            if old is not None and old.address == address:
                return
            self._master = self._link(address)
            if self._closed:
                self._master.close()
        logger.info("Redis at %s: the master is %s", self.place, address)
        if old is not None:
            old.close()

    def _link(self, address: Address) -> RedisLink:
        return RedisLink(
            self._login,
            address,
            place=f"{address}, master of {self.place}",
            timeout=self._timeout,
            client_name=self._client_name,
        )

    def drop_idle(self) -> None:
        for link in self._all():
            link.drop_idle()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for link in self._all():
            link.close()

    def _all(self) -> list[RedisLink]:
        master = self._master
        return [*self._sentinels, *([master] if master is not None else [])]
