"""Addresses: what people type, and every way to get it wrong."""

from __future__ import annotations

import doctest
import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_mooncake.errors import ProtocolError
from hicache_mooncake.transfer import address

ports = st.integers(1, 65535)
hosts = st.one_of(
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
    st.from_regex(r"\A[a-z]([a-z0-9-]{0,20}[a-z0-9])?(\.[a-z]([a-z0-9-]{0,20}[a-z0-9])?){0,3}\Z"),
)


def test_the_examples_in_the_documentation_hold() -> None:
    result = doctest.testmod(address)
    assert result.attempted > 10
    assert result.failed == 0


@given(hosts, ports)
def test_every_address_survives_its_text(host: str, port: int) -> None:
    parsed = address.Address("tcp", host, port)
    assert address.parse(str(parsed)) == parsed
    assert address.parse(parsed.url) == parsed


@given(hosts, ports, st.one_of(st.just(""), hosts))
def test_a_contact_address_is_never_a_wildcard(host: str, port: int, advertise: str) -> None:
    if ":" in advertise:
        advertise = f"[{advertise}]"
    bound = address.Address("tcp", host, port)
    try:
        told = address.contact(bound, advertise)
    except ProtocolError:
        assert address.is_wildcard(advertise.strip("[]") or host)
        return
    assert not address.is_wildcard(told.host)
    assert told.port == port
    assert address.parse(str(told)) == told


@given(st.text(max_size=40))
def test_any_text_parses_or_is_refused_with_a_reason(text: str) -> None:
    try:
        parsed = address.parse(text)
    except ProtocolError as error:
        assert repr(text) in str(error)
        return
    assert 1 <= parsed.port <= 65535
    if ":" in parsed.host:
        ipaddress.IPv6Address(parsed.host.partition("%")[0])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "port is missing"),
        ("10.0.0.1", "port is missing"),
        ("10.0.0.1:", "port is missing"),
        (":7001", "host is missing"),
        ("10.0.0.1:0", "1 to 65535"),
        ("10.0.0.1:65536", "1 to 65535"),
        ("10.0.0.1:+80", "1 to 65535"),
        ("10.0.0.1: 80", "1 to 65535"),
        ("10.0.0.1:٣٤", "1 to 65535"),
        ("::1:7001", "brackets"),
        ("fd00::17:340", "brackets"),
        ("[::1]", "port is missing"),
        ("[::1]:", "port is missing"),
        ("[::1]7001", "brackets do not match"),
        ("[::1:7001", "brackets do not match"),
        ("[10.0.0.1]:7001", "only an IPv6 host"),
        ("[zz::1]:7001", "not an IPv6 address"),
        ("[fe80::1%a b]:7001", "not an interface"),
        ("256.1.1.1:7001", "not an IPv4 address"),
        ("my host:7001", "not a host name"),
        ("a" * 300 + ":7001", "not a host name"),
        ("TCP://10.0.0.1:7001", "not a scheme"),
    ],
)
def test_what_is_wrong_is_said(text: str, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        address.parse(text)


def test_a_listen_address_may_leave_the_port_open() -> None:
    assert address.parse("[::]:0", listening=True) == ("tcp", "::", 0)


def test_a_listener_cannot_advertise_another_scheme() -> None:
    with pytest.raises(ProtocolError, match="speaks tcp"):
        address.contact(address.parse("127.0.0.1:1"), "rdma://10.0.0.1")
