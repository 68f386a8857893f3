"""A workload made to fit: cut to a context, thinned or multiplied, faster or slower, smaller; each gives a new
workload.

Everything is decided by names and numbers of the workload itself, so that a shaped workload is the same in every run.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

from benchmarks.multiturn.workload import Blocks, Part, Session, Setting, Text, Turn, Workload
from hicache_mooncake.errors import ConfigError


def timed(workload: Workload, factor: float) -> Workload:
    """Arrivals and think times ``factor`` times as long: 0.5 asks twice as fast."""
    _above_zero("time scale", factor)

    def turn(turn: Turn) -> Turn:
        return replace(turn, at=None if turn.at is None else turn.at * factor, think=turn.think * factor)

    return _each(workload, lambda session: _mapped(session, turn), time_scale=factor)


def loaded(workload: Workload, factor: float) -> Workload:
    """``factor`` times as many sessions: a part of them, or copies beside them that ask at the same times for other
    tokens.

    Which part is decided by the sessions' names: half the load is in the whole load.
    """
    _above_zero("load scale", factor)

    def sessions() -> Iterator[Session]:
        for session in workload.sessions():
            for copy in range(int(factor) + 1):
                if _share(f"{copy} {session.id}") < factor - copy:
                    yield _copied(session, copy) if copy else session

    return _derived(workload, sessions, known=False, load_scale=factor)


def shrunk(workload: Workload, factor: float) -> Workload:
    """Prompts and answers ``factor`` times as long, block by block, so that hits stay the share of the prompt that
    they are.

    For machines that are slower than the trace's. A block has one token at least.
    """
    _above_zero("token scale", factor)

    def turn(turn: Turn) -> Turn:
        prompt = tuple(_shrunk(part, factor) for part in turn.prompt)
        return replace(
            turn, prompt=prompt, output_tokens=max(min(1, turn.output_tokens), round(turn.output_tokens * factor))
        )

    return _each(workload, lambda session: _mapped(session, turn), token_scale=factor)


def staggered(workload: Workload, per_second: float, seed: int = 1) -> Workload:
    """Sessions that all begin at 0 (as recorded one by one) begin at Poisson times instead, in an open loop."""
    _above_zero("session rate", per_second)

    def sessions() -> Iterator[Session]:
        source = random.Random(seed)
        begin = 0.0
        for session in workload.sessions():
            yield _mapped(session, lambda turn: replace(turn, at=None if turn.at is None else turn.at + begin))  # noqa: B023
            begin += source.expovariate(per_second)

    return _derived(workload, sessions, session_rate=per_second)


def limited(workload: Workload, *, sessions: int = 0, requests: int = 0, seconds: float = 0.0) -> Workload:
    """The first sessions, at most so many sessions, requests, or seconds of arrivals; 0 does not limit."""

    def some() -> Iterator[Session]:
        left = requests
        for session in islice(workload.sessions(), sessions or None):
            first = next((turn.at for turn in session.turns), None)
            if seconds and first is not None and first > seconds:
                return
            over = requests and len(session.turns) > left
            kept = replace(session, turns=session.turns[:left], after=()) if over else session
            left -= _requests(kept)
            yield kept
            if requests and left <= 0:
                return

    return _derived(
        workload, some, known=False, limits=f"sessions {sessions}, requests {requests}, seconds {seconds:g}"
    )


def cut(workload: Workload, context: int) -> Workload:
    """Prompts and answers that fit into a context of ``context`` tokens.

    A prompt that is too long is cut at its end. Later turns of its session would ask the same again, a hit that no user
    makes: those that have nothing new within the context are left out. A session whose prompts are built up turn by
    turn ends before the turn that does not fit. Text is left as it is: only the server can count it.
    """
    if context < 2:
        raise ConfigError("context", context, "2 tokens at least")
    notes = workload.notes

    def sessions() -> Iterator[Session]:
        for session in workload.sessions():
            yield _cut(session, context, notes)

    return _derived(workload, sessions, known=False, context=context)


def grouped(workload: Workload) -> Workload:
    """Sessions of one id, as traces give them request by request, made one, for a closed loop; a think time is the time
    between two arrivals. Holds the whole workload in memory.
    """

    def sessions() -> Iterator[Session]:
        groups: dict[str, list[Session]] = {}
        for session in workload.sessions():
            groups.setdefault(session.id, []).append(session)
        for parts in groups.values():
            turns: list[Turn] = []
            for turn in (turn for part in parts for turn in part.turns):
                last = turns[-1].at if turns else None
                known = turn.at is not None and last is not None and len(parts) > 1
                turns.append(
                    replace(turn, think=max(0.0, turn.at - last)) if known and turn.at and last is not None else turn
                )
            yield replace(parts[0], turns=tuple(turns), after=tuple(child for part in parts for child in part.after))

    return _derived(workload, sessions, grouped=True)


def _each(workload: Workload, change: Callable[[Session], Session], **settings: Setting) -> Workload:
    return replace(
        workload,
        sessions=lambda: map(change, workload.sessions()),
        settings={**workload.settings, **settings},
    )


def _derived(
    workload: Workload, sessions: Callable[[], Iterator[Session]], *, known: bool = True, **settings: Setting
) -> Workload:
    return replace(
        workload,
        sessions=sessions,
        requests=workload.requests if known else None,
        settings={**workload.settings, **settings},
    )


def _mapped(session: Session, change: Callable[[Turn], Turn]) -> Session:
    """The session and those within it, every turn changed."""
    turns = tuple(
        replace(change(turn), after=tuple(_mapped(child, change) for child in turn.after)) for turn in session.turns
    )
    return replace(session, turns=turns, after=tuple(_mapped(child, change) for child in session.after))


def _requests(session: Session) -> int:
    within = sum(_requests(child) for turn in session.turns for child in turn.after)
    return len(session.turns) + within + sum(map(_requests, session.after))


def _copied(session: Session, copy: int) -> Session:
    """The same session of another user: other tokens, other names."""

    def turn(turn: Turn) -> Turn:
        prompt = tuple(
            replace(part, space=f"{part.space} copy {copy}")
            if isinstance(part, Blocks)
            else Text(f"[{copy}] {part.text}")
            for part in turn.prompt
        )
        return replace(turn, prompt=prompt, after=tuple(_renamed(child, copy) for child in turn.after))

    return _renamed(_mapped(session, turn), copy)


def _renamed(session: Session, copy: int) -> Session:
    return replace(session, id=f"{session.id} copy {copy}", parent=session.parent and f"{session.parent} copy {copy}")


def _shrunk(part: Part, factor: float) -> Part:
    if isinstance(part, Text):
        return Text(part.text[: max(1, round(len(part.text) * factor))])
    size = max(1, round(part.size * factor))
    whole, rest = divmod(part.length, part.size)
    length = whole * size + min(size, round(rest * factor))
    return replace(part, ids=part.ids[: -(-length // size)], size=size, length=length)


def _cut(session: Session, context: int, notes: Counter[str]) -> Session:
    turns: list[Turn] = []
    history = 0
    full: tuple[Part, ...] = ()  # the session's last prompt that was cut
    for turn in session.turns:
        output = min(turn.output_tokens, context // 2)
        known = turn.known_tokens
        after = tuple(_cut(child, context, notes) for child in turn.after)
        prompt = turn.prompt
        if turn.continues and known is not None and history + known + output > context:
            notes["sessions ended where the context was full"] += 1
            return replace(session, turns=tuple(turns), after=())
        if not turn.continues and known is not None and known + output > context:
            prompt = _first(prompt, context - output)
            if full and _agree(prompt, full):
                notes["turns left out: nothing new within the context"] += 1
                continue
            full = prompt
            notes["prompts cut to the context"] += 1
        history = (history if turn.continues else 0) + (known or 0) + output
        turns.append(replace(turn, prompt=prompt, output_tokens=output, after=after))
    return replace(session, turns=tuple(turns), after=tuple(_cut(child, context, notes) for child in session.after))


def _agree(one: tuple[Part, ...], other: tuple[Part, ...]) -> bool:
    """Whether one of two prompts of blocks is the beginning of the other."""
    shorter = min(_tokens(one), _tokens(other))
    return _first(one, shorter) == _first(other, shorter)


def _tokens(prompt: tuple[Part, ...]) -> int:
    return sum(part.length for part in prompt if isinstance(part, Blocks))


def _first(prompt: tuple[Part, ...], tokens: int) -> tuple[Part, ...]:
    """The first tokens of a prompt of blocks."""
    kept: list[Part] = []
    for part in prompt:
        if isinstance(part, Text) or tokens <= 0:
            break
        length = min(part.length, tokens)
        kept.append(replace(part, ids=part.ids[: -(-length // part.size)], length=length))
        tokens -= length
    return tuple(kept)


def _share(name: str) -> float:
    """A number in [0, 1) that depends on the name only."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") / 2**64


def _above_zero(setting: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise ConfigError(setting, value, "a number above 0")
