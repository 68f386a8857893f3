"""The same workload with one cache tier more each time: what each brings to the time to the first token.

Every configuration is a fresh SGLang, and where it has a pool a fresh node and directory. The sizes follow the
published run (a working set of 121 GB over a pool of 80 GB of DRAM): DRAM alone does not hold the conversations, DRAM
and SSD do.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.demo_machines import UserServer, close_cpu_servers
from benchmarks.multiturn.replay import Endpoint, Options, Summary, replay
from benchmarks.multiturn.workload import Workload
from hicache_mooncake.errors import ConfigError
from hicache_mooncake.metadata.redis_server import PrivateRedis
from testbed.models import write_llama
from testbed.server import SGLangServer
from tests.pool import NodeProcess, free_port

WORKING_SET_TO_DRAM = 121 / 80
"""Of the published run: the cliff where DRAM alone runs out lies here."""

LAYERS, HIDDEN, HEADS, KV_HEADS = 8, 512, 8, 4
"""The model on a CPU: prefill heavy enough that a hit is worth something, decode light."""

CPU_TOKEN_BYTES = LAYERS * 2 * KV_HEADS * (HIDDEN // HEADS) * 4
PAGE = 64

Progress = Callable[[int, int | None, str], None]


@dataclass(frozen=True)
class Configuration:
    """A column. ``backend`` is SGLang's L3; ``ssd`` and ``populated`` are about the pool."""

    name: str
    hierarchical: bool = True
    backend: str | None = None
    ssd: bool = False
    populated: bool = False


COLUMNS = {
    "device": Configuration("device only", hierarchical=False),
    "host": Configuration("L1+L2"),
    "file": Configuration("L1+L2+file", backend="file"),
    "dram": Configuration("L1+L2+pool (DRAM)", backend="mooncake"),
    "ssd": Configuration("L1+L2+pool (DRAM+SSD)", backend="mooncake", ssd=True),
    "populated": Configuration("pool, populated before", backend="mooncake", ssd=True, populated=True),
}
DEFAULT_COLUMNS = ("device", "host", "dram", "ssd", "populated")


@dataclass(frozen=True)
class Sizes:
    """Tokens of the device's and the host's pool, and bytes of the node's DRAM."""

    device_tokens: int
    host_ratio: float
    segment: int
    ssd: int

    @classmethod
    def for_cpu(cls, longest_prompt: int, working_set: int, in_flight: int) -> Sizes:
        """The smallest device pool that serves ``in_flight`` prompts at once; the rest as in the published run."""
        device = in_flight * (-(-longest_prompt // PAGE) + 2) * PAGE
        segment = int(working_set * CPU_TOKEN_BYTES / WORKING_SET_TO_DRAM)
        return cls(device, 1.1, segment, 4 * working_set * CPU_TOKEN_BYTES + (1 << 30))


@dataclass(frozen=True)
class Bench:
    """What all columns share. ``model``: the user's, with ``words`` for SGLang; None: a tiny one on the CPU."""

    directory: Path
    out: Path
    sizes: Sizes
    options: Options
    model: str | None
    words: Sequence[str]
    context: int
    ssd_directory: Path


def run_columns(bench: Bench, columns: Sequence[str], workload: Workload, progress: Progress) -> list[Summary]:
    """Replay ``workload`` in every configuration of ``columns``; a Parquet file each, under ``bench.out``.

    Raises ``ConfigError`` for a column that there is not, ``ServerFailed`` with the end of its log.
    """
    for name in columns:
        if name not in COLUMNS:
            raise ConfigError("columns", name, f"of {', '.join(COLUMNS)}")
    bench.out.mkdir(parents=True, exist_ok=True)
    done: list[Summary] = []
    with ExitStack() as undo:
        undo.callback(close_cpu_servers)
        for at, name in enumerate(columns):
            column = COLUMNS[name]
            progress(at, len(columns), f"{column.name}: starting")
            with _pool(bench, column) as (extra, metrics):
                if column.populated:
                    _ask(bench, replace(column, name="populating"), extra, metrics, workload, progress, "")
                done.append(_ask(bench, column, extra, metrics, workload, progress, name))
    return done


def _ask(
    bench: Bench,
    column: Configuration,
    extra: Mapping[str, Any] | None,
    metrics: tuple[str, ...],
    workload: Workload,
    progress: Progress,
    name: str,
) -> Summary:
    target = bench.out / f"{name}.parquet" if name else bench.directory / "populating.parquet"
    with _server(bench, column, extra) as server:
        return replay(
            workload,
            Endpoint(server.url, pool_metrics=metrics),
            bench.options,
            target,
            configuration=column.name,
            metadata={"sizes": vars(bench.sizes)},
            progress=progress,
        )


@contextmanager
def _pool(bench: Bench, column: Configuration) -> Iterator[tuple[Mapping[str, Any] | None, tuple[str, ...]]]:
    """The pool of a configuration that has one: what SGLang's backend is told, and the nodes' metrics pages."""
    if column.backend == "file":
        place = Path(tempfile.mkdtemp(prefix="file-", dir=bench.ssd_directory))
        try:
            yield {"file_storage_path": str(place)}, ()
        finally:
            shutil.rmtree(place, ignore_errors=True)
        return
    if column.backend is None:
        yield None, ()
        return
    with ExitStack() as undo:
        redis = undo.enter_context(PrivateRedis())
        port = free_port()
        settings: dict[str, object] = {"segment_size": bench.sizes.segment, "metrics_port": port, "pool": "multiturn"}
        if column.ssd:
            place = Path(tempfile.mkdtemp(prefix="hicache-mooncake-", dir=bench.ssd_directory))
            undo.callback(shutil.rmtree, place, ignore_errors=True)
            settings |= {"ssd_path": str(place / "ssd"), "ssd_size": bench.sizes.ssd}
        node = undo.enter_context(NodeProcess(redis.url, "n", settings))
        yield {"node": node.socket, "pool": "multiturn"}, (f"http://127.0.0.1:{port}/metrics",)


@contextmanager
def _server(bench: Bench, column: Configuration, extra: Mapping[str, Any] | None) -> Iterator[SGLangServer]:
    log = bench.directory / f"{column.name.replace('/', ' ')}.log"
    server: SGLangServer
    if bench.model is not None:
        server = UserServer(bench.model, bench.words, extra if column.backend == "mooncake" else None, log)
        if column.backend == "file":
            server._argv += ["--hicache-storage-backend", "file"]
            server._argv += ["--hicache-storage-backend-extra-config", json.dumps(dict(extra or {}))]
    else:
        model = bench.directory / "model"
        if not model.exists():
            write_llama(
                model, layers=LAYERS, hidden=HIDDEN, heads=HEADS, kv_heads=KV_HEADS, context=bench.context + 2 * PAGE
            )
        server = SGLangServer(
            model,
            backend=column.backend,
            extra_config=extra,
            page_size=PAGE,
            tokens=bench.sizes.device_tokens,
            host_ratio=bench.sizes.host_ratio,
            attend_new_rows=True,
            layout="page_first" if column.backend else None,
            extra_args=["--dtype", "float32", "--served-model-name", "tiny-llama"],
            env={"TMPDIR": str(bench.directory)},
            log_path=log,
        )
    if not column.hierarchical:
        server._argv = _without_hierarchy(server._argv)
    with server:
        yield server


def _without_hierarchy(words: Sequence[str]) -> list[str]:
    """SGLang's arguments without those of its host cache."""
    kept: list[str] = []
    skip = False
    for word in words:
        if skip and not word.startswith("--"):
            continue
        skip = word.startswith("--hicache-")
        if not skip and word != "--enable-hierarchical-cache":
            kept.append(word)
    return kept
