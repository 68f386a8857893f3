"""From which pages exist to how long a prefix can be restored: SGLang's hit policies, as pure functions.

The rules are those of ``HiCacheStorage.batch_exists_v2`` in SGLang 0.5.23 (``mem_cache/hicache_storage.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class PoolQuery(NamedTuple):
    """One side pool of an existence query.

    ``present``: one truth value a page of the query. ``window``: pages that a trailing pool needs at its end.
    ``block_pages`` and ``group_pages``: the geometry of block groups (FULL pages a block; objects a group).
    """

    name: str
    policy: str
    present: Sequence[int]
    window: int = 1
    block_pages: int = 0
    group_pages: int = 0


class Restorable(NamedTuple):
    """``pages``: the longest usable prefix. ``boundaries``: pool -> its own verdict, where it has one above zero.

    ``lengths``: every prefix length that all pools can serve, ascending. A trailing pool leaves holes in it, so ranks
    have to intersect these sets; the minimum of their maxima may be a length that some rank cannot serve.
    """

    pages: int
    boundaries: dict[str, int]
    lengths: list[int]


def leading_run(present: Sequence[int]) -> int:
    """How many pages from the first on are there without a gap."""
    for position, here in enumerate(present):
        if not here:
            return position
    return len(present)


def trailing_lengths(present: Sequence[int], limit: int, window: int) -> list[int]:
    """Prefix lengths up to ``limit`` whose last ``window`` pages (fewer at the very start) are all there."""
    lengths = []
    run = 0
    for position in range(limit):
        run = run + 1 if present[position] else 0
        length = position + 1
        if run >= min(window, length):
            lengths.append(length)
    return lengths


def restorable(kv_pages: int, pools: Sequence[PoolQuery]) -> Restorable:
    """What can be restored when the KV pool holds the first ``kv_pages`` pages.

    Raises ``ValueError`` for a policy that this release of SGLang does not define: better no hit than a wrong one.
    """
    boundaries = {"kv": kv_pages} if kv_pages else {}
    lengths = list(range(1, kv_pages + 1))
    for pool in pools:
        if pool.policy == "all_pages":
            boundary = leading_run(pool.present[:kv_pages])
            lengths = [length for length in lengths if length <= boundary]
        elif pool.policy == "trailing_pages":
            own = trailing_lengths(pool.present, kv_pages, max(1, pool.window))
            boundary = own[-1] if own else 0
            allowed = set(own)
            lengths = [length for length in lengths if length in allowed]
        elif pool.policy == "block_groups":
            boundary = _covered_by_groups(pool, kv_pages)  # reports, never gates the KV hit
        else:
            raise ValueError(f"hit policy {pool.policy!r} of pool {pool.name!r} is unknown")
        if boundary:
            boundaries[pool.name] = boundary
    return Restorable(lengths[-1] if lengths else 0, boundaries, lengths)


def _covered_by_groups(pool: PoolQuery, kv_pages: int) -> int:
    """FULL pages that the leading complete groups of a block-group pool cover.

    A block of ``block_pages`` FULL pages is kept as one group of ``group_pages`` objects, named by the last page hashes
    of the block, the ones at its boundary.
    """
    block = max(1, pool.block_pages)
    group = min(block, max(1, pool.group_pages))
    covered = 0
    while covered + block <= kv_pages and all(pool.present[covered + block - group : covered + block]):
        covered += block
    return covered
