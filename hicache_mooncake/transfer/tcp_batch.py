"""A batch on one connection: cut into requests, asked for or offered, its pages' bytes taken in or sent."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .. import memory
from ..errors import HiCacheMooncakeError
from . import wire
from .base import Outcome, PageRead, PageWrite
from .tcp_stream import DeadlinePassed, Stream


@dataclass(slots=True)
class ReadJob:
    """One call of :meth:`TcpPeer.read`, shared by the threads that work on it."""

    batch: Sequence[PageRead]
    deadline: float
    verify: bool
    todo: deque[range]
    outcomes: list[Outcome | None] = field(default_factory=list)
    unfinished: Outcome = Outcome.FAILED
    failure: str = ""

    def next_part(self) -> range | None:
        """What a lane asks for next; None when there is nothing left."""
        try:
            return self.todo.popleft()
        except IndexError:
            return None

    def fail(self, error: HiCacheMooncakeError) -> None:
        self.unfinished = Outcome.TIMEOUT if isinstance(error, DeadlinePassed) else Outcome.FAILED
        self.failure = str(error)


def total_bytes(batch: Sequence[PageRead]) -> int:
    """The size of a batch. Raises ``ValueError`` for what could only break the reply's framing later."""
    total = 0
    for page in batch:
        length = 0
        for area, offset, size in page.into:
            if offset < 0 or size < 0 or offset + size > area.size:
                raise ValueError(f"an extent of page {page.key!r} lies outside its memory")
            length += size
        if length != page.size:
            raise ValueError(f"the extents of page {page.key!r} have {length} bytes, not {page.size}")
        if not 0 < page.size <= wire.MAX_PAGE_BYTES:
            raise ValueError(f"page {page.key!r} cannot have {page.size} bytes")
        total += length
    wire.encode_keys([page.key for page in batch])
    return total


def requests(batch: Sequence[PageRead | PageWrite], limit: int) -> Iterator[range]:
    """Cut a batch into requests of at most ``limit`` bytes (or one page) and ``wire.MAX_PAGES`` pages."""
    start = size = 0
    for index, page in enumerate(batch):
        if index > start and (size + page.size > limit or index - start == wire.MAX_PAGES):
            yield range(start, index)
            start, size = index, 0
        size += page.size
    yield range(start, len(batch))


def request_pages(job: ReadJob, part: range, stream: Stream) -> list[wire.PageRow]:
    """Ask for a part of the batch; returns what the owner says about each page, before their bytes."""
    pages = job.batch[part.start : part.stop]
    sizes = [page.size for page in pages]
    budget = job.deadline - time.monotonic()
    stream.send([wire.encode_read(wire.ReadRequest([page.key for page in pages], sizes, budget))], job.deadline)
    _, payload = stream.receive_frame((wire.Kind.PAGES,), wire.MAX_REPLY_BYTES, job.deadline)
    return wire.decode_pages(payload, sizes)


def receive_pages(stream: Stream, job: ReadJob, part: range, rows: list[wire.PageRow]) -> None:
    """Take the bytes that follow ``rows`` in, and settle the outcome of each page."""
    buffers: list[memoryview] = []
    coming: deque[tuple[int, int, int]] = deque()
    for index, row in zip(part, rows, strict=True):
        if row.status is Outcome.OK:
            for area, offset, size in job.batch[index].into:
                if size:
                    buffers.append(area.view[offset : offset + size])
            coming.append((len(buffers), index, row.checksum))
        else:
            job.outcomes[index] = row.status
    for full in stream.receive_scattered(buffers, job.deadline):
        while coming and coming[0][0] <= full:
            _, index, expected = coming.popleft()
            page = job.batch[index]
            intact = not job.verify or memory.checksum(page.key, page.into) == expected
            job.outcomes[index] = Outcome.OK if intact else Outcome.CORRUPT


def offer(pages: Sequence[PageWrite], deadline: float, stream: Stream) -> list[wire.Acceptance]:
    """Offer pages to the owner; returns which it wants."""
    request = wire.StoreRequest(
        [page.key for page in pages],
        [page.size for page in pages],
        [page.checksum for page in pages],
        deadline - time.monotonic(),
    )
    stream.send([wire.encode_store(request)], deadline)
    _, payload = stream.receive_frame((wire.Kind.ACCEPTED,), wire.MAX_REPLY_BYTES, deadline)
    return wire.decode_accepted(payload, len(pages))


def deliver(
    stream: Stream,
    batch: Sequence[PageWrite],
    part: range,
    answers: list[wire.Acceptance],
    outcomes: list[Outcome | None],
    deadline: float,
) -> None:
    """Send the pages of ``part`` that are wanted, and settle the outcome of each."""
    sent = [index for index, answer in zip(part, answers, strict=True) if answer is wire.Acceptance.SEND]
    stream.send([extent.view for index in sent for extent in batch[index].source], deadline)
    _, payload = stream.receive_frame((wire.Kind.STORED,), wire.MAX_REPLY_BYTES, deadline)
    for index, kept in zip(sent, wire.decode_stored(payload, len(sent)), strict=True):
        outcomes[index] = Outcome.OK if kept else Outcome.CORRUPT
    for index, answer in zip(part, answers, strict=True):
        if answer is not wire.Acceptance.SEND:
            outcomes[index] = Outcome.OK if answer is wire.Acceptance.HELD else Outcome.FULL
