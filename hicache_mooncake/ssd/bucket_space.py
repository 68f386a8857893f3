"""The files of a bucket store: which there are, how much disk they take, and how room is made for another one.

Removing a bucket: 1. invisible here, 2. forgotten in Redis (both by the store, ``invisible``), 3. its last reader is
gone, 4. the data file, then the index. A file that cannot be removed stays counted, and the next bucket goes instead;
it is tried again later.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from hicache_mooncake.ssd.allocation import disk_bytes, preallocate, unlink
from hicache_mooncake.ssd.base import Hooks, StoreConfig
from hicache_mooncake.ssd.bucket_file import Bucket, data_path, index_path
from hicache_mooncake.ssd.bucket_index import BucketRows, encode_index, seal_frame
from hicache_mooncake.ssd.descriptors import Descriptors
from hicache_mooncake.ssd.directory import replace_file, sync_directory
from hicache_mooncake.ssd.frames import encode
from hicache_mooncake.ssd.io_base import ALIGNMENT, DiskIO, Transfer
from hicache_mooncake.ssd.local import Scratch, left

logger = logging.getLogger(__name__)

SEAL_SECONDS = 30.0
_TRIES = 4
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)

Invisible = Callable[[Bucket], None]


class BucketSpace:
    """``lock`` is the store's; nothing here does I/O under it. ``current`` changes only with the placing lock held, or
    when its bucket is broken."""

    def __init__(
        self,
        config: StoreConfig,
        io: DiskIO,
        hooks: Hooks,
        bucket_size: int,
        lock: threading.Lock,
        scratch: Scratch,
        count: Callable[[str, int], None],
    ) -> None:
        self.bucket_size = bucket_size // ALIGNMENT * ALIGNMENT
        self.owner = b""
        self.used = 0
        self.next_number = 1
        self.current: Bucket | None = None
        self._config = config
        self._io = io
        self._hooks = hooks
        self._lock = lock
        self._changed = threading.Condition(lock)
        self._scratch = scratch
        self._count = count
        self._buckets: dict[int, Bucket] = {}
        self._removing: set[int] = set()
        self._deleting: set[int] = set()
        self._stuck: set[int] = set()
        self._descriptors = Descriptors(self._open)
        self._high = int(config.capacity * config.high_watermark)
        self._low = int(config.capacity * config.low_watermark)

    # -- buckets; with the lock held

    def of(self, number: int, fresh: Bucket | None = None) -> Bucket:
        """The bucket of this number; ``fresh`` is one that is not added yet."""
        return fresh if fresh is not None and fresh.number == number else self._buckets[number]

    def add(self, bucket: Bucket) -> None:
        self._buckets[bucket.number] = bucket
        self.used += bucket.disk
        self.next_number = max(self.next_number, bucket.number + 1)

    def all(self) -> list[Bucket]:
        """Every visible bucket, the oldest first."""
        return [self._buckets[number] for number in sorted(self._buckets.keys() - self._removing)]

    # -- files

    def _open(self, number: int) -> int:
        path = data_path(self._config.path, number)
        with self._lock:
            writable = not self._buckets[number].sealed
        if writable:
            try:
                return self._io.open(path, os.O_RDWR)
            except OSError as error:
                if error.errno not in _READ_ONLY:
                    raise
        return self._io.open(path, os.O_RDONLY)

    @contextmanager
    def opened(self, number: int) -> Iterator[int]:
        """The data file's descriptor. Raises ``OSError``."""
        descriptor = self._descriptors.acquire(number)
        try:
            yield descriptor
        finally:
            self._descriptors.release(number)

    def try_open(self, number: int) -> int | None:
        """The same until :meth:`release`; None when the file is gone, or the negative ``errno``."""
        try:
            return self._descriptors.acquire(number)
        except FileNotFoundError:
            return None
        except OSError as error:
            return -(error.errno or errno.EIO)

    def release(self, number: int) -> None:
        self._descriptors.release(number)

    def pinned_rows(self, number: int) -> BucketRows:
        """The rows of a bucket that the caller has pinned."""
        with self._lock:
            return self._buckets[number].rows

    def unpin(self, numbers: Iterable[int]) -> None:
        """A reader is done with these buckets; removes those that waited for it."""
        waiting: list[Bucket] = []
        with self._lock:
            for number in numbers:
                bucket = self._buckets[number]
                bucket.readers -= 1
                if bucket.forgotten and not bucket.readers:
                    waiting.append(bucket)
        for bucket in waiting:
            self._delete(bucket)

    # -- writing

    def begin(self, deadline: float, invisible: Invisible) -> int:
        """Make a new bucket the current one; returns how many were removed for it. Raises ``OSError``."""
        removed = self._make_room(self.bucket_size, deadline, invisible)
        for attempt in range(_TRIES):
            try:
                self._create()
                return removed
            except OSError as error:  # the file system is smaller than the capacity, or shared with others
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or attempt == _TRIES - 1:
                    raise
                victims = self._victims(self.used - 1)
                if not victims:
                    raise
                self._remove_all(victims[:1], invisible)
                removed += 1
        raise AssertionError("unreachable")

    def _create(self) -> None:
        with self._lock:
            number = self.next_number
            self.next_number += 1
        path = data_path(self._config.path, number)
        self._hooks.failpoint("create")
        descriptor = self._io.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            self._hooks.failpoint("preallocate")
            preallocate(descriptor, self.bucket_size)
            if self._config.sync:
                sync_directory(self._config.path)
        except BaseException:
            os.close(descriptor)
            unlink(path)
            raise
        bucket = Bucket(number, BucketRows.empty(), end=0, disk=self.bucket_size)
        with self._lock:
            self.add(bucket)
            self.current = bucket
        self._descriptors.put(number, descriptor)

    def retire(self) -> Bucket | None:
        """The current bucket takes no more; returned when it can be sealed now, else its last writer does it."""
        with self._lock:
            bucket, self.current = self.current, None
            if bucket is None:
                return None
            bucket.closed = True
            return None if bucket.writers else bucket

    def wrote(self, bucket: Bucket, *, broken: bool) -> None:
        """A writer is done with the bucket; ``broken``: not all of its bytes are on disk, so no more go there."""
        with self._lock:
            bucket.writers -= 1
            if broken:
                bucket.broken = bucket.closed = True
                if self.current is bucket:
                    self.current = None
            last = bucket.closed and not bucket.writers
        if last:
            self.seal(bucket)

    def seal(self, bucket: Bucket) -> None:
        """Finish a bucket that takes no more: its index is written. What fails is tried again later."""
        with self._lock:
            if bucket.sealed or bucket.sealing or bucket.writers:
                return
            if bucket.number in self._removing or bucket.number not in self._buckets:
                return  # it went to make room before its turn came
            bucket.sealing = True
            rows = bucket.rows
        try:
            if rows.keys:
                self._write_index(bucket, rows)
            sealed = bool(rows.keys)
        except OSError as error:
            sealed = False
            self._count("unsealed", 1)
            logger.warning("SSD store %s: bucket %x stays open: %s", self._config.path, bucket.number, error)
        disk = self._measure(bucket)
        with self._lock:
            bucket.sealing = False
            bucket.sealed = sealed
            self.used += disk - bucket.disk
            bucket.disk = disk
        if not rows.keys:
            self.remove(bucket, lambda _: None)

    def _write_index(self, bucket: Bucket, rows: BucketRows) -> None:
        self._hooks.failpoint("seal")
        index = encode_index(rows, bucket=bucket.number, pool=self._config.pool, owner=self.owner)
        frame = encode(seal_frame(index, rows=len(rows), bucket=bucket.number, owner=self.owner, place=bucket.end))
        with self._scratch.filled([frame]) as [extent], self.opened(bucket.number) as descriptor:
            moved = self._io.write([Transfer(descriptor, bucket.end, [extent])], time.monotonic() + SEAL_SECONDS)[0]
            if moved != len(frame):
                number = -moved if moved < 0 else errno.ENOSPC
                raise OSError(number, os.strerror(number))
            self._hooks.failpoint("truncate")
            os.ftruncate(descriptor, bucket.end + ALIGNMENT)
            if self._config.sync:
                self._hooks.failpoint("seal sync")
                os.fsync(descriptor)
        self._hooks.failpoint("index")
        replace_file(index_path(self._config.path, bucket.number), index, sync=self._config.sync)

    def _measure(self, bucket: Bucket) -> int:
        try:
            data, index = data_path(self._config.path, bucket.number), index_path(self._config.path, bucket.number)
            return disk_bytes(data) + disk_bytes(index)
        except OSError:
            return bucket.disk

    # -- removing

    def remove(self, bucket: Bucket, invisible: Invisible) -> None:
        """Remove a bucket, its files with its last reader."""
        with self._lock:
            if bucket.number in self._removing or bucket.number not in self._buckets:
                return
            self._removing.add(bucket.number)
        invisible(bucket)
        with self._lock:
            bucket.forgotten = True
            unused = not bucket.readers
        if unused:
            self._delete(bucket)

    def _delete(self, bucket: Bucket) -> None:
        number = bucket.number
        with self._lock:
            if number in self._deleting or number not in self._buckets:
                return
            self._deleting.add(number)
        self._descriptors.forget(number)
        try:
            self._hooks.failpoint("unlink data")
            unlink(data_path(self._config.path, number))
            self._hooks.failpoint("unlink index")
            unlink(index_path(self._config.path, number))
            gone = True
        except OSError as error:
            gone = False
            if number not in self._stuck:
                self._count("unremovable", 1)
                logger.warning("SSD store %s: bucket %x cannot be removed: %s", self._config.path, number, error)
        with self._lock:
            self._deleting.discard(number)
            if gone:
                del self._buckets[number]
                self._removing.discard(number)
                self._stuck.discard(number)
                self.used -= bucket.disk
            else:
                self._stuck.add(number)
            self._changed.notify_all()

    def shrink(self, invisible: Invisible) -> int:
        """Remove buckets down to the capacity, after it was lowered; returns how many."""
        return self._remove_all(
            self._victims(self._config.capacity) if self.used > self._config.capacity else [], invisible
        )

    def _make_room(self, needed: int, deadline: float, invisible: Invisible) -> int:
        victims = self._victims(self._low - needed) if self._expected() + needed > self._high else []
        removed = self._remove_all(victims, invisible)
        with self._changed:
            fits = self._changed.wait_for(lambda: self.used + needed <= self._config.capacity, left(deadline))
        if not fits:
            raise OSError(errno.ENOSPC, "buckets that wait for their readers, or cannot be removed, take the capacity")
        return removed

    def _remove_all(self, victims: list[Bucket], invisible: Invisible) -> int:
        for victim in victims:
            self.remove(victim, invisible)
        return len(victims)

    def _expected(self) -> int:
        """Bytes used when the readers of removed buckets are gone."""
        with self._lock:
            leaving = self._removing - self._stuck
            return self.used - sum(self._buckets[number].disk for number in leaving)

    def _victims(self, target: int) -> list[Bucket]:
        """The buckets to remove so that at most ``target`` bytes are used."""
        expected = self._expected()
        with self._lock:
            free = [bucket for bucket in self._buckets.values() if self._can_go(bucket)]
            free.sort(key=lambda bucket: (bucket.used_at if self._config.eviction == "lru" else 0, bucket.number))
            victims: list[Bucket] = []
            for bucket in free:
                if expected <= target:
                    break
                victims.append(bucket)
                expected -= bucket.disk
        return victims

    def _can_go(self, bucket: Bucket) -> bool:
        busy = bucket.writers or bucket.sealing or bucket is self.current
        return not busy and bucket.number not in self._removing

    # -- in the background

    def finish_open_work(self) -> None:
        """Seal and remove what could not be sealed or removed before."""
        with self._lock:
            unsealed = [bucket for bucket in self._buckets.values() if bucket.closed and not bucket.sealed]
            stuck = [self._buckets[number] for number in self._stuck]
        for bucket in unsealed:
            self.seal(bucket)
        for bucket in stuck:
            self._delete(bucket)

    def close(self) -> None:
        self._descriptors.close()
