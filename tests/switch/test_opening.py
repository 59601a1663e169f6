"""Switches of frames as their files describe them."""

from contextlib import ExitStack
from ipaddress import IPv4Address
from pathlib import Path

import pytest

from inanet.aio.switch import open_switch
from inanet.config.daemons import load
from inanet.config.switch import SwitchConfig
from inanet.wire.endpoint import endpoint
from tests.phy.spaces import open_spaces
from tests.phy.test_port import echo
from tests.switch.running import running
from tests.switch.test_framed_switch import OWN, Rack, hardware_of

pytestmark = pytest.mark.privileged("CAP_NET_RAW, CAP_NET_ADMIN, and CAP_SYS_ADMIN for namespaces")


def written(directory: Path, text: str) -> SwitchConfig:
    file = directory / "s.toml"
    file.write_text(text)
    config = load(file)
    assert isinstance(config, SwitchConfig)
    return config


def test_a_switch_of_interfaces(stack: ExitStack, tmp_path: Path) -> None:
    rack = Rack(stack)
    for device in rack.devices.values():
        device.close()
    first, second, third = rack.addresses
    hardware = rack.hosts[0].run(hardware_of).to_bytes(6, "big").hex(":")
    config = written(
        tmp_path,
        f"""
[switch]
transport = "packet"
address = "{OWN}"
hardware = "02:00:00:00:75:fe"
ports = [{{ name = "p0" }}, {{ name = "p1", rate = "1 Gbit/s", drop = 0.01 }}, {{ name = "p2" }}]
hosts = [{{ address = "{first}", hardware = "{hardware}", port = "p0" }}]
routes = [{{ network = "10.80.0.0/16", port = "p1", gateway = "{second}" }}]
[[switch.programs]]
system = "a2tp"
jobs = [{{ job = 1, workers = ["{first}", "{second}"], ps = "{third}" }}]
[[switch.programs]]
system = "switchml"
jobs = [{{ job = 1, workers = ["{first}:4000", "{second}:4000"], slots = 64 }}]
""",
    )
    switch = rack.middle.run(lambda: open_switch(config))
    stack.callback(switch.close)
    assert [port.name for port in switch.ports] == ["p0", "p1", "p2", "p0/ring", "p1/ring", "p2/ring"]
    assert switch.endpoints() == {"a2tp": endpoint(OWN, 7412), "switchml": endpoint(OWN, 0xBEE0)}
    assert switch.tables.host(int(IPv4Address("10.80.1.1"))) is None  # type: ignore[attr-defined]
    with running(switch):
        assert echo(rack.hosts[0], third, b"configured") == b"configured"
        assert echo(rack.hosts[2], OWN, b"answers itself..") == b"answers itself.."
    # a host that is given is bound to its port, in all its roles
    assert switch._members.tolist() == [  # type: ignore[attr-defined]
        [0, endpoint(first, 0), 1],
        [0, endpoint(second, 0), 0],
        [0, endpoint(third, 0), 0],
        [1, endpoint(first, 4000), 1],
        [1, endpoint(second, 4000), 0],
    ]


def test_one_interface_that_is_missing_opens_nothing(stack: ExitStack, tmp_path: Path) -> None:
    rack = Rack(stack, 1)
    config = written(
        tmp_path,
        f"""
[switch]
transport = "packet"
address = "{OWN}"
ports = [{{ name = "p0" }}, {{ name = "nosuch0" }}]
""",
    )
    with pytest.raises(OSError, match="interface nosuch0: No such device; there are lo, p0"):
        rack.middle.run(lambda: open_switch(config))


def test_a_switch_of_tun_interfaces(stack: ExitStack, tmp_path: Path) -> None:
    (space,) = open_spaces(stack, 1)
    config = written(
        tmp_path,
        """
[switch]
transport = "tun"
address = "10.78.0.254"
ports = [
    { name = "t0", behind = ["10.78.0.1"], attracts = ["10.78.0.254"] },
    { name = "t1", behind = ["10.78.0.2"] },
]
routes = [{ network = "10.79.0.0/16", port = "t1" }]
""",
    )
    switch = space.run(lambda: open_switch(config))
    stack.callback(switch.close)
    tables = switch.tables  # type: ignore[attr-defined]
    found = [
        tables.host(int(IPv4Address(one))) for one in ("10.78.0.1", "10.78.0.2", "10.79.3.3", "10.80.0.1")
    ]
    assert found == [(0, 0), (0, 1), (0, 1), None]
    assert [port.name for port in switch.ports] == ["t0", "t1"]
