"""Opening an offset store: its journal replayed, its space accounted for; or a new one begun."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from hicache_mooncake.allocator import ExtentAllocator
from hicache_mooncake.errors import ConfigError
from hicache_mooncake.ssd.base import Hooks, Recovery, StoreConfig
from hicache_mooncake.ssd.io_base import DiskIO
from hicache_mooncake.ssd.local import Scratch
from hicache_mooncake.ssd.offset_device import Device
from hicache_mooncake.ssd.offset_format import Geometry, Stored, spans_of, without_overlaps
from hicache_mooncake.ssd.offset_journal import Journal, JournalFull


class Recovered(NamedTuple):
    journal: Journal
    allocator: ExtentAllocator
    objects: dict[str, Stored]
    recovery: Recovery


def recover(
    device: Device,
    config: StoreConfig,
    io: DiskIO,
    hooks: Hooks,
    scratch: Scratch,
    progress: Callable[[int, int], None] | None,
) -> Recovered:
    """What is stored on an open device; a checkpoint is written when the journal was damaged or the size changed.

    Raises ``OSError``.
    """
    started = time.monotonic()
    recovery = Recovery()
    recovery.drop("damaged_superblock", device.damaged)
    known = device.geometry
    geometry = known or Geometry.of(device.size, config.pool, config.node)
    journal = Journal(io, device.descriptor, geometry, device.owner, scratch, hooks, sync=config.sync)
    objects: dict[str, Stored] = {}
    if known is not None:
        objects = journal.replay(device.read, progress)
    resized = Geometry(device.size, geometry.area, geometry.epoch, config.pool, config.node)
    if not resized.data_size:
        raise ConfigError("ssd_size", device.size, "it has no room beside the journal", hint="more, or a larger device")
    bad = without_overlaps(objects, resized.data_size)
    for key in bad:
        del objects[key]
    recovery.drop("overlapping", len(bad))
    recovery.drop("damaged_journal_frame", journal.damaged)
    if known is None or known.size > device.size:
        hooks.failpoint("preallocate")
    if known is None or resized.size != known.size or bad or journal.damaged:
        if resized.size >= geometry.size:
            device.grow(resized.size)
        try:
            journal.checkpoint(objects.items(), resized)
        except JournalFull as error:
            raise OSError(28, "the journal does not take what is held") from error
        device.grow(resized.size)
    spans = sorted(span for found in objects.values() for span in spans_of(found))
    recovery.entries = len(objects)
    recovery.bytes = sum(found[0] for found in objects.values())
    recovery.seconds = time.monotonic() - started
    return Recovered(journal, ExtentAllocator.holding(resized.data_size, spans), objects, recovery)
