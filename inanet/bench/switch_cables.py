"""The surroundings of a switch that is measured: namespaces, cables, and senders on their other side."""

import socket
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.bench.spaces import Space, cable
from inanet.bench.switch_loads import WORKERS
from inanet.phy.mmsg import HEADER_WORDS, address_in_memory, request_buffer, transmit
from inanet.phy.packet import open_packet_socket
from inanet.phy.port import FramePort
from inanet.phy.sockets import SO_SNDBUFFORCE
from inanet.phy.vnet import FrameBatch
from inanet.switch.programs import RAW_ETHERTYPE
from inanet.switch.rebuild import Rebuilder
from inanet.switch.tables import Tables
from inanet.wire.endpoint import endpoint

#: the switch's address and the PS's
SWITCH, PS = "10.76.0.254", "10.76.0.100"
HARDWARE = 0x02_00_00_00_76_FE
BUFFER = 32 << 20


class Wrong(Exception):
    """Sums that are not what they must be: there is nothing to measure."""


class Injector:
    """Sends frames out of ``interface``, and hears none."""

    def __init__(self, interface: str) -> None:
        self._socket = open_packet_socket()
        request_buffer(self._socket, SO_SNDBUFFORCE, socket.SO_SNDBUF, BUFFER)
        self._socket.bind((interface, 0))

    def send(self, frames: FrameBatch, start: int = 0) -> int:
        count = len(frames) - start
        words, iovecs = np.zeros((count, HEADER_WORDS), np.uint64), np.zeros((count, 2), np.uint64)
        iovecs[:, 0] = frames.offsets[start:] + address_in_memory(frames.arena)
        iovecs[:, 1] = frames.lengths[start:]
        words[:, 2] = address_in_memory(iovecs) + np.arange(count, dtype=np.uint64) * 16
        words[:, 3] = 1
        return self.send_messages(words, 0, count, frames.lengths[start:])

    def send_messages(
        self, words: NDArray[np.uint64], first: int, count: int, sizes: NDArray[np.int64]
    ) -> int:
        table, at = address_in_memory(words), first
        while at < first + count:
            sent = transmit(self._socket.fileno(), table + at * HEADER_WORDS * 8, first + count - at)
            if sent < 0:
                break
            at += sent
        return at - first

    def close(self) -> None:
        self._socket.close()


class Cabled:
    """A switch between two cables: all workers behind one, the PS behind the other."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        self.middle, self.left, self.right = Space(stack), Space(stack), Space(stack)
        self.addresses = [f"10.76.0.{i + 1}" for i in range(WORKERS)]
        self.hardware = [
            int.from_bytes(cable(self.middle, "p0", self.left, "e0", self.addresses), "big"),
            int.from_bytes(cable(self.middle, "p1", self.right, "e0", [PS]), "big"),
        ]
        self.devices = {
            name: self.open(self.middle, partial(FramePort, name, rcvbuf=BUFFER, sndbuf=BUFFER))
            for name in ("p0", "p1")
        }
        self.senders = [self.open(space, lambda: Injector("e0")) for space in (self.left, self.right)]
        self.tables = Tables(HARDWARE, endpoint(SWITCH, 0) >> 16)
        for address in self.addresses:
            self.tables.give_host(endpoint(address, 0) >> 16, self.hardware[0], 0)
        self.tables.give_host(endpoint(PS, 0) >> 16, self.hardware[1], 1)

    def open(self, space: Space, make: Callable[[], Any]) -> Any:
        """Something with sockets in a namespace, closed with the stack."""
        made = space.run(make)
        self.stack.callback(made.close)
        return made

    def header(self, side: int, source: int, destination: int, raw: bool, marked: bool) -> NDArray[np.uint8]:
        """Headers of frames to the switch."""
        kind = RAW_ETHERTYPE if raw else 0x0800
        ethernet = (
            HARDWARE.to_bytes(6, "big") + self.hardware[side].to_bytes(6, "big") + kind.to_bytes(2, "big")
        )
        ip = bytes([0x45, 3 if marked else 0, 0, 0, 0, 0, 0x40, 0, 64, 1 if raw else 17, 0, 0])
        ip += (source >> 16).to_bytes(4, "big") + (destination >> 16).to_bytes(4, "big")
        ports = (source & 0xFFFF).to_bytes(2, "big") + (destination & 0xFFFF).to_bytes(2, "big") + bytes(4)
        return np.frombuffer(bytes(10) + ethernet + ip + ports, np.uint8)

    def sender(
        self, side: int, header: NDArray[np.uint8], raw: bool, segments: int
    ) -> Callable[[NDArray[Any]], None]:
        """Sends packets (structured) in super-frames of so many segments."""
        rebuilder, port = Rebuilder(14), self.senders[side]

        def send(packets: NDArray[Any]) -> None:
            length, arena = packets.dtype.itemsize, packets.view(np.uint8)
            step = len(packets) if raw else segments
            for first in range(0, len(packets), step):
                offsets = np.arange(first, min(first + step, len(packets)), dtype=np.int64) * length
                for frames, _ in rebuilder.frames(port, header, raw, arena, offsets, length):
                    if frames.send(0) < len(frames):
                        raise Wrong("the send buffer is full")

        return send
