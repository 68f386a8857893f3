"""A plan moves every byte to its place, whatever the pieces on both sides; parts cover it once."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hicache_mooncake.transfer.rdma import abi, stripes
from hicache_mooncake.transfer.rdma.plan import Places, Plan, Progress
from hicache_mooncake.transfer.rdma.status import MEANINGS, Fault, meaning
from hicache_mooncake.transfer.rdma.stripes import FIRST_REST, LONGEST_REST, Rates, Rests, Work


def places(lengths: list[int], order: list[int], gap: int) -> tuple[Places, int]:
    """Extents of these lengths, laid out in another order with gaps; and the size of the memory they lie in."""
    addresses = [0] * len(lengths)
    at = 7
    for index in order:
        addresses[index] = at
        at += lengths[index] + gap
    keys = np.arange(len(lengths)) % 3
    return Places(np.array(addresses, np.uint64), np.array(lengths, np.uint64), keys), at


@st.composite
def sides(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Pages, each cut into extents in two ways."""
    pages = draw(st.lists(st.integers(1, 400), min_size=1, max_size=8))
    cut = []
    for _ in range(2):
        extents = []
        for page in pages:
            marks = sorted(draw(st.sets(st.integers(1, page), max_size=5)) - {page})
            extents += [high - low for low, high in zip([0, *marks], [*marks, page], strict=True)]
        cut.append(extents)
    return pages, cut[0], cut[1]


def carry_out(plan: Plan, begin: int, end: int, local: NDArray[Any], remote: NDArray[Any]) -> None:
    """What a device does with requests of a plan, by reading them as it would."""
    at = 0
    for request in plan.requests[begin:end]:
        source = int(request["remote"])
        first = (int(request["pieces"]) - plan.pieces.ctypes.data) // abi.PIECE.itemsize
        for piece in plan.pieces[first : first + int(request["count"])]:
            size = int(piece["length"])
            local[int(piece["address"]) : int(piece["address"]) + size] = remote[source : source + size]
            source += size
            at += size


@settings(deadline=None, max_examples=100)
@given(data=st.data(), cut=sides(), most=st.integers(1, 5), limit=st.sampled_from([0, 1, 17, 100]))
def test_every_byte_arrives_once(
    data: st.DataObject, cut: tuple[list[int], list[int], list[int]], most: int, limit: int
) -> None:
    pages, here, there = cut
    local, local_size = places(here, data.draw(st.permutations(range(len(here)))), 3)
    remote, remote_size = places(there, data.draw(st.permutations(range(len(there)))), 5)
    plan = Plan(local, remote, op=abi.OP_READ, max_pieces=most, slice_bytes=limit)
    source = np.random.default_rng(1).integers(1, 256, remote_size, np.uint8)
    target = np.zeros(local_size, np.uint8)
    progress = Progress(plan, np.cumsum(np.array(pages, np.uint64)))
    work, complete = Work(len(plan)), []
    while work:
        begin, end = work.first()
        until = plan.cut(begin, end, data.draw(st.integers(1, 300)), data.draw(st.integers(1, 4)))
        work.take(until)
        if data.draw(st.booleans()):  # given up by one path, done by another
            middle = data.draw(st.integers(begin, until))
            work.give_back(middle, until)
            until = middle
        if begin < until:
            carry_out(plan, begin, until, target, source)
            complete += progress.carried_out(begin, until)
    assert sorted(complete) == list(range(len(pages)))
    assert [bytes(target[int(a) : int(a + n)]) for a, n in zip(local.addresses, local.lengths, strict=True)] == _cut(
        b"".join(bytes(source[int(a) : int(a + n)]) for a, n in zip(remote.addresses, remote.lengths, strict=True)),
        here,
    )
    assert int((target != 0).sum()) == sum(pages), "nothing else is written"
    assert plan.requests["count"].max() <= most
    sizes = np.diff(plan.starts.astype(np.int64))
    assert sizes.sum() == sum(pages) and (not limit or sizes.max() <= limit)


def _cut(content: bytes, lengths: list[int]) -> list[bytes]:
    marks = np.cumsum([0, *lengths]).tolist()
    return [content[low:high] for low, high in itertools.pairwise(marks)]


def test_a_chain_is_linked_signalled_and_keyed() -> None:
    local, _ = places([4096] * 6, list(range(6)), 0)
    plan = Plan(local, local, op=abi.OP_WRITE, max_pieces=1)
    first = plan.chain(1, [3, 5], np.array([11, 12, 13], np.uint32), np.array([21, 22, 23], np.uint32))
    assert first == plan.requests.ctypes.data + abi.WORK.itemsize
    chained = plan.requests[1:5]
    at = plan.requests.ctypes.data
    assert chained["next"].tolist() == [at + abi.WORK.itemsize * n for n in (2, 3, 4)] + [0]
    assert chained["flags"].tolist() == [0, abi.SIGNALED, 0, abi.SIGNALED]
    assert chained["rkey"].tolist() == [22, 23, 21, 22]
    assert plan.pieces["lkey"][1:5].tolist() == [12, 13, 11, 12]
    assert chained["id"].tolist() == [1, 2, 3, 4] and set(chained["op"].tolist()) == {abi.OP_WRITE}


def test_sides_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="different lengths"):
        Plan(places([5], [0], 0)[0], places([6], [0], 0)[0], op=abi.OP_READ, max_pieces=1)


A, B, NEW = ("a~1", 0, 0), ("b~2", 0, 0), ("a~1", 1, 1)


def test_faster_paths_are_given_more() -> None:
    rates = Rates()
    assert rates.shares([A, B]) == [0.5, 0.5]
    for _ in range(20):
        rates.measured(A, 3 << 20, 0.001)
        rates.measured(B, 1 << 20, 0.001)
    assert rates.shares([A, B]) == pytest.approx([0.75, 0.25])
    assert rates.shares([A, B, NEW])[2] == pytest.approx(1 / 3)
    assert stripes.part_bytes(32 << 20, 0.5, False) == 8 << 20
    assert stripes.part_bytes(1 << 20, 0.5, False) == stripes.SMALLEST_PART
    rates.forget("a~1")
    assert rates.shares([A, B]) == [0.5, 0.5], "what is known of peers goes with them"


def test_a_path_that_fails_rests_longer_each_time_and_is_forgiven() -> None:
    rests = Rests()
    now, lengths = 0.0, []
    for _ in range(12):
        lengths.append(rests.failed(A, now))
        assert rests.resting(A, now) and not rests.resting(B, now)
        assert rests.failed(A, now) == lengths[-1], "several batches that find out together"
        now += lengths[-1]
        assert not rests.resting(A, now)
    assert lengths[:4] == [1, 2, 4, 8] and lengths[-1] == LONGEST_REST
    rests.worked(A)
    assert rests.failed(A, now) == FIRST_REST
    rests.forget("a~1")
    assert not rests.resting(A, now)


def test_every_status_has_a_meaning() -> None:
    assert sorted(MEANINGS) == list(range(24))
    assert meaning(0).fault is Fault.NONE
    assert {meaning(status).name for status in (4, 5, 10, 12)} == {
        "LOC_PROT_ERR",
        "WR_FLUSH_ERR",
        "REM_ACCESS_ERR",
        "RETRY_EXC_ERR",
    }
    assert meaning(77).fault is Fault.PATH
