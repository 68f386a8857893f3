"""Requests of an engine and replies of its node, and how they are framed on the unix socket.

A frame is a little-endian u32 length and a MessagePack body. Descriptors travel beside the frame that names them.
One connection carries one request at a time, so replies need no number; the request number is for the fence.
"""

from __future__ import annotations

import hmac
import struct
from enum import IntEnum

import msgspec

from hicache_mooncake.errors import ProtocolError

VERSION = 1
"""Engine and node must speak the same one; the package is installed once per host, so there is no negotiation."""

FRAME = struct.Struct("<I")

MAX_FRAME = 64 << 20
"""Largest body: an existence query over a million tokens at page size 16 needs 5 MB, so this only stops nonsense."""

MAX_OBJECT = 1 << 40
"""Largest object in bytes: far above any page, far below where arithmetic on addresses overflows."""

MAX_DESCRIPTORS = 64
"""Most descriptors beside one frame; the kernel's own limit is 253."""


class Status(IntEnum):
    """What became of one object of a request."""

    OK = 0
    ABSENT = 1  # nobody holds it
    SIZE = 2  # stored with another size
    CORRUPT = 3  # bytes did not match their checksum; the replica was dropped
    FAILED = 4  # the holder could not be reached
    TIMEOUT = 5  # the deadline passed
    NO_SPACE = 6  # the segment is full of pages that may not go
    REVOKED = 7  # the engine gave up on the request while it ran


class Message(msgspec.Struct, tag_field="op", omit_defaults=True):
    """Base of everything that is framed."""


class Hello(Message, tag="hello"):
    """First frame of a connection that opens a session: who is calling.

    A caller that is no ``engine`` only asks; a node that was started for engines does not live on for it.
    """

    version: int
    pool: str
    label: str
    engine: bool = True


class Welcome(Message, tag="welcome"):
    """The node accepts: who it is, where its Redis is and how it was set, without secrets.

    ``embedded``: an engine started it, and may start another when it is gone; else that is an operator's matter.
    ``proof`` shows to whoever has the node's shared secret that it is the same one; see :func:`secret_proof`.
    """

    node_id: str
    session: bytes
    package: str
    redis: str
    embedded: bool = False
    settings: dict[str, str] = {}
    proof: bytes = b""


class Refused(Message, tag="refused"):
    """The node does not do what was asked, and why; the connection closes after it."""

    reason: str


class Done(Message, tag="done"):
    """An order without a result was carried out."""


class Region(msgspec.Struct, array_like=True):
    """``size`` bytes of the engine's address space from ``base``: bytes ``offset``.. of the descriptor beside it."""

    base: int
    size: int
    offset: int


class Attach(Message, tag="attach"):
    """Memory the node may read and write on request: one descriptor a region; first of all the fence's."""

    regions: list[Region]
    with_fence: bool = False


class Join(Message, tag="join"):
    """First frame of a further connection of a session; it owns fence slot ``slot`` for good."""

    version: int
    session: bytes
    slot: int


class Stage(Message, tag="stage"):
    """The staging region of this connection, its descriptor beside it; replaces an earlier one."""

    region: Region


class Declare(Message, tag="declare"):
    """Namespaces this engine uses: digest -> readable fields.

    ``page_tokens``: how many tokens a page of a namespace stands for, where this engine is the one that counts them:
    the first rank, for its KV pool.
    """

    namespaces: dict[str, dict[str, str]]
    page_tokens: dict[str, int] = {}


class Keys(msgspec.Struct, array_like=True):
    """Objects by name: every part of every page of one namespace, page by page."""

    digest: str
    parts: list[str]
    hashes: list[str]


class Exists(Message, tag="exists"):
    """Which pages are held by anybody. With ``prefix_only`` the node stops at the first group's first missing page.

    ``limit_to_first``: later groups are asked only up to the first group's leading run.
    """

    budget_ms: int
    groups: list[Keys]
    prefix_only: bool = False
    limit_to_first: bool = False


class Found(Message, tag="found"):
    """One byte a page and group, 1 where all its parts are held; groups cut short are padded with 0."""

    pages: list[bytes]


class Pages(msgspec.Struct, array_like=True):
    """Objects and where they lie in the engine's memory.

    Every object has the same ``lengths`` (bytes of each extent, in order); ``addresses`` holds one little-endian u64
    an extent, object by object.
    """

    keys: Keys
    lengths: list[int]
    addresses: bytes


class Put(Message, tag="put"):
    """Store objects. ``request`` is the number the fence must show for the whole time."""

    request: int
    budget_ms: int
    groups: list[Pages]


class Get(Message, tag="get"):
    """Fetch objects into the engine's memory, fenced like :class:`Put`."""

    request: int
    budget_ms: int
    groups: list[Pages]


class Moved(Message, tag="moved"):
    """One :class:`Status` byte an object and group."""

    statuses: list[bytes]


class Clear(Message, tag="clear"):
    """Drop every page of these namespaces, on every node."""

    budget_ms: int
    digests: list[str]


class Cleared(Message, tag="cleared"):
    """How many objects were dropped, and the nodes that did not answer."""

    objects: int
    unreached: list[str]


class Relay(Message, tag="relay"):
    """Have an order (see ``orders``) carried out by ``nodes``, ids or names; by all of the pool when there are none."""

    budget_ms: int
    body: bytes
    nodes: list[str] = []


class Relayed(Message, tag="relayed"):
    """What nodes answered, and why others did not."""

    answers: dict[str, bytes]
    unreached: dict[str, str]


class Stats(Message, tag="stats"):
    """The node's counters are wanted."""


class Counters(Message, tag="counters"):
    """Name -> value."""

    values: dict[str, float]


Request = Attach | Stage | Declare | Exists | Put | Get | Clear | Relay | Stats
Reply = Welcome | Refused | Done | Found | Moved | Cleared | Relayed | Counters
Opening = Hello | Join

_encoder = msgspec.msgpack.Encoder()
_openings: msgspec.msgpack.Decoder[Opening] = msgspec.msgpack.Decoder(Opening)
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def secret_proof(secret: bytes, session: bytes) -> bytes:
    """What two who hold the same shared secret both compute for a session; empty when there is none."""
    return hmac.digest(secret, session, "sha256") if secret else b""


def encode(message: Message) -> bytes:
    """The whole frame of ``message``. Raises ``ProtocolError`` when it would be longer than a frame may be."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME:
        raise ProtocolError(
            f"a {type(message).__name__} of {len(body)} bytes is longer than a frame may be ({MAX_FRAME})"
        )
    return FRAME.pack(len(body)) + body


def frame_length(header: bytes | bytearray) -> int:
    """Length of the body that follows ``header``. Raises ``ProtocolError`` for one no frame can have."""
    length: int = FRAME.unpack(header)[0]
    if not 0 < length <= MAX_FRAME:
        raise ProtocolError(f"a frame of {length} bytes: the other side does not speak this protocol")
    return length


def decode_opening(body: bytes | bytearray) -> Opening:
    """The first message of a connection. Raises ``ProtocolError`` when it is none."""
    try:
        return _openings.decode(body)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"not an opening message: {error}") from error


def decode_request(body: bytes | bytearray) -> Request:
    """A request. Raises ``ProtocolError`` when it is none, or its parts do not agree in length."""
    try:
        message = _requests.decode(body)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"not a request: {error}") from error
    if isinstance(message, Put | Get):
        for group in message.groups:
            _check_pages(group)
    elif isinstance(message, Exists):
        if not all(group.parts for group in message.groups):
            raise ProtocolError("an object needs at least one part")
    elif isinstance(message, Attach):
        for region in message.regions:
            _check_region(region)
    elif isinstance(message, Stage):
        _check_region(message.region)
    return message


def _check_pages(group: Pages) -> None:
    objects = len(group.keys.parts) * len(group.keys.hashes)
    if not group.lengths or min(group.lengths) <= 0 or sum(group.lengths) > MAX_OBJECT or not group.keys.parts:
        raise ProtocolError("an object needs at least one part and one extent of one byte")
    if len(group.addresses) != 8 * objects * len(group.lengths):
        raise ProtocolError(
            f"{objects} objects of {len(group.lengths)} extents with {len(group.addresses) // 8} addresses"
        )


def _check_region(region: Region) -> None:
    last = 1 << 63  # what the kernel takes, and far from where a sum of two would not fit any more
    if not (0 <= region.base < last and 0 < region.size < last and 0 <= region.offset < last):
        raise ProtocolError(f"no memory can have {region.size} bytes at {region.base:#x}, offset {region.offset}")


def decode_reply(body: bytes | bytearray) -> Reply:
    """A reply. Raises ``ProtocolError`` when it is none."""
    try:
        return _replies.decode(body)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"not a reply: {error}") from error
