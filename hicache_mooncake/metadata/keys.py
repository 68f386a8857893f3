"""Every Redis key of this package, and the only place that spells one.

==================================================  ======================================================
``hcm:<pool>``                                      hash: schema, shards, created
``hcm:<pool>:shard:{<shard>}``                      hash: epoch, created
``hcm:<pool>:nodes:{<shard>}``                      set of node ids, dead ones until the next sweep
``hcm:<pool>:node:{<shard>}<id>``                   hash, always with a TTL: the node lives as long as this key
``hcm:<pool>:namespaces:{<shard>}``                 set of namespace digests
``hcm:<pool>:ns:{<shard>}<digest>``                 hash, with a TTL: what the digest stands for, for people
``hcm:<pool>:probe:{<shard>}``                      written and removed at open, to see what the user may do
``hcm:<pool>:o:{<shard>}<object key>``              string: size and one word per holder
==================================================  ======================================================

A shard is a directory of its own: all its keys are in one slot of a Redis Cluster, so that a script may touch them
together, and nodes announce themselves in each, so that one that is lost takes only its own pages out of sight. A
single Redis has one shard, ``{0}``.

A pool's name holds no ``:`` and no glob character, so no pool's keys can match another pool's pattern.
"""

from __future__ import annotations

import itertools
import string
import zlib
from collections.abc import Iterator
from functools import cache

from redis.crc import REDIS_CLUSTER_HASH_SLOTS as SLOTS
from redis.crc import key_slot

from hicache_mooncake import config_values
from hicache_mooncake.errors import ConfigError

SCHEMA = 2
"""Version of what the keys hold. Nodes that disagree about it do not share a pool."""

MAX_SHARDS = 64


class Shard:
    """The keys of one shard. ``slot`` is where a Redis Cluster has them."""

    def __init__(self, pool: str, number: int, tag: str) -> None:
        self._pool = pool
        self._tag = tag
        self.number = number
        self.slot = key_slot(tag.encode())
        self.state = f"hcm:{pool}:shard:{{{tag}}}"
        self.nodes = f"hcm:{pool}:nodes:{{{tag}}}"
        self.namespaces = f"hcm:{pool}:namespaces:{{{tag}}}"
        self.probe = f"hcm:{pool}:probe:{{{tag}}}"
        self._node = f"hcm:{pool}:node:{{{tag}}}"
        self._namespace = f"hcm:{pool}:ns:{{{tag}}}"
        self._object = f"hcm:{pool}:o:{{{tag}}}"

    def node(self, node_id: str) -> str:
        return self._node + node_id

    def namespace(self, digest: str) -> str:
        return self._namespace + digest

    def objects(self, object_keys: list[str]) -> list[str]:
        """The Redis keys of ``object_keys``, all of which belong to this shard."""
        prefix = self._object
        return [prefix + object_key for object_key in object_keys]

    def objects_like(self, digest: str = "", page_hash: str = "") -> str:
        """A pattern for SCAN: the shard's objects of a namespace, of a page, or all.

        >>> Keys("default").shards[0].objects_like(page_hash="abc")
        'hcm:default:o:{0}*:abc:*'
        """
        if not digest and not page_hash:
            return self._object + "*"
        parts = [escaped(digest) if digest else "*", escaped(page_hash) if page_hash else "*", "*"]
        return self._object + ":".join(parts)


class Keys:
    """The keys of one pool. Raises :class:`ConfigError` for a name or a number of shards that cannot be
    used.
    """

    def __init__(self, pool: str, shards: int = 1) -> None:
        try:
            self.pool_name = config_values.name(pool)
        except ValueError as error:
            raise ConfigError("pool", pool, str(error)) from None
        if not 1 <= shards <= MAX_SHARDS:
            raise ConfigError("shards", shards, f"1 to {MAX_SHARDS} is expected")
        self.pool = f"hcm:{pool}"
        self.slot = key_slot(self.pool.encode())
        self.shards = [Shard(pool, number, tag) for number, tag in enumerate(tags(shards))]

    def shard_of(self, object_key: str) -> Shard:
        return self.shards[shard_of(object_key, len(self.shards))]

    def object(self, object_key: str) -> str:
        """
        >>> Keys("default").object("0011223344556677:abc:all")
        'hcm:default:o:{0}0011223344556677:abc:all'
        """
        return self.shard_of(object_key).objects([object_key])[0]

    @staticmethod
    def object_key(name: bytes) -> str:
        """The object key in the Redis key ``name``; the inverse of :meth:`object`."""
        return name.decode(errors="replace").partition("}")[2]


@cache
def tags(shards: int) -> tuple[str, ...]:
    """The hash tags of a pool's shards, spread evenly over the slots of a Redis Cluster, as its masters are.

    Part of the schema: every node must come to the same ones.

    >>> tags(1), [key_slot(tag.encode()) * 3 // SLOTS for tag in tags(3)]
    (('0',), [0, 1, 2])
    """
    if shards == 1:
        return ("0",)
    return tuple(next(_near(number, shards)) for number in range(shards))


def _near(number: int, shards: int) -> Iterator[str]:
    """Tags that begin with ``number`` and lie around the middle of its part of the slots."""
    part = SLOTS / shards
    for length in itertools.count(0):
        for letters in itertools.product(string.ascii_lowercase, repeat=length):
            tag = str(number) + "".join(letters)
            if abs(key_slot(tag.encode()) - (number + 0.5) * part) <= part / 8:
                yield tag


def escaped(text: str) -> str:
    """``text`` as a pattern that matches only itself."""
    return "".join(f"\\{symbol}" if symbol in "*?[]\\^-" else symbol for symbol in text)


def shard_of(object_key: str, shards: int) -> int:
    """Which shard holds ``object_key``: all parts of a page share one, so that a page is looked up in one
    call.

    >>> shard_of("00ff:abcd:tp0", 4) == shard_of("00ff:abcd:tp1", 4)
    True
    """
    if shards == 1:
        return 0
    _, _, rest = object_key.partition(":")
    page_hash, _, _ = rest.partition(":")
    return zlib.crc32(page_hash.encode()) % shards
