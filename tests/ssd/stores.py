"""What the tests of the SSD stores need: pages with known bytes, stores on real files, I/O that can be held up."""

from __future__ import annotations

import os
import random
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hicache_mooncake import memory
from hicache_mooncake.memory import Extent, Memory
from hicache_mooncake.ssd import registry
from hicache_mooncake.ssd.base import Hooks, Outcome, SsdStore, StoreConfig, StoreRead, StoreWrite
from hicache_mooncake.ssd.io_base import DiskIO, Transfer
from hicache_mooncake.ssd.io_threads import ThreadIO

STORES = ("bucket", "offset", "file_per_key", "shared")
CAPACITY = 16 << 20
PAGE = 64 << 10


def key_of(number: int, namespace: str = "00112233aabbccdd") -> str:
    return f"{namespace}:{number:064x}:all"


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


class Pages:
    """Pages in shared memory whose bytes follow from their number, in pieces of any cut."""

    def __init__(self, size: int = 24 << 20) -> None:
        self.memory = memory.create("test-pages", size)
        self.target = memory.create("test-target", size)
        self._at = 0

    def write(self, number: int, size: int = PAGE, cuts: Sequence[int] = ()) -> StoreWrite:
        """A page to write; ``cuts`` are lengths of its first extents."""
        content = random.Random(number).randbytes(size)
        extents = self._extents(self.memory, size, cuts)
        at = 0
        for extent in extents:
            extent.view[:] = content[at : at + extent.length]
            at += extent.length
        return StoreWrite(key_of(number), size, memory.checksum(key_of(number), extents), extents)

    def batch(self, numbers: Sequence[int], size: int = PAGE) -> list[StoreWrite]:
        self._at = 0
        return [self.write(number, size) for number in numbers]

    def _extents(self, block: Memory, size: int, cuts: Sequence[int]) -> list[Extent]:
        extents = []
        for length in [*cuts, size - sum(cuts)]:
            if self._at + length > block.size:
                self._at = 0
            extents.append(Extent(block, self._at, length))
            self._at += -(-length // 4096) * 4096
        return extents

    def read(self, store: SsdStore, numbers: Sequence[int], size: int = PAGE) -> dict[int, Outcome]:
        """Read pages and compare every byte of those that are said to be right."""
        outcomes: dict[int, Outcome] = {}
        for start in range(0, len(numbers), 128):
            some = numbers[start : start + 128]
            self._at = 0
            reads = [StoreRead(key_of(number), size, self._extents(self.target, size, ())) for number in some]
            for number, read, result in zip(some, reads, store.read(reads, soon()), strict=True):
                outcomes[number] = result.outcome
                if result.outcome is Outcome.OK:
                    content = b"".join(bytes(extent.view) for extent in read.into)
                    assert content == random.Random(number).randbytes(size), "wrong bytes"
        return outcomes

    def close(self) -> None:
        self.memory.close()
        self.target.close()


class HeldIO(ThreadIO):
    """Real I/O that waits, or fails with an ``errno``, when a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.hold_reads = threading.Event()
        self.reading = threading.Event()
        self.let_go = threading.Event()
        self.fail_reads = self.fail_writes = 0

    def read(self, batch: Sequence[Transfer], deadline: float) -> list[int]:
        if self.hold_reads.is_set():
            self.reading.set()
            assert self.let_go.wait(20)
        return [-self.fail_reads] * len(batch) if self.fail_reads else super().read(batch, deadline)

    def write(self, batch: Sequence[Transfer], deadline: float) -> list[int]:
        return [-self.fail_writes] * len(batch) if self.fail_writes else super().write(batch, deadline)


def make(
    name: str,
    path: Path,
    io: DiskIO,
    *,
    capacity: int = CAPACITY,
    forget: Callable[[Sequence[str]], None] = lambda keys: None,
    failpoint: Callable[[str], None] = lambda step: None,
    pool: str = "default",
    eviction: str = "fifo",
    sync: bool = False,
    bucket_keys: int = 4096,
) -> SsdStore:
    config = StoreConfig(
        str(path), capacity, pool=pool, eviction=eviction, sync=sync, bucket_keys=bucket_keys, bucket_size=2 << 20
    )
    return registry.create(name, config, io, Hooks(forget, failpoint))


def write_all(store: SsdStore, pages: Pages, numbers: Sequence[int], size: int = PAGE) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for start in range(0, len(numbers), 64):
        outcomes += [r.outcome for r in store.write(pages.batch(numbers[start : start + 64], size), soon())]
    return outcomes


def disk_usage(path: Path) -> int:
    return int(
        subprocess.run(["du", "-s", "-B1", str(path)], capture_output=True, text=True, check=True).stdout.split()[0]
    )


def data_files(path: Path) -> list[Path]:
    """The files that hold pages."""
    return sorted(
        Path(folder) / name for folder, _, names in os.walk(path) for name in names if name.endswith((".data", ".page"))
    )


def flip_page(path: Path, number: int, size: int = PAGE) -> None:
    """Flip one bit in the middle of a page, wherever it lies on disk."""
    content = random.Random(number).randbytes(size)
    for file in data_files(path):
        data = file.read_bytes()
        at = data.find(content[:512])
        if at >= 0:
            with open(file, "r+b") as opened:
                opened.seek(at + size // 2)
                opened.write(bytes([data[at + size // 2] ^ 1]))
            return
    raise AssertionError(f"page {number} is not on disk")
