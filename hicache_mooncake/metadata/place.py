"""What a ``redis_url`` says: which servers to ask first, how they are arranged, and how to log in. Pure, no I/O but
for a password file, which is read at every login.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from urllib.parse import parse_qsl, quote, urlencode

import redis.connection
import redis.credentials
import redis.exceptions as failures

from hicache_mooncake.config_values import masked_url, split_redis_url
from hicache_mooncake.errors import ConfigError

SENTINEL_PORT = 26379
REDIS_PORT = 6379

Mode = Literal["single", "sentinel", "cluster"]


class Address(NamedTuple):
    """A server's host and port; an empty host is a unix socket's."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Login:
    """How connections to servers of one kind are made: redis-py's class and its arguments, without host and port."""

    connection_class: Callable[..., Any]
    arguments: dict[str, Any] = field(repr=False)

    @property
    def user(self) -> str:
        return str(self.arguments.get("username") or "default")

    def arguments_for(self, address: Address) -> dict[str, Any]:
        if not address.host:
            return self.arguments
        return {**self.arguments, "host": address.host, "port": address.port}


@dataclass(frozen=True)
class Place:
    """``addresses`` are the seeds: the server itself, sentinels, or members of a cluster. ``shown`` has no password."""

    mode: Mode
    shown: str
    addresses: tuple[Address, ...]
    service: str
    login: Login
    sentinel_login: Login


class PasswordFile(redis.credentials.CredentialProvider):  # type: ignore[misc]
    """User and password, the password read from a file anew at every login: who rotates it restarts nothing."""

    def __init__(self, user: str, path: str) -> None:
        self._user = user
        self._path = path

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        try:
            with open(self._path, encoding="utf-8") as source:
                password = source.read(1 << 16).rstrip("\r\n")
        except (OSError, ValueError) as error:
            raise failures.AuthenticationError(f"password_file {self._path}: {type(error).__name__}") from None
        if not password:
            raise failures.AuthenticationError(f"password_file {self._path} is empty")
        return (self._user, password) if self._user else (password,)


def parse_place(url: str) -> Place:
    """Raises :class:`ConfigError` for a URL that no connection can be made from."""
    shown = masked_url(url)
    try:
        scheme, credentials, hosts, path, query = split_redis_url(url)
        words = dict(parse_qsl(query, keep_blank_values=True))
        sentinel_words = {
            name.partition("_")[2]: words.pop(name) for name in list(words) if name.startswith("sentinel_")
        }
        if scheme == "unix":
            login = _login(url.partition("?")[0], words)
            return Place("single", shown, (Address("", 0),), "", login, login)
        base, _, kind = scheme.partition("+")
        mode: Mode = "sentinel" if kind == "sentinel" else "cluster" if kind == "cluster" else "single"
        addresses = tuple(
            Address(host, port or (SENTINEL_PORT if mode == "sentinel" else REDIS_PORT)) for host, port in hosts
        )
        service = ""
        if mode == "sentinel":
            service, _, path = path.strip("/").partition("/")
            path = "/" + path
        login = _login(f"{base}://{credentials}{hosts[0][0] if ':' not in hosts[0][0] else '[::1]'}{path}", words)
        tls = {name: value for name, value in words.items() if name.startswith("ssl_")}
        account = ""
        if sentinel_words.get("username") or sentinel_words.get("password"):
            account = ":".join(quote(sentinel_words.pop(name, ""), safe="") for name in ("username", "password")) + "@"
        sentinel_login = _login(f"{base}://{account}h", {**tls, **sentinel_words})
        return Place(mode, shown, addresses, service, login, sentinel_login)
    except (ValueError, TypeError, OSError, failures.RedisError) as error:
        # The text of these errors may quote the URL, so it is not passed on.
        raise ConfigError("redis_url", shown, f"it cannot be used ({type(error).__name__})") from None


def _login(url: str, words: dict[str, str]) -> Login:
    words = dict(words)
    path = words.pop("password_file", "")
    arguments: dict[str, Any] = redis.connection.parse_url(url + ("?" + urlencode(words) if words else ""))
    made = arguments.pop("connection_class", redis.connection.Connection)
    if made is not redis.connection.UnixDomainSocketConnection:
        arguments.pop("host", None)
        arguments.pop("port", None)
    if path:
        user = arguments.pop("username", "")
        arguments.pop("password", None)
        arguments["credential_provider"] = PasswordFile(user, path)
    return Login(made, arguments)
