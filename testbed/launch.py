"""Start one SGLang server: ``python -m testbed.launch <sglang's own flags>``; or many, forked from one warm
process.

A third of a minute of a server's start is Python importing torch and SGLang, once in each of its three
processes. ``--warm FD`` imports them once, then forks a server for every request that comes over the socket
``FD``; a server forks its scheduler and detokenizer where SGLang would spawn them. Same code, same processes,
a tenth of the time. Without ``--warm`` nothing is forked and SGLang starts as it does in production.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys
import threading
from typing import Any

_PR_SET_PDEATHSIG = 1
_MAX_REQUEST = 1 << 20
# What a server's processes import anyway; imported before the fork, they cost nothing after it.
_PRELOAD = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler",
    "sglang.srt.mem_cache.memory_pool_host",
    "sglang.srt.mem_cache.unified_radix_cache",
    "sglang.srt.models.registry",
    "sglang.srt.layers.attention.torch_native_backend",
    "transformers.models.llama.configuration_llama",
    "transformers.models.deepseek_v2.configuration_deepseek_v2",
    "transformers.models.auto.tokenization_auto",
)


def serve(arguments: list[str], *, forked: bool) -> None:
    """Run one server in this process until it is stopped."""
    import multiprocessing

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    if forked:
        # SGLang asks for "spawn" because of CUDA, which a forked process could not use.
        multiprocessing.set_start_method("fork", force=True)
        multiprocessing.set_start_method = lambda method, force=False: None
    load_plugins()
    try:
        run_server(prepare_server_args(arguments))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def fork_on_request(control: socket.socket) -> None:
    """Fork a process for every request on ``control``; when it closes, kill what is left and return.

    A request is one JSON datagram: ``task`` (``server``; ``fresh``: a server in a new Python, as in
    production; ``component``), ``argv``, ``env`` (all of it) and ``log`` (a path). The answer is the
    process's pid, which is also its process group's.
    """
    for name in _PRELOAD:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    _be_single_threaded()
    servers: list[int] = []
    signal.signal(signal.SIGCHLD, lambda *_: _reap(servers))
    control.send(b"ready")
    while request := control.recv(_MAX_REQUEST):
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _become(control, json.loads(request))
        servers.append(pid)
        control.send(str(pid).encode())
    for pid in servers:
        _kill_group(pid)


def _be_single_threaded() -> None:
    """A fork copies only the calling thread: another one could hold a lock for ever in the copy."""
    if threading.active_count() > 1:
        names = ", ".join(thread.name for thread in threading.enumerate())
        raise RuntimeError(f"importing SGLang started threads, so it cannot be forked: {names}")


def _reap(servers: list[int]) -> None:
    for pid in list(servers):
        try:
            if os.waitpid(pid, os.WNOHANG)[0]:
                servers.remove(pid)
                _kill_group(pid)
        except ChildProcessError:
            servers.remove(pid)


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _become(control: socket.socket, request: dict[str, Any]) -> None:
    """The child's side of the fork: own process group, log, environment; runs the task and never returns."""
    control.close()
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    task, argv = request["task"], request["argv"]
    if task == "fresh":
        os.execve(sys.executable, [sys.executable, "-m", "testbed.launch", *argv], request["env"])
    os.environ.clear()
    os.environ.update(request["env"])
    code = 1
    try:
        if task == "component":
            importlib.import_module("testbed.component").main(argv)
        else:
            serve(argv, forked=True)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:  # noqa: BLE001  the traceback belongs in the log, then the process ends
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Entry point of ``python -m testbed.launch``."""
    if len(sys.argv) == 3 and sys.argv[1] == "--warm":
        fork_on_request(socket.socket(fileno=int(sys.argv[2])))
    else:
        serve(sys.argv[1:], forked=False)


if __name__ == "__main__":
    main()
