"""The journal of an offset store: what was written where and what was freed, in the order it happened.

Every frame carries its epoch and number, so that the end of the journal is where the next number is not found. A frame
is written before what it says is relied on: an object is visible after its frame, and space is used again after the
frame that frees it. So the journal may be cut off anywhere.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from hicache_mooncake.ssd.base import Hooks
from hicache_mooncake.ssd.frames import (
    HEADER_BYTES,
    Frame,
    Kind,
    announced_length,
    decode,
    decode_numbers,
    decode_rows,
    encode,
    encode_numbers,
    encode_rows,
)
from hicache_mooncake.ssd.io_base import ALIGNMENT, DiskIO, Transfer, padded
from hicache_mooncake.ssd.local import Scratch
from hicache_mooncake.ssd.offset_format import Geometry, Stored, encode_super, spans_of, stored_rows

JOURNAL_SECONDS = 30.0
"""Longest wait for a frame: it is a few KiB, and whoever waits is in the background."""

_ROWS_AT_ONCE = 4096
_LOOK_AHEAD = 4 << 20
"""Bytes after a damaged frame in which the next one is looked for: more than the longest frame."""

_PIECE = 8 << 20
_NUMBER_BITS = 32


class JournalFull(Exception):
    """The frame does not fit any more: a checkpoint is needed first."""


class Journal:
    """Not thread-safe: one caller at a time. Everything that writes raises ``OSError``."""

    def __init__(
        self,
        io: DiskIO,
        descriptor: int,
        geometry: Geometry,
        owner: bytes,
        scratch: Scratch,
        hooks: Hooks,
        *,
        sync: bool,
    ) -> None:
        self.geometry = geometry
        self.damaged = 0
        self._io = io
        self._descriptor = descriptor
        self._owner = owner
        self._scratch = scratch
        self._hooks = hooks
        self._sync = sync
        self._at = geometry.journal_start
        self._number = 0

    # -- writing

    def put(self, objects: Sequence[tuple[str, Stored]]) -> None:
        """Objects were written. Raises :class:`JournalFull`."""
        for start in range(0, len(objects), _ROWS_AT_ONCE):
            rows = objects[start : start + _ROWS_AT_ONCE]
            self._append(Kind.PUT, _rows(rows), len(rows), self.geometry)

    def free(self, first_offsets: Sequence[int]) -> None:
        """Objects were removed. Raises :class:`JournalFull`."""
        self._append(Kind.FREE, encode_numbers(first_offsets), len(first_offsets), self.geometry)

    def checkpoint(self, objects: Iterable[tuple[str, Stored]], geometry: Geometry | None = None) -> None:
        """Start anew in the other area, with what there is. Until the superblock says so the old area counts."""
        fresh = (geometry or self.geometry).next()
        self._hooks.failpoint("checkpoint")
        before = self._at, self._number
        self._at, self._number = fresh.journal_start, 0
        try:
            waiting = iter(objects)
            while rows := list(islice(waiting, _ROWS_AT_ONCE)):
                self._append(Kind.PUT, _rows(rows), len(rows), fresh, sync=False)
            self._hooks.failpoint("checkpoint sync")
            os.fdatasync(self._descriptor)
            place, content = encode_super(fresh, self._owner)
            self._hooks.failpoint("superblock")
            self._write(place, content)
            os.fdatasync(self._descriptor)
        except (OSError, JournalFull):
            self._at, self._number = before
            raise
        self.geometry = fresh

    def _append(self, kind: Kind, payload: bytes, count: int, geometry: Geometry, *, sync: bool = True) -> None:
        number = geometry.epoch << _NUMBER_BITS | (self._number + 1)
        content = encode(Frame(kind, self._owner, number, self._at, count, payload))
        if self._at + padded(len(content)) > geometry.journal_start + geometry.area:
            raise JournalFull
        self._hooks.failpoint(f"journal {kind.name.lower()}")
        self._write(self._at, content)
        if sync and self._sync:
            self._hooks.failpoint("journal sync")
            os.fdatasync(self._descriptor)
        self._at += padded(len(content))
        self._number += 1

    def _write(self, place: int, content: bytes) -> None:
        deadline = time.monotonic() + JOURNAL_SECONDS
        with self._scratch.filled([content]) as [extent]:
            moved = self._io.write([Transfer(self._descriptor, place, [extent])], deadline)[0]
        if moved != len(content):
            number = -moved if moved < 0 else errno.ENOSPC
            raise OSError(number, os.strerror(number))

    # -- reading

    def replay(
        self,
        read: Callable[[int, int], bytes],
        progress: Callable[[int, int], None] | None,
    ) -> dict[str, Stored]:
        """What the journal says is there, in the order it was written. ``read`` gives bytes at an offset.

        Frames are appended behind the last one found from then on, so it is never left half-way. Raises ``OSError``.
        """
        objects: dict[str, Stored] = {}
        key_at: dict[int, str] = {}
        geometry = self.geometry
        start, end = geometry.journal_start, geometry.journal_start + geometry.area
        window = _Window(read, end)
        at = start
        while at < end:
            frame = self._frame_at(window, at)
            if frame is None:
                found = self._next_frame(window, at, end)
                if found is None:
                    break
                self.damaged += 1
                at, frame = found
            self._number = frame.sequence & ((1 << _NUMBER_BITS) - 1)
            _apply(frame, objects, key_at)
            at += frame.footprint
            self._at = at
            if progress is not None:
                progress(at - start, geometry.area)
        return objects

    def _frame_at(self, window: _Window, at: int) -> Frame | None:
        length = announced_length(window.bytes(at, HEADER_BYTES))
        if not length:
            return None
        frame = decode(window.bytes(at, length), owner=self._owner, place=at)
        if frame is None or frame.sequence >> _NUMBER_BITS != self.geometry.epoch:
            return None
        return frame if frame.sequence & ((1 << _NUMBER_BITS) - 1) > self._number else None

    def _next_frame(self, window: _Window, at: int, end: int) -> tuple[int, Frame] | None:
        for place in range(at + ALIGNMENT, min(end, at + _LOOK_AHEAD), ALIGNMENT):
            frame = self._frame_at(window, place)
            if frame is not None:
                return place, frame
        return None


class _Window:
    """Reads a file front to end in large pieces."""

    def __init__(self, read: Callable[[int, int], bytes], end: int) -> None:
        self._read = read
        self._end = end
        self._start = 0
        self._content = b""

    def bytes(self, at: int, length: int) -> bytes:
        end = min(at + length, self._end)
        if not self._start <= at <= end <= self._start + len(self._content):
            self._start = at
            self._content = self._read(at, min(max(_PIECE, length), self._end - at))
        return self._content[at - self._start : end - self._start]


def _rows(objects: Sequence[tuple[str, Stored]]) -> bytes:
    return encode_rows(
        [key for key, _ in objects],
        [found[0] for _, found in objects],
        [found[1] for _, found in objects],
        [spans_of(found) for _, found in objects],
    )


def _apply(frame: Frame, objects: dict[str, Stored], key_at: dict[int, str]) -> None:
    if frame.kind is Kind.PUT:
        rows = decode_rows(frame.payload)
        if rows is None:
            return
        found = stored_rows(rows)
        if not objects.keys().isdisjoint(rows.keys):
            for key in rows.keys:  # so that the order is that of the last write
                objects.pop(key, None)
        objects.update(zip(rows.keys, found, strict=True))
        key_at.update(zip((one[2] for one in found), rows.keys, strict=True))
    elif frame.kind is Kind.FREE:
        for offset in decode_numbers(frame.payload):
            freed = key_at.pop(offset, None)
            if freed is not None and objects.get(freed, (0, 0, -1))[2] == offset:
                del objects[freed]
