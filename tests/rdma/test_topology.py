"""Devices are found, filtered and ranked as an administrator of such machines would."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache_mooncake import memory
from hicache_mooncake.errors import ConfigError
from hicache_mooncake.transfer.rdma import numa
from hicache_mooncake.transfer.rdma.topology import ANYWHERE, Gid, Host, Nic, by_distance, gid_index, read, select

from . import sysfs
from .sysfs import Port


def names(nics: list[Nic]) -> list[str]:
    return [nic.name for nic in nics]


def test_a_dgx_uses_its_eight_compute_ports(tmp_path: Path) -> None:
    host = read(sysfs.dgx_h100(tmp_path))
    assert len(host.nics) == 12
    chosen = select(host, "")
    assert names(chosen) == ["mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11"]
    assert by_distance(host, chosen, 0) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert by_distance(host, chosen, 1) == [[4, 5, 6, 7], [0, 1, 2, 3]]
    assert by_distance(host, chosen, ANYWHERE) == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert chosen[0].pci == "0000:18:00.0" and chosen[0].rate == 400 and not chosen[0].ethernet


def test_a_roce_host_uses_its_rails_by_ipv4_and_not_the_bond(tmp_path: Path) -> None:
    chosen = select(read(sysfs.roce_h800(tmp_path)), "")
    assert names(chosen) == [f"mlx5_{rail}" for rail in range(8)]
    assert [gid_index(nic) for nic in chosen] == [3] * 8


def test_near_is_what_the_firmware_says(tmp_path: Path) -> None:
    host = read(sysfs.epyc_four_nodes(tmp_path))
    chosen = select(host, "")
    for node, order in ((0, [[0], [1]]), (1, [[0], [1]]), (2, [[1], [0]]), (3, [[1], [0]])):
        assert by_distance(host, chosen, node) == order
    assert host.distance(0, 1) == 21, "never nearer than a device whose node is not known"


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("mlx5_9", ["mlx5_9"]),
        ("mlx5_10, mlx5_0", ["mlx5_0", "mlx5_10"]),
        ("numa:1", ["mlx5_6", "mlx5_7", "mlx5_9", "mlx5_10", "mlx5_11"]),
        ('{"0": "mlx5_0", "1": "mlx5_0,mlx5_3"}', ["mlx5_0", "mlx5_3"]),
        ("mlx5_1", ["mlx5_1"]),
        ("mlx5_0:1", ["mlx5_0"]),
    ],
)
def test_device_name_picks(tmp_path: Path, wanted: str, expected: list[str]) -> None:
    assert names(select(read(sysfs.dgx_h100(tmp_path)), wanted)) == expected


@pytest.mark.parametrize(
    ("wanted", "field", "said"),
    [
        ("mlx5_77", "device_name", "mlx5_11"),
        ("mlx5_2", "device_name", "mlx5_2 is DOWN"),
        ("numa:9", "device_name", "not a device"),
        ('{"0": ', "device_name", "JSON"),
        ('{"0": ["a"]}x', "device_name", "JSON"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, wanted: str, field: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        select(read(sysfs.dgx_h100(tmp_path)), wanted)
    assert refused.value.field == field and said in str(refused.value)


def test_no_device_and_no_link_are_told_apart(tmp_path: Path) -> None:
    assert read(tmp_path / "nothing") == Host(())
    with pytest.raises(ConfigError, match="no RDMA device"):
        select(Host(()), "")
    host = read(sysfs.write(tmp_path, [Port("rxe0", state="1: DOWN", link="Ethernet", gids=sysfs.ROCE)], ()))
    with pytest.raises(ConfigError, match=r"no link is up: rxe0 is DOWN.*ip link set"):
        select(host, "")


def nic(*gids: tuple[str, str], ethernet: bool = True) -> Nic:
    entries = tuple(Gid(at, sysfs.expand(value), kind) for at, (value, kind) in enumerate(gids) if value != "::")
    return Nic("x", 1, "ACTIVE", 100, ethernet, gids=entries)


@pytest.mark.parametrize(
    ("port", "expected"),
    [
        (nic(*sysfs.ROCE), 3),
        (nic(("fe80::1", "IB/RoCE v1"), ("fe80::1", "RoCE v2")), 1),
        (nic(("fe80::1", "RoCE v2"), ("2001:db8::1", "RoCE v2")), 1),
        (nic(("::ffff:169.254.1.1", "RoCE v2"), ("2001:db8::1", "RoCE v2")), 1),
        (nic(("2001:db8::1", "RoCE v2"), ("::ffff:10.0.0.1", "RoCE v2")), 1),
        (nic(("::ffff:10.0.0.1", "IB/RoCE v1")), 0),
        (nic(), None),
        (nic(ethernet=False), 0),
    ],
)
def test_the_address_that_passes_routers_is_taken(port: Nic, expected: int | None) -> None:
    assert gid_index(port) == expected


def test_a_port_of_two_and_one_without_an_address(tmp_path: Path) -> None:
    ports = [
        Port("mlx4_0", -1, state="4: ACTIVE"),
        Port("mlx4_0", -1, state="4: ACTIVE", port=2),
        Port("rxe9", pci="0000:01:00.0", link="Ethernet", gids=[("::", "")], rate="400 Gb/sec"),
    ]
    host = read(sysfs.write(tmp_path, ports, ()))
    assert names(select(host, "")) == ["mlx4_0", "mlx4_0:2"]
    assert host.nics[0].numa_node == ANYWHERE
    assert by_distance(host, select(host, "mlx4_0:2"), 5) == [[0]]


def test_where_memory_lies_is_asked_of_the_kernel() -> None:
    made = memory.create("numa", 4 << 20)
    made.view[::4096] = bytes(len(made.view[::4096]))
    nodes = {int(path.name[4:]) for path in Path("/sys/devices/system/node").glob("node[0-9]*")}
    assert numa.node_of(made.address, made.size) in nodes | {ANYWHERE}
    assert numa.node_of(made.address, 0) == ANYWHERE
    made.close()
