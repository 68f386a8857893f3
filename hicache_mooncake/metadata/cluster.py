"""The way to a Redis Cluster: each command to the master of its slot, all masters at once, within one timeout.

The map of slots is learned from any member, and corrected by what masters reply (MOVED, ASK) and by their silence. A
master that is away takes its own slots out of reach and nothing else.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import redis.exceptions as failures

from hicache_mooncake.errors import Unavailable
from hicache_mooncake.metadata.link import Away, Command, Link, Pending, RedisLink, cannot_serve
from hicache_mooncake.metadata.permissions import CLUSTER_RULES
from hicache_mooncake.metadata.place import Address, Place
from hicache_mooncake.metadata.slots import SlotMap, parse_slots

logger = logging.getLogger(__name__)

MAX_ROUNDS = 6
"""Times a command is sent in one call: a slot that moves while its master fails over needs three."""

REFRESH_PAUSE = 0.1
"""Seconds between two questions for the map while something is wrong."""

TRY_AGAIN_PAUSE = 0.01
"""Seconds until keys of one command, some of which are on their way to another master, are asked for again."""

_ASKING: Command = ("ASKING",)


class ClusterLink(Link):
    """A Redis Cluster, found through any of the place's addresses. ``timeout`` is in seconds and for a whole call."""

    rules = CLUSTER_RULES

    def __init__(self, place: Place, *, timeout: float, client_name: str) -> None:
        super().__init__(place.shown, place.login.user)
        self._login = place.login
        self._seeds = place.addresses
        self._timeout = timeout
        self._client_name = client_name
        self._lock = threading.Lock()
        self._links: dict[Address, RedisLink] = {}
        self._map = SlotMap()
        self._doubted = True
        self._refreshing = threading.Lock()
        self._refreshed_at = -REFRESH_PAUSE
        self._turn = itertools.count()
        self._closed = False
        for address in self._seeds:
            self._link(address)  # raises ConfigError for a login that cannot be used

    # -- calls

    def call(self, commands: Sequence[Command], slots: Sequence[int] = ()) -> list[Any]:
        deadline = time.monotonic() + self._timeout
        if self._doubted:
            self._refresh(deadline)
        chosen = slots or [0] * len(commands)
        replies: list[Any] = [None] * len(commands)
        asked: dict[int, Address] = {}  # by position: where a slot that is being moved has its keys already
        todo: Sequence[int] = range(len(commands))
        for turn in range(MAX_ROUNDS):
            sent = self._round(commands, chosen, todo, asked, replies, deadline)
            todo = self._again(todo, chosen, sent, asked, replies)
            if not todo or turn == MAX_ROUNDS - 1 or time.monotonic() >= deadline:
                break
            if any(isinstance(replies[at], failures.TryAgainError) for at in todo):
                time.sleep(TRY_AGAIN_PAUSE)
            if self._doubted:
                self._refresh(deadline)
                # A master that could not be reached is tried again only where another one has its slots now.
                todo = [
                    at
                    for at in todo
                    if not isinstance(replies[at], Away) or self._map.owner(chosen[at]) not in (None, sent[at])
                ]
                if not todo:
                    break
        for at, reply in enumerate(replies):
            if _cannot(reply):
                replies[at] = Away(str(reply))
        if replies and all(isinstance(reply, Away) for reply in replies):
            raise self.unavailable(replies[0]) from replies[0].__cause__
        return replies

    def _round(
        self,
        commands: Sequence[Command],
        slots: Sequence[int],
        todo: Sequence[int],
        asked: dict[int, Address],
        replies: list[Any],
        deadline: float,
    ) -> dict[int, Address | None]:
        """Send each of ``todo`` to where it belongs and fill in its reply; where each was sent."""
        sent: dict[int, Address | None] = {at: asked.get(at) or self._map.owner(slots[at]) for at in todo}
        groups: dict[Address, list[int]] = {}
        for at, address in sent.items():
            if address is None:
                replies[at] = Away("no master of the Redis Cluster has these keys")
                self._doubted = True
            else:
                groups.setdefault(address, []).append(at)
        under_way: list[tuple[RedisLink, list[int], Pending]] = []
        for address, positions in groups.items():
            link = self._link(address)
            batch: list[Command] = []
            for at in positions:
                batch += [_ASKING, commands[at]] if at in asked else [commands[at]]
            try:
                under_way.append((link, positions, link.begin(batch, deadline)))
            except Unavailable as error:
                self._away(positions, replies, error)
        for link, positions, pending in under_way:
            try:
                answers = iter(link.finish(pending))
            except Unavailable as error:
                self._away(positions, replies, error)
                continue
            for at in positions:
                if at in asked:
                    next(answers)
                replies[at] = next(answers)
        return sent

    def _away(self, positions: Sequence[int], replies: list[Any], error: Unavailable) -> None:
        cause = error.__cause__
        self._doubted = True
        for at in positions:
            away = Away(error.message)
            away.__cause__ = cause
            replies[at] = away

    def _again(
        self,
        todo: Sequence[int],
        slots: Sequence[int],
        sent: dict[int, Address | None],
        asked: dict[int, Address],
        replies: list[Any],
    ) -> list[int]:
        """Which of ``todo`` have to be sent once more, now that their replies are known."""
        again = []
        for at in todo:
            reply = replies[at]
            asked.pop(at, None)
            if isinstance(reply, failures.MovedError):  # which is a kind of AskError
                self._map = self._map.corrected(slots[at], self._named(reply, sent[at]))
                self._doubted = True
                again.append(at)
            elif isinstance(reply, failures.AskError):
                asked[at] = self._named(reply, sent[at])
                again.append(at)
            elif isinstance(reply, failures.TryAgainError):
                again.append(at)
            elif isinstance(reply, Away) or _cannot(reply):
                self._doubted = True
                if not isinstance(reply, Away):
                    replies[at] = Away(str(reply))
                again.append(at)
        return again

    @staticmethod
    def _named(redirect: Any, asked: Address | None) -> Address:
        return Address(redirect.host or (asked.host if asked is not None else ""), int(redirect.port))

    # -- the map

    def servers(self) -> Sequence[RedisLink]:
        if self._doubted:
            self._refresh(time.monotonic() + self._timeout)
        return [self._link(address) for address in self._map.masters()]

    def _refresh(self, deadline: float) -> None:
        """Ask a member for the map, one thread at a time and not too often; others go on with what is known.

        Raises :class:`Unavailable` when no map was ever learned.
        """
        if self._closed:
            raise Unavailable(f"Redis at {self.place}: the directory is closed")
        wait = 0.0 if self._map else max(0.0, deadline - time.monotonic())
        if not self._refreshing.acquire(timeout=wait):
            if self._map:
                return
            raise Unavailable(f"Redis at {self.place} did not answer within {self._timeout:g} s")
        try:
            if self._map and (not self._doubted or time.monotonic() - self._refreshed_at < REFRESH_PAUSE):
                return
            error = self._learn(deadline)
        finally:
            self._refreshing.release()
        if not self._map:
            raise error or Unavailable(f"Redis at {self.place}: no member answers")

    def _learn(self, deadline: float) -> Unavailable | None:
        problem: Unavailable | None = None
        for address in self._members():
            now = time.monotonic()
            if now >= deadline:
                break
            link = self._link(address)
            try:
                # Half of what is left for each: one member that hangs leaves time for another.
                (reply,) = link.finish(link.begin([("CLUSTER", "SLOTS")], now + (deadline - now) / 2))
            except Unavailable as error:
                problem = error
                continue
            if isinstance(reply, failures.ResponseError):
                problem = self.unavailable(reply)
                problem.__cause__ = reply
                continue
            found = parse_slots(reply, address)
            if found:
                self._adopt(found)
                return None
        self._refreshed_at = time.monotonic()
        return problem

    def _members(self) -> list[Address]:
        """Whom to ask for the map: who answered lately first, and not always the same one."""
        everyone = list(dict.fromkeys([*self._map.masters(), *self._map.replicas, *self._seeds]))
        turn = next(self._turn) % len(everyone)
        everyone = everyone[turn:] + everyone[:turn]
        return sorted(everyone, key=lambda address: self._link(address).resting)

    def _adopt(self, found: SlotMap) -> None:
        gone: list[RedisLink] = []
        keep = {*found.masters(), *found.replicas, *self._seeds}
        with self._lock:
            if found.masters() != self._map.masters():
                logger.info("Redis Cluster at %s: masters %s", self.place, ", ".join(map(str, found.masters())))
            self._map = found
            self._doubted = False
            self._refreshed_at = time.monotonic()
            gone = [self._links.pop(address) for address in list(self._links) if address not in keep]
        for link in gone:
            link.close()

    def _link(self, address: Address) -> RedisLink:
        with self._lock:
            link = self._links.get(address)
            if link is None:
                place = f"{address} of {self.place}"
                link = RedisLink(
                    self._login, address, place=place, timeout=self._timeout, client_name=self._client_name
                )
                if self._closed:
                    link.close()
                else:
                    self._links[address] = link
            return link

    def drop_idle(self) -> None:
        for link in self._all():
            link.drop_idle()

    def close(self) -> None:
        self._closed = True
        for link in self._all():
            link.close()

    def _all(self) -> list[RedisLink]:
        with self._lock:
            return list(self._links.values())


def _cannot(reply: object) -> bool:
    """Whether the server that replied has not run the command, and another one may, now or soon."""
    return isinstance(reply, (failures.AskError, failures.TryAgainError)) or cannot_serve(reply)
