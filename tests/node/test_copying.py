"""Copies of batches: the compiled way and Python's do the same."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hicache_mooncake import memory
from hicache_mooncake.memory import Extent, Memory, checksum
from hicache_mooncake.native import build, library
from hicache_mooncake.node.copying import Copier
from hicache_mooncake.node.moves import Wanted
from hicache_mooncake.protocol.fence import Fence
from hicache_mooncake.protocol.messages import Status

_AREA = 64 << 20
_FAR = time.monotonic() + 3600

compiled = library.library or pytest.param(
    None, id="compiled", marks=pytest.mark.skip(reason="copying is not compiled here: there is no C compiler")
)


@pytest.fixture(params=[pytest.param(compiled, id="compiled"), pytest.param(None, id="python")])
def copier(request: pytest.FixtureRequest) -> Iterator[Copier]:
    copier = Copier(3, request.param)
    yield copier
    copier.close()


@pytest.fixture(scope="module")
def areas() -> Iterator[tuple[Memory, Memory]]:
    source, target = memory.create("test-source", _AREA), memory.create("test-target", _AREA)
    source.view[:] = random.Random(1).randbytes(1 << 20) * (_AREA >> 20)
    yield source, target
    source.close()
    target.close()


@pytest.fixture
def wanted() -> Iterator[Wanted]:
    fence = Fence.create()
    fence.allow(3, 41)
    yield Wanted(fence, 3, 41)
    fence.close()


def _cut(area: Memory, start: int, size: int, pieces: int, chance: random.Random) -> list[Extent]:
    """``size`` bytes from ``start`` on as extents with gaps of a byte, in any order."""
    ends = [*sorted(chance.sample(range(1, size), pieces - 1)), size]
    starts = [0, *ends[:-1]]
    extents = [
        Extent(area, start + at + low, high - low) for at, (low, high) in enumerate(zip(starts, ends, strict=True))
    ]
    chance.shuffle(extents)
    return extents


def test_every_page_arrives_with_its_checksum(copier: Copier, areas: tuple[Memory, Memory], wanted: Wanted) -> None:
    source, target = areas
    chance = random.Random(2)
    keys, targets, sources, sizes = [], [], [], []
    at = 0
    while True:
        size = chance.choice([1, 500, 4096, 65536, 100_000, 512 << 10, (512 << 10) + 1, 3 << 20])
        if at + size + 64 > _AREA:
            break
        keys.append(f"0123456789abcdef:{len(keys):064x}:" + chance.choice(["all", "tp0", "ü"]))
        targets.append(_cut(target, at, size, chance.choice([1, 1, min(size, 5)]), chance))
        sources.append(_cut(source, at, size, chance.choice([1, 1, min(size, 16)]), chance))
        sizes.append(size)
        at += size + 64
    target.view[:] = bytes(_AREA)
    statuses, digests = copier.run(keys, targets, sources, sum(sizes), wanted, _FAR)
    assert statuses == [Status.OK] * len(keys)
    for key, to, start, digest in zip(keys, targets, sources, digests, strict=True):
        content = b"".join(bytes(extent.view) for extent in start)
        assert b"".join(bytes(extent.view) for extent in to) == content
        assert digest == checksum(key, start) == checksum(key, to)
    beside = np.frombuffer(target.view, dtype=np.uint8).copy()
    for to in targets:
        for extent in to:
            beside[extent.offset : extent.offset + extent.length] = 0
    assert not beside.any()


def test_no_copies_are_fine(copier: Copier, wanted: Wanted) -> None:
    assert copier.run([], [], [], 0, wanted, _FAR) == ([], [])


def test_after_the_deadline_nothing_is_copied(copier: Copier, areas: tuple[Memory, Memory], wanted: Wanted) -> None:
    source, target = areas
    target.view[:4096] = b"\xee" * 4096
    statuses, _ = copier.run(
        ["a"], [[Extent(target, 0, 4096)]], [[Extent(source, 0, 4096)]], 4096, wanted, time.monotonic() - 1
    )
    assert statuses == [Status.TIMEOUT]
    assert target.view[:4096] == b"\xee" * 4096


def test_what_the_engine_gave_up_is_not_copied(copier: Copier, areas: tuple[Memory, Memory], wanted: Wanted) -> None:
    source, target = areas
    target.view[:4096] = b"\xee" * 4096
    wanted._fence.revoke(3, 41)
    statuses, _ = copier.run(["a"], [[Extent(target, 0, 4096)]], [[Extent(source, 0, 4096)]], 4096, wanted, _FAR)
    assert statuses == [Status.REVOKED]
    assert target.view[:4096] == b"\xee" * 4096


def test_giving_up_ends_a_batch_at_the_page_at_hand(
    copier: Copier, areas: tuple[Memory, Memory], wanted: Wanted
) -> None:
    source, target = areas
    size, count = 16 << 20, 400
    revoked_at: list[float] = []

    def revoke() -> None:
        time.sleep(0.05)
        wanted._fence.revoke(3, 41)
        revoked_at.append(time.monotonic())

    thread = threading.Thread(target=revoke)
    thread.start()
    extents = [Extent(source, 0, size)], [Extent(target, 0, size)]
    statuses, _ = copier.run(["k"] * count, [extents[1]] * count, [extents[0]] * count, size * count, wanted, _FAR)
    ended = time.monotonic()
    thread.join()
    assert Status.REVOKED in statuses, "the batch ended before it was given up"
    assert set(statuses) <= {Status.OK, Status.REVOKED}
    assert statuses[-1] == Status.REVOKED
    assert ended - revoked_at[0] < 3  # what is under way ends; nothing like the whole batch follows
    target.view[:4096] = b"\xee" * 4096
    time.sleep(0.05)
    assert target.view[:4096] == b"\xee" * 4096


@pytest.mark.skipif(build.compiler() is None, reason="there is no C compiler")
class TestBuilding:
    def test_the_library_in_use_is_that_of_this_source(self) -> None:
        assert library.library is not None, f"to build it: {library.HOW_TO_BUILD}"
        assert build.library().exists()

    def test_it_builds_anew_and_an_older_one_goes(self, tmp_path: Path) -> None:
        for name in ("build.py", "copying.c"):
            shutil.copy(build.HERE / name, tmp_path)
        stale = tmp_path / "libcopying-00000000.so"
        stale.write_bytes(b"not of this source")
        subprocess.run([sys.executable, str(tmp_path / "build.py")], check=True, timeout=120)
        (built,) = tmp_path.glob("*.so")
        assert built.name == build.library().name
        ctypes.CDLL(str(built))
        assert not list(tmp_path.glob("libcopying-*.[0-9]*"))

    def test_without_a_compiler_it_says_so(self, tmp_path: Path) -> None:
        for name in ("build.py", "copying.c"):
            shutil.copy(build.HERE / name, tmp_path)
        done = subprocess.run(
            [sys.executable, str(tmp_path / "build.py")],
            env={"PATH": str(tmp_path), "CC": "no-such-compiler"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 1
        assert "no C compiler" in done.stderr


def test_a_library_that_cannot_be_loaded_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "libcopying-00000000.so"
    broken.write_bytes(b"\x7fELF and then nothing")
    monkeypatch.setattr(library, "built_library", lambda: broken)
    assert library.load() is None
    assert "compiled copying is not used" in caplog.text
    assert library.HOW_TO_BUILD in caplog.text
    monkeypatch.setattr(library, "built_library", lambda: tmp_path / "absent.so")
    assert library.load() is None
