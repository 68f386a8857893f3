"""Ask a workload of a server and write down what came back.

summary = replay(workload, Endpoint("http://127.0.0.1:30000"), Options(loop="closed", in_flight=4), Path("run.parquet"),
                 configuration="L1+L2")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.multiturn.workload import Workload


@dataclass(frozen=True)
class Endpoint:
    """A server. ``api`` is ``sglang`` (POST /generate) or ``openai`` (POST /v1/completions, for SGLang, vLLM and
    others).

    ``model`` is the name that the OpenAI API wants; empty: the first that the server lists.
    """

    url: str
    api: Literal["sglang", "openai"] = "sglang"
    model: str = ""
    api_key: str = field(default="", repr=False)


@dataclass(frozen=True)
class Options:
    """How a workload is asked.

    ``loop``: ``open`` starts a turn at its time ``at``, ``closed`` after its think time. ``in_flight`` bounds
    requests (and connections) at a time, ``sessions`` (closed loop) how many sessions run at a time, 0: all.
    ``rate`` (closed loop) starts at most that many requests a second, at Poisson times, 0: unbounded. ``vocabulary``
    are the token ids that blocks may become, first and one past the last. ``form``: blocks go as ``ids`` or as
    ``text``. ``output_tokens`` replaces the workload's own, 0: as they are. Times in seconds.
    """

    loop: Literal["open", "closed"] = "closed"
    in_flight: int = 64
    sessions: int = 0
    rate: float = 0.0
    vocabulary: tuple[int, int] = (1000, 30000)
    form: Literal["ids", "text"] = "ids"
    output_tokens: int = 0
    request_timeout: float = 600.0
    retries: int = 2
    seed: int = 1


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
    raise NotImplementedError
