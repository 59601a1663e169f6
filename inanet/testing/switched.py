"""A switch with its program, and machines around it, in virtual time: no clock, no sockets, nothing by chance.

>>> star = Star(program, Impairment(seed=1, drop=0.05))
>>> star.attach(endpoint("10.0.0.1", 4000), worker)
>>> star.group(7, [...])
>>> star.run(lambda: done, deadline=10.0)

Every machine has one link to the switch. What is sent to the switch's own address goes through the program; everything
else is forwarded as it is. Links have a delay, may have a rate, and lose, duplicate and delay packets as their impairment
says, in both directions.
"""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from inanet.phy.device import aligned_offsets
from inanet.proto.common.program import Action, Program, Verdicts
from inanet.testing.pump import Stuck
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.endpoint import endpoint

SWITCH = endpoint("10.0.0.254", 0xBEE0)
#: packets that a program sees at a time
BATCH = 256
_DROP, _UNICAST, _GROUP, _REPLY = (
    int(Action.DROP),
    int(Action.UNICAST),
    int(Action.GROUP),
    int(Action.REPLY),
)


class Machine(Protocol):
    """The core contract."""

    def receive(self, batch: PacketBatch, now: float) -> None:
        """Take a batch."""
        ...

    def transmit(self, now: float) -> list[Transmission]:
        """What is to be sent."""
        ...

    def timer(self) -> float | None:
        """Next deadline."""
        ...

    def on_timer(self, now: float) -> None:
        """A deadline has come."""
        ...

    def events(self) -> Sequence[Any]:
        """What has happened."""
        ...


@dataclass(frozen=True, slots=True)
class Impairment:
    """Probabilities per packet and hop; a ``late`` packet takes up to ``delay`` seconds more."""

    seed: int = 0
    drop: float = 0.0
    duplicate: float = 0.0
    late: float = 0.0
    delay: float = 200e-6


class _Arrival(NamedTuple):
    at: float
    order: int
    to: int
    source: int
    destination: int
    data: bytes


class Star:
    """``program`` at :data:`SWITCH`. ``latency`` in seconds per hop; ``rates`` by address in B/s, of the link towards the
    switch; ``ecn`` marks what waits longer than this for such a link. Whatever arrives within the same ``tick`` arrives as
    one batch.
    """

    def __init__(
        self,
        program: Program | None,
        impairment: Impairment | None = None,
        *,
        latency: float = 10e-6,
        rates: Mapping[int, float] | None = None,
        ecn: float = float("inf"),
        tick: float = 1e-6,
    ) -> None:
        self.program = program
        self.now = 0.0
        self.latency = latency
        self.machines: dict[int, Machine] = {}
        self.log: list[tuple[int, Any]] = []
        self.carried = 0
        self._impairment = impairment or Impairment()
        self._random = np.random.default_rng(self._impairment.seed)
        self._draws: list[list[float]] = []
        self._impaired = max(self._impairment.drop, self._impairment.duplicate, self._impairment.late) > 0
        self._rates = dict(rates or {})
        self._free: dict[int, float] = {}
        self._ecn = ecn
        self._tick = tick
        self._groups: dict[int, list[int]] = {}
        self._heap: list[_Arrival] = []
        #: what each machine's timer has said last
        self._due: dict[int, float | None] = {}
        self._order = 0
        self._verdicts = Verdicts(BATCH)

    def attach(self, address: int, machine: Machine) -> None:
        """Put a machine at an address, in the place of whatever was there."""
        self.machines[address] = machine

    def detach(self, address: int) -> None:
        """Kill a machine; what is on its way to it is lost."""
        del self.machines[address]

    def group(self, number: int, members: Sequence[int]) -> None:
        """Say who is in a group of the program."""
        self._groups[number] = list(members)

    # ------------------------------------------------------------ links

    def send(self, source: int, transmission: Transmission) -> None:
        """Put packets on the link of ``source`` towards the switch."""
        for index in range(len(transmission)):
            data = transmission.packet(index)
            start = max(self.now, self._free.get(source, 0.0))
            rate = self._rates.get(source)
            if rate is not None:
                start += len(data) / rate
                self._free[source] = start
            self._hop(start + self.latency, SWITCH, source, transmission.destination, data)

    def inject(self, source: int, data: bytes, delay: float = 0.0) -> None:
        """Have one packet, from ``source`` by its own account, arrive at the switch after ``delay``, whatever it is."""
        self._push(self.now + delay, SWITCH, source, SWITCH, data)

    def _hop(self, at: float, to: int, source: int, destination: int, data: bytes) -> None:
        how = self._impairment
        self.carried += 1
        duplicate = 1.0
        if self._impaired:
            drop, duplicate, late, delay = self._draw()
            if drop < how.drop:
                return
            if late < how.late:
                at += how.delay * delay
        # upwards: nothing arrives before it was sent
        at = math.ceil(at / self._tick - 1e-6) * self._tick
        self._push(at, to, source, destination, data)
        if duplicate < how.duplicate:
            self._push(at, to, source, destination, data)

    def _draw(self) -> list[float]:
        """Four random numbers; drawn for many packets at a time."""
        if not self._draws:
            self._draws = self._random.random((1024, 4)).tolist()
        return self._draws.pop()

    def _push(self, at: float, to: int, source: int, destination: int, data: bytes) -> None:
        self._order += 1
        heapq.heappush(self._heap, _Arrival(at, self._order, to, source, destination, data))

    # ------------------------------------------------------------ the switch

    def _switch(self, arrivals: list[_Arrival]) -> None:
        mine = [arrival for arrival in arrivals if arrival.destination == SWITCH]
        for arrival in arrivals:
            if arrival.destination != SWITCH:
                self._forward(arrival.destination, arrival.source, arrival.data)
        if self.program is None:
            return
        for start in range(0, len(mine), BATCH):
            self._judge(mine[start : start + BATCH])
        for spilled in self.program.spilled():
            for index in range(len(spilled)):
                self._forward(spilled.destination, SWITCH, spilled.packet(index))

    def _judge(self, arrivals: list[_Arrival]) -> None:
        assert self.program is not None
        batch, verdicts = _batch(arrivals), self._verdicts
        waiting = [self._free.get(arrival.source, 0.0) - self.now > self._ecn for arrival in arrivals]
        self.program.process(batch, np.array(waiting, np.uint8), verdicts, self.now)
        workers = {member for members in self._groups.values() for member in members}
        for index, arrival in enumerate(arrivals):
            action = int(verdicts.action[index])
            if action == _DROP:
                continue
            start = int(batch.offsets[index])
            data = batch.arena[start : start + int(verdicts.length[index])].tobytes()
            if action == _UNICAST:
                self._forward(int(verdicts.target[index]), arrival.source, data)
            elif action == _REPLY:
                self._forward(arrival.source, SWITCH, data)
            elif action == _GROUP:
                source = SWITCH if arrival.source in workers else arrival.source
                for member in self._groups[int(verdicts.target[index])]:
                    self._forward(member, source, data)

    def _forward(self, to: int, source: int, data: bytes) -> None:
        self._hop(self.now + self.latency, to, source, to, data)

    # ------------------------------------------------------------ time

    def run(self, until: Callable[[], bool], *, deadline: float = 30.0) -> None:
        """Run until a condition holds. Raises :class:`~inanet.testing.pump.Stuck` after ``deadline`` virtual seconds."""
        stop = self.now + deadline
        self._transmit(list(self.machines))
        while not until():
            due = self._next()
            if due is None or due > stop:
                raise Stuck(f"not done at {self.now:.6f} s; next is {due}")
            self._advance(due)

    def settle(self, seconds: float) -> None:
        """Let this much virtual time pass."""
        stop = self.now + seconds
        self._transmit(list(self.machines))
        while (due := self._next()) is not None and due <= stop:
            self._advance(due)
        self.now = stop

    def _next(self) -> float | None:
        times = [self._due.get(address) for address in self.machines]
        if self.program is not None:
            times.append(self.program.timer())
        if self._heap:
            times.append(self._heap[0].at)
        return min((at for at in times if at is not None), default=None)

    def _advance(self, due: float) -> None:
        self.now = max(self.now, due)
        arrived: dict[int, list[_Arrival]] = {}
        while self._heap and self._heap[0].at <= self.now:
            arrival = heapq.heappop(self._heap)
            arrived.setdefault(arrival.to, []).append(arrival)
        self._switch(arrived.pop(SWITCH, []))
        if self.program is not None and (at := self.program.timer()) is not None and at <= self.now:
            self.program.on_timer(self.now)
            self._switch([])
        stirred = []
        for address, arrivals in arrived.items():
            if address in self.machines:
                self.machines[address].receive(_batch(arrivals), self.now)
                stirred.append(address)
        for address, machine in self.machines.items():
            at = self._due.get(address)
            if at is not None and at <= self.now:
                machine.on_timer(self.now)
                stirred.append(address)
        self._transmit(stirred)

    def _transmit(self, addresses: Sequence[int]) -> None:
        for address in dict.fromkeys(addresses):
            machine = self.machines[address]
            for transmission in machine.transmit(self.now):
                self.send(address, transmission)
            self.log.extend((address, event) for event in machine.events())
            self._due[address] = machine.timer()


def _batch(arrivals: Sequence[_Arrival]) -> PacketBatch:
    lengths = np.array([len(arrival.data) for arrival in arrivals], np.int64)
    offsets, size = aligned_offsets(lengths)
    arena = np.zeros(size, np.uint8)
    for arrival, start in zip(arrivals, offsets.tolist(), strict=True):
        arena[start : start + len(arrival.data)] = np.frombuffer(arrival.data, np.uint8)
    return PacketBatch(arena, offsets, lengths, np.array([a.source for a in arrivals], np.uint64))
