"""A million objects are found again in seconds."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest

from hicache_mooncake.ssd import directory
from hicache_mooncake.ssd.base import NO_HOOKS, Entry
from hicache_mooncake.ssd.bucket_file import data_path, index_path
from hicache_mooncake.ssd.bucket_index import BucketRows, encode_index, seal_frame
from hicache_mooncake.ssd.frames import encode
from hicache_mooncake.ssd.io_threads import ThreadIO
from hicache_mooncake.ssd.local import Scratch
from hicache_mooncake.ssd.offset_device import DATA_FILE
from hicache_mooncake.ssd.offset_format import Geometry, stored
from hicache_mooncake.ssd.offset_journal import Journal
from tests.ssd.stores import key_of, make

OBJECTS = 1_000_000
PAGE = 64 << 10
CAPACITY = 128 << 30
LIMIT = 60.0
"""Seconds; it takes about three."""


def fill_buckets(path: Path, io: ThreadIO) -> None:
    identity = directory.read_identity(str(path))
    assert identity is not None
    each = 4000
    for bucket in range(OBJECTS // each):
        numbers = range(bucket * each, (bucket + 1) * each)
        offsets = array("Q", (4096 + PAGE * row for row in range(each)))
        rows = BucketRows([key_of(n) for n in numbers], array("Q", [PAGE] * each), array("Q", numbers), offsets)
        index = encode_index(rows, bucket=bucket + 1, pool="default", owner=identity.owner)
        end = 4096 + PAGE * each
        frame = seal_frame(index, rows=each, bucket=bucket + 1, owner=identity.owner, place=end)
        with open(data_path(str(path), bucket + 1), "wb") as file:
            file.seek(end)
            file.write(encode(frame).ljust(4096, b"\0"))
        Path(index_path(str(path), bucket + 1)).write_bytes(index)


def fill_journal(path: Path, io: ThreadIO) -> None:
    identity = directory.read_identity(str(path))
    assert identity is not None
    descriptor = io.open(str(path / DATA_FILE), os.O_RDWR)
    scratch = Scratch()
    geometry = Geometry.of(CAPACITY, "default", "").next()
    journal = Journal(io, descriptor, geometry, identity.owner, scratch, NO_HOOKS, sync=False)
    journal.checkpoint((key_of(n), stored(PAGE, n, ((n * PAGE, PAGE),))) for n in range(OBJECTS))
    scratch.close()
    os.close(descriptor)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fill"), [("bucket", fill_buckets), ("offset", fill_journal)])
def test_a_million_objects(
    name: str,
    fill: Callable[[Path, ThreadIO], None],
    path: Path,
    io: ThreadIO,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The file is as long as it would be, and takes no disk.
    monkeypatch.setattr("hicache_mooncake.ssd.offset_device.preallocate", os.ftruncate)
    with make(name, path, io, capacity=CAPACITY) as store:
        store.open()
    fill(path, io)
    published = 0

    def count(entries: list[Entry]) -> None:
        nonlocal published
        published += len(entries)

    with make(name, path, io, capacity=CAPACITY) as store:
        recovery = store.open(count)
        assert recovery.entries == published == OBJECTS and not recovery.dropped
        with capsys.disabled():
            print(f"\n{name}: {OBJECTS} objects found in {recovery.seconds:.2f} s")
        assert recovery.seconds < LIMIT
        assert store.find([key_of(777_777)]) == [Entry(key_of(777_777), PAGE, 777_777)]
