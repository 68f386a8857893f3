"""An engine in a process of its own, to be killed. ``python -m tests.engine.attached POOL SETTINGS``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from hicache_mooncake.errors import HiCacheMooncakeError
from tests.pool import Engine, hashes

SMALL: dict[str, object] = {"segment_size": "16MiB", "heartbeat": 0.2}


class Attached:
    """The child; ``report`` is what it said once it was attached, or why it could not be."""

    def __init__(self, pool: str, **settings: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.attached", pool, json.dumps({**SMALL, **settings})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        self._report: dict[str, object] | None = None

    @property
    def report(self) -> dict[str, object]:
        """Waits for it."""
        if self._report is None:
            assert self.process.stdout is not None
            line = self.process.stdout.readline()
            assert line, "the engine's process ended without a word"
            self._report = json.loads(line)
        return self._report

    @property
    def node_pid(self) -> int:
        return int(str(self.report["node_pid"]))

    def kill(self) -> None:
        """As the kernel's out-of-memory killer would."""
        self.process.kill()
        self.close()

    def close(self) -> None:
        """Let it detach and end, if it still lives."""
        self.process.communicate(timeout=30)


def processes_of(node_pid: int) -> list[int]:
    """The node and what it started, as long as they live."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                status = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if status[0] != "Z" and node_pid in (int(entry), int(status[1])):
                found.append(int(entry))
    return found


def main(pool: str, settings: str) -> None:
    started = time.monotonic()
    try:
        engine = Engine("", pool=pool, settings=json.loads(settings))
    except HiCacheMooncakeError as error:
        report = {"error": type(error).__name__, "field": getattr(error, "field", ""), "text": str(error)}
        print(json.dumps({**report, "seconds": time.monotonic() - started}), flush=True)
        return
    with engine:
        link = engine.session._link
        assert link is not None and link.node is not None
        names = hashes("common", 8)
        found = sum(engine.check(names))
        engine.store(names)
        report = {"node": link.welcome.node_id, "node_pid": link.node.pid, "found": found}
        print(json.dumps({**report, "seconds": time.monotonic() - started}), flush=True)
        sys.stdin.read()  # until the parent closes it, or is gone
        assert all(engine.check(names))


if __name__ == "__main__":
    main(*sys.argv[1:])
