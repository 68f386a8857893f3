"""Which other nodes hold a page, as far as they can be used now."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from hicache_mooncake.errors import Unavailable
from hicache_mooncake.metadata.records import ObjectRecord
from hicache_mooncake.node.counters import Counters
from hicache_mooncake.node.directory_sync import DirectorySync
from hicache_mooncake.node.peers import Peers
from hicache_mooncake.node.recent import RecentHolders
from hicache_mooncake.node.store import DramStore, LowerTier

LOOKUP_CHUNK = 512
"""Keys an existence query looks up at a time: a miss near the front of a long prompt costs one short call."""


class Lookup:
    """Thread-safe. Asks the own store first, then Redis."""

    def __init__(self, store: DramStore, sync: DirectorySync, peers: Peers, counters: Counters) -> None:
        self._store = store
        self._sync = sync
        self._peers = peers
        self._counters = counters
        self._recent = RecentHolders()
        self.lower: LowerTier | None = None

    def exists(self, keys: Sequence[str], deadline: float, *, stop_at_miss: bool) -> bytearray:
        """One byte a key, 1 where a live node holds it. With ``stop_at_miss`` what follows the first miss stays 0."""
        found = bytearray(len(keys))
        for start in range(0, len(keys), LOOKUP_CHUNK):
            chunk = keys[start : start + LOOKUP_CHUNK]
            here = self._exists_chunk(chunk, deadline)
            found[start : start + len(chunk)] = here
            if stop_at_miss and not all(here):
                break
        self._counters.add(exists_asked=len(keys), exists_found=sum(found))
        return found

    def _exists_chunk(self, keys: Sequence[str], deadline: float) -> bytes:
        here = self.held_here(keys)
        missing = [position for position, held in enumerate(here) if not held]
        if missing and time.monotonic() < deadline:
            elsewhere = [keys[at] for at in missing]
            found = self.holders(elsewhere)
            self._recent.note(elsewhere, found)
            for position, nodes in zip(missing, found, strict=True):
                here[position] = bool(nodes)
        return bytes(here)

    def held_here(self, keys: Sequence[str]) -> list[bool]:
        """Which keys this node holds, in whatever tier."""
        here = self._store.contains(keys)
        if self.lower is not None and not all(here):
            missing = [at for at, held in enumerate(here) if not held]
            for at, saved in zip(missing, self.lower.contains([keys[at] for at in missing]), strict=True):
                here[at] = saved
        return here

    def holders_lately(self, keys: Sequence[str]) -> tuple[list[Sequence[str]], bool]:
        """As :meth:`holders`, but an existence query's answer of a moment ago will do, once; whether any was used."""
        usable = self._peers.usable()
        found: list[Sequence[str]] = [
            [node for node in nodes if node in usable] if nodes else () for nodes in self._recent.of(keys)
        ]
        unknown = [at for at, nodes in enumerate(found) if not nodes]
        if unknown:
            for at, nodes in zip(unknown, self.holders([keys[at] for at in unknown]), strict=True):
                found[at] = nodes
        return found, len(unknown) < len(keys)

    def holders(self, keys: Sequence[str]) -> list[Sequence[str]]:
        """For each key the usable nodes that hold it; nobody where Redis does not answer."""
        try:
            records = self._sync.lookup(keys)
            # Pages of one batch mostly have the same holders, and then the very same record.
            distinct = {id(record): record for record in records if record is not None}
            self._look_after(keys, records, distinct.values())
        except Unavailable:
            self._counters.add(directory_errors=1)
            return [[] for _ in keys]
        if not distinct:
            return [()] * len(keys)
        usable = self._peers.usable()
        nodes: dict[int, Sequence[str]] = {
            number: self._peers.holders(record, usable) for number, record in distinct.items()
        }
        return [nodes.get(id(record), ()) for record in records]

    def _look_after(
        self, keys: Sequence[str], records: Sequence[ObjectRecord | None], distinct: Collection[ObjectRecord]
    ) -> None:
        """What the records tell besides: nodes that we have not met, and pages that we are wrongly said to hold."""
        own = f"{self._sync.node_id}/"
        words = {word for record in distinct for word in record.holders}
        ours = {word for word in words if word.startswith(own)}
        self._sync.refresh_unknown({word.partition("/")[0] for word in words - ours if "~" in word})
        if ours:
            self._sync.believed_held(
                [
                    key
                    for key, record in zip(keys, records, strict=True)
                    if record is not None and not ours.isdisjoint(record.holders)
                ]
            )
