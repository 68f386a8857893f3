"""Two runs against each other, with intervals that say how sure the difference is.

Requests of the same name are the same request in both runs, so they are compared pairwise; where the runs have few in
common, as whole samples. Sessions are drawn anew, not requests: turns of one session share their luck, and drawing
them one by one would make intervals too narrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.multiturn.results import Row, Run

_DRAWS = 4000
_LEVEL = 0.95

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Change:
    """A figure in two runs. ``ratio`` is second / first, ``low`` to ``high`` its 95 % interval; ``sure`` when 1 is
    outside."""

    name: str
    first: float
    second: float
    ratio: float
    low: float
    high: float

    @property
    def sure(self) -> bool:
        return not self.low <= 1 <= self.high


@dataclass(frozen=True)
class Comparison:
    """``second`` against ``first``. ``answers_equal`` counts pairs whose outputs are equal; None where none can be
    told."""

    first: str
    second: str
    pairs: int
    paired: bool
    answers_equal: int
    changes: tuple[Change, ...]


def compare(first: Run, second: Run, seed: int = 1) -> Comparison:
    """Compare the times to the first token of two runs. Requests that failed in either are left out of pairs."""
    ours = {row.request_id: row for row in first.answered if row.ttft_s is not None}
    theirs = {row.request_id: row for row in second.answered if row.ttft_s is not None}
    common = [name for name in ours if name in theirs]
    paired = len(common) * 2 > max(len(ours), len(theirs))
    one = [ours[name] for name in common] if paired else list(ours.values())
    other = [theirs[name] for name in common] if paired else list(theirs.values())
    source = np.random.default_rng(seed)
    changes = _changes("", one, other, paired, source)
    for turn in sorted({row.turn for row in one} & {row.turn for row in other}):
        same = [(a, b) for a, b in zip(one, other, strict=True) if a.turn == turn] if paired else []
        in_one = [a for a, _ in same] if paired else [row for row in one if row.turn == turn]
        in_other = [b for _, b in same] if paired else [row for row in other if row.turn == turn]
        changes += _changes(f"turn {turn}", in_one, in_other, paired, source)[:1]
    equal = sum(ours[name].answer == theirs[name].answer for name in common)
    return Comparison(first.name, second.name, len(common), paired, equal, tuple(changes))


def _changes(
    where: str, one: Sequence[Row], other: Sequence[Row], paired: bool, source: np.random.Generator
) -> list[Change]:
    if not one or not other:
        return []
    groups_one, sessions = _by_session(one)
    groups_other, sessions_other = _by_session(other)
    drawn = source.integers(0, sessions, (_DRAWS, sessions))
    drawn_other = drawn if paired else source.integers(0, sessions_other, (_DRAWS, sessions_other))
    found = []
    means = (_drawn_means(groups_one, drawn), _drawn_means(groups_other, drawn_other))
    found.append(_change(f"mean TTFT{_of(where)}", _mean(groups_one), _mean(groups_other), *means))
    for share in (50, 99) if not where else ():
        both = (_drawn_percentiles(groups_one, drawn, share), _drawn_percentiles(groups_other, drawn_other, share))
        first, second = (float(np.percentile(np.concatenate(groups), share)) for groups in (groups_one, groups_other))
        found.append(_change(f"p{share} TTFT", first, second, *both))
    return found


def _of(where: str) -> str:
    return f", {where}" if where else ""


def _by_session(rows: Sequence[Row]) -> tuple[list[Floats], int]:
    groups: dict[str, list[float]] = {}
    for row in rows:
        groups.setdefault(row.session_id, []).append(row.ttft_s or 0.0)
    return [np.array(group) for group in groups.values()], len(groups)


def _mean(groups: Sequence[Floats]) -> float:
    return float(np.concatenate(groups).mean())


def _drawn_means(groups: Sequence[Floats], drawn: NDArray[np.int64]) -> Floats:
    sums = np.array([group.sum() for group in groups])
    sizes = np.array([len(group) for group in groups])
    means: Floats = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    return means


def _drawn_percentiles(groups: Sequence[Floats], drawn: NDArray[np.int64], share: float) -> Floats:
    some = drawn[: _DRAWS // 8]
    return np.array([np.percentile(np.concatenate([groups[at] for at in draw]), share) for draw in some])


def _change(name: str, first: float, second: float, drawn_first: Floats, drawn_second: Floats) -> Change:
    ratios = drawn_second / np.maximum(drawn_first, 1e-9)
    low, high = np.percentile(ratios, [100 * (1 - _LEVEL) / 2, 100 * (1 + _LEVEL) / 2])
    return Change(name, first, second, second / max(first, 1e-9), float(low), float(high))
