"""Taking out of a shard what dead nodes have left in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from hicache_mooncake.metadata import scripts
from hicache_mooncake.metadata.calls import Call, run, send
from hicache_mooncake.metadata.keys import Shard
from hicache_mooncake.metadata.link import Away, Link
from hicache_mooncake.metadata.records import node_of, parse_object


def sweep_shard(link: Link, shard: Shard, live: set[str], *, keys_per_call: int, pause: float) -> int | None:
    """Drop the words of holders whose node is not in ``live``; how many, or ``None`` when the shard is away.

    Goes through all of the shard's objects ``keys_per_call`` at a time, ``pause`` seconds apart. Raises
    :class:`Unavailable`.
    """
    dropped = 0
    cursor = b"0"
    while True:
        scan = ("SCAN", cursor, "MATCH", shard.objects_like(), "COUNT", keys_per_call)
        (scanned,) = send(link, [Call(shard.slot, scan)])
        if isinstance(scanned, Away):
            return None
        cursor, names = scanned
        # SCAN may return more than COUNT, from a bucket of many keys.
        for start in range(0, len(names), keys_per_call):
            some = _sweep_some(link, shard, names[start : start + keys_per_call], live)
            if some is None:
                return None
            dropped += some
        if cursor == b"0":
            break
        if pause:
            time.sleep(pause)
    (ids,) = send(link, [Call(shard.slot, ("SMEMBERS", shard.nodes))])
    if isinstance(ids, Away):
        return None
    known = [raw.decode(errors="replace") for raw in ids]
    prune(link, shard, shard.nodes, shard.node, [node_id for node_id in known if node_id not in live], keys_per_call)
    return dropped


def _sweep_some(link: Link, shard: Shard, names: list[bytes], live: set[str]) -> int | None:
    (values,) = send(link, [Call(shard.slot, ("MGET", *names))])
    if isinstance(values, Away):
        return None
    touched = []
    suspects: set[str] = set()
    for name, raw in zip(names, values, strict=True):
        record = parse_object(raw) if raw is not None else None
        owners = {node_of(holder) for holder in record.holders} if record is not None else set()
        gone = {owner for owner in owners if owner is not None and owner not in live}
        if gone:
            touched.append(name)
            suspects |= gone
    if not touched:
        return 0
    ids = sorted(suspects)
    call = run(scripts.SWEEP, shard.slot, [*touched, *map(shard.node, ids)], [len(touched), *ids])
    (count,) = send(link, [call])
    return None if isinstance(count, Away) else int(count)


def prune(
    link: Link, shard: Shard, index: str, key_of: Callable[[str], str], members: Sequence[str], limit: int
) -> None:
    """Drop from a set of the shard those of ``members`` whose key is gone."""
    for start in range(0, len(members), limit):
        some = members[start : start + limit]
        send(link, [run(scripts.PRUNE, shard.slot, [index, *map(key_of, some)], some)])
