"""The contract of every SSD store, on real files."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import random
import shutil
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from hicache_mooncake.errors import ConfigError
from hicache_mooncake.ssd import registry
from hicache_mooncake.ssd.base import Entry, Outcome, StoreRead
from hicache_mooncake.ssd.io_threads import ThreadIO
from hicache_mooncake.ssd.scrub import scrub
from tests.ssd.stores import (
    CAPACITY,
    PAGE,
    HeldIO,
    Pages,
    data_files,
    disk_usage,
    flip_page,
    key_of,
    make,
    soon,
    write_all,
)

OK = Outcome.OK
SIZES = (1, 511, 4095, 4096, 4097, 65536, (1 << 20) + 1)


def test_what_is_written_is_read_in_any_size_and_cut(name: str, path: Path, io: ThreadIO, pages: Pages) -> None:
    with make(name, path, io) as store:
        store.open()
        for number, size in enumerate(SIZES):
            assert store.write([pages.write(number, size)], soon())[0].outcome is OK
            cut = pages.write(1000 + number, size + 6000, cuts=(4096, size, 1))
            assert store.write([cut], soon())[0].outcome is OK
        for number, size in enumerate(SIZES):
            assert pages.read(store, [number], size) == {number: OK}
            assert pages.read(store, [1000 + number], size + 6000) == {1000 + number: OK}


def test_batches_duplicates_and_what_is_not_there(name: str, path: Path, io: ThreadIO, pages: Pages) -> None:
    with make(name, path, io) as store:
        store.open()
        batch = pages.batch([*range(128)], 4096)
        assert Counter(r.outcome for r in store.write([*batch, batch[3]], soon())) == {OK: 128, Outcome.HELD: 1}
        assert store.write([batch[5]], soon())[0].outcome is Outcome.HELD
        assert set(pages.read(store, [*range(128)], 4096).values()) == {OK}
        assert pages.read(store, [500], 4096) == {500: Outcome.ABSENT}
        assert pages.read(store, [7], 8192) == {7: Outcome.SIZE}
        assert store.contains([key_of(1), key_of(500)]) == [True, False]
        assert store.find([key_of(1), key_of(500)]) == [Entry(batch[1].key, 4096, batch[1].checksum), None]
        assert sum(map(len, store.entries())) == 128 == store.usage().entries


def test_everything_is_found_again_and_what_was_removed_is_not(
    name: str, path: Path, io: ThreadIO, pages: Pages
) -> None:
    forgotten: list[str] = []
    with make(name, path, io, forget=forgotten.extend) as store:
        store.open()
        assert set(write_all(store, pages, range(100))) == {OK}
        assert store.remove([key_of(3), key_of(64), key_of(3), "nobody's"]) == 2
        assert forgotten == [key_of(3), key_of(64)]
    published: list[Entry] = []
    steps: list[tuple[int, int]] = []
    with make(name, path, io) as store:
        recovery = store.open(published.extend, lambda done, of: steps.append((done, of)))
        assert recovery.entries == 98 == len(published) and not recovery.dropped
        assert {entry.key for entry in published} == {key_of(n) for n in range(100)} - {key_of(3), key_of(64)}
        assert steps and all(done <= of for done, of in steps)
        outcomes = pages.read(store, [*range(100)])
        assert {n for n, outcome in outcomes.items() if outcome is not OK} == {3, 64}
        # The same key may be stored again, beside its removal.
        assert write_all(store, pages, [3]) == [OK]
    with make(name, path, io) as store:
        assert store.open().entries == 99
        assert pages.read(store, [3, 64]) == {3: OK, 64: Outcome.ABSENT}


@pytest.mark.slow
@pytest.mark.parametrize("eviction", ["fifo", "lru"])
def test_capacity_is_real_bytes_on_disk(name: str, eviction: str, path: Path, io: ThreadIO, pages: Pages) -> None:
    forgotten: list[str] = []
    written: list[int] = []
    with make(name, path, io, forget=forgotten.extend, eviction=eviction) as store:
        store.open()
        for start in range(0, 640, 64):
            assert set(write_all(store, pages, range(start, start + 64))) == {OK}
            written += range(start, start + 64)
            assert disk_usage(path) <= CAPACITY + (2 << 20)
            assert store.usage().used <= CAPACITY
            if eviction == "lru":
                pages.read(store, [0])
        held = {n for n in written if store.contains([key_of(n)])[0]}
        assert {key_of(n) for n in written} - {key_of(n) for n in held} == set(forgotten)
        assert len(held) * PAGE > CAPACITY / 2
        assert name != "bucket" or (0 in held) == (eviction == "lru")
        assert max(held) == 639
        assert set(pages.read(store, sorted(held)).values()) == {OK}


@pytest.mark.slow
def test_readers_writers_and_removers_at_once(name: str, path: Path, io: ThreadIO) -> None:
    failures: list[BaseException] = []
    stop = time.monotonic() + 1.5
    with make(name, path, io, capacity=8 << 20) as store:
        store.open()

        def work(seed: int) -> None:
            own = Pages(4 << 20)
            choice = random.Random(seed)
            try:
                while time.monotonic() < stop:
                    numbers = choice.sample(range(200), 16)
                    what = choice.random()
                    if what < 0.5:
                        outcomes = set(write_all(store, own, numbers))
                        assert outcomes <= {OK, Outcome.HELD, Outcome.FULL}, outcomes
                    elif what < 0.95:
                        outcomes = set(own.read(store, numbers).values())
                        assert outcomes <= {OK, Outcome.ABSENT}, outcomes
                    else:
                        store.remove([key_of(number) for number in numbers])
            except BaseException as error:
                failures.append(error)
            finally:
                own.close()

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not failures, failures[0]
        left = [n for n in range(200) if store.contains([key_of(n)])[0]]
    own = Pages(16 << 20)
    with make(name, path, io, capacity=8 << 20) as store:
        assert store.open().entries == len(left)
        assert set(own.read(store, left).values()) <= {OK}
    own.close()


def test_what_is_removed_while_it_is_read_stays_until_then(name: str, path: Path, pages: Pages) -> None:
    with HeldIO() as io, make(name, path, io, capacity=4 << 20) as store:
        store.open()
        write_all(store, pages, range(8))
        io.hold_reads.set()
        outcomes: dict[int, Outcome] = {}
        target = Pages(2 << 20)
        reader = threading.Thread(target=lambda: outcomes.update(target.read(store, [0, 1])))
        reader.start()
        assert io.reading.wait(10)
        assert store.remove([key_of(n) for n in range(8)]) == 8
        for start in range(100, 220, 8):  # everything that may be used again is
            store.write(pages.batch(range(start, start + 8)), time.monotonic() + 0.2)
        io.let_go.set()
        reader.join(20)
        assert outcomes == {0: OK, 1: OK}
        store.flush()
        assert pages.read(store, [0, 1]) == {0: Outcome.ABSENT, 1: Outcome.ABSENT}
        target.close()


def test_a_flipped_bit_costs_that_page_and_scrub_finds_it(name: str, path: Path, io: ThreadIO, pages: Pages) -> None:
    forgotten: list[str] = []
    with make(name, path, io) as store:
        store.open()
        write_all(store, pages, range(40))
    for number in (5, 23, 39):
        flip_page(path, number)
    with make(name, path, io, forget=forgotten.extend) as store:
        assert store.open().entries == 40
        outcomes = pages.read(store, [*range(20)])
        assert {n for n, outcome in outcomes.items() if outcome is not OK} == {5}
        assert outcomes[5] is Outcome.CORRUPT and pages.read(store, [5]) == {5: Outcome.ABSENT}
        found: list[str] = []
        report = scrub(store, bandwidth=1e9, pause=lambda seconds: False, found=found.extend)
        assert report.checked == 39 and report.rotten == 2
        assert sorted(found) == [key_of(23), key_of(39)]
        assert sorted(forgotten) == [key_of(5), key_of(23), key_of(39)]
        assert store.counters()["read_corrupt"] == 3
    with make(name, path, io) as store:
        assert store.open().entries == 37  # and they do not come back


def test_scrub_keeps_to_its_bandwidth_and_stops(name: str, path: Path, io: ThreadIO, pages: Pages) -> None:
    with make(name, path, io) as store:
        store.open()
        write_all(store, pages, range(200))
        waited: list[float] = []
        scrub(store, bandwidth=8 << 20, pause=lambda seconds: bool(waited.append(seconds)))
        assert sum(waited) > 0.5 * (200 * PAGE - (8 << 20)) / (8 << 20)
        assert scrub(store, bandwidth=1, pause=lambda seconds: True).checked == 0


def test_one_path_one_process(name: str, path: Path, io: ThreadIO, pages: Pages) -> None:
    with make(name, path, io) as store:
        store.open()
        write_all(store, pages, range(4))
        other = make(name, path, io)
        if name == "shared":
            other.open()
            assert set(pages.read(other, [*range(4)]).values()) == {OK}
            assert other.write(pages.batch([9]), soon())[0].outcome is Outcome.REFUSED
        else:
            with pytest.raises(ConfigError, match="another process uses it"):
                other.open()
        other.close()
    with make(name, path, io) as store:
        assert store.open().entries == 4


def test_anothers_directory_is_refused(name: str, path: Path, io: ThreadIO, pages: Pages, tmp_path: Path) -> None:
    with make(name, path, io) as store:
        store.open()
        write_all(store, pages, range(4))
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with pytest.raises(ConfigError, match="belongs to pool 'default'"):
        make(name, path, io, pool="other").open()
    other = "offset" if name == "bucket" else "bucket"
    with pytest.raises(ConfigError, match=f"it is a '{name}' store"):
        make(other, path, io).open()
    assert before == {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    mine = tmp_path / "home"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="thesis"):
        make(name, mine, io).open()
    assert (mine / "thesis.txt").read_text() == "years of work"
    (path / "store.json").write_text("{")
    with pytest.raises(ConfigError, match="damaged"):
        make(name, path, io).open()


def test_older_formats_go_and_newer_ones_are_refused(name: str, path: Path, io: ThreadIO, pages: Pages) -> None:
    with make(name, path, io) as store:
        store.open()
        write_all(store, pages, range(40))
    text = (path / "store.json").read_text()
    (path / "store.json").write_text(text.replace('"version": 1', '"version": 2'))
    with pytest.raises(ConfigError, match="newer version"):
        make(name, path, io).open()
    (path / "store.json").write_text(text.replace('"version": 1', '"version": 0'))
    with make(name, path, io) as store:
        assert store.open().entries == 0
        assert write_all(store, pages, range(4)) == [OK] * 4
    with make(name, path, io) as store:
        assert store.open().entries == 4


def test_the_disk_failing_costs_what_it_fails_for(name: str, path: Path, pages: Pages) -> None:
    forgotten: list[str] = []
    with HeldIO() as io, make(name, path, io, forget=forgotten.extend) as store:
        store.open()
        write_all(store, pages, range(8))
        io.fail_writes = errno.EIO
        results = store.write(pages.batch(range(8, 12)), soon())
        assert {(r.outcome, r.errno) for r in results} == {(Outcome.FAILED, errno.EIO)}
        io.fail_writes = errno.ENOSPC
        assert {r.outcome for r in store.write(pages.batch(range(8, 12)), soon())} == {Outcome.FULL}
        io.fail_writes = 0
        io.fail_reads = errno.EIO
        assert set(pages.read(store, [0, 1]).values()) == {Outcome.FAILED}
        assert sorted(forgotten) == [key_of(0), key_of(1)]
        io.fail_reads = errno.ETIMEDOUT
        assert pages.read(store, [2]) == {2: Outcome.TIMEOUT}
        io.fail_reads = 0
        assert write_all(store, pages, range(8, 12)) == [OK] * 4
        store.flush()
        assert set(pages.read(store, [*range(2, 12)]).values()) == {OK}
    with ThreadIO() as io, make(name, path, io) as store:
        store.open()
        assert set(pages.read(store, [*range(2, 12)]).values()) == {OK}


def descriptors() -> list[str]:
    """What this process has open."""
    targets = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            targets.append(os.readlink(f"/proc/self/fd/{number}"))
    return targets


@pytest.mark.slow
def test_nothing_stays_open(name: str, path: Path, io: ThreadIO, pages: Pages) -> None:
    counts = []
    for _ in range(4):
        store = make(name, path, io)
        store.close()
        store.open()
        write_all(store, pages, range(300))
        pages.read(store, [*range(300)])
        store.flush()
        store.close()
        store.close()
        assert store.write(pages.batch([999]), soon())[0].outcome is Outcome.REFUSED
        assert set(pages.read(store, [1, 299]).values()) == {Outcome.ABSENT}
        gc.collect()
        counts.append(sum("bounce" not in target for target in descriptors()))  # one an I/O thread, at first use
    assert counts[-1] <= counts[0]


def test_malformed_writes_are_refused(name: str, path: Path, io: ThreadIO, pages: Pages) -> None:
    with make(name, path, io) as store:
        store.open()
        good = pages.write(1)
        bad = [good._replace(size=0), good._replace(size=5), good._replace(key=""), good._replace(key="k" * 5000)]
        assert {r.outcome for r in store.write(bad, soon())} == {Outcome.REFUSED}
        assert store.write([good._replace(key="café:" + "0" * 8 + ":all")], soon())[0].outcome is OK
        assert store.read([StoreRead(good.key, 5, good.source)], soon())[0].outcome is Outcome.ABSENT


@pytest.mark.skipif(os.getuid() != 0, reason="mounts need root")
def test_a_full_file_system(name: str, path: Path, io: ThreadIO, pages: Pages) -> None:
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(path)], check=True)
    try:
        hog = path / ".hicache-mooncake-hog"
        with make(name, path, io, capacity=8 << 20) as store:
            store.open()
            assert write_all(store, pages, range(16)) == [OK] * 16
            with open(hog, "wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
                while True:
                    file.write(bytes(1 << 20))
            outcomes = write_all(store, pages, range(100, 300))
            assert set(outcomes) <= {OK, Outcome.FULL}
            os.unlink(hog)
            store.flush()
            assert write_all(store, pages, range(300, 316)) == [OK] * 16
            held = [n for n in range(400) if store.contains([key_of(n)])[0]]
            assert set(pages.read(store, held).values()) == {OK}
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0 or shutil.which("mkfs.ext4") is None, reason="loop devices need root")
def test_a_file_system_that_turns_read_only(name: str, path: Path, io: ThreadIO, pages: Pages, tmp_path: Path) -> None:
    image = tmp_path / "image"
    with open(image, "wb") as file:
        file.truncate(96 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-e", "remount-ro", str(image)], check=True)
    path.mkdir()
    if subprocess.run(
        ["mount", "-o", "loop,errors=remount-ro", str(image), str(path)], capture_output=True, check=False
    ).returncode:
        pytest.skip("no loop device")
    try:
        with make(name, path, io) as store:
            store.open()
            assert write_all(store, pages, range(40)) == [OK] * 40
            device = os.path.basename(
                os.path.realpath(
                    subprocess.check_output(["findmnt", "-n", "-o", "SOURCE", str(path)], text=True).strip()
                )
            )
            Path(f"/sys/fs/ext4/{device}/trigger_fs_error").write_text("a test")  # as after a failed write
            with pytest.raises(OSError, match="Read-only"):
                (path / "probe").touch()
            results = store.write(pages.batch(range(100, 110)), soon())
            assert {r.outcome for r in results} == {Outcome.FAILED} and results[0].errno in (errno.EROFS, errno.EIO)
            assert store.remove([key_of(7)]) == 1
            store.flush()
            outcomes = pages.read(store, [*range(40)])
            assert {n for n, outcome in outcomes.items() if outcome is not OK} == {7}
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bucket", "file_per_key", "shared"])
@pytest.mark.skipif(os.getuid() != 0 or shutil.which("chattr") is None, reason="chattr needs root")
def test_a_file_that_cannot_be_removed_does_not_stop_the_rest(
    name: str, path: Path, io: ThreadIO, pages: Pages
) -> None:
    with make(name, path, io) as store:
        store.open()
        write_all(store, pages, range(64))
        oldest = min(data_files(path), key=lambda file: (file.stat().st_mtime_ns, file))
        if subprocess.run(["chattr", "+i", str(oldest)], capture_output=True, check=False).returncode:
            pytest.skip("no immutable files on this file system")
        try:
            for start in range(64, 512, 64):
                assert set(write_all(store, pages, range(start, start + 64))) == {OK}
                assert disk_usage(path) <= CAPACITY + (2 << 20)
            assert oldest.exists() and store.counters()["unremovable"] >= 1
        finally:
            subprocess.run(["chattr", "-i", str(oldest)], check=True)
        store.flush()
        assert not oldest.exists()


def test_a_scan_that_is_stopped_takes_no_writes(path: Path, io: ThreadIO, pages: Pages) -> None:
    with make("bucket", path, io) as store:
        store.open()
        write_all(store, pages, range(100))
    with make("bucket", path, io) as store:
        store.open(stopped=lambda: True)
        assert store.write(pages.batch([200]), soon())[0].outcome is Outcome.REFUSED
    with make("bucket", path, io) as store:
        assert store.open().entries == 100


def test_objects_of_a_bucket_that_could_not_be_read_come_back(path: Path, pages: Pages) -> None:
    with HeldIO() as io, make("bucket", path, io) as store:
        store.open()
        write_all(store, pages, range(100))
        io.fail_reads = errno.EIO
        assert set(pages.read(store, [*range(100)]).values()) == {Outcome.FAILED}
    with ThreadIO() as io, make("bucket", path, io) as store:
        assert store.open().entries == 100
        assert set(pages.read(store, [*range(100)]).values()) == {OK}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bucket", "offset", "file_per_key"])
def test_another_capacity_than_before(name: str, path: Path, io: ThreadIO, pages: Pages) -> None:
    for capacity in (16, 8, 24, 4):
        with make(name, path, io, capacity=capacity << 20) as store:
            store.open()
            assert set(write_all(store, pages, range(capacity * 16))) <= {OK, Outcome.HELD, Outcome.FULL}
            held = [n for n in range(600) if store.contains([key_of(n)])[0]]
            assert len(held) * PAGE > capacity << (18 if name == "file_per_key" else 19)  # folders stay
            assert set(pages.read(store, held).values()) == {OK}
            assert disk_usage(path) <= (capacity << 20) + (2 << 20)


def test_an_offset_journal_that_is_full_is_written_anew(path: Path, io: ThreadIO, pages: Pages) -> None:
    with make("offset", path, io, capacity=2 << 20) as store:
        store.open()
        batches = [pages.write(n, 4096) for n in range(300)]
        for _ in range(3):
            for item in batches[:100]:
                assert store.write([item], soon())[0].outcome is OK
            store.remove([item.key for item in batches[:100]])
        assert store.counters()["checkpoints"] >= 2
        assert store.write(batches[100:200], soon())[0].outcome is OK
    with make("offset", path, io, capacity=2 << 20) as store:
        assert store.open().entries == 100


def test_a_store_of_another_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Path, io: ThreadIO, pages: Pages
) -> None:
    (tmp_path / "elsewhere.py").write_text(
        "from hicache_mooncake.ssd.file_per_key import FilePerKeyStore\n"
        "class Mine(FilePerKeyStore):\n    name = 'mine'\n"
        "class NoStore:\n    pass\n"
    )
    info = tmp_path / "elsewhere-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[hicache_mooncake.ssd_stores]\nmine = elsewhere:Mine\nnone = elsewhere:NoStore\ngone = elsewhere:Gone\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert set(registry.names()) == {"bucket", "file_per_key", "offset", "shared", "mine", "none", "gone"}
    with make("mine", path, io) as store:
        store.open()
        assert write_all(store, pages, range(4)) == [OK] * 4
    with pytest.raises(ConfigError, match="is no SsdStore"):
        registry.store_class("none")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        registry.store_class("gone")
    with pytest.raises(ConfigError, match="bucket, file_per_key"):
        registry.store_class("floppy")
