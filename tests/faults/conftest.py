"""A pool of two hosts with a Redis that may be mistreated."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
import redis

from hicache_mooncake.metadata.redis_server import PrivateRedis
from tests.pool import Engine, NodeProcess, eventually, free_port, running

HEARTBEAT = 0.2
TTL = 3 * HEARTBEAT
HEAL_WITHIN = TTL + 5
"""Seconds after a fault is over in which everything must work again by itself."""


@dataclass
class TwoHosts:
    """Nodes ``near`` and ``far``, an engine on each, and their Redis."""

    server: PrivateRedis
    near: NodeProcess
    far: NodeProcess
    engine: Engine
    far_engine: Engine
    stack: ExitStack = field(repr=False)

    @property
    def engines(self) -> list[Engine]:
        return [self.engine, self.far_engine]

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.server.url)

    def signal_redis(self, number: int) -> None:
        os.kill(self.server.pid, number)

    def wait_until_both_see_each_other(self) -> None:
        for engine in self.engines:
            eventually(lambda engine=engine: engine.session.connected and nodes(engine) == 2, HEAL_WITHIN)


def nodes(engine: Engine) -> int:
    """How many nodes the engine's node sees."""
    from hicache_mooncake.protocol import messages as m

    reply = engine.session.ask(m.Stats())
    return int(reply.values["nodes"]) if isinstance(reply, m.Counters) else 0


@pytest.fixture
def two_hosts() -> Iterator[TwoHosts]:
    with ExitStack() as stack:
        server = stack.enter_context(PrivateRedis())
        settings: dict[str, object] = {"heartbeat": HEARTBEAT, "op_timeout": 1.0}
        far_settings = {**settings, "listen": f"127.0.0.1:{free_port()}"}
        near, far = stack.enter_context(
            running(NodeProcess(server.url, "near", settings), NodeProcess(server.url, "far", far_settings))
        )
        engine, far_engine = (
            stack.enter_context(Engine(node.socket, page_bytes=16384, op_timeout=1.0)) for node in (near, far)
        )
        made = TwoHosts(server, near, far, engine, far_engine, stack)
        made.wait_until_both_see_each_other()
        yield made
        if server.alive():
            made.signal_redis(signal.SIGCONT)
