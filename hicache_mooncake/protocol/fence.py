"""The fence: who may touch an engine's pages, decided by two words in memory that both processes map.

SGLang reuses a page as soon as the call on it has returned. So the node may work on an engine's memory only while the
engine waits for it, and the engine must be able to end that without the node's help: it may be frozen.

Each connection owns a slot of two words. ``allowed`` (written by the engine) is the number of the request that waits;
``writing`` (written by the node) the number of the request that is storing into the engine's pages.

Reading into pages, against a write after the call returned:

1. node: ``writing = r``; then reads ``allowed``, and goes away if it is not ``r``.
2. node: stores into the pages, looking at ``allowed`` again before each; then ``writing = 0``.
3. engine, to give up: ``allowed = 0``; a memory barrier on every CPU; then reads ``writing``.

Whatever the order of 1 and 3, either the node sees that it is not allowed, or the engine sees that it is writing and
waits for it (and at its deadline kills it: see ``engine/quiesce.py``).

Writing from pages, against bytes that changed after the call returned: the node copies a page out, then reads
``allowed``; if it still is ``r``, every byte was read before the engine gave up, else the copy is dropped.

The barrier of step 3 is ``membarrier(2)``: the rare side pays for the frequent side, which in Python has no fence.
"""

from __future__ import annotations

import ctypes
import platform
import time

from hicache_mooncake import memory
from hicache_mooncake.memory import Memory

SLOTS = 4096
"""Slots of one session, 64 KiB. Slots are never reused; a session that runs out of them is opened anew."""

SIZE = SLOTS * 16

_SYS_MEMBARRIER = {"x86_64": 324, "aarch64": 283}.get(platform.machine(), -1)
_MEMBARRIER_CMD_GLOBAL = 1
_STORE_DRAIN = 0.01
"""Seconds that are longer than any CPU keeps a store to itself, for kernels or sandboxes without membarrier."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def barrier_everywhere() -> None:
    """Return after every running thread of this host has executed a full memory barrier."""
    if _SYS_MEMBARRIER < 0 or _libc.syscall(ctypes.c_long(_SYS_MEMBARRIER), _MEMBARRIER_CMD_GLOBAL, 0, 0) != 0:
        time.sleep(_STORE_DRAIN)


class Fence:
    """The words of one session, mapped by its engine and its node."""

    def __init__(self, mapping: Memory) -> None:
        """Take ownership of ``mapping``. Raises ``ValueError`` when it is too small."""
        if mapping.size < SIZE:
            raise ValueError(f"a fence needs {SIZE} bytes, got {mapping.size}")
        self.memory = mapping
        self._words = mapping.view[:SIZE].cast("Q")

    @classmethod
    def create(cls) -> Fence:
        return cls(memory.create("hicache-mooncake-fence", SIZE))

    # -- the engine's side

    def allow(self, slot: int, request: int) -> None:
        """From now on the node may work on this request's pages."""
        self._words[2 * slot] = request

    def finish(self, slot: int) -> None:
        """The node's reply is here: it is done by itself, no barrier needed."""
        self._words[2 * slot] = 0

    def revoke(self, slot: int, request: int) -> bool:
        """Forbid the request. True when the node is storing into its pages at this moment and must be waited for."""
        self._words[2 * slot] = 0
        barrier_everywhere()
        return self.writing(slot, request)

    def writing(self, slot: int, request: int) -> bool:
        """Whether the node still stores into the pages of ``request``."""
        return self._words[2 * slot + 1] == request

    # -- the node's side

    def word(self, slot: int) -> int:
        """Address of the slot's ``allowed``, for copying that Python is not part of."""
        return self.memory.address + 16 * slot

    def allowed(self, slot: int, request: int) -> bool:
        """Whether the engine still waits for the request."""
        return self._words[2 * slot] == request

    def begin_writing(self, slot: int, request: int) -> bool:
        """Announce stores into the request's pages; False (and none may follow) when it is not allowed any more."""
        self._words[2 * slot + 1] = request
        if self.allowed(slot, request):
            return True
        self._words[2 * slot + 1] = 0
        return False

    def end_writing(self, slot: int) -> None:
        """No store of this slot's request follows."""
        self._words[2 * slot + 1] = 0

    def close(self) -> None:
        self._words.release()
        self.memory.close()
