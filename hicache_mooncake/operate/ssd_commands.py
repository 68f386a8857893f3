"""``hicache-mooncake ssd``: look at, check and repair an SSD directory or device while no node uses it."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from typing import Any

from hicache_mooncake import memory
from hicache_mooncake.config_values import size
from hicache_mooncake.errors import ConfigError
from hicache_mooncake.memory import Extent
from hicache_mooncake.ssd import registry
from hicache_mooncake.ssd.base import Entry, Outcome, Recovery, SsdStore, StoreConfig, StoreRead, StoreWrite
from hicache_mooncake.ssd.directory import read_identity
from hicache_mooncake.ssd.io_base import ALIGNMENT, DiskIO, padded
from hicache_mooncake.ssd.io_threads import ThreadIO
from hicache_mooncake.ssd.offset_format import SUPERBLOCKS, decode_super
from hicache_mooncake.ssd.scrub import scrub

_SECONDS = 3600.0
_AT_ONCE = 32 << 20
_ANY_CAPACITY = 1 << 50


def run(given: argparse.Namespace) -> tuple[int, str]:
    """Exit status and what to print. Raises ``ConfigError``, ``Unavailable``."""
    with ThreadIO() as io:
        if given.action == "import":
            status, facts = _import(given, io)
        else:
            store, recovery = _opened(given.path, io)
            with store:
                actions = {"inspect": _inspect, "verify": _verify, "compact": _compact}
                status, facts = actions[given.action](store, given)
                facts = {"path": given.path, "store": store.name, **_recovered(recovery), **facts}
    lines = [f"{name:<20} {_shown(value)}" for name, value in facts.items()]
    return status, json.dumps(facts) if given.json else "\n".join(lines)


def _size(option: str, text: str) -> int:
    try:
        return size(text)
    except ValueError as error:
        raise ConfigError(option, text, str(error)) from error


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {number}" for name, number in sorted(value.items())) or "none"
    return str(value)


def _identity(path: str) -> tuple[str, str, int]:
    """Store, pool and capacity of what lies at ``path``. Raises ``ConfigError``."""
    if not os.path.exists(path):
        raise ConfigError("PATH", path, "there is nothing")
    if os.path.isdir(path):
        identity = read_identity(path)
        if identity is None:
            raise ConfigError("PATH", path, "it holds no SSD store of this program")
        if identity.store == "offset":
            return "offset", identity.pool, _device_size(os.path.join(path, "objects.data"))
        return identity.store, identity.pool, _ANY_CAPACITY
    with open(path, "rb") as file:
        found = decode_super(file.read(SUPERBLOCKS * ALIGNMENT))
    if found is None:
        raise ConfigError("PATH", path, "it holds no SSD store of this program")
    return "offset", found[0].pool, found[0].size


def _device_size(path: str) -> int:
    try:
        with open(path, "rb") as file:
            found = decode_super(file.read(SUPERBLOCKS * ALIGNMENT))
    except FileNotFoundError:
        found = None
    if found is None:
        raise ConfigError("PATH", path, "its superblocks are missing or damaged")
    return found[0].size


def _opened(path: str, io: DiskIO) -> tuple[SsdStore, Recovery]:
    name, pool, capacity = _identity(path)
    store = registry.create(name, StoreConfig(path, capacity, pool=pool, high_watermark=1.0, low_watermark=1.0), io)
    return store, store.open()


def _recovered(recovery: Recovery) -> dict[str, Any]:
    return {
        "objects": recovery.entries,
        "bytes": recovery.bytes,
        "salvaged": recovery.salvaged,
        "dropped": recovery.dropped,
        "seconds": round(recovery.seconds, 3),
    }


def _inspect(store: SsdStore, given: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    objects: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for entries in store.entries():
        for entry in entries:
            digest = entry.key.partition(":")[0]
            objects[digest] += 1
            sizes[digest] += entry.size
    used = {} if store.name == "offset" else {"disk_bytes": store.usage().used}
    return 0, {"pool": store.config.pool, **used, "by_namespace": dict(objects), "bytes_by_namespace": dict(sizes)}


def _verify(store: SsdStore, given: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    bandwidth = _size("--bandwidth", given.bandwidth) or float("inf")
    rotten: list[str] = []

    def pause(seconds: float) -> bool:
        time.sleep(seconds)
        return False

    report = scrub(store, bandwidth=bandwidth, pause=pause, found=rotten.extend)
    facts = {"checked": report.checked, "rotten": report.rotten, "unread": report.unread, "rotten_keys": rotten[:100]}
    return int(bool(report.rotten or report.unread)), facts


def _compact(store: SsdStore, given: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    return 0, {"given_back": store.compact(time.monotonic() + _SECONDS)}


def _import(given: argparse.Namespace, io: DiskIO) -> tuple[int, dict[str, Any]]:
    if os.path.realpath(given.source) == os.path.realpath(given.path):
        raise ConfigError("PATH", given.path, "it is the source")
    capacity = _size("--size", given.size)
    source, recovery = _opened(given.source, io)
    outcomes: Counter[str] = Counter()
    with source:
        pool = given.pool or source.config.pool
        with registry.create(given.store, StoreConfig(given.path, capacity, pool=pool, sync=True), io) as target:
            target.open()
            for entries in source.entries():
                for start in range(0, len(entries), 64):
                    outcomes.update(_copy(source, target, entries[start : start + 64]))
            held = target.usage().entries
    facts = {**_recovered(recovery), "copied": outcomes.pop("ok", 0), "not_copied": dict(outcomes), "held": held}
    return int(bool(outcomes)), facts


def _copy(source: SsdStore, target: SsdStore, entries: list[Entry]) -> list[str]:
    """What became of each, in words."""
    told: list[str] = []
    waiting = list(reversed(entries))
    while waiting:
        chosen = [waiting.pop()]
        total = padded(chosen[0].size)
        while waiting and total + padded(waiting[-1].size) <= _AT_ONCE:
            chosen.append(waiting.pop())
            total += padded(chosen[-1].size)
        block = memory.create("ssd-import", total)
        try:
            at = 0
            reads = []
            for entry in chosen:
                reads.append(StoreRead(entry.key, entry.size, [Extent(block, at, entry.size)]))
                at += padded(entry.size)
            results = source.read(reads, time.monotonic() + _SECONDS)
            told += [result.outcome.name.lower() for result in results if result.outcome is not Outcome.OK]
            writes = [
                StoreWrite(read.key, read.size, entry.checksum, read.into)
                for entry, read, result in zip(chosen, reads, results, strict=True)
                if result.outcome is Outcome.OK
            ]
            told += [result.outcome.name.lower() for result in target.write(writes, time.monotonic() + _SECONDS)]
        finally:
            block.close()
    return told
