"""Disk I/O by ``pread`` and ``pwrite`` in threads: what there is where io_uring or O_DIRECT is refused.

A transfer under way cannot be taken back: :meth:`ThreadIO.read` waits for the system calls that have begun, and begins
none after the deadline.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final

from hicache_mooncake import memory
from hicache_mooncake.memory import Memory
from hicache_mooncake.ssd.io_base import DiskIO, Transfer
from hicache_mooncake.ssd.opening import is_direct, leave_direct, open_direct
from hicache_mooncake.ssd.pieces import MAX_PIECE, Piece, cut, gather, scatter, settle
from hicache_mooncake.ssd.reads_first import ReadsFirst

logger = logging.getLogger(__name__)

THREADS: Final = 8
"""System calls under way at once, over all callers: what a SATA disk or a page cache makes use of."""

WRITE_LANES: Final = 4
"""Threads that one batch of writes takes at most, so that a read finds some free."""

_libc = ctypes.CDLL(None, use_errno=True)
for _name in ("pread64", "pwrite64"):
    _function = getattr(_libc, _name)
    _function.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)
    _function.restype = ctypes.c_ssize_t


class ThreadIO(DiskIO):
    """``direct=False`` opens files without O_DIRECT: for file systems where it is known not to work."""

    kind = "threads"

    def __init__(self, *, threads: int = THREADS, direct: bool = True) -> None:
        self._threads = threads
        self._direct = direct
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="hcm-ssd-io")
        self._own = threading.local()
        self._order = ReadsFirst()

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        return open_direct(path, flags, mode) if self._direct else os.open(path, flags | os.O_CLOEXEC, mode)

    def read(self, batch: Sequence[Transfer], deadline: float) -> list[int]:
        with self._order.reading():
            return self._run(batch, deadline, write=False)

    def write(self, batch: Sequence[Transfer], deadline: float) -> list[int]:
        return self._run(batch, deadline, write=True)

    def _run(self, batch: Sequence[Transfer], deadline: float, *, write: bool) -> list[int]:
        if not batch:
            return []
        aligned = any(is_direct(fd) for fd in {transfer.fd for transfer in batch})
        pieces = cut(batch, aligned=aligned)
        moved = [-errno.ETIMEDOUT] * len(pieces)
        todo = deque(range(len(pieces)))
        lanes = min(len(pieces), self._threads, WRITE_LANES if write else self._threads)

        def lane() -> None:
            while todo:
                if write:
                    self._order.let_reads_pass(deadline)
                if time.monotonic() >= deadline:
                    return
                try:
                    at = todo.popleft()
                except IndexError:
                    return
                moved[at] = self._move(pieces[at], write)

        others: list[Future[None]] = []
        try:
            for _ in range(lanes - 1):
                others.append(self._pool.submit(lane))
            lane()
        finally:
            # Lanes that have not begun find nothing to do any more: nobody is to wait for their turn.
            wait([other for other in others if not other.cancel()])
        return settle(batch, pieces, moved)

    def _move(self, piece: Piece, write: bool) -> int:
        if piece.address:
            return _loop(piece.fd, piece.address, piece.length, piece.offset, write)
        bounce = self._bounce().address
        if write:
            gather(bounce, piece)
        moved = _loop(piece.fd, bounce, piece.moved, piece.offset, write)
        if moved > 0 and not write:
            scatter(bounce, piece, moved)
        return moved

    def _bounce(self) -> Memory:
        area: Memory | None = getattr(self._own, "bounce", None)
        if area is None:
            area = self._own.bounce = memory.create("hicache-mooncake-bounce", MAX_PIECE)
        return area

    def close(self) -> None:
        self._pool.shutdown()
        self._own = threading.local()


def _loop(fd: int, address: int, length: int, offset: int, write: bool) -> int:
    """Move all of a range, or up to the end of the file. Bytes, or a negative errno."""
    call: Callable[[int, int, int, int], int] = _libc.pwrite64 if write else _libc.pread64
    done = 0
    while done < length:
        count = call(fd, address + done, length - done, offset + done)
        if count > 0:
            done += count
            continue
        if count == 0:
            break
        number = ctypes.get_errno()
        if number in (errno.EINTR, errno.EAGAIN) or (number == errno.EINVAL and not done and leave_direct(fd)):
            continue
        if number == errno.EINVAL and done and not write:
            break  # O_DIRECT from where the file ends, inside of a sector
        return -number
    return done
