"""Network addresses as pure text: parse, format, and what a listener tells its peers.

An address is ``host:port`` with an optional ``tcp://`` in front; an IPv6 host stands in brackets. The
address a node listens on (maybe a wildcard, maybe port 0) is not the address its peers contact it at.
"""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple

from ..errors import ProtocolError

DEFAULT_SCHEME = "tcp"
_MAX_HOST = 253  # the longest DNS name
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?)*\.?")
_ZONE = re.compile(r"[A-Za-z0-9_.-]+")


class Address(NamedTuple):
    """A parsed address; ``host`` is without brackets. ``str()`` gives ``host:port``, for :func:`parse`."""

    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        return join_host_port(self.host, self.port)

    @property
    def url(self) -> str:
        """With the scheme in front.

        >>> parse("[::1]:7001").url
        'tcp://[::1]:7001'
        """
        return f"{self.scheme}://{self}"


def parse(text: str, *, listening: bool = False) -> Address:
    """Parse ``[scheme://]host:port``. Port 0 (pick a free one) is allowed only for ``listening``.

    >>> parse("node-7.rack2:7001")
    Address(scheme='tcp', host='node-7.rack2', port=7001)
    >>> parse("tcp://[fe80::1%eth0]:7001").host
    'fe80::1%eth0'
    >>> parse("0.0.0.0:0", listening=True)
    Address(scheme='tcp', host='0.0.0.0', port=0)

    Raises :class:`ProtocolError` that says what is wrong:

    >>> parse("fd00::17:340")
    Traceback (most recent call last):
    ...
    hicache_mooncake.errors.ProtocolError: address 'fd00::17:340': an IPv6 host needs brackets, as [::1]:7001
    """
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = DEFAULT_SCHEME, text
    elif not re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme):
        raise _refused(text, f"{scheme!r} is not a scheme")
    host, port = _split(text, rest)
    if not port:
        raise _refused(text, "the port is missing")
    return Address(scheme, _host(text, host), _port(text, port, lowest=0 if listening else 1))


def contact(bound: Address, advertise: str) -> Address:
    """What peers are told: ``advertise`` (``host`` or ``host:port``) completed from the address really bound.

    >>> str(contact(parse("0.0.0.0:7001"), "10.0.0.5"))
    '10.0.0.5:7001'
    >>> str(contact(parse("0.0.0.0:7001"), "lb.example:9000"))
    'lb.example:9000'
    >>> str(contact(parse("0.0.0.0:7001"), "[fd00::5]:0"))
    '[fd00::5]:7001'
    >>> str(contact(parse("[::1]:7001"), ""))
    '[::1]:7001'

    Raises :class:`ProtocolError` when what results cannot be contacted:

    >>> contact(parse("0.0.0.0:7001"), "")
    Traceback (most recent call last):
    ...
    hicache_mooncake.errors.ProtocolError: address '0.0.0.0:7001': peers cannot contact a wildcard
    """
    if not advertise:
        host, port = bound.host, bound.port
    else:
        scheme, separator, rest = advertise.partition("://")
        if separator and scheme != bound.scheme:
            raise _refused(advertise, f"the listener speaks {bound.scheme}")
        host, text_port = _split(advertise, rest if separator else advertise)
        host = _host(advertise, host)
        port = (_port(advertise, text_port, lowest=0) if text_port else 0) or bound.port
    if is_wildcard(host):
        raise _refused(advertise or str(bound), "peers cannot contact a wildcard")
    return Address(bound.scheme, host, port)


def join_host_port(host: str, port: int) -> str:
    """The text of both.

    >>> join_host_port("::1", 7001), join_host_port("10.0.0.5", 7001)
    ('[::1]:7001', '10.0.0.5:7001')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_wildcard(host: str) -> bool:
    """Whether binding to ``host`` means every interface.

    >>> is_wildcard("0.0.0.0"), is_wildcard("::"), is_wildcard("10.0.0.5"), is_wildcard("localhost")
    (True, True, False, False)
    """
    literal = ip_literal(host)
    return literal is not None and literal.is_unspecified


def is_loopback(host: str) -> bool:
    """Whether only this host can reach ``host``.

    >>> is_loopback("127.0.0.3"), is_loopback("::1"), is_loopback("localhost"), is_loopback("10.0.0.5")
    (True, True, True, False)
    """
    literal = ip_literal(host)
    return literal.is_loopback if literal is not None else host.rstrip(".").lower() == "localhost"


def ip_literal(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """``host`` as an IP address, or None when it is a name that has to be resolved."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _split(text: str, rest: str) -> tuple[str, str]:
    """Host (brackets removed) and the text of the port, empty when there is none."""
    if rest.startswith("["):
        host, bracket, after = rest[1:].partition("]")
        if not bracket or (after and not after.startswith(":")):
            raise _refused(text, "the brackets do not match")
        if ":" not in host:
            raise _refused(text, "only an IPv6 host stands in brackets")
        if after == ":":
            raise _refused(text, "the port is missing")
        return host, after[1:]
    if rest.count(":") > 1:
        raise _refused(text, "an IPv6 host needs brackets, as [::1]:7001")
    host, colon, port = rest.partition(":")
    if colon and not port:
        raise _refused(text, "the port is missing")
    return host, port


def _host(text: str, host: str) -> str:
    if not host:
        raise _refused(text, "the host is missing")
    if ":" in host:
        literal, percent, zone = host.partition("%")
        try:
            ipaddress.IPv6Address(literal)
        except ValueError:
            raise _refused(text, f"{literal!r} is not an IPv6 address") from None
        if percent and not _ZONE.fullmatch(zone):
            raise _refused(text, f"{zone!r} is not an interface")
        return host
    if ip_literal(host) is None:
        if len(host) > _MAX_HOST or not _NAME.fullmatch(host):
            raise _refused(text, f"{host!r} is not a host name")
        if host.replace(".", "").isdigit():
            raise _refused(text, f"{host!r} is not an IPv4 address")
    return host


def _port(text: str, port: str, *, lowest: int) -> int:
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and lowest <= int(port) <= 65535):
        raise _refused(text, f"the port is {lowest} to 65535, not {port!r}")
    return int(port)


def _refused(text: str, why: str) -> ProtocolError:
    return ProtocolError(f"address {text!r}: {why}")
