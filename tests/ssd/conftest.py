from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache_mooncake.ssd.io_threads import ThreadIO
from tests.ssd.stores import STORES, Pages


# ``shared`` writes as ``file_per_key`` does: its half of the contract is left to the thorough run.
@pytest.fixture(params=[pytest.param(one, marks=pytest.mark.slow if one == "shared" else ()) for one in STORES])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def io() -> Iterator[ThreadIO]:
    with ThreadIO() as opened:
        yield opened


@pytest.fixture
def pages() -> Iterator[Pages]:
    made = Pages()
    yield made
    made.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"
