"""What is listed in sets that every shard has: nodes and namespaces."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hicache_mooncake.metadata.calls import Call, send
from hicache_mooncake.metadata.keys import Shard
from hicache_mooncake.metadata.link import Link
from hicache_mooncake.metadata.records import pairs


def listed(
    link: Link, shards: Sequence[Shard], index_of: Callable[[Shard], str], key_of: Callable[[Shard, str], str]
) -> dict[str, dict[str, str]]:
    """The members of a set, over all shards, and the hash of each, from the first shard that has one (empty where
    none does). Raises :class:`Unavailable`.
    """
    replies = send(link, [Call(shard.slot, ("SMEMBERS", index_of(shard))) for shard in shards], shards=len(shards))
    where: dict[str, list[Shard]] = {}
    for shard, reply in zip(shards, replies, strict=True):
        for raw in reply if isinstance(reply, list) else ():
            where.setdefault(raw.decode(errors="replace"), []).append(shard)
    found: dict[str, dict[str, str]] = {member: {} for member in sorted(where)}
    for turn in range(len(shards)):  # mostly the first finds all
        asked = [
            (member, where[member][turn])
            for member, fields in found.items()
            if not fields and turn < len(where[member])
        ]
        calls = [Call(shard.slot, ("HGETALL", key_of(shard, member))) for member, shard in asked]
        for (member, _), reply in zip(asked, send(link, calls, shards=len(shards)), strict=True):
            if isinstance(reply, list):
                found[member] = pairs(reply)
    return found
