"""A batch that takes many requests, with every page in its place."""

from __future__ import annotations

import time

import pytest

from hicache_mooncake.transfer import Outcome, transport, wire

from .pages import KIB, MIB, NODE, Landing, Segment, arrived
from .serving import SECRET


@pytest.mark.parametrize("key_bytes", [40, 900])  # requests of 25 KB, and of 460 KB
def test_pages_of_many_requests_with_holes_among_them(key_bytes: int) -> None:
    count, size = 3 * wire.MAX_PAGES + 7, 4 * KIB + 3
    segment, landing = Segment(8 * MIB), Landing(8 * MIB)
    keys = [f"ns:{index}:".ljust(key_bytes, "k") for index in range(count)]
    absent = {0, 100, wire.MAX_PAGES, 2 * wire.MAX_PAGES - 1, count - 1}
    try:
        for index, key in enumerate(keys):
            if index not in absent:
                segment.put(key, size + (index % 5 == 2))
        tcp = transport("tcp")
        with (
            tcp.listen("127.0.0.1:0", "", segment, SECRET) as listener,
            tcp.connect(listener.address, NODE, SECRET) as peer,
        ):
            for _ in range(2):
                landing.reset()
                batch = [landing.want(key, size) for key in keys]
                outcomes = peer.read(batch, time.monotonic() + 20, True)
                for index, (outcome, page) in enumerate(zip(outcomes, batch, strict=True)):
                    if index in absent:
                        assert outcome is Outcome.ABSENT
                    elif index % 5 == 2:
                        assert outcome is Outcome.SIZE
                    else:
                        assert outcome is Outcome.OK and arrived(page)
        assert not segment.pinned
    finally:
        segment.close()
        landing.close()
