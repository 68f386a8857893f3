"""Where an offset store lives: a directory with one file, a file, or a block device; locked, and known by its head."""

from __future__ import annotations

import fcntl
import os
import stat
import struct
from dataclasses import dataclass
from typing import Final

from hicache_mooncake.errors import ConfigError
from hicache_mooncake.ssd import directory
from hicache_mooncake.ssd.allocation import preallocate
from hicache_mooncake.ssd.base import Hooks, StoreConfig
from hicache_mooncake.ssd.frames import VERSION, peek_version
from hicache_mooncake.ssd.io_base import ALIGNMENT, DiskIO
from hicache_mooncake.ssd.offset_format import SUPERBLOCKS, Geometry, decode_super

DATA_FILE = "objects.data"
_BLKGETSIZE64: Final = 0x80081272
_LOOKED_AT = 1 << 20
"""Bytes at the front of a device that must be zeros before it is taken: partitions and file systems begin there."""


@dataclass(slots=True)
class Device:
    """An open store. ``geometry`` is None when nothing is stored there yet, or nothing that can be read."""

    lock: directory.Lock
    descriptor: int
    path: str
    size: int
    geometry: Geometry | None
    owner: bytes
    damaged: bool = False

    def close(self) -> None:
        os.close(self.descriptor)
        self.lock.release()

    def read(self, offset: int, length: int) -> bytes:
        """Bytes through the page cache. Raises ``OSError``."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            parts = []
            while length and (part := os.pread(descriptor, length, offset)):
                parts.append(part)
                offset += len(part)
                length -= len(part)
            return b"".join(parts)
        finally:
            os.close(descriptor)

    def grow(self, size: int) -> None:
        """Give a file ``size`` bytes of disk; a device has what it has. Raises ``OSError``."""
        status = os.fstat(self.descriptor)
        if stat.S_ISREG(status.st_mode):
            preallocate(self.descriptor, size)
            if status.st_size > size:
                os.ftruncate(self.descriptor, size)


def open_device(config: StoreConfig, io: DiskIO, hooks: Hooks, name: str) -> Device:
    """Lock and open ``config.path``. Raises ``ConfigError``, ``OSError``."""
    wanted = directory.new_identity(name, config.pool, config.node)
    if os.path.exists(config.path) and not os.path.isdir(config.path):
        lock = directory.Lock.take(config.path, flags=os.O_RDWR)
        if lock is None:
            raise directory.in_use(config.path)
        owner, path = wanted.owner, config.path
    else:
        directory.prepare(config.path)
        lock = directory.lock(config.path)
        try:
            identity, older = directory.identify(
                config.path, wanted, failpoint=hooks.failpoint, expected=lambda found: found == DATA_FILE
            )
            path, owner = os.path.join(config.path, DATA_FILE), identity.owner
            if older:
                os.unlink(path)
                directory.write_identity(config.path, identity)
        except BaseException:
            lock.release()
            raise
    try:
        return _open(lock, path, owner, config, io)
    except BaseException:
        lock.release()
        raise


def _open(lock: directory.Lock, path: str, owner: bytes, config: StoreConfig, io: DiskIO) -> Device:
    descriptor = io.open(path, os.O_RDWR | os.O_CREAT if path != config.path else os.O_RDWR)
    try:
        size = config.capacity
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISBLK(mode):
            answer = fcntl.ioctl(descriptor, _BLKGETSIZE64, b"\0" * 8)
            size = min(size, struct.unpack("=Q", answer)[0])
        device = Device(lock, descriptor, path, size // ALIGNMENT * ALIGNMENT, None, owner)
        front = device.read(0, _LOOKED_AT)
        found = decode_super(front[: SUPERBLOCKS * ALIGNMENT])
        if found is not None:
            device.geometry, found_owner = found
            if path == config.path:
                device.owner = found_owner
            if device.geometry.pool != config.pool or device.owner != found_owner:
                raise ConfigError(
                    "ssd_path",
                    config.path,
                    f"it belongs to pool {device.geometry.pool!r}, or to another store of it",
                    hint="set that pool, or another ssd_path",
                )
            return device
        if max(peek_version(front), peek_version(front[ALIGNMENT:])) > VERSION:
            raise ConfigError("ssd_path", config.path, "it was written by a newer version", hint="wipe it")
        if any(front):
            device.damaged = True
            if path == config.path:  # not in a directory of ours: it may be anybody's
                raise ConfigError(
                    "ssd_path",
                    config.path,
                    "it holds something else",
                    hint=f"if not: dd if=/dev/zero of={path} bs=1M count=1",
                )
        return device
    except BaseException:
        os.close(descriptor)
        raise
