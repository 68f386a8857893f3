"""What this node serves to other nodes: its pages, pinned while they are sent."""

from __future__ import annotations

from collections.abc import Sequence

from hicache_mooncake.memory import checksum
from hicache_mooncake.node.counters import Counters
from hicache_mooncake.node.directory_sync import DirectorySync
from hicache_mooncake.node.index import Page
from hicache_mooncake.node.pages import PageService
from hicache_mooncake.node.store import DramStore
from hicache_mooncake.transfer.base import PinnedPage


class StoreSource:
    """The ``PageSource`` of a node's data port."""

    def __init__(
        self, node_id: str, store: DramStore, sync: DirectorySync, pages: PageService, counters: Counters
    ) -> None:
        self._node_id = node_id
        self._store = store
        self._sync = sync
        self._pages = pages
        self._counters = counters

    @property
    def node_id(self) -> str:
        return self._node_id

    def pin(self, keys: Sequence[str]) -> list[PinnedPage | None]:
        """The pages, pinned. A reader that asks for one that is not here followed a stale entry: Redis is told."""
        pages = self._store.pin(keys)
        stale = [key for key, page in zip(keys, pages, strict=True) if page is None]
        if stale:
            self._sync.believed_held(stale)
        self._counters.add(served_pages=len(keys) - len(stale), served_absent=len(stale))
        return [None if page is None else PinnedPage(page.size, page.checksum, page.extents, page) for page in pages]

    def unpin(self, pages: Sequence[PinnedPage]) -> None:
        """Let go of pages that :meth:`pin` returned."""
        self._store.unpin([page.handle for page in pages if isinstance(page.handle, Page)])

    def clear(self, digests: Sequence[str]) -> int:
        """Drop every page of these namespaces."""
        return self._pages.clear_here(digests)

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
        return len(rotten)
