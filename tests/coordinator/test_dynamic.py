"""A manager's trees follow their fabric under traffic: with real members and nodes, in virtual time, and the same bits."""

import pytest

from inanet.coordinator.coordinator import Coordinator
from inanet.coordinator.managed_fabric import ManagedFabric, Policy
from inanet.coordinator.registry import Registry
from inanet.coordinator.settings import Settings
from inanet.messages.control import PROTOCOL
from inanet.messages.registration import Register, Report
from inanet.planning.costs import Costs
from inanet.planning.topology import Topology
from inanet.proto.common.formats import make_format
from tests.coordinator.test_whole import FLOATS, INTEGERS, TOKEN, Whole, all_reduce

GIB = 1 << 30
NODES = Topology(
    roots=("ps",),
    aggregators={"a0": "ps", "a1": "ps"},
    workers={"w0": ("ps",), "w1": ("ps",), "w2": ("ps",), "w3": ("ps",)},
)


class Dynamic(Whole):
    """Nodes that register with a manager, which plans for them and goes by their reports."""

    budget = 24

    def _coordinator(self) -> Coordinator:
        self.registry = Registry()
        fabric = ManagedFabric(self.registry, Policy(kind="tree", dynamic=True, rate=10**9), Costs())
        return Coordinator(
            Settings(fabric, TOKEN), make_format, lambda: next(self._keys), registry=self.registry
        )

    def start(self, name: str) -> None:
        """A node registers and reports before it joins."""
        role = "ps" if name == "ps" else "worker" if name in self.topology.workers else "aggregator"
        line = self.ids[f"{name}/r"] = next(self._next_id)
        self.coordinator.connected(line, self.clock.now)
        card = Register(
            protocol=PROTOCOL,
            name=name,
            role=role,  # type: ignore[arg-type]
            token=TOKEN,
            cores=8,
            memory=16 * GIB,
            link_bps=10**9,
        )
        self.coordinator.receive(line, card, self.clock.now)
        self.report(name)
        super().start(name)

    def report(self, name: str, idle: float = 8.0, times: int = 1) -> None:
        """So many reports running of idle cores."""
        for _ in range(times):
            report = Report(idle_cores=idle, memory_used=GIB)
            self.coordinator.receive(self.ids[f"{name}/r"], report, self.clock.now)

    def kill(self, name: str) -> None:
        self.coordinator.disconnected(self.ids.pop(f"{name}/r"), self.clock.now)
        super().kill(name)

    def step(self) -> bool:
        # nobody answers on lines of registration: they are not looked at here
        names = {peer: name for name, peer in self.ids.items() if name.endswith("/r")}
        waiting = self.coordinator.outgoing()
        self.coordinator._outgoing = [pair for pair in waiting if pair[0] not in names]
        return super().step()

    def parents(self) -> dict[str, str]:
        """The tree that the job has now."""
        (job,) = self.coordinator.jobs.values()
        return dict(job.plans.current.trees[0].parents)


@pytest.mark.parametrize("impair", [0.0, 0.03], ids=["clean", "impaired"])
def test_burst_load_moves_children_up_in_the_middle_of_a_round_and_back_between_rounds(impair: float) -> None:
    whole = Dynamic(NODES, impair)
    assert set(whole.parents().values()) == {"a0", "a1", "ps"}
    all_reduce(whole, 1, FLOATS)

    def busy() -> None:
        for _ in range(6):
            whole.step()
        assert not whole.done(2)
        whole.report("a0", idle=0.1, times=2)
        assert "a0" in whole.parents().values(), "three reports running, not two"
        whole.report("a0", idle=0.1)
        assert "a0" not in whole.parents().values(), "at once, in the middle of the round"

    all_reduce(whole, 2, INTEGERS, busy)
    assert "a0" not in whole.parents().values()
    assert {whole.parents()[name] for name in ("w0", "w1", "w2", "w3")} == {"a1", "ps"}
    all_reduce(whole, 3, FLOATS)
    whole.report("a0", times=3)
    all_reduce(whole, 4, INTEGERS)
    whole.wait(31)
    all_reduce(whole, 5, FLOATS)
    assert "a0" in whole.parents().values()


def test_a_new_server_is_taken_in_between_rounds_and_one_that_dies_is_done_without() -> None:
    whole = Dynamic(NODES)
    whole.kill("a1")
    all_reduce(whole, 1, FLOATS)
    assert set(whole.parents().values()) <= {"a0", "ps"}

    def comes() -> None:
        for _ in range(4):
            whole.step()
        whole.start("a1")

    all_reduce(whole, 2, FLOATS, comes)
    whole.wait(31)
    all_reduce(whole, 3, INTEGERS)
    assert "a1" in whole.parents().values()

    def dies() -> None:
        for _ in range(4):
            whole.step()
        whole.kill("a1")

    all_reduce(whole, 4, FLOATS, dies)
    assert "a1" not in whole.parents().values()
    all_reduce(whole, 5, INTEGERS)
