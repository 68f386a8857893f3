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
from pathlib import Path
from typing import Any

import hicache_mooncake
from hicache_mooncake.config import Settings
from hicache_mooncake.errors import ConfigError, Unavailable
from hicache_mooncake.protocol.channel import default_socket, socket_address

logger = logging.getLogger(__name__)

START_TIMEOUT = 8.0
"""Seconds a started node has to be ready: an attach that cannot work has to say so within ten."""

_RETRY = 0.02


class NodeFinder:
    """Where this host's node listens, from the settings. Only a node at the default place is ever started by us."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.address = settings.node or default_socket(settings.pool)
        self.may_start = not settings.node
        self.started = False
        self._starting = threading.Lock()

    def dial(self, deadline: float) -> socket.socket:
        """A connection to the running node. Raises ``Unavailable`` when none answers by ``deadline``."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
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
        except Unavailable:
            if not self.may_start:
                raise
        with self._starting:
            self._start()
        return self.dial(deadline)

    def _start(self) -> None:
        """Start a node that outlives this process' process tree, and wait until it is ready."""
        ready, report = os.pipe()
        package_root = str(Path(hicache_mooncake.__file__).parent.parent)
        paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
        try:
            child = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "hicache_mooncake.cli",
                    "node",
                    "--embedded",
                    "--report-fd",
                    str(report),
                ],
                stdin=subprocess.PIPE,
                stdout=2,
                pass_fds=(report,),
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )
        except OSError as error:
            os.close(ready)
            raise Unavailable(f"a node cannot be started: {error}") from error
        finally:
            os.close(report)
        try:
            # Settings go over a pipe: an argument list or environment would show the secrets in them.
            child.communicate(json.dumps(self._settings.explicit()).encode(), timeout=START_TIMEOUT)
            self._await_report(ready)
        except subprocess.TimeoutExpired as error:
            child.kill()
            child.wait()
            raise Unavailable(f"a started node was not ready within {START_TIMEOUT:g} s") from error
        finally:
            os.close(ready)

    def _await_report(self, ready: int) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        text = b""
        while not text.endswith(b"\n"):
            poller = select.poll()
            poller.register(ready, select.POLLIN | select.POLLHUP)
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise Unavailable(f"a started node was not ready within {START_TIMEOUT:g} s")
            piece = os.read(ready, 65536)
            if not piece:
                raise Unavailable("a started node ended before it was ready", hint="its reason is in this log")
            text += piece
        report: dict[str, Any] = json.loads(text)
        if report.get("state") == "ready":
            self.started = True
            logger.info("node %s was started for this engine", report.get("node"))
        elif report.get("field") == "node":
            return  # another rank was faster: its node is the one to use
        elif report.get("field"):
            raise ConfigError(report["field"], report.get("value"), report["allowed"], hint=report.get("hint", ""))
        else:
            raise Unavailable(f"a node cannot be started: {report.get('error', 'no reason given')}")
