"""Reading pages straight out of a peer's segment, and writing them into a staging area that it grants.

The connection that pages would take over TCP carries what is said about them instead, and the pages themselves where
RDMA cannot be used: memory that is not registered yet, every path to the peer resting.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hicache_mooncake import memory
from hicache_mooncake.errors import Unavailable
from hicache_mooncake.memory import Extent
from hicache_mooncake.transfer import wire
from hicache_mooncake.transfer.address import Address
from hicache_mooncake.transfer.base import Credentials, Outcome, PageWrite
from hicache_mooncake.transfer.tcp_batch import ReadJob, deliver
from hicache_mooncake.transfer.tcp_client import ClientLimits, TcpPeer
from hicache_mooncake.transfer.tcp_stream import Stream

from . import abi, frames, stripes
from .fabric import Fabric
from .paths import Path, RdmaStream, Refused, Transfer, connect_all
from .plan import Places, Plan, Progress
from .queue_pair import Endpoint, QueuePair
from .registration import Located, Registered, locate
from .staging import split_extents
from .stripes import PathKey
from .verbs import VerbsError

logger = logging.getLogger(__name__)

DEPTH = 512
"""Requests under way on one queue pair."""
PIECES = 16
"""Extents of one request: what fits a work queue entry of 320 bytes, so that a queue pair costs 160 KiB."""
SLICE = 1 << 20
"""Bytes of the largest request while several paths share a batch."""
OPEN_TIMEOUT = 3.0
"""Seconds both sides have to open their paths. Resolving a neighbour's address the first time takes a second."""
LOOK_AGAIN = 2.0
"""Seconds until a connection without RDMA is made anew, to see whether the peer is ready now or a link is up."""


class _Fetched(NamedTuple):
    rows: list[wire.PageRow]
    places: Places
    registered: list[Registered]


class _Granted(NamedTuple):
    grant: frames.Grant
    registered: list[Registered]


class RdmaPeer(TcpPeer):
    """The connections to one node. ``strict``: pages do not move over TCP, whatever happens."""

    _stream_type = RdmaStream

    def __init__(
        self,
        address: Address,
        node_id: str,
        credentials: Credentials,
        limits: ClientLimits,
        fabric: Fabric,
        *,
        strict: bool,
    ) -> None:
        super().__init__(address, node_id, credentials, limits)
        self._fabric = fabric
        self._strict = strict
        self._their_devices = 0

    # -- connections

    def close(self) -> None:
        super().close()
        self._fabric.forget(self.node_id)

    def _release(self, stream: Stream, healthy: bool) -> None:
        if not healthy:
            assert isinstance(stream, RdmaStream)
            stream.end_paths()  # may take a moment, so not under the lock of all connections
        super()._release(stream, healthy)

    def _reuse(self) -> Stream | None:
        while (stream := super()._reuse()) is not None:
            assert isinstance(stream, RdmaStream)
            if time.monotonic() < stream.look_again:
                return stream
            self._release(stream, False)  # a path may have come back
        return None

    def _agreed(self, stream: Stream, deadline: float) -> None:
        assert isinstance(stream, RdmaStream)
        now = time.monotonic()
        deadline = min(deadline, now + OPEN_TIMEOUT)
        offers: list[frames.Offer] = []
        pairs: list[tuple[QueuePair, int, Any]] = []
        try:
            for number, adapter in enumerate(self._fabric.adapters):
                to_device = self._pairing(number, now)
                if to_device is None or not self._fabric.usable(adapter):
                    stream.look_again = now + LOOK_AGAIN
                    continue
                limits = adapter.device.limits
                pair = QueuePair(
                    adapter.device,
                    adapter.nic.port,
                    adapter.gid_index,
                    ethernet=adapter.nic.ethernet,
                    depth=min(DEPTH, limits.work, limits.completions - 1),
                    pieces=min(PIECES, limits.pieces),
                )
                pairs.append((pair, number, self._path_key(number, to_device)))
                offers.append(frames.Offer(pair.local, to_device))
            if offers:
                self._open(stream, offers, pairs, deadline)
        except VerbsError as error:
            stream.look_again = now + LOOK_AGAIN
            self._fabric.count(rdma_paths_failed=1)
            logger.warning("RDMA: no path to node %s: %s", self.node_id, error)
        finally:
            for pair, _, _ in pairs:
                if not any(path.pair is pair for path in stream.paths):
                    pair.close()

    def _open(
        self, stream: RdmaStream, offers: list[frames.Offer], pairs: list[tuple[QueuePair, int, Any]], deadline: float
    ) -> None:
        stream.send([frames.encode_open(offers)], deadline)
        _, payload = stream.receive_frame((wire.Kind.OPENED,), frames.MAX_OPENED_BYTES, deadline)
        opened = frames.decode_opened(payload, len(offers))
        self._their_devices = opened.devices
        stream.opened = np.array(opened.regions, np.uint64).reshape(-1, 2)
        stream.awaits_owner = not opened.regions
        paths: list[tuple[Path, Endpoint]] = []
        for at, (pair, number, key) in enumerate(pairs):
            end = opened.ends[at]
            if end is None or not opened.regions:
                stream.look_again = time.monotonic() + LOOK_AGAIN
                continue
            paths.append((Path(pair, number, key, opened.keys[at]), end))
        # Those that cannot be connected stay in their place: both sides number the paths that were opened.
        stream.paths = [path for path, _ in paths]
        try:
            errors = connect_all(paths, deadline)
        except Unavailable:
            stream.paths = []
            pairs.clear()  # whoever is connecting one still closes it
            raise
        for path, error in zip(stream.paths, errors, strict=True):
            if error:
                path.close()
                pause = self._fabric.rests.failed(path.key, time.monotonic())
                stream.look_again = min(stream.look_again, time.monotonic() + pause)
                self._fabric.count(rdma_paths_failed=1)
                logger.warning("RDMA: no path to node %s over %s: %s", self.node_id, path.name, error)

    def _pairing(self, number: int, now: float) -> int | None:
        """Which of the peer's devices our device ``number`` is connected to; None while all those paths rest.

        The same number first: in a fabric of several rails it is on the same switch.
        """
        for shift in range(max(self._their_devices, 1)):
            to_device = (number + shift) % max(self._their_devices, number + 1)
            if not self._fabric.rests.resting(self._path_key(number, to_device), now):
                return to_device
        return None

    def _path_key(self, number: int, to_device: int) -> PathKey:
        return (self.node_id, number, to_device % max(self._their_devices, number + 1))

    # -- reading

    def _request(self, job: ReadJob, part: range, stream: Stream) -> Any:
        assert isinstance(stream, RdmaStream)
        pages = job.batch[part.start : part.stop]
        registered = self._registered(stream, [extent for page in pages for extent in page.into])
        if registered is None:
            self._fabric.count(rdma_reads_by_tcp=len(pages))
            return super()._request(job, part, stream)
        sizes = [page.size for page in pages]
        request = wire.ReadRequest([page.key for page in pages], sizes, job.deadline - time.monotonic())
        stream.send([wire.encode_read(request, wire.Kind.FETCH)], job.deadline)
        _, payload = stream.receive_frame((wire.Kind.PLACES,), frames.MAX_PLACES_BYTES, job.deadline)
        return _Fetched(*frames.decode_places(payload, sizes, stream.opened), registered)

    def _receive(self, stream: Stream, job: ReadJob, part: range, answer: Any) -> None:
        if not isinstance(answer, _Fetched):
            super()._receive(stream, job, part, answer)
            return
        assert isinstance(stream, RdmaStream)
        present: list[int] = []
        expected: list[int] = []
        for index, row in zip(part, answer.rows, strict=True):
            if row.status is Outcome.OK:
                present.append(index)
                expected.append(row.checksum)
            else:
                job.outcomes[index] = row.status
        failure = ""
        if present:
            failure = self._take(stream, job, present, expected, answer)
        stream.send([wire.encode_frame(wire.Kind.RELEASE, b"")], job.deadline)
        left = [index for index in present if job.outcomes[index] is None]
        if left:
            self._read_by_tcp(stream, job, left, failure)

    def _take(self, stream: RdmaStream, job: ReadJob, present: list[int], expected: list[int], answer: _Fetched) -> str:
        """Read the pages at ``present`` that the owner holds pinned; why some are not read."""
        pages = [job.batch[index] for index in present]
        local, located = locate([extent for page in pages for extent in page.into], answer.registered)
        ends = np.cumsum(np.array([page.size for page in pages], np.uint64))
        paths, spare = self._choose(stream, located.numa_node, int(ends[-1]))
        plan = Plan(
            local,
            answer.places,
            op=abi.OP_READ,
            max_pieces=min(min(path.pair.pieces, path.pair.device.limits.read_pieces) for path in [*paths, *spare]),
            slice_bytes=SLICE if len(paths) > 1 else 0,
        )
        progress = Progress(plan, ends)
        outcomes, verify = job.outcomes, job.verify

        def arrived(begin: int, end: int) -> None:
            for at in progress.carried_out(begin, end):
                page = pages[at]
                intact = not verify or memory.checksum(page.key, page.into) == expected[at]
                outcomes[present[at]] = Outcome.OK if intact else Outcome.CORRUPT

        transfer = Transfer(
            self._fabric,
            stream,
            plan,
            arrived,
            local_keys=_memoised(located),
            remote_keys=lambda path: path.remote_keys,
        )
        try:
            if transfer.run(paths, spare, job.deadline):
                self._fabric.count(rdma_read_pages=len(pages), rdma_read_bytes=plan.size)
        except Refused as error:
            stream.look_again = 0.0
            return str(error)
        return transfer.failure

    def _read_by_tcp(self, stream: RdmaStream, job: ReadJob, left: list[int], failure: str) -> None:
        """What no path could read comes over the connection itself."""
        if self._strict:
            raise Unavailable(failure or "no path is left")
        rest = ReadJob([job.batch[index] for index in left], job.deadline, job.verify, job.todo, [None] * len(left))
        whole = range(len(left))
        self._fabric.count(rdma_reads_by_tcp=len(left))
        super()._receive(stream, rest, whole, super()._request(rest, whole, stream))
        for index, outcome in zip(left, rest.outcomes, strict=True):
            job.outcomes[index] = outcome

    # -- writing

    def _offer(self, pages: Sequence[PageWrite], deadline: float, stream: Stream) -> Any:
        assert isinstance(stream, RdmaStream)
        registered = self._registered(stream, [extent for page in pages for extent in page.source])
        if registered is None:
            self._fabric.count(rdma_writes_by_tcp=len(pages))
            return super()._offer(pages, deadline, stream)
        request = wire.StoreRequest(
            [page.key for page in pages],
            [page.size for page in pages],
            [page.checksum for page in pages],
            deadline - time.monotonic(),
        )
        stream.send([wire.encode_store(request, wire.Kind.PUSH)], deadline)
        _, payload = stream.receive_frame((wire.Kind.GRANT,), frames.MAX_GRANT_BYTES, deadline)
        return _Granted(frames.decode_grant(payload, len(pages), len(stream.paths)), registered)

    def _deliver(
        self,
        stream: Stream,
        batch: Sequence[PageWrite],
        part: range,
        answer: Any,
        outcomes: list[Outcome | None],
        deadline: float,
    ) -> None:
        if not isinstance(answer, _Granted):
            super()._deliver(stream, batch, part, answer, outcomes, deadline)
            return
        assert isinstance(stream, RdmaStream)
        grant = answer.grant
        wanted = [index for index, said in zip(part, grant.answers, strict=True) if said is wire.Acceptance.SEND]
        if not grant.size or not wanted:
            if self._strict and wanted:
                raise Unavailable("the peer has no staging area free for RDMA")
            deliver(stream, batch, part, grant.answers, outcomes, deadline)
            return
        extents = [extent for index in wanted for extent in batch[index].source if extent.length]
        total = sum(batch[index].size for index in wanted)
        taken = 0
        while taken < total:
            size = min(grant.size, total - taken)
            extents = self._put(stream, extents, size, grant, answer.registered, deadline)
            stream.send([frames.encode_bytes(wire.Kind.WRITTEN, size)], deadline)
            taken += size
            if taken < total:
                stream.receive_frame((wire.Kind.TAKEN,), wire.MAX_REPLY_BYTES, deadline)
        self._fabric.count(rdma_written_pages=len(wanted), rdma_written_bytes=total)
        _, payload = stream.receive_frame((wire.Kind.STORED,), wire.MAX_REPLY_BYTES, deadline)
        for index, kept in zip(wanted, wire.decode_stored(payload, len(wanted)), strict=True):
            outcomes[index] = Outcome.OK if kept else Outcome.CORRUPT
        for index, said in zip(part, grant.answers, strict=True):
            if said is not wire.Acceptance.SEND:
                outcomes[index] = Outcome.OK if said is wire.Acceptance.HELD else Outcome.FULL

    def _put(
        self,
        stream: RdmaStream,
        extents: list[Extent],
        size: int,
        grant: frames.Grant,
        registered: list[Registered],
        deadline: float,
    ) -> list[Extent]:
        """Write the first ``size`` bytes of ``extents`` into the staging area; returns the extents that are left.

        The area's keys come one a path, in the order of the paths that were opened.
        """
        now, later = split_extents(extents, size)
        local, located = locate(now, registered)
        remote = Places(np.array([grant.address], np.uint64), np.array([size], np.uint64), np.zeros(1, np.int64))
        paths, spare = self._choose(stream, located.numa_node, size)
        pieces = min(path.pair.pieces for path in [*paths, *spare])
        plan = Plan(local, remote, op=abi.OP_WRITE, max_pieces=pieces, slice_bytes=SLICE if len(paths) > 1 else 0)
        keys = {path: np.array([key], np.uint32) for path, key in zip(stream.paths, grant.keys, strict=True)}
        transfer = Transfer(
            self._fabric,
            stream,
            plan,
            lambda begin, end: None,
            local_keys=_memoised(located),
            remote_keys=keys.__getitem__,
        )
        if not transfer.run(paths, spare, deadline):
            raise Unavailable(transfer.failure or "no path is left")
        return later

    # -- both

    def _registered(self, stream: RdmaStream, extents: list[Extent]) -> list[Registered] | None:
        """The memories of a batch if RDMA can move it; None when it has to go over TCP. Raises when it must not."""
        registered = self._fabric.registered(extents) if stream.live() else None
        if registered is None and self._strict:
            # What is being registered, here or there, is no fault: until then a page is better late than missed.
            if not stream.live() and not stream.awaits_owner:
                raise Unavailable("no path by RDMA: a link is down, or the peer is not reached")
            if refused := self._fabric.refused(extents):
                raise Unavailable(f"memory is not registered: {refused}")
        return registered

    def _choose(self, stream: RdmaStream, numa_node: int, size: int) -> tuple[list[Path], list[Path]]:
        """The paths for a batch, the ones near its memory, and those to use when they all fail."""
        live = stream.live()
        if not live:
            raise Unavailable("no path is left")
        ordered: list[list[Path]] = []
        for group in self._fabric.near(numa_node):
            near = [path for path in live if path.adapter in group]
            if near:
                ordered.append(near)
        paths, spare = ordered[0], [path for group in ordered[1:] for path in group]
        if size < stripes.STRIPE_FROM and len(paths) > 1:
            first = next(self._fabric.turn) % len(paths)
            spare = [*paths[first + 1 :], *paths[:first], *spare]
            paths = [paths[first]]
        return paths, spare


def _memoised(located: Located) -> Any:
    """Local keys by adapter; put together once a batch."""
    made: dict[int, NDArray[Any]] = {}

    def keys(adapter: int) -> NDArray[Any]:
        if adapter not in made:
            made[adapter] = located.local_keys(adapter)
        return made[adapter]

    return keys
