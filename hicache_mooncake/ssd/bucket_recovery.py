"""What a bucket's files say after a restart: the index if it is whole, else every batch of the data file, verified."""

from __future__ import annotations

import os
from dataclasses import dataclass

import xxhash

from hicache_mooncake.memory import key_seed
from hicache_mooncake.ssd.allocation import disk_bytes
from hicache_mooncake.ssd.bucket_index import BucketRows, decode_index, matches_seal
from hicache_mooncake.ssd.frames import HEADER_BYTES, Kind, announced_length, decode, decode_rows
from hicache_mooncake.ssd.io_base import ALIGNMENT, padded

_PIECE = 4 << 20


@dataclass(slots=True)
class Found:
    """A bucket as it was found. ``sealed``: its index counts, nothing has been verified but the index."""

    number: int
    rows: BucketRows
    sealed: bool
    end: int
    """Where in the data file the next thing could be written."""
    disk: int
    dropped: int = 0
    """Objects that were announced in the data file and are not whole."""
    foreign: bool = False
    """The data file is another store's."""


def load_bucket(data: str, index: str, number: int, owner: bytes) -> Found:
    """Read the index of a bucket, or, where it does not count, the data file. Raises ``OSError``."""
    descriptor = os.open(data, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        disk = status.st_blocks * 512 + disk_bytes(index)
        rows = _sealed_rows(descriptor, status.st_size, index, number, owner)
        if rows is not None:
            return Found(number, rows, True, status.st_size - ALIGNMENT, disk)
        return _salvage(descriptor, status.st_size, number, owner, disk)
    finally:
        os.close(descriptor)


def _sealed_rows(descriptor: int, length: int, index: str, number: int, owner: bytes) -> BucketRows | None:
    place = length - ALIGNMENT
    if place < 0:
        return None
    seal = decode(os.pread(descriptor, ALIGNMENT, place), owner=owner, place=place)
    if seal is None or seal.kind is not Kind.SEAL or seal.sequence != number:
        return None
    try:
        with open(index, "rb") as file:
            content = file.read()
    except FileNotFoundError:
        return None
    if not matches_seal(content, seal):
        return None
    try:
        return decode_index(content)
    except ValueError:
        return None


def _salvage(descriptor: int, length: int, number: int, owner: bytes, disk: int) -> Found:
    """Look at every block for a batch; objects behind one count when their bytes are those of their checksums.

    1. A writer that was killed may have left any part of its last batches: their heads and objects are written in no
       order. What was answered ``OK`` is whole.
    2. A damaged head loses its batch, not those behind it.
    """
    rows = BucketRows.empty()
    dropped = at = 0
    end = ALIGNMENT * (length // ALIGNMENT)
    others = 0
    while at < end:
        head = os.pread(descriptor, ALIGNMENT, at)
        announced = announced_length(head)
        if not announced:
            at += ALIGNMENT
            continue
        if announced > len(head):
            head = os.pread(descriptor, announced, at)
        frame = decode(head, place=at)
        if frame is None or frame.owner != owner or frame.sequence != number or frame.kind is not Kind.BATCH:
            others += frame is not None and frame.owner != owner
            at += ALIGNMENT
            continue
        batch = decode_rows(frame.payload)
        next_at = at + frame.footprint
        for key, size, checksum, (offset, _) in zip(*batch[:3], batch.spans, strict=True) if batch else ():
            if _matches(descriptor, key, int(offset), int(size), int(checksum)):
                rows.append(key, int(size), int(checksum), int(offset))
                next_at = max(next_at, int(offset) + padded(int(size)))
            else:
                dropped += 1
        at = next_at
    used = max((offset + padded(size) for offset, size in zip(rows.offsets, rows.sizes, strict=True)), default=0)
    return Found(number, rows, False, used, disk, dropped, foreign=bool(others) and not len(rows))


def _matches(descriptor: int, key: str, offset: int, size: int, checksum: int) -> bool:
    digest = xxhash.xxh3_64(seed=key_seed(key))
    end = offset + size
    while offset < end:
        piece = os.pread(descriptor, min(_PIECE, end - offset), offset)
        if not piece:
            return False
        digest.update(piece)
        offset += len(piece)
    return digest.intdigest() == checksum


__all__ = ["HEADER_BYTES", "Found", "load_bucket"]
