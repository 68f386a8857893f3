"""Pages over TCP: what there is where there is no RDMA."""

from __future__ import annotations

import os
from dataclasses import replace

from ..errors import ProtocolError
from .address import parse
from .base import Credentials, Listener, PageSource, Peer, Transport
from .tcp_client import ClientLimits, TcpPeer
from .tcp_server import ServerLimits, TcpListener


class TcpTransport(Transport):
    """Blocking sockets in threads, gathered from the segment on one side and scattered into L2 on the other.

    The limits have defaults that are right; tests and unusual networks give their own.
    """

    scheme = "tcp"

    def __init__(self, *, server: ServerLimits | None = None, client: ClientLimits | None = None) -> None:
        self._server = server or ServerLimits()
        # With two processors a second connection only takes turns with the first, and costs a thread.
        self._client = client or replace(ClientLimits(), lanes=2 if (os.cpu_count() or 1) >= 4 else 1)

    def listen(self, address: str, advertise: str, source: PageSource, credentials: Credentials) -> Listener:
        return TcpListener(address, advertise, source, credentials, self._server)

    def connect(self, address: str, node_id: str, credentials: Credentials) -> Peer:
        where = parse(address)
        if where.scheme != self.scheme:
            raise ProtocolError(f"address {address!r}: this transport speaks {self.scheme}")
        return TcpPeer(where, node_id, credentials, self._client)
