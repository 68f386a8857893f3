"""What reader and owner say survives the wire, and nothing that is not sound is believed."""

from __future__ import annotations

import ctypes
import random

import numpy as np
import pytest

from hicache_mooncake.errors import ProtocolError
from hicache_mooncake.transfer import wire
from hicache_mooncake.transfer.base import Outcome
from hicache_mooncake.transfer.rdma import abi, frames
from hicache_mooncake.transfer.rdma.frames import Grant, Offer, Opened
from hicache_mooncake.transfer.rdma.queue_pair import Endpoint
from hicache_mooncake.transfer.wire import Acceptance, Kind, PageRow

END = Endpoint(bytes(range(16)), 7, 0xABCDE, 0x123456, 5, True, 16, 16)
REGIONS = np.array([[0x7F0000000000, 1 << 20], [0x7F0000100000, 4096]], np.uint64)
ROWS = [PageRow(Outcome.OK, 8192, 77), PageRow(Outcome.ABSENT, 0, 0), PageRow(Outcome.OK, 4096, 2**64 - 1)]


def payload(frame: bytes, kind: Kind) -> bytes:
    found, size = wire.decode_header(frame[: wire.HEADER_SIZE], (kind,), 1 << 30)
    assert (found, size) == (kind, len(frame) - wire.HEADER_SIZE)
    return frame[wire.HEADER_SIZE :]


def places(extents: list[tuple[int, int, int]]) -> bytes:
    return payload(frames.encode_places(ROWS, [2, 0, 1], extents), Kind.PLACES)


def test_paths_are_offered_and_opened() -> None:
    offers = [Offer(END, 0), Offer(END._replace(ethernet=False), 3)]
    assert frames.decode_open(payload(frames.encode_open(offers), Kind.OPEN)) == offers
    opened = Opened([END, None], 4, [(4096, 8192), (1 << 40, 5)], np.array([[1, 2], [3, 2**32 - 1]], np.uint32))
    back = frames.decode_opened(payload(frames.encode_opened(opened), Kind.OPENED), 2)
    assert back[:3] == opened[:3] and (back.keys == opened.keys).all()
    for wrong in (1, 3):
        with pytest.raises(ProtocolError):
            frames.decode_opened(payload(frames.encode_opened(opened), Kind.OPENED), wrong)


def test_places_become_addresses() -> None:
    rows, found = frames.decode_places(places([(0, 0, 4096), (0, 8192, 4096), (1, 0, 4096)]), [8192, 1, 4096], REGIONS)
    assert rows == ROWS
    assert found.addresses.tolist() == [0x7F0000000000, 0x7F0000002000, 0x7F0000100000]
    assert found.keys.tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    "extents",
    [
        [(0, 0, 4096), (0, 8192, 4095), (1, 0, 4096)],  # too short
        [(0, 0, 4096), (2, 0, 4096), (1, 0, 4096)],  # no such region
        [(0, 0, 4096), (0, (1 << 20) - 4095, 4096), (1, 0, 4096)],  # beyond its end
        [(0, 0, 4096), (0, 2**64 - 1, 4096), (1, 0, 4096)],  # so far that it comes round
        [(0, 0, 8192), (0, 8192, 0), (1, 0, 4096)],  # empty
    ],
)
def test_places_that_are_not_sound_are_refused(extents: list[tuple[int, int, int]]) -> None:
    with pytest.raises(ProtocolError):
        frames.decode_places(places(extents), [8192, 1, 4096], REGIONS)


def test_grants_and_counts() -> None:
    grant = Grant([Acceptance.SEND, Acceptance.FULL], 1 << 47, 16 << 20, [5, 6])
    assert frames.decode_grant(payload(frames.encode_grant(grant), Kind.GRANT), 2, 2) == grant
    none = Grant([Acceptance.SEND, Acceptance.FULL], 0, 0, [])
    assert frames.decode_grant(payload(frames.encode_grant(none), Kind.GRANT), 2, 2) == none
    with pytest.raises(ProtocolError):
        frames.decode_grant(payload(frames.encode_grant(grant), Kind.GRANT), 2, 3)
    assert frames.decode_bytes(payload(frames.encode_bytes(Kind.WRITTEN, 2**40), Kind.WRITTEN)) == 2**40


def test_noise_is_a_protocol_error_and_nothing_else() -> None:
    chance = random.Random(5)
    whole = [
        (frames.encode_open([Offer(END, 0)]), frames.decode_open, ()),
        (frames.encode_opened(Opened([END], 1, [(1, 2)], np.ones((1, 1), np.uint32))), frames.decode_opened, (1,)),
        (
            frames.encode_places(ROWS, [1, 0, 1], [(0, 0, 8192), (1, 0, 4096)]),
            frames.decode_places,
            ([8192, 1, 4096], REGIONS),
        ),
        (frames.encode_grant(Grant([Acceptance.SEND], 1, 2, [3])), frames.decode_grant, (1, 1)),
    ]
    refused = 0
    for frame, decode, arguments in whole:
        content = frame[wire.HEADER_SIZE :]
        for _ in range(500):
            noisy = bytearray(content)
            for _ in range(chance.randint(1, 4)):
                noisy[chance.randrange(len(noisy))] = chance.randrange(256)
            del noisy[chance.randint(0, len(noisy)) :]
            try:
                decode(bytes(noisy), *arguments)  # type: ignore[operator]
            except ProtocolError:
                refused += 1
    assert refused > 1000


def test_structures_are_as_the_compiler_lays_them_out() -> None:
    assert {kind.__name__: ctypes.sizeof(kind) for kind in abi.SIZES} == {
        kind.__name__: size for kind, size in abi.SIZES.items()
    }
    assert abi.PortAttributes.lid.offset == 34 and abi.DeviceAttributes.max_reads_asked.offset == 156
    assert abi.QueuePairAttributes.address.offset == 56 and abi.QueuePairAttributes.partition_index.offset == 120
