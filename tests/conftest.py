"""Fixtures of the whole suite: a Redis of its own, and a look for what a test left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hicache_mooncake.metadata.redis_server import PrivateRedis


@pytest.fixture(scope="module")
def redis_server() -> Iterator[PrivateRedis]:
    """A Redis for one test module."""
    with PrivateRedis() as server:
        yield server


@pytest.fixture
def redis_url(redis_server: PrivateRedis) -> str:
    return redis_server.url
