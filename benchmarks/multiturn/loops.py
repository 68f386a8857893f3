"""When turns are asked: an open loop by the clock, a closed loop after think times, and a closed loop with a
barrier."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Coroutine, Iterator
from itertools import chain, count
from types import TracebackType
from typing import Any

from benchmarks.multiturn.asking import Asking, History
from benchmarks.multiturn.workload import Session, Turn, Workload
from hicache_mooncake.errors import ConfigError


async def open_loop(workload: Workload, asking: Asking) -> None:
    """Every turn at its time, whatever the server does.

    A turn that is due while all places in flight are taken goes out later, in the order of arrival, and its clock runs
    from when it was due. So does that of a turn which has to wait for the answer before it, because its prompt contains
    it. Nothing is read ahead of what is due, so memory is bounded by the requests in flight.
    """
    async with _Tasks() as tasks:
        answered: dict[str, tuple[asyncio.Task[None], History]] = {}  # of turns that the next one continues
        for at, session, number in arrivals(workload):
            await _until(asking, at)
            await asking.place()
            turn = session.turns[number]
            before, history = answered.pop(session.id, (None, None)) if turn.continues else (None, None)
            history = history or asking.history()
            task = tasks.start(_after(before, asking, session, turn, history, at))
            if number + 1 < len(session.turns) and session.turns[number + 1].continues:
                answered[session.id] = (task, history)


async def _after(
    before: asyncio.Task[None] | None, asking: Asking, session: Session, turn: Turn, history: History, due: float
) -> None:
    if before is not None:
        await asyncio.wait([before])
    await asking.turn(session, turn, history, due, placed=True)


def arrivals(workload: Workload) -> Iterator[tuple[float, Session, int]]:
    """(time, session, index of its turn) of all turns in the order of their times, subagents' among them.

    Sessions are read as their first turns become due. Raises :class:`ConfigError` for turns without a time, and for
    sessions that do not come in the order of their times.
    """
    order = count()
    waiting: list[tuple[float, int, int, Session]] = []
    reached = 0.0

    def push(session: Session, turn: int) -> None:
        if turn < len(session.turns):
            at = session.turns[turn].at
            if at is None:
                hint = "a closed loop asks by think times: --loop closed"
                raise ConfigError("loop", "open", f"a workload with timestamps; {workload.name} has none", hint=hint)
            heapq.heappush(waiting, (at, next(order), turn, session))

    def pop() -> tuple[float, Session, int]:
        at, _, turn, session = heapq.heappop(waiting)
        push(session, turn + 1)
        return at, session, turn

    for session in workload.sessions():
        family = list(_family(session))
        first = min((one.turns[0].at or 0.0 for one in family if one.turns), default=reached)
        if first < reached:
            raise ConfigError(
                "trace", session.id, "sessions in the order of their times: this one begins before another"
            )
        reached = first
        while waiting and waiting[0][0] <= first:
            yield pop()
        for one in family:
            push(one, 0)
    while waiting:
        yield pop()


def _family(session: Session) -> Iterator[Session]:
    """A session and all that run for it."""
    yield session
    for child in chain((child for turn in session.turns for child in turn.after), session.after):
        yield from _family(child)


async def closed_loop(workload: Workload, asking: Asking) -> None:
    """``options.sessions`` sessions at a time; each asks its next turn when the last was answered and thought about."""
    source = workload.sessions()
    workers = asking.options.sessions
    async with _Tasks() as tasks:
        if not workers:
            for session in source:
                tasks.start(_session(session, asking))
            return

        async def work() -> None:
            for session in source:  # shared: each worker takes the next
                await _session(session, asking)

        for _ in range(workers):
            tasks.start(work())


async def _session(session: Session, asking: Asking) -> None:
    history = asking.history()
    for turn in session.turns:
        if turn.think:
            await asyncio.sleep(turn.think)
        if turn.after:
            await _all(turn.after, asking)
        await asking.turn(session, turn, history, asking.now())
    if session.after:
        await _all(session.after, asking)


async def _all(sessions: tuple[Session, ...], asking: Asking) -> None:
    async with _Tasks() as tasks:
        for session in sessions:
            tasks.start(_session(session, asking))


async def barrier_loop(workload: Workload, asking: Asking) -> None:
    """All sessions' first turns, then all their second ones: as the published benchmark asks them, in an order drawn
    anew for each round.
    """
    source = random.Random(asking.options.seed)
    sessions = [(session, asking.history()) for session in workload.sessions()]
    for number in range(max((len(session.turns) for session, _ in sessions), default=0)):
        ready = [(session, history) for session, history in sessions if number < len(session.turns)]
        source.shuffle(ready)
        async with _Tasks() as tasks:
            for session, history in ready:
                tasks.start(_round(session, number, history, asking))


async def _round(session: Session, number: int, history: History, asking: Asking) -> None:
    turn = session.turns[number]
    if turn.think:
        await asyncio.sleep(turn.think)
    if turn.after:
        await _all(turn.after, asking)
    await asking.turn(session, turn, history, asking.now())


async def _until(asking: Asking, at: float) -> None:
    left = at - asking.now()
    if left > 0:
        await asyncio.sleep(left)


class _Tasks:
    """Tasks that end with the block: it waits for all, and the first error cancels the others."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()
        self._failed: BaseException | None = None

    async def __aenter__(self) -> _Tasks:
        return self

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task. Raises what an earlier one failed with."""
        if self._failed is not None:
            work.close()
            raise self._failed
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failed = self._failed or task.exception()
            for other in self._running:
                other.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for task in self._running:
                task.cancel()
        while self._running:
            await asyncio.wait(set(self._running))
        if error is None and self._failed is not None:
            raise self._failed
