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


CLUSTER_RULES = f"{ACL_RULES} +cluster|slots +asking"
"""The rules in a Redis Cluster, on each of its nodes."""


def grant(user: str, rules: str = ACL_RULES) -> str:
    """The command that gives ``user`` what it needs, to be run by an administrator of Redis."""
    return f"ACL SETUSER {user} {rules}"


def harmless(keys: Keys) -> list[tuple[int, tuple[str | int, ...]]]:
    """One call in each shard, with its slot, of each command that reads, removes, or can be called so that only its
    permission is looked at.

    What they reply is of no interest but for :data:`REFUSED`, which Redis finds out before anything else.
    """
    calls: list[tuple[int, tuple[str | int, ...]]] = [
        (keys.slot, ("HGET", keys.pool, "shards")),
        (keys.slot, ("HMGET", keys.pool, "shards")),
    ]
    for shard in keys.shards:
        probe = shard.probe
        calls += [
            (shard.slot, command)
            for command in (
                ("SCAN", 0, "MATCH", shard.objects_like(), "COUNT", 1),
                ("MGET", probe),
                ("EXISTS", probe),
                ("SMEMBERS", shard.nodes),
                ("HGETALL", probe),
                ("HSET", probe, "field", "value", "field without value"),
                ("MSET", probe, "value", probe),
                ("SREM", probe, "member"),
                ("PEXPIRE", probe, 1),
                ("DEL", probe),
                ("EVAL", PRUNE.source, 1, probe),
                ("EVALSHA", PRUNE.sha1, 1, probe),
            )
        ]
    return calls


def harmless_once_allowed(keys: Keys) -> list[tuple[int, tuple[str, ...]]]:
    """The rest, when all of :func:`harmless` is allowed: it needs the one to undo the other."""
    return [
        (shard.slot, command)
        for shard in keys.shards
        for command in (("SADD", shard.probe, "member"), ("DEL", shard.probe))
    ]
