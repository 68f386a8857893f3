"""Finds the node of this host, or starts one: the embedded default."""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import hicache_mooncake
from hicache_mooncake.config import Settings
from hicache_mooncake.engine.link import StartFailed
from hicache_mooncake.errors import ConfigError, Unavailable
from hicache_mooncake.protocol.channel import default_socket, socket_address

logger = logging.getLogger(__name__)

START_TIMEOUT = 8.0
"""Seconds a started node has to be ready: an attach that cannot work has to say so within ten."""


FIRST_START_PAUSE, LONGEST_START_PAUSE = 5.0, 60.0
"""Seconds after a start that failed before the next one, doubling: each costs a process and its lines in the log."""


class NodeFinder:
    """Where this host's node listens, from the settings. Only a node at the default place is ever started by us.

    ``may_start`` turns false for good once an operator's node was found there.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.address = settings.node or default_socket(settings.pool)
        self.may_start = not settings.node
        self.started = False
        self._starting = threading.Lock()
        self._failure: ConfigError | StartFailed | None = None
        self._start_pause = FIRST_START_PAUSE
        self._start_again = 0.0

    def dial(self, deadline: float) -> socket.socket:
        """A connection to the running node. Raises ``Unavailable`` when none answers by ``deadline``."""
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            raise Unavailable(f"no socket for a connection to the node: {error}") from error
        try:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            sock.connect(socket_address(self.address))
        except OSError as error:
            sock.close()
            raise Unavailable(
                f"no node answers at {self.address}: {error}", hint="start one with: hicache-mooncake node"
            ) from error
        return sock

    def find_or_start(self, deadline: float) -> socket.socket:
        """A connection to the node, started first if there is none and none is configured.

        Raises ``Unavailable``, or ``ConfigError`` when a node cannot work with these settings.
        """
        try:
            return self.dial(deadline)
        except Unavailable as error:
            # One that listens but does not take the connection is there: starting another would not help.
            if not self.may_start or not isinstance(error.__cause__, ConnectionRefusedError):
                raise
        with self._starting:
            try:
                return self.dial(deadline)  # another thread has started it meanwhile
            except Unavailable:
                self._start_if_due(min(deadline, time.monotonic() + START_TIMEOUT))
        return self.dial(deadline)

    def _start_if_due(self, deadline: float) -> None:
        """Start a node, or raise again why the last start failed when that was only a moment ago."""
        if self._failure is not None and time.monotonic() < self._start_again:
            raise self._failure.with_traceback(None) from None
        try:
            self._start(deadline)
        except (ConfigError, StartFailed) as error:
            self._failure = error
            self._start_again = time.monotonic() + self._start_pause
            self._start_pause = min(LONGEST_START_PAUSE, 2 * self._start_pause)
            raise
        self._failure, self._start_pause = None, FIRST_START_PAUSE

    def _start(self, deadline: float) -> None:
        """Start a node that outlives this process' process tree, and wait until it is ready."""
        ready, report = os.pipe()
        package_root = str(Path(hicache_mooncake.__file__).parent.parent)
        paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [sys.executable, "-m", "hicache_mooncake.cli", "node", "--embedded", "--report-fd", str(report)]
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=2,
                pass_fds=(report,),
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )
        except OSError as error:
            os.close(ready)
            raise StartFailed(f"a node cannot be started: {error}") from error
        finally:
            os.close(report)
        try:
            # Settings go over a pipe: an argument list or environment would show the secrets in them.
            assert child.stdin is not None
            with suppress(BrokenPipeError), child.stdin as pipe:
                pipe.write(json.dumps(self._settings.explicit()).encode())
            # A node that is late is left to come up: it has the socket already, so the next attempt finds it, and if
            # there is none it ends as any node that nobody uses.
            self._follow(_report(ready, deadline))
        finally:
            os.close(ready)
            # The child ends as soon as the node, its own child, has detached itself.
            threading.Thread(target=child.wait, name="hcm-reap", daemon=True).start()

    def _follow(self, report: dict[str, Any]) -> None:
        if report.get("state") == "ready":
            self.started = True
            logger.info("node %s was started for this engine", report.get("node"))
        elif report.get("field") == "node":
            return  # another rank was faster: its node is the one to use
        elif report.get("field"):
            raise ConfigError(report["field"], report.get("value"), report["allowed"], hint=report.get("hint", ""))
        else:
            raise StartFailed(f"a node cannot be started: {report.get('error', 'no reason given')}")


def _report(ready: int, deadline: float) -> dict[str, Any]:
    """What a started node says of itself over the pipe ``ready``."""
    poller = select.poll()
    poller.register(ready, select.POLLIN | select.POLLHUP)
    text = b""
    while not text.endswith(b"\n"):
        if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise StartFailed("a started node was not ready in time", hint="its reason is in this log")
        piece = os.read(ready, 65536)
        if not piece:
            raise StartFailed("a started node ended before it was ready", hint="its reason is in this log")
        text += piece
    report: dict[str, Any] = json.loads(text)
    return report
