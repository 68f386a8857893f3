"""Real groups of Redis servers on this machine, to be mistreated: a cluster, and a master with sentinels."""

from __future__ import annotations

import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

import redis

from hicache_mooncake.metadata.redis_server import find_binary
from tests.pool import eventually

NODE_TIMEOUT = 1.0
"""Seconds of silence after which a cluster's members and sentinels take a server for dead."""

FAILOVER_WITHIN = NODE_TIMEOUT + 8
"""Seconds in which a replica is promoted, on a busy machine."""

_handed_out: set[int] = set()


def free_port() -> int:
    """One that leaves room for a cluster's second port, 10,000 above it, and that was not handed out before."""
    while True:
        with socket.socket() as probe, socket.socket() as bus:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
            if port > 55_000 or port in _handed_out:
                continue
            with suppress(OSError):
                bus.bind(("127.0.0.1", port + 10_000))
                _handed_out.add(port)
                return port


class Server:
    """A redis-server in a directory of its own. It keeps its port over restarts, and its data only if told so."""

    def __init__(self, home: Path, *options: str, binary: str = "", port: int = 0, sentinel: bool = False) -> None:
        self.home = home
        self.port = port or free_port()
        self.options = list(options)
        self.binary = binary or find_binary()
        self.sentinel = sentinel
        self.process: subprocess.Popen[bytes] | None = None
        home.mkdir(parents=True, exist_ok=True)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def client(self, **options: object) -> redis.Redis:
        return redis.Redis(port=self.port, socket_timeout=5, **options)

    def start(self) -> Server:
        assert self.process is None
        arguments = [self.binary]
        if self.sentinel:
            arguments += [str(self.home / "sentinel.conf"), "--sentinel"]
        else:
            arguments += ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", *self.options]
        with open(self.home / "log", "ab") as log:
            self.process = subprocess.Popen(arguments, cwd=self.home, stdout=log, stderr=log)
        eventually(self.listens, what=f"{arguments} listens")
        return self

    def listens(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1.0):
            return True
        return False

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait(10)
            self.process = None


class Group:
    """Servers that end together."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="hcm-redis-group-")
        self.home = Path(self._directory.name)
        self.servers: list[Server] = []

    def close(self) -> None:
        for server in self.servers:
            server.kill()
        self._directory.cleanup()

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Cluster(Group):
    """Three masters with a third of the slots each, and ``replicas`` of each."""

    def __init__(self, *, replicas: int = 0, binary: str = "", options: Sequence[str] = ()) -> None:
        super().__init__()
        settings = [
            *("--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf"),
            *("--cluster-node-timeout", str(int(NODE_TIMEOUT * 1000)), "--cluster-require-full-coverage", "no"),
            *("--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1", *options),
        ]
        try:
            for number in range(3 * (1 + replicas)):
                self.servers.append(Server(self.home / str(number), *settings, binary=binary).start())
            self._form(replicas)
        except BaseException:
            self.close()
            raise

    def _form(self, replicas: int) -> None:
        first = self.servers[0]
        for number, server in enumerate(self.servers):
            with server.client() as client:
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
                if number < 3:
                    low, high = number * 16384 // 3, (number + 1) * 16384 // 3 - 1
                    slots = range(low, high + 1)
                    client.execute_command("CLUSTER", "ADDSLOTS", *slots)
                if server is not first:
                    client.execute_command("CLUSTER", "MEET", "127.0.0.1", first.port)
        for server in self.servers:
            eventually(lambda server=server: self._knows(server) == len(self.servers), 20, "the members meet")
        for number, server in enumerate(self.servers[3:]):
            with self.servers[number % 3].client() as client:
                master = client.execute_command("CLUSTER", "MYID").decode()
            with server.client() as client:
                eventually(lambda client=client, master=master: _done(client, "CLUSTER", "REPLICATE", master), 10)
        for server in self.servers:
            eventually(lambda server=server: self.state(server) == "ok", 20, "the cluster is ready")
        for number in range(3 if replicas else 0):
            eventually(lambda number=number: self.replicas_of(number), 20, "replicas are in step")

    @staticmethod
    def _knows(server: Server) -> int:
        with server.client() as client:
            text = bytes(client.execute_command("CLUSTER", "NODES"))
        return sum(b"handshake" not in line for line in text.splitlines() if line)

    @staticmethod
    def state(server: Server) -> str:
        with server.client() as client:
            return "ok" if b"cluster_state:ok" in bytes(client.execute_command("CLUSTER", "INFO")) else "fail"

    def replicas_of(self, number: int) -> int:
        """How many replicas of one of the first masters are in step with it."""
        with self.servers[number].client() as client:
            facts = client.info("replication")
        return sum(str(facts[key].get("state")) == "online" for key in facts if key.startswith("slave"))

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(server.address for server in self.servers[:3])

    def masters(self) -> list[Server]:
        """Who has slots now, as the living see it."""
        found = []
        for server in self.servers:
            with suppress(redis.RedisError), server.client() as client:
                if client.info("replication")["role"] == "master":
                    found.append(server)
        return found

    def flush(self) -> None:
        for server in self.servers:
            with suppress(redis.RedisError), server.client() as client:
                client.flushall()

    def keys(self) -> int:
        """Keys on all masters together."""
        total = 0
        for server in self.masters():
            with server.client() as client:
                total += client.dbsize()
        return total


class Sentinels(Group):
    """A master, a replica of it, and three sentinels that watch them under the name ``main``."""

    def __init__(self, *, binary: str = "", options: Sequence[str] = ()) -> None:
        super().__init__()
        try:
            self._start(binary, options)
        except BaseException:
            self.close()
            raise

    def _start(self, binary: str, options: Sequence[str]) -> None:
        common = ["--repl-diskless-sync-delay", "0", *options]
        master = Server(self.home / "0", *common, binary=binary).start()
        self.servers.append(master)
        replica = Server(self.home / "1", *common, "--replicaof", "127.0.0.1", str(master.port), binary=binary)
        self.servers.append(replica.start())
        self.sentinels = [Server(self.home / f"s{n}", sentinel=True, binary=binary) for n in range(3)]
        for sentinel in self.sentinels:
            (sentinel.home / "sentinel.conf").write_text(
                f"port {sentinel.port}\nbind 127.0.0.1\n"
                f"sentinel monitor main 127.0.0.1 {master.port} 2\n"
                f"sentinel down-after-milliseconds main {int(NODE_TIMEOUT * 1000)}\n"
                "sentinel failover-timeout main 3000\n"
            )
            self.servers.append(sentinel.start())
        eventually(self._ready, 30, "sentinels know each other and the replica")

    def _ready(self) -> bool:
        for sentinel in self.sentinels:
            with sentinel.client() as client:
                facts = client.sentinel_master("main")
                if int(facts["num-other-sentinels"]) < 2 or int(facts["num-slaves"]) < 1:
                    return False
        return True

    @property
    def url(self) -> str:
        return "redis+sentinel://" + ",".join(sentinel.address for sentinel in self.sentinels) + "/main/1"

    def master(self) -> Server:
        """Who is the master for the first sentinel that answers."""
        for sentinel in self.sentinels:
            with suppress(redis.RedisError), sentinel.client() as client:
                _, port = client.sentinel_get_master_addr_by_name("main")
                return next(server for server in self.servers if server.port == port)
        raise AssertionError("no sentinel answers")

    def replica(self) -> Server:
        return next(server for server in self.servers[:2] if server is not self.master())

    def wait_for_replica(self) -> None:
        """Until the other one is in step."""

        def in_step() -> bool:
            with suppress(redis.RedisError), self.replica().client() as client:
                return client.info("replication").get("master_link_status") == "up"
            return False

        eventually(in_step, 20, "the replica is in step")


def _done(client: redis.Redis, *command: object) -> bool:
    try:
        client.execute_command(*command)
    except redis.ResponseError:
        return False
    return True


@contextmanager
def timed() -> Iterator[Callable[[], float]]:
    """Seconds since the block began."""
    started = time.monotonic()
    yield lambda: time.monotonic() - started
