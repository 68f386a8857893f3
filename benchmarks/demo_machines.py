"""What the demo starts: a Redis, two nodes, SGLang servers on a CPU or a GPU; and what Redis says the pool holds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hicache_mooncake.config import Settings
from hicache_mooncake.metadata.directory import Directory
from hicache_mooncake.metadata.keys import Keys
from hicache_mooncake.metadata.records import ObjectRecord, node_of
from hicache_mooncake.operate.pool_view import local_node
from testbed import environment
from testbed.server import ServerFailed, SGLangServer

POOL = "demo"
NODE_READY_WITHIN = 30.0
REDIS_TIMEOUT = 5.0
GPU_READY_WITHIN = 1800.0
"""Seconds until a server of the user's model answers: reading 100 GB of weights and capturing CUDA graphs included."""


class DemoFailed(Exception):
    """The demo cannot go on. ``hint`` says what the user can do."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


# -- nodes


class DemoNode:
    """``hicache-mooncake node`` in a process of its own."""

    def __init__(self, name: str, directory: Path, redis_url: str, segment_size: str) -> None:
        self.name = name
        self.socket = str(directory / f"node-{name}.sock")
        self.log_path = directory / f"node-{name}.log"
        self.words = ["node", "--name", name, "--pool", POOL, "--node", self.socket]
        self.words += ["--redis-url", redis_url, "--segment-size", segment_size, "--heartbeat", "0.5"]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        # Killed outright, the demo cannot clean up; the kernel then ends its nodes.
        setpriv = shutil.which("setpriv")
        prefix = [setpriv, "--pdeathsig", "TERM"] if setpriv else []
        with open(self.log_path, "ab") as log:
            self._process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "hicache_mooncake.cli", *self.words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the demo, which stops its parts in order
            )

    def wait_until_listed(self, directory: Directory) -> str:
        """Wait until the pool's directory lists the node; its id."""
        deadline = time.monotonic() + NODE_READY_WITHIN
        while time.monotonic() < deadline and self.alive:
            for record in directory.nodes().values():
                if record.name == self.name:
                    return record.id
            time.sleep(0.05)
        said = self.log_path.read_text(errors="replace").strip().rpartition("\n")[2] or "it said nothing"
        reason, _, hint = said.removesuffix(")").partition(" (hint: ")
        raise DemoFailed(f"node {self.name} did not start: {reason}", hint)

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """SIGTERM, then SIGKILL. Harmless when not started."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def counters(self) -> Mapping[str, float]:
        """What the node has counted since it started."""
        with local_node(Settings.of({"node": self.socket, "pool": POOL})) as node:
            return node.counters()


# -- servers


class UserServer(SGLangServer):
    """``python -m sglang.launch_server`` for a model and with flags of the user's, nothing of the test bed's in it."""

    def __init__(self, model: str, words: Sequence[str], extra: Mapping[str, Any] | None, log_path: Path) -> None:
        super().__init__(Path(model), admin_api_key="demo", log_path=log_path)
        backend = [] if extra is None else ["--hicache-storage-backend", "mooncake"]
        if extra is not None:
            backend += ["--hicache-storage-backend-extra-config", json.dumps(dict(extra))]
        self._argv = [
            *("--model-path", model, "--host", "127.0.0.1", "--port", str(self.port), "--page-size", "64"),
            *("--enable-hierarchical-cache", "--hicache-storage-prefetch-policy", "wait_complete"),
            *("--enable-metrics", "--enable-cache-report", "--admin-api-key", "demo"),
            *backend,
            *words,
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, within: float = GPU_READY_WITHIN, progress: Callable[[str], None] | None = None) -> None:
        """As the server of the test bed, without its stand-ins."""
        with open(self.log_path, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sglang.launch_server", *self._argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)
        started = time.monotonic()
        said = ""
        while not self._answers():
            if not self.alive or time.monotonic() - started > within:
                what = "died while starting" if not self.alive else f"was not ready within {within:.0f} s"
                self.kill()
                raise ServerFailed(f"SGLang {what}; the end of its log:\n{self.log_tail()}")
            last = self.log_tail(1).rpartition("] ")[2]
            if progress and last != said and "/health" not in last:
                progress(said := last)
            time.sleep(0.5)
        self.boot_seconds = time.monotonic() - started

    def kill(self) -> None:
        super().kill()
        if self._process is not None:
            self._process.wait(timeout=10)


def usable_gpu() -> bool:
    """Whether torch sees a CUDA device. Imports torch: seconds."""
    import torch

    return bool(torch.cuda.is_available())


def cpu_server(model: Path, tokens: int, extra: Mapping[str, Any] | None, log_path: Path) -> SGLangServer:
    """A server of a tiny model in the test bed, in the arithmetic in which a cached prompt gives the same answer."""
    return SGLangServer(
        model,
        backend=None if extra is None else "mooncake",
        extra_config=extra,
        page_size=64,
        tokens=tokens,
        attend_new_rows=True,
        extra_args=["--dtype", "float32", "--served-model-name", "tiny-llama"],
        # SGLang leaves its own sockets behind when it is killed: in the demo's directory they go with it.
        env={"TMPDIR": str(log_path.parent)},
        log_path=log_path,
    )


def close_cpu_servers() -> None:
    """End the process that servers on a CPU are forked from, and every server that is left."""
    environment.close_warm_process()


# -- what Redis says


@dataclass(frozen=True)
class Holding:
    """What one node holds according to Redis, where its pages are read, and how much it could hold."""

    id: str
    name: str
    address: str
    pages: int
    bytes: int
    capacity: int


@dataclass(frozen=True)
class Contents:
    """The pool as Redis describes it; ``example`` is the Redis key of one page."""

    pages: int
    bytes: int
    nodes: tuple[Holding, ...]
    example: str


def contents(url: str) -> Contents:
    """Read the pool's directory, as anybody could with redis-cli."""
    with closing(Directory.of_existing(url, POOL, timeout=REDIS_TIMEOUT)) as directory:
        records = dict(directory.objects())
        nodes = sorted(directory.nodes().values(), key=lambda node: node.name)
    holdings = []
    for node in nodes:
        held = {key: record for key, record in records.items() if node.id in map(node_of, record.holders)}
        pages, size = _pages_and_bytes(held)
        holdings.append(Holding(node.id, node.name, node.addresses.get("tcp", ""), pages, size, node.capacity))
    example = Keys(POOL).object(next(iter(records))) if records else ""
    return Contents(*_pages_and_bytes(records), tuple(holdings), example)


def _pages_and_bytes(records: Mapping[str, ObjectRecord]) -> tuple[int, int]:
    # An object is one rank's part of a page; the parts of a page differ in the last word of their keys.
    pages = {key.rpartition(":")[0] for key in records}
    return len(pages), sum(record.size for record in records.values())
