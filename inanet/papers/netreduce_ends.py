"""Two processes of this machine that stream messages and bounce small ones, over several transports (Table 1 of NetReduce).

``python -m inanet.papers.netreduce_ends WAY PORT NET`` is the far end: it meets the near one at a port, prints
``{"port"}``, and obeys lines on standard input, each answered by a line ``{"cpu"}``, its processor time: ``{"take": N}``
messages, ``{"return": N}`` small ones.

========= ==============================================================================================================
roce-raw  queue pairs of :mod:`inanet.proto.roce` in whole IPv4 packets over a raw socket, RDMA WRITEs with immediate data
roce-udp  the same packets as the payload of datagrams, as jobs without privileges send them
tcp       the kernel's TCP
udp       datagrams of 1 KB, a system call for each, with a window of 64 and no repair
========= ==============================================================================================================
"""

import json
import select
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np

from inanet.phy.udp import UdpDevice
from inanet.phy.whole import RawWholeDevice
from inanet.proto.roce import Attributes, Peer, ProtectionDomain, QueuePair, Received
from inanet.wire.endpoint import endpoint
from inanet.wire.roce import PORT

WAYS = ("roce-raw", "roce-udp", "tcp", "udp")
#: bytes of a message, NetReduce's 170 packets of 1 KB; and of one that is bounced
MESSAGE, SMALL = 170 * 1024, 1024
#: seconds in which something has to happen
DEADLINE = 20.0
#: messages posted and not completed, datagrams not acknowledged
_DEPTH, _WINDOW = 4, 64
_LOOPBACK = "127.0.0.1"


class End(Protocol):
    """One of two. Everything raises ``TimeoutError`` after :data:`DEADLINE` seconds in which nothing came."""

    port: int

    @property
    def sent(self) -> int:
        """Bytes of IP packets that were sent."""
        ...

    def join(self, port: int) -> None:
        """Near end: the far one is at this port."""

    def stream(self, count: int) -> None:
        """Send messages, until the other end has all."""

    def take(self, count: int) -> None:
        """Receive messages, and say so."""

    def bounce(self, count: int) -> list[float]:
        """Send small messages one by one; seconds until each was back."""

    def give_back(self, count: int) -> None:
        """Send small messages back."""

    def close(self) -> None:
        """Close sockets."""


class TcpEnd:
    """The kernel's TCP, messages in one call each. It may cut segments as it likes: :attr:`sent` is without headers."""

    def __init__(self, far: int | None) -> None:
        self.sent = 0
        self._listener = socket.create_server((_LOOPBACK, 0))
        self._listener.settimeout(DEADLINE)
        self.port = self._listener.getsockname()[1]
        self._socket: socket.socket | None = None
        self._buffer = bytearray(MESSAGE)
        if far is not None:
            self._use(socket.create_connection((_LOOPBACK, far), DEADLINE))

    def _use(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(DEADLINE)
        self._socket = sock

    def join(self, port: int) -> None:
        self._use(self._listener.accept()[0])

    def _receive(self, count: int) -> None:
        assert self._socket is not None
        view = memoryview(self._buffer)[:count]
        while len(view):
            got = self._socket.recv_into(view)
            if not got:
                raise ConnectionError("the other end has gone")
            view = view[got:]

    def _send(self, count: int) -> None:
        assert self._socket is not None
        self._socket.sendall(memoryview(self._buffer)[:count])
        self.sent += count

    def stream(self, count: int) -> None:
        for _ in range(count):
            self._send(MESSAGE)
        self._receive(1)

    def take(self, count: int) -> None:
        for _ in range(count):
            self._receive(MESSAGE)
        self._send(1)

    def bounce(self, count: int) -> list[float]:

        def once() -> None:
            self._send(SMALL)
            self._receive(SMALL)

        return _timed(count, once)

    def give_back(self, count: int) -> None:
        for _ in range(count):
            self._receive(SMALL)
            self._send(SMALL)

    def close(self) -> None:
        self._listener.close()
        if self._socket is not None:
            self._socket.close()


class UdpEnd:
    """Datagrams; every 32nd is acknowledged. On a loopback nothing is lost as long as the window fits the buffer."""

    def __init__(self, far: int | None) -> None:
        self.sent = 0
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        self._socket.bind((_LOOPBACK, 0))
        self._socket.settimeout(DEADLINE)
        self.port = self._socket.getsockname()[1]
        self._payload = bytes(SMALL)
        self._buffer = bytearray(SMALL)
        if far is not None:
            self.join(far)

    def join(self, port: int) -> None:
        self._socket.connect((_LOOPBACK, port))

    def _send(self, payload: bytes) -> None:
        self._socket.send(payload)
        self.sent += len(payload) + 28

    def stream(self, count: int) -> None:
        packets, half = count * MESSAGE // SMALL, _WINDOW // 2
        acknowledged = 0
        for number in range(packets):
            if number - acknowledged == _WINDOW:
                self._socket.recv_into(self._buffer)
                acknowledged += half
            self._send(self._payload)
        while acknowledged < packets // half * half:
            self._socket.recv_into(self._buffer)
            acknowledged += half
        self._socket.recv_into(self._buffer)

    def take(self, count: int) -> None:
        for number in range(1, count * MESSAGE // SMALL + 1):
            self._socket.recv_into(self._buffer)
            if number % (_WINDOW // 2) == 0:
                self._send(b"+")
        self._send(b"!")

    def bounce(self, count: int) -> list[float]:

        def once() -> None:
            self._send(self._payload)
            self._socket.recv_into(self._buffer)

        return _timed(count, once)

    def give_back(self, count: int) -> None:
        for _ in range(count):
            self._socket.recv_into(self._buffer)
            self._send(self._payload)

    def close(self) -> None:
        self._socket.close()


class RoceEnd:
    """A queue pair. ``raw``: over a raw socket of an address of the net 127.``net`` that this pair of ends has alone."""

    def __init__(self, far: int | None, raw: bool, net: int) -> None:
        self._raw = raw
        near = far is None
        names = [f"127.{net >> 8 & 0xFF}.{net & 0xFF}.{last}" for last in (1, 2)]
        mine, theirs = names if near else names[::-1]
        self._device = RawWholeDevice(mine) if raw else UdpDevice(_LOOPBACK)
        self.port = self._device.endpoint & 0xFFFF
        self._out = np.zeros(MESSAGE, np.uint8)
        domain = ProtectionDomain()
        region = domain.register(np.zeros(_DEPTH * MESSAGE, np.uint8))
        attributes = Attributes(path_mtu=SMALL, window=_DEPTH * MESSAGE // SMALL)
        ends = [
            Peer(endpoint(name, 0xC000), 0x11 + number, key=region.key, base=region.base)
            for number, name in enumerate((mine, theirs) if near else (theirs, mine))
        ]
        own, other = ends if near else ends[::-1]
        self._pair = QueuePair(own, other, domain=domain, attributes=attributes)
        self._pair.connect()
        self._pair.post_receive(count=2 * _DEPTH)
        self._bound = endpoint(theirs, PORT)
        #: messages that have come, those that were waited for so far, own ones that are acknowledged
        self._received = self._expected = self._completed = 0
        if far is not None:
            self.join(far)

    @property
    def sent(self) -> int:
        counters = self._device.counters()
        return counters["tx_bytes"] + self._device.headroom * counters["tx_packets"]

    def join(self, port: int) -> None:
        if not self._raw:
            self._bound = endpoint(_LOOPBACK, port)

    def _until(self, done: Callable[[], bool]) -> None:
        """Move packets until a condition holds."""
        stop = time.monotonic() + DEADLINE
        while not done():
            if not self._turn():
                self._wait(stop)

    def _turn(self) -> bool:
        now, busy = time.monotonic(), False
        while (batch := self._device.receive()) is not None:
            self._pair.receive(batch, now)
            busy = True
        for one in self._pair.transmit(now):
            sent, bound = 0, replace(one, destination=self._bound)
            while (sent := sent + self._device.send(bound, sent)) < len(one):
                select.select([], [self._device.fileno()], [], DEADLINE)
            busy = True
        for event in self._pair.events():
            if isinstance(event, Received):
                self._received += 1
                self._pair.post_receive()
            else:
                self._completed += 1
        return busy

    def _wait(self, stop: float) -> None:
        now, due = time.monotonic(), self._pair.timer()
        if now >= stop:
            raise TimeoutError(f"nothing came for {DEADLINE:.0f} s: {self._pair.stats()}")
        select.select(
            [self._device.fileno()], [], [], max(0.0, min(stop if due is None else due, stop) - now)
        )
        if due is not None and time.monotonic() >= due:
            self._pair.on_timer(time.monotonic())

    def _write(self, number: int, size: int) -> None:
        self._pair.post_write(self._out[:size], number % _DEPTH * MESSAGE, number)

    def stream(self, count: int) -> None:
        first = self._completed
        for number in range(count):
            self._until(lambda: number - (self._completed - first) < _DEPTH)  # noqa: B023  called at once
            self._write(number, MESSAGE)
            self._turn()
        self._hear(1)

    def take(self, count: int) -> None:
        self._hear(count)
        self._write(0, 1)
        self._finish()

    def _hear(self, count: int) -> None:
        """Until so many more messages are here; those that follow may have come as well."""
        self._expected += count
        self._until(lambda: self._received >= self._expected)

    def _finish(self) -> None:
        """Until everything written is acknowledged."""
        self._until(lambda: not self._pair.pending)

    def bounce(self, count: int) -> list[float]:

        def once() -> None:
            self._write(0, SMALL)
            self._hear(1)

        return _timed(count, once)

    def give_back(self, count: int) -> None:
        for _ in range(count):
            self._hear(1)
            self._write(0, SMALL)
        self._finish()

    def close(self) -> None:
        self._device.close()


def _timed(count: int, once: Callable[[], object]) -> list[float]:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        once()
        times.append(time.perf_counter() - start)
    return times


def open_end(way: str, net: int, far: int | None = None) -> End:
    """The near end, or the far one, which is told the near one's port. Raises ``OSError``; ``ValueError`` for an unknown way."""
    if way == "tcp":
        return TcpEnd(far)
    if way == "udp":
        return UdpEnd(far)
    if way in WAYS:
        return RoceEnd(far, way == "roce-raw", net)
    raise ValueError(f"no transport {way!r}; there are {', '.join(WAYS)}")


def main(way: str, port: str, net: str) -> None:
    """The far end."""
    end = open_end(way, int(net), int(port))
    try:
        print(json.dumps({"port": end.port}), flush=True)
        for line in sys.stdin:
            order = json.loads(line)
            began = time.process_time()
            if "take" in order:
                end.take(order["take"])
            else:
                end.give_back(order["return"])
            print(json.dumps({"cpu": time.process_time() - began}), flush=True)
    finally:
        end.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
