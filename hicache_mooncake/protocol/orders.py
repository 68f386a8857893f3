"""Orders of an operator to the nodes that own pages, and what they answer. Pure messages.

An order travels as bytes: from the command line to the node of its host (``messages.Relay``), and from there to other
nodes over their data ports. Who carries one out is registered in ``node/orders.py``, so a new kind of order is a class
here, a line in ``Order`` and a function there. Pages are named by their hashes, as they stand in object keys, in the
namespaces ``digests`` (all where there are none): an owner knows by itself which objects those are.
"""

from __future__ import annotations

import msgspec

from hicache_mooncake.errors import ProtocolError

MAX_ORDER = 512 << 10
"""Bytes of an order: what a listener buffers for a request anyway."""

MAX_ANSWER = 4 << 20
"""Bytes of an answer: every replica of :data:`PAGES_AT_ONCE` pages with sixteen parts each."""

PAGES_AT_ONCE = 1024
"""Most page hashes in one order."""


class _Order(msgspec.Struct, tag_field="order", omit_defaults=True):
    pass


class _OfPages(_Order):
    hashes: list[str] = []
    digests: list[str] = []


class Pin(_OfPages, tag="pin"):
    """Protect pages, softly for ``ttl`` seconds without a use (0: the node's default), or ``hard`` for good."""

    hard: bool = False
    ttl: float = 0.0


class Unpin(_OfPages, tag="unpin"):
    """Protect pages no longer."""


class Evict(_OfPages, tag="evict"):
    """Drop pages that are not hard-pinned: ``hashes``, else all of ``digests``, else ``size`` bytes of cold ones."""

    size: int = 0


class Describe(_OfPages, tag="describe"):
    """Tell how the replicas here stand."""


class Verify(_Order, tag="verify"):
    """Begin to check every page here against its checksum, at most ``bandwidth`` bytes a second (0: a default)."""

    bandwidth: int = 0


class Progress(_Order, tag="progress"):
    """How far the job ``kind`` (the tag of the order that began it) is."""

    kind: str


class Cancel(_Order, tag="cancel"):
    """End the job ``kind`` early."""

    kind: str


Order = Pin | Unpin | Evict | Describe | Verify | Progress | Cancel


class _Answer(msgspec.Struct, tag_field="answer", omit_defaults=True):
    pass


class Handled(_Answer, tag="handled"):
    """What it was carried out for, in objects and bytes, and objects ``left`` as they are; ``found``: a byte a hash."""

    objects: int = 0
    size: int = 0
    left: int = 0
    found: bytes = b""


class Replica(msgspec.Struct, array_like=True):
    """A page as its owner has it. ``idle`` and ``pin_left`` are seconds, ``readers`` who read it now."""

    key: str
    size: int
    protection: str
    extra: bool
    readers: int
    idle: float
    pin_left: float


class Described(_Answer, tag="described"):
    """The replicas at this owner."""

    replicas: list[Replica]


class Job(_Answer, tag="job"):
    """A job of this owner: ``state`` is none, running, done, cancelled or failed; ``done`` of ``total`` bytes."""

    kind: str
    state: str = "none"
    done: int = 0
    total: int = 0
    objects: int = 0
    dropped: list[str] = []
    error: str = ""


class Declined(_Answer, tag="declined"):
    """The order is not carried out, and why."""

    reason: str


Answer = Handled | Described | Job | Declined

_encoder = msgspec.msgpack.Encoder()
_orders: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def encode(message: Order | Answer) -> bytes:
    return _encoder.encode(message)


def decode_order(body: bytes | bytearray) -> Order:
    """Raises ``ProtocolError`` for what is no order, or names too many pages."""
    try:
        order = _orders.decode(body)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"not an order: {error}") from error
    if isinstance(order, _OfPages) and max(len(order.hashes), len(order.digests)) > PAGES_AT_ONCE:
        raise ProtocolError(f"an order is for at most {PAGES_AT_ONCE} pages")
    return order


def decode_answer(body: bytes | bytearray) -> Answer:
    """Raises ``ProtocolError`` for what is no answer."""
    try:
        return _answers.decode(body)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"not an answer: {error}") from error
