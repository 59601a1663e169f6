"""Labs that are built, found, healed and removed for real."""

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pyroute2 import IPRoute
from pyroute2.netlink.rtnl import TC_H_ROOT

from inanet.lab import build, namespaces, remains
from inanet.lab.layout import BRIDGE, namespace
from inanet.lab.model import Topology
from inanet.launch import child

pytestmark = pytest.mark.privileged("network namespaces")
Parse = Callable[[str], Topology]

DEADLINE = 20.0
NODES = ("ps", "s0", "w0", "w1")


def own_links() -> set[str]:
    """Interfaces of the namespace this process is in."""
    with IPRoute() as netlink:
        return {link.get_attr("IFLA_IFNAME") for link in netlink.get_links()}


def links(lab: str, node: str) -> dict[str, tuple[int, str | None]]:
    """Index and state of a node's interfaces, by name."""

    def read() -> dict[str, tuple[int, str | None]]:
        with IPRoute() as netlink:
            return {
                link.get_attr("IFLA_IFNAME"): (link["index"], link.get_attr("IFLA_OPERSTATE"))
                for link in netlink.get_links()
            }

    return namespaces.inside(namespace(lab, node), read)


def udp(lab: str, node: str) -> socket.socket:
    """A UDP socket that lives in a node's namespace."""

    def make() -> socket.socket:
        opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        opened.settimeout(DEADLINE)
        return opened

    return namespaces.inside(namespace(lab, node), make)


def exchange(lab: str) -> None:
    """A datagram from w0 to w1 and back."""
    with udp(lab, "w0") as near, udp(lab, "w1") as far:
        far.bind(("10.201.0.3", 0))
        near.sendto(b"there", far.getsockname())
        data, origin = far.recvfrom(100)
        assert (data, origin[0]) == (b"there", "10.201.0.2")
        far.sendto(b"back", origin)
        assert near.recv(100) == b"back"


def test_hosts_reach_each_other_at_the_rates_of_the_file(built: str) -> None:
    assert namespaces.labs()[built] == [namespace(built, node) for node in NODES]
    exchange(built)
    uplink = build.shape(built, "w0", "eth0")
    downlink = build.shape(built, "s0", "ps")
    assert uplink is not None
    assert downlink is not None
    assert (uplink.rate, downlink.rate) == (400_000_000, 800_000_000)
    # what may wait: latency at the rate, and the bucket
    assert uplink.limit == pytest.approx(0.02 * 400e6 / 8 + 150_000, rel=0.001)
    assert downlink.limit == pytest.approx(0.01 * 800e6 / 8 + 150_000, rel=0.001)
    # ARP and a datagram at least
    assert uplink.sent_packets >= 2
    assert uplink.drops == 0


def test_nothing_of_a_lab_is_outside_its_namespaces(pair: Topology, name: str) -> None:
    before = own_links()
    build.build(pair, name)
    assert own_links() == before
    assert set(links(name, "s0")) >= {"lo", BRIDGE, "ps", "w0", "w1"}
    assert build.remove(name) == [namespace(name, node) for node in NODES]
    assert name not in namespaces.labs()
    assert own_links() == before
    assert build.remove(name) == []


def test_building_twice_changes_nothing(pair: Topology, built: str) -> None:
    before = {node: links(built, node) for node in NODES}
    identities = [remains.identity(namespaces.path(namespace(built, node))) for node in NODES]
    build.build(pair, built)
    assert {node: links(built, node) for node in NODES} == before
    assert [remains.identity(namespaces.path(namespace(built, node))) for node in NODES] == identities
    exchange(built)


def damage_namespace(lab: str) -> None:
    remains.remove([namespace(lab, "w0")])


def damage_mount(lab: str) -> None:
    """What a kill between making the file and mounting the namespace leaves."""
    remains.remove([namespace(lab, "w0")])
    namespaces.path(namespace(lab, "w0")).touch()


def damage_cable(lab: str) -> None:
    def cut() -> None:
        with IPRoute() as netlink:
            netlink.link("del", index=netlink.link_lookup(ifname="w1")[0])

    namespaces.inside(namespace(lab, "s0"), cut)


def damage_settings(lab: str) -> None:
    def spoil() -> None:
        with IPRoute() as netlink:
            index = netlink.link_lookup(ifname="eth0")[0]
            netlink.tc("del", index=index, parent=TC_H_ROOT)
            netlink.addr("del", index=index, address="10.201.0.2", prefixlen=24)
            netlink.addr("add", index=index, address="10.201.0.99", prefixlen=24)
            netlink.link("set", index=index, state="down")

    namespaces.inside(namespace(lab, "w0"), spoil)


def damage_strangers(lab: str) -> None:
    def add() -> None:
        with IPRoute() as netlink:
            netlink.link("add", ifname="stranger", kind="bridge")

    namespaces.inside(namespace(lab, "w0"), add)
    namespaces.create(namespace(lab, "w9"))


@pytest.mark.parametrize(
    "damage", [damage_namespace, damage_mount, damage_cable, damage_settings, damage_strangers]
)
def test_a_damaged_lab_is_mended(pair: Topology, built: str, damage: Callable[[str], None]) -> None:
    damage(built)
    build.build(pair, built)
    exchange(built)
    assert namespaces.labs()[built] == [namespace(built, node) for node in NODES]
    assert set(links(built, "w0")) == set(links(built, "w1"))
    shape = build.shape(built, "w0", "eth0")
    assert shape is not None
    assert shape.rate == 400_000_000


def test_a_changed_file_changes_the_lab(parse: Parse, built: str) -> None:
    text = (
        'name = "pair"\nsummary = "s"\n[[switch]]\nname = "s0"\nsnooping = false\n'
        '[[host]]\nname = "w"\ncount = 2\nswitch = "s0"\n'
    )
    build.build(parse(text), built)
    assert namespaces.labs()[built] == [namespace(built, node) for node in ("s0", "w0", "w1")]
    assert "ps" not in links(built, "s0")
    assert build.shape(built, "w0", "eth0") is None


_BUILD_UNTIL = """
import sys
from pathlib import Path
from inanet.lab import build
from inanet.lab.model import load

calls = 0
def check():
    global calls
    calls += 1
    if calls == int(sys.argv[3]):
        print("here", flush=True)
        sys.stdin.read()

build.build(load(Path(sys.argv[1])), sys.argv[2], check)
"""


@pytest.mark.parametrize("calls", [2, 5, 6])
def test_a_killed_build_is_completed_or_removed(
    pair: Topology, name: str, tmp_path: Path, calls: int
) -> None:
    command = [sys.executable, "-c", _BUILD_UNTIL, str(tmp_path / "topology.toml"), name, str(calls)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as building:
        assert building.stdout is not None
        assert building.stdout.readline() == b"here\n"
        building.kill()
    assert 1 <= len(namespaces.labs()[name]) <= 4
    if calls == 5:
        build.build(pair, name)
        exchange(name)
    build.remove(name)
    assert name not in namespaces.labs()


def test_removal_ends_the_processes_inside_also_the_deaf(built: str) -> None:
    deaf = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); sys.stdin.read()"
    place = str(namespaces.path(namespace(built, "w0")))
    command = [
        sys.executable,
        "-I",
        "-S",
        str(child.__file__),
        str(os.getpid()),
        place,
        sys.executable,
        "-c",
        deaf,
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"deaf\n"
        assert remains.inhabitants([namespace(built, "w0")]) == [process.pid]
        build.remove(built, grace=0.0)
        assert process.wait(DEADLINE) == -signal.SIGKILL
    assert built not in namespaces.labs()


def test_multicast_goes_only_where_it_was_asked_for(built: str) -> None:
    group = "239.1.2.3"
    with udp(built, "w0") as sender, udp(built, "w1") as member, udp(built, "ps") as stranger:
        joined = socket.inet_aton(group) + socket.inet_aton("10.201.0.3")
        member.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, joined)
        for receiver in (member, stranger):
            receiver.bind(("", 5000))
        # counting at the switch's port: the stranger's kernel would drop the packet in any case
        before = _sent(built, "ps")
        attempts = 0
        flooded = True
        # until the querier is trusted, a second after it was switched on, the switch floods
        while flooded and attempts < 100:
            attempts += 1
            sender.sendto(b"x" * 999, (group, 5000))
            try:
                assert member.recv(2000) == b"x" * 999
            except TimeoutError:
                # the switch stopped to flood before it had heard of the member, who answers the next query
                continue
            now = _sent(built, "ps")
            flooded, before = now - before >= 999, now
            select.select([], [], [], 0.05)
        assert not flooded


def _sent(lab: str, port: str) -> int:
    shape = build.shape(lab, "s0", port)
    assert shape is not None
    return shape.sent_bytes
