"""Pages moved from node to node: one small interface, one module a transport."""

from __future__ import annotations

from ..errors import ProtocolError
from .base import Credentials, Listener, Outcome, PageRead, PageSource, PageWrite, Peer, PinnedPage, Room, Transport
from .tcp import TcpTransport

_TRANSPORTS: dict[str, type[Transport]] = {TcpTransport.scheme: TcpTransport}


def transport(scheme: str) -> Transport:
    """The transport of that scheme, with default limits.

    Raises ``ProtocolError`` for an unknown one, ``ConfigError`` for ``rdma`` where there is no device.
    """
    if scheme == "rdma":
        from .rdma.transport import RdmaTransport  # noqa: PLC0415 -- nothing of verbs is touched unless it is asked for

        return RdmaTransport()
    try:
        return _TRANSPORTS[scheme]()
    except KeyError:
        known = ", ".join(sorted([*_TRANSPORTS, "rdma"]))
        raise ProtocolError(f"no transport is called {scheme!r}; there are: {known}") from None


__all__ = [
    "Credentials",
    "Listener",
    "Outcome",
    "PageRead",
    "PageSource",
    "PageWrite",
    "Peer",
    "PinnedPage",
    "Room",
    "TcpTransport",
    "Transport",
    "transport",
]
