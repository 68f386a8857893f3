"""The conversation that the demo replays, and what became of it: plain data, no servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from testbed.server import Generation, prompt_ids

FIRST_SHARE = 0.4
"""Part of the longest prompt that the first turn brings: a system prompt and a document."""


@dataclass(frozen=True)
class Conversation:
    """``turns`` prompts, each the one before it, its answer of ``answer`` tokens, and what the user adds.

    Token ids depend on nothing but these numbers and the answers, so every server is asked the same.
    """

    turns: int
    longest: int
    answer: int = 16

    def new_tokens(self, turn: int) -> int:
        """How many tokens turn ``turn``, counted from 0, brings from the user."""
        first = round(FIRST_SHARE * self.longest)
        if turn == 0:
            return first
        grown = self.longest - first - (self.turns - 1) * self.answer
        share, rest = divmod(grown, self.turns - 1)
        return share + (turn <= rest)

    def prompt(self, turn: int, answers: Sequence[Sequence[int]]) -> list[int]:
        """The token ids of turn ``turn`` after ``answers`` to the turns before it."""
        tokens = prompt_ids(0, self.new_tokens(0))
        for number in range(1, turn + 1):
            tokens += [*answers[number - 1], *prompt_ids(number, self.new_tokens(number))]
        return tokens


@dataclass(frozen=True)
class Turn:
    """Where the tokens of one prompt came from, and how long its first new token took, in seconds."""

    prompt: int
    device: int
    host: int
    pool: int
    ttft: float
    output: tuple[int, ...]

    @classmethod
    def of(cls, got: Generation) -> Turn:
        cached = got.cached
        ttft = got.elapsed if got.ttft is None else got.ttft
        return cls(got.prompt_tokens, cached.device, cached.host, cached.storage, ttft, got.output_ids)

    @property
    def computed(self) -> int:
        return self.prompt - self.device - self.host - self.pool


@dataclass(frozen=True)
class Phase:
    """The whole conversation, once. ``key`` is its name in JSON, ``from_pool`` whether its pages must come from L3."""

    key: str
    name: str
    turns: tuple[Turn, ...]
    from_pool: bool = False

    @property
    def mean_ttft(self) -> float:
        return mean(turn.ttft for turn in self.turns)


def complaints(reference: Phase, phases: Sequence[Phase]) -> list[str]:
    """What went wrong: answers that differ from those computed without any cache, pages that did not come back."""
    found = []
    for phase in phases:
        for number, (expected, turn) in enumerate(zip(reference.turns, phase.turns, strict=True), 1):
            if turn.output != expected.output:
                found.append(
                    f"{phase.name}, turn {number}: the answer {list(turn.output)} "
                    f"differs from {list(expected.output)}, computed without any cache"
                )
            if phase.from_pool and not turn.pool:
                found.append(f"{phase.name}, turn {number}: no token came from the pool")
    return found
