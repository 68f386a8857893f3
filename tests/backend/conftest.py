"""SGLang in the test process itself, on its CPU stand-ins, and a node for the backends of a test module."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from testbed import SITE, environment
from tests.backend.rig import Rig, load_sglang
from tests.pool import NodeProcess, running


@pytest.fixture(scope="session")
def sglang() -> Iterator[None]:
    """SGLang's classes can be imported; the environment that they need lasts as long as the session."""
    if reason := environment.missing():
        pytest.skip(reason)
    before = dict(os.environ)
    load_sglang()
    yield
    os.environ.clear()
    os.environ.update(before)
    sys.path.remove(str(SITE))


@pytest.fixture(scope="module")
def node(redis_server: object) -> Iterator[NodeProcess]:
    """One node for a module's tests."""
    with running(NodeProcess(redis_server.url, settings={"segment_size": "256MiB"})) as (started,):  # type: ignore[attr-defined]
        yield started


@pytest.fixture
def rig(sglang: None, node: NodeProcess) -> Iterator[Rig]:
    """Makes backends on the node, and closes them."""
    with Rig(node) as made:
        yield made
