"""The ``shared`` store: a directory on a distributed file system, written by one node and read by all that mount it.

Files are those of ``file_per_key``. Their place follows from the key, and their head says key, size and checksum: so a
node that is not the writer needs no index, and no word with it, to read an object and to know that it is the right one.
Who opens the directory first writes; the others read, and see what the writer writes and removes as it happens.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from hicache_mooncake.errors import ConfigError
from hicache_mooncake.memory import Extent
from hicache_mooncake.ssd import directory
from hicache_mooncake.ssd.base import Entry, Outcome, Recovery, Result, StoreRead
from hicache_mooncake.ssd.checked import Located, read_objects
from hicache_mooncake.ssd.file_per_key import FilePerKeyStore
from hicache_mooncake.ssd.frames import well_formed
from hicache_mooncake.ssd.io_base import ALIGNMENT, Transfer
from hicache_mooncake.ssd.object_file import LONGEST_NAME, decode_head, file_name


class SharedStore(FilePerKeyStore):
    """``writes`` says which role this node got at :meth:`open`; as a reader every write is ``REFUSED``."""

    name = "shared"
    readable_by_all = True
    writes = False

    def open(
        self,
        recovered: Callable[[Sequence[Entry]], None] | None = None,
        progress: Callable[[int, int], None] | None = None,
        stopped: Callable[[], bool] | None = None,
    ) -> Recovery:
        directory.prepare(self.config.path)
        wanted = directory.new_identity(self.name, self.config.pool, self.config.node)
        try:
            lock = directory.Lock.take(os.path.join(self.config.path, directory.LOCK_FILE))
        except OSError as error:
            raise directory.refusal(self.config.path, error) from error
        if lock is not None:
            lock.release()
            self.writes = True
            return super().open(recovered, progress, stopped)
        found = directory.read_identity(self.config.path)
        if found is None:
            raise ConfigError("ssd_path", self.config.path, "its writer has not finished opening it", hint="try again")
        directory.check(self.config.path, found, wanted)
        self._owner = found.owner
        self._readers.open()
        return Recovery()

    def close(self) -> None:
        if self.writes:
            super().close()
        else:
            self._readers.shut(self.CLOSING)
            self._scratch.close()

    def read(self, batch: Sequence[StoreRead], deadline: float, *, touch: bool = True) -> list[Result]:
        if self.writes:
            return super().read(batch, deadline, touch=touch)
        results: list[Result] = [Result(Outcome.ABSENT)] * len(batch)
        with self._readers.inside() as entered:
            if entered:
                self._read_as_guest(batch, results, deadline)
        self._count_results("read", results)
        return results

    def _read_as_guest(self, batch: Sequence[StoreRead], results: list[Result], deadline: float) -> None:
        """Open by name, read the heads, then what they announce. Nothing is removed: that is the writer's to do."""
        opened: list[tuple[int, int]] = []
        try:
            for index, item in enumerate(batch):
                if not well_formed(item) or len(file_name(item.key)) > LONGEST_NAME:
                    continue
                try:
                    opened.append((index, self.io.open(self._path(item.key), os.O_RDONLY)))
                except FileNotFoundError:
                    continue
                except OSError as error:
                    results[index] = Result(Outcome.FAILED, errno=error.errno or 0)
            if not opened:
                return
            with self._scratch.borrowed(ALIGNMENT * len(opened)) as block:
                heads = [Extent(block, ALIGNMENT * number, ALIGNMENT) for number in range(len(opened))]
                transfers = [Transfer(fd, 0, [head]) for (_, fd), head in zip(opened, heads, strict=True)]
                moved = self.io.read(transfers, deadline)
                found = [decode_head(bytes(head.view), self._owner) for head in heads]
            objects: list[Located] = []
            order: list[int] = []
            for (index, descriptor), count, head in zip(opened, moved, found, strict=True):
                item = batch[index]
                if count < 0:
                    results[index] = Result(Outcome.FAILED, errno=-count)
                elif count < ALIGNMENT or head is None or head.key != item.key:
                    results[index] = Result(Outcome.CORRUPT)
                elif head.size != item.size:
                    results[index] = Result(Outcome.SIZE)
                else:
                    transfer = Transfer(descriptor, ALIGNMENT, item.into)
                    objects.append(Located(item.key, item.size, head.checksum, item.into, (transfer,)))
                    order.append(index)
            if objects:
                for index, result in zip(order, read_objects(self.io, objects, deadline), strict=True):
                    results[index] = result
        finally:
            for _, descriptor in opened:
                os.close(descriptor)

    def contains(self, keys: Sequence[str]) -> list[bool]:
        if self.writes:
            return super().contains(keys)
        return [len(file_name(key)) <= LONGEST_NAME and os.path.exists(self._path(key)) for key in keys]
