"""A writer that is killed at every step, files that are damaged in every way: what is whole is found."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hicache_mooncake.ssd.base import Outcome, SsdStore
from hicache_mooncake.ssd.bucket_open import is_ours
from hicache_mooncake.ssd.io_threads import ThreadIO
from tests.ssd.stores import CAPACITY, PAGE, Pages, data_files, key_of, make, write_all

OK = Outcome.OK
STEPS = {
    "bucket": (
        "identity create preallocate data visible seal truncate index unlink_data unlink_index removals data_sync "
        "seal_sync"
    ),
    "offset": "identity preallocate data journal_put visible journal_free checkpoint checkpoint_sync superblock",
    "file_per_key": "identity folder create data rename unlink",
}
BIG = 4 * CAPACITY // PAGE


def write_until_killed(name: str, path: str, step: str, times: int) -> None:
    """In a child process: write, remove and evict; die the ``times``-th time that a step is reached.

    Every page that was answered for is told on standard output first, and every one that was removed.
    """
    seen = 0

    def failpoint(reached: str) -> None:
        nonlocal seen
        seen += reached.replace(" ", "_") == step
        if seen == times:
            os.kill(os.getpid(), signal.SIGKILL)

    def forget(keys: object) -> None:
        for key in keys:  # type: ignore[attr-defined]
            print("-", int(key.split(":")[1], 16), flush=True)

    pages = Pages()
    with ThreadIO() as io, make(name, Path(path), io, failpoint=failpoint, forget=forget, sync="sync" in step) as store:
        store.open()
        for start in range(0, BIG, 16):
            outcomes = [r.outcome for r in store.write(pages.batch(range(start, start + 16)), time.monotonic() + 20)]
            for number, outcome in zip(range(start, start + 16), outcomes, strict=True):
                if outcome is OK:
                    print("+", number, flush=True)
            if start % 64 == 0:
                store.remove([key_of(start + 1)])
            if start % 256 == 0:
                store.compact(time.monotonic() + 20)


CASES = [(name, step, times) for name, steps in STEPS.items() for step in steps.split() for times in (1, 3)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "step", "times"), CASES, ids=str)
def test_killed_at_every_step(name: str, step: str, times: int, path: Path, io: ThreadIO, pages: Pages) -> None:
    root = Path(__file__).parent.parent.parent
    code = f"from tests.ssd.test_crashes import write_until_killed as w; w({name!r}, {str(path)!r}, {step!r}, {times})"
    child = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60, check=False
    )
    assert child.returncode in (-signal.SIGKILL, 0), child.stderr
    assert child.returncode == -signal.SIGKILL or (times > 1 or step == "preallocate"), "the step was never reached"
    held: set[int] = set()
    touched: set[int] = set()
    for line in child.stdout.splitlines():
        sign, number = line.split()
        (held.add if sign == "+" else held.discard)(int(number))
        touched.add(int(number))
    with make(name, path, io) as store:
        recovery = store.open()
        found = {n for n in range(BIG) if store.contains([key_of(n)])[0]}
        assert held <= found, f"lost {sorted(held - found)[:5]}: {recovery}"
        # What was being written or removed when it died may be there or not; all that is there is right.
        outcomes = pages.read(store, sorted(found))
        assert set(outcomes.values()) <= {OK}
        assert store.usage().used <= CAPACITY
        assert set(write_all(store, pages, range(5000, 5016))) == {OK}
    with make(name, path, io) as store:
        store.open()
        assert all(store.contains([key_of(number) for number in range(5000, 5016)]))


def filled(name: str, path: Path, io: ThreadIO, pages: Pages, count: int = 60) -> None:
    with make(name, path, io) as store:
        store.open()
        assert set(write_all(store, pages, range(count))) == {OK}


def missing(store: SsdStore, pages: Pages, count: int = 60) -> set[int]:
    return {n for n, outcome in pages.read(store, [*range(count)]).items() if outcome is not OK}


def pages_in(file: Path, count: int = 60) -> set[int]:
    content = file.read_bytes()
    return {n for n in range(count) if random.Random(n).randbytes(PAGE) in content}


@pytest.mark.parametrize("name", ["bucket", "file_per_key", "shared"])
@pytest.mark.parametrize("running", [False, True])
def test_a_data_file_that_is_cut_off_or_gone(name: str, running: bool, path: Path, io: ThreadIO, pages: Pages) -> None:
    filled(name, path, io, pages)
    first, second = data_files(path)[:2]
    store = make(name, path, io)
    if running:
        store.open()
    gone = pages_in(first)
    os.unlink(first)
    before = pages_in(second)
    os.truncate(second, second.stat().st_size // 2 // 4096 * 4096 + 100)
    gone |= before - pages_in(second)
    if not running:
        recovery = store.open()
        assert recovery.entries == 60 - len(gone)
        assert recovery.dropped
    assert missing(store, pages) == gone
    store.close()
    with make(name, path, io) as store:
        assert store.open().entries == 60 - len(gone)


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "swapped", "empty"])
def test_a_damaged_index_costs_no_page(damage: str, path: Path, io: ThreadIO, pages: Pages) -> None:
    filled("bucket", path, io, pages)
    first, second = sorted(path.glob("*.arrow"))[:2]
    if damage == "gone":
        first.unlink()
    elif damage == "swapped":
        one, two = first.read_bytes(), second.read_bytes()
        first.write_bytes(two)
        second.write_bytes(one)
    else:
        content = bytearray(first.read_bytes())
        content[len(content) // 3] ^= 16
        first.write_bytes(b"" if damage == "empty" else content[: len(content) // 2] if damage == "cut" else content)
    with make("bucket", path, io) as store:
        recovery = store.open()
        assert recovery.entries == 60 and recovery.salvaged > 0
        assert not missing(store, pages)
    with make("bucket", path, io) as store:  # and its index was written anew
        recovery = store.open()
        assert recovery.entries == 60 and recovery.salvaged == 0


def test_an_index_without_its_bucket_and_a_strangers_bucket(
    path: Path, io: ThreadIO, pages: Pages, tmp_path: Path
) -> None:
    filled("bucket", path, io, pages)
    filled("bucket", tmp_path / "other", io, pages)
    first = data_files(path)[0]
    gone = pages_in(first)
    os.unlink(first)
    stranger = path / "00000000000000ff.data"
    stranger.write_bytes(data_files(tmp_path / "other")[0].read_bytes())
    with make("bucket", path, io) as store:
        recovery = store.open()
        assert recovery.dropped == {"index_without_data": 1, "foreign_bucket": 1}
        assert missing(store, pages) == gone
        write_all(store, pages, range(100, 110))
    assert stranger.exists() and not first.with_suffix(".arrow").exists()
    assert is_ours(stranger.name)


def test_removals_outlive_the_index_and_a_damaged_log(path: Path, io: ThreadIO, pages: Pages) -> None:
    filled("bucket", path, io, pages)
    with make("bucket", path, io) as store:
        store.open()
        for number in (1, 2, 40):
            store.remove([key_of(number)])
    for index in path.glob("*.arrow"):
        index.unlink()
    with make("bucket", path, io) as store:
        assert store.open().entries == 57
    log = path / "removed.log"
    content = bytearray(log.read_bytes())
    content[70] ^= 1  # the first record
    log.write_bytes(content + b"torn")
    with make("bucket", path, io) as store:
        recovery = store.open()
        assert recovery.entries == 58 and recovery.dropped["damaged_removal_record"]
        assert missing(store, pages) == {2, 40}


def test_a_damaged_journal_frame_costs_its_pages(path: Path, io: ThreadIO, pages: Pages) -> None:
    with make("offset", path, io) as store:
        store.open()
        for number in range(60):
            assert write_all(store, pages, [number]) == [OK]
    file = path / "objects.data"
    data = bytearray(file.read_bytes())
    area = data.find(key_of(30).encode())
    data[area] ^= 1
    file.write_bytes(data)
    with make("offset", path, io) as store:
        recovery = store.open()
        assert recovery.entries == 59 and recovery.dropped == {"damaged_journal_frame": 1}
        assert missing(store, pages) == {30}
    for place in (0, 4096):  # one superblock is enough
        data = bytearray(file.read_bytes())
        kept = bytes(data[place : place + 100])
        data[place + 70] ^= 1
        file.write_bytes(data)
        with make("offset", path, io) as store:
            entries = store.open().entries
            assert entries in (0, 59)
            assert missing(store, pages) >= {30}
        data = bytearray(file.read_bytes())
        data[place : place + 100] = kept


def test_a_journal_that_is_cut_anywhere(path: Path, io: ThreadIO, pages: Pages) -> None:
    with make("offset", path, io) as store:
        store.open()
        for number in range(20):
            write_all(store, pages, [number])
    file = path / "objects.data"
    whole = file.read_bytes()
    for last in range(0, 20, 4):
        data = bytearray(whole)
        at = data.find(key_of(last).encode()) // 4096 * 4096
        end = (data.find(key_of(19).encode()) // 4096 + 1) * 4096
        data[at:end] = bytes(end - at)
        file.write_bytes(data)
        with make("offset", path, io) as store:
            assert store.open().entries == last
            assert missing(store, pages, 20) == set(range(last, 20))


@pytest.mark.skipif(os.getuid() != 0, reason="loop devices need root")
def test_a_raw_block_device(tmp_path: Path, io: ThreadIO, pages: Pages) -> None:
    image = tmp_path / "image"
    with open(image, "wb") as file:
        file.truncate(32 << 20)
    made = subprocess.run(["losetup", "-f", "--show", str(image)], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no loop device: {made.stderr}")
    device = Path(made.stdout.strip())
    try:
        subprocess.run(["mkfs.ext4", "-q", str(device)], check=True)
        with pytest.raises(Exception, match="holds something else"):
            make("offset", device, io).open()
        subprocess.run(["dd", "if=/dev/zero", f"of={device}", "bs=1M", "count=2"], capture_output=True, check=True)
        with make("offset", device, io, capacity=1 << 30) as store:
            store.open()
            assert set(write_all(store, pages, range(100))) == {OK}
            with pytest.raises(Exception, match="another process"):
                make("offset", device, io).open()
            assert store.usage().capacity < 32 << 20
        with pytest.raises(Exception, match="belongs to pool"):
            make("offset", device, io, pool="other").open()
        with make("offset", device, io, capacity=1 << 30) as store:
            assert store.open().entries == 100
            assert not missing(store, pages)
    finally:
        subprocess.run(["losetup", "-d", str(device)], check=True)
