"""Get: a page comes from the own segment, else from one of its holders, and is checked when it has arrived."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, wait

from hicache_mooncake.errors import HiCacheMooncakeError
from hicache_mooncake.node.copying import Copier
from hicache_mooncake.node.counters import Counters
from hicache_mooncake.node.index import Page
from hicache_mooncake.node.lookup import LOOKUP_CHUNK, Lookup
from hicache_mooncake.node.moves import Move, Wanted
from hicache_mooncake.node.peers import Peers
from hicache_mooncake.node.ssd_tier import SsdTier
from hicache_mooncake.node.store import DramStore
from hicache_mooncake.protocol.messages import Status
from hicache_mooncake.transfer.base import Outcome, PageRead, Peer

logger = logging.getLogger(__name__)


_OK = int(Status.OK)


class PageReader:
    """Fetches pages from the own segment and from other nodes. Thread-safe. ``readers`` runs reads from peers."""

    def __init__(
        self,
        store: DramStore,
        lookup: Lookup,
        peers: Peers,
        copier: Copier,
        readers: Executor,
        counters: Counters,
        *,
        verify: bool,
    ) -> None:
        self._store = store
        self._lookup = lookup
        self._peers = peers
        self._copier = copier
        self._readers = readers
        self._counters = counters
        self._verify = verify
        self.ssd: SsdTier | None = None

    def get(self, moves: Sequence[Move], wanted: Wanted, deadline: float) -> bytearray:
        """Fetch objects into place; one status each. Pages that are not ``OK`` may hold anything."""
        statuses = bytearray([Status.ABSENT]) * len(moves)
        pinned = self._store.pin([move.key for move in moves])
        local = [position for position, page in enumerate(pinned) if page is not None]
        try:
            self._get_local(moves, pinned, local, statuses, wanted, deadline)
        finally:
            self._store.unpin(pinned)
        hits = statuses.count(Status.OK)
        remote = saved = 0
        if hits < len(moves):
            missing = [
                position for position, page in enumerate(pinned) if page is None or statuses[position] == Status.CORRUPT
            ]
            if self.ssd is not None and missing and wanted():
                saved = self.ssd.get(moves, missing, statuses, wanted, deadline, self._copier)
                missing = [position for position in missing if statuses[position] != Status.OK]
            remote = self._get_remote(moves, missing, statuses, wanted, deadline) if missing else 0
        self._counters.add_statuses("get", statuses, ok_as={"local": hits, "ssd_local": saved, "remote": remote})
        return statuses

    def _get_local(
        self,
        moves: Sequence[Move],
        pinned: Sequence[Page | None],
        local: Sequence[int],
        statuses: bytearray,
        wanted: Wanted,
        deadline: float,
    ) -> None:
        if not local:
            return
        positions: list[int] = []
        pages: list[Page] = []
        for position in local:
            page = pinned[position]
            assert page is not None
            if page.size == moves[position].size:
                positions.append(position)
                pages.append(page)
            else:
                statuses[position] = Status.SIZE
        size = sum([page.size for page in pages])
        copied, digests = self._copier.run(
            [page.key for page in pages],
            [moves[at].extents for at in positions],
            [page.extents for page in pages],
            size,
            wanted,
            deadline,
        )
        corrupt = []
        for position, page, status, digest in zip(positions, pages, copied, digests, strict=True):
            if status == _OK and digest == page.checksum:
                statuses[position] = _OK
                continue
            if status == _OK:
                corrupt.append(page)
            statuses[position] = status or Status.CORRUPT
            size -= page.size
        for page in corrupt:
            self._store.drop(page)
        self._counters.add(get_local_bytes=size, corrupt_dropped=len(corrupt))

    def _get_remote(
        self,
        moves: Sequence[Move],
        missing: Sequence[int],
        statuses: bytearray,
        wanted: Wanted,
        deadline: float,
    ) -> int:
        """Read from other nodes: those that an existence query found just now, or that Redis names.

        A page that was not to be had from the former is looked up anew: it may have moved meanwhile.
        """
        found, remembered = self._lookup.holders_lately([moves[at].key for at in missing])
        got = self._get_from(moves, dict(zip(missing, found, strict=True)), statuses, wanted, deadline)
        if remembered and got < len(missing) and wanted() and time.monotonic() < deadline:
            again = [at for at in missing if statuses[at] in (Status.ABSENT, Status.FAILED, Status.CORRUPT)]
            found = self._lookup.holders([moves[at].key for at in again]) if again else []
            got += self._get_from(moves, dict(zip(again, found, strict=True)), statuses, wanted, deadline)
        return got

    def _get_from(
        self,
        moves: Sequence[Move],
        found: Mapping[int, Sequence[str]],
        statuses: bytearray,
        wanted: Wanted,
        deadline: float,
    ) -> int:
        """Read each page from its holders, the last one first, until one delivers or time is up; how many came."""
        holders = {at: [*nodes] for at, nodes in found.items()}
        got = 0
        while True:
            by_peer: defaultdict[str, list[int]] = defaultdict(list)
            for position, nodes in holders.items():
                if nodes and statuses[position] != Status.OK:
                    by_peer[nodes.pop()].append(position)
            if not by_peer or not wanted():
                return got
            now = time.monotonic()
            if now > deadline:
                for positions in by_peer.values():
                    for position in positions:
                        statuses[position] = Status.TIMEOUT
                return got
            more = any(nodes for nodes in holders.values())
            until = now + (deadline - now) / 2 if more else deadline  # leave time for the next replica
            reads = [(positions, node_id, until) for node_id, positions in by_peer.items()]
            futures = [self._readers.submit(self._read_peer, moves, statuses, *read) for read in reads[1:]]
            try:
                got += self._read_peer(moves, statuses, *reads[0])
            finally:
                wait(futures)
            got += sum(future.result() for future in futures)

    def _read_peer(
        self, moves: Sequence[Move], statuses: bytearray, positions: Sequence[int], node_id: str, until: float
    ) -> int:
        peer = self._peers.get(node_id)
        if peer is None or time.monotonic() > until:
            for position in positions:
                statuses[position] = Status.FAILED
            return 0
        outcomes = peer.read([PageRead(*moves[position]) for position in positions], until, self._verify)
        size = got = 0
        for position, outcome in zip(positions, outcomes, strict=True):
            statuses[position] = outcome  # the same numbers mean the same
            if outcome == Outcome.OK:
                got += 1
                size += moves[position].size
        self._peers.judge(node_id, peer, outcomes)
        self._counters.add(get_remote_bytes=size)
        corrupt = [moves[at].key for at, outcome in zip(positions, outcomes, strict=True) if outcome == Outcome.CORRUPT]
        if corrupt:
            self._doubt(peer, corrupt, until)
        return got

    def _doubt(self, peer: Peer, keys: Sequence[str], until: float) -> None:
        """Have the owner look at pages that arrived corrupt, so that the next reader does not get them too."""
        try:
            for start in range(0, len(keys), LOOKUP_CHUNK):
                peer.doubt(keys[start : start + LOOKUP_CHUNK], until)
        except HiCacheMooncakeError as error:
            logger.warning("node %s was not told of %d corrupt pages: %s", peer.node_id, len(keys), error)
