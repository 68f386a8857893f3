"""What every way of disk I/O has to do, on real files: io_uring, threads with O_DIRECT, threads without."""

from __future__ import annotations

import errno
import gc
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache_mooncake import memory
from hicache_mooncake.errors import ConfigError
from hicache_mooncake.memory import Extent, Memory
from hicache_mooncake.ssd import io_probe, opening, pieces
from hicache_mooncake.ssd.io_base import ALIGNMENT, DiskIO, Transfer, padded
from hicache_mooncake.ssd.io_threads import ThreadIO
from hicache_mooncake.ssd.io_uring import UringIO
from hicache_mooncake.ssd.opening import is_direct

MIB = 1 << 20
AREA = 8 * MIB
CANARY = 0xA5

KINDS: dict[str, Callable[[Memory], DiskIO]] = {
    "io_uring": lambda area: UringIO(queue_depth=16, fixed=[Extent(area, 0, AREA)]),
    "io_uring, nothing registered": lambda area: UringIO(queue_depth=16),
    "threads": lambda area: ThreadIO(threads=4),
    "threads, page cache": lambda area: ThreadIO(threads=4, direct=False),
}


@pytest.fixture
def area() -> Iterator[Memory]:
    with_canary = memory.create("test-io", AREA)
    with_canary.view[:] = bytes([CANARY]) * AREA
    yield with_canary
    with_canary.close()


@pytest.fixture(params=KINDS)
def io(request: pytest.FixtureRequest, area: Memory) -> Iterator[DiskIO]:
    with KINDS[request.param](area) as made:
        yield made


@pytest.fixture
def file(io: DiskIO, tmp_path: Path) -> Iterator[int]:
    fd = io.open(str(tmp_path / "data"), os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def soon(seconds: float = 30) -> float:
    return time.monotonic() + seconds


def content(size: int, seed: int = 1) -> bytes:
    return np.random.default_rng(seed).bytes(size)


SIZES = [1, 511, 4095, 4096, 4097, 65536, MIB - 1, MIB, MIB + 1, 2 * MIB + 4097]


@pytest.mark.parametrize("shift", [0, 1, 512])
@pytest.mark.parametrize("size", SIZES)
def test_any_size_at_any_address_comes_back_and_nothing_around_it_changes(
    io: DiskIO, file: int, area: Memory, size: int, shift: int
) -> None:
    wanted = content(size, size)
    source = Extent(area, shift, size)
    source.view[:] = wanted
    assert io.write([Transfer(file, 2 * ALIGNMENT, [source])], soon()) == [size]
    area.view[:] = bytes([CANARY]) * AREA
    target = Extent(area, 3 * MIB + shift, size)
    assert io.read([Transfer(file, 2 * ALIGNMENT, [target])], soon()) == [size]
    assert target.view == wanted
    around = bytearray(area.view)
    around[target.offset : target.offset + size] = bytes([CANARY]) * size
    assert around.count(CANARY) == AREA


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batch=st.lists(
        st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 20_000)), min_size=1, max_size=4),
        min_size=1,
        max_size=6,
    )
)
def test_batches_of_scattered_memory_come_back(
    io: DiskIO, file: int, area: Memory, batch: list[list[tuple[int, int]]]
) -> None:
    def place(start: int) -> tuple[list[Transfer], list[Extent]]:
        transfers, everything, memory_at, offset = [], [], start, 0
        for extents in batch:
            made = []
            for gap, length in extents:
                made.append(Extent(area, memory_at + gap, length))
                memory_at += gap + length
            transfers.append(Transfer(file, offset, made))
            everything += made
            offset += padded(sum(length for _, length in extents))
        return transfers, everything

    area.view[:] = bytes([CANARY]) * AREA
    writes, sources = place(0)
    reads, targets = place(4 * MIB + 7)
    for number, extent in enumerate(sources):
        extent.view[:] = content(extent.length, number)
    sizes = [sum(extent.length for extent in transfer.extents) for transfer in writes]
    assert io.write(writes, soon()) == sizes
    order = random.Random(len(batch)).sample(range(len(batch)), len(batch))
    assert io.read([reads[at] for at in order], soon()) == [sizes[at] for at in order]
    for number, extent in enumerate(targets):
        assert extent.view == content(extent.length, number)
        extent.view[:] = bytes([CANARY]) * extent.length
    assert bytes(area.view[4 * MIB :]).count(CANARY) == AREA - 4 * MIB


def test_a_read_ends_with_its_file(io: DiskIO, file: int, area: Memory, tmp_path: Path) -> None:
    for size in (0, 100, ALIGNMENT, MIB + 1):
        (tmp_path / "data").write_bytes(content(size))
        target = Extent(area, 0, 3 * MIB)
        assert io.read([Transfer(file, 0, [target])], soon()) == [size]
        assert target.view[:size] == content(size)
    assert io.read([Transfer(file, 16 * MIB, [Extent(area, 0, ALIGNMENT)])], soon()) == [0]


def test_more_transfers_than_the_queue_has_room_for(io: DiskIO, file: int, area: Memory) -> None:
    count, size = 512, 8192 + 100
    stride = padded(size)
    area.view[: count * stride] = content(count * stride)
    writes = [Transfer(file, at * stride, [Extent(area, at * stride, size)]) for at in range(count)]
    assert io.write(writes, soon()) == [size] * count
    before = bytes(area.view[: count * stride])
    for at in range(count):
        area.view[at * stride : at * stride + size] = bytes(size)
    assert io.read(writes, soon()) == [size] * count
    assert area.view[: count * stride] == before


def test_an_error_is_that_of_its_transfer(io: DiskIO, file: int, area: Memory, tmp_path: Path) -> None:
    page = Extent(area, 0, ALIGNMENT)
    assert io.write([Transfer(file, 0, [page])], soon()) == [ALIGNMENT]
    reader = io.open(str(tmp_path / "data"), os.O_RDONLY)
    full = os.open("/dev/full", os.O_RDWR)
    try:
        assert io.write([Transfer(file, 0, [page]), Transfer(reader, 0, [page])], soon()) == [ALIGNMENT, -errno.EBADF]
        assert io.write([Transfer(full, 0, [page])], soon()) == [-errno.ENOSPC]
    finally:
        os.close(reader)
        os.close(full)
    assert io.read([Transfer(reader, 0, [page]), Transfer(file, 0, [page])], soon()) == [-errno.EBADF, ALIGNMENT]
    with pytest.raises(FileNotFoundError):
        io.open(str(tmp_path / "missing"), os.O_RDONLY)
    with pytest.raises(ValueError):
        io.read([Transfer(file, 512, [page])], soon())


def test_nothing_begins_after_the_deadline(io: DiskIO, file: int, area: Memory) -> None:
    page = Extent(area, 0, ALIGNMENT)
    assert io.write([Transfer(file, 0, [page])] * 3, time.monotonic() - 1) == [-errno.ETIMEDOUT] * 3
    assert io.read([Transfer(file, 0, [page])] * 3, time.monotonic() - 1) == [-errno.ETIMEDOUT] * 3
    assert os.fstat(file).st_size == 0
    assert io.read([], soon()) == []


def test_many_threads_read_and_write_at_once(io: DiskIO, file: int, area: Memory) -> None:
    size, rounds, failures = 300 * 1024 + 5, 12, []

    def one(number: int) -> None:
        mine = Extent(area, number * MIB, size)
        for turn in range(rounds):
            wanted = content(size, number * 1000 + turn)
            mine.view[:] = wanted
            transfer = Transfer(file, number * MIB, [mine])
            wrote = io.write([transfer], soon())
            mine.view[:] = bytes(size)
            if wrote != [size] or io.read([transfer], soon()) != [size] or mine.view != wanted:
                failures.append((number, turn))

    threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_read_that_is_late_is_cancelled_and_writes_no_more(area: Memory) -> None:
    # A pipe that nobody writes into is a device that does not answer, but lets go of a request that is cancelled.
    reader, writer = os.pipe()
    with UringIO(queue_depth=4, fixed=[Extent(area, 0, AREA)]) as io:
        extents = [Extent(area, at * ALIGNMENT, ALIGNMENT) for at in range(9)]
        began = time.monotonic()
        results = io.read([Transfer(reader, 0, [extent]) for extent in extents], began + 0.2)
        assert time.monotonic() - began < 10
        assert results == [-errno.ETIMEDOUT] * 9
        os.write(writer, b"late" * (ALIGNMENT // 4))
        time.sleep(0.05)
        assert bytes(area.view).count(CANARY) == AREA
        # The ring is as good as before.
        assert io.read([Transfer(reader, 0, [extents[0]])], soon()) == [ALIGNMENT]
    os.close(reader)
    os.close(writer)


def test_reads_are_not_held_up_by_writes(tmp_path: Path, area: Memory) -> None:
    """Both make progress at once; a writer steps aside for a moment only."""
    with UringIO(queue_depth=16, fixed=[Extent(area, 0, AREA)]) as io:
        fd = io.open(str(tmp_path / "data"), os.O_RDWR | os.O_CREAT)
        source, target = Extent(area, 0, 4 * MIB), Extent(area, 4 * MIB, 256 * 1024)
        assert io.write([Transfer(fd, 0, [source])], soon()) == [4 * MIB]
        stop = threading.Event()
        wrote: list[int] = []

        def writer() -> None:
            while not stop.is_set():
                wrote.extend(io.write([Transfer(fd, 0, [source])], soon()))

        thread = threading.Thread(target=writer)
        thread.start()
        try:
            for _ in range(50):
                assert io.read([Transfer(fd, 0, [target])], soon()) == [256 * 1024]
            deadline = soon()
            while not wrote and time.monotonic() < deadline:
                time.sleep(0.01)
        finally:
            stop.set()
            thread.join()
        os.close(fd)
        assert wrote and set(wrote) == {4 * MIB}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_behind(kind: str, area: Memory, tmp_path: Path) -> None:
    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before, threads = descriptors(), threading.active_count()
    for _ in range(3):
        io = KINDS[kind](area)
        fd = io.open(str(tmp_path / "data"), os.O_RDWR | os.O_CREAT)

        def use(io: DiskIO = io, fd: int = fd) -> None:
            for odd in (0, 3):
                assert io.write([Transfer(fd, 0, [Extent(area, odd, 5000)])], soon()) == [5000]

        use()
        for _ in range(5):  # a ring of a thread goes with its thread
            thread = threading.Thread(target=use)
            thread.start()
            thread.join()
        if isinstance(io, UringIO):
            gc.collect()
            assert io.rings == 1
        os.close(fd)
        io.close()
        io.close()
    assert descriptors() == before
    assert threading.active_count() == threads


def test_a_file_system_that_refuses_transfers_with_o_direct_is_used_without_it(
    io: DiskIO, file: int, area: Memory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # The kernel itself refuses: it is given memory at an odd address, as if everything were aligned.
    if not is_direct(file):
        pytest.skip("this one never uses O_DIRECT")
    monkeypatch.setattr(pieces, "ALIGNMENT", 1)
    monkeypatch.setattr(opening, "_said", set())
    source, target = Extent(area, 1, 5000), Extent(area, MIB + 3, 5000)
    source.view[:] = content(5000)
    for _ in range(2):
        assert io.write([Transfer(file, 0, [source])], soon()) == [5000]
        assert io.read([Transfer(file, 0, [target])], soon()) == [5000]
    assert target.view == content(5000) and not is_direct(file)
    assert [record.message for record in caplog.records if "EINVAL" in record.message] == [
        "SSD I/O: O_DIRECT was accepted, but transfers with it are refused (EINVAL): going on through the page cache"
    ]


# -- which one is used


def test_the_probe_takes_io_uring_where_it_works_and_leaves_nothing_behind(tmp_path: Path) -> None:
    found = io_probe.choose(str(tmp_path))
    with found.io:
        assert found.kind in ("io_uring", "threads")
        assert (found.kind == "io_uring" and found.direct) or found.reason
    assert os.listdir(tmp_path) == []
    with io_probe.choose(str(tmp_path), wanted="threads").io as io:
        assert isinstance(io, ThreadIO)


def test_the_probe_of_a_file_only_reads(tmp_path: Path) -> None:
    path = tmp_path / "device"
    path.write_bytes(content(MIB))
    with io_probe.choose(str(path)).io:
        pass
    assert path.read_bytes() == content(MIB)


def test_tmpfs_works_whatever_it_refuses(area: Memory) -> None:
    directory = Path("/dev/shm")
    if not directory.is_dir():
        pytest.skip("no /dev/shm here")
    path = directory / f"hcm-test-{os.getpid()}"
    path.mkdir()
    try:
        with io_probe.choose(str(path)).io as io:
            fd = io.open(str(path / "data"), os.O_RDWR | os.O_CREAT)
            extent = Extent(area, 5, 70_001)
            extent.view[:] = content(70_001)
            assert io.write([Transfer(fd, 0, [extent])], soon()) == [70_001]
            extent.view[:] = bytes(70_001)
            assert io.read([Transfer(fd, 0, [extent])], soon()) == [70_001]
            assert extent.view == content(70_001)
            os.close(fd)
    finally:
        for left in path.iterdir():
            left.unlink()
        path.rmdir()


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written_is_refused_as_root_or_not(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="EACCES"):
        io_probe.choose(str(tmp_path))


def test_a_place_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ENOENT"):
        io_probe.choose(str(tmp_path / "missing"))


WITHOUT_URING = """
import ctypes, logging, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
# Load the number of the call; where it is io_uring_setup, the errno, else let it pass.
program = b"".join(struct.pack("HBBI", *line) for line in (
    (0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050000 | int(sys.argv[2])), (0x06, 0, 0, 0x7FFF0000)))
code = ctypes.create_string_buffer(program)
filter_ = struct.pack("HxxxxxxP", 4, ctypes.addressof(code))
assert libc.prctl(22, 2, filter_, 0, 0) == 0, "no seccomp here"
logging.basicConfig(level=logging.INFO)
from hicache_mooncake.ssd import io_probe
found = io_probe.choose(sys.argv[1])
print(found.kind, found.direct, found.reason)
found.io.close()
try:
    io_probe.choose(sys.argv[1], wanted="io_uring")
except Exception as error:
    print(error)
"""


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
def test_a_container_that_forbids_io_uring_gets_threads_and_one_line_says_why(tmp_path: Path, number: int) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_URING, str(tmp_path), str(number)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "no seccomp here" in ran.stderr:
        pytest.skip("no seccomp here")
    name = errno.errorcode[number]
    first, refused = ran.stdout.splitlines()
    assert first.startswith("threads ") and f"io_uring is refused: {name}" in first
    assert "ssd_io" in refused and name in refused
    said = [line for line in ran.stderr.splitlines() if "SSD I/O of" in line]
    assert len(said) == 1 and name in said[0] and str(tmp_path) in said[0]
