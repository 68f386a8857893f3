"""What the machine itself can do: copies of the same pages, a plain TCP stream, calls of a bare Redis client."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import xxhash

from hicache_mooncake.memory import Memory

COUNT_EXISTING = """
local found = 0
for i = 1, #KEYS do found = found + redis.call('EXISTS', KEYS[i]) end
return found
"""


def copy_pages(target: Memory, source: Memory, page_bytes: int, places: Sequence[tuple[int, int]]) -> None:
    """The pages of ``places``, ``(to, from)`` page numbers, one ``memmove`` each."""
    for to, start in places:
        ctypes.memmove(target.address + to * page_bytes, source.address + start * page_bytes, page_bytes)


def copy_and_hash_pages(target: Memory, source: Memory, page_bytes: int, places: Sequence[tuple[int, int]]) -> None:
    """Like :func:`copy_pages`, each page hashed after it: what a verified copy costs at least."""
    for to, start in places:
        ctypes.memmove(target.address + to * page_bytes, source.address + start * page_bytes, page_bytes)
        xxhash.xxh3_64_intdigest(target.view[to * page_bytes : (to + 1) * page_bytes], 1)


class ThreadedCopy:
    """:func:`copy_pages` by several threads."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads)

    def __call__(self, target: Memory, source: Memory, page_bytes: int, places: Sequence[tuple[int, int]]) -> None:
        lanes = [places[lane :: self._threads] for lane in range(self._threads)]
        wait([self._pool.submit(copy_pages, target, source, page_bytes, lane) for lane in lanes])

    def close(self) -> None:
        self._pool.shutdown()


class PlainStream:
    """One TCP connection from a process that sends pages; received with ``recv_into``, page by page."""

    def __init__(self, page_bytes: int, pages: int, batches: int) -> None:
        command = [sys.executable, "-m", "benchmarks.plain_sender", str(page_bytes), str(pages), str(batches)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        try:
            port = int(self._process.stdout.readline())
            self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        except BaseException:
            self._end()
            raise
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(None)  # a Python timeout would cost a poll for each call; the kernel's own does not
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 60, 0))
        self._page_bytes = page_bytes

    @property
    def pid(self) -> int:
        """The sender's process."""
        return self._process.pid

    def receive(self, target: Memory, slots: Sequence[int]) -> None:
        """One batch into the pages ``slots`` of ``target``."""
        size = self._page_bytes
        self._socket.sendall(b"\1")
        for slot in slots:
            page = target.view[slot * size : (slot + 1) * size]
            while page:
                got = self._socket.recv_into(page)
                if not got:
                    raise ConnectionError("the sender of the plain stream is gone")
                page = page[got:]

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def close(self) -> None:
        self._socket.close()
        self._end()


class BareRedis:
    """A plain redis-py client with hiredis, and one script that asks whether keys exist."""

    def __init__(self, url: str) -> None:
        import redis

        self._client: Any = redis.Redis.from_url(url)
        self._script: str = self._client.script_load(COUNT_EXISTING)

    def ping(self) -> None:
        self._client.ping()

    def count(self, keys: Sequence[str]) -> int:
        """How many of ``keys`` exist, by one call of the script."""
        found: int = self._client.evalsha(self._script, len(keys), *keys)
        return found

    def object_keys(self) -> list[str]:
        """The Redis keys of every object of the pool."""
        return sorted(key.decode() for key in self._client.scan_iter("hcm:*:o:*", count=1000))

    def close(self) -> None:
        self._client.close()


@contextlib.contextmanager
def plain_stream(page_bytes: int, pages: int, batches: int) -> Iterator[PlainStream]:
    """A stream that is closed at the end."""
    stream = PlainStream(page_bytes, pages, batches)
    try:
        yield stream
    finally:
        stream.close()
