"""What lies where in an offset store's file or device. Pure.

======================  ==========================================================================================
block 0, block 1        superblock: geometry, and which journal area counts; written in turn, the younger one counts
journal area 0 and 1    frames, one after the other: objects written and freed; a checkpoint starts the other area
data                    objects, in extents of whole 4 KiB granules
======================  ==========================================================================================
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from hicache_mooncake.ssd.frames import Frame, Kind, Rows, decode, encode
from hicache_mooncake.ssd.io_base import ALIGNMENT, padded

SUPERBLOCKS = 2
JOURNAL_SHARE = 256
"""A journal area is this part of the whole: room for a row of every 64 KiB page, and as much again to append to."""

SMALLEST_AREA = 256 << 10
SMALLEST_SIZE = 1 << 20

Stored = tuple[int, ...]
"""An object as the index keeps it: size, checksum, then offset and length of each span; one span's length is left out,
it is the size. A flat tuple of numbers, which the garbage collector does not walk."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """``size`` of the whole and of one journal ``area``, in bytes; ``epoch`` counts checkpoints, and ``epoch % 2`` is
    the area that counts."""

    size: int
    area: int
    epoch: int
    pool: str
    node: str = ""

    @classmethod
    def of(cls, size: int, pool: str, node: str) -> Geometry:
        """The geometry of a new store."""
        whole = size // ALIGNMENT * ALIGNMENT
        return cls(whole, max(padded(whole // JOURNAL_SHARE), SMALLEST_AREA), 1, pool, node)

    @property
    def data_start(self) -> int:
        return SUPERBLOCKS * ALIGNMENT + 2 * self.area

    @property
    def data_size(self) -> int:
        return max(0, self.size - self.data_start)

    @property
    def journal_start(self) -> int:
        return SUPERBLOCKS * ALIGNMENT + self.epoch % 2 * self.area

    def next(self) -> Geometry:
        """After another checkpoint."""
        return replace(self, epoch=self.epoch + 1)


def encode_super(geometry: Geometry, owner: bytes) -> tuple[int, bytes]:
    """Where the superblock goes, and its bytes: the older of the two is overwritten."""
    place = geometry.epoch % SUPERBLOCKS * ALIGNMENT
    payload = json.dumps(asdict(geometry)).encode()
    return place, encode(Frame(Kind.SUPER, owner, geometry.epoch, place, 0, payload))


def decode_super(blocks: bytes) -> tuple[Geometry, bytes] | None:
    """The younger whole superblock of the two blocks, and the owner; None when there is none."""
    best: tuple[Geometry, bytes] | None = None
    for place in range(0, SUPERBLOCKS * ALIGNMENT, ALIGNMENT):
        frame = decode(blocks[place : place + ALIGNMENT], place=place)
        if frame is None or frame.kind is not Kind.SUPER:
            continue
        try:
            geometry = Geometry(**json.loads(frame.payload))
        except (ValueError, TypeError):
            continue
        if best is None or geometry.epoch > best[0].epoch:
            best = geometry, frame.owner
    return best


def stored(size: int, checksum: int, spans: tuple[tuple[int, int], ...]) -> Stored:
    if len(spans) == 1:
        return (size, checksum, spans[0][0])
    return (size, checksum, *(number for span in spans for number in span))


def spans_of(found: Stored) -> list[tuple[int, int]]:
    """Offset and length of each span, relative to the start of the data."""
    if len(found) == 3:
        return [(found[2], found[0])]
    return list(zip(found[2::2], found[3::2], strict=True))


def stored_rows(rows: Rows) -> list[Stored]:
    """The rows of a journal frame as the index keeps them."""
    if len(rows.spans) == len(rows.keys):
        return list(zip(rows.sizes.tolist(), rows.checksums.tolist(), rows.spans[:, 0].tolist(), strict=True))
    spans = [(offset, length) for offset, length in rows.spans.tolist()]
    bounds = rows.first_span.tolist()
    return [
        stored(size, checksum, tuple(spans[bounds[row] : bounds[row + 1]]))
        for row, (size, checksum) in enumerate(zip(rows.sizes.tolist(), rows.checksums.tolist(), strict=True))
    ]


def without_overlaps(objects: dict[str, Stored], data_size: int) -> list[str]:
    """Keys whose space is outside the data, or was given to a later object: what a damaged journal leaves.

    ``objects`` is in the order it was written. Both would fail their check, so this only keeps the books right.
    """
    bad: set[str] = set()
    spans: list[tuple[int, int, int, str]] = []
    for order, (key, found) in enumerate(objects.items()):
        for offset, length in spans_of(found):
            end = offset + padded(length)
            if offset % ALIGNMENT or length <= 0 or end > data_size:
                bad.add(key)
            spans.append((offset, end, order, key))
    spans.sort()
    last: tuple[int, int, int, str] | None = None
    for span in spans:
        if span[3] in bad:
            continue
        if last is not None and span[0] < last[1] and last[3] not in bad:
            older = min(span, last, key=lambda one: one[2])
            bad.add(older[3])
            if older is span:
                continue
        last = span
    return list(bad)
