"""A real server on a pool whose DRAM is smaller than its conversations, with an SSD tier below it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.server import SGLangServer, prompt_ids
from tests.pool import Engine, NodeProcess, eventually, running

pytest.importorskip("pyarrow", reason="the extra [ssd] is not installed")
pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.usefixtures("warm_sglang")]

PROMPTS = [prompt_ids(300 + number, 1024) for number in range(6)]


@pytest.fixture
def disk() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="hcm-test-ssd-", dir="/var/tmp"))
    yield path / "ssd"
    shutil.rmtree(path)


@pytest.mark.timeout(300)
def test_later_turns_hit_on_disk_also_after_the_node_was_killed(
    redis_url: str, llama: Path, disk: Path, tmp_path: Path
) -> None:
    with SGLangServer(llama, log_path=tmp_path / "plain.log") as server:
        right = [server.generate(prompt, 6).output_ids for prompt in PROMPTS]
        server.kill()
    sizes: dict[str, object] = {"pool": "ssdserver", "segment_size": "1MiB", "ssd_size": "512MiB"}
    node = NodeProcess(redis_url, "n", {**sizes, "ssd_path": str(disk)})
    extra = {"node": node.socket, "pool": "ssdserver"}
    with running(node):
        with SGLangServer(llama, backend="mooncake", extra_config=extra, log_path=tmp_path / "pool.log") as server:

            def turn() -> list[int]:
                """Every prompt once more after a flush; how many tokens of each came from the pool."""
                server.flush()
                answers = [server.generate(prompt, 6) for prompt in PROMPTS]
                assert [answer.output_ids for answer in answers] == right
                return [answer.cached.storage for answer in answers]

            for prompt, expected in zip(PROMPTS, right, strict=True):
                assert server.generate(prompt, 6).output_ids == expected
            with Engine(node.socket, pool="ssdserver") as looking:
                eventually(lambda: looking.stats()["ssd_offload_queue"] == 0, what="all is written to disk")
                held = looking.stats()
                assert held["pages"] < held["ssd_pages"], "the test wants a DRAM that is too small"
            assert min(turn()) > 0
            node.kill()
            node.start()
            eventually(lambda: min(turn()) > 0, timeout=60, what="hits from disk after the node was killed")
            server.kill()
        with Engine(node.socket, pool="ssdserver") as looking:
            assert looking.stats()["get_ssd_local"] > 0
