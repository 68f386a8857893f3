"""A store's directory: who may write in it, and what it says about itself.

``store.json`` names pool, store and format; ``LOCK`` is held by the process that uses the directory (``flock``, so
that it goes with the process). A directory that holds anything else is refused: a cache must not grow over somebody's
files, nor take another pool's pages for its own.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from hicache_mooncake.errors import ConfigError, Unavailable
from hicache_mooncake.ssd.frames import OWNER_BYTES, VERSION

IDENTITY_FILE = "store.json"
LOCK_FILE = "LOCK"
_FORMAT = "hicache-mooncake-ssd"
_IGNORED = {IDENTITY_FILE, IDENTITY_FILE + ".tmp", LOCK_FILE, "lost+found"}
_REFUSED_WRITES = (errno.EROFS, errno.EACCES, errno.EPERM)


@dataclass(frozen=True, slots=True)
class Identity:
    """What ``store.json`` says. ``owner`` is drawn when the directory is created and stands in every frame."""

    store: str
    pool: str
    owner: bytes
    version: int = VERSION
    node: str = ""


class Lock:
    """Exclusive use of a path by this process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def take(cls, path: str, *, flags: int = os.O_RDWR | os.O_CREAT) -> Lock | None:
        """None when another process, or another store of this one, holds it. Raises ``OSError``."""
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno == errno.EWOULDBLOCK:
                return None
            raise
        return cls(descriptor)

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def prepare(path: str) -> None:
    """Create the directory if it is missing. Raises ``ConfigError``."""
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
    except OSError as error:
        raise refusal(path, error) from error


def lock(path: str) -> Lock:
    """The directory's lock. Raises ``ConfigError`` when another process has it, or it cannot be written in."""
    try:
        held = Lock.take(os.path.join(path, LOCK_FILE))
    except OSError as error:
        raise refusal(path, error) from error
    if held is None:
        raise in_use(path)
    return held


def in_use(path: str) -> ConfigError:
    return ConfigError(
        "ssd_path", path, "another process uses it", hint="one path a node: end that process, or set another ssd_path"
    )


def refusal(path: str, error: OSError) -> ConfigError | Unavailable:
    """The error of a path that cannot be used, by what the system said."""
    if error.errno in (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.ETIMEDOUT):
        return Unavailable(f"SSD path {path}: {error.strerror}", hint="look at the disk of ssd_path")
    if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
        return ConfigError(
            "ssd_path", path, f"its file system has no locks ({error.strerror})", hint="mount with flock"
        )
    hint = "mount it for writing, and give it to the user of the node" if error.errno in _REFUSED_WRITES else ""
    return ConfigError("ssd_path", path, f"it cannot be used ({error.strerror})", hint=hint or "set another ssd_path")


def read_identity(path: str) -> Identity | None:
    """None when there is no ``store.json``. Raises ``ConfigError`` when it is not one of ours, or damaged."""
    file = os.path.join(path, IDENTITY_FILE)
    try:
        with open(file, "rb") as opened:
            content = json.loads(opened.read(1 << 16))
        if content["format"] != _FORMAT:
            raise ValueError("another format")
        owner = bytes.fromhex(content["owner"])
        if len(owner) != OWNER_BYTES:
            raise ValueError("owner is cut off")
        return Identity(
            str(content["store"]), str(content["pool"]), owner, int(content["version"]), str(content.get("node", ""))
        )
    except FileNotFoundError:
        return None
    except OSError as error:
        raise refusal(path, error) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            "ssd_path", path, f"its {IDENTITY_FILE} is damaged or of another program", hint="empty the directory"
        ) from error


def identify(
    path: str,
    wanted: Identity,
    *,
    failpoint: Callable[[str], None],
    expected: Callable[[str], bool],
) -> tuple[Identity, bool]:
    """The directory's identity, written if it is new, and whether an older version's files have to go.

    ``expected`` says of a file name whether it may lie in a directory that is not finished. Raises ``ConfigError`` for
    another pool's or store's directory, a newer version's, or one that holds something else.
    """
    found = read_identity(path)
    if found is None:
        strangers = [name for name in _names(path) if not _ignored(name) and not expected(name)]
        if strangers:
            raise ConfigError(
                "ssd_path", path, f"it holds other files ({strangers[0]!r}, ...)", hint="give it an empty directory"
            )
        failpoint("identity")
        write_identity(path, wanted)
        return wanted, False
    check(path, found, wanted)
    if found.version < VERSION:
        fresh = Identity(wanted.store, wanted.pool, wanted.owner, VERSION, wanted.node)
        return fresh, True
    return found, False


def check(path: str, found: Identity, wanted: Identity) -> None:
    """Raises ``ConfigError`` unless ``found`` is of the wanted pool and store, in a version that we know."""
    if found.pool != wanted.pool:
        raise ConfigError(
            "ssd_path", path, f"it belongs to pool {found.pool!r}", hint="set that pool, or another ssd_path"
        )
    if found.store != wanted.store:
        hint = f"set ssd_store to {found.store!r}, or bring it over with 'hicache-mooncake ssd import'"
        raise ConfigError("ssd_path", path, f"it is a {found.store!r} store, not {wanted.store!r}", hint=hint)
    if found.version > VERSION:
        raise ConfigError(
            "ssd_path", path, f"it was written by a newer version (format {found.version})", hint="empty the directory"
        )


def new_identity(store: str, pool: str, node: str) -> Identity:
    return Identity(store, pool, secrets.token_bytes(OWNER_BYTES), VERSION, node)


def write_identity(path: str, identity: Identity) -> None:
    """Replace ``store.json`` durably. Raises ``ConfigError`` or ``Unavailable``."""
    content = {
        "format": _FORMAT,
        "version": identity.version,
        "store": identity.store,
        "pool": identity.pool,
        "owner": identity.owner.hex(),
        "node": identity.node,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    try:
        replace_file(os.path.join(path, IDENTITY_FILE), json.dumps(content, indent=1).encode() + b"\n", sync=True)
    except OSError as error:
        raise refusal(path, error) from error


def replace_file(path: str, content: bytes, *, sync: bool) -> None:
    """Write a whole file beside ``path`` and rename it into place. Raises ``OSError``; nothing half-written stays."""
    temporary = path + ".tmp"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            write_all(descriptor, content)
            if sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if sync:
        sync_directory(os.path.dirname(path))


def write_all(descriptor: int, content: bytes) -> None:
    """Write all of ``content`` at the descriptor's position. Raises ``OSError``."""
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def sync_directory(path: str) -> None:
    """Make renames and new names in a directory durable. Raises ``OSError``."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _ignored(name: str) -> bool:
    return name in _IGNORED or name.startswith(".hicache-mooncake-")  # what a probe left that was killed


def _names(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError as error:
        raise refusal(path, error) from error
