"""Devices for whole IPv4 packets: what comes out is what went in, header and all; and queue pairs across them."""

import errno
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from inanet.phy.device import Device
from inanet.phy.pcap import PcapWriter
from inanet.phy.whole import PacketWholeDevice, RawWholeDevice, TunWholeDevice
from inanet.proto.roce import Attributes, Completion, Peer, ProtectionDomain, QueuePair, Received, Status
from inanet.wire.batch import Transmission
from inanet.wire.endpoint import endpoint
from inanet.wire.roce import PORT, PSN_MASK, Opcode, Packet
from tests.phy.conftest import lacking
from tests.phy.helpers import contents, drive, read_until
from tests.phy.spaces import Space, cable, open_spaces
from tests.proto.roce.decoding import check_checksums, dissect

pytestmark = pytest.mark.privileged("CAP_NET_RAW, and CAP_NET_ADMIN and CAP_SYS_ADMIN for TUN and namespaces")
ONE, OTHER = "10.79.0.1", "10.79.0.2"
#: addresses at the end of TUN interfaces, and of the hosts that these belong to
TUN_ONE, TUN_OTHER = "10.79.1.1", "10.79.2.1"


def train(source: str, destination: str, count: int, size: int = 1024) -> Transmission:
    """Packets of a message, with identifications of their own."""
    packets = [
        Packet(
            endpoint(source, 50000),
            endpoint(destination, PORT),
            Opcode.WRITE_MIDDLE,
            7,
            i,
            bytes([i & 0xFF]) * size,
            identification=i + 1,
        ).encode()
        for i in range(count)
    ]
    length = len(packets[0])
    arena = np.frombuffer(b"".join(packets), np.uint8).copy()
    return Transmission(endpoint(destination, PORT), arena, np.arange(count, dtype=np.int64) * length, length)


def masked(packets: list[bytes]) -> list[bytes]:
    """Without what routers change: time to live and header checksum."""
    return [packet[:8] + b"." + packet[9:10] + b".." + packet[12:] for packet in packets]


@pytest.fixture
def spaces(stack: ExitStack) -> tuple[Space, Space]:
    """Two hosts with a cable between ONE and OTHER, which forward to each other's TUN addresses."""
    one, other = open_spaces(stack, 2)
    cable(one, "a0", other, "b0", ONE, OTHER)

    def forward(network: str, gateway: str) -> None:
        from pyroute2 import IPRoute

        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        with IPRoute() as netlink:
            netlink.route("add", dst=network, gateway=gateway)

    one.run(lambda: forward("10.79.2.0/24", OTHER))
    other.run(lambda: forward("10.79.1.0/24", ONE))
    return one, other


@pytest.fixture
def open_whole(stack: ExitStack, spaces: tuple[Space, Space]) -> Callable[[str], tuple[Device, Device]]:
    """Opens a pair of devices, one on each host."""

    def open_one(kind: str, space: Space, interface: str, address: str) -> Device:
        if kind == "packet":
            return space.run(lambda: PacketWholeDevice(interface, address))
        if kind == "raw":
            return space.run(lambda: RawWholeDevice(address))
        return space.run(lambda: TunWholeDevice(address))

    def open_pair(kinds: str) -> tuple[Device, Device]:
        devices = []
        for i, kind in enumerate(kinds.split()):
            address = (TUN_ONE, TUN_OTHER)[i] if kind == "tun" else (ONE, OTHER)[i]
            try:
                devices.append(open_one(kind, spaces[i], ("a0", "b0")[i], address))
            except PermissionError as error:
                lacking(str(error))
            stack.callback(devices[-1].close)
        return devices[0], devices[1]

    return open_pair


def address(device: Device) -> str:
    return socket.inet_ntoa((device.endpoint >> 16).to_bytes(4, "big"))


@pytest.mark.parametrize("kinds", ["packet packet", "raw raw", "tun tun", "packet tun", "tun raw"])
def test_packets_arrive_as_they_were_made(
    open_whole: Callable[[str], tuple[Device, Device]], kinds: str
) -> None:
    one, other = open_whole(kinds)
    for sender, receiver in ((one, other), (other, one)):
        # the first ones wait for the kernel to find the neighbour, and it keeps only so many
        for count in (20, 300):
            sent = train(address(sender), address(receiver), count)
            assert sender.send(sent) == count
            got = read_until(receiver, count)
            assert masked([packet for _, packet in got]) == masked(contents(sent))
            assert {source for source, _ in got} == {endpoint(address(sender), 50000)}
    assert one.counters()["tx_packets"] == one.counters()["rx_packets"] == 320


def write_across(one: Device, other: Device, size: int) -> None:
    """Connect queue pairs over two devices and write twice ``size`` bytes from one to the other."""
    memory = np.zeros(2 * size, np.uint8)
    domain = ProtectionDomain()
    region = domain.register(memory, base=1 << 32)
    here = Peer(endpoint(address(one), 50000), 0x21, psn=0xFFFFF0)
    there = Peer(endpoint(address(other), 50001), 0x22, psn=5, key=region.key, base=region.base)
    attributes = Attributes(window=64)
    sender = QueuePair(here, there, attributes=attributes)
    receiver = QueuePair(there, here, domain=domain, attributes=attributes)
    sender.connect()
    receiver.connect()
    receiver.post_receive(1, count=2)
    data = np.random.default_rng(3).integers(0, 256, size, dtype=np.uint8)
    sender.post_write(data, 0, 1, wr_id=1)
    sender.post_write(data, size, 2, wr_id=2)
    ends = ((sender, one), (receiver, other))
    drive(ends, lambda: not sender.pending, lambda: (sender.stats(), receiver.drops_by_reason()))
    happened = [*sender.events(), *receiver.events()]
    assert (memory[:size] == data).all()
    assert (memory[size:] == data).all()
    assert [event.immediate for event in happened if isinstance(event, Received)] == [1, 2]
    assert [event.status for event in happened if isinstance(event, Completion)] == [Status.SUCCESS] * 2
    assert receiver.drops_by_reason()["bad_icrc"] == 0


@pytest.mark.parametrize("kinds", ["raw packet", "tun tun"])
def test_queue_pairs_write_across(open_whole: Callable[[str], tuple[Device, Device]], kinds: str) -> None:
    write_across(*open_whole(kinds), 200_000)


def test_a_capture_of_the_cable_is_accepted_by_both_decoders(
    open_whole: Callable[[str], tuple[Device, Device]], tmp_path: Path
) -> None:
    one, other = open_whole("packet packet")
    path = tmp_path / "cable.pcap"
    writer = PcapWriter(one, path, time.time, whole=True)
    write_across(writer, other, 60_000)
    writer.close()
    opcodes = check_checksums(path)
    assert opcodes.count(Opcode.WRITE_MIDDLE) >= 2 * 57
    rows = dissect(
        path, "_ws.malformed", "_ws.expert.severity", "infiniband.bth.opcode", "infiniband.bth.psn"
    )
    assert [row[2] for row in rows] == [str(opcode) for opcode in opcodes]
    assert all(row[:2] == ["", ""] for row in rows)
    sent = [int(row[3]) for row in rows if int(row[2]) != Opcode.ACKNOWLEDGE]
    assert {*sent} == {0xFFFFF0 + i & PSN_MASK for i in range(118)}


def test_packets_above_the_mtu_are_refused(open_whole: Callable[[str], tuple[Device, Device]]) -> None:
    for kinds in ("packet packet", "raw raw", "tun tun"):
        one, other = open_whole(kinds)
        with pytest.raises(OSError, match=r"2044 B (.* )?need an MTU of 2044 B") as caught:
            one.send(train(address(one), address(other), 1, 2000))
        assert caught.value.errno == errno.EMSGSIZE
        assert one.send(train(address(one), address(other), 1)) == 1
        one.close()
        other.close()


def test_only_udp_to_the_port_and_address_is_taken(
    open_whole: Callable[[str], tuple[Device, Device]], spaces: tuple[Space, Space]
) -> None:
    one, other = open_whole("packet raw")
    with spaces[1].run(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as plain:
        plain.sendto(b"another port", (ONE, 4790))
        plain.sendto(b"the port, but no such packet", (ONE, PORT))
        ((source, packet),) = read_until(one, 1)
        assert packet[28:] == b"the port, but no such packet"
        assert source & 0xFFFF == plain.getsockname()[1]
    with spaces[0].run(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as plain:
        plain.sendto(b"another port", (OTHER, 4790))
        plain.sendto(b"the port", (OTHER, PORT))
        ((source, packet),) = read_until(other, 1)
        assert packet[28:] == b"the port"
        # no unreachable port was reported for what the devices took past the kernel
        plain.connect((OTHER, PORT))
        plain.send(b"again")
        read_until(other, 1)
        plain.send(b"and again")


def test_an_address_of_another_host_is_refused_by_name(spaces: tuple[Space, Space]) -> None:
    with pytest.raises(OSError, match=r"192\.0\.2\.1"):
        spaces[0].run(lambda: RawWholeDevice("192.0.2.1"))
    with pytest.raises(OSError, match=r"192\.0\.2\.1"):
        spaces[0].run(lambda: RawWholeDevice("192.0.2.1", hold=False))
