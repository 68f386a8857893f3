"""Finding a pool in Redis, or creating it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import redis.exceptions as failures

from hicache_mooncake.errors import ConfigError, Unavailable
from hicache_mooncake.metadata import scripts
from hicache_mooncake.metadata.admission import check_permissions, check_servers, refusal, unusable
from hicache_mooncake.metadata.calls import Call, run, send
from hicache_mooncake.metadata.keys import MAX_SHARDS, SCHEMA, Keys
from hicache_mooncake.metadata.link import Link


@dataclass(frozen=True)
class Opened:
    """A pool as it is in Redis, and whether its servers say who they are."""

    keys: Keys
    may_info: bool


def find_or_create(link: Link, pool: str, wanted_shards: int) -> Opened:
    """``wanted_shards`` 0 is for what the pool has, or what suits a new one.

    Raises :class:`ConfigError` when Redis cannot be used, or has the pool with another schema or number of shards;
    :class:`Unavailable` while it is loading its data.
    """
    keys = Keys(pool, wanted_shards or 1)
    try:
        may_info = check_servers(link)
        check_permissions(link, keys)
        suits = wanted_shards or shards_there(link, keys) or min(len(link.servers()), MAX_SHARDS)
        if suits > 1 and not wanted_shards:
            check_permissions(link, Keys(pool, suits))
        (found,) = link.call([open_call(keys, suits).in_full()], [keys.slot])
    except Unavailable as error:
        if isinstance(error.__cause__, failures.BusyLoadingError):
            raise
        raise refusal(link, error) from error
    if isinstance(found, failures.ResponseError):
        raise unusable(link, str(found), hint=link.remedy(found))
    return Opened(Keys(pool, check_pool(link, pool, found, wanted_shards)), may_info)


def shards_there(link: Link, keys: Keys) -> int:
    """How many shards the pool has in Redis; 0 when there is no such pool. Raises :class:`Unavailable`."""
    (raw,) = send(link, [Call(keys.slot, ("HGET", keys.pool, "shards"))])
    return min(int(raw), MAX_SHARDS) if isinstance(raw, bytes) and raw.isdigit() else 0


def open_call(keys: Keys, shards: int) -> Call:
    """What creates the pool unless it is there; :func:`check_pool` looks at the reply."""
    return run(scripts.OPEN, keys.slot, [keys.pool], [SCHEMA, shards, f"{time.time():.3f}"])


def check_pool(link: Link, pool: str, found: Sequence[bytes | None], wanted_shards: int) -> int:
    """The number of shards of a pool. Raises :class:`ConfigError` unless that is what is wanted (0: any)."""
    schema, shards = (int(raw) if raw is not None and raw.isdigit() else 0 for raw in found)
    if schema != SCHEMA:
        raise unusable(link, f"pool {pool!r} there has schema {schema}, this build has {SCHEMA}")
    if shards != (wanted_shards or shards) or not 1 <= shards <= MAX_SHARDS:
        raise ConfigError("shards", wanted_shards, f"pool {pool!r} was created with {shards}")
    return shards
