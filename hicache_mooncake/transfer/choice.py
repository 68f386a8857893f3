"""Which transports a node uses: what the setting ``protocol`` comes to on this host."""

from __future__ import annotations

import logging
import os

from ..errors import ConfigError
from .base import Transport
from .tcp import TcpTransport

logger = logging.getLogger(__name__)

DEVICES = "/sys/class/infiniband"


def open_transports(protocol: str, device_name: str, segment_bytes: int) -> list[Transport]:
    """The transports of a node that serves ``segment_bytes``, the preferred one first; it listens with that one.

    ``tcp`` touches nothing of RDMA. ``auto`` adds it where it can be had, and says in one line why not. ``rdma`` raises
    ``ConfigError`` where it cannot, with the remedy.
    """
    if protocol == "tcp":
        return [TcpTransport()]
    if protocol == "rdma":
        return [_rdma(device_name, segment_bytes, strict=True)]
    if not _has_devices():
        logger.info("pages move over TCP: this host has no RDMA device")
        return [TcpTransport()]
    try:
        return [_rdma(device_name, segment_bytes, strict=False), TcpTransport()]
    except ConfigError as error:
        if error.field == "device_name":
            raise  # the operator has named what is not there
        logger.warning("pages move over TCP: %s", error)
        return [TcpTransport()]


def _has_devices() -> bool:
    try:
        return bool(os.listdir(DEVICES))
    except OSError:
        return False


def _rdma(device_name: str, segment_bytes: int, *, strict: bool) -> Transport:
    from .rdma import memlock  # noqa: PLC0415 -- nothing of RDMA is imported unless it is asked for
    from .rdma.transport import RdmaTransport  # noqa: PLC0415

    made = RdmaTransport(device_name, strict=strict)
    if short := memlock.shortfall(segment_bytes * len(made.fabric.adapters)):
        made.close()
        raise ConfigError("protocol", "rdma", short, hint=memlock.REMEDY)
    logger.info("pages move by RDMA, where peers have it too, over %s", made.devices)
    return made
