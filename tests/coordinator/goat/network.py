"""A coordinator, a parameter server, four switches and hosts in virtual time; everything but processes and sockets is real.

Two switches lead from ``s4`` to ``s1``, so that either may be lost::

    ps - s1 - s2 - s4 - w0, w1
          | `- s3 -'
          w2
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from inanet.coordinator.coordinator import Coordinator
from inanet.coordinator.settings import Settings
from inanet.member.member import Failed, Identity, Member
from inanet.messages.services import Service
from inanet.planning.topology import Topology
from inanet.proto.common.formats import make_format
from inanet.proto.common.plan import SwitchedJob
from inanet.proto.slots.goat.job import GoatJob
from inanet.proto.slots.goat.program import GoatProgram
from inanet.proto.slots.registers import META_BYTES
from inanet.sim.link import Link, LinkSpec
from inanet.sim.network import Network
from inanet.sim.nodes import Switch
from inanet.switch.follower import SwitchFollower
from inanet.switch.programs import Registration, dismiss, serve
from inanet.wire.endpoint import endpoint, show
from inanet.wire.goat import WORDS
from tests.coordinator.rack import PS, ROOT, TOKEN, WINDOW, Rack

SWITCHES = ("s1", "s2", "s3", "s4")
LINKS = (
    ("ps", "s1"),
    ("s1", "s2"),
    ("s1", "s3"),
    ("s2", "s4"),
    ("s3", "s4"),
    ("s4", "w0"),
    ("s4", "w1"),
    ("s1", "w2"),
)
ADDRESSES = {name: endpoint(f"10.2.0.{index}", 0xBEE0) for index, name in enumerate(SWITCHES, 1)}
LINK = LinkSpec(rate=1e9, delay=5e-6)
SLOTS = 24


class Wires:
    """The network as :class:`~tests.coordinator.rack.Rack` uses its star; ``at`` says at which switch an address is."""

    def __init__(self, at: Callable[[int], str]) -> None:
        self.network = Network(seed=1)
        self._at = at
        self._seen = 0
        self._log: list[tuple[int, Any]] = []

    @property
    def now(self) -> float:
        return self.network.now

    @property
    def log(self) -> list[tuple[int, Any]]:
        """Events by the address of the machine that reported them."""
        fresh, self._seen = self.network.log[self._seen :], len(self.network.log)
        self._log += [(self.network.hosts[name].address, event) for name, event in fresh]
        return self._log

    def attach(self, address: int, machine: Any) -> None:
        self.network.add_host(show(address), address, machine)
        if address == PS and show(ROOT) in self.network.hosts:
            self.network.share(show(PS), show(ROOT))
        else:
            self.network.connect(show(address), self._at(address), LINK)

    def detach(self, address: int) -> None:
        """Nothing of what is sent there is heard any more."""
        self.network.hosts[show(address)].take = lambda *_: None  # type: ignore[method-assign]

    def settle(self, seconds: float) -> None:
        over: list[bool] = []
        self.network.at(self.now + seconds, lambda: over.append(True))
        self.network.run(lambda: bool(over), deadline=2 * seconds)


class _Site:
    """A switch as a follower of plans sees it."""

    def __init__(self, node: Switch, registration: Registration) -> None:
        self._node, self._registration = node, registration

    def serve(self, program: str, job: SwitchedJob, key: int) -> None:
        serve(self._registration, job, key, self._node.address)
        self._tell()

    def dismiss(self, program: str, job: int, leave: Callable[[Any], None]) -> None:
        dismiss(self._registration, job)
        self._tell()

    def _tell(self) -> None:
        self._node.groups = dict(self._registration.groups)
        around = {hop for hops in self._registration.users.values() for hop in hops}
        # over UDP all that leaves a switch comes from it
        self._node.peers = frozenset(around)

    def endpoints(self) -> Mapping[str, int]:
        return {"goat": self._node.address}

    @property
    def pipeline(self) -> "_Site":
        return self

    @property
    def registrations(self) -> list[Registration]:
        return [self._registration]


class GoatRack(Rack):
    """Three hosts with two ranks each, in one job that chooses goat."""

    def __init__(self, slots: int = SLOTS, links: tuple[tuple[str, str], ...] = LINKS) -> None:
        self.system = "goat"
        self.slots = slots
        self.names = ["w0", "w1", "w2"]
        self.star = Wires(self._switch_of)  # type: ignore[assignment]
        self.programs: dict[str, GoatProgram] = {}
        self._cut: dict[str, list[tuple[Switch, str, Link]]] = {}
        for name in SWITCHES:
            self.star.network.add_switch(name, None, ADDRESSES[name])  # type: ignore[attr-defined]
        for one, other in LINKS:
            if {one, other} <= set(SWITCHES):
                self.star.network.connect(one, other, LINK)  # type: ignore[attr-defined]
        topology = Topology(roots=("ps",), workers=dict.fromkeys(self.names, ("ps",)))
        settings = Settings(
            topology, TOKEN, round=5.0, join=3.0, switches=SWITCHES, switch_window=WINDOW, links=links
        )
        self._keys = itertools.count(0xABCD_0000_0000_0001)
        self.coordinator = Coordinator(settings, make_format, lambda: next(self._keys))
        self.members: dict[str, Member] = {}
        self.hosts = {}
        self.results: dict[tuple[str, int], Failed | None] = {}
        self._ids: dict[str, int] = {}
        self._next_id = itertools.count(1)
        self._seen = 0
        self._begun = 0

    def _switch_of(self, address: int) -> str:
        """Hosts have addresses that end in their index plus 1."""
        if address in (ROOT, PS):
            return "s1"
        return ("s4", "s4", "s1")[(address >> 16 & 0xFF) - 1]

    def start(self, *, switch: bool = True) -> "GoatRack":
        self.start_ps()
        for name in SWITCHES if switch else ():
            self.start_switch(name)
        for name in self.names:
            self.start_host(name)
        return self

    def start_switch(self, name: str = "s1") -> None:
        """A switch whose registers are empty."""
        node: Switch = self.star.network.switches[name]  # type: ignore[attr-defined]
        program = GoatProgram(budget=self.slots * (4 * WORDS + META_BYTES))
        node.program = self.programs[name] = program
        for one, other, link in self._cut.pop(name, ()):
            one.links[other] = link
        self.star.network._forget_ways()  # type: ignore[attr-defined]
        registration = Registration("goat", program)
        has = registration.program.offer(None, 9)
        services = {
            "goat": Service(
                endpoint=node.address, relays=True, slots=has.slots, own=has.own, values=has.values
            )
        }
        follower = SwitchFollower(_Site(node, registration), {"goat": "goat"})  # type: ignore[arg-type]
        identity = Identity(name, "switch", TOKEN, node.address, 512, services=services)
        self._connect(name, Member(follower, identity))

    def kill_switch(self, name: str) -> None:
        """kill -9; networks find other ways for what is not for it."""
        self.kill(name)
        nodes = self.star.network.switches  # type: ignore[attr-defined]
        ends = [(nodes[name], way) for way in nodes[name].links]
        ends += [(nodes[way], name) for way in nodes[name].links if way in nodes]
        self._cut[name] = [(node, way, node.links.pop(way)) for node, way in ends]
        self.star.network._forget_ways()  # type: ignore[attr-defined]
        nodes[name].program = None

    def sites(self) -> tuple[str, ...]:
        """Switches that the job is summed in."""
        (job,) = self.coordinator.jobs.values()
        facts = job.plans.current.switched
        assert isinstance(facts, GoatJob)
        return tuple(site.name for site in facts.sites)

    def figures(self) -> dict[str, Any]:
        return {name: host.stats() for name, host in self.hosts.items()} | {
            name: program.stats() for name, program in self.programs.items()
        }
