"""One engine as its node sees it: the memory it lent us and the fence that says when we may touch it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import repeat

import numpy as np
import numpy.typing as npt

from hicache_mooncake.errors import ProtocolError
from hicache_mooncake.memory import Extent, Memory
from hicache_mooncake.node.moves import Move
from hicache_mooncake.protocol.fence import SLOTS, Fence
from hicache_mooncake.protocol.messages import Pages, Region
from hicache_mooncake.radix_bridge import object_keys, printable_hashes

# The constructors of these tuples without their Python wrappers: a large request makes hundreds of both.
_extent: Callable[[tuple[Memory, int, int]], Extent] = partial(tuple.__new__, Extent)
_move: Callable[[tuple[str, int, Sequence[Extent]]], Move] = partial(tuple.__new__, Move)


MAX_COUNTED = 64
"""Namespaces of one engine whose tokens are counted."""


class Lent:
    """A region of an engine's address space, mapped here."""

    def __init__(self, region: Region, mapping: Memory) -> None:
        self.base = region.base
        self.end = region.base + region.size
        self.memory = mapping


class Session:
    """Closed, and everything unmapped, when the engine's first connection is gone and the last request has ended."""

    def __init__(self, token: bytes, *, engine: bool) -> None:
        self.token = token
        self.engine = engine
        self.fence: Fence | None = None
        self.regions: list[Lent] = []
        self.page_tokens: dict[str, int] = {}
        self._slots: set[int] = set()
        self._users = 0
        self._ended = False
        self._lock = threading.Lock()

    def lend(self, region: Region, mapping: Memory) -> None:
        """More of the engine's memory may be used from now on."""
        with self._lock:
            if self._ended:
                mapping.close()
                raise ProtocolError("the session has ended")
            self.regions = [*self.regions, Lent(region, mapping)]

    def count_tokens(self, page_tokens: Mapping[str, int]) -> None:
        """Tokens a page of namespaces that this engine counts; an engine has a handful."""
        if len(self.page_tokens) < MAX_COUNTED:
            self.page_tokens.update(page_tokens)

    def set_fence(self, fence: Fence) -> None:
        """The session's fence; there is one for good."""
        with self._lock:
            if self.fence is not None or self._ended:
                fence.close()
                raise ProtocolError("the session has a fence already, or has ended")
            self.fence = fence

    def claim_slot(self, slot: int) -> None:
        """A connection takes a fence slot. Raises ``ProtocolError`` if another one had it: slots are never reused."""
        with self._lock:
            if self.fence is None or not 0 <= slot < SLOTS or slot in self._slots:
                raise ProtocolError(f"fence slot {slot} cannot be had")
            self._slots.add(slot)

    def enter(self) -> None:
        """A request begins: memory stays mapped until :meth:`leave`. Raises ``ProtocolError`` when it is too late."""
        with self._lock:
            if self._ended:
                raise ProtocolError("the session has ended")
            self._users += 1

    def leave(self) -> None:
        """The request has ended."""
        with self._lock:
            self._users -= 1
            last = self._ended and not self._users
        if last:
            self._unmap()

    def end(self) -> None:
        """The engine is gone, or detached: no new request; unmap when those under way have ended."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            idle = not self._users
        if idle:
            self._unmap()

    def _unmap(self) -> None:
        for lent in self.regions:
            lent.memory.close()
        self.regions = []
        if self.fence is not None:
            self.fence.close()


def moves_of(group: Pages, regions: Sequence[Lent]) -> list[Move]:
    """The objects of a request, their addresses translated into our mappings.

    Raises ``ProtocolError`` when an extent lies outside what the engine lent.
    """
    keys = object_keys(group.keys.digest, printable_hashes(group.keys.hashes), group.keys.parts)
    if not keys:
        return []
    lengths = group.lengths
    addresses = np.frombuffer(group.addresses, "<u8").reshape(len(keys), len(lengths))
    size = sum(lengths)
    columns: list[list[Extent]] = []
    for column, length in enumerate(lengths):
        memory, offsets = _translate(addresses[:, column], length, regions)
        if memory is None:
            return [
                Move(key, size, _each(row, lengths, regions)) for key, row in zip(keys, addresses.tolist(), strict=True)
            ]
        columns.append(list(map(_extent, zip(repeat(memory), offsets, repeat(length)))))
    return list(map(_move, zip(keys, repeat(size), zip(*columns, strict=True), strict=False)))


def _translate(
    addresses: npt.NDArray[np.uint64], length: int, regions: Sequence[Lent]
) -> tuple[Memory | None, list[int]]:
    """Offsets in the one region that holds all ``addresses``; None when there is no such region."""
    low, high = int(addresses.min()), int(addresses.max()) + length
    for lent in regions:
        if lent.base <= low and high <= lent.end:
            return lent.memory, (addresses - np.uint64(lent.base)).tolist()
    return None, []


def _each(addresses: Sequence[int], lengths: Sequence[int], regions: Sequence[Lent]) -> list[Extent]:
    extents = []
    for address, length in zip(addresses, lengths, strict=True):
        for lent in regions:
            if lent.base <= address and address + length <= lent.end:
                extents.append(Extent(lent.memory, address - lent.base, length))
                break
        else:
            raise ProtocolError(f"{length} bytes at {address:#x} were not lent to this node")
    return extents
