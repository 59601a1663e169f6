"""One job over a tree of switches in virtual time, under GOAT, GOAT's asynchronous training, ATP, ESA, or without any
aggregation.

>>> tree = Tree({"s1": "ps", "s2": "s1", "w0": "s2", "w1": "s2"}, "ps", ("s1", "s2"), ("w0", "w1"))
>>> lab = Collaborative(tree, "goat", slots=64, window=512, link=LinkSpec(rate=1e9))
>>> lab.add_tensor(0, spec, scheduled)
>>> lab.begin(0, arrays)
>>> lab.run(deadline=1.0)

Every switch has the system's program. *goat*, *goat-async*: the sub-models' nodes sum, everything else is passed on. *atp*, *esa*: the switch
that workers are plugged into sums first, and the PS's own switch sums those sums (:mod:`inanet.sim.tiers`). *none*: switches
only forward, workers send to the PS and it to each of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from inanet.proto.common.events import RoundDone
from inanet.proto.common.plan import Scheduled, TensorLayout, TensorSpec
from inanet.proto.common.recovery import Timing
from inanet.proto.slots.exponents import ExponentRoot
from inanet.proto.slots.goat.job import GoatJob, below, neighbours, sites, towards
from inanet.proto.slots.goat.program import GoatProgram, tenant_at
from inanet.proto.slots.goat.ps import goat_server
from inanet.proto.slots.goat.worker import goat_worker
from inanet.proto.slots.goat_async.program import EpochProgram
from inanet.proto.slots.goat_async.ps import EpochServer
from inanet.proto.slots.goat_async.worker import epoch_worker
from inanet.proto.slots.program import SwitchProgram
from inanet.proto.slots.ps import PSJob, SumServer
from inanet.proto.slots.registers import META_BYTES
from inanet.proto.slots.tenants import Tenant
from inanet.proto.slots.window import TIMING
from inanet.proto.slots.worker import Membership, Worker
from inanet.sim.link import LinkSpec
from inanet.sim.network import Network
from inanet.sim.nodes import Switch
from inanet.sim.rack import SYSTEMS
from inanet.sim.tiers import RackSwitch
from inanet.wire.endpoint import endpoint
from inanet.wire.goat import WORDS

JOB = 1
#: a host hands everything to its link: a PS has no timer that would have it asked again
_BUFFER = 1 << 30
KEY = 0x0123_4567_89AB_CDEF
PLAIN = "none"
#: those whose switches are given sub-models
_COLLABORATING = {"goat": GoatProgram, "goat-async": EpochProgram}
#: register bytes of one of GOAT's slots
SLOT_BYTES = 4 * WORDS + META_BYTES


@dataclass(frozen=True, slots=True)
class Tree:
    """Every switch's and worker's neighbour towards the PS; switches have numbers 1, 2 and so on as aggregation nodes."""

    parents: Mapping[str, str]
    ps: str
    switches: tuple[str, ...]
    workers: tuple[str, ...]


class Collaborative:
    """``slots`` of every switch, or by its name; ``window`` of the workers, in fragments. ``link`` joins neighbours in both
    directions; ``sending`` are other links of workers, by name, for what they send. ``seed`` decides all losses; ``pull_after``
    as for :class:`~inanet.sim.rack.Rack`.
    """

    def __init__(
        self,
        tree: Tree,
        system: str,
        *,
        slots: int | Mapping[str, int],
        window: int,
        link: LinkSpec,
        sending: Mapping[str, LinkSpec] | None = None,
        timing: Timing | None = None,
        seed: int = 0,
        tick: float | None = None,
        pull_after: float = 0.005,
    ) -> None:
        self.tree, self.system = tree, system
        self.slots = dict.fromkeys(tree.switches, slots) if isinstance(slots, int) else dict(slots)
        self.window = window
        self.timing = timing or replace(TIMING, silent=60.0)
        self.pull_after = pull_after
        self.network = Network(seed, tick=tick)
        self.programs: dict[str, SwitchProgram] = {}
        self.workers: dict[str, Worker] = {}
        self.server: SumServer | EpochServer
        self._begun: dict[str, int] = dict.fromkeys(tree.workers, 0)
        self._endpoints = {
            tree.ps: endpoint("10.0.1.1", 5000),
            **{name: endpoint(f"10.0.0.{index + 1}", 0xBEE0) for index, name in enumerate(tree.switches)},
            **{name: endpoint(f"10.1.0.{index + 1}", 4000) for index, name in enumerate(tree.workers)},
        }
        self._root = endpoint("10.0.1.1", 5001)
        self._add_switches()
        self._add_hosts()
        self._connect(link, sending or {})

    # ------------------------------------------------------------ building

    def _behind(self, switch: str) -> dict[str, int]:
        """Bits of the workers in each direction away from the PS."""
        found: dict[str, int] = {}
        for index, worker in enumerate(self.tree.workers):
            way = towards(self.tree.parents, switch, worker)
            if way != self.tree.parents[switch]:
                found[way] = found.get(way, 0) | 1 << index
        return found

    def _job(self) -> GoatJob:
        tree, endpoints = self.tree, self._endpoints
        where, entries = sites(tree.parents, tree.switches, tree.workers, endpoints)
        workers, ps = tuple(endpoints[worker] for worker in tree.workers), endpoints[tree.ps]
        return GoatJob(
            "goat", JOB, workers, 0, 0, self._root, self.window, ps=ps, sites=where, entries=entries
        )

    def _add_switches(self) -> None:
        its, job = self.tree, self._job()
        for index, name in enumerate(its.switches):
            program: SwitchProgram | None = None
            if self.system in _COLLABORATING:
                kind = _COLLABORATING[self.system]
                program = kind(budget=max(1, self.slots[name]) * (SLOT_BYTES + kind.extra))
                program.add_job(tenant_at(job, index + 1, KEY))
            elif self.system != PLAIN:
                program = SYSTEMS[self.system].program(self.slots[name])
            address = self._endpoints[name] if program is not None else 0
            made = RackSwitch if self.system in SYSTEMS else Switch
            switch = self.network.add_switch(name, program, address, kind=made)
            if program is None:
                continue
            self.programs[name] = program
            if self.system in _COLLABORATING:
                site = job.sites[index]
                switch.groups[JOB] = below(site)
                switch.peers = frozenset(neighbours(site))
            else:
                self._bind(name, program, switch)

    def _bind(self, name: str, program: SwitchProgram, switch: Switch) -> None:
        """ATP's family: members are the neighbours away from the PS, and what is complete goes on towards it."""
        members = {self._endpoints[way]: bits for way, bits in self._behind(name).items()}
        above = self._endpoints[self.tree.parents[name]]
        program.add_job(Tenant(JOB, members, JOB, above))
        switch.groups[JOB] = tuple(members)
        switch.peers = frozenset(self._endpoints[one] for one in self.tree.switches if one != name)

    def _add_hosts(self) -> None:
        its = self.tree
        bits = {self._endpoints[name]: 1 << index for index, name in enumerate(its.workers)}
        switches = tuple(self._endpoints[name] for name in its.switches)
        first = tuple(self._endpoints[name] for name in its.switches if its.parents[name] == its.ps)
        downlinks = tuple(bits) if self.system == PLAIN else first
        job = PSJob(
            JOB, bits, downlinks, self.window, min(self.slots.values()) or 1, switches=switches, key=KEY
        )
        if self.system in SYSTEMS:
            self.server = SYSTEMS[self.system].server(self.pull_after)
        else:
            self.server = EpochServer() if self.system == "goat-async" else goat_server()
        self.server.add_job(job)
        self.network.add_host(its.ps, self._endpoints[its.ps], self.server, send_buffer=_BUFFER)
        root = ExponentRoot()
        root.add_job(JOB, KEY, bits)
        self.network.add_host(f"{its.ps}/exponents", self._root, root)
        for index, name in enumerate(its.workers):
            self.workers[name] = self._worker(index, name)
            self.network.add_host(name, self._endpoints[name], self.workers[name], send_buffer=_BUFFER)

    def _worker(self, index: int, name: str) -> Worker:
        its, count = self.tree, len(self.tree.workers)
        switch, ps = its.parents[name], self._endpoints[its.ps]
        to = ps if self.system == PLAIN else self._endpoints[switch]
        # with ATP's switches, answers come from whoever is above the first one
        results = self._endpoints[its.parents[switch]] if self.system in SYSTEMS else to
        place = Membership(JOB, index, count, count, to, results, root=self._root, key=KEY)
        if self.system in SYSTEMS:
            return SYSTEMS[self.system].worker(place, self.window, min(self.slots.values()), self.timing)
        make = epoch_worker if self.system == "goat-async" else goat_worker
        return make(place, self.window, self.timing)

    def _connect(self, link: LinkSpec, sending: Mapping[str, LinkSpec]) -> None:
        for name, parent in self.tree.parents.items():
            self.network.connect(name, parent, sending.get(name, link), link)
        self.network.share(f"{self.tree.ps}/exponents", self.tree.ps)

    # ------------------------------------------------------------ rounds

    def add_tensor(
        self, tensor: int, spec: TensorSpec, scheduled: Sequence[Scheduled] = (), priority: int = 0
    ) -> None:
        """Make a tensor known; ``scheduled`` are its sub-models (GOAT), ``priority`` what evicts others (ESA)."""
        for program in self.programs.values():
            program.hold(JOB, scheduled)
        self.server.hold(JOB, TensorLayout(tensor, spec, (), tuple(scheduled)))
        for worker in self.workers.values():
            worker.add_tensor(tensor, spec, priority)
            worker.schedule(tensor, scheduled)

    def begin(self, tensor: int, arrays: Sequence[NDArray[Any]], delays: Sequence[float] = ()) -> None:
        """Begin a round at all workers, each with its array, some of them later by so many seconds."""
        for index, name in enumerate(self.tree.workers):
            self._begun[name] += 1
            self._start(name, tensor, self._begun[name], arrays[index], delays[index] if len(delays) else 0.0)

    def step(self, worker: str, tensor: int, array: NDArray[Any], delay: float) -> None:
        """Begin one worker's next step after so many seconds (goat-async)."""
        self._begun[worker] += 1
        self._start(worker, tensor, self._begun[worker], array, delay)

    def _start(self, name: str, tensor: int, number: int, array: NDArray[Any], delay: float) -> None:
        def start() -> None:
            self.workers[name].begin(tensor, number, [array], self.network.now)
            self.network.wake(name)

        if delay:
            self.network.at(self.network.now + delay, start)
        else:
            start()

    def run(self, *, deadline: float) -> float:
        """Until everybody has finished what was begun; returns the time. Raises
        :class:`~inanet.testing.pump.Stuck` after ``deadline`` virtual seconds.
        """
        wanted = sum(self._begun.values())
        seen = count = 0

        def done() -> bool:
            nonlocal seen, count
            log = self.network.log
            count += sum(isinstance(event, RoundDone) for _, event in log[seen:])
            seen = len(log)
            return count == wanted

        self.network.run(done, deadline=deadline)
        return self.network.now

    def pass_time(self, seconds: float) -> float:
        """Let so much virtual time pass, whatever is finished by then; returns the time."""
        passed: list[bool] = []
        self.network.at(self.network.now + seconds, lambda: passed.append(True))
        self.network.run(lambda: bool(passed), deadline=2 * seconds)
        return self.network.now

    # ------------------------------------------------------------ figures

    def packets_into_ps(self) -> int:
        """Packets that have reached the PS, those about exponents included."""
        (switch,) = (name for name in self.tree.switches if self.tree.parents[name] == self.tree.ps)
        return self.network.counters().get(f"{switch}-{self.tree.ps}", {}).get("packets", 0)
