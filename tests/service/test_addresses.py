"""Addresses: what a configured host means on this machine, and which mistakes are noticed."""

import socket
from pathlib import Path

import pytest

from inanet.service import addresses
from inanet.service.addresses import (
    AddressError,
    HostPort,
    Resolved,
    interfaces,
    parse_host_port,
    refuse_loopback,
    resolve,
    suspicion,
)


def test_forms() -> None:
    assert parse_host_port("10.0.0.1:7400") == HostPort("10.0.0.1", 7400)
    assert parse_host_port("eth0.100", default_port=0) == HostPort("eth0.100", 0)
    assert parse_host_port("unix:/run/a.sock", unix=True) == HostPort("", 0, "/run/a.sock")
    for text in ("node-7.lab:1", "unix:/run/a.sock"):
        assert str(parse_host_port(text, unix=True)) == text


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("node7.lab.", "node7.lab"),
        ("NODE7.Lab", "NODE7.Lab"),
        ("LOCALHOST", "LOCALHOST"),
        ("bücher.example", "xn--bcher-kva.example"),
        ("Bücher.Example.", "xn--bcher-kva.Example"),
        ("計算機.example", "xn--new508a40k.example"),
        ("node_7.lab", "node_7.lab"),
        ("eth0.100", "eth0.100"),
        ("veth@if3", "veth@if3"),
        ("a" * 63 + ".b", "a" * 63 + ".b"),
        ("10.0.0.1.", "10.0.0.1"),
    ],
)
def test_names_are_taken_as_dns_does(text: str, host: str) -> None:
    assert parse_host_port(f"{text}:7400") == HostPort(host, 7400)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("node 7", "' ' cannot be in its name"),
        ("node/7", "'/' cannot be in its name"),
        ("node7!", "'!' cannot be in its name"),
        ("-node7", "its name cannot begin or end with '-'"),
        ("node7-", "its name cannot begin or end with '-'"),
        ("node7..", "its name cannot begin or end with '.'"),
        (".", "it is empty"),
        ("", "it is empty"),
        ("a..b", "in parts of 1 to 63"),
        ("a" * 64 + ".b", "in parts of 1 to 63"),
        ("a." * 130 + "b", "up to 253 characters"),
        ("bü cher", "' ' cannot be in its name"),
        ("ü" * 70, "is not a host"),
        ("node\u200b7!", "'!' cannot be in its name"),
        ("\u2028", "is not a host"),
    ],
)
def test_what_cannot_be_in_a_name_is_named(text: str, says: str) -> None:
    with pytest.raises(ValueError, match="is not a host: ") as refused:
        parse_host_port(text, default_port=0)
    assert says in str(refused.value)


def test_case_does_not_hide_that_this_machine_is_meant() -> None:
    assert all(HostPort(name, 1).local for name in ("localhost", "LocalHost", "LO".lower(), "127.0.0.1"))


def test_every_address_of_an_interface_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    present = {
        "127.0.0.1": "lo",
        "10.0.0.7": "eth0",
        "10.0.0.8": "eth0",
        "10.9.0.2": "wg0",
        "10.9.0.3": "wg0",
    }
    monkeypatch.setattr(addresses, "owners", lambda: present)
    monkeypatch.setattr(addresses, "_is_tunnel", lambda name: name == "wg0")
    assert interfaces() == {"lo": "127.0.0.1", "eth0": "10.0.0.7", "wg0": "10.9.0.2"}
    assert suspicion("10.0.0.8") is None
    assert suspicion("10.9.0.3") == suspicion("10.9.0.2") == "belongs to wg0, a tunnel or VPN"
    assert resolve(HostPort("eth0", 1)).address == "10.0.0.7"


def test_an_address_is_taken_as_it_is() -> None:
    assert resolve(HostPort("192.0.2.9", 5)) == Resolved("192.0.2.9", 5, "address")


def test_an_interface_comes_before_a_host_name() -> None:
    assert interfaces()["lo"] == "127.0.0.1"
    assert resolve(HostPort("lo", 0)) == Resolved("127.0.0.1", 0, "interface lo")
    assert resolve(HostPort("localhost", 7)) == Resolved("127.0.0.1", 7, "host name localhost")


def test_a_name_that_means_nothing_is_answered_with_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*arguments: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(AddressError, match=r"'eht0' is neither an interface .*lo \(127\.0\.0\.1\)"):
        resolve(HostPort("eht0", 0))


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("127.0.1.1", "loopback"),
        ("10.9.0.2", "tunnel or VPN"),
        ("100.70.1.2", "100.64.0.0/10"),
        ("169.254.3.4", "link-local"),
        ("10.0.0.1", None),
    ],
)
def test_suspicious_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, says: str | None
) -> None:
    monkeypatch.setattr(addresses, "_is_tunnel", lambda name: name == "wg0")
    found = suspicion(address, {"wg0": "10.9.0.2", "eth0": "10.0.0.1"})
    assert (says is None) == (found is None)
    assert says is None or says in str(found)


def test_the_loopback_interface_is_no_tunnel() -> None:
    assert not addresses._is_tunnel("lo")
    assert not addresses._is_tunnel("no such interface")


def test_a_loopback_address_is_not_advertised_to_another_machine() -> None:
    refuse_loopback("w0", "127.0.0.1", "127.0.0.1")
    refuse_loopback("w0", "10.0.0.2", "10.0.0.1")
    refuse_loopback("w0", "10.0.0.2", "127.0.0.1")
    with pytest.raises(
        AddressError, match=r"w0 would advertise 127\.0\.0\.1 .*10\.0\.0\.1.*set node\.listen"
    ):
        refuse_loopback("w0", "127.0.0.1", "10.0.0.1")
