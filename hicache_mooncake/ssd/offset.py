"""The ``offset`` store: one preallocated file, or a raw block device, cut into extents; removed object by object.

Objects lie in extents of 4 KiB granules (at most 16 an object, so fragmentation is bounded for any mix of sizes). What
lies where is written into a journal in the same file. Above the high watermark the longest unused objects go, down to
the low one.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from hicache_mooncake.allocator import ExtentAllocator, Span
from hicache_mooncake.errors import ConfigError
from hicache_mooncake.ssd import directory
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
from hicache_mooncake.ssd.checked import Located, cut, failure, read_objects, write_result
from hicache_mooncake.ssd.frames import ROW_BYTES, SPAN_BYTES, well_formed
from hicache_mooncake.ssd.io_base import DiskIO, Transfer
from hicache_mooncake.ssd.local import LocalStore
from hicache_mooncake.ssd.offset_device import Device, open_device
from hicache_mooncake.ssd.offset_format import SMALLEST_SIZE, Stored, spans_of, stored
from hicache_mooncake.ssd.offset_journal import JournalFull
from hicache_mooncake.ssd.offset_recovery import recover

logger = logging.getLogger(__name__)

_ENTRIES_AT_ONCE = 4096
_JOURNAL_FILL = 0.6
"""Share of a journal area that the rows of what is held may take: the rest is for appending."""


class OffsetStore(LocalStore):
    """``config.path`` is a directory, a file, or a block device; always ``lru``."""

    name = "offset"

    def __init__(self, config: StoreConfig, io: DiskIO, hooks: Hooks = NO_HOOKS) -> None:
        super().__init__(config, io, hooks)
        if config.capacity < SMALLEST_SIZE:
            raise ConfigError("ssd_size", config.capacity, f"an offset store takes at least {SMALLEST_SIZE} bytes")
        self._lock = threading.Lock()
        self._journaling = threading.Lock()  # taken before the other one, never after it
        self._objects: OrderedDict[str, Stored] = OrderedDict()
        self._row_bytes = 0
        self._claimed: set[str] = set()
        self._readers_at: dict[int, int] = {}  # first offset -> readers
        self._leaving: dict[int, Stored] = {}  # first offset -> removed, and freed on disk, but still read
        self._unfreed: list[Stored] = []  # removed, and not yet told to the journal
        self._device: Device | None = None
        self._allocator = ExtentAllocator(0)

    # -- opening and closing

    def open(
        self,
        recovered: Callable[[Sequence[Entry]], None] | None = None,
        progress: Callable[[int, int], None] | None = None,
        stopped: Callable[[], bool] | None = None,
    ) -> Recovery:
        try:
            device = open_device(self.config, self.io, self.hooks, self.name)
        except OSError as error:
            raise directory.refusal(self.config.path, error) from error
        try:
            found = recover(device, self.config, self.io, self.hooks, self._scratch, progress)
        except OSError as error:
            device.close()
            raise directory.refusal(self.config.path, error) from error
        except BaseException:
            device.close()
            raise
        self._device = device
        self._journal, self._allocator, recovery = found.journal, found.allocator, found.recovery
        self._data_start = found.journal.geometry.data_start
        with self._lock:
            self._objects = OrderedDict(found.objects)
            self._row_bytes = sum(map(_row_bytes, self._objects.items()))
        self._readers.open()
        self._gate.open()
        if recovered is not None:
            for entries in self.entries():
                recovered(entries)
        return recovery

    def close(self) -> None:
        if self._device is None:
            return
        self._gate.shut(self.CLOSING)
        self._readers.shut(self.CLOSING)
        self._write_down_freed()
        self._device.close()
        self._device = None
        self._scratch.close()

    # -- looking

    def contains(self, keys: Sequence[str]) -> list[bool]:
        objects = self._objects
        return [key in objects for key in keys]

    def find(self, keys: Sequence[str]) -> list[Entry | None]:
        with self._lock:
            found = [(key, self._objects.get(key)) for key in keys]
        return [None if one is None else Entry(key, one[0], one[1]) for key, one in found]

    def entries(self) -> Iterator[list[Entry]]:
        with self._lock:
            everything = sorted(self._objects.items(), key=lambda item: item[1][2])
        for start in range(0, len(everything), _ENTRIES_AT_ONCE):
            yield [Entry(key, one[0], one[1]) for key, one in everything[start : start + _ENTRIES_AT_ONCE]]

    def __len__(self) -> int:
        return len(self._objects)

    def usage(self) -> Usage:
        return Usage(self._allocator.capacity or self.config.capacity, self._allocator.used_bytes, len(self._objects))

    # -- writing

    def write(self, batch: Sequence[StoreWrite], deadline: float) -> list[Result]:
        with self._gate.inside() as entered:
            results: list[Result | None] = [None if entered else Result(Outcome.REFUSED)] * len(batch)
            if entered:
                mine = self._claim(batch, results)
                try:
                    self._write_claimed(batch, mine, results, deadline)
                finally:
                    with self._lock:
                        self._claimed.difference_update(batch[index].key for index in mine)
        final = [result or Result(Outcome.FAILED) for result in results]
        self._count_results("write", final)
        return final

    def _claim(self, batch: Sequence[StoreWrite], results: list[Result | None]) -> list[int]:
        mine = []
        with self._lock:
            for index, item in enumerate(batch):
                if not well_formed(item) or item.size > self._allocator.capacity:
                    results[index] = Result(Outcome.REFUSED)
                elif item.key in self._objects or item.key in self._claimed:
                    results[index] = Result(Outcome.HELD)
                else:
                    self._claimed.add(item.key)
                    mine.append(index)
        return mine

    def _write_claimed(
        self, batch: Sequence[StoreWrite], mine: Sequence[int], results: list[Result | None], deadline: float
    ) -> None:
        placed = self._reserve(batch, mine, results)
        kept: list[tuple[str, Stored]] = []
        try:
            self._write_data(batch, placed, results, deadline)
            kept = [
                (batch[index].key, stored(batch[index].size, batch[index].checksum, spans))
                for index, spans in placed
                if results[index] is None
            ]
            error = self._record(kept)
            for index, _ in placed:
                if results[index] is None:
                    results[index] = failure(error) if error else Result(Outcome.OK)
        finally:
            with self._lock:
                for index, spans in placed:
                    result = results[index]
                    if result is None or result.outcome is not Outcome.OK:
                        self._allocator.free(spans)

    def _reserve(
        self, batch: Sequence[StoreWrite], mine: Sequence[int], results: list[Result | None]
    ) -> list[tuple[int, tuple[Span, ...]]]:
        """Space for objects, making room for them first."""
        self._make_room(sum(ExtentAllocator.footprint(batch[index].size) for index in mine), len(mine))
        placed: list[tuple[int, tuple[Span, ...]]] = []
        taken: set[int] = set()
        for attempt in (1, 2):
            missing = 0
            with self._lock:
                for index in mine:
                    if index not in taken:
                        spans = self._allocator.allocate(batch[index].size)
                        if spans is None:
                            missing += ExtentAllocator.footprint(batch[index].size)
                        else:
                            placed.append((index, spans))
                            taken.add(index)
            if not missing or attempt == 2 or not self._evict(missing):
                break
        for index in mine:
            if index not in taken:
                results[index] = Result(Outcome.FULL)
        return placed

    def _write_data(
        self,
        batch: Sequence[StoreWrite],
        placed: Sequence[tuple[int, tuple[Span, ...]]],
        results: list[Result | None],
        deadline: float,
    ) -> None:
        transfers: list[Transfer] = []
        wanted: list[tuple[int, int]] = []
        for index, spans in placed:
            pieces = cut(batch[index].source, [span.length for span in spans])
            for span, piece in zip(spans, pieces, strict=True):
                transfers.append(Transfer(self._descriptor, self._data_start + span.offset, piece))
                wanted.append((index, span.length))
        if not transfers:
            return
        self.hooks.failpoint("data")
        for (index, length), moved in zip(wanted, self.io.write(transfers, deadline), strict=True):
            results[index] = results[index] or write_result(moved, length)
        if self.config.sync:
            try:
                self.hooks.failpoint("data sync")
                os.fdatasync(self._descriptor)
            except OSError as error:
                for index, _ in placed:
                    results[index] = results[index] or failure(error.errno or 0)

    @property
    def _descriptor(self) -> int:
        return -1 if self._device is None else self._device.descriptor

    def _record(self, objects: Sequence[tuple[str, Stored]]) -> int:
        """Write objects into the journal, then make them visible; returns an ``errno``, 0 when it worked.

        Both under the journal's lock, so that a checkpoint never falls between them.
        """
        if not objects:
            return 0
        with self._journaling:
            try:
                self._flush_freed()
                self._journaled(lambda: self._journal.put(objects))
            except OSError as error:
                logger.warning("SSD store %s: its journal cannot be written: %s", self.config.path, error)
                return error.errno or 5
            self.hooks.failpoint("visible")
            with self._lock:
                self._objects.update(objects)
                self._row_bytes += sum(map(_row_bytes, objects))
        return 0

    def _journaled(self, append: Callable[[], None]) -> None:
        """With the journal's lock: append, after a checkpoint where the area is full. Raises ``OSError``."""
        try:
            append()
        except JournalFull:
            self._checkpoint()
            try:
                append()
            except JournalFull as error:
                raise OSError(28, "a journal area does not even take what is held") from error

    def _checkpoint(self) -> None:
        with self._lock:
            everything = list(self._objects.items())
        self._count("checkpoints")
        try:
            self._journal.checkpoint(everything)
        except JournalFull as error:
            raise OSError(28, "a journal area does not take what is held") from error

    # -- reading

    def read(self, batch: Sequence[StoreRead], deadline: float, *, touch: bool = True) -> list[Result]:
        results: list[Result] = [Result(Outcome.ABSENT)] * len(batch)
        with self._readers.inside() as entered:
            if not entered:
                return results
            chosen: list[int] = []
            pinned: list[Stored] = []
            with self._lock:
                for index, item in enumerate(batch):
                    found = self._objects.get(item.key)
                    if found is None:
                        continue
                    if found[0] != item.size or not well_formed(item):
                        results[index] = Result(Outcome.SIZE)
                        continue
                    if touch:
                        self._objects.move_to_end(item.key)
                    self._readers_at[found[2]] = self._readers_at.get(found[2], 0) + 1
                    chosen.append(index)
                    pinned.append(found)
            try:
                objects = [self._located(batch[index], found) for index, found in zip(chosen, pinned, strict=True)]
                if objects:
                    for index, result in zip(chosen, read_objects(self.io, objects, deadline), strict=True):
                        results[index] = result
            finally:
                self._unpin(pinned)
            self._drop(
                [
                    (batch[index].key, found)
                    for index, found in zip(chosen, pinned, strict=True)
                    if results[index].outcome in (Outcome.CORRUPT, Outcome.FAILED)
                ]
            )
        self._count_results("read", results)
        return results

    def _located(self, item: StoreRead, found: Stored) -> Located:
        spans = spans_of(found)
        pieces = [item.into] if len(spans) == 1 else cut(item.into, [length for _, length in spans])
        transfers = [
            Transfer(self._descriptor, self._data_start + offset, piece)
            for (offset, _), piece in zip(spans, pieces, strict=True)
        ]
        return Located(item.key, item.size, found[1], item.into, transfers)

    def _unpin(self, pinned: Sequence[Stored]) -> None:
        with self._lock:
            for found in pinned:
                first = found[2]
                self._readers_at[first] -= 1
                if not self._readers_at[first]:
                    del self._readers_at[first]
                    leaving = self._leaving.pop(first, None)
                    if leaving is not None:
                        self._allocator.free(_spans(leaving))

    # -- removing

    def remove(self, keys: Sequence[str]) -> int:
        with self._readers.inside() as entered:
            if not entered:
                return 0
            with self._lock:
                held = [(key, self._objects[key]) for key in dict.fromkeys(keys) if key in self._objects]
            return self._drop(held)

    def _drop(self, objects: Sequence[tuple[str, Stored]]) -> int:
        """1. Invisible, 2. forgotten in Redis, 3. in the journal, 4. the space is free with the last reader."""
        gone: list[tuple[str, Stored]] = []
        with self._lock:
            for key, found in objects:
                if self._objects.get(key) == found:
                    del self._objects[key]
                    self._row_bytes -= _row_bytes((key, found))
                    gone.append((key, found))
        if not gone:
            return 0
        self._tell([key for key, _ in gone])
        with self._lock:
            self._unfreed += [found for _, found in gone]
        self._write_down_freed()
        return len(gone)

    def _write_down_freed(self) -> None:
        with self._journaling:
            try:
                self._flush_freed()
            except OSError as error:
                self._count("removals_unwritten")
                logger.warning("SSD store %s: removed objects may come back: %s", self.config.path, error)

    def _flush_freed(self) -> None:
        """With the journal's lock: write down what was removed, and free its space. Raises ``OSError``."""
        with self._lock:
            waiting, self._unfreed = self._unfreed, []
        if not waiting:
            return
        try:
            self._journaled(lambda: self._journal.free([found[2] for found in waiting]))
        except OSError:
            with self._lock:
                self._unfreed = waiting + self._unfreed
            raise
        with self._lock:
            for found in waiting:
                if found[2] in self._readers_at:
                    self._leaving[found[2]] = found
                else:
                    self._allocator.free(_spans(found))

    def _make_room(self, needed: int, count: int) -> None:
        capacity = self._allocator.capacity
        with self._lock:
            used = self._allocator.used_bytes
            crowded = self._row_bytes + count * 256 > _JOURNAL_FILL * self._journal.geometry.area
        if used + needed > capacity * self.config.high_watermark:
            self._evict(used + needed - int(capacity * self.config.low_watermark))
        elif crowded:
            self._evict(used // 10)

    def _evict(self, wanted: int) -> bool:
        """Remove the longest unused objects that nobody reads, of at least ``wanted`` bytes; True if any went."""
        victims: list[tuple[str, Stored]] = []
        with self._lock:
            for key, found in self._objects.items():
                if wanted <= 0:
                    break
                if found[2] not in self._readers_at:
                    victims.append((key, found))
                    wanted -= ExtentAllocator.footprint(found[0])
        self._count("evicted", self._drop(victims))
        return bool(victims)

    # -- in the background

    def flush(self) -> None:
        with self._gate.inside() as entered:
            if entered:
                self._write_down_freed()

    def compact(self, deadline: float) -> int:
        """Write the journal anew. The file keeps its size: its space is given out again, not given back."""
        with self._gate.inside() as entered:
            if entered:
                with self._journaling:
                    try:
                        self._flush_freed()
                        self._checkpoint()
                    except OSError as error:
                        logger.warning("SSD store %s: its journal cannot be written: %s", self.config.path, error)
        return 0


def _row_bytes(item: tuple[str, Stored]) -> int:
    return ROW_BYTES + SPAN_BYTES * max(1, (len(item[1]) - 2) // 2) + len(item[0])


def _spans(found: Stored) -> tuple[Span, ...]:
    return tuple(Span(offset, length) for offset, length in spans_of(found))
