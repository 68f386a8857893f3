"""Pages by RDMA, and over TCP on the same port where a peer or a moment has none."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

from hicache_mooncake.errors import HiCacheMooncakeError, ProtocolError
from hicache_mooncake.memory import Memory
from hicache_mooncake.transfer.address import parse
from hicache_mooncake.transfer.base import Credentials, Listener, PageSource, Peer, Transport
from hicache_mooncake.transfer.tcp_client import ClientLimits
from hicache_mooncake.transfer.tcp_server import ServerLimits

from . import topology
from .client import RdmaPeer
from .fabric import Fabric
from .registration import LARGEST_PIECE
from .server import RdmaListener

logger = logging.getLogger(__name__)

SCHEME = "rdma"


class RdmaTransport(Transport):
    """One-sided reads out of a peer's segment, one-sided writes into staging areas that it grants.

    ``device_name`` says which devices (see :func:`~.topology.select`). ``strict`` peers never fall back to TCP, except
    while memory is still being registered on either side; others move pages over TCP whenever RDMA cannot be used. A
    listener speaks both: it is the node's only data port. Close the transport after its listeners and peers.
    """

    scheme = SCHEME

    def __init__(
        self,
        device_name: str = "",
        *,
        strict: bool = False,
        server: ServerLimits | None = None,
        client: ClientLimits | None = None,
        root: Path = Path("/"),
        largest_piece: int = LARGEST_PIECE,
    ) -> None:
        """Open the devices. Raises ``ConfigError`` when none can be used."""
        self._strict = strict
        self._server = server or ServerLimits()
        # A second connection is a second thread that checks pages: one keeps up with some 8 GB/s.
        self._client = client or replace(ClientLimits(), lanes=2 if (os.cpu_count() or 1) >= 4 else 1)
        self.fabric = Fabric(topology.read(root), device_name, largest_piece=largest_piece)

    @property
    def devices(self) -> str:
        """The devices in use, for people."""
        return ", ".join(f"{nic.name} ({nic.rate:g} Gbit/s, NUMA node {nic.numa_node})" for nic in self.fabric.nics)

    def listen(self, address: str, advertise: str, source: PageSource, credentials: Credentials) -> Listener:
        return RdmaListener(address, advertise, source, credentials, self._server, self.fabric)

    def connect(self, address: str, node_id: str, credentials: Credentials) -> Peer:
        where = parse(address if "://" in address else f"{SCHEME}://{address}")
        if where.scheme != SCHEME:
            raise ProtocolError(f"address {address!r}: this transport speaks {SCHEME}")
        return RdmaPeer(where, node_id, credentials, self._client, self.fabric, strict=self._strict)

    def prepare(self, memory: Memory) -> None:
        try:
            self.fabric.local.prepare(memory)
        except HiCacheMooncakeError as error:
            how = "cannot be moved" if self._strict else "move over TCP"
            logger.warning("RDMA: pages of %d MiB of an engine's memory %s: %s", memory.size >> 20, how, error)

    def stats(self) -> dict[str, float]:
        return self.fabric.stats()

    def close(self) -> None:
        self.fabric.close()
