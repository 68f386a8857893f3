"""A pool of two nodes on this machine and an engine at each, as the benchmarks use them."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from hicache_mooncake import memory
from hicache_mooncake.engine.host_pools import Located
from hicache_mooncake.engine.transfers import Batch
from hicache_mooncake.metadata.redis_server import PrivateRedis
from hicache_mooncake.protocol import messages as m
from hicache_mooncake.radix_bridge import Namespace
from tests.pool import Engine, NodeProcess, eventually, hashes, running

_STEP = 16 << 20
_SEGMENT_SLACK = 64 << 20
_FAR_SEGMENT = 64 << 20


class Pool:
    """Redis, two nodes, and this process in the part of an engine at either.

    ``near`` holds the pages, ``far`` is where an engine reads them from over the network.
    """

    def __init__(self, redis_url: str, near: NodeProcess, far: NodeProcess) -> None:
        self.redis_url = redis_url
        self.near = near
        self.far = far
        self.mapped_alone = {pid: _shared_bytes(pid) for pid in self.pids}  # with no engine attached

    @property
    def pids(self) -> list[int]:
        return [self.near.pid, self.far.pid]


@contextmanager
def running_pool(largest_footprint: int) -> Iterator[Pool]:
    """A pool whose first node can hold twice ``largest_footprint`` bytes: pages to read and pages to write."""
    segment = int(2 * largest_footprint / 0.9) + _SEGMENT_SLACK
    with PrivateRedis() as redis:
        near = NodeProcess(redis.url, "near", settings={"segment_size": segment, "heartbeat": 0.5})
        far = NodeProcess(redis.url, "far", settings={"segment_size": _FAR_SEGMENT, "heartbeat": 0.5})
        with running(near, far):
            _wait_until_mapped(near.pid, segment)
            _wait_until_mapped(far.pid, _FAR_SEGMENT)
            yield Pool(redis.url, near, far)


class Pages:
    """``batches`` batches of pages of one size: their content, their names, and two engines' L2 to move them in."""

    def __init__(self, pool: Pool, page_bytes: int, pages: int, batches: int, undo: ExitStack) -> None:
        self.page_bytes = page_bytes
        self.pages = pages
        self.batches = batches
        self.pool = pool
        count = pages * batches
        self.content = memory.create("bench-content", page_bytes * count)
        undo.callback(self.content.close)
        self._fill(random.Random(page_bytes))
        for pid, alone in pool.mapped_alone.items():  # a node unmaps an engine's memory soon after it has gone
            _wait_until_unmapped(pid, alone + _STEP)
        self.writer = self._engine(pool.near, undo)
        self.reader = self._engine(pool.far, undo)
        for pid, alone in pool.mapped_alone.items():
            _wait_until_mapped(pid, alone + page_bytes * count)
        for start in range(0, self.content.size, _STEP):
            self.writer.l2.view[start : start + _STEP] = self.content.view[start : start + _STEP]
        self.names = hashes(f"read/{page_bytes}", count)
        self.slots = list(range(count))
        random.Random(2).shuffle(self.slots)  # pages of one request lie anywhere in L2, as SGLang's do
        self.puts = 0
        self.written = Namespace.describe(model="test", page_bytes=page_bytes, use="puts")

    def _engine(self, node: NodeProcess, undo: ExitStack) -> Engine:
        count = self.pages * self.batches
        engine = Engine(node.socket, page_bytes=self.page_bytes, pages=count, op_timeout=30)
        undo.callback(engine.close)
        engine.l2.populate()
        return engine

    def _fill(self, source: random.Random) -> None:
        generator = np.random.default_rng(source.randrange(1 << 30))
        for start in range(0, self.content.size, _STEP):
            size = min(_STEP, self.content.size - start)
            self.content.view[start : start + size] = generator.bytes(size)

    def _part(self, batch: int) -> slice:
        return slice(batch * self.pages, (batch + 1) * self.pages)

    def batch_slots(self, batch: int) -> list[int]:
        """Where the pages of a batch lie."""
        return self.slots[self._part(batch)]

    def batch_names(self, batch: int) -> list[str]:
        return self.names[self._part(batch)]

    def store_all(self) -> None:
        """Put every batch, so that it can be read. Raises ``RuntimeError`` when a page is not taken."""
        for batch in range(self.batches):
            self.move(m.Put, self.writer, self.batch(self.writer, batch))

    def new_names(self) -> list[str]:
        """Names of a batch that nobody stored before."""
        self.puts += 1
        return hashes(f"put/{self.page_bytes}/{self.puts}", self.pages)

    def batch(self, engine: Engine, number: int, names: Sequence[str] | None = None) -> Batch:
        """The request for a batch: outside of the clock, for SGLang's own pool says where its pages lie."""
        slots = np.array(self.batch_slots(number), dtype=np.uint64)
        addresses = np.uint64(engine.l2.address) + slots * np.uint64(self.page_bytes)
        keys = m.Keys(engine.namespace.digest, ["all"], self.batch_names(number))
        if names is not None:
            keys = m.Keys(self.written.digest, ["all"], list(names))
        return Batch(keys, Located(addresses.reshape(-1, 1), [self.page_bytes]))

    def move(self, kind: type[m.Put] | type[m.Get], engine: Engine, batch: Batch) -> None:
        """Store or fetch a batch. Raises ``RuntimeError`` when a page is not moved."""
        (moved,) = engine.mover.move(kind, [batch], engine.deadline())
        if not all(moved):
            raise RuntimeError(f"{kind.__name__}: {moved.count(False)} of {len(moved)} pages failed")

    def clear(self, *, puts_only: bool = False) -> None:
        """Make room: drop what was stored in the namespace of puts, or everything."""
        digests = [self.written.digest] if puts_only else [self.written.digest, self.writer.namespace.digest]
        reply = self.writer.session.ask(m.Clear(10_000, digests))
        if not isinstance(reply, m.Cleared) or reply.unreached:
            raise RuntimeError(f"the pool was not cleared: {reply}")

    def check(self, engine: Engine, batch: int) -> None:
        """Fetch a batch into wiped pages and compare every byte. Raises ``RuntimeError`` when one is wrong."""
        size = self.page_bytes
        for slot in self.batch_slots(batch):
            engine.l2.view[slot * size : (slot + 1) * size] = bytes(size)
        self.move(m.Get, engine, self.batch(engine, batch))
        for slot in self.batch_slots(batch):
            there = slice(slot * size, (slot + 1) * size)
            if engine.l2.view[there] != self.content.view[there]:
                raise RuntimeError(f"page {slot} came back with other bytes")


def _shared_bytes(pid: int) -> int:
    match = re.search(r"RssShmem:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(match.group(1)) * 1024 if match else 0


def _wait_until_mapped(pid: int, size: int) -> None:
    """Wait until a node has faulted its memory in, as it has long done when it serves real traffic."""
    eventually(lambda: _shared_bytes(pid) >= size, timeout=120, what=f"{size} bytes mapped in process {pid}")
    time.sleep(0.05)


def _wait_until_unmapped(pid: int, size: int) -> None:
    eventually(lambda: _shared_bytes(pid) <= size, timeout=30, what=f"more than {size} bytes unmapped in process {pid}")
