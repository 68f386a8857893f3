"""The operator's commands against a real pool, as a shell runs them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache_mooncake.metadata.permissions import grant
from hicache_mooncake.metadata.redis_server import PrivateRedis
from hicache_mooncake.radix_bridge import page_hashes
from tests.pool import Engine, NodeProcess, eventually, running


def run(*words: str, status: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "hicache_mooncake.cli", *words], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def nodes(redis_server_url: str) -> Iterator[tuple[NodeProcess, ...]]:
    settings: dict[str, object] = {"pool": "ops"}
    pair = NodeProcess(redis_server_url, "a", settings), NodeProcess(redis_server_url, "b", settings)
    with running(*pair):
        yield pair


@pytest.fixture(scope="module")
def redis_server_url(redis_server: object) -> str:
    return str(redis_server.url)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def engine(nodes: tuple[NodeProcess, ...]) -> Iterator[Engine]:
    with Engine(nodes[0].socket, pool="ops", page_size="16") as engine:
        eventually(lambda: engine.stats()["nodes"] == 2)
        yield engine


@pytest.fixture
def where(nodes: tuple[NodeProcess, ...]) -> list[str]:
    return ["--pool", "ops", "--redis-url", nodes[0].redis_url, "--node", nodes[0].socket]


def test_status_nodes_and_ls_agree(engine: Engine, where: list[str], nodes: tuple[NodeProcess, ...]) -> None:
    names = page_hashes(range(160), 16)
    engine.store(names)
    engine.check(names)
    eventually(lambda: json.loads(run("status", "--json", *where))["objects"] == 10)
    status = json.loads(run("status", "--json", *where))
    assert {node["id"] for node in status["nodes"]} == {node.node_id for node in nodes}
    assert status["used"] == 10 * engine.page_bytes and status["local"]["get_local"] >= 10
    assert [space["digest"] for space in status["namespaces"]] == [engine.namespace.digest]
    listed = json.loads(run("ls", "--json", *where))
    assert {view["page_hash"] for view in listed} == set(names)
    assert all(view["holders"] == [f"{nodes[0].node_id}/dram"] and not view["dead"] for view in listed)
    assert len(json.loads(run("ls", "--json", "--limit", "3", *where))) == 3
    assert json.loads(run("ls", "--json", "--namespace", "0" * 16, *where)) == []
    assert "more than these 3" in run("ls", "--limit", "3", *where)
    assert "more than" not in run("ls", "--limit", "10", *where)
    assert "--limit" in run("ls", "--limit", "-1", *where, status=2)
    text = run("status", *where)
    assert "2 nodes" in text and nodes[1].node_id in text and "hits" in text
    assert nodes[0].node_id in run("nodes", *where)


def test_inspect_finds_a_prompt_by_its_tokens(engine: Engine, where: list[str], tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"
    engine.store(page_hashes(range(160), 16))
    tokens.write_text(json.dumps([*range(96), *range(1000, 1064)]))
    text = run("inspect", "--tokens", str(tokens), "--page-size", "16", *where)
    assert text.startswith("6 of 10 pages of 16 tokens are held: 96 tokens")
    again = run("inspect", "--tokens", str(tokens), *where)  # the namespace tells its page size
    assert text.partition("\n\n")[0] == again.partition("\n\n")[0] and "last use" in again
    one = json.loads(run("inspect", "--json", page_hashes(range(16), 16)[0], *where))
    assert len(one) == 1 and one[0]["size"] == engine.page_bytes
    assert json.loads(run("inspect", "--json", "no-such-page", *where)) == []
    assert "a page hash has 64 hex digits" in run("inspect", "no-such-page", *where)
    assert "--page-size" in run("inspect", "--tokens", str(tokens), "--page-size", "0", *where, status=2)
    assert "No such file" in run("inspect", "--tokens", "/nonexistent", *where, status=2)
    salted = run("inspect", "--tokens", str(tokens), "--page-size", "16", "--cache-salt", "x", *where)
    assert salted.startswith("0 of 10")
    assert "--tokens" in run("inspect", *where, status=2)
    tokens.write_text("not json")
    assert "JSON list" in run("inspect", "--tokens", str(tokens), *where, status=2)


def test_clear_drops_one_namespace(engine: Engine, where: list[str]) -> None:
    engine.store(page_hashes(range(32), 16))
    with Engine(where[-1], pool="ops", tenant="other") as other:
        other.store(page_hashes(range(32), 16))
        assert "objects dropped" in run("clear", *where, engine.namespace.digest)
        assert not any(engine.exists(page_hashes(range(32), 16)))
        assert all(other.check(page_hashes(range(32), 16)))


def test_wrong_places_are_told_in_one_line(where: list[str]) -> None:
    assert "no such pool" in run("status", "--pool", "nope", "--redis-url", where[3], status=2)
    assert "give --redis-url" in run("status", "--node", "/nonexistent.sock", status=2)
    assert run("status", "--node", "/nonexistent.sock", status=2).count("hint") == 1
    assert "cannot" in run("nodes", "--redis-url", "redis://127.0.0.1:1/0", status=2)


def test_doctor_passes_here_and_fails_on_a_fault(where: list[str]) -> None:
    assert "FAIL" not in run("doctor", *where)
    findings = json.loads(run("doctor", "--json", *where, "--sglang", "--hicache-ratio 2", status=1))
    assert {"sglang"} == {finding["check"] for finding in findings if finding["level"] == "fail"}
    assert "closing quotation" in run("doctor", *where, "--sglang", "--a 'b", status=2)


def test_doctor_finds_who_cannot_be_read(where: list[str], nodes: tuple[NodeProcess, ...], tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    assert "another secret" in run("doctor", *where, "--secret-file", str(secret), status=1)
    assert "cannot be read" in run("doctor", *where, "--secret-file", str(tmp_path / "none"), status=1)
    assert "not the node of pool" in run("doctor", *where[2:], "--pool", "elsewhere", status=1)
    lines = nodes[1].log.read_text()
    run("doctor", *where)
    assert nodes[1].log.read_text() == lines  # a probe leaves no line in anybody's log


def test_clear_refuses_what_is_no_namespace(engine: Engine, where: list[str]) -> None:
    for digest in ("nope", "*", "0" * 16):
        assert engine.namespace.digest in run("clear", *where, digest, status=2)


def test_clear_tells_whom_it_may_have_missed() -> None:
    settings: dict[str, object] = {"pool": "blind"}
    names = page_hashes(range(64), 16)
    with PrivateRedis() as redis:
        pair = NodeProcess(redis.url, "a", settings), NodeProcess(redis.url, "b", settings)
        with running(*pair), Engine(pair[1].socket, pool="blind") as engine:
            engine.store(names)
            digest = engine.namespace.digest
            where = ["--pool", "blind", "--redis-url", redis.url, "--node", pair[0].socket]
            eventually(lambda: len(json.loads(run("nodes", "--json", *where))) == 2)

            pair[1].freeze()  # longer than it lives for Redis
            eventually(lambda: len(json.loads(run("nodes", "--json", *where))) == 1)
            assert pair[1].node_id in run("clear", *where, digest, status=1)
            pair[1].thaw()
            eventually(lambda: len(json.loads(run("nodes", "--json", *where))) == 2)
            assert "4 objects dropped" in run("clear", *where, digest)

            engine.store(names)
            redis.stop()
            eventually(lambda: engine.stats()["nodes"] == 1, what="the view of the pool is too old")
            assert "Redis does not answer" in run("clear", *where, digest, status=1)
            assert not any(engine.exists(names))  # whom it knew, it asked


def test_a_node_that_has_ended_is_not_missed_by_clear(redis_server_url: str) -> None:
    settings: dict[str, object] = {"pool": "ended"}
    pair = NodeProcess(redis_server_url, "a", settings), NodeProcess(redis_server_url, "b", settings)
    with running(*pair), Engine(pair[0].socket, pool="ended") as engine:
        where = ["--pool", "ended", "--redis-url", redis_server_url, "--node", pair[0].socket]
        eventually(lambda: engine.stats()["nodes"] == 2)
        pair[1].stop()
        eventually(lambda: engine.stats()["nodes"] == 1)
        assert run("clear", *where, engine.namespace.digest) == "0 objects dropped\n"


def test_options_are_not_abbreviated_and_help_is_cheap() -> None:
    assert "unrecognized arguments: --js" in run("nodes", "--js", status=2)
    assert "unrecognized arguments: --segment" in run("node", "--segment", "1gb", status=2)
    text = run("node", "--help")
    assert "Default: 4GiB" in text and "`" not in text
    script = "import sys\nfrom hicache_mooncake.cli import main\ntry: main(['--version'])\nexcept SystemExit: pass\n"
    script += "print(sorted({'redis', 'numpy', 'yaml', 'hiredis', 'sglang'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.splitlines()[1] == "[]"


def test_a_node_that_cannot_start_says_why_in_one_sentence(redis_server_url: str) -> None:
    node = ["node", "--redis-url", redis_server_url, "--segment-size", "1MiB"]
    assert "make the directory /nonexist/dir" in run(*node, "--node", "/nonexist/dir/x.sock", status=2)
    text = run(*node, "--node", "@test-wildcard", "--listen", "0.0.0.0:0", status=2)
    assert "listen is 0.0.0.0:0, every interface" in text and "set advertise" in text


def test_the_operating_manual_has_every_command_and_the_acl() -> None:
    text = (Path(__file__).parents[2] / "docs" / "operating.md").read_text()
    assert grant("pool") in text
    commands = re.search(r"\{([a-z,]+)\}", run("--help"))
    assert commands is not None
    for command in commands[1].split(","):
        assert f"hicache-mooncake {command}" in text
