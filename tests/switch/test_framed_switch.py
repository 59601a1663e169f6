"""Switches on packet sockets: hosts in namespaces of their own, a cable each to the switch in the middle."""

import fcntl
import select
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from ipaddress import IPv4Address, IPv4Network

import numpy as np
import pytest
from pyroute2 import IPRoute

from inanet.phy.port import FramePort
from inanet.phy.ring import FrameRing, without
from inanet.phy.udp import UdpDevice
from inanet.switch.frame_ports import TunFrames
from inanet.switch.framed import FrameSwitch
from inanet.switch.pipeline import Pipeline
from inanet.switch.programs import RAW_ETHERTYPE, Registration
from inanet.switch.tables import Tables
from inanet.wire.batch import Transmission
from inanet.wire.endpoint import endpoint
from tests.phy.conftest import lacking
from tests.phy.helpers import carry, numbered, read_until
from tests.phy.spaces import Space, cable, open_spaces
from tests.phy.test_port import echo
from tests.phy.test_ring import read
from tests.switch.adder import GROUP, Adder, packet
from tests.switch.memory import batch_of, ethernet, ipv4
from tests.switch.running import DEADLINE, running
from tests.switch.test_udp_switch import VALUES

pytestmark = pytest.mark.privileged("CAP_NET_RAW, and CAP_SYS_ADMIN for namespaces")
OWN, HARDWARE, PORT = "10.75.0.254", 0x02_00_00_00_75_FE, 48_000
ONES = np.ones(VALUES, np.int32)


class Rack:
    """``hosts`` namespaces 10.75.0.1 and so on, each on a port of the switch."""

    def __init__(self, stack: ExitStack, hosts: int = 3, subnets: bool = False) -> None:
        self.stack = stack
        self.middle, *self.hosts = open_spaces(stack, 1 + hosts)
        self.addresses = [f"10.75.{i if subnets else 0}.{i + 1}" for i in range(hosts)]
        self.devices = {}
        for i, (host, address) in enumerate(zip(self.hosts, self.addresses, strict=True)):
            cable(self.middle, f"p{i}", host, "eth0", None, address)
            self.devices[f"p{i}"] = self.middle.run(lambda name=f"p{i}": FramePort(name))
            stack.callback(self.devices[f"p{i}"].close)
        self.tables = Tables(HARDWARE, int(IPv4Address(OWN)))
        self.udp: list[UdpDevice] = []

    def open_udp(self) -> None:
        """A UDP socket on every host."""
        for host, address in zip(self.hosts, self.addresses, strict=True):
            self.udp.append(host.run(lambda address=address: UdpDevice(address)))
            self.stack.callback(self.udp[-1].close)

    def switch(self, *registrations: Registration, **options: object) -> FrameSwitch:
        return FrameSwitch(Pipeline(registrations), self.devices, self.tables, **options)  # type: ignore[arg-type]

    def adder(self, **options: object) -> tuple[Adder, Registration]:
        """The adder for all hosts but the last, which is the PS."""
        *members, ps = [device.endpoint for device in self.udp]
        adder = Adder(members, ps, slots=256, values=VALUES, **options)  # type: ignore[arg-type]
        return adder, Registration(
            "adder",
            adder,
            (range(PORT, PORT + 16),),
            uplinks={**dict.fromkeys(members, ps), ps: 0},
            groups={GROUP: tuple(members)},
        )

    def send(self, host: int, packets: list[bytes], to: int) -> None:
        arena = np.frombuffer(b"".join(packets), np.uint8).copy()
        offsets = np.arange(len(packets), dtype=np.int64) * len(packets[0])
        device = self.udp[host]
        assert device.send(Transmission(to, arena, offsets, len(packets[0]))) == len(packets)

    def hear(self, host: int, count: int) -> list[tuple[int, bytes]]:
        """Source and bytes of the next packets of a host."""
        got: list[tuple[int, bytes]] = []
        poll = select.poll()
        poll.register(self.udp[host].fileno(), select.POLLIN)
        end = time.monotonic() + DEADLINE
        while len(got) < count:
            assert time.monotonic() < end, f"{len(got)} of {count} packets"
            batch = self.udp[host].receive()
            if batch is None:
                poll.poll(100)
                continue
            got += [(int(batch.sources[i]), batch.packet(i)) for i in range(len(batch))]
        return got


@pytest.fixture
def rack(stack: ExitStack) -> Rack:
    return Rack(stack)


def until(condition: Callable[[], bool]) -> None:
    """Wait for what the switch's thread does."""
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end
        threading.Event().wait(0.005)


def test_ping_passes_and_the_switch_answers_for_itself(rack: Rack) -> None:
    switch = rack.switch()
    with running(switch):
        for i, host in enumerate(rack.hosts):
            for address in (*rack.addresses[:i], *rack.addresses[i + 1 :], OWN):
                assert echo(host, address, b"through the switch..") == b"through the switch.."
    assert switch.tables.port_of(0x02_00_00_00_00_00, 0.0) is None
    places = [switch.tables.host(int(IPv4Address(address))) for address in rack.addresses]
    assert [place and place[1] for place in places] == [0, 1, 2]


def transfer(left: Space, right: Space, address: str, data: bytes) -> bytes:
    """Send over TCP; returns what arrived."""
    got = bytearray()
    with right.run(lambda: socket.create_server((address, 0))) as listener:
        listener.settimeout(DEADLINE)
        port = listener.getsockname()[1]
        with left.run(lambda: socket.create_connection((address, port), DEADLINE)) as sender:
            accepted, _ = listener.accept()
            accepted.settimeout(DEADLINE)

            def read() -> None:
                while chunk := accepted.recv(1 << 20):
                    got.extend(chunk)

            with accepted:
                reader = threading.Thread(target=read)
                reader.start()
                sender.sendall(data)
                sender.shutdown(socket.SHUT_WR)
                reader.join()
    return bytes(got)


def test_tcp_passes_byte_for_byte_in_super_frames(rack: Rack) -> None:
    data = numbered(1, 4 << 20).tobytes()
    switch = rack.switch()
    with running(switch):
        assert transfer(rack.hosts[0], rack.hosts[1], rack.addresses[1], data) == data
    assert rack.devices["p0"].counters()["rx_frames"] < 400
    assert switch.stats()["drops"] == {}


def test_udp_super_frames_pass_whole(rack: Rack) -> None:
    rack.open_udp()
    length = 1052
    offsets = np.arange(2000, dtype=np.int64) * length
    with running(rack.switch()):
        echo(rack.hosts[0], rack.addresses[1], b"resolves")
        sender, receiver = rack.udp[:2]
        carry(sender, receiver, Transmission(receiver.endpoint, numbered(2000, length), offsets, length))
    assert receiver.counters()["rx_superframes"] == sender.counters()["tx_superframes"]


@pytest.mark.skipif(shutil.which("iperf3") is None, reason="iperf3 is not installed")
def test_iperf3_passes(rack: Rack) -> None:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with running(rack.switch()):
        server = rack.hosts[1].run(
            lambda: subprocess.Popen(["iperf3", "-s", "-1", "--forceflush", "-p", "5201"], **pipes)
        )
        try:
            assert server.stdout is not None
            for line in server.stdout:
                if "listening" in line:
                    break
            client = rack.hosts[0].run(
                lambda: subprocess.run(
                    ["iperf3", "-c", rack.addresses[1], "-p", "5201", "-n", "4M", "-u", "-b", "200M"],
                    capture_output=True,
                    text=True,
                    timeout=60,
                )
            )
            assert client.returncode == 0, client.stdout + client.stderr
        finally:
            server.kill()
            server.communicate()


def test_the_adder_answers_from_the_switchs_own_address(rack: Rack) -> None:
    rack.open_udp()
    _, registration = rack.adder()
    switch = rack.switch(registration)
    to = endpoint(OWN, PORT + 3)
    vectors = np.random.default_rng(1).integers(-(1 << 28), 1 << 28, (2, 200, VALUES)).astype(np.int32)
    sums = vectors.sum(0, dtype=np.int32)
    with running(switch):
        for worker in range(2):
            echo(rack.hosts[worker], OWN, b"resolves")
            rack.send(worker, [packet(slot, worker, 1, vectors[worker, slot]) for slot in range(200)], to)
        for worker in range(2):
            heard = rack.hear(worker, 200)
            assert {source for source, _ in heard} == {to}
            assert [one[4:] for _, one in heard] == [packet(0, 0, 0, sums[slot])[4:] for slot in range(200)]
        # a duplicate is answered to its sender alone
        rack.send(0, [packet(9, 0, 1, ONES)], to)
        assert rack.hear(0, 1) == [(to, packet(9, 0, 1, sums[9]))]
        # the switch leaves what it has no slot for to nobody: the packet was for itself
        rack.send(0, [packet(300, 0, 1, ONES)], to)
        until(lambda: switch.stats()["drops"] == {"no_route": 1})  # type: ignore[comparison-overlap]
    # 200 fragments came in and left again in a handful of super-frames, each 128 segments at most
    assert rack.udp[0].counters()["rx_superframes"] <= 8


def test_packets_to_the_ps_are_summed_or_pass_as_they_are(rack: Rack) -> None:
    rack.open_udp()
    # the PS listens at the program's port
    rack.udp[2] = rack.hosts[2].run(lambda: UdpDevice(rack.addresses[2], PORT))
    rack.stack.callback(rack.udp[2].close)
    _, registration = rack.adder(age=0.05)
    ps = rack.udp[2].endpoint
    switch = rack.switch(registration)
    with running(switch):
        for worker in range(2):
            echo(rack.hosts[worker], rack.addresses[2], b"resolves")
        beyond = [packet(300 + i, 0, 1, ONES) for i in range(100)]
        rack.send(0, beyond, ps)
        assert rack.hear(2, 100) == [(rack.udp[0].endpoint, one) for one in beyond]
        for worker in range(2):
            rack.send(worker, [packet(7, worker, 1, ONES * 3)], ps)
        # results come from where the contributions were sent to: nobody but a switch was on the way
        for worker in range(2):
            assert rack.hear(worker, 1) == [(ps, packet(7, 1, 1, ONES * 6))]
        # a slot that ages out comes from the switch
        rack.send(1, [packet(8, 1, 1, ONES)], ps)
        assert rack.hear(2, 1) == [(endpoint(OWN, PORT), packet(8, 255, 1, ONES))]


def test_foreign_packets_are_refused(rack: Rack) -> None:
    rack.open_udp()
    adder, registration = rack.adder()
    # the second worker must be at the first one's port
    switch = rack.switch(registration, members={rack.udp[1].endpoint: 0})
    to = endpoint(OWN, PORT)
    stranger = rack.hosts[0].run(lambda: UdpDevice(rack.addresses[0]))
    rack.stack.callback(stranger.close)
    with running(switch):
        for host in rack.hosts[:2]:
            echo(host, OWN, b"resolves")
        rack.send(1, [packet(slot, 1, 1, ONES) for slot in range(5)], to)
        arena = np.frombuffer(packet(1, 0, 1, ONES), np.uint8).copy()
        stranger.send(Transmission(to, arena, np.zeros(1, np.int64), len(arena)))
        until(lambda: switch.stats()["drops"] == {"foreign_host": 6})  # type: ignore[comparison-overlap]
    assert not adder.bitmap.any()


def test_routes_lead_from_subnet_to_subnet(stack: ExitStack) -> None:
    rack = Rack(stack, 2, subnets=True)
    for i, host in enumerate(rack.hosts):

        def route(i: int = i) -> None:
            gateway = f"10.75.{i}.254"
            subprocess.run(["ip", "route", "add", "default", "via", gateway], check=True)
            neighbour(gateway, HARDWARE)

        host.run(route)
    switch = rack.switch()
    switch.tables.set_routes([(IPv4Network(f"10.75.{i}.0/24"), i, 0) for i in range(2)])
    for i, (host, address) in enumerate(zip(rack.hosts, rack.addresses, strict=True)):
        switch.tables.give_host(int(IPv4Address(address)), host.run(hardware_of), i)
    data = numbered(1, 1 << 20).tobytes()
    with running(switch):
        assert echo(rack.hosts[0], rack.addresses[1], b"from net to net.") == b"from net to net."
        assert transfer(rack.hosts[1], rack.hosts[0], rack.addresses[0], data) == data
    assert switch.stats()["drops"] == {}


def hardware_of() -> int:
    """Of eth0 in the namespace of this thread."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        answer = fcntl.ioctl(handle, 0x8927, struct.pack("16s24x", b"eth0"))
    return int.from_bytes(answer[18:24], "big")


def neighbour(address: str, hardware: int) -> None:
    """Tell the namespace of this thread where an address is."""
    text = hardware.to_bytes(6, "big").hex(":")
    subprocess.run(["ip", "neigh", "replace", address, "lladdr", text, "dev", "eth0"], check=True)


def test_raw_frames_come_through_rings(rack: Rack) -> None:
    """Frames with ethertype 0x0700 of two hosts, summed; ordinary frames pass beside them."""
    members = [endpoint(address, 0) for address in rack.addresses[:2]]
    adder = Adder(members, slots=256, values=VALUES)
    registration = Registration(
        "adder", adder, raw=True, uplinks=dict.fromkeys(members, 0), groups={GROUP: tuple(members)}
    )
    rings = {}
    for name, device in rack.devices.items():
        rings[name] = rack.middle.run(lambda name=name: FrameRing(name, RAW_ETHERTYPE))
        rack.stack.callback(rings[name].close)
        device.filter(without(RAW_ETHERTYPE))
    switch = rack.switch(registration, rings=rings)
    listeners = [host.run(lambda: FrameRing("eth0", RAW_ETHERTYPE)) for host in rack.hosts[:2]]
    senders = [host.run(lambda: FramePort("eth0")) for host in rack.hosts[:2]]
    for device in (*listeners, *senders):
        rack.stack.callback(device.close)
    with running(switch):
        for number, host in enumerate(rack.hosts[:2]):
            hardware = host.run(hardware_of)
            frames = [
                ethernet(
                    HARDWARE,
                    hardware,
                    RAW_ETHERTYPE,
                    ipv4(rack.addresses[number], OWN, 1, packet(slot, number, 1, ONES * (slot + number))),
                )
                for slot in range(200)
            ]
            for first in range(0, 200, 50):
                assert senders[number].send(batch_of(frames[first : first + 50])) == 50
            echo(host, rack.addresses[1 - number], b"passes beside it")
        for listener in listeners:
            # whose packet completes a slot is a matter of which ring is read first
            got = {one[44]: one[48:] for one in read(listener, 200)}
            assert got == {slot: (ONES * (2 * slot + 1)).tobytes() for slot in range(200)}
    assert switch.stats()["drops"] == {}
    assert sum(ring.counters()["rx_frames"] for ring in rings.values()) == 400


def test_tun_ports_lead_from_kernel_to_kernel(stack: ExitStack) -> None:
    """Two hosts at TUN interfaces; ordinary traffic and sums between them, without any Ethernet."""
    spaces = open_spaces(stack, 2)
    addresses = ["10.77.0.1", "10.77.0.2"]
    own = "10.77.0.254"
    devices: dict[str, TunFrames] = {}
    for number, space in enumerate(spaces):
        name = f"t{number}"
        try:
            devices[name] = space.run(
                lambda name=name, other=addresses[1 - number]: TunFrames(name, routes=(other, own), mtu=9000)
            )
        except PermissionError as error:
            lacking(str(error))
        stack.callback(devices[name].close)

        def assign(name: str = name, address: str = addresses[number]) -> None:
            with IPRoute() as netlink:
                netlink.addr("add", index=netlink.link_lookup(ifname=name)[0], address=address, prefixlen=32)

        space.run(assign)
    hosts = [
        space.run(lambda address=address: UdpDevice(address))
        for space, address in zip(spaces, addresses, strict=True)
    ]
    for host in hosts:
        stack.callback(host.close)
    members = [host.endpoint for host in hosts]
    adder = Adder(members, slots=256, values=VALUES)
    registration = Registration(
        "adder",
        adder,
        (range(PORT, PORT + 1),),
        uplinks=dict.fromkeys(members, 0),
        groups={GROUP: tuple(members)},
    )
    tables = Tables(0, int(IPv4Address(own)))
    tables.set_routes([(IPv4Network(address), number, 0) for number, address in enumerate(addresses)])
    switch = FrameSwitch(Pipeline([registration]), devices, tables, link=0)
    data = numbered(1, 2 << 20).tobytes()
    packets = [
        [packet(slot, number, 1, ONES * (slot + number)) for slot in range(200)] for number in range(2)
    ]
    with running(switch):
        assert echo(spaces[0], addresses[1], b"through the tunnel..") == b"through the tunnel.."
        assert echo(spaces[1], own, b"to the switch itself") == b"to the switch itself"
        assert transfer(spaces[1], spaces[0], addresses[0], data) == data
        for host, mine in zip(hosts, packets, strict=True):
            arena = np.frombuffer(b"".join(mine), np.uint8).copy()
            offsets = np.arange(200, dtype=np.int64) * len(mine[0])
            host.send(Transmission(endpoint(own, PORT), arena, offsets, len(mine[0])))
        for host in hosts:
            got = [one for _, one in read_until(host, 200)]
            assert [one[4:] for one in got] == [(ONES * (2 * slot + 1)).tobytes() for slot in range(200)]
    # kernels look for IPv6 routers on every interface
    assert set(switch.stats()["drops"]) <= {"no_route"}  # type: ignore[call-overload]
    # super-frames all the way: 4,096 segments of TCP in a fraction of as many frames
    assert devices["t1"].counters()["rx_frames"] < 400
