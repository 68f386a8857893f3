"""What the documents show is run, and settings in them exist."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from hicache_mooncake.config import Settings
from hicache_mooncake.radix_bridge import page_hashes
from tests.pool import Engine, NodeProcess, eventually, hashes

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def console(path: Path) -> list[tuple[str, list[str]]]:
    """The commands of a document's console blocks, each with the output shown under it."""
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"```console\n(.*?)```", path.read_text(), re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            elif found:
                found[-1][1].append(line)
    return found


def shape(text: str) -> str:
    """A line with what differs from run to run taken out."""
    return re.sub(r"[0-9a-f]{6,}|\d+", "#", text)


@pytest.fixture
def tcp_redis_url(tmp_path: Path) -> Iterator[str]:
    """A Redis on a port, because redis-cli takes no URL of a unix socket."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path)],
        stdout=subprocess.DEVNULL,
    )
    url = f"redis://127.0.0.1:{port}/0"
    try:
        with redis.Redis.from_url(url) as client:
            eventually(lambda: _answers(client))
        yield url
    finally:
        server.terminate()
        server.wait(timeout=10)


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


@pytest.mark.skipif(shutil.which("redis-cli") is None, reason="redis-cli is not installed")
def test_every_redis_cli_example_prints_what_is_shown(tcp_redis_url: str) -> None:
    examples = console(ROOT / "docs" / "redis-cli.md")
    assert len(examples) > 8
    script = "set -e\n"
    for number, (command, _) in enumerate(examples):
        # redis-cli prints for people on a terminal, and plainly into a pipe or a variable.
        terminal = "|" not in command and "$(" not in command
        script += f"echo '== {number}'\n{'export FAKETTY=1' if terminal else 'unset FAKETTY'}\n{command}\n"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with NodeProcess(tcp_redis_url, "docs") as node, Engine(node.socket) as engine:
        engine.store(hashes("docs", 8))
        with redis.Redis.from_url(tcp_redis_url) as client:
            key = f"hcm:default:node:{{0}}{node.node_id}"
            eventually(lambda: client.hget(key, "pages") == b"8", what="a heartbeat that counts the pages")
        done = subprocess.run(
            ["bash", "-c", script],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=ROOT,
            check=False,
            env={**os.environ, "REDIS_URL": tcp_redis_url, "PATH": path},
        )
    parts = re.split(r"== \d+\n", done.stdout)[1:]
    assert len(parts) == len(examples), done.stderr
    for (command, shown), printed in zip(examples, parts, strict=True):
        assert [shape(line) for line in printed.splitlines()] == [shape(line) for line in shown], command


def test_settings_in_the_documents_exist() -> None:
    for path in DOCUMENTS:
        for text in re.findall(r"extra-config '(\{.*?\})'", path.read_text()):
            Settings.load(json.loads(text), env={})
        for flags in re.findall(r"hicache-mooncake node ((?:.|\\\n)*?)\n```", path.read_text()):
            for flag in re.findall(r"--([a-z-]+)", flags):
                assert flag == "config" or flag.replace("-", "_") in Settings.__dataclass_fields__, (path.name, flag)


def test_links_between_documents_lead_somewhere() -> None:
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
            if not target.startswith("http"):
                assert (path.parent / target).exists(), (path.name, target)


def test_the_makefile_has_what_the_readme_names() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`?make ([a-z-]+)", (ROOT / "README.md").read_text()):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_hash_in_the_documents_is_right() -> None:
    text = (ROOT / "docs" / "redis-cli.md").read_text()
    assert page_hashes(range(32), 16)[1] in text
