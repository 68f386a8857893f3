"""The fixture of every test that runs SGLang: skips without it; ends the warm process at last."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from testbed import environment


@pytest.fixture(scope="session")
def warm_sglang() -> Iterator[None]:
    """SGLang can be run: its page hash is built, and one process has imported it for all servers."""
    if reason := environment.missing():
        pytest.skip(reason)
    environment.build_page_hash()
    yield
    environment.close_warm_process()
