"""What a node does with pages: exists, put, get. The policy and the copies; engines and sockets are elsewhere."""

from __future__ import annotations

import logging
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import NamedTuple

from hicache_mooncake.errors import HiCacheMooncakeError, Unavailable
from hicache_mooncake.memory import Extent, copy_and_check, copy_extents
from hicache_mooncake.metadata.records import ObjectRecord
from hicache_mooncake.node.counters import Counters
from hicache_mooncake.node.directory_sync import DirectorySync
from hicache_mooncake.node.index import Page
from hicache_mooncake.node.peers import Peers
from hicache_mooncake.node.store import DramStore
from hicache_mooncake.protocol.messages import Status
from hicache_mooncake.transfer.base import Outcome, PageRead, Peer

logger = logging.getLogger(__name__)

PARALLEL_FROM = 4 << 20
"""Bytes of a batch from which it is copied by several threads: below, handing over costs more than it brings."""

LOOKUP_CHUNK = 512
"""Keys an existence query looks up at a time: a miss near the front of a long prompt costs one short call."""

CHECK_MARGIN = 0.02
"""Seconds kept back from a deadline for the reply."""

MAX_PEER_READS = 16
"""Peers read from at once, over all requests; more wait their turn inside their deadline."""


class Move(NamedTuple):
    """One object to be stored from, or fetched into, ``extents`` (``size`` bytes in all)."""

    key: str
    size: int
    extents: Sequence[Extent]


Wanted = Callable[[], bool]
"""Whether the engine still waits: looked at before every page, see ``protocol/fence.py``."""


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
    ) -> None:
        self._store = store
        self._sync = sync
        self._peers = peers
        self._counters = counters
        self._verify = verify
        self._copy_threads = copy_threads
        self._copiers = ThreadPoolExecutor(max(1, copy_threads - 1), thread_name_prefix="hcm-copy")
        self._readers = ThreadPoolExecutor(MAX_PEER_READS, thread_name_prefix="hcm-peer")

    def close(self) -> None:
        self._copiers.shutdown()
        self._readers.shutdown()

    # -- exists

    def exists(self, keys: Sequence[str], deadline: float, *, stop_at_miss: bool) -> bytearray:
        """One byte a key, 1 where a live node holds it. With ``stop_at_miss`` what follows the first miss stays 0."""
        found = bytearray(len(keys))
        for start in range(0, len(keys), LOOKUP_CHUNK):
            chunk = keys[start : start + LOOKUP_CHUNK]
            here = self._exists_chunk(chunk, deadline)
            found[start : start + len(chunk)] = here
            if stop_at_miss and not all(here):
                break
        hits = sum(found)
        self._counters.add(exists_asked=len(keys), exists_found=hits)
        return found

    def _exists_chunk(self, keys: Sequence[str], deadline: float) -> bytes:
        here = self._store.contains(keys)
        missing = [position for position, held in enumerate(here) if not held]
        if missing and time.monotonic() < deadline:
            for position, nodes in zip(missing, self._holders([keys[at] for at in missing]), strict=True):
                here[position] = bool(nodes)
        return bytes(here)

    def _holders(self, keys: Sequence[str]) -> list[list[str]]:
        """For each key the usable nodes that hold it; nobody where Redis does not answer."""
        try:
            records = self._sync.lookup(keys)
            self._meet_newcomers(records)
        except Unavailable:
            self._counters.add(directory_errors=1)
            return [[] for _ in keys]
        usable = self._peers.usable()
        return [self._peers.holders(record, usable) for record in records]

    def _meet_newcomers(self, records: Sequence[ObjectRecord | None]) -> None:
        first = next((record for record in records if record is not None), None)
        if first is not None:
            own = self._sync.holder
            self._sync.refresh_unknown(
                holder.partition("/")[0] for holder in first.holders if holder != own and "~" in holder
            )

    # -- put

    def put(self, moves: Sequence[Move], wanted: Wanted, deadline: float) -> bytearray:
        """Store objects; one status each. What is held somewhere already is ``OK`` without moving a byte."""
        statuses = bytearray([Status.OK]) * len(moves)
        here = self._store.contains([move.key for move in moves])
        first_of: dict[str, int] = {}
        new: list[int] = []
        for position, move in enumerate(moves):
            if not here[position] and first_of.setdefault(move.key, position) == position:
                new.append(position)
        elsewhere = self._holders([moves[at].key for at in new]) if new else []
        new = [position for position, nodes in zip(new, elsewhere, strict=True) if not nodes]
        stored = self._store_new(moves, new, statuses, wanted, deadline) if new else 0
        for position, move in enumerate(moves):  # the twins of a key that failed failed too
            statuses[position] = statuses[first_of.get(move.key, position)]
        succeeded = statuses.count(Status.OK)
        self._counters.add_statuses("put", statuses, ok_as={"stored": stored, "present": succeeded - stored})
        return statuses

    def _store_new(
        self, moves: Sequence[Move], new: Sequence[int], statuses: bytearray, wanted: Wanted, deadline: float
    ) -> int:
        spans = self._store.reserve([moves[at].size for at in new])
        pages: list[Page | None] = [None] * len(new)

        def copy_in(at: int) -> None:
            reserved, move = spans[at], moves[new[at]]
            if reserved is None:
                statuses[new[at]] = Status.NO_SPACE
                return
            if time.monotonic() > deadline:
                statuses[new[at]] = Status.TIMEOUT
                return
            extents = self._store.extents(reserved)
            digest = copy_and_check(move.key, extents, move.extents)
            if not wanted():  # the source may have changed under the copy
                statuses[new[at]] = Status.REVOKED
                return
            pages[at] = Page(move.key, move.size, digest, reserved, extents)

        try:
            self._in_parallel(copy_in, len(new), sum(moves[at].size for at in new))
        except BaseException:
            pages = [None] * len(new)  # nothing of this batch is stored
            raise
        finally:
            for reserved, page in zip(spans, pages, strict=True):
                if page is None and reserved is not None:
                    self._store.cancel(reserved)
        written = [page for page in pages if page is not None]
        fresh = [page for page, inserted in zip(written, self._store.commit(written), strict=True) if inserted]
        if fresh:
            others = self._sync.publish([page.key for page in fresh], [page.size for page in fresh])
            self._drop_surplus([page for page, count in zip(fresh, others, strict=True) if count])
        self._counters.add(put_bytes=sum(page.size for page in written))
        return len(written)

    def _drop_surplus(self, pages: Sequence[Page]) -> None:
        """Two nodes stored the same page at once; the one told so second drops its copy, if the other is alive."""
        if pages:
            for page, nodes in zip(pages, self._holders([page.key for page in pages]), strict=True):
                if nodes:
                    self._store.drop(page)

    # -- get

    def get(self, moves: Sequence[Move], wanted: Wanted, deadline: float) -> bytearray:
        """Fetch objects into place; one status each. Pages that are not ``OK`` may hold anything."""
        statuses = bytearray([Status.ABSENT]) * len(moves)
        pinned = self._store.pin([move.key for move in moves])
        local = [position for position, page in enumerate(pinned) if page is not None]
        try:
            self._get_local(moves, pinned, local, statuses, wanted, deadline)
        finally:
            self._store.unpin(pinned)
        hits = sum(1 for position in local if statuses[position] == Status.OK)
        missing = [
            position for position, page in enumerate(pinned) if page is None or statuses[position] == Status.CORRUPT
        ]
        remote = self._get_remote(moves, missing, statuses, wanted, deadline) if missing else 0
        self._counters.add_statuses("get", statuses, ok_as={"local": hits, "remote": remote})
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
        corrupt: list[Page] = []

        def copy_out(at: int) -> None:
            position = local[at]
            page, move = pinned[position], moves[position]
            assert page is not None
            if page.size != move.size:
                statuses[position] = Status.SIZE
            elif time.monotonic() > deadline:
                statuses[position] = Status.TIMEOUT
            elif not wanted():
                statuses[position] = Status.REVOKED
            elif not self._verify:
                copy_extents(move.extents, page.extents)
                statuses[position] = Status.OK
            elif copy_and_check(move.key, move.extents, page.extents) == page.checksum:
                statuses[position] = Status.OK
            else:
                statuses[position] = Status.CORRUPT
                corrupt.append(page)

        self._in_parallel(copy_out, len(local), sum(moves[at].size for at in local))
        for page in corrupt:
            self._store.drop(page)
        self._counters.add(
            get_local_bytes=sum(moves[at].size for at in local if statuses[at] == Status.OK),
            corrupt_dropped=len(corrupt),
        )

    def _in_parallel(self, work: Callable[[int], None], count: int, size: int) -> None:
        """``work(0)`` .. ``work(count - 1)``, over threads when ``size`` bytes are worth it; ends when all have."""
        lanes = max(1, min(self._copy_threads, count, size // PARALLEL_FROM))

        def lane(first: int) -> None:
            for at in range(first, count, lanes):
                work(at)

        others = [self._copiers.submit(lane, first) for first in range(1, lanes)]
        try:
            lane(0)
        finally:
            wait(others)
        for future in others:
            future.result()

    def _get_remote(
        self,
        moves: Sequence[Move],
        missing: Sequence[int],
        statuses: bytearray,
        wanted: Wanted,
        deadline: float,
    ) -> int:
        """Read from other nodes, each page from one holder after the other until one delivers or time is up."""
        holders = dict(zip(missing, self._holders([moves[at].key for at in missing]), strict=True))
        for nodes in holders.values():
            random.shuffle(nodes)
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
            statuses[position] = Status(outcome)
            if outcome == Outcome.OK:
                got += 1
                size += moves[position].size
        if not got and any(outcome in (Outcome.FAILED, Outcome.TIMEOUT) for outcome in outcomes):
            self._peers.failed(node_id, peer.failure)
        else:
            self._peers.succeeded(node_id)
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

    # -- clear

    def clear(self, digests: Sequence[str], deadline: float) -> tuple[int, list[str]]:
        """Drop every page of these namespaces on every node: how many went, and the nodes that did not answer."""
        dropped = self.clear_here(digests)
        nodes = sorted(self._peers.alive_ids())
        orders = [self._readers.submit(self._clear_peer, node_id, digests, deadline) for node_id in nodes]
        answers = [order.result() for order in orders]
        unreached = [node_id for node_id, count in zip(nodes, answers, strict=True) if count is None]
        return dropped + sum(count or 0 for count in answers), unreached

    def _clear_peer(self, node_id: str, digests: Sequence[str], deadline: float) -> int | None:
        peer = self._peers.get(node_id)
        if peer is None:
            return None
        try:
            return peer.clear(digests, deadline - CHECK_MARGIN)
        except HiCacheMooncakeError as error:
            logger.warning("node %s did not clear: %s", node_id, error)
            return None

    def clear_here(self, digests: Sequence[str]) -> int:
        """Drop this node's pages of these namespaces."""
        prefixes = tuple(f"{digest}:" for digest in digests)
        return self._store.remove_where(lambda key: key.startswith(prefixes)) if prefixes else 0
