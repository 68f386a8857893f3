"""Whether a Redis can hold a pool: its version and mode, and what its user may do. Asked once, at open."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import redis.exceptions as failures

from hicache_mooncake.errors import ConfigError, Unavailable
from hicache_mooncake.metadata.cluster import ClusterLink
from hicache_mooncake.metadata.keys import Keys
from hicache_mooncake.metadata.link import Command, Link, RedisLink
from hicache_mooncake.metadata.permissions import REFUSED, harmless, harmless_once_allowed
from hicache_mooncake.metadata.records import parse_hello, parse_info, parse_version
from hicache_mooncake.metadata.redis_binary import OLDEST_REDIS
from hicache_mooncake.metadata.sentinel import SentinelLink

logger = logging.getLogger(__name__)

_REACH = "does Redis run there, and may this host connect to it (its bind and protected-mode, the firewall)?"


_OTHER_MODES = {
    "cluster": "this is a member of a Redis Cluster: redis+cluster://host:port[,host:port…] is how to say so",
    "sentinel": "this is a sentinel: redis+sentinel://host:port[,host:port…]/service is how to say so",
}


class Memory(NamedTuple):
    """A server's memory in bytes; ``limit`` 0 is none, ``policy`` empty where the user may not ask."""

    policy: str
    limit: int
    used: int

    @property
    def part(self) -> float:
        return self.used / self.limit if self.limit else 0.0


def check_servers(link: Link) -> bool:
    """Raise :class:`ConfigError` unless the servers are such that a pool works with. Whether INFO is allowed.

    Raises :class:`Unavailable` when they cannot be asked.
    """
    allowed = [_check_server(link, server) for server in link.servers()]  # every one is looked at
    return all(allowed)


def _check_server(link: Link, server: RedisLink) -> bool:
    (info,) = server.call([("INFO",)])
    may_info = not isinstance(info, failures.NoPermissionError)
    if may_info:
        if isinstance(info, failures.ResponseError):
            raise unusable(link, f"INFO is refused: {info}")
        facts = parse_info(info)
        version = facts.get("redis_version", "")
        mode = facts.get("redis_mode") or facts.get("server_mode", "")  # as Redis and Valkey call it
    else:
        # INFO counts as dangerous for ACLs; HELLO every user may say, unless it was renamed.
        (hello,) = server.call([("HELLO",)])
        if not isinstance(hello, list):
            raise _denied(link, "INFO", info)
        facts = parse_hello(hello)
        version, mode = facts.get("version", ""), facts.get("mode", "")
    if parse_version(version) < OLDEST_REDIS:
        raise unusable(link, f"Redis 6.2 or newer is needed, this is {version or 'of no known version'}")
    if mode in _OTHER_MODES and not isinstance(link, ClusterLink):
        raise unusable(link, _OTHER_MODES[mode])
    if not may_info:
        logger.warning(
            "the user %s of Redis at %s may not run INFO, so a Redis that restarts with an old copy of its data is "
            "not noticed, and what was published since is not found; ACL SETUSER %s +info helps",
            link.user,
            link.place,
            link.user,
        )
    policy = facts.get("maxmemory_policy", "noeviction")
    if facts.get("maxmemory", "0") != "0" and policy != "noeviction":
        logger.warning(
            "Redis at %s has maxmemory-policy %s: it may evict parts of the directory, which turns hits "
            "into misses; noeviction is better",
            server.place,
            policy,
        )
    return may_info


def memory_of(server: RedisLink) -> Memory:
    """What a server says of its memory. Raises :class:`Unavailable`."""
    (info,) = server.call([("INFO", "memory")])
    if isinstance(info, failures.NoPermissionError):
        return Memory("", 0, 0)
    if isinstance(info, failures.RedisError):
        raise server.unavailable(info) from info
    facts = parse_info(info)
    limit, used = (int(facts.get(name, "0")) for name in ("maxmemory", "used_memory"))
    return Memory(facts.get("maxmemory_policy", "noeviction"), limit, used)


def check_permissions(link: Link, keys: Keys) -> None:
    """Raise :class:`ConfigError`, with the command and the rules to add, unless the user may do all that a
    pool needs.

    Without it a node would start, and fail at the first page.
    """
    _try(link, harmless(keys))
    _try(link, harmless_once_allowed(keys))


def _try(link: Link, calls: Sequence[tuple[int, Command]]) -> None:
    commands = [command for _, command in calls]
    for command, reply in zip(commands, link.call(commands, [slot for slot, _ in calls]), strict=True):
        if isinstance(reply, failures.NoPermissionError):
            raise _denied(link, str(command[0]), reply)


def _denied(link: Link, command: str, error: BaseException) -> ConfigError:
    return unusable(link, f"the user {link.user} may not run {command}: {error}", hint=link.remedy(error))


def refusal(link: Link, error: Unavailable) -> ConfigError:
    """``error``, which ended the first attempt to use Redis, as what the operator has to change."""
    cause = error.__cause__
    if isinstance(cause, failures.NoPermissionError):
        return unusable(link, f"the user {link.user} lacks a permission: {cause}", hint=link.remedy(cause))
    if isinstance(cause, REFUSED):
        return unusable(link, f"the user or password is refused: {cause}", hint=link.remedy(cause))
    if isinstance(link, ClusterLink) and "cluster support disabled" in str(cause):
        return unusable(link, "this is a single Redis and no cluster: redis://host:port[/db] is how to say so")
    if isinstance(link, SentinelLink) and isinstance(cause, failures.ResponseError) and "SENTINEL" in str(cause):
        return unusable(link, "this is a Redis and no sentinel: redis://host:port[/db] is how to say so")
    if isinstance(cause, failures.ResponseError):
        return unusable(link, str(cause), hint=link.remedy(cause))
    if isinstance(cause, failures.InvalidResponse):
        return unusable(link, "what answers there is not Redis", hint="redis_url is the host and port of a Redis")
    return unusable(link, f"it cannot be reached: {cause or error.message}", hint=_REACH)


def unusable(link: Link, reason: str, *, hint: str = "") -> ConfigError:
    return ConfigError("redis_url", link.place, reason, hint=hint)
