"""Jobs of a switch's system on one rack: workers and PSs around a switch with a program, in virtual time.

>>> rack = Rack(SYSTEMS["a2tp"], slots=450, link=LinkSpec(rate=70e9, delay=4e-6))
>>> rack.add_job(1, workers=4, window=450)
>>> rack.add_job(2, workers=4, window=450, links={3: LinkSpec(rate=17e9, delay=4e-6)})
>>> rack.loop(1, values=100_000)
>>> rack.run(0.002)

A job loops: as soon as a worker has its result it begins the next round, without a computation between as the
micro-benchmark jobs of ATP and A2TP do, or after one. Values are int32, exact; arrays are zeros, since what is sent does not
matter here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from inanet.proto.common.events import RoundDone
from inanet.proto.common.plan import ExponentMode, TensorJob, TensorSpec, Terms
from inanet.proto.common.recovery import Timing
from inanet.proto.slots import systems
from inanet.proto.slots.atp.ps import AtpAnswering
from inanet.proto.slots.program import SwitchProgram
from inanet.proto.slots.ps import PSJob, SumServer
from inanet.proto.slots.tenants import Tenant
from inanet.proto.slots.window import TIMING
from inanet.proto.slots.worker import Membership, Worker
from inanet.sim.link import LinkSpec
from inanet.sim.network import Network
from inanet.wire.atp import VALUES
from inanet.wire.endpoint import endpoint

SWITCH = endpoint("10.0.0.254", 0xBEE0)
#: Register bytes of a slot beside its values.
_SLOT_STATE = 24
#: Ethernet and IPv4 headers, checksum, preamble and gap: the public framings have no UDP header.
OVERHEAD = 14 + 20 + 4 + 8 + 12


def budget(slots: int, values: int, sets: int = 1) -> int:
    """Register bytes of so many slots, each with ``sets`` versions of ``values`` values."""
    return slots * sets * (4 * values + _SLOT_STATE)


@dataclass(frozen=True, slots=True)
class System:
    """A system as the papers' racks have it: ``values`` in a packet, so many ``sets`` of every slot."""

    name: str
    values: int = VALUES
    sets: int = 1

    @property
    def parts(self) -> systems.System:
        """Its record in the table of systems."""
        return systems.SYSTEMS[self.name]

    @property
    def static(self) -> bool:
        """Whether every job has a share of its own; then it needs no PS."""
        return not self.parts.server

    def program(self, slots: int) -> SwitchProgram:
        """The switch's, with that many slots in all."""
        options = {"values": self.values} if "values" in self.parts.options else {}
        program: SwitchProgram = self.parts.make_program(
            budget=budget(slots, self.values, self.sets), age=60.0, **options
        )
        return program

    def worker(self, member: Membership, window: int, slots: int, timing: Timing) -> Worker:
        """A worker of a job that has ``slots``."""
        job = self.parts.load_job()
        assert issubclass(job, TensorJob)
        terms = Terms(member.results, 0, member.root, window, slots, self.static, values=self.values)
        workers = tuple(range(1, member.workers + 1))
        return self.parts.make_worker(
            member, job.on(self.name, member.job, workers, member.switch, terms), timing
        )

    def server(self, pull_after: float) -> SumServer:
        """The PS, which asks the switch after so many seconds for what it may hold of a fragment."""
        server = self.parts.make_server()
        assert isinstance(server, SumServer)
        assert isinstance(server.answering, AtpAnswering)
        server.answering.pull_after = pull_after
        return server


SYSTEMS: Mapping[str, System] = {
    "switchml": System("switchml", values=64, sets=2),
    **{name: System(name) for name in ("atp", "esa", "a2tp")},
}


@dataclass(slots=True)
class _Job:
    names: tuple[str, ...]
    workers: tuple[Worker, ...]
    spec: TensorSpec | None = None
    looping: bool = False
    compute: float = 0.0
    round: dict[str, int] = field(default_factory=dict)
    #: when the first worker has had each round's result
    finished: list[float] = field(default_factory=list)


class Rack:
    """``link`` joins every host to the switch in both directions; ``port`` is what the switch sends over, by default the
    same. ``slots`` are the switch's. ``timing`` is the workers'; after ``pull_after`` seconds a PS asks the switch for what
    it may hold of a fragment. ``tick`` is the network's.
    """

    def __init__(
        self,
        system: System,
        *,
        slots: int,
        link: LinkSpec,
        port: LinkSpec | None = None,
        seed: int = 0,
        timing: Timing | None = None,
        pull_after: float = 0.005,
        tick: float | None = None,
    ) -> None:
        self.system = system
        self.slots = slots
        self.network = Network(seed, tick=tick)
        self.program = system.program(slots)
        self.switch = self.network.add_switch("switch", self.program, SWITCH)
        self.link = link
        self.port = port or link
        self.timing = timing or replace(TIMING, silent=60.0)
        self.pull_after = pull_after
        self.jobs: dict[int, _Job] = {}
        self._seen = 0

    def add_job(
        self,
        number: int,
        workers: int,
        window: int,
        *,
        slots: int | None = None,
        links: Mapping[int, LinkSpec] | None = None,
    ) -> tuple[Worker, ...]:
        """A job with its PS. ``slots`` it may hash to (a static system: its own), by default all; ``links`` of workers
        that are not like the others, by index. Raises as the programs do, when registers are short.
        """
        slots = self.slots if slots is None else slots
        addresses = [endpoint(f"10.{number}.0.{index + 1}", 4000) for index in range(workers)]
        members = {address: 1 << index for index, address in enumerate(addresses)}
        ps = 0 if self.system.static else endpoint(f"10.{number}.1.1", 5000)
        self.program.add_job(Tenant(number, members, number, ps, slots if self.system.static else None))
        self.switch.groups[number] = tuple(addresses)
        if ps:
            server = self.system.server(self.pull_after)
            server.add_job(PSJob(number, members, [SWITCH], window, slots, switches=[SWITCH]))
            self.network.add_host(f"ps{number}", ps, server)
            self.network.connect(f"ps{number}", "switch", self.link, self.port)
        names, machines = [], []
        for index, address in enumerate(addresses):
            member = Membership(number, index, workers, workers, SWITCH, ps)
            machine = self.system.worker(member, window, slots, self.timing)
            name = f"j{number}w{index}"
            self.network.add_host(name, address, machine)
            self.network.connect(name, "switch", (links or {}).get(index, self.link), self.port)
            if ps:
                self.switch.congestion[address] = ps
            names.append(name)
            machines.append(machine)
        self.jobs[number] = _Job(tuple(names), tuple(machines))
        return tuple(machines)

    def loop(self, number: int, values: int, compute: float = 0.0) -> None:
        """From now on, rounds of ``values`` int32 one after the other, ``compute`` seconds between them."""
        job = self.jobs[number]
        job.compute = compute
        job.spec = TensorSpec("t", "i32", (values,), "sum", ExponentMode.NONE)
        job.looping = True
        for name, machine in zip(job.names, job.workers, strict=True):
            machine.add_tensor(0, job.spec)
            self._begin(job, name, machine)

    def stop(self, number: int) -> None:
        """Begin no further rounds; those that run are finished."""
        self.jobs[number].looping = False

    def _begin(self, job: _Job, name: str, machine: Worker) -> None:
        assert job.spec is not None
        job.round[name] = job.round.get(name, 0) + 1
        machine.begin(0, job.round[name], [np.zeros(job.spec.shape, np.int32)], self.network.now)
        self.network.wake(name)

    def run(self, seconds: float) -> None:
        """Let virtual time pass."""
        stop = self.network.now + seconds
        reached: list[bool] = []
        self.network.at(stop, lambda: reached.append(True))
        self.network.run(lambda: self._turn() or bool(reached), deadline=2 * seconds + 1.0)

    def _turn(self) -> bool:
        """Begin the rounds that can begin; never True."""
        log = self.network.log
        if self._seen == len(log):
            return False
        for name, event in log[self._seen :]:
            if isinstance(event, RoundDone):
                job = self.jobs[event.job]
                if name == job.names[0]:
                    job.finished.append(self.network.now)
                if job.looping:
                    self._next(job, name)
        self._seen = len(log)
        return False

    def _next(self, job: _Job, name: str) -> None:
        machine = job.workers[job.names.index(name)]
        if job.compute:
            self.network.at(self.network.now + job.compute, lambda: self._begin(job, name, machine))
        else:
            self._begin(job, name, machine)

    def finished(self, number: int) -> tuple[float, ...]:
        """When each of the job's rounds was done at its first worker, seconds."""
        return tuple(self.jobs[number].finished)

    def answered(self, number: int) -> float:
        """Bytes of values that a worker of the job has had answered so far, on average over its workers."""
        workers = self.jobs[number].workers
        total = sum(worker.stats()["results_in"] * 4 * worker.layout.width for worker in workers)
        return total / len(workers)

    def occupied(self, number: int) -> float:
        """Share of the switch's slots that a job holds now."""
        return self.program.stats()[f"occupied_{number}"] / self.slots
