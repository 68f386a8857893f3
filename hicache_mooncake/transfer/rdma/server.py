"""The data port where peers may use RDMA too: it says where pages are and keeps them there while they are read.

The processor of the owner has no part in moving them. What it owes the reader is that a page stays where it is: it is
pinned from before their places are told until the reader says that it is done. A reader that does not, by its own
deadline, loses its queue pairs first and the pins after: then its device cannot read what the memory is used for next.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from hicache_mooncake.errors import ProtocolError, Unavailable
from hicache_mooncake.memory import Extent
from hicache_mooncake.transfer import wire
from hicache_mooncake.transfer.base import Credentials, Outcome, PageSource, Room
from hicache_mooncake.transfer.tcp_server import GONE, ServerLimits, TcpListener, take_bytes
from hicache_mooncake.transfer.tcp_stream import Stream

from . import abi, frames
from .fabric import ON_DEMAND, Fabric
from .paths import Path, RdmaStream
from .queue_pair import Endpoint, QueuePair
from .registration import Registered, Registry
from .staging import Area, Staging, copy_out
from .verbs import VerbsError

logger = logging.getLogger(__name__)

_NO_KEYS = np.zeros(0, np.uint32)


class RdmaListener(TcpListener):
    """A data port with queue pairs. TCP peers are served like by any other."""

    _stream_type = RdmaStream
    _kinds = (*TcpListener._kinds, wire.Kind.OPEN, wire.Kind.FETCH, wire.Kind.PUSH)

    def __init__(
        self,
        address: str,
        advertise: str,
        source: PageSource,
        credentials: Credentials,
        limits: ServerLimits,
        fabric: Fabric,
    ) -> None:
        self._fabric = fabric
        self._segment = Registry(fabric.adapters, abi.REMOTE_READ, largest_piece=fabric.largest_piece)
        self._writable = Registry(fabric.adapters, abi.LOCAL_WRITE | abi.REMOTE_WRITE)
        self._staging = Staging(self._writable)
        self._registering = threading.Thread(
            target=self._register, args=(source,), name="hcm-register-segment", daemon=True
        )
        super().__init__(address, advertise, source, credentials, limits)
        self._registering.start()
        if source.memory.size <= ON_DEMAND:
            self._registering.join()  # readers find it ready; of what is larger, pages go over TCP until it is

    def close(self) -> None:
        super().close()
        # Every connection has ended, and its queue pairs with it: nobody can reach the memory any more.
        self._staging.close()
        self._writable.close()
        self._segment.close()
        self._registering.join()

    def wait_until_registered(self, timeout: float) -> bool:
        """Whether the segment can be read by RDMA, after at most ``timeout`` seconds."""
        self._registering.join(timeout)
        return self._segment.ready(self._source.memory) is not None

    def _register(self, source: PageSource) -> None:
        try:
            self._segment.prepare(source.memory)
        except Unavailable as error:
            if not self._closing:
                logger.warning(
                    "RDMA: the segment is not registered, so pages are read from this node over TCP: %s", error
                )

    def _handle(self, stream: Stream, kind: wire.Kind, payload: bytearray) -> None:
        assert isinstance(stream, RdmaStream)
        if kind is wire.Kind.OPEN:
            self._open(stream, frames.decode_open(payload))
        elif kind is wire.Kind.FETCH:
            self._hold_pages(stream, wire.decode_read(payload))
        elif kind is wire.Kind.PUSH:
            self._take_written(stream, wire.decode_store(payload))
        else:
            super()._handle(stream, kind, payload)

    def _ended(self, stream: Stream) -> None:
        assert isinstance(stream, RdmaStream)
        stream.end_paths()

    # -- paths

    def _open(self, stream: RdmaStream, offers: Sequence[frames.Offer]) -> None:
        if stream.paths:
            raise ProtocolError("the reader opens paths twice")
        registered = self._segment.ready(self._source.memory)
        ends: list[Endpoint | None] = [None] * len(offers)
        keys = np.zeros((len(offers), 0), np.uint32)
        regions: list[tuple[int, int]] = []
        if registered is not None:
            regions = registered.bounds
            keys = np.zeros((len(offers), len(regions)), np.uint32)
            for at, offer in enumerate(offers):
                number = offer.to_device % len(self._fabric.adapters)
                ends[at] = self._answer_offer(stream, offer, number)
                keys[at] = registered.remote_keys[number]
        opened = frames.Opened(ends, len(self._fabric.adapters), regions, keys)
        stream.send([frames.encode_opened(opened)], time.monotonic() + self._limits.handshake_timeout)

    def _answer_offer(self, stream: RdmaStream, offer: frames.Offer, number: int) -> Endpoint | None:
        adapter = self._fabric.adapters[number]
        if not self._fabric.usable(adapter):
            return None
        try:
            pair = QueuePair(adapter.device, adapter.nic.port, adapter.gid_index, ethernet=adapter.nic.ethernet)
        except VerbsError as error:
            logger.warning("RDMA: no path for a reader: %s", error)
            return None
        try:
            # What may be reached is the regions' to say: the segment for reading, staging areas for writing.
            pair.connect(offer.end, access=abi.REMOTE_READ | abi.REMOTE_WRITE)
        except VerbsError as error:
            logger.warning("RDMA: a reader's path cannot be connected: %s", error)
            pair.close()
            return None
        stream.paths.append(Path(pair, number, ("", 0, number), _NO_KEYS))
        return pair.local

    # -- pages that are read

    def _hold_pages(self, stream: RdmaStream, request: wire.ReadRequest) -> None:
        registered = self._segment.ready(self._source.memory)
        if registered is None or not stream.paths:
            raise ProtocolError("the reader asks for places without having opened a path")
        deadline = time.monotonic() + min(request.budget + GONE, self._limits.send_timeout)
        pages = self._source.pin(request.keys)
        released = False
        try:
            rows: list[wire.PageRow] = []
            counts: list[int] = []
            extents: list[tuple[int, int, int]] = []
            for page, size in zip(pages, request.sizes, strict=True):
                before = len(extents)
                if page is None:
                    rows.append(wire.PageRow(Outcome.ABSENT, 0, 0))
                elif page.size != size:
                    rows.append(wire.PageRow(Outcome.SIZE, page.size, page.checksum))
                else:
                    rows.append(wire.PageRow(Outcome.OK, page.size, page.checksum))
                    extents += _in_regions(page.extents, registered)
                counts.append(len(extents) - before)
            stream.send([frames.encode_places(rows, counts, extents)], deadline)
            stream.receive_frame((wire.Kind.RELEASE,), 0, deadline)
            released = True
        finally:
            if not released:
                stream.end_paths()  # first of all: the reader's device may be reading still
            self._source.unpin([page for page in pages if page is not None])

    # -- pages that are written

    def _take_written(self, stream: RdmaStream, request: wire.StoreRequest) -> None:
        deadline = time.monotonic() + min(request.budget + GONE, self._limits.send_timeout)
        made = self._source.make_room(request.keys, request.sizes)
        rooms = [room for room in made if room is not None]
        checksums = [given for given, room in zip(request.checksums, made, strict=True) if room is not None]
        area: Area | None = None
        arrived = False
        try:
            held = self._source.holds(request.keys)
            answers = [
                wire.Acceptance.SEND if room is not None else wire.Acceptance.HELD if here else wire.Acceptance.FULL
                for room, here in zip(made, held, strict=True)
            ]
            if rooms:
                area = self._staging.take(deadline)
            stream.send([frames.encode_grant(_grant(answers, area, stream))], deadline)
            if area is not None:
                self._copy_in(stream, rooms, area, deadline)
            else:
                take_bytes(stream, rooms, deadline)
            arrived = True
            coming, rooms = rooms, []
            kept = self._source.keep(coming, checksums)
        finally:
            if area is not None:
                if not arrived:
                    stream.end_paths()  # the writer's device may be writing still, and the area has a next user
                self._staging.give_back(area)
            self._source.give_up(rooms)
        stream.send([wire.encode_stored(kept)], deadline)

    def _copy_in(self, stream: RdmaStream, rooms: Sequence[Room], area: Area, deadline: float) -> None:
        """Copy what the writer says it has written, as often as it takes until every room is full."""
        targets = [extent for room in rooms for extent in room.extents]
        left = sum(room.size for room in rooms)
        while left:
            _, payload = stream.receive_frame((wire.Kind.WRITTEN,), 8, deadline)
            size = frames.decode_bytes(payload)
            if not 0 < size <= min(left, area.memory.size):
                raise ProtocolError("the writer has written more than there was room for")
            # Its device has our device's word that the bytes are here. Should one not be visible yet after all, the
            # checksum of the copy says so.
            targets = copy_out(area.memory, size, targets)
            left -= size
            if left:
                stream.send([frames.encode_bytes(wire.Kind.TAKEN, size)], deadline)


def _grant(answers: list[wire.Acceptance], area: Area | None, stream: RdmaStream) -> frames.Grant:
    if area is None:
        return frames.Grant(answers, 0, 0, [])
    keys = [int(area.registered.remote_keys[path.adapter][0]) for path in stream.paths]
    return frames.Grant(answers, area.memory.address, area.memory.size, keys)


def _in_regions(extents: Sequence[Extent], registered: Registered) -> list[tuple[int, int, int]]:
    """Region, offset and length of extents; cut where a region ends."""
    starts = registered.starts
    if len(starts) == 1:
        return [(0, offset, length) for _, offset, length in extents if length]
    found: list[tuple[int, int, int]] = []
    bounds: list[Any] = registered.bounds
    for extent in extents:
        address, left = extent.address, extent.length
        region = int(np.searchsorted(starts, address, side="right")) - 1
        while left:
            start, length = bounds[region]
            step = min(left, start + length - address)
            found.append((region, address - start, step))
            address, left, region = address + step, left - step, region + 1
    return found
