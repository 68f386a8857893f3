"""Trees of sysfs as real machines have them, reduced to what is read: written out below a folder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Port:
    """What sysfs says of one port; ``gids`` are addresses with their types, by index."""

    device: str
    numa: int = 0
    pci: str = "0000:00:00.0"
    state: str = "4: ACTIVE"
    rate: str = "400 Gb/sec (4X NDR)"
    link: str = "InfiniBand"
    port: int = 1
    gids: Sequence[tuple[str, str]] = field(default_factory=lambda: [("fe80::0001", "IB/RoCE v1")])


def expand(address: str) -> str:
    """``::ffff:10.0.0.1`` as sysfs writes it."""
    import ipaddress

    return ipaddress.IPv6Address(address).exploded


def write(root: Path, ports: Iterable[Port], distances: Sequence[Sequence[int]]) -> Path:
    """A machine with these ports and NUMA nodes."""
    for port in ports:
        pci = root / f"sys/devices/pci0000:00/{port.pci}"
        pci.mkdir(parents=True, exist_ok=True)
        (pci / "numa_node").write_text(f"{port.numa}\n")
        device = root / "sys/class/infiniband" / port.device
        folder = device / "ports" / str(port.port)
        (folder / "gids").mkdir(parents=True)
        (folder / "gid_attrs/types").mkdir(parents=True)
        if not (device / "device").exists():
            (device / "device").symlink_to(pci)
        (folder / "state").write_text(f"{port.state}\n")
        (folder / "rate").write_text(f"{port.rate}\n")
        (folder / "link_layer").write_text(f"{port.link}\n")
        for index, (address, kind) in enumerate(port.gids):
            (folder / "gids" / str(index)).write_text(f"{expand(address)}\n")
            if address != "::":  # reading the type of an unused entry fails with EINVAL: as if there were none
                (folder / "gid_attrs/types" / str(index)).write_text(f"{kind}\n")
    for node, row in enumerate(distances):
        folder = root / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "distance").write_text(" ".join(map(str, row)) + "\n")
    return root


TWO_SOCKETS = ((10, 21), (21, 10))


def dgx_h100(root: Path) -> Path:
    """An NVIDIA DGX H100: eight NDR ports for the GPUs, four a socket, beside two storage ports and Ethernet ones.

    Names, PCI addresses and NUMA nodes as ``nvidia-smi topo -m`` and ``ibdev2netdev -v`` of such machines show them.
    """
    compute = [
        Port("mlx5_0", 0, "0000:18:00.0"),
        Port("mlx5_3", 0, "0000:40:00.0"),
        Port("mlx5_4", 0, "0000:4f:00.0"),
        Port("mlx5_5", 0, "0000:5e:00.0"),
        Port("mlx5_6", 1, "0000:9a:00.0"),
        Port("mlx5_9", 1, "0000:c0:00.0"),
        Port("mlx5_10", 1, "0000:ce:00.0"),
        Port("mlx5_11", 1, "0000:dc:00.0"),
    ]
    other = [
        Port("mlx5_1", 0, "0000:29:00.0", rate="100 Gb/sec (4X EDR)", link="Ethernet", gids=ROCE),
        Port("mlx5_2", 0, "0000:29:00.1", state="1: DOWN", rate="40 Gb/sec (4X QDR)"),
        Port("mlx5_7", 1, "0000:aa:00.0", rate="100 Gb/sec (4X EDR)", link="Ethernet", gids=ROCE),
        Port("mlx5_8", 1, "0000:aa:00.1", state="1: DOWN", rate="40 Gb/sec (4X QDR)"),
    ]
    return write(root, [*compute, *other], TWO_SOCKETS)


ROCE: Sequence[tuple[str, str]] = (
    ("fe80::a288:c2ff:fe5b:1a2c", "IB/RoCE v1"),
    ("fe80::a288:c2ff:fe5b:1a2c", "RoCE v2"),
    ("::ffff:10.1.2.3", "IB/RoCE v1"),
    ("::ffff:10.1.2.3", "RoCE v2"),
    ("::", ""),
)


def roce_h800(root: Path) -> Path:
    """Eight GPUs, eight RoCE ports named by rail, two sockets, and a 25 Gbit/s bond for management."""
    rails = [
        Port(f"mlx5_{rail}", rail // 4, f"0000:{0x10 + 16 * rail:02x}:00.0", link="Ethernet", gids=ROCE)
        for rail in range(8)
    ]
    bond = Port("mlx5_bond_0", 0, "0000:05:00.0", rate="25 Gb/sec (1X EDR)", link="Ethernet", gids=ROCE)
    return write(root, [bond, *rails], TWO_SOCKETS)


def epyc_four_nodes(root: Path) -> Path:
    """A dual EPYC in NPS2: four NUMA nodes, two of each socket, and devices on two of them."""
    ports = [Port("mlx5_0", 1, "0000:41:00.0"), Port("mlx5_1", 3, "0000:c1:00.0")]
    return write(root, ports, ((10, 12, 32, 32), (12, 10, 32, 32), (32, 32, 10, 12), (32, 32, 12, 10)))
