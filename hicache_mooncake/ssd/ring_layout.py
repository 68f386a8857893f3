"""How the kernel's io_uring lays out its queues: opcodes, flags, entries, offsets. Pure: nothing here calls the kernel.

Numbers and structures are those of Linux' ``include/uapi/linux/io_uring.h``; they are the same on every architecture.
Entries are filled as arrays, one store a column for a whole batch: a Python object an entry would cost more than the
system call that it saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

SYS_SETUP: Final = 425
SYS_ENTER: Final = 426
SYS_REGISTER: Final = 427

OP_NOP: Final = 0
OP_READ_FIXED: Final = 4
OP_WRITE_FIXED: Final = 5
OP_POLL_ADD: Final = 6
OP_ASYNC_CANCEL: Final = 14
OP_READ: Final = 22
OP_WRITE: Final = 23

SETUP_CLAMP: Final = 1 << 4
SETUP_SINGLE_ISSUER: Final = 1 << 12
SETUP_DEFER_TASKRUN: Final = 1 << 13

FEAT_SINGLE_MMAP: Final = 1 << 0  # Linux 5.4
FEAT_NODROP: Final = 1 << 1  # 5.5: a full completion queue loses nothing
FEAT_EXT_ARG: Final = 1 << 8  # 5.11: waiting takes a timeout
NEEDED_FEATURES: Final = FEAT_SINGLE_MMAP | FEAT_NODROP | FEAT_EXT_ARG

ENTER_GETEVENTS: Final = 1 << 0
ENTER_EXT_ARG: Final = 1 << 3

REGISTER_BUFFERS: Final = 0
UNREGISTER_BUFFERS: Final = 1

OFF_RINGS: Final = 0
OFF_SQES: Final = 0x10000000

MAX_BUFFER: Final = 1 << 30
"""Bytes of the largest buffer that the kernel registers as one."""

NOT_FIXED: Final = -1
"""Stands for the number of a registered buffer where memory is in none."""

PARAMS_WORDS: Final = 30
"""``struct io_uring_params`` as 32-bit words."""

SQE: Final = np.dtype(
    {
        "names": ["opcode", "flags", "ioprio", "fd", "off", "addr", "len", "rw", "tag", "buffer", "rest"],
        "formats": ["u1", "u1", "u2", "i4", "u8", "u8", "u4", "u4", "u8", "u2", ("u1", 22)],
        "offsets": [0, 1, 2, 4, 8, 16, 24, 28, 32, 40, 42],
        "itemsize": 64,
    }
)
CQE: Final = np.dtype([("tag", "u8"), ("result", "i4"), ("flags", "u4")])


class Offsets(NamedTuple):
    """Where the parts of both queues lie in the mapping of the rings, and how many entries they have."""

    sq_entries: int
    cq_entries: int
    features: int
    sq_head: int
    sq_tail: int
    sq_array: int
    cq_head: int
    cq_tail: int
    cqes: int

    @property
    def rings_size(self) -> int:
        """Bytes of the mapping that holds both rings."""
        return max(self.sq_array + 4 * self.sq_entries, self.cqes + CQE.itemsize * self.cq_entries)


def offsets_of(params: Sequence[int]) -> Offsets:
    """What the kernel wrote into ``struct io_uring_params``.

    Raises ``ValueError`` for a kernel that lacks what is needed here.
    """
    sq, cq = params[10:20], params[20:30]
    features = params[5]
    if features & NEEDED_FEATURES != NEEDED_FEATURES:
        raise ValueError("the kernel's io_uring is older than Linux 5.11")
    return Offsets(params[0], params[1], features, sq[0], sq[1], sq[6], cq[0], cq[1], cq[5])


class Entries(NamedTuple):
    """Reads, or writes, to be queued: one array an item, all of one length. ``buffers``: see :data:`NOT_FIXED`."""

    fds: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.uint64]
    addresses: npt.NDArray[np.uint64]
    lengths: npt.NDArray[np.uint32]
    buffers: npt.NDArray[np.int32]
    tags: npt.NDArray[np.uint64]


def fill(sqes: npt.NDArray[Any], tail: int, entries: Entries, *, write: bool) -> None:
    """Write ``entries`` into the ring of ``sqes`` from ``tail`` on; its length is a power of two, and not exceeded."""
    count, size = len(entries.tags), len(sqes)
    if count > size:
        raise ValueError(f"{count} entries do not fit into a ring of {size}")
    at = tail & (size - 1)
    first = min(count, size - at)
    _fill_part(sqes[at : at + first], entries, slice(0, first), write)
    if first < count:
        _fill_part(sqes[: count - first], entries, slice(first, count), write)


def _fill_part(sqes: npt.NDArray[Any], entries: Entries, part: slice, write: bool) -> None:
    fixed = entries.buffers[part] >= 0
    sqes["opcode"] = np.where(fixed, OP_WRITE_FIXED, OP_WRITE) if write else np.where(fixed, OP_READ_FIXED, OP_READ)
    sqes["flags"] = 0
    sqes["ioprio"] = 0
    sqes["fd"] = entries.fds[part]
    sqes["off"] = entries.offsets[part]
    sqes["addr"] = entries.addresses[part]
    sqes["len"] = entries.lengths[part]
    sqes["rw"] = 0
    sqes["tag"] = entries.tags[part]
    sqes["buffer"] = np.where(fixed, entries.buffers[part], 0)
    sqes["rest"] = 0


def fill_one(sqes: npt.NDArray[Any], tail: int, **fields: int) -> None:
    """Write one entry; what is not given is 0."""
    entry = sqes[tail & (len(sqes) - 1) :][:1]
    entry.view("u1")[:] = 0
    for name, number in fields.items():
        entry[name] = number


def take(cqes: npt.NDArray[Any], head: int, tail: int) -> npt.NDArray[Any]:
    """The completions from ``head`` up to ``tail`` (both run through all 32 bits), copied out of their ring."""
    size = len(cqes)
    count = (tail - head) & 0xFFFFFFFF
    at = head & (size - 1)
    if at + count <= size:
        taken: npt.NDArray[Any] = cqes[at : at + count].copy()
        return taken
    return np.concatenate([cqes[at:], cqes[: at + count - size]])
