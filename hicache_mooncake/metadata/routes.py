"""The right kind of link for a ``redis_url``."""

from __future__ import annotations

from hicache_mooncake.metadata.cluster import ClusterLink
from hicache_mooncake.metadata.link import Link, RedisLink
from hicache_mooncake.metadata.place import parse_place
from hicache_mooncake.metadata.sentinel import SentinelLink


def link_to(url: str, *, timeout: float, client_name: str) -> Link:
    """``timeout`` is how many seconds a call may take. Raises :class:`ConfigError` for a URL that no connection can
    be made from. Nothing is connected before the first call.
    """
    place = parse_place(url)
    if place.mode == "cluster":
        return ClusterLink(place, timeout=timeout, client_name=client_name)
    if place.mode == "sentinel":
        return SentinelLink(place, timeout=timeout, client_name=client_name)
    return RedisLink(place.login, place.addresses[0], place=place.shown, timeout=timeout, client_name=client_name)
