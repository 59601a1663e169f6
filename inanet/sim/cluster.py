"""Jobs on servers in racks, in virtual time: servers that jobs share, two-level aggregation, equal-cost ways between racks.

>>> layout = Layout(racks=12, cores=2, servers=4, nic=20e9, uplink=10e9, delay=2e-6)
>>> cluster = Cluster(layout, "a2tp", [Placed(1, (0, 5, 17), 30, 248 * 1000)], slots=120, window=130)
>>> cluster.run(rounds=2, deadline=1.0)
>>> cluster.iteration(1)

Every rack has a switch with the system's program, joined to every core switch; core switches only forward, by a hash of the
addresses. What runs on a server shares its link. A job loops: a round, then ``compute`` seconds. The system ``"ring"`` is
:class:`~inanet.sim.hostring.RingWorker`, in packets of an ordinary size and without programs.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from inanet.proto.common.events import RoundDone
from inanet.proto.common.plan import ExponentMode, TensorSpec
from inanet.proto.common.recovery import Timing
from inanet.proto.slots.program import SwitchProgram
from inanet.proto.slots.ps import PSJob
from inanet.proto.slots.tenants import Tenant
from inanet.proto.slots.window import TIMING
from inanet.proto.slots.worker import Membership, Worker
from inanet.sim.hostring import RingWorker
from inanet.sim.link import UDP_OVERHEAD, LinkSpec
from inanet.sim.network import Network
from inanet.sim.nodes import Machine
from inanet.sim.rack import OVERHEAD, SYSTEMS, budget
from inanet.sim.tiers import PlainSwitch, RackSwitch, TieredSwitchML
from inanet.wire.endpoint import endpoint

RING = "ring"
#: Bytes of an ordinary packet's payload: 1500 less IPv4 and UDP.
PAYLOAD = 1472
#: Bytes that an int32 takes on the wire: sums are exact, in two halves.
INTEGER = 8
#: Bytes of a packet of the switch systems, about.
SMALL = 275


@dataclass(frozen=True, slots=True)
class Layout:
    """``racks`` of ``servers``, ``cores`` above them (none for one rack). ``nic`` and ``uplink`` bits per second; a process
    sends at most ``process`` of them, if given. ``delay`` seconds of a server's link, ``core_delay`` of one between
    switches. Ports of switches have ``queue`` bytes and mark from ``ecn`` bytes; packets move in pieces of ``piece``
    bytes or a packet.
    """

    racks: int
    cores: int
    servers: int
    nic: float
    uplink: float = 0.0
    delay: float = 2e-6
    core_delay: float = 2e-7
    process: float | None = None
    queue: int = 1 << 20
    ecn: int = 80_000
    piece: int = 4096
    tick: float | None = None

    def sending(self, processes: int, overhead: int, grain: int) -> LinkSpec:
        """What a server with so many processes sends over."""
        rate = self.nic if self.process is None else min(self.nic, processes * self.process)
        return LinkSpec(rate=rate, delay=self.delay, overhead=overhead, grain=grain)

    def port(self, rate: float, delay: float, overhead: int, grain: int) -> LinkSpec:
        """What a switch sends over."""
        return LinkSpec(rate, delay, self.queue, self.ecn, 0.0, overhead, grain)


@dataclass(frozen=True, slots=True)
class Placed:
    """Job ``number`` (1 to 255): its ``workers``' servers, all different, its ``ps``'s, ``size`` bytes of a round,
    ``compute`` seconds before each, ``start`` of the first.
    """

    number: int
    workers: tuple[int, ...]
    ps: int
    size: int
    compute: float = 0.0
    start: float = 0.0


@dataclass(frozen=True, slots=True)
class _Member:
    """A worker's place: its host's name, address, bit, rack, and the rack whose switch it sends to."""

    name: str
    address: int
    bit: int
    rack: int
    sends_to: int


class Cluster:
    """``slots`` of every switch, for SwitchML with two versions; ``window`` of a worker in packets of the system, also the
    first one. ``pull_after`` and ``timing`` as for :class:`~inanet.sim.rack.Rack`.
    """

    def __init__(
        self,
        layout: Layout,
        system: str,
        jobs: Sequence[Placed],
        *,
        slots: int,
        window: int,
        seed: int = 0,
        timing: Timing | None = None,
        pull_after: float = 0.005,
    ) -> None:
        self.layout = layout
        self.system = system
        self.slots, self.window = slots, window
        self.timing = timing or replace(TIMING, silent=60.0)
        self.pull_after = pull_after
        self.network = Network(seed, tick=layout.tick)
        self.jobs = {job.number: job for job in jobs}
        self.machines: dict[str, Machine] = {}
        self.programs: list[SwitchProgram] = []
        self._overhead = UDP_OVERHEAD if system == RING else OVERHEAD
        self._grain = max(1, layout.piece // ((PAYLOAD if system == RING else SMALL) + self._overhead))
        self._finished: dict[int, list[float]] = {job.number: [] for job in jobs}
        #: rounds of each job that do not count
        self._skipped: dict[int, int] = {job.number: 0 for job in jobs}
        self._rounds: Counter[str] = Counter()
        self._seen = 0
        self._first: dict[int, str] = {}
        self._processes = Counter(server for job in jobs for server in (*job.workers, job.ps))
        if system == RING:
            self._processes = Counter(server for job in jobs for server in job.workers)
        self._add_switches()
        shares = self._shares(jobs)
        for job in jobs:
            if system == RING:
                self._add_ring(job)
            else:
                self._add_job(job, shares[job.number])

    # ------------------------------------------------------------ building

    def _rack_of(self, server: int) -> int:
        return server // self.layout.servers

    @staticmethod
    def _switch_at(rack: int) -> int:
        return endpoint(f"10.0.{rack}.254", 0xBEE0)

    def _add_switches(self) -> None:
        layout = self.layout
        kind = PlainSwitch if self.system == "switchml" else RackSwitch
        peers = frozenset(self._switch_at(rack) for rack in range(layout.racks))
        for rack in range(layout.racks):
            program: SwitchProgram | None = None
            if self.system == "switchml":
                # shares are rounded up to one slot at least
                room = self.slots + len(self.jobs)
                program = TieredSwitchML(values=64, budget=budget(room, 64, 2), age=60.0)
            elif self.system != RING:
                program = SYSTEMS[self.system].program(self.slots)
            address = self._switch_at(rack) if program is not None else 0
            switch = self.network.add_switch(f"rack{rack}", program, address, kind=kind)
            switch.peers = peers - {address}
            if program is not None:
                self.programs.append(program)
        between = layout.port(layout.uplink, layout.core_delay, self._overhead, self._grain)
        for core in range(layout.cores):
            self.network.add_switch(f"core{core}")
            for rack in range(layout.racks):
                self.network.connect(f"rack{rack}", f"core{core}", between)

    def _add_host(self, name: str, address: int, machine: Machine, server: int) -> None:
        self.network.add_host(name, address, machine)
        self.machines[name] = machine
        beside = self._first.setdefault(server, name)
        if beside != name:
            self.network.share(name, beside)
            return
        up = self.layout.sending(self._processes[server], self._overhead, self._grain)
        down = self.layout.port(self.layout.nic, self.layout.delay, self._overhead, self._grain)
        self.network.connect(name, f"rack{self._rack_of(server)}", up, down)

    def _root(self, job: Placed) -> int:
        if self.system != "switchml":
            return self._rack_of(job.ps)
        racks = Counter(self._rack_of(server) for server in job.workers)
        return max(racks, key=lambda rack: (racks[rack], -rack))

    def _members(self, job: Placed) -> list[_Member]:
        root = self._root(job)
        racks = Counter(self._rack_of(server) for server in job.workers)
        return [
            _Member(
                f"j{job.number}w{index}",
                endpoint(f"10.{job.number}.0.{index + 1}", 4000),
                1 << index,
                rack := self._rack_of(server),
                rack if racks[rack] > 1 else root,
            )
            for index, server in enumerate(job.workers)
        ]

    def _shares(self, jobs: Sequence[Placed]) -> dict[int, int]:
        """Slots of each job: all of them, or an equal share among the jobs that use the same switch."""
        if self.system != "switchml":
            return {job.number: self.slots for job in jobs}
        users: Counter[int] = Counter()
        for job in jobs:
            users.update({self._root(job), *(member.sends_to for member in self._members(job))})
        return {
            job.number: min(
                -(-self.slots // users[rack])
                for rack in {self._root(job), *(member.sends_to for member in self._members(job))}
            )
            for job in jobs
        }

    def _bind(self, job: Placed, members: Sequence[_Member], ps: int, share: int) -> list[int]:
        """Tell the switches of a job; returns the addresses of those below its root."""
        root = self._root(job)
        static = share if self.system == "switchml" else None
        at_root = {member.address: member.bit for member in members if member.sends_to == root}
        below = []
        for rack in sorted({member.sends_to for member in members} - {root}):
            mine = {member.address: member.bit for member in members if member.sends_to == rack}
            program = self.programs[rack]
            program.add_job(Tenant(job.number, mine, job.number, self._switch_at(root), static))
            if isinstance(program, TieredSwitchML):
                program.put_below(job.number, self._switch_at(root))
            self.network.switches[f"rack{rack}"].groups[job.number] = tuple(mine)
            # SwitchML counts members, ATP's family the workers behind them
            at_root[self._switch_at(rack)] = sum(mine.values()) if ps else min(mine.values())
            below.append(self._switch_at(rack))
        self.programs[root].add_job(Tenant(job.number, at_root, job.number, ps, static))
        self.network.switches[f"rack{root}"].groups[job.number] = tuple(at_root)
        return below

    def _add_job(self, job: Placed, share: int) -> None:
        made = SYSTEMS[self.system]
        members = self._members(job)
        ps = 0 if made.static else endpoint(f"10.{job.number}.1.1", 5000)
        below = self._bind(job, members, ps, share)
        root = self._switch_at(self._root(job))
        window = share if made.static else self.window
        if ps:
            server = made.server(self.pull_after)
            bits = {member.address: member.bit for member in members}
            server.add_job(PSJob(job.number, bits, [root], window, share, switches=[root, *below]))
            self._add_host(f"ps{job.number}", ps, server, job.ps)
        spec = TensorSpec("t", "i32", (job.size // INTEGER,), "sum", ExponentMode.NONE)
        for index, member in enumerate(members):
            switch = self._switch_at(member.sends_to)
            results = ps if switch == root else root
            place = Membership(job.number, index, len(members), len(members), switch, results)
            machine = made.worker(place, window, share, self.timing)
            machine.add_tensor(0, spec)
            self._add_host(member.name, member.address, machine, job.workers[index])
            self._start(job, member.name)

    def _add_ring(self, job: Placed) -> None:
        members = self._members(job)
        count = len(members)
        for index, member in enumerate(members):
            machine = RingWorker(
                job.number,
                count,
                members[(index + 1) % count].address,
                members[index - 1].address,
                size=job.size,
                payload=PAYLOAD,
                window=self.window,
                largest=2 * self.window,
                timeout=self.timing.retransmit,
            )
            self._add_host(member.name, member.address, machine, job.workers[index])
            self._start(job, member.name)

    # ------------------------------------------------------------ rounds

    def _start(self, job: Placed, name: str) -> None:
        self.network.at(job.start + job.compute, lambda: self._begin(job, name))

    def _begin(self, job: Placed, name: str) -> None:
        machine = self.machines[name]
        self._rounds[name] += 1
        if isinstance(machine, RingWorker):
            machine.begin(self.network.now)
        else:
            assert isinstance(machine, Worker)
            machine.begin(0, self._rounds[name], [np.zeros(job.size // INTEGER, np.int32)], self.network.now)
        self.network.wake(name)

    def _turn(self) -> None:
        log = self.network.log
        for name, event in log[self._seen :]:
            if isinstance(event, RoundDone):
                job = self.jobs[event.job]
                if name.endswith("w0"):
                    self._finished[job.number].append(self.network.now)
                self.network.at(self.network.now + job.compute, partial(self._begin, job, name))
        self._seen = len(log)

    def run(self, rounds: int, *, deadline: float, settled: float = 0.0) -> None:
        """Until every job has done so many rounds, after the first ``settled`` seconds, in which rounds do not count; jobs
        that are faster go on meanwhile.

        Raises :class:`~inanet.testing.pump.Stuck` after ``deadline`` virtual seconds.
        """
        if settled:
            over: list[bool] = []
            self.network.at(settled, lambda: over.append(True))
            self._until(lambda: bool(over), deadline)
            # the round that is under way is not one of them
            self._skipped = {job: len(times) + 1 for job, times in self._finished.items()}
        self._until(
            lambda: all(len(times) - self._skipped[job] >= rounds for job, times in self._finished.items()),
            deadline,
        )

    def _until(self, reached: Callable[[], bool], deadline: float) -> None:
        def look() -> bool:
            self._turn()
            return reached()

        self.network.run(look, deadline=deadline)

    def iteration(self, number: int) -> float:
        """Mean seconds of a job's iterations that count: a round, and the computation before it."""
        times, skipped = self._finished[number], self._skipped[number]
        first = times[skipped - 1] if skipped else self.jobs[number].start
        return (times[-1] - first) / (len(times) - skipped)


def scaled(layout: Layout, factor: float) -> Layout:
    """Rates and queues divided by a factor, delays as they are."""
    return replace(
        layout,
        nic=layout.nic / factor,
        uplink=layout.uplink / factor,
        process=None if layout.process is None else layout.process / factor,
        queue=round(layout.queue / factor),
        ecn=round(layout.ecn / factor),
    )
