"""The directory of a pool: who holds what, and which nodes live. It is a hint: the owners are the authority.

Whatever Redis says may be stale, lost or rebuilt; a reader asks the owner before it believes, so the worst
that this module can cause is a miss. The read path writes nothing.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hicache_mooncake.errors import ConfigError, Unavailable
from hicache_mooncake.metadata import scripts
from hicache_mooncake.metadata.admission import Memory, memory_of, refusal
from hicache_mooncake.metadata.calls import Call, by_shard, run, send
from hicache_mooncake.metadata.keys import Keys, Shard, shard_of
from hicache_mooncake.metadata.link import Away
from hicache_mooncake.metadata.listing import listed
from hicache_mooncake.metadata.opening import check_pool, find_or_create, open_call, shards_there
from hicache_mooncake.metadata.permissions import ACL_RULES
from hicache_mooncake.metadata.records import (
    NodeRecord,
    ObjectRecord,
    format_node,
    parse_info,
    parse_node,
    parse_object,
)
from hicache_mooncake.metadata.routes import link_to
from hicache_mooncake.metadata.sweeping import prune, sweep_shard

__all__ = ["ACL_RULES", "Directory", "Unreached"]

logger = logging.getLogger(__name__)

CHANGES_PER_CALL = 512
"""Objects in one Lua call: about 5 ms of the server, and far from Lua's limit of some 8,000 arguments."""

LOOKUPS_PER_CALL = 1024
"""Objects in one MGET: about 2 ms of the server."""

NAMESPACE_TTL = 30 * 24 * 3600.0
"""Seconds for which what a namespace stands for is remembered after it was last declared."""


class Unreached(Unavailable):
    """A part of the shards was away; ``keys`` are those it was not told about. The rest is done."""

    def __init__(self, message: str, keys: Sequence[str] = ()) -> None:
        super().__init__(message, hint="the pool heals when all masters of the Redis Cluster answer again")
        self.keys = keys


class _Identity(NamedTuple):
    """Which shard a node has published to. A change of any part means: publish everything again."""

    run_id: str  # another server process: restarted, replaced, failed over; "" where INFO is not allowed
    epoch: str  # another `hcm:<pool>:shard:…`: flushed, restored from an old dump
    lease: str  # the node's own key had expired: others may have swept what it holds
    missed: int  # writes that did not reach the shard


class Directory:
    """One pool's directory in Redis. Thread-safe.

    ``timeout`` is how many seconds a call to Redis may take. ``shards`` is fixed for the pool by who creates
    it; 0 takes what the pool has, or what suits a new one. Every method but :meth:`open` and :meth:`close`
    raises :class:`Unavailable` when Redis does not answer in time, and works again when Redis does, without
    being opened again. After a call that waited in vain, others fail at once for a moment instead of waiting too.

    Where a Redis Cluster has lost some of its masters, the pages of their shards are misses, the rest goes on, and
    :meth:`heartbeat` asks for them to be published again when they are back.
    """

    def __init__(self, url: str, pool: str, *, timeout: float = 0.5, shards: int = 0) -> None:
        """Raises :class:`ConfigError` for a URL, a name or a number of shards that cannot be used; no I/O."""
        self.pool = pool
        self.timeout = timeout
        self._wanted_shards = shards
        self._known_keys: Keys | None = None
        self._pool_keys = Keys(pool, shards or 1)
        if shards:
            self._known_keys = self._pool_keys
        self._link = link_to(url, timeout=timeout, client_name=f"hicache-mooncake:{pool}")
        self._may_info = True
        self._published_to: dict[str, dict[int, _Identity]] = {}
        self._missed: Counter[int] = Counter()
        self._unreached = 0
        self._lock = threading.Lock()

    # -- joining and leaving --

    def open(self) -> None:
        """Find the pool in Redis, or create it.

        Raises :class:`ConfigError` when there is no usable Redis under the URL, or when the pool there has
        another schema or number of shards, or when the user may not run all of what is needed later;
        :class:`Unavailable` while Redis is loading its data.
        """
        try:
            opened = find_or_create(self._link, self.pool, self._wanted_shards)
        except BaseException:
            self._link.drop_idle()
            raise
        self._may_info = opened.may_info
        if self._known_keys is None or len(self._known_keys.shards) != len(opened.keys.shards):
            self._known_keys = opened.keys

    @classmethod
    def of_existing(cls, url: str, pool: str, *, timeout: float) -> Directory:
        """The directory of a pool that is there, with its own number of shards: for tools, which create nothing.

        Raises :class:`ConfigError` when Redis cannot be used or has no such pool.
        """
        found = cls(url, pool, timeout=timeout)
        try:
            try:
                shards = shards_there(found._link, found._pool_keys)
            except Unavailable as error:
                raise refusal(found._link, error) from error
            if not shards:
                raise ConfigError("pool", pool, f"there is no such pool in Redis at {found.place}")
        except BaseException:
            found.close()
            raise
        found._known_keys = Keys(pool, shards)
        return found

    @property
    def place(self) -> str:
        """Where Redis is, without any password."""
        return self._link.place

    @property
    def unreached(self) -> int:
        """How many keys were not looked up, all in all, because their part of Redis was away."""
        return self._unreached

    def close(self) -> None:
        """Close the connections. What this process published stays until :meth:`leave` or its TTL."""
        self._link.close()

    def join(self, record: NodeRecord, ttl: float) -> None:
        """Make the node known for ``ttl`` seconds; to be called before it publishes anything."""
        identities = self._announce(record, ttl)
        with self._lock:
            self._published_to[record.id] = identities

    def heartbeat(self, record: NodeRecord, ttl: float) -> bool:
        """Keep the node known for another ``ttl`` seconds.

        ``False``, once for each such change, when a shard is not the one the node has published to, has taken
        the node for dead, or was away while there was something to tell it: what was missing is created again,
        and the node must publish everything it holds again.
        """
        identities = self._announce(record, ttl)
        with self._lock:
            known = self._published_to.setdefault(record.id, {})
            same = all(known.get(shard) == identity for shard, identity in identities.items())
            known.update(identities)
        return same

    def leave(self, node_id: str) -> None:
        """Make the node unknown at once: what it still has in the directory no longer counts."""
        with self._lock:
            self._published_to.pop(node_id, None)
        self._send([run(scripts.LEAVE, s.slot, [s.nodes, s.node(node_id)], [node_id]) for s in self._shards])

    def nodes(self) -> dict[str, NodeRecord]:
        """The living nodes by id."""
        found = {
            node_id: parse_node(node_id, fields)
            for node_id, fields in listed(self._link, self._shards, lambda s: s.nodes, Shard.node).items()
        }
        return {node_id: record for node_id, record in found.items() if record is not None}

    # -- objects --

    def publish(self, keys: Sequence[str], sizes: Sequence[int], holder: str) -> list[int]:
        """Say that ``holder`` has each of ``keys``, and learn how many *others* have it: none, as far as is known,
        where a shard is away.

        A record of another size is replaced: the key names the content, so the others' bytes are stale.
        """
        if " " in holder or "/" not in holder:
            raise ValueError(f"not a holder word: {holder!r}")
        others = [0] * len(keys)
        calls: list[Call] = []
        places = []
        for shard, indices in self._by_shard(keys, CHANGES_PER_CALL):
            names = shard.objects([keys[i] for i in indices])
            calls.append(run(scripts.PUBLISH, shard.slot, names, [holder, *[sizes[i] for i in indices]]))
            places.append((shard, indices))
        for (shard, indices), reply in zip(places, self._send(calls), strict=True):
            if isinstance(reply, Away):
                self._note_missed(shard)
                continue
            for i, count in zip(indices, reply, strict=True):
                others[i] = count
        return others

    def forget(self, keys: Sequence[str], holder: str) -> int:
        """Take back that ``holder`` has ``keys``; the number of records that said so.

        Raises :class:`Unreached`, which names the keys, where only some shards could be told.
        """
        unique = list(dict.fromkeys(keys))
        places = list(self._by_shard(unique, CHANGES_PER_CALL))
        count = 0
        missed: list[str] = []
        calls = [
            run(scripts.FORGET, s.slot, s.objects([unique[i] for i in indices]), [holder]) for s, indices in places
        ]
        for (shard, indices), reply in zip(places, self._send(calls), strict=True):
            if isinstance(reply, Away):
                self._note_missed(shard)
                missed += [unique[i] for i in indices]
            else:
                count += reply
        if missed:
            raise Unreached(f"Redis at {self.place}: a master is away", missed)
        return count

    def lookup(self, keys: Sequence[str]) -> list[ObjectRecord | None]:
        """Who holds each of ``keys``; ``None`` for nobody, or where a shard is away. Holders may be dead: compare
        with :meth:`nodes`.
        """
        found: list[ObjectRecord | None] = [None] * len(keys)
        calls: list[Call] = []
        places = []
        for shard, indices in self._by_shard(keys, LOOKUPS_PER_CALL):
            calls.append(Call(shard.slot, ("MGET", *shard.objects([keys[i] for i in indices]))))
            places.append(indices)
        # Pages of one batch mostly have the same size and holders: each distinct record is parsed once.
        parsed: dict[bytes | None, ObjectRecord | None] = {None: None}
        for indices, reply in zip(places, self._send(calls), strict=True):
            if isinstance(reply, Away):
                with self._lock:
                    self._unreached += len(indices)
                continue
            for i, raw in zip(indices, reply, strict=True):
                if raw not in parsed:
                    parsed[raw] = parse_object(raw)
                found[i] = parsed[raw]
        return found

    def objects(self, *, digest: str = "", page_hash: str = "") -> Iterator[tuple[str, ObjectRecord]]:
        """Every object there is, or those of one namespace or page, in no order: for people, a few hundred at a time.

        One that comes or goes while this runs may be left out; one may come twice.
        """
        away: Away | None = None
        for shard in self._shards:
            pattern = shard.objects_like(digest, page_hash)
            cursor = b"0"
            while True:
                (scanned,) = self._send_to(shard, ("SCAN", cursor, "MATCH", pattern, "COUNT", CHANGES_PER_CALL))
                if isinstance(scanned, Away):
                    away = scanned
                    break
                cursor, names = scanned
                (values,) = self._send_to(shard, ("MGET", *names)) if names else ([],)
                for name, raw in zip(names, values if isinstance(values, list) else [], strict=False):
                    record = parse_object(raw) if raw is not None else None
                    if record is not None:
                        yield Keys.object_key(name), record
                if cursor == b"0":
                    break
        if away is not None:
            raise Unreached(f"Redis at {self.place}: {away}")

    # -- namespaces --

    def declare_namespace(self, digest: str, fields: Mapping[str, str]) -> None:
        """Write down, for people and for :data:`NAMESPACE_TTL`, what ``digest`` stands for. ``fields`` must not be
        empty.
        """
        if not fields:
            raise ValueError("a namespace has at least one field")
        flat = [word for pair in fields.items() for word in pair]
        arguments: list[str | int] = [digest, round(NAMESPACE_TTL * 1000), *flat]
        calls = [run(scripts.DECLARE, s.slot, [s.namespaces, s.namespace(digest)], arguments) for s in self._shards]
        for shard, reply in zip(self._shards, self._send(calls), strict=True):
            if isinstance(reply, Away):
                self._note_missed(shard)

    def namespaces(self) -> dict[str, dict[str, str]]:
        """What was declared and is remembered, by digest."""
        found = listed(self._link, self._shards, lambda s: s.namespaces, Shard.namespace)
        expired = [digest for digest, fields in found.items() if not fields]
        try:
            for shard in self._shards if expired else ():
                prune(self._link, shard, shard.namespaces, shard.namespace, expired, CHANGES_PER_CALL)
        except Unavailable as error:  # of a replica, or full: the answer is good all the same
            logger.debug("expired namespaces stay in the index: %s", error)
        return {digest: fields for digest, fields in found.items() if fields}

    def memory(self) -> Memory:
        """What the fullest of the servers says of its memory."""
        return max((memory_of(server) for server in self._link.servers()), key=lambda found: found.part)

    def memory_policy(self) -> tuple[str, int]:
        """Redis' ``maxmemory-policy``, and ``maxmemory`` in bytes (0: no limit).

        ``("", 0)`` where the user may not ask.
        """
        found = self.memory()
        return found.policy, found.limit

    # -- what the dead leave --

    def sweep(self, live: set[str], *, keys_per_call: int = CHANGES_PER_CALL, pause: float = 0.0) -> int:
        """Drop the words of holders whose node is not in ``live``; how many were dropped.

        Goes through all objects ``keys_per_call`` at a time, ``pause`` seconds apart. A node whose key is
        there is never swept, whatever ``live`` says: it may have joined after ``live`` was asked for. A shard
        that is away is left out; :meth:`heartbeat` is ``False`` when it is back.
        """
        dropped = 0
        for shard in self._shards:
            swept = sweep_shard(self._link, shard, live, keys_per_call=keys_per_call, pause=pause)
            if swept is None:
                self._note_missed(shard)
            else:
                dropped += swept
        return dropped

    # -- talking to Redis --

    @property
    def _shards(self) -> list[Shard]:
        if self._known_keys is None:
            there = shards_there(self._link, self._pool_keys)
            if not there:
                return self._pool_keys.shards  # nobody has created the pool yet: there is nothing to be found
            self._known_keys = Keys(self.pool, there)
        return self._known_keys.shards

    def _note_missed(self, shard: Shard) -> None:
        with self._lock:
            self._missed[shard.number] += 1

    def _announce(self, record: NodeRecord, ttl: float) -> dict[int, _Identity]:
        """Say in every shard that the node lives; what those that were reached are."""
        shards = self._shards
        self._link.servers()  # has sentinels asked now and then who the master is
        created, lease = f"{time.time():.3f}", secrets.token_hex(8)
        rest: list[str | int] = [record.id, max(1, round(ttl * 1000)), lease, *format_node(record)]
        calls = [open_call(self._pool_keys, len(shards))]
        with self._lock:
            missed = Counter(self._missed)  # before it is sent: what is missed meanwhile counts the next time
        for shard in shards:
            keys = [shard.state, shard.nodes, shard.node(record.id)]
            calls.append(run(scripts.HEARTBEAT, shard.slot, keys, [secrets.token_hex(8), created, *rest]))
            if self._may_info:
                # One connection is one server process, so the run id is that of the server that took the heartbeat.
                calls.append(Call(shard.slot, ("INFO", "server")))
        pool, *replies = self._send(calls)
        if not isinstance(pool, Away):
            try:
                check_pool(self._link, self.pool, pool, len(shards))
            except ConfigError as error:
                raise Unavailable(f"the pool was created anew by others: {error}") from error
        found: dict[int, _Identity] = {}
        step = 2 if self._may_info else 1
        for at, shard in enumerate(shards):
            beat, *info = replies[at * step : (at + 1) * step]
            if not isinstance(beat, Away) and not (info and isinstance(info[0], Away)):
                run_id = parse_info(info[0]).get("run_id", "") if info else ""
                found[shard.number] = _Identity(run_id, beat[0].decode(), beat[1].decode(), missed[shard.number])
        if not found:
            raise Unavailable(f"Redis at {self.place}: the pool's masters are away")
        return found

    def _by_shard(self, keys: Sequence[str], limit: int) -> Iterator[tuple[Shard, Sequence[int]]]:
        """The positions of ``keys`` shard by shard, at most ``limit`` at a time."""
        shards = self._shards
        spread: list[Any] = [range(len(keys))]
        if len(shards) > 1:
            spread = [[] for _ in shards]
            for i, key in enumerate(keys):
                spread[shard_of(key, len(shards))].append(i)
        for number, indices in by_shard(spread, limit):
            yield shards[number], indices

    def _send_to(self, shard: Shard, command: Iterable[str | bytes | int]) -> list[Any]:
        return self._send([Call(shard.slot, tuple(command))])

    def _send(self, calls: Sequence[Call]) -> list[Any]:
        return send(self._link, calls, shards=len(self._known_keys.shards) if self._known_keys else 1)
