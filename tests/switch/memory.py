"""Ports in memory: frames are built and looked at byte by byte, time is virtual."""

import ctypes
import struct
from collections import deque

import numpy as np

from inanet.phy.vnet import DATA_VALID, GSO_UDP_L4, HEADER_BYTES, NEEDS_CSUM, FrameBatch
from inanet.wire.batch import I64, U64
from inanet.wire.endpoint import address_of


class MemoryPort:
    """A device of :class:`inanet.switch.framed.FrameSwitch` that records what it is given."""

    def __init__(self, accepts: int = 1 << 30) -> None:
        self.arriving: deque[list[bytes]] = deque()
        self.sent: list[bytes] = []
        self.accepts = accepts

    def fileno(self) -> int:
        return -1

    def receive(self) -> FrameBatch | None:
        return batch_of(self.arriving.popleft()) if self.arriving else None

    def send(self, frames: FrameBatch, start: int = 0) -> int:
        taken = min(len(frames) - start, self.accepts)
        self.sent += [frames.frame(i) for i in range(start, start + taken)]
        return taken

    def send_messages(self, words: U64, first: int, count: int, sizes: I64) -> int:
        taken = min(count, self.accepts)
        for (iovecs, pieces), size in zip(
            words[first : first + taken, 2:4].tolist(), sizes.tolist(), strict=False
        ):
            pairs = (ctypes.c_uint64 * (2 * pieces)).from_address(iovecs)
            frame = b"".join(ctypes.string_at(pairs[2 * i], pairs[2 * i + 1]) for i in range(pieces))
            assert len(frame) == size
            self.sent.append(frame)
        return taken

    def counters(self) -> dict[str, int]:
        return {"rx_frames": 0}

    def close(self) -> None:
        pass

    def take(self) -> list[bytes]:
        """What was sent since the last call."""
        sent, self.sent = self.sent, []
        return sent


def batch_of(frames: list[bytes]) -> FrameBatch:
    """Received frames at odd places of an arena."""
    lengths = np.array([len(frame) for frame in frames], np.int64)
    offsets = np.cumsum(lengths + 3) - lengths
    arena = np.zeros(int(offsets[-1] + lengths[-1]), np.uint8)
    for at, frame in zip(offsets, frames, strict=True):
        arena[at : at + len(frame)] = np.frombuffer(frame, np.uint8)
    return FrameBatch(arena, offsets, lengths)


def internet_checksum(data: bytes) -> int:
    padded = data + b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f">{len(padded) // 2}H", padded))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def ethernet(to: int, source: int, kind: int, body: bytes) -> bytes:
    """An ordinary frame with its virtio-net header."""
    return (
        bytes(HEADER_BYTES)
        + to.to_bytes(6, "big")
        + source.to_bytes(6, "big")
        + kind.to_bytes(2, "big")
        + body
    )


def ipv4(source: str, destination: str, protocol: int, body: bytes, tos: int = 0, ttl: int = 64) -> bytes:
    """An IPv4 packet without options."""
    addresses = bytes(map(int, source.split("."))) + bytes(map(int, destination.split(".")))
    header = struct.pack(">BBHHHBBH", 0x45, tos, 20 + len(body), 7, 0x4000, ttl, protocol, 0) + addresses
    return header[:10] + internet_checksum(header).to_bytes(2, "big") + header[12:] + body


def udp(
    to: int,
    hardware: int,
    source: int,
    destination: int,
    packets: list[bytes],
    tos: int = 0,
    link: bool = True,
) -> bytes:
    """A super-frame (or a frame) of datagrams, its checksum left open as by a kernel with segmentation offload."""
    (own, port), (other, aim) = address_of(source), address_of(destination)
    payload = b"".join(packets)
    datagram = struct.pack(">HHHH", port, aim, 8 + len(payload), 0) + payload
    packet = ipv4(own, other, 17, datagram, tos)
    size = len(packets[0]) if len(packets) > 1 else 0
    start = 34 if link else 20
    vnet = struct.pack("=BBHHHH", NEEDS_CSUM, GSO_UDP_L4 if size else 0, start + 8, size, start, 6)
    body = ethernet(to, hardware, 0x0800, packet)[HEADER_BYTES:] if link else packet
    return vnet + body


class Parsed:
    """A frame with UDP that a switch has sent; checks lengths, checksum and virtio-net header."""

    def __init__(self, frame: bytes, link: bool = True) -> None:
        flags, kind, headers, size, start, offset = struct.unpack_from("=BBHHHH", frame)
        ip = HEADER_BYTES + (14 if link else 0)
        self.to = int.from_bytes(frame[10:16], "big") if link else 0
        self.hardware = int.from_bytes(frame[16:22], "big") if link else 0
        self.tos, self.ttl = frame[ip + 1], frame[ip + 8]
        self.address, self.target = (".".join(map(str, frame[ip + at : ip + at + 4])) for at in (12, 16))
        total = int.from_bytes(frame[ip + 2 : ip + 4], "big")
        assert total == len(frame) - ip
        assert internet_checksum(frame[ip : ip + 20]) == 0
        self.port, self.aim, length, check = struct.unpack_from(">HHHH", frame, ip + 20)
        assert length == total - 20
        payload = frame[ip + 28 :]
        assert (flags & ~DATA_VALID, headers, start, offset) == (NEEDS_CSUM, ip + 28 - 10, ip + 20 - 10, 6)
        # what the sum begins with: addresses, protocol, length
        assert check == ~internet_checksum(frame[ip + 12 : ip + 20] + struct.pack(">HH", 17, length)) & 0xFFFF
        assert kind == (GSO_UDP_L4 if size else 0)
        step = size or len(payload)
        self.packets = [payload[i : i + step] for i in range(0, len(payload), step)]
