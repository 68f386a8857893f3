"""A running node: everything put together, in the order in which it must start and stop."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack

from hicache_mooncake import __version__
from hicache_mooncake.allocator import ExtentAllocator
from hicache_mooncake.config import Settings
from hicache_mooncake.config_values import masked_url
from hicache_mooncake.errors import HiCacheMooncakeError
from hicache_mooncake.memory import Extent
from hicache_mooncake.metadata.directory import Directory
from hicache_mooncake.metadata.records import DRAM, SSD, NodeRecord
from hicache_mooncake.metadata.redis_server import PrivateRedis
from hicache_mooncake.node import segment
from hicache_mooncake.node.counters import Counters
from hicache_mooncake.node.directory_sync import DirectorySync, Held
from hicache_mooncake.node.engine_server import EngineServer
from hicache_mooncake.node.engine_socket import close_listener, listen
from hicache_mooncake.node.metrics import MetricsPort, NodeMetrics
from hicache_mooncake.node.orders import OrderDesk, OrderRelay
from hicache_mooncake.node.pages import PageService
from hicache_mooncake.node.peers import Peers
from hicache_mooncake.node.source import StoreSource
from hicache_mooncake.node.ssd_tier import SsdTier
from hicache_mooncake.node.stopping import StopRequest
from hicache_mooncake.node.store import DramStore
from hicache_mooncake.protocol import messages as m
from hicache_mooncake.protocol.channel import default_socket
from hicache_mooncake.transfer.address import is_loopback, parse
from hicache_mooncake.transfer.base import Credentials, Listener
from hicache_mooncake.transfer.choice import open_transports

logger = logging.getLogger(__name__)

LEAVE_WITHIN = 3.0
"""Seconds a stopping node spends on removing its entries from Redis; others sweep the rest."""

REDIS_TIMEOUT = 0.5
"""Longest that one Redis call may take, in seconds; less where ``op_timeout`` is shorter."""

REVIVE_PAUSE = 5.0
"""Seconds between two attempts to start a private Redis again: one that dies at once is not to eat a CPU."""

UNUSED_GRACE = 20.0
"""Seconds an embedded node waits for its first user: the engine that started it is still starting itself."""


def default_copy_threads() -> int:
    """Enough threads to fill the memory bus, not so many that the engine's own threads starve."""
    return max(1, min(4, len(os.sched_getaffinity(0))))


class Node:
    """One node of a pool, from construction until :meth:`close`. An ``embedded`` one ends with its last engine."""

    def __init__(self, settings: Settings, *, embedded: bool = False) -> None:
        """Take memory, join the pool, listen. Raises ``ConfigError`` naming the setting that cannot work."""
        self.settings = settings
        self.id = f"{settings.node_name}~{secrets.token_hex(4)}"
        self._embedded = embedded
        self._started = time.time()
        self.counters = Counters()
        self._listener: Listener | None = None
        self._private_redis: PrivateRedis | None = None
        self._revive_at = 0.0
        address = settings.node or default_socket(settings.pool)
        with ExitStack() as undo:
            # First of all: it decides who is the node of this host. Engines that come early wait in its backlog.
            # An embedded one does not ask who came before: that is the node of another rank, still starting.
            sock = listen(address, pool="" if embedded else settings.pool)
            undo.callback(close_listener, sock, address)
            credentials = self._credentials = Credentials(settings.shared_secret(), settings.pool)
            self._transports = open_transports(settings.protocol, settings.device_name, settings.segment_size)
            for transport in self._transports:
                undo.callback(transport.close)  # after all that has been moved by it
            staged = settings.ssd_staging if settings.enable_ssd_offload else 0
            # Behind the segment, so that whatever may read the one may read the other.
            staging_at = ExtentAllocator.footprint(settings.segment_size)
            memory = segment.create(
                staging_at + staged if staged else settings.segment_size, huge_pages=settings.huge_pages
            )
            undo.callback(memory.close)
            self.redis_url = settings.redis_url or self._start_redis(undo)
            self.directory = Directory(
                self.redis_url,
                settings.pool,
                timeout=min(REDIS_TIMEOUT, settings.op_timeout / 2),
                shards=settings.shards,
            )
            undo.callback(self.directory.close)
            self.directory.open()
            self.sync = DirectorySync(self.directory, self.describe, self.counters, heartbeat=settings.heartbeat)
            self.store = DramStore(
                memory,
                capacity=settings.segment_size,
                high_watermark=settings.high_watermark,
                forget_in_directory=self.sync.forget,
                held_elsewhere=self._held_elsewhere,
            )
            self.peers = Peers(self._transports, credentials, self.sync.others)
            self.pages = PageService(
                self.store,
                self.sync,
                self.peers,
                self.counters,
                copy_threads=settings.copy_threads or default_copy_threads(),
                verify=settings.verify == "always",
                watermark=settings.high_watermark,
            )
            self.ssd: SsdTier | None = None
            if staged:
                self.ssd = SsdTier(
                    settings, self.id, self.store, Extent(memory, staging_at, staged), self.sync, self.counters
                )
                self.pages.put_below(self.ssd)
                undo.callback(self.ssd.close)
            undo.callback(self.pages.close)
            desk = OrderDesk(self.store, self.counters, pin_ttl=settings.pin_ttl)
            undo.callback(desk.close)
            source = StoreSource(self.id, self.store, self.sync, self.pages, self.counters, desk, self.ssd)
            self._listener = self._transports[0].listen(settings.listen, settings.advertise, source, credentials)
            undo.callback(self._listener.close)
            if not credentials.secret and not is_loopback(parse(settings.listen, listening=True).host):
                logger.warning(
                    "UNPROTECTED: the data port %s is open to the network and no secret is set: whoever reaches it can "
                    "read and clear this node's pages (set secret_file, the same on every node of the pool)",
                    self._listener.address,
                )
            tiers: dict[str, Held] = {DRAM: self.store}
            if self.ssd is not None:
                tiers[SSD] = self.ssd
            self.sync.start(tiers, on_beat=self.peers.tend)
            undo.callback(self.sync.stop, leave_within=LEAVE_WITHIN)
            if self.ssd is not None:
                self.ssd.open()
            self.metrics = NodeMetrics(self.stats, pool=settings.pool, node=settings.node_name)
            self.engines = EngineServer(
                sock,
                address,
                self.pages,
                self.counters,
                pool=settings.pool,
                welcome=self._welcome,
                declare=self.sync.declare,
                stats=self.stats,
                observe=self.metrics.observe,
                prepare=self.peers.prepare,
                relay=OrderRelay(self.id, desk, self.peers, known=self.sync.known).relay,
            )
            undo.callback(self.engines.close)
            self.metrics_port = 0
            if settings.metrics_port:
                page = MetricsPort(self.metrics, parse(settings.listen, listening=True).host, settings.metrics_port)
                undo.callback(page.close)
                self.metrics_port = page.port
            undo.callback(self.peers.close)  # before all others: a read from a peer that hangs ends with it
            self._undo = undo.pop_all()
        logger.info(
            "node %s of pool %s: segment %d MiB, engines at %s, pages at %s, redis %s",
            self.id,
            settings.pool,
            self.store.capacity >> 20,
            self.engines.address,
            self._listener.address,
            masked_url(self.redis_url),
        )

    def _welcome(self, session: bytes) -> m.Welcome:
        return m.Welcome(
            self.id,
            session,
            __version__,
            masked_url(self.redis_url),
            embedded=self._embedded,
            settings={name: str(value) for name, value in self.settings.public().items()},
            proof=m.secret_proof(self._credentials.secret, session),
        )

    def _held_elsewhere(self, keys: Sequence[str]) -> Sequence[bool]:
        return self.pages.held_elsewhere(keys)  # which is made after the store that asks

    def _start_redis(self, undo: ExitStack) -> str:
        server = PrivateRedis()
        server.start()
        undo.callback(server.stop)
        self._private_redis = server
        return server.url

    def _revive_redis(self) -> None:
        """Start the private Redis again if it died; the next heartbeat notices and tells it everything."""
        now = time.monotonic()
        if self._private_redis is None or self._private_redis.alive() or now < self._revive_at:
            return
        self._revive_at = now + REVIVE_PAUSE
        try:
            self._private_redis.revive()
        except (HiCacheMooncakeError, OSError) as error:
            logger.error("the private Redis cannot be started again, trying on: %s", error)

    def describe(self) -> NodeRecord:
        """This node as the directory shows it, as of now."""
        store = getattr(self, "store", None)
        ssd = getattr(self, "ssd", None)
        usage = ssd.store.usage() if ssd is not None else None
        return NodeRecord(
            id=self.id,
            name=self.settings.node_name,
            host=socket.gethostname(),
            addresses=self._addresses(),
            capacity=self.settings.segment_size,
            used=store.used if store is not None else 0,
            version=__version__,
            started=self._started,
            pages=len(store) if store is not None else 0,
            ssd_capacity=usage.capacity if usage is not None else 0,
            ssd_used=usage.used if usage is not None else 0,
            ssd_pages=usage.entries if usage is not None else 0,
        )

    def _addresses(self) -> dict[str, str]:
        """Where peers reach the data port: by TCP always, whatever else it speaks."""
        if self._listener is None:
            return {}
        return dict.fromkeys(("tcp", self._transports[0].scheme), self._listener.address)

    def stats(self) -> dict[str, float]:
        """Counters and gauges by name."""
        return {
            **self.counters.snapshot(),
            **self.peers.stats(),
            "capacity_bytes": self.store.capacity,
            "used_bytes": self.store.used,
            "pages": len(self.store),
            "pins": self.store.pins,
            **self.store.facts(),
            "engines": self.engines.sessions,
            "nodes": 1 + len(self.sync.others()),
            "directory_unreached": self.directory.unreached,
            **(self.ssd.stats() if self.ssd is not None else {}),
        }

    def unused(self) -> bool:
        """Whether an embedded node's last user is gone for longer than ``node_linger``."""
        if not self._embedded or self.engines.sessions:
            return False
        idle = time.monotonic() - self.engines.idle_since
        return idle > (self.settings.node_linger if self.engines.served else UNUSED_GRACE)

    def run(self, stop: StopRequest) -> None:
        """Serve until ``stop`` is set or, embedded, nobody uses the node any more; then close it."""
        try:
            while not stop.wait(0.25):
                self._revive_redis()
                if self.unused():
                    logger.info("node %s: the last user is gone", self.id)
                    return
        finally:
            self.close()

    def close(self) -> None:
        """Leave the pool and give everything back, within seconds."""
        self._undo.close()
