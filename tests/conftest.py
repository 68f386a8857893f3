"""Fixtures of the whole suite: a Redis of its own, and a look for what a test left behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache_mooncake.metadata.redis_server import PrivateRedis

DEEP = ("backend/", "engine/", "faults/", "sglang/", "metadata/test_directory", "transfer/test_faults")
"""What ``make test-fast`` leaves out beside servers and single slow tests."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if str(item.path.relative_to(here)).startswith(DEEP):
            item.add_marker("deep")


@pytest.fixture(scope="module")
def redis_server() -> Iterator[PrivateRedis]:
    """A Redis for one test module."""
    with PrivateRedis() as server:
        yield server


@pytest.fixture
def redis_url(redis_server: PrivateRedis) -> str:
    return redis_server.url
