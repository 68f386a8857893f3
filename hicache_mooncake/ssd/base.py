"""What every SSD store speaks: batches of objects written from and read into shared memory, and what is held.

Order of events, as in DRAM: bytes written -> index on disk -> visible here (the caller publishes it then); and to
free: invisible here -> Redis (``forget``) -> no reader any more -> the file or its space. So a crash at any step
leaves an object that is whole, or none.

Stores never trust the disk: the checksum (:func:`hicache_mooncake.memory.checksum`, seeded by the object key) of every
object is kept in the index and compared by the reader.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import TracebackType
from typing import ClassVar, NamedTuple, TypeVar

from hicache_mooncake.memory import Extent
from hicache_mooncake.ssd.io_base import DiskIO

MAX_KEY_BYTES = 1024
"""The longest object key in bytes, as between nodes."""

_Store = TypeVar("_Store", bound="SsdStore")


class Outcome(IntEnum):
    """What became of one object of a batch. A read that is not ``OK`` leaves its memory undefined: a miss."""

    OK = 0
    ABSENT = 1
    """Read: not held (any more)."""
    SIZE = 2
    """Read: held with another size than the caller expects."""
    CORRUPT = 3
    """Read: the bytes are not those of the checksum, or the file ends before them. The object has been dropped."""
    FAILED = 4
    """The disk or file system refused, see ``Result.errno`` (EIO, EROFS, EACCES, ...). A read's object is
    dropped, so that it can be written again; a store may find it again at its next start."""
    TIMEOUT = 5
    """The deadline passed first."""
    FULL = 6
    """Write: no room, or ENOSPC, or EDQUOT: what could be removed was not enough. Worth trying again later."""
    HELD = 7
    """Write: held already, or being written by another thread; nothing was written."""
    REFUSED = 8
    """Write: this store does not take it: a reader of a shared directory, not open, or an object over the limits."""


class Result(NamedTuple):
    """``checksum`` is that of the object that was read; ``errno`` the system's reason of ``FAILED`` and ``FULL``."""

    outcome: Outcome
    checksum: int = 0
    errno: int = 0


class Entry(NamedTuple):
    """One object that a store holds."""

    key: str
    size: int
    checksum: int


class StoreWrite(NamedTuple):
    """One object to write: ``size`` bytes in ``source``, which stay as they are until the call returns."""

    key: str
    size: int
    checksum: int
    source: Sequence[Extent]


class StoreRead(NamedTuple):
    """One object to read: exactly ``size`` bytes, scattered over ``into``."""

    key: str
    size: int
    into: Sequence[Extent]


class Usage(NamedTuple):
    """``used`` counts real bytes on disk, files that wait for readers or could not be removed included."""

    capacity: int
    used: int
    entries: int


@dataclass(slots=True)
class Recovery:
    """What :meth:`SsdStore.open` found: objects published, and what was not, by cause."""

    entries: int = 0
    bytes: int = 0
    seconds: float = 0.0
    salvaged: int = 0
    """Of the entries, those found without an index, by looking at the data itself."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Objects, or files where it cannot be told how many objects were in them, by cause."""

    def drop(self, cause: str, count: int = 1) -> None:
        if count:
            self.dropped[cause] = self.dropped.get(cause, 0) + count


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """What an operator says about a store. Sizes are in bytes."""

    path: str
    """Directory of the store; for ``offset`` also a file or a block device."""
    capacity: int
    pool: str = "default"
    node: str = ""
    """Who writes here, for people who look at the directory."""
    high_watermark: float = 0.90
    low_watermark: float = 0.80
    eviction: str = "fifo"
    """``fifo`` or ``lru``; of buckets in ``bucket``; the other stores are always ``lru``."""
    bucket_size: int = 256 << 20
    bucket_keys: int = 4096
    sync: bool = False
    """Make data durable before it is visible. Without it a loss of power costs objects, never right bytes."""
    recovery_threads: int = 4


def _nobody(keys: Sequence[str]) -> None:
    """Nobody is told."""


def _no_failpoint(step: str) -> None:
    """Nothing fails on purpose."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """What a store calls. None of them may call the store back.

    ``forget`` is told the keys that have just become invisible here, before their space is freed; called without a
    lock, from whichever thread removes; what it raises is logged and does not stop the removal. ``failpoint`` is told
    the name of every step that changes the disk, before it is done: for crash tests.
    """

    forget: Callable[[Sequence[str]], None] = _nobody
    failpoint: Callable[[str], None] = _no_failpoint


NO_HOOKS = Hooks()


class SsdStore(ABC):
    """One directory, file or device that holds objects. Thread-safe; many readers and writers at once.

    Nothing is raised by anything but :meth:`open` and the constructor. Descriptors and memory are bounded.
    """

    name: ClassVar[str]
    """What ``ssd_store`` calls it."""
    readable_by_all: ClassVar[bool] = False
    """Other nodes that have the same path mounted read objects without asking the writer."""

    def __init__(self, config: StoreConfig, io: DiskIO, hooks: Hooks = NO_HOOKS) -> None:
        self.config = config
        self.io = io
        self.hooks = hooks

    @abstractmethod
    def open(
        self,
        recovered: Callable[[Sequence[Entry]], None] | None = None,
        progress: Callable[[int, int], None] | None = None,
        stopped: Callable[[], bool] | None = None,
    ) -> Recovery:
        """Lock the path for this process and find what is intact in it.

        ``recovered`` is given the entries in batches, from one thread at a time; they can be read from then on.
        ``progress`` is told how many files (or journal bytes) of how many are done. ``stopped`` is asked between them;
        True ends the scan, and the store is of no use but to be closed. Writes are ``REFUSED`` until this has returned;
        reads miss what was not found yet.

        Raises ``ConfigError`` when the path cannot be used: not writable, locked by another process, another pool's,
        written by a newer version, or holding something else; ``Unavailable`` when the disk fails.
        """

    @abstractmethod
    def close(self) -> None:
        """Write what is still open to disk, unlock, close every descriptor. Reads and writes under way are waited
        for, as long as their own deadlines. Safe to call again, and without :meth:`open`."""

    @abstractmethod
    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Which objects are held."""

    @abstractmethod
    def find(self, keys: Sequence[str]) -> list[Entry | None]:
        """The entries of objects that are held; touches nothing."""

    @abstractmethod
    def entries(self) -> Iterator[list[Entry]]:
        """Everything held, in batches, in the order it lies on disk. What comes or goes meanwhile may be missed."""

    @abstractmethod
    def write(self, batch: Sequence[StoreWrite], deadline: float) -> list[Result]:
        """Write objects, removing old ones to stay within capacity. One result an object, in order.

        ``OK`` and ``HELD``: it can be read now, and (``OK``) is found again after this process is killed.
        """

    @abstractmethod
    def read(self, batch: Sequence[StoreRead], deadline: float, *, touch: bool = True) -> list[Result]:
        """Read objects and verify them. One result an object, in order. ``touch`` counts as a use for ``lru``.

        Nothing writes into the memory any more when this has returned.
        """

    @abstractmethod
    def remove(self, keys: Sequence[str]) -> int:
        """Remove objects, so that they stay removed after a restart; returns how many were held."""

    @abstractmethod
    def flush(self) -> None:
        """Finish what has been open for long (a partly filled bucket), try again to remove what could not be removed.
        To be called every few seconds."""

    def compact(self, deadline: float) -> int:
        """Give back disk space that holds nothing any more; returns the bytes. May take long."""
        return 0

    @abstractmethod
    def usage(self) -> Usage:
        """How full it is."""

    @abstractmethod
    def counters(self) -> dict[str, int]:
        """What happened since the start, by name: ``evicted``, ``corrupt``, ``unremovable``, ..."""

    def __enter__(self: _Store) -> _Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
