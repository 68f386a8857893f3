"""The environment of a server process, and the warm process that servers are forked from."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from testbed import SITE

_ROOT = SITE.parent.parent
_READY_WITHIN = 180.0
_FORK_WITHIN = 30.0
_BUILD_WITHIN = 600.0


def missing() -> str:
    """Why servers cannot run in this Python, or an empty string when they can."""
    absent = [name for name in ("torch", "sglang") if importlib.util.find_spec(name) is None]
    return f"{', '.join(absent)} not installed (make venv installs them)" if absent else ""


def extensions_directory() -> Path:
    """Where SGLang's page-hash extension is built: kept with the virtual environment, so once for all
    servers.
    """
    return Path(sys.prefix) / "torch_extensions"


def server_environment(overrides: Mapping[str, str] | None = None) -> dict[str, str]:
    """Everything a server process needs in its environment; ``overrides`` win."""
    path = [str(SITE), str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore",
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "cpu_models",
        "TORCHDYNAMO_DISABLE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCH_EXTENSIONS_DIR": str(extensions_directory()),
        **(overrides or {}),
    }


def build_page_hash() -> None:
    """Build SGLang's C++ page hash unless it is there. Half a minute, once a virtual environment; else at
    once.

    SGLang would build it inside the first prompt of the first server, and every server started meanwhile
    would wait.
    """
    stamp = extensions_directory() / "hicache_hash_cpp.built"
    if stamp.exists():
        return
    stamp.parent.mkdir(parents=True, exist_ok=True)
    with open(stamp.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.exists():
            return
        code = (
            "from array import array\n"
            "from sglang.srt.mem_cache.cpp_utils.native_hash import get_native_hash\n"
            "get_native_hash(array('q', range(16)), None, 16)"
        )
        built = subprocess.run(
            [sys.executable, "-c", code],
            env=server_environment(),
            capture_output=True,
            text=True,
            timeout=_BUILD_WITHIN,
            check=False,
        )
        if built.returncode:
            raise RuntimeError(f"SGLang's page hash does not build (g++, ninja, libssl-dev?):\n{built.stderr[-3000:]}")
        stamp.touch()


class WarmProcess:
    """A process that has imported SGLang and forks servers on demand. It and they die with the process that
    made it.

    Thread-safe. One is enough for a test run: :func:`warm_process` keeps it.
    """

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the process
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "testbed.launch", "--warm", str(theirs.fileno())],
                env=server_environment(),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
            )
        self._ready = False

    def fork(self, task: str, argv: Sequence[str], env: Mapping[str, str], log: Path) -> int:
        """Start a process; returns its pid, also its process group's.

        ``task`` is ``server`` (``argv`` being SGLang's flags), ``fresh`` (the same in a new Python that
        spawns its parts: slow, and what production does) or ``component`` (the arguments of
        ``testbed.component``). Raises ``RuntimeError`` when the warm process could not import SGLang or does
        not answer.
        """
        with self._lock:
            if not self._ready:
                self._answer(_READY_WITHIN)
                self._ready = True
            request = {"task": task, "argv": list(argv), "env": dict(env), "log": str(log.absolute())}
            self._control.send(json.dumps(request).encode())
            return int(self._answer(_FORK_WITHIN))

    def _answer(self, within: float) -> bytes:
        self._control.settimeout(within)
        try:
            answer = self._control.recv(64)
        except TimeoutError:
            answer = b""
        if not answer:
            words = self._last_words()
            self.close()
            raise RuntimeError(f"the warm process gave up:\n{words}")
        return answer

    def close(self) -> None:
        """Kill every server that was forked and the process itself. Idempotent."""
        self._control.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _last_words(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-3000:].decode(errors="replace")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None


_warm: WarmProcess | None = None
_warm_lock = threading.Lock()


def warm_process() -> WarmProcess:
    """The one warm process of this Python process, started when first asked for."""
    global _warm  # noqa: PLW0603
    with _warm_lock:
        if _warm is None or not _warm.alive:
            _warm = WarmProcess()
        return _warm


def close_warm_process() -> None:
    """Stop the warm process and every server forked from it, if there is one."""
    global _warm  # noqa: PLW0603
    with _warm_lock:
        if _warm is not None:
            _warm.close()
            _warm = None


def has_exited(pidfd: int) -> bool:
    """Whether the process behind a pidfd is gone (a zombie counts as gone)."""
    return bool(select.select([pidfd], [], [], 0)[0])


def wait_for_exit(pid: int, within: float) -> None:
    """Wait until a process that was forked for us is gone; kill it when that takes longer than ``within``
    seconds.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if not select.select([pidfd], [], [], within)[0]:
            kill_tree(pid)
    finally:
        os.close(pidfd)


def descendants(pid: int) -> list[int]:
    """Every process below ``pid``, parents before their children."""
    found: list[int] = []
    for below in _children(pid):
        found += [below, *descendants(below)]
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    except (FileNotFoundError, ProcessLookupError):
        return found  # it ended while we looked
    return found


def kill_tree(pid: int) -> None:
    """SIGKILL a server: its process group, and every process below it that left the group."""
    below = descendants(pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    for process in below:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
