"""One io_uring, made of the kernel's own system calls.

No binding in between: the one on PyPI (``liburing``) keeps the interpreter's lock while it waits and takes only
``bytearray``; a system call by ``ctypes`` gives the lock back, and takes an address in shared memory.

A ring belongs to the thread that made it. There is no kernel thread that polls (SQPOLL), so the kernel looks at the
queue's tail only inside of our system call, and we look at the completions only after it: both are barriers enough.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache_mooncake.ssd import ring_layout as layout
from hicache_mooncake.ssd.ring_layout import Entries

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long

_TRY_AGAIN = (errno.EINTR, errno.EAGAIN, errno.EBUSY, errno.ETIME)


class _Buffer(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


class _Wait(ctypes.Structure):
    """``struct io_uring_getevents_arg`` and the ``struct __kernel_timespec`` it points to."""

    _fields_ = (
        ("sigmask", ctypes.c_uint64),
        ("sigmask_size", ctypes.c_uint32),
        ("min_wait", ctypes.c_uint32),
        ("timespec", ctypes.c_uint64),
        ("seconds", ctypes.c_int64),
        ("nanoseconds", ctypes.c_int64),
    )


_ARGUMENT_SIZE = 24


def _call(*arguments: object) -> int:
    result = int(_syscall(*arguments))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


class Ring:
    """At most ``entries`` operations in flight; who uses it keeps count. For one thread."""

    def __init__(self, entries: int) -> None:
        """Raises ``OSError`` where the kernel, seccomp or a limit refuses it; ``ValueError`` before Linux 5.11."""
        params = (ctypes.c_uint32 * layout.PARAMS_WORDS)()
        self._fd = _setup(entries, params)
        try:
            where = layout.offsets_of(list(params))
            # The mapping of a ring is no memory of its own: it must not be copied into a child.
            self._rings = mmap.mmap(self._fd, where.rings_size, flags=mmap.MAP_SHARED, offset=layout.OFF_RINGS)
            self._entries = mmap.mmap(
                self._fd, where.sq_entries * layout.SQE.itemsize, flags=mmap.MAP_SHARED, offset=layout.OFF_SQES
            )
        except BaseException:
            os.close(self._fd)
            raise
        self.entries = where.sq_entries
        self._sq_tail = self._words(where.sq_tail, 1)
        self._words(where.sq_array, where.sq_entries)[:] = np.arange(where.sq_entries, dtype="u4")
        self._cq_head = self._words(where.cq_head, 1)
        self._cq_tail = self._words(where.cq_tail, 1)
        self._cqes: npt.NDArray[Any] = np.frombuffer(self._rings, layout.CQE, where.cq_entries, where.cqes)
        self._sqes: npt.NDArray[Any] = np.frombuffer(self._entries, layout.SQE, where.sq_entries)
        self._queued = 0
        self._wait = _Wait()
        self._wait.timespec = ctypes.addressof(self._wait) + _Wait.seconds.offset

    def _words(self, offset: int, count: int) -> npt.NDArray[np.uint32]:
        return np.frombuffer(self._rings, np.uint32, count, offset)

    def register(self, buffers: Sequence[tuple[int, int]]) -> None:
        """Have the kernel keep memory (address and length of each) in place, so that no operation has to look it up.

        Raises ``OSError``: ENOMEM where RLIMIT_MEMLOCK is too small for it.
        """
        table = (_Buffer * len(buffers))(*[_Buffer(address, size) for address, size in buffers])
        _call(layout.SYS_REGISTER, ctypes.c_uint(self._fd), ctypes.c_uint(layout.REGISTER_BUFFERS), table, len(buffers))

    def queue(self, entries: Entries, *, write: bool) -> None:
        """Put reads or writes into the queue; they begin with the next :meth:`enter`."""
        layout.fill(self._sqes, self._tail(), entries, write=write)
        self._advance(len(entries.tags))

    def queue_one(self, **fields: int) -> None:
        """Put any one operation into the queue, by the fields of its entry."""
        layout.fill_one(self._sqes, self._tail(), **fields)
        self._advance(1)

    def _tail(self) -> int:
        return int(self._sq_tail[0])

    def _advance(self, count: int) -> None:
        self._sq_tail[0] = (self._tail() + count) & 0xFFFFFFFF
        self._queued += count

    @property
    def room(self) -> int:
        """Entries that can be queued before the next :meth:`enter`."""
        return self.entries - self._queued

    def enter(self, *, wait: int, timeout: float) -> npt.NDArray[Any]:
        """Begin what is queued, wait for ``wait`` completions or ``timeout`` seconds, and return what has completed.

        The interpreter's lock is free meanwhile. Raises ``OSError`` when the ring cannot be used any more.
        """
        self._wait.seconds, self._wait.nanoseconds = divmod(max(0, int(timeout * 1e9)), 1_000_000_000)
        result = int(
            _syscall(
                layout.SYS_ENTER,
                ctypes.c_uint(self._fd),
                ctypes.c_uint(self._queued),
                ctypes.c_uint(wait),
                ctypes.c_uint(layout.ENTER_GETEVENTS | layout.ENTER_EXT_ARG),
                ctypes.byref(self._wait),
                ctypes.c_size_t(_ARGUMENT_SIZE),
            )
        )
        if result < 0:
            number = ctypes.get_errno()
            if number not in _TRY_AGAIN:  # those: nothing was begun
                raise OSError(number, os.strerror(number))
        else:
            self._queued -= result
        head, tail = int(self._cq_head[0]), int(self._cq_tail[0])
        done = layout.take(self._cqes, head, tail)
        self._cq_head[0] = tail
        return done

    def close(self) -> None:
        """Give the ring back. What is in flight goes on to its end in the kernel: reap it before."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        del self._sq_tail, self._cq_head, self._cq_tail, self._cqes, self._sqes
        self._rings.close()
        self._entries.close()


def _setup(entries: int, params: ctypes.Array[ctypes.c_uint32]) -> int:
    # Completions are handled in our own system call instead of by interrupting us (Linux 6.1), else as before.
    for flags in (layout.SETUP_CLAMP | layout.SETUP_SINGLE_ISSUER | layout.SETUP_DEFER_TASKRUN, layout.SETUP_CLAMP):
        params[2] = flags
        try:
            fd = _call(layout.SYS_SETUP, ctypes.c_uint(entries), ctypes.byref(params))
        except OSError as error:
            if error.errno != errno.EINVAL or flags == layout.SETUP_CLAMP:
                raise
            continue
        return fd
    raise AssertionError("unreachable")
