"""Copying a batch between an engine's pages and the segment, with checksums, for as long as the engine waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from hicache_mooncake.memory import Extent, copy_and_check, piece_addresses
from hicache_mooncake.native import library as native
from hicache_mooncake.node.lanes import CopyLanes
from hicache_mooncake.node.moves import Wanted
from hicache_mooncake.protocol.messages import Status

_STATUS = {native.COPIED: int(Status.OK), native.LATE: int(Status.TIMEOUT), native.REVOKED: int(Status.REVOKED)}


class Copier:
    """Thread-safe. ``library``: the compiled copying, or None to copy in Python."""

    def __init__(self, threads: int, library: native.Library | None = native.library) -> None:
        self._lanes = CopyLanes(threads)
        self._library = library

    def run(
        self,
        keys: Sequence[str],
        targets: Sequence[Sequence[Extent]],
        sources: Sequence[Sequence[Extent]],
        size: int,
        wanted: Wanted,
        deadline: float,
    ) -> tuple[list[int], list[int]]:
        """Copy the bytes of every object, ``size`` in all; when this returns, all copying has ended.

        For each a status and, with ``OK``, the checksum of what lies in its target now. ``TIMEOUT``: its turn came
        after the deadline. ``REVOKED``: the engine gave up before, or while its bytes were read, which may not be
        those that it meant.
        """
        if self._library is None:
            return self._run_in_python(keys, targets, sources, size, wanted, deadline)
        jobs = native.Jobs(keys, list(map(piece_addresses, targets, sources)))
        library = self._library
        self._lanes.together(lambda: library.copy(jobs, wanted.word, wanted.request, deadline), size)
        return [_STATUS[outcome] for outcome in jobs.outcomes], jobs.digests

    def _run_in_python(
        self,
        keys: Sequence[str],
        targets: Sequence[Sequence[Extent]],
        sources: Sequence[Sequence[Extent]],
        size: int,
        wanted: Wanted,
        deadline: float,
    ) -> tuple[list[int], list[int]]:
        statuses, digests = [int(Status.TIMEOUT)] * len(keys), [0] * len(keys)

        def copy(at: int) -> None:
            if time.monotonic() > deadline:
                return
            if wanted():
                digests[at] = copy_and_check(keys[at], targets[at], sources[at])
            statuses[at] = Status.OK if wanted() else Status.REVOKED

        self._lanes.run(copy, len(keys), size)
        return statuses, digests

    def each(self, work: Callable[[int], None], count: int, size: int) -> None:
        """``work(0)`` .. ``work(count - 1)`` over the same threads, for ``size`` bytes in all."""
        self._lanes.run(work, count, size)

    def close(self) -> None:
        self._lanes.close()
