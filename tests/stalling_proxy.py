"""A TCP proxy that can stall, throttle, cut, damage and refuse: the network between a client and a real server.

``with StallingProxy("127.0.0.1:6379") as proxy:`` then connect to ``proxy.address``. Faults apply to connections
that are open and to new ones. Byte counts are of what the server sends, from the call on.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from types import TracebackType

_STEP = 64 * 1024
_TICK = 0.02
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST


class StallingProxy:
    """Faults are set from the test's thread; one thread a direction moves the bytes."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host.strip("[]"), int(port))
        self._lock = threading.Condition()
        self._stalled = False
        self._refusing = False
        self._rate = 0.0
        self._stall_at = self._cut_at = self._flip_at = -1
        self._passed = 0
        self._closing = False
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads: list[threading.Thread] = []
        self.accepted = 0
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self._start(self._accept)

    def stall(self, after: int = 0) -> None:
        """Pass nothing any more, either way, once ``after`` more bytes have come from the server."""
        with self._lock:
            if after:
                self._stall_at = self._passed + after
            else:
                self._stalled = True

    def resume(self) -> None:
        """Undo :meth:`stall`, :meth:`throttle` and :meth:`refuse`; what was held back is passed on."""
        with self._lock:
            self._stalled = self._refusing = False
            self._stall_at = self._cut_at = self._flip_at = -1
            self._rate = 0.0
            self._lock.notify_all()

    def throttle(self, bytes_per_second: float) -> None:
        """Pass what the server sends no faster than this, over all connections."""
        with self._lock:
            self._rate = bytes_per_second

    def cut(self, after: int = 0) -> None:
        """Reset every open connection once ``after`` more bytes have come from the server. New ones are welcome."""
        with self._lock:
            if after:
                self._cut_at = self._passed + after
                return
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for sock in pair:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                sock.close()

    def flip(self, after: int) -> None:
        """Damage one byte, ``after`` bytes from now."""
        with self._lock:
            self._flip_at = self._passed + after

    def refuse(self) -> None:
        """Reset new connections as soon as they are made."""
        with self._lock:
            self._refusing = True

    @property
    def passed(self) -> int:
        """Bytes that have come from the server so far."""
        with self._lock:
            return self._passed

    def close(self) -> None:
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()
        self._listener.close()

    def __enter__(self) -> StallingProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name="proxy", daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closing:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            try:
                if self._refusing:
                    raise ConnectionRefusedError
                server = socket.create_connection(self._target, timeout=5)
            except OSError:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                client.close()
                continue
            for sock in (client, server):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._pairs.append((client, server))
            self._start(self._pump, client, server, False)
            self._start(self._pump, server, client, True)

    def _pump(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        try:
            sink.settimeout(_TICK)
            while True:
                allowed = self._allowance(counted)
                if allowed < 0:
                    break
                if not allowed or not select.select([source], [], [], _TICK)[0]:
                    continue
                data = bytearray(source.recv(allowed))
                if not data:
                    break
                if counted:
                    self._count(data)
                self._send(sink, data)
        except (OSError, ValueError):
            pass  # cut, or one side has gone: the other one is told below
        with self._lock:
            self._pairs = [pair for pair in self._pairs if source not in pair]
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _allowance(self, counted: bool) -> int:
        """How many bytes may be moved next; 0 for not now, -1 for never again."""
        cut = False
        with self._lock:
            if self._closing:
                return -1
            if self._stalled:
                self._lock.wait(_TICK)
                return 0
            allowed = _STEP
            if counted:
                for mark in (self._stall_at, self._cut_at):
                    if mark >= 0:
                        allowed = min(allowed, mark - self._passed)
                if allowed <= 0:
                    self._stalled = self._passed >= self._stall_at >= 0
                    cut = not self._stalled
                    self._stall_at = self._cut_at = -1
                elif self._rate:
                    allowed = max(1, min(allowed, int(self._rate * _TICK)))
        if cut:
            self.cut()
            return -1
        if counted and self._rate:
            time.sleep(allowed / self._rate)
        return max(allowed, 0)

    def _count(self, data: bytearray) -> None:
        with self._lock:
            if self._passed <= self._flip_at < self._passed + len(data):
                data[self._flip_at - self._passed] ^= 0x40
            self._passed += len(data)

    def _send(self, sink: socket.socket, data: bytearray) -> None:
        view = memoryview(data)
        while view and not self._closing:
            try:
                view = view[sink.send(view) :]
            except TimeoutError:
                continue  # the other side does not read: as slow as it likes, until it or we are closed
