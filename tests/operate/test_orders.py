"""Orders of an operator against a real pool: pins, evictions and verification, here and on other nodes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache_mooncake.metadata.redis_server import PrivateRedis
from hicache_mooncake.radix_bridge import page_hashes
from tests.operate.test_commands import run
from tests.pool import Engine, NodeProcess, eventually, hashes, running


@pytest.fixture(scope="module")
def nodes(redis_server: PrivateRedis) -> Iterator[tuple[NodeProcess, ...]]:
    settings: dict[str, object] = {"pool": "orders", "segment_size": "4MiB"}
    pair = NodeProcess(redis_server.url, "a", settings), NodeProcess(redis_server.url, "b", settings)
    with running(*pair):
        yield pair


@pytest.fixture
def engines(nodes: tuple[NodeProcess, ...]) -> Iterator[list[Engine]]:
    """One at each node, in a namespace that no other test uses."""
    tag = os.urandom(4).hex()
    first = Engine(nodes[0].socket, pool="orders", page_size="16", tenant=tag)
    second = Engine(nodes[1].socket, pool="orders", page_size="16", tenant=tag)
    with first, second:
        eventually(lambda: first.stats()["nodes"] == 2 and second.stats()["nodes"] == 2)
        yield [first, second]
        run("evict", "--tenant", tag, *place(nodes))


def place(nodes: tuple[NodeProcess, ...]) -> list[str]:
    return ["--pool", "orders", "--redis-url", nodes[0].redis_url, "--node", nodes[0].socket]


@pytest.fixture
def where(nodes: tuple[NodeProcess, ...]) -> list[str]:
    return place(nodes)


def replicas(where: list[str], page_hash: str) -> list[dict[str, object]]:
    (view,) = json.loads(run("inspect", "--json", page_hash, *where))
    found: list[dict[str, object]] = view["replicas"]
    return found


def test_a_pinned_prompt_outlives_what_is_written_after_it(
    engines: list[Engine], where: list[str], tmp_path: Path
) -> None:
    tokens = list(range(7000, 7096))
    prompt = page_hashes(tokens, 16)
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps(tokens))
    engines[1].store(prompt)  # held by the other node
    assert run("pin", "--tokens", str(file), "--hard", *where).startswith("6 of 6 pages are held\n6 objects pinned")
    for number in range(12):
        engines[1].store(hashes(f"flood{number}", 16))
    assert engines[1].exists(prompt) == [True] * 6
    (replica,) = replicas(where, prompt[0])
    assert (replica["protection"], replica["extra"], replica["readers"]) == ("hard", False, 0)
    assert "hard" in run("inspect", prompt[0], *where)
    assert "left as they are" in run("evict", prompt[0], *where)
    assert run("unpin", "--tokens", str(file), *where).startswith("6 of 6 pages are held\n6 objects let go")
    assert "1 objects dropped" in run("evict", prompt[0], *where)
    for number in range(12, 24):
        engines[1].store(hashes(f"flood{number}", 16))
    assert not any(engines[1].exists(prompt))


@pytest.mark.slow
def test_a_soft_pin_ends_when_nobody_uses_the_page(engines: list[Engine], where: list[str]) -> None:
    used, idle = hashes("soft", 2)
    engines[0].store([used, idle])
    done = json.loads(run("pin", used, idle, "--ttl", "2s", "--json", *where))
    assert (done["found"], done["objects"], done["unreached"]) == (2, 2, [])
    until = time.monotonic() + 3.0
    while time.monotonic() < until:
        engines[0].check([used])
        time.sleep(0.1)
    assert [replicas(where, name)[0]["protection"] for name in (used, idle)] == ["soft", "none"]
    assert float(str(replicas(where, idle)[0]["idle"])) >= 2.9


@pytest.mark.slow
def test_evict_takes_keys_namespaces_tenants_and_amounts(engines: list[Engine], where: list[str]) -> None:
    engine = engines[0]
    names = hashes("evict", 12)
    engine.store(names)
    assert "1 objects dropped, 64.0 KiB" in run("evict", f"{engine.namespace.digest}:{names[0]}:all", *where)
    assert "0 of 1 pages are held" in run("evict", names[0], *where)
    done = json.loads(run("evict", "--bytes", "128KiB", "--on", "a", "--json", *where))
    assert (done["objects"], done["bytes"]) == (2, 128 << 10)
    assert sum(engine.exists(names)) == 9
    assert "0 objects dropped" in run("evict", "--namespace", engine.namespace.digest, "--on", "b", *where)
    assert "9 objects dropped" in run("evict", "--tenant", engine.namespace.fields["tenant"], *where)
    eventually(lambda: json.loads(run("ls", "--json", "--namespace", engine.namespace.digest, *where)) == [])
    assert "tenants that have" in run("evict", "--tenant", "nobody", *where, status=2)
    assert "is expected" in run("evict", *where, status=2)
    assert "no node of the pool is called 'c'" in run("evict", "--bytes", "1", "--on", "c", *where, status=1)


def test_verify_drops_what_is_rotten_and_names_it(
    engines: list[Engine], where: list[str], nodes: tuple[NodeProcess, ...]
) -> None:
    engine = engines[0]
    names = hashes("verify", 8)
    engine.store(names)
    assert run("verify", *where).count("done") == 2
    rot(nodes[0].pid, engine.content(names[3]))
    done = json.loads(run("verify", "a", "--json", *where, status=1))
    (job,) = done["nodes"].values()
    assert job["dropped"] == [f"{engine.namespace.digest}:{names[3]}:all"] and job["done"] == job["total"]
    assert engine.check(names) == [name != names[3] for name in names]
    eventually(lambda: json.loads(run("inspect", "--json", names[3], *where)) == [])
    assert run("verify", *where).count("done") == 2


def rot(pid: int, content: bytes) -> None:
    """Flip a byte of a page in a node's segment."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "memfd:" in line and "segment" in line:
            start, end = (int(word, 16) for word in line.split()[0].split("-"))
            with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
                memory.seek(start)
                at = memory.read(end - start).find(content)
                if at >= 0:
                    memory.seek(start + at + 100)
                    memory.write(bytes([content[100] ^ 1]))
                    return
    raise AssertionError("the page is not in the segment")


@pytest.mark.slow
def test_an_order_tells_whom_it_did_not_reach(
    engines: list[Engine], where: list[str], nodes: tuple[NodeProcess, ...]
) -> None:
    names = hashes("reach", 2)
    engines[0].store(names)
    nodes[1].signal(signal.SIGSTOP)
    try:
        done = json.loads(run("pin", *names, "--json", *where, status=1))
    finally:
        nodes[1].thaw()
    assert done["found"] == 2 and done["unreached"] == [nodes[1].node_id]
    eventually(lambda: engines[0].stats()["nodes"] == 2)


@pytest.mark.slow
def test_pins_are_gone_with_the_node(redis_server: PrivateRedis) -> None:
    settings: dict[str, object] = {"pool": "short"}
    names = hashes("short", 4)
    node = NodeProcess(redis_server.url, "a", settings)
    with running(node):
        where = ["--pool", "short", "--redis-url", redis_server.url, "--node", node.socket]
        with Engine(node.socket, pool="short") as engine:
            engine.store(names)
            assert "4 objects pinned" in run("pin", *names, "--hard", *where)
            assert engine.stats()["hard_pinned_bytes"] == 4 * engine.page_bytes
        node.kill()
        node.start()
        with Engine(node.socket, pool="short") as engine:
            assert engine.stats()["hard_pinned_bytes"] == 0
            eventually(lambda: engine.stats()["nodes"] == 1, what="the node that was killed is dead to all")
            engine.store(names)
            assert replicas(where, names[0])[0]["protection"] == "none"
