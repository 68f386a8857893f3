"""Keeps Redis in step with what this node holds, and this node's view of the pool in step with Redis.

The store is the authority; Redis follows. Whatever Redis misses while it is away is made good when it is back: it is
told again everything that is held, and rid of what was dropped meanwhile.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

from hicache_mooncake.errors import Unavailable
from hicache_mooncake.metadata.directory import Directory, Unreached
from hicache_mooncake.metadata.records import DRAM, NodeRecord, ObjectRecord
from hicache_mooncake.node.audit import Audit
from hicache_mooncake.node.counters import Counters

logger = logging.getLogger(__name__)

HEARTBEATS_TO_LIVE = 3
"""A node that misses this many heartbeats is dead to the others."""

REPUBLISH_BATCH = 512
REPUBLISH_PAUSE = 0.005
"""Seconds between two batches of a rebuild: serving goes first, and 100,000 pages still take about two seconds."""

FORGOTTEN_LIMIT = 100_000
"""Keys remembered as dropped while Redis was away. A stale entry beyond it is repaired when somebody follows it."""

REPAIR_BATCHES = 8
"""Batches of stale entries repaired in one heartbeat: a flood of them must not make us late with the next one."""

DESCRIBE_EVERY = 86_400.0
"""Seconds after which namespaces in use are described again: a description that nobody renews expires in Redis."""

NAMESPACE_LIMIT = 10_000
"""Namespaces remembered to be declared again; far more than a node ever serves."""

SWEEP_WITHIN = 10.0
"""What a dead node left in Redis is swept within so many seconds of somebody noticing; who comes first does it."""

SWEEP_APART = 60.0
"""Seconds at least between sweeps because of holders whom nobody knows: each goes through the whole directory."""

REMEMBER = 600.0
"""Seconds a node that vanished from Redis is remembered: it may still run and hold pages, only out of Redis' sight."""


class Held(Protocol):
    """What a tier of this node holds."""

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Which objects it holds."""

    def sizes_of(self, keys: Sequence[str]) -> dict[str, int]:
        """Key -> size in bytes of those it holds; touches nothing."""

    def keys(self) -> list[str]:
        """Every key: a snapshot."""


class DirectorySync:
    """One node's writes to the directory, its heartbeat, and the other nodes it knows. Thread-safe."""

    def __init__(
        self,
        directory: Directory,
        describe: Callable[[], NodeRecord],
        counters: Counters,
        *,
        heartbeat: float,
    ) -> None:
        """``describe`` gives this node's record as of now; ``heartbeat`` is in seconds."""
        self._directory = directory
        self._describe = describe
        self._counters = counters
        self._heartbeat = heartbeat
        self._tiers: dict[str, Held] = {}
        self._audits: dict[str, Audit] = {}
        self._on_beat: Callable[[], None] = lambda: None
        self.node_id = describe().id
        self._others: dict[str, NodeRecord] = {}
        self._vanished: dict[str, tuple[NodeRecord, float]] = {}
        self._seen_nodes_at = 0.0
        self._behind = threading.Event()  # Redis missed a write of ours
        self._lost_keys: deque[tuple[str, str]] = deque(maxlen=FORGOTTEN_LIMIT)
        self._stale: deque[str] = deque(maxlen=FORGOTTEN_LIMIT)
        self._namespaces: dict[str, Mapping[str, str]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hcm-heartbeat", daemon=True)
        self._describe_at = time.monotonic() + DESCRIBE_EVERY
        self._sweeper: threading.Thread | None = None
        self._unknown_at = time.monotonic() - SWEEP_APART
        # What was there before us:
        self._sweep_at: float | None = time.monotonic() + random.uniform(0.5, 1) * SWEEP_WITHIN

    def start(self, tiers: Mapping[str, Held], *, on_beat: Callable[[], None]) -> None:
        """Join the pool and begin the heartbeat; ``on_beat`` is called after each. Raises ``Unavailable``.

        ``tiers``: what this node holds, by the tier's name in holder words.
        """
        self._tiers = dict(tiers)
        self._audits = {
            tier: Audit(held.keys, self._directory.lookup, self._word(tier)) for tier, held in self._tiers.items()
        }
        self._on_beat = on_beat
        self._directory.join(self._describe(), self._ttl)
        self._refresh_nodes()
        self._thread.start()

    def _word(self, tier: str) -> str:
        return f"{self.node_id}/{tier}"

    @property
    def _ttl(self) -> float:
        return self._heartbeat * HEARTBEATS_TO_LIVE

    # -- the view

    def others(self) -> dict[str, NodeRecord]:
        """The other nodes alive as of the last heartbeat; nobody when Redis has been away longer than a TTL."""
        return self._others if self.view_is_current() else {}

    def view_is_current(self) -> bool:
        """Whether Redis told who lives within the last TTL; if not, nobody here knows who is in the pool."""
        return time.monotonic() - self._seen_nodes_at <= self._ttl + self._heartbeat

    def known(self) -> dict[str, NodeRecord]:
        """Every other node that was alive within the last minutes, also those that Redis does not name now."""
        since = time.monotonic() - REMEMBER
        vanished = {node_id: record for node_id, (record, at) in list(self._vanished.items()) if at > since}
        return {**vanished, **self._others}

    def lookup(self, keys: Sequence[str]) -> list[ObjectRecord | None]:
        """Who is said to hold each key. Raises ``Unavailable``."""
        return self._directory.lookup(keys)

    def refresh_unknown(self, node_ids: Collection[str]) -> None:
        """Look at the nodes again when somebody holds pages whom we do not know: it joined since the last heartbeat.

        One that nobody knows died before our time, and a sweep missed it: there will be another.
        """
        if any(node_id not in self._others for node_id in node_ids):
            since = time.monotonic() - self._seen_nodes_at
            if since > self._heartbeat / 4:
                self._refresh_nodes()
                unknown = any(node_id not in self._others and node_id not in self._vanished for node_id in node_ids)
                if unknown and self._sweep_at is None and time.monotonic() > self._unknown_at + SWEEP_APART:
                    self._unknown_at = time.monotonic()
                    self._sweep_at = time.monotonic() + random.uniform(0.1, 1) * SWEEP_WITHIN

    def _refresh_nodes(self) -> None:
        nodes = self._directory.nodes()
        nodes.pop(self.node_id, None)
        if self._sweep_at is None and any(node_id not in nodes for node_id in self._others):
            self._sweep_at = time.monotonic() + random.uniform(0.1, 1) * SWEEP_WITHIN
        now = time.monotonic()
        vanished = {node_id: (record, at) for node_id, (record, at) in self._vanished.items() if now - at < REMEMBER}
        vanished.update((node_id, (record, now)) for node_id, record in self._others.items() if node_id not in nodes)
        self._vanished = {node_id: seen for node_id, seen in vanished.items() if node_id not in nodes}
        self._others = nodes
        self._seen_nodes_at = now

    # -- writes

    def publish(self, keys: Sequence[str], sizes: Sequence[int], tier: str = DRAM) -> list[int]:
        """Tell Redis of pages just made visible; how many other holders each has (0 where Redis is away)."""
        try:
            others = self._directory.publish(keys, sizes, self._word(tier))
        except Unavailable as error:
            self._fell_behind(error)
            return [0] * len(keys)
        # 1. A put makes K visible. 2. An eviction takes K and tells Redis. 3. The put tells Redis of K: a stale entry.
        # So whoever writes last looks again at what is really held.
        gone = [key for key, held in zip(keys, self._tiers[tier].contains(keys), strict=True) if not held]
        if gone:
            self.forget(gone, tier)
        return others

    def forget(self, keys: Sequence[str], tier: str = DRAM) -> None:
        """Tell Redis that this node does not hold ``keys`` any more."""
        try:
            self._forget_now(keys, tier)
        except Unavailable as error:
            self._lost_keys.extend((tier, key) for key in keys)
            self._fell_behind(error)

    def _forget_now(self, keys: Sequence[str], tier: str) -> None:
        try:
            self._directory.forget(keys, self._word(tier))
        except Unreached as error:
            # A master of a Redis Cluster is away. When it is back, the heartbeat has everything told again.
            self._lost_keys.extend((tier, key) for key in error.keys)

    def believed_held(self, keys: Iterable[str]) -> None:
        """A reader came for pages that are not here: Redis shall be told, soon."""
        self._stale.extend(keys)

    def declare(self, namespaces: Mapping[str, Mapping[str, str]]) -> None:
        """Have namespaces described in Redis, now and whenever it has lost them."""
        for digest, fields in namespaces.items():
            if fields and (digest in self._namespaces or len(self._namespaces) < NAMESPACE_LIMIT):
                self._namespaces[digest] = dict(fields)
        try:
            for digest, fields in namespaces.items():
                if fields:
                    self._directory.declare_namespace(digest, fields)
        except Unavailable as error:
            self._fell_behind(error)

    def _fell_behind(self, error: Unavailable) -> None:
        if not self._behind.is_set():
            logger.warning("directory: %s; serving goes on, Redis is told everything when it is back", error)
        self._behind.set()
        self._counters.add(directory_errors=1)

    # -- the heartbeat

    def _run(self) -> None:
        while not self._stop.wait(self._heartbeat * random.uniform(0.9, 1.0)):
            try:
                ours = self._beat()
                if not ours and self._sweep_at is None:
                    # What is there now may be old: a replica that was promoted knows nodes that died since.
                    self._sweep_at = time.monotonic() + random.uniform(0.1, 1) * SWEEP_WITHIN
                if not ours or self._behind.is_set():
                    self._rebuild()
                self._repair_stale()
                self._restore_lost()
                if time.monotonic() > self._describe_at:
                    self._describe_namespaces()
                if self._sweep_at is not None and time.monotonic() > self._sweep_at:
                    self._start_sweep()
            except Unavailable as error:
                self._fell_behind(error)
            except Exception:
                # The heartbeat is what keeps this node in the pool: one bad round must not end it.
                logger.exception("heartbeat failed; trying again in %.1f s", self._heartbeat)

    def _beat(self) -> bool:
        """Say that we live, look who else does; False when this Redis must be told everything again."""
        ours = self._directory.heartbeat(self._describe(), self._ttl)
        if not ours:
            self._behind.set()  # also if what follows fails: it is said only once
        self._refresh_nodes()
        self._on_beat()
        return ours

    def _describe_namespaces(self) -> None:
        self._describe_at = time.monotonic() + DESCRIBE_EVERY
        for digest, fields in list(self._namespaces.items()):
            self._directory.declare_namespace(digest, fields)

    def _rebuild(self) -> None:
        """Tell Redis again everything that is held, in batches, serving meanwhile."""
        self._behind.clear()
        lost = [self._lost_keys.popleft() for _ in range(len(self._lost_keys))]
        told = 0
        beat = time.monotonic()
        try:
            self._describe_namespaces()
            for tier, held in self._tiers.items():
                dropped = [key for of, key in lost if of == tier]
                for start in range(0, len(dropped), REPUBLISH_BATCH):
                    batch = dropped[start : start + REPUBLISH_BATCH]
                    self._forget_now(batch, tier)
                    self._publish_held(batch, tier)
                snapshot = held.keys()
                for start in range(0, len(snapshot), REPUBLISH_BATCH):
                    told += self._publish_held(snapshot[start : start + REPUBLISH_BATCH], tier)
                    if time.monotonic() - beat > self._heartbeat:
                        self._beat()
                        beat = time.monotonic()
                    if self._stop.wait(REPUBLISH_PAUSE):
                        return
        except Unavailable:
            self._lost_keys.extend(lost)
            raise
        logger.info("directory: Redis was told again of %d pages", told)
        self._counters.add(directory_rebuilds=1, directory_republished=told)

    def _publish_held(self, keys: Sequence[str], tier: str) -> int:
        of_tier = self._tiers[tier]
        held = of_tier.sizes_of(keys)
        if not held:
            return 0
        published = list(held)
        self._directory.publish(published, [held[key] for key in published], self._word(tier))
        still = of_tier.sizes_of(published)
        gone = [key for key in published if key not in still]
        if gone:
            self._forget_now(gone, tier)
        return len(published)

    def _repair_stale(self) -> None:
        for _ in range(REPAIR_BATCHES):
            if not self._stale:
                return
            batch = [self._stale.popleft() for _ in range(min(len(self._stale), REPUBLISH_BATCH))]
            for tier, of_tier in self._tiers.items():
                held = of_tier.sizes_of(batch)
                gone = [key for key in batch if key not in held]
                if gone:
                    self._forget_now(gone, tier)
                    self._publish_held(gone, tier)  # a put may have come between the look and the forget
                    if tier == DRAM:
                        self._counters.add(directory_stale_repaired=len(gone))

    def _restore_lost(self) -> None:
        """Tell Redis again of pages that it says nothing of."""
        for tier, audit in self._audits.items():
            lost = audit.step()
            if lost:
                self._counters.add(directory_restored=self._publish_held(lost, tier))

    def _start_sweep(self) -> None:
        # In a thread of its own: it goes through the whole directory, and the heartbeat cannot wait for that.
        if self._sweeper is None or not self._sweeper.is_alive():
            self._sweep_at = None
            self._sweeper = threading.Thread(target=self._sweep, name="hcm-sweep", daemon=True)
            self._sweeper.start()

    def _sweep(self) -> None:
        try:
            removed = self._directory.sweep({self.node_id, *self._directory.nodes()}, pause=REPUBLISH_PAUSE)
        except Unavailable as error:
            logger.info("directory: sweeping is put off: %s", error)
            self._sweep_at = time.monotonic() + SWEEP_WITHIN
            return
        if removed:
            logger.info("directory: swept %d entries of dead nodes", removed)
            self._counters.add(directory_swept=removed)

    def stop(self, *, leave_within: float) -> None:
        """Leave the pool: from here on no other node counts our pages. Entries are removed for ``leave_within`` s."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=max(5.0, 2 * self._heartbeat))
        try:
            self._directory.leave(self.node_id)
            deadline = time.monotonic() + leave_within
            for tier, held in self._tiers.items():
                keys = held.keys()
                for start in range(0, len(keys), REPUBLISH_BATCH):
                    if time.monotonic() > deadline:
                        logger.info("directory: %d entries are left for the sweep", len(keys) - start)
                        break
                    self._directory.forget(keys[start : start + REPUBLISH_BATCH], self._word(tier))
        except Unavailable as error:
            logger.info("directory: left without saying so (%s); our entries count for nothing already", error)
        self._directory.close()
        if self._sweeper is not None:
            self._sweeper.join(timeout=5.0)  # its next call fails, the directory is closed
