"""What a bucket store does when it is opened: bring its directory in order and take in every bucket that is whole."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from hicache_mooncake.ssd.allocation import disk_bytes
from hicache_mooncake.ssd.base import Entry, Recovery
from hicache_mooncake.ssd.bucket_file import Bucket, data_path, index_path, parse_name
from hicache_mooncake.ssd.bucket_index import BucketRows
from hicache_mooncake.ssd.bucket_recovery import Found, load_bucket
from hicache_mooncake.ssd.bucket_removals import LOG_FILE, Removals
from hicache_mooncake.ssd.bucket_space import BucketSpace

if TYPE_CHECKING:
    from hicache_mooncake.ssd.bucket import BucketStore

logger = logging.getLogger(__name__)

_AHEAD = 16
"""Buckets loaded before the one that is taken in, a thread: memory stays bounded when one is slow."""


def is_ours(name: str) -> bool:
    """Whether a bucket store writes files of this name."""
    return parse_name(name) is not None or name.startswith(LOG_FILE)


def wipe(path: str) -> int:
    """Remove every file of a store whose format is not read any more; returns how many."""
    names = [name for name in os.listdir(path) if is_ours(name)]
    for name in names:
        os.unlink(os.path.join(path, name))
    return len(names)


def scan(
    store: BucketStore,
    space: BucketSpace,
    removals: Removals,
    recovery: Recovery,
    recovered: Callable[[Sequence[Entry]], None] | None,
    progress: Callable[[int, int], None] | None,
    stopped: Callable[[], bool] | None,
) -> None:
    """Take in what is on disk, the youngest bucket first. Raises ``OSError``."""
    started = time.monotonic()
    path = store.config.path
    numbers = _tidy(path, recovery)
    space.next_number = max([*numbers, 0]) + 1
    removals.load()
    removals.keep_buckets(set(numbers))
    recovery.drop("damaged_removal_record", removals.damaged)
    for done, (number, result) in enumerate(_load_all(path, numbers, space.owner, store.config.recovery_threads), 1):
        if stopped is not None and stopped():
            break
        _take_in(store, number, result, removals.of_bucket(number), recovery, recovered)
        if progress is not None:
            progress(done, len(numbers))
    space.finish_open_work()
    store.shrink()
    recovery.entries = len(store)
    recovery.seconds = time.monotonic() - started


def _take_in(
    store: BucketStore,
    number: int,
    result: Found | OSError,
    removed: set[int],
    recovery: Recovery,
    recovered: Callable[[Sequence[Entry]], None] | None,
) -> None:
    if isinstance(result, OSError):
        # Its bytes still count, and it goes when its turn comes.
        recovery.drop("unreadable_bucket")
        logger.warning("SSD store %s: bucket %x cannot be read: %s", store.config.path, number, result)
        with contextlib.suppress(OSError):
            disk = disk_bytes(data_path(store.config.path, number))
            lost = Bucket(number, BucketRows.empty(), end=0, disk=disk)
            lost.closed = lost.sealed = True
            store.adopt(lost, set())
        return
    if result.foreign:
        recovery.drop("foreign_bucket")
        logger.warning("SSD store %s: bucket %x is another store's; left alone", store.config.path, number)
        return
    recovery.drop("torn", result.dropped)
    bucket = Bucket(number, result.rows, end=result.end, disk=result.disk)
    bucket.closed = True
    bucket.sealed = result.sealed
    bucket.used_at = -1  # unused since the start: before everything that was used since
    entries = store.adopt(bucket, removed)
    if not result.sealed:
        recovery.salvaged += len(entries)
    if not entries:
        store.drop_bucket(bucket)
    elif recovered is not None:
        recovered(entries)
    recovery.bytes += sum(entry.size for entry in entries)


def _tidy(path: str, recovery: Recovery) -> list[int]:
    """Remove files that are of no use; returns the numbers of the buckets, the youngest first."""
    data: set[int] = set()
    indexes: set[int] = set()
    for name in os.listdir(path):
        found = parse_name(name)
        if found is None:
            continue
        number, kind = found
        if kind == "data":
            data.add(number)
        elif kind == "index":
            indexes.add(number)
        else:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(path, name))
    for number in indexes - data:
        recovery.drop("index_without_data")
        with contextlib.suppress(OSError):
            os.unlink(index_path(path, number))
    return sorted(data, reverse=True)


def _load_all(path: str, numbers: Sequence[int], owner: bytes, threads: int) -> Iterator[tuple[int, Found | OSError]]:
    """Every bucket in this order, loaded by several threads a little ahead."""

    def load(number: int) -> Found | OSError:
        try:
            return load_bucket(data_path(path, number), index_path(path, number), number, owner)
        except OSError as error:
            return error

    with ThreadPoolExecutor(max(threads, 1), "ssd-recovery") as pool:
        ahead: list[tuple[int, Future[Found | OSError]]] = []
        waiting = iter(numbers)
        try:
            for number in waiting:
                ahead.append((number, pool.submit(load, number)))
                if len(ahead) >= _AHEAD * max(threads, 1):
                    first, future = ahead.pop(0)
                    yield first, future.result()
            for number, future in ahead:
                yield number, future.result()
        finally:
            for _, future in ahead:
                future.cancel()
