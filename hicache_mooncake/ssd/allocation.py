"""Space for files before it is written, and how much they really take."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.fallocate.restype = ctypes.c_int
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def preallocate(descriptor: int, size: int) -> bool:
    """Give the file ``size`` bytes of disk. False where the file system cannot: it is then only as long as that.

    Not ``posix_fallocate``, which writes every block where the file system has no such call. Raises ``OSError``
    (ENOSPC, EFBIG, EIO, ...).
    """
    while _libc.fallocate(descriptor, 0, 0, size) != 0:
        number = ctypes.get_errno()
        if number == errno.EINTR:
            continue
        if number not in _UNSUPPORTED:
            raise OSError(number, os.strerror(number))
        os.ftruncate(descriptor, size)
        return False
    return True


def disk_bytes(path: str) -> int:
    """What ``du`` says of a file; 0 when it is not there. Raises ``OSError``."""
    try:
        return os.stat(path).st_blocks * 512
    except FileNotFoundError:
        return 0


def unlink(path: str) -> None:
    """Remove a file that may be gone already. Raises ``OSError``."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
