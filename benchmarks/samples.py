"""Timed calls, the processor time each process spent on them, and what many of them come to."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

GB = 1e9


class Sample(NamedTuple):
    """One call: seconds on the clock, and CPU seconds of the engine's process and of all others together."""

    seconds: float
    engine_cpu: float
    other_cpu: float


def cpu_seconds(pid: int) -> float:
    """CPU seconds a process and its ended threads have used: nanoseconds where the kernel gives that, else ticks."""
    try:
        return time.clock_gettime((~pid << 3) | 2)  # clock_getcpuclockid(3), which Python does not have
    except OSError:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(work: Callable[[], object], others: Sequence[int]) -> Sample:
    """Time one call of ``work`` here, and what it makes the processes ``others`` do meanwhile."""
    other = -sum(map(cpu_seconds, others))
    engine = -time.process_time()
    started = time.perf_counter()
    work()
    seconds = time.perf_counter() - started
    engine += time.process_time()
    return Sample(seconds, engine, other + sum(map(cpu_seconds, others)))


class Spread(NamedTuple):
    """A figure over the rounds of a run."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


class Series:
    """The samples of one thing, round by round; each sample moves ``size`` bytes of ``count`` pages or keys."""

    def __init__(self, name: str, size: int, count: int) -> None:
        self.name = name
        self.size = size
        self.count = count
        self.rounds: list[list[Sample]] = []

    def begin_round(self) -> None:
        self.rounds.append([])

    def add(self, sample: Sample) -> None:
        self.rounds[-1].append(sample)

    @property
    def samples(self) -> list[Sample]:
        return [sample for of_round in self.rounds for sample in of_round]

    def seconds_by_round(self) -> list[float]:
        """The median call of each round."""
        return [statistics.median(sample.seconds for sample in of_round) for of_round in self.rounds]

    def percentile(self, share: float) -> float:
        """Seconds of the call that ``share`` of all calls were not slower than."""
        ordered = sorted(sample.seconds for sample in self.samples)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def cpu_per_gb(self, who: Callable[[Sample], float]) -> Spread | None:
        """CPU seconds per GB, over the rounds; None for what moves no bytes."""
        if not self.size:
            return None
        return Spread.of([sum(map(who, of_round)) / (self.size * len(of_round)) * GB for of_round in self.rounds])

    def cpu_per_call(self, who: Callable[[Sample], float]) -> float:
        """Median CPU seconds of one call."""
        return statistics.median(map(who, self.samples))


def ratio(of: Series, to: Series) -> Spread:
    """How many times the throughput of ``to`` the throughput of ``of`` is, round by round."""
    return Spread.of([b / a for a, b in zip(of.seconds_by_round(), to.seconds_by_round(), strict=True)])


def interleave(
    series: Sequence[tuple[Series, Callable[[], Sample]]], rounds: int, calls: int, *, in_a_row: int = 1
) -> None:
    """Take ``calls`` samples of each in each of ``rounds`` rounds, at most ``in_a_row`` of each in turn.

    So whatever else the machine does meets all of them alike; the order turns round by round.
    """
    for number in range(rounds):
        turned = [series[(at + number) % len(series)] for at in range(len(series))]
        for of_turn, _ in turned:
            of_turn.begin_round()
        for done in range(0, calls, in_a_row):
            for of_turn, take in turned:
                for _ in range(min(in_a_row, calls - done)):
                    of_turn.add(take())
