"""How a batch of transfers becomes single operations on a file: aligned pieces, and what has to be bounced.

O_DIRECT takes only ranges of the file and memory that are aligned. What is aligned goes straight to where it belongs;
the rest (a tail shorter than a sector, an extent at an odd address) goes through a bounce buffer, padded to whole
sectors. Pure arithmetic, but for the copying of what is bounced.

A bounced piece always begins on an aligned offset of the file: transfers begin on one, and what goes straight is whole
sectors. So a bounced write never has to keep what was before it, and what it pads behind is the transfer's own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from hicache_mooncake.ssd.io_base import ALIGNMENT, Transfer, padded

MAX_PIECE = 1 << 20
"""Bytes of one operation: enough that its own cost is lost in it, little enough that several share a disk fairly."""


class Piece(NamedTuple):
    """``length`` bytes of ``fd`` from ``offset`` on, part of transfer number ``transfer``.

    Straight to or from ``address``, or, where that is 0, bounced: the bytes lie in ``parts`` (address and length of
    each), in order.
    """

    transfer: int
    fd: int
    offset: int
    length: int
    address: int
    parts: tuple[tuple[int, int], ...] = ()

    @property
    def moved(self) -> int:
        """Bytes of the operation: whole sectors where the piece is bounced."""
        return self.length if self.address else padded(self.length)


def cut(batch: Sequence[Transfer], *, aligned: bool, limit: int = MAX_PIECE) -> list[Piece]:
    """The operations of a batch. Without ``aligned`` (a file that is not open for O_DIRECT) nothing is bounced.

    Raises ``ValueError`` for a transfer that does not begin on an aligned offset, or has no bytes.
    """
    pieces: list[Piece] = []
    for number, (fd, offset, extents) in enumerate(batch):
        if offset % ALIGNMENT or offset < 0:
            raise ValueError(f"a transfer begins at {offset}, which is no multiple of {ALIGNMENT}")
        if len(extents) == 1 and 0 < extents[0].length <= limit:  # nearly all there are
            memory, start, length = extents[0]
            address = memory.address + start
            if not aligned or not (length | address) % ALIGNMENT:
                pieces.append(Piece(number, fd, offset, length, address))
                continue
        _cut_one(number, fd, offset, [(extent.address, extent.length) for extent in extents], aligned, limit, pieces)
    return pieces


def _cut_one(
    number: int,
    fd: int,
    offset: int,
    extents: Sequence[tuple[int, int]],
    aligned: bool,
    limit: int,
    pieces: list[Piece],
) -> None:
    before = len(pieces)
    bounced: list[tuple[int, int]] = []
    held = 0  # bytes in ``bounced``

    def bounce() -> None:
        nonlocal held, offset
        if held:
            pieces.append(Piece(number, fd, offset, held, 0, tuple(bounced)))
            offset += held
            bounced.clear()
            held = 0

    for start, size in extents:
        address, length = start, size
        while length:
            if not aligned:
                straight = length
            elif held % ALIGNMENT or address % ALIGNMENT:
                straight = 0
            else:
                straight = length // ALIGNMENT * ALIGNMENT
            if straight:
                bounce()
                step = min(straight, limit)
                pieces.append(Piece(number, fd, offset, step, address))
                offset += step
            else:
                step = min(length, limit - held)
                bounced.append((address, step))
                held += step
                if held == limit:
                    bounce()
            address += step
            length -= step
    bounce()
    if len(pieces) == before:
        raise ValueError("a transfer of no bytes")


def settle(batch: Sequence[Transfer], pieces: Sequence[Piece], moved: Sequence[int]) -> list[int]:
    """The result of each transfer from that of each piece (bytes, or a negative errno): see ``DiskIO``."""
    results = [0] * len(batch)
    ended = bytearray(len(batch))  # a piece met the end of the file: what follows is not contiguous
    for piece, count in zip(pieces, moved, strict=True):
        at = piece.transfer
        if results[at] < 0:
            continue
        if count < 0:
            results[at] = count
        elif not ended[at]:
            results[at] += min(count, piece.length)
            ended[at] = count < piece.length
    return results


def gather(bounce: int, piece: Piece) -> None:
    """Copy a bounced piece's bytes to address ``bounce``, and zeros up to its last whole sector."""
    at = bounce
    for address, length in piece.parts:
        ctypes.memmove(at, address, length)
        at += length
    ctypes.memset(at, 0, piece.moved - piece.length)


def scatter(bounce: int, piece: Piece, count: int) -> None:
    """Copy the first ``count`` bytes at address ``bounce`` to where they belong, and no more than the piece has."""
    at, left = bounce, count
    for address, length in piece.parts:
        step = min(length, left)
        if step <= 0:
            return
        ctypes.memmove(address, at, step)
        at += step
        left -= step
