"""The directory of a pool: who holds what, and which nodes live. It is a hint: the owners are the authority.

Whatever Redis says may be stale, lost or rebuilt; a reader asks the owner before it believes, so the worst
that this module can cause is a miss. The read path writes nothing.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import redis.exceptions as failures

from hicache_mooncake.errors import ConfigError, Unavailable
from hicache_mooncake.metadata import scripts
from hicache_mooncake.metadata.admission import check_permissions, check_server, refusal, unusable
from hicache_mooncake.metadata.keys import SCHEMA, Keys, shard_of
from hicache_mooncake.metadata.link import Command, RedisLink
from hicache_mooncake.metadata.permissions import ACL_RULES
from hicache_mooncake.metadata.records import (
    NodeRecord,
    ObjectRecord,
    format_node,
    node_of,
    pairs,
    parse_info,
    parse_node,
    parse_object,
)
from hicache_mooncake.metadata.scripts import Script

__all__ = ["ACL_RULES", "Directory"]

logger = logging.getLogger(__name__)

CHANGES_PER_CALL = 512
"""Objects in one Lua call: about 5 ms of the server, and far from Lua's limit of some 8,000 arguments."""

LOOKUPS_PER_CALL = 1024
"""Objects in one MGET: about 2 ms of the server."""

CALLS_PER_WRITE = 8
"""Calls sent before the first reply is read: enough to hide the round trip, and buffers stay small."""

NAMESPACE_TTL = 30 * 24 * 3600.0
"""Seconds for which what a namespace stands for is remembered after it was last declared."""

_Call = tuple[Script, Sequence["str | bytes"], Sequence["str | int"]]


class _Identity(NamedTuple):
    """Which directory a node has published to. A change of any part means: publish everything again."""

    run_id: str  # another server process: restarted, replaced, failed over; "" where INFO is not allowed
    epoch: str  # another `hcm:<pool>`: flushed, restored from an old dump
    lease: str  # the node's own key had expired: others may have swept what it holds


class Directory:
    """One pool's directory in one Redis. Thread-safe.

    ``timeout`` is how many seconds a call to Redis may take. ``shards`` is fixed for the pool by who creates
    it. Every method but :meth:`open` and :meth:`close` raises :class:`Unavailable` when Redis does not answer
    in time, and works again when Redis does, without being opened again. After a call that waited in vain,
    others fail at once for a moment instead of waiting too.
    """

    def __init__(self, url: str, pool: str, *, timeout: float = 0.5, shards: int = 1) -> None:
        """Raises :class:`ConfigError` for a URL, a name or a number of shards that cannot be used; no I/O."""
        self.pool = pool
        self.timeout = timeout
        self._keys = Keys(pool, shards)
        self._link = RedisLink(url, timeout=timeout, client_name=f"hicache-mooncake:{pool}")
        self._may_info = True
        self._published_to: dict[str, _Identity] = {}
        self._lock = threading.Lock()

    # -- joining and leaving --

    def open(self) -> None:
        """Find the pool in Redis, or create it.

        Raises :class:`ConfigError` when there is no usable Redis under the URL, or when the pool there has
        another schema or number of shards, or when the user may not run all of what is needed later;
        :class:`Unavailable` while Redis is loading its data.
        """
        try:
            self._find_or_create()
        except BaseException:
            self._link.drop_idle()
            raise

    @classmethod
    def of_existing(cls, url: str, pool: str, *, timeout: float) -> Directory:
        """The directory of a pool that is there, with its own number of shards: for tools, which create nothing.

        Raises :class:`ConfigError` when Redis cannot be used or has no such pool.
        """
        found = cls(url, pool, timeout=timeout)
        try:
            (shards,) = found._call([("HGET", found._keys.pool, "shards")])
        except Unavailable as error:
            raise refusal(found._link, error) from error
        finally:
            found.close()
        if shards is None:
            raise ConfigError("pool", pool, f"there is no such pool in Redis at {found.place}")
        return cls(url, pool, timeout=timeout, shards=int(shards))

    @property
    def place(self) -> str:
        """Where Redis is, without any password."""
        return self._link.place

    def close(self) -> None:
        """Close the connections. What this process published stays until :meth:`leave` or its TTL."""
        self._link.close()

    def join(self, record: NodeRecord, ttl: float) -> None:
        """Make the node known for ``ttl`` seconds; to be called before it publishes anything."""
        identity = self._announce(record, ttl)
        with self._lock:
            self._published_to[record.id] = identity

    def heartbeat(self, record: NodeRecord, ttl: float) -> bool:
        """Keep the node known for another ``ttl`` seconds.

        ``False``, once for each such change, when the directory is not the one the node has published to, or
        has taken the node for dead meanwhile: what was missing is created again, and the node must publish
        everything it holds again.
        """
        identity = self._announce(record, ttl)
        with self._lock:
            same = self._published_to.get(record.id) == identity
            self._published_to[record.id] = identity
        return same

    def leave(self, node_id: str) -> None:
        """Make the node unknown at once: what it still has in the directory no longer counts."""
        with self._lock:
            self._published_to.pop(node_id, None)
        self._run([(scripts.LEAVE, [self._keys.nodes, self._keys.node(node_id)], [node_id])])

    def nodes(self) -> dict[str, NodeRecord]:
        """The living nodes by id."""
        ids, records = self._indexed(self._keys.nodes, self._keys.node)
        found = {node_id: parse_node(node_id, fields) for node_id, fields in zip(ids, records, strict=True)}
        return {node_id: record for node_id, record in found.items() if record is not None}

    # -- objects --

    def publish(self, keys: Sequence[str], sizes: Sequence[int], holder: str) -> list[int]:
        """Say that ``holder`` has each of ``keys``, and learn how many *others* have it.

        A record of another size is replaced: the key names the content, so the others' bytes are stale.
        """
        if " " in holder or "/" not in holder:
            raise ValueError(f"not a holder word: {holder!r}")
        others = [0] * len(keys)
        calls: list[_Call] = []
        places = []
        for shard, indices in self._by_shard(keys, CHANGES_PER_CALL):
            names = self._keys.objects(shard, [keys[i] for i in indices])
            calls.append((scripts.PUBLISH, names, [holder, *[sizes[i] for i in indices]]))
            places.append(indices)
        for indices, reply in zip(places, self._run(calls), strict=True):
            for i, count in zip(indices, reply, strict=True):
                others[i] = count
        return others

    def forget(self, keys: Sequence[str], holder: str) -> int:
        """Take back that ``holder`` has ``keys``; the number of records that said so."""
        unique = list(dict.fromkeys(keys))
        calls = [
            (scripts.FORGET, self._keys.objects(shard, [unique[i] for i in indices]), [holder])
            for shard, indices in self._by_shard(unique, CHANGES_PER_CALL)
        ]
        return sum(self._run(calls))

    def lookup(self, keys: Sequence[str]) -> list[ObjectRecord | None]:
        """Who holds each of ``keys``; ``None`` for nobody. Holders may be dead: compare with
        :meth:`nodes`.
        """
        found: list[ObjectRecord | None] = [None] * len(keys)
        calls: list[Command] = []
        places = []
        for shard, indices in self._by_shard(keys, LOOKUPS_PER_CALL):
            calls.append(("MGET", *self._keys.objects(shard, [keys[i] for i in indices])))
            places.append(indices)
        # Pages of one batch mostly have the same size and holders: each distinct record is parsed once.
        parsed: dict[bytes | None, ObjectRecord | None] = {None: None}
        for indices, reply in zip(places, self._call(calls), strict=True):
            for i, raw in zip(indices, reply, strict=True):
                if raw not in parsed:
                    parsed[raw] = parse_object(raw)
                found[i] = parsed[raw]
        return found

    def objects(self, *, digest: str = "", page_hash: str = "") -> Iterator[tuple[str, ObjectRecord]]:
        """Every object there is, or those of one namespace or page, in no order: for people, a few hundred at a time.

        One that comes or goes while this runs may be left out; one may come twice.
        """
        pattern = self._keys.objects_like(digest, page_hash)
        cursor = b"0"
        while True:
            cursor, names = self._call([("SCAN", cursor, "MATCH", pattern, "COUNT", CHANGES_PER_CALL)])[0]
            values = self._call([("MGET", *names)])[0] if names else []
            for name, raw in zip(names, values, strict=True):
                record = parse_object(raw) if raw is not None else None
                if record is not None:
                    yield self._keys.object_key(name), record
            if cursor == b"0":
                return

    # -- namespaces --

    def declare_namespace(self, digest: str, fields: Mapping[str, str]) -> None:
        """Write down, for people and for :data:`NAMESPACE_TTL`, what ``digest`` stands for. ``fields`` must not be
        empty.
        """
        if not fields:
            raise ValueError("a namespace has at least one field")
        flat = [word for pair in fields.items() for word in pair]
        keys = [self._keys.namespaces, self._keys.namespace(digest)]
        self._run([(scripts.DECLARE, keys, [digest, round(NAMESPACE_TTL * 1000), *flat])])

    def namespaces(self) -> dict[str, dict[str, str]]:
        """What was declared and is remembered, by digest."""
        digests, records = self._indexed(self._keys.namespaces, self._keys.namespace)
        found = {digest: fields for digest, fields in zip(digests, records, strict=True) if fields}
        try:
            self._prune(self._keys.namespaces, self._keys.namespace, [d for d in digests if d not in found])
        except Unavailable as error:  # of a replica, or full: the answer is good all the same
            logger.debug("expired namespaces stay in the index: %s", error)
        return found

    def memory_policy(self) -> tuple[str, int]:
        """Redis' ``maxmemory-policy``, and ``maxmemory`` in bytes (0: no limit).

        ``("", 0)`` where the user may not ask.
        """
        try:
            facts = parse_info(self._call([("INFO", "memory")])[0])
        except Unavailable as error:
            if isinstance(error.__cause__, failures.NoPermissionError):
                return "", 0
            raise
        return facts.get("maxmemory_policy", "noeviction"), int(facts.get("maxmemory", "0"))

    # -- what the dead leave --

    def sweep(self, live: set[str], *, keys_per_call: int = CHANGES_PER_CALL, pause: float = 0.0) -> int:
        """Drop the words of holders whose node is not in ``live``; how many were dropped.

        Goes through all objects ``keys_per_call`` at a time, ``pause`` seconds apart. A node whose key is
        there is never swept, whatever ``live`` says: it may have joined after ``live`` was asked for.
        """
        dropped = 0
        cursor = b"0"
        while True:
            scan = ("SCAN", cursor, "MATCH", self._keys.object_pattern, "COUNT", keys_per_call)
            cursor, names = self._call([scan])[0]
            # SCAN may return more than COUNT, from a bucket of many keys.
            for start in range(0, len(names), keys_per_call):
                dropped += self._sweep_some(names[start : start + keys_per_call], live)
            if cursor == b"0":
                break
            if pause:
                time.sleep(pause)
        ids = [raw.decode(errors="replace") for raw in self._call([("SMEMBERS", self._keys.nodes)])[0]]
        self._prune(self._keys.nodes, self._keys.node, [node_id for node_id in ids if node_id not in live])
        return dropped

    def _prune(self, index: str, key_of: Callable[[str], str], members: Sequence[str]) -> None:
        """Drop from a set those of ``members`` whose key is gone."""
        for start in range(0, len(members), CHANGES_PER_CALL):
            some = members[start : start + CHANGES_PER_CALL]
            self._run([(scripts.PRUNE, [index, *map(key_of, some)], some)])

    def _sweep_some(self, names: list[bytes], live: set[str]) -> int:
        touched = []
        suspects: set[str] = set()
        for name, raw in zip(names, self._call([("MGET", *names)])[0], strict=True):
            record = parse_object(raw) if raw is not None else None
            owners = {node_of(holder) for holder in record.holders} if record is not None else set()
            gone = {owner for owner in owners if owner is not None and owner not in live}
            if gone:
                touched.append(name)
                suspects |= gone
        if not touched:
            return 0
        ids = sorted(suspects)
        dropped: int = self._run([(scripts.SWEEP, [*touched, *map(self._keys.node, ids)], [len(touched), *ids])])[0]
        return dropped

    # -- talking to Redis --

    def _find_or_create(self) -> None:
        try:
            self._may_info = check_server(self._link)
            check_permissions(self._link, self._keys)
            (found,) = self._link.call([self._eval(scripts.OPEN, [self._keys.pool], self._creation())])
        except Unavailable as error:
            if isinstance(error.__cause__, failures.BusyLoadingError):
                raise
            raise refusal(self._link, error) from error
        if isinstance(found, failures.ResponseError):
            raise unusable(self._link, str(found), hint=self._link.remedy(found))
        self._check_pool(found)

    def _announce(self, record: NodeRecord, ttl: float) -> _Identity:
        keys = [self._keys.pool, self._keys.nodes, self._keys.node(record.id)]
        lease = secrets.token_hex(8)
        arguments = [*self._creation(), record.id, max(1, round(ttl * 1000)), lease, *format_node(record)]
        # One connection is one server process, so the run id is that of the server that took the heartbeat.
        commands: list[Command] = [self._eval(scripts.HEARTBEAT, keys, arguments)]
        if self._may_info:
            commands.append(("INFO", "server"))
        found, *info = self._call(commands)
        try:
            self._check_pool(found)
        except ConfigError as error:
            raise Unavailable(f"the pool was created anew by others: {error}") from error
        run_id = parse_info(info[0]).get("run_id", "") if info else ""
        return _Identity(run_id, found[2].decode(), found[3].decode())

    def _creation(self) -> list[str | int]:
        return [SCHEMA, self._keys.shards, secrets.token_hex(8), f"{time.time():.3f}"]

    def _check_pool(self, found: Sequence[bytes | None]) -> None:
        schema, shards = (int(raw) if raw is not None and raw.isdigit() else None for raw in found[:2])
        if schema != SCHEMA:
            raise unusable(self._link, f"pool {self.pool!r} there has schema {schema}, this build has {SCHEMA}")
        if shards != self._keys.shards:
            raise ConfigError("shards", self._keys.shards, f"pool {self.pool!r} was created with {shards}")

    def _by_shard(self, keys: Sequence[str], limit: int) -> Iterator[tuple[int, Sequence[int]]]:
        """The positions of ``keys`` shard by shard, at most ``limit`` at a time."""
        shards: Mapping[int, Sequence[int]] = {0: range(len(keys))}
        if self._keys.shards > 1:
            spread = defaultdict(list)
            for i, key in enumerate(keys):
                spread[shard_of(key, self._keys.shards)].append(i)
            shards = spread
        for shard, indices in shards.items():
            for start in range(0, len(indices), limit):
                yield shard, indices[start : start + limit]

    def _indexed(self, index: str, key_of: Callable[[str], str]) -> tuple[list[str], list[dict[str, str]]]:
        """The members of a set, and the hash that belongs to each (empty where there is none)."""
        members = sorted(raw.decode(errors="replace") for raw in self._call([("SMEMBERS", index)])[0])
        return members, [pairs(reply) for reply in self._call([("HGETALL", key_of(member)) for member in members])]

    @staticmethod
    def _eval(script: Script, keys: Sequence[str | bytes], arguments: Sequence[str | int]) -> Command:
        return ("EVAL", script.source, len(keys), *keys, *arguments)

    def _run(self, calls: Sequence[_Call]) -> list[Any]:
        """Run scripts by digest, and in full where the server does not know one (new, restarted, SCRIPT
        FLUSH).
        """
        commands: list[Command] = [
            ("EVALSHA", script.sha1, len(keys), *keys, *arguments) for script, keys, arguments in calls
        ]
        full = {id(command): self._eval(*call) for command, call in zip(commands, calls, strict=True)}
        return self._call(commands, full)

    def _call(self, commands: Sequence[Command], full: Mapping[int, Command] | None = None) -> list[Any]:
        replies: list[Any] = []
        for start in range(0, len(commands), CALLS_PER_WRITE):
            some = commands[start : start + CALLS_PER_WRITE]
            for command, reply in zip(some, self._link.call(some), strict=True):
                answer = reply
                if full is not None and isinstance(answer, failures.NoScriptError):
                    answer = self._link.call([full[id(command)]])[0]
                if isinstance(answer, failures.RedisError):
                    raise self._link.unavailable(answer) from answer
                replies.append(answer)
        return replies
