"""A batch as work requests: one stream of bytes, cut where it changes place on either side. Pure numpy, no device.

The pieces here and the pieces there, each in order, describe the same bytes. Every request moves one range of the
other side's memory, to or from up to ``max_pieces`` pieces of ours. What changes with the path that a request takes,
its keys, is filled in when it is handed out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import abi

LARGEST_REQUEST = 256 << 20
"""Bytes of one request: below the largest message of any port (1 or 2 GiB)."""

U64 = NDArray[np.uint64]
Index = NDArray[np.int64]


class Places(NamedTuple):
    """Extents in stream order: where each begins, its bytes, and which key it is reached by."""

    addresses: U64
    lengths: U64
    keys: Index


class Plan:
    """Work requests of a batch.

    ``starts`` are the positions in the stream where they begin, and its end. Ranges of requests are handed out by
    :meth:`chain`; a request that was not carried out may be handed out again, also with other keys.
    """

    def __init__(self, local: Places, remote: Places, *, op: int, max_pieces: int, slice_bytes: int = 0) -> None:
        """With ``slice_bytes`` no request is larger, so that large extents can take several paths.

        Raises ``ValueError`` when the two sides do not have the same length.
        """
        local_ends, remote_ends = np.cumsum(local.lengths), np.cumsum(remote.lengths)
        self.size = total = int(local_ends[-1]) if len(local_ends) else 0
        if not total or len(remote_ends) == 0 or int(remote_ends[-1]) != total:
            raise ValueError("the two sides of a transfer have different lengths")
        limit = min(slice_bytes or LARGEST_REQUEST, LARGEST_REQUEST)
        cuts = remote_ends
        if int(remote.lengths.max()) > limit:
            cuts = np.union1d(remote_ends, np.arange(limit, total, limit, dtype=np.uint64))
        # numpy's union1d sorts both anew; where they are the same, as for pages of one extent, there is nothing to do.
        ends = cuts if np.array_equal(cuts, local_ends) else np.union1d(local_ends, cuts)
        starts = np.empty_like(ends)
        starts[0] = 0
        starts[1:] = ends[:-1]
        at_local = np.searchsorted(local_ends, starts, side="right")
        at_remote = np.searchsorted(remote_ends, starts, side="right")
        run = np.searchsorted(cuts, starts, side="right")
        within = np.arange(len(starts)) - np.searchsorted(run, run, side="left")
        first = np.flatnonzero(within % max_pieces == 0)

        self.pieces = pieces = np.empty(len(starts), abi.PIECE)
        pieces["address"] = local.addresses[at_local] + (starts - (local_ends - local.lengths)[at_local])
        pieces["length"] = ends - starts
        self._local_keys = local.keys[at_local]
        self._first_piece = np.append(first, len(starts))
        self.requests = requests = np.zeros(len(first), abi.WORK)
        requests["id"] = np.arange(len(first))
        requests["pieces"] = pieces.ctypes.data + abi.PIECE.itemsize * first
        requests["count"] = np.diff(self._first_piece)
        requests["op"] = op
        begin, where = starts[first], at_remote[first]
        requests["remote"] = remote.addresses[where] + (begin - (remote_ends - remote.lengths)[where])
        self._remote_keys = remote.keys[where]
        self._at = requests.ctypes.data
        self._next = self._at + abi.WORK.itemsize * (np.arange(len(first), dtype=np.uint64) + 1)
        self.starts = np.append(begin, total)

    def __len__(self) -> int:
        return len(self.requests)

    def chain(self, begin: int, ends: Sequence[int], local_keys: NDArray[Any], remote_keys: NDArray[Any]) -> int:
        """Requests from ``begin`` to the last of ``ends`` as one chain, each end's last one signalled.

        ``local_keys`` and ``remote_keys`` are those of the path, by the numbers given for the extents. Returns the
        address of the chain's first, valid as long as this object and until the requests are handed out again.
        """
        end = ends[-1]
        requests = self.requests[begin:end]
        first, last = int(self._first_piece[begin]), int(self._first_piece[end])
        if len(local_keys) == 1:
            self.pieces["lkey"][first:last] = local_keys[0]
        else:
            self.pieces["lkey"][first:last] = local_keys[self._local_keys[first:last]]
        requests["rkey"] = remote_keys[0] if len(remote_keys) == 1 else remote_keys[self._remote_keys[begin:end]]
        requests["next"] = self._next[begin:end]
        requests["next"][-1] = 0
        requests["flags"] = 0
        self.requests["flags"][np.array(ends) - 1] = abi.SIGNALED
        return self._at + abi.WORK.itemsize * begin

    def cut(self, begin: int, end: int, size: int, most: int) -> int:
        """Where a part from ``begin`` on ends: about ``size`` bytes, at most ``most`` requests, not beyond ``end``."""
        reached = int(np.searchsorted(self.starts, self.starts[begin] + np.uint64(size), side="left"))
        return min(max(reached, begin + 1), begin + most, end)

    def bytes_of(self, begin: int, end: int) -> int:
        """The size of a range of requests."""
        return int(self.starts[end] - self.starts[begin])


class Progress:
    """Which pages of a plan are complete: ``ends`` are the positions in the stream where pages end."""

    def __init__(self, plan: Plan, ends: U64) -> None:
        self._page = np.searchsorted(ends, plan.starts[:-1], side="right")
        self._left = np.bincount(self._page, minlength=len(ends))

    def carried_out(self, begin: int, end: int) -> list[int]:
        """A range of requests is done: the pages that are complete by it."""
        if begin == end:
            return []
        pages = self._page[begin:end]
        low, high = int(pages[0]), int(pages[-1]) + 1
        self._left[low:high] -= np.bincount(pages - low, minlength=high - low)
        complete: list[int] = (np.flatnonzero(self._left[low:high] == 0) + low).tolist()
        return complete
