"""The pool as Redis and the local node tell it, gathered for reports. Reads only."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from hicache_mooncake.config import Settings
from hicache_mooncake.engine.launch import NodeFinder
from hicache_mooncake.errors import ConfigError, HiCacheMooncakeError, ProtocolError, Unavailable
from hicache_mooncake.metadata.directory import Directory
from hicache_mooncake.metadata.records import NodeRecord, ObjectRecord, node_of
from hicache_mooncake.protocol import messages as m
from hicache_mooncake.protocol import orders as o
from hicache_mooncake.protocol.channel import Channel, close_all
from hicache_mooncake.radix_bridge import printable_hash, split_object_key

ASK_WITHIN = 2.0
"""Seconds the local node has to answer a question of the CLI."""


class LocalNode:
    """The node of this host, asked over its unix socket like an engine would. Raises ``Unavailable``."""

    def __init__(self, settings: Settings) -> None:
        deadline = time.monotonic() + ASK_WITHIN
        self._channel = Channel(NodeFinder(settings).dial(deadline))
        try:
            self._channel.send(m.Hello(m.VERSION, settings.pool, "CLI", engine=False), deadline)
            welcome = self._answer(deadline)
            if not isinstance(welcome, m.Welcome):
                raise ProtocolError(
                    welcome.reason if isinstance(welcome, m.Refused) else "the node did not say welcome"
                )
            self.node_id = welcome.node_id
            self.redis = welcome.redis
        except BaseException:
            self._channel.close()
            raise

    def counters(self) -> dict[str, float]:
        """What the node counts."""
        reply = self._ask(m.Stats())
        return reply.values if isinstance(reply, m.Counters) else {}

    def clear(self, digests: Sequence[str], within: float) -> m.Cleared:
        """Drop these namespaces on every node of the pool."""
        reply = self._ask(m.Clear(int(within * 1000), list(digests)), within)
        if not isinstance(reply, m.Cleared):
            raise Unavailable("the node did not clear")
        return reply

    def order(self, order: o.Order, nodes: Sequence[str], within: float) -> tuple[dict[str, o.Answer], set[str]]:
        """Have nodes, ids or names, carry out an order, all of the pool if there are none; and who did not answer."""
        reply = self._ask(m.Relay(int(within * 1000), o.encode(order), list(nodes)), within)
        if not isinstance(reply, m.Relayed):
            raise Unavailable(reply.reason if isinstance(reply, m.Refused) else "the node did not pass the order on")
        return {node: o.decode_answer(body) for node, body in reply.answers.items()}, set(reply.unreached)

    def _ask(self, request: m.Message, within: float = ASK_WITHIN) -> m.Reply:
        deadline = time.monotonic() + within
        self._channel.send(request, deadline)
        return self._answer(deadline)

    def _answer(self, deadline: float) -> m.Reply:
        body, descriptors = self._channel.receive(deadline)
        close_all(descriptors)
        return m.decode_reply(body)

    def close(self) -> None:
        self._channel.close()


@contextmanager
def local_node(settings: Settings) -> Iterator[LocalNode]:
    """The node of this host for a while. Raises ``Unavailable`` when there is none."""
    node = LocalNode(settings)
    try:
        yield node
    finally:
        node.close()


@contextmanager
def directory(settings: Settings) -> Iterator[Directory]:
    """The pool's directory: in the Redis of the settings, else in the one that this host's node uses.

    Raises ``ConfigError`` when neither tells where it is.
    """
    url = settings.redis_url
    if not url:
        try:
            with local_node(settings) as node:
                url = node.redis
        except HiCacheMooncakeError as error:
            raise ConfigError(
                "redis_url", "", f"it is not set, and no node here tells it ({error.message})", hint="give --redis-url"
            ) from error
        if "***" in url:
            raise ConfigError("redis_url", url, "the node keeps its password to itself", hint="give --redis-url")
    found = Directory.of_existing(url, settings.pool, timeout=ASK_WITHIN)
    try:
        yield found
    finally:
        found.close()


@dataclass(frozen=True)
class PoolStatus:
    """One page about a pool. Sizes in bytes, times in seconds."""

    pool: str
    redis: str
    redis_ms: float
    capacity: int
    used: int
    objects: int
    nodes: list[dict[str, Any]]
    namespaces: list[dict[str, str]]
    local: dict[str, float] = field(default_factory=dict)


def status(settings: Settings, pool: Directory) -> PoolStatus:
    """Nodes, totals, namespaces, and the local node's counters where there is one."""
    started = time.perf_counter()
    nodes = sorted(pool.nodes().values(), key=lambda node: (node.name, node.id))
    elapsed = time.perf_counter() - started
    namespaces = [{"digest": digest, **fields} for digest, fields in sorted(pool.namespaces().items())]
    local: dict[str, float] = {}
    try:
        with local_node(settings) as node:
            local = node.counters()
    except HiCacheMooncakeError:
        local = {}
    return PoolStatus(
        pool=pool.pool,
        redis=pool.place,
        redis_ms=round(elapsed * 1000, 2),
        capacity=sum(node.capacity for node in nodes),
        used=sum(node.used for node in nodes),
        objects=sum(node.pages for node in nodes),
        nodes=[describe_node(node) for node in nodes],
        namespaces=namespaces,
        local=local,
    )


def describe_node(node: NodeRecord) -> dict[str, Any]:
    """A node's record with its age in seconds instead of its birth."""
    described = asdict(node)
    described["age"] = round(max(0.0, time.time() - described.pop("started")), 1)
    return described


@dataclass(frozen=True)
class ObjectView:
    """One object: its name's pieces, its size in bytes, and its holders as living and dead node ids."""

    digest: str
    page_hash: str
    part: str
    size: int
    holders: list[str]
    dead: list[str]


def view(key: str, record: ObjectRecord, alive: set[str]) -> ObjectView:
    """An object and which of its holders live."""
    digest, page_hash, part = split_object_key(key)
    live = [word for word in record.holders if (node_of(word) or word) in alive or node_of(word) is None]
    dead = [word for word in record.holders if word not in live]
    return ObjectView(digest, page_hash, part, record.size, live, dead)


def listing(pool: Directory, *, digest: str, page_hash: str, limit: int) -> list[ObjectView]:
    """Up to ``limit`` objects of a namespace, of a page, or of the pool."""
    alive = set(pool.nodes())
    found: list[ObjectView] = []
    seen: set[str] = set()
    for key, record in pool.objects(digest=digest, page_hash=printable_hash(page_hash) if page_hash else ""):
        if key in seen:
            continue
        seen.add(key)
        try:
            found.append(view(key, record, alive))
        except ValueError:
            continue  # somebody else's key under our prefix
        if len(found) >= limit:
            break
    return found


@dataclass(frozen=True)
class Prompt:
    """How much of a prompt is held: ``held`` of its ``pages``, counted from the first one to the first miss."""

    page_size: int
    pages: int
    held: int
    objects: list[ObjectView]

    @property
    def tokens(self) -> int:
        return self.held * self.page_size


def prompt(pool: Directory, hashes: Sequence[str], page_size: int) -> Prompt:
    """Look for a prompt's pages, up to the first that nobody alive holds."""
    found: list[ObjectView] = []
    held = 0
    for page_hash in hashes:
        objects = listing(pool, digest="", page_hash=page_hash, limit=1000)
        found += objects
        if not any(view.holders for view in objects):
            break
        held += 1
    return Prompt(page_size, len(hashes), held, found)


def page_sizes(pool: Directory) -> list[int]:
    """The page sizes, in tokens, that the pool's namespaces have."""
    given = {fields.get("page_size", "") for fields in pool.namespaces().values()}
    return sorted(int(text) for text in given if text.isascii() and text.isdigit() and int(text) > 0)


def known_namespaces(settings: Settings) -> set[str] | None:
    """The digests declared in Redis; None when Redis cannot be asked, from here or now."""
    try:
        with directory(settings) as pool:
            return set(pool.namespaces())
    except HiCacheMooncakeError:
        return None
