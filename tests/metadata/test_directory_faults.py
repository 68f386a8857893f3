"""Redis killed, frozen, restarted, flushed, full, demoted: at most an error in time, and it heals."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hicache_mooncake.errors import ConfigError, Unavailable
from hicache_mooncake.metadata import Directory, ObjectRecord

from .conftest import PATIENCE, TIMEOUT, TcpRedis, eventually, keys, node

A = "a~00000001/dram"


@pytest.fixture
def directory(tcp_redis: TcpRedis) -> Iterator[Directory]:
    opened = Directory(tcp_redis.url, "default", timeout=TIMEOUT)
    opened.open()
    yield opened
    opened.close()


def every_method(directory: Directory) -> dict[str, Callable[[], object]]:
    return {
        "publish": lambda: directory.publish(keys(3), [1, 1, 1], A),
        "forget": lambda: directory.forget(keys(3), A),
        "lookup": lambda: directory.lookup(keys(3)),
        "nodes": directory.nodes,
        "join": lambda: directory.join(node(), 30),
        "heartbeat": lambda: directory.heartbeat(node(), 30),
        "leave": lambda: directory.leave(node().id),
        "declare_namespace": lambda: directory.declare_namespace("00", {"a": "b"}),
        "namespaces": directory.namespaces,
        "sweep": lambda: directory.sweep(set()),
    }


def refuses_in_time(call: Callable[[], object]) -> None:
    started = time.monotonic()
    with pytest.raises(Unavailable):
        call()
    assert time.monotonic() - started < PATIENCE


def test_killed_and_started_again_empty(tcp_redis: TcpRedis, directory: Directory) -> None:
    directory.join(node(), 30)
    directory.publish(keys(3), [1, 1, 1], A)
    tcp_redis.kill()
    for call in every_method(directory).values():
        refuses_in_time(call)
    tcp_redis.start()
    eventually(lambda: directory.lookup(keys(3)) == [None] * 3)
    assert directory.heartbeat(node(), 30) is False
    assert directory.heartbeat(node(), 30) is True
    assert set(directory.nodes()) == {node().id}
    assert directory.publish(keys(3), [1, 1, 1], A) == [0, 0, 0]


def test_restarted_between_two_calls_costs_no_error(tcp_redis: TcpRedis, directory: Directory) -> None:
    directory.publish(keys(1), [1], A)
    tcp_redis.kill()
    tcp_redis.start()
    assert directory.publish(keys(1), [1], A) == [0], "the reused connection was closed: a fresh one is made"
    assert directory.lookup(keys(1)) == [ObjectRecord(1, (A,))]


def test_restarted_with_its_data_is_still_another_directory(tcp_redis: TcpRedis, directory: Directory) -> None:
    directory.join(node(), 300)
    directory.publish(keys(1), [1], A)
    with tcp_redis.client() as client:
        client.save()
    tcp_redis.kill()
    tcp_redis.start()
    assert directory.lookup(keys(1)) == [ObjectRecord(1, (A,))]
    assert directory.heartbeat(node(), 30) is False, "what was published after the save is gone"
    assert directory.heartbeat(node(), 30) is True


def test_frozen_and_thawed(tcp_redis: TcpRedis, directory: Directory) -> None:
    directory.join(node(), 300)
    directory.publish(keys(3), [1, 1, 1], A)
    tcp_redis.freeze()
    for call in every_method(directory).values():
        refuses_in_time(call)
        time.sleep(TIMEOUT / 2)  # until the next call is one that tries again
    tcp_redis.thaw()
    eventually(lambda: directory.publish(keys(3), [1, 1, 1], A) == [0, 0, 0])
    assert directory.lookup(keys(3)) == [ObjectRecord(1, (A,))] * 3


def test_a_fresh_connection_to_a_frozen_redis_is_bounded(tcp_redis: TcpRedis, directory: Directory) -> None:
    tcp_redis.freeze()
    late = Directory(tcp_redis.url, "default", timeout=TIMEOUT)
    try:
        started = time.monotonic()
        with pytest.raises(ConfigError, match="redis_url"):
            late.open()
        assert time.monotonic() - started < PATIENCE
        time.sleep(TIMEOUT)  # past the moment in which calls fail without trying
        refuses_in_time(lambda: late.lookup(keys(1)))
    finally:
        tcp_redis.thaw()
        late.close()


def test_many_callers_of_a_frozen_redis_do_not_wait_one_after_another(
    tcp_redis: TcpRedis, directory: Directory
) -> None:
    tcp_redis.freeze()
    outcomes: list[float] = []

    def call() -> None:
        for _ in range(20):
            with contextlib.suppress(Unavailable):
                directory.lookup(keys(1))
        outcomes.append(time.monotonic())

    started = time.monotonic()
    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(outcomes) == 8
    assert max(outcomes) - started < 20 * TIMEOUT, "most of them failed at once"
    tcp_redis.thaw()
    eventually(lambda: directory.lookup(keys(1)) == [None])


def test_calls_in_flight_when_redis_dies(tcp_redis: TcpRedis, directory: Directory) -> None:
    stop = threading.Event()
    longest = 0.0
    answered = 0
    wrong: list[BaseException] = []

    def work() -> None:
        nonlocal longest, answered
        while not stop.is_set():
            started = time.monotonic()
            try:
                directory.publish(keys(100), [1] * 100, A)
                records = directory.lookup(keys(100))
                assert all(record in (None, ObjectRecord(1, (A,))) for record in records)
                answered += 1
            except Unavailable:
                time.sleep(0.005)
            except BaseException as error:
                wrong.append(error)
                return
            longest = max(longest, time.monotonic() - started)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            time.sleep(0.1)
            tcp_redis.kill()
            time.sleep(0.05)
            tcp_redis.start()
        before = answered
        eventually(lambda: answered > before + 20)
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    assert not wrong
    assert longest < 2 * PATIENCE


def test_killed_clients_are_not_noticed(tcp_redis: TcpRedis, directory: Directory) -> None:
    directory.publish(keys(1), [1], A)
    with tcp_redis.client() as client:
        for _ in range(20):
            client.client_kill_filter(_type="normal", skipme=True)
            assert directory.lookup(keys(1)) == [ObjectRecord(1, (A,))]


def test_idle_clients_that_redis_drops(tcp_redis: TcpRedis, directory: Directory) -> None:
    with tcp_redis.client() as client:
        client.config_set("timeout", 1)
        directory.publish(keys(1), [1], A)
        eventually(lambda: len(client.client_list()) == 1, within=20)
    assert directory.lookup(keys(1)) == [ObjectRecord(1, (A,))]


def test_flushed(tcp_redis: TcpRedis, directory: Directory) -> None:
    directory.join(node(), 30)
    directory.publish(keys(3), [1, 1, 1], A)
    with tcp_redis.client() as client:
        client.flushall()
        assert directory.lookup(keys(3)) == [None] * 3
        assert directory.heartbeat(node(), 30) is False
        assert client.pttl(f"hcm:default:node:{{0}}{node().id}") > 0
        assert client.hget("hcm:default", "schema") == b"2"


def test_created_anew_with_other_shards(tcp_redis: TcpRedis, directory: Directory) -> None:
    directory.join(node(), 30)
    with tcp_redis.client() as client:
        client.flushall()
    anew = Directory(tcp_redis.url, "default", timeout=TIMEOUT, shards=2)
    anew.open()
    anew.close()
    with pytest.raises(Unavailable, match="created with 2"):
        directory.heartbeat(node(), 30)


def test_a_heartbeat_whose_reply_was_lost_still_tells(tcp_redis: TcpRedis, directory: Directory) -> None:
    # 1. the node's key expires   2. a heartbeat creates it again, but its reply is lost
    # 3. the next one must still say that others may have taken the node for dead meanwhile
    directory.join(node(), 300)
    with tcp_redis.client() as client:
        client.delete(f"hcm:default:node:{{0}}{node().id}")
        announced = directory._announce(node(), 300)  # what a heartbeat does before it looks at the reply
        assert announced[0].lease
    assert directory.heartbeat(node(), 30) is False
    assert directory.heartbeat(node(), 30) is True


def test_demoted_to_a_replica(tcp_redis: TcpRedis, directory: Directory) -> None:
    directory.publish(keys(1), [1], A)
    with tcp_redis.client() as client:
        client.replicaof("127.0.0.1", "1")
        refuses_in_time(lambda: directory.publish(keys(2), [1, 1], A))
        assert directory.lookup(keys(1)) == [ObjectRecord(1, (A,))]
        client.replicaof("no", "one")
    assert directory.publish(keys(2), [1, 1], A) == [0, 0]


def test_out_of_memory(tcp_redis: TcpRedis, directory: Directory) -> None:
    directory.publish(keys(1), [1], A)
    with tcp_redis.client() as client:
        client.config_set("maxmemory", "1")
        refuses_in_time(lambda: directory.publish(keys(2), [1, 1], A))
        assert directory.lookup(keys(1)) == [ObjectRecord(1, (A,))]
        client.config_set("maxmemory", "0")
    assert directory.publish(keys(2), [1, 1], A) == [0, 0]


def test_an_eviction_policy_is_warned_about(tcp_redis: TcpRedis, caplog: pytest.LogCaptureFixture) -> None:
    with tcp_redis.client() as client:
        client.config_set("maxmemory", "100mb")
        client.config_set("maxmemory-policy", "allkeys-lru")
    opened = Directory(tcp_redis.url, "default", timeout=TIMEOUT)
    opened.open()
    opened.close()
    assert "allkeys-lru" in caplog.text


def test_closed(tcp_redis: TcpRedis, directory: Directory) -> None:
    directory.close()
    for call in every_method(directory).values():
        refuses_in_time(call)
    with tcp_redis.client() as client:
        assert len(client.client_list()) == 1


class TestOpen:
    """What open() says about a URL under which no pool can be."""

    def refused(self, url: str, match: str, shown: str = "") -> ConfigError:
        directory = Directory(url, "default", timeout=TIMEOUT)
        started = time.monotonic()
        with pytest.raises(ConfigError, match=match) as caught:
            directory.open()
        assert time.monotonic() - started < PATIENCE
        assert caught.value.field == "redis_url"
        directory.close()
        return caught.value

    def test_nothing_listens(self, tcp_redis: TcpRedis) -> None:
        tcp_redis.kill()
        error = self.refused(tcp_redis.url, "cannot be reached")
        assert "does Redis run there, and may this host connect" in error.hint

    def test_tried_again_at_once(self, tcp_redis: TcpRedis) -> None:
        directory = Directory(tcp_redis.url, "default", timeout=TIMEOUT)
        tcp_redis.freeze()
        try:
            for _ in range(2):
                with pytest.raises(ConfigError, match=r"cannot be reached: [^N]") as caught:
                    directory.open()
                assert caught.value.hint
        finally:
            tcp_redis.thaw()
            directory.close()

    def test_no_such_socket(self, tmp_path: Path) -> None:
        self.refused(f"unix://{tmp_path}/none.sock", "cannot be reached")

    def test_a_port_that_drops_connections(self) -> None:
        with socket.socket() as full, contextlib.ExitStack() as waiting:
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            for _ in range(4):  # more than the backlog takes: further connection requests are not answered
                client = waiting.enter_context(socket.socket())
                client.setblocking(False)
                client.connect_ex(full.getsockname())
            self.refused(f"redis://127.0.0.1:{full.getsockname()[1]}", "cannot be reached")

    def test_a_name_that_does_not_resolve(self) -> None:
        self.refused("redis://no-such-host.invalid:6379", "cannot be reached")

    def test_a_resolver_that_hangs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        release = threading.Event()

        def hang(*_: object, **__: object) -> list[object]:
            release.wait(30)
            raise socket.gaierror("no answer")

        monkeypatch.setattr(socket, "getaddrinfo", hang)
        try:
            self.refused("redis://redis.example:6379", "cannot be reached")
        finally:
            release.set()

    def test_not_redis(self) -> None:
        with canned(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
            self.refused(f"redis://127.0.0.1:{port}", "not Redis")

    def test_too_old(self) -> None:
        info = b"# Server\r\nredis_version:6.0.16\r\n"
        reply = b"+OK\r\n" * 3 + b"$%d\r\n%s\r\n*0\r\n" % (len(info), info)
        with canned(reply) as port:
            self.refused(f"redis://127.0.0.1:{port}", r"6\.0\.16")

    def test_cluster(self, tmp_path: Path) -> None:
        cluster = TcpRedis(tmp_path, "--cluster-enabled", "yes")
        try:
            self.refused(cluster.url, "Cluster")
        finally:
            cluster.kill()

    @pytest.mark.parametrize("credentials", ["", "someone:wrongword@", ":wrongword@"])
    def test_password_refused(self, tmp_path: Path, credentials: str) -> None:
        guarded = TcpRedis(tmp_path, "--requirepass", "rightword")
        try:
            error = self.refused(f"redis://{credentials}127.0.0.1:{guarded.port}", "password is refused")
            assert "word@" not in str(error)
            assert "password in redis_url" in error.hint
        finally:
            guarded.kill()

    @pytest.mark.parametrize(
        "url", ["http://a", "redis://h:99999", "redis://h/?nonsense=1", "", "redis://h?socket_timeout=x"]
    )
    def test_a_url_that_is_none(self, url: str) -> None:
        with pytest.raises(ConfigError, match="redis_url"):
            Directory(url, "default")


def test_user_password_and_database(tmp_path: Path) -> None:
    guarded = TcpRedis(tmp_path, "--requirepass", "root%word", "--user", "cache", "on", ">p@ss", "~*", "+@all")
    try:
        directory = Directory(f"redis://cache:p%40ss@127.0.0.1:{guarded.port}/3", "default", timeout=TIMEOUT)
        directory.open()
        directory.publish(keys(1), [1], A)
        with guarded.client(password="root%word", db=3) as client:
            assert client.dbsize() == 2
            client.client_kill_filter(_type="normal", skipme=True)
        assert directory.lookup(keys(1)) == [ObjectRecord(1, (A,))], "a new connection logs in and selects too"
        guarded.kill()
        with pytest.raises(Unavailable) as caught:
            directory.lookup(keys(1))
        assert "p@ss" not in str(caught.value) and "p%40ss" not in str(caught.value)
        assert "cache:***@" in str(caught.value)
        directory.close()
    finally:
        guarded.kill()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_tls(tmp_path: Path) -> None:
    certificate = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -keyout key.pem -out cert.pem"
    subprocess.run(
        [*certificate.split(), "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        timeout=30,
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--tls-port", str(port), "--tls-cert-file", "cert.pem", "--tls-key-file", "key.pem"]
    secured = TcpRedis(tmp_path, *options, "--tls-auth-clients", "no")
    try:
        url = f"rediss://localhost:{port}?ssl_ca_certs={tmp_path}/cert.pem"
        directory = Directory(url, "default", timeout=2.0)
        directory.open()
        assert directory.publish(keys(1), [1], A) == [0]
        assert directory.lookup(keys(1)) == [ObjectRecord(1, (A,))]
        directory.close()
        untrusting = Directory(f"rediss://localhost:{port}", "default", timeout=2.0)
        with pytest.raises(ConfigError, match="redis_url"):
            untrusting.open()
        untrusting.close()
    finally:
        secured.kill()


@contextlib.contextmanager
def canned(reply: bytes) -> Iterator[int]:
    """A port that answers whatever it is sent with ``reply``."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(5)

        def serve() -> None:
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(5)
                    connection.recv(65536)
                    connection.sendall(reply)
                    while connection.recv(65536):
                        pass

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            thread.join(15)
