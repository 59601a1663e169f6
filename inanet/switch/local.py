"""What is for the switch itself: address resolution (ARP) and echo (ICMP), a frame at a time."""

import struct

import numpy as np

from inanet.phy.vnet import ETHERTYPE_IPV4, HEADER_BYTES, IP_BYTES, FrameBatch
from inanet.switch.parse import ETHERTYPE_ARP
from inanet.switch.tables import Tables

_ARP = struct.Struct(">HHBBH6sI6sI")
_REQUEST, _REPLY = 1, 2
_ICMP, _ECHO, _ECHO_REPLY = 1, 8, 0
_BROADCAST = b"\xff" * 6
#: seconds between two questions for one address
PATIENCE = 1.0


def batch_of(frame: bytes) -> FrameBatch:
    """A batch of one frame, virtio-net header included."""
    arena = np.frombuffer(bytearray(frame), np.uint8)
    return FrameBatch(arena, np.zeros(1, np.int64), np.array([len(frame)], np.int64))


def _checksum(data: bytes) -> int:
    padded = data + b"\0" * (len(data) & 1)
    total: int = sum(struct.unpack(f">{len(padded) // 2}H", padded))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


class Local:
    """The switch as a host. ``link`` is the length of link headers: without any there is no ARP."""

    def __init__(self, tables: Tables, link: int) -> None:
        self._tables = tables
        self._link = link
        self._asked: dict[int, float] = {}

    def answer(self, frame: bytes, ingress: int, now: float) -> bytes | None:
        """What the switch answers to a frame (virtio-net headers first), out of the port it came in at. ``None``: it
        is not for the switch, which may have learned from it all the same.
        """
        if self._link and frame[HEADER_BYTES + 12 : HEADER_BYTES + 14] == ETHERTYPE_ARP.to_bytes(2, "big"):
            return self._resolve(frame, ingress, now)
        return self._echo(frame)

    def _resolve(self, frame: bytes, ingress: int, now: float) -> bytes | None:
        link, network, sizes, length, operation, hardware, address, _, wanted = _ARP.unpack_from(
            frame, HEADER_BYTES + 14
        )
        if (link, network, sizes, length) != (1, ETHERTYPE_IPV4, 6, 4):
            return None
        if address:
            self._tables.learn_host(address, int.from_bytes(hardware, "big"), ingress, now)
        if operation != _REQUEST or not wanted or wanted != int(self._tables.own_address):
            return None
        return self._arp(_REPLY, hardware, hardware, address)

    def _arp(self, operation: int, to: bytes, target: bytes, address: int) -> bytes:
        own = int(self._tables.own_hardware).to_bytes(6, "big")
        body = _ARP.pack(
            1, ETHERTYPE_IPV4, 6, 4, operation, own, int(self._tables.own_address), target, address
        )
        return bytes(HEADER_BYTES) + to + own + ETHERTYPE_ARP.to_bytes(2, "big") + body

    def question(self, address: int, now: float) -> bytes | None:
        """A frame to all ports that asks who has an address; ``None`` if that was asked just now, or cannot be."""
        if (
            not self._link
            or not self._tables.own_address
            or self._asked.get(address, -PATIENCE) > now - PATIENCE
        ):
            return None
        self._asked[address] = now
        return self._arp(_REQUEST, _BROADCAST, bytes(6), address)

    def _echo(self, frame: bytes) -> bytes | None:
        """The reply to an echo request; other packets to the switch mean nothing to it."""
        ip = HEADER_BYTES + self._link
        body = ip + (frame[ip] & 0xF) * 4
        end = ip + int.from_bytes(frame[ip + 2 : ip + 4], "big")
        fragment = int.from_bytes(frame[ip + 6 : ip + 8], "big") & 0x3FFF
        if frame[ip + 9] != _ICMP or fragment or end > len(frame) or end < body + 8 or frame[body] != _ECHO:
            return None
        ethernet = frame[HEADER_BYTES:ip]
        swapped = ethernet[6:12] + ethernet[:6] + ethernet[12:]
        header = bytearray(frame[ip : ip + IP_BYTES])
        header[0] = 0x45
        header[2:4] = (IP_BYTES + end - body).to_bytes(2, "big")
        header[8] = 64
        header[10:12] = b"\0\0"
        header[12:20] = header[16:20] + header[12:16]
        header[10:12] = _checksum(bytes(header)).to_bytes(2, "big")
        message = bytes([_ECHO_REPLY, 0, 0, 0]) + frame[body + 4 : end]
        message = message[:2] + _checksum(message).to_bytes(2, "big") + message[4:]
        return bytes(HEADER_BYTES) + swapped + bytes(header) + message
