"""What is asked of a server: sessions of turns, each a prompt made of blocks or text. Pure data, no I/O.

A *session* is one conversation or agent: its turns come one after the other. A *turn* is one request. Its prompt is
a tuple of parts, sent one behind the other; a part is a run of token blocks known by their hashes (:class:`Blocks`)
or text (:class:`Text`). How blocks become token ids is :mod:`benchmarks.multiturn.tokens`'s to say.

When a turn starts is told in two ways, and the replay takes one of them:

- open loop: ``at``, seconds from the workload's beginning, whatever the server does;
- closed loop: ``think`` seconds after the session's previous turn was answered.

>>> session = Session("s", (Turn(1, (Blocks("trace", (7, 8), 16, 20),), output_tokens=4, at=0.5),))
>>> session.turns[0].known_tokens, session.request_id(session.turns[0])
(20, 's/1')
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

Setting = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Blocks:
    """``length`` tokens, named by the hashes of blocks of ``size`` tokens; the last block may be cut.

    Equal ids in one ``space`` are equal tokens, others differ. Hashes of traces cover the whole prefix, so an id
    stands behind one and the same prefix only; a reader that has other hashes gives a space to each.
    """

    space: str
    ids: tuple[int, ...]
    size: int
    length: int

    def __post_init__(self) -> None:
        if not (len(self.ids) - 1) * self.size < self.length <= len(self.ids) * self.size:
            raise ValueError(f"{len(self.ids)} blocks of {self.size} tokens cannot hold {self.length} tokens")


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt as text, for the server's tokenizer to cut."""

    text: str


Part = Blocks | Text


@dataclass(frozen=True, slots=True)
class Turn:
    """One request.

    ``continues``: the prompt is only what is new; before it goes all that the session sent and the server answered
    so far. Otherwise the prompt is whole. ``after`` are sessions (an agent's subagents) that start when this turn is
    due and whose end it waits for. ``number`` counts a session's turns from 1, also when a reader gives its turns as
    separate sessions.
    """

    number: int
    prompt: tuple[Part, ...]
    output_tokens: int
    continues: bool = False
    at: float | None = None
    think: float = 0.0
    after: tuple[Session, ...] = ()

    @property
    def known_tokens(self) -> int | None:
        """Tokens of ``prompt``, or None where only a tokenizer can tell."""
        total = 0
        for part in self.prompt:
            if isinstance(part, Text):
                return None
            total += part.length
        return total


@dataclass(frozen=True, slots=True)
class Session:
    """Turns that follow each other. ``parent`` is the session that this one runs for, or empty; ``after`` are sessions
    that start when the last turn was answered.
    """

    id: str
    turns: tuple[Turn, ...]
    parent: str = ""
    after: tuple[Session, ...] = ()

    def request_id(self, turn: Turn) -> str:
        """The same request has the same name in every run of the workload: comparisons pair by it."""
        return f"{self.id}/{turn.number}"


@dataclass(frozen=True)
class Workload:
    """What one run asks.

    ``sessions`` reads the workload anew on each call, lazily: for an open loop in the order of ``at``. ``barrier``: no
    session starts its next turn before all have ended this one. ``requests`` is how many turns there are in all,
    where that is known before the end. ``settings`` go into the results: which trace, which factors.
    """

    name: str
    sessions: Callable[[], Iterator[Session]]
    barrier: bool = False
    requests: int | None = None
    settings: Mapping[str, Setting] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)
