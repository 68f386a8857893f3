"""Shared memory that a host's processes map together: segments, L2 pools, staging areas.

Everything that moves bytes speaks in :class:`Memory` (one mapping) and :class:`Extent` (a piece of one), so a
transport or a store never needs to know whether the piece is DRAM segment, L2 page or staging.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import xxhash

PAGE = mmap.PAGESIZE
HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
_POPULATE_STEP = 64 << 20

COPY_PIECE = 512 << 10
"""Bytes copied before they are hashed: source and target of a piece fit in a core's own cache of 1 MiB together."""

_memmove = ctypes.memmove
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.restype = ctypes.c_int


class Memory:
    """One shared mapping of a memfd (or any shareable file), readable and writable in this process.

    ``address`` is where it starts in this process, ``size`` its length in bytes, ``view`` a writable memoryview of
    all of it. The descriptor lives as long as the mapping: until :meth:`close`, or, without that, until nothing refers
    to the mapping any more, a tensor made of ``view`` included.
    """

    def __init__(self, fd: int, size: int, *, offset: int = 0, huge: bool = False) -> None:
        """Take ownership of ``fd`` and map ``size`` bytes from ``offset``. Raises ``OSError`` (``fd`` is closed)."""
        self.fd = fd
        self.size = size
        self.huge = huge
        self._before_close: list[Callable[[Memory], None]] = []
        try:
            self._map = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE, offset=offset)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise OSError(
                getattr(error, "errno", 0) or 22, f"cannot map {size} bytes of shared memory: {error}"
            ) from error
        self._close_fd = weakref.finalize(self._map, os.close, fd)
        self._close_fd.atexit = False
        self.view = memoryview(self._map)
        anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(anchor)
        del anchor

    def populate(self, *, huge: bool = True) -> None:
        """Fault every page in, with the GIL released, so that no data path pays for the first touch.

        With ``huge`` as 2 MiB pages where the host grants them on request (``shmem_enabled`` is ``advise``).
        Safe to run in a thread beside readers and writers: existing content is kept.
        """
        if huge and not self.huge and self.size >= HUGE_PAGE:
            _libc.madvise(self.address, self.size, _MADV_HUGEPAGE)  # a wish: refused, pages are small ones
        for start in range(0, self.size, _POPULATE_STEP):
            length = min(_POPULATE_STEP, self.size - start)
            if _libc.madvise(self.address + start, length, _MADV_POPULATE_WRITE) != 0:
                return  # kernel < 5.14 or no memory left: pages are faulted on first use instead

    def before_close(self, callback: Callable[[Memory], None]) -> None:
        """Have ``callback`` called when the mapping is about to go: a device that uses it has to let go first."""
        self._before_close.append(callback)

    def close(self) -> None:
        """Unmap and close. The caller has made sure that nothing reads or writes here any more."""
        if self.fd < 0:
            return
        while self._before_close:
            self._before_close.pop()(self)
        self.fd = -1
        self._close_fd()
        with suppress(BufferError):  # a slice is still referenced by a frame being unwound: the mapping goes with it
            self.view.release()
            self._map.close()


class Extent(NamedTuple):
    """``length`` bytes of ``memory`` from ``offset`` on."""

    memory: Memory
    offset: int
    length: int

    @property
    def view(self) -> memoryview:
        return self.memory.view[self.offset : self.offset + self.length]

    @property
    def address(self) -> int:
        return self.memory.address + self.offset


def create(name: str, size: int, *, huge: bool = False) -> Memory:
    """A new zeroed anonymous shared memory of ``size`` bytes; gone with the last process that maps it.

    ``huge`` asks for 2 MiB pages and falls back to normal ones where the host has not reserved enough of them.
    """
    if huge:
        rounded = -(-size // HUGE_PAGE) * HUGE_PAGE
        if free_huge_bytes() >= rounded:
            try:
                return _create(name, rounded, os.MFD_HUGETLB, huge=True)
            except OSError:
                pass  # another process took them between the check and the mapping
    return _create(name, -(-size // PAGE) * PAGE, 0, huge=False)


def _create(name: str, size: int, flags: int, *, huge: bool) -> Memory:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | flags)
    try:
        os.ftruncate(fd, size)
    except OSError:
        os.close(fd)
        raise
    return Memory(fd, size, huge=huge)


def free_huge_bytes() -> int:
    """Bytes of 2 MiB pages that are reserved on this host and free now."""
    try:
        with open("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages") as file:
            return int(file.read()) * HUGE_PAGE
    except (OSError, ValueError):
        return 0


def copy_extents(target: Sequence[Extent], source: Sequence[Extent]) -> None:
    """Copy the bytes of ``source``, in order, to ``target``; both have the same total length. Releases the GIL."""
    if len(target) == 1 and len(source) == 1:
        to, start = target[0], source[0]
        _memmove(to.memory.address + to.offset, start.memory.address + start.offset, start.length)
        return
    for to_memory, to_offset, from_memory, from_offset, length in _pieces(target, source, COPY_PIECE):
        _memmove(to_memory.address + to_offset, from_memory.address + from_offset, length)


def copy_and_check(key: str, target: Sequence[Extent], source: Sequence[Extent]) -> int:
    """Copy like :func:`copy_extents` and return the :func:`checksum` of what lies in ``target`` then.

    Every piece is hashed right after it was copied, out of the processor's cache: memory is passed over once.
    """
    if len(target) == 1 and len(source) == 1:
        memory, offset, length = target[0]
        if length <= COPY_PIECE:
            from_memory, from_offset, _ = source[0]
            _memmove(memory.address + offset, from_memory.address + from_offset, length)
            return xxhash.xxh3_64_intdigest(memory.view[offset : offset + length], key_seed(key))
    digest = xxhash.xxh3_64(seed=key_seed(key))
    for memory, offset, from_memory, from_offset, length in _pieces(target, source, COPY_PIECE):
        _memmove(memory.address + offset, from_memory.address + from_offset, length)
        digest.update(memory.view[offset : offset + length])
    return digest.intdigest()


def piece_addresses(target: Sequence[Extent], source: Sequence[Extent]) -> Sequence[int]:
    """What to copy where: for each piece the addresses to copy to and from, and a length, one after the other."""
    if len(target) == 1 and len(source) == 1:
        (memory, offset, length), (from_memory, from_offset, _) = target[0], source[0]
        return memory.address + offset, from_memory.address + from_offset, length
    flat: list[int] = []
    for memory, offset, from_memory, from_offset, length in _pieces(target, source, sys.maxsize):
        flat += (memory.address + offset, from_memory.address + from_offset, length)
    return flat


def _pieces(
    target: Sequence[Extent], source: Sequence[Extent], longest: int
) -> Iterator[tuple[Memory, int, Memory, int, int]]:
    """What to copy where, at most ``longest`` bytes at a time: memory and offset of both sides, and a length."""
    sources = iter(source)
    from_memory, from_offset, available = next(sources)
    for memory, offset, length in target:
        done = 0
        while done < length:
            if not available:
                from_memory, from_offset, available = next(sources)
                continue
            step = min(length - done, available, longest)
            yield memory, offset + done, from_memory, from_offset, step
            done += step
            from_offset += step
            available -= step


def key_seed(key: str) -> int:
    """The checksum seed of an object key: a right page under a wrong key fails its check too."""
    return xxhash.xxh3_64_intdigest(key.encode())


def checksum(key: str, extents: Sequence[Extent]) -> int:
    """xxh3-64 of the bytes of ``extents`` in order, seeded by the object key."""
    seed = key_seed(key)
    if len(extents) == 1:
        memory, offset, length = extents[0]
        return xxhash.xxh3_64_intdigest(memory.view[offset : offset + length], seed)
    digest = xxhash.xxh3_64(seed=seed)
    for extent in extents:
        digest.update(extent.view)
    return digest.intdigest()
