"""What Redis holds about an object and about a node, how it is written there, and what Redis says about itself.

Pure functions, no I/O.

Records are text for people: ``redis-cli get`` on an object shows ``262144 node7~5f0c12aa/dram``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_ADDRESS = "address."

_OF_SSD = ("ssd_capacity", "ssd_used", "ssd_pages")

DRAM, SSD = "dram", "ssd"
"""Tiers, as they stand in holder words."""


@dataclass(frozen=True)
class ObjectRecord:
    """Who holds an object: its ``size`` in bytes, and a word ``<node id>/<tier>`` for each replica."""

    size: int
    holders: tuple[str, ...]


@dataclass(frozen=True)
class NodeRecord:
    """What a node tells the others about itself at every heartbeat.

    ``id`` is new at every process start. ``addresses`` maps a transport's scheme to its contact
    ``host:port``. ``capacity`` and ``used`` are bytes of its segment, ``pages`` is how many it holds,
    ``started`` a unix time. ``ssd_*`` are the same of its SSD tier, 0 where there is none.
    """

    id: str
    name: str
    host: str
    addresses: dict[str, str]
    capacity: int
    used: int
    version: str
    started: float
    pages: int
    ssd_capacity: int = 0
    ssd_used: int = 0
    ssd_pages: int = 0


def format_object(record: ObjectRecord) -> bytes:
    """
    >>> format_object(ObjectRecord(4096, ("a~00000001/dram", "b~00000002/dram")))
    b'4096 a~00000001/dram b~00000002/dram'
    """
    return " ".join((str(record.size), *record.holders)).encode()


def parse_object(raw: bytes) -> ObjectRecord | None:
    """The record in ``raw``, or ``None`` where it is none: for a reader that is a miss, not a fault.

    >>> parse_object(b"4096 a~00000001/dram")
    ObjectRecord(size=4096, holders=('a~00000001/dram',))
    >>> parse_object(b"what is this")
    """
    size, *holders = raw.split(b" ")
    # isdigit on bytes is ASCII only; the bound is that of a Redis value's own arithmetic (signed 64 bits)
    if not size.isdigit() or len(size) > 18 or not holders or not all(holders):
        return None
    try:
        return ObjectRecord(int(size), tuple([holder.decode() for holder in holders]))
    except UnicodeDecodeError:
        return None


def node_of(holder: str) -> str | None:
    """The node that a holder word belongs to, or ``None`` for one that no node owns (``shared/<store>``).

    >>> node_of("n1~00ff00ff/dram"), node_of("shared/nfs")
    ('n1~00ff00ff', None)
    """
    owner, _, _ = holder.partition("/")
    return owner if "~" in owner else None


def format_node(record: NodeRecord) -> list[str]:
    """``record`` as fields and values in turn, as HSET takes them; the id is in the key."""
    fields = {
        "name": record.name,
        "host": record.host,
        "version": record.version,
        "started": repr(record.started),
        "capacity": str(record.capacity),
        "used": str(record.used),
        "pages": str(record.pages),
        **({name: str(getattr(record, name)) for name in _OF_SSD} if record.ssd_capacity else {}),
        **{_ADDRESS + scheme: address for scheme, address in record.addresses.items()},
    }
    return [word for pair in fields.items() for word in pair]


def parse_node(node_id: str, fields: Mapping[str, str]) -> NodeRecord | None:
    """The record of ``node_id``, or ``None`` where ``fields`` do not hold one."""
    try:
        return NodeRecord(
            id=node_id,
            name=fields["name"],
            host=fields["host"],
            addresses={
                field[len(_ADDRESS) :]: address for field, address in fields.items() if field.startswith(_ADDRESS)
            },
            capacity=int(fields["capacity"]),
            used=int(fields["used"]),
            version=fields["version"],
            started=float(fields["started"]),
            pages=int(fields["pages"]),
            **{name: int(fields.get(name, 0)) for name in _OF_SSD},
        )
    except (KeyError, ValueError):
        return None


def pairs(flat: Iterable[bytes]) -> dict[str, str]:
    """The reply of HGETALL as a dictionary."""
    words = iter(flat)
    return {
        field.decode(errors="replace"): value.decode(errors="replace")
        for field, value in zip(words, words, strict=True)
    }


def parse_info(raw: bytes) -> dict[str, str]:
    """The reply of INFO as a dictionary."""
    lines = raw.decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))


def parse_hello(flat: Iterable[object]) -> dict[str, str]:
    """The texts in the reply of HELLO; its numbers and lists are left out.

    >>> parse_hello([b"version", b"7.2.4", b"proto", 2, b"mode", b"standalone", b"modules", []])
    {'version': '7.2.4', 'mode': 'standalone'}
    """
    words = iter(flat)
    return pairs(
        word
        for name, value in zip(words, words, strict=False)
        if isinstance(name, bytes) and isinstance(value, bytes)
        for word in (name, value)
    )


def parse_version(text: str) -> tuple[int, ...]:
    """
    >>> parse_version("7.0.15")
    (7, 0)
    """
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
