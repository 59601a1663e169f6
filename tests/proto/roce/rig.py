"""Two queue pairs on an in-memory network in virtual time: time stands still while packets travel, then jumps."""

from collections.abc import Callable, Iterable

import numpy as np

from inanet.phy.device import Device, aligned_offsets
from inanet.phy.memory import MemoryNetwork
from inanet.proto.roce import (
    Attributes,
    Completion,
    Event,
    Peer,
    ProtectionDomain,
    QueuePair,
    State,
    Status,
)
from inanet.testing.clock import FakeClock
from inanet.testing.pump import Pump
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.endpoint import endpoint
from inanet.wire.roce import PORT, Packet, decode

Wrap = Callable[[Device, str, FakeClock], Device]
BASE = 1 << 40
#: more steps than any test needs; a machine that never comes to rest fails by it
STEPS = 20_000


def batch_of(packets: Iterable[bytes]) -> PacketBatch:
    """A received batch with these packets."""
    data = list(packets)
    lengths = np.array([len(packet) for packet in data], np.int64)
    offsets, size = aligned_offsets(lengths)
    arena = np.zeros(size, np.uint8)
    for packet, start in zip(data, offsets.tolist(), strict=True):
        arena[start : start + len(packet)] = np.frombuffer(packet, np.uint8)
    return PacketBatch(arena, offsets, lengths, np.zeros(len(data), np.uint64))


def packets_of(transmissions: Iterable[Transmission]) -> list[Packet]:
    """What was sent, decoded (so every ICRC is right)."""
    return [decode(sent.packet(i)) for sent in transmissions for i in range(len(sent))]


def unchanged(device: Device, name: str, clock: FakeClock) -> Device:
    """No impairment."""
    return device


class Host:
    """One end: a queue pair, the memory the other end writes to, and what has happened."""

    def __init__(self, pair: QueuePair, memory: np.ndarray, device: Device) -> None:
        self.pair, self.memory, self.device = pair, memory, device
        self.events: list[Event] = []

    def statuses(self) -> list[tuple[int, Status]]:
        """Completions, as work request and status."""
        return [(event.wr_id, event.status) for event in self.events if isinstance(event, Completion)]


class Wire:
    """Hosts ``a`` and ``b``, connected; each can write to ``memory`` bytes of the other."""

    def __init__(
        self,
        attributes: Attributes | None = None,
        *,
        memory: int = 1 << 18,
        psns: tuple[int, int] = (100, 9000),
        wrap: Wrap = unchanged,
        connect: bool = True,
    ) -> None:
        self.clock = FakeClock()
        self.network = MemoryNetwork()
        domains = (ProtectionDomain(), ProtectionDomain())
        memories = [np.zeros(memory, np.uint8) for _ in domains]
        regions = [
            domain.register(buffer, base=BASE) for domain, buffer in zip(domains, memories, strict=True)
        ]
        peers = [
            Peer(endpoint(f"10.0.0.{i + 1}", 50001 + i), 0x11 + i, psns[i], regions[i].key, BASE)
            for i in range(2)
        ]
        hosts = []
        for i, name in enumerate("ab"):
            device = wrap(self.network.open(f"10.0.0.{i + 1}", PORT), name, self.clock)
            pair = QueuePair(peers[i], peers[1 - i], domain=domains[i], attributes=attributes)
            if connect:
                pair.connect()
            hosts.append(Host(pair, memories[i], device))
        self.a, self.b = hosts
        self.hosts = hosts
        numbered = dict(enumerate(hosts))
        self._pump = Pump(
            self.clock,
            {i: host.pair for i, host in numbered.items()},
            {i: host.device for i, host in numbered.items()},
        )

    def exchange(self) -> None:
        """Deliver until nothing travels, without letting time pass."""
        for _ in range(STEPS):
            moved = self._pump.exchange()
            for host in self.hosts:
                host.events += host.pair.events()
            if not moved:
                return
        raise AssertionError("the two ends talk without end")

    def run(self, until: Callable[[], bool] = lambda: False, *, deadline: float = 1e9) -> None:
        """Exchange and jump from timer to timer until a condition holds, nothing is left to happen, or it is ``deadline``."""
        for _ in range(STEPS):
            self.exchange()
            if until():
                return
            due = self._pump.timer()
            if due is None:
                return
            if due > deadline:
                self.clock.now = max(self.clock.now, deadline)
                return
            self._pump.advance(due)
        raise AssertionError(f"no rest after {STEPS} timers")


def in_state(pair: QueuePair, state: State) -> QueuePair:
    """Take a new queue pair to a state."""
    way = [State.INIT, State.RTR, State.RTS, State.SQD]
    if state is State.ERR:
        way = [State.INIT, State.ERR]
    for step in way[: way.index(state) + 1] if state is not State.RESET else []:
        pair.modify(step)
    return pair
