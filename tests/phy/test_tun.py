"""TUN devices in namespaces of their own: ordinary sockets at the other end of the virtual cable."""

import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from inanet.phy.tun import QUEUE, TunDevice, TunPort
from inanet.phy.udp import UdpDevice
from inanet.phy.vnet import GSO_UDP_L4, NEEDS_CSUM
from inanet.wire.batch import Transmission
from inanet.wire.endpoint import endpoint
from tests.phy.conftest import lacking
from tests.phy.helpers import carry, numbered, read_until
from tests.phy.spaces import Space, open_spaces

pytestmark = pytest.mark.privileged("CAP_NET_ADMIN for TUN interfaces and namespaces")
ROW = 1052
HOST = "10.76.0.1"
OpenTun = Callable[..., TunDevice]


def rows(destination: int, count: int, length: int = ROW) -> Transmission:
    return Transmission(
        destination, numbered(count, length), np.arange(count, dtype=np.int64) * length, length
    )


@pytest.fixture
def space(stack: ExitStack) -> Space:
    """A namespace whose host has the address 10.76.0.1."""
    (space,) = open_spaces(stack, 1)
    space.run(lambda: space.setup("lo", HOST))
    return space


@pytest.fixture
def open_tun(stack: ExitStack, space: Space) -> OpenTun:
    """Opens TUN devices in the namespace and closes them after the test."""

    def open_device(*arguments: object, **options: object) -> TunDevice:
        try:
            device = space.run(lambda: TunDevice(*arguments, **options))  # type: ignore[arg-type]
        except PermissionError as error:
            lacking(str(error))
        stack.callback(device.close)
        return device

    return open_device


@pytest.fixture
def peer(stack: ExitStack, space: Space) -> UdpDevice:
    """An ordinary socket of the host."""
    device = space.run(lambda: UdpDevice(HOST))
    stack.callback(device.close)
    return device


@pytest.mark.parametrize("length", [1, 3, 36, 1052, 1472])
@pytest.mark.parametrize("count", [1, 2, 63, 2500])
def test_round_trip_with_an_ordinary_socket(
    open_tun: OpenTun, peer: UdpDevice, length: int, count: int
) -> None:
    device = open_tun("10.76.1.2")
    assert carry(device, peer, rows(peer.endpoint, count, length)) == count
    assert carry(peer, device, rows(device.endpoint, count, length)) == count


def test_super_frames_stay_whole_both_ways(open_tun: OpenTun, peer: UdpDevice) -> None:
    device = open_tun("10.76.1.2", 7000)
    assert device.endpoint == endpoint("10.76.1.2", 7000)
    carry(device, peer, rows(peer.endpoint, 186))
    assert peer.counters()["rx_superframes"] == device.counters()["tx_superframes"] == 3
    carry(peer, device, rows(device.endpoint, 186))
    assert peer.counters()["tx_superframes"] == 3
    # beside the three: what the host asks every new interface (IPv6)
    assert device.counters()["rx_superframes"] - device.counters()["rx_foreign"] == 3


def test_packets_of_fragment_size_are_aligned(open_tun: OpenTun, peer: UdpDevice) -> None:
    device = open_tun("10.76.1.2")
    assert peer.send(rows(device.endpoint, 130)) == 130
    seen = 0
    while (batch := device.receive()) is not None:
        seen += len(batch)
        assert not (batch.offsets % 4).any()
    assert seen == 130


def test_two_devices_through_a_forwarding_host(open_tun: OpenTun, space: Space) -> None:
    space.run(forward_packets)
    one, other = open_tun("10.76.1.2"), open_tun("10.76.1.3")
    carry(one, other, rows(other.endpoint, 500))
    carry(other, one, rows(one.endpoint, 500))
    # a super-frame is forwarded as one
    counters = one.counters()
    assert counters["rx_superframes"] - counters["rx_foreign"] == other.counters()["tx_superframes"]


def forward_packets() -> None:
    """Let the namespace of this thread forward; the file belongs to the namespace of who opens it."""
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def test_what_is_for_others_is_refused(open_tun: OpenTun, peer: UdpDevice, space: Space) -> None:
    device = open_tun("10.76.1.2", 7000)
    before = device.counters()["rx_foreign"]
    assert peer.send(rows(endpoint("10.76.1.2", 7001), 3)) == 3
    carry(peer, device, rows(device.endpoint, 3))
    assert device.counters()["rx_foreign"] > before
    assert device.counters()["rx_packets"] == 3


def test_a_packet_above_the_mtu_is_refused(open_tun: OpenTun, peer: UdpDevice) -> None:
    device = open_tun("10.76.1.2", mtu=1100)
    with pytest.raises(OSError, match=r"1073 B .* need an MTU of 1101 B; interface ina0 has 1100: raise it"):
        device.send(rows(peer.endpoint, 1, 1073))
    carry(device, peer, rows(peer.endpoint, 100, 1072))


def test_drops_of_the_queue_are_counted(open_tun: OpenTun, peer: UdpDevice) -> None:
    device = open_tun("10.76.1.2")
    assert device.rx_budget == QUEUE
    one = rows(device.endpoint, 1, 4)
    for _ in range(QUEUE + 100):
        peer.send(one)
    dropped = device.counters()["kernel_overflow"]
    assert dropped >= 100
    read_until(device, QUEUE + 100 - dropped)
    device.close()
    assert device.counters()["kernel_overflow"] == dropped


def test_a_port_carries_whole_packets_of_any_kind(stack: ExitStack, space: Space) -> None:
    port = space.run(TunPort)
    stack.callback(port.close)
    space.run(lambda: port.route("10.76.1.9"))
    with space.run(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as sender:
        sender.bind((HOST, 0))
        sender.setsockopt(17, 103, ROW)
        sender.sendto(bytes(10 * ROW), ("10.76.1.9", 9))
    seen = []
    while (frames := port.receive()) is not None:
        seen += [frames.frame(i) for i in range(len(frames))]
    (frame,) = [frame for frame in seen if frame[10] >> 4 == 4]
    assert len(frame) == 10 + 28 + 10 * ROW
    assert (frame[0], frame[1]) == (NEEDS_CSUM, GSO_UDP_L4)


def test_errors_and_closing(open_tun: OpenTun) -> None:
    device = open_tun("10.76.1.2")
    with pytest.raises(OSError, match="making TUN interface lo: Invalid argument"):
        open_tun("10.76.1.3", name="lo")
    device.close()
    device.close()
    assert device.fileno() == -1
    with pytest.raises(OSError, match="Bad file descriptor"):
        device.receive()
