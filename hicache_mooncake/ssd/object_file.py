"""One object in one file: a 4 KiB head that says what it is, and its bytes behind. Pure."""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple
from urllib.parse import quote, unquote

from hicache_mooncake.ssd.frames import Frame, Kind, decode, decode_rows, encode, encode_rows
from hicache_mooncake.ssd.io_base import ALIGNMENT, padded

SUFFIX = ".page"
TEMPORARY = ".tmp"
LONGEST_NAME = 240
_FANOUT = 64


class Head(NamedTuple):
    key: str
    size: int
    checksum: int


def encode_head(head: Head, owner: bytes) -> bytes:
    """The first block of the file."""
    payload = encode_rows([head.key], [head.size], [head.checksum], [[(ALIGNMENT, head.size)]])
    return encode(Frame(Kind.PAGE, owner, 0, 0, 1, payload)).ljust(ALIGNMENT, b"\0")


def decode_head(block: bytes, owner: bytes | None = None) -> Head | None:
    """None when the block is no head, damaged, or another store's."""
    frame = decode(block, owner=owner, place=0)
    rows = decode_rows(frame.payload) if frame is not None and frame.kind is Kind.PAGE else None
    if rows is None or len(rows.keys) != 1:
        return None
    return Head(rows.keys[0], int(rows.sizes[0]), int(rows.checksums[0]))


def file_name(key: str) -> str:
    """The file of a key; readable, and told from the key alone. Longer than ``LONGEST_NAME``: it cannot be stored."""
    return quote(key, safe="+=@,") + SUFFIX


def folder(key: str) -> str:
    """Two levels of 64 folders: a million files are 250 in each."""
    digest = blake2b(key.encode(), digest_size=2).digest()
    return f"{digest[0] % _FANOUT:02x}/{digest[1] % _FANOUT:02x}"


def key_of(name: str) -> str | None:
    """The key of a file name; None for other names."""
    return unquote(name[: -len(SUFFIX)]) if name.endswith(SUFFIX) else None


def footprint(size: int) -> int:
    """Bytes on disk of a file, and a share of its folder's."""
    return ALIGNMENT + padded(size) + 512


def folders() -> list[str]:
    """The folders of the first level."""
    return [f"{number:02x}" for number in range(_FANOUT)]
