"""Opening files for O_DIRECT, and doing without it where a file system refuses it."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading

logger = logging.getLogger(__name__)

_said: set[str] = set()
_said_lock = threading.Lock()


def open_direct(path: str, flags: int, mode: int = 0o600) -> int:
    """A descriptor with ``O_DIRECT``, without it where the file system does not have it. Raises ``OSError``."""
    flags |= os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, mode)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        _say_once("O_DIRECT is refused when a file is opened", error.errno)
    if flags & os.O_CREAT:
        flags &= ~os.O_EXCL  # the attempt may have created it; had it been there before, that would have been the error
    return os.open(path, flags, mode)


def is_direct(fd: int) -> bool:
    """Whether the descriptor really is open for O_DIRECT."""
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
    except OSError:
        return False


def leave_direct(fd: int) -> bool:
    """Go on without O_DIRECT: some file systems accept it and then refuse every transfer. False where it was off."""
    try:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        if not flags & os.O_DIRECT:
            return False
        fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    except OSError:
        return False
    _say_once("O_DIRECT was accepted, but transfers with it are refused", errno.EINVAL)
    return True


def _say_once(what: str, number: int) -> None:
    with _said_lock:
        if what in _said:
            return
        _said.add(what)
    logger.warning("SSD I/O: %s (%s): going on through the page cache", what, errno.errorcode.get(number, number))
