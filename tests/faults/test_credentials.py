"""Nodes that do not share a secret read nothing from each other; an open port without one is said loudly."""

from __future__ import annotations

import pytest

from tests.faults.conftest import HEAL_WITHIN, nodes
from tests.pool import Engine, NodeProcess, eventually, hashes, running


@pytest.mark.parametrize("theirs", ["", "another"])
def test_a_node_without_the_secret_reads_nothing(redis_url: str, theirs: str) -> None:
    pool = f"secret{len(theirs)}"
    ours: dict[str, object] = {"pool": pool, "secret": "ours"}
    with (
        running(NodeProcess(redis_url, "a", ours), NodeProcess(redis_url, "b", {**ours, "secret": theirs})) as (a, b),
        Engine(a.socket, pool=pool) as writer,
        Engine(b.socket, pool=pool) as reader,
    ):
        eventually(lambda: nodes(reader) == 2, HEAL_WITHIN)
        names = hashes("secret", 8)
        writer.store(names)
        for _ in range(3):
            assert not any(reader.check(names))
        reader.store(names)  # and can keep its own
        assert all(reader.check(names))
        log = b.log.read_text()
        assert log.count("left alone") == 1 and "ours" not in log + a.log.read_text()


def test_an_open_port_without_a_secret_is_said_loudly(redis_url: str) -> None:
    open_port: dict[str, object] = {"listen": "0.0.0.0:0", "advertise": "127.0.0.1"}
    with running(NodeProcess(redis_url, settings=open_port)) as (node,):
        assert "UNPROTECTED" in node.log.read_text()
    for fine in ({**open_port, "secret": "long enough"}, {"listen": "[::1]:0"}, {}):
        with running(NodeProcess(redis_url, settings=fine)) as (node,):
            assert "UNPROTECTED" not in node.log.read_text()
