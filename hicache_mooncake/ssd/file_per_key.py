"""The ``file_per_key`` store: an object a file, in two levels of hashed folders, under a name that tells its key.

For looking at, and for few or large pages: a file costs a head, a name and several system calls an object. Files are
written beside their place and renamed into it; the longest unused go first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from hicache_mooncake.errors import ConfigError
from hicache_mooncake.ssd import directory
from hicache_mooncake.ssd.allocation import unlink
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
from hicache_mooncake.ssd.checked import Located, failure, read_objects, write_result
from hicache_mooncake.ssd.file_scan import scan_folder
from hicache_mooncake.ssd.frames import well_formed
from hicache_mooncake.ssd.io_base import ALIGNMENT, DiskIO, Transfer
from hicache_mooncake.ssd.local import LocalStore
from hicache_mooncake.ssd.object_file import (
    LONGEST_NAME,
    TEMPORARY,
    Head,
    encode_head,
    file_name,
    folder,
    folders,
    footprint,
)

logger = logging.getLogger(__name__)

SMALLEST_CAPACITY = 1 << 20
_ENTRIES_AT_ONCE = 4096
_EVICT_AT_LEAST = 16


class FilePerKeyStore(LocalStore):
    """Always ``lru``; the order is that of the last write after a restart."""

    name = "file_per_key"

    def __init__(self, config: StoreConfig, io: DiskIO, hooks: Hooks = NO_HOOKS) -> None:
        super().__init__(config, io, hooks)
        if config.capacity < SMALLEST_CAPACITY:
            raise ConfigError("ssd_size", config.capacity, f"this store takes at least {SMALLEST_CAPACITY} bytes")
        self._lock = threading.Lock()
        self._objects: OrderedDict[str, tuple[int, int]] = OrderedDict()  # key -> size, checksum
        self._claimed: set[str] = set()
        self._readers_of: dict[str, int] = {}
        self._leaving: dict[str, int] = {}  # key -> size: invisible, but the file is still read, or not removable
        self._folders: set[str] = set()  # each takes a block
        self._used = 0
        self._owner = b""
        self._held: directory.Lock | None = None

    # -- opening and closing

    def open(
        self,
        recovered: Callable[[Sequence[Entry]], None] | None = None,
        progress: Callable[[int, int], None] | None = None,
        stopped: Callable[[], bool] | None = None,
    ) -> Recovery:
        started = time.monotonic()
        path = self.config.path
        directory.prepare(path)
        self._held = directory.lock(path)
        recovery = Recovery()
        try:
            identity, older = directory.identify(
                path,
                directory.new_identity(self.name, self.config.pool, self.config.node),
                failpoint=self.hooks.failpoint,
                expected=set(folders()).__contains__,
            )
            self._owner = identity.owner
            self._readers.open()
            self._scan(recovery, recovered, progress, stopped, wipe=older)
            if older:
                directory.write_identity(path, identity)
            self._make_room(0)
        except OSError as error:
            self.close()
            raise directory.refusal(path, error) from error
        except BaseException:
            self.close()
            raise
        recovery.entries = len(self._objects)
        recovery.seconds = time.monotonic() - started
        if stopped is None or not stopped():
            self._gate.open()
        return recovery

    def _scan(
        self,
        recovery: Recovery,
        recovered: Callable[[Sequence[Entry]], None] | None,
        progress: Callable[[int, int], None] | None,
        stopped: Callable[[], bool] | None,
        *,
        wipe: bool,
    ) -> None:
        names = folders()

        def load(name: str) -> tuple[list[tuple[float, Entry]], dict[str, int]]:
            if stopped is not None and stopped():
                return [], {}
            return scan_folder(os.path.join(self.config.path, name), self._owner, wipe=wipe)

        found: list[tuple[float, Entry]] = []
        with ThreadPoolExecutor(max(1, self.config.recovery_threads), "ssd-recovery") as pool:
            for done, (of_one, dropped) in enumerate(pool.map(load, names), 1):
                found += of_one
                for cause, count in dropped.items():
                    recovery.drop(cause, count)
                if progress is not None:
                    progress(done, len(names))
        found.sort(key=lambda one: one[0])
        with self._lock:
            for _, entry in found:
                self._objects[entry.key] = (entry.size, entry.checksum)
                self._used += footprint(entry.size) + self._new_folder(entry.key)
                recovery.bytes += entry.size
        if recovered is not None and found:
            recovered([entry for _, entry in found])

    def close(self) -> None:
        if self._held is None:
            return
        self._gate.shut(self.CLOSING)
        self._readers.shut(self.CLOSING)
        self._scratch.close()
        self._held.release()
        self._held = None

    # -- looking

    def contains(self, keys: Sequence[str]) -> list[bool]:
        objects = self._objects
        return [key in objects for key in keys]

    def find(self, keys: Sequence[str]) -> list[Entry | None]:
        with self._lock:
            found = [(key, self._objects.get(key)) for key in keys]
        return [None if one is None else Entry(key, *one) for key, one in found]

    def entries(self) -> Iterator[list[Entry]]:
        with self._lock:
            everything = sorted(self._objects.items(), key=lambda item: folder(item[0]))
        for start in range(0, len(everything), _ENTRIES_AT_ONCE):
            yield [Entry(key, *one) for key, one in everything[start : start + _ENTRIES_AT_ONCE]]

    def usage(self) -> Usage:
        return Usage(self.config.capacity, self._used, len(self._objects))

    def _path(self, key: str) -> str:
        return os.path.join(self.config.path, folder(key), file_name(key))

    # -- writing

    def write(self, batch: Sequence[StoreWrite], deadline: float) -> list[Result]:
        results: list[Result] = []
        with self._gate.inside() as entered:
            for item in batch:
                results.append(self._write_one(item, deadline) if entered else Result(Outcome.REFUSED))
        self._count_results("write", results)
        return results

    def _write_one(self, item: StoreWrite, deadline: float) -> Result:
        needed = footprint(item.size)
        if not well_formed(item) or len(file_name(item.key)) > LONGEST_NAME or needed > self.config.capacity:
            return Result(Outcome.REFUSED)
        with self._lock:
            # Not while an old file of the key waits for its readers: its removal would take the new one.
            if item.key in self._objects or item.key in self._claimed or item.key in self._leaving:
                return Result(Outcome.HELD if item.key not in self._leaving else Outcome.FULL)
            self._claimed.add(item.key)
        try:
            self._make_room(needed)
            with self._lock:
                if self._used + needed > self.config.capacity:
                    return Result(Outcome.FULL)
                self._used += needed + self._new_folder(item.key)
            result = self._write_file(item, deadline)
            with self._lock:
                if result.outcome is Outcome.OK:
                    self._objects[item.key] = (item.size, item.checksum)
                else:
                    self._used -= needed
            return result
        finally:
            with self._lock:
                self._claimed.discard(item.key)

    def _new_folder(self, key: str) -> int:
        """Bytes that the folders of a key take, the first time."""
        before = len(self._folders)
        self._folders.update((folder(key), folder(key)[:2]))
        return ALIGNMENT * (len(self._folders) - before)

    def _write_file(self, item: StoreWrite, deadline: float) -> Result:
        path = self._path(item.key)
        temporary = path + TEMPORARY
        try:
            self.hooks.failpoint("folder")
            os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
            self.hooks.failpoint("create")
            descriptor = self.io.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                self.hooks.failpoint("data")
                refused = self._write_content(descriptor, item, deadline)
                if refused is None:
                    os.ftruncate(descriptor, ALIGNMENT + item.size)
                    if self.config.sync:
                        os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if refused is None:
                self.hooks.failpoint("rename")
                os.rename(temporary, path)
                if self.config.sync:
                    directory.sync_directory(os.path.dirname(path))
                return Result(Outcome.OK)
        except OSError as error:
            refused = failure(error.errno or 0)
        with contextlib.suppress(OSError):
            unlink(temporary)
        return refused

    def _write_content(self, descriptor: int, item: StoreWrite, deadline: float) -> Result | None:
        head = encode_head(Head(item.key, item.size, item.checksum), self._owner)
        with self._scratch.filled([head]) as [extent]:
            moved = self.io.write(
                [Transfer(descriptor, 0, [extent]), Transfer(descriptor, ALIGNMENT, item.source)], deadline
            )
        return write_result(moved[0], len(head)) or write_result(moved[1], item.size)

    # -- reading

    def read(self, batch: Sequence[StoreRead], deadline: float, *, touch: bool = True) -> list[Result]:
        results: list[Result] = [Result(Outcome.ABSENT)] * len(batch)
        with self._readers.inside() as entered:
            if not entered:
                return results
            pinned: list[tuple[int, tuple[int, int]]] = []
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
                    self._readers_of[item.key] = self._readers_of.get(item.key, 0) + 1
                    pinned.append((index, found))
            try:
                self._read_files(batch, pinned, results, deadline)
            finally:
                self._unpin([batch[index].key for index, _ in pinned])
            lost = (Outcome.CORRUPT, Outcome.FAILED)
            self._drop([(batch[index].key, found) for index, found in pinned if results[index].outcome in lost])
        self._count_results("read", results)
        return results

    def _read_files(
        self,
        batch: Sequence[StoreRead],
        pinned: Sequence[tuple[int, tuple[int, int]]],
        results: list[Result],
        deadline: float,
    ) -> None:
        objects: list[Located] = []
        order: list[int] = []
        opened: list[int] = []
        try:
            for index, (size, checksum) in pinned:
                item = batch[index]
                try:
                    descriptor = self.io.open(self._path(item.key), os.O_RDONLY)
                except FileNotFoundError:
                    results[index] = Result(Outcome.CORRUPT)
                    continue
                except OSError as error:
                    results[index] = Result(Outcome.FAILED, errno=error.errno or 0)
                    continue
                opened.append(descriptor)
                transfer = Transfer(descriptor, ALIGNMENT, item.into)
                objects.append(Located(item.key, size, checksum, item.into, (transfer,)))
                order.append(index)
            if objects:
                for index, result in zip(order, read_objects(self.io, objects, deadline), strict=True):
                    results[index] = result
        finally:
            for descriptor in opened:
                os.close(descriptor)

    def _unpin(self, keys: Sequence[str]) -> None:
        waiting = []
        with self._lock:
            for key in keys:
                self._readers_of[key] -= 1
                if not self._readers_of[key]:
                    del self._readers_of[key]
                    if key in self._leaving:
                        waiting.append(key)
        self._unlink(waiting)

    # -- removing

    def remove(self, keys: Sequence[str]) -> int:
        with self._readers.inside() as entered:
            if not entered:
                return 0
            with self._lock:
                held = [(key, self._objects[key]) for key in dict.fromkeys(keys) if key in self._objects]
            return self._drop(held)

    def _drop(self, objects: Sequence[tuple[str, tuple[int, int]]]) -> int:
        """1. Invisible, 2. forgotten in Redis, 3. the file goes with its last reader."""
        gone: list[tuple[str, int]] = []
        with self._lock:
            for key, found in objects:
                if self._objects.get(key) == found:
                    del self._objects[key]
                    gone.append((key, found[0]))
                    self._leaving[key] = found[0]
        if gone:
            self._tell([key for key, _ in gone])
            with self._lock:
                unread = [key for key, _ in gone if key not in self._readers_of]
            self._unlink(unread)
        return len(gone)

    def _unlink(self, keys: Sequence[str]) -> None:
        for key in keys:
            try:
                self.hooks.failpoint("unlink")
                unlink(self._path(key))
            except OSError as error:
                self._count("unremovable")
                logger.warning("SSD store %s: %s cannot be removed: %s", self.config.path, key, error)
                continue
            with self._lock:
                size = self._leaving.pop(key, None)
                if size is not None:
                    self._used -= footprint(size)

    def _make_room(self, needed: int) -> None:
        """Above the high watermark remove the longest unused that nobody reads, down to the low one."""
        with self._lock:
            if self._used + needed <= self.config.capacity * self.config.high_watermark:
                return
            excess = self._used + needed - int(self.config.capacity * self.config.low_watermark)
            victims = []
            for key, found in self._objects.items():
                if excess <= 0:
                    break
                if key not in self._readers_of:
                    victims.append((key, found))
                    excess -= footprint(found[0])
        self._count("evicted", self._drop(victims))

    def flush(self) -> None:
        with self._gate.inside() as entered:
            if entered:
                with self._lock:
                    stuck = [key for key in self._leaving if key not in self._readers_of]
                self._unlink(stuck)
