"""Who moves what of a batch: parts handed out to paths as they have room, in proportion to what each has shown. Pure.

A part's size follows what is left (guided self-scheduling, Polychronopoulos and Kuck 1987): large ones first, smaller
ones towards the end, so that paths finish together however fast each turns out to be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

SMALLEST_PART = 512 << 10
LARGEST_PART = 8 << 20
"""Bytes. A part is signalled at its end: pages of it are checked while the next ones come."""

STRIPE_FROM = 2 << 20
"""A smaller batch takes one path: waking up for two costs more than it saves."""

FIRST_REST = 1.0
LONGEST_REST = 300.0
"""Seconds a path that failed is left alone; doubling, until it works once."""


PathKey: TypeAlias = tuple[str, int, int]
"""A path: the peer's node id, the number of our device, and of the peer's."""


def part_bytes(left: int, share: float, alone: bool) -> int:
    """How much a path with this ``share`` of the bandwidth takes of ``left`` bytes."""
    if alone:
        return LARGEST_PART
    return max(SMALLEST_PART, min(LARGEST_PART, int(left * share / 2)))


class Rates:
    """What each path has shown, in bytes a second: an average in which the last half dozen parts count. Thread-safe."""

    def __init__(self) -> None:
        self._rates: dict[PathKey, float] = {}

    def measured(self, path: PathKey, size: int, seconds: float) -> None:
        """A part has arrived."""
        rate = size / max(seconds, 1e-6)
        before = self._rates.get(path)
        self._rates[path] = rate if before is None else before + (rate - before) / 4

    def shares(self, paths: Sequence[PathKey]) -> list[float]:
        """Parts of the whole; a path that is not known yet counts like the average of those that are."""
        known = [self._rates[path] for path in paths if path in self._rates]
        usual = sum(known) / len(known) if known else 1.0
        rates = [self._rates.get(path, usual) for path in paths]
        whole = sum(rates)
        return [rate / whole for rate in rates]

    def forget(self, node_id: str) -> None:
        """The peer is gone."""
        for path in [path for path in list(self._rates) if path[0] == node_id]:
            self._rates.pop(path, None)


@dataclass
class Rests:
    """Paths that failed, and until when each is left alone. Thread-safe. Times are ``time.monotonic()`` seconds."""

    _until: dict[PathKey, float] = field(default_factory=dict)
    _length: dict[PathKey, float] = field(default_factory=dict)

    def failed(self, path: PathKey, now: float) -> float:
        """Returns for how long it rests."""
        if self._until.get(path, 0.0) > now:
            return self._until[path] - now  # several batches found out together
        length = min(2 * self._length.get(path, 0.0) or FIRST_REST, LONGEST_REST)
        self._length[path], self._until[path] = length, now + length
        return length

    def worked(self, path: PathKey) -> None:
        """It moved bytes: the next failure is a first one."""
        if path in self._length:
            self._length.pop(path, None)
            self._until.pop(path, None)

    def resting(self, path: PathKey, now: float) -> bool:
        return self._until.get(path, 0.0) > now

    def forget(self, node_id: str) -> None:
        """The peer is gone."""
        for path in [path for path in list(self._length) if path[0] == node_id]:
            self.worked(path)


class Work:
    """Ranges of a plan's requests that nobody has taken yet."""

    def __init__(self, requests: int) -> None:
        self._left: deque[tuple[int, int]] = deque([(0, requests)] if requests else [])

    def __bool__(self) -> bool:
        return bool(self._left)

    def first(self) -> tuple[int, int]:
        """The range that is next; there must be one."""
        return self._left[0]

    def take(self, until: int) -> None:
        """Requests of the next range up to ``until`` are taken."""
        begin, end = self._left.popleft()
        if until < end:
            self._left.appendleft((until, end))
        assert begin < until <= end

    def give_back(self, begin: int, end: int) -> None:
        """These were not carried out: somebody else does them next."""
        if begin < end:
            self._left.appendleft((begin, end))

    def ranges(self) -> list[tuple[int, int]]:
        return list(self._left)
