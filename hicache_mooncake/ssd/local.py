"""What the stores of this package share: who is inside, what is counted, memory for what is written beside pages."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hicache_mooncake import memory
from hicache_mooncake.memory import Extent, Memory
from hicache_mooncake.ssd.base import NO_HOOKS, Hooks, Outcome, Result, SsdStore, StoreConfig
from hicache_mooncake.ssd.io_base import DiskIO, padded

logger = logging.getLogger(__name__)

_SCRATCH = 64 << 10
_SCRATCH_KEPT = 8


class Gate:
    """Lets calls in until it is shut, and then waits for those inside. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._open = False

    def open(self) -> None:
        self._open = True

    @contextmanager
    def inside(self) -> Iterator[bool]:
        """False when it is shut: the caller then does nothing."""
        with self._changed:
            entered = self._open
            self._inside += entered
        try:
            yield entered
        finally:
            if entered:
                with self._changed:
                    self._inside -= 1
                    self._changed.notify_all()

    def shut(self, longest: float) -> bool:
        """Nobody comes in any more; True when nobody is inside, after ``longest`` seconds at most."""
        with self._changed:
            self._open = False
            return self._changed.wait_for(lambda: not self._inside, longest)


class Scratch:
    """Shared memory for frames that go through the same I/O as pages. Thread-safe."""

    def __init__(self) -> None:
        self._free: list[Memory] = []
        self._lock = threading.Lock()

    @contextmanager
    def filled(self, contents: Sequence[bytes]) -> Iterator[list[Extent]]:
        """An aligned extent with each of ``contents``, for as long as the block lasts; zeros up to the alignment."""
        needed = sum(padded(len(content)) for content in contents)
        with self.borrowed(needed) as block:
            extents = []
            at = 0
            for content in contents:
                end = at + padded(len(content))
                block.view[at : at + len(content)] = content
                block.view[at + len(content) : end] = bytes(end - at - len(content))
                extents.append(Extent(block, at, len(content)))
                at = end
            yield extents

    @contextmanager
    def borrowed(self, needed: int) -> Iterator[Memory]:
        """A block of at least ``needed`` bytes, with anything in it."""
        with self._lock:
            block = self._free.pop() if self._free and needed <= _SCRATCH else None
        if block is None:
            block = memory.create("ssd-scratch", max(needed, _SCRATCH))
        try:
            yield block
        finally:
            with self._lock:
                keep = block.size <= _SCRATCH and len(self._free) < _SCRATCH_KEPT
                if keep:
                    self._free.append(block)
            if not keep:
                block.close()

    def close(self) -> None:
        with self._lock:
            blocks, self._free = self._free, []
        for block in blocks:
            block.close()


class LocalStore(SsdStore):
    """A store with counters, a gate for its callers and scratch memory."""

    CLOSING = 30.0
    """Seconds that :meth:`close` waits for calls under way, which have deadlines of their own."""

    def __init__(self, config: StoreConfig, io: DiskIO, hooks: Hooks = NO_HOOKS) -> None:
        super().__init__(config, io, hooks)
        self._gate = Gate()
        self._readers = Gate()
        self._scratch = Scratch()
        self._counts: Counter[str] = Counter()
        self._counting = threading.Lock()

    def counters(self) -> dict[str, int]:
        with self._counting:
            return dict(self._counts)

    def _count(self, name: str, times: int = 1) -> None:
        if times:
            with self._counting:
                self._counts[name] += times

    def _count_results(self, verb: str, results: Sequence[Result]) -> None:
        with self._counting:
            for result in results:
                if result.outcome is not Outcome.OK:
                    self._counts[f"{verb}_{result.outcome.name.lower()}"] += 1
                else:
                    self._counts[verb] += 1

    def _tell(self, keys: Sequence[str]) -> None:
        """Step 2 of a removal: whoever published the keys forgets them."""
        if keys:
            try:
                self.hooks.forget(keys)
            except Exception:  # a removal that stops half-way would fill the disk
                logger.exception("SSD store %s: publishing that %d objects went failed", self.config.path, len(keys))


def left(deadline: float) -> float:
    """Seconds until the deadline, not negative."""
    return max(0.0, deadline - time.monotonic())
