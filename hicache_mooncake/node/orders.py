"""An operator's orders, carried out by the node that owns the pages, and passed on to the nodes they are for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

from hicache_mooncake.errors import HiCacheMooncakeError, ProtocolError
from hicache_mooncake.memory import checksum
from hicache_mooncake.metadata.records import NodeRecord
from hicache_mooncake.node.counters import Counters
from hicache_mooncake.node.index import Page, Protection
from hicache_mooncake.node.jobs import Jobs, Running
from hicache_mooncake.node.peers import Peers
from hicache_mooncake.node.store import DramStore, PageState
from hicache_mooncake.protocol import orders as o

logger = logging.getLogger(__name__)

VERIFY_BANDWIDTH = 512 << 20
"""Bytes a second that a verification reads where the order names no other: a small part of what memory gives."""

_VERIFIED_AT_ONCE = 8 << 20
"""Bytes that are held together while they are checked: a few milliseconds."""

DROPPED_NAMED = 100
"""Rotten pages that a report names; all are counted."""

RELAYED_AT_ONCE = 16
"""Nodes that are asked at the same time."""


def _replica(state: PageState) -> o.Replica:
    protection = state.protection.name.lower()
    return o.Replica(
        state.key, state.size, protection, state.extra, state.pins, round(state.idle, 3), round(state.pin_left, 3)
    )


class OrderDesk:
    """The orders that this node carries out, by their class. Thread-safe; :meth:`register` before serving."""

    def __init__(self, store: DramStore, counters: Counters, *, pin_ttl: float) -> None:
        self._store = store
        self._counters = counters
        self._pin_ttl = pin_ttl
        self.jobs = Jobs()
        self._carriers: dict[type, Callable[[Any], o.Answer]] = {}
        self.register(o.Pin, self._pin)
        self.register(o.Unpin, self._unpin)
        self.register(o.Evict, self._evict)
        self.register(o.Describe, self._describe)
        self.register(o.Verify, self._verify)
        self.register(o.Progress, lambda order: self.jobs.progress(order.kind))
        self.register(o.Cancel, lambda order: self.jobs.cancel(order.kind))

    def register(self, kind: type, carry_out: Callable[[Any], o.Answer]) -> None:
        """Have orders of a class carried out by a function, which answers soon: what takes long is a job."""
        self._carriers[kind] = carry_out

    def carry_out(self, body: bytes | bytearray) -> bytes:
        """The answer to an encoded order; one that is not understood is declined."""
        try:
            order = o.decode_order(body)
            carrier = self._carriers.get(type(order))
            answer = carrier(order) if carrier is not None else o.Declined(f"no {type(order).__name__} is known here")
        except HiCacheMooncakeError as error:
            answer = o.Declined(str(error))
        return o.encode(answer)

    def close(self) -> None:
        self.jobs.close()

    def _pin(self, order: o.Pin) -> o.Answer:
        found = self._store.find(order.hashes, order.digests)
        protection = Protection.HARD if order.hard else Protection.SOFT
        handled = self._store.protect(chain(*found), protection, order.ttl or self._pin_ttl)
        return o.Handled(*handled, bytes(map(bool, found)))

    def _unpin(self, order: o.Unpin) -> o.Answer:
        found = self._store.find(order.hashes, order.digests)
        return o.Handled(*self._store.protect(chain(*found), Protection.NONE), bytes(map(bool, found)))

    def _evict(self, order: o.Evict) -> o.Answer:
        if order.size and not (order.hashes or order.digests):
            return o.Handled(*self._store.evict_bytes(order.size))
        found: list[list[Page]] = []
        if order.hashes:
            found = self._store.find(order.hashes, order.digests)
        elif order.digests:
            prefixes = tuple(f"{digest}:" for digest in order.digests)
            found = [[page for page in self._store.snapshot() if page.key.startswith(prefixes)]]
        pages = [page for page in chain(*found) if page.protection is not Protection.HARD]
        removed = self._store.remove(pages)
        size = sum(page.footprint for page in pages)
        return o.Handled(removed, size, sum(map(len, found)) - len(pages), bytes(map(bool, found)))

    def _describe(self, order: o.Describe) -> o.Answer:
        states = self._store.states(chain(*self._store.find(order.hashes, order.digests)))
        return o.Described([_replica(state) for state in states])

    def _verify(self, order: o.Verify) -> o.Answer:
        bandwidth = order.bandwidth or VERIFY_BANDWIDTH
        return self.jobs.begin("verify", lambda job: self._verify_all(job, bandwidth))

    def _verify_all(self, job: Running, bandwidth: int) -> None:
        pages = self._store.snapshot()
        job.report.total = sum(page.size for page in pages)
        while pages and not job.cancelled.is_set():
            size = 0
            batch = []
            while pages and size < _VERIFIED_AT_ONCE:
                batch.append(pages.pop())
                size += batch[-1].size
            held = self._store.hold([page.key for page in batch])
            try:
                rotten = [p for p in held if p is not None and checksum(p.key, p.extents) != p.checksum]
            finally:
                self._store.unpin(held)
            for page in rotten:
                self._store.drop(page)  # index, then Redis, then memory
            if rotten:
                self._counters.add(corrupt_dropped=len(rotten))
                named = [*job.report.dropped, *(page.key for page in rotten)]
                job.report.dropped = named[:DROPPED_NAMED]
            job.report.done += size
            job.report.objects += len(batch)
            job.cancelled.wait(size / bandwidth)


class OrderRelay:
    """Has orders carried out here and by other nodes, which ``known`` gives."""

    def __init__(
        self, node_id: str, desk: OrderDesk, peers: Peers, *, known: Callable[[], Mapping[str, NodeRecord]]
    ) -> None:
        self._node_id = node_id
        self._desk = desk
        self._peers = peers
        self._known = known

    def relay(self, body: bytes, nodes: Sequence[str], deadline: float) -> tuple[dict[str, bytes], dict[str, str]]:
        """Answers by node, and why others gave none. ``nodes`` are ids or names; none are all there are."""
        known = dict(self._known())
        names = {self._node_id, *known}
        unknown = [word for word in nodes if not any(word in (name, name.partition("~")[0]) for name in names)]
        if unknown:
            raise ProtocolError(f"no node of the pool is called {unknown[0]!r}; there are: {', '.join(sorted(names))}")
        chosen = [name for name in sorted(names) if not nodes or name in nodes or name.partition("~")[0] in nodes]
        answers: dict[str, bytes] = {}
        failed: dict[str, str] = {}
        if self._node_id in chosen:
            answers[self._node_id] = self._desk.carry_out(body)
        others = [name for name in chosen if name != self._node_id]
        with ThreadPoolExecutor(RELAYED_AT_ONCE, thread_name_prefix="hcm-relay") as threads:
            asked = [threads.submit(self._ask, name, known[name], body, deadline) for name in others]
            for name, future in zip(others, asked, strict=True):
                try:
                    answers[name] = future.result()
                except HiCacheMooncakeError as error:
                    failed[name] = error.message
        return answers, failed

    def _ask(self, node_id: str, record: NodeRecord, body: bytes, deadline: float) -> bytes:
        peer = self._peers.get(node_id)
        if peer is not None:
            return peer.order(body, deadline)
        with self._peers.visit(node_id, record) as stranger:
            return stranger.order(body, deadline)
