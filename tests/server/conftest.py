from __future__ import annotations

from pathlib import Path

import pytest

from testbed.models import write_deepseek, write_llama
from tests.warm_sglang import warm_sglang

__all__ = ["warm_sglang"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_deepseek(tmp_path_factory.mktemp("deepseek"))
