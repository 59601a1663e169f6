"""Jobs over several switches from the first Hello on: the coordinator schedules, everybody follows, in virtual time."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from inanet.coordinator.coordinator import Coordinator
from inanet.coordinator.goat.fabric import ways
from inanet.coordinator.settings import Settings
from inanet.member.member import Failed, Identity, Member
from inanet.messages.services import Service
from inanet.planning.goat.publication import Memory, Publisher
from inanet.planning.goat.submodels import layers_of
from inanet.planning.topology import Topology, TopologyError
from inanet.proto.common.formats import make_format
from inanet.proto.common.local import LocalTensor
from inanet.proto.common.plan import ExponentMode, SwitchedJob, TensorSpec
from inanet.proto.slots.exponents import ExponentRoot
from inanet.proto.slots.goat.job import GoatJob, neighbours
from inanet.proto.slots.goat.program import GoatProgram
from inanet.proto.slots.goat.ps import goat_server
from inanet.proto.slots.root import SwitchedRoot
from inanet.proto.slots.systems import EXPONENTS
from inanet.proto.tree.node import Node
from inanet.sim.link import LinkSpec
from inanet.sim.network import Network
from inanet.switch.follower import SwitchFollower
from inanet.switch.programs import Registration, dismiss, serve
from inanet.wire.endpoint import endpoint
from tests.coordinator.rack import PS, ROOT, TOKEN, WINDOW, Rack
from tests.coordinator.test_switches import arrays_of

SWITCHES = ("s0", "s1", "s2")
HOSTS = ("w0", "w1", "w2", "w3")
LINKS = (("s0", "ps"), ("s0", "s1"), ("s0", "s2"), ("s1", "w0"), ("s1", "w1"), ("s2", "w2"), ("s2", "w3"))
FLOATS = TensorSpec("f", "f32", (3000,), "mean", ExponentMode.CARRIED)
INTEGERS = TensorSpec("i", "i32", (700,), "sum", ExponentMode.NONE)
LINK = LinkSpec(rate=1e9, grain=16)
#: slots of the switches: not one has room for a tensor
SLOTS = {"s0": 20, "s1": 30, "s2": 40}


class Mesh:
    """A network as :class:`~tests.coordinator.rack.Rack` knows its star."""

    def __init__(self) -> None:
        self.network = Network(seed=3)
        self.plugs: dict[int, str] = {}

    @property
    def now(self) -> float:
        return self.network.now

    @property
    def log(self) -> list[tuple[int, Any]]:
        return [(int(name), event) for name, event in self.network.log]

    def attach(self, address: int, machine: Any) -> None:
        self.network.add_host(str(address), address, machine)
        self.network.connect(str(address), self.plugs[address], LINK)

    def settle(self, seconds: float) -> None:
        stop = self.now + seconds
        passed: list[bool] = []
        self.network.at(stop, lambda: passed.append(True))
        self.network.run(lambda: bool(passed), deadline=2 * seconds)


class MeshSwitch:
    """One of its switches as a follower of plans sees it."""

    def __init__(self, mesh: Mesh, name: str, address: int, program: GoatProgram) -> None:
        self.registration = Registration(program.name, program)
        self.pipeline = SimpleNamespace(registrations=[self.registration])
        self._address = address
        self._switch = mesh.network.add_switch(name, program, address)

    def endpoints(self) -> dict[str, int]:
        return {self.registration.name: self._address}

    def serve(self, program: str, job: SwitchedJob, key: int) -> None:
        assert isinstance(job, GoatJob)
        serve(self.registration, job, key, self._address)
        self._switch.groups[job.number] = self.registration.groups[job.number]
        self._switch.peers = frozenset(neighbours(job.sites[job.node_at(self._address) - 1]))

    def dismiss(self, program: str, job: int, leave: Callable[[Any], None]) -> None:
        dismiss(self.registration, job)


class Lab(Rack):
    """Three switches, four hosts with two ranks each, in one job."""

    def __init__(self, links: tuple[tuple[str, str], ...] = LINKS) -> None:
        self.system, self.names, self.star = "goat", list(HOSTS), Mesh()  # type: ignore[assignment]
        topology = Topology(roots=("ps",), workers=dict.fromkeys(HOSTS, ("ps",)))
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
        self._seen = self._begun = 0
        self.switches = {
            name: MeshSwitch(
                self.mesh,
                name,
                endpoint(f"10.0.2.{index + 1}", 0xBEE0),
                self.program_of(SLOTS[name]),
            )
            for index, name in enumerate(SWITCHES)
        }
        for leaf in ("s1", "s2"):
            self.mesh.network.connect("s0", leaf, LINK)
        self.server = goat_server()

    def program_of(self, slots: int) -> GoatProgram:
        return GoatProgram(budget=slots * 284)

    @property
    def mesh(self) -> Mesh:
        assert isinstance(self.star, Mesh)
        return self.star

    def start_ps(self) -> None:
        self.mesh.plugs |= {ROOT: "s0", PS: "s0"}
        exponents = ExponentRoot()
        self.mesh.attach(ROOT, exponents)
        self.mesh.attach(PS, self.server)
        services = {EXPONENTS: Service(endpoint=ROOT), self.system: Service(endpoint=PS)}
        follower = SwitchedRoot(Node("ps", 64), {EXPONENTS: exponents, self.system: self.server})
        self._connect("ps", Member(follower, Identity("ps", "ps", TOKEN, ROOT, 512, services=services)))

    def start_switch(self, name: str = "", *, relays: bool = True) -> None:
        for one in [name] if name else SWITCHES:
            switch = self.switches[one]
            has = switch.registration.program.offer(None, 9)
            where = switch.endpoints()[self.system]
            services = {self.system: Service(endpoint=where, slots=has.slots, own=has.own, relays=relays)}
            follower = SwitchFollower(switch, {self.system: self.system})  # type: ignore[arg-type]
            self._connect(
                one, Member(follower, Identity(one, "switch", TOKEN, where, 512, services=services))
            )

    def start_host(self, name: str, **changes: Any) -> None:
        index = self.names.index(name)
        # the port that the rack will give it
        self.mesh.plugs[endpoint(f"10.0.0.{index + 1}", 4000 + self._peek())] = "s1" if index < 2 else "s2"
        super().start_host(name, **changes)

    def _peek(self) -> int:
        following = next(self._next_id)
        self._next_id = itertools.count(following)
        return following

    def stats(self, name: str) -> int:
        return sum(switch.registration.program.stats()[name] for switch in self.switches.values())


def test_a_job_is_scheduled_once_published_to_all_and_forgotten_when_it_is_over() -> None:
    lab = Lab().start().joined()
    reference = {spec: LocalTensor(spec, 8) for spec in (FLOATS, INTEGERS)}
    rounds = []
    for seed, spec in enumerate((FLOATS, INTEGERS, FLOATS)):
        mine = arrays_of(spec, 8, seed)
        expected = [array.copy() for array in mine]
        assert reference[spec].reduce(expected) is None
        rounds.append((lab.begin(spec, mine), mine, expected))
    for number, mine, expected in rounds:
        lab.run(lambda number=number: lab.ended(number))  # type: ignore[misc]
        assert lab.errors(number) == {""}
        for array in mine:
            np.testing.assert_array_equal(array.view(np.uint32), expected[0].view(np.uint32))
    # every switch has its part, and no two sub-models a slot
    for name, switch in lab.switches.items():
        stats = switch.registration.program.stats()
        assert 0 < stats["held_slots"] <= SLOTS[name]
        assert stats["completed"] > 0
        assert stats["collisions"] == 0
    layouts = {name: lab.members[name]._jobs.views for name in ("ps", "s0", "w3")}
    published = [
        tuple(its.scheduled for view in jobs.values() for its in view.layouts.values())
        for jobs in layouts.values()
    ]
    assert published[0] == published[1] == published[2]
    assert len(published[0]) == 2
    for member in [lab.members[name] for name in lab.names]:
        member.leave("done")
    lab.run(lambda: not lab.coordinator.jobs)
    lab.step()
    assert lab.stats("held_slots") == 0


def test_the_next_job_gets_all_memory_again() -> None:
    lab = Lab().start().joined()
    number = lab.begin(INTEGERS, arrays_of(INTEGERS, 8, 1))
    lab.run(lambda: lab.ended(number))
    held = lab.stats("held_slots")
    for name in lab.names:
        lab.members[name].leave("done")
    lab.run(lambda: not lab.coordinator.jobs)
    lab.step()
    assert lab.stats("held_slots") == 0
    for name in lab.names:
        lab.coordinator.disconnected(lab._ids.pop(name), lab.star.now)
        lab.start_host(name)
    lab.joined()
    lab.results.clear()
    lab._begun = 0
    number = lab.begin(INTEGERS, arrays_of(INTEGERS, 8, 1))
    lab.run(lambda: lab.ended(number))
    assert lab.errors(number) == {""}
    assert lab.stats("held_slots") == held > 0


def test_a_job_waits_for_every_switch() -> None:
    lab = Lab().start(switch=False)
    lab.start_switch("s0")
    lab.start_switch("s1")
    for _ in range(5):
        lab.step()
    assert not lab.coordinator.jobs
    # frames keep their senders' names: the next switch could not tell who may speak
    lab.start_switch("s2", relays=False)
    for _ in range(5):
        lab.step()
    assert not lab.coordinator.jobs
    assert "over UDP: s2" in str(list(lab.coordinator._admission.pending(lab.star.now)))
    lab.coordinator.disconnected(lab._ids.pop("s2"), lab.star.now)
    lab.start_switch("s2")
    lab.joined()


@pytest.mark.parametrize(
    ("links", "problem"),
    [
        (LINKS[:-1], "'w3' has no way to the PS 'ps'"),
        (LINKS[:2] + LINKS[3:], "'s2' has no way to the PS 'ps'"),
        ((*LINKS[:-1], ("ps", "w3")), "'w3' is at the PS itself"),
        ((*LINKS, ("s2", "ps")), "2 switches are at the PS"),
    ],
)
def test_links_that_do_not_fit_are_named(links: tuple[tuple[str, str], ...], problem: str) -> None:
    lab = Lab(links)
    lab.start_ps()
    lab.start_switch()
    lab.step()
    fabric = lab.coordinator._admission.fabrics.of("goat")
    with pytest.raises(TopologyError, match=problem):
        fabric.fits(HOSTS)


def test_ways_are_shortest_and_hosts_pass_nothing_on() -> None:
    links = [("ps", "a"), ("a", "b"), ("b", "c"), ("a", "c"), ("c", "w0"), ("w0", "w1"), ("b", "w1")]
    assert ways(links, "ps", {"a", "b", "c"}) == {"a": "ps", "b": "a", "c": "a", "w0": "c", "w1": "b"}


def test_layers_larger_than_a_share_are_cut_and_a_whole_model_makes_better_use_of_memory() -> None:
    parents = ways(LINKS, "ps", SWITCHES)
    layers = [(name, -(-size // 256)) for name, size in layers_of([256 * 50, 4, 256 * 7])]

    def publisher() -> Publisher:
        return Publisher(1, parents, "ps", SWITCHES, HOSTS, SLOTS, Memory())

    together = publisher().publish_all(layers)
    share = SLOTS["s0"] // 8
    assert [sum(part.count for part in its) for its in together] == [50, 1, 7]
    assert all(part.count <= share for its in together for part in its)
    assert [part.number for its in together for part in its] == list(range(sum(map(len, together))))
    one_by_one = publisher()
    apart = [one_by_one.publish(*layer) for layer in layers]
    assert [sum(part.count for part in its) for its in apart] == [50, 1, 7]


def test_a_tensor_without_a_schedule_in_time_is_refused_and_takes_no_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("inanet.planning.goat.publication.SECONDS", 0.0)
    memory = Memory()
    publisher = Publisher(1, ways(LINKS, "ps", SWITCHES), "ps", SWITCHES, HOSTS, SLOTS, memory)
    with pytest.raises(
        ValueError, match=r"tensor gradient cannot be scheduled over the switches: .*Time limit"
    ):
        publisher.publish("gradient", 50)
    assert all(memory.hole(name, SLOTS[name]) == (0, SLOTS[name]) for name in SWITCHES)
