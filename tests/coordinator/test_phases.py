"""Each role is killed at each phase of a round: the round completes with the same bits, or all hear the same."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from inanet.proto.common.plan import ExponentMode, TensorSpec
from tests.coordinator.test_elasticity import Elastic
from tests.coordinator.test_whole import DEEP, Whole, arrays_for

FRAGMENTS = 60
#: with those of exponents, each for 32 of data
ALL = FRAGMENTS + 2
SPEC = TensorSpec("p", "f32", (256 * FRAGMENTS,), "sum", ExponentMode.PROLOGUE)


def reverse(named: dict[str, Any]) -> None:
    """The pump knows the mapping."""
    entries = list(reversed(named.items()))
    named.clear()
    named.update(entries)


class Watched(Whole):
    """With buffers so small that a round takes many steps, and results that take a step for every hop."""

    budget = 16

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        # a step goes through the nodes in order: children before their parents
        reverse(self.nodes)
        reverse(self.members)

    def root(self) -> int:
        """Data fragments of the round that are whole at the root."""
        stats = self.members["ps"].node.stats()
        return stats["fragments_completed"] - self.before

    def arrived(self) -> int:
        """Results that have come to w3."""
        return self.members["w3"].node.stats()["results_in"] - self.seen

    def begin_watched(self, round_: int, arrays: dict[str, NDArray[np.generic]]) -> None:
        """Begin a round; figures count from here."""
        self.before = self.members["ps"].node.stats()["fragments_completed"]
        self.seen = self.members["w3"].node.stats()["results_in"]
        self.begin(round_, SPEC, arrays)


class WatchedElastic(Elastic, Watched):
    """The same, where jobs go on."""


PHASES: dict[str, Callable[[Watched], bool]] = {
    "sending": lambda whole: whole.members["a0"].node.stats()["contributions_in"] > 2,
    "half aggregated": lambda whole: whole.root() > FRAGMENTS // 2,
    "results going down": lambda whole: whole.root() == ALL and 0 < whole.arrived() < ALL,
    "between rounds": lambda whole: whole.done(1),
}


def restart_manager(whole: Whole) -> None:
    """kill -9 of the coordinator alone; nodes come back to the next one."""
    whole.coordinator = whole._coordinator()
    whole.ids.clear()
    for name in whole.members:
        whole.connect(name)


def restart(name: str) -> Callable[[Whole], None]:
    def act(whole: Whole) -> None:
        whole.kill(name)
        whole.start(name)

    return act


ROLES: dict[str, Callable[[Whole], None]] = {
    "aggregator": lambda whole: whole.kill("a0"),
    "aggregator of aggregators": lambda whole: whole.kill("top"),
    "PS and its supervisor": restart("ps"),
    "manager": restart_manager,
    "PS and coordinator in one": lambda whole: whole.crash(),
}


def reached(whole: Watched, phase: str) -> None:
    """Run until a phase; it must not have been passed over."""
    whole.run(lambda: PHASES[phase](whole))
    if phase == "half aggregated":
        assert whole.root() < FRAGMENTS
    elif phase == "sending":
        assert whole.root() < FRAGMENTS // 4


def exact(arrays: dict[str, NDArray[np.generic]]) -> NDArray[np.float64]:
    return np.sum(np.stack([array.astype(np.float64) for array in arrays.values()]), axis=0)


@pytest.fixture(scope="module")
def bits() -> list[bytes]:
    """Of two rounds that nobody disturbs."""
    whole = Watched(DEEP)
    found = []
    for round_ in (1, 2):
        arrays = arrays_for(DEEP, round_, SPEC)
        whole.begin(round_, SPEC, arrays)
        whole.run(lambda round_=round_: whole.done(round_))  # type: ignore[misc]
        found.append(arrays["w0"].tobytes())
    return found


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("role", ROLES)
def test_whoever_is_killed_no_bit_changes(role: str, phase: str, bits: list[bytes]) -> None:
    whole = Watched(DEEP)
    arrays = arrays_for(DEEP, 1, SPEC)
    whole.begin_watched(1, arrays)
    reached(whole, phase)
    ROLES[role](whole)
    whole.run(lambda: whole.done(1))
    later = arrays_for(DEEP, 2, SPEC)
    whole.begin(2, SPEC, later)
    whole.run(lambda: whole.done(2))
    assert {whole.results[name, round_] for name in DEEP.workers for round_ in (1, 2)} == {None}
    assert [{array.tobytes() for array in its.values()} for its in (arrays, later)] == [{bits[0]}, {bits[1]}]


@pytest.mark.parametrize("elastic", [False, True], ids=["fixed", "elastic"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_worker_is_one_error_for_all_or_none(phase: str, elastic: bool, bits: list[bytes]) -> None:
    whole = WatchedElastic(DEEP) if elastic else Watched(DEEP)
    arrays = arrays_for(DEEP, 1, SPEC)
    whole.begin_watched(1, arrays)
    reached(whole, phase)
    whole.kill("w1")
    left = ("w0", "w2", "w3")
    whole.run(lambda: all((name, 1) in whole.results for name in left))
    outcomes = [whole.results[name, 1] for name in left]
    assert len({None if one is None else (one.cause, one.message, one.missing) for one in outcomes}) == 1
    if outcomes[0] is None:
        assert {arrays[name].tobytes() for name in left} == {bits[0]}
    else:
        assert (outcomes[0].cause, outcomes[0].missing) == ("worker_lost", (1,))
    # what is whole at the root is completed if the job goes on; if not, that depends on who knows of it
    if phase in ("sending", "half aggregated"):
        assert outcomes[0] is not None
    elif phase == "between rounds" or elastic:
        assert outcomes[0] is None
    if not elastic:
        whole.run(lambda: all(whole.members[name].failed is not None for name in left))
        assert len({whole.members[name].failed for name in left}) == 1
        return
    whole.wait(0.1)
    later = {name: array for name, array in arrays_for(DEEP, 2, SPEC).items() if name in left}
    sums = exact(later)
    whole.begin(2, SPEC, later)
    whole.run(lambda: all((name, 2) in whole.results for name in left))
    assert [whole.results[name, 2] for name in left] == [None] * 3
    assert len({array.tobytes() for array in later.values()}) == 1
    np.testing.assert_allclose(later["w0"].astype(np.float64), sums, rtol=0, atol=1e-5)
