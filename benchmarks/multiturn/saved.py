"""Prefill time that hits saved, and what they cost: is the pool worth it?

A hit saves the time that its tokens would have taken to compute, and costs the time to look them up, to move them
from L3 into host memory and to load them from there onto the device. What computing costs is a
:class:`~.cost_profile.Profile`, given or fitted to the runs themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.multiturn.cost_profile import Prefill, Profile, fit_prefill
from benchmarks.multiturn.figures import TIERS, cached
from benchmarks.multiturn.results import Row, Run

_ENOUGH = 12
"""Requests that a fit needs at least: it has three coefficients."""


@dataclass(frozen=True)
class PrefillCost:
    """Seconds to compute. ``basis`` says in words where they come from; ``error`` is the fit's, root mean square,
    relative."""

    profile: Profile
    basis: str
    error: float | None = None

    def seconds(self, new: int, prefix: int) -> float:
        return self.profile.chunked_prefill(new, prefix) if new > 0 else 0.0


@dataclass(frozen=True)
class Benefit:
    """Seconds over a whole run. ``saved`` by tier. ``waited`` is what requests waited for L3 (lookup and move as users
    feel them); ``lookup`` and ``move`` what the pool's nodes worked on them, None where they were not asked; ``load``
    from host to device. None where the server does not tell.
    """

    saved: dict[str, float]
    waited: float | None
    lookup: float | None
    move: float | None
    load: float | None
    requests: int

    @property
    def total_saved(self) -> float:
        return sum(self.saved.values())

    @property
    def net(self) -> float | None:
        """Saved − lookup − move − load: what is waited for stands for lookup and move. None where that is not known."""
        if self.waited is None:
            return None
        return self.total_saved - self.waited - (self.load or 0.0)


def prefill_cost(runs: Sequence[Run], profile: Profile | None = None) -> PrefillCost | None:
    """What prefill costs on the server of these runs: ``profile``, or a fit to the times that the server tells
    (SGLang's ``/generate``), of requests that had the server to themselves if there are enough. None where nothing
    tells.
    """
    if profile is not None:
        return PrefillCost(profile, f"profile {profile.name}")
    chunk = next((_chunk(run) for run in runs), 8192)
    alone = [sample for run in runs for sample in _samples(run.answered, alone=True)]
    every = [sample for run in runs for sample in _samples(run.answered, alone=False)]
    for samples, basis in (
        (alone, "requests that had the server to themselves"),
        (every, "all requests, batches shared"),
    ):
        if len(samples) >= _ENOUGH:
            fit = fit_prefill(samples, chunk)
            base, per_token, per_pair = fit.coefficients
            fitted = Profile(
                name="fitted",
                source=f"{len(samples)} {basis}",
                kv_bytes_per_token=1,
                per_token=per_token,
                per_pair=per_pair,
                pass_base=base,
                chunk_tokens=chunk,
            )
            return PrefillCost(fitted, f"fitted to {len(samples)} of {basis}", fit.rms_error)
    return None


def _chunk(run: Run) -> int:
    chunk = run.metadata.get("server", {}).get("chunked_prefill_size")
    return chunk if isinstance(chunk, int) and chunk > 0 else 1 << 20


def _samples(rows: Sequence[Row], *, alone: bool) -> list[Prefill]:
    """Prefills that the server timed. ``alone``: no other request was between sending and first token meanwhile."""
    samples = []
    ordered = sorted((row for row in rows if row.first_token_s is not None), key=lambda row: row.sent_s)
    busy_until = -1.0
    for at, row in enumerate(ordered):
        following = ordered[at + 1].sent_s if at + 1 < len(ordered) else float("inf")
        shared = busy_until > row.sent_s or following < (row.first_token_s or 0.0)
        busy_until = max(busy_until, row.done_s)
        new = row.prompt_tokens - row.cached_tokens
        if row.prefill_s and row.cached_known and new > 0 and not (alone and shared):
            samples.append(Prefill(new, row.cached_tokens, row.prefill_s))
    return samples


def benefit(run: Run, cost: PrefillCost) -> Benefit:
    """What a run's hits saved and cost, over all its requests."""
    saved = dict.fromkeys(TIERS, 0.0)
    rows = [row for row in run.answered if row.cached_known]
    for row in rows:
        prefix = 0
        left = cost.seconds(row.prompt_tokens, 0)
        for tier in TIERS:  # in the order of the prefix: what lies nearer comes first
            prefix += cached(row, tier)
            after = cost.seconds(row.prompt_tokens - prefix, prefix)
            saved[tier] += left - after
            left = after
    waits = [row.storage_wait_s for row in rows if row.storage_wait_s is not None]
    pool = run.metadata.get("pool") or {}
    return Benefit(
        saved,
        sum(waits) if waits else None,
        pool.get("hicache_mooncake_request_seconds_sum{exists}"),
        pool.get("hicache_mooncake_request_seconds_sum{get}"),
        run.metrics.get("sglang:load_back_duration_seconds_sum", 0.0) if run.metrics else None,
        len(rows),
    )
