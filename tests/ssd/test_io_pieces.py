"""How transfers are cut, and how the ring's entries are laid out: without any I/O."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_mooncake.memory import Extent
from hicache_mooncake.ssd import ring_layout as layout
from hicache_mooncake.ssd.io_base import ALIGNMENT, Transfer
from hicache_mooncake.ssd.pieces import cut, settle

LIMIT = 4 * ALIGNMENT


def transfer(offset: int, extents: list[tuple[int, int]]) -> Transfer:
    """``extents``: address and length of each."""
    area: Any = SimpleNamespace(address=0)
    return Transfer(7, offset, [Extent(area, address, length) for address, length in extents])


lengths = st.one_of(
    st.integers(1, 3 * LIMIT), st.sampled_from([1, 511, ALIGNMENT, ALIGNMENT + 1, LIMIT, LIMIT + ALIGNMENT])
)
addresses = st.one_of(
    st.integers(1, 1 << 30).map(lambda page: page * ALIGNMENT),
    st.integers(ALIGNMENT, 1 << 40),
)
transfers = st.builds(
    transfer,
    st.integers(0, 1 << 20).map(lambda sector: sector * ALIGNMENT),
    st.lists(st.tuples(addresses, lengths), min_size=1, max_size=5),
)


@given(batch=st.lists(transfers, min_size=1, max_size=4), aligned=st.booleans())
def test_every_byte_is_moved_once_and_in_its_place(batch: list[Transfer], aligned: bool) -> None:
    pieces = cut(batch, aligned=aligned, limit=LIMIT)
    for number, wanted in enumerate(batch):
        mine = [piece for piece in pieces if piece.transfer == number]
        expected = [(extent.address, extent.length) for extent in wanted.extents]
        offset = wanted.offset
        moved: list[tuple[int, int]] = []
        for piece in mine:
            assert piece.fd == wanted.fd and piece.offset == offset and 0 < piece.length <= LIMIT
            parts = [(piece.address, piece.length)] if piece.address else list(piece.parts)
            assert sum(length for _, length in parts) == piece.length
            moved += parts
            offset += piece.length
            if aligned:
                assert piece.offset % ALIGNMENT == 0 and piece.moved % ALIGNMENT == 0
                assert not piece.address % ALIGNMENT
        assert _joined(moved) == _joined(expected)


def _joined(parts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for address, length in parts:
        if joined and sum(joined[-1]) == address:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((address, length))
    return joined


def test_only_what_is_not_aligned_is_bounced() -> None:
    page = 10 * ALIGNMENT
    (whole,) = cut([transfer(0, [(page, 3 * ALIGNMENT)])], aligned=True)
    assert whole.address == page
    straight, tail = cut([transfer(0, [(page, 2 * ALIGNMENT + 100)])], aligned=True)
    assert (straight.address, straight.length) == (page, 2 * ALIGNMENT)
    assert (tail.address, tail.length, tail.moved) == (0, 100, ALIGNMENT)
    (odd,) = cut([transfer(0, [(page + 1, ALIGNMENT)])], aligned=True)
    assert odd.address == 0
    (odd,) = cut([transfer(0, [(page + 1, ALIGNMENT)])], aligned=False)
    assert odd.address == page + 1


@pytest.mark.parametrize("wrong", [transfer(1, [(ALIGNMENT, 1)]), transfer(0, []), transfer(0, [(ALIGNMENT, 0)])])
def test_what_cannot_be_is_refused(wrong: Transfer) -> None:
    with pytest.raises(ValueError):
        cut([wrong], aligned=True)


def test_a_transfer_ends_where_its_file_does_or_with_its_first_error() -> None:
    batch = [transfer(0, [(ALIGNMENT, 3 * LIMIT)]) for _ in range(4)]
    pieces = cut(batch, aligned=True, limit=LIMIT)
    moved = [LIMIT] * 3 + [LIMIT, 5, LIMIT] + [LIMIT, -5, -28] + [0, 0, 0]
    assert settle(batch, pieces, moved) == [3 * LIMIT, LIMIT + 5, -5, 0]


@given(tail=st.integers(0, (1 << 32) - 1), count=st.integers(1, 8), write=st.booleans())
def test_entries_wrap_around_the_ring(tail: int, count: int, write: bool) -> None:
    ring = np.full(8, 0xFF, "u1").repeat(64).view(layout.SQE).copy()
    number = np.arange(count)
    entries = layout.Entries(
        number.astype(np.int32) + 3,
        number.astype(np.uint64) * ALIGNMENT,
        number.astype(np.uint64) + (1 << 40),
        number.astype(np.uint32) + 1,
        np.where(number % 2, 5, layout.NOT_FIXED).astype(np.int32),
        number.astype(np.uint64) + 1,
    )
    layout.fill(ring, tail, entries, write=write)
    for at in range(count):
        entry = ring[(tail + at) % 8]
        fixed = at % 2
        plain = layout.OP_WRITE if write else layout.OP_READ
        registered = layout.OP_WRITE_FIXED if write else layout.OP_READ_FIXED
        assert entry["opcode"] == (registered if fixed else plain)
        assert (entry["fd"], entry["off"], entry["addr"], entry["len"]) == (
            at + 3,
            at * ALIGNMENT,
            (1 << 40) + at,
            at + 1,
        )
        assert entry["tag"] == at + 1 and entry["buffer"] == (5 if fixed else 0)
        assert not entry["rest"].any() and not entry["flags"] and not entry["rw"]
    assert all((ring[(tail + at) % 8]["opcode"] == 0xFF) for at in range(count, 8))
    with pytest.raises(ValueError):
        layout.fill(ring[: count // 2] if count > 1 else ring[:0], 0, entries, write=write)


@given(head=st.integers(0, (1 << 32) - 1), count=st.integers(0, 16))
def test_completions_are_taken_in_order_around_the_end(head: int, count: int) -> None:
    ring = np.zeros(16, layout.CQE)
    for at in range(count):
        ring[(head + at) % 16]["tag"] = at + 1
    taken = layout.take(ring, head, (head + count) & 0xFFFFFFFF)
    assert taken["tag"].tolist() == list(range(1, count + 1))


def test_an_old_kernel_is_refused() -> None:
    params = [0] * layout.PARAMS_WORDS
    params[5] = layout.FEAT_SINGLE_MMAP | layout.FEAT_NODROP
    with pytest.raises(ValueError, match="older"):
        layout.offsets_of(params)
