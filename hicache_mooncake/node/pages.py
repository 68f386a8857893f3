"""What a node does with pages: exists, put, get, clear. Engines and sockets are elsewhere; the parts are in modules of
their own: ``lookup``, ``writing`` (with ``placement``), ``reading``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from hicache_mooncake.errors import HiCacheMooncakeError
from hicache_mooncake.metadata.records import NodeRecord
from hicache_mooncake.node.copying import Copier
from hicache_mooncake.node.counters import Counters
from hicache_mooncake.node.directory_sync import DirectorySync
from hicache_mooncake.node.index import Page
from hicache_mooncake.node.lookup import Lookup
from hicache_mooncake.node.moves import Move, Wanted
from hicache_mooncake.node.peers import Peers
from hicache_mooncake.node.reading import PageReader
from hicache_mooncake.node.ssd_tier import SsdTier
from hicache_mooncake.node.store import DramStore
from hicache_mooncake.node.writing import PageWriter
from hicache_mooncake.transfer.handshake import AnotherNode

logger = logging.getLogger(__name__)

CHECK_MARGIN = 0.02
"""Seconds kept back from a deadline for the reply."""

MAX_PEER_READS = 16
"""Peers read from at once, over all requests; more wait their turn inside their deadline."""


UNSEEN = "whoever else is in the pool (Redis does not answer)"
"""Stands in :meth:`PageService.clear` for the nodes that only Redis could name."""


class PageService:
    """Thread-safe: engines' requests run concurrently, one a connection."""

    def __init__(
        self,
        store: DramStore,
        sync: DirectorySync,
        peers: Peers,
        counters: Counters,
        *,
        copy_threads: int,
        verify: bool,
        watermark: float,
    ) -> None:
        self._store = store
        self._sync = sync
        self._peers = peers
        self._ssd: SsdTier | None = None
        self._copier = Copier(copy_threads)
        self._readers = ThreadPoolExecutor(MAX_PEER_READS, thread_name_prefix="hcm-peer")
        self._lookup = Lookup(store, sync, peers, counters)
        self._writer = PageWriter(
            store, sync, self._lookup, peers, self._copier, counters, others=sync.others, watermark=watermark
        )
        self._reader = PageReader(store, self._lookup, peers, self._copier, self._readers, counters, verify=verify)

    def put_below(self, ssd: SsdTier) -> None:
        """Give the segment an SSD tier below it."""
        self._ssd = ssd
        self._store.lower = self._lookup.lower = ssd
        self._reader.ssd = ssd

    def held_here(self, keys: Sequence[str]) -> list[bool]:
        """Which keys this node holds, in whatever tier."""
        return self._lookup.held_here(keys)

    def close(self) -> None:
        self._copier.close()
        self._readers.shutdown()

    def exists(self, keys: Sequence[str], deadline: float, *, stop_at_miss: bool) -> bytearray:
        """One byte a key, 1 where a live node holds it. With ``stop_at_miss`` what follows the first miss stays 0."""
        return self._lookup.exists(keys, deadline, stop_at_miss=stop_at_miss)

    def put(self, moves: Sequence[Move], wanted: Wanted, deadline: float) -> bytearray:
        """Store objects; one status each. What is held somewhere already is ``OK`` without moving a byte."""
        return self._writer.put(moves, wanted, deadline)

    def get(self, moves: Sequence[Move], wanted: Wanted, deadline: float) -> bytearray:
        """Fetch objects into place; one status each. Pages that are not ``OK`` may hold anything."""
        return self._reader.get(moves, wanted, deadline)

    def held_elsewhere(self, keys: Sequence[str]) -> list[bool]:
        """Which pages another live node holds, as far as can be told now."""
        return [bool(nodes) for nodes in self._lookup.holders(keys)]

    def commit(self, written: Sequence[Page]) -> int:
        """Make written pages visible, here and then in Redis; how many were not here already."""
        return self._writer.commit(written)

    def clear(self, digests: Sequence[str], deadline: float) -> tuple[int, list[str]]:
        """Drop every page of these namespaces on every node: how many went, and who may still hold some.

        Also nodes that Redis has lost sight of are asked. While Redis tells nothing, nobody knows whom to ask besides:
        ``UNSEEN`` then stands among those not reached.
        """
        dropped = self.clear_here(digests)
        nodes = sorted(self._sync.known().items())
        orders = [
            self._readers.submit(self._clear_peer, node_id, record, digests, deadline) for node_id, record in nodes
        ]
        answers = [order.result() for order in orders]
        unreached = [node_id for (node_id, _), count in zip(nodes, answers, strict=True) if count is None]
        if not self._sync.view_is_current():
            unreached.append(UNSEEN)
        return dropped + sum(count or 0 for count in answers), unreached

    def _clear_peer(self, node_id: str, record: NodeRecord, digests: Sequence[str], deadline: float) -> int | None:
        """How many pages went; None when the node may still hold some."""
        try:
            peer = self._peers.get(node_id)
            if peer is not None:
                return peer.clear(digests, deadline - CHECK_MARGIN)
            with self._peers.visit(node_id, record) as stranger:
                return stranger.clear(digests, deadline - CHECK_MARGIN)
        except HiCacheMooncakeError as error:
            if node_id not in self._sync.others() and _has_ended(error):
                return 0
            logger.warning("node %s did not clear: %s", node_id, error)
            return None

    def clear_here(self, digests: Sequence[str]) -> int:
        """Drop this node's pages of these namespaces."""
        prefixes = tuple(f"{digest}:" for digest in digests)
        if not prefixes:
            return 0
        dropped = self._store.remove_where(lambda key: key.startswith(prefixes))
        if self._ssd is not None:
            dropped += self._ssd.remove_where(lambda key: key.startswith(prefixes))
        return dropped


def _has_ended(error: HiCacheMooncakeError) -> bool:
    """Whether a failure shows that the node's process is gone: its host says that nobody, or another, listens there."""
    return isinstance(error, AnotherNode) or isinstance(error.__cause__, ConnectionRefusedError)
