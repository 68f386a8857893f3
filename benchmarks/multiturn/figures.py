"""What a run came to: times by turn, hits by tier, throughput, goodput, traffic between tiers. Pure arithmetic on
rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.multiturn.results import Row, Run

TIERS = ("device", "host", "storage")


@dataclass(frozen=True)
class Limits:
    """A request is good when its first token and its TBT came within these seconds."""

    ttft: float = 2.0
    tbt: float = 0.2


@dataclass(frozen=True)
class Spread:
    """Seconds of many requests. None where there are none."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread:
        known = np.array([value for value in values if value is not None])
        if not len(known):
            return cls(None, None, None, None)
        return cls(float(known.mean()), *(float(np.percentile(known, share)) for share in (50, 90, 99)))


@dataclass(frozen=True)
class Hits:
    """Prompt tokens and requests by where their KV was found.

    ``tokens`` are shares of all prompt tokens by tier (token-weighted hit ratio), ``requests`` the shares of requests
    that found anything there; ``any_request`` of those that found anything anywhere. None where the server does not
    tell.
    """

    tokens: dict[str, float] | None
    requests: dict[str, float] | None
    any_request: float | None

    @property
    def token_ratio(self) -> float | None:
        return None if self.tokens is None else sum(self.tokens.values())

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Hits:
        known = [row for row in rows if row.cached_known]
        total = sum(row.prompt_tokens for row in known)
        if not total:
            return cls(None, None, None)
        by_tier = {tier: [cached(row, tier) for row in known] for tier in TIERS}
        return cls(
            {tier: sum(found) / total for tier, found in by_tier.items()},
            {tier: sum(tokens > 0 for tokens in found) / len(known) for tier, found in by_tier.items()},
            sum(row.cached_tokens > 0 for row in known) / len(known),
        )


@dataclass(frozen=True)
class Turn:
    """The requests that were the same turn of their sessions."""

    number: int
    requests: int
    failed: int
    prompt_tokens: float
    ttft: Spread
    hits: Hits


@dataclass(frozen=True)
class Figures:
    """A run in figures. ``seconds`` is from the first request due to the last answered."""

    name: str
    requests: int
    failed: int
    retried: int
    seconds: float
    prompt_tokens: int
    output_tokens: int
    ttft: Spread
    tbt: Spread
    waited: Spread
    hits: Hits
    good: float
    limits: Limits
    turns: tuple[Turn, ...]

    @property
    def input_per_s(self) -> float:
        """Prompt tokens a second, computed or found: what users get, not what the device does."""
        return self.prompt_tokens / self.seconds if self.seconds else 0.0

    @property
    def output_per_s(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def goodput(self) -> float:
        """Requests a second within the limits; failed ones are not good."""
        return self.good * self.requests / self.seconds if self.seconds else 0.0


def figures(run: Run, limits: Limits) -> Figures:
    """The figures of a run. Times and tokens are of the requests that were answered to the end."""
    answered = run.answered
    begin = min((row.due_s for row in run.rows), default=0.0)
    good = sum(is_good(row, limits) for row in run.rows)
    return Figures(
        name=run.name,
        requests=len(run.rows),
        failed=len(run.rows) - len(answered),
        retried=sum(row.retries > 0 for row in run.rows),
        seconds=max((row.done_s for row in run.rows), default=0.0) - begin,
        prompt_tokens=sum(row.prompt_tokens for row in answered),
        output_tokens=sum(row.output_tokens for row in answered),
        ttft=Spread.of(row.ttft_s for row in answered),
        tbt=Spread.of(row.tbt_s for row in answered),
        waited=Spread.of(row.sent_s - row.due_s for row in run.rows),
        hits=Hits.of(answered),
        good=good / len(run.rows) if run.rows else 0.0,
        limits=limits,
        turns=tuple(_turns(run.rows)),
    )


def is_good(row: Row, limits: Limits) -> bool:
    """Whether a request met both limits; an answer of one token has no time between tokens."""
    in_time = not row.error and row.ttft_s is not None and row.ttft_s <= limits.ttft
    return in_time and (row.tbt_s is None or row.tbt_s <= limits.tbt)


def cached(row: Row, tier: str) -> int:
    """Prompt tokens of a request that were found in a tier."""
    return int(getattr(row, f"cached_{tier}"))


def _turns(rows: Sequence[Row]) -> Iterable[Turn]:
    by_turn: dict[int, list[Row]] = {}
    for row in rows:
        by_turn.setdefault(row.turn, []).append(row)
    for number, same in sorted(by_turn.items()):
        answered = [row for row in same if not row.error]
        yield Turn(
            number,
            len(same),
            len(same) - len(answered),
            sum(row.prompt_tokens for row in answered) / len(answered) if answered else 0.0,
            Spread.of(row.ttft_s for row in answered),
            Hits.of(answered),
        )


@dataclass(frozen=True)
class Traffic:
    """Tokens and bytes that went from one tier to another; None where the server does not count them."""

    way: str
    tokens: float | None
    bytes: float | None


_WAYS = (
    ("device → host", "sglang:hicache_backup_tokens_total", "sglang:hicache_backup_bytes_total"),
    ("host → device", "sglang:load_back_tokens_total", "sglang:load_back_bytes_total"),
    ("host → L3", "sglang:backuped_tokens_total", ""),
    ("L3 → host", "sglang:prefetched_tokens_total", ""),
)


def traffic(run: Run) -> list[Traffic]:
    """What went between the tiers during the run, by the counters of SGLang; where it counts tokens only, bytes
    follow from the bytes a token has on the way between device and host.
    """
    grown = run.metrics
    per_token = next(
        (grown[size] / grown[count] for _, count, size in _WAYS if grown.get(count) and grown.get(size)), None
    )
    found = []
    for way, count, size in _WAYS:
        tokens = grown.get(count, 0.0) if grown else None
        known = grown.get(size) if size else None
        derived = tokens * per_token if tokens is not None and per_token else None
        found.append(Traffic(way, tokens, known if known is not None else derived))
    return found
