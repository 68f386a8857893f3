"""How objects get into buckets: claimed, laid out, written, made visible."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from itertools import count

from hicache_mooncake.memory import Extent
from hicache_mooncake.ssd.base import Hooks, Outcome, Result, StoreConfig, StoreWrite
from hicache_mooncake.ssd.bucket_file import ROW_BITS, Batch, Bucket, lay_out, plan, smallest_bucket
from hicache_mooncake.ssd.bucket_index import batch_frame
from hicache_mooncake.ssd.bucket_removals import Removals
from hicache_mooncake.ssd.bucket_space import BucketSpace
from hicache_mooncake.ssd.checked import failure, write_result
from hicache_mooncake.ssd.frames import well_formed
from hicache_mooncake.ssd.io_base import DiskIO, Transfer
from hicache_mooncake.ssd.local import Scratch


class BucketWriter:
    """The writing side of a bucket store; ``lock`` and ``where`` are the store's.

    1. Under the store's lock keys are claimed, so that two threads never write one. 2. Under the placing lock a batch
    gets its place at the end of the current bucket; a bucket that is full is followed by a new one. 3. Without a lock
    the bytes are written, several threads at once. 4. Under the store's lock what was written becomes visible. The last
    writer of a full bucket seals it.
    """

    def __init__(
        self,
        config: StoreConfig,
        io: DiskIO,
        hooks: Hooks,
        space: BucketSpace,
        where: dict[str, int],
        lock: threading.Lock,
        scratch: Scratch,
        invisible: Callable[[Bucket], None],
        evicted: Callable[[int], None],
        clock: count[int],
        key_limit: int,
    ) -> None:
        self._config = config
        self._io = io
        self._hooks = hooks
        self._space = space
        self._where = where
        self._lock = lock
        self._scratch = scratch
        self._invisible = invisible
        self._evicted = evicted
        self._clock = clock
        self._key_limit = key_limit
        self._claimed: set[str] = set()
        self._placing = threading.Lock()  # taken before the store's lock, never after it

    def write(self, batch: Sequence[StoreWrite], deadline: float) -> list[Result]:
        """Objects that are not held yet."""
        results: list[Result | None] = [None] * len(batch)
        claimed = self._claim(batch, results)
        try:
            self._write_placed(batch, claimed, results, deadline, None)
        finally:
            with self._lock:
                self._claimed.difference_update(batch[index].key for index in claimed)
        return [result or Result(Outcome.FAILED) for result in results]

    def move(self, batch: Sequence[StoreWrite], deadline: float, removals: Removals) -> list[Result]:
        """Objects that are held in another bucket; they are found in the new one from then on."""
        results: list[Result | None] = [None] * len(batch)
        self._write_placed(batch, range(len(batch)), results, deadline, removals)
        return [result or Result(Outcome.FAILED) for result in results]

    def finish(self) -> None:
        """Seal the current bucket."""
        with self._placing:
            last = self._space.retire()
        if last is not None:
            self._space.seal(last)

    def _claim(self, batch: Sequence[StoreWrite], results: list[Result | None]) -> list[int]:
        """The objects of a batch that this call writes: neither held, nor being written, nor beyond the limits."""
        mine = []
        with self._lock:
            for index, item in enumerate(batch):
                if not well_formed(item) or smallest_bucket(item.size, item.key) > self._space.bucket_size:
                    results[index] = Result(Outcome.REFUSED)
                elif item.key in self._where or item.key in self._claimed:
                    results[index] = Result(Outcome.HELD)
                else:
                    self._claimed.add(item.key)
                    mine.append(index)
        return mine

    def _write_placed(
        self,
        batch: Sequence[StoreWrite],
        items: Sequence[int],
        results: list[Result | None],
        deadline: float,
        removals: Removals | None,
    ) -> None:
        """Bucket by bucket: what is written already can make room for what comes, however large the batch is."""
        waiting = list(items)
        while waiting:
            try:
                placed = self._place(batch, waiting, deadline)
            except OSError as error:
                for index in waiting:
                    results[index] = failure(error.errno or 0)
                return
            waiting = waiting[len(placed.items) :]
            shown = False
            try:
                with self._scratch.filled([placed.head]) as [head]:
                    self._write_batch(batch, placed, head, results, deadline)
                shown = True
                self._show(batch, placed, results, removals)
            finally:
                if not shown:
                    self._space.wrote(placed.bucket, broken=True)

    def _place(self, batch: Sequence[StoreWrite], waiting: Sequence[int], deadline: float) -> Batch:
        """Set aside space for as many of the waiting objects as fit in one bucket. Raises ``OSError``."""
        full: list[Bucket] = []
        try:
            with self._placing:
                while True:
                    bucket = self._space.current
                    fitting = plan(bucket, batch, waiting, self._space.bucket_size, self._key_limit) if bucket else 0
                    if not bucket or not fitting:
                        retired = self._space.retire()
                        if retired is not None:
                            full.append(retired)
                        self._evicted(self._space.begin(deadline, self._invisible))
                        continue
                    with self._lock:
                        if bucket.closed:  # another thread's write to it has just failed
                            continue
                        bucket.writers += 1
                    chosen, place = waiting[:fitting], bucket.end
                    offsets, payload, bucket.end = lay_out(batch, chosen, place)
                    bucket.planned += fitting
                    head = batch_frame(
                        payload, rows=fitting, bucket=bucket.number, owner=self._space.owner, place=place
                    )
                    return Batch(bucket, place, head, chosen, offsets)
        finally:
            for bucket in full:
                self._space.seal(bucket)

    def _write_batch(
        self, batch: Sequence[StoreWrite], placed: Batch, head: Extent, results: list[Result | None], deadline: float
    ) -> None:
        bucket = placed.bucket
        try:
            with self._space.opened(bucket.number) as descriptor:
                transfers = [Transfer(descriptor, placed.place, [head])]
                transfers += [
                    Transfer(descriptor, offset, batch[index].source)
                    for index, offset in zip(placed.items, placed.offsets, strict=True)
                ]
                self._hooks.failpoint("data")
                moved = self._io.write(transfers, deadline)
                refused = write_result(moved[0], head.length)
                for index, count in zip(placed.items, moved[1:], strict=True):
                    results[index] = refused or write_result(count, batch[index].size) or Result(Outcome.OK)
                if self._config.sync:
                    self._hooks.failpoint("data sync")
                    os.fdatasync(descriptor)
        except OSError as error:
            for index in placed.items:
                results[index] = failure(error.errno or 0)

    def _show(
        self, batch: Sequence[StoreWrite], placed: Batch, results: list[Result | None], removals: Removals | None
    ) -> None:
        bucket, rows = placed.bucket, placed.bucket.rows
        self._hooks.failpoint("visible")
        broken = False
        with self._lock:
            for index, offset in zip(placed.items, placed.offsets, strict=True):
                result = results[index]
                if result is None or result.outcome is not Outcome.OK:
                    broken = True
                    continue
                item = batch[index]
                if removals is not None:  # moved from another bucket
                    old = self._where.get(item.key)
                    if old is None:  # and removed meanwhile: the head that is on disk must not bring it back
                        removals.add([(bucket.number, offset)])
                        continue
                    self._space.of(old >> ROW_BITS).live -= 1
                self._where[item.key] = bucket.number << ROW_BITS | len(rows)
                rows.append(item.key, item.size, item.checksum, offset)
                bucket.live += 1
            bucket.used_at = next(self._clock)
        self._space.wrote(bucket, broken=broken)
