"""Which of this process' memory another process can map too: found in the kernel's own list of mappings.

An L2 pool in shared memory is lent to the node by its descriptor, whoever allocated it; anything else goes through
staging. Nothing here depends on SGLang.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterable
from typing import NamedTuple

_MAPPING = re.compile(
    r"(?P<start>[0-9a-f]+)-(?P<end>[0-9a-f]+) (?P<mode>\S+) (?P<offset>[0-9a-f]+) (?P<device>\S+) (?P<inode>\d+)"
)


class Lendable(NamedTuple):
    """``size`` bytes from address ``base`` at ``offset`` of the file behind ``fd`` (the caller's to close)."""

    base: int
    size: int
    fd: int
    offset: int


def lendable(ranges: Iterable[tuple[int, int]]) -> list[Lendable]:
    """The shared mappings that cover ``ranges`` of ``(address, bytes)``; a range that is private memory has none.

    Whole mappings are given, not the ranges themselves: page boundaries stay where they are and neighbours come for
    free. Each mapping once, however many ranges it covers.
    """
    wanted = [(address, address + size) for address, size in ranges if size > 0]
    found: list[Lendable] = []
    with open("/proc/self/maps") as maps:
        lines = maps.readlines()
    for line in lines:
        match = _MAPPING.match(line)
        if match is None or not match["mode"].startswith("rw") or match["mode"][3] != "s":
            continue
        start, end = int(match["start"], 16), int(match["end"], 16)
        if not any(start < high and low < end for low, high in wanted):
            continue
        fd = _descriptor(match["start"], match["end"], match["device"], int(match["inode"]))
        if fd is None:
            continue
        offset = int(match["offset"], 16)
        # The kernel maps whole pages; of the last one only what is in the file can be mapped elsewhere.
        size = min(end - start, os.fstat(fd).st_size - offset)
        if size > 0:
            found.append(Lendable(start, size, fd, offset))
        else:
            os.close(fd)
    return found


def _descriptor(start: str, end: str, device: str, inode: int) -> int | None:
    """A new descriptor of the mapped file: a duplicate of one that is open, or through the kernel's link to it."""
    major, _, minor = device.partition(":")
    wanted = (os.makedev(int(major, 16), int(minor, 16)), inode)
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.stat(f"/proc/self/fd/{name}")
            if (status.st_dev, status.st_ino) == wanted and _is_writable(int(name)):
                return os.dup(int(name))
        except OSError:
            continue  # closed by another thread meanwhile
    try:
        # An anonymous shared mapping has no open descriptor; this link needs CAP_CHECKPOINT_RESTORE.
        return os.open(f"/proc/self/map_files/{start}-{end}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None


def _is_writable(fd: int) -> bool:
    return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
