"""The ``bucket`` store: large files written from front to end, removed as a whole.

A write appends a batch to the open bucket: a head that says which objects follow, and the objects. So a bucket that
was never finished is read back batch by batch, and nothing that was answered ``OK`` is lost to a kill. A full bucket is
*sealed*: its last block names the checksum of its index, then the index is written and renamed into place.

Capacity is made by removing whole buckets, the oldest (``fifo``) or the longest unused (``lru``): an SSD is written in
large pieces and erased in large pieces. Objects removed one by one are written into a log beside the buckets.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence

from hicache_mooncake.errors import ConfigError
from hicache_mooncake.ssd import bucket_open, directory
from hicache_mooncake.ssd.base import (
    NO_HOOKS,
    Entry,
    Hooks,
    Outcome,
    Recovery,
    Result,
    StoreConfig,
    StoreRead,
    StoreWrite,
    Usage,
)
from hicache_mooncake.ssd.bucket_compaction import compact
from hicache_mooncake.ssd.bucket_file import (
    ROW_BITS,
    Bucket,
)
from hicache_mooncake.ssd.bucket_index import arrow
from hicache_mooncake.ssd.bucket_removals import Removals
from hicache_mooncake.ssd.bucket_space import BucketSpace
from hicache_mooncake.ssd.bucket_writing import BucketWriter
from hicache_mooncake.ssd.checked import Located, read_objects
from hicache_mooncake.ssd.frames import well_formed
from hicache_mooncake.ssd.io_base import DiskIO, Transfer
from hicache_mooncake.ssd.local import LocalStore

logger = logging.getLogger(__name__)

SMALLEST_CAPACITY = 1 << 20
_SMALLEST_BUCKET = 128 << 10
_ROW_MASK = (1 << ROW_BITS) - 1
_ENTRIES_AT_ONCE = 4096


class BucketStore(LocalStore):
    """``config.eviction`` is ``fifo`` or ``lru``. Buckets are never larger than an eighth of the capacity."""

    name = "bucket"

    def __init__(self, config: StoreConfig, io: DiskIO, hooks: Hooks = NO_HOOKS) -> None:
        super().__init__(config, io, hooks)
        if config.capacity < SMALLEST_CAPACITY:
            raise ConfigError("ssd_size", config.capacity, f"a bucket store takes at least {SMALLEST_CAPACITY} bytes")
        if config.eviction not in ("fifo", "lru"):
            raise ConfigError("ssd_eviction", config.eviction, "fifo or lru is expected")
        arrow()
        size = min(config.bucket_size, max(config.capacity // 8, _SMALLEST_BUCKET))
        self._lock = threading.Lock()
        self._where: dict[str, int] = {}
        self._clock = itertools.count(1)
        self._space = BucketSpace(config, io, hooks, size, self._lock, self._scratch, self._count)
        self._writer = BucketWriter(
            config,
            io,
            hooks,
            self._space,
            self._where,
            self._lock,
            self._scratch,
            self._invisible,
            lambda buckets: self._count("evicted_buckets", buckets),
            self._clock,
            min(max(config.bucket_keys, 1), _ROW_MASK),
        )
        self._removals = Removals(config.path, b"", sync=config.sync)
        self._writing_removals = threading.Lock()
        self._held: directory.Lock | None = None

    # -- opening and closing

    def open(
        self,
        recovered: Callable[[Sequence[Entry]], None] | None = None,
        progress: Callable[[int, int], None] | None = None,
        stopped: Callable[[], bool] | None = None,
    ) -> Recovery:
        path = self.config.path
        directory.prepare(path)
        self._held = directory.lock(path)
        try:
            identity, older = directory.identify(
                path,
                directory.new_identity(self.name, self.config.pool, self.config.node),
                failpoint=self.hooks.failpoint,
                expected=bucket_open.is_ours,
            )
            recovery = Recovery()
            if older:
                recovery.drop("older_format", bucket_open.wipe(path))
                directory.write_identity(path, identity)
            self._removals = Removals(path, identity.owner, sync=self.config.sync)
            self._space.owner = identity.owner
            self._readers.open()
            bucket_open.scan(self, self._space, self._removals, recovery, recovered, progress, stopped)
        except OSError as error:
            self.close()
            raise directory.refusal(path, error) from error
        except BaseException:
            self.close()
            raise
        if stopped is not None and stopped():
            return recovery
        self._gate.open()
        self._write_down_removals(rewrite=bool(self._removals.damaged) or self._removals.worn())
        return recovery

    def adopt(self, bucket: Bucket, removed: set[int]) -> list[Entry]:
        """Take in a bucket that was found on disk; returns its live objects. Of two of one key the later lives."""
        rows, base = bucket.rows, bucket.number << ROW_BITS
        with self._lock:
            where = self._where
            before = len(where)
            plain = not removed and where.keys().isdisjoint(rows.keys)
            if plain:
                where.update(zip(rows.keys, range(base, base + len(rows)), strict=True))
                bucket.live = len(where) - before
            else:
                for row, key in enumerate(rows.keys):
                    if rows.offsets[row] in removed:
                        continue
                    other = where.get(key, -1)
                    if other > base + row:
                        continue
                    if other >= 0:
                        self._space.of(other >> ROW_BITS, bucket).live -= 1
                    where[key] = base + row
                    bucket.live += 1
            self._space.add(bucket)
            if bucket.live == len(rows):
                return [Entry(*entry) for entry in zip(rows.keys, rows.sizes, rows.checksums, strict=True)]
            return [
                Entry(key, rows.sizes[row], rows.checksums[row])
                for row, key in enumerate(rows.keys)
                if where.get(key) == base + row
            ]

    def close(self) -> None:
        if self._held is None:
            return
        self._gate.shut(self.CLOSING)
        self._readers.shut(self.CLOSING)
        self._writer.finish()
        self._space.finish_open_work()
        self._write_down_removals()
        self._space.close()
        self._scratch.close()
        self._held.release()
        self._held = None

    # -- looking

    def contains(self, keys: Sequence[str]) -> list[bool]:
        where = self._where
        return [key in where for key in keys]

    def find(self, keys: Sequence[str]) -> list[Entry | None]:
        with self._lock:
            return [None if position is None else self._entry(position) for position in map(self._where.get, keys)]

    def _entry(self, position: int) -> Entry:
        rows, row = self._space.of(position >> ROW_BITS).rows, position & _ROW_MASK
        return Entry(rows.keys[row], rows.sizes[row], rows.checksums[row])

    def entries(self) -> Iterator[list[Entry]]:
        with self._lock:
            buckets = self._space.all()
        for bucket in buckets:
            rows = bucket.rows
            found = [Entry(rows.keys[row], rows.sizes[row], rows.checksums[row]) for row in self.live_rows(bucket)]
            for start in range(0, len(found), _ENTRIES_AT_ONCE):
                yield found[start : start + _ENTRIES_AT_ONCE]

    def __len__(self) -> int:
        return len(self._where)

    def usage(self) -> Usage:
        return Usage(self.config.capacity, self._space.used, len(self._where))

    # -- writing

    def write(self, batch: Sequence[StoreWrite], deadline: float) -> list[Result]:
        with self._gate.inside() as entered:
            results = self._writer.write(batch, deadline) if entered else [Result(Outcome.REFUSED)] * len(batch)
        self._count_results("write", results)
        return results

    # -- reading

    def read(self, batch: Sequence[StoreRead], deadline: float, *, touch: bool = True) -> list[Result]:
        results: list[Result | None] = [None] * len(batch)
        with self._readers.inside() as entered:
            if not entered:
                return [Result(Outcome.ABSENT)] * len(batch)
            positions = self._pin(batch, results, touch=touch)
            pinned = {position >> ROW_BITS for _, position in positions}
            try:
                self._read_pinned(batch, positions, results, deadline)
            finally:
                self._space.unpin(pinned)
        final = [result or Result(Outcome.FAILED) for result in results]
        self._count_results("read", final)
        return final

    def _pin(self, batch: Sequence[StoreRead], results: list[Result | None], *, touch: bool) -> list[tuple[int, int]]:
        """Which of the batch are held, and where; their buckets stay until :meth:`BucketSpace.unpin`."""
        found: list[tuple[int, int]] = []
        buckets: dict[int, Bucket] = {}
        with self._lock:
            for index, item in enumerate(batch):
                position = self._where.get(item.key)
                if position is None:
                    results[index] = Result(Outcome.ABSENT)
                    continue
                number = position >> ROW_BITS
                bucket = buckets.get(number) or self._space.of(number)
                if bucket.rows.sizes[position & _ROW_MASK] != item.size or not well_formed(item):
                    results[index] = Result(Outcome.SIZE)
                    continue
                buckets[number] = bucket
                found.append((index, position))
            for bucket in buckets.values():
                bucket.readers += 1
                if touch:
                    bucket.used_at = next(self._clock)
        return found

    def _read_pinned(
        self,
        batch: Sequence[StoreRead],
        positions: Sequence[tuple[int, int]],
        results: list[Result | None],
        deadline: float,
    ) -> None:
        objects: list[Located] = []
        order: list[tuple[int, int]] = []
        lost: list[tuple[int, int]] = []
        opened: dict[int, int | None] = {}
        try:
            for index, position in positions:
                number, row = position >> ROW_BITS, position & _ROW_MASK
                if number not in opened:
                    opened[number] = self._space.try_open(number)
                descriptor = opened[number]
                if descriptor is None or descriptor < 0:
                    gone = descriptor is None
                    results[index] = (
                        Result(Outcome.CORRUPT) if gone else Result(Outcome.FAILED, errno=-(descriptor or 0))
                    )
                    lost.append((index, position))
                    continue
                item, rows = batch[index], self._space.pinned_rows(number)
                transfer = Transfer(descriptor, rows.offsets[row], item.into)
                objects.append(Located(item.key, item.size, rows.checksums[row], item.into, (transfer,)))
                order.append((index, position))
            if objects:
                for (index, position), result in zip(order, read_objects(self.io, objects, deadline), strict=True):
                    results[index] = result
                    if result.outcome in (Outcome.CORRUPT, Outcome.FAILED):
                        lost.append((index, position))
        finally:
            for number, descriptor in opened.items():
                if descriptor is not None and descriptor >= 0:
                    self._space.release(number)
        for outcome, for_good in ((Outcome.CORRUPT, True), (Outcome.FAILED, False)):
            self._drop(
                [(batch[index].key, at) for index, at in lost if _is(results[index], outcome)], for_good=for_good
            )

    # -- removing

    def remove(self, keys: Sequence[str]) -> int:
        with self._readers.inside() as entered:
            if not entered:
                return 0
            with self._lock:
                held = [(key, self._where[key]) for key in dict.fromkeys(keys) if key in self._where]
            return self._drop(held, for_good=True)

    def _drop(self, objects: Sequence[tuple[str, int]], *, for_good: bool) -> int:
        """Remove single objects, unless they lie elsewhere by now."""
        gone: list[str] = []
        empty: list[Bucket] = []
        with self._lock:
            for key, position in objects:
                if self._where.get(key) != position:
                    continue
                del self._where[key]
                gone.append(key)
                bucket = self._space.of(position >> ROW_BITS)
                bucket.live -= 1
                if for_good:
                    self._removals.add([(bucket.number, bucket.rows.offsets[position & _ROW_MASK])])
                if for_good and not bucket.live and bucket.sealed:
                    empty.append(bucket)
        if gone:
            self._tell(gone)
            if for_good:
                self._write_down_removals()
            for bucket in empty:
                self.drop_bucket(bucket)
        return len(gone)

    def _invisible(self, bucket: Bucket) -> None:
        """Steps 1 and 2 of removing a bucket: no object of it is found any more, here and then in Redis."""
        base = bucket.number << ROW_BITS
        with self._lock:
            keys = [key for row, key in enumerate(bucket.rows.keys) if self._where.get(key) == base + row]
            for key in keys:
                del self._where[key]
            bucket.live = 0
            self._removals.drop_bucket(bucket.number)
        self._count("evicted", len(keys))
        self._tell(keys)

    def drop_bucket(self, bucket: Bucket) -> None:
        """Remove a bucket with all that is in it."""
        self._space.remove(bucket, self._invisible)

    def shrink(self) -> None:
        """Remove what is above the capacity."""
        self._count("evicted_buckets", self._space.shrink(self._invisible))

    def _write_down_removals(self, *, rewrite: bool = False) -> None:
        with self._writing_removals:
            with self._lock:
                waiting = self._removals.take_unwritten()
                rewrite = rewrite or self._removals.worn()
                everything = self._removals.snapshot() if rewrite else []
            if not waiting and not rewrite:
                return
            try:
                self.hooks.failpoint("removals")
                if rewrite:
                    self._removals.rewrite(everything)
                else:
                    self._removals.write_down(waiting)
            except OSError as error:
                with self._lock:
                    self._removals.give_back(waiting)
                self._count("removals_unwritten", len(waiting))
                logger.warning("SSD store %s: removed objects may come back: %s", self.config.path, error)

    # -- in the background

    def flush(self) -> None:
        with self._gate.inside() as entered:
            if entered:
                self._space.finish_open_work()
                self._write_down_removals()

    def compact(self, deadline: float) -> int:
        return compact(self, self._space, deadline)

    def finish(self) -> None:
        """Seal the bucket that is being filled."""
        self._writer.finish()

    def move(self, batch: Sequence[StoreWrite], deadline: float) -> list[Result]:
        """Write objects that are held once more, into the current bucket, in place of where they lie now."""
        return self._writer.move(batch, deadline, self._removals)

    def live_rows(self, bucket: Bucket) -> list[int]:
        """The rows of a bucket that are still held in it."""
        base = bucket.number << ROW_BITS
        with self._lock:
            return [row for row, key in enumerate(bucket.rows.keys) if self._where.get(key) == base + row]


def _is(result: Result | None, outcome: Outcome) -> bool:
    return result is not None and result.outcome is outcome
