"""A node's metrics page for Prometheus: its counters under stable names, and how long requests take.

Invariant: ``hicache_mooncake_objects_total`` summed over ``result`` is what was asked, for each ``op``; every object
asked for ends in exactly one result.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hicache_mooncake.errors import ConfigError
from hicache_mooncake.protocol.messages import Status

logger = logging.getLogger(__name__)

PREFIX = "hicache_mooncake_"

_RESULTS = {
    "get": ("local", "ssd_local", "remote"),
    "put": ("stored", "spilled", "present"),
}
_TOKENS = {"get": ("hit", "miss"), "put": ("stored", "failed")}
_CAUSES = tuple(status.name.lower() for status in Status if status != Status.OK)

_COUNTERS = {
    "evicted": ("evicted_pages", "Pages that left the segment because it was full"),
    "evicted_extra": ("evicted_extra_pages", "Of those, cold copies that another node held as well"),
    "evicted_soft": ("evicted_soft_pinned_pages", "Of those, soft-pinned ones"),
    "corrupt_dropped": ("corrupt_pages", "Replicas dropped because their bytes did not match their checksum"),
    "served_pages": ("served_pages", "Pages sent to other nodes"),
    "served_absent": ("served_absent_pages", "Pages that other nodes came for in vain"),
    "taken_pages": ("taken_pages", "Pages stored for other nodes"),
    "rdma_read_pages": ("rdma_read_pages", "Pages read from peers by RDMA"),
    "rdma_read_bytes": ("rdma_read_bytes", "Bytes read from peers by RDMA"),
    "rdma_written_pages": ("rdma_written_pages", "Pages written to peers by RDMA"),
    "rdma_written_bytes": ("rdma_written_bytes", "Bytes written to peers by RDMA"),
    "rdma_reads_by_tcp": ("rdma_reads_by_tcp_pages", "Pages read over TCP from peers that have RDMA"),
    "rdma_writes_by_tcp": ("rdma_writes_by_tcp_pages", "Pages written over TCP to peers that have RDMA"),
    "rdma_paths_failed": ("rdma_paths_failed", "Times that a device's path to a peer failed"),
    "ssd_offloaded": ("ssd_offloaded_pages", "Pages written to SSD"),
    "ssd_offloaded_bytes": ("ssd_offloaded_bytes", "Bytes written to SSD"),
    "ssd_offload_dropped": ("ssd_offload_dropped_pages", "Pages not written to SSD because the queue was full"),
    "ssd_offload_late": ("ssd_offload_late_pages", "Pages that had left DRAM before their turn"),
    "ssd_offload_failed": ("ssd_offload_failed_pages", "Pages that the disk did not take"),
    "ssd_evicted_unsaved": ("ssd_evicted_unsaved_pages", "Pages evicted without a copy on SSD, by force_evict"),
    "ssd_promoted": ("ssd_promoted_pages", "Pages that came back from SSD to DRAM"),
    "ssd_served_pages": ("ssd_served_pages", "Pages read from SSD for other nodes"),
    "directory_errors": ("directory_errors", "Calls to Redis that failed"),
    "directory_unreached": ("directory_unreached_lookups", "Objects not looked up: their Redis master was away"),
    "directory_rebuilds": ("directory_rebuilds", "Times that Redis was told everything again"),
    "directory_swept": ("directory_swept_entries", "Entries of dead nodes removed from Redis"),
    "directory_restored": ("directory_restored_entries", "Entries that Redis had lost and was told again"),
    "directory_stale_repaired": ("directory_repaired_entries", "Entries removed because the page was not here"),
}
_GAUGES = {
    "capacity_bytes": ("segment_capacity_bytes", "Size of the segment"),
    "used_bytes": ("segment_used_bytes", "Bytes of the segment that are taken"),
    "pages": ("pages", "Pages held"),
    "hard_pinned_bytes": ("hard_pinned_bytes", "Bytes that an operator pinned hard"),
    "soft_pinned_bytes": ("soft_pinned_bytes", "Bytes that an operator pinned softly"),
    "extra_bytes": ("extra_bytes", "Bytes of extra copies"),
    "ssd_capacity_bytes": ("ssd_capacity_bytes", "Size of the SSD tier"),
    "ssd_used_bytes": ("ssd_used_bytes", "Real bytes that the SSD tier takes"),
    "ssd_pages": ("ssd_pages", "Objects on SSD"),
    "ssd_offload_queue": ("ssd_offload_queue", "Pages that wait to be written to SSD"),
    "ssd_read_queue": ("ssd_read_queue", "Reads from SSD under way or waiting"),
    "ssd_degraded": ("ssd_degraded", "1 while the disk takes no pages"),
    "ssd_io_uring": ("ssd_io_uring", "1 if the disk is spoken to by io_uring"),
    "ssd_direct": ("ssd_direct", "1 if it is by O_DIRECT"),
    "pins": ("pins", "Reads under way, over all pages"),
    "engines": ("engines", "Engines attached"),
    "nodes": ("nodes", "Nodes alive in the pool, this one among them"),
}
_BYTES = {
    "get_local_bytes": ("get", "local"),
    "get_remote_bytes": ("get", "remote"),
    "get_ssd_local_bytes": ("get", "ssd_local"),
    "put_bytes": ("put", "stored"),
    "put_spilled_bytes": ("put", "spilled"),
}
_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class NodeMetrics(Collector):
    """What is on the page: ``stats`` gives the node's counters and gauges by name."""

    def __init__(self, stats: Callable[[], Mapping[str, float]], **labels: str) -> None:
        self._stats = stats
        self._labels = labels
        self.registry = CollectorRegistry(auto_describe=False)
        self._seconds = Histogram(
            PREFIX + "request_seconds",
            "Time a request of an engine takes in the node",
            ["op", *labels],
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self.registry.register(self)

    def observe(self, op: str, seconds: float) -> None:
        """A request of an engine has ended."""
        self._seconds.labels(op, *self._labels.values()).observe(seconds)

    def collect(self) -> Iterable[Metric]:
        values = self._stats()
        own = list(self._labels.values())
        objects = CounterMetricFamily(
            PREFIX + "objects", "Objects asked for, by how it ended", labels=["op", "result", *self._labels]
        )
        for op, results in _RESULTS.items():
            for result in (*results, *_CAUSES):
                objects.add_metric([op, result, *own], values.get(f"{op}_{result}", 0))
        found = values.get("exists_found", 0)
        objects.add_metric(["exists", "found", *own], found)
        objects.add_metric(["exists", "missing", *own], values.get("exists_asked", 0) - found)
        yield objects
        tokens = CounterMetricFamily(
            PREFIX + "tokens",
            "Tokens of the pages asked for, by whether they came",
            labels=["op", "result", *self._labels],
        )
        for op, (ok, missed) in _TOKENS.items():
            came = values.get(f"{op}_tokens_ok", 0)
            tokens.add_metric([op, ok, *own], came)
            tokens.add_metric([op, missed, *own], values.get(f"{op}_tokens", 0) - came)
        yield tokens
        moved = CounterMetricFamily(PREFIX + "bytes", "Bytes moved, by way", labels=["op", "result", *self._labels])
        for name, way in _BYTES.items():
            moved.add_metric([*way, *own], values.get(name, 0))
        yield moved
        for name, (metric, text) in _COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + metric, text, labels=list(self._labels))
            counter.add_metric(own, values.get(name, 0))
            yield counter
        for name, (metric, text) in _GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + metric, text, labels=list(self._labels))
            gauge.add_metric(own, values.get(name, 0))
            yield gauge


class MetricsPort:
    """Serves the page over HTTP until :meth:`close`. Raises ``ConfigError`` when the port cannot be had."""

    def __init__(self, metrics: NodeMetrics, host: str, port: int) -> None:
        try:
            self._server, self._thread = start_http_server(port, host, metrics.registry)
        except (OSError, OverflowError) as error:
            raise ConfigError("metrics_port", port, f"a free port of {host} is expected ({error})") from error
        self.port: int = self._server.server_port

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


def describe() -> str:
    """The reference in ``docs/metrics.md``, generated."""
    rows = [
        (
            "objects_total",
            "counter",
            "`op`, `result`",
            "Objects asked for, by how it ended: "
            + "; ".join(f"`{op}`: {', '.join((*results, *_CAUSES))}" for op, results in _RESULTS.items())
            + "; `exists`: found, missing",
        ),
        (
            "tokens_total",
            "counter",
            "`op`, `result`",
            "Tokens of the pages asked for, once a page, not once a rank or pool: "
            + "; ".join(f"`{op}`: {', '.join(results)}" for op, results in _TOKENS.items()),
        ),
        ("bytes_total", "counter", "`op`, `result`", "Bytes moved, by way"),
        *((f"{metric}_total", "counter", "", text) for metric, text in _COUNTERS.values()),
        *((metric, "gauge", "", text) for metric, text in _GAUGES.values()),
        ("request_seconds", "histogram", "`op`", "Time a request of an engine takes in the node"),
    ]
    lines = [f"| `{PREFIX}{name}` | {kind} | {labels} | {text} |" for name, kind, labels, text in rows]
    return "\n".join(["| metric | type | labels | what |", "|---|---|---|---|", *lines])
