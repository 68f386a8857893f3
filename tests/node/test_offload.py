"""What keeps an SSD tier out of everybody's way: bounded queues, and DRAM that goes on without it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache_mooncake import memory
from hicache_mooncake.memory import Extent, checksum
from hicache_mooncake.metadata.records import ObjectRecord
from hicache_mooncake.node.counters import Counters
from hicache_mooncake.node.index import Page
from hicache_mooncake.node.offload import Offloader
from hicache_mooncake.node.peers import Peers
from hicache_mooncake.node.ssd_loading import WAITING_LIMIT, SsdLoader
from hicache_mooncake.node.staging import Staging
from hicache_mooncake.node.store import DramStore
from hicache_mooncake.ssd import registry
from hicache_mooncake.ssd.base import NO_HOOKS, Entry, Outcome, SsdStore, StoreConfig, StoreWrite
from hicache_mooncake.ssd.io_threads import ThreadIO
from hicache_mooncake.transfer.base import Credentials

SIZE = 4096


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SsdStore]:
    io = ThreadIO(direct=False)
    store = registry.create("file_per_key", StoreConfig(str(tmp_path / "ssd"), 1 << 30), io, NO_HOOKS)
    (tmp_path / "ssd").mkdir()
    store.open()
    yield store
    store.close()
    io.close()


@pytest.fixture
def dram() -> Iterator[DramStore]:
    segment = memory.create("test", 64 * SIZE)
    yield DramStore(segment, high_watermark=0.9, forget_in_directory=lambda keys: None)
    segment.close()


def offloader(dram: DramStore, disk: SsdStore, **options: object) -> Offloader:
    settings = {"eager": False, "on_evict": True, "queue_limit": 1000, "watermark": 0.5, "force_evict": False}
    made = Offloader(dram, disk, Counters(), published=lambda keys, sizes: None, **{**settings, **options})  # type: ignore[arg-type]
    dram.lower = _Tier(made, disk)
    return made


class _Tier:
    def __init__(self, offloader: Offloader, disk: SsdStore) -> None:
        self.contains = disk.contains
        self.stored = offloader.stored
        self.may_leave = offloader.may_leave


def put(dram: DramStore, key: str) -> bool:
    """One page, as a put of an engine does it."""
    (spans,) = dram.reserve([SIZE])
    if spans is None:
        return False
    extents = dram.extents(spans)
    extents[0].view[:] = key.encode().ljust(SIZE, b".")
    dram.commit([Page(key, SIZE, checksum(key, extents), spans, extents)])
    return True


def test_until_the_disk_can_be_written_dram_evicts_as_without_one(dram: DramStore, disk: SsdStore) -> None:
    offloader(dram, disk)  # not started: the directory is still being looked through, or cannot be used
    assert all(put(dram, f"ns:{at:03}:all") for at in range(200))


def test_once_it_can_nothing_unsaved_is_evicted(dram: DramStore, disk: SsdStore) -> None:
    made = offloader(dram, disk)
    made.start()
    try:
        keys = [f"ns:{at:03}:all" for at in range(200)]
        for key in keys:
            until = time.monotonic() + 10
            while not put(dram, key):
                assert time.monotonic() < until, "no room was made"
                time.sleep(0.005)
        here = dram.contains(keys)
        assert all(held or saved for held, saved in zip(here, disk.contains(keys), strict=True))
        assert here.count(False) > 100
    finally:
        made.stop(5)


def test_saved_pages_go_though_colder_ones_are_not_saved(dram: DramStore, disk: SsdStore) -> None:
    made = offloader(dram, disk, queue_limit=1)
    keys = [f"ns:{at:03}:all" for at in range(57)]
    assert all(put(dram, key) for key in keys)
    last = dram.hold(keys[-12:])
    disk.write([StoreWrite(page.key, SIZE, page.checksum, page.extents) for page in last if page], time.monotonic() + 9)
    dram.unpin(last)
    made._started = True  # its thread would write the others, too
    assert put(dram, "ns:new:all")
    assert sum(dram.contains(keys[:-12])) == 45
    assert sum(dram.contains(keys[-12:])) == 11


def test_a_disk_that_hangs_costs_no_memory(disk: SsdStore, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(disk, "read", lambda reads, deadline: (released.wait(30), [])[1])
    area = memory.create("test", 1 << 20)
    loader = SsdLoader(disk, Staging(Extent(area, 0, 1 << 20)))
    try:
        for _ in range(3 * WAITING_LIMIT):
            loading = loader.load([Entry("ns:a:all", SIZE, 0)], time.monotonic() + 0.001)
            assert all(result.outcome is Outcome.TIMEOUT for job in loading for result in job.results)
            loading.close()
        assert loader.waiting <= WAITING_LIMIT
    finally:
        released.set()
        loader.close()
    assert loader.waiting == 0
    area.close()


def test_holders_with_the_page_in_dram_are_asked_first() -> None:
    peers = Peers([], Credentials(b""), dict)
    record = ObjectRecord(SIZE, ("a~1/ssd", "b~2/dram", "c~3/dram", "b~2/ssd", "d~4/ssd", "e~5/dram"))
    orders = {tuple(peers.holders(record, {"a~1", "b~2", "c~3", "d~4"})) for _ in range(100)}
    assert {frozenset(order[:2]) for order in orders} == {frozenset({"a~1", "d~4"})}
    assert {frozenset(order[2:]) for order in orders} == {frozenset({"b~2", "c~3"})}
    assert len(orders) == 4
