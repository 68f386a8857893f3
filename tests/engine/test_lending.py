"""Which memory of a process can be lent to another one: found whatever it is made of, and really the same memory."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence

import pytest

from hicache_mooncake import memory
from hicache_mooncake.engine.lending import Lendable, lendable
from hicache_mooncake.memory import Memory
from hicache_mooncake.protocol.channel import close_all

PAGE = mmap.PAGESIZE


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


def address_of(mapping: mmap.mmap) -> int:
    import ctypes

    anchor = ctypes.c_char.from_buffer(mapping)
    address = ctypes.addressof(anchor)
    del anchor
    return address


def check_same_memory(regions: Sequence[Lendable], mapping: mmap.mmap, at: int) -> None:
    """Byte ``at`` of ``mapping`` is found, through a lent descriptor, by whoever maps it as a node does."""
    address = address_of(mapping) + at
    (region,) = [r for r in regions if r.base <= address < r.base + r.size]
    there = Memory(os.dup(region.fd), region.size, offset=region.offset)
    mapping[at] = 0x5A
    assert there.view[address - region.base] == 0x5A
    there.view[address - region.base] = 0xA5
    assert mapping[at] == 0xA5
    there.close()


def close(regions: Sequence[Lendable]) -> None:
    close_all([region.fd for region in regions])


def test_a_memfd_is_found_by_its_open_descriptor() -> None:
    made = memory.create("l2", 10 * PAGE)
    regions = lendable([(made.address, made.size)])
    assert [(r.base, r.size, r.offset) for r in regions] == [(made.address, made.size, 0)]
    check_same_memory(regions, made._map, 3 * PAGE + 5)
    close(regions)
    made.close()


@pytest.mark.parametrize("descriptor_kept", [True, False])
def test_a_file_in_dev_shm(descriptor_kept: bool) -> None:
    path = f"/dev/shm/hcm-test-{os.getpid()}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        os.ftruncate(fd, 8 * PAGE)
        with mmap.mmap(fd, 4 * PAGE, offset=2 * PAGE) as mapping:
            if not descriptor_kept:
                os.close(fd)
            regions = lendable([(address_of(mapping), len(mapping))])
            if descriptor_kept or regions:  # without it only who may follow the kernel's own link
                assert [(r.size, r.offset) for r in regions] == [(4 * PAGE, 2 * PAGE)]
                check_same_memory(regions, mapping, 100)
            close(regions)
    finally:
        os.unlink(path)
        if descriptor_kept:
            os.close(fd)


def test_a_file_that_ends_within_a_page_is_lent_up_to_its_end() -> None:
    fd = os.memfd_create("odd")
    os.ftruncate(fd, 3 * PAGE + 17)
    with mmap.mmap(fd, 3 * PAGE + 17) as mapping:
        regions = lendable([(address_of(mapping), 3 * PAGE + 17)])
        assert [r.size for r in regions] == [3 * PAGE + 17]
        check_same_memory(regions, mapping, 3 * PAGE + 16)
        close(regions)
    os.close(fd)


def test_a_descriptor_that_cannot_be_written_through_is_passed_over() -> None:
    fd = os.memfd_create("ro")
    os.ftruncate(fd, PAGE)
    with mmap.mmap(fd, PAGE) as mapping:
        read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        writable = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        os.close(fd)
        os.dup2(read_only, fd)  # the lower number is looked at first
        regions = lendable([(address_of(mapping), PAGE)])
        check_same_memory(regions, mapping, 0)
        close(regions)
        for each in (fd, read_only, writable):
            os.close(each)


def test_anonymous_shared_memory_is_lent_or_left_out_but_never_wrong() -> None:
    with mmap.mmap(-1, 4 * PAGE, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS) as mapping:
        regions = lendable([(address_of(mapping), len(mapping))])
        if regions:
            check_same_memory(regions, mapping, PAGE)
        close(regions)


def test_private_memory_is_never_lent() -> None:
    fd = os.memfd_create("private")
    os.ftruncate(fd, 4 * PAGE)
    with (
        mmap.mmap(-1, 4 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as anonymous,
        mmap.mmap(fd, 4 * PAGE, flags=mmap.MAP_PRIVATE) as copy,
    ):
        assert lendable([(address_of(anonymous), len(anonymous)), (address_of(copy), len(copy))]) == []
    os.close(fd)


def test_read_only_memory_is_never_lent() -> None:
    fd = os.memfd_create("read-only")
    os.ftruncate(fd, PAGE)
    with mmap.mmap(fd, PAGE) as writable, mmap.mmap(fd, PAGE, prot=mmap.PROT_READ) as mapping:
        import numpy as np

        address = np.frombuffer(mapping, np.uint8).ctypes.data
        assert lendable([(address, PAGE)]) == [] and address != address_of(writable)
    os.close(fd)


@pytest.mark.parametrize("start, size", [(1, 1), (PAGE - 1, 2), (5 * PAGE + 3, 777), (10 * PAGE - 1, 1)])
def test_any_part_of_a_mapping_lends_the_whole_of_it(start: int, size: int) -> None:
    made = memory.create("l2", 10 * PAGE)
    regions = lendable([(made.address + start, size)])
    assert [(r.base, r.size) for r in regions] == [(made.address, made.size)]
    close(regions)
    made.close()


def test_many_ranges_of_one_mapping_lend_it_once_and_others_not_at_all() -> None:
    first, second, third = (memory.create(f"l2-{number}", 8 * PAGE) for number in range(3))
    ranges = [(made.address + at * 100, 100) for made in (first, third) for at in range(100)]
    regions = lendable([*ranges, (second.address, 0)])
    inodes = sorted(os.fstat(r.fd).st_ino for r in regions)
    assert inodes == sorted(os.fstat(made.fd).st_ino for made in (first, third))
    close(regions)
    for made in (first, second, third):
        made.close()


def test_nothing_is_asked_for() -> None:
    assert lendable([]) == [] == lendable([(0, 0)])
