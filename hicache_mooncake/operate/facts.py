"""What the doctor looks at, collected from this host, Redis and the other nodes."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hicache_mooncake import memory
from hicache_mooncake.config import Settings
from hicache_mooncake.engine.launch import NodeFinder
from hicache_mooncake.errors import ConfigError, HiCacheMooncakeError
from hicache_mooncake.metadata.directory import Directory
from hicache_mooncake.metadata.records import NodeRecord
from hicache_mooncake.metadata.redis_server import find_binary
from hicache_mooncake.node.segment import available_memory
from hicache_mooncake.operate.pool_view import local_node
from hicache_mooncake.operate.rdma_facts import RdmaFacts, rdma_facts
from hicache_mooncake.transfer.base import Credentials
from hicache_mooncake.transfer.tcp import TcpTransport

CONNECT_WITHIN = 1.0
"""Seconds another node's data port has to accept a connection, with both sides proving that they know the secret."""

PROBES = 16
"""Nodes that are asked at once."""


@dataclass
class Facts:
    """Everything the checks look at. Sizes in bytes, times as said."""

    settings: Settings
    redis_error: str = ""
    redis_ms: float = 0.0
    redis_binary: str = ""
    redis_policy: tuple[str, int] = ("noeviction", 0)  # maxmemory-policy, maxmemory
    redis_used: int = 0
    nodes: list[NodeRecord] = field(default_factory=list)
    reachable: dict[str, str] = field(default_factory=dict)  # node id -> error, empty when it answers
    secret_error: str = ""
    node_here: bool = False  # somebody answers at the socket
    node_error: str = ""  # why that node is not ours
    node_id: str = ""
    node_redis: str = ""  # without its password
    available_memory: int = 0
    huge_pages_free: int = 0
    open_files: int = 0
    memlock: int = 0
    rdma: RdmaFacts | None = None  # None where only TCP is wanted
    now: float = 0.0
    sglang: Mapping[str, Any] = field(default_factory=dict)  # flags as given: name -> value


def facts(settings: Settings, sglang: Mapping[str, Any]) -> Facts:
    """What is so on this host, now."""
    found = Facts(settings, sglang=sglang, now=time.time())
    found.available_memory = available_memory()
    found.huge_pages_free = memory.free_huge_bytes()
    found.open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    found.memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    found.rdma = rdma_facts(settings)
    with suppress(ConfigError):
        found.redis_binary = find_binary()
    with suppress(HiCacheMooncakeError):
        NodeFinder(settings).dial(time.monotonic() + CONNECT_WITHIN).close()
        found.node_here = True
    if found.node_here:
        try:
            with local_node(settings) as here:
                found.node_id, found.node_redis = here.node_id, here.redis
        except HiCacheMooncakeError as error:
            found.node_error = error.message
    if settings.redis_url:
        _ask_redis(found)
    return found


def _ask_redis(found: Facts) -> None:
    directory = Directory(found.settings.redis_url, found.settings.pool, timeout=CONNECT_WITHIN)
    try:
        directory.nodes()  # the first call pays for the connection
        started = time.perf_counter()
        found.nodes = list(directory.nodes().values())
        found.redis_ms = (time.perf_counter() - started) * 1000
        said = directory.memory()
        found.redis_policy, found.redis_used = (said.policy, said.limit), said.used
    except HiCacheMooncakeError as error:
        found.redis_error = str(error)
    finally:
        directory.close()
    try:
        credentials = Credentials(found.settings.shared_secret(), found.settings.pool)
    except ConfigError as error:
        found.secret_error = str(error)
        return
    with ThreadPoolExecutor(PROBES) as probes:
        errors = probes.map(lambda node: _probe_error(node, credentials), found.nodes)
        found.reachable = {node.id: error for node, error in zip(found.nodes, errors, strict=True)}


def _probe_error(node: NodeRecord, credentials: Credentials) -> str:
    """Why the node cannot be read from here; empty when it can."""
    try:
        with TcpTransport().connect(node.addresses.get("tcp", ""), node.id, credentials) as peer:
            peer.probe(time.monotonic() + CONNECT_WITHIN)
    except HiCacheMooncakeError as error:
        return error.message
    return ""
