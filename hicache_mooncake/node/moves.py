"""What is to be moved, and until when: the common terms of reading and writing pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hicache_mooncake.memory import Extent
from hicache_mooncake.protocol.fence import Fence


class Move(NamedTuple):
    """One object to be stored from, or fetched into, ``extents`` (``size`` bytes in all)."""

    key: str
    size: int
    extents: Sequence[Extent]


class Wanted:
    """Whether the engine still waits for a request: looked at before every page, see ``protocol/fence.py``.

    ``word`` is the address of the fence's word that holds ``request`` for so long.
    """

    __slots__ = ("_fence", "_slot", "request", "word")

    def __init__(self, fence: Fence, slot: int, request: int) -> None:
        self._fence = fence
        self._slot = slot
        self.request = request
        self.word = fence.word(slot)

    def __call__(self) -> bool:
        return self._fence.allowed(self._slot, self.request)
