"""Whether memory may be locked, which a device needs: checked before registering, for the kernel only says ENOMEM."""

from __future__ import annotations

import resource
from contextlib import suppress

REMEDY = (
    "ulimit -l unlimited; in a systemd unit LimitMEMLOCK=infinity; docker run --ulimit memlock=-1; in Kubernetes the "
    "container runtime's limit, or capability IPC_LOCK"
)
_IPC_LOCK = 1 << 14


def limit() -> int:
    """Bytes that this process may lock, its soft limit raised as far as it can be; -1 for no limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or _may_ignore_it():
        return -1
    return soft


def _may_ignore_it() -> bool:
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) & _IPC_LOCK)
    return False


def locked() -> int:
    """Bytes that devices hold locked for this process now."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmPin:"):
                return int(line.split()[1]) * 1024
    return 0


def shortfall(wanted: int) -> str:
    """Why ``wanted`` more bytes cannot be locked, for people; empty when they can."""
    allowed = limit()
    if allowed < 0 or locked() + wanted <= allowed:
        return ""
    return (
        f"{wanted >> 20} MiB are to be locked for RDMA (each device counts), RLIMIT_MEMLOCK allows "
        f"{allowed >> 20} MiB, {locked() >> 20} MiB of it taken"
    )
