"""The frames of the page protocol. Pure codecs: bytes in, values out, ``ProtocolError`` for anything else.

A frame is a 12-byte header (magic, kind, payload length) and a payload. A reader sends ``READ`` and gets
``PAGES``: one row a page, then, outside the frame, the bytes of exactly the pages whose row says ``OK``, in
order and without gaps. ``CLEAR`` asks to drop namespaces, ``DOUBT`` to check pages whose bytes did not match
their checksum at the reader; both get ``CLEARED``, how many pages went. ``ORDER`` and ``ORDERED`` carry a node's
orders and answers, opaque here. ``STORE`` offers pages and gets
``ACCEPTED``, one byte a page; then come, outside the frame, the bytes of the pages that are wanted, and last
``STORED``, one byte for each of those. One request is under way on a connection at a time. All numbers are
little-endian.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ProtocolError
from .base import Outcome

MAGIC: Final = b"HCMT"
_HEADER = struct.Struct("<4sB3xI")
HEADER_SIZE: Final = _HEADER.size

MAX_PAGES: Final = 512
"""Pages of one request: what is pinned together must be sent well within a pin's life."""
MAX_KEY_BYTES: Final = 1024
"""Object keys are about 100 bytes; this leaves room for longer hashes and bounds a request."""
MAX_PAGE_BYTES: Final = 1 << 40
"""Far above any page: only so that sums of sizes stay in 64 bits."""
MAX_DIGESTS: Final = 4096
"""Namespaces dropped by one request; a pool has a few per model."""
MAX_BUDGET: Final = 3600.0
"""Seconds; a reader that would wait longer for a page is as good as gone."""

_COUNT = struct.Struct("<I")
_READ = struct.Struct("<II")
_CLEARED = struct.Struct("<Q")
_WANTED = np.dtype([("size", "<u8"), ("key_bytes", "<u2")])
_ROW = np.dtype([("status", "u1"), ("size", "<u8"), ("checksum", "<u8")])
_OFFERED = np.dtype([("size", "<u8"), ("checksum", "<u8"), ("key_bytes", "<u2")])
_NAME_BYTES = np.dtype("<u2")

MAX_REQUEST_BYTES: Final = max(
    _READ.size + MAX_PAGES * (_OFFERED.itemsize + MAX_KEY_BYTES),
    _COUNT.size + MAX_DIGESTS * (_NAME_BYTES.itemsize + 128),
)
"""What a listener buffers for one connection before it knows what is asked."""
MAX_ANSWER_BYTES: Final = 4 << 20
"""Of an order's answer: what a node says about a few thousand pages."""
MAX_REPLY_BYTES: Final = _COUNT.size + MAX_PAGES * _ROW.itemsize

_OUTCOMES = tuple(Outcome)
_HIGHEST_SENT = Outcome.SIZE  # the later ones are for the reader to find out


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REFUSAL = 5
    READ = 16
    PAGES = 17
    CLEAR = 18
    CLEARED = 19
    DOUBT = 20
    STORE = 21
    ACCEPTED = 22
    STORED = 23
    ORDER = 24
    ORDERED = 25
    OPEN = 32  # from here on see rdma/frames.py
    OPENED = 33
    FETCH = 34
    PLACES = 35
    RELEASE = 36
    PUSH = 37
    GRANT = 38
    WRITTEN = 39
    TAKEN = 40


class Acceptance(IntEnum):
    """What an owner says to a page that it is offered."""

    SEND = 0
    HELD = 1
    FULL = 2


class ReadRequest(NamedTuple):
    """``sizes`` is what the reader expects; after ``budget`` seconds it does not wait any more."""

    keys: list[str]
    sizes: list[int]
    budget: float


class StoreRequest(NamedTuple):
    """Pages offered to an owner; after ``budget`` seconds the writer does not wait any more."""

    keys: list[str]
    sizes: list[int]
    checksums: list[int]
    budget: float


class PageRow(NamedTuple):
    """The owner's answer for one page: its real size and checksum (both 0 when absent)."""

    status: Outcome
    size: int
    checksum: int


# The constructor without its Python wrapper: a reply has hundreds of rows.
_page_row: Callable[[tuple[Outcome, int, int]], PageRow] = partial(tuple.__new__, PageRow)


def encode_frame(kind: Kind, payload: bytes) -> bytes:
    return _HEADER.pack(MAGIC, kind, len(payload)) + payload


def decode_header(data: bytes | bytearray, allowed: Sequence[Kind], limit: int) -> tuple[Kind, int]:
    """Kind (one of ``allowed``) and payload length (at most ``limit``) of a frame."""
    if len(data) != HEADER_SIZE:
        raise ProtocolError(f"a frame header has {HEADER_SIZE} bytes, not {len(data)}")
    magic, kind, length = _HEADER.unpack(data)
    if magic != MAGIC:
        raise ProtocolError("the other side does not speak the page protocol")
    if kind not in allowed:
        raise ProtocolError(f"a frame of kind {kind} is out of turn")
    if length > limit:
        raise ProtocolError(f"a frame of {length} bytes is over the limit of {limit}")
    return Kind(kind), length


def encode_read(request: ReadRequest, kind: Kind = Kind.READ) -> bytes:
    """A whole READ (or FETCH) frame. Raises ``ValueError`` for what the limits do not allow."""
    keys, sizes, budget = request
    _check_sizes(keys, sizes)
    encoded = encode_keys(keys)
    rows = np.empty(len(keys), _WANTED)
    rows["size"] = sizes
    rows["key_bytes"] = [len(key) for key in encoded]
    head = _READ.pack(len(keys), _milliseconds(budget))
    return encode_frame(kind, b"".join((head, rows.tobytes(), *encoded)))


def decode_read(payload: bytes | bytearray) -> ReadRequest:
    rows, budget = _request_rows(_WANTED, payload)
    keys = _texts(payload, _READ.size + rows.nbytes, rows["key_bytes"])
    return ReadRequest(keys, rows["size"].tolist(), budget)


def _check_sizes(keys: Sequence[str], sizes: Sequence[int]) -> None:
    if not 0 < len(keys) <= MAX_PAGES or len(keys) != len(sizes):
        raise ValueError(f"a request is for 1 to {MAX_PAGES} pages, not {len(keys)}")
    if not 0 < min(sizes) <= max(sizes) <= MAX_PAGE_BYTES:
        raise ValueError("a page has 1 byte to 1 TiB")


def _milliseconds(budget: float) -> int:
    return round(min(max(budget, 0.0), MAX_BUDGET) * 1000)


def _request_rows(dtype: np.dtype[Any], payload: bytes | bytearray) -> tuple[NDArray[Any], float]:
    """The rows of a request and its budget in seconds, within the limits."""
    count, milliseconds = _unpack(_READ, payload)
    if not 0 < count <= MAX_PAGES:
        raise ProtocolError(f"a request is for 1 to {MAX_PAGES} pages, not {count}")
    if milliseconds > MAX_BUDGET * 1000:
        raise ProtocolError(f"a budget of {milliseconds} ms is over the limit")
    rows = _rows(dtype, payload, _READ.size, count)
    if not 0 < int(rows["size"].min()) <= int(rows["size"].max()) <= MAX_PAGE_BYTES:
        raise ProtocolError("a page has 1 byte to 1 TiB")
    return rows, milliseconds / 1000


def encode_store(request: StoreRequest, kind: Kind = Kind.STORE) -> bytes:
    """A whole STORE (or PUSH) frame. Raises ``ValueError`` for what the limits do not allow."""
    keys, sizes, checksums, budget = request
    _check_sizes(keys, sizes)
    encoded = encode_keys(keys)
    rows = np.empty(len(keys), _OFFERED)
    rows["size"], rows["checksum"] = sizes, np.array(checksums, np.uint64)
    rows["key_bytes"] = [len(key) for key in encoded]
    head = _READ.pack(len(keys), _milliseconds(budget))
    return encode_frame(kind, b"".join((head, rows.tobytes(), *encoded)))


def decode_store(payload: bytes | bytearray) -> StoreRequest:
    rows, budget = _request_rows(_OFFERED, payload)
    keys = _texts(payload, _READ.size + rows.nbytes, rows["key_bytes"])
    return StoreRequest(keys, rows["size"].tolist(), rows["checksum"].tolist(), budget)


def encode_accepted(answers: Sequence[Acceptance]) -> bytes:
    return encode_frame(Kind.ACCEPTED, bytes(answers))


def decode_accepted(payload: bytes | bytearray, pages: int) -> list[Acceptance]:
    if len(payload) != pages or (payload and max(payload) > max(Acceptance)):
        raise ProtocolError(f"not an answer to an offer of {pages} pages")
    return [Acceptance(answer) for answer in payload]


def encode_stored(kept: Sequence[bool]) -> bytes:
    return encode_frame(Kind.STORED, bytes(kept))


def decode_stored(payload: bytes | bytearray, pages: int) -> list[bool]:
    if len(payload) != pages or (payload and max(payload) > 1):
        raise ProtocolError(f"not an answer to {pages} pages that were sent")
    return [bool(kept) for kept in payload]


def encode_pages(rows: Sequence[PageRow]) -> bytes:
    """A whole PAGES frame; the bytes of the pages follow it."""
    return encode_frame(Kind.PAGES, encode_page_rows(rows))


def encode_page_rows(rows: Sequence[PageRow]) -> bytes:
    """What :func:`decode_page_rows` reads."""
    return _COUNT.pack(len(rows)) + np.array(rows, _ROW).tobytes()


def decode_pages(payload: bytes | bytearray, sizes: Sequence[int]) -> list[PageRow]:
    """The rows that answer a request for ``sizes``, and nothing else."""
    rows = decode_page_rows(payload, sizes)
    if len(payload) != _COUNT.size + len(rows) * _ROW.itemsize:
        raise ProtocolError("a reply has trailing bytes")
    return rows


def decode_page_rows(payload: bytes | bytearray, sizes: Sequence[int]) -> list[PageRow]:
    """The rows that a reply begins with; only a page of the size asked may announce bytes."""
    (count,) = _unpack(_COUNT, payload)
    if count != len(sizes):
        raise ProtocolError(f"asked for {len(sizes)} pages, the reply is about {count}")
    table = _rows(_ROW, payload, _COUNT.size, count)
    status, size = table["status"], table["size"]
    if count and status.max() > _HIGHEST_SENT:
        raise ProtocolError(f"a page cannot have the status {status.max()}")
    fits = size == np.array(sizes, np.uint64)
    if np.any((status == Outcome.OK) & ~fits) or np.any((status == Outcome.SIZE) & fits):
        raise ProtocolError("a page's status and size contradict what was asked for")
    outcomes = map(_OUTCOMES.__getitem__, status.tolist())
    return list(map(_page_row, zip(outcomes, size.tolist(), table["checksum"].tolist(), strict=True)))


def encode_clear(digests: Sequence[str]) -> bytes:
    """A whole CLEAR frame. Raises ``ValueError`` for what the limits do not allow."""
    encoded = encode_keys(digests)
    if len(encoded) > MAX_DIGESTS or max(map(len, encoded), default=0) > 128:
        raise ValueError(f"at most {MAX_DIGESTS} namespace digests of at most 128 bytes")
    return _encode_names(Kind.CLEAR, encoded)


def decode_clear(payload: bytes | bytearray) -> list[str]:
    return _decode_names(payload, MAX_DIGESTS)


def encode_doubt(keys: Sequence[str]) -> bytes:
    """A whole DOUBT frame. Raises ``ValueError`` for what the limits do not allow."""
    if len(keys) > MAX_PAGES:
        raise ValueError(f"a request is for at most {MAX_PAGES} pages, not {len(keys)}")
    return _encode_names(Kind.DOUBT, encode_keys(keys))


def decode_doubt(payload: bytes | bytearray) -> list[str]:
    return _decode_names(payload, MAX_PAGES)


def encode_cleared(pages: int) -> bytes:
    return encode_frame(Kind.CLEARED, _CLEARED.pack(pages))


def decode_cleared(payload: bytes | bytearray) -> int:
    if len(payload) != _CLEARED.size:
        raise ProtocolError("the answer to a clear is one number")
    pages: int = _CLEARED.unpack(payload)[0]
    return pages


def encode_order(body: bytes) -> bytes:
    """A whole ORDER frame; what is in it is not this protocol's. Raises ``ValueError`` when it is too long."""
    if len(body) > MAX_REQUEST_BYTES:
        raise ValueError(f"an order has at most {MAX_REQUEST_BYTES} bytes, not {len(body)}")
    return encode_frame(Kind.ORDER, body)


def encode_ordered(body: bytes) -> bytes:
    """A whole ORDERED frame. Raises ``ValueError`` when it is too long."""
    if len(body) > MAX_ANSWER_BYTES:
        raise ValueError(f"an answer has at most {MAX_ANSWER_BYTES} bytes, not {len(body)}")
    return encode_frame(Kind.ORDERED, body)


def encode_keys(keys: Sequence[str]) -> list[bytes]:
    """The bytes of object keys or digests; ``ValueError`` when one is empty, too long or not valid text."""
    encoded = [key.encode() for key in keys]
    lengths = list(map(len, encoded))
    if lengths and not 0 < min(lengths) <= max(lengths) <= MAX_KEY_BYTES:
        raise ValueError(f"a key has 1 to {MAX_KEY_BYTES} bytes, not {min(lengths)} to {max(lengths)}")
    return encoded


def _encode_names(kind: Kind, encoded: Sequence[bytes]) -> bytes:
    lengths = np.array([len(name) for name in encoded], _NAME_BYTES)
    return encode_frame(kind, b"".join((_COUNT.pack(len(encoded)), lengths.tobytes(), *encoded)))


def _decode_names(payload: bytes | bytearray, most: int) -> list[str]:
    (count,) = _unpack(_COUNT, payload)
    if count > most:
        raise ProtocolError(f"{count} names are over the limit of {most}")
    lengths = _rows(_NAME_BYTES, payload, _COUNT.size, count)
    return _texts(payload, _COUNT.size + lengths.nbytes, lengths)


def _unpack(layout: struct.Struct, payload: bytes | bytearray) -> tuple[int, ...]:
    if len(payload) < layout.size:
        raise ProtocolError(f"a payload of {len(payload)} bytes is cut short")
    return layout.unpack_from(payload)


def _rows(dtype: np.dtype[Any], payload: bytes | bytearray, offset: int, count: int) -> NDArray[Any]:
    if len(payload) < offset + count * dtype.itemsize:
        raise ProtocolError(f"a payload of {len(payload)} bytes is cut short")
    return np.frombuffer(payload, dtype, count, offset)


def _texts(payload: bytes | bytearray, offset: int, lengths: NDArray[Any]) -> list[str]:
    """The texts of ``lengths`` bytes from ``offset`` to the very end of the payload."""
    ends = offset + np.cumsum(lengths, dtype=np.int64)
    if (int(ends[-1]) if len(ends) else offset) != len(payload):
        raise ProtocolError("the lengths in a payload do not add up to it")
    if len(lengths) and not 0 < int(lengths.min()) <= int(lengths.max()) <= MAX_KEY_BYTES:
        raise ProtocolError(f"a key has 1 to {MAX_KEY_BYTES} bytes")
    marks = [offset, *ends.tolist()]
    if payload[offset:].isascii():  # as object keys are: decoded at once
        text = payload.decode("latin-1")
        return [text[start:end] for start, end in itertools.pairwise(marks)]
    try:
        return [payload[start:end].decode() for start, end in itertools.pairwise(marks)]
    except UnicodeDecodeError as error:
        raise ProtocolError("a key is not valid text") from error
