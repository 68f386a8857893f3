"""What every transport speaks: pages read from a peer node straight into local memory.

A node *listens* and serves the pages of its :class:`PageSource`; a reader *connects* and reads batches
through a :class:`Peer`. Nothing here does I/O; ``tcp`` and later ``rdma`` implement the ABCs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import TracebackType
from typing import NamedTuple, Protocol, TypeVar

from ..memory import Extent, Memory

_Closing = TypeVar("_Closing", bound="_Closeable")


class Outcome(IntEnum):
    """What became of one page of a batch. All but ``OK`` are misses and leave the page's bytes undefined."""

    OK = 0
    ABSENT = 1
    """The owner does not hold the page (any more)."""
    SIZE = 2
    """The owner's page has another size than the reader expects: its bytes were not sent."""
    CORRUPT = 3
    """The bytes arrived and their checksum is not the owner's."""
    FAILED = 4
    """The peer could not be reached, refused us, or the connection broke."""
    TIMEOUT = 5
    """The deadline passed first."""
    FULL = 6
    """Only of a write: the owner has no room for the page."""


@dataclass(slots=True)
class PageRead:
    """One page wanted from a peer: ``size`` bytes of ``key``, scattered over ``into`` (as long in all)."""

    key: str
    size: int
    into: Sequence[Extent]


@dataclass(slots=True)
class PageWrite:
    """One page to be stored by a peer: ``size`` bytes of ``key`` gathered from ``source``, and their checksum."""

    key: str
    size: int
    checksum: int
    source: Sequence[Extent]


class Room(NamedTuple):
    """Memory that an owner has set aside for a page that is coming; ``handle`` is the owner's."""

    key: str
    size: int
    extents: Sequence[Extent]
    handle: object = None


class PinnedPage(NamedTuple):
    """A page that its owner keeps in place until it is unpinned, and its ``memory.checksum``.

    ``handle`` is the owner's: which page it is that was pinned, for one key may name another page meanwhile.
    """

    size: int
    checksum: int
    extents: Sequence[Extent]
    handle: object = None


@dataclass(frozen=True, slots=True)
class Credentials:
    """What nodes prove to each other: that they know the pool's secret. Both sides have one, or neither."""

    secret: bytes = field(default=b"", repr=False)
    pool: str = "default"


class PageSource(Protocol):
    """What a listener serves; implemented by the node. Called from several threads at once."""

    @property
    def node_id(self) -> str:
        """The node's id of this process start; a reader that expects another one is refused."""

    @property
    def memory(self) -> Memory:
        """What all of its pages lie in, and where room for new ones is made."""

    def pin(self, keys: Sequence[str]) -> Sequence[PinnedPage | None]:
        """For each key its page, pinned in place until :meth:`unpin`, or None. Named twice, pinned twice."""

    def unpin(self, pages: Sequence[PinnedPage]) -> None:
        """Let go of exactly the pages that :meth:`pin` returned, as often as it did."""

    def make_room(self, keys: Sequence[str], sizes: Sequence[int]) -> Sequence[Room | None]:
        """Room for pages that a peer wants to store; None where it is held already or there is no room.

        What was made goes through :meth:`keep` or :meth:`give_up`, once.
        """

    def holds(self, keys: Sequence[str]) -> Sequence[bool]:
        """Which pages are held already."""

    def keep(self, rooms: Sequence[Room], checksums: Sequence[int]) -> Sequence[bool]:
        """The bytes have arrived: store the pages whose checksum is right; True for those, and free the others."""

    def give_up(self, rooms: Sequence[Room]) -> None:
        """The bytes did not arrive: free the rooms."""

    def clear(self, digests: Sequence[str]) -> int:
        """Drop every page of these namespaces; returns how many pages that were."""

    def order(self, body: bytes | bytearray) -> bytes:
        """Carry out an order, which the node understands and this layer does not, and answer it soon."""

    def doubt(self, keys: Sequence[str]) -> int:
        """Check the bytes of these pages, drop what does not match its checksum; returns how many did not."""


class _Closeable(ABC):
    @abstractmethod
    def close(self) -> None:
        """Release everything. Safe to call again, and from any thread."""

    def __enter__(self: _Closing) -> _Closing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Listener(_Closeable):
    """A node's data port. It serves from its own threads from construction until :meth:`close`.

    When :meth:`close` has returned, nothing reads the source's memory any more and every pin is let go.
    """

    address: str
    """The contact address, ``host:port``, that peers are told to connect to."""


class Peer(_Closeable):
    """The connections to one node. Thread-safe: several batches may be under way at once.

    :meth:`close` makes batches that are under way return ``FAILED`` soon; later ones do so at once.
    """

    address: str
    node_id: str
    failure: str
    """Why the last attempt to use the peer failed, for people to read; empty after one that worked."""

    @abstractmethod
    def read(self, batch: Sequence[PageRead], deadline: float, verify: bool) -> list[Outcome]:
        """Read the pages of ``batch`` into their extents; one outcome a page, in order.

        ``deadline`` (``time.monotonic()`` seconds) bounds the whole call. Whatever happened, once this has
        returned nothing writes into the extents any more. With ``verify`` every page's bytes are checked
        against the owner's checksum of them under this key. Never raises for what the network or the peer
        does; raises ``ValueError`` for a batch wrong in itself (extents that do not add up to the size, an
        empty or oversized key).
        """

    @abstractmethod
    def write(self, batch: Sequence[PageWrite], deadline: float) -> list[Outcome]:
        """Have the peer store the pages of ``batch``; one outcome a page, in order.

        ``OK`` also for a page that it held already, ``FULL`` for one it has no room for, ``CORRUPT`` when the bytes
        that arrived do not have the checksum that was given: the peer has dropped them. Bounded and raising like
        :meth:`read`.
        """

    @abstractmethod
    def clear(self, digests: Sequence[str], deadline: float) -> int:
        """Ask the peer to drop these namespaces; returns how many pages it dropped.

        Raises ``Unavailable`` or ``ProtocolError``; the peer may or may not have dropped them then.
        """

    @abstractmethod
    def doubt(self, keys: Sequence[str], deadline: float) -> int:
        """Tell the owner that these pages' bytes were not those of their checksum here; it looks at its own.

        Returns how many of them it found rotten and dropped. Raises ``Unavailable`` or ``ProtocolError``.
        """

    @abstractmethod
    def order(self, body: bytes, deadline: float) -> bytes:
        """Have the peer carry out an order; its answer. Both are opaque here, and bounded.

        Raises ``Unavailable`` or ``ProtocolError``; it may or may not have been carried out then.
        """

    @abstractmethod
    def probe(self, deadline: float) -> None:
        """Make sure that a connection is there and both sides accept each other, without reading anything.

        Raises ``Unavailable`` when the peer does not answer in time, ``ProtocolError`` when a side refuses.
        """


class Transport(ABC):
    """One way to move pages between nodes."""

    scheme: str

    @abstractmethod
    def listen(self, address: str, advertise: str, source: PageSource, credentials: Credentials) -> Listener:
        """Serve ``source`` on ``address`` (``host:port``, port 0 picks a free one).

        ``advertise`` (``host``, ``host:port``, or empty for the address bound) is what peers are told; a
        wildcard address cannot be told, so it needs one. Raises ``ConfigError`` when the address cannot be
        served on.
        """

    @abstractmethod
    def connect(self, address: str, node_id: str, credentials: Credentials) -> Peer:
        """A peer at its contact address; no I/O yet. ``node_id`` is who must answer there.

        Raises ``ProtocolError`` when ``address`` is not one.
        """

    def prepare(self, memory: Memory) -> None:  # noqa: B027
        """Pages will be read into and written from ``memory``: what takes long is done now. May take seconds a GiB."""

    def stats(self) -> dict[str, float]:
        """What it has moved, by name; empty where others count it."""
        return {}

    def close(self) -> None:  # noqa: B027
        """Give back what listeners and peers have shared; they are closed before."""
