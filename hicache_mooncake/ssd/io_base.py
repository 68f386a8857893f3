"""What every way of disk I/O speaks: batches of transfers between files and shared memory.

A transfer is one contiguous range of a file and the pieces of memory that its bytes lie in, in order. Stores keep
every range's start on :data:`ALIGNMENT`; lengths and memory may be anything, and it is the I/O's business to bounce
what O_DIRECT does not take.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import ClassVar, NamedTuple, TypeVar

from hicache_mooncake.memory import Extent

ALIGNMENT = 4096
"""Bytes that O_DIRECT wants offsets, lengths and addresses to be a multiple of: the largest sector in use, and a
system page."""

_IO = TypeVar("_IO", bound="DiskIO")


class Transfer(NamedTuple):
    """The file range ``offset`` .. ``offset + sum of the extents' lengths`` of ``fd``; ``offset`` is aligned."""

    fd: int
    offset: int
    extents: Sequence[Extent]


def padded(length: int) -> int:
    """``length`` rounded up to the alignment."""
    return -(-length // ALIGNMENT) * ALIGNMENT


class DiskIO(ABC):
    """One way to do disk I/O. Thread-safe: many threads read and write at once.

    Results are one number a transfer, in order: the bytes moved (its whole length, or fewer where a read met the end
    of the file), or the negative ``errno`` it failed with. ``-ETIMEDOUT`` is the deadline. Nothing is raised for what
    the disk or the file system does.
    """

    kind: ClassVar[str] = "other"
    """What logs and metrics call it."""

    @abstractmethod
    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        """Open a file or block device for transfers: ``O_DIRECT`` where it works there, always ``O_CLOEXEC``.

        ``flags`` are those of ``os.open`` without these two. The descriptor is the caller's to close, with
        ``os.close``, when no transfer uses it. Raises ``OSError``.
        """

    @abstractmethod
    def read(self, batch: Sequence[Transfer], deadline: float) -> list[int]:
        """Read file ranges into memory. Nothing writes into the memory any more when this has returned.

        ``deadline`` (``time.monotonic()`` seconds) bounds the call as far as the kernel lets go of a request; a
        request that the device holds on to is waited for, because it still writes into memory that is given back.
        """

    @abstractmethod
    def write(self, batch: Sequence[Transfer], deadline: float) -> list[int]:
        """Write memory to file ranges. In no order, and durable only after an ``fdatasync`` of the caller.

        The file's bytes between a range's end and the next multiple of the alignment may become zeros: the caller
        leaves them to the range.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything. No transfer is under way."""

    def __enter__(self: _IO) -> _IO:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
