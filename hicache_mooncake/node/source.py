"""What this node serves to other nodes: its pages, pinned while they are sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from hicache_mooncake.allocator import Span
from hicache_mooncake.memory import Extent, Memory, checksum
from hicache_mooncake.node.counters import Counters
from hicache_mooncake.node.directory_sync import DirectorySync
from hicache_mooncake.node.index import Page
from hicache_mooncake.node.orders import OrderDesk
from hicache_mooncake.node.pages import PageService
from hicache_mooncake.node.ssd_tier import SsdTier, StagedPage
from hicache_mooncake.node.store import DramStore
from hicache_mooncake.transfer.base import PinnedPage, Room

# The constructor without its Python wrapper: a request names hundreds of pages.
_pinned: Callable[[tuple[int, int, Sequence[Extent], Page]], PinnedPage] = partial(tuple.__new__, PinnedPage)


class StoreSource:
    """The ``PageSource`` of a node's data port."""

    def __init__(
        self,
        node_id: str,
        store: DramStore,
        sync: DirectorySync,
        pages: PageService,
        counters: Counters,
        desk: OrderDesk,
        ssd: SsdTier | None = None,
    ) -> None:
        self._node_id = node_id
        self._store = store
        self._sync = sync
        self._pages = pages
        self._counters = counters
        self._desk = desk
        self._ssd = ssd

    @property
    def node_id(self) -> str:
        return self._node_id

    @property
    def memory(self) -> Memory:
        return self._store.segment

    def pin(self, keys: Sequence[str]) -> list[PinnedPage | None]:
        """The pages, pinned. A reader that asks for one that is not here followed a stale entry: Redis is told."""
        pages = self._store.pin(keys)
        pinned = [None if page is None else _pinned((page.size, page.checksum, page.extents, page)) for page in pages]
        missing = [at for at, page in enumerate(pages) if page is None]
        if missing and self._ssd is not None:
            for at, staged in zip(missing, self._ssd.stage([keys[at] for at in missing]), strict=True):
                pinned[at] = staged
            missing = [at for at in missing if pinned[at] is None]
        if missing:
            self._sync.believed_held([keys[at] for at in missing])
        self._counters.add(served_pages=len(keys) - len(missing), served_absent=len(missing))
        return pinned

    def unpin(self, pages: Sequence[PinnedPage]) -> None:
        """Let go of pages that :meth:`pin` returned."""
        self._store.unpin([page.handle for page in pages if isinstance(page.handle, Page)])
        for page in pages:
            if isinstance(page.handle, StagedPage):
                SsdTier.unstage(page.handle)

    def holds(self, keys: Sequence[str]) -> list[bool]:
        """Which pages are here."""
        return self._pages.held_here(keys)

    def make_room(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Room | None]:
        """Room for another node's pages that are not here, as far as nothing has to go for it."""
        held = self._pages.held_here(keys)
        wanted = [at for at, here in enumerate(held) if not here]
        rooms: list[Room | None] = [None] * len(keys)
        for at, spans in zip(wanted, self._store.reserve_free([sizes[at] for at in wanted]), strict=True):
            if spans is not None:
                rooms[at] = Room(keys[at], sizes[at], self._store.extents(spans), spans)
        return rooms

    def keep(self, rooms: Sequence[Room], checksums: Sequence[int]) -> list[bool]:
        """Store what arrived whole; a page that somebody else stored here meanwhile is kept as it is."""
        right = [checksum(room.key, room.extents) == given for room, given in zip(rooms, checksums, strict=True)]
        self.give_up([room for room, whole in zip(rooms, right, strict=True) if not whole])
        pages = [
            Page(room.key, room.size, given, _spans(room), room.extents)
            for room, given, whole in zip(rooms, checksums, right, strict=True)
            if whole
        ]
        fresh = self._pages.commit(pages)
        self._counters.add(taken_pages=fresh, taken_corrupt=len(rooms) - len(pages))
        return right

    def give_up(self, rooms: Sequence[Room]) -> None:
        """Free rooms whose pages did not arrive."""
        for room in rooms:
            self._store.cancel(_spans(room))

    def clear(self, digests: Sequence[str]) -> int:
        """Drop every page of these namespaces."""
        return self._pages.clear_here(digests)

    def order(self, body: bytes | bytearray) -> bytes:
        """Carry out an operator's order."""
        return self._desk.carry_out(body)

    def doubt(self, keys: Sequence[str]) -> int:
        """A reader's checksum failed: pages whose bytes really do not match here are dropped; returns how many."""
        pages = self._store.pin(keys)
        rotten = []
        try:
            rotten = [page for page in pages if page is not None and checksum(page.key, page.extents) != page.checksum]
        finally:
            self._store.unpin(pages)
        for page in rotten:
            self._store.drop(page)
        self._counters.add(corrupt_dropped=len(rotten))
        return len(rotten) + (self._ssd.doubt(keys) if self._ssd is not None else 0)


def _spans(room: Room) -> tuple[Span, ...]:
    assert isinstance(room.handle, tuple)
    return room.handle
