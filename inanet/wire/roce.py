"""RoCEv2: InfiniBand's transport headers behind UDP port 4791, whole IPv4 packets.

====== ==== ======== ================================================================================================
offset size header   fields (big-endian)
====== ==== ======== ================================================================================================
0      20   IPv4     without options; the two low bits of the type of service are ECN
20     8    UDP      source port: any, the flow's own (entropy); destination 4791; checksum 0
28     12   BTH      opcode, flags (solicited 1, migrated 1, pad count 2, version 4), partition key 16,
                     FECN 1, BECN 1, reserved 6, destination QP 24, acknowledge request 1, reserved 7, PSN 24
40     16   RETH     virtual address 64, remote key 32, length of the message 32: first packet of a WRITE
…      4    ImmDt    immediate data 32: last packet of a WRITE with immediate, behind RETH if there is one
40     4    AETH     syndrome 8, message sequence number 24: acknowledgements
…      n    payload  and 0 to 3 bytes of padding (the pad count)
…      4    ICRC     CRC-32 of Ethernet over everything that no router changes, little-endian
====== ==== ======== ================================================================================================

The ICRC is taken over eight bytes of ones (in the place of InfiniBand's local route header), then the packet with type of
service, time to live, IPv4 checksum, UDP checksum and the BTH byte with FECN and BECN read as ones. It covers the IPv4
identification, so the sender must choose that itself. Sources: InfiniBand Architecture Specification 1.2.1, chapter 9,
and its annex A17 (RoCEv2).
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from inanet.wire.drops import Drop

PORT = 4791
IP_BYTES = 20
UDP_BYTES = 8
#: where the base transport header begins
BTH_AT = IP_BYTES + UDP_BYTES
BTH_BYTES = 12
#: what every packet begins with
HEADER_BYTES = BTH_AT + BTH_BYTES
RETH_BYTES = 16
AETH_BYTES = 4
IMMEDIATE_BYTES = 4
ICRC_BYTES = 4
#: reserved bytes of a congestion notification packet
CNP_BYTES = 16

BTH = np.dtype([("opcode", "u1"), ("flags", "u1"), ("key", ">u2"), ("qp", ">u4"), ("psn", ">u4")])
RETH = np.dtype([("address", ">u8"), ("key", ">u4"), ("length", ">u4")])
AETH = np.dtype([("syndrome_msn", ">u4")])
IMMEDIATE = np.dtype([("immediate", ">u4")])
IPV4 = np.dtype(
    [
        ("version", "u1"),
        ("tos", "u1"),
        ("total", ">u2"),
        ("identification", ">u2"),
        ("fragment", ">u2"),
        ("ttl", "u1"),
        ("protocol", "u1"),
        ("checksum", ">u2"),
        ("source", ">u4"),
        ("destination", ">u4"),
    ]
)
UDP = np.dtype([("source", ">u2"), ("destination", ">u2"), ("length", ">u2"), ("checksum", ">u2")])
#: the first 40 bytes of every packet
HEADER = np.dtype([("ip", IPV4), ("udp", UDP), ("bth", BTH)])
assert HEADER.itemsize == HEADER_BYTES

#: packet sequence numbers and queue pair numbers have 24 bits
PSN_MASK = QP_MASK = MSN_MASK = 0xFFFFFF
#: half the PSN space: what is farther ahead lies behind (9.7.2)
PSN_HALF = 1 << 23
DEFAULT_KEY = 0xFFFF
FECN, BECN = 1 << 31, 1 << 30
ACK_REQUEST = 1 << 31
MIGRATED = 0x40
PAD_SHIFT = 4
DONT_FRAGMENT = 0x4000
UDP_PROTOCOL = 17
TTL = 64

#: ECN codepoints, the low bits of the type of service
NOT_ECT, ECT0, CONGESTED = 0, 2, 3
#: type of service of congestion notification packets: the class that the vendors' switches prefer (DSCP 48)
CNP_TOS = 48 << 2

#: bytes of payload that a path may carry per packet
PATH_MTUS = (256, 512, 1024, 2048, 4096)
#: largest message of one WRITE
MAX_MESSAGE = 1 << 31


class Opcode(IntEnum):
    """Reliable connection's opcodes for RDMA WRITE, and the notification packet of RoCEv2's congestion management."""

    WRITE_FIRST = 0x06
    WRITE_MIDDLE = 0x07
    WRITE_LAST = 0x08
    WRITE_LAST_IMMEDIATE = 0x09
    WRITE_ONLY = 0x0A
    WRITE_ONLY_IMMEDIATE = 0x0B
    ACKNOWLEDGE = 0x11
    CNP = 0x81


#: opcodes that begin a message: they carry a RETH
STARTS = frozenset((Opcode.WRITE_FIRST, Opcode.WRITE_ONLY, Opcode.WRITE_ONLY_IMMEDIATE))
#: opcodes with immediate data
WITH_IMMEDIATE = frozenset((Opcode.WRITE_LAST_IMMEDIATE, Opcode.WRITE_ONLY_IMMEDIATE))


class Trait(IntEnum):
    """What kernels need to know of an opcode: bits of :data:`TRAITS`."""

    KNOWN = 1
    #: first or last packet of a message
    STARTS = 2
    ENDS = 4
    IMMEDIATE = 8


#: kinds of acknowledgement: the upper three bits of the syndrome (9.7.5.1.1); the lower five are credits, a timer, a code
SYNDROME_ACK, SYNDROME_RNR, SYNDROME_NAK = 0x00, 0x20, 0x60
SYNDROME_KIND = 0xE0
SYNDROME_VALUE = 0x1F
#: credit count that says: the responder does not count credits
NO_CREDITS = 0x1F


class Nak(IntEnum):
    """Codes of a negative acknowledgement (table 46)."""

    PSN_SEQUENCE = 0
    INVALID_REQUEST = 1
    REMOTE_ACCESS = 2
    REMOTE_OPERATION = 3


#: seconds that a requester waits after "receiver not ready", by the code in the syndrome (table 45)
RNR_SECONDS = tuple(
    hundredths * 1e-5
    for hundredths in (
        *(65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192),
        *(256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152),
    )
)


def timeout_seconds(code: int) -> float | None:
    """Acknowledgement timeout by its code, 0 to 31: 4.096 us times 2^code; ``None`` for 0, which is forever (9.7.6.1.3)."""
    return 4.096e-6 * (1 << code) if code else None


#: what is read as ones, by offset; everything else enters the checksum as it is
_MASKED = (1, 8, 10, 11, 26, 27, BTH_AT + 4)


def icrc(packet: bytes) -> int:
    """Invariant CRC of a whole IPv4 packet, which ends with four bytes for it that are not looked at."""
    masked = bytearray(packet[:-ICRC_BYTES])
    for at in _MASKED:
        masked[at] = 0xFF
    return crc32(masked, crc32(b"\xff" * 8))


class MalformedRoce(ValueError):
    """Bytes that are not such a packet; ``reason`` is the :class:`~inanet.wire.drops.Drop`."""

    def __init__(self, reason: Drop, detail: str) -> None:
        super().__init__(f"{reason.label}: {detail}")
        self.reason = reason


def payload_at(opcode: int) -> int:
    """Where the payload begins in packets with this opcode. Raises ``ValueError`` for opcodes other than :class:`Opcode`'s."""
    code = Opcode(opcode)
    at = HEADER_BYTES
    if code in STARTS:
        at += RETH_BYTES
    if code in WITH_IMMEDIATE:
        at += IMMEDIATE_BYTES
    if code is Opcode.ACKNOWLEDGE:
        at += AETH_BYTES
    if code is Opcode.CNP:
        at += CNP_BYTES
    return at


#: where the payload begins, by opcode; 0 for those not in :class:`Opcode`
PAYLOAD_AT: NDArray[np.int64] = np.zeros(256, np.int64)
#: bits of :class:`Trait` by opcode
TRAITS: NDArray[np.int64] = np.zeros(256, np.int64)
for _code in Opcode:
    PAYLOAD_AT[_code] = payload_at(_code)
    TRAITS[_code] = (
        Trait.KNOWN
        | (Trait.STARTS if _code in STARTS else 0)
        | (Trait.ENDS if Opcode.WRITE_LAST <= _code <= Opcode.WRITE_ONLY_IMMEDIATE else 0)
        | (Trait.IMMEDIATE if _code in WITH_IMMEDIATE else 0)
    )


def ip_checksum(header: bytes) -> int:
    """The checksum to put into an IPv4 header of 20 bytes whose own is zero (RFC 1071)."""
    total: int = sum(struct.unpack(">10H", header))
    total = (total & 0xFFFF) + (total >> 16)
    return ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF


@dataclass(frozen=True, slots=True)
class Packet:
    """A decoded packet; for tests, traces and dissectors.

    ``source`` and ``destination`` are endpoints (:mod:`inanet.wire.endpoint`). ``address``, ``key`` and ``length`` are the
    RETH's; ``syndrome`` and ``msn`` the AETH's. Fields that an opcode has no header for are ignored.
    """

    source: int
    destination: int
    opcode: int
    qp: int
    psn: int
    payload: bytes = b""
    address: int = 0
    key: int = 0
    length: int = 0
    immediate: int = 0
    syndrome: int = 0
    msn: int = 0
    ack_request: bool = False
    fecn: bool = False
    becn: bool = False
    partition: int = DEFAULT_KEY
    tos: int = ECT0
    ttl: int = TTL
    identification: int = 1

    def encode(self) -> bytes:
        """The packet's bytes, IPv4 header first, checksums filled in. Raises ``ValueError`` for an unknown opcode."""
        begin = payload_at(self.opcode)
        pad = -len(self.payload) % 4
        total = begin + len(self.payload) + pad + ICRC_BYTES
        header = np.zeros((), HEADER)
        ip, udp, bth = header["ip"], header["udp"], header["bth"]
        ip["version"], ip["tos"], ip["total"], ip["ttl"] = 0x45, self.tos, total, self.ttl
        ip["identification"], ip["fragment"], ip["protocol"] = (
            self.identification,
            DONT_FRAGMENT,
            UDP_PROTOCOL,
        )
        ip["source"], ip["destination"] = self.source >> 16, self.destination >> 16
        ip["checksum"] = ip_checksum(ip.tobytes())
        udp["source"], udp["destination"] = self.source & 0xFFFF, self.destination & 0xFFFF
        udp["length"] = total - IP_BYTES
        bth["opcode"], bth["flags"], bth["key"] = self.opcode, MIGRATED | pad << PAD_SHIFT, self.partition
        bth["qp"] = self.fecn * FECN | self.becn * BECN | self.qp & QP_MASK
        bth["psn"] = self.ack_request * ACK_REQUEST | self.psn & PSN_MASK
        packet = header.tobytes() + self._extended() + self.payload + bytes(pad)
        return packet + icrc(packet + bytes(ICRC_BYTES)).to_bytes(ICRC_BYTES, "little")

    def _extended(self) -> bytes:
        parts = b""
        if self.opcode in STARTS:
            parts += struct.pack(">QII", self.address, self.key, self.length)
        if self.opcode in WITH_IMMEDIATE:
            parts += struct.pack(">I", self.immediate)
        if self.opcode == Opcode.ACKNOWLEDGE:
            parts += struct.pack(">I", self.syndrome << 24 | self.msn & MSN_MASK)
        if self.opcode == Opcode.CNP:
            parts += bytes(CNP_BYTES)
        return parts


def decode(packet: bytes) -> Packet:
    """The packet that these bytes are. Raises :class:`MalformedRoce`, also when the ICRC does not match."""
    if len(packet) < HEADER_BYTES + ICRC_BYTES:
        raise MalformedRoce(Drop.SHORT, f"{len(packet)} B")
    header = np.frombuffer(packet[:HEADER_BYTES], HEADER)[0]
    ip, udp, bth = header["ip"], header["udp"], header["bth"]
    if ip["version"] != 0x45 or ip["protocol"] != UDP_PROTOCOL or udp["destination"] != PORT:
        raise MalformedRoce(Drop.BAD_MAGIC, "not UDP to port 4791 over IPv4 without options")
    if ip["total"] != len(packet) or udp["length"] != len(packet) - IP_BYTES:
        raise MalformedRoce(Drop.SHORT, f"{len(packet)} B, of which the headers know {ip['total']}")
    opcode, flags = int(bth["opcode"]), int(bth["flags"])
    try:
        begin = payload_at(opcode)
    except ValueError:
        raise MalformedRoce(Drop.BAD_TYPE, f"opcode {opcode:#04x}") from None
    if flags & 0x0F:
        raise MalformedRoce(Drop.BAD_TYPE, f"transport header version {flags & 0x0F}")
    end = len(packet) - ICRC_BYTES - (flags >> PAD_SHIFT & 3)
    if end < begin:
        raise MalformedRoce(Drop.SHORT, f"{len(packet)} B with opcode {opcode:#04x}")
    if int.from_bytes(packet[-ICRC_BYTES:], "little") != icrc(packet):
        raise MalformedRoce(Drop.BAD_ICRC, f"opcode {opcode:#04x}, PSN {int(bth['psn']) & PSN_MASK}")
    address = key = length = immediate = acknowledgement = 0
    if opcode in STARTS:
        address, key, length = struct.unpack_from(">QII", packet, HEADER_BYTES)
    if opcode in WITH_IMMEDIATE:
        (immediate,) = struct.unpack_from(">I", packet, begin - IMMEDIATE_BYTES)
    if opcode == Opcode.ACKNOWLEDGE:
        (acknowledgement,) = struct.unpack_from(">I", packet, HEADER_BYTES)
    qp, psn = int(bth["qp"]), int(bth["psn"])
    return Packet(
        source=int(ip["source"]) << 16 | int(udp["source"]),
        destination=int(ip["destination"]) << 16 | int(udp["destination"]),
        opcode=opcode,
        qp=qp & QP_MASK,
        psn=psn & PSN_MASK,
        payload=packet[begin:end],
        address=address,
        key=key,
        length=length,
        immediate=immediate,
        syndrome=acknowledgement >> 24,
        msn=acknowledgement & MSN_MASK,
        ack_request=bool(psn & ACK_REQUEST),
        fecn=bool(qp & FECN),
        becn=bool(qp & BECN),
        partition=int(bth["key"]),
        tos=int(ip["tos"]),
        ttl=int(ip["ttl"]),
        identification=int(ip["identification"]),
    )
