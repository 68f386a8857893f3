"""The embedded default: a node is started by whoever comes first, shared, and gone with its last user."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache_mooncake.errors import ConfigError
from tests.engine.attached import SMALL, Attached, processes_of
from tests.pool import Engine, eventually, hashes

GONE_WITHIN = 10.0
_numbers = itertools.count()


@pytest.fixture
def pool() -> str:
    return f"embedded-{os.getpid()}-{next(_numbers)}"


@pytest.fixture(autouse=True)
def nothing_is_left_on_the_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Temporary files go to a place of their own, which is empty again in the end."""
    shared = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory(prefix="hcm-") as place:
        monkeypatch.setenv("TMPDIR", place)
        yield
        eventually(lambda: not os.listdir(place), GONE_WITHIN, "files of the node are gone")
    assert not [name for name in set(os.listdir("/dev/shm")) - shared if "hicache" in name]


def test_two_engines_at_once_agree_on_one_node(pool: str) -> None:
    both = [Attached(pool), Attached(pool)]
    first, second = (engine.report for engine in both)
    assert first["node"] == second["node"], (first, second)
    pid = both[0].node_pid
    assert len(processes_of(pid)) == 2, "the node and its private Redis"
    both[0].close()
    time.sleep(0.7)
    assert processes_of(pid), "it has a user yet"
    both[1].close()
    eventually(lambda: not processes_of(pid), GONE_WITHIN, "the node is gone with its last user")
    assert [engine.process.returncode for engine in both] == [0, 0]


def test_a_node_goes_with_an_engine_that_was_killed(pool: str) -> None:
    engine = Attached(pool)
    pid = engine.node_pid
    engine.kill()
    eventually(lambda: not processes_of(pid), GONE_WITHIN, "the node is gone with its last user")


def test_a_killed_node_leaves_no_redis_behind_and_is_replaced(pool: str) -> None:
    with Engine("", pool=pool, settings=SMALL) as engine:
        names = hashes("replaced", 8)
        engine.store(names)
        link = engine.session._link
        assert link is not None and link.node is not None
        first, family = link.welcome.node_id, processes_of(link.node.pid)
        assert len(family) == 2
        os.kill(link.node.pid, signal.SIGKILL)
        eventually(lambda: not any(map(_alive, family)), GONE_WITHIN, "the private Redis died with its node")

        def replaced() -> bool:
            link = engine.session._link
            return engine.session.connected and link is not None and link.welcome.node_id != first

        eventually(replaced, 15, "another node was started")
        assert not any(engine.check(names))
        engine.store(names)
        assert all(engine.check(names))
        link = engine.session._link
        assert link is not None and link.node is not None
        pid = link.node.pid
    eventually(lambda: not processes_of(pid), GONE_WITHIN, "the node is gone with its last user")
    # The killed node could not tidy up: the next one that starts a private Redis in the same place did.


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_private_redis_that_dies_is_started_again(pool: str) -> None:
    with Engine("", pool=pool, settings=SMALL) as engine:
        link = engine.session._link
        assert link is not None and link.node is not None
        names = hashes("revived", 8)
        engine.store(names)
        (redis,) = [pid for pid in processes_of(link.node.pid) if pid != link.node.pid]
        os.kill(redis, signal.SIGKILL)
        assert all(engine.check(names)), "what the node holds itself is read without Redis"

        def healed() -> bool:
            stats = engine.stats()
            return stats.get("directory_rebuilds", 0) >= 1 and len(processes_of(link.node.pid if link.node else 0)) == 2

        eventually(healed, 15, "Redis is back and was told again")
        assert all(engine.exists(names)) and all(engine.check(names))
        assert engine.session._link is link, "the engine saw nothing of it"


def test_a_node_that_lingers_is_warm_for_the_next_engine(pool: str) -> None:
    first = Attached(pool, node_linger=4)
    assert first.report["found"] == 0
    pid = first.node_pid
    first.kill()
    time.sleep(1)
    second = Attached(pool, node_linger=4)
    assert second.report["found"] == 8 and second.node_pid == pid
    second.close()
    eventually(lambda: not processes_of(pid), 4 + GONE_WITHIN, "the node is gone after its linger")


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    "field, value",
    [
        ("segment_size", "900TiB"),
        ("redis_url", "redis://127.0.0.1:1"),
        ("redis_url", "redis://no-such-host.invalid:6379"),
        ("listen", "127.0.0.1:{taken_port}"),
        ("listen", "192.0.2.1:0"),
        ("listen", "0.0.0.0:0"),  # a wildcard needs an address to tell others
        ("huge_pages", "on"),
        ("secret_file", "/no/such/file"),
    ],
)
def test_a_setting_that_cannot_work_is_named_within_ten_seconds(
    pool: str, taken_port: int, field: str, value: str
) -> None:
    given = {**SMALL, "segment_size": "512MiB", field: value.format(taken_port=taken_port)}
    started = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        Engine("", pool=pool, settings=given)
    assert time.monotonic() - started < 10
    assert caught.value.field in (field, "advertise" if value.startswith("0.0.0.0") else field)


def test_a_wrong_setting_leaves_no_node_and_a_right_one_works_at_once(pool: str) -> None:
    with pytest.raises(ConfigError):
        Engine("", pool=pool, settings={**SMALL, "secret_file": "/no/such/file"})
    with Engine("", pool=pool, settings=SMALL) as engine:
        engine.store(hashes("right", 4))
