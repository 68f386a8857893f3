"""Whether a Redis can hold a pool: its version and mode, and what its user may do. Asked once, at open."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import redis.exceptions as failures

from hicache_mooncake.errors import ConfigError, Unavailable
from hicache_mooncake.metadata.keys import Keys
from hicache_mooncake.metadata.link import Command, RedisLink
from hicache_mooncake.metadata.permissions import REFUSED, harmless, harmless_once_allowed
from hicache_mooncake.metadata.records import parse_hello, parse_info, parse_version
from hicache_mooncake.metadata.redis_binary import OLDEST_REDIS

logger = logging.getLogger(__name__)

_REACH = "does Redis run there, and may this host connect to it (its bind and protected-mode, the firewall)?"


def check_server(link: RedisLink) -> bool:
    """Raise :class:`ConfigError` unless the server is one that a pool works with. Whether INFO is allowed."""
    (info,) = link.call([("INFO",)])
    may_info = not isinstance(info, failures.NoPermissionError)
    if may_info:
        if isinstance(info, failures.ResponseError):
            raise unusable(link, f"INFO is refused: {info}")
        facts = parse_info(info)
        version, mode = facts.get("redis_version", ""), facts.get("redis_mode", "")
    else:
        # INFO counts as dangerous for ACLs; HELLO every user may say, unless it was renamed.
        (hello,) = link.call([("HELLO",)])
        if not isinstance(hello, list):
            raise _denied(link, "INFO", info)
        facts = parse_hello(hello)
        version, mode = facts.get("version", ""), facts.get("mode", "")
    if parse_version(version) < OLDEST_REDIS:
        raise unusable(link, f"Redis 6.2 or newer is needed, this is {version or 'of no known version'}")
    if mode == "cluster":
        raise unusable(link, "this build works with a single Redis (and its replicas), not with Redis Cluster")
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
            link.place,
            policy,
        )
    return may_info


def check_permissions(link: RedisLink, keys: Keys) -> None:
    """Raise :class:`ConfigError`, with the command and the rules to add, unless the user may do all that a
    pool needs.

    Without it a node would start, and fail at the first page.
    """
    _try(link, harmless(keys))
    _try(link, harmless_once_allowed(keys))


def _try(link: RedisLink, commands: Sequence[Command]) -> None:
    for command, reply in zip(commands, link.call(commands), strict=True):
        if isinstance(reply, failures.NoPermissionError):
            raise _denied(link, str(command[0]), reply)


def _denied(link: RedisLink, command: str, error: BaseException) -> ConfigError:
    return unusable(link, f"the user {link.user} may not run {command}: {error}", hint=link.remedy(error))


def refusal(link: RedisLink, error: Unavailable) -> ConfigError:
    """``error``, which ended the first attempt to use Redis, as what the operator has to change."""
    cause = error.__cause__
    if isinstance(cause, failures.NoPermissionError):
        return unusable(link, f"the user {link.user} lacks a permission: {cause}", hint=link.remedy(cause))
    if isinstance(cause, REFUSED):
        return unusable(link, f"the user or password is refused: {cause}", hint=link.remedy(cause))
    if isinstance(cause, failures.ResponseError):
        return unusable(link, str(cause), hint=link.remedy(cause))
    if isinstance(cause, failures.InvalidResponse):
        return unusable(link, "what answers there is not Redis", hint="redis_url is the host and port of a Redis")
    return unusable(link, f"it cannot be reached: {cause or error.message}", hint=_REACH)


def unusable(link: RedisLink, reason: str, *, hint: str = "") -> ConfigError:
    return ConfigError("redis_url", link.place, reason, hint=hint)
