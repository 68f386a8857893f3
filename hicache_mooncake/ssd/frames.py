"""The one framing of everything that stores write beside the pages themselves: checksummed, and bound to its place.

A frame is a header of 64 bytes and a payload; on disk it starts on the alignment and is padded to it. The header names
the store that wrote it (so that a foreign store's frame is none), a sequence number, and the frame's own place, so
that stale bytes of a file that was used before, or a copy of a frame inside a page, are never taken for one.

Rows, the payload of most frames, are objects as columns: a million are decoded in about a second. Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from hicache_mooncake.ssd.base import MAX_KEY_BYTES, StoreRead, StoreWrite
from hicache_mooncake.ssd.io_base import ALIGNMENT, padded

VERSION = 1
"""Of every format in this package. An older version's files are removed at open, a newer one's refused."""

MAGIC: Final = b"\xf4HCMssd\n"
_HEADER: Final = struct.Struct("<8sHHIQ16sQQQ")
HEADER_BYTES: Final = _HEADER.size
_CHECKED: Final = HEADER_BYTES - 8  # all but the checksum itself, which is the last field

OWNER_BYTES: Final = 16
ROW_BYTES: Final = 2 + 8 + 8 + 1
SPAN_BYTES: Final = 16
MAX_PAYLOAD: Final = 64 << 20
_COUNT: Final = struct.Struct("<II")


class Kind(IntEnum):
    """What a frame is."""

    BATCH = 1
    """Of a bucket: which objects lie behind it."""
    SEAL = 2
    """Of a bucket: its last block, with the index's checksum."""
    REMOVED = 3
    """Of a bucket store's log: objects that were removed one by one."""
    SUPER = 4
    """Of an offset store: geometry, and which journal area counts."""
    PUT = 5
    """Of an offset journal: objects written."""
    FREE = 6
    """Of an offset journal: objects whose space may be used again."""
    PAGE = 7
    """Of a file that holds one object: its header."""


@dataclass(frozen=True, slots=True)
class Frame:
    """``count`` is the number of rows; ``place`` the offset of the frame in its file."""

    kind: Kind
    owner: bytes
    sequence: int
    place: int
    count: int
    payload: bytes

    @property
    def footprint(self) -> int:
        """Bytes on disk."""
        return padded(HEADER_BYTES + len(self.payload))


def encode(frame: Frame) -> bytes:
    """Header and payload, not padded."""
    header = _HEADER.pack(
        MAGIC, frame.kind, VERSION, frame.count, len(frame.payload), frame.owner, frame.sequence, frame.place, 0
    )[:_CHECKED]
    return header + struct.pack("<Q", xxhash.xxh3_64_intdigest(header + frame.payload)) + frame.payload


def decode(
    data: bytes | bytearray | memoryview, *, owner: bytes | None = None, place: int | None = None
) -> Frame | None:
    """The frame that ``data`` starts with, or None if it is none, damaged, cut off, or not of this owner and place."""
    if len(data) < HEADER_BYTES or bytes(data[:8]) != MAGIC:
        return None
    _, kind, version, count, length, found_owner, sequence, found_place, checksum = _HEADER.unpack_from(data)
    if version != VERSION or length > MAX_PAYLOAD or HEADER_BYTES + length > len(data):
        return None
    if (owner is not None and found_owner != owner) or (place is not None and found_place != place):
        return None
    payload = bytes(data[HEADER_BYTES : HEADER_BYTES + length])
    if xxhash.xxh3_64_intdigest(bytes(data[:_CHECKED]) + payload) != checksum:
        return None
    try:
        return Frame(Kind(kind), found_owner, sequence, found_place, count, payload)
    except ValueError:
        return None


def announced_length(header: bytes | memoryview) -> int:
    """Bytes of the frame whose header this says it is, 0 if it is no header. Unverified."""
    if len(header) < HEADER_BYTES or bytes(header[:8]) != MAGIC:
        return 0
    length: int = _HEADER.unpack_from(header)[4]
    return HEADER_BYTES + length if length <= MAX_PAYLOAD else 0


def peek_version(data: bytes) -> int:
    """The version of a frame that this may be the head of; 0 when it is none."""
    if len(data) < HEADER_BYTES or data[:8] != MAGIC:
        return 0
    version: int = _HEADER.unpack_from(data)[2]
    return version


class Rows(NamedTuple):
    """Objects as columns. Object ``i`` lies in ``spans[first_span[i]:first_span[i + 1]]``, (offset, length) each."""

    keys: list[str]
    sizes: NDArray[np.uint64]
    checksums: NDArray[np.uint64]
    first_span: NDArray[np.int64]
    spans: NDArray[np.uint64]


def rows_bytes(keys: Sequence[bytes], spans: int) -> int:
    """Bytes of the payload of these rows."""
    return _COUNT.size + len(keys) * ROW_BYTES + spans * SPAN_BYTES + sum(map(len, keys))


def encode_rows(
    keys: Sequence[str], sizes: Sequence[int], checksums: Sequence[int], spans: Sequence[Sequence[tuple[int, int]]]
) -> bytes:
    """The payload of a frame. At most 255 spans an object, and keys of at most ``MAX_KEY_BYTES``."""
    names = [key.encode() for key in keys]
    flat = [number for of_one in spans for span in of_one for number in span]
    return b"".join(
        (
            _COUNT.pack(len(names), len(flat) // 2),
            np.asarray(sizes, np.uint64).tobytes(),
            np.asarray(checksums, np.uint64).tobytes(),
            np.asarray(flat, np.uint64).tobytes(),
            np.asarray([len(name) for name in names], np.uint16).tobytes(),
            np.asarray([len(of_one) for of_one in spans], np.uint8).tobytes(),
            *names,
        )
    )


def decode_rows(payload: bytes) -> Rows | None:
    """The rows of a frame's payload; None if it does not add up, which a verified frame of ours never does."""
    if len(payload) < _COUNT.size:
        return None
    count, spans = _COUNT.unpack_from(payload)
    if _COUNT.size + count * ROW_BYTES + spans * SPAN_BYTES > len(payload):
        return None
    at = _COUNT.size

    def column(dtype: Any, length: int) -> Any:
        nonlocal at
        found = np.frombuffer(payload, dtype, length, at)
        at += found.nbytes
        return found

    sizes, checksums = column(np.uint64, count), column(np.uint64, count)
    flat = column(np.uint64, spans * 2).reshape(-1, 2)
    lengths, counts = column(np.uint16, count), column(np.uint8, count)
    names = payload[at:]
    if int(lengths.sum(dtype=np.int64)) != len(names) or int(counts.sum(dtype=np.int64)) != spans:
        return None
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    starts = [0, *ends[:-1]] if ends else []
    try:
        if names.isascii():
            text = names.decode()
            keys = [text[start:end] for start, end in zip(starts, ends, strict=True)]
        else:
            keys = [names[start:end].decode() for start, end in zip(starts, ends, strict=True)]
    except UnicodeDecodeError:
        return None
    return Rows(keys, sizes, checksums, np.concatenate(([0], np.cumsum(counts, dtype=np.int64))), flat)


def encode_numbers(numbers: Iterable[int]) -> bytes:
    return np.asarray(list(numbers), np.uint64).tobytes()


def decode_numbers(payload: bytes) -> list[int]:
    return [] if len(payload) % 8 else [int(number) for number in np.frombuffer(payload, np.uint64)]


def well_formed(item: StoreWrite | StoreRead) -> bool:
    """Whether sizes and key are within what can be written down."""
    extents = item.source if isinstance(item, StoreWrite) else item.into
    if not 0 < item.size < 1 << 40 or not item.key or sum(extent.length for extent in extents) != item.size:
        return False
    return len(item.key) <= MAX_KEY_BYTES and (item.key.isascii() or len(item.key.encode()) <= MAX_KEY_BYTES)


__all__ = [
    "ALIGNMENT",
    "HEADER_BYTES",
    "Frame",
    "Kind",
    "Rows",
    "announced_length",
    "decode",
    "decode_numbers",
    "decode_rows",
    "encode",
    "encode_numbers",
    "encode_rows",
    "peek_version",
    "rows_bytes",
    "well_formed",
]
