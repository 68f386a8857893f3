"""What a workload holds, and what a cache that never forgets would hit of it: the most that any pool can bring.

Counted in blocks of the trace, in the order of arrival, nothing of a server in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.multiturn.workload import Blocks, Session, Text, Turn, Workload


@dataclass
class Contents:
    """Counts of a workload. ``blocks_hit`` are leading blocks of a prompt that were in an earlier one."""

    sessions: int = 0
    requests: int = 0
    longest_session: int = 0
    longest_prompt: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    texts: int = 0
    blocks: int = 0
    blocks_unique: int = 0
    blocks_hit: int = 0
    tokens_unique: int = 0
    tokens_hit: int = 0
    seconds: float = 0.0

    @property
    def block_hit_ratio(self) -> float:
        return self.blocks_hit / self.blocks if self.blocks else 0.0

    @property
    def token_hit_ratio(self) -> float:
        return self.tokens_hit / self.prompt_tokens if self.prompt_tokens else 0.0


def contents(workload: Workload, progress: Callable[[int], None] | None = None) -> Contents:
    """Read a workload through. Answers that go into the next prompts count as tokens, not as blocks; text counts as
    ``texts`` only. ``progress`` hears how many requests were read.
    """
    counted = Contents(sessions=0)
    seen: dict[str, set[int]] = {}
    names: set[str] = set()
    for session in workload.sessions():
        _session(session, counted, seen, names)
        if progress:
            progress(counted.requests)
    counted.sessions = len(names)
    return counted


def _session(session: Session, counted: Contents, seen: dict[str, set[int]], names: set[str]) -> None:
    names.add(session.id)
    history = 0
    for turn in session.turns:
        for child in turn.after:
            _session(child, counted, seen, names)
        counted.requests += 1
        counted.longest_session = max(counted.longest_session, turn.number)
        counted.seconds = max(counted.seconds, turn.at or 0.0)
        counted.output_tokens += turn.output_tokens
        history = _turn(turn, counted, seen, history if turn.continues else 0) + turn.output_tokens
    for child in session.after:
        _session(child, counted, seen, names)


def _turn(turn: Turn, counted: Contents, seen: dict[str, set[int]], history: int) -> int:
    """Count a turn after ``history`` tokens that are in the cache already; its prompt's length."""
    counted.tokens_hit += history
    length = history
    hitting = True
    for part in turn.prompt:
        if isinstance(part, Text):
            counted.texts += 1
            continue
        hitting = _blocks(part, counted, seen.setdefault(part.space, set()), hitting)
        length += part.length
    counted.prompt_tokens += length
    counted.longest_prompt = max(counted.longest_prompt, length)
    return length


def _blocks(part: Blocks, counted: Contents, seen: set[int], hitting: bool) -> bool:
    counted.blocks += len(part.ids)
    for at, number in enumerate(part.ids):
        size = min(part.size, part.length - at * part.size)
        if number not in seen:
            hitting = False
            seen.add(number)
            counted.blocks_unique += 1
            counted.tokens_unique += size
        elif hitting:
            counted.blocks_hit += 1
            counted.tokens_hit += size
    return hitting
