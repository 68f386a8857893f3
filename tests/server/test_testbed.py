"""The test bed itself: real SGLang servers with HiCache on a CPU, SGLang's own ``file`` backend as L3."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from testbed.server import Cached, ServerFailed, SGLangServer, prompt_ids

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("warm_sglang")]

PROMPT = prompt_ids(1, 1024)
# The last token is always computed, and with it the rest of its page.
REUSABLE = 1024 - 16


def with_files(model: Path, tmp_path: Path, **settings: object) -> SGLangServer:
    """A server whose L3 is a directory of files below ``tmp_path``, one file a page and rank."""
    env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path / "l3")}
    settings = {"backend": "file", "env": env, "log_path": tmp_path / "server.log", **settings}
    return SGLangServer(model, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama", "layer_first"),
        ("llama", "page_first"),
        ("llama", "page_first_direct"),
        ("llama", "page_head"),
        ("deepseek", "layer_first"),
        ("deepseek", "page_first"),
        ("deepseek", "page_first_direct"),
    ],
)
def test_a_flushed_prompt_comes_back_from_l3_and_says_the_same(
    model: str, layout: str, tp: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with with_files(request.getfixturevalue(model), tmp_path, layout=layout, tp=tp) as server:
        cold = server.generate(PROMPT, 8)
        assert cold.cached == Cached()
        server.flush()
        warm = server.generate(PROMPT, 8, stream=True)
        assert warm.cached == Cached(storage=REUSABLE)
        assert warm.output_ids == cold.output_ids
        assert warm.ttft is not None and 0 < warm.ttft <= warm.elapsed
        # Latent KV is the same on every rank and written by one; heads are split over the ranks.
        assert len(list((tmp_path / "l3").iterdir())) == len(PROMPT) // 16 * (tp if model == "llama" else 1)
        server.kill()


def test_pages_outlive_a_server_that_is_killed(llama: Path, tmp_path: Path) -> None:
    with with_files(llama, tmp_path) as server:
        cold = server.generate(PROMPT)
        server.wait_for_backup()
        pids = server.pids
        assert len(pids) >= 3
        server.kill()
        assert not server.alive
        deadline = time.monotonic() + 10
        while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    with with_files(llama, tmp_path) as server:
        warm = server.generate(PROMPT)
        server.kill()
    assert warm.cached == Cached(storage=REUSABLE)
    assert warm.output_ids == cold.output_ids


def test_a_backend_is_attached_cleared_and_detached_at_run_time(llama: Path, tmp_path: Path) -> None:
    with with_files(llama, tmp_path, backend=None) as server:
        assert server.status()["hicache_storage_backend"] is None
        server.generate(PROMPT)
        server.flush()
        assert server.generate(PROMPT).cached == Cached()  # nowhere to come back from
        server.attach("file", {"prefetch_threshold": 256})
        assert server.status()["hicache_storage_backend"] == "file"
        other = prompt_ids(2, 1024)
        server.generate(other)
        server.flush()
        assert server.generate(other).cached == Cached(storage=REUSABLE)
        server.clear_storage()
        server.flush()
        assert server.generate(other).cached == Cached()
        server.detach()
        assert server.status()["hicache_storage_backend"] is None
        server.kill()


def test_an_unflushed_prompt_is_found_on_the_device(llama: Path, tmp_path: Path) -> None:
    with with_files(llama, tmp_path) as server:
        server.generate(PROMPT)
        assert server.generate(PROMPT).cached == Cached(device=REUSABLE)
        server.kill()


def test_a_server_stops_when_asked(llama: Path, tmp_path: Path) -> None:
    server = with_files(llama, tmp_path)
    server.start()
    server.stop()
    assert not server.alive
    assert "Finished server process" in server.log_tail(200)  # it ended by itself, and was not killed
    server.stop()


def test_a_server_that_cannot_start_says_why(llama: Path, tmp_path: Path) -> None:
    server = with_files(llama, tmp_path, extra_args=["--no-such-flag"])
    with pytest.raises(ServerFailed, match="no-such-flag"):
        server.start()
    assert not server.alive


def test_an_unknown_backend_is_told_by_the_log(llama: Path, tmp_path: Path) -> None:
    server = with_files(llama, tmp_path, backend="dynamic", extra_config={"backend_name": "x"})
    with pytest.raises(ServerFailed, match=r"died while starting"):
        server.start()


@pytest.mark.parametrize("model", ["llama", "deepseek"])
def test_attending_new_rows_only_says_the_same(model: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    directory, exact = request.getfixturevalue(model), ["--dtype", "float32"]
    with with_files(directory, tmp_path, backend=None, extra_args=exact) as server:
        stock = server.generate(PROMPT, 8)
        server.kill()
    with with_files(directory, tmp_path, extra_args=exact, attend_new_rows=True) as server:
        assert server.generate(PROMPT, 8).output_ids == stock.output_ids
        server.flush()
        warm = server.generate(PROMPT, 8)
        server.kill()
    assert warm.output_ids == stock.output_ids
    assert warm.cached == Cached(storage=REUSABLE)


@pytest.mark.slow
def test_a_server_started_as_in_production_behaves_the_same(llama: Path, tmp_path: Path) -> None:
    heard: list[str] = []
    server = with_files(llama, tmp_path, fresh=True)
    server.start(progress=heard.append)
    try:
        cold = server.generate(PROMPT)
        server.flush()
        warm = server.generate(PROMPT)
    finally:
        server.kill()
    assert warm.cached == Cached(storage=REUSABLE)
    assert warm.output_ids == cold.output_ids
    assert heard[-1].startswith("ready on port")
