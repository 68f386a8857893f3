"""A real pool on this machine for tests: node processes, a shared Redis, and engines that lend them memory.

:class:`Engine` is the engine side of the package (session, lending, transfers) over a flat L2 of equal pages, without
SGLang: what SGLang's host pools add is tested with SGLang itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hicache_mooncake import memory
from hicache_mooncake.config import Settings
from hicache_mooncake.engine.host_pools import Located
from hicache_mooncake.engine.launch import NodeFinder
from hicache_mooncake.engine.lending import lendable
from hicache_mooncake.engine.session import NodeSession
from hicache_mooncake.engine.transfers import Batch, PageMover
from hicache_mooncake.protocol import messages as m
from hicache_mooncake.radix_bridge import Namespace

START_TIMEOUT = 20.0


@dataclass
class NodeProcess:
    """A node in a process of its own; ``settings`` as on its command line. ``socket`` is where engines find it."""

    redis_url: str
    name: str = "n"
    settings: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.directory = tempfile.TemporaryDirectory(prefix="hcm-test-")
        self.socket = f"{self.directory.name}/node.sock"
        self.log = Path(self.directory.name) / "node.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.node_id = ""

    def start(self) -> NodeProcess:
        """Start and wait until it serves. Raises ``AssertionError`` with its log when it does not."""
        settings = {
            "redis_url": self.redis_url,
            "node": self.socket,
            "name": self.name,
            "segment_size": "64MiB",
            "heartbeat": 0.2,
            **self.settings,
        }
        arguments = [f"--{key.replace('_', '-')}={value}" for key, value in settings.items()]
        ready, report = os.pipe()
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hicache_mooncake.cli", "node", f"--report-fd={report}", *arguments],
                stdout=log,
                stderr=log,
                pass_fds=(report,),
            )
        os.close(report)
        try:
            with open(ready, "rb") as pipe:
                text = pipe.readline()
        finally:
            assert text, f"the node did not start:\n{self.tail()}"
        content = json.loads(text)
        assert content.get("state") == "ready", f"{content}\n{self.tail()}"
        self.node_id = content["node"]
        return self

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def freeze(self) -> None:
        """Stop it; returns when every thread has come to rest."""
        self.signal(signal.SIGSTOP)
        eventually(self._at_rest, what="the node is frozen")

    def _at_rest(self) -> bool:
        tasks = Path(f"/proc/{self.pid}/task")
        try:
            return all((task / "stat").read_text().rpartition(")")[2].split()[0] in "TZ" for task in tasks.iterdir())
        except OSError:
            return False  # a thread ended meanwhile: look again

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """As the kernel's out-of-memory killer would."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(timeout=10)

    def stop(self, timeout: float = 15.0) -> int:
        """SIGTERM; its exit status. A node that does not go in time is killed and fails the test."""
        process = self.process
        assert process is not None
        if process.poll() is None:
            process.terminate()
            try:
                return process.wait(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGUSR2)  # has it write down what each thread does
                time.sleep(0.5)
                process.kill()
                process.wait()
                raise AssertionError(f"the node did not stop within {timeout:g} s:\n{self.tail()}") from None
        return process.returncode

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else ""

    def close(self) -> None:
        try:
            if self.process is not None and self.process.poll() is None:
                self.thaw()
                self.stop()
        finally:
            self.directory.cleanup()

    def __enter__(self) -> NodeProcess:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()


class Engine:
    """An engine with an L2 of ``pages`` pages of ``page_bytes``, its pages lent to the node unless ``staged``."""

    def __init__(
        self,
        node: str,
        *,
        page_bytes: int = 65536,
        pages: int = 256,
        staged: bool = False,
        op_timeout: float = 3.0,
        pool: str = "default",
        settings: Mapping[str, object] | None = None,
        **fields: str,
    ) -> None:
        """Without a ``node`` it is found or started, with ``settings``."""
        self.page_bytes = page_bytes
        self.pages = pages
        self.l2 = memory.create("test-l2", page_bytes * pages)
        chosen = Settings.of({"node": node, "pool": pool, "op_timeout": op_timeout, **(settings or {})})
        self.session = NodeSession(NodeFinder(chosen), pool=pool, label="test", op_timeout=op_timeout)
        try:
            self.session.open()
        except BaseException:
            self.session.close()
            self.l2.close()
            raise
        self.mover = PageMover(self.session, staging_size=1 << 20)
        if not staged:
            regions = lendable([(self.l2.address, self.l2.size)])
            self.session.lend(regions)
            for region in regions:
                self.mover.add_lent(region.base, region.size)
        self.namespace = Namespace.describe(**{"model": "test", "page_bytes": str(page_bytes), **fields})
        self.session.declare(self.namespace.digest, self.namespace.fields)

    # -- bytes of L2

    def fill(self, slot: int, content: bytes) -> None:
        assert len(content) == self.page_bytes
        self.l2.view[slot * self.page_bytes : (slot + 1) * self.page_bytes] = content

    def read(self, slot: int) -> bytes:
        return bytes(self.l2.view[slot * self.page_bytes : (slot + 1) * self.page_bytes])

    def content(self, key: str, salt: str = "") -> bytes:
        """What a page of this key holds in these tests: the same for everybody, different for every key."""
        seed = int.from_bytes(hashlib.sha256(f"{key}/{salt}".encode()).digest()[:8], "little")
        return np.random.default_rng(seed).bytes(self.page_bytes)

    # -- calls

    def keys(self, hashes: Sequence[str]) -> m.Keys:
        return m.Keys(self.namespace.digest, ["all"], list(hashes))

    def batch(self, hashes: Sequence[str], slots: Sequence[int]) -> Batch:
        addresses = np.array([[self.l2.address + slot * self.page_bytes] for slot in slots], dtype=np.uint64)
        return Batch(self.keys(hashes), Located(addresses, [self.page_bytes]))

    def deadline(self) -> float:
        return time.monotonic() + self.session.op_timeout

    def put(self, hashes: Sequence[str], slots: Sequence[int] | None = None) -> list[bool]:
        slots = range(len(hashes)) if slots is None else slots
        return self.mover.move(m.Put, [self.batch(hashes, slots)], self.deadline())[0]

    def get(self, hashes: Sequence[str], slots: Sequence[int] | None = None) -> list[bool]:
        slots = range(len(hashes)) if slots is None else slots
        return self.mover.move(m.Get, [self.batch(hashes, slots)], self.deadline())[0]

    def exists(self, hashes: Sequence[str]) -> list[bool]:
        budget = self.session.budget_ms(self.deadline())
        reply = self.session.ask(m.Exists(budget, [self.keys(hashes)]))
        return [bool(page) for page in reply.pages[0]] if isinstance(reply, m.Found) else [False] * len(hashes)

    def store(self, hashes: Sequence[str]) -> None:
        """Put pages with their own content; every one must be taken."""
        for slot, page_hash in enumerate(hashes):
            self.fill(slot, self.content(page_hash))
        assert self.put(hashes) == [True] * len(hashes)

    def check(self, hashes: Sequence[str]) -> list[bool]:
        """Get pages into wiped slots; which were hits. A hit with any other byte fails the test."""
        blank = b"\xee" * self.page_bytes
        for slot in range(len(hashes)):
            self.fill(slot, blank)
        hits = self.get(hashes)
        for slot, (page_hash, hit) in enumerate(zip(hashes, hits, strict=True)):
            assert not hit or self.read(slot) == self.content(page_hash), f"wrong bytes for {page_hash}"
        return hits

    def stats(self) -> dict[str, float]:
        reply = self.session.ask(m.Stats())
        assert isinstance(reply, m.Counters)
        return reply.values

    def close(self) -> None:
        self.session.close()
        self.l2.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def hashes(tag: str, count: int) -> list[str]:
    """``count`` page hashes that no other tag has."""
    return [hashlib.sha256(f"{tag}/{number}".encode()).hexdigest() for number in range(count)]


def free_port() -> int:
    """A TCP port of loopback that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def eventually(condition: Any, timeout: float = 10.0, what: str = "") -> None:
    """Wait until ``condition()`` is true; fails after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what or condition}"
        time.sleep(0.02)


@contextmanager
def running(*nodes: NodeProcess) -> Iterator[tuple[NodeProcess, ...]]:
    """Start nodes, close them all."""
    started: list[NodeProcess] = []
    try:
        for node in nodes:
            started.append(node)
            node.start()
        yield nodes
    finally:
        for node in reversed(started):
            node.close()
