"""The unix socket on which the engines of a host find their node: having it is what makes a process that node."""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import suppress

from hicache_mooncake.errors import ConfigError
from hicache_mooncake.protocol.channel import socket_address


def listen(address: str) -> socket.socket:
    """The socket on which this host's engines find their node. Whoever has it is the node of this host and pool.

    Raises ``ConfigError`` when ``address`` cannot be listened on, because a node does already or otherwise.
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
            hint="a node may run already",
        ) from error
    return sock


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
