"""The kinds of values a setting can have: pure parsers from what people type to what the program uses.

A parser takes the raw value (a string from the environment, anything JSON, TOML or YAML can hold) and returns
the typed value, or raises ``ValueError`` whose text says what would be accepted. It never quotes the raw
value: the caller decides whether that may be shown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl, urlsplit

Parser = Callable[[object], Any]

UNIX_SOCKET_PATH_MAX = 107
"""Bytes: ``sun_path`` holds 108 with its final NUL."""

_SIZE_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE | re.ASCII)
_DURATION_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "m": 60.0, "min": 60.0, "h": 3600.0}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|min|m|h|)", re.IGNORECASE | re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", re.ASCII)
_TRUE = frozenset(("true", "yes", "on", "1"))
_FALSE = frozenset(("false", "no", "off", "0"))
_URL_PARAMETERS = frozenset(("db", "username", "password", "password_file", "client_name", "socket_read_size"))
_SENTINEL_PARAMETERS = frozenset(("sentinel_username", "sentinel_password", "sentinel_password_file"))
_TLS_PARAMETERS = frozenset(
    (
        "ssl_ca_certs",
        "ssl_ca_data",
        "ssl_ca_path",
        "ssl_cert_reqs",
        "ssl_certfile",
        "ssl_check_hostname",
        "ssl_ciphers",
        "ssl_keyfile",
        "ssl_min_version",
        "ssl_password",
    )
)
_SECRET_QUERY = re.compile(r"((?:^|[?&])[^=&]*password=)[^&]*", re.IGNORECASE)


def text(raw: object) -> str:
    """Any printable text on one line."""
    if not isinstance(raw, str):
        raise ValueError("text is expected")
    if not raw.isprintable():
        raise ValueError("text on one line, without control characters, is expected")
    return raw


def name(raw: object, *, empty: bool = False) -> str:
    """A word that is safe inside a Redis key, a file name and a log line."""
    if isinstance(raw, str) and (_NAME.fullmatch(raw) or (empty and not raw)):
        return raw
    raise ValueError("1 to 64 of A-Z a-z 0-9 _ . - are expected, starting with a letter, a digit or _")


def optional_name(raw: object) -> str:
    return name(raw, empty=True)


def flag(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, int) and raw in (0, 1):
        return bool(raw)
    if isinstance(raw, str):
        word = raw.strip().lower()
        if word in _TRUE or word in _FALSE:
            return word in _TRUE
    raise ValueError("true or false is expected (also yes, no, on, off, 1, 0)")


def size(raw: object) -> int:
    """Bytes. Units are powers of 1024 whether written ``kb``, ``KiB`` or ``k``, as SGLang's ``4gb`` is.

    >>> size("4gb") == size("4 GiB") == size(4 << 30) == size("4096m")
    True
    """
    if isinstance(raw, int) and not isinstance(raw, bool) and raw >= 0:
        return raw
    if isinstance(raw, float) and raw >= 0 and raw.is_integer():
        return int(raw)
    if isinstance(raw, str):
        match = _SIZE.fullmatch(raw.strip())
        if match:
            number, unit = match.groups()
            scale = _SIZE_UNITS[unit.lower()]
            return int(number) * scale if number.isdigit() else int(float(number) * scale)
    raise ValueError('a size is expected: bytes, or a number with a unit such as "512MiB", "4gb"')


def duration(raw: object) -> float:
    """Seconds.

    >>> duration("500ms"), duration("5s"), duration("2m"), duration(1)
    (0.5, 5.0, 120.0, 1.0)
    """
    if isinstance(raw, (int, float)) and not isinstance(raw, bool) and math.isfinite(raw) and raw >= 0:
        return float(raw)
    if isinstance(raw, str):
        match = _DURATION.fullmatch(raw.strip())
        if match:
            number, unit = match.groups()
            if unit.lower() == "ms":
                return float(number) / 1000  # 500ms is exactly 0.5, which 500 * 0.001 is not for every number
            return float(number) * _DURATION_UNITS[unit.lower()]
    raise ValueError('a duration is expected: seconds, or a number with a unit such as "5s", "500ms"')


def number(raw: object) -> float:
    if isinstance(raw, str):
        try:
            raw = float(raw.strip())
        except ValueError:
            raise ValueError("a number is expected") from None
    if isinstance(raw, (int, float)) and not isinstance(raw, bool) and math.isfinite(raw):
        return float(raw)
    raise ValueError("a number is expected")


def integer(raw: object) -> int:
    if isinstance(raw, str) and re.fullmatch(r"[+-]?[0-9]{1,18}", raw.strip(), re.ASCII):
        return int(raw)
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    if isinstance(raw, float) and raw.is_integer():
        return int(raw)
    raise ValueError("a whole number is expected")


def within(parse: Parser, low: float, high: float, allowed: str) -> Parser:
    """``parse``, then refuse what lies outside ``low`` … ``high``, saying ``allowed``."""

    def bounded(raw: object) -> Any:
        value = parse(raw)
        if not low <= value <= high:
            raise ValueError(allowed)
        return value

    return bounded


def choice(*words: str) -> Parser:
    """One of ``words``; YAML's bare ``on`` and ``off``, booleans there, are understood."""

    def chosen(raw: object) -> str:
        word = {True: "on", False: "off"}[raw] if isinstance(raw, bool) else raw
        if isinstance(word, str) and word.strip().lower() in words:
            return word.strip().lower()
        raise ValueError("one of " + ", ".join(words) + " is expected")

    return chosen


def socket_path(raw: object) -> str:
    """Empty, the absolute path of a unix socket, or ``@name`` for an abstract one."""
    value = text(raw)
    if value and not (value.startswith("/") or (value.startswith("@") and len(value) > 1)):
        raise ValueError("an absolute path of a unix socket, or @name for an abstract one, is expected")
    if len(value.encode()) > UNIX_SOCKET_PATH_MAX:
        raise ValueError(f"a unix socket's path has at most {UNIX_SOCKET_PATH_MAX} bytes")
    return value


def file_path(raw: object) -> str:
    value = text(raw)
    if value and not value.startswith("/"):
        raise ValueError("an absolute path is expected")
    return value


def endpoint(raw: object) -> str:
    """``host:port``, ``[v6]:port``; port 0 lets the system choose."""
    value = text(raw)
    if "://" in value or not _endpoint_parts(value, port_required=True):
        raise ValueError('host:port is expected, such as "0.0.0.0:7070" or "[::1]:0"')
    return value


def contact(raw: object) -> str:
    """Empty, ``host``, or ``host:port``: how others reach us; the port defaults to the one listened on."""
    value = text(raw)
    if value and ("://" in value or not _endpoint_parts(value, port_required=False)):
        raise ValueError('host or host:port is expected, such as "10.0.0.7" or "node7.rack2:7070"')
    return value


def _endpoint_parts(value: str, *, port_required: bool) -> bool:
    if value.startswith("["):
        host, bracket, rest = value[1:].partition("]")
        if not bracket or ":" not in host:
            return False
        colon, port = rest[:1], rest[1:]
    else:
        host, colon, port = value.partition(":")
    if not host or any(c.isspace() or c in "/@[]" for c in host):
        return False
    if not colon:
        return not port_required and not port
    return colon == ":" and port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535


def split_redis_url(url: str) -> tuple[str, str, list[tuple[str, int]], str, str]:
    """Scheme, credentials with their ``@``, hosts with their ports (0: not given), path and query of a Redis URL.

    >>> split_redis_url("redis+sentinel://u:p@s1,s2:26380/main/1?db=2")
    ('redis+sentinel', 'u:p@', [('s1', 0), ('s2', 26380)], '/main/1', 'db=2')

    Raises ``ValueError`` for what is none.
    """
    parts = urlsplit(url)
    credentials, at, places = parts.netloc.rpartition("@")
    hosts = []
    for place in places.split(",") if parts.scheme != "unix" else []:
        one = urlsplit(f"//{place}")
        if not one.hostname or one.port == 0:
            raise ValueError("no host")
        hosts.append((one.hostname, one.port or 0))
    return parts.scheme, credentials + at, hosts, parts.path, parts.query


def redis_url(raw: object) -> str:
    """Empty, or where the directory is: one Redis, the sentinels that watch one, or members of a Redis Cluster.

    ``redis://[user:password@]host[:port][/db]``, ``unix://[user:password@]/path[?db=n]``,
    ``redis+sentinel://[user:password@]host[:port][,…]/service[/db]``, ``redis+cluster://[user:password@]host[:port][,…]``,
    and ``rediss`` instead of ``redis`` for TLS.
    """
    value = text(raw).strip()
    if not value:
        return value
    refused = (
        "redis://[user:password@]host[:port][/db], rediss://…, unix:///path[?db=n], "
        "redis+sentinel://host[:port][,…]/service[/db] or redis+cluster://host[:port][,…] is expected"
    )
    try:
        scheme, _, hosts, path, parameters = split_redis_url(value)
    except ValueError:
        raise ValueError(refused + "; special characters in a password are written %XX") from None
    base, _, kind = scheme.partition("+")
    if scheme == "unix":
        if not path.startswith("/") or path == "/":
            raise ValueError(refused)
    elif base not in ("redis", "rediss") or kind not in ("", "sentinel", "cluster"):
        raise ValueError(refused)
    elif kind == "" and len(hosts) > 1:
        raise ValueError("several hosts are for redis+sentinel:// and redis+cluster://")
    elif kind == "cluster" and path not in ("", "/", "/0"):
        raise ValueError("a Redis Cluster has no database but 0: redis+cluster://host[:port][,…] is expected")
    elif kind == "sentinel" and not re.fullmatch(r"/[A-Za-z0-9_.-]+(/[0-9]{1,5})?/?", path, re.ASCII):
        raise ValueError("redis+sentinel://host[:port][,…]/service[/db] is expected; service is what sentinels watch")
    elif kind == "" and path not in ("", "/") and not re.fullmatch(r"/[0-9]{1,5}/?", path):
        raise ValueError(refused + "; the path is the number of a database")
    query = dict(parse_qsl(parameters, keep_blank_values=True))
    allowed = _URL_PARAMETERS
    if kind == "sentinel":
        allowed |= _SENTINEL_PARAMETERS
    if base == "rediss":
        allowed |= _TLS_PARAMETERS
    for parameter in query:
        if parameter not in allowed:
            # With an @ behind it, what looks like a parameter is a part of a password that holds a ?.
            plain = re.fullmatch(r"[A-Za-z_]{1,40}", parameter) and "@" not in parameters
            named = f"the parameter {parameter!r}" if plain else "a parameter"
            known = ", ".join(sorted(allowed))
            raise ValueError(f"{named} after the ? is not known; {known} are")
    if "db" in query and (not query["db"].isdigit() or (kind == "cluster" and query["db"] != "0")):
        raise ValueError(refused + "; db is the number of a database")
    for parameter in ("password_file", "sentinel_password_file"):
        if parameter in query and not query[parameter].startswith("/"):
            raise ValueError(f"{parameter} is the absolute path of a file that holds the password")
    return value


def masked_url(url: str) -> str:
    """``url`` for logs and errors: the password, wherever it is written, becomes ``***``.

    >>> masked_url("redis://cache:pa:ss@w@rd@db.example:6379/1")
    'redis://cache:***@db.example:6379/1'
    >>> masked_url("unix:///run/redis.sock?db=1&password=hunter2")
    'unix:///run/redis.sock?db=1&password=***'
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        return "***" if url else ""
    rest, question, query = rest.partition("?") if "@" not in rest.partition("?")[2] else (rest, "", "")
    credentials, at, place = rest.rpartition("@")
    if at:
        user, colon, _ = credentials.partition(":")
        rest = f"{user}:***@{place}" if colon else f"***@{place}"
    return f"{scheme}://{rest}{question}{_SECRET_QUERY.sub(lambda m: m.group(1) + '***', query)}"
