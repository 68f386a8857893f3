"""One bucket: a data file that is written once from front to end, and the index that is written when it is full."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from hicache_mooncake.ssd.base import StoreWrite
from hicache_mooncake.ssd.bucket_index import BucketRows
from hicache_mooncake.ssd.frames import HEADER_BYTES, encode_rows, rows_bytes
from hicache_mooncake.ssd.io_base import ALIGNMENT, padded

ROW_BITS = 24
"""An object's position is one number, ``bucket << ROW_BITS | row``: a later bucket's is greater."""

_DATA, _INDEX = ".data", ".arrow"


class Bucket:
    """What is known of a bucket. The store's lock is held around every change."""

    __slots__ = (
        "broken",
        "closed",
        "disk",
        "end",
        "forgotten",
        "live",
        "number",
        "planned",
        "readers",
        "rows",
        "sealed",
        "sealing",
        "used_at",
        "writers",
    )

    def __init__(self, number: int, rows: BucketRows, *, end: int, disk: int) -> None:
        self.number = number
        self.rows = rows
        self.end = end  # where the next batch goes
        self.disk = disk  # bytes, index included
        self.planned = len(rows)  # rows, those being written included
        self.live = 0  # rows that the index points at
        self.used_at = 0
        self.readers = 0
        self.writers = 0
        self.closed = False  # takes no more batches
        self.sealed = False  # its index is on disk
        self.sealing = False
        self.broken = False  # a write to it failed
        self.forgotten = False  # invisible here and in Redis: to be removed with its last reader


class Batch(NamedTuple):
    """Objects of a write that go into one bucket together: which of the call's, where each lies, and their head."""

    bucket: Bucket
    place: int
    head: bytes
    items: Sequence[int]
    offsets: Sequence[int]


def plan(bucket: Bucket, batch: Sequence[StoreWrite], waiting: Sequence[int], size_limit: int, key_limit: int) -> int:
    """How many of the waiting objects fit in the bucket, its seal included."""
    keys: list[bytes] = []
    objects = 0
    room = size_limit - ALIGNMENT - bucket.end
    for number, index in enumerate(waiting):
        if bucket.planned + number >= key_limit:
            return number
        keys.append(batch[index].key.encode())
        objects += padded(batch[index].size)
        if padded(HEADER_BYTES + rows_bytes(keys, len(keys))) + objects > room:
            return number
    return len(waiting)


def lay_out(batch: Sequence[StoreWrite], items: Sequence[int], place: int) -> tuple[list[int], bytes, int]:
    """Offsets of these objects behind a head at ``place``, the payload of the head, and where the batch ends."""
    chosen = [batch[index] for index in items]
    keys = [item.key for item in chosen]
    at = place + padded(HEADER_BYTES + rows_bytes([key.encode() for key in keys], len(keys)))
    offsets = []
    for item in chosen:
        offsets.append(at)
        at += padded(item.size)
    sizes = [item.size for item in chosen]
    spans = [[(offset, size)] for offset, size in zip(offsets, sizes, strict=True)]
    return offsets, encode_rows(keys, sizes, [item.checksum for item in chosen], spans), at


def smallest_bucket(size: int, key: str) -> int:
    """Bytes of a bucket that holds one object of ``size`` bytes."""
    return padded(HEADER_BYTES + rows_bytes([key.encode()], 1)) + padded(size) + ALIGNMENT


def data_path(directory: str, number: int) -> str:
    return os.path.join(directory, f"{number:016x}{_DATA}")


def index_path(directory: str, number: int) -> str:
    return os.path.join(directory, f"{number:016x}{_INDEX}")


def parse_name(name: str) -> tuple[int, str] | None:
    """Number and kind (``data``, ``index``, ``tmp``) of a bucket's file; None for any other name."""
    stem, dot, suffix = name.partition(".")
    if len(stem) != 16 or not dot:
        return None
    try:
        number = int(stem, 16)
    except ValueError:
        return None
    kind = {_DATA[1:]: "data", _INDEX[1:]: "index", _INDEX[1:] + ".tmp": "tmp"}.get(suffix)
    return (number, kind) if kind and f"{number:016x}" == stem else None
