"""Redis users that may not do everything: refused at open with what to add, or told what they miss."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import redis

from hicache_mooncake.errors import ConfigError, Unavailable
from hicache_mooncake.metadata import Directory, ObjectRecord
from hicache_mooncake.metadata.directory import ACL_RULES

from .conftest import TcpRedis, fresh_pool, keys, node
from .test_directory_faults import canned

A = "a~00000001/dram"


@pytest.fixture
def raw(tcp_redis: TcpRedis) -> Iterator[redis.Redis]:
    with tcp_redis.client() as client:
        yield client


def allow(raw: redis.Redis, rules: str) -> None:
    raw.execute_command("ACL", "SETUSER", "cache", "reset", "on", ">secretword", *rules.split())


def directory_of(server: TcpRedis, password: str = "secretword") -> Directory:
    return Directory(f"redis://cache:{password}@127.0.0.1:{server.port}/1", fresh_pool(), timeout=5.0)


def without(command: str) -> str:
    return " ".join(rule for rule in ACL_RULES.split() if rule != f"+{command}")


def test_every_missing_permission_is_found_at_open(tcp_redis: TcpRedis, raw: redis.Redis) -> None:
    commands = [rule[1:] for rule in ACL_RULES.split() if rule.startswith("+")]
    for command in set(commands) - {"info"}:
        allow(raw, without(command))
        directory = directory_of(tcp_redis)
        with pytest.raises(ConfigError) as caught:
            directory.open()
        directory.close()
        error = caught.value
        assert error.field == "redis_url"
        assert f"'{command}'" in error.allowed, "Redis names it, " + command
        assert error.hint.endswith(f"ACL SETUSER cache {ACL_RULES}")
        assert "secretword" not in str(error) and "heals" not in str(error)
    assert raw.dbsize() == 0, "nothing is created by a user that cannot work"


def test_the_hint_helps(tcp_redis: TcpRedis, raw: redis.Redis) -> None:
    allow(raw, "~other:* +@read")
    directory = directory_of(tcp_redis)
    with pytest.raises(ConfigError) as caught:
        directory.open()
    raw.execute_command(*caught.value.hint.partition(": ")[2].split())
    directory.open()
    assert directory.publish(keys(1), [1], A) == [0]
    directory.close()


def test_keys_that_are_not_allowed(tcp_redis: TcpRedis, raw: redis.Redis) -> None:
    allow(raw, ACL_RULES.replace("~hcm:*", "~other:*"))
    directory = directory_of(tcp_redis)
    with pytest.raises(ConfigError, match=r"HGET.*key") as caught:
        directory.open()
    assert "~hcm:*" in caught.value.hint
    directory.close()


@pytest.mark.parametrize("rules", ["~hcm:* +@all -@dangerous -@admin", without("info")])
def test_without_info(tcp_redis: TcpRedis, raw: redis.Redis, caplog: pytest.LogCaptureFixture, rules: str) -> None:
    allow(raw, rules)
    directory = directory_of(tcp_redis)
    with caplog.at_level(logging.WARNING):
        directory.open()
    assert "ACL SETUSER cache +info" in caplog.text
    directory.join(node(), 30)
    assert directory.heartbeat(node(), 30) is True
    assert directory.publish(keys(2), [1, 1], A) == [0, 0]
    assert directory.lookup(keys(1)) == [ObjectRecord(1, (A,))]
    assert directory.sweep({node().id}) == 2
    assert directory.forget(keys(2), A) == 0
    assert directory.memory_policy() == ("", 0)
    assert not [entry for entry in raw.acl_log() if entry["object"] == "info" and int(entry["count"]) > 2]
    raw.flushall()
    assert directory.heartbeat(node(), 30) is False
    assert directory.heartbeat(node(), 30) is True
    directory.leave(node().id)
    directory.close()


def test_neither_info_nor_hello() -> None:
    with canned(b"+OK\r\n" * 4 + b"-NOPERM no info\r\n-ERR unknown command\r\n") as port:
        directory = Directory(f"redis://cache:word@127.0.0.1:{port}", "default", timeout=5.0)
        with pytest.raises(ConfigError, match="may not run INFO") as caught:
            directory.open()
        assert ACL_RULES in caught.value.hint
        directory.close()


def test_a_permission_taken_away_later(tcp_redis: TcpRedis, raw: redis.Redis) -> None:
    allow(raw, ACL_RULES)
    directory = directory_of(tcp_redis)
    directory.open()
    raw.execute_command("ACL", "SETUSER", "cache", "-mget")
    for call in (lambda: directory.lookup(keys(1)), lambda: directory.publish(keys(1), [1], A)):
        with pytest.raises(Unavailable) as caught:
            call()
        assert caught.value.hint.endswith(ACL_RULES)
    raw.execute_command("ACL", "SETUSER", "cache", "+mget")
    assert directory.publish(keys(1), [1], A) == [0]
    directory.close()


def test_a_password_changed_later(tcp_redis: TcpRedis, raw: redis.Redis) -> None:
    allow(raw, ACL_RULES)
    directory = directory_of(tcp_redis)
    directory.open()
    raw.execute_command("ACL", "SETUSER", "cache", "resetpass", ">other")
    raw.client_kill_filter(_type="normal", skipme=True)
    with pytest.raises(Unavailable, match="password in redis_url") as caught:
        directory.lookup(keys(1))
    assert "heals when" not in str(caught.value) and "secretword" not in str(caught.value)
    directory.close()


def test_what_of_an_existing_pool_is_refused(tcp_redis: TcpRedis, raw: redis.Redis) -> None:
    allow(raw, without("hget"))
    url = f"redis://cache:secretword@127.0.0.1:{tcp_redis.port}"
    with pytest.raises(ConfigError, match="hget") as caught:
        Directory.of_existing(url, "default", timeout=5.0)
    assert ACL_RULES in caught.value.hint
