"""What a store with a file an object finds at its start: every head is read, what is not whole is removed."""

from __future__ import annotations

import contextlib
import os

from hicache_mooncake.ssd.base import Entry
from hicache_mooncake.ssd.io_base import ALIGNMENT
from hicache_mooncake.ssd.object_file import TEMPORARY, decode_head, folders, key_of


def scan_folder(path: str, owner: bytes, *, wipe: bool) -> tuple[list[tuple[float, Entry]], dict[str, int]]:
    """The whole files of a first-level folder, with the time they were written, and what was removed, by cause."""
    found: list[tuple[float, Entry]] = []
    dropped: dict[str, int] = {}

    def drop(file: str, cause: str) -> None:
        dropped[cause] = dropped.get(cause, 0) + 1
        with contextlib.suppress(OSError):
            os.unlink(file)

    for second in folders():
        try:
            names = os.listdir(os.path.join(path, second))
        except (FileNotFoundError, NotADirectoryError):
            continue
        for name in names:
            file = os.path.join(path, second, name)
            key = key_of(name)
            if name.endswith(TEMPORARY):
                drop(file, "unfinished")
            elif wipe:
                drop(file, "older_format")
            elif key is not None:
                entry = _look_at(file, key, owner)
                if isinstance(entry, str):
                    drop(file, entry)
                else:
                    found.append(entry)
    return found, dropped


def _look_at(file: str, key: str, owner: bytes) -> tuple[float, Entry] | str:
    """The entry of a file and when it was written, or why it does not count."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return "unreadable"
    try:
        status = os.fstat(descriptor)
        head = decode_head(os.pread(descriptor, ALIGNMENT, 0), owner)
    except OSError:
        return "unreadable"
    finally:
        os.close(descriptor)
    if head is None or head.key != key:
        return "damaged_head"
    if status.st_size < ALIGNMENT + head.size:
        return "torn"
    return status.st_mtime, Entry(head.key, head.size, head.checksum)
