"""Two nodes, one at each end of the cable: put on one, get on the other, every byte compared."""

from __future__ import annotations

import pytest

from tests.pool import Engine, NodeProcess, eventually, hashes

pytestmark = pytest.mark.rdma


def node(redis_url: str, name: str, **settings: object) -> NodeProcess:
    return NodeProcess(redis_url, name, {"protocol": "rdma", "op_timeout": 10, "segment_size": "256MiB", **settings})


@pytest.mark.timeout(240)
@pytest.mark.parametrize("devices", [("rxe0", "rxe1"), ("rxe0,rxe1", "rxe0,rxe1")], ids=["across", "striped"])
def test_pages_of_every_size_in_batches_of_every_length(redis_url: str, devices: tuple[str, str]) -> None:
    with (
        node(redis_url, "owner", device_name=devices[0]) as owner,
        node(redis_url, "reader", device_name=devices[1]) as reader,
    ):
        moved = 0
        for size, count in ((65536, 1), (65536, 512), (262144, 64), (1 << 20, 16), (4 << 20, 4)):
            shape = {"page_bytes": size, "pages": count, "op_timeout": 10.0}
            with Engine(owner.socket, **shape) as writer, Engine(reader.socket, **shape) as engine:  # type: ignore
                pages = hashes(f"{size}x{count}", count)
                if count == 512:  # storing so many takes the guest longer than one call may
                    for start in range(0, count, 64):
                        for slot, page in enumerate(pages[start : start + 64]):
                            writer.fill(slot, writer.content(page))
                        assert all(writer.put(pages[start : start + 64], range(64)))
                else:
                    writer.store(pages)
                eventually(lambda engine=engine, pages=pages: all(engine.exists(pages)))
                assert all(engine.check(pages)), reader.tail()
                moved += size * count
                assert engine.stats()["rdma_read_bytes"] == moved, "not one page over TCP"
                assert engine.stats().get("rdma_reads_by_tcp", 0) == 0
        assert owner.stop() == 0 and reader.stop() == 0


@pytest.mark.timeout(120)
def test_a_full_node_spills_by_rdma_and_a_tcp_node_reads_it(redis_url: str) -> None:
    with (
        node(redis_url, "full", device_name="rxe0", segment_size=0) as full,
        node(redis_url, "roomy", device_name="rxe1") as roomy,
        NodeProcess(redis_url, "plain", {"protocol": "tcp"}) as plain,
    ):
        pages = hashes("spilled", 16)
        with Engine(full.socket, page_bytes=262144, pages=16) as writer:
            eventually(lambda: writer.stats()["nodes"] == 3)
            writer.store(pages)
            assert writer.stats()["rdma_written_pages"] == 16, full.tail()
            assert all(writer.check(pages)), "and back again"
        with Engine(plain.socket, page_bytes=262144, pages=16) as engine:
            assert all(engine.check(pages)), plain.tail()
            assert "rdma_read_pages" not in engine.stats()
        assert roomy.stop() == 0


@pytest.mark.timeout(120)
def test_auto_uses_it_where_both_have_it_and_heals_when_an_owner_comes_back(redis_url: str) -> None:
    with (
        node(redis_url, "owner", protocol="auto", device_name="rxe0") as owner,
        node(redis_url, "reader", protocol="auto", device_name="rxe1") as reader,
    ):
        pages = hashes("auto", 8)
        with Engine(reader.socket) as engine:
            with Engine(owner.socket) as writer:
                writer.store(pages)
            assert all(engine.check(pages))
            assert engine.stats()["rdma_read_pages"] == 8
            assert "pages move by RDMA" in reader.tail()
            with Engine(reader.socket, staged=True) as copying:
                assert all(copying.check(pages)), "through a staging area, registered when it is first used"
                assert copying.stats()["rdma_read_pages"] == 16
            owner.kill()
            assert not any(engine.check(pages)), "misses, and soon"
            owner.start()
            with Engine(owner.socket) as writer:
                writer.store(pages)
            eventually(lambda: all(engine.check(pages)), 20)
            assert engine.stats()["rdma_read_pages"] >= 24
