"""An engine beside a node that an operator runs at the default place: it waits for it, and never takes its place."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache_mooncake.engine import launch
from hicache_mooncake.engine.launch import NodeFinder
from hicache_mooncake.errors import ConfigError, HiCacheMooncakeError
from hicache_mooncake.protocol.channel import default_socket
from tests.engine.attached import SMALL
from tests.pool import Engine, NodeProcess, eventually, hashes

_numbers = itertools.count()


@pytest.fixture
def pool() -> str:
    return f"operator-{os.getpid()}-{next(_numbers)}"


@pytest.fixture
def node(redis_url: str, pool: str) -> Iterator[NodeProcess]:
    """An operator's node, at the default place."""
    made = NodeProcess(redis_url, settings={"node": "", "pool": pool})
    yield made
    made.close()


def _listened_on(pool: str) -> bool:
    return default_socket(pool) in Path("/proc/net/unix").read_text()


@pytest.mark.parametrize("killed", [False, True])
def test_an_operators_node_that_restarts_finds_its_place_free(node: NodeProcess, pool: str, killed: bool) -> None:
    node.start()
    with Engine("", pool=pool, settings=SMALL) as engine:
        names = hashes("restart", 4)
        engine.store(names)
        node.kill() if killed else node.stop()
        until = time.monotonic() + 3
        while time.monotonic() < until:
            assert not _listened_on(pool), "the engine took the operator's place"
            time.sleep(0.05)
        assert not any(engine.get(names))
        node.start()
        eventually(lambda: engine.session.connected, 15, "the engine found the operator's node again")
        engine.store(names)
        assert all(engine.check(names))
        link = engine.session._link
        assert link is not None and link.welcome.node_id == node.node_id and not link.welcome.embedded


def test_a_node_that_cannot_start_says_that_an_embedded_one_has_its_place(node: NodeProcess, pool: str) -> None:
    with Engine("", pool=pool, settings=SMALL) as engine:
        link = engine.session._link
        assert link is not None and link.welcome.embedded
        with pytest.raises(AssertionError, match="embedded node that an engine started") as refused:
            node.start()
        assert link.welcome.node_id in str(refused.value) and "--node PATH" in str(refused.value)
    assert node.process is not None and node.process.wait(timeout=10) == 2
    eventually(lambda: not _listened_on(pool), 10, "it ends with its last engine")
    node.start()


def test_a_node_that_cannot_start_names_the_one_that_runs(node: NodeProcess, redis_url: str) -> None:
    node.start()
    second = NodeProcess(redis_url, settings=node.settings)
    try:
        with pytest.raises(AssertionError, match="runs already") as refused:
            second.start()
        assert node.node_id in str(refused.value)
    finally:
        second.close()


def test_starts_that_fail_are_not_repeated_every_second(
    redis_url: str, pool: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    starts: list[float] = []
    start = NodeFinder._start

    def counted(finder: NodeFinder, deadline: float) -> None:
        starts.append(time.monotonic())
        start(finder, deadline)

    monkeypatch.setattr(NodeFinder, "_start", counted)
    monkeypatch.setattr(launch, "FIRST_START_PAUSE", 3.0)
    with Engine("", pool=pool, settings=SMALL) as engine:
        finder, link = engine.session._finder, engine.session._link
        assert isinstance(finder, NodeFinder) and link is not None and link.node is not None
        good, finder._settings = finder._settings, type(finder._settings).of({"pool": pool, "secret_file": "/no/file"})
        finder._start_pause = 3.0
        os.kill(link.node.pid, signal.SIGKILL)
        eventually(lambda: len(starts) == 3, 20, "a start was tried, and after a pause again")
        assert starts[2] - starts[1] >= 3.0
        said = [record for record in caplog.records if "/no/file" in record.getMessage()]
        assert len(said) == 1, "the same error once"
        with pytest.raises(ConfigError, match="/no/file"):
            finder.find_or_start(time.monotonic() + 5)
        assert len(starts) == 3, "told why, without another start"
        finder._settings = good
        eventually(lambda: engine.session.connected, 30, "healed")
        assert finder._start_pause == 3.0


def test_an_engine_that_only_ever_met_an_embedded_node_starts_another(pool: str) -> None:
    with Engine("", pool=pool, settings=SMALL) as engine:
        assert engine.session._finder.may_start
    with pytest.raises(HiCacheMooncakeError):
        Engine("/no/such/node.sock", pool=pool)
