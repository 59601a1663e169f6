"""RoCEv2's packets, against an independent implementation of their checksum."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inanet.kernels.icrc import invariant_crc, is_sound, seal_packets
from inanet.wire.drops import Drop
from inanet.wire.endpoint import endpoint
from inanet.wire.roce import (
    PORT,
    PSN_MASK,
    RNR_SECONDS,
    WITH_IMMEDIATE,
    MalformedRoce,
    Opcode,
    Packet,
    decode,
    icrc,
    payload_at,
    timeout_seconds,
)

A, B = endpoint("10.1.2.3", 50000), endpoint("192.168.77.1", PORT)
#: of the whole packet: type of service, time to live, checksums, the byte with FECN and BECN
UNCOVERED = {1, 8, 10, 11, 26, 27, 32}


def some(opcode: int, payload: bytes = b"payload") -> Packet:
    """A packet with every field its opcode has."""
    fields: dict[str, object] = {}
    if opcode in (Opcode.WRITE_FIRST, Opcode.WRITE_ONLY, Opcode.WRITE_ONLY_IMMEDIATE):
        fields = {"address": 0x1122334455667788, "key": 0xA1B2C3D4, "length": 77}
    if opcode in WITH_IMMEDIATE:
        fields["immediate"] = 0xDEADBEEF
    if opcode == Opcode.ACKNOWLEDGE:
        fields = {"syndrome": 0x1F, "msn": 0x123456}
    if opcode in (Opcode.ACKNOWLEDGE, Opcode.CNP):
        payload = b""
    return Packet(A, B, opcode, 0xABCDEF, 0xFEDCBA, payload, ack_request=True, becn=True, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("opcode", list(Opcode))
@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 15, 16, 17, 1024])
def test_packets_survive_both_ways(opcode: Opcode, size: int) -> None:
    packet = some(opcode, bytes(range(256)) * 4 if size == 1024 else bytes(range(size)))
    data = packet.encode()
    assert len(data) % 4 == 0
    assert decode(data) == packet
    arena = np.frombuffer(b"..." + data, np.uint8).copy()
    assert invariant_crc(arena, 3, len(data)) == icrc(data)
    assert is_sound(arena, 3, len(data))


def test_scapy_reads_what_is_written_and_writes_the_same_bytes() -> None:
    pytest.importorskip("scapy")
    from scapy.contrib.roce import AETH, BTH, cnp
    from scapy.layers.inet import IP, UDP
    from scapy.packet import Raw

    for packet in map(some, Opcode):
        data = packet.encode()
        read = IP(data)
        bth = read[BTH]
        assert (bth.opcode, bth.dqpn, bth.psn, bth.ackreq, bth.becn) == (
            packet.opcode,
            0xABCDEF,
            0xFEDCBA,
            1,
            1,
        )
        assert read[UDP].dport == PORT
        carried = bth.icrc
        bth.icrc = None
        assert IP(bytes(read))[BTH].icrc == carried
    head = IP(src="10.1.2.3", dst="192.168.77.1", flags="DF", id=1, ttl=64, tos=2) / UDP(
        sport=50000, dport=PORT, chksum=0
    )
    acknowledgement = head / BTH(opcode=0x11, migreq=1, dqpn=7, psn=9) / AETH(syndrome=0x1F, msn=3)
    assert Packet(A, B, Opcode.ACKNOWLEDGE, 7, 9, syndrome=0x1F, msn=3).encode() == bytes(acknowledgement)
    notification = head / cnp(7)
    notification[BTH].migreq = 1
    assert Packet(A, B, Opcode.CNP, 7, 0, becn=True).encode() == bytes(notification)
    middle = head / BTH(opcode=7, migreq=1, dqpn=7, psn=9) / Raw(b"abcdefgh")
    assert Packet(A, B, Opcode.WRITE_MIDDLE, 7, 9, b"abcdefgh").encode() == bytes(middle)


def test_one_flipped_bit_is_found_wherever_it_is_covered() -> None:
    data = some(Opcode.WRITE_ONLY_IMMEDIATE, bytes(100)).encode()
    arena = np.frombuffer(data, np.uint8).copy()
    for at in range(len(data)):
        for bit in range(8):
            arena[at] ^= 1 << bit
            assert is_sound(arena, 0, len(data)) == (at in UNCOVERED), at
            arena[at] ^= 1 << bit


@pytest.mark.parametrize("length", [-4, 0, 40, 45, 46, 47])
def test_lengths_that_no_packet_has_are_unsound(length: int) -> None:
    assert not is_sound(np.zeros(64, np.uint8), 0, length)


def test_a_batch_is_sealed_in_place() -> None:
    packets = [some(Opcode.WRITE_MIDDLE, bytes(size)).encode() for size in (0, 40, 1024)]
    arena = np.frombuffer(b"".join(packets), np.uint8).copy()
    lengths = np.array([len(packet) for packet in packets], np.int64)
    offsets = np.cumsum(lengths) - lengths
    whole = arena.copy()
    for end in (offsets + lengths).tolist():
        arena[end - 4 : end] = 0
    seal_packets(arena, offsets, lengths)
    assert (arena == whole).all()


@given(st.binary(max_size=120))
def test_bytes_are_a_packet_or_malformed(data: bytes) -> None:
    with pytest.raises(MalformedRoce):
        decode(data)


@pytest.mark.parametrize(
    ("at", "value", "reason"),
    [
        (0, 0x46, Drop.BAD_MAGIC),
        (9, 6, Drop.BAD_MAGIC),
        (23, 0, Drop.BAD_MAGIC),
        (3, 0, Drop.SHORT),
        (25, 0, Drop.SHORT),
        (28, 0x0C, Drop.BAD_TYPE),
        (29, 0x41, Drop.BAD_TYPE),
        (41, 1, Drop.BAD_ICRC),
    ],
)
def test_malformed_packets_have_a_reason(at: int, value: int, reason: Drop) -> None:
    data = bytearray(some(Opcode.WRITE_MIDDLE).encode())
    data[at] = value
    with pytest.raises(MalformedRoce) as caught:
        decode(bytes(data))
    assert caught.value.reason is reason


def test_a_packet_must_hold_the_headers_of_its_opcode() -> None:
    short = bytearray(some(Opcode.WRITE_MIDDLE, bytes(8)).encode())
    short[28] = Opcode.WRITE_FIRST
    with pytest.raises(MalformedRoce, match="opcode 0x06"):
        decode(bytes(short))
    with pytest.raises(ValueError, match="12"):
        payload_at(12)


def test_codes_of_times() -> None:
    assert timeout_seconds(0) is None
    assert timeout_seconds(14) == pytest.approx(0.067, rel=0.01)
    assert len(RNR_SECONDS) == 32
    assert (RNR_SECONDS[0], RNR_SECONDS[1], RNR_SECONDS[12], RNR_SECONDS[31]) == pytest.approx(
        (0.65536, 1e-5, 6.4e-4, 0.49152)
    )
    assert PSN_MASK == 2**24 - 1
