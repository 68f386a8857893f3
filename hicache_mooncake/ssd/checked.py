"""Reading objects and comparing their bytes with what was written: the same for every store."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import NamedTuple

from hicache_mooncake.memory import Extent, checksum
from hicache_mooncake.ssd.base import Outcome, Result
from hicache_mooncake.ssd.io_base import DiskIO, Transfer

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Located(NamedTuple):
    """An object and the file ranges that its bytes lie in, in order."""

    key: str
    size: int
    checksum: int
    into: Sequence[Extent]
    transfers: Sequence[Transfer]


def read_objects(io: DiskIO, objects: Sequence[Located], deadline: float) -> list[Result]:
    """Read all objects in one batch of I/O and verify each. One result an object, in order."""
    moved = io.read([transfer for item in objects for transfer in item.transfers], deadline)
    results: list[Result] = []
    at = 0
    for item in objects:
        mine = moved[at : at + len(item.transfers)]
        at += len(item.transfers)
        lowest = min(mine)
        if lowest < 0:
            results.append(Result(Outcome.TIMEOUT if -lowest == errno.ETIMEDOUT else Outcome.FAILED, errno=-lowest))
        elif sum(mine) != item.size or checksum(item.key, item.into) != item.checksum:
            results.append(Result(Outcome.CORRUPT))
        else:
            results.append(Result(Outcome.OK, item.checksum))
    return results


def write_result(moved: int, length: int) -> Result | None:
    """What a write of ``length`` bytes came to: None when all of it was written."""
    if moved == length:
        return None
    if moved >= 0:  # a file system that writes a part and says no error has no room for the rest
        return Result(Outcome.FULL, errno=errno.ENOSPC)
    return failure(-moved)


def failure(number: int) -> Result:
    """The result of a write that the system refused with this ``errno``."""
    if number == errno.ETIMEDOUT:
        return Result(Outcome.TIMEOUT, errno=number)
    return Result(Outcome.FULL if number in NO_SPACE else Outcome.FAILED, errno=number)


def cut(extents: Sequence[Extent], lengths: Sequence[int]) -> list[list[Extent]]:
    """The extents of memory cut at ``lengths``, which add up to theirs."""
    pieces: list[list[Extent]] = []
    waiting = list(reversed(extents))
    for length in lengths:
        piece: list[Extent] = []
        left = length
        while left:
            memory, offset, available = waiting.pop()
            taken = min(left, available)
            piece.append(Extent(memory, offset, taken))
            if taken < available:
                waiting.append(Extent(memory, offset + taken, available - taken))
            left -= taken
        pieces.append(piece)
    return pieces
