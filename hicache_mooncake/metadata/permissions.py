"""What the Redis user of a pool must be allowed to do, and commands that find out without changing anything."""

from __future__ import annotations

import redis.exceptions as failures

from hicache_mooncake.metadata.keys import Keys
from hicache_mooncake.metadata.scripts import PRUNE

ACL_RULES = (
    "~hcm:* +client|setname +select +info +eval +evalsha +scan +mget +exists +smembers +hgetall +hget +hmget"
    " +hset +sadd +srem +mset +del +pexpire"
)
"""Rules for ACL SETUSER that suffice for everything, commands inside of scripts included."""

REFUSED = (failures.NoPermissionError, failures.AuthenticationError, failures.AuthorizationError)


def grant(user: str) -> str:
    """The command that gives ``user`` what it needs, to be run by an administrator of Redis."""
    return f"ACL SETUSER {user} {ACL_RULES}"


def harmless(keys: Keys) -> list[tuple[str | int, ...]]:
    """One call of each command that reads, removes, or can be called so that only its permission is looked at.

    What they reply is of no interest but for :data:`REFUSED`, which Redis finds out before anything else.
    """
    probe = keys.probe
    return [
        ("SCAN", 0, "MATCH", keys.object_pattern, "COUNT", 1),
        ("MGET", probe),
        ("EXISTS", probe),
        ("SMEMBERS", keys.nodes),
        ("HGETALL", probe),
        ("HGET", keys.pool, "shards"),
        ("HMGET", keys.pool, "shards"),
        ("HSET", probe, "field", "value", "field without value"),
        ("MSET", probe, "value", probe),
        ("SREM", probe, "member"),
        ("PEXPIRE", probe, 1),
        ("DEL", probe),
        ("EVAL", PRUNE.source, 1, probe),
        ("EVALSHA", PRUNE.sha1, 1, probe),
    ]


def harmless_once_allowed(keys: Keys) -> list[tuple[str, ...]]:
    """The rest, when all of :func:`harmless` is allowed: it needs the one to undo the other."""
    return [("SADD", keys.probe, "member"), ("DEL", keys.probe)]
