"""What the device tests share: making packets, reading until they are there, and a device that plays a
script."""

import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from inanet.phy.device import Device, aligned_offsets
from inanet.testing.pump import Pumped, call_due, exchange
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.endpoint import endpoint

PEER = endpoint("127.0.0.9", 9)
#: bytes that even the distribution's default receive buffer holds
BURST = 250_000
DEADLINE = 10.0


def numbered(count: int, length: int, seed: int = 0) -> np.ndarray:
    """uint8[count * length] of random packets, different from each other where the length allows it."""
    packets = np.random.default_rng(seed).integers(0, 256, (count, length), dtype=np.uint8)
    stamp = np.arange(count, dtype="<u4").view(np.uint8).reshape(count, 4)
    packets[:, : min(4, length)] = stamp[:, : min(4, length)]
    return packets.reshape(-1)


def batch_of(packets: Iterable[bytes], source: int = PEER) -> PacketBatch:
    """A received batch with these packets."""
    packets = list(packets)
    lengths = np.array([len(packet) for packet in packets], np.int64)
    offsets, size = aligned_offsets(lengths)
    arena = np.zeros(size, np.uint8)
    for offset, packet in zip(offsets, packets, strict=True):
        arena[offset : offset + len(packet)] = np.frombuffer(packet, np.uint8)
    return PacketBatch(arena, offsets, lengths, np.full(len(packets), source, np.uint64))


def contents(batch: PacketBatch | Transmission | None) -> list[bytes]:
    """The packets of a batch."""
    return [] if batch is None else [batch.packet(i) for i in range(len(batch))]


def read_until(device: Device, count: int) -> list[tuple[int, bytes]]:
    """Source and bytes of the next ``count`` packets; fails when they do not come."""
    poll = select.poll()
    poll.register(device.fileno(), select.POLLIN)
    got: list[tuple[int, bytes]] = []
    end = time.monotonic() + DEADLINE
    while len(got) < count:
        batch = device.receive()
        if batch is not None:
            got += zip(map(int, batch.sources), contents(batch), strict=True)
        elif time.monotonic() > end:
            raise AssertionError(f"{len(got)} of {count} packets arrived: {device.counters()}")
        else:
            poll.poll(100)
    assert device.receive() is None
    return got


def carry(sender: Device, receiver: Device, transmission: Transmission) -> int:
    """Send everything, in bursts that fit a default receive buffer, and require every packet to arrive in
    order; returns how many arrived."""
    arrived = 0
    burst = max(BURST // transmission.length, 1)
    for first in range(0, len(transmission), burst):
        offsets = transmission.offsets[first : first + burst]
        part = Transmission(transmission.destination, transmission.arena, offsets, transmission.length)
        assert sender.send(part) == len(part)
        got = read_until(receiver, len(part))
        assert [source for source, _ in got] == [sender.endpoint] * len(part)
        assert [packet for _, packet in got] == contents(part)
        arrived += len(got)
    return arrived


def closed_port() -> int:
    """Endpoint on loopback where nobody listens."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return endpoint(*probe.getsockname())


class ScriptedDevice:
    """Delivers given batches and takes a given number of packets per send; records what it took."""

    endpoint = endpoint("127.0.0.1", 7000)
    rx_budget = 1000

    def __init__(self, batches: Iterable[PacketBatch] = (), accepts: Iterable[int] = ()) -> None:
        self.batches = deque(batches)
        self.accepts = deque(accepts)
        self.held: deque[tuple[float, PacketBatch]] = deque()
        self.closed = 0

    def fileno(self) -> int:
        return 42

    def receive(self) -> PacketBatch | None:
        return self.batches.popleft() if self.batches else None

    def send(self, transmission: Transmission, start: int = 0) -> int:
        offered = len(transmission) - start
        return min(self.accepts.popleft(), offered) if self.accepts else offered

    def retry_fileno(self) -> int | None:
        return None

    def timer(self) -> float | None:
        return self.held[0][0] if self.held else None

    def flush(self, now: float) -> PacketBatch | None:
        return self.held.popleft()[1] if self.held and self.held[0][0] <= now else None

    def counters(self) -> dict[str, int]:
        return {"rx_packets": 5}

    def close(self) -> None:
        self.closed += 1


def drive(
    ends: Sequence[tuple[Pumped, Device]],
    until: Callable[[], bool],
    figures: Callable[[], object],
    deadline: float = DEADLINE,
) -> None:
    """Move packets between machines and their devices until a condition holds; fails with ``figures`` when it does not. What a full
    buffer does not take is lost, as on any network.
    """
    poll = select.poll()
    for _, device in ends:
        poll.register(device.fileno(), select.POLLIN)
    end = time.monotonic() + deadline
    while not until():
        now = time.monotonic()
        assert now < end, figures()
        for machine, device in ends:
            call_due(machine, now)
            exchange(machine, device, now)
        poll.poll(1)
