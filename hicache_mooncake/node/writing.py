"""Put: skip what is held, store the rest here, or where there is room; bytes first, then index, then Redis."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence

from hicache_mooncake.allocator import ExtentAllocator
from hicache_mooncake.memory import checksum
from hicache_mooncake.metadata.records import NodeRecord
from hicache_mooncake.node.copying import Copier
from hicache_mooncake.node.counters import Counters
from hicache_mooncake.node.directory_sync import DirectorySync
from hicache_mooncake.node.index import Page
from hicache_mooncake.node.lookup import Lookup
from hicache_mooncake.node.moves import Move, Wanted
from hicache_mooncake.node.peers import Peers
from hicache_mooncake.node.placement import Room, spill_targets
from hicache_mooncake.node.store import DramStore
from hicache_mooncake.protocol.messages import Status
from hicache_mooncake.transfer.base import Outcome, PageWrite


class PageWriter:
    """Stores pages in the own segment or on other nodes. Thread-safe. ``others`` gives the live nodes."""

    def __init__(
        self,
        store: DramStore,
        sync: DirectorySync,
        lookup: Lookup,
        peers: Peers,
        copier: Copier,
        counters: Counters,
        *,
        others: Callable[[], Mapping[str, NodeRecord]],
        watermark: float,
    ) -> None:
        self._store = store
        self._sync = sync
        self._lookup = lookup
        self._peers = peers
        self._copier = copier
        self._counters = counters
        self._others = others
        self._watermark = watermark
        self._chance = random.Random()

    def put(self, moves: Sequence[Move], wanted: Wanted, deadline: float) -> bytearray:
        """Store objects; one status each. What is held somewhere already is ``OK`` without moving a byte."""
        statuses = bytearray([Status.OK]) * len(moves)
        here = self._lookup.held_here([move.key for move in moves])
        first_of: dict[str, int] = {}
        new: list[int] = []
        for position, move in enumerate(moves):
            if not here[position] and first_of.setdefault(move.key, position) == position:
                new.append(position)
        elsewhere = self._lookup.holders([moves[at].key for at in new]) if new else []
        new = [position for position, nodes in zip(new, elsewhere, strict=True) if not nodes]
        spilled, new = self._spill(moves, new, wanted, deadline)
        stored = self._store_new(moves, new, statuses, wanted, deadline) if new else 0
        for position, move in enumerate(moves):  # the twins of a key that failed failed too
            statuses[position] = statuses[first_of.get(move.key, position)]
        succeeded = statuses.count(Status.OK)
        present = succeeded - stored - spilled
        self._counters.add_statuses("put", statuses, ok_as={"stored": stored, "spilled": spilled, "present": present})
        return statuses

    def _spill(
        self, moves: Sequence[Move], new: Sequence[int], wanted: Wanted, deadline: float
    ) -> tuple[int, list[int]]:
        """Offer a batch to others when there is no room for it here: how many went, and which stay to be stored."""
        left = list(new)
        if not left:
            return 0, left
        needed = sum(ExtentAllocator.footprint(moves[at].size) for at in left)
        here = Room(self._store.capacity, self._store.used, self._watermark)
        if needed <= here.free:
            return 0, left
        targets = spill_targets(needed, here, self._others(), self._peers.usable(), self._chance)
        if not targets:
            return 0, left
        writes: dict[int, PageWrite] = {}

        def check(index: int) -> None:
            at = left[index]
            move = moves[at]
            digest = checksum(move.key, move.extents)
            # A sum taken while the engine waits is one of the right bytes; should they change before they are sent,
            # the owner finds that they do not have it.
            if wanted():
                writes[at] = PageWrite(move.key, move.size, digest, move.extents)

        self._copier.each(check, len(left), needed)
        spilled = 0
        for node_id in targets:
            peer = self._peers.get(node_id)
            offered = [at for at in left if at in writes]
            now = time.monotonic()
            if peer is None or not offered or not wanted() or now > deadline:
                break
            # Half of the time for the first one: what it does not take has to be stored here, or by the second.
            outcomes = peer.write([writes[at] for at in offered], now + (deadline - now) / 2)
            taken = {at for at, outcome in zip(offered, outcomes, strict=True) if outcome == Outcome.OK}
            spilled += len(taken)
            left = [at for at in left if at not in taken]
            self._peers.judge(node_id, peer, outcomes)
            self._counters.add(put_spilled_bytes=sum(moves[at].size for at in taken))
        return spilled, left

    def _store_new(
        self, moves: Sequence[Move], new: Sequence[int], statuses: bytearray, wanted: Wanted, deadline: float
    ) -> int:
        spans = self._store.reserve([moves[at].size for at in new])
        pages: list[Page | None] = [None] * len(new)
        try:
            roomy = [(index, reserved) for index, reserved in enumerate(spans) if reserved is not None]
            sources = [moves[new[index]] for index, _ in roomy]
            targets = [self._store.extents(reserved) for _, reserved in roomy]
            copied, digests = self._copier.run(
                [move.key for move in sources],
                targets,
                [move.extents for move in sources],
                sum([move.size for move in sources]),
                wanted,
                deadline,
            )
            for at in new:
                statuses[at] = Status.NO_SPACE  # unless there was some
            for (index, room), move, extents, status, digest in zip(
                roomy, sources, targets, copied, digests, strict=True
            ):
                statuses[new[index]] = status
                if status == Status.OK:
                    pages[index] = Page(move.key, move.size, digest, room, extents)
        except BaseException:
            pages = [None] * len(new)  # nothing of this batch is stored
            raise
        finally:
            for reserved, page in zip(spans, pages, strict=True):
                if page is None and reserved is not None:
                    self._store.cancel(reserved)
        written = [page for page in pages if page is not None]
        self.commit(written)
        self._counters.add(put_bytes=sum(page.size for page in written))
        return len(written)

    def commit(self, written: Sequence[Page]) -> int:
        """Make written pages visible, here and then in Redis; how many were not here already."""
        fresh = [page for page, inserted in zip(written, self._store.commit(written), strict=True) if inserted]
        if fresh:
            others = self._sync.publish([page.key for page in fresh], [page.size for page in fresh])
            self._drop_surplus([page for page, count in zip(fresh, others, strict=True) if count])
        return len(fresh)

    def _drop_surplus(self, pages: Sequence[Page]) -> None:
        """Two nodes stored the same page at once; the one told so second drops its copy, if the other is alive."""
        if pages:
            for page, nodes in zip(pages, self._lookup.holders([page.key for page in pages]), strict=True):
                if nodes:
                    self._store.drop(page)
