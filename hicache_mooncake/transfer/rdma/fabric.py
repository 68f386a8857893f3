"""What all connections of a node share: its open devices, the memory registered with them, what paths have shown."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack

from hicache_mooncake.errors import ConfigError, HiCacheMooncakeError
from hicache_mooncake.memory import Extent, Memory

from . import abi, topology
from .registration import LARGEST_PIECE, Adapter, Registered, Registry
from .stripes import Rates, Rests
from .topology import Host
from .verbs import Device

ON_DEMAND = 256 << 20
"""Bytes of memory that the first batch itself registers: some 50 ms. What is larger has to be prepared."""


class Fabric:
    """The devices in use, from construction until :meth:`close`, which comes after all queue pairs have ended."""

    def __init__(self, host: Host, device_name: str, *, largest_piece: int = LARGEST_PIECE) -> None:
        """Raises ``ConfigError`` when no device can be used."""
        self.host = host
        self.adapters: list[Adapter] = []
        self.rates, self.rests = Rates(), Rests()
        self.largest_piece = largest_piece
        self.counters: Counter[str] = Counter()
        self._counting = threading.Lock()
        self.turn = itertools.count()
        with ExitStack() as undo:
            for nic in topology.select(host, device_name):
                index = topology.gid_index(nic)
                assert index is not None  # or it would not have been selected
                try:
                    device = Device(nic.device)
                except HiCacheMooncakeError as error:
                    raise ConfigError("protocol", "rdma", error.message, hint=error.hint) from error
                undo.callback(device.close)
                self.adapters.append(Adapter(nic, device, index))
            self.local = Registry(self.adapters, abi.LOCAL_WRITE, largest_piece=largest_piece)
            undo.callback(self.local.close)
            self._undo = undo.pop_all()
        self.nics = [adapter.nic for adapter in self.adapters]

    def usable(self, adapter: Adapter) -> bool:
        """Whether its link is up."""
        try:
            return adapter.device.port(adapter.nic.port).active
        except HiCacheMooncakeError:
            return False

    def registered(self, extents: Iterable[Extent]) -> list[Registered] | None:
        """The memories of a batch, registered; None when one is not, or not yet."""
        found: dict[int, Registered] = {}
        for extent in extents:
            memory: Memory = extent[0]
            if id(memory) in found:
                continue
            ready = self.local.ready(memory)
            if ready is None and memory.size <= ON_DEMAND:
                try:
                    ready = self.local.prepare(memory)
                except HiCacheMooncakeError:
                    return None
            if ready is None:
                return None
            found[id(memory)] = ready
        return list(found.values())

    def refused(self, extents: Iterable[Extent]) -> str:
        """Why a memory of a batch can never be registered; empty when all are, or may be soon."""
        return next(filter(None, (self.local.failure(extent[0]) for extent in extents)), "")

    def near(self, numa_node: int) -> list[list[int]]:
        """Adapters by their distance from memory on that node."""
        return topology.by_distance(self.host, self.nics, numa_node)

    def forget(self, node_id: str) -> None:
        """A peer is gone, and its paths with it."""
        self.rates.forget(node_id)
        self.rests.forget(node_id)

    def count(self, **amounts: int) -> None:
        with self._counting:
            self.counters.update(amounts)

    def stats(self) -> dict[str, float]:
        with self._counting:
            return dict(self.counters)

    def close(self) -> None:
        """Deregister all memory, then close the devices."""
        self._undo.close()
