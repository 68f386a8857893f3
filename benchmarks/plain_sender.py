"""The other end of the plain TCP stream that TCP transfers are held against: ``python -m benchmarks.plain_sender``.

Prints its port, takes one connection, and for each byte it receives sends a batch of pages with ``sendall``.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import socket


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page_bytes", type=int)
    parser.add_argument("pages", type=int)
    parser.add_argument("batches", type=int)
    arguments = parser.parse_args()
    size = arguments.page_bytes * arguments.pages * arguments.batches
    descriptor = os.memfd_create("plain-sender")
    os.ftruncate(descriptor, size)
    with mmap.mmap(descriptor, size) as memory, memoryview(memory) as view:
        view[:] = bytes(size)  # every page touched before the clock runs
        with socket.create_server(("127.0.0.1", 0)) as listener:
            print(listener.getsockname()[1], flush=True)
            connection, _ = listener.accept()
        order = list(range(arguments.pages * arguments.batches))
        random.Random(1).shuffle(order)
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            batch = 0
            while connection.recv(1):
                for page in order[batch * arguments.pages : (batch + 1) * arguments.pages]:
                    connection.sendall(view[page * arguments.page_bytes : (page + 1) * arguments.page_bytes])
                batch = (batch + 1) % arguments.batches


if __name__ == "__main__":
    main()
