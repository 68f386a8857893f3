"""Load on a pool from several threads that believe nothing: every hit is compared byte by byte."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence

from tests.pool import Engine

LATE = 0.2
"""Seconds past ``op_timeout`` by which every call must have returned, whatever happened."""


class Watch:
    """How late this machine wakes a thread: what a call may be late for that is not its own fault."""

    def __init__(self) -> None:
        self.worst = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            started = time.monotonic()
            if self._stop.wait(0.01):
                return
            self.worst = max(self.worst, time.monotonic() - started - 0.01)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


class Load:
    """``with Load([a, b], names):`` puts, gets and asks for ``names`` on every engine until the end of the block.

    At its end everything is checked: no wrong byte, no change of a page after its call had returned, no call late, no
    exception. ``hits`` counts the pages read, by engine.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        names: Sequence[str],
        *,
        threads: int = 2,
        batch: int = 16,
        kinds: Sequence[str] = ("put", "get", "get", "exists"),
        pause: float = 0.002,
    ) -> None:
        self._names = list(names)
        self._batch = batch
        self._kinds = list(kinds)
        self._pause = pause
        self._stop = threading.Event()
        self._contents = {name: engines[0].content(name) for name in names}
        self.problems: list[str] = []
        self.hits = [0] * len(engines)
        self.calls = 0
        self.slowest = 0.0
        self._limits = [engine.session.op_timeout for engine in engines]
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(engines[at], at, number), name=f"load-{at}-{number}", daemon=True)
            for at in range(len(engines))
            for number in range(threads)
        ]

    def __enter__(self) -> Load:
        self._watch = Watch()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
        self._watch.close()
        if kind is None:
            assert not any(thread.is_alive() for thread in self._threads), "a call never came back"
            assert not self.problems, self.problems[:5]

    def hits_grow(self, at: int, by: int = 50) -> bool:
        """Whether the engine reads pages now."""
        before, until = self.hits[at], time.monotonic() + 0.5
        while time.monotonic() < until:
            if self.hits[at] >= before + by:
                return True
            time.sleep(0.01)
        return False

    def _run(self, engine: Engine, at: int, number: int) -> None:
        rng = random.Random(f"{at}/{number}")
        slots = range(number * self._batch, (number + 1) * self._batch)
        low, high = slots.start * engine.page_bytes, slots.stop * engine.page_bytes
        try:
            while not self._stop.is_set():
                names = rng.sample(self._names, self._batch)
                kind = rng.choice(self._kinds)
                pattern = bytes([rng.randrange(256)]) * (high - low)
                if kind == "put":
                    engine.l2.view[low:high] = b"".join(self._contents[name] for name in names)
                else:
                    engine.l2.view[low:high] = pattern
                started = time.monotonic()
                if kind == "exists":
                    engine.exists(names)
                elif kind == "put":
                    engine.put(names, slots)
                else:
                    hits = engine.get(names, slots)
                took = time.monotonic() - started
                if took > self._limits[at] + LATE + self._watch.worst:
                    self.problems.append(f"{kind} on engine {at} took {took:.3f} s")
                if kind == "get":
                    for slot, name, hit in zip(slots, names, hits, strict=True):
                        if hit and engine.read(slot) != self._contents[name]:
                            self.problems.append(f"engine {at}: wrong bytes for {name}")
                # SGLang would use the pages for something else now:
                engine.l2.view[low:high] = pattern
                with self._lock:
                    self.calls += 1
                    self.slowest = max(self.slowest, took)
                    if kind == "get":
                        self.hits[at] += sum(hits)
                time.sleep(self._pause)
                if engine.l2.view[low:high] != pattern:
                    self.problems.append(f"engine {at}: pages were written to after a {kind} had returned")
        except BaseException as error:
            self.problems.append(f"engine {at}: {type(error).__name__}: {error}")
            raise
