"""Somebody is revoked in the middle of rounds of real nodes, in virtual time: no bit is lost, no key is kept."""

import random
from collections.abc import Iterator

import pytest

from inanet.planning.topology import Topology
from inanet.trust.certificates import ROLES, Certified
from tests.coordinator.test_phases import PHASES, SPEC, Watched, reached
from tests.coordinator.test_whole import DEEP, FLOATS, INTEGERS, TREES, Whole, all_reduce, arrays_for


class Revoking(Watched):
    """Aggregators have certificates."""

    def connect(self, name: str) -> None:
        super().connect(name)
        peer = self.coordinator._peers.get(self.ids[name])
        assert peer is not None
        peer.certificate = Certified(frozenset([name]), frozenset(ROLES), serial=name)

    def revoke(self, name: str) -> None:
        """Its member hears of it; its node goes on sending as before."""
        self.coordinator.recheck(lambda one: "revoked" if one and one.serial == name else "", self.clock.now)

    @property
    def keys(self) -> Iterator[int]:
        return (view.plan.key for member in self.members.values() for view in member._jobs.views.values())


def two_rounds(phase: str = "", revoked: str = "") -> tuple[Revoking, list[set[bytes]], set[int]]:
    """The fabric, the bits of two rounds on all hosts, and the job's keys when somebody was revoked in the first one."""
    whole = Revoking(DEEP)
    arrays = arrays_for(DEEP, 1, SPEC)
    whole.begin_watched(1, arrays)
    if phase:
        reached(whole, phase)
    before = {*whole.keys}
    if revoked:
        whole.revoke(revoked)
    whole.run(lambda: whole.done(1))
    whole.wait(0.5)
    later = arrays_for(DEEP, 2, SPEC)
    whole.begin(2, SPEC, later)
    whole.run(lambda: whole.done(2))
    assert {whole.results[name, round_] for name in DEEP.workers for round_ in (1, 2)} == {None}
    return whole, [{array.tobytes() for array in its.values()} for its in (arrays, later)], before


@pytest.fixture(scope="module")
def undisturbed() -> list[set[bytes]]:
    _, bits, _ = two_rounds()
    assert [len(one) for one in bits] == [1, 1]
    return bits


@pytest.mark.parametrize("name", ["a0", "top"])
@pytest.mark.parametrize("phase", PHASES)
def test_no_bit_depends_on_an_aggregator_that_is_revoked(
    phase: str, name: str, undisturbed: list[set[bytes]]
) -> None:
    whole, bits, before = two_rounds(phase, name)
    assert bits == undisturbed
    (job,) = whole.coordinator.jobs.values()
    # it still has what it had, and nothing else
    (held,) = {view.plan.key for view in whole.members[name]._jobs.views.values()}
    assert before == {held} != {job.plans.current.key}


class Renewed(Whole):
    """Every process has a certificate of its own. ``revoked`` are serial numbers."""

    def __init__(self, topology: Topology, impair: float) -> None:
        self.revoked: set[str] = set()
        self.serials: dict[str, str] = {}
        super().__init__(topology, impair)

    def connect(self, name: str) -> None:
        super().connect(name)
        self.serials[name] = f"{name}-{self.ids[name]}"
        peer = self.coordinator._peers.get(self.ids[name])
        assert peer is not None
        peer.certificate = Certified(frozenset([name]), frozenset(ROLES), serial=self.serials[name])

    def withdrawn(self, certificate: Certified | None) -> str:
        return "revoked" if certificate is not None and certificate.serial in self.revoked else ""

    def act(self, name: str, chance: random.Random) -> None:
        """Kill it, revoke it, or first the one and then the other; some moments later it is there again."""
        steps = chance.randrange(12)
        how = chance.choice(["killed", "revoked", "both"])
        for _ in range(steps):
            self.step()
        if how != "killed":
            self.revoked.add(self.serials[name])
        if how != "both":
            self.coordinator.recheck(self.withdrawn, self.clock.now)
            for _ in range(steps):
                self.step()
        self.kill(name)
        self.coordinator.recheck(self.withdrawn, self.clock.now)
        for _ in range(chance.randrange(6)):
            self.step()
        self.start(name)


@pytest.mark.parametrize("seed", range(4))
def test_whoever_is_revoked_when_no_bit_is_lost_and_no_key_is_kept(seed: int) -> None:
    chance = random.Random(seed)
    topology = DEEP if seed % 2 else TREES
    whole = Renewed(topology, chance.choice([0.0, 0.03]))
    (first,) = {job.plans.current.key for job in whole.coordinator.jobs.values()}
    for round_ in range(1, 7):
        victim = chance.choice([*topology.aggregators, *topology.roots])
        all_reduce(
            whole, round_, FLOATS if round_ % 2 else INTEGERS, lambda victim=victim: whole.act(victim, chance)
        )  # type: ignore[misc]
    (job,) = whole.coordinator.jobs.values()
    whole.run(lambda: not any(map(whole.withdrawn, whole.coordinator._keyholders.of(job.plans.current.key))))
    whole.wait(60.0)
    assert job.plans.absent == set()
    followed = {
        (name, view.plan.key)
        for name, member in whole.members.items()
        for view in member._jobs.views.values()
    }
    assert followed == {(name, job.plans.current.key) for name in whole.members}
    assert job.plans.current.key != first, "somebody who knew it was revoked"
