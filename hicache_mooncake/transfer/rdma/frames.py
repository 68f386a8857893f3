"""What reader and owner tell each other beside the frames of ``wire``, on the same connection. Pure.

::

    reader                                          owner
    OPEN     ends of queue pairs            --->
                                            <---    OPENED   their other ends; regions and their keys
    FETCH    keys, sizes                    --->             pins the pages
                                            <---    PLACES   where each is, its checksum
             reads them, one-sided
    RELEASE                                 --->             lets go of the pins
    PUSH     keys, sizes, checksums         --->             makes room
                                            <---    GRANT    which it wants; a staging area and its keys
             writes them there, one-sided
    WRITTEN  bytes                          --->             copies them into the room
                                            <---    TAKEN, until all are there; then STORED, as after STORE

Keys of memory are only in OPENED and GRANT: nobody gets one who has not proven that he knows the pool's secret.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hicache_mooncake.errors import ProtocolError
from hicache_mooncake.transfer.base import Outcome
from hicache_mooncake.transfer.wire import (
    MAX_PAGES,
    Acceptance,
    Kind,
    PageRow,
    decode_accepted,
    decode_page_rows,
    encode_frame,
    encode_page_rows,
)

from .plan import Places
from .queue_pair import Endpoint

VERSION: Final = 1
MAX_PATHS: Final = 64
"""Queue pairs of one connection: one per device of the reader."""
MAX_REGIONS: Final = 4096
"""Pieces of a segment: 32 TiB in pieces of 8 GiB."""
MAX_EXTENTS: Final = 1 << 16
"""Extents of the pages of one request, 16 a page and room to spare."""

_OPEN = struct.Struct("<HBx")
_OPENED = struct.Struct("<HBBH2x")
_END = struct.Struct("<16sHIIBBBBB")
_GRANT = struct.Struct("<QQB")
_BYTES = struct.Struct("<Q")
_COUNT = struct.Struct("<I")
_REGION = np.dtype([("address", "<u8"), ("length", "<u8")])
_EXTENT = np.dtype([("region", "<u2"), ("offset", "<u8"), ("length", "<u8")])
_ROW_BYTES: Final = 17

MAX_OPEN_BYTES: Final = _OPEN.size + MAX_PATHS * _END.size
MAX_OPENED_BYTES: Final = _OPENED.size + MAX_PATHS * _END.size + MAX_REGIONS * (_REGION.itemsize + 4 * MAX_PATHS)
MAX_PLACES_BYTES: Final = 2 * _COUNT.size + MAX_PAGES * (_ROW_BYTES + 2) + MAX_EXTENTS * _EXTENT.itemsize
MAX_GRANT_BYTES: Final = MAX_PAGES + _GRANT.size + 4 * MAX_PATHS


class Offer(NamedTuple):
    """A reader's end of a path, and the number of the owner's device that it should lead to (modulo how many)."""

    end: Endpoint
    to_device: int


class Opened(NamedTuple):
    """The owner's ends, in the order of the offers (None where it has none to give), and its regions; none at all while
    its segment is being registered.

    ``keys[path][region]`` is the region's remote key on that path. ``devices`` is how many devices the owner uses.
    """

    ends: list[Endpoint | None]
    devices: int
    regions: list[tuple[int, int]]
    keys: NDArray[np.uint32]


class Grant(NamedTuple):
    """What the owner says to an offer of pages, and where to write them; no bytes where only TCP is open."""

    answers: list[Acceptance]
    address: int
    size: int
    keys: list[int]


def encode_open(offers: Sequence[Offer]) -> bytes:
    body = b"".join(_pack_end(offer.end, offer.to_device) for offer in offers)
    return encode_frame(Kind.OPEN, _OPEN.pack(VERSION, len(offers)) + body)


def decode_open(payload: bytes | bytearray) -> list[Offer]:
    version, count = _unpack(_OPEN, payload)
    if version != VERSION:
        raise ProtocolError(f"the reader speaks version {version} of RDMA, version {VERSION} is spoken here")
    if not 0 < count <= MAX_PATHS or len(payload) != _OPEN.size + count * _END.size:
        raise ProtocolError("not an offer of paths")
    return [Offer(*_unpack_end(payload, at)) for at in range(_OPEN.size, _OPEN.size + count * _END.size, _END.size)]


def encode_opened(opened: Opened) -> bytes:
    """A whole OPENED frame."""
    head = _OPENED.pack(VERSION, len(opened.ends), opened.devices, len(opened.regions))
    ends = b"".join(_pack_end(end, 1) if end is not None else bytes(_END.size) for end in opened.ends)
    regions = np.array(opened.regions, _REGION)
    return encode_frame(Kind.OPENED, head + ends + regions.tobytes() + opened.keys.astype("<u4").tobytes())


def decode_opened(payload: bytes | bytearray, paths: int) -> Opened:
    version, count, devices, regions = _unpack(_OPENED, payload)
    if version != VERSION:
        raise ProtocolError(f"the owner speaks version {version} of RDMA, version {VERSION} is spoken here")
    after_ends = _OPENED.size + count * _END.size
    after_regions = after_ends + regions * _REGION.itemsize
    if count != paths or regions > MAX_REGIONS or len(payload) != after_regions + 4 * count * regions:
        raise ProtocolError("not an answer to an offer of paths")
    ends = [_unpack_end(payload, at) for at in range(_OPENED.size, after_ends, _END.size)]
    table = np.frombuffer(payload, _REGION, regions, after_ends)
    keys = np.frombuffer(payload, "<u4", count * regions, after_regions).reshape(count, regions)
    return Opened(
        [end if present else None for end, present in ends], devices, list(map(tuple, table.tolist())), keys.copy()
    )


def encode_places(rows: Sequence[PageRow], counts: Sequence[int], extents: Sequence[tuple[int, int, int]]) -> bytes:
    """A whole PLACES frame: ``counts`` extents for each row, all of them as region, offset and length."""
    table = np.array(extents, _EXTENT)
    body = (
        encode_page_rows(rows),
        np.array(counts, "<u2").tobytes(),
        _COUNT.pack(len(table)),
        table.tobytes(),
    )
    return encode_frame(Kind.PLACES, b"".join(body))


def decode_places(
    payload: bytes | bytearray, sizes: Sequence[int], regions: NDArray[np.uint64]
) -> tuple[list[PageRow], Places]:
    """The rows that answer a request for ``sizes``, and where the pages that are there lie, one after the other.

    ``regions`` has two columns, address and length. Everything named must lie inside its region and add up to its page.
    """
    (count,) = _unpack(_COUNT, payload)
    after_rows = _COUNT.size + count * _ROW_BYTES
    after_counts = after_rows + 2 * count
    if count != len(sizes) or len(payload) < after_counts + _COUNT.size:
        raise ProtocolError(f"asked for {len(sizes)} pages, the reply is about {count}")
    rows = decode_page_rows(payload, sizes)
    counts = np.frombuffer(payload, "<u2", count, after_rows).astype(np.int64)
    (total,) = _COUNT.unpack_from(payload, after_counts)
    start = after_counts + _COUNT.size
    if total != counts.sum() or len(payload) != start + total * _EXTENT.itemsize:
        raise ProtocolError("the places in a reply do not add up to it")
    table = np.frombuffer(payload, _EXTENT, total, start)
    region = table["region"].astype(np.int64)
    offset, length = table["offset"].astype(np.uint64), table["length"].astype(np.uint64)
    if total:
        if region.max() >= len(regions):
            raise ProtocolError("a reply names a region that there is not")
        room = regions[region, 1]
        if np.any(length == 0) or np.any(length > room) or np.any(offset > room - length):
            raise ProtocolError("a reply names a place outside its region")
    page = np.repeat(np.arange(count), counts)
    held = np.bincount(page, length.astype(np.float64), count)
    expected = [size if row.status is Outcome.OK else 0 for row, size in zip(rows, sizes, strict=True)]
    if not np.array_equal(held, np.array(expected, np.float64)):
        raise ProtocolError("a page's places do not have its size")
    return rows, Places(regions[region, 0] + offset if total else offset, length, region)


def encode_grant(grant: Grant) -> bytes:
    head = bytes(grant.answers) + _GRANT.pack(grant.address, grant.size, len(grant.keys))
    return encode_frame(Kind.GRANT, head + np.array(grant.keys, "<u4").tobytes())


def decode_grant(payload: bytes | bytearray, pages: int, paths: int) -> Grant:
    answers = decode_accepted(payload[:pages], pages)
    address, size, count = _unpack(_GRANT, payload[pages:])
    start = pages + _GRANT.size
    if len(payload) != start + 4 * count or (size and count != paths):
        raise ProtocolError("not an answer to an offer of pages")
    return Grant(answers, address, size, np.frombuffer(payload, "<u4", count, start).tolist())


def encode_bytes(kind: Kind, size: int) -> bytes:
    """A whole WRITTEN or TAKEN frame."""
    return encode_frame(kind, _BYTES.pack(size))


def decode_bytes(payload: bytes | bytearray) -> int:
    if len(payload) != _BYTES.size:
        raise ProtocolError("a number of bytes is expected")
    size: int = _BYTES.unpack(payload)[0]
    return size


def _pack_end(end: Endpoint, extra: int) -> bytes:
    gid, lid, number, psn, mtu, ethernet, served, asked = end
    return _END.pack(gid, lid, number, psn, mtu, ethernet, served, asked, extra & 0xFF)


def _unpack_end(payload: bytes | bytearray, at: int) -> tuple[Endpoint, int]:
    gid, lid, number, psn, mtu, ethernet, served, asked, extra = _END.unpack_from(payload, at)
    # An end that is not there is all zeros; of one that is, the device checks the rest when it is connected.
    if number and not (1 <= mtu <= 5 and number < 1 << 24 and psn < 1 << 24 and served and asked):
        raise ProtocolError("an end of a path makes no sense")
    return Endpoint(gid, lid, number, psn, mtu, bool(ethernet), served, asked), extra


def _unpack(layout: struct.Struct, payload: bytes | bytearray) -> tuple[Any, ...]:
    if len(payload) < layout.size:
        raise ProtocolError(f"a payload of {len(payload)} bytes is cut short")
    return layout.unpack_from(payload)
