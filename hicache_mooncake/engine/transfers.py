"""Moves batches of pages between host pools and the node: in place where the pool is lent, else through staging."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hicache_mooncake.engine.host_pools import Located
from hicache_mooncake.engine.session import NodeSession
from hicache_mooncake.memory import Memory
from hicache_mooncake.protocol import messages as m


class Batch(NamedTuple):
    """Pages of one pool to be moved: what they are called and where they lie."""

    keys: m.Keys
    located: Located


class PageMover:
    """Thread-safe. ``lent`` are the ranges of this process that the node maps."""

    def __init__(self, session: NodeSession, *, staging_size: int) -> None:
        self._session = session
        self._staging_size = staging_size
        self._lent: list[tuple[int, int]] = []

    def add_lent(self, base: int, size: int) -> None:
        """The node maps these bytes from now on."""
        self._lent.append((base, base + size))

    def move(self, kind: type[m.Put] | type[m.Get], batches: Sequence[Batch], deadline: float) -> list[list[bool]]:
        """For each batch, for each page, whether all its objects were moved. Never later than ``deadline``."""
        results = [np.zeros(len(batch.located.addresses), dtype=bool) for batch in batches]
        in_place = self._session.can_write_in_place
        direct = [at for at, batch in enumerate(batches) if in_place and self._is_lent(batch.located)]
        if direct:
            groups = [
                m.Pages(batches[at].keys, batches[at].located.lengths, batches[at].located.addresses.tobytes())
                for at in direct
            ]
            statuses = self._session.move(kind, groups, deadline)
            for at, of_group in zip(direct, statuses or [], strict=False):
                results[at] = np.frombuffer(of_group, dtype=np.uint8) == m.Status.OK
        for at, batch in enumerate(batches):
            if at not in direct:
                self._move_staged(kind, batch, results[at], deadline)
        by_page: list[list[bool]] = []
        for batch, result in zip(batches, results, strict=True):
            width = len(batch.keys.parts)
            objects: list[bool] = result.tolist()
            if width > 1:
                objects = [all(objects[at : at + width]) for at in range(0, len(objects), width)]
            by_page.append(objects)
        return by_page

    def _is_lent(self, located: Located) -> bool:
        if not located.addresses.size:
            return True
        for column, length in enumerate(located.lengths):
            low = int(located.addresses[:, column].min())
            high = int(located.addresses[:, column].max()) + length
            if not any(start <= low and high <= end for start, end in self._lent):
                return False
        return True

    def _move_staged(
        self, kind: type[m.Put] | type[m.Get], batch: Batch, result: npt.NDArray[np.bool_], deadline: float
    ) -> None:
        parts = len(batch.keys.parts)
        size = sum(batch.located.lengths)
        pages_at_once = max(1, self._staging_size // (size * parts))
        for first in range(0, len(batch.keys.hashes), pages_at_once):
            if time.monotonic() > deadline:
                return
            hashes = batch.keys.hashes[first : first + pages_at_once]
            objects = slice(first * parts, (first + len(hashes)) * parts)
            keys = m.Keys(batch.keys.digest, batch.keys.parts, hashes)
            located = Located(batch.located.addresses[objects], batch.located.lengths)
            if not self._move_piece(kind, keys, located, result[objects], deadline):
                return

    def _move_piece(
        self,
        kind: type[m.Put] | type[m.Get],
        keys: m.Keys,
        located: Located,
        result: npt.NDArray[np.bool_],
        deadline: float,
    ) -> bool:
        """One staging area full; ``result`` is a view that gets the outcome by object."""
        size = sum(located.lengths)
        objects = len(located.addresses)
        ends = np.cumsum([0, *located.lengths[:-1]]).astype(np.uint64)

        def places(staging: Memory) -> npt.NDArray[np.uint64]:
            starts = np.uint64(staging.address) + np.arange(objects, dtype=np.uint64) * np.uint64(size)
            staged: npt.NDArray[np.uint64] = starts[:, None] + ends[None, :]
            return staged

        def build(staging: Memory) -> m.Pages:
            staged = places(staging)
            if kind is m.Put:
                _copy(staged, located.addresses, located.lengths)
            return m.Pages(keys, located.lengths, staged.tobytes())

        def done(staging: Memory, statuses: bytes) -> None:
            moved = np.frombuffer(statuses, dtype=np.uint8) == m.Status.OK
            if kind is m.Get:
                _copy(located.addresses[moved], places(staging)[moved], located.lengths)
            result[:] = moved

        area = max(self._staging_size, size * objects)
        return self._session.move_staged(kind, build, done, area, deadline)


def _copy(target: npt.NDArray[np.uint64], source: npt.NDArray[np.uint64], lengths: Sequence[int]) -> None:
    """Copy object by object, extent by extent; the GIL is released in each copy."""
    for to_row, from_row in zip(target.tolist(), source.tolist(), strict=True):
        for to, start, length in zip(to_row, from_row, lengths, strict=True):
            ctypes.memmove(to, start, length)
