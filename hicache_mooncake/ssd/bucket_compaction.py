"""Taking the room of removed objects back: buckets that are mostly dead are written anew, without what is dead."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hicache_mooncake import memory
from hicache_mooncake.memory import Extent
from hicache_mooncake.ssd.base import Outcome, StoreRead, StoreWrite
from hicache_mooncake.ssd.bucket_file import Bucket
from hicache_mooncake.ssd.bucket_space import BucketSpace
from hicache_mooncake.ssd.io_base import padded

if TYPE_CHECKING:
    from hicache_mooncake.ssd.bucket import BucketStore

WORTH_IT = 0.75
"""Buckets whose live objects take less than this share of the file are written anew."""

_AT_ONCE = 64 << 20


def compact(store: BucketStore, space: BucketSpace, deadline: float) -> int:
    """Bytes of disk given back. A bucket goes only when everything live in it has been moved."""
    before = store.usage().used
    for bucket in space.all():
        if time.monotonic() > deadline:
            break
        live = sum(padded(bucket.rows.sizes[row]) for row in store.live_rows(bucket))
        if bucket.sealed and live < WORTH_IT * bucket.disk and _move_out(store, bucket, deadline):
            store.drop_bucket(bucket)
    store.finish()
    return max(0, before - store.usage().used)


def _move_out(store: BucketStore, bucket: Bucket, deadline: float) -> bool:
    rows = bucket.rows
    waiting = store.live_rows(bucket)
    while waiting:
        chosen: list[int] = []
        total = 0
        while waiting and (not chosen or total + padded(rows.sizes[waiting[-1]]) <= _AT_ONCE):
            chosen.append(waiting.pop())
            total += padded(rows.sizes[chosen[-1]])
        block = memory.create("ssd-compaction", total)
        try:
            if not _move(store, bucket, chosen, block, deadline):
                return False
        finally:
            block.close()
    return not store.live_rows(bucket)


def _move(store: BucketStore, bucket: Bucket, chosen: list[int], block: memory.Memory, deadline: float) -> bool:
    rows = bucket.rows
    at = 0
    reads: list[StoreRead] = []
    for row in chosen:
        reads.append(StoreRead(rows.keys[row], rows.sizes[row], [Extent(block, at, rows.sizes[row])]))
        at += padded(rows.sizes[row])
    writes = [
        StoreWrite(read.key, read.size, rows.checksums[row], read.into)
        for row, read, result in zip(chosen, reads, store.read(reads, deadline, touch=False), strict=True)
        if result.outcome is Outcome.OK  # the others have been dropped, or are found to be still there
    ]
    return all(result.outcome is Outcome.OK for result in store.move(writes, deadline))
