"""Ask a workload of a server and write down what came back.

summary = replay(workload, Endpoint("http://127.0.0.1:30000"), Options(loop="closed", in_flight=4), Path("run.parquet"),
                 configuration="L1+L2")
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.multiturn.asking import Asking, Endpoint, Options
from benchmarks.multiturn.client import Client
from benchmarks.multiturn.loops import barrier_loop, closed_loop, open_loop
from benchmarks.multiturn.provenance import grown, machine, versions
from benchmarks.multiturn.results import Writer
from benchmarks.multiturn.tokens import Vocabulary
from benchmarks.multiturn.workload import Workload

__all__ = ["Endpoint", "Options", "Summary", "replay", "replay_async"]


@dataclass(frozen=True)
class Summary:
    """What a replay came to; everything else is in the file."""

    path: Path
    requests: int
    failed: int
    retried: int
    seconds: float


def replay(
    workload: Workload,
    endpoint: Endpoint,
    options: Options,
    out: Path,
    *,
    configuration: str = "",
    metadata: Mapping[str, Any] | None = None,
    progress: Callable[[int, int | None, str], None] | None = None,
) -> Summary:
    """Run ``workload`` to its end and write a row a request to ``out`` (Parquet, see
    :mod:`benchmarks.multiturn.results`).

    ``configuration`` names the column of a comparison. ``metadata`` (JSON-able) goes into the file beside the run's
    options, versions and machine. ``progress`` hears (requests done, requests in all or None, what is going on).

    A request that fails is a row with its error, and no reason to stop. Raises ``Unavailable`` when the server does
    not answer at all before the first request.
    """
    return asyncio.run(
        replay_async(
            workload, endpoint, options, out, configuration=configuration, metadata=metadata, progress=progress
        )
    )


async def replay_async(
    workload: Workload,
    endpoint: Endpoint,
    options: Options,
    out: Path,
    *,
    configuration: str = "",
    metadata: Mapping[str, Any] | None = None,
    progress: Callable[[int, int | None, str], None] | None = None,
) -> Summary:
    """:func:`replay` for a caller that has an event loop already. Cancelled, it writes what there is, marked as
    interrupted.
    """
    client = Client(
        endpoint.url,
        endpoint.api,
        model=endpoint.model,
        api_key=endpoint.api_key,
        connections=options.in_flight + 1,
        timeout=options.request_timeout,
        retries=options.retries,
    )
    async with client:
        server = await client.greet()
        before = await client.counters()
        pool_before = await _summed(client, endpoint.pool_metrics)
        writer = Writer(out)
        asked = Asking(client, Vocabulary(*options.vocabulary), options, writer, workload.requests, progress)
        started = time.time()
        how = {"open": open_loop, "closed": barrier_loop if workload.barrier else closed_loop}[options.loop]
        interrupted = True
        try:
            await how(workload, asked)
            interrupted = False
        finally:
            seconds = asked.now()
            if interrupted and not writer.rows:
                writer.abandon()
            else:
                grown_by = {} if interrupted else grown(before, await client.counters())
                pool = {} if interrupted else grown(pool_before, await _summed(client, endpoint.pool_metrics))
                writer.close(
                    {
                        "workload": {"name": workload.name, **workload.settings, "notes": dict(workload.notes)},
                        "configuration": configuration,
                        "clock": "due" if options.loop == "open" else "sent",
                        "started": started,
                        "seconds": seconds,
                        "interrupted": interrupted,
                        "options": asdict(options),
                        "endpoint": {"url": endpoint.url, "api": endpoint.api, "model": client.model},
                        "server": server,
                        "metrics": grown_by,
                        "pool": pool,
                        "versions": versions(),
                        "machine": machine(),
                        **(metadata or {}),
                    }
                )
    return Summary(out, asked.done, asked.failed, asked.retried, seconds)


async def _summed(client: Client, pages: Sequence[str]) -> dict[str, float]:
    """The counters of several pages, added up."""
    total: dict[str, float] = {}
    for page in pages:
        for name, value in (await client.counters(page)).items():
            total[name] = total.get(name, 0.0) + value
    return total
