"""Which transport a node gets on a host without RDMA, and that nothing of verbs is touched for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hicache_mooncake.errors import ConfigError
from hicache_mooncake.transfer.choice import DEVICES, open_transports
from hicache_mooncake.transfer.tcp import TcpTransport
from tests.pool import Engine, NodeProcess, hashes

without_rdma = pytest.mark.skipif(Path(DEVICES).is_dir(), reason="this host has RDMA devices")


@without_rdma
def test_asking_for_rdma_where_there_is_none_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"no RDMA device.*protocol=auto") as refused:
        open_transports("rdma", "", 1 << 20)
    assert refused.value.field == "protocol"


@without_rdma
@pytest.mark.parametrize("protocol", ["auto", "tcp"])
def test_a_node_without_rdma_loads_nothing_of_it(protocol: str, redis_url: str) -> None:
    """Seen in what its process has mapped and opened while it serves a page, and in the modules that it imports."""
    with NodeProcess(redis_url, settings={"protocol": protocol}) as node, Engine(node.socket) as engine:
        engine.store(hashes("a", 2))
        maps = Path(f"/proc/{node.pid}/maps").read_text()
        assert "ibverbs" not in maps and "infiniband" not in maps
        lines = [line for line in node.tail().splitlines() if "RDMA" in line]
        assert len(lines) == (1 if protocol == "auto" else 0), lines
    shown = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", _TRACE.format(protocol=protocol)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "verbs" not in shown.stderr and ".rdma" not in shown.stderr


_TRACE = """
import hicache_mooncake.node.service, hicache_mooncake.engine.session, hicache_mooncake.cli
from hicache_mooncake.transfer.choice import open_transports
assert [transport.scheme for transport in open_transports("{protocol}", "", 0)] == ["tcp"]
"""


def test_tcp_is_tcp_everywhere() -> None:
    (only,) = open_transports("tcp", "", 1 << 40)
    assert isinstance(only, TcpTransport)
