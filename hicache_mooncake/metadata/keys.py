"""Every Redis key of this package, and the only place that spells one.

================================================  ========================================================
``hcm:<pool>``                                    hash: schema, shards, epoch, created
``hcm:<pool>:nodes``                              set of node ids, dead ones until the next sweep
``hcm:<pool>:node:<id>``                          hash, always with a TTL: the node lives as long as this key
``hcm:<pool>:namespaces``                         set of namespace digests
``hcm:<pool>:ns:<digest>``                        hash, with a TTL: what the digest stands for, for people
``hcm:<pool>:probe``                              written and removed at open, to see what the user may do
``hcm:<pool>:o:{<shard>}<object key>``            string: size and one word per holder
================================================  ========================================================

A pool's name holds no ``:`` and no glob character, so no pool's keys can match another pool's pattern.
"""

from __future__ import annotations

import zlib

from hicache_mooncake import config_values
from hicache_mooncake.errors import ConfigError

SCHEMA = 1
"""Version of what the keys hold. Nodes that disagree about it do not share a pool."""


class Keys:
    """The keys of one pool. Raises :class:`ConfigError` for a name or a number of shards that cannot be
    used.
    """

    def __init__(self, pool: str, shards: int = 1) -> None:
        try:
            self.pool_name = config_values.name(pool)
        except ValueError as error:
            raise ConfigError("pool", pool, str(error)) from None
        if not 1 <= shards <= 64:
            raise ConfigError("shards", shards, "1 to 64 is expected")
        self.shards = shards
        self.pool = f"hcm:{pool}"
        self.nodes = f"hcm:{pool}:nodes"
        self.namespaces = f"hcm:{pool}:namespaces"
        self.probe = f"hcm:{pool}:probe"
        self.object_pattern = f"hcm:{pool}:o:*"
        self._object_prefixes = [f"hcm:{pool}:o:{{{shard}}}" for shard in range(shards)]

    def node(self, node_id: str) -> str:
        return f"{self.pool}:node:{node_id}"

    def namespace(self, digest: str) -> str:
        return f"{self.pool}:ns:{digest}"

    def object(self, object_key: str) -> str:
        """
        >>> Keys("default").object("0011223344556677:abc:all")
        'hcm:default:o:{0}0011223344556677:abc:all'
        """
        return self._object_prefixes[shard_of(object_key, self.shards)] + object_key

    def objects_like(self, digest: str = "", page_hash: str = "") -> str:
        """A pattern for SCAN: the objects of a namespace, of a page, or all.

        >>> Keys("default").objects_like(page_hash="abc")
        'hcm:default:o:{*}*:abc:*'
        """
        parts = [escaped(digest) if digest else "*", escaped(page_hash) if page_hash else "*", "*"]
        return f"{self.pool}:o:{{*}}" + ":".join(parts)

    def object_key(self, name: bytes) -> str:
        """The object key in the Redis key ``name``; the inverse of :meth:`object`."""
        return name.decode(errors="replace").partition("}")[2]

    def objects(self, shard: int, object_keys: list[str]) -> list[str]:
        """The Redis keys of ``object_keys``, all of which belong to ``shard``."""
        prefix = self._object_prefixes[shard]
        return [prefix + object_key for object_key in object_keys]


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
