"""The unix socket on which the engines of a host find their node: having it is what makes a process that node."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from contextlib import suppress

from hicache_mooncake.errors import ConfigError, HiCacheMooncakeError
from hicache_mooncake.protocol import messages as m
from hicache_mooncake.protocol.channel import Channel, close_all, socket_address

ASK_WITHIN = 1.0
"""Seconds that whoever has the socket already gets to say who it is."""


def listen(address: str, *, pool: str = "") -> socket.socket:
    """The socket on which this host's engines find their node. Whoever has it is the node of this host and pool.

    Raises ``ConfigError`` when ``address`` cannot be listened on, because a node does already or otherwise. Given
    ``pool``, the node that has it is asked who it is, so that the error can say what to do.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if address.startswith("@"):
            sock.bind(socket_address(address))
        else:
            _bind_path(sock, address)
        sock.listen(64)
    except OSError as error:
        sock.close()
        raise ConfigError(
            "node",
            address,
            f"it cannot be listened on: {error.strerror or error}",
            hint=_hint(address, error, pool),
        ) from error
    return sock


def _hint(address: str, error: OSError, pool: str) -> str:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return f"make the directory {os.path.dirname(address)}"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"this user needs to write to {os.path.dirname(address)}"
    if error.errno == errno.EADDRINUSE and pool:
        return _who_has(address, pool)
    return "a node may run already"


def _bind_path(sock: socket.socket, path: str) -> None:
    """Bind to ``path``, in place of what a dead node left there."""
    # Under a lock on the directory, or: 1. two nodes find a dead one's socket 2. one replaces it 3. the other one
    # removes that as well, and the first node is never found again.
    directory = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        try:
            sock.bind(path)
        except OSError:
            if not _is_abandoned(path):
                raise
            os.unlink(path)
            sock.bind(path)
        os.chmod(path, 0o600)
        sock.listen(64)  # before the lock goes: until then it looks abandoned
    finally:
        os.close(directory)


def close_listener(sock: socket.socket, address: str) -> None:
    """Stop listening and leave no file behind. Safe to call again."""
    if sock.fileno() < 0:
        return
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
    if not address.startswith("@"):
        with suppress(OSError):
            os.unlink(address)


def _who_has(address: str, pool: str) -> str:
    """What whoever listens on ``address`` says of itself, and what to do about it."""
    deadline = time.monotonic() + ASK_WITHIN
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.settimeout(ASK_WITHIN)
            sock.connect(socket_address(address))
            channel = Channel(sock)
            channel.send(m.Hello(m.VERSION, pool, "a node that starts", engine=False), deadline)
            body, descriptors = channel.receive(deadline)
            close_all(descriptors)
            reply = m.decode_reply(body)
        except (HiCacheMooncakeError, OSError) as error:
            return f"a node may run already; asked who it is: {error}"
    if isinstance(reply, m.Refused):
        return f"what has it says: {reply.reason}"
    if not isinstance(reply, m.Welcome):
        return "a node may run already"
    if reply.embedded:
        return (
            f"an embedded node that an engine started has it ({reply.node_id}); "
            "it ends with its last engine, or give both sides the same --node PATH"
        )
    return f"node {reply.node_id} runs already"


def _is_abandoned(path: str) -> bool:
    """Whether ``path`` is a socket that no process listens on any more."""
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.settimeout(1)
        probe.connect(path)
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    finally:
        probe.close()
    return False
