"""Which network devices there are, which of them to use, and which is near which memory. Pure, but for :func:`read`.

Everything is read from sysfs, below a root that can be given, so that trees of real machines can be kept as test data.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hicache_mooncake.errors import ConfigError

ANYWHERE = -1
"""The NUMA node of a device or memory for which the host names none."""
_SAME, _UNKNOWN, _OTHER = 10, 20, 21
"""ACPI distances: of a node to itself, of one that is not known, and the least to another where the host gives none."""
_SLOW = 0.5
"""A device slower than this part of the fastest is for something else: management, storage."""


@dataclass(frozen=True, slots=True)
class Gid:
    """An entry of a port's address table. ``kind`` is sysfs' text: ``IB/RoCE v1`` or ``RoCE v2``."""

    index: int
    value: str
    kind: str


@dataclass(frozen=True, slots=True)
class Nic:
    """One port of an RDMA device. ``rate`` is in Gbit/s, ``state`` sysfs' word for it (``ACTIVE``, ``DOWN`` …)."""

    device: str
    port: int
    state: str
    rate: float
    ethernet: bool
    numa_node: int = ANYWHERE
    pci: str = ""
    gids: tuple[Gid, ...] = ()

    @property
    def name(self) -> str:
        """``device``, with ``:port`` where it is not the first."""
        return self.device if self.port == 1 else f"{self.device}:{self.port}"

    @property
    def active(self) -> bool:
        return self.state == "ACTIVE"


@dataclass(frozen=True, slots=True)
class Host:
    """A host's devices, and how far its NUMA nodes are from each other (``distances[a][b]``, ACPI's numbers)."""

    nics: tuple[Nic, ...]
    distances: Mapping[int, Sequence[int]] = field(default_factory=dict)

    def distance(self, a: int, b: int) -> int:
        """Between two NUMA nodes; what is not known is far, but nearer than what is known to be another node."""
        if ANYWHERE in (a, b):
            return _UNKNOWN
        if a == b:
            return _SAME
        row = self.distances.get(a, ())
        return max(row[b], _OTHER) if b < len(row) else _OTHER


def read(root: Path = Path("/")) -> Host:
    """The host below ``root``. Without RDMA in its kernel it has no devices."""
    nics: list[Nic] = []
    for device in _entries(root / "sys/class/infiniband"):
        for port in _entries(device / "ports"):
            if port.name.isdigit():
                nics.append(_nic(device, port))
    distances = {}
    for node in _entries(root / "sys/devices/system/node"):
        if re.fullmatch(r"node\d+", node.name):
            distances[int(node.name[4:])] = [int(word) for word in _text(node / "distance").split()]
    return Host(tuple(nics), distances)


def _nic(device: Path, port: Path) -> Nic:
    numa = _text(device / "device/numa_node")
    rate = re.match(r"[\d.]+", _text(port / "rate"))
    pci = ""
    with contextlib.suppress(OSError):
        pci = (device / "device").resolve(strict=True).name
    return Nic(
        device.name,
        int(port.name),
        _text(port / "state").partition(":")[2].strip(),
        float(rate.group()) if rate else 0.0,
        _text(port / "link_layer") == "Ethernet",
        int(numa) if re.fullmatch(r"\d+", numa) else ANYWHERE,
        pci,
        tuple(_gids(port)),
    )


def _gids(port: Path) -> Iterator[Gid]:
    for entry in sorted(_entries(port / "gids"), key=lambda path: int(path.name) if path.name.isdigit() else -1):
        text = _text(entry)
        if entry.name.isdigit() and text.replace(":", "").strip("0"):
            yield Gid(int(entry.name), text, _text(port / "gid_attrs/types" / entry.name))


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir(), key=lambda path: _natural(path.name))
    except OSError:
        return []


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts ``mlx5_10`` behind ``mlx5_9``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _text(path: Path) -> str:
    """A file's content; empty where there is none, as for unused entries of a GID table."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def gid_index(nic: Nic) -> int | None:
    """The address that a port is used by: on InfiniBand the first; on Ethernet RoCE v2, IPv4 before global IPv6.

    Link-local addresses and RoCE v1 do not pass a router, and are taken only where there is nothing else. None when the
    port has no address at all.
    """
    if not nic.ethernet:
        return 0
    ranked = sorted((_gid_rank(gid), gid.index) for gid in nic.gids)
    return ranked[0][1] if ranked else None


def _gid_rank(gid: Gid) -> int:
    address = ipaddress.IPv6Address(gid.value)
    v4 = address.ipv4_mapped
    if "v2" not in gid.kind:
        return 8 + (v4 is None)
    if v4 is not None:
        return 3 if v4.is_link_local else 0
    return 4 if address.is_link_local else 1


def select(host: Host, wanted: str) -> list[Nic]:
    """The ports to use, from the setting ``device_name``; all active ones of the fast kind where it is empty.

    ``wanted`` is a list by commas of devices (``mlx5_0``), ports (``mlx5_0:2``) and NUMA nodes (``numa:0``), or a JSON
    object whose values are such lists, one per rank, as SGLang's own backend takes it: a host has one node for all its
    ranks, which uses all of them, each for the memory that is near. Raises ``ConfigError`` with what there is.
    """
    if not host.nics:
        why = "this host has no RDMA device"
        hint = "load the driver, give the container /dev/infiniband, or set protocol=auto or tcp; see docs/rdma.md"
        raise ConfigError("protocol", "rdma", why, hint=hint)
    usable = [nic for nic in host.nics if nic.active and gid_index(nic) is not None]
    words = _words(wanted)
    if words:
        chosen = [nic for nic in host.nics if any(_matches(nic, word) for word in words)]
        for word in words:
            if not any(_matches(nic, word) for nic in host.nics):
                there = ", ".join(nic.name for nic in host.nics)
                raise ConfigError("device_name", wanted, f"{word!r} is not a device of this host, which has {there}")
        usable = [nic for nic in chosen if nic in usable]
    if not usable:
        states = ", ".join(f"{nic.name} is {nic.state or 'in no state'}" for nic in host.nics)
        hint = "bring the link up (ip link set … up; on InfiniBand a subnet manager must run), or set protocol=auto"
        raise ConfigError(
            "device_name" if words else "protocol", wanted or "rdma", f"no link is up: {states}", hint=hint
        )
    if words:
        return usable
    fastest = max(usable, key=lambda nic: nic.rate)
    return [nic for nic in usable if nic.rate >= _SLOW * fastest.rate and nic.ethernet == fastest.ethernet]


def _words(wanted: str) -> list[str]:
    text = wanted.strip()
    if text.startswith("{"):
        try:
            given = json.loads(text)
            lists = [str(names) for names in given.values()]
        except (ValueError, AttributeError) as error:
            allowed = "a list by commas, or a JSON object of such lists, is expected"
            raise ConfigError("device_name", wanted, allowed) from error
        text = ",".join(lists)
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def _matches(nic: Nic, word: str) -> bool:
    if word.startswith("numa:"):
        return word[5:].isdigit() and nic.numa_node == int(word[5:])
    return word in (nic.device, f"{nic.device}:{nic.port}")


def by_distance(host: Host, nics: Sequence[Nic], memory_node: int) -> list[list[int]]:
    """Indexes into ``nics``, in groups of one distance from memory on ``memory_node``, the nearest group first.

    Memory on no particular node is equally near to all.
    """
    groups: dict[int, list[int]] = {}
    for index, nic in enumerate(nics):
        distance = _UNKNOWN if memory_node == ANYWHERE else host.distance(memory_node, nic.numa_node)
        groups.setdefault(distance, []).append(index)
    return [groups[distance] for distance in sorted(groups)]
