"""AF_PACKET devices on loopback and between namespaces."""

import socket
import struct
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import pytest

from inanet.phy.packet import PacketDevice
from inanet.phy.udp import FRAGMENTS, TRUESIZE, UdpDevice
from inanet.testing.clock import FakeClock
from inanet.wire.batch import Transmission
from inanet.wire.endpoint import address_of, endpoint
from tests.phy.conftest import lacking
from tests.phy.helpers import carry, contents, numbered, read_until
from tests.phy.spaces import Space, cable, open_spaces

pytestmark = pytest.mark.privileged("CAP_NET_RAW, and CAP_SYS_ADMIN for namespaces")
OpenUdp = Callable[..., UdpDevice]
OpenPacket = Callable[..., PacketDevice]
ROW = 1052
GROUP = "239.255.73.2"


def rows(destination: int, count: int, length: int = ROW) -> Transmission:
    return Transmission(
        destination, numbered(count, length), np.arange(count, dtype=np.int64) * length, length
    )


@pytest.fixture
def open_packet(stack: ExitStack) -> OpenPacket:
    """Opens packet devices and closes them after the test; skips without CAP_NET_RAW."""
    try:
        PacketDevice("lo", "127.0.0.1").close()
    except PermissionError as error:
        lacking(str(error))

    def open_device(*arguments: object, **options: object) -> PacketDevice:
        device = PacketDevice(*arguments, **options)  # type: ignore[arg-type]
        stack.callback(device.close)
        return device

    return open_device


@pytest.fixture
def pair(stack: ExitStack) -> tuple[Space, Space]:
    """Two namespaces with a cable between 10.73.0.1 (``a0``) and 10.73.0.2 (``b0``)."""
    one, other = open_spaces(stack, 2)
    cable(one, "a0", other, "b0", "10.73.0.1", "10.73.0.2")
    return one, other


@pytest.mark.parametrize("length", [1, 3, 36, 1052, 1400])
@pytest.mark.parametrize("count", [1, 2, 63, 2500])
def test_round_trip_on_loopback(open_packet: OpenPacket, length: int, count: int) -> None:
    sender, receiver = open_packet("lo", "127.0.0.1"), open_packet("lo", "127.0.0.1")
    carry(sender, receiver, rows(receiver.endpoint, count, length))
    assert sender.counters()["tx_through_kernel"] == 0


def test_super_frames_stay_whole_and_packets_aligned(open_packet: OpenPacket) -> None:
    sender, receiver = open_packet("lo", "127.0.0.1"), open_packet("lo", "127.0.0.1")
    assert sender.send(rows(receiver.endpoint, 200)) == 200
    batch = receiver.receive()
    assert batch is not None
    assert contents(batch) == contents(rows(receiver.endpoint, 200))
    assert not (batch.offsets % 4).any()
    assert receiver.counters()["rx_superframes"] == sender.counters()["tx_superframes"] == 4


def test_scattered_packets(open_packet: OpenPacket) -> None:
    sender, receiver = open_packet("lo", "127.0.0.1"), open_packet("lo", "127.0.0.1")
    offsets = np.random.default_rng(1).permutation(500).astype(np.int64) * ROW
    assert carry(sender, receiver, Transmission(receiver.endpoint, numbered(500, ROW), offsets, ROW)) == 500


def test_peers_with_ordinary_sockets(
    open_packet: OpenPacket, open_udp: OpenUdp, pair: tuple[Space, Space]
) -> None:
    one, other = pair
    device = one.run(lambda: open_packet("a0", "10.73.0.1", 7000))
    peer = other.run(lambda: open_udp("10.73.0.2"))
    # the kernel resolves the neighbour for the first transmission (and would hold three super-frames
    # meanwhile)
    carry(device, peer, rows(peer.endpoint, 100))
    carry(device, peer, rows(peer.endpoint, 3000))
    assert device.counters()["tx_through_kernel"] == 100
    carry(peer, device, rows(device.endpoint, 3000))
    assert device.counters()["rx_superframes"] < 3000 // 40
    # no unreachable port was reported for what the device took past the kernel
    assert peer.counters()["path_errors"] == 0


def test_two_packet_devices_between_namespaces(open_packet: OpenPacket, pair: tuple[Space, Space]) -> None:
    one, other = pair
    device = one.run(lambda: open_packet("a0", "10.73.0.1"))
    peer = other.run(lambda: open_packet("b0", "10.73.0.2"))
    for sender, receiver in ((device, peer), (peer, device)):
        assert carry(sender, receiver, rows(receiver.endpoint, 10)) == 10
        assert carry(sender, receiver, rows(receiver.endpoint, 700)) == 700


def test_a_neighbour_is_verified_by_the_kernel_from_time_to_time(
    open_packet: OpenPacket, open_udp: OpenUdp, pair: tuple[Space, Space]
) -> None:
    one, other = pair
    clock = FakeClock()
    device = one.run(lambda: open_packet("a0", "10.73.0.1", clock=clock))
    peer = other.run(lambda: open_udp("10.73.0.2"))
    for _ in range(2):
        carry(device, peer, rows(peer.endpoint, 5))
    assert device.counters()["tx_through_kernel"] == 5
    clock.advance(31)
    for _ in range(2):
        carry(device, peer, rows(peer.endpoint, 5))
    assert device.counters()["tx_through_kernel"] == 10


def test_what_is_not_for_this_port_is_not_taken(
    open_packet: OpenPacket, open_udp: OpenUdp, pair: tuple[Space, Space]
) -> None:
    one, other = pair
    device = one.run(lambda: open_packet("a0", "10.73.0.1", 7000))
    ordinary = one.run(lambda: open_udp("10.73.0.1", 7001))
    peer = other.run(lambda: open_udp("10.73.0.2"))
    carry(peer, ordinary, rows(ordinary.endpoint, 100))
    assert device.receive() is None
    counters = device.counters()
    assert (counters["rx_packets"], counters["rx_foreign"]) == (0, 0)
    # the port is taken, so that nobody else gets it and peers get no "unreachable"
    with pytest.raises(OSError, match="Address already in use"):
        one.run(lambda: open_udp("10.73.0.1", 7000))


def test_groups(open_packet: OpenPacket, open_udp: OpenUdp, pair: tuple[Space, Space]) -> None:
    one, other = pair
    device = one.run(lambda: open_packet("a0", "10.73.0.1", 7000))
    peer = other.run(lambda: open_packet("b0", "10.73.0.2", 7000))
    group = endpoint(GROUP, 7500)
    peer.join(group)
    # groups need no resolving
    assert device.send(rows(group, 150)) == 150
    assert read_until(peer, 150) == [(device.endpoint, packet) for packet in contents(rows(group, 150))]
    carry(device, peer, rows(peer.endpoint, 10))
    peer.leave(group)
    assert device.send(rows(group, 150)) == 150
    assert peer.receive() is None
    with pytest.raises(ValueError, match=r"10\.0\.0\.1:7 is not a multicast group"):
        device.join(endpoint("10.0.0.1", 7))


def frame(payload: bytes, checksum: int | None, fragment: int = 0, flip_ip: bool = False) -> bytes:
    """A frame for 127.0.0.1:7000 without offloads, from 127.0.0.1:9."""
    udp = struct.pack(">HHHH", 9, 7000, 8 + len(payload), 0) + payload
    address = socket.inet_aton("127.0.0.1")
    pseudo = address * 2 + struct.pack(">HH", 17, len(udp))
    right = internet_checksum(pseudo + udp)
    udp = udp[:6] + struct.pack(">H", right if checksum is None else checksum) + udp[8:]
    header = struct.pack(">BBHHHBBH", 0x45, 0, 20 + len(udp), 7, fragment, 64, 17, 0) + address * 2
    header = header[:10] + struct.pack(">H", internet_checksum(header) ^ flip_ip) + header[12:]
    return bytes(12) + b"\x08\x00" + header + udp


def internet_checksum(data: bytes) -> int:
    data += bytes(len(data) % 2)
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF or 0xFFFF


def test_checksums_that_nobody_has_verified_are_verified(open_packet: OpenPacket) -> None:
    receiver = open_packet("lo", "127.0.0.1", 7000)
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as other:
        other.bind(("lo", 0x0800))
        for data in (
            frame(b"wrong", 0x1234),
            frame(b"no checksum", 0),
            frame(b"odd", None),
            frame(b"even", None),
            frame(b"a fragment", None, fragment=0x2000),
            frame(b"wrong header", None, flip_ip=True),
            frame(b"", None),
            frame(b"padded", None) + bytes(20),
        ):
            other.send(data)
    got = read_until(receiver, 5)
    assert [packet for _, packet in got] == [b"no checksum", b"odd", b"even", b"", b"padded"]
    assert {source for source, _ in got} == {endpoint("127.0.0.1", 9)}
    counters = receiver.counters()
    assert counters["rx_bad_checksum"] == 2
    # fragments do not pass the socket's filter
    assert counters["rx_foreign"] == counters["rx_malformed"] == 0


def test_a_packet_above_the_mtu_is_refused(open_packet: OpenPacket, pair: tuple[Space, Space]) -> None:
    device = pair[0].run(lambda: open_packet("a0", "10.73.0.1"))
    with pytest.raises(OSError, match=r"packets of 1473 B .* need an MTU of 1501 B; interface a0 has 1500"):
        device.send(rows(endpoint("10.73.0.2", 9), 2, 1473))
    assert device.send(rows(endpoint("10.73.0.2", 9), 2, 1472)) == 2


def test_budget_holds_what_it_promises(open_packet: OpenPacket) -> None:
    sender, receiver = open_packet("lo", "127.0.0.1"), open_packet("lo", "127.0.0.1", rcvbuf=212_992)
    budget = receiver.rx_budget
    assert budget == 2 * 212_992 // TRUESIZE * FRAGMENTS == 6 * 62
    assert sender.send(rows(receiver.endpoint, budget)) == budget
    read_until(receiver, budget)
    assert receiver.counters()["kernel_overflow"] == 0
    assert sender.send(rows(receiver.endpoint, 3000)) == 3000
    got = 0
    while (batch := receiver.receive()) is not None:
        got += len(batch)
    assert receiver.counters()["kernel_overflow"] == (3000 - got + 61) // 62 > 0


def test_errors_name_what_is_wrong(open_packet: OpenPacket, pair: tuple[Space, Space]) -> None:
    with pytest.raises(OSError, match=r"interface nosuch0: No such device; there are .*lo"):
        open_packet("nosuch0", "127.0.0.1")
    with pytest.raises(OSError, match=r"cannot bind UDP 192\.0\.2\.1:0"):
        open_packet("lo", "192.0.2.1")
    with pytest.raises(OSError, match="is not the name of an interface"):
        open_packet("x" * 16, "127.0.0.1")


def test_closing(open_packet: OpenPacket) -> None:
    device = open_packet("lo", "127.0.0.1")
    address, port = address_of(device.endpoint)
    device.close()
    device.close()
    assert device.fileno() == -1
    with pytest.raises(OSError, match="Bad file descriptor"):
        device.receive()
    open_packet("lo", address, port)
