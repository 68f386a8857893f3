"""Which master of a Redis Cluster has which slots: what CLUSTER SLOTS says, and its corrections. Pure, no I/O."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from hicache_mooncake.metadata.place import Address


class _Range(NamedTuple):
    first: int
    last: int
    master: Address


class SlotMap:
    """Immutable, so that threads share it without a lock."""

    def __init__(self, ranges: Sequence[_Range] = (), moved: dict[int, Address] | None = None) -> None:
        self._ranges = sorted(ranges)
        self._firsts = [entry.first for entry in self._ranges]
        self._moved = moved or {}
        self.replicas: frozenset[Address] = frozenset()

    def owner(self, slot: int) -> Address | None:
        """The master of ``slot``; ``None`` where none is known."""
        if slot in self._moved:
            return self._moved[slot]
        at = bisect_right(self._firsts, slot) - 1
        return self._ranges[at].master if at >= 0 and slot <= self._ranges[at].last else None

    def masters(self) -> list[Address]:
        """Each master once, in the order of their slots."""
        return list(dict.fromkeys([entry.master for entry in self._ranges] + list(self._moved.values())))

    def corrected(self, slot: int, master: Address) -> SlotMap:
        """The map after a MOVED for ``slot``."""
        made = SlotMap(self._ranges, {**self._moved, slot: master})
        made.replicas = self.replicas
        return made

    def __bool__(self) -> bool:
        return bool(self._ranges)


def parse_slots(reply: object, asked: Address) -> SlotMap | None:
    """The reply of CLUSTER SLOTS, given by the server at ``asked``; ``None`` for anything else.

    A server that does not know its own address names an empty one: it is where it was asked.

    >>> found = parse_slots([[0, 99, [b"10.0.0.1", 7000, b"id"], [b"10.0.0.2", 7001, b"id"]]], Address("h", 1))
    >>> found.owner(99), found.owner(100), found.replicas
    (Address(host='10.0.0.1', port=7000), None, frozenset({Address(host='10.0.0.2', port=7001)}))
    """
    ranges, replicas = [], set()
    try:
        assert isinstance(reply, list)
        for first, last, *members in reply:
            addresses = [Address((host or b"").decode() or asked.host, int(port)) for host, port, *_ in members]
            ranges.append(_Range(int(first), int(last), addresses[0]))
            replicas.update(addresses[1:])
    except (AssertionError, ValueError, TypeError, AttributeError, IndexError):
        return None
    found = SlotMap(ranges)
    found.replicas = frozenset(replicas)
    return found
