"""Captures, read back by an independent reader."""

from pathlib import Path

import numpy as np
import pytest
from scapy.layers.inet import IP, UDP
from scapy.utils import rdpcap

from inanet.phy.pcap import PcapWriter
from inanet.wire.batch import Transmission
from inanet.wire.endpoint import endpoint
from inanet.wire.xagg import IP_PROTOCOL
from tests.phy.helpers import PEER, ScriptedDevice, batch_of, contents, numbered

NOW = 1_700_000_000.25


def packets_of(count: int, length: int) -> list[bytes]:
    data = numbered(count, length).tobytes()
    return [data[i * length : (i + 1) * length] for i in range(count)]


def checksum_holds(packet: IP) -> bool:
    header = bytes(packet)[: packet.ihl * 4]
    total = sum(int.from_bytes(header[i : i + 2], "big") for i in range(0, len(header), 2))
    return total % 0xFFFF == 0


def test_both_directions_are_read_back(tmp_path: Path) -> None:
    received = [*packets_of(40, 1052), b"", b"odd", packets_of(1, 36)[0]]
    device = ScriptedDevice([batch_of(received)], accepts=[3])
    capture = PcapWriter(device, tmp_path / "a.pcap", lambda: NOW)
    assert contents(capture.receive()) == received
    assert capture.receive() is None
    sent = Transmission(endpoint("127.0.0.8", 8000), numbered(9, 156), np.arange(9) * 156, 156)
    assert capture.send(sent, 2) == 3
    device.held.append((5.0, batch_of([b"held"])))
    assert capture.timer() == 5.0
    assert capture.flush(4.0) is None
    assert contents(capture.flush(5.0)) == [b"held"]
    capture.close()
    assert device.closed == 1

    expected = [(PEER, device.endpoint, packet) for packet in received]
    expected += [(device.endpoint, sent.destination, packet) for packet in contents(sent)[2:5]]
    expected.append((PEER, device.endpoint, b"held"))
    packets = rdpcap(str(tmp_path / "a.pcap"))
    got = [
        (
            endpoint(packet[IP].src, packet[UDP].sport),
            endpoint(packet[IP].dst, packet[UDP].dport),
            bytes(packet[UDP].payload),
        )
        for packet in packets
    ]
    assert got == expected
    assert all(checksum_holds(packet[IP]) for packet in packets)
    assert all(packet[IP].len == len(packet) == packet[UDP].len + 20 for packet in packets)
    assert {float(packet.time) for packet in packets} == {NOW}


def test_devices_without_ports_are_captured_as_raw_ip(tmp_path: Path) -> None:
    device = ScriptedDevice([batch_of(packets_of(3, 100), endpoint("127.0.0.9", 0))])
    device.endpoint = endpoint("127.0.0.1", 0)
    capture = PcapWriter(device, tmp_path / "raw.pcap", lambda: NOW)
    capture.receive()
    capture.close()
    packets = rdpcap(str(tmp_path / "raw.pcap"))
    assert [bytes(packet[IP].payload) for packet in packets] == packets_of(3, 100)
    assert {(packet[IP].proto, packet[IP].src) for packet in packets} == {(IP_PROTOCOL, "127.0.0.9")}
    assert all(checksum_holds(packet[IP]) for packet in packets)


def test_rotation_keeps_the_newest_packets_within_the_limit(tmp_path: Path) -> None:
    limit, length = 70_000, 1052
    per_file = (limit - 24) // (16 + 28 + length)
    packets = packets_of(300, length)
    device = ScriptedDevice([batch_of(packets[:250]), batch_of(packets[250:])])
    capture = PcapWriter(device, tmp_path / "r.pcap", lambda: NOW, max_bytes=limit, keep=2)
    while capture.receive() is not None:
        pass
    capture.close()
    names = ["r.pcap.2", "r.pcap.1", "r.pcap"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    files = [[bytes(p[UDP].payload) for p in rdpcap(str(tmp_path / name))] for name in names]
    assert [len(file) for file in files] == [per_file, per_file, 300 - 4 * per_file]
    assert [packet for file in files for packet in file] == packets[2 * per_file :]
    assert all((tmp_path / name).stat().st_size <= limit for name in names)


def test_a_limit_below_one_packet_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="allow at least 65575 B"):
        PcapWriter(ScriptedDevice(), tmp_path / "x.pcap", lambda: NOW, max_bytes=1000)
    assert list(tmp_path.iterdir()) == []


def test_immutable_bytes_can_be_captured(tmp_path: Path) -> None:
    capture = PcapWriter(ScriptedDevice(), tmp_path / "b.pcap", lambda: NOW)
    frozen = np.frombuffer(b"abcdefgh", np.uint8)
    assert capture.send(Transmission(PEER, frozen, np.array([0, 4]), 4)) == 2
    capture.close()
    assert [bytes(packet[UDP].payload) for packet in rdpcap(str(tmp_path / "b.pcap"))] == [b"abcd", b"efgh"]
