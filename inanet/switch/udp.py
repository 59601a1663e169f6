"""A switch without privileges: every worker and PS is a UDP endpoint, and its packets are the datagrams' payload.

Each program listens on one UDP port of the switch, and each endpoint that may send to it is a port of its own: a
connected socket, so that only its packets come in there (bound endpoints), into a buffer of its own, and a receiver that has
stopped reading keeps back nobody else's packets. A packet that a program lets pass goes on to its endpoint's uplink. There is
no IP header to mark: congestion shows in the INA header alone, where the program puts it.
"""

import time
from collections.abc import Callable, Mapping

import numpy as np

from inanet.phy.device import Device
from inanet.phy.pacing import OVERHEAD
from inanet.phy.sockets import RCVBUF
from inanet.phy.udp import UdpDevice
from inanet.proto.common.plan import SwitchedJob
from inanet.proto.common.program import Action
from inanet.switch.egress import Outbox, Packets
from inanet.switch.pipeline import BATCH, Pipeline, Run
from inanet.switch.port import PortOptions, SwitchPort
from inanet.switch.programs import Registration, dismiss, serve
from inanet.wire.batch import U8, U64, PacketBatch, Transmission
from inanet.wire.drops import Drop
from inanet.wire.endpoint import show

#: send buffer of a port: what a receiver has not read yet is charged to it
SNDBUF = 4 << 20
_NOBODY: U64 = np.zeros(BATCH, np.uint64)


class UdpPort:
    """The way between the switch and one endpoint of one program."""

    def __init__(
        self,
        switch: "UdpSwitch",
        registration: Registration,
        peer: int,
        device: Device,
        options: PortOptions,
    ) -> None:
        self.name = f"{registration.name}/{show(peer)}"
        self.peer = peer
        self.queue = options.queue(self.name)
        self.device = device
        self.outbox = Outbox()
        self._switch = switch
        self._registration = registration
        self._origins: U64 = np.full(BATCH, peer, np.uint64)

    def fileno(self) -> int:
        return self.device.fileno()

    def read(self, now: float) -> bool:
        batch = self.device.receive()
        if batch is None:
            return False
        self._take(batch, now)
        return True

    def release(self, now: float) -> None:
        """Take what the port's faults have held back."""
        batch = self.device.flush(now)
        if batch is not None:
            self._take(batch, now)

    def _take(self, batch: PacketBatch, now: float) -> None:
        origins = self._origins
        if len(batch) > len(origins):
            origins = np.full(len(batch), self.peer, np.uint64)
        self._switch.take(self._registration, batch, origins, now)

    @property
    def blocked(self) -> bool:
        return self.outbox.blocked

    def resume(self) -> None:
        self.outbox.resume()

    def send(self, run: Run, now: float) -> tuple[int, int]:
        """Queue and send a run; returns the fragments lost to the queue and to the kernel."""
        count = len(run.offsets)
        admitted = sum(self.queue.admit(count, run.length + OVERHEAD, now))
        if not admitted:
            return count, 0
        transmission = Transmission(self.peer, run.arena, run.offsets[:admitted], run.length)
        return count - admitted, self.outbox.send(Packets(self.device, transmission))

    def counters(self) -> dict[str, int]:
        return {**self.device.counters(), **self.queue.counters()}


class _Strays:
    """The port of whoever else sends to a program: refused, whatever it is."""

    blocked = False

    def __init__(self, name: str, device: UdpDevice, pipeline: Pipeline) -> None:
        self.name = name
        self.device = device
        self._pipeline = pipeline

    def fileno(self) -> int:
        return self.device.fileno()

    def read(self, now: float) -> bool:
        batch = self.device.receive()
        if batch is None:
            return False
        stages = self._pipeline.stages
        stages["parse"] += len(batch)
        stages["filter"] += len(batch)
        self._pipeline.drops[Drop.FOREIGN_HOST] += len(batch)
        return True

    def resume(self) -> None:
        return None

    def counters(self) -> dict[str, int]:
        return self.device.counters()


class UdpSwitch:
    """Ports at ``listen`` (a dotted address) for the programs of ``pipeline``, each at the first of its UDP ports.

    ``options`` are those of an endpoint's port, ``default`` those of all others. ``clock`` is what delays of faults are
    measured by. Raises ``OSError`` naming the address for ports that cannot be had.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        listen: str = "127.0.0.1",
        *,
        options: Mapping[int, PortOptions] | None = None,
        default: PortOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
        rcvbuf: int = RCVBUF,
    ) -> None:
        self.pipeline = pipeline
        self._options = options or {}
        self._default = default or PortOptions()
        self._clock = clock
        self._rcvbuf = rcvbuf
        self._strays: dict[str, _Strays] = {}
        self._ports: dict[tuple[str, int], UdpPort] = {}
        self._opened = 0
        #: what ports have counted that are closed now
        self._past: dict[str, int] = {}
        #: share of a program's bytes that left again so far: offered, left
        self._shares = {one.name: [0, 0] for one in pipeline.registrations}
        try:
            for registration in pipeline.registrations:
                first = registration.ports[0].start
                device = UdpDevice(listen, first, rcvbuf=rcvbuf)
                self._strays[registration.name] = _Strays(f"{registration.name}/others", device, pipeline)
                self.attach(registration)
        except BaseException:
            self.close()
            raise

    @property
    def ports(self) -> list[SwitchPort]:
        """All ports."""
        return [*self._ports.values(), *self._strays.values()]

    def endpoint(self, program: str) -> int:
        """Where a program's packets are to be sent."""
        return self._strays[program].device.endpoint

    def endpoints(self) -> dict[str, int]:
        return {name: self.endpoint(name) for name in self._strays}

    def attach(self, registration: Registration) -> None:
        """Open ports for the endpoints of a registration that have none yet."""
        base = self._strays[registration.name].device
        for peer in registration.uplinks:
            key = (registration.name, peer)
            if key not in self._ports:
                options = self._options.get(peer, self._default)
                bare = base.beside(peer, rcvbuf=self._rcvbuf, sndbuf=SNDBUF)
                device = options.faults.around(bare, self._opened, self._clock)
                self._opened += 1
                self._ports[key] = UdpPort(self, registration, peer, device, options)

    def serve(self, program: str, job: SwitchedJob, key: int) -> None:
        registration = self._registration(program)
        serve(registration, job, key, self.endpoint(program))
        try:
            self.attach(registration)
        except OSError:
            # nobody will dismiss a job that was refused: its slots and its number would be gone for good
            self.dismiss(program, job.number, lambda _port: None)
            raise

    def dismiss(self, program: str, job: int, leave: Callable[[SwitchPort], None]) -> None:
        registration = self._registration(program)
        dismiss(registration, job)
        for key in [key for key in self._ports if key[0] == program and key[1] not in registration.uplinks]:
            port = self._ports.pop(key)
            leave(port)
            port.device.close()
            for name, count in port.counters().items():
                self._past[name] = self._past.get(name, 0) + count

    def _registration(self, program: str) -> Registration:
        return next(one for one in self.pipeline.registrations if one.name == program)

    def take(self, registration: Registration, batch: PacketBatch, origins: U64, now: float) -> None:
        """Send a batch from one endpoint through its program, and what comes out to where it goes."""
        pipeline = self.pipeline
        count = len(batch)
        pipeline.stages["parse"] += count
        senders = _NOBODY if count <= BATCH else np.zeros(count, np.uint64)
        congested = self._congested(registration, int(origins[0]), batch, now)
        runs = pipeline.process(registration, batch, origins, senders, now, congested)
        runs += pipeline.spilled(registration, 0)
        share = self._shares[registration.name]
        share[0] += count
        share[1] += sum(len(run.offsets) for run in runs)
        self._forward(registration, runs, now)

    def _congested(
        self, registration: Registration, origin: int, batch: PacketBatch, now: float
    ) -> U8 | None:
        """Which packets find the queue to their uplink, or back to their endpoint, above its threshold."""
        bound = registration.uplinks.get(origin) or origin
        port = self._ports.get((registration.name, bound))
        if port is None or port.queue.rate is None:
            return None
        offered, left = self._shares[registration.name]
        return port.queue.expected(batch.lengths + OVERHEAD, left / offered if offered else 0.0, now)

    def _forward(self, registration: Registration, runs: list[Run], now: float) -> None:
        stages, drops = self.pipeline.stages, self.pipeline.drops
        for run in runs:
            stages["mark"] += len(run.offsets)
            for destination in self._destinations(registration, run):
                port = self._ports.get((registration.name, destination))
                if port is None:
                    drops[Drop.NO_ROUTE] += len(run.offsets)
                    continue
                full, refused = port.send(run, now)
                drops[Drop.QUEUE_FULL] += full
                drops[Drop.EGRESS_FULL] += refused
                stages["forward"] += len(run.offsets) - full - refused

    @staticmethod
    def _destinations(registration: Registration, run: Run) -> tuple[int, ...]:
        """Where a run goes: one endpoint, or every member of a group."""
        if run.action == Action.GROUP:
            return registration.groups.get(run.target, (0,))
        if run.action == Action.UNICAST:
            return (run.target,)
        if run.action == Action.REPLY:
            return (run.origin,)
        return (registration.uplinks.get(run.origin, 0),)

    def timer(self) -> float:
        held = [port.device.timer() for port in self._ports.values()]
        return min(self.pipeline.timer(), *(at for at in held if at is not None), float("inf"))

    def on_timer(self, now: float) -> None:
        """Age slots, sample occupancy, release delayed packets."""
        self.pipeline.on_timer(now)
        for registration in self.pipeline.registrations:
            self._forward(registration, self.pipeline.spilled(registration, 0), now)
        for port in self._ports.values():
            port.release(now)

    def stats(self) -> dict[str, object]:
        return self.pipeline.stats_with(self.ports, self._past)

    def close(self) -> None:
        """Close all ports; figures stay readable."""
        for device in (
            *(port.device for port in self._ports.values()),
            *(port.device for port in self._strays.values()),
        ):
            device.close()
