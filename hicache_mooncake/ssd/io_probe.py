"""Which disk I/O works in a place: tried out at the start, on the file system in question, and said once."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from hicache_mooncake import memory
from hicache_mooncake.errors import ConfigError
from hicache_mooncake.memory import Extent, Memory
from hicache_mooncake.ssd.io_base import ALIGNMENT, DiskIO, Transfer
from hicache_mooncake.ssd.io_threads import ThreadIO
from hicache_mooncake.ssd.io_uring import QUEUE_DEPTH, UringIO
from hicache_mooncake.ssd.opening import is_direct

logger = logging.getLogger(__name__)

PROBE_TIMEOUT = 10.0
"""Seconds that a disk has for the 4 KiB that are tried: it may have to spin up, or be mounted first."""

KINDS = ("auto", "io_uring", "threads")


class Probed(NamedTuple):
    """The I/O to use. ``direct``: files are really open for O_DIRECT. ``reason``: why not io_uring and O_DIRECT."""

    io: DiskIO
    kind: str
    direct: bool
    reason: str


def choose(path: str, *, wanted: str = "auto", queue_depth: int = QUEUE_DEPTH, fixed: Sequence[Extent] = ()) -> Probed:
    """The best I/O for ``path``, a directory or a block device. Leaves nothing behind there.

    With ``auto`` io_uring where it and O_DIRECT work, else threads. Raises ``ConfigError`` when what is ``wanted`` does
    not work.
    """
    reason = ""
    if wanted != "threads":
        try:
            ring_io = UringIO(queue_depth=queue_depth, fixed=fixed)
        except (OSError, ValueError) as error:
            reason = f"io_uring is refused: {_why(error)}"
        else:
            failed = _try(ring_io, path)
            if not failed or (wanted == "io_uring" and failed == _NOT_DIRECT):
                return _said(path, Probed(ring_io, ring_io.kind, not failed, failed))
            ring_io.close()
            reason = failed
        if wanted == "io_uring":
            raise ConfigError("ssd_io", wanted, f"it does not work on {path}: {reason}", hint="ssd_io=auto")
    for direct in (True, False):
        thread_io = ThreadIO(direct=direct)
        failed = _try(thread_io, path)
        if not failed or (not direct and failed == _NOT_DIRECT):
            return _said(path, Probed(thread_io, thread_io.kind, not failed, reason or failed))
        thread_io.close()
    raise ConfigError("ssd_path", path, f"nothing can be written and read there: {failed}")


_NOT_DIRECT = "O_DIRECT is refused: EINVAL"


def _try(io: DiskIO, path: str) -> str:
    """What does not work with ``io``, empty where all does."""
    block = memory.create("hicache-mooncake-probe", 2 * ALIGNMENT)
    try:
        return _try_file(io, path, block)
    except OSError as error:
        return f"no file can be used: {_why(error)}"
    finally:
        block.close()


def _try_file(io: DiskIO, path: str, block: Memory) -> str:
    first, second = Extent(block, 0, ALIGNMENT), Extent(block, ALIGNMENT, ALIGNMENT)
    deadline = time.monotonic() + PROBE_TIMEOUT
    if not stat.S_ISDIR(os.stat(path).st_mode):  # a device, or a file: what is in it is not ours to overwrite
        fd = io.open(path, os.O_RDONLY)
        try:
            (count,) = io.read([Transfer(fd, 0, [first])], deadline)
            return "" if count >= 0 and is_direct(fd) else _failed("reading", count) or _NOT_DIRECT
        finally:
            os.close(fd)
    name = os.path.join(path, f".hicache-mooncake-probe-{secrets.token_hex(4)}")
    fd = io.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        first.view[:] = secrets.token_bytes(ALIGNMENT)
        (count,) = io.write([Transfer(fd, 0, [first])], deadline)
        if count != ALIGNMENT:
            return _failed("writing", count)
        (count,) = io.read([Transfer(fd, 0, [second])], deadline)
        if count != ALIGNMENT or first.view != second.view:
            return _failed("reading", count) or "other bytes are read than were written"
        return "" if is_direct(fd) else _NOT_DIRECT
    finally:
        os.close(fd)
        with suppress(OSError):
            os.unlink(name)


def _failed(what: str, count: int) -> str:
    return f"{what} fails: {_name(-count)}" if count < 0 else ""


def _why(error: Exception) -> str:
    return _name(error.errno) if isinstance(error, OSError) and error.errno else str(error)


def _name(number: int) -> str:
    return f"{errno.errorcode.get(number, str(number))} ({os.strerror(number)})"


def _said(path: str, probed: Probed) -> Probed:
    if probed.reason:
        logger.warning(
            "SSD I/O of %s is by %s%s: %s",
            path,
            probed.kind,
            "" if probed.direct else " through the page cache",
            probed.reason,
        )
    else:
        logger.info("SSD I/O of %s is by %s with O_DIRECT", path, probed.kind)
    return probed
