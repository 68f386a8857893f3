"""Which objects of a bucket store were removed one by one: buckets are written once, so a log beside them tells.

The log is appended to, and written anew without what no longer matters (rows of buckets that are gone). A damaged
record costs only itself: its objects come back at the next start, with the right bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from hicache_mooncake.ssd.directory import replace_file, write_all
from hicache_mooncake.ssd.frames import (
    MAGIC,
    Frame,
    Kind,
    announced_length,
    decode,
    decode_numbers,
    encode,
    encode_numbers,
)

LOG_FILE = "removed.log"
_REWRITE_ABOVE = 1 << 20
"""Bytes of log below which it is not worth writing anew."""

Removed = tuple[int, int]
"""Bucket number and offset of an object."""


class Removals:
    """Not thread-safe: the store's lock is held around all but :meth:`write_down`, which has one caller at a time."""

    def __init__(self, directory: str, owner: bytes, *, sync: bool) -> None:
        self._path = os.path.join(directory, LOG_FILE)
        self._owner = owner
        self._sync = sync
        self._of_bucket: dict[int, set[int]] = {}
        self._unwritten: list[Removed] = []
        self._length = 0
        self.damaged = 0

    def load(self) -> None:
        """Read the log. Raises ``OSError``."""
        try:
            with open(self._path, "rb") as file:
                content = file.read()
        except FileNotFoundError:
            return
        self._length = len(content)
        at = 0
        while at < len(content):
            frame = decode(content[at : at + announced_length(content[at : at + 64])], owner=self._owner, place=at)
            if frame is None or frame.kind is not Kind.REMOVED:
                self.damaged += 1
                at = content.find(MAGIC, at + 1)
                if at < 0:
                    break
                continue
            numbers = decode_numbers(frame.payload)
            for bucket, offset in zip(numbers[::2], numbers[1::2], strict=True):
                self._of_bucket.setdefault(bucket, set()).add(offset)
            at += len(encode(frame))

    def of_bucket(self, bucket: int) -> set[int]:
        """Offsets of the objects of a bucket that were removed."""
        return self._of_bucket.get(bucket, set())

    def add(self, removed: Iterable[Removed]) -> None:
        """Remember, to be written down."""
        for bucket, offset in removed:
            self._of_bucket.setdefault(bucket, set()).add(offset)
            self._unwritten.append((bucket, offset))

    def drop_bucket(self, bucket: int) -> None:
        """The bucket is gone."""
        self._of_bucket.pop(bucket, None)

    def keep_buckets(self, buckets: set[int]) -> None:
        """All other buckets are gone."""
        for bucket in self._of_bucket.keys() - buckets:
            del self._of_bucket[bucket]

    def take_unwritten(self) -> list[Removed]:
        taken, self._unwritten = self._unwritten, []
        return taken

    def give_back(self, removed: list[Removed]) -> None:
        """They could not be written down: to be tried again."""
        self._unwritten = [pair for pair in removed if pair[0] in self._of_bucket] + self._unwritten

    def worn(self) -> bool:
        """Whether most of the log says nothing any more."""
        return self._length > max(_REWRITE_ABOVE, 4 * 16 * sum(map(len, self._of_bucket.values())))

    def snapshot(self) -> list[Removed]:
        return [(bucket, offset) for bucket, offsets in self._of_bucket.items() for offset in offsets]

    def write_down(self, removed: list[Removed]) -> None:
        """Append to the log. Raises ``OSError``; a record cut off by it is passed over when the log is read."""
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            place = os.lseek(descriptor, 0, os.SEEK_END)
            content = self._record(removed, place)
            write_all(descriptor, content)
            if self._sync:
                os.fdatasync(descriptor)
            self._length = place + len(content)
        finally:
            os.close(descriptor)

    def rewrite(self, removed: list[Removed]) -> None:
        """Replace the log by one record. Raises ``OSError``."""
        content = self._record(removed, 0) if removed else b""
        replace_file(self._path, content, sync=self._sync)
        self._length = len(content)

    def _record(self, removed: list[Removed], place: int) -> bytes:
        payload = encode_numbers(number for pair in removed for number in pair)
        return encode(Frame(Kind.REMOVED, self._owner, 0, place, len(removed), payload))
