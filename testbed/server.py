"""One real SGLang server with HiCache on this machine's CPU, as a context manager.

with SGLangServer(write_llama(tmp / "model"), backend="file", log_path=tmp / "server.log") as server:
    first = server.generate(prompt_ids(1, 2048))
    server.flush()
    again = server.generate(prompt_ids(1, 2048))      # again.cached.storage == 2032
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from types import TracebackType
from typing import Any

from testbed import environment

POLL = 0.05
_READY_WORDS = re.compile(r"Load weight end|Attached hybrid pool stack|Uvicorn running")


class ServerFailed(RuntimeError):
    """The server did not start, died or answered with an error; the message ends with its log's tail."""


@dataclass(frozen=True)
class Cached:
    """Prompt tokens that were not computed, by where their KV was found."""

    device: int = 0
    host: int = 0
    storage: int = 0

    @property
    def total(self) -> int:
        return self.device + self.host + self.storage


@dataclass(frozen=True)
class Generation:
    """What one request got. ``ttft`` is seconds to the first token, known only when streamed; ``elapsed`` to
    the last.
    """

    output_ids: tuple[int, ...]
    prompt_tokens: int
    cached: Cached
    ttft: float | None
    elapsed: float


def prompt_ids(seed: int, length: int) -> list[int]:
    """``length`` token ids that depend only on ``seed`` and never hit a special token of the test bed's
    models.
    """
    source = random.Random(seed)
    return [source.randrange(3, 500) for _ in range(length)]


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class SGLangServer:
    """A server of ``model_dir`` with HiCache, its L3 being ``backend`` (``None``: none until :meth:`attach`).

    ``layout`` is SGLang's ``--hicache-mem-layout`` (default: SGLang's own choice), ``extra_config`` the
    backend's settings, ``env`` goes on top of the inherited environment, ``extra_args`` at the end of the
    command line, so it wins. ``tokens`` and ``host_ratio`` size the device pool and, as a multiple of it, the
    host pool. ``fresh`` starts it as production does, in a new Python that spawns its parts, instead of
    forking it from the warm process. ``attend_new_rows`` makes the time to the first token follow the tokens
    that are computed, as on a GPU, at the price of rounding that differs with what was cached: use it with
    float32 (``extra_args=("--dtype", "float32")``) where outputs are compared. ``log_path`` is created if
    missing and appended to; without it the log goes to a temporary file.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        port: int = 0,
        tp: int = 1,
        page_size: int = 16,
        layout: str | None = None,
        backend: str | None = None,
        extra_config: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        extra_args: Sequence[str] = (),
        admin_api_key: str | None = "testbed",
        log_path: Path | None = None,
        tokens: int = 8192,
        host_ratio: float = 2.0,
        attend_new_rows: bool = False,
        fresh: bool = False,
    ) -> None:
        self.model_dir = model_dir
        self.port = port or free_port()
        self.tp = tp
        self.admin_api_key = admin_api_key
        self.log_path = log_path or Path(tempfile.mkdtemp(prefix="sglang-")) / "server.log"
        self.pid = 0
        self.boot_seconds = 0.0
        self._pidfd = -1
        self._fresh = fresh
        self._env = {"TESTBED_ATTEND_NEW_ROWS": str(int(attend_new_rows)), **(env or {})}
        flags: dict[str, object] = {
            "model-path": model_dir,
            "load-format": "dummy",
            "random-seed": 1,
            "dtype": "bfloat16",
            "device": "cpu",
            "host": "127.0.0.1",
            "port": self.port,
            "tp": tp,
            "attention-backend": "torch_native",
            "sampling-backend": "pytorch",
            "grammar-backend": "none",
            "mem-fraction-static": 0.1,
            "max-total-tokens": tokens,
            "max-running-requests": 8,
            "page-size": page_size,
            "disable-overlap-schedule": True,
            "skip-server-warmup": True,
            "sleep-on-idle": True,
            "enable-metrics": True,
            "enable-cache-report": True,
            "enable-hierarchical-cache": True,
            "hicache-ratio": host_ratio,
            "hicache-storage-prefetch-policy": "wait_complete",
            "admin-api-key": admin_api_key,
            "hicache-storage-backend": backend,
        }
        if layout:
            # SGLang would otherwise swap page_first and page_first_direct to fit the copy engine.
            flags["hicache-mem-layout"] = layout
            flags["hicache-io-backend"] = "direct" if layout == "page_first_direct" else "kernel"
        if extra_config is not None:
            flags["hicache-storage-backend-extra-config"] = json.dumps(dict(extra_config))
        self._argv = [word for flag, value in flags.items() for word in _words(flag, value)] + [*extra_args]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # --- life cycle ----------------------------------------------------------------------------------------

    def __enter__(self) -> SGLangServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, *, within: float = 180.0, progress: Callable[[str], None] | None = None) -> None:
        """Start it and wait until it answers. ``progress`` hears a line for every step of the log that
        matters.

        Raises :class:`ServerFailed` when it dies or is not ready ``within`` seconds; nothing is left running
        then.
        """
        environment.build_page_hash()
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        env = environment.server_environment(
            {
                # The health page would otherwise wait a second for a token that it generates.
                "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
                "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank % _cpus()) for rank in range(self.tp)),
                **self._env,
            }
        )
        # A restarted server appends to the same log: only what this start writes may count.
        seen = self.log_path.stat().st_size if self.log_path.exists() else 0
        warm = environment.warm_process()
        self.pid = warm.fork("fresh" if self._fresh else "server", self._argv, env, self.log_path)
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            raise ServerFailed(f"SGLang died at once; the end of its log:\n{self.log_tail()}") from None
        started = time.monotonic()
        while not self._answers():
            if environment.has_exited(self._pidfd) or time.monotonic() - started > within:
                exited = environment.has_exited(self._pidfd)
                what = "died while starting" if exited else f"did not become ready within {within:.0f} s"
                self.kill()
                raise ServerFailed(f"SGLang {what}; the end of its log:\n{self.log_tail()}")
            if progress:
                seen = self._report(seen, progress)
            time.sleep(POLL)
        self.boot_seconds = time.monotonic() - started
        if progress:
            progress(f"ready on port {self.port} after {self.boot_seconds:.1f} s")

    def stop(self, *, within: float = 15.0) -> None:
        """Ask it to end (SIGTERM), then kill whatever is left of its process tree. Idempotent."""
        if self._pidfd < 0:
            return
        if self.alive:
            os.kill(self.pid, signal.SIGTERM)
            deadline = time.monotonic() + within
            while self.alive and time.monotonic() < deadline:
                time.sleep(POLL)
        self.kill()

    def kill(self) -> None:
        """SIGKILL the whole process tree at once: no draining, no closing. Idempotent."""
        if self._pidfd < 0:
            return
        environment.kill_tree(self.pid)
        deadline = time.monotonic() + 10
        while self.alive and time.monotonic() < deadline:
            time.sleep(POLL)
        os.close(self._pidfd)
        self._pidfd = -1

    @property
    def alive(self) -> bool:
        return self._pidfd >= 0 and not environment.has_exited(self._pidfd)

    @property
    def pids(self) -> list[int]:
        """Every process of the server, the HTTP one first."""
        return [self.pid, *environment.descendants(self.pid)] if self.alive else []

    def log_tail(self, lines: int = 40) -> str:
        """The last lines of the log, without SGLang's page-long dump of its settings."""
        try:
            text = self.log_path.read_text(errors="replace")
        except FileNotFoundError:
            return "(no log)"
        kept = [line[:400] for line in text.splitlines() if "server_args=" not in line]
        return "\n".join(kept[-lines:])

    # --- requests ------------------------------------------------------------------------------------------

    def generate(
        self,
        input_ids: Sequence[int],
        max_new_tokens: int = 4,
        *,
        stream: bool = False,
        within: float = 120.0,
        **fields: Any,
    ) -> Generation:
        """Greedy tokens after ``input_ids``, never ending early. ``stream`` also measures the time to the
        first. ``fields`` are further ones of the request, such as ``cache_salt``.
        """
        body = {
            **fields,
            "input_ids": list(input_ids),
            "stream": stream,
            "sampling_params": {"max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": True},
        }
        started = time.monotonic()
        first: float | None = None
        reply: dict[str, Any] = {}
        with self._call("POST", "/generate", body, within) as response:
            if not stream:
                reply = json.load(response)
            for line in response:
                if line.startswith(b"data: {"):
                    first = first or time.monotonic() - started
                    reply = json.loads(line[6:])
        if "meta_info" not in reply:
            raise ServerFailed(f"/generate answered {reply}")
        meta = reply["meta_info"]
        # Absent when nothing was cached, or when the request waited for no tier.
        details = meta.get("cached_tokens_details") or {"device": meta.get("cached_tokens") or 0}
        cached = Cached(details.get("device") or 0, details.get("host") or 0, details.get("storage") or 0)
        return Generation(tuple(reply["output_ids"]), meta["prompt_tokens"], cached, first, time.monotonic() - started)

    def flush(self, *, settle: float = 10.0) -> None:
        """Empty the device and host tiers, once everything written to L2 has reached L3; L3 keeps its pages.

        Waits up to ``settle`` seconds for SGLang's count of backed-up tokens to stand still.
        """
        self.wait_for_backup(within=settle)
        self._text("POST", "/flush_cache?timeout=10")

    def wait_for_backup(self, *, quiet: float = 0.4, within: float = 10.0) -> int:
        """Wait until no token has been backed up to L3 for ``quiet`` seconds; returns how many have been so
        far.
        """
        deadline = time.monotonic() + within
        count, since = self.backed_up_tokens(), time.monotonic()
        while time.monotonic() - since < quiet and time.monotonic() < deadline:
            time.sleep(POLL)
            now = self.backed_up_tokens()
            if now != count:
                count, since = now, time.monotonic()
        return count

    def backed_up_tokens(self) -> int:
        """Tokens that SGLang has written to L3 since it started (rank 0)."""
        return int(self.metric("sglang:backuped_tokens_total"))

    def metric(self, name: str) -> float:
        """The first sample of a Prometheus metric of the server, or 0 when it has none yet."""
        found = re.search(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", self._text("GET", "/metrics"), re.MULTILINE)
        return float(found.group(1)) if found else 0.0

    # --- the storage backend, over HTTP --------------------------------------------------------------------

    def attach(self, backend: str, extra_config: Mapping[str, Any] | None = None) -> str:
        """Attach an L3 backend to the running, idle server; returns SGLang's answer."""
        body = {
            "hicache_storage_backend": backend,
            "hicache_storage_backend_extra_config_json": json.dumps(dict(extra_config or {})),
            "hicache_storage_prefetch_policy": "wait_complete",
        }
        return self._text("PUT", "/hicache/storage-backend", body)

    def detach(self) -> str:
        """Detach the L3 backend from the running, idle server; returns SGLang's answer."""
        return self._text("DELETE", "/hicache/storage-backend")

    def status(self) -> dict[str, Any]:
        """What L3 backend SGLang believes is attached, and with which settings."""
        reply: dict[str, Any] = json.loads(self._text("GET", "/hicache/storage-backend"))
        return reply

    def clear_storage(self) -> None:
        """Tell the L3 backend to drop its pages."""
        self._text("POST", "/hicache/storage-backend/clear")

    # --- underneath ----------------------------------------------------------------------------------------

    def _answers(self) -> bool:
        try:
            self._text("GET", "/health", None, 5.0)
        except ServerFailed:
            return False
        return True

    def _report(self, seen: int, progress: Callable[[str], None]) -> int:
        try:
            with self.log_path.open("rb") as log:
                log.seek(seen)
                new = log.read()
        except FileNotFoundError:
            return seen
        whole = new[: new.rfind(b"\n") + 1]
        for line in whole.decode(errors="replace").splitlines():
            if _READY_WORDS.search(line):
                progress(line[:200])
        return seen + len(whole)

    def _text(self, method: str, path: str, body: Any = None, within: float = 60.0) -> str:
        with self._call(method, path, body, within) as response:
            return response.read().decode()

    @contextmanager
    def _call(self, method: str, path: str, body: Any, within: float) -> Iterator[HTTPResponse]:
        """One HTTP request on a connection of its own. ``within`` bounds every wait for the next bytes."""
        headers = {"Content-Type": "application/json"}
        if self.admin_api_key:
            headers["Authorization"] = f"Bearer {self.admin_api_key}"
        connection = HTTPConnection("127.0.0.1", self.port, timeout=within)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != HTTPStatus.OK:
                said = response.read().decode(errors="replace")[:2000]
                raise ServerFailed(f"{method} {path} answered {response.status}: {said}")
            yield response
        except (OSError, HTTPException) as error:
            tail = self.log_tail()
            raise ServerFailed(f"{method} {path} failed: {error!r}; the end of the log:\n{tail}") from error
        finally:
            connection.close()


def _words(flag: str, value: object) -> list[str]:
    """A flag as command-line words: none when it is unset, one when it only needs to be there."""
    if value is None:
        return []
    return [f"--{flag}"] if value is True else [f"--{flag}", str(value)]


def _cpus() -> int:
    return len(os.sched_getaffinity(0))
