"""What stands on disk, without a disk."""

from __future__ import annotations

import random
from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_mooncake.allocator import GRANULE, ExtentAllocator
from hicache_mooncake.memory import Extent, create
from hicache_mooncake.ssd import frames
from hicache_mooncake.ssd.base import StoreWrite
from hicache_mooncake.ssd.bucket_file import Bucket, data_path, index_path, lay_out, parse_name, plan
from hicache_mooncake.ssd.bucket_index import BucketRows, decode_index, encode_index, matches_seal, seal_frame
from hicache_mooncake.ssd.checked import cut
from hicache_mooncake.ssd.frames import Frame, Kind
from hicache_mooncake.ssd.io_base import padded
from hicache_mooncake.ssd.object_file import Head, decode_head, encode_head, file_name, folder, key_of
from hicache_mooncake.ssd.offset_format import (
    Geometry,
    decode_super,
    encode_super,
    spans_of,
    stored,
    stored_rows,
    without_overlaps,
)

OWNER = bytes(range(16))
NUMBERS = st.integers(0, (1 << 64) - 1)
KEYS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=40)
SPANS = st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=16)


@given(st.lists(st.tuples(KEYS, NUMBERS, NUMBERS, SPANS), max_size=20))
def test_rows_come_back(rows: list[tuple[str, int, int, list[tuple[int, int]]]]) -> None:
    payload = frames.encode_rows([r[0] for r in rows], [r[1] for r in rows], [r[2] for r in rows], [r[3] for r in rows])
    assert len(payload) == frames.rows_bytes([r[0].encode() for r in rows], sum(len(r[3]) for r in rows))
    decoded = frames.decode_rows(payload)
    assert decoded is not None
    bounds = decoded.first_span.tolist()
    spans = [tuple(span) for span in decoded.spans.tolist()]
    assert rows == [
        (key, size, checksum, spans[bounds[row] : bounds[row + 1]])
        for row, (key, size, checksum) in enumerate(
            zip(decoded.keys, decoded.sizes.tolist(), decoded.checksums.tolist(), strict=True)
        )
    ]
    for length in range(0, len(payload), 7):
        assert frames.decode_rows(payload[:length]) is None


@given(st.sampled_from(Kind), NUMBERS, st.integers(0, 1 << 40), st.binary(max_size=300), st.data())
def test_a_frame_is_itself_or_nothing(
    kind: Kind, sequence: int, place: int, payload: bytes, data: st.DataObject
) -> None:
    frame = Frame(kind, OWNER, sequence, place, 3, payload)
    encoded = frames.encode(frame)
    assert frames.decode(encoded + b"what follows", owner=OWNER, place=place) == frame
    assert frames.announced_length(encoded[:64]) == len(encoded)
    assert frames.decode(encoded, owner=bytes(16)) is None and frames.decode(encoded, place=place + 1) is None
    at = data.draw(st.integers(0, len(encoded) - 1))
    broken = bytearray(encoded)
    broken[at] ^= 1 << data.draw(st.integers(0, 7))
    assert frames.decode(broken) is None
    assert frames.decode(encoded[:at]) is None


@given(st.lists(st.tuples(KEYS, NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=20), st.data())
@settings(deadline=None)
def test_an_index_is_itself_or_does_not_match_its_seal(
    rows: list[tuple[str, int, int, int]], data: st.DataObject
) -> None:
    columns = BucketRows([r[0] for r in rows], *(array("Q", [r[n] for r in rows]) for n in (1, 2, 3)))
    index = encode_index(columns, bucket=7, pool="default", owner=OWNER)
    seal = seal_frame(index, rows=len(rows), bucket=7, owner=OWNER, place=4096)
    assert matches_seal(index, seal)
    decoded = decode_index(index)
    assert [*zip(decoded.keys, decoded.sizes, decoded.checksums, decoded.offsets, strict=True)] == rows
    broken = bytearray(index)
    broken[data.draw(st.integers(0, len(index) - 1))] ^= 1
    assert not matches_seal(bytes(broken), seal) and not matches_seal(index[:-1], seal)


@given(st.integers(1 << 20, 1 << 50), st.integers(1, 1 << 30))
def test_superblocks_in_turn(size: int, epoch: int) -> None:
    geometry = Geometry(Geometry.of(size, "p", "n").size, 262144, epoch, "p", "n")
    blocks = bytearray(8192)
    for step in (geometry, geometry.next()):
        place, content = encode_super(step, OWNER)
        blocks[place : place + len(content)] = content
    assert decode_super(bytes(blocks)) == (geometry.next(), OWNER)
    blocks[geometry.next().epoch % 2 * 4096 + 65] ^= 1
    assert decode_super(bytes(blocks)) == (geometry, OWNER)
    assert decode_super(bytes(8192)) is None


@given(st.lists(st.integers(1, 40 * GRANULE), min_size=1, max_size=60), st.randoms(use_true_random=False))
def test_an_allocator_that_was_taken_up_again_is_the_same(sizes: list[int], choice: random.Random) -> None:
    first = ExtentAllocator(600 * GRANULE)
    held = [spans for spans in map(first.allocate, sizes) if spans is not None]
    for spans in choice.sample(held, len(held) // 2):
        first.free(spans)
        held.remove(spans)
    again = ExtentAllocator.holding(first.capacity, sorted(span for spans in held for span in spans))
    assert again.holes() == first.holes() and again.used_bytes == first.used_bytes
    for spans in held:
        again.free(spans)
    assert again.free_bytes == again.capacity and len(again.holes()) == 1


def test_overlapping_objects_are_found() -> None:
    objects = {
        "old": stored(8192, 1, ((0, 8192),)),
        "fine": stored(100, 1, ((16384, 100),)),
        "new": stored(5000, 1, ((4096, 4096), (8192, 904))),
        "beyond": stored(8192, 1, ((1 << 20, 8192),)),
        "odd": stored(10, 1, ((77, 10),)),
    }
    assert sorted(without_overlaps(objects, 1 << 20)) == ["beyond", "odd", "old"]
    assert spans_of(objects["new"]) == [(4096, 4096), (8192, 904)] and spans_of(objects["fine"]) == [(16384, 100)]
    payload = frames.encode_rows(
        list(objects),
        [one[0] for one in objects.values()],
        [one[1] for one in objects.values()],
        [spans_of(one) for one in objects.values()],
    )
    rows = frames.decode_rows(payload)
    assert rows is not None and stored_rows(rows) == list(objects.values())


@given(st.lists(st.integers(1, 300_000), min_size=1, max_size=40), st.integers(1, 50))
def test_a_bucket_never_takes_more_than_fits(sizes: list[int], key_limit: int) -> None:
    block = create("test", 4096)
    batch = [StoreWrite(f"k{n}", size, 0, [Extent(block, 0, size)]) for n, size in enumerate(sizes)]
    bucket = Bucket(1, BucketRows.empty(), end=4096, disk=0)
    fitting = plan(bucket, batch, range(len(batch)), 1 << 20, key_limit)
    assert fitting <= key_limit
    if fitting:
        offsets, payload, end = lay_out(batch, range(fitting), bucket.end)
        assert offsets[0] == bucket.end + padded(64 + len(payload)) and end + 4096 <= 1 << 20
        assert all(offset % 4096 == 0 for offset in offsets)
        assert all(a + padded(size) == b for a, b, size in zip(offsets, [*offsets[1:], end], sizes, strict=False))
    block.close()


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_extents_are_cut_without_a_byte_lost(lengths: list[int], choice: random.Random) -> None:
    block = create("test", 4096)
    total = sum(lengths)
    cuts = sorted(choice.sample(range(1, total), min(3, total - 1))) if total > 1 else []
    wanted = [end - start for start, end in zip([0, *cuts], [*cuts, total], strict=True)]
    extents, at = [], 0
    for length in lengths:
        extents.append(Extent(block, at, length))
        at += length
    pieces = cut(extents, wanted)
    assert [sum(extent.length for extent in piece) for piece in pieces] == wanted
    assert [n for piece in pieces for e in piece for n in range(e.offset, e.offset + e.length)] == [*range(total)]
    block.close()


@given(KEYS)
def test_names_of_files(key: str) -> None:
    assert key_of(file_name(key)) == key and "/" not in file_name(key) and file_name(key) not in (".", "..")
    first, second = folder(key).split("/")
    assert int(first, 16) < 64 and int(second, 16) < 64
    head = Head(key, 5, 9)
    assert decode_head(encode_head(head, OWNER), OWNER) == head and len(encode_head(head, OWNER)) == 4096
    assert key_of("notes.txt") is None and decode_head(bytes(4096)) is None


def test_names_of_buckets() -> None:
    assert parse_name(data_path("", 255)) == (255, "data") and parse_name(index_path("", 1)) == (1, "index")
    assert parse_name("00000000000000FF.data") is None and parse_name("x.data") is None
