"""Pins of readers in other processes: held while the owner sends, gone with a reader that is dead or too slow."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hicache_mooncake.metadata.directory import Directory
from hicache_mooncake.metadata.redis_server import PrivateRedis
from hicache_mooncake.radix_bridge import object_keys
from tests.pool import Engine, NodeProcess, eventually, hashes, running

PAGE = 1 << 20
PAGES = 24
"""One request, whose pages are pinned together, and more than fits into the buffers of a socket."""

READER = """
import sys, time
from hicache_mooncake import memory
from hicache_mooncake.memory import Extent
from hicache_mooncake.transfer.base import Credentials, Outcome, PageRead
from hicache_mooncake.transfer.tcp import TcpTransport

address, node_id, size, *keys = sys.argv[1:]
size = int(size)
landing = memory.create("landing", size * len(keys))
batch = [PageRead(key, size, [Extent(landing, at * size, size)]) for at, key in enumerate(keys)]
with TcpTransport().connect(address, node_id, Credentials(pool="pins")) as peer:
    peer.probe(time.monotonic() + 10)
    print("reading", flush=True)
    while True:  # until one read was held up for long
        started = time.monotonic()
        outcomes = peer.read(batch, started + 60, True)
        if time.monotonic() - started > 1.5:
            print(outcomes.count(Outcome.OK), flush=True)
            break
"""


@pytest.fixture(scope="module")
def owner(redis_server: PrivateRedis) -> Iterator[NodeProcess]:
    with running(NodeProcess(redis_server.url, "owner", {"pool": "pins", "segment_size": "64MiB"})) as (node,):
        yield node


@pytest.fixture
def engine(owner: NodeProcess) -> Iterator[Engine]:
    with Engine(owner.socket, pool="pins", page_bytes=PAGE, pages=64) as engine:
        yield engine


@contextmanager
def reading(owner: NodeProcess, engine: Engine, names: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that has begun to read pages, and is stopped in the middle of it."""
    directory = Directory(owner.redis_url, "pins")
    address = directory.nodes()[owner.node_id].addresses["tcp"]
    directory.close()
    keys = object_keys(engine.namespace.digest, names, ["all"])
    words = [sys.executable, "-c", READER, address, owner.node_id, str(PAGE), *keys]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as reader:
        try:
            assert reader.stdout is not None and reader.stdout.readline() == "reading\n"
            eventually(lambda: _step(reader) and engine.stats()["pins"] == PAGES, what="the owner sends")
            yield reader
        finally:
            reader.kill()


def _step(reader: subprocess.Popen[str]) -> bool:
    """Let a stopped process go on for a moment."""
    reader.send_signal(signal.SIGCONT)
    time.sleep(0.0005)
    reader.send_signal(signal.SIGSTOP)
    return True


def test_a_dead_reader_pins_nothing(owner: NodeProcess, engine: Engine) -> None:
    names = hashes("dead", PAGES)
    engine.store(names)
    with reading(owner, engine, names) as reader:
        engine.store(hashes("dead-flood", 24))
        assert engine.exists(names) == [True] * PAGES
        reader.kill()
        reader.wait()
        eventually(lambda: engine.stats()["pins"] == 0, timeout=2.0)
    engine.store(hashes("dead-flood2", 60))
    assert not any(engine.exists(names))


def test_a_slow_batch_keeps_its_pins_to_the_end(owner: NodeProcess, engine: Engine) -> None:
    names = hashes("slow", PAGES)
    engine.store(names)
    with reading(owner, engine, names) as reader:
        for number in range(12):  # some seconds in which everything that may go does
            engine.store(hashes(f"slow-flood{number}", 16))
            _step(reader)
            time.sleep(0.15)
        reader.send_signal(signal.SIGCONT)
        assert reader.stdout is not None and reader.stdout.readline() == f"{PAGES}\n"
    eventually(lambda: engine.stats()["pins"] == 0)


@pytest.mark.slow
def test_a_reader_that_takes_longer_than_a_pin_lasts_loses_its_connection(owner: NodeProcess, engine: Engine) -> None:
    names = hashes("frozen", PAGES)
    engine.store(names)
    with reading(owner, engine, names):
        started = time.monotonic()
        eventually(lambda: engine.stats()["pins"] == 0, timeout=12.0)
        assert time.monotonic() - started > 8.0
        engine.store(hashes("frozen-flood", 60))
        assert not any(engine.exists(names))
