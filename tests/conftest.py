"""Fixtures of the whole suite: a Redis of its own, and a look for what a test left behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache_mooncake.metadata.redis_server import PrivateRedis

DEEP = (
    "backend/",
    "engine/",
    "faults/",
    "metadata/test_cluster",
    "metadata/test_directory",
    "sglang/",
    "ssd/test_stores",
    "transfer/test_faults",
)
"""What ``make test-fast`` leaves out beside servers and single slow tests."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    devices = Path("/sys/class/infiniband")
    has_rdma = devices.is_dir() and any(devices.iterdir())
    for item in items:
        if not has_rdma and item.get_closest_marker("rdma"):
            item.add_marker(pytest.mark.skip("no RDMA device here: make test-rdma runs it in a guest"))
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
