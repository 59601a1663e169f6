"""Raw IPv4 on loopback, where every node has its own 127.0.0.x."""

import errno
import socket
import struct
from collections.abc import Callable

import numpy as np
import pytest

from inanet.phy.rawip import TRUESIZE, RawIpDevice, strip_headers
from inanet.wire.batch import Transmission
from inanet.wire.endpoint import endpoint
from inanet.wire.xagg import IP_PROTOCOL
from tests.phy.helpers import carry, numbered, read_until

OpenRaw = Callable[..., RawIpDevice]
needs_root = pytest.mark.privileged("CAP_NET_RAW")


def rows(destination: int, count: int, length: int = 1052) -> Transmission:
    return Transmission(
        destination, numbered(count, length), np.arange(count, dtype=np.int64) * length, length
    )


@needs_root
@pytest.mark.parametrize("length", [1, 36, 1052, 9000])
@pytest.mark.parametrize("count", [1, 127, 300])
def test_round_trip(open_raw: OpenRaw, length: int, count: int) -> None:
    sender, receiver = open_raw("127.0.0.41"), open_raw("127.0.0.42")
    assert receiver.endpoint == endpoint("127.0.0.42", 0)
    transmission = rows(receiver.endpoint, count, length)
    # single packets cost more receive buffer than super-frames do
    for first in range(0, count, 100):
        part = Transmission(
            receiver.endpoint, transmission.arena, transmission.offsets[first : first + 100], length
        )
        carry(sender, receiver, part)


@needs_root
def test_the_kernel_filters_by_own_address(open_raw: OpenRaw) -> None:
    sender, receiver, other = open_raw("127.0.0.41"), open_raw("127.0.0.42"), open_raw("127.0.0.43")
    carry(sender, receiver, rows(receiver.endpoint, 20))
    assert other.receive() is None
    assert sender.receive() is None


@needs_root
def test_options_in_the_header_are_stripped(open_raw: OpenRaw) -> None:
    receiver = open_raw("127.0.0.42")
    payload = numbered(1, 1052).tobytes()
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, IP_PROTOCOL) as other:
        other.bind(("127.0.0.41", 0))
        other.setsockopt(socket.IPPROTO_IP, socket.IP_OPTIONS, b"\x01" * 8)
        other.sendto(payload, ("127.0.0.42", 0))
    assert read_until(receiver, 1) == [(endpoint("127.0.0.41", 0), payload)]


@needs_root
def test_packets_beyond_the_buffer_are_counted_and_left_out(open_raw: OpenRaw) -> None:
    sender, receiver = open_raw("127.0.0.41"), open_raw("127.0.0.42")
    sender.send(rows(receiver.endpoint, 2, 12000))
    sender.send(rows(receiver.endpoint, 1, 500))
    got = read_until(receiver, 1)
    assert [len(packet) for _, packet in got] == [500]
    assert receiver.counters()["rx_truncated"] == 2
    assert receiver.counters()["rx_packets"] == 1


@needs_root
def test_a_packet_no_ip_packet_can_hold_is_refused(open_raw: OpenRaw) -> None:
    sender = open_raw("127.0.0.41")
    with pytest.raises(OSError, match="65516 B need an MTU of 65536 B") as caught:
        sender.send(rows(endpoint("127.0.0.42", 0), 1, 65516))
    assert caught.value.errno == errno.EMSGSIZE


@needs_root
def test_budget_counts_single_packets(open_raw: OpenRaw) -> None:
    assert open_raw(rcvbuf=212_992).rx_budget == 2 * 212_992 // TRUESIZE


@needs_root
def test_an_address_of_another_host_is_refused_by_name(open_raw: OpenRaw) -> None:
    with pytest.raises(OSError, match=r"cannot bind raw IPv4 192\.0\.2\.1: "):
        RawIpDevice("192.0.2.1")


def test_without_the_capability_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(socket, "socket", refuse)
    with pytest.raises(PermissionError, match=r"CAP_NET_RAW: run as root, grant it .* or use the udp device"):
        RawIpDevice()


def test_malformed_headers_are_left_out() -> None:
    def header(first: int, source: bytes = b"\x0a\x00\x00\x07") -> bytes:
        return struct.pack(">B11x4s4x", first, source)

    good = header(0x46) + b"\0" * 4 + b"payload"
    packets = [header(0x65) + b"v6", header(0x44) + b"ihl", header(0x4F), b"\x45short", good, header(0x45)]
    stride = 64
    arena = np.zeros(stride * len(packets), np.uint8)
    headers = np.zeros((len(packets), 16), np.uint32)
    for i, packet in enumerate(packets):
        arena[i * stride : i * stride + len(packet)] = np.frombuffer(packet, np.uint8)
        headers[i, 14] = len(packet)
    offsets, lengths = np.zeros(6, np.int64), np.zeros(6, np.int64)
    sources = np.zeros(6, np.uint64)
    assert strip_headers(headers, arena, len(packets), stride, offsets, lengths, sources) == 2
    assert offsets[:2].tolist() == [4 * stride + 24, 5 * stride + 20]
    assert lengths[:2].tolist() == [7, 0]
    assert sources[:2].tolist() == [endpoint("10.0.0.7", 0)] * 2
    assert arena[offsets[0] : offsets[0] + 7].tobytes() == b"payload"
