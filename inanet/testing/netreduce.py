"""Rings in one process and in virtual time: real workers, queue pairs and switch programs, impaired on every hop.

>>> fabric = RingFabric(4, impair={"drop": 0.05})
>>> fabric.all_reduce(spec, arrays)      # arrays are overwritten with the result
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.phy.device import Device
from inanet.phy.fault import FaultInjector
from inanet.phy.memory import MemoryNetwork
from inanet.proto.common.events import RoundDone
from inanet.proto.common.plan import TensorSpec
from inanet.proto.common.program import Action, Verdicts
from inanet.proto.netreduce.program import NetReduceProgram
from inanet.proto.netreduce.ring import Connection, Member, RingAt, rack, racks
from inanet.proto.netreduce.worker import NetReduceWorker
from inanet.testing.clock import FakeClock
from inanet.testing.pump import Pump, call_due
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.endpoint import endpoint
from inanet.wire.roce import PORT

_BATCH = 8192


def host_address(number: int) -> int:
    """IPv4 address of a host, as an integer."""
    return endpoint(f"10.0.0.{number + 1}", 0) >> 16


def switch_address(number: int) -> int:
    """IPv4 address of a switch; 0 is the one above all others."""
    return endpoint(f"10.0.255.{number + 1}", 0) >> 16


def connections_of(workers: Sequence[NetReduceWorker]) -> list[Connection]:
    """What switches call the connections of a ring, by rank."""
    ends = [(worker.outlet.endpoint >> 16, worker.inlet) for worker in workers]
    return [
        Connection(
            source, ends[(rank + 1) % len(ends)][1].endpoint >> 16, ends[(rank + 1) % len(ends)][1].number
        )
        for rank, (source, _) in enumerate(ends)
    ]


def connect(workers: Sequence[NetReduceWorker]) -> None:
    """Make a ring of workers, in the order of ranks."""
    for rank, worker in enumerate(workers):
        worker.connect(workers[(rank + 1) % len(workers)].inlet, workers[rank - 1].outlet)


class _Host:
    """The workers of a host, which has one device."""

    def __init__(self, fabric: "RingFabric", address: int, switch: int) -> None:
        self._fabric, self._address, self._to = fabric, address, switch << 16 | PORT

    @property
    def _workers(self) -> list[NetReduceWorker]:
        return self._fabric.workers[self._address]

    def receive(self, batch: PacketBatch, now: float) -> None:
        for worker in self._workers:
            worker.receive(batch, now)

    def transmit(self, now: float) -> Iterator[Transmission]:
        for worker in self._workers:
            for one in worker.transmit(now):
                yield Transmission(self._to, one.arena, one.offsets, one.length)
            self._fabric.log += [(worker, event) for event in worker.events()]

    def timer(self) -> float | None:
        return min((at for worker in self._workers if (at := worker.timer()) is not None), default=None)

    def on_timer(self, now: float) -> None:
        for worker in self._workers:
            call_due(worker, now)


class _Switch:
    """Answers while it receives, and waits for nothing."""

    def __init__(self, fabric: "RingFabric", address: int) -> None:
        self._fabric, self._address = fabric, address

    def receive(self, batch: PacketBatch, now: float) -> None:
        self._fabric.process(self._address, batch)

    def transmit(self, now: float) -> Sequence[Transmission]:
        return ()

    def timer(self) -> None:
        return None

    def on_timer(self, now: float) -> None:
        """Never asked for."""


class RingFabric:
    """``hosts`` hosts on one switch or, with ``leaves`` (how many hosts on each), on several below another.

    ``impair`` are faults of :class:`~inanet.phy.fault.FaultInjector`, met at every hop. Without ``serving`` no switch knows
    any ring. ``tap`` is shown every packet that a switch receives.
    """

    def __init__(
        self,
        hosts: int,
        *,
        leaves: Sequence[int] = (),
        impair: Mapping[str, Any] | None = None,
        serving: bool = True,
        seed: int = 1,
        tap: Callable[[int, PacketBatch], None] | None = None,
    ) -> None:
        self.clock = FakeClock()
        self.serving = serving
        self.hosts = hosts
        self._tap = tap
        self._seed = seed
        self._impair = dict(impair or {})
        self._network = MemoryNetwork()
        self._leaf_of: dict[int, int] = {}
        for leaf, count in enumerate(leaves):
            for _ in range(count):
                self._leaf_of[host_address(len(self._leaf_of))] = switch_address(leaf + 1)
        self.switches = {switch_address(0): NetReduceProgram()}
        self.switches |= {leaf: NetReduceProgram() for leaf in self._leaf_of.values()}
        self.devices: dict[int, Device] = {}
        for address in (*map(host_address, range(hosts)), *self.switches):
            self.devices[address] = self._open(address)
        #: workers by address of their host
        self.workers: dict[int, list[NetReduceWorker]] = {host_address(i): [] for i in range(hosts)}
        self.log: list[tuple[NetReduceWorker, Any]] = []
        self._verdicts = Verdicts(_BATCH)
        machines: dict[int, _Host | _Switch] = {
            address: _Host(self, address, self._leaf_of.get(address, switch_address(0)))
            for address in self.workers
        }
        machines |= {address: _Switch(self, address) for address in self.switches}
        self._pump = Pump(self.clock, machines, self.devices, figures=self.stats)

    def _open(self, address: int) -> Device:
        text = ".".join(str(byte) for byte in address.to_bytes(4, "big"))
        device: Device = self._network.open(text, PORT)
        if self._impair:
            self._seed += 1
            device = FaultInjector(device, self._seed, self.clock, **self._impair)
        return device

    # ---------------------------------------------------------------- rings

    def add_ring(
        self, members: Sequence[Member], hosts: Sequence[int] | None = None, **options: Any
    ) -> list[NetReduceWorker]:
        """Workers on these hosts (default: the first ones), connected, and known to the switches."""
        chosen = range(len(members)) if hosts is None else hosts
        workers = []
        for member, host in zip(members, chosen, strict=True):
            address = host_address(host)
            base = 0x10 + 2 * len(self.workers[address])
            worker = NetReduceWorker(
                member, address << 16 | 0xC000 + base, numbers=(base, base + 1), **options
            )
            self.workers[address].append(worker)
            workers.append(worker)
        connect(workers)
        if self.serving:
            for address, plan in self.plans(workers).items():
                self.switches[address].add_ring(plan)
        return workers

    def plans(self, workers: Sequence[NetReduceWorker]) -> dict[int, RingAt]:
        """What switches have to be told of a ring, by their address."""
        member, connections = workers[0].member, connections_of(workers)
        if not self._leaf_of:
            return {switch_address(0): rack(member.ring, connections, member.sizes, member.epoch)}
        leaves: dict[int, list[int]] = {}
        for worker in workers:
            address = worker.outlet.endpoint >> 16
            leaves.setdefault(self._leaf_of[address], []).append(address)
        return racks(member.ring, connections, switch_address(0), leaves, member.sizes, member.epoch)

    # ---------------------------------------------------------------- packets

    def _next_hop(self, switch: int, destination: int) -> int:
        if not self._leaf_of or self._leaf_of.get(destination) == switch:
            return destination
        if switch != switch_address(0):
            return switch_address(0)
        return self._leaf_of.get(destination, destination)

    def _forward(self, switch: int, transmission: Transmission) -> None:
        destination = transmission.destination >> 16
        hop = self._next_hop(switch, destination)
        self.devices[switch].send(
            Transmission(hop << 16 | PORT, transmission.arena, transmission.offsets, transmission.length)
        )

    def process(self, address: int, batch: PacketBatch) -> None:
        """A switch has received packets."""
        if self._tap is not None:
            self._tap(address, batch)
        count = len(batch)
        program, verdicts = self.switches[address], self._verdicts
        program.process(batch, np.zeros(count, np.uint8), verdicts, self.clock.now)
        for i in np.flatnonzero(verdicts.action[:count] == Action.PASS).tolist():
            at = int(batch.offsets[i])
            destination = int.from_bytes(batch.arena[at + 16 : at + 20].tobytes(), "big")
            self._forward(
                address,
                Transmission(
                    destination << 16 | PORT, batch.arena, batch.offsets[i : i + 1], int(batch.lengths[i])
                ),
            )
        for transmission in program.spilled():
            self._forward(address, transmission)

    def turn(self) -> bool:
        """Move what is on its way by a hop; whether anything was."""
        return self._pump.exchange()

    # ---------------------------------------------------------------- time

    def run(self, until: Callable[[], bool], *, deadline: float = 60.0) -> None:
        """Run until a condition holds. Raises :class:`~inanet.testing.pump.Stuck` when it never will."""
        self._pump.run(until, deadline)

    def done(self, workers: Sequence[NetReduceWorker], round_: int) -> bool:
        """Whether a round is done on all of these workers."""
        finished = {
            id(worker) for worker, event in self.log if isinstance(event, RoundDone) and event.round == round_
        }
        return all(id(worker) in finished for worker in workers)

    def all_reduce(
        self,
        workers: Sequence[NetReduceWorker],
        spec: TensorSpec,
        arrays: Sequence[NDArray[Any]],
        round_: int = 1,
    ) -> None:
        """One round of a tensor that is made known for it; ``arrays[r]`` is rank *r*'s."""
        for worker, array in zip(workers, arrays, strict=True):
            if round_ == 1:
                worker.add_tensor(0, spec)
            worker.begin(0, round_, [array], self.clock.now)
        self.run(lambda: self.done(workers, round_))

    def stats(self) -> dict[str, Any]:
        """Counters of switches and workers."""
        return {
            **{f"switch {address & 0xFF}": program.stats() for address, program in self.switches.items()},
            **{
                f"ring {worker.member.ring} rank {worker.member.rank}": {
                    **worker.stats(),
                    **worker.drops_by_reason(),
                }
                for workers in self.workers.values()
                for worker in workers
            },
        }
