"""Real SGLang servers on a CPU with this package as their L3: what goes to the pool comes back, and says the same."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.server import Cached, ServerFailed, SGLangServer, prompt_ids
from tests.pool import NodeProcess, eventually, running

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("warm_sglang")]

PROMPT = prompt_ids(1, 1024)
REUSABLE = 1024 - 16  # the last token is always computed, and with it the rest of its page


@pytest.fixture
def two_nodes(redis_url: str, request: pytest.FixtureRequest) -> Iterator[tuple[NodeProcess, ...]]:
    settings: dict[str, object] = {"pool": f"p{abs(hash(request.node.name)) % 10**8}"}
    with running(NodeProcess(redis_url, "a", settings), NodeProcess(redis_url, "b", settings)) as nodes:
        yield nodes


def on(node: NodeProcess, model: Path, tmp_path: Path, **settings: object) -> SGLangServer:
    """A server whose L3 is the pool, by ``node``."""
    extra = {"node": node.socket, "pool": node.settings.get("pool", "default"), **settings.pop("extra", {})}  # type: ignore[dict-item]
    settings = {"backend": "mooncake", "extra_config": extra, "log_path": tmp_path / "server.log", **settings}
    return SGLangServer(model, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama", "page_first"),
        ("llama", "page_first_direct"),
        ("llama", "page_head"),
        ("deepseek", "page_first"),
        ("deepseek", "page_first_direct"),
    ],
)
def test_pages_come_back_after_a_flush_a_restart_and_on_a_second_node(
    model: str,
    layout: str,
    tp: int,
    two_nodes: tuple[NodeProcess, ...],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    here, there = two_nodes
    directory = request.getfixturevalue(model)
    with on(here, directory, tmp_path, layout=layout, tp=tp) as server:
        cold = server.generate(PROMPT, 8)
        assert cold.cached == Cached()
        server.flush()
        flushed = server.generate(PROMPT, 8)
        log = server.log_tail(10_000)
        server.kill()
    assert "hicache-mooncake" in log and "is the L3 of" in log and "lent to the node" in log
    with on(here, directory, tmp_path, layout=layout, tp=tp) as server:
        restarted = server.generate(PROMPT, 8)
        server.kill()
    with on(there, directory, tmp_path, layout=layout, tp=tp) as server:
        elsewhere = server.generate(PROMPT, 8)
        changed = server.generate([*PROMPT[:500], *prompt_ids(9, 524)], 8)
        server.kill()
    for warm in (flushed, restarted, elsewhere):
        assert warm.cached == Cached(storage=REUSABLE)
        assert warm.output_ids == cold.output_ids
    assert changed.cached.device == 496  # found in what was just loaded, up to the page where it differs


def test_a_partial_hit_goes_on_as_a_full_computation_does(
    two_nodes: tuple[NodeProcess, ...], llama: Path, tmp_path: Path
) -> None:
    prompts = [[*PROMPT[:kept], *prompt_ids(kept, 700)] for kept in (0, 300, 512, 1000)]
    with SGLangServer(llama, log_path=tmp_path / "plain.log") as server:
        plain = [server.generate(prompt, 8).output_ids for prompt in prompts]
        server.kill()
    with on(two_nodes[0], llama, tmp_path) as server:
        server.generate(PROMPT)
        for prompt, expected in zip(prompts, plain, strict=True):
            server.flush()
            shared = next((at for at, (x, y) in enumerate(zip(prompt, PROMPT, strict=False)) if x != y), 0) // 16 * 16
            found = server.generate(prompt, 8)
            assert found.output_ids == expected
            # SGLang asks L3 for 256 tokens or more
            assert found.cached == Cached(storage=shared if shared >= 256 else 0)
        server.kill()


def test_what_is_not_interchangeable_is_not_found(
    two_nodes: tuple[NodeProcess, ...], llama: Path, tmp_path: Path
) -> None:
    node = two_nodes[0]
    with on(node, llama, tmp_path) as server:
        server.generate(PROMPT)
        server.flush()
        for fields in ({"cache_salt": "tenant"}, {"extra_key": "adapter"}):
            assert server.generate(PROMPT, **fields).cached == Cached()
        assert server.generate(PROMPT).cached == Cached(storage=REUSABLE)
        server.kill()
    contrasts: list[dict[str, object]] = [
        {"page_size": 32},
        {"layout": "page_first_direct"},
        {"tp": 2},
        {"extra_args": ["--dtype", "float16"]},
        {"extra": {"revision": "2"}},
        {"extra": {"extra_backend_tag": "x"}},
        {"extra": {"tenant": "other"}},
        {"extra_args": ["--served-model-name", "other"]},
    ]
    for contrast in contrasts:
        with on(node, llama, tmp_path, **contrast) as server:
            assert server.generate(PROMPT).cached == Cached(), contrast
            server.kill()


def test_the_generic_interface_by_dynamic(two_nodes: tuple[NodeProcess, ...], llama: Path, tmp_path: Path) -> None:
    dynamic = {
        "backend_name": "hicache-mooncake",
        "module_path": "hicache_mooncake.backend",
        "class_name": "MooncakeHiCacheStorage",
    }
    for extra in ({}, {"interface_v1": 1}, {"interface_v1": 1, "allocator": "shm"}):
        with on(
            two_nodes[0], llama, tmp_path, backend="dynamic", extra={**dynamic, **extra, "revision": str(extra)}
        ) as server:
            cold = server.generate(PROMPT, 8)
            server.flush()
            warm = server.generate(PROMPT, 8)
            server.kill()
        assert (cold.cached, warm.cached) == (Cached(), Cached(storage=REUSABLE))
        assert warm.output_ids == cold.output_ids


def test_attach_clear_and_detach_over_http(two_nodes: tuple[NodeProcess, ...], llama: Path, tmp_path: Path) -> None:
    node = two_nodes[0]
    extra = {"node": node.socket, "pool": node.settings["pool"]}
    with on(node, llama, tmp_path, backend=None, extra_config=None) as server:
        cold = server.generate(PROMPT, 8)
        server.flush()
        with pytest.raises(ServerFailed, match="segment_sise"):
            server.attach("mooncake", {**extra, "segment_sise": 1})
        for _ in range(2):
            server.attach("mooncake", extra)
            server.generate(PROMPT, 8)
            server.flush()
            warm = server.generate(PROMPT, 8)
            assert warm.cached == Cached(storage=REUSABLE) and warm.output_ids == cold.output_ids
            server.detach()
            server.flush()
        server.attach("mooncake", extra)
        server.clear_storage()
        assert server.generate(PROMPT, 8).cached == Cached()
        server.kill()


def test_everything_is_started_for_you_and_gone_with_the_engine(llama: Path, tmp_path: Path) -> None:
    pool = "embedded-test"
    extra = {"segment_size": "64mb", "pool": pool}
    with SGLangServer(llama, backend="mooncake", extra_config=extra, log_path=tmp_path / "server.log", tp=2) as server:
        cold = server.generate(PROMPT, 8)
        server.flush()
        warm = server.generate(PROMPT, 8)
        assert warm.cached == Cached(storage=REUSABLE) and warm.output_ids == cold.output_ids
        log = server.log_tail(10_000)
        server.kill()
    assert log.count("was started for this engine") == 1
    redis_directory = log.partition("redis unix://")[2].partition("/redis.sock")[0]
    assert redis_directory.startswith("/")
    eventually(lambda: not Path(redis_directory).exists(), 15, "the private Redis is gone")
    eventually(lambda: f"@hicache-mooncake/0/{pool}" not in Path("/proc/net/unix").read_text(), 15)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"segment_sise": "1gb"}, "segment_size"),
        ({"segment_size": "many"}, "segment_size"),
        ({"redis_url": "redis://127.0.0.1:1/0"}, "redis_url"),
        ({"segment_size": "100tb"}, "segment_size"),
        ({"master_server_address": "127.0.0.1:50051"}, "redis_url"),
        ({"node": "/nonexistent/node.sock"}, "/nonexistent/node.sock"),
    ],
)
def test_a_wrong_setting_stops_the_start_and_is_named(
    extra: dict[str, object], said: str, llama: Path, tmp_path: Path
) -> None:
    server = SGLangServer(
        llama, backend="mooncake", extra_config={"pool": "wrong", **extra}, log_path=tmp_path / "s.log"
    )
    started = time.monotonic()
    try:
        with pytest.raises(ServerFailed) as failed:
            server.start()
    finally:
        server.kill()
    assert said in str(failed.value)
    assert time.monotonic() - started < 60


def test_a_lost_or_corrupted_page_ends_the_prefix_and_the_answer_stays_right(
    two_nodes: tuple[NodeProcess, ...], llama: Path, tmp_path: Path
) -> None:
    import redis

    node = two_nodes[0]
    with on(node, llama, tmp_path) as server:
        cold = server.generate(PROMPT, 8)
        server.wait_for_backup()
        flip_stored_bytes(node, llama_pages(node))
        server.flush()
        warm = server.generate(PROMPT, 8)
        assert warm.output_ids == cold.output_ids
        assert warm.cached.storage < REUSABLE
        server.flush()
        with redis.Redis.from_url(node.redis_url) as client:
            client.flushall()
        assert server.generate(PROMPT, 8).output_ids == cold.output_ids
        server.kill()


def llama_pages(node: NodeProcess) -> int:
    import redis

    with redis.Redis.from_url(node.redis_url) as client:
        return sum(1 for _ in client.scan_iter(f"hcm:{node.settings['pool']}:o:*"))


def flip_stored_bytes(node: NodeProcess, pages: int) -> None:
    """Flip a bit in the middle of what the node's segment holds."""
    import mmap
    import os

    for entry in os.listdir(f"/proc/{node.pid}/fd"):
        if "hicache-mooncake-segment" in os.readlink(f"/proc/{node.pid}/fd/{entry}"):
            fd = os.open(f"/proc/{node.pid}/fd/{entry}", os.O_RDWR)
            with mmap.mmap(fd, 0) as segment:
                segment[4096 * (pages // 2) + 100] ^= 1
            os.close(fd)
            return
    raise AssertionError("the node's segment was not found")
