"""What the doctor looks at of RDMA. Collecting it loads the library only where there is a device to open."""

from __future__ import annotations

import os
from dataclasses import dataclass

from hicache_mooncake.config import Settings
from hicache_mooncake.errors import ConfigError, Unavailable
from hicache_mooncake.transfer.choice import DEVICES


@dataclass(frozen=True)
class RdmaFacts:
    """``insisted``: ``protocol`` is ``rdma``. ``chosen`` are the ports to use, ``down`` those whose link is not up."""

    insisted: bool
    present: int = 0
    chosen: tuple[str, ...] = ()
    down: tuple[str, ...] = ()
    problem: str = ""
    remedy: str = ""
    lockable: int = -1
    to_lock: int = 0


def rdma_facts(settings: Settings) -> RdmaFacts | None:
    """None with ``protocol=tcp``."""
    if settings.protocol == "tcp":
        return None
    insisted = settings.protocol == "rdma"
    try:
        present = len(os.listdir(DEVICES))
    except OSError:
        present = 0
    if not present:
        return RdmaFacts(insisted)
    from hicache_mooncake.transfer.rdma import memlock, topology, verbs  # noqa: PLC0415 -- only where there is RDMA

    host = topology.read()
    lockable = memlock.limit()
    try:
        nics = topology.select(host, settings.device_name)
        known = verbs.device_names()
    except ConfigError as error:
        return RdmaFacts(insisted, present, problem=error.allowed, remedy=error.hint, lockable=lockable)
    except Unavailable as error:
        return RdmaFacts(insisted, present, problem=error.message, remedy=error.hint, lockable=lockable)
    chosen = tuple(nic.name for nic in nics)
    down = tuple(nic.name for nic in host.nics if not nic.active)
    to_lock = settings.segment_size * len(nics)
    problem = remedy = ""
    unknown = [nic.device for nic in nics if nic.device not in known]
    if unknown:
        problem, remedy = f"{verbs.LIBRARY} does not know {', '.join(unknown)}", verbs.INSTALL
    elif not os.path.isdir("/dev/infiniband"):
        problem = "there is no /dev/infiniband"
        remedy = "docker run --device=/dev/infiniband; in Kubernetes the RDMA device plugin"
    return RdmaFacts(insisted, present, chosen, down, problem, remedy, lockable, to_lock)
