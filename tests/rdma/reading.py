"""A reader in a process of its own, to be killed while it reads. ``python -m tests.rdma.reading FD SIZE ADDRESS``."""

from __future__ import annotations

import contextlib
import sys
import time

from hicache_mooncake.memory import Extent, Memory
from hicache_mooncake.transfer import PageRead
from hicache_mooncake.transfer.rdma.transport import RdmaTransport
from tests.transfer.pages import MIB, NODE
from tests.transfer.serving import SECRET


def main(fd: str, size: str, address: str) -> None:
    landing = Memory(int(fd), int(size))
    batch = [PageRead(f"ns:{at}:all", MIB, [Extent(landing, at * MIB, MIB)]) for at in range(landing.size // MIB)]
    with (
        contextlib.closing(RdmaTransport("rxe0", strict=True)) as reader,
        reader.connect(address, NODE, SECRET) as peer,
    ):
        peer.probe(time.monotonic() + 10)
        print("reading", flush=True)
        while True:
            peer.read(batch, time.monotonic() + 10, False)


if __name__ == "__main__":
    main(*sys.argv[1:])
