"""What a run was measured with: the server, its counters, this machine, the versions of what matters."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from benchmarks.report import machine

__all__ = ["counters", "grown", "machine", "server_facts", "versions"]

_PACKAGES = ("hicache-mooncake", "sglang", "torch", "aiohttp", "pyarrow", "numpy")

_TOLD = re.compile(
    r"version|model_path|served_model_name|tp_size|dp_size|pp_size|page_size|dtype|kv_cache_dtype|device|quantization"
    r"|max_total_num_tokens|max_total_tokens|max_running_requests|mem_fraction_static|context_length|chunked_prefill_size"
    r"|attention_backend|schedule_policy|enable_hierarchical_cache|hicache_(?!storage_backend_extra_config)\w+"
    r"|disable_radix_cache|random_seed|launch_command"
)
"""What of a server's own description is kept: never keys, which it tells too."""

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)(?: \d+)?$", re.MULTILINE)

_COUNTER = re.compile(r"(?:^sglang:|^vllm:|^hicache_mooncake).*(?:_total|_sum|_count)$")


def versions() -> dict[str, str]:
    """Installed packages that a figure may depend on, and Python."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def server_facts(told: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of ``/server_info``: no secrets, no live state."""
    kept = {key: value for key, value in told.items() if _TOLD.fullmatch(key) and value is not None}
    command = kept.get("launch_command")
    if isinstance(command, str):
        kept["launch_command"] = re.sub(
            r"(--[\w-]*(?:key|secret|password|config)[\w-]*[= ])('[^']*'|\S+)", r"\1***", command
        )
    return kept


def counters(page: str) -> dict[str, float]:
    """Counters of a Prometheus page by name, summed over their labels; and by source, operation and result, where they
    have such labels.

    >>> counters('sglang:cached_tokens_total{cache_source="host",tp_rank="0"} 5.0')
    {'sglang:cached_tokens_total': 5.0, 'sglang:cached_tokens_total{host}': 5.0}
    """
    found: dict[str, float] = {}
    for name, labels, value in _SAMPLE.findall(page):
        if not _COUNTER.search(name):
            continue
        kinds = ",".join(re.findall(r'(?:cache_source|op|result)="([^"]*)"', labels or ""))
        for key in [name, f"{name}{{{kinds}}}"] if kinds else [name]:
            found[key] = found.get(key, 0.0) + float(value)
    return found


def grown(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """By how much counters grew; those that did not are left out."""
    return {name: value - before.get(name, 0.0) for name, value in after.items() if value != before.get(name, 0.0)}
