"""Copies of scattered bytes, and their checksums."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_mooncake import memory
from hicache_mooncake.memory import Extent, Memory, checksum, copy_and_check, copy_extents

_SIZE = 64 << 10


@pytest.fixture(scope="module")
def areas() -> Iterator[tuple[Memory, Memory]]:
    source, target = memory.create("test-source", _SIZE), memory.create("test-target", _SIZE)
    yield source, target
    source.close()
    target.close()


def _cut(total: int, cuts: list[int], area: Memory, gap: int) -> list[Extent]:
    """``total`` bytes of ``area`` as extents that end at ``cuts``, ``gap`` bytes apart."""
    ends = [*sorted({cut % total for cut in cuts} - {0}), total]
    starts = [0, *ends[:-1]]
    return [
        Extent(area, start + at * gap, end - start) for at, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]


@settings(deadline=None)
@given(
    total=st.integers(1, 4096),
    piece=st.sampled_from([1, 7, 256, 1 << 20]),
    from_cuts=st.lists(st.integers(1, 4096), max_size=6),
    to_cuts=st.lists(st.integers(1, 4096), max_size=6),
    content=st.randoms(use_true_random=False),
)
def test_bytes_arrive_however_both_sides_are_cut(
    areas: tuple[Memory, Memory], total: int, piece: int, from_cuts: list[int], to_cuts: list[int], content: object
) -> None:
    source_area, target_area = areas
    data = content.randbytes(total)  # type: ignore[attr-defined]
    source, target = _cut(total, from_cuts, source_area, 3), _cut(total, to_cuts, target_area, 5)
    done = 0
    for extent in source:
        extent.view[:] = data[done : done + extent.length]
        done += extent.length
    whole = [Extent(source_area, 32 << 10, total)]
    whole[0].view[:] = data
    for checked in (False, True):
        target_area.view[:] = b"\xee" * _SIZE
        if checked:
            with mock.patch.object(memory, "COPY_PIECE", piece):
                digest = copy_and_check("key", target, source)
            assert digest == checksum("key", target) == checksum("key", source) == checksum("key", whole)
            assert digest != checksum("other key", whole)
        else:
            copy_extents(target, source)
        assert b"".join(bytes(extent.view) for extent in target) == data
        outside = _SIZE - total
        assert bytes(target_area.view).count(b"\xee") >= outside  # nothing else was written
        for before, after in itertools.pairwise(target):
            assert bytes(target_area.view[before.offset + before.length : after.offset]) == b"\xee" * 5


def test_a_page_larger_than_a_piece_is_copied_and_hashed_whole() -> None:
    size = 3 * memory.COPY_PIECE + 17
    source, target = memory.create("test-source", size), memory.create("test-target", size)
    try:
        source.view[:size] = (bytes(range(251)) * (size // 251 + 1))[:size]
        digest = copy_and_check("large", [Extent(target, 0, size)], [Extent(source, 0, size)])
        assert digest == checksum("large", [Extent(source, 0, size)])
        assert target.view[:size] == source.view[:size]
    finally:
        source.close()
        target.close()


@pytest.mark.parametrize("count", [0, 1, 3])
def test_plain_hashes_stand_as_they_are_and_others_stay_different(count: int) -> None:
    from hicache_mooncake.radix_bridge import printable_hash, printable_hashes

    plain = [f"{number:064x}" for number in range(count)]
    assert list(printable_hashes(plain)) == plain
    # 63 and 65 characters: as long together as two plain ones
    for odd in (["a" * 63, "b" * 65], ["a:" + "b" * 62], ["x" + "a" * 63], ["", "c" * 128], ["d" * 63 + "\n"]):
        mixed = [*plain, *odd]
        assert list(printable_hashes(mixed)) == [printable_hash(page_hash) for page_hash in mixed]
        assert len(set(printable_hashes(mixed))) == len(mixed)
