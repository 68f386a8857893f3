"""How fast pages move by RDMA between two hosts, one command on each.

::

    host A$ python -m benchmarks.rdma serve --listen 0.0.0.0:7799 --advertise 10.0.0.1
    host B$ python -m benchmarks.rdma read 10.0.0.1:7799

For every page size, with one device and with more up to all: GB/s, the time of a batch, CPU seconds a GB on the
reader's side; the owner's processor has no part in it. Where ``ib_read_bw`` (perftest) is installed on both sides, its
figure for one device stands beside. Pages are checked by their checksums unless ``--no-verify`` is given, which shows
what the wire alone does.

``local`` does both on one machine, such as the tests' guest. ``python`` needs no device: it measures what this
package's own code costs a page on the path of a read.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hicache_mooncake import memory
from hicache_mooncake.config_values import size as parse_size
from hicache_mooncake.errors import HiCacheMooncakeError
from hicache_mooncake.memory import Extent, Memory
from hicache_mooncake.transfer import wire
from hicache_mooncake.transfer.base import Credentials, Outcome, PageRead, PinnedPage, Room
from hicache_mooncake.transfer.rdma import abi, frames, topology
from hicache_mooncake.transfer.rdma.plan import Plan, Progress
from hicache_mooncake.transfer.rdma.registration import Registered, locate
from hicache_mooncake.transfer.rdma.server import RdmaListener
from hicache_mooncake.transfer.rdma.transport import RdmaTransport
from hicache_mooncake.transfer.tcp_batch import total_bytes

NODE = "benchmark~00000000"
SIZES = "64kb,256kb,1mb,4mb"
READ_BW_PORT = 18515


class Pages:
    """A node whose every page is a piece of one memory: ``<size>:<number>``, as often as there is room for it."""

    node_id = NODE

    def __init__(self, size: int) -> None:
        self.memory = memory.create("benchmark-segment", size)
        self.memory.populate()
        step = 64 << 20
        block = np.random.default_rng(1).bytes(min(step, size))
        for start in range(0, size, step):
            part = min(step, size - start)
            self.memory.view[start : start + part] = block[:part]
        self._pages: dict[str, PinnedPage] = {}

    def pin(self, keys: Sequence[str]) -> list[PinnedPage | None]:
        return [self._pages.get(key) or self._make(key) for key in keys]

    def _make(self, key: str) -> PinnedPage:
        size, number = map(int, key.split(":"))
        extent = Extent(self.memory, number * size % (self.memory.size - size + 1) // 4096 * 4096, size)
        page = PinnedPage(size, memory.checksum(key, [extent]), [extent])
        self._pages[key] = page
        return page

    def unpin(self, pages: Sequence[PinnedPage]) -> None:
        """Nothing ever moves here."""

    def make_room(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Room | None]:
        return [None] * len(keys)

    def holds(self, keys: Sequence[str]) -> list[bool]:
        return [False] * len(keys)

    def keep(self, rooms: Sequence[Room], checksums: Sequence[int]) -> list[bool]:
        return [False] * len(rooms)

    def give_up(self, rooms: Sequence[Room]) -> None:
        """No room is ever made."""

    def clear(self, digests: Sequence[str]) -> int:
        return 0

    def doubt(self, keys: Sequence[str]) -> int:
        return 0


@dataclass(frozen=True)
class Result:
    """Of one size on one number of devices. Times in seconds."""

    size: int
    devices: int
    batch: int
    seconds: list[float]
    cpu: float

    @property
    def rate(self) -> float:
        return self.size * self.batch * len(self.seconds) / sum(self.seconds)

    def line(self) -> str:
        at = sorted(self.seconds)
        p50, p99 = (at[min(len(at) - 1, int(len(at) * part))] for part in (0.5, 0.99))
        cpu = self.cpu / (self.size * self.batch * len(at) / 1e9)
        return (
            f"{self.size >> 10:>7} KiB {self.devices:>5} {self.rate / 1e9:>8.2f} {p50 / self.batch * 1e6:>10.1f} "
            f"{p50 * 1e3:>10.2f} {p99 * 1e3:>10.2f} {cpu:>10.3f}"
        )


HEAD = f"{'page':>11} {'NICs':>5} {'GB/s':>8} {'µs a page':>10} {'p50 ms':>10} {'p99 ms':>10} {'CPU s/GB':>10}"


def main() -> None:
    arguments = _arguments()
    try:
        arguments.run(arguments)
    except HiCacheMooncakeError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def serve(arguments: argparse.Namespace) -> None:
    with serving(arguments, arguments.listen, arguments.advertise, arguments.devices) as address:
        print(f"serving {arguments.memory} at {address}; end with Ctrl-C", flush=True)
        if shutil.which("ib_read_bw"):
            _read_bw_server(arguments.devices)
        threading.Event().wait()


@contextlib.contextmanager
def serving(arguments: argparse.Namespace, listen: str, advertise: str, devices: str) -> Iterator[str]:
    with contextlib.closing(RdmaTransport(devices)) as transport:
        print(f"devices: {transport.devices}", flush=True)
        pages = Pages(parse_size(arguments.memory))
        try:
            with transport.listen(listen, advertise, pages, _credentials(arguments)) as listener:
                assert isinstance(listener, RdmaListener)
                while not listener.wait_until_registered(5):
                    print("registering memory …", flush=True)
                yield listener.address
        finally:
            pages.memory.close()


def read(arguments: argparse.Namespace) -> None:
    names = [nic.name for nic in topology.select(topology.read(), arguments.devices)]
    sizes = [parse_size(text) for text in arguments.sizes.split(",")]
    landing = memory.create("benchmark-landing", max(sizes) * arguments.batch)
    landing.populate()
    print(HEAD, flush=True)
    try:
        for count in range(1, len(names) + 1):
            if count in (1, 2, 4, len(names)) or count % 4 == 0:
                _read_with(arguments, names[:count], sizes, landing)
    finally:
        landing.close()
    if shutil.which("ib_read_bw"):
        print(_read_bw(names[0], arguments.address.rpartition(":")[0]), flush=True)


def _read_with(arguments: argparse.Namespace, names: list[str], sizes: list[int], landing: Memory) -> None:
    with contextlib.closing(RdmaTransport(",".join(names), strict=True)) as transport:
        transport.prepare(landing)
        with transport.connect(arguments.address, NODE, _credentials(arguments)) as peer:
            for size in sizes:
                batch = [
                    PageRead(f"{size}:{number}", size, [Extent(landing, number * size, size)])
                    for number in range(arguments.batch)
                ]
                for _ in range(2):  # the owner takes the checksums, both sides make their connections
                    outcomes = peer.read(batch, time.monotonic() + 60, True)
                if outcomes != [Outcome.OK] * len(batch):
                    raise SystemExit(f"pages of {size} bytes cannot be read: {peer.failure or set(outcomes)}")
                seconds: list[float] = []
                cpu, until = time.process_time(), time.monotonic() + arguments.seconds
                while time.monotonic() < until or len(seconds) < 3:
                    began = time.perf_counter()
                    outcomes = peer.read(batch, time.monotonic() + 60, not arguments.no_verify)
                    seconds.append(time.perf_counter() - began)
                    assert outcomes == [Outcome.OK] * len(batch), peer.failure
                used = time.process_time() - cpu
                print(Result(size, len(names), arguments.batch, seconds, used).line(), flush=True)


def local(arguments: argparse.Namespace) -> None:
    """The first device serves, the others (or the same) read."""
    names = [nic.name for nic in topology.select(topology.read(), arguments.devices)]
    with serving(arguments, "127.0.0.1:0", "", names[0]) as address:
        if shutil.which("ib_read_bw"):
            _read_bw_server(names[0])
        arguments.address, arguments.devices = address, ",".join(names[1:] or names)
        read(arguments)


# -- beside perftest


def _read_bw_server(devices: str) -> None:
    device = topology.select(topology.read(), devices)[0]

    def run() -> None:
        while True:
            subprocess.run(_read_bw_command(device), capture_output=True, check=False)
            time.sleep(0.2)

    threading.Thread(target=run, daemon=True).start()


def _read_bw_command(nic: topology.Nic) -> list[str]:
    command = ["ib_read_bw", "-d", nic.device, "-i", str(nic.port), "-s", "1048576", "-n", "1000", "-F"]
    return [*command, "-p", str(READ_BW_PORT), *(["-x", str(topology.gid_index(nic))] if nic.ethernet else [])]


def _read_bw(name: str, host: str) -> str:
    nic = topology.select(topology.read(), name)[0]
    shown = subprocess.run([*_read_bw_command(nic), host], capture_output=True, text=True, check=False)
    figures = [line.split() for line in shown.stdout.splitlines() if line.split()[:1] == ["1048576"]]
    if not figures:
        return f"ib_read_bw did not work: {(shown.stderr or shown.stdout).strip()[-200:]}"
    if not float(figures[0][3]):
        return "ib_read_bw has no figure: it counts a processor's cycles, which a guest does not have"
    return f"ib_read_bw, 1 MiB, {name}: {float(figures[0][3]) * (1 << 20) / 1e9:.2f} GB/s"


# -- what Python costs


def python(arguments: argparse.Namespace) -> None:
    """Every step of a read that this package's own code does, a device's part left out."""
    for extents in (1, 2):
        steps = python_cost(arguments.batch, extents)
        total = sum(steps.values())
        shown = ", ".join(f"{name} {cost:.2f}" for name, cost in steps.items())
        print(f"batch {arguments.batch}, {extents} extents a page: {total:.2f} µs a page ({shown})")


def python_cost(count: int, extents: int, size: int = 65536, repeat: int = 300) -> dict[str, float]:
    """Microseconds a page, by step."""
    area = memory.create("benchmark-landing", size * count)
    part = size // extents
    batch = [
        PageRead(
            f"0123456789abcdef:{number:064x}:tp1.pp0",
            size,
            [Extent(area, number * size + piece * part, part) for piece in range(extents)],
        )
        for number in range(count)
    ]
    registered = Registered(area, np.array([area.address]), [np.array([7], np.uint32)], [np.array([8], np.uint32)])
    rows = [wire.PageRow(Outcome.OK, size, 1)] * count
    places = frames.encode_places(rows, [1] * count, [(0, number * size, size) for number in range(count)])
    payload = places[wire.HEADER_SIZE :]
    regions = np.array([[1 << 40, size * count]], np.uint64)
    sizes = [page.size for page in batch]
    keys = np.array([9], np.uint32)
    # A C function that does nothing stands for the device's own code.
    nothing = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    call = nothing(ctypes.cast(ctypes.CDLL(None).labs, ctypes.c_void_p).value or 0)
    completions = np.zeros(64, abi.COMPLETION)
    state: dict[str, object] = {}

    def ask() -> None:
        total_bytes(batch)
        wire.encode_read(wire.ReadRequest([page.key for page in batch], [page.size for page in batch], 1.0))

    def decode() -> None:
        state["places"] = frames.decode_places(payload, sizes, regions)[1]

    def fill() -> None:
        local, located = locate([extent for page in batch for extent in page.into], [registered])
        plan = Plan(local, state["places"], op=abi.OP_READ, max_pieces=16)  # type: ignore[arg-type]
        state["plan"] = plan
        state["progress"] = Progress(plan, np.cumsum(np.array(sizes, np.uint64)))
        state["keys"] = located.local_keys(0)

    def post() -> None:
        plan = state["plan"]
        assert isinstance(plan, Plan)
        call(1, plan.chain(0, [len(plan)], keys, keys), 2)

    def poll() -> None:
        plan, progress = state["plan"], state["progress"]
        assert isinstance(plan, Plan) and isinstance(progress, Progress)
        call(1, 64, completions.ctypes.data)
        done = completions[:1]
        for _number, _status in zip(done["id"].tolist(), done["status"].tolist(), strict=True):
            outcomes: list[Outcome | None] = [None] * count
            for at in progress.carried_out(0, len(plan)):
                outcomes[at] = Outcome.OK

    steps: dict[str, Callable[[], None]] = {"ask": ask, "decode": decode, "fill": fill, "post": post, "poll": poll}
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(repeat):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            best[name] = min(best[name], time.perf_counter() - began)
    area.close()
    return {name: cost / count * 1e6 for name, cost in best.items()}


def _credentials(arguments: argparse.Namespace) -> Credentials:
    secret = b""
    if arguments.secret_file:
        with open(arguments.secret_file, "rb") as file:
            secret = file.read().rstrip(b"\r\n")
    return Credentials(secret, "benchmark")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rdma", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(required=True)
    for name, run, needs in (("serve", serve, "serve"), ("read", read, "read"), ("local", local, "serve read")):
        command = commands.add_parser(name)
        command.set_defaults(run=run)
        command.add_argument("--devices", default="", help="as the setting device_name; default: all fast ones")
        command.add_argument("--secret-file", default="", help="as the nodes' setting; the same on both sides")
        if "serve" in needs:
            command.add_argument("--memory", default="1gb", help="what is served; more than a cache")
        if name == "serve":
            command.add_argument("--listen", default="0.0.0.0:7799")
            command.add_argument("--advertise", default="127.0.0.1")
        if "read" in needs:
            command.add_argument("--sizes", default=SIZES)
            command.add_argument("--batch", type=int, default=128, help="pages of a batch")
            command.add_argument("--seconds", type=float, default=3.0, help="for each size")
            command.add_argument("--no-verify", action="store_true", help="leave checksums out")
        if name == "read":
            command.add_argument("address", help="what serve printed")
    cost = commands.add_parser("python")
    cost.set_defaults(run=python)
    cost.add_argument("--batch", type=int, default=128)
    return parser.parse_args()


if __name__ == "__main__":
    main()
