"""Disk I/O by io_uring: a private ring for every thread, many operations a system call, O_DIRECT.

Operations go straight between the file and the memory they are for where both are aligned, and through a bounce buffer
of the ring where not. Memory that is used all the time (``fixed``) is registered with each ring, so that the kernel
does not look its pages up for every operation.

A read that misses its deadline is cancelled, and then waited for: while the device holds on to a request, it still
writes into memory that the caller is about to give back.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hicache_mooncake import memory
from hicache_mooncake.memory import Extent
from hicache_mooncake.ssd import ring_layout as layout
from hicache_mooncake.ssd.io_base import DiskIO, Transfer
from hicache_mooncake.ssd.opening import is_direct, leave_direct, open_direct
from hicache_mooncake.ssd.pieces import MAX_PIECE, Piece, cut, gather, scatter, settle
from hicache_mooncake.ssd.reads_first import ReadsFirst
from hicache_mooncake.ssd.ring import Ring

logger = logging.getLogger(__name__)

QUEUE_DEPTH: Final = 128
"""Operations that one thread has in flight at most."""

WRITE_DEPTH: Final = 16
"""The same of writes: as much as keeps a disk busy, so that a read that comes waits for little."""

_BOUNCE_SLOTS: Final = 4
_CANCEL: Final = 1 << 63
_SAY_STUCK: Final = 5.0
"""Seconds after which it is said, again and again, that a device does not let go of a request."""

_AGAIN = (-errno.EAGAIN, -errno.EINTR)


class UringIO(DiskIO):
    """``fixed`` outlives this. Raises ``OSError`` or ``ValueError`` (old kernel) where there is no io_uring."""

    kind = "io_uring"

    def __init__(self, *, queue_depth: int = QUEUE_DEPTH, fixed: Sequence[Extent] = ()) -> None:
        Ring(2).close()
        self._depth = queue_depth
        self._fixed = fixed
        self._own = threading.local()
        self._lanes: weakref.WeakSet[_Lane] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._order = ReadsFirst()

    @property
    def rings(self) -> int:
        """Rings open now, one a thread that reads or writes."""
        with self._lock:
            return len(self._lanes)

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        return open_direct(path, flags, mode)

    def read(self, batch: Sequence[Transfer], deadline: float) -> list[int]:
        with self._order.reading():
            return self._run(batch, deadline, write=False)

    def write(self, batch: Sequence[Transfer], deadline: float) -> list[int]:
        return self._run(batch, deadline, write=True)

    def _run(self, batch: Sequence[Transfer], deadline: float, *, write: bool) -> list[int]:
        if not batch:
            return []
        try:
            lane = self._lane()
        except (OSError, ValueError) as error:
            number = getattr(error, "errno", None) or errno.ENOSYS
            logger.error("SSD I/O: no ring for this thread: %s", error)
            return [-number] * len(batch)
        aligned = any(is_direct(fd) for fd in {transfer.fd for transfer in batch})
        pieces = cut(batch, aligned=aligned)
        moved = lane.run(pieces, deadline, write=write)
        refused = {pieces[at].fd for at, count in enumerate(moved) if count == -errno.EINVAL}
        if sum(map(leave_direct, refused)):
            moved = lane.run(pieces, deadline, write=write)
        return settle(batch, pieces, moved)

    def _lane(self) -> _Lane:
        lane: _Lane | None = getattr(self._own, "lane", None)
        if lane is None or lane.closed:
            lane = _Lane(self._depth, self._fixed, self._order)
            self._own.lane = lane
            with self._lock:
                self._lanes.add(lane)
        return lane

    def close(self) -> None:
        with self._lock:
            lanes = list(self._lanes)
            self._lanes.clear()
        for lane in lanes:
            lane.close()


class _Lane:
    """What one thread has: a ring and a bounce buffer. Gone with the thread, or with the I/O."""

    def __init__(self, depth: int, fixed: Sequence[Extent], order: ReadsFirst) -> None:
        self._depth = depth
        self._order = order
        self._ring = Ring(2 * depth)  # room to cancel everything that is in flight
        try:
            self._bounce = memory.create("hicache-mooncake-bounce", _BOUNCE_SLOTS * MAX_PIECE)
        except BaseException:
            self._ring.close()
            raise
        self.closed = False
        self._free = [self._bounce.address + slot * MAX_PIECE for slot in range(_BOUNCE_SLOTS)]
        self._buffers = self._register([Extent(self._bounce, 0, self._bounce.size), *fixed])

    def _register(self, areas: Sequence[Extent]) -> list[tuple[int, int]]:
        buffers = [
            (area.address + start, min(layout.MAX_BUFFER, area.length - start))
            for area in areas
            for start in range(0, area.length, layout.MAX_BUFFER)
        ]
        for attempt in (buffers, buffers[:1]):
            try:
                self._ring.register(attempt)
                return attempt
            except OSError as error:
                logger.info(
                    "SSD I/O: %d MiB cannot be registered with io_uring (%s): its pages are looked up for every "
                    "operation (hint: raise RLIMIT_MEMLOCK)",
                    sum(size for _, size in attempt) >> 20,
                    error.strerror,
                )
        return []

    def run(self, pieces: Sequence[Piece], deadline: float, *, write: bool) -> list[int]:
        """Do the pieces; for each what was moved, or a negative errno. Nothing is in flight any more then."""
        return _Run(self, pieces, write).complete(deadline)

    @property
    def ring(self) -> Ring:
        return self._ring

    @property
    def order(self) -> ReadsFirst:
        return self._order

    def depth(self, write: bool) -> int:
        return min(WRITE_DEPTH, self._depth) if write else self._depth

    @property
    def free_slots(self) -> list[int]:
        return self._free

    def buffer_numbers(
        self, addresses: npt.NDArray[np.uint64], lengths: npt.NDArray[np.uint32]
    ) -> npt.NDArray[np.int32]:
        """The registered buffer that each piece of memory lies in."""
        numbers = np.full(len(addresses), layout.NOT_FIXED, np.int32)
        for number, (start, size) in enumerate(self._buffers):
            inside = (addresses >= start) & (addresses + lengths <= start + size)
            numbers[inside] = number
        return numbers

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._ring.close()
            self._bounce.close()

    def __del__(self) -> None:
        if hasattr(self, "closed"):  # else it was never whole
            self.close()


class _Run:
    """One batch on its way through a ring."""

    def __init__(self, lane: _Lane, pieces: Sequence[Piece], write: bool) -> None:
        self._lane = lane
        self._pieces = pieces
        self._write = write
        self._results = [-errno.ETIMEDOUT] * len(pieces)
        self._slots: dict[int, int] = {}  # piece -> its bounce slot
        self._again: list[int] = []
        self._partly: dict[int, int] = {}  # piece -> bytes moved before its operation now
        self._in_flight: set[int] = set()
        self._next = 0
        self._fds = np.array([piece.fd for piece in pieces], np.int32)
        self._offsets = np.array([piece.offset for piece in pieces], np.uint64)
        self._addresses = np.array([piece.address for piece in pieces], np.uint64)
        self._lengths = np.array([piece.moved for piece in pieces], np.uint32)
        self._numbers = lane.buffer_numbers(self._addresses, self._lengths)

    def complete(self, deadline: float) -> list[int]:
        try:
            while self._begin(deadline) or self._in_flight:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._wait(left)
        finally:
            if self._in_flight:
                self._end()
        return self._results

    # -- beginning

    def _begin(self, deadline: float) -> bool:
        """Queue what there is room for. False when there was nothing more to queue."""
        if (not self._again and self._next >= len(self._pieces)) or time.monotonic() >= deadline:
            return False
        if self._write:
            self._lane.order.let_reads_pass(deadline)
        room = self._lane.depth(self._write) - len(self._in_flight)
        chosen: list[int] = []
        while len(chosen) < room:
            at = self._again[-1] if self._again else self._next
            if at >= len(self._pieces) or not self._placed(at):
                break
            if self._again:
                self._again.pop()
            else:
                self._next += 1
            chosen.append(at)
        if chosen:
            self._queue(chosen)
        return True

    def _placed(self, at: int) -> bool:
        """Whether the piece has its memory: a bounced one needs a slot, which may have to become free first."""
        piece = self._pieces[at]
        if piece.address or at in self._slots:
            return True
        free = self._lane.free_slots
        if not free:
            return False
        slot = self._slots[at] = free.pop()
        self._addresses[at] = slot
        self._numbers[at : at + 1] = self._lane.buffer_numbers(self._addresses[at : at + 1], self._lengths[at : at + 1])
        if self._write:
            gather(slot, piece)
        return True

    def _queue(self, chosen: Sequence[int]) -> None:
        which = np.array(chosen, np.intp)
        entries = layout.Entries(
            self._fds[which],
            self._offsets[which],
            self._addresses[which],
            self._lengths[which],
            self._numbers[which],
            which.astype(np.uint64) + np.uint64(1),
        )
        self._lane.ring.queue(entries, write=self._write)
        self._in_flight.update(chosen)

    # -- waiting

    def _wait(self, timeout: float) -> None:
        # With more to begin, as soon as a part has ended; else for all of it, in one call.
        more = self._again or self._next < len(self._pieces)
        wait = max(1, len(self._in_flight) // 4) if more else len(self._in_flight)
        self._take(self._lane.ring.enter(wait=wait, timeout=timeout))

    def _take(self, done: npt.NDArray[Any]) -> None:
        for tag, result in zip(done["tag"].tolist(), done["result"].tolist(), strict=True):
            if tag & _CANCEL:
                continue
            at = tag - 1
            self._in_flight.discard(at)
            self._completed(at, result)

    def _completed(self, at: int, result: int) -> None:
        piece = self._pieces[at]
        if result in _AGAIN:
            self._again.append(at)
            return
        before = self._partly.pop(at, 0)
        if 0 < result < int(self._lengths[at]):  # a part of it: the rest, or the end of the file, is met with another
            self._partly[at] = before + result
            self._offsets[at] += np.uint64(result)
            self._addresses[at] += np.uint64(result)
            self._lengths[at] -= np.uint32(result)
            self._again.append(at)
            return
        if before and not self._write and result == -errno.EINVAL:
            result = 0  # O_DIRECT from where the file ends, inside of a sector
        if result == -errno.ECANCELED:
            result = -errno.ETIMEDOUT
        total = self._results[at] = before + result if result >= 0 else result
        slot = self._slots.pop(at, 0)
        if slot:
            if total > 0 and not self._write:
                scatter(slot, piece, total)
            self._lane.free_slots.append(slot)

    # -- ending early

    def _end(self) -> None:
        """Cancel what is in flight and wait until the kernel has let go of it."""
        ring = self._lane.ring
        for at in self._in_flight:
            ring.queue_one(opcode=layout.OP_ASYNC_CANCEL, addr=at + 1, tag=_CANCEL | (at + 1))
        began = time.monotonic()
        said = began
        while self._in_flight:
            try:
                self._take(ring.enter(wait=len(self._in_flight), timeout=0.1))
            except OSError as error:
                logger.error("SSD I/O: %s; waiting on", error)
                time.sleep(0.1)
            self._again.clear()
            now = time.monotonic()
            if self._in_flight and now - said > _SAY_STUCK:
                said = now
                logger.error(
                    "SSD I/O: a device holds on to %d operations for %.0f s beyond their deadline",
                    len(self._in_flight),
                    now - began,
                )
