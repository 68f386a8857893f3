"""One turn of a session asked of a server: its prompt made, sent, timed, and written down as a row."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from benchmarks.multiturn.api import Answer, Prompt
from benchmarks.multiturn.client import Client, Exchange
from benchmarks.multiturn.results import Row, Writer
from benchmarks.multiturn.tokens import Ids, Vocabulary
from benchmarks.multiturn.workload import Blocks, Session, Text, Turn
from hicache_mooncake.errors import ConfigError


@dataclass(frozen=True)
class Endpoint:
    """A server. ``api`` is ``sglang`` (POST /generate) or ``openai`` (POST /v1/completions, for SGLang, vLLM and
    others).

    ``model`` is the name that the OpenAI API wants; empty: the first that the server lists. ``pool_metrics`` are the
    metrics pages of the pool's nodes, whose counters are read before and after, as the server's are.
    """

    url: str
    api: Literal["sglang", "openai"] = "sglang"
    model: str = ""
    api_key: str = field(default="", repr=False)
    pool_metrics: tuple[str, ...] = ()


@dataclass(frozen=True)
class Options:
    """How a workload is asked.

    ``loop``: ``open`` starts a turn at its time ``at``, ``closed`` after its think time. ``in_flight`` bounds
    requests (and connections) at a time, ``sessions`` (closed loop) how many sessions run at a time, 0: all.
    ``rate`` (closed loop) starts at most that many requests a second, at Poisson times, 0: unbounded. ``vocabulary``
    are the token ids that blocks may become, first and one past the last. ``form``: blocks go as ``ids`` or as
    ``text``. ``output_tokens`` replaces the workload's own, 0: as they are. Times in seconds.
    """

    loop: Literal["open", "closed"] = "closed"
    in_flight: int = 64
    sessions: int = 0
    rate: float = 0.0
    vocabulary: tuple[int, int] = (1000, 30000)
    form: Literal["ids", "text"] = "ids"
    output_tokens: int = 0
    request_timeout: float = 600.0
    retries: int = 2
    seed: int = 1

    def __post_init__(self) -> None:
        for name, least in (("in_flight", 1), ("sessions", 0), ("rate", 0), ("output_tokens", 0), ("retries", 0)):
            value = getattr(self, name)
            if not least <= value < float("inf"):
                raise ConfigError(name, value, f"{least} at least")
        Vocabulary(*self.vocabulary)


class History:
    """What a session has said and heard so far, as token ids or as text."""

    def __init__(self, vocabulary: Vocabulary, form: str) -> None:
        self._vocabulary = vocabulary
        self._form = form
        self._ids: Ids = np.empty(0, np.uint32)
        self._text = ""

    def prompt(self, turn: Turn) -> Prompt:
        """The whole prompt of a turn, which is remembered."""
        if self._form == "text" or any(isinstance(part, Text) for part in turn.prompt):
            new = self._vocabulary.text(turn.prompt)
            self._text = self._text + new if turn.continues else new
            return Prompt(None, self._text)
        ids = self._vocabulary.ids(turn.prompt)
        self._ids = np.concatenate((self._ids, ids)) if turn.continues else ids
        return Prompt(self._ids.tolist())

    def heard(self, session: Session, turn: Turn, answer: Answer) -> None:
        """The answer goes into the next prompt. Where a server tells no ids, tokens of the same number stand for it."""
        if self._text:
            self._text += answer.text
        elif answer.ids is not None:
            self._ids = np.concatenate((self._ids, np.asarray(answer.ids, np.uint32)))
        elif answer.output_tokens:
            size = max(answer.output_tokens, self._vocabulary.digits)
            stand_in = Blocks(f"answer {session.request_id(turn)}", (0,), size, answer.output_tokens)
            self._ids = np.concatenate((self._ids, self._vocabulary.ids((stand_in,))))


class Asking:
    """Asks turns and writes rows; at most ``options.in_flight`` at a time, at most ``options.rate`` a second."""

    def __init__(
        self,
        client: Client,
        vocabulary: Vocabulary,
        options: Options,
        writer: Writer,
        requests: int | None,
        progress: Callable[[int, int | None, str], None] | None,
    ) -> None:
        self.options = options
        self.done = self.failed = self.retried = 0
        self._client = client
        self._vocabulary = vocabulary
        self._writer = writer
        self._requests = requests
        self._progress = progress
        self._places = asyncio.Semaphore(options.in_flight)
        self._arrivals = random.Random(options.seed)
        self._next_at = 0.0
        self._begun = time.perf_counter()

    def now(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._begun

    def history(self) -> History:
        return History(self._vocabulary, self.options.form)

    async def place(self) -> None:
        """Wait for one of the places in flight; :meth:`turn` gives it back."""
        await self._places.acquire()

    async def turn(self, session: Session, turn: Turn, history: History, due: float, *, placed: bool = False) -> None:
        """Ask one turn that was due at ``due``. ``placed``: the caller has called :meth:`place`."""
        if not placed:
            await self.place()
        try:
            if self.options.rate:
                await self._wait_for_rate()
            prompt = history.prompt(turn)
            exchange = await self._client.ask(prompt, self.options.output_tokens or turn.output_tokens)
        finally:
            self._places.release()
        history.heard(session, turn, exchange.answer)
        self._write(session, turn, prompt, due, exchange)

    async def _wait_for_rate(self) -> None:
        """Poisson times, one after the other: a request that comes late does not let the next ones come closer."""
        at = max(self.now(), self._next_at)
        self._next_at = at + self._arrivals.expovariate(self.options.rate)
        if at > self.now():
            await asyncio.sleep(at - self.now())

    def _write(self, session: Session, turn: Turn, prompt: Prompt, due: float, exchange: Exchange) -> None:
        answer = exchange.answer
        first = None if answer.first is None else answer.first - self._begun
        sent = exchange.sent - self._begun
        gaps = answer.gaps
        cached = answer.cached or (0, 0, 0)
        known = answer.prompt_tokens
        self._writer.add(
            Row(
                request_id=session.request_id(turn),
                session_id=session.id,
                parent_id=session.parent,
                turn=turn.number,
                due_s=due,
                sent_s=sent,
                first_token_s=first,
                done_s=exchange.done - self._begun,
                ttft_s=None if first is None else first - (due if self.options.loop == "open" else sent),
                tbt_s=_mean_of_longest(gaps),
                tbt_mean_s=sum(gaps) / len(gaps) if gaps else None,
                tbt_max_s=max(gaps, default=None),
                prompt_tokens=known if known is not None else len(prompt.ids or ()),
                output_tokens=answer.output_tokens,
                cached_known=answer.cached is not None,
                cached_device=cached[0],
                cached_host=cached[1],
                cached_storage=cached[2],
                storage_wait_s=answer.storage_wait,
                queue_s=answer.queue,
                prefill_s=answer.prefill,
                retries=exchange.retries,
                error=exchange.error,
                answer=answer.digest,
            )
        )
        self.done += 1
        self.failed += bool(exchange.error)
        self.retried += bool(exchange.retries)
        if self._progress:
            self._progress(self.done, self._requests, f"{self.failed} failed" if self.failed else "")


def _mean_of_longest(gaps: Sequence[float]) -> float | None:
    """The mean of the longest tenth of the gaps between tokens, at least of one: TBT as Mooncake's paper has it."""
    if not gaps:
        return None
    longest = sorted(gaps)[-max(1, len(gaps) // 10) :]
    return sum(longest) / len(longest)
