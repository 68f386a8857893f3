"""The metrics page: what a scraper reads adds up, and is what the node counted."""

from __future__ import annotations

import socket
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hicache_mooncake.errors import ConfigError
from hicache_mooncake.node.counters import Counters
from hicache_mooncake.node.metrics import MetricsPort, NodeMetrics, describe
from hicache_mooncake.node.tokens import count
from hicache_mooncake.protocol.messages import Keys
from tests.pool import Engine, NodeProcess, hashes

PREFIX = "hicache_mooncake_"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def scrape(port: int) -> dict[tuple[str, ...], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        text = page.read().decode()
    return {
        (
            sample.name.removeprefix(PREFIX),
            *(value for name, value in sample.labels.items() if name not in ("pool", "node")),
        ): (sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_object_asked_for_ends_in_one_result(redis_url: str) -> None:
    port = free_port()
    with NodeProcess(redis_url, settings={"metrics_port": port}) as node, Engine(node.socket) as engine:
        names = hashes("metrics", 20)
        engine.store(names)
        engine.store(names[:5])
        engine.check([*names, *hashes("absent", 7)])
        engine.exists([*names, *hashes("absent", 3)])
        seen = scrape(port)
        assert seen[("objects_total", "put", "stored")] == 20 and seen[("objects_total", "put", "present")] == 5
        assert seen[("objects_total", "get", "local")] == 20 and seen[("objects_total", "get", "absent")] == 7
        assert seen[("objects_total", "exists", "found")] == 20 and seen[("objects_total", "exists", "missing")] == 3
        for op, asked in (("put", 25), ("get", 27), ("exists", 23)):
            assert sum(value for key, value in seen.items() if key[:2] == ("objects_total", op)) == asked
            assert seen[("request_seconds_count", op)] >= 1
        assert seen[("bytes_total", "get", "local")] == 20 * engine.page_bytes
        assert seen[("segment_used_bytes",)] == 20 * engine.page_bytes and seen[("pages",)] == 20
        assert seen[("engines",)] == 1 and seen[("pins",)] == 0


def test_tokens_are_counted_once_a_page_by_the_rank_that_counts(redis_url: str) -> None:
    port = free_port()
    with (
        NodeProcess(redis_url, settings={"metrics_port": port}) as node,
        Engine(node.socket) as first,
        Engine(node.socket) as second,
    ):
        first.session.declare(first.namespace.digest, first.namespace.fields, page_tokens=64)
        names = hashes("tokens", 10)
        for engine in (first, second):
            engine.store(names)
            engine.check([*names, *hashes("absent", 3)])
        seen = scrape(port)
        assert seen[("tokens_total", "put", "stored")] == 640 and seen[("tokens_total", "put", "failed")] == 0
        assert seen[("tokens_total", "get", "hit")] == 640 and seen[("tokens_total", "get", "miss")] == 192


def test_a_page_of_several_parts_counts_when_all_of_them_came() -> None:
    counters = Counters()
    keys = Keys("d", ["h0", "h1"], ["a", "b", "c"])
    count(counters, "get", [(keys, bytes([0, 0, 0, 1, 1, 1])), (Keys("other", ["x"], ["a"]), b"\0")], {"d": 16})
    assert counters.snapshot() == {"get_tokens": 48, "get_tokens_ok": 16}


def test_a_port_in_use_is_refused_by_name() -> None:
    metrics = NodeMetrics(dict)
    page = MetricsPort(metrics, "127.0.0.1", 0)
    with pytest.raises(ConfigError, match="metrics_port"):
        MetricsPort(metrics, "127.0.0.1", page.port)
    page.close()


def test_the_reference_is_current() -> None:
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    assert text.endswith(describe() + "\n")
