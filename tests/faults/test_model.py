"""Random lives of a pool against a plain model of it.

The model knows what every page has to hold, and which pages somebody may have. A pool may forget whatever it likes at
any time; it must never give other bytes, never invent a page, and once nothing happens any more what it says is there
must be there, and its accounts must add up.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

from hicache_mooncake.metadata.redis_server import PrivateRedis
from hicache_mooncake.protocol import messages as m
from tests.faults.conftest import HEAL_WITHIN, HEARTBEAT, nodes
from tests.pool import Engine, NodeProcess, eventually, free_port, hashes

SIZES = (4096, 20_000)
"""Bytes of a page: one whole granule, and one whose last granule is not full."""

SEGMENTS = ("2MiB", "1MiB", "0")
"""Much less than what is written, so that all the time something goes; the third node stores only on others."""

SSD: dict[str, object] = {"ssd_size": "6MiB", "ssd_store": "offset", "ssd_staging": "1MiB"}

STEPS = 220


class Life:
    """Three nodes, two engines at each (pages of two sizes), and what may be true about them."""

    def __init__(self, seed: int, stack: ExitStack, disk: Path | None = None) -> None:
        """``disk``: where the first node has an SSD tier, smaller than what is written."""
        self.chance = random.Random(seed)
        self.server = stack.enter_context(PrivateRedis())
        self.nodes = [
            NodeProcess(
                self.server.url,
                f"n{at}",
                {
                    "heartbeat": HEARTBEAT,
                    "op_timeout": 1.0,
                    "segment_size": size,
                    "listen": f"127.0.0.1:{free_port()}",
                    **({"ssd_path": str(disk), **SSD} if disk is not None and at == 0 else {}),
                },
            )
            for at, size in enumerate(SEGMENTS)
        ]
        for node in self.nodes:
            stack.callback(node.close)
            node.start()
        self.engines = [
            [
                stack.enter_context(Engine(node.socket, page_bytes=size, pages=64, op_timeout=1.0, use=str(size)))
                for size in SIZES
            ]
            for node in self.nodes
        ]
        self.names = hashes(f"life {seed}", 600)
        self.written: list[set[str]] = [set() for _ in SIZES]  # by page size: what was ever stored and not cleared
        self.told: list[str] = []  # what was done, for whoever reads a failure
        self.frozen: set[int] = set()
        self.invented = False
        self.wait_until_whole()

    def wait_until_whole(self) -> None:
        for at in range(len(self.nodes)):
            for engine in self.engines[at]:
                eventually(
                    lambda engine=engine: engine.session.connected and nodes(engine) == len(self.nodes),
                    HEAL_WITHIN,
                    "all nodes see each other",
                )

    def some(self) -> list[str]:
        """Neighbouring pages, as a prompt has them; now and then one of them twice."""
        count = self.chance.randint(1, 40)
        start = self.chance.randrange(len(self.names) - count)
        found = self.names[start : start + count]
        return [*found, found[0]] if self.chance.random() < 0.1 else found

    def pick(self) -> tuple[Engine, int]:
        kind = self.chance.randrange(len(SIZES))
        return self.engines[self.chance.randrange(len(self.nodes))][kind], kind

    # -- what may happen

    def put(self) -> None:
        engine, kind = self.pick()
        names = self.some()
        for slot, name in enumerate(names):
            engine.fill(slot, engine.content(name))
        self.written[kind].update(names)  # also of a put that failed some may have come through
        engine.put(names)

    def get(self) -> None:
        engine, kind = self.pick()
        names = self.some()
        for name, hit in zip(names, engine.check(names), strict=True):  # compares every byte
            assert not hit or name in self.written[kind], f"{name} was never stored, or was cleared"

    def exists(self) -> None:
        engine, kind = self.pick()
        names = self.some()
        for name, there in zip(names, engine.exists(names), strict=True):
            # What Redis says of an owner is believed until that is asked, so an invented entry counts for a while.
            assert not there or self.invented or name in self.written[kind], f"{name} was never stored, or was cleared"

    def kill(self) -> None:
        at = self.chance.randrange(len(self.nodes))
        self.nodes[at].kill()
        self.nodes[at].start()

    def freeze(self) -> None:
        at = self.chance.randrange(len(self.nodes))
        if not self.frozen:
            self.nodes[at].freeze()
            self.frozen.add(at)

    def thaw(self) -> None:
        for at in self.frozen:
            node = self.nodes[at]
            assert node.process is not None
            if node.process.poll() is None:
                node.thaw()
            else:  # an engine ended it: it was frozen while it wrote into that engine's pages
                node.start()
        self.frozen.clear()

    def flush_redis(self) -> None:
        with redis.Redis.from_url(self.server.url) as client:
            client.flushall()

    def restart_redis(self) -> None:
        os.kill(self.server.pid, signal.SIGKILL)
        eventually(lambda: not self.server.alive())
        self.server.revive()

    def lose_entries(self) -> None:
        """Some of the directory goes, as when a Redis with too little memory evicts."""
        with redis.Redis.from_url(self.server.url) as client:
            for key in client.scan_iter("hcm:*:o:*", count=200):
                if self.chance.random() < 0.3:
                    client.delete(key)

    def invent_entries(self) -> None:
        """The directory says of pages that somebody holds them who does not."""
        self.invented = True
        with redis.Redis.from_url(self.server.url) as client:
            keys = list(client.scan_iter("hcm:*:o:*", count=200))
            owners = [node.node_id for node in self.nodes] + ["ghost~00000000"]
            for key in self.chance.sample(keys, min(20, len(keys))):
                size = bytes(client.get(key) or b"4096 ").split(b" ")[0].decode()
                client.set(key, f"{size} {self.chance.choice(owners)}/dram")

    def clear(self) -> None:
        engine, kind = self.pick()
        if self.frozen:
            return  # whoever is frozen comes back with its pages, and the caller is told so: nothing to hold it to
        reply = engine.session.ask(m.Clear(900, [engine.namespace.digest]))
        if isinstance(reply, m.Cleared) and not reply.unreached:
            self.written[kind].clear()

    def live(self, steps: int) -> None:
        often: list[Callable[[], None]] = [self.put] * 12 + [self.get] * 12 + [self.exists] * 6
        seldom = [self.kill, self.freeze, self.flush_redis, self.restart_redis]
        seldom += [self.lose_entries, self.invent_entries, self.clear]
        for _ in range(steps):
            deed = self.chance.choice(seldom if self.chance.random() < 0.06 else often)
            self.told.append(deed.__name__)
            deed()
            if self.frozen and self.chance.random() < 0.3:
                self.told.append("thaw")
                self.thaw()
        self.thaw()

    # -- at rest

    def check_at_rest(self) -> None:
        self.wait_until_whole()
        self.look_for_everything()  # whoever is wrongly said to hold something is asked for it, and corrects it
        eventually(self.accounts_add_up, HEAL_WITHIN, "the accounts of the nodes and of Redis agree")
        for at, (there, came) in self.look_for_everything().items():
            assert came == there, f"node {at}: what is said to be there has to come, and the reverse"

    def look_for_everything(self) -> dict[int, tuple[list[bool], list[bool]]]:
        """Of each node which pages are said to be there, and which really come."""
        found: dict[int, tuple[list[bool], list[bool]]] = {}
        for at, of_node in enumerate(self.engines):
            there, came = found[at] = ([], [])
            for kind, engine in enumerate(of_node):
                for start in range(0, len(self.names), 50):
                    names = self.names[start : start + 50]
                    there += engine.exists(names)
                    hits = engine.check(names)
                    came += hits
                    assert all(name in self.written[kind] for name, hit in zip(names, hits, strict=True) if hit)
        return found

    def accounts_add_up(self) -> bool:
        stats = [of_node[0].stats() for of_node in self.engines]
        with redis.Redis.from_url(self.server.url) as client:
            records = client.mget(keys) if (keys := list(client.scan_iter("hcm:*:o:*", count=500))) else []
        entries = [word for raw in records if raw is not None for word in raw.decode().split(" ")[1:]]
        held = {node.node_id: int(of["pages"]) for node, of in zip(self.nodes, stats, strict=True)}
        on_disk = {node.node_id: int(of.get("ssd_pages", 0)) for node, of in zip(self.nodes, stats, strict=True)}
        told = {node_id: entries.count(f"{node_id}/dram") for node_id in held}
        told_on_disk = {node_id: entries.count(f"{node_id}/ssd") for node_id in held}
        footprint = sum(of["used_bytes"] for of in stats)
        sizes = [-(-int(raw.split(b" ")[0]) // 4096) * 4096 for raw in records if raw is not None]
        replicas = [raw.count(b"/dram") for raw in records if raw is not None]
        expected = sum(size * count for size, count in zip(sizes, replicas, strict=True))
        return (
            told == held
            and told_on_disk == on_disk
            and len(entries) == sum(held.values()) + sum(on_disk.values())
            and footprint == expected
            and not any(of["pins"] for of in stats)
        )


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [2, 5])
def test_a_random_life_with_a_disk_does_neither(seed: int) -> None:
    with ExitStack() as stack:
        place = stack.enter_context(tempfile.TemporaryDirectory(prefix="hcm-test-ssd-", dir="/var/tmp"))
        life = Life(seed, stack, Path(place) / "ssd")
        try:
            life.live(STEPS)
            life.check_at_rest()
        except BaseException as error:
            error.args = (f"{error}\nseed {seed}, what happened: {' '.join(life.told)}",)
            raise


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1, 4, 9, 27])
def test_a_random_life_tells_no_lie_and_adds_up(seed: int) -> None:
    with ExitStack() as stack:
        life = Life(seed, stack)
        try:
            life.live(STEPS)
            life.check_at_rest()
        except BaseException as error:
            error.args = (f"{error}\nseed {seed}, what happened: {' '.join(life.told)}",)
            raise
