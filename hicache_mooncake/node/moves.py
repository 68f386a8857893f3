"""What is to be moved: the common terms of reading and writing pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from hicache_mooncake.memory import Extent


class Move(NamedTuple):
    """One object to be stored from, or fetched into, ``extents`` (``size`` bytes in all)."""

    key: str
    size: int
    extents: Sequence[Extent]


Wanted = Callable[[], bool]
"""Whether the engine still waits: looked at before every page, see ``protocol/fence.py``."""
