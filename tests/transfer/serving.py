"""A node's data port in a process of its own, to be stopped and killed. ``python -m tests.transfer.serving …``."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from hicache_mooncake.transfer import Credentials, Transport, transport

from .pages import NODE, Segment

SECRET = Credentials(b"correct horse", "prod")


class Serving:
    """The child process and its address. It holds ``count`` pages ``ns:<i>:all`` of ``size`` bytes."""

    def __init__(
        self, count: int, size: int, *, node: str = NODE, address: str = "127.0.0.1:0", device: str = ""
    ) -> None:
        command = [sys.executable, "-m", "tests.transfer.serving", address, node, str(count), str(size), device]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
        )
        assert self.process.stdout
        self.address = self.process.stdout.readline().strip()
        assert self.address, "the child did not start"

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; a SIGSTOP only takes effect once every thread has come to rest, which is waited for."""
        os.kill(self.process.pid, number)
        while number is signal.SIGSTOP and not all(map(_stopped, self._tasks())):
            time.sleep(0.005)

    def _tasks(self) -> list[Path]:
        return list(Path(f"/proc/{self.process.pid}/task").iterdir())

    def close(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=10)


def _stopped(task: Path) -> bool:
    return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"


@contextlib.contextmanager
def serving(
    count: int, size: int, *, node: str = NODE, address: str = "127.0.0.1:0", device: str = ""
) -> Iterator[Serving]:
    """With an RDMA ``device`` it serves by that too."""
    child = Serving(count, size, node=node, address=address, device=device)
    try:
        yield child
    finally:
        child.close()


def _transport(device: str) -> Transport:
    if not device:
        return transport("tcp")
    from hicache_mooncake.transfer.rdma.transport import RdmaTransport

    return RdmaTransport(device)


def main(address: str, node: str, count: str, size: str, device: str) -> None:
    segment = Segment(int(count) * int(size), node)
    for index in range(int(count)):
        segment.put(f"ns:{index}:all", int(size))
    with (
        contextlib.closing(_transport(device)) as moved,
        moved.listen(address, "", segment, SECRET) as listener,
    ):
        print(listener.address, flush=True)
        sys.stdin.read()  # until the parent closes it, or is gone
    segment.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
