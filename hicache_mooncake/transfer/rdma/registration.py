"""Memory that devices may use: each piece registered once with each device, until the memory is closed.

A large memory is registered in pieces, because devices have a largest region and because nothing can be said, and
nothing stopped, while one call lasts. Registered is deregistered before it is unmapped: by ``Memory.close`` itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hicache_mooncake.errors import Unavailable
from hicache_mooncake.memory import HUGE_PAGE, Extent, Memory

from . import memlock, numa
from .plan import Index, Places
from .topology import ANYWHERE, Nic
from .verbs import Device, Region, VerbsError

logger = logging.getLogger(__name__)

LARGEST_PIECE = 8 << 30
"""Bytes registered by one call: a second or two."""
SAY_EVERY = 5.0
"""Seconds between two lines about how far a registration is."""

Keys = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Adapter:
    """A port of a device that is open, and the address it is used by."""

    nic: Nic
    device: Device
    gid_index: int


@dataclass(eq=False)
class Registered:
    """A memory and its pieces: where they begin, and for each adapter their local and remote keys."""

    memory: Memory
    starts: Index
    local_keys: list[Keys] = field(default_factory=list)
    remote_keys: list[Keys] = field(default_factory=list)
    numa_node: int = ANYWHERE
    regions: list[Region] = field(default_factory=list)

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """Address and length of each piece."""
        ends = [*self.starts[1:].tolist(), self.memory.address + self.memory.size]
        return [(start, end - start) for start, end in zip(self.starts.tolist(), ends, strict=True)]


class _Entry:
    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.lock = threading.Lock()
        self.registered: Registered | None = None
        self.failure = ""
        self.doomed = False


class Registry:
    """Memories registered with all of ``adapters`` for one kind of ``access``. Thread-safe."""

    def __init__(self, adapters: Sequence[Adapter], access: int, *, largest_piece: int = LARGEST_PIECE) -> None:
        self._adapters = adapters
        self._access = access
        smallest = min(adapter.device.limits.region_bytes for adapter in adapters)
        # Pieces begin at huge pages, which a region must not cut.
        align = HUGE_PAGE if largest_piece >= HUGE_PAGE else 4096
        self._largest = max(min(largest_piece, smallest) // align * align, 4096)
        self._lock = threading.Lock()
        self._entries: dict[int, _Entry] = {}
        self._closed = False

    def ready(self, memory: Memory) -> Registered | None:
        """The memory if it is registered now."""
        entry = self._entries.get(id(memory))
        return entry.registered if entry is not None else None

    def failure(self, memory: Memory) -> str:
        """Why a memory cannot be registered; empty while nothing speaks against it."""
        entry = self._entries.get(id(memory))
        return entry.failure if entry is not None else ""

    def prepare(self, memory: Memory) -> Registered:
        """Register a memory, or wait until another thread has. Raises ``Unavailable``, again each time it is asked."""
        with self._lock:
            if self._closed:
                raise Unavailable("the devices are closed")
            entry = self._entries.get(id(memory))
            if entry is None:
                entry = self._entries[id(memory)] = _Entry(memory)
                memory.before_close(self._forget)
        with entry.lock:
            if entry.registered is None and not entry.failure:
                try:
                    entry.registered = self._register(entry)
                except Unavailable as error:
                    entry.failure = str(error)
            if entry.registered is None:
                raise Unavailable(entry.failure)
            return entry.registered

    def close(self) -> None:
        """Deregister everything. Queue pairs must have ended."""
        with self._lock:
            self._closed = True
            memories = [entry.memory for entry in self._entries.values()]
        for memory in memories:
            self._forget(memory)

    def _forget(self, memory: Memory) -> None:
        with self._lock:
            entry = self._entries.get(id(memory))
            if entry is None:
                return
            entry.doomed = True
        with entry.lock:  # a registration under way ends after its piece
            registered, entry.registered, entry.failure = entry.registered, None, "the memory is closed"
            if registered is not None:
                _release(registered.regions)
        with self._lock:
            self._entries.pop(id(memory), None)

    def _register(self, entry: _Entry) -> Registered:
        memory, devices = entry.memory, len(self._adapters)
        if short := memlock.shortfall(memory.size * devices):
            raise Unavailable(short, hint=memlock.REMEDY)
        starts = _piece_starts(memory.address, memory.size, self._largest)
        made = Registered(memory, np.array(starts, np.int64))
        keys = np.zeros((2, devices, len(starts)), np.uint32)
        began = said = time.monotonic()
        try:
            for piece, (address, length) in enumerate(made.bounds):
                for at, adapter in enumerate(self._adapters):
                    region = adapter.device.register(address, length, self._access)
                    made.regions.append(region)
                    keys[:, at, piece] = region.lkey, region.rkey
                if entry.doomed:
                    raise Unavailable("the memory is closed")
                if time.monotonic() - said > SAY_EVERY:
                    said = time.monotonic()
                    done = address + length - memory.address
                    logger.info("RDMA: %d of %d GiB are registered", done >> 30, memory.size >> 30)
        except BaseException:
            _release(made.regions)
            raise
        made.local_keys, made.remote_keys = list(keys[0]), list(keys[1])
        made.numa_node = numa.node_of(memory.address, memory.size)
        logger.debug("RDMA: %d MiB registered in %.2f s", memory.size >> 20, time.monotonic() - began)
        return made


def _piece_starts(address: int, size: int, largest: int) -> list[int]:
    """Where the pieces of a memory begin: every ``largest`` bytes, from the first boundary of a huge page on."""
    starts = [address]
    first = address // largest * largest + largest if largest >= HUGE_PAGE else address + largest
    return starts + list(range(first, address + size, largest))


def _release(regions: list[Region]) -> None:
    while regions:
        try:
            regions.pop().close()
        except VerbsError as error:
            logger.error("RDMA: %s", error)


class Located(list[Registered]):
    """The memories of a batch, in the order in which the keys of its pieces number them."""

    def local_keys(self, adapter: int) -> Keys:
        return self[0].local_keys[adapter] if len(self) == 1 else np.concatenate([m.local_keys[adapter] for m in self])

    @property
    def numa_node(self) -> int:
        return self[0].numa_node


def locate(extents: Sequence[Extent], registered: Sequence[Registered]) -> tuple[Places, Located]:
    """Extents as places with the numbers of their keys; those that cross the end of a piece are cut there."""
    located = Located(registered)
    addresses = np.array([memory.address + offset for memory, offset, _ in extents], np.uint64)
    lengths = np.array([length for _, _, length in extents], np.uint64)
    if len(located) == 1 and len(located[0].starts) == 1:
        return Places(addresses, lengths, np.zeros(len(extents), np.int64)), located
    base, first_of = 0, {}
    for one in located:
        first_of[id(one.memory)] = base
        base += len(one.starts)
    starts = {id(one.memory): one.starts for one in located}
    rows: list[tuple[int, int, int]] = []
    for memory, offset, length in extents:
        if not length:
            continue
        begins, key = starts[id(memory)], first_of[id(memory)]
        address, end = memory.address + offset, memory.address + offset + length
        piece = int(np.searchsorted(begins, address, side="right")) - 1
        while address < end:
            limit = int(begins[piece + 1]) if piece + 1 < len(begins) else end
            step = min(end, limit) - address
            rows.append((address, step, key + piece))
            address += step
            piece += 1
    table = np.array(rows, np.uint64).reshape(-1, 3)
    return Places(table[:, 0].copy(), table[:, 1].copy(), table[:, 2].astype(np.int64)), located
