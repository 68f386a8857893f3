"""What docs/rdma.md shows is run, as far as a guest goes; what the rest names is there."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.rdma import python_cost

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "rdma.md").read_text()
COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
    if line
]


def command(begins: str) -> list[str]:
    (found,) = [line for line in COMMANDS if line.startswith(begins)]
    return [sys.executable if word == "python" else word for word in shlex.split(found)]


def test_what_is_named_is_there() -> None:
    assert re.search(r"^test-rdma:", (ROOT / "Makefile").read_text(), re.MULTILINE) and "make test-rdma" in COMMANDS
    for path in re.findall(r"`(tests/[^ `]+)", TEXT):
        assert (ROOT / path).exists(), path


def test_python_is_no_more_than_a_few_microseconds_a_page() -> None:
    """3 are aimed at; a busy machine is given as much again, for here nobody else's load is kept away."""
    for extents in (1, 2):
        cost = python_cost(128, extents, repeat=200)
        assert sum(cost.values()) < 6, cost


@pytest.mark.rdma
@pytest.mark.timeout(120)
def test_the_benchmark_runs_on_two_hosts() -> None:
    serve = command("python -m benchmarks.rdma serve")
    read = command("python -m benchmarks.rdma read")
    serve[serve.index("--listen") + 1] = "127.0.0.1:7799"
    serve[serve.index("--advertise") + 1] = "127.0.0.1"
    read[-1] = "127.0.0.1:7799"
    with subprocess.Popen(
        [*serve, "--devices", "rxe1", "--memory", "16mb"], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as server:
        try:
            assert server.stdout is not None
            lines = [server.stdout.readline() for _ in range(2)]
            assert "serving 16mb at 127.0.0.1:7799" in lines[1], lines
            few = ["--devices", "rxe0", "--sizes", "64kb,1mb", "--batch", "4", "--seconds", "0.3"]
            time.sleep(1)
            shown = subprocess.run([*read, *few], capture_output=True, text=True, cwd=ROOT, check=False)
        finally:
            server.kill()
    print(shown.stdout)
    assert shown.returncode == 0, shown.stderr
    rows = [line.split() for line in shown.stdout.splitlines()]
    assert [(row[0], row[2]) for row in rows[1:3]] == [("64", "1"), ("1024", "1")]
    assert all(float(row[3]) > 0.001 for row in rows[1:3])


@pytest.mark.rdma
def test_a_soft_device_is_added_as_shown() -> None:
    (line,) = [line for line in COMMANDS if line.startswith("rdma link add")]
    words = shlex.split(line)
    words[words.index("rxe0")], words[words.index("eth0")] = "rxe7", "lo"
    if shutil.which("modprobe"):
        subprocess.run(["modprobe", "rdma_rxe"], check=False)  # the guest's kernel has it built in
    added = subprocess.run(words, capture_output=True, text=True, check=False)
    assert added.returncode == 0, added.stderr
    subprocess.run(["rdma", "link", "delete", "rxe7"], check=True)
