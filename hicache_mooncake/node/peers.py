"""The other nodes as this one can use them: connections, and who is left alone after failing until it answers again.

A peer whose read failed rests. Once its rest is over it is probed, in the background: an engine's request is never what
finds out that a peer still does not answer, because that costs the engine its whole deadline.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from hicache_mooncake.errors import HiCacheMooncakeError
from hicache_mooncake.memory import Memory
from hicache_mooncake.metadata.records import DRAM, SSD, NodeRecord, ObjectRecord, node_of
from hicache_mooncake.transfer.base import Credentials, Outcome, Peer, Transport

logger = logging.getLogger(__name__)

FIRST_REST = 1.0
LONGEST_REST = 30.0
"""Seconds before a peer whose read failed is probed. Doubling from the first to the longest where reads fail between
probes that succeed: a path that is too slow for pages. Forgotten after one read that went well."""

PROBE_AGAIN = 1.0
"""Seconds from a probe that failed to the next."""

PROBE_TIMEOUT = 1.0
"""Seconds a peer has to answer a probe."""


class _Rest:
    """A peer that failed: left alone until a probe succeeded, and used on trial from then on."""

    __slots__ = ("length", "probe_at", "resting")

    def __init__(self) -> None:
        self.length = 0.0
        self.probe_at = 0.0
        self.resting = False

    def begin(self, now: float) -> None:
        self.length = min(LONGEST_REST, 2 * self.length or FIRST_REST)
        self.probe_at = now + self.length
        self.resting = True


class Peers:
    """Thread-safe. ``alive`` gives the live nodes as the directory has them.

    A node is reached by the first of ``transports`` that it has an address for.
    """

    def __init__(
        self, transports: Sequence[Transport], credentials: Credentials, alive: Callable[[], Mapping[str, NodeRecord]]
    ) -> None:
        self._transports = transports
        self._credentials = credentials
        self._alive = alive
        self._lock = threading.Lock()
        self._peers: dict[str, Peer] = {}
        self._rests: dict[str, _Rest] = {}
        self._closed = False

    def usable(self) -> set[str]:
        """Nodes that are alive, can be reached by a transport of ours and are not resting after a failure."""
        with self._lock:
            resting = {node_id for node_id, rest in self._rests.items() if rest.resting}
        return {
            node_id
            for node_id, record in self._alive().items()
            if node_id not in resting and self._reaches(record) is not None
        }

    def holders(self, record: ObjectRecord | None, usable: set[str]) -> list[str]:
        """The usable nodes that hold an object, the best last: at random, those that have it in DRAM after others."""
        if record is None:
            return []
        found: list[str] = []
        for tier in (DRAM, SSD):
            nodes = [node_of(holder) for holder in record.holders if holder.endswith(f"/{tier}")]
            of_tier = {node_id for node_id in nodes if node_id is not None and node_id in usable}
            found = [*random.sample(sorted(of_tier - {*found}), len(of_tier - {*found})), *found]
        return found

    def get(self, node_id: str) -> Peer | None:
        """The peer, connected on first use; None when it is not alive any more."""
        record = self._alive().get(node_id)
        transport = self._reaches(record) if record is not None else None
        if record is None or transport is None:
            return None
        with self._lock:
            if self._closed:
                return None
            peer = self._peers.get(node_id)
            if peer is None:
                try:
                    peer = transport.connect(record.addresses[transport.scheme], node_id, self._credentials)
                except HiCacheMooncakeError as error:
                    logger.warning("node %s cannot be connected to: %s", node_id, error)
                    return None
                self._peers[node_id] = peer
            return peer

    def visit(self, node_id: str, record: NodeRecord) -> Peer:
        """A peer of the caller's own, which closes it, for a node whether alive or not. Raises ``ProtocolError``."""
        transport = self._reaches(record) or self._transports[0]
        return transport.connect(record.addresses.get(transport.scheme, ""), node_id, self._credentials)

    def prepare(self, memory: Memory) -> None:
        """Pages will be moved to and from ``memory``, an engine's: what takes long for that is done now."""
        for transport in self._transports:
            transport.prepare(memory)

    def stats(self) -> dict[str, float]:
        """What the transports count by themselves."""
        return {name: value for transport in self._transports for name, value in transport.stats().items()}

    def _reaches(self, record: NodeRecord) -> Transport | None:
        return next((transport for transport in self._transports if transport.scheme in record.addresses), None)

    def judge(self, node_id: str, peer: Peer, outcomes: Sequence[Outcome]) -> None:
        """A batch with this peer has ended: it failed if nothing came of it for want of an answer."""
        failed = any(outcome in (Outcome.FAILED, Outcome.TIMEOUT) for outcome in outcomes)
        if failed and Outcome.OK not in outcomes:
            self.failed(node_id, peer.failure)
        else:
            self.succeeded(node_id)

    def succeeded(self, node_id: str) -> None:
        """The peer did what it should: it is used without reserve again."""
        if node_id in self._rests:
            with self._lock:
                self._rests.pop(node_id, None)

    def failed(self, node_id: str, reason: str) -> None:
        """The peer did not answer or broke off: others are asked until it answers again."""
        with self._lock:
            if node_id not in self._peers:
                return  # we broke it off ourselves, because Redis did not know the node for a moment
            rest = self._rests.setdefault(node_id, _Rest())
            if rest.resting:
                return  # several batches were under way when it failed: one failure
            rest.begin(time.monotonic())
        logger.warning("node %s failed (%s): left alone until it answers again", node_id, reason or "no answer")

    def tend(self) -> None:
        """Forget nodes that are gone, probe those that have rested. Does not wait; called at every heartbeat."""
        self._prune()
        now = time.monotonic()
        with self._lock:
            due = [node_id for node_id, rest in self._rests.items() if rest.resting and rest.probe_at <= now]
            for node_id in due:
                self._rests[node_id].probe_at = now + PROBE_TIMEOUT + PROBE_AGAIN
        for node_id in due:
            threading.Thread(target=self._probe, args=(node_id,), name="hcm-probe", daemon=True).start()

    def _probe(self, node_id: str) -> None:
        peer = self.get(node_id)
        if peer is None:
            return
        try:
            peer.probe(time.monotonic() + PROBE_TIMEOUT)
        except HiCacheMooncakeError as error:
            logger.debug("node %s does not answer a probe: %s", node_id, error)
            return
        with self._lock:
            rest = self._rests.get(node_id)
            if rest is None or not rest.resting:
                return
            rest.resting = False
        logger.warning("node %s answers again", node_id)

    def _prune(self) -> None:
        """Close the connections to nodes that are gone."""
        alive = self._alive()
        with self._lock:
            gone = [self._peers.pop(node_id) for node_id in list(self._peers) if node_id not in alive]
            for node_id in list(self._rests):
                if node_id not in alive:
                    del self._rests[node_id]
        for peer in gone:
            peer.close()

    def close(self) -> None:
        """Close every connection, for good; batches under way fail."""
        with self._lock:
            self._closed = True
            peers, self._peers = list(self._peers.values()), {}
        for peer in peers:
            peer.close()
