"""A coordinator, its parameter server, a switch and hosts in virtual time: everything but processes and sockets is real."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from numpy.typing import NDArray

from inanet.coordinator.coordinator import Coordinator
from inanet.coordinator.settings import Settings
from inanet.member.member import Failed, Identity, Member
from inanet.messages.codec import decode, encode
from inanet.messages.services import Service
from inanet.planning.topology import Fabric, Topology
from inanet.proto.common.formats import make_format
from inanet.proto.common.plan import SwitchedJob, TensorSpec
from inanet.proto.slots.exponents import ExponentRoot
from inanet.proto.slots.host import SwitchedHost
from inanet.proto.slots.root import SwitchedRoot
from inanet.proto.slots.systems import EXPONENTS, SYSTEMS
from inanet.proto.slots.window import TIMING
from inanet.proto.tree.node import Node
from inanet.switch.follower import SwitchFollower
from inanet.switch.programs import Registration, dismiss, serve
from inanet.testing.switched import SWITCH, Impairment, Star
from inanet.wire.endpoint import endpoint

TOKEN = "t"
SLOTS = 64
WINDOW = 32
ROOT, PS = endpoint("10.0.1.1", 7000), endpoint("10.0.1.1", 7001)
#: seconds between two looks at the control plane
STEP = 0.0002


class StarSwitch:
    """A star's switch as a follower of plans sees it."""

    def __init__(self, star: Star, registration: Registration) -> None:
        self._star, self._registration = star, registration

    def serve(self, program: str, job: SwitchedJob, key: int) -> None:
        serve(self._registration, job, key, SWITCH)
        self._star.group(job.number, job.workers)

    def dismiss(self, program: str, job: int, leave: Callable[[Any], None]) -> None:
        dismiss(self._registration, job)


class Rack:
    """``hosts`` worker hosts, each with two ranks, in one job that chooses ``system``."""

    def __init__(
        self,
        system: str,
        hosts: int = 3,
        impairment: Impairment | None = None,
        fabric: Fabric | None = None,
    ) -> None:
        """``fabric``: a manager's, which takes whatever switch comes; else ``s0`` is configured."""
        self.system = system
        parts = SYSTEMS[system]
        budget = SLOTS * 4 * 1024 if not parts.server else SLOTS * (4 * 62 + 24)
        self.program = parts.make_program(budget=budget, age=1.0)
        self.star = Star(self.program, impairment)
        self.names = [f"w{index}" for index in range(hosts)]
        topology = Topology(roots=("ps",), workers=dict.fromkeys(self.names, ("ps",)))
        settings = Settings(
            fabric or topology,
            TOKEN,
            round=5.0,
            join=3.0,
            switches=() if fabric else ("s0",),
            any_switch=fabric is not None,
            switch_window=WINDOW,
        )
        self._keys = itertools.count(0xABCD_0000_0000_0001)
        self.coordinator = Coordinator(settings, make_format, lambda: next(self._keys))
        self.members: dict[str, Member] = {}
        self.hosts: dict[str, SwitchedHost] = {}
        self.results: dict[tuple[str, int], Failed | None] = {}
        self._ids: dict[str, int] = {}
        self._next_id = itertools.count(1)
        self._seen = 0
        self._begun = 0

    # ---------- nodes

    def start(self, *, switch: bool = True) -> "Rack":
        """Everything joins; returns when the job has begun."""
        self.start_ps()
        if switch:
            self.start_switch()
        for name in self.names:
            self.start_host(name)
        return self

    def joined(self) -> "Rack":
        """Wait for the job to begin."""
        self.run(lambda: all(self.members[name].joined for name in self.names))
        return self

    def _connect(self, name: str, member: Member) -> None:
        self.members[name] = member
        self._ids[name] = next(self._next_id)
        self.coordinator.connected(self._ids[name], self.star.now)
        member.connected()

    def start_ps(self) -> None:
        exponents, services = ExponentRoot(), {EXPONENTS: Service(endpoint=ROOT)}
        self.star.attach(ROOT, exponents)
        server = SYSTEMS[self.system].make_server()
        if server is not None:
            self.star.attach(PS, server)
            services[self.system] = Service(endpoint=PS)
        follower = SwitchedRoot(
            Node("ps", 64),
            {EXPONENTS: exponents, **({} if server is None else {self.system: server})},
        )
        self._connect("ps", Member(follower, Identity("ps", "ps", TOKEN, ROOT, 512, services=services)))

    def start_switch(self, name: str = "s0") -> None:
        registration = Registration(self.system, self.program)
        has = registration.program.offer(None, 9)
        service = Service(endpoint=SWITCH, slots=has.slots, own=has.own, values=has.values)
        follower = SwitchFollower(StarSwitch(self.star, registration), {self.system: self.system})  # type: ignore[arg-type]
        services = {self.system: service}
        self._connect(name, Member(follower, Identity(name, "switch", TOKEN, SWITCH, 512, services=services)))

    def start_host(self, name: str, **changes: Any) -> None:
        index = self.names.index(name)
        address = endpoint(f"10.0.0.{index + 1}", 4000 + next(self._next_id))
        host = self.hosts[name] = SwitchedHost(address, TIMING)
        self.star.attach(address, host)
        who = {
            "job": "train",
            "ranks": (2 * index, 2 * index + 1),
            "world": 2 * len(self.names),
            "system": self.system,
        } | changes

        self._connect(name, Member(host, Identity(name, "worker", TOKEN, address, 512, **who)))

    def kill(self, name: str) -> None:
        """kill -9"""
        self.coordinator.disconnected(self._ids.pop(name), self.star.now)
        self.members.pop(name).disconnected()
        host = self.hosts.pop(name, None)
        if host is not None:
            self.star.detach(host.endpoint)

    # ---------- time

    def step(self) -> None:
        """Carry control messages, tell members what their hosts found, let a moment pass."""
        now = self.star.now
        log, self._seen = self.star.log[self._seen :], len(self.star.log)
        for address, event in log:
            name = next((name for name, host in self.hosts.items() if host.endpoint == address), "")
            if name in self.members:
                self.members[name].on_event(event, now)
        busy = True
        while busy:
            busy = False
            for name, member in list(self.members.items()):
                for message in member.outgoing():
                    busy = True
                    self.coordinator.receive(self._ids[name], decode(encode(message)[4:]), now)
            names = {peer: name for name, peer in self._ids.items()}
            for peer, message in self.coordinator.outgoing():
                busy = True
                if peer in names:
                    member = self.members[names[peer]]
                    member.receive(decode(encode(message)[4:]), now)
                    if member.failed is not None:
                        # as its connection would
                        member.abandon(member.failed)
        self.star.settle(STEP)
        if (due := self.coordinator.timer()) is not None and due <= self.star.now:
            self.coordinator.on_timer(self.star.now)

    def run(self, until: Callable[[], bool], seconds: float = 20.0) -> None:
        stop = self.star.now + seconds
        while not until():
            self.step()
            assert self.star.now < stop, self.figures()

    def figures(self) -> dict[str, Any]:
        """For a test that gets stuck."""
        return {name: host.stats() for name, host in self.hosts.items()} | {"program": self.program.stats()}

    # ---------- rounds

    def begin(
        self, spec: TensorSpec, arrays: Sequence[NDArray[Any]], only: Sequence[str] | None = None
    ) -> int:
        """Begin a round with the arrays of all ranks in order, overwritten by the result; its number."""
        self._begun += 1
        for name in self.names if only is None else only:
            index = self.names.index(name)
            mine = list(arrays[2 * index : 2 * index + 2])
            self.begin_at(name, self._begun, spec, mine)
        return self._begun

    def begin_at(self, name: str, round_: int, spec: TensorSpec, arrays: Sequence[NDArray[Any]]) -> None:
        """One host's part in a round."""
        done = partial(self.results.__setitem__, (name, round_))
        self.members[name].begin(round_, spec, arrays, self.star.now, done)

    def ended(self, round_: int, names: Sequence[str] | None = None) -> bool:
        """Whether a round is over at these hosts, by default at all."""
        return all((name, round_) in self.results for name in names or self.names)

    def errors(self, round_: int, names: Sequence[str] | None = None) -> set[str]:
        """Causes by which it has ended."""
        found = [self.results[name, round_] for name in names or self.names]
        return {"" if error is None else error.cause for error in found}
