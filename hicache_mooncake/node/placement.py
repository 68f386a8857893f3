"""Where a new page goes: here, or to another node that has room. Pure policy.

Local first: a page is read most by the host that computed it, and a read from here needs no network. Only when storing
here would push the segment above its watermark is another node considered, and then at most every other time: a page
that goes away costs the network twice, and a node that is new and empty must not be given everything that is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from hicache_mooncake.metadata.records import NodeRecord

SPILL_SHARE = 0.5
"""Most of a full node's batches that go elsewhere; the others evict what is cold here."""


@dataclass(frozen=True)
class Room:
    """What a node can take in bytes: ``capacity`` of its segment, ``used`` of it, and its high watermark as a part."""

    capacity: int
    used: int
    watermark: float

    @property
    def free(self) -> int:
        """Bytes that can be stored before anything is evicted."""
        return max(0, int(self.capacity * self.watermark) - self.used)


def spill_targets(
    needed: int, here: Room, others: Mapping[str, NodeRecord], usable: set[str], chance: Random
) -> Sequence[str]:
    """Nodes to offer a batch of ``needed`` bytes to, in this order; none when it is to be stored here.

    Nodes are drawn with a probability in proportion to their free bytes, so that several full nodes do not all run to
    the emptiest one at once. What a heartbeat tells is up to a second old: who is full by now says so when asked.
    """
    if needed <= here.free:
        return []
    if here.capacity and chance.random() >= SPILL_SHARE:
        return []
    free = {
        node_id: Room(record.capacity, record.used, here.watermark).free
        for node_id, record in others.items()
        if node_id in usable
    }
    candidates = {node_id: room for node_id, room in sorted(free.items()) if room >= needed}
    order: list[str] = []
    while candidates and len(order) < 2:  # a third attempt would come too late to be worth it
        (chosen,) = chance.choices(list(candidates), weights=list(candidates.values()))
        order.append(chosen)
        del candidates[chosen]
    return order
