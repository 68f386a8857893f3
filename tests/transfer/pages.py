"""Real memory to serve and to read into, with content that can be told from the key alone."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterable, Sequence

from hicache_mooncake import memory
from hicache_mooncake.memory import Extent, Memory
from hicache_mooncake.transfer.base import PageRead, PageWrite, PinnedPage, Room

KIB = 1024
MIB = 1024 * KIB
NODE = "alpha~0000abcd"


def content(key: str, size: int) -> bytes:
    return random.Random(key).randbytes(size)


def cut(mem: Memory, start: int, size: int, pieces: int, seed: str) -> list[Extent]:
    """``size`` bytes from ``start`` on as ``pieces`` extents of uneven length, in no order."""
    chance = random.Random(seed)
    marks = sorted(chance.sample(range(1, size), pieces - 1)) if pieces > 1 else []
    extents = [Extent(mem, start + low, high - low) for low, high in zip([0, *marks], [*marks, size], strict=True)]
    chance.shuffle(extents)
    return extents


def fill(extents: Iterable[Extent], data: bytes) -> None:
    done = 0
    for extent in extents:
        extent.view[:] = data[done : done + extent.length]
        done += extent.length


def joined(extents: Iterable[Extent]) -> bytes:
    return b"".join(bytes(extent.view) for extent in extents)


class Segment:
    """A node's memory as a transport sees it: a PageSource that counts its pins."""

    def __init__(self, size: int, node_id: str = NODE) -> None:
        self.node_id = node_id
        self.memory = memory.create("segment", size)
        self.pages: dict[str, PinnedPage] = {}
        self.pins: Counter[str] = Counter()
        self.pinned_ever = 0
        self.rooms = 0
        self.cleared: list[list[str]] = []
        self._used = 0
        self._lock = threading.Lock()

    def put(self, key: str, size: int, pieces: int = 1) -> None:
        extents = cut(self.memory, self._used, size, pieces, f"put {key}")
        self._used += size
        fill(extents, content(key, size))
        self.pages[key] = PinnedPage(size, memory.checksum(key, extents), extents, key)

    def pin(self, keys: Sequence[str]) -> list[PinnedPage | None]:
        with self._lock:
            pages = [self.pages.get(key) for key in keys]
            pinned = [key for key, page in zip(keys, pages, strict=True) if page is not None]
            self.pins.update(pinned)
            self.pinned_ever += len(pinned)
            return pages

    def unpin(self, pages: Sequence[PinnedPage]) -> None:
        with self._lock:
            self.pins.subtract([str(page.handle) for page in pages])
            assert min(self.pins.values(), default=0) >= 0

    @property
    def pinned(self) -> int:
        with self._lock:
            return sum(self.pins.values())

    def clear(self, digests: Sequence[str]) -> int:
        with self._lock:
            self.cleared.append(list(digests))
            doomed = [key for key in self.pages if key.split(":")[0] in digests]
            for key in doomed:
                del self.pages[key]
            return len(doomed)

    def holds(self, keys: Sequence[str]) -> list[bool]:
        with self._lock:
            return [key in self.pages for key in keys]

    def make_room(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Room | None]:
        rooms: list[Room | None] = []
        with self._lock:
            for key, size in zip(keys, sizes, strict=True):
                if key in self.pages or self._used + size > self.memory.size:
                    rooms.append(None)
                    continue
                rooms.append(Room(key, size, cut(self.memory, self._used, size, 1 + size % 3, key)))
                self._used += size
                self.rooms += 1
        return rooms

    def keep(self, rooms: Sequence[Room], checksums: Sequence[int]) -> list[bool]:
        kept = []
        for room, expected in zip(rooms, checksums, strict=True):
            right = memory.checksum(room.key, room.extents) == expected
            kept.append(right)
            with self._lock:
                self.rooms -= 1
                if right:
                    self.pages[room.key] = PinnedPage(room.size, expected, room.extents, room.key)
        return kept

    def give_up(self, rooms: Sequence[Room]) -> None:
        with self._lock:
            self.rooms -= len(rooms)

    def order(self, body: bytes | bytearray) -> bytes:
        return bytes(reversed(body))

    def doubt(self, keys: Sequence[str]) -> int:
        with self._lock:
            rotten = [
                key
                for key in keys
                if key in self.pages and memory.checksum(key, self.pages[key].extents) != self.pages[key].checksum
            ]
            for key in rotten:
                del self.pages[key]
            return len(rotten)

    def close(self) -> None:
        self.pages.clear()
        self.memory.close()


class Landing:
    """Where a reader's pages arrive."""

    def __init__(self, size: int) -> None:
        self.memory = memory.create("landing", size)
        self._used = 0

    def want(self, key: str, size: int, pieces: int = 1) -> PageRead:
        extents = cut(self.memory, self._used, size, pieces, f"want {key} {self._used}")
        self._used += size
        return PageRead(key, size, extents)

    def offer(self, key: str, size: int, pieces: int = 1) -> PageWrite:
        """A page with its content, to be written to a peer."""
        extents = cut(self.memory, self._used, size, pieces, f"offer {key} {self._used}")
        self._used += size
        fill(extents, content(key, size))
        return PageWrite(key, size, memory.checksum(key, extents), extents)

    def reset(self) -> None:
        self._used = 0

    def close(self) -> None:
        self.memory.close()


def arrived(read: PageRead) -> bool:
    return joined(read.into) == content(read.key, read.size)
