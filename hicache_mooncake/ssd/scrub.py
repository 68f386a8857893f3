"""Finding rot before somebody asks for the page: everything is read again, slowly, within a bandwidth budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hicache_mooncake import memory
from hicache_mooncake.memory import Extent
from hicache_mooncake.ssd.base import Entry, Outcome, SsdStore, StoreRead
from hicache_mooncake.ssd.io_base import padded

_AT_ONCE = 8 << 20
_READ_SECONDS = 30.0


@dataclass(slots=True)
class ScrubReport:
    """``rotten`` objects have been dropped by the store; ``unread`` ones could not be read, or went meanwhile."""

    checked: int = 0
    bytes: int = 0
    rotten: int = 0
    unread: int = 0


def scrub(
    store: SsdStore,
    *,
    bandwidth: float,
    pause: Callable[[float], bool],
    found: Callable[[Sequence[str]], None] | None = None,
) -> ScrubReport:
    """Read and verify everything once, at ``bandwidth`` bytes a second at most, and without counting as a use.

    ``pause(seconds)`` waits, and returns True when it is time to stop (an ``Event``'s ``wait``). ``found`` is told the
    keys of rotten objects.
    """
    report = ScrubReport()
    block = memory.create("ssd-scrub", _AT_ONCE)
    due = time.monotonic()
    try:
        for entries in store.entries():
            for chosen in _portions(entries):
                total = sum(entry.size for entry in chosen)
                if total > block.size:
                    block.close()
                    block = memory.create("ssd-scrub", padded(total))
                if pause(max(0.0, due - time.monotonic())):
                    return report
                due = max(due, time.monotonic()) + total / bandwidth
                _check(store, chosen, block, report, found)
    finally:
        block.close()
    return report


def _check(
    store: SsdStore,
    chosen: Sequence[Entry],
    block: memory.Memory,
    report: ScrubReport,
    found: Callable[[Sequence[str]], None] | None,
) -> None:
    reads = []
    at = 0
    for entry in chosen:
        reads.append(StoreRead(entry.key, entry.size, [Extent(block, at, entry.size)]))
        at += entry.size
    rotten = []
    for entry, result in zip(chosen, store.read(reads, time.monotonic() + _READ_SECONDS, touch=False), strict=True):
        report.checked += 1
        report.bytes += entry.size
        if result.outcome is Outcome.CORRUPT:
            rotten.append(entry.key)
        elif result.outcome is not Outcome.OK:
            report.unread += 1
    report.rotten += len(rotten)
    if rotten and found is not None:
        found(rotten)


def _portions(entries: Sequence[Entry]) -> list[list[Entry]]:
    portions: list[list[Entry]] = []
    left = 0
    for entry in entries:
        if not portions or entry.size > left:
            portions.append([])
            left = _AT_ONCE
        portions[-1].append(entry)
        left -= entry.size
    return portions
